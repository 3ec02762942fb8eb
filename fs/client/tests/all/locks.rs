//! Locks of two clients: what one holds the other does not, whatever breaks and restarts meanwhile.

use crate::world::{WRITE, World, below, create, data, flat};
use levada_base::ids::Ino;
use levada_base::reactor::{self, JoinHandle, Reactor};
use levada_client::{Cancel, Client, Error, File};
use levada_wire::attr::Attr;
use levada_wire::lock::{Lock, LockOwner, LockRange, LockSort};
use levada_wire::meta::MetaFault;
use std::rc::Rc;
use std::time::Duration;

/// Longer than a lease and what follows it.
const LONG: Duration = Duration::from_secs(70);
const SOON: Duration = Duration::from_secs(5);

fn flock(id: u64) -> Lock {
    let owner = LockOwner { sort: LockSort::Flock, id };
    Lock { owner, range: LockRange::WHOLE, exclusive: true, pid: 1 }
}

fn posix(id: u64, start: u64, end: u64) -> Lock {
    let owner = LockOwner { sort: LockSort::Posix, id };
    Lock { owner, range: LockRange { start, end }, exclusive: true, pid: 1 }
}

async fn open(client: &Client, ino: Ino) -> File {
    client.open(ino, WRITE).await.expect("there").0
}

/// A file that two clients have open.
async fn two(world: &World) -> (Client, File, Client, File) {
    let (a, b) = (world.client("a").await, world.client("b").await);
    let mine = create(&a, "file").await;
    let ino = mine.ino();
    let theirs = open(&b, ino).await;
    (a, mine, b, theirs)
}

fn waiting(file: &File, lock: Lock, cancel: &Cancel) -> JoinHandle<Result<Attr, Error>> {
    let (file, cancel) = (file.clone(), cancel.clone());
    reactor::spawn(async move { file.lock(lock, Some(cancel)).await })
}

async fn soon<T>(task: JoinHandle<T>) -> T {
    reactor::timeout(SOON, task).await.expect("in time").expect("alive")
}

const HELD: Error = Error::Meta(MetaFault::LockHeld);

#[test]
fn a_wait_ends_when_the_lock_is_released() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let (_a, mine, _b, theirs) = two(&world).await;
        mine.lock(flock(1), None).await.expect("free");
        assert_eq!(theirs.lock(flock(1), None).await.map(drop), Err(HELD));
        let tested = theirs.test_lock(flock(1)).await.expect("answered").expect("held");
        assert_eq!((tested.exclusive, tested.pid), (true, 0));
        let wait = waiting(&theirs, flock(1), &Cancel::default());
        reactor::sleep(LONG).await;
        mine.write(0, data(b"text")).await.expect("written");
        mine.unlock(flock(1).owner, LockRange::WHOLE).await.expect("held");
        // What was written under the lock shows under the next one.
        assert_eq!(soon(wait).await.expect("granted").size, 4);
        assert_eq!(flat(&theirs.read(0, 10).await.expect("read")), b"text");
        assert!(theirs.has_locks(flock(1).owner) && !mine.has_locks(flock(1).owner));
        // The last close releases.
        let wait = waiting(&mine, flock(2), &Cancel::default());
        theirs.close().await;
        soon(wait).await.expect("granted");
    });
}

/// The service drops the locks of a file with its last close, and others may have them before it restarts.
#[test]
fn what_was_locked_in_a_closed_file_is_not_reclaimed() {
    for seed in 0..20 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(1).await;
            let (a, mine, b, theirs) = two(&world).await;
            let (ino, kept) = (mine.ino(), create(&a, "kept").await);
            for file in [&mine, &kept] {
                file.lock(flock(1), None).await.expect("free");
            }
            let wait = waiting(&theirs, flock(1), &Cancel::default());
            reactor::sleep(Duration::from_millis(below(3))).await;
            mine.close().await;
            soon(wait).await.expect("granted");
            reactor::sleep(Duration::from_millis(below(3))).await;
            world.restart_meta().await;
            reactor::sleep(SOON).await;
            let mine = open(&a, ino).await;
            assert_eq!(mine.lock(flock(1), None).await.map(drop), Err(HELD));
            theirs.write(0, data(b"text")).await.expect("its lock is not lost");
            kept.write(0, data(b"text")).await.expect("nor is that of another file");
            let other = open(&b, kept.ino()).await;
            assert_eq!(other.lock(flock(1), None).await.map(drop), Err(HELD));
        });
    }
}

