//! An object target that does not answer holds up what lies on it, and nothing else.

use crate::world::{ROOT, ROOT_DIR, WRITE, World, below, create, data, flat};
use futures_util::future::join_all;
use levada_base::ids::{Ino, TargetId};
use levada_base::reactor::{self, Group, Instant, Reactor};
use levada_client::housekeeper::{self, Swept};
use levada_client::{Client, Error};
use levada_wire::attr::Attr;
use levada_wire::meta::AttrChange;
use std::rc::Rc;
use std::time::Duration;

/// Longer than a target is waited for.
const PATIENCE: Duration = Duration::from_secs(20);
/// No wait for a target that is known to be silent.
const AT_ONCE: Duration = Duration::from_millis(500);
/// Longer than a lease.
const LONG: Duration = Duration::from_secs(120);
/// More than one request for chores brings.
const FILES: usize = 200;

async fn look(client: &Client, limit: Duration) -> Swept {
    let swept = reactor::timeout(limit, housekeeper::do_chores(client)).await;
    swept.expect("in time").expect("a list")
}

/// What the metadata service alone knows of the files in the root.
async fn listed(client: &Client) -> Vec<Attr> {
    let (entries, end) = client.read_dir(ROOT_DIR, 0, 1000, true).await.expect("listed");
    assert!(end);
    entries.into_iter().map(|entry| *entry.attr.expect("asked for")).collect()
}

async fn made_and_deleted(world: &World) {
    let client = world.client("client").await;
    for n in 0..FILES {
        let file = create(&client, &format!("{n}")).await;
        file.write(0, data(&[7; 100_000])).await.expect("written");
        file.close().await;
        client.unlink(ROOT, ROOT_DIR, format!("{n}").as_bytes()).await.expect("there");
    }
    client.shutdown().await.expect("settled");
}

#[test]
fn deleted_files_on_other_targets_go_and_the_rest_when_the_target_is_back() {
    for stripe_count in [1, 2] {
        Reactor::simulated(1).block_on(async {
            let world = World::with_stripes(2, stripe_count, 1 << 40).await;
            made_and_deleted(&world).await;
            let objects = |number| world.objects(number).names().len();
            let stuck = FILES / 2 * stripe_count as usize;
            assert_eq!((objects(0), objects(1)), (stuck, stuck));
            world.stop_target(0);
            let background = world.client("housekeeper").await;
            let swept = look(&background, PATIENCE).await;
            assert_eq!(swept, Swept { done: FILES - stuck, left: stuck });
            assert_eq!((objects(0), objects(1)), (stuck, 0));
            assert_eq!(look(&background, AT_ONCE).await, Swept { done: 0, left: stuck });
            world.restart_server(0);
            reactor::sleep(Duration::from_secs(3)).await;
            assert_eq!(look(&background, AT_ONCE).await, Swept { done: stuck, left: 0 });
            assert_eq!(objects(0), 0);
        });
    }
}

#[test]
fn a_session_ends_when_every_target_of_its_file_has_answered() {
    Reactor::simulated(1).block_on(async {
        let world = World::with_stripes(2, 1, 1 << 40).await;
        let machine = Group::new();
        let writing = {
            let world = Rc::clone(&world);
            reactor::spawn_in(&machine, async move {
                let client = world.client("client").await;
                for name in ["a", "b"] {
                    let file = create(&client, name).await;
                    file.write(0, data(&[1; 100_000])).await.expect("written");
                    file.fsync().await.expect("durable");
                    file.write(100_000, data(&[2; 100_000])).await.expect("written");
                }
                // What is not synced would be committed by and by.
                std::future::pending::<()>().await;
            })
        };
        reactor::sleep(Duration::from_millis(500)).await;
        machine.kill();
        drop(writing);
        world.stop_target(0);
        reactor::sleep(LONG).await;
        let background = world.client("housekeeper").await;
        assert_eq!(look(&background, PATIENCE).await, Swept { done: 1, left: 1 });
        for attr in listed(&background).await {
            let is_stuck = attr.layout.expect("a file").targets == [TargetId(1)];
            let size = if is_stuck { 100_000 } else { 200_000 };
            assert_eq!((attr.writers, attr.size), (is_stuck, size));
        }
        world.drop_requests(0);
        reactor::sleep(Duration::from_secs(3)).await;
        assert_eq!(look(&background, AT_ONCE).await, Swept { done: 1, left: 0 });
        for attr in listed(&background).await {
            assert_eq!((attr.writers, attr.size), (false, 200_000));
        }
    });
}

