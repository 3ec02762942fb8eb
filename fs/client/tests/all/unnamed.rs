//! Files without a name: made once, written, and given one or not, whatever happens meanwhile.

use crate::world::{ROOT, ROOT_DIR, UNIT, WRITE, World, below, data, flat, random_bytes};
use levada_base::reactor::{self, Reactor};
use levada_client::{Client, Error, File, housekeeper};
use levada_wire::meta::MetaFault;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// Longer than a lease.
const LONG: Duration = Duration::from_secs(60);

async fn unnamed(client: &Client, may_link: bool) -> File {
    let made = client.create_unnamed(ROOT, ROOT_DIR, 0o644, WRITE, may_link).await;
    let (file, attr) = made.expect("made");
    assert_eq!((attr.nlink, attr.size), (0, 0));
    file
}

/// Inodes beside the root, once nothing changes any more.
async fn inodes(world: &Rc<World>) -> u64 {
    let background = world.client("housekeeper").await;
    for _ in 0..3 {
        // Clients of before a restart must have come back or fallen silent.
        reactor::sleep(LONG).await;
        housekeeper::do_chores(&background).await.expect("chores");
    }
    let space = background.space().await.expect("told");
    space.inodes - space.inodes_free - 1
}

#[test]
fn files_without_a_name_are_made_and_named_once_over_any_number_of_repetitions() {
    for seed in 0..5 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(2).await;
            let client = world.client("client").await;
            world.network.break_one_in(10);
            let restarts = {
                let world = Rc::clone(&world);
                reactor::spawn(async move {
                    for _ in 0..3 {
                        reactor::sleep(Duration::from_millis(below(60))).await;
                        world.restart_meta().await;
                    }
                })
            };
            let tasks: Vec<_> = (0..12)
                .map(|task| {
                    let client = client.clone();
                    reactor::spawn(async move {
                        for n in 0..6 {
                            let file = unnamed(&client, n % 3 > 0).await;
                            let bytes = random_bytes(2 * UNIT as usize);
                            file.write(0, data(&bytes)).await.expect("written");
                            let name = format!("{task}-{n}");
                            let named = client.link(ROOT, file.ino(), ROOT_DIR, name.as_bytes());
                            match named.await {
                                Ok(attr) => assert_eq!((attr.nlink, n % 3 > 0), (1, true)),
                                Err(error) => {
                                    assert_eq!(error, Error::Meta(MetaFault::NotFound));
                                    assert_eq!(n % 3, 0);
                                }
                            }
                            reactor::sleep(Duration::from_millis(below(30))).await;
                            let found = file.read(0, 3 * UNIT).await.expect("read");
                            assert!(flat(&found) == bytes);
                            file.close().await;
                        }
                    })
                })
                .collect();
            for task in tasks {
                task.await.expect("not killed");
            }
            restarts.await;
            world.network.break_one_in(0);
            client.sync().await.expect("durable");
            let (entries, end) = client.read_dir(ROOT_DIR, 0, 1000, true).await.expect("listed");
            assert!(end && entries.len() == 48, "{} entries, seed {seed}", entries.len());
            let sizes = entries.iter().map(|entry| entry.attr.as_ref().expect("asked for").size);
            assert!(sizes.into_iter().all(|size| size == 2 * UNIT));
            assert_eq!(inodes(&world).await, 48, "seed {seed}");
        });
    }
}

/// Nobody was told of the first one, so it is no matter whether there is one.
#[test]
fn one_whose_answer_was_lost_with_the_lease_is_made_anew() {
    let mut made_twice = 0;
    for seed in 0..40 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(1).await;
            let client = world.client("client").await;
            let first = unnamed(&client, true).await;
            let told = Rc::new(Cell::new(false));
            let making = {
                let (client, told) = (client.clone(), Rc::clone(&told));
                reactor::spawn(async move {
                    let file = unnamed(&client, true).await;
                    told.set(true);
                    file
                })
            };
            reactor::sleep(Duration::from_micros(below(300))).await;
            world.network.partition("client", "meta");
            let was_told = told.get();
            reactor::sleep(LONG).await;
            world.network.heal("client", "meta");
            let file = making.await.expect("alive");
            made_twice += usize::from(file.ino().0 > first.ino().0 + 1);
            // What was open went with the lease.
            let lost = if was_told { vec![&first, &file] } else { vec![&first] };
            for file in lost {
                let named = client.link(ROOT, file.ino(), ROOT_DIR, b"lost").await;
                assert_eq!(named.expect_err("gone"), Error::Meta(MetaFault::Stale));
            }
            if !was_told {
                file.write(0, data(b"text")).await.expect("written");
                file.fsync().await.expect("durable");
                client.link(ROOT, file.ino(), ROOT_DIR, b"name").await.expect("still open");
            }
            first.close().await;
            file.close().await;
            assert_eq!(inodes(&world).await, u64::from(!was_told), "seed {seed}");
            if !was_told {
                assert_eq!(client.lookup(ROOT_DIR, b"name").await.expect("there").size, 4);
            }
        });
    }
    assert!(made_twice > 5, "{made_twice}");
}

#[test]
fn one_whose_maker_dies_goes_with_its_objects() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(2).await;
        let dying = reactor::Group::new();
        let made = {
            let world = Rc::clone(&world);
            reactor::spawn_in(&dying, async move {
                let client = world.client("dying").await;
                for _ in 0..3 {
                    let file = unnamed(&client, true).await;
                    file.write(0, data(&vec![1; 2 * UNIT as usize])).await.expect("written");
                }
                std::future::pending::<()>().await;
            })
        };
        let objects = || -> usize { (0..2).map(|n| world.objects(n).names().len()).sum() };
        while objects() < 6 {
            reactor::sleep(Duration::from_millis(1)).await;
        }
        dying.kill();
        drop(made);
        assert_eq!((inodes(&world).await, objects()), (0, 0));
    });
}