/// Of what was asked for through a closed file nothing is left, whenever it is granted; and what is locked through one
/// that is opened at once, by the same owner, stays.
#[test]
fn a_close_ends_waits_and_takes_nothing_from_the_next_open() {
    let mut granted = 0;
    for seed in 0..60 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(1).await;
            let (a, mine, _b, theirs) = two(&world).await;
            let ino = mine.ino();
            if seed % 2 == 0 {
                world.network.break_one_in(30);
            }
            theirs.lock(posix(1, 10, 19), None).await.expect("free");
            mine.lock(posix(1, 0, 9), None).await.expect("free");
            let wait = waiting(&mine, posix(1, 0, 19), &Cancel::default());
            reactor::sleep(Duration::from_micros(below(500))).await;
            let unlocking = {
                let theirs = theirs.clone();
                reactor::spawn(async move {
                    reactor::sleep(Duration::from_micros(below(500))).await;
                    theirs.unlock(posix(1, 0, 0).owner, LockRange::WHOLE).await
                })
            };
            reactor::sleep(Duration::from_micros(below(800))).await;
            mine.close().await;
            match soon(wait).await {
                Ok(_) => granted += 1,
                Err(error) => assert_eq!(error, Error::Meta(MetaFault::NotOpen), "seed {seed}"),
            }
            let mine = open(&a, ino).await;
            let again = waiting(&mine, posix(1, 4, 5), &Cancel::default());
            soon(again).await.expect("free");
            soon(unlocking).await.expect("held");
            reactor::sleep(SOON).await;
            for _ in 0..2 {
                for (start, end, is_free) in [(0, 3, true), (4, 4, false), (6, 30, true)] {
                    let got = theirs.lock(posix(1, start, end), None).await.map(drop);
                    assert_eq!(
                        got,
                        if is_free { Ok(()) } else { Err(HELD) },
                        "seed {seed}: {start}"
                    );
                }
                world.restart_meta().await;
            }
            mine.read(0, 1).await.expect("its lock is not lost");
        });
    }
    assert!((5..55).contains(&granted), "{granted}");
}

#[test]
fn any_number_of_waits_leaves_room_for_the_unlock() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let (_a, mine, _b, theirs) = two(&world).await;
        mine.lock(flock(1), None).await.expect("free");
        let cancel = Cancel::default();
        let waits: Vec<_> = (0..1000).map(|n| waiting(&mine, flock(2 + n), &cancel)).collect();
        reactor::sleep(Duration::from_secs(1)).await;
        let other = waiting(&theirs, flock(1), &Cancel::default());
        mine.unlock(flock(1).owner, LockRange::WHOLE).await.expect("held");
        reactor::sleep(Duration::from_secs(1)).await;
        cancel.cancel();
        let mut granted = Vec::new();
        for (n, wait) in (2..).zip(waits) {
            match soon(wait).await {
                Ok(_) => granted.push(n),
                Err(error) => assert_eq!(error, Error::Interrupted),
            }
        }
        assert_eq!(granted.len(), 1, "the first in the queue");
        mine.unlock(flock(granted[0]).owner, LockRange::WHOLE).await.expect("held");
        soon(other).await.expect("granted");
    });
}

#[test]
fn who_gives_up_has_no_lock() {
    for seed in 0..40 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(1).await;
            let (_a, mine, _b, theirs) = two(&world).await;
            world.network.break_one_in(20);
            mine.lock(posix(1, 0, 9), None).await.expect("free");
            let cancel = Cancel::default();
            let wait = waiting(&theirs, posix(1, 5, 6), &cancel);
            reactor::sleep(Duration::from_micros(below(1000))).await;
            let unlocking = {
                let mine = mine.clone();
                reactor::spawn(
                    async move { mine.unlock(posix(1, 0, 9).owner, LockRange::WHOLE).await },
                )
            };
            reactor::sleep(Duration::from_micros(below(300))).await;
            match below(3) {
                0 => cancel.cancel(),
                // Dropped: nobody hears of it.
                1 => {
                    let theirs = theirs.clone();
                    let given_up = theirs.lock(posix(2, 5, 6), Some(Cancel::default()));
                    let _ = reactor::timeout(Duration::from_micros(below(300)), given_up).await;
                }
                _ => {}
            }
            soon(unlocking).await.expect("unlocked");
            if soon(wait).await.is_ok() {
                assert_eq!(mine.lock(posix(1, 5, 6), None).await.map(drop), Err(HELD));
                theirs.unlock(posix(1, 0, 0).owner, LockRange::WHOLE).await.expect("held");
            }
            reactor::sleep(SOON).await;
            mine.lock(posix(1, 0, 9), None).await.expect("free");
        });
    }
}

