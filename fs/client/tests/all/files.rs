//! What files promise while everything works, and while single things do not.

use crate::world::{
    ROOT, ROOT_DIR, UNIT, WRITE, World, below, create, cut, data, flat, random_bytes,
};
use futures_util::future::join_all;
use levada_base::reactor::{self, Group, Reactor};
use levada_base::{Buf, BufMut};
use levada_client::{Client, ClientConfig, Error, housekeeper};
use levada_wire::attr::Time;
use levada_wire::local::LinkConfig;
use levada_wire::meta::{AttrChange, MetaFault, NewInode, OpenMode, SetTime};
use std::rc::Rc;
use std::time::Duration;

#[test]
fn bytes_are_dealt_over_all_targets_and_read_back() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(4).await;
        let client = world.client("client").await;
        let file = create(&client, "a").await;
        let bytes = random_bytes(1_000_003);
        file.write(12_345, data(&bytes)).await.expect("written");
        assert_eq!(file.attr().await.expect("there").size, 1_012_348);
        assert_eq!(flat(&file.read(12_345, 2_000_000).await.expect("read")), bytes);
        let head = flat(&file.read(0, 20_000).await.expect("read"));
        assert!(head[..12_345].iter().all(|byte| *byte == 0) && head[12_345..] == bytes[..7_655]);
        assert!(file.read(1_012_348, 10).await.expect("end").is_empty());
        assert!(file.read(u64::MAX, 10).await.expect("end").is_empty());
        file.fsync().await.expect("durable");
        assert_eq!(client.unstable_bytes(), 0);
        for number in 0..4 {
            assert_eq!(world.objects(number).names().len(), 1);
        }
        let ino = file.ino();
        file.close().await;
        client.shutdown().await.expect("settled");
        let attr = client.lookup(ROOT_DIR, b"a").await.expect("there");
        assert_eq!((attr.ino, attr.size, attr.writers), (ino, 1_012_348, false));
        assert_eq!(attr.components, 0b1111);
        let other = world.client("other").await;
        let (file, attr) =
            other.open(ino, OpenMode { write: false, truncate: false }).await.expect("there");
        assert_eq!(attr.size, 1_012_348);
        assert_eq!(flat(&file.read(12_345, 1_000_003).await.expect("read")), bytes);
    });
}

#[test]
fn all_requests_of_a_call_are_in_flight_together() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(4).await;
        let client = world.client("client").await;
        let file = create(&client, "a").await;
        // Connections and verifiers first.
        file.write(0, data(&vec![1; 4 * UNIT as usize])).await.expect("written");
        let delay = Duration::from_millis(10);
        world.network.set_config(LinkConfig { delay_min: delay, delay_max: delay, codec: false });
        let start = reactor::now();
        file.write(0, BufMut::zeroed(64 * UNIT as usize).freeze().into_vec()).await.expect("done");
        assert!(start.elapsed() < 3 * delay, "{:?}", start.elapsed());
        let start = reactor::now();
        assert_eq!(file.read(0, 64 * UNIT).await.expect("read").len(), 64);
        assert!(start.elapsed() < 3 * delay, "{:?}", start.elapsed());
        let start = reactor::now();
        file.fsync().await.expect("durable");
        assert!(start.elapsed() < 6 * delay, "COMMITs, then CommitWrite: {:?}", start.elapsed());
    });
}

#[test]
fn overlapping_writes_end_as_the_last_one() {
    for seed in 0..10 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(2).await;
            world.network.break_one_in(30);
            let client = world.client("client").await;
            let file = create(&client, "a").await;
            let writes = (0..20u8).map(|n| file.write(u64::from(n), data(&[n; 100])));
            let reading = async {
                reactor::sleep(Duration::from_micros(below(2000))).await;
                file.read(0, 200).await
            };
            let (written, read) = futures_util::join!(join_all(writes), reading);
            written.into_iter().collect::<Result<(), Error>>().expect("written");
            read.expect("read");
            let expected: Vec<u8> = (0..119u8).map(|n| n.min(19)).collect();
            assert_eq!(flat(&file.read(0, 1000).await.expect("read")), expected);
        });
    }
}

