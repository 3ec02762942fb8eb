//! What the metadata service counts as open is what programs have open, whatever restarts meanwhile.

use crate::world::{ROOT, ROOT_DIR, WRITE, World, below, create, data, flat};
use levada_base::reactor::{self, Reactor};
use levada_client::{Client, housekeeper};
use levada_wire::meta::OpenMode;
use std::rc::Rc;
use std::time::Duration;

const READ: OpenMode = OpenMode { write: false, truncate: false };

/// Nothing of an unlinked file is left once nobody has it open.
async fn assert_gone(world: &World, client: &Client) {
    reactor::sleep(Duration::from_secs(3)).await;
    assert_eq!(world.open_files(), 0);
    // A lease after a restart nothing is kept any more for an answer that got lost.
    reactor::sleep(world.lease + Duration::from_secs(5)).await;
    housekeeper::do_chores(client).await.expect("chores");
    assert_eq!(world.objects(0).names(), []);
}

#[test]
fn an_open_in_flight_at_a_restart_is_counted_once() {
    for seed in 0..40 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(1).await;
            let client = world.client("client").await;
            let file = create(&client, "a").await;
            file.write(0, data(b"text")).await.expect("written");
            let ino = file.ino();
            file.close().await;
            client.sync().await.expect("durable");
            // On its way, carried out, or answered.
            let opening = {
                let client = client.clone();
                reactor::spawn(async move { client.open(ino, READ).await })
            };
            reactor::sleep(Duration::from_micros(below(200))).await;
            world.restart_meta().await;
            let (file, _) = opening.await.expect("alive").expect("opens");
            client.unlink(ROOT, ROOT_DIR, b"a").await.expect("there");
            assert_eq!(flat(&file.read(0, 10).await.expect("held")), b"text", "seed {seed}");
            file.close().await;
            assert_gone(&world, &client).await;
        });
    }
}

#[test]
fn opens_and_closes_are_counted_once_whatever_restarts() {
    for seed in 0..20 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(1).await;
            let client = world.client("client").await;
            world.network.break_one_in(30);
            let tasks: Vec<_> = (0..8)
                .map(|n| {
                    let client = client.clone();
                    reactor::spawn(async move {
                        for round in 0..30 {
                            let name = format!("{n}-{round}");
                            let file = create(&client, &name).await;
                            file.write(0, data(name.as_bytes())).await.expect("written");
                            let (other, _) = client.open(file.ino(), READ).await.expect("there");
                            file.close().await;
                            client.unlink(ROOT, ROOT_DIR, name.as_bytes()).await.expect("there");
                            reactor::sleep(Duration::from_micros(below(3000))).await;
                            let read = other.read(0, 100).await.expect("held");
                            assert_eq!(flat(&read), name.as_bytes(), "seed {seed}");
                            other.close().await;
                        }
                    })
                })
                .collect();
            let chaos = {
                let world = Rc::clone(&world);
                reactor::spawn(async move {
                    loop {
                        reactor::sleep(Duration::from_millis(below(100))).await;
                        world.restart_meta().await;
                    }
                })
            };
            for task in tasks {
                task.await.expect("alive");
            }
            chaos.abort();
            if !world.has_meta() {
                world.start_meta().await;
            }
            world.network.break_one_in(0);
            assert_gone(&world, &client).await;
        });
    }
}

#[test]
fn who_left_and_comes_back_reclaims_as_ever() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let (one, two) = (world.client("one").await, world.client("two").await);
        let file = create(&one, "a").await;
        file.write(0, data(b"text")).await.expect("written");
        let (held, _) = two.open(file.ino(), WRITE).await.expect("there");
        file.close().await;
        world.restart_meta().await;
        one.shutdown().await.expect("told");
        // The other notices the restart when it renews its lease.
        reactor::sleep(world.lease * 9 / 10).await;
        assert_eq!(world.open_files(), 1, "the other's");
        // A new registration, and a restart after it.
        let (file, _) = one.open(held.ino(), WRITE).await.expect("there");
        two.unlink(ROOT, ROOT_DIR, b"a").await.expect("there");
        held.close().await;
        two.shutdown().await.expect("told");
        world.restart_meta().await;
        reactor::sleep(world.lease * 3).await;
        assert_eq!(world.open_files(), 1);
        assert_eq!(flat(&file.read(0, 10).await.expect("held")), b"text");
        file.close().await;
        assert_gone(&world, &one).await;
    });
}