#[test]
fn a_deadlock_over_two_files_is_told_to_the_one_who_completes_it() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let (a, mine, b, theirs) = two(&world).await;
        let second = create(&a, "second").await;
        let also = open(&b, second.ino()).await;
        mine.lock(posix(1, 0, 9), None).await.expect("free");
        also.lock(posix(1, 0, 9), None).await.expect("free");
        let wait = waiting(&second, posix(1, 0, 0), &Cancel::default());
        reactor::sleep(SOON).await;
        let refused = soon(waiting(&theirs, posix(1, 9, 9), &Cancel::default())).await;
        assert_eq!(refused.map(drop), Err(Error::Meta(MetaFault::Deadlock)));
        also.unlock(posix(1, 0, 0).owner, LockRange::WHOLE).await.expect("held");
        soon(wait).await.expect("granted");
    });
}

#[test]
fn locks_and_waits_survive_a_restart_of_the_service() {
    for seed in 0..20 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(1).await;
            let (_a, mine, _b, theirs) = two(&world).await;
            mine.lock(posix(1, 0, 9), None).await.expect("free");
            mine.unlock(posix(1, 0, 0).owner, LockRange { start: 4, end: 5 }).await.expect("held");
            let cancel = Cancel::default();
            let wait = waiting(&theirs, posix(1, 0, 0), &cancel);
            let given_up = waiting(&theirs, posix(2, 9, 9), &cancel);
            reactor::sleep(Duration::from_micros(below(1000))).await;
            world.restart_meta().await;
            // Nobody asks anything; both come back by themselves.
            reactor::sleep(SOON).await;
            for (start, end, is_free) in [(0, 3, false), (4, 5, true), (6, 9, false)] {
                let got = reactor::timeout(SOON, theirs.lock(posix(3, start, end), None)).await;
                assert_eq!(got.expect("in time").is_ok(), is_free, "{start}..={end}");
            }
            mine.unlock(posix(1, 0, 0).owner, LockRange { start: 0, end: 3 }).await.expect("held");
            soon(wait).await.expect("granted");
            cancel.cancel();
            assert_eq!(soon(given_up).await.map(drop), Err(Error::Interrupted));
        });
    }
}

#[test]
fn a_holder_that_died_with_the_service_costs_one_lease() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let (a, b) = (world.client("a").await, world.client("b").await);
        let group = reactor::Group::new();
        let ino = create(&a, "file").await.ino();
        let theirs = open(&b, ino).await;
        let dying = world.config("dying");
        let holding = reactor::spawn_in(&group, async move {
            let client = Client::connect(dying).await.expect("connects");
            let file = open(&client, ino).await;
            file.lock(flock(1), None).await.expect("free");
            std::future::pending::<()>().await;
        });
        reactor::sleep(SOON).await;
        assert_eq!(theirs.lock(flock(1), None).await.map(drop), Err(HELD));
        world.kill_meta();
        group.kill();
        drop(holding);
        world.start_meta().await;
        let since = reactor::now();
        theirs.lock(flock(1), None).await.expect("free after the lease");
        let waited = since.elapsed();
        assert!(waited > world.lease / 2 && waited < world.lease + SOON, "{waited:?}");
        // Nobody who may hold locks is missing: no grace.
        theirs.unlock(flock(1).owner, LockRange::WHOLE).await.expect("held");
        world.restart_meta().await;
        let since = reactor::now();
        theirs.lock(flock(1), None).await.expect("free");
        assert!(since.elapsed() < SOON);
    });
}

