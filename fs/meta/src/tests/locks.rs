//! Locks of two clients, as the service answers; `crate::locks` has the model.

use super::*;
use levada_base::planted;
use levada_wire::lock::{Lock, LockOwner, LockRange, LockSort};
use levada_wire::meta::{Ack, Notice};

fn flock(id: u64, exclusive: bool) -> Lock {
    let owner = LockOwner { sort: LockSort::Flock, id };
    Lock { owner, range: LockRange::WHOLE, exclusive, pid: 100 + id as u32 }
}

fn request(ino: Ino, lock: Lock, ticket: Option<u64>) -> MetaRequest {
    MetaRequest::Lock { ino, lock, ticket }
}

fn unlock(ino: Ino, lock: Lock) -> MetaRequest {
    MetaRequest::Unlock { ino, owner: lock.owner, range: lock.range }
}

fn is_locked(reply: &MetaReply, ino: Ino) -> bool {
    matches!(reply, MetaReply::Locked(attr) if attr.ino == ino)
}

impl World {
    fn notices(&self, t: &Tester) -> Vec<(u64, Notice)> {
        self.service().table.borrow().locks.notices(t.client.get())
    }
}

/// Two clients that have a file open.
async fn two(world: &Rc<World>) -> (Tester, Tester, Ino) {
    let (a, b) = (Tester::new(world, 1).await, Tester::new(world, 2).await);
    for t in [&a, &b] {
        assert_eq!(t.read(reclaim(Vec::new())).await, MetaReply::Done);
    }
    let ino = a.file("file").await.ino;
    a.open(ino, true, false).await.expect("opens");
    b.open(ino, true, false).await.expect("opens");
    (a, b, ino)
}

const HELD: MetaReply = MetaReply::Failed(MetaFault::LockHeld);

#[test]
fn a_lock_is_taken_waited_for_and_released() {
    simulated(1, async {
        let world = World::small().await;
        let (a, b, ino) = two(&world).await;
        let (mine, theirs) = (flock(1, true), flock(1, true));
        let locking = request(ino, mine, None);
        assert!(is_locked(&a.change(locking.clone()).await, ino));
        // Over another connection: the answer that it had.
        let again = world.service().handle(a.last_call(), locking).await;
        assert!(is_locked(&again, ino));
        assert_eq!(b.change(request(ino, theirs, None)).await, HELD);
        let tested = b.read(MetaRequest::TestLock { ino, lock: theirs }).await;
        assert_eq!(tested, MetaReply::Tested(Some(Lock { pid: 0, ..mine })));
        let tested = a.read(MetaRequest::TestLock { ino, lock: flock(2, false) }).await;
        assert_eq!(tested, MetaReply::Tested(Some(mine)));
        assert_eq!(b.change(request(ino, theirs, Some(9))).await, MetaReply::Waiting);
        // Under another slot sequence: the same wait.
        assert_eq!(b.change(request(ino, theirs, Some(9))).await, MetaReply::Waiting);
        assert!(world.notices(&b).is_empty());
        assert_eq!(a.change(unlock(ino, mine)).await, MetaReply::Done);
        assert_eq!(a.change(unlock(ino, mine)).await, MetaReply::Done);
        assert_eq!(world.notices(&b), [(1, Notice::Granted { ticket: 9 })]);
        // The notice was lost, and the answer too.
        assert!(is_locked(&b.change(request(ino, theirs, Some(9))).await, ino));
        world
            .service()
            .acknowledged(b.client.get(), &[1, 7].map(|number| Ack { number, keeps: false }));
        assert!(world.notices(&b).is_empty());
        assert_eq!(a.change(request(ino, mine, None)).await, HELD);
        world.stop();
    });
}