#[test]
fn unstable_bytes_stay_below_the_bound() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let config = ClientConfig { unstable_bytes_max: 16 << 20, ..world.config("client") };
        let client = Client::connect(config).await.expect("connects");
        let file = create(&client, "a").await;
        let piece = BufMut::zeroed(1 << 20).freeze();
        let writes = (0..64u64).map(|n| {
            let (file, client, piece) = (&file, &client, piece.clone());
            async move {
                file.write(n << 20, piece.into_vec()).await.expect("written");
                assert!(client.unstable_bytes() <= 16 << 20);
            }
        });
        join_all(writes).await;
        assert_eq!(file.attr().await.expect("there").size, 64 << 20);
    });
}

#[test]
fn a_full_target_says_so_and_room_comes_back() {
    Reactor::simulated(1).block_on(async {
        let world = World::with_capacity(1, 1 << 20).await;
        let client = world.client("client").await;
        let (big, small) = (create(&client, "big").await, create(&client, "small").await);
        big.write(0, data(&vec![1; 900_000])).await.expect("fits");
        let refused = small.write(0, data(&vec![2; 200_000])).await;
        assert_eq!(refused, Err(Error::Full));
        assert_eq!(Error::Full.errno(), libc::ENOSPC);
        cut(&client, &big, 1000).await;
        small.write(0, data(&vec![2; 200_000])).await.expect("fits now");
        assert_eq!(flat(&big.read(0, 5000).await.expect("read")), vec![1; 1000]);
    });
}

#[test]
fn a_missing_object_is_an_error_and_a_hole_is_zeroes() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(2).await;
        let client = world.client("client").await;
        let file = create(&client, "a").await;
        file.write(UNIT, data(&[5; 10])).await.expect("written");
        assert_eq!(flat(&file.read(0, UNIT).await.expect("a hole")), vec![0; UNIT as usize]);
        file.fsync().await.expect("durable");
        let attr = file.attr().await.expect("there");
        assert_eq!(attr.components.count_ones(), 1);
        for number in 0..2 {
            for object in world.objects(number).names() {
                levada_object::Objects::delete(&*world.objects(number), object).await.expect("ok");
            }
        }
        let error = file.read(UNIT, 10).await.expect_err("lost");
        assert_eq!((error, error.errno()), (Error::Missing { component: 1 }, libc::EIO));
    });
}

#[test]
fn what_was_cut_reads_as_zeroes_when_the_file_grows_again() {
    for seed in 0..10 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(3).await;
            let client = world.client("client").await;
            let file = create(&client, "a").await;
            let bytes = random_bytes(5 * UNIT as usize);
            file.write(0, data(&bytes)).await.expect("written");
            let keep = below(5 * UNIT);
            cut(&client, &file, keep).await;
            world.restart_server(below(3) as u32);
            if seed % 2 == 0 {
                cut(&client, &file, 4 * UNIT).await;
            } else {
                file.write(6 * UNIT, data(&[9])).await.expect("written");
            }
            let read = flat(&file.read(0, 4 * UNIT).await.expect("read"));
            assert_eq!(read.len() as u64, 4 * UNIT);
            let keep = (keep as usize).min(read.len());
            assert_eq!(read[..keep], bytes[..keep]);
            assert!(read[keep..].iter().all(|byte| *byte == 0), "seed {seed}");
            let open = OpenMode { write: true, truncate: true };
            let (again, attr) = client.open(file.ino(), open).await.expect("there");
            assert_eq!((attr.size, again.attr().await.expect("there").size), (0, 0));
        });
    }
}

