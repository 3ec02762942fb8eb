//! Changes that end half-way, or meet those of others: truncations above all.

use crate::world::{ROOT, ROOT_DIR, UNIT, WRITE, World, below, create, cut, data, flat};
use levada_base::reactor::{self, Group, Reactor};
use levada_client::{Client, Error, File, housekeeper};
use levada_wire::meta::{AttrChange, OpenMode};
use std::rc::Rc;
use std::time::Duration;

const EMPTY: OpenMode = OpenMode { write: true, truncate: true };

/// What another client finds in the file, some time later.
async fn seen_by(other: &Client, file: &File) -> Vec<u8> {
    let (file, attr) = other.open(file.ino(), WRITE).await.expect("there");
    assert!(!attr.writers && !attr.cut, "{attr:?}");
    let found = flat(&file.read(0, 1 << 30).await.expect("read"));
    assert_eq!(found.len() as u64, attr.size);
    file.close().await;
    found
}

#[test]
fn a_truncation_that_fails_is_finished_before_anything_is_written() {
    for (seed, is_closed) in [(1, false), (2, true), (3, false), (4, true)] {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(3).await;
            let (client, other) = (world.client("client").await, world.client("other").await);
            let mut file = create(&client, "a").await;
            file.write(0, data(&vec![1; 4 * UNIT as usize])).await.expect("written");
            file.fsync().await.expect("durable");
            if is_closed {
                let ino = file.ino();
                file.close().await;
                reactor::sleep(Duration::from_millis(50)).await;
                file = client.open(ino, WRITE).await.expect("there").0;
            }
            world.objects(1).truncations_to_fail.set(1);
            let change = AttrChange { size: Some(0), ..AttrChange::default() };
            let failed = client.set_attr(ROOT, file.ino(), change).await;
            assert!(failed.is_err(), "{failed:?}");
            if seed > 2 {
                // Nor does a growth wait for it for ever.
                cut(&client, &file, 2 * UNIT).await;
                cut(&client, &file, 0).await;
            }
            file.write(0, data(b"text")).await.expect("written");
            file.fsync().await.expect("durable");
            assert_eq!(file.attr().await.expect("there").size, 4);
            file.close().await;
            reactor::sleep(Duration::from_millis(100)).await;
            assert_eq!(seen_by(&other, &file_of(&other, "a").await).await, b"text");
        });
    }
}

async fn file_of(client: &Client, name: &str) -> File {
    let attr = client.lookup(ROOT_DIR, name.as_bytes()).await.expect("there");
    let file = client.open(attr.ino, WRITE).await.expect("there").0;
    file.clone().close().await;
    reactor::sleep(Duration::from_millis(50)).await;
    file
}

#[test]
fn of_a_write_that_failed_no_byte_lies_past_the_size_and_no_object_is_forgotten() {
    for seed in 0..20 {
        Reactor::simulated(seed).block_on(async {
            let world = World::with_capacity(2, 1_000_000).await;
            let (client, other) = (world.client("client").await, world.client("other").await);
            let big = create(&client, "big").await;
            big.write(0, data(&vec![1; 1_800_000])).await.expect("fits");
            let small = create(&client, "small").await;
            if seed % 2 == 0 {
                small.write(0, data(&[2; 1000])).await.expect("fits");
            }
            let refused = small.write(1000, data(&vec![3; 400_000])).await;
            assert_eq!(refused, Err(Error::Full));
            let ino = small.ino();
            small.clone().close().await;
            reactor::sleep(Duration::from_millis(100)).await;
            let attr = other.attr(ino).await.expect("there");
            assert!(!attr.writers);
            // The last byte that an object has is in the file.
            cut(&client, &big, 0).await;
            let size = attr.size;
            cut(&client, &small, size + 10_000).await;
            let found = seen_by(&other, &small).await;
            assert!(found[size as usize..].iter().all(|byte| *byte == 0), "seed {seed}");
            client.unlink(ROOT, ROOT_DIR, b"small").await.expect("there");
            client.unlink(ROOT, ROOT_DIR, b"big").await.expect("there");
            big.close().await;
            reactor::sleep(Duration::from_millis(100)).await;
            housekeeper::do_chores(&other).await.expect("chores");
            for number in 0..2 {
                assert_eq!(world.objects(number).names(), [], "seed {seed}");
            }
        });
    }
}

#[test]
fn a_dead_clients_size_does_not_come_back_over_a_truncation() {
    for seed in 0..60 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(2).await;
            let background = world.client("housekeeper").await;
            let machine = Group::new();
            let ino = {
                let world = Rc::clone(&world);
                let task = reactor::spawn_in(&machine, async move {
                    let client = world.client("client").await;
                    let file = create(&client, "a").await;
                    file.write(0, data(&[1; 100_000])).await.expect("written");
                    file.ino()
                });
                task.await.expect("alive")
            };
            machine.kill();
            reactor::sleep(Duration::from_secs(120)).await;
            let client = world.client("next").await;
            for number in 0..2 {
                world.objects(number).delay_max.set(Duration::from_millis(20));
            }
            let house = {
                let background = background.clone();
                reactor::spawn(async move {
                    for _ in 0..100 {
                        housekeeper::do_chores(&background).await.expect("chores");
                        reactor::sleep(Duration::from_millis(below(300))).await;
                    }
                })
            };
            reactor::sleep(Duration::from_millis(below(120))).await;
            let (file, _) = client.open(ino, EMPTY).await.expect("there");
            file.write(0, data(b"text")).await.expect("written");
            file.fsync().await.expect("durable");
            file.close().await;
            house.await.expect("alive");
            reactor::sleep(Duration::from_secs(60)).await;
            housekeeper::do_chores(&background).await.expect("chores");
            let (file, attr) = background.open(ino, WRITE).await.expect("there");
            assert_eq!((attr.size, attr.writers), (4, false), "seed {seed}");
            assert_eq!(flat(&file.read(0, 100).await.expect("read")), b"text");
        });
    }
}