#[test]
fn a_wait_is_cancelled_or_was_granted_before() {
    simulated(1, async {
        let world = World::small().await;
        let (a, b, ino) = two(&world).await;
        let cancel = |ticket| MetaRequest::CancelWait { ino, ticket };
        assert!(is_locked(&a.change(request(ino, flock(1, true), None)).await, ino));
        assert_eq!(b.change(request(ino, flock(1, true), Some(1))).await, MetaReply::Waiting);
        assert_eq!(b.change(cancel(1)).await, MetaReply::Done);
        assert_eq!(b.change(cancel(1)).await, MetaReply::Done);
        assert_eq!(a.change(unlock(ino, flock(1, true))).await, MetaReply::Done);
        assert!(world.notices(&b).is_empty());
        assert!(is_locked(&a.change(request(ino, flock(1, true), None)).await, ino));
        assert_eq!(b.change(request(ino, flock(1, true), Some(2))).await, MetaReply::Waiting);
        assert_eq!(a.change(unlock(ino, flock(1, true))).await, MetaReply::Done);
        // It crosses the notice.
        assert!(is_locked(&b.change(cancel(2)).await, ino));
        assert_eq!(a.change(request(ino, flock(1, false), None)).await, HELD);
        world.stop();
    });
}

#[test]
fn a_cycle_over_two_files_and_two_clients_is_refused() {
    simulated(1, async {
        let world = World::small().await;
        let (a, b, first) = two(&world).await;
        let second = a.file("second").await.ino;
        for t in [&a, &b] {
            t.open(second, true, false).await.expect("opens");
        }
        let posix = |id| Lock { owner: LockOwner { sort: LockSort::Posix, id }, ..flock(id, true) };
        assert!(is_locked(&a.change(request(first, posix(1), None)).await, first));
        assert!(is_locked(&b.change(request(second, posix(1), None)).await, second));
        assert_eq!(a.change(request(second, posix(1), Some(1))).await, MetaReply::Waiting);
        let refused = MetaReply::Failed(MetaFault::Deadlock);
        assert_eq!(b.change(request(first, posix(1), Some(1))).await, refused);
        // Not of flock, as in Linux; nor when it does not wait.
        assert_eq!(b.change(request(first, posix(1), None)).await, HELD);
        assert!(is_locked(&a.change(request(first, flock(1, true), None)).await, first));
        assert!(is_locked(&b.change(request(second, flock(1, true), None)).await, second));
        assert_eq!(a.change(request(second, flock(1, true), Some(2))).await, MetaReply::Waiting);
        assert_eq!(b.change(request(first, flock(1, true), Some(2))).await, MetaReply::Waiting);
        world.stop();
    });
}

#[test]
fn locks_end_with_the_last_close_and_with_the_client() {
    simulated(1, async {
        let world = World::small().await;
        let (a, b, ino) = two(&world).await;
        a.open(ino, false, false).await.expect("opens");
        assert!(is_locked(&a.change(request(ino, flock(1, true), None)).await, ino));
        assert_eq!(b.change(request(ino, flock(1, true), Some(1))).await, MetaReply::Waiting);
        assert!(matches!(a.change(MetaRequest::Close { ino }).await, MetaReply::Done));
        assert!(world.notices(&b).is_empty(), "open once more");
        assert!(matches!(a.change(MetaRequest::Close { ino }).await, MetaReply::Done));
        assert_eq!(world.notices(&b).len(), 1);
        let not_open = MetaReply::Failed(MetaFault::NotOpen);
        assert_eq!(a.change(request(ino, flock(1, true), Some(1))).await, not_open);
        a.open(ino, false, false).await.expect("opens");
        assert_eq!(a.change(request(ino, flock(1, true), Some(2))).await, MetaReply::Waiting);
        // A client that says good-bye, and one that falls silent.
        assert_eq!(b.read(MetaRequest::Leave).await, MetaReply::Done);
        assert_eq!(world.notices(&a), [(1, Notice::Granted { ticket: 2 })]);
        let c = Tester::new(&world, 3).await;
        c.open(ino, false, false).await.expect("opens");
        assert_eq!(c.change(request(ino, flock(1, true), Some(1))).await, MetaReply::Waiting);
        for _ in 0..5 {
            reactor::sleep(LEASE / 4).await;
            c.attr(ino).await.expect("there");
            world.service().tick().await.expect("ticks");
        }
        assert_eq!(world.notices(&c), [(1, Notice::Granted { ticket: 1 })]);
        world.stop();
    });
}

