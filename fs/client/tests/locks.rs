//! Locks of two clients: what one holds the other does not, whatever breaks and restarts meanwhile.

mod world;

use levada_base::ids::Ino;
use levada_base::reactor::{self, JoinHandle, Reactor};
use levada_client::{Cancel, Client, Error, File};
use levada_wire::attr::Attr;
use levada_wire::lock::{Lock, LockOwner, LockRange, LockSort};
use levada_wire::meta::MetaFault;
use std::time::Duration;
use world::{WRITE, World, below, create, data, flat};

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