#[test]
fn a_lock_that_ended_with_the_lease_fails_the_files_it_was_taken_through() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let (a, mine, _b, theirs) = two(&world).await;
        let (other, second) = (open(&a, mine.ino()).await, create(&a, "second").await);
        mine.write(0, data(b"mine")).await.expect("written");
        mine.fsync().await.expect("durable");
        mine.lock(flock(1), None).await.expect("free");
        second.lock(flock(1), None).await.expect("free");
        second.unlock(flock(1).owner, LockRange::WHOLE).await.expect("held");
        let wait = waiting(&theirs, flock(1), &Cancel::default());
        let mine_waits = waiting(&other, flock(2), &Cancel::default());
        reactor::sleep(SOON).await;
        world.network.partition("a", "meta");
        reactor::sleep(LONG).await;
        soon(wait).await.expect("the lease is over");
        world.network.heal("a", "meta");
        reactor::sleep(SOON).await;
        assert_eq!(mine.read(0, 4).await.map(drop), Err(Error::LockLost));
        assert_eq!(mine.write(0, data(b"late")).await, Err(Error::LockLost));
        assert_eq!(mine.fsync().await, Err(Error::LockLost));
        assert_eq!(mine.lock(flock(1), None).await.map(drop), Err(Error::LockLost));
        mine.unlock(flock(1).owner, LockRange::WHOLE).await.expect("may be released");
        mine.close().await;
        second.write(0, data(b"fine")).await.expect("another file");
        assert_eq!(flat(&other.read(0, 4).await.expect("another open")), b"mine");
        theirs.unlock(flock(1).owner, LockRange::WHOLE).await.expect("held");
        // What waited has been asked for anew.
        soon(mine_waits).await.expect("granted");
    });
}

#[test]
fn nobody_but_the_holder_is_inside() {
    (0..40).for_each(crate::world::contest::locks_exclude);
}

/// A number in a file, read and written under a lock, counts every turn, over all that can happen but the end of a
/// lease.
#[test]
fn a_counter_under_a_lock_skips_nothing() {
    for seed in 0..30 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(2).await;
            let (a, mine, b, theirs) = two(&world).await;
            mine.write(0, data(&0_u64.to_le_bytes())).await.expect("written");
            world.network.break_one_in(60);
            let mut tasks = Vec::new();
            for (number, (client, file)) in
                [(&a, &mine), (&b, &theirs), (&a, &mine)].into_iter().enumerate()
            {
                let (_client, file) = (client.clone(), file.clone());
                tasks.push(reactor::spawn(async move {
                    let lock = match number {
                        0 | 1 => Lock { range: LockRange { start: 0, end: 7 }, ..posix(5, 0, 0) },
                        _ => posix(6, 3, 12),
                    };
                    let mut turns = 0_u64;
                    while turns < 15 {
                        let cancel = Cancel::default();
                        if below(4) == 0 {
                            let cancel = cancel.clone();
                            reactor::spawn(async move {
                                reactor::sleep(Duration::from_micros(below(30_000))).await;
                                cancel.cancel();
                            });
                        }
                        match file.lock(lock, Some(cancel)).await {
                            Ok(_) => {}
                            Err(Error::Interrupted) => continue,
                            Err(error) => panic!("{error}"),
                        }
                        let bytes = flat(&file.read(0, 8).await.expect("read"));
                        let count = u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
                        reactor::sleep(Duration::from_micros(below(20_000))).await;
                        file.write(0, data(&(count + 1).to_le_bytes())).await.expect("written");
                        turns += 1;
                        file.unlock(lock.owner, LockRange::WHOLE).await.expect("held");
                    }
                    turns
                }));
            }
            let mischief = {
                let world = Rc::clone(&world);
                reactor::spawn(async move {
                    loop {
                        // Both must come back in one life for the locks to go on.
                        reactor::sleep(Duration::from_millis(100 + below(500))).await;
                        world.restart_meta().await;
                    }
                })
            };
            let mut turns = 0;
            for task in tasks {
                turns += reactor::timeout(LONG, task).await.expect("in time").expect("alive");
            }
            mischief.abort();
            reactor::sleep(Duration::from_secs(1)).await;
            if !world.has_meta() {
                world.start_meta().await;
            }
            let count = flat(&mine.read(0, 8).await.expect("read"));
            assert_eq!(
                u64::from_le_bytes(count.try_into().expect("8 bytes")),
                turns,
                "seed {seed}"
            );
        });
    }
}