/// As `: > a; echo text > a` does it.
#[test]
fn a_file_that_is_emptied_while_its_last_close_is_under_way_keeps_what_is_written_then() {
    for delay in 0..80 {
        Reactor::simulated(delay).block_on(async {
            let world = World::new(2).await;
            let (client, other) = (world.client("client").await, world.client("other").await);
            let file = create(&client, "a").await;
            let ino = file.ino();
            if delay % 2 == 1 {
                file.write(0, data(&[1; 300])).await.expect("written");
            }
            file.close().await;
            reactor::sleep(Duration::from_micros(delay * 100)).await;
            let open = OpenMode { write: true, truncate: true };
            let (file, _) = client.open(ino, open).await.expect("there");
            file.write(0, data(&[2; 100])).await.expect("written");
            assert_eq!(file.attr().await.expect("there").size, 100, "after {delay} x 100 us");
            file.close().await;
            reactor::sleep(Duration::from_millis(100)).await;
            let (file, attr) = other.open(ino, WRITE).await.expect("there");
            assert_eq!((attr.size, attr.writers), (100, false), "after {delay} x 100 us");
            assert_eq!(flat(&file.read(0, 400).await.expect("read")), [2; 100]);
        });
    }
}

#[test]
fn another_client_sees_what_was_written() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(2).await;
        let (one, two) = (world.client("one").await, world.client("two").await);
        let file = create(&one, "a").await;
        let (seen, _) = two.open(file.ino(), WRITE).await.expect("there");
        file.write(0, data(&[1; 100_000])).await.expect("written");
        assert_eq!(seen.attr().await.expect("there").size, 100_000);
        assert_eq!(two.lookup(ROOT_DIR, b"a").await.expect("there").size, 100_000);
        assert_eq!(flat(&seen.read(99_990, 100).await.expect("read")), [1; 10]);
        cut(&two, &seen, 10).await;
        assert_eq!(file.attr().await.expect("there").size, 10);
    });
}

#[test]
fn names_are_made_once_over_any_number_of_repetitions() {
    for seed in 0..5 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(1).await;
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
            let tasks: Vec<_> = (0..20)
                .map(|task| {
                    let client = client.clone();
                    reactor::spawn(async move {
                        for n in 0..6 {
                            let name = format!("{task}-{n}");
                            create(&client, &name).await.close().await;
                            let to = format!("{name}-moved");
                            let (from, to) = (name.as_bytes(), to.as_bytes());
                            let renamed = client
                                .rename(ROOT, (ROOT_DIR, from), (ROOT_DIR, to), 1)
                                .await
                                .expect("done once");
                            assert_eq!(renamed.ino, None);
                            if n % 2 == 0 {
                                client.unlink(ROOT, ROOT_DIR, to).await.expect("done once");
                            }
                            reactor::sleep(Duration::from_millis(below(30))).await;
                        }
                    })
                })
                .collect();
            for task in tasks {
                task.await.expect("not killed");
            }
            restarts.await;
            let (entries, end) = client.read_dir(ROOT_DIR, 0, 1000, false).await.expect("listed");
            assert!(end && entries.len() == 60, "{} entries, seed {seed}", entries.len());
        });
    }
}

#[test]
fn an_unlinked_file_lives_while_it_is_open_also_over_a_restart() {
    for seed in 0..5 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(2).await;
            let client = world.client("client").await;
            let background = world.client("housekeeper").await;
            let file = create(&client, "a").await;
            file.write(0, data(&[3; 200_000])).await.expect("written");
            client.unlink(ROOT, ROOT_DIR, b"a").await.expect("there");
            assert_eq!(client.lookup(ROOT_DIR, b"a").await, Err(Error::Meta(MetaFault::NotFound)));
            world.restart_meta().await;
            housekeeper::do_chores(&background).await.expect("chores");
            file.write(200_000, data(&[4; 10])).await.expect("written");
            file.fsync().await.expect("durable");
            assert_eq!(flat(&file.read(199_999, 100).await.expect("read"))[..2], [3, 4]);
            file.close().await;
            client.shutdown().await.expect("settled");
            // The other clients of before the restart must have reclaimed or fallen silent.
            let mut left = usize::MAX;
            for _ in 0..100 {
                reactor::sleep(Duration::from_secs(1)).await;
                housekeeper::do_chores(&background).await.expect("chores");
                left = (0..2).map(|n| world.objects(n).names().len()).sum();
                if left == 0 {
                    break;
                }
            }
            assert_eq!(left, 0, "the objects are gone in the end");
        });
    }
}