/// The space that is told, and how long that took.
async fn told(client: &Client) -> (Result<u64, Error>, Duration) {
    let asked: Instant = reactor::now();
    let space = reactor::timeout(2 * PATIENCE, client.space()).await.expect("in time");
    (space.map(|space| space.total_bytes), asked.elapsed())
}

#[test]
fn space_is_told_of_the_targets_that_answer() {
    Reactor::simulated(1).block_on(async {
        let world = World::with_capacity(2, 1 << 40).await;
        let client = world.client("client").await;
        assert_eq!(told(&client).await.0, Ok(2 << 40));
        world.stop_target(0);
        assert_eq!(told(&client).await.0, Ok(1 << 40));
        let (space, took) = told(&client).await;
        assert!(space == Ok(1 << 40) && took < AT_ONCE, "waited {took:?} for what is silent");
        world.stop_target(1);
        assert_eq!(told(&client).await.0, Err(Error::Deadline), "not a full file system");
        (0..2).for_each(|number| world.restart_server(number));
        reactor::sleep(Duration::from_secs(3)).await;
        assert_eq!(told(&client).await.0, Ok(2 << 40));
    });
}

#[test]
fn a_restart_of_all_services_is_a_pause_for_those_who_ask_for_space() {
    Reactor::simulated(1).block_on(async {
        let world = World::with_capacity(2, 1 << 40).await;
        let client = world.client("client").await;
        for is_asked_before in [false, true] {
            if !is_asked_before {
                world.kill_meta();
            }
            (0..2).for_each(|number| world.kill_server(number));
            let asks = client.clone();
            let asking = reactor::spawn(async move { asks.space().await });
            reactor::sleep(Duration::from_secs(1)).await;
            if is_asked_before {
                world.kill_meta();
            }
            reactor::sleep(LONG).await;
            world.start_meta().await;
            (0..2).for_each(|number| world.restart_server(number));
            let space = asking.await.expect("alive").expect("told");
            assert_eq!(space.total_bytes, 2 << 40);
        }
    });
}

/// A client that died while it emptied files of both targets.
async fn dies_truncating(world: &Rc<World>) -> Vec<Ino> {
    let maker = world.client("maker").await;
    let mut inos = Vec::new();
    for n in 0..4 {
        let file = create(&maker, &format!("{n}")).await;
        file.write(0, data(&[1; 200_000])).await.expect("written");
        file.fsync().await.expect("durable");
        inos.push(file.ino());
        file.close().await;
    }
    let machine = Group::new();
    let (emptying, world) = (inos.clone(), Rc::clone(world));
    reactor::spawn_in(&machine, async move {
        let client = world.client("client").await;
        (0..2).for_each(|number| world.network.partition("client", &format!("object-{number}")));
        let empty = AttrChange { size: Some(0), ..AttrChange::default() };
        join_all(emptying.iter().map(|ino| client.set_attr(ROOT, *ino, empty))).await;
    });
    reactor::sleep(Duration::from_millis(100)).await;
    machine.kill();
    reactor::sleep(LONG).await;
    inos
}

/// Requests of the housekeeper hang in a target for minutes, at any moment of the chores that cut some files. Whoever
/// writes to a file once its chore is done keeps that.
#[test]
fn a_cut_that_hangs_takes_nothing_of_what_is_written_afterwards() {
    for seed in 0..60 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(2).await;
            let inos = dies_truncating(&world).await;
            let background = world.client("housekeeper").await;
            let quick = world.objects(0).delay_max.get();
            let house = {
                let background = background.clone();
                reactor::spawn(async move {
                    for _ in 0..600 {
                        look(&background, LONG).await;
                        reactor::sleep(Duration::from_secs(1)).await;
                    }
                })
            };
            reactor::sleep(Duration::from_micros(below(2000))).await;
            world.objects(0).delay_max.set(Duration::from_secs(400));
            reactor::sleep(Duration::from_micros(200)).await;
            world.objects(0).delay_max.set(quick);
            let client = world.client("next").await;
            let written = inos.iter().map(|ino| async {
                let (file, _) = client.open(*ino, WRITE).await.expect("there");
                file.write(0, data(&[3; 200_000])).await.expect("written");
                file.fsync().await.expect("durable");
                file
            });
            let written = join_all(written).await;
            house.await.expect("alive");
            for file in written {
                let found = flat(&file.read(0, 300_000).await.expect("read"));
                assert!(found == [3; 200_000], "seed {seed}: bytes are lost");
            }
            assert_eq!(look(&background, AT_ONCE).await.left, 0, "seed {seed}");
        });
    }
}
