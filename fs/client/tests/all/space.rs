//! What deleted files still take counts as free, and who writes into it waits for it.

use crate::world::{ROOT, ROOT_DIR, World, create, data};
use levada_base::ids::Ino;
use levada_base::reactor::{self, Reactor};
use levada_client::{Client, Error};
use levada_wire::meta::OpenMode;
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// Of each target.
const CAPACITY: u64 = 8 * MIB;

async fn fill(client: &Client, name: &str, bytes: u64) -> Result<(), Error> {
    let file = create(client, name).await;
    let written = file.write(0, data(&vec![7; bytes as usize])).await;
    file.close().await;
    written
}

async fn free(client: &Client) -> u64 {
    client.space().await.expect("answers").free_bytes
}

/// A world of two targets, a client, and a file that fills three quarters of it.
async fn filled() -> (std::rc::Rc<World>, Client) {
    let world = World::with_capacity(2, CAPACITY).await;
    let client = world.client("client").await;
    assert_eq!(free(&client).await, 2 * CAPACITY);
    fill(&client, "big", 12 * MIB).await.expect("fits");
    assert_eq!(free(&client).await, 4 * MIB);
    (world, client)
}

async fn remove(client: &Client, name: &str) {
    client.unlink(ROOT, ROOT_DIR, name.as_bytes()).await.expect("there");
}

/// Nobody has deleted an object yet.
#[test]
fn what_was_deleted_counts_as_free_at_once() {
    Reactor::simulated(1).block_on(async {
        let (world, client) = filled().await;
        remove(&client, "big").await;
        assert_eq!(free(&client).await, 2 * CAPACITY);
        // Also after a restart, and when it is gone.
        world.kill_meta();
        world.start_meta().await;
        assert_eq!(free(&client).await, 2 * CAPACITY);
        levada_client::housekeeper::do_chores(&world.client("housekeeper").await)
            .await
            .expect("done");
        assert_eq!(free(&client).await, 2 * CAPACITY);
        fill(&client, "next", 12 * MIB).await.expect("fits");
    });
}

#[test]
fn holes_and_truncations_are_known() {
    Reactor::simulated(1).block_on(async {
        let (_world, client) = filled().await;
        let ino = client.lookup(ROOT_DIR, b"big").await.expect("there").ino;
        let mode = OpenMode { write: true, truncate: false };
        let (file, _) = client.open(ino, mode).await.expect("opened");
        crate::world::cut(&client, &file, 3 * MIB).await;
        file.close().await;
        assert_eq!(free(&client).await, 13 * MIB);
        // From another client, which knows of it only what the service says.
        remove(&client, "big").await;
        assert_eq!(free(&client).await, 16 * MIB);
    });
}

/// What is added up stays within what there is, and comes to it in the end, also while deletions are under way.
#[test]
fn nothing_counts_twice_while_it_is_deleted() {
    for seed in 0..20 {
        Reactor::simulated(seed).block_on(async {
            let world = World::with_capacity(2, CAPACITY).await;
            let client = world.client("client").await;
            for n in 0..30 {
                fill(&client, &format!("{n}"), MIB / 4).await.expect("fits");
            }
            fill(&client, "kept", MIB).await.expect("fits");
            let house = levada_client::housekeeper::start(world.client("housekeeper").await);
            for n in 0..30 {
                remove(&client, &format!("{n}")).await;
                let gone = (n + 1) * MIB / 4;
                let used = 2 * CAPACITY - free(&client).await;
                assert!(used >= MIB + 30 * MIB / 4 - gone, "seed {seed}: {n}: {used}");
            }
            reactor::sleep(Duration::from_secs(10)).await;
            assert_eq!(free(&client).await, 2 * CAPACITY - MIB);
            drop(house);
        });
    }
}

#[test]
fn who_writes_into_it_waits_for_it() {
    Reactor::simulated(1).block_on(async {
        let (world, client) = filled().await;
        remove(&client, "big").await;
        let keeper = world.client("housekeeper").await;
        reactor::spawn(async move {
            reactor::sleep(Duration::from_secs(2)).await;
            levada_client::housekeeper::do_chores(&keeper).await.expect("done");
        });
        let begun = reactor::now();
        fill(&client, "next", 14 * MIB).await.expect("fits");
        assert!(begun.elapsed() > Duration::from_secs(2), "{:?}", begun.elapsed());
        assert_eq!(free(&client).await, 2 * MIB);
    });
}

#[test]
fn who_writes_more_than_that_is_told_at_once() {
    Reactor::simulated(1).block_on(async {
        let (_world, client) = filled().await;
        let begun = reactor::now();
        assert_eq!(fill(&client, "more", 5 * MIB).await, Err(Error::Full));
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    });
}

/// Its objects' deletion never ends: nobody looks after chores.
#[test]
fn room_that_does_not_come_is_not_waited_for_for_ever() {
    Reactor::simulated(1).block_on(async {
        let (_world, client) = filled().await;
        remove(&client, "big").await;
        let begun = reactor::now();
        assert_eq!(fill(&client, "more", 5 * MIB).await, Err(Error::Full));
        let waited = begun.elapsed();
        assert!((5..10).contains(&waited.as_secs()), "{waited:?}");
    });
}

/// Two write the same file: neither knows what the other has written last.
#[test]
fn of_a_file_that_two_have_written_the_objects_are_asked() {
    Reactor::simulated(1).block_on(async {
        let world = World::with_capacity(2, CAPACITY).await;
        let (one, other) = (world.client("one").await, world.client("other").await);
        let file = create(&one, "shared").await;
        let ino: Ino = file.ino();
        let mode = OpenMode { write: true, truncate: false };
        let (same, _) = other.open(ino, mode).await.expect("opened");
        file.write(0, data(&vec![1; MIB as usize])).await.expect("written");
        file.fsync().await.expect("synced");
        same.write(MIB, data(&vec![2; MIB as usize])).await.expect("written");
        file.write(2 * MIB, data(&vec![3; MIB as usize])).await.expect("written");
        same.fsync().await.expect("synced");
        file.close().await;
        same.close().await;
        reactor::sleep(Duration::from_secs(1)).await;
        levada_client::housekeeper::do_chores(&world.client("housekeeper").await)
            .await
            .expect("done");
        remove(&one, "shared").await;
        assert_eq!(free(&one).await, 2 * CAPACITY);
    });
}