#[test]
fn a_client_that_took_leave_is_not_waited_for() {
    for seed in 0..5 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(2).await;
            let client = world.client("client").await;
            let file = create(&client, "a").await;
            file.write(0, data(&[3; 200_000])).await.expect("written");
            file.close().await;
            client.shutdown().await.expect("settled");
            drop(client);
            world.restart_meta().await;
            let asked = reactor::now();
            let other = world.client("other").await;
            let attr = other.lookup(ROOT_DIR, b"a").await.expect("there");
            assert_eq!((attr.size, attr.writers), (200_000, false));
            assert!(asked.elapsed() < Duration::from_millis(500), "{:?}", asked.elapsed());
        });
    }
}

#[test]
fn taking_leave_of_a_service_that_is_away_ends() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(2).await;
        let client = world.client("client").await;
        let file = create(&client, "a").await;
        file.close().await;
        client.sync().await.expect("durable");
        // Until the close has been answered too.
        reactor::sleep(Duration::from_secs(3)).await;
        world.kill_meta();
        let asked = reactor::now();
        client.shutdown().await.expect("everything was durable");
        assert!(asked.elapsed() < Duration::from_secs(5), "{:?}", asked.elapsed());
        world.start_meta().await;
        // It can be used again, as a new client.
        create(&client, "b").await.close().await;
        client.shutdown().await.expect("settled");
    });
}

#[test]
fn a_time_that_was_set_outlasts_the_writes_before_it() {
    for seed in 0..40 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(2).await;
            world.network.break_one_in(30);
            let client = world.client("client").await;
            let old = AttrChange { mtime: Some(SetTime::To(Time(5))), ..AttrChange::default() };
            for n in 0..10u8 {
                let name = format!("f{n}");
                let file = create(&client, &name).await;
                let ino = file.ino();
                file.write(0, data(&[1; 1000])).await.expect("written");
                let close_first = n % 2 == 0;
                if close_first {
                    file.clone().close().await;
                }
                reactor::sleep(Duration::from_micros(below(3000))).await;
                let set = client.set_attr(ROOT, ino, old).await.expect("set");
                assert_eq!((set.mtime, set.size), (Time(5), 1000));
                let wins = if n == 9 {
                    file.write(0, data(&[2; 10])).await.expect("written");
                    file.attr().await.expect("there").mtime
                } else {
                    Time(5)
                };
                assert_eq!(wins > Time(5), n == 9);
                if !close_first {
                    file.close().await;
                }
                client.shutdown().await.expect("settled");
                let attr = client.attr(ino).await.expect("there");
                assert_eq!((attr.mtime, attr.size, attr.writers), (wins, 1000, false));
            }
        });
    }
}

#[test]
fn a_dead_clients_session_is_settled() {
    for seed in 0..10 {
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
                    file.fsync().await.expect("durable");
                    file.write(100_000, data(&[2; 100_000])).await.expect("written");
                    file.ino()
                });
                task.await.expect("alive")
            };
            machine.kill();
            assert!(background.attr(ino).await.expect("there").writers);
            let mut attr = background.attr(ino).await.expect("there");
            for _ in 0..200 {
                if !attr.writers {
                    break;
                }
                reactor::sleep(Duration::from_secs(1)).await;
                housekeeper::do_chores(&background).await.expect("chores");
                attr = background.attr(ino).await.expect("there");
            }
            assert!(!attr.writers && attr.size == 200_000, "{attr:?}");
            world.restart_server(0);
            world.restart_server(1);
            let (file, _) = background.open(ino, WRITE).await.expect("there");
            let read = flat(&file.read(0, 300_000).await.expect("read"));
            assert!(read.len() == 200_000 && read[..100_000].iter().all(|byte| *byte == 1));
            assert!(read[100_000..].iter().all(|byte| *byte == 2), "settled, so durable");
        });
    }
}