#[test]
fn a_size_from_before_another_clients_truncation_does_not_come_back() {
    for seed in 0..60 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(2).await;
            let (one, two) = (world.client("one").await, world.client("two").await);
            let file = create(&one, "a").await;
            for round in 0..4u8 {
                for number in 0..2 {
                    world.objects(number).delay_max.set(Duration::from_millis(below(8)));
                }
                if below(2) == 0 {
                    world.network.break_one_in(20);
                }
                let (writer, cutter) = if round % 2 == 0 { (&one, &two) } else { (&two, &one) };
                let (long, _) = writer.open(file.ino(), WRITE).await.expect("there");
                long.write(0, data(&[round; 300])).await.expect("written");
                long.close().await;
                reactor::sleep(Duration::from_micros(below(12_000))).await;
                let (short, _) = cutter.open(file.ino(), EMPTY).await.expect("there");
                short.write(0, data(&[round; 10])).await.expect("written");
                let attr = short.attr().await.expect("there");
                assert_eq!(attr.size, 10, "seed {seed} round {round}");
                if below(2) == 0 {
                    short.fsync().await.expect("durable");
                }
                short.close().await;
                world.network.break_one_in(0);
                reactor::sleep(Duration::from_secs(2)).await;
                let attr = writer.attr(file.ino()).await.expect("there");
                assert_eq!(attr.size, 10, "seed {seed} round {round}");
            }
        });
    }
}

#[test]
fn a_sync_under_way_hears_that_the_tail_is_lost() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let client = world.client("client").await;
        let file = create(&client, "a").await;
        client.sync_meta().await.expect("durable");
        let renamed = client.rename(ROOT, (ROOT_DIR, b"a"), (ROOT_DIR, b"b"), 0).await;
        renamed.expect("told early");
        world.network.partition("client", "meta");
        let syncing = {
            let client = client.clone();
            reactor::spawn(async move { client.sync_meta().await })
        };
        reactor::sleep(Duration::from_millis(10)).await;
        world.restart_meta().await;
        let other = world.client("other").await;
        // Until the service has waited for the first one long enough.
        let _ = other.lookup(ROOT_DIR, b"a").await;
        world.network.heal("client", "meta");
        assert_eq!(syncing.await.expect("alive"), Err(Error::Lost));
        assert_eq!(client.sync_meta().await, Ok(()), "told once");
        drop(file);
    });
}

#[test]
fn a_hole_is_zeroes_also_while_its_first_bytes_are_written() {
    for seed in 0..40 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(3).await;
            let client = world.client("client").await;
            let file = create(&client, "a").await;
            cut(&client, &file, 3 * UNIT).await;
            let writing = {
                let file = file.clone();
                reactor::spawn(async move {
                    reactor::sleep(Duration::from_micros(below(300))).await;
                    file.write(UNIT, data(&[1; 100])).await
                })
            };
            let found = flat(&file.read(2 * UNIT - 100, 100).await.expect("no error"));
            assert_eq!(found, [0; 100]);
            writing.await.expect("alive").expect("written");
        });
    }
}

/// A client that died had begun to truncate a file that another one has open, and that loses its name.
#[test]
fn a_dead_clients_truncation_of_a_file_without_a_name_ends() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(2).await;
        let background = world.client("housekeeper").await;
        let client = world.client("client").await;
        let file = create(&client, "a").await;
        file.write(0, data(&vec![1; 3 * UNIT as usize])).await.expect("written");
        let machine = Group::new();
        {
            let (world, ino) = (Rc::clone(&world), file.ino());
            reactor::spawn_in(&machine, async move {
                let other = world.client("other").await;
                world.objects(0).truncations_to_fail.set(u32::MAX);
                let change = AttrChange { size: Some(0), ..AttrChange::default() };
                other.set_attr(ROOT, ino, change).await.expect_err("cannot be carried out");
                std::future::pending::<()>().await;
            });
        }
        reactor::sleep(Duration::from_secs(1)).await;
        machine.kill();
        world.objects(0).truncations_to_fail.set(0);
        client.unlink(ROOT, ROOT_DIR, b"a").await.expect("there");
        file.write(UNIT, data(&[2; 10])).await.expect("written");
        let house = reactor::spawn(async move {
            for _ in 0..200 {
                reactor::sleep(Duration::from_secs(1)).await;
                housekeeper::do_chores(&background).await.expect("chores");
            }
        });
        file.fsync().await.expect("durable");
        file.close().await;
        client.shutdown().await.expect("ends");
        house.await.expect("alive");
        for number in 0..2 {
            assert_eq!(world.objects(number).names(), []);
        }
    });
}

#[test]
fn a_truncation_that_failed_is_carried_out_while_its_file_lies_idle() {
    for seed in 0..5 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(2).await;
            let (client, other) = (world.client("client").await, world.client("other").await);
            let file = create(&client, "a").await;
            file.write(0, data(&vec![1; 3 * UNIT as usize])).await.expect("written");
            file.fsync().await.expect("durable");
            world.objects(1).truncations_to_fail.set(3);
            let change = AttrChange { size: Some(10), ..AttrChange::default() };
            client.set_attr(ROOT, file.ino(), change).await.expect_err("cannot be carried out");
            // Nobody does anything with it here; it is carried out all the same.
            let (seen, _) = other.open(file.ino(), WRITE).await.expect("there");
            seen.write(0, data(&[2; 5])).await.expect("written, once it is over");
            seen.fsync().await.expect("durable");
            assert_eq!(seen.attr().await.expect("there").size, 10, "seed {seed}");
        });
    }
}
