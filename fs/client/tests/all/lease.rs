//! A client whose lease ends while it lives: what it had begun must not be done over what others did since.

use crate::world::{ROOT, ROOT_DIR, UNIT, WRITE, World, below, create, cut, data, flat};
use levada_base::reactor::{self, JoinHandle, Reactor};
use levada_client::{Client, Error, housekeeper};
use levada_wire::attr::Attr;
use levada_wire::meta::AttrChange;
use std::rc::Rc;
use std::time::Duration;

/// Longer than a lease.
const LONG: Duration = Duration::from_secs(60);
const TARGETS: u32 = 2;

/// Cuts `client` off from the objects' servers; nothing that it has sent arrives any more.
fn cut_off(world: &World) {
    for number in 0..TARGETS {
        world.network.partition("client", &format!("object-{number}"));
        world.drop_requests(number);
    }
}

fn let_back(world: &World) {
    for number in 0..TARGETS {
        world.network.heal("client", &format!("object-{number}"));
    }
}

fn truncating(client: &Client, ino: levada_base::ids::Ino) -> JoinHandle<Result<Attr, Error>> {
    let client = client.clone();
    reactor::spawn(async move {
        let change = AttrChange { size: Some(0), ..AttrChange::default() };
        client.set_attr(ROOT, ino, change).await
    })
}

/// The lease of `client`, which is truncating, ends; another one writes to the whole file and syncs. Back come the
/// objects first, so that the client could go on without the metadata service.
async fn overtaken(world: &World, cutting: JoinHandle<Result<Attr, Error>>) {
    world.network.partition("client", "meta");
    reactor::sleep(LONG).await;
    housekeeper::do_chores(&world.client("housekeeper").await).await.expect("chores");
    let whole = vec![2; 4 * UNIT as usize];
    let other = world.client("other").await;
    let ino = other.lookup(ROOT_DIR, b"a").await.expect("there").ino;
    let (file, _) = other.open(ino, WRITE).await.expect("there");
    file.write(0, data(&whole)).await.expect("written");
    file.fsync().await.expect("durable");
    let_back(world);
    reactor::sleep(Duration::from_secs(5)).await;
    world.network.heal("client", "meta");
    match cutting.await.expect("alive") {
        Ok(attr) => assert!(attr.size == 0 || attr.size == whole.len() as u64, "{}", attr.size),
        Err(error) => assert_eq!(error, Error::InDoubt),
    }
    reactor::sleep(LONG).await;
    let (seen, attr) = world.client("reader").await.open(ino, WRITE).await.expect("there");
    assert_eq!(attr.size, whole.len() as u64);
    assert!(flat(&seen.read(0, 1 << 30).await.expect("read")) == whole, "bytes are lost");
}

#[test]
fn a_truncation_that_had_not_reached_the_objects_is_not_resumed_over_what_others_synced() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(TARGETS).await;
        let file = create(&world.client("maker").await, "a").await;
        file.write(0, data(&vec![1; 4 * UNIT as usize])).await.expect("written");
        file.fsync().await.expect("durable");
        let ino = file.ino();
        file.close().await;
        let client = world.client("client").await;
        cut_off(&world);
        let cutting = truncating(&client, ino);
        reactor::sleep(Duration::from_millis(100)).await;
        overtaken(&world, cutting).await;
    });
}

#[test]
fn a_truncation_of_some_objects_is_not_resumed_over_what_others_synced() {
    for seed in 0..30 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(TARGETS).await;
            let client = world.client("client").await;
            let file = create(&client, "a").await;
            file.write(0, data(&vec![1; 4 * UNIT as usize])).await.expect("written");
            file.fsync().await.expect("durable");
            (0..TARGETS)
                .for_each(|number| world.objects(number).delay_max.set(Duration::from_millis(10)));
            let cutting = truncating(&client, file.ino());
            reactor::sleep(Duration::from_micros(500 + below(20_000))).await;
            cut_off(&world);
            overtaken(&world, cutting).await;
        });
    }
}