#[test]
fn a_deadline_ends_a_wait_and_the_client_goes_on() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let deadline = Some(Duration::from_secs(2));
        let client = Client::connect(ClientConfig { deadline, ..world.config("client") })
            .await
            .expect("connects");
        let file = create(&client, "a").await;
        world.kill_server(0);
        assert_eq!(file.write(0, data(&[1; 10])).await, Err(Error::Deadline));
        world.restart_server(0);
        file.write(0, data(&[2; 10])).await.expect("written");
        assert_eq!(flat(&file.read(0, 10).await.expect("read")), [2; 10]);
        world.kill_meta();
        let made = client.create(ROOT, ROOT_DIR, b"d", 0o755, NewInode::Directory).await;
        assert_eq!(made, Err(Error::Deadline));
        world.start_meta().await;
        reactor::sleep(Duration::from_secs(2)).await;
        client.lookup(ROOT_DIR, b"d").await.expect("carried out in the end");
    });
}

#[test]
fn small_writes_do_not_hold_large_buffers() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let client = world.client("client").await;
        let file = create(&client, "a").await;
        let large = Buf::copy_of(&[7; 1 << 20]);
        file.write(0, large.slice(100, 5000).into_vec()).await.expect("written");
        assert_eq!(client.unstable_bytes(), 5000);
        assert!(large.try_into_mut().is_ok(), "nobody else keeps it");
    });
}

#[test]
fn a_size_from_an_earlier_session_does_not_come_back() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let (one, two) = (world.client("one").await, world.client("two").await);
        let mut wrong = Vec::new();
        for n in 0..80u64 {
            let file = create(&one, &format!("f{n}")).await;
            let ino = file.ino();
            file.write(0, data(&[1; 100])).await.expect("written");
            file.close().await;
            reactor::sleep(Duration::from_micros(200 * n)).await;
            let (again, _) = one.open(ino, WRITE).await.expect("there");
            reactor::sleep(Duration::from_millis(50)).await;
            let change = AttrChange { size: Some(0), ..AttrChange::default() };
            two.set_attr(ROOT, ino, change).await.expect("cut");
            again.write(0, data(&[2; 10])).await.expect("written");
            let size = again.attr().await.expect("there").size;
            let real = two.attr(ino).await.expect("there").size;
            if size != 10 || real != 10 {
                wrong.push((n, size, real));
            }
            again.close().await;
        }
        assert!(wrong.is_empty(), "{wrong:?}");
    });
}

/// The truncating open has cut the file at the service when the growth gets there, and waits for it
/// here to be able to cut the objects.
#[test]
fn truncating_opens_and_growths_of_one_file_do_not_wait_for_each_other() {
    for seed in 0..20 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(2).await;
            let client = Rc::new(world.client("client").await);
            let file = create(&client, "a").await;
            file.write(0, data(&random_bytes(10_000))).await.expect("written");
            let cutter = reactor::spawn({
                let (client, ino) = (Rc::clone(&client), file.ino());
                async move {
                    for _ in 0..50 {
                        let mode = OpenMode { write: true, truncate: true };
                        client.open(ino, mode).await.expect("opened").0.close().await;
                    }
                }
            });
            for n in 0..50 {
                cut(&client, &file, 10_000 + n).await;
                file.write(below(9000), data(&random_bytes(100))).await.expect("written");
            }
            cutter.await.expect("to its end");
            file.close().await;
            client.shutdown().await.expect("settled");
        });
    }
}