/// No client relies on it: each unlocks before it closes. It is for those that do not.
#[test]
fn a_close_that_keeps_locks_would_be_found() {
    for is_planted in [false, true] {
        simulated(1, async {
            let world = World::small().await;
            let (a, b, ino) = two(&world).await;
            assert!(is_locked(&a.change(request(ino, flock(1, true), None)).await, ino));
            if is_planted {
                planted::choose(Some("meta-lock-kept-after-close"));
            }
            assert_eq!(a.change(MetaRequest::Close { ino }).await, MetaReply::Done);
            planted::choose(None);
            let is_free = is_locked(&b.change(request(ino, flock(1, true), None)).await, ino);
            assert_eq!(is_free, !is_planted);
            world.stop();
        });
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    simulated(1, async {
        let world = World::small().await;
        let (a, _, ino) = two(&world).await;
        let invalid = MetaReply::Failed(MetaFault::Invalid);
        for (start, end) in [(3, 2), (0, 1 << 63)] {
            let lock = Lock { range: LockRange { start, end }, ..flock(1, true) };
            assert_eq!(a.change(request(ino, lock, None)).await, invalid);
            assert_eq!(a.change(unlock(ino, lock)).await, invalid);
            assert_eq!(a.read(MetaRequest::TestLock { ino, lock }).await, invalid);
        }
        let nowhere = a.change(request(Ino(999), flock(1, true), None)).await;
        assert_eq!(nowhere, MetaReply::Failed(MetaFault::NotOpen));
        // Without a slot nobody would know a repetition.
        assert_eq!(a.read(request(ino, flock(1, true), None)).await, invalid);
        world.stop();
    });
}

/// A full store takes no row, but locks need none.
#[test]
fn a_full_store_locks_and_unlocks() {
    simulated(1, async {
        let world = World::new(fs_config(), serve_config(), 2 * MIB).await;
        let (a, _, ino) = two(&world).await;
        assert!(is_locked(&a.change(request(ino, flock(2, false), None)).await, ino));
        for n in 0.. {
            let made = a.make(Ino::ROOT, &format!("{n:0200}"), NewInode::Directory).await;
            if made == Err(MetaFault::Full) {
                break;
            }
        }
        assert_eq!(a.change(unlock(ino, flock(2, false))).await, MetaReply::Done);
        assert!(is_locked(&a.change(request(ino, flock(1, true), None)).await, ino));
        assert_eq!(a.change(unlock(ino, flock(1, true))).await, MetaReply::Done);
        world.stop();
    });
}

fn reclaim_locks(opens: Vec<(Ino, u32)>, locks: Vec<(Ino, Lock)>, last: bool) -> MetaRequest {
    MetaRequest::Reclaim { opens, locks, last }
}

const AWAY: MetaReply = MetaReply::Failed(MetaFault::Unavailable);

#[test]
fn nobody_is_given_a_lock_before_those_who_may_hold_one_have_spoken() {
    simulated(1, async {
        let world = World::small().await;
        let (a, b, ino) = two(&world).await;
        assert!(is_locked(&a.change(request(ino, flock(1, true), None)).await, ino));
        world.power_cut().await;
        let test = || MetaRequest::TestLock { ino, lock: flock(1, true) };
        b.register().await;
        assert_eq!(b.read(reclaim(vec![(ino, 1)])).await, MetaReply::Done);
        for _ in 0..2 {
            assert_eq!(b.change(request(ino, flock(1, true), Some(1))).await, AWAY);
            assert_eq!(b.read(test()).await, AWAY);
        }
        assert_eq!(b.change(unlock(ino, flock(1, true))).await, MetaReply::Done);
        // In three parts, of which a connection loses some.
        let (opens, locks) = (vec![(ino, 1)], vec![(ino, flock(1, true))]);
        a.register().await;
        assert_eq!(a.read(reclaim_locks(opens.clone(), vec![], false)).await, MetaReply::Done);
        assert_eq!(a.read(reclaim_locks(vec![], locks.clone(), false)).await, MetaReply::Done);
        a.register().await;
        assert_eq!(a.read(reclaim_locks(opens.clone(), vec![], false)).await, MetaReply::Done);
        assert_eq!(a.read(reclaim_locks(vec![], locks.clone(), false)).await, MetaReply::Done);
        assert_eq!(b.change(request(ino, flock(1, true), Some(1))).await, AWAY);
        let other = Lock { owner: LockOwner { sort: LockSort::Posix, id: 1 }, ..flock(1, true) };
        assert_eq!(a.read(reclaim_locks(vec![], vec![(ino, other)], true)).await, MetaReply::Done);
        assert_eq!(b.change(request(ino, flock(1, true), Some(1))).await, MetaReply::Waiting);
        assert_eq!(b.change(request(ino, other, None)).await, HELD);
        // The answer was lost, and all is said again.
        a.register().await;
        assert_eq!(a.read(reclaim_locks(opens, locks, true)).await, MetaReply::Done);
        assert!(world.notices(&b).is_empty());
        assert!(is_locked(&b.change(request(ino, other, None)).await, ino), "not said this time");
        assert_eq!(a.change(unlock(ino, flock(1, true))).await, MetaReply::Done);
        assert_eq!(world.notices(&b), [(1, Notice::Granted { ticket: 1 })]);
        world.stop();
    });
}

#[test]
fn what_cannot_have_been_held_is_not_reclaimed() {
    simulated(1, async {
        let world = World::small().await;
        let (a, b, ino) = two(&world).await;
        for t in [&a, &b] {
            assert!(is_locked(&t.change(request(ino, flock(1, false), None)).await, ino));
        }
        world.power_cut().await;
        let stale = MetaReply::Failed(MetaFault::Stale);
        a.register().await;
        let not_open = reclaim_locks(vec![], vec![(ino, flock(1, true))], true);
        assert_eq!(a.read(not_open).await, stale);
        a.register().await;
        let all = || reclaim_locks(vec![(ino, 1)], vec![(ino, flock(1, true))], true);
        assert_eq!(a.read(all()).await, MetaReply::Done);
        // In the way of the first: all of it is refused, but what it has open counts.
        b.register().await;
        assert_eq!(b.read(all()).await, stale);
        assert_eq!(b.change(request(ino, flock(1, true), Some(1))).await, MetaReply::Waiting);
        // Of one that never had a lock nothing can be true.
        let c = Tester::new(&world, 3).await;
        assert_eq!(c.read(all()).await, stale);
        world.stop();
    });
}

#[test]
fn grace_is_for_those_who_had_locks_lately() {
    simulated(1, async {
        let world = World::small().await;
        let (a, b, ino) = two(&world).await;
        assert!(is_locked(&a.change(request(ino, flock(1, true), None)).await, ino));
        assert_eq!(a.change(unlock(ino, flock(1, true))).await, MetaReply::Done);
        let back = async || {
            b.register().await;
            assert_eq!(b.read(reclaim(vec![(ino, 1)])).await, MetaReply::Done);
            b.change(request(ino, flock(1, true), None)).await
        };
        // It has none, but nobody noted that.
        world.power_cut().await;
        assert_eq!(back().await, AWAY);
        a.register().await;
        assert_eq!(a.read(reclaim(vec![(ino, 1)])).await, MetaReply::Done);
        assert!(is_locked(&back().await, ino));
        assert_eq!(b.change(unlock(ino, flock(1, true))).await, MetaReply::Done);
        for _ in 0..6 {
            reactor::sleep(LEASE / 4).await;
            a.attr(ino).await.expect("there");
            b.attr(ino).await.expect("there");
            world.service().tick().await.expect("ticks");
        }
        world.service().durable(world.service().store().last_seq()).await.expect("durable");
        world.power_cut().await;
        assert!(is_locked(&back().await, ino), "nobody is waited for");
        // One that never comes back: one lease.
        world.power_cut().await;
        let c = Tester::new(&world, 3).await;
        assert_eq!(c.read(reclaim(Vec::new())).await, MetaReply::Done);
        c.open(ino, true, false).await.expect("opens");
        assert_eq!(c.change(request(ino, flock(1, true), None)).await, AWAY);
        for _ in 0..5 {
            reactor::sleep(LEASE / 4).await;
            c.attr(ino).await.expect("there");
            world.service().tick().await.expect("ticks");
        }
        assert!(is_locked(&c.change(request(ino, flock(1, true), None)).await, ino));
        world.stop();
    });
}