/// It is told that nobody knows, or what came of it the one time.
#[test]
fn a_change_whose_answer_was_lost_with_the_lease_is_not_done_again() {
    let mut in_doubt = 0;
    for seed in 0..60 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(1).await;
            let (client, other) = (world.client("client").await, world.client("other").await);
            create(&other, "a").await.close().await;
            client.lookup(ROOT_DIR, b"a").await.expect("there");
            let removing = {
                let client = client.clone();
                reactor::spawn(async move { client.unlink(ROOT, ROOT_DIR, b"a").await })
            };
            reactor::sleep(Duration::from_micros(below(300))).await;
            world.network.partition("client", "meta");
            reactor::sleep(LONG).await;
            if other.lookup(ROOT_DIR, b"a").await.is_err() {
                create(&other, "a").await.close().await;
            }
            other.sync().await.expect("durable");
            world.network.heal("client", "meta");
            match removing.await.expect("alive") {
                Ok(_) => {}
                Err(error) => {
                    assert_eq!(error, Error::InDoubt, "seed {seed}");
                    in_doubt += 1;
                }
            }
            other.lookup(ROOT_DIR, b"a").await.expect("what was made since is there");
            client.unlink(ROOT, ROOT_DIR, b"a").await.expect("the next change is carried out");
        });
    }
    assert!(in_doubt > 10, "{in_doubt}");
}

#[test]
fn a_change_that_was_never_sent_waits_out_the_end_of_the_lease() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let client = world.client("client").await;
        world.network.partition("client", "meta");
        world.network.disconnect("client", "meta");
        // Until the connection is known to have ended.
        let waited = reactor::timeout(LONG, client.lookup(ROOT_DIR, b"a")).await;
        assert!(waited.is_err(), "{waited:?}");
        let making = {
            let client = client.clone();
            reactor::spawn(async move { create(&client, "a").await })
        };
        reactor::sleep(LONG).await;
        world.network.heal("client", "meta");
        let file = making.await.expect("made");
        file.write(0, data(b"text")).await.expect("written");
        file.fsync().await.expect("durable");
    });
}

/// What may be repeated is: the program notices nothing.
#[test]
fn files_are_opened_written_and_closed_across_the_end_of_a_lease() {
    for seed in 0..40 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(TARGETS).await;
            let client = world.client("client").await;
            let held = create(&client, "a").await;
            client.sync().await.expect("durable");
            let ino = held.ino();
            let using = {
                let client = client.clone();
                reactor::spawn(async move {
                    let (file, _) = client.open(ino, WRITE).await.expect("opened");
                    file.write(0, data(b"text")).await.expect("written");
                    file.fsync().await.expect("durable");
                    file.close().await;
                })
            };
            reactor::sleep(Duration::from_micros(below(1500))).await;
            world.network.partition("client", "meta");
            reactor::sleep(LONG).await;
            world.network.heal("client", "meta");
            using.await.expect("alive");
            reactor::sleep(Duration::from_secs(1)).await;
            let background = world.client("housekeeper").await;
            housekeeper::do_chores(&background).await.expect("chores");
            assert_eq!(background.attr(ino).await.expect("there").size, 4, "seed {seed}");
            // One open is left of two.
            client.unlink(ROOT, ROOT_DIR, b"a").await.expect("there");
            reactor::sleep(Duration::from_secs(1)).await;
            housekeeper::do_chores(&background).await.expect("chores");
            assert_eq!(flat(&held.read(0, 10).await.expect("kept for who has it open")), b"text");
        });
    }
}

#[test]
fn what_is_sent_again_to_a_file_that_is_gone_takes_no_room() {
    let mut came_back = 0;
    for seed in 0..10 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(TARGETS).await;
            let (client, other) = (world.client("client").await, world.client("other").await);
            let file = create(&client, "a").await;
            file.fsync().await.expect("durable");
            let bytes = vec![1; 2 * UNIT as usize];
            file.write(0, data(&bytes)).await.expect("written");
            world.network.partition("client", "meta");
            reactor::sleep(LONG).await;
            other.unlink(ROOT, ROOT_DIR, b"a").await.expect("there");
            reactor::sleep(Duration::from_millis(50)).await;
            housekeeper::do_chores(&other).await.expect("chores");
            let names = |world: &Rc<World>| -> Vec<_> {
                (0..TARGETS).flat_map(|number| world.objects(number).names()).collect()
            };
            assert_eq!(names(&world), []);
            // Its session, too, is over, but it has not heard of that.
            file.write(0, data(&bytes)).await.expect("written");
            (0..TARGETS).for_each(|number| world.restart_server(number));
            // It hears of that before it hears that the file is gone.
            let size = file.read(0, 10).await.map(|found| flat(&found).len());
            came_back += usize::from(!names(&world).is_empty());
            world.network.heal("client", "meta");
            let error = file.fsync().await.expect_err("gone");
            assert_eq!(error.errno(), libc::ESTALE, "{size:?}");
            reactor::sleep(Duration::from_secs(1)).await;
            assert_eq!(names(&world), [], "seed {seed}");
            cut(&client, &create(&client, "b").await, 10).await;
        });
    }
    assert!(came_back > 0);
}