#[test]
fn where_another_cluster_answers_nothing_is_written_and_everybody_is_told() {
    for seed in 0..8 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(2).await;
            let ours = [1; 16];
            // Who asked for any cluster stays with the first.
            world.asks_for_any.set(seed >= 4);
            world.cluster.set(ours);
            world.restart_meta().await;
            (0..2).for_each(|number| world.restart_server(number));
            let client = world.client("client").await;
            let file = create(&client, "a").await;
            let bytes = random_bytes(300_000);
            file.write(0, data(&bytes)).await.expect("written");
            let (meta_away, servers_away) = (seed % 2 == 0, seed % 4 < 2);
            // Sending again has begun when the other one comes.
            if servers_away {
                (0..2).for_each(|number| world.restart_server(number));
                let again = file.clone();
                let under_way = reactor::spawn(async move { again.fsync().await });
                reactor::sleep(Duration::from_micros(below(300))).await;
                drop(under_way);
            }
            world.cluster.set([2; 16]);
            (0..2).for_each(|number| world.restart_server(number));
            if meta_away {
                world.restart_meta().await;
            }
            let held: Vec<_> = (0..2).map(|number| world.objects(number).names().len()).collect();
            let began = reactor::now();
            let refused = [
                file.write(0, data(&[1; 200_000])).await.err(),
                file.fsync().await.err(),
                file.read(0, 200_000).await.err(),
            ];
            for error in refused {
                assert_eq!(error.map(Error::errno), Some(libc::ESTALE), "seed {seed}");
            }
            if meta_away {
                let error = client.lookup(ROOT_DIR, b"a").await.expect_err("another cluster");
                assert_eq!(error.errno(), libc::ESTALE);
                let error = client.unlink(ROOT, ROOT_DIR, b"a").await.expect_err("another");
                assert_eq!(error.errno(), libc::ESTALE);
            }
            assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
            let now: Vec<_> = (0..2).map(|number| world.objects(number).names().len()).collect();
            assert_eq!(held, now, "seed {seed}: nothing was written there");
            // Back again: what was written is still kept, and becomes durable.
            world.cluster.set(ours);
            (0..2).for_each(|number| world.restart_server(number));
            if meta_away {
                world.restart_meta().await;
            }
            reactor::sleep(Duration::from_secs(1)).await;
            file.fsync().await.expect("durable");
            assert_eq!(flat(&file.read(0, 300_000).await.expect("read")), bytes, "seed {seed}");
        });
    }
}

#[test]
fn another_file_system_in_the_place_of_this_one_is_refused() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let client = world.client("client").await;
        let file = create(&client, "ours").await;
        world.kill_meta();
        world.format([8; 16]).await;
        world.start_meta().await;
        let other = world.client("other").await;
        // The same number as ours has there.
        let theirs = create(&other, "theirs").await;
        assert_eq!(theirs.ino(), file.ino());
        for error in [
            client.lookup(ROOT_DIR, b"theirs").await.err(),
            client.attr(theirs.ino()).await.err(),
            cut_error(&client, theirs.ino()).await,
            client.create(ROOT, ROOT_DIR, b"x", 0o755, NewInode::Directory).await.err(),
        ] {
            assert_eq!(error.map(Error::errno), Some(libc::ESTALE));
        }
        assert_eq!(other.lookup(ROOT_DIR, b"x").await.err(), Some(MetaFault::NotFound.into()));
        let began = reactor::now();
        let _ = client.shutdown().await;
        assert!(began.elapsed() < Duration::from_secs(5), "it ends all the same");
    });
}

async fn cut_error(client: &Client, ino: levada_base::ids::Ino) -> Option<Error> {
    let change = AttrChange { size: Some(0), ..AttrChange::default() };
    client.set_attr(ROOT, ino, change).await.err()
}
