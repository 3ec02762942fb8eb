//! What this client holds of files' locks, and what it waits for.
//!
//! What always holds:
//! - A lock is in the table from when this client was told of it until its `Unlock` begins. That is what it
//!   says after a restart of the service.
//! - Notices are taken in where frames are received, before the answers that come behind them.
//! - What was granted while the same owner was unlocking may be held or not: it is asked for again.
//! - Locks end with the client's number: the handles they were taken through fail from then on.
//!
//! How a wait goes on is in [`WaitState::after`]; who asks and answers is in `inode/locks.rs`.

use levada_base::ids::Ino;
use levada_base::planted;
use levada_base::sync::Notify;
use levada_wire::lock::{Held, Lock, LockOwner, LockRange, Span};
use levada_wire::meta::{MetaReply, Notice};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::{Rc, Weak};

/// An open file lost a lock that was taken through it: true from then on.
pub(crate) type LostMark = Rc<Cell<bool>>;

/// How far a wait for a lock has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitState {
    /// The service has been asked, or is about to be.
    Asking,
    Queued,
    /// The lock is in the table.
    Held,
    /// It would never end.
    Refused,
    /// The service has forgotten it, and there is no lock.
    Forgotten,
    /// It was granted while the same owner was unlocking.
    Unclear,
}

/// What happens to a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitEvent {
    /// The answer that it is queued.
    Waiting,
    /// The answer, or a notice, that the lock is held.
    Locked,
    /// As `Locked`, while the same owner is unlocking.
    LockedUnclearly,
    Refused,
    /// Another life of the service, or another number of this client.
    Forgotten,
}

impl WaitState {
    /// Every change happens here.
    #[must_use]
    pub(crate) fn after(self, event: WaitEvent) -> Self {
        use {WaitEvent as E, WaitState::*};
        match (self, event) {
            (Asking, E::Waiting) => Queued,
            (Asking | Queued, E::Locked) => Held,
            (Asking | Queued, E::LockedUnclearly) => Unclear,
            (Asking | Queued, E::Refused) => Refused,
            (Queued, E::Forgotten) => Forgotten,
            // What was asked is asked again by itself.
            (Asking, E::Forgotten) => Asking,
            // It is in the table, and goes with that.
            (Held, E::Forgotten) => Held,
            // A notice overtook the answer, or came again.
            (Held, E::Waiting | E::Locked | E::LockedUnclearly | E::Refused) => Held,
            (Refused, _) => Refused,
            (Forgotten, _) => Forgotten,
            (Unclear, E::Forgotten) => Forgotten,
            (Unclear, E::Waiting | E::Locked | E::LockedUnclearly | E::Refused) => Unclear,
            (Queued, E::Waiting) => Queued,
        }
    }
}

/// A wait for a lock, under one ticket.
pub(crate) struct Wait {
    pub(crate) ticket: u64,
    ino: Ino,
    lock: Lock,
    lost: LostMark,
    state: Cell<WaitState>,
    changed: Notify,
}

impl Wait {
    pub(crate) fn state(&self) -> WaitState {
        self.state.get()
    }

    /// Waits until it is neither asked for nor queued.
    pub(crate) async fn ended(&self) -> WaitState {
        let has_ended = || {
            let state = self.state.get();
            (!matches!(state, WaitState::Asking | WaitState::Queued)).then_some(state)
        };
        self.changed.until(has_ended).await
    }

    fn happens(&self, event: WaitEvent) {
        self.state.set(self.state.get().after(event));
        self.changed.notify_all();
    }
}

/// What one owner holds of one file.
#[derive(Default)]
struct Holding {
    held: Held,
    /// Open files through which it was taken.
    taken_through: Vec<Weak<Cell<bool>>>,
}

/// Called with a file whose lock is lost.
pub(crate) type OnLost = Rc<dyn Fn(Ino)>;

/// See the module.
#[derive(Default)]
pub(crate) struct Locks {
    held: RefCell<BTreeMap<(Ino, LockOwner), Holding>>,
    waits: RefCell<BTreeMap<u64, Rc<Wait>>>,
    /// A wait or a lock has ended.
    ended: Notify,
    last_ticket: Cell<u64>,
    /// Unlocks under way.
    unlocking: RefCell<BTreeMap<(Ino, LockOwner), u32>>,
    on_lost: RefCell<Option<OnLost>>,
}

/// An `Unlock` under way.
pub(crate) struct Unlocking<'a> {
    locks: &'a Locks,
    key: (Ino, LockOwner),
    /// What was held before.
    before: Vec<Span>,
}

impl Unlocking<'_> {
    /// The service refused: nothing was released.
    pub(crate) fn refused(self) {
        let (ino, owner) = self.key;
        let mut held = self.locks.held.borrow_mut();
        let holding = held.entry((ino, owner)).or_default();
        for Span { range, exclusive, pid } in &self.before {
            holding.held.take(&Lock { owner, range: *range, exclusive: *exclusive, pid: *pid });
        }
    }
}

impl Drop for Unlocking<'_> {
    fn drop(&mut self) {
        let mut unlocking = self.locks.unlocking.borrow_mut();
        if let Some(count) = unlocking.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                unlocking.remove(&self.key);
            }
        }
    }
}

impl Locks {
    pub(crate) fn set_on_lost(&self, on_lost: OnLost) {
        *self.on_lost.borrow_mut() = Some(on_lost);
    }

    /// A lock was told; the file through which it was taken fails when it is lost.
    fn told(&self, ino: Ino, lock: &Lock, lost: &LostMark) {
        let mut held = self.held.borrow_mut();
        let holding = held.entry((ino, lock.owner)).or_default();
        holding.held.take(lock);
        let lost = Rc::downgrade(lost);
        holding.taken_through.retain(|known| known.strong_count() > 0 && !known.ptr_eq(&lost));
        holding.taken_through.push(lost);
    }

    /// Whether there is anything to release.
    pub(crate) fn has_any(&self, ino: Ino, owner: LockOwner) -> bool {
        self.held.borrow().contains_key(&(ino, owner))
            || self.waits.borrow().values().any(|wait| (wait.ino, wait.lock.owner) == (ino, owner))
    }

    /// Who holds something of a file.
    pub(crate) fn owners(&self, ino: Ino) -> BTreeSet<LockOwner> {
        let held = self.held.borrow();
        let from = held.range((ino, LockOwner::FIRST)..=(ino, LockOwner::LAST));
        from.map(|((_, owner), _)| *owner).collect()
    }

    /// What is waited for of a file.
    pub(crate) fn waits(&self, ino: Ino) -> Vec<Rc<Wait>> {
        self.waits.borrow().values().filter(|wait| wait.ino == ino).cloned().collect()
    }

    /// `Unlock` begins.
    pub(crate) fn unlock(&self, ino: Ino, owner: LockOwner, range: LockRange) -> Unlocking<'_> {
        let key = (ino, owner);
        *self.unlocking.borrow_mut().entry(key).or_default() += 1;
        let mut held = self.held.borrow_mut();
        let mut before = Vec::new();
        if let Some(holding) = held.get_mut(&key) {
            before = holding.held.iter().copied().collect();
            holding.held.release(range);
            if holding.held.is_empty() {
                held.remove(&key);
            }
        }
        drop(held);
        self.ended.notify_all();
        Unlocking { locks: self, key, before }
    }

    /// A wait under a ticket of its own; [`Locks::end_wait`] ends it.
    pub(crate) fn begin_wait(&self, ino: Ino, lock: &Lock, lost: &LostMark) -> Rc<Wait> {
        let ticket = self.last_ticket.get() + 1;
        self.last_ticket.set(ticket);
        let state = Cell::new(WaitState::Asking);
        let changed = Notify::default();
        let wait = Wait { ticket, ino, lock: *lock, lost: Rc::clone(lost), state, changed };
        let wait = Rc::new(wait);
        self.waits.borrow_mut().insert(ticket, Rc::clone(&wait));
        wait
    }

    pub(crate) fn end_wait(&self, wait: &Wait) {
        self.waits.borrow_mut().remove(&wait.ticket);
        self.ended.notify_all();
    }

    /// The service answered `Lock` or `CancelWait`. There is one such request of a file at a time, so no unlock is
    /// under way.
    pub(crate) fn answered(&self, wait: &Wait, reply: &MetaReply) {
        match reply {
            MetaReply::Locked(_) => self.granted(wait, WaitEvent::Locked),
            MetaReply::Waiting => wait.happens(WaitEvent::Waiting),
            _ => {}
        }
    }

    fn granted(&self, wait: &Wait, event: WaitEvent) {
        let is_new = matches!(wait.state(), WaitState::Asking | WaitState::Queued);
        if is_new && event == WaitEvent::Locked {
            self.told(wait.ino, &wait.lock, &wait.lost);
        }
        wait.happens(event);
    }

    /// A notice came. That of a ticket which is not known (any more) means nothing: whoever gave it up has
    /// been told how it ended.
    pub(crate) fn heard(&self, notice: Notice) {
        let (Notice::Granted { ticket } | Notice::Refused { ticket }) = notice else { return };
        let wait = self.waits.borrow().get(&ticket).cloned();
        let Some(wait) = wait else { return };
        let is_unlocking = self.unlocking.borrow().contains_key(&(wait.ino, wait.lock.owner));
        match notice {
            Notice::Refused { .. } => wait.happens(WaitEvent::Refused),
            Notice::Granted { .. } if is_unlocking => {
                self.granted(&wait, WaitEvent::LockedUnclearly)
            }
            _ => self.granted(&wait, WaitEvent::Locked),
        }
    }

    /// Whether anything is held or waited for, so that the connection matters.
    pub(crate) fn is_used(&self) -> bool {
        !self.waits.borrow().is_empty() || !self.held.borrow().is_empty()
    }

    /// Waits until nothing is.
    pub(crate) async fn unused(&self) {
        self.ended.until(|| (!self.is_used()).then_some(())).await;
    }

    /// What this client holds, for a service that restarted.
    pub(crate) fn all_held(&self) -> Vec<(Ino, Lock)> {
        if planted!("client-lock-not-reclaimed") {
            return Vec::new();
        }
        let held = self.held.borrow();
        let ranges = held.iter().flat_map(|((ino, owner), holding)| {
            holding.held.iter().map(|Span { range, exclusive, pid }| {
                (*ino, Lock { owner: *owner, range: *range, exclusive: *exclusive, pid: *pid })
            })
        });
        ranges.collect()
    }

    /// The service knows nothing of what was queued.
    pub(crate) fn forgotten(&self) {
        for wait in self.waits.borrow().values() {
            wait.happens(WaitEvent::Forgotten);
        }
    }

    /// The number under which everything was held is no more; others may hold it.
    pub(crate) fn lose_all(&self) {
        let lost = std::mem::take(&mut *self.held.borrow_mut());
        let on_lost = self.on_lost.borrow().clone();
        for ((ino, _), holding) in lost {
            tracing::warn!(
                ino = ino.0,
                "a lock is lost with the lease; its files fail until they are closed"
            );
            holding.taken_through.iter().filter_map(Weak::upgrade).for_each(|mark| mark.set(true));
            if let Some(on_lost) = &on_lost {
                on_lost(ino);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_wire::lock::LockSort;

    const FILE: Ino = Ino(7);

    fn lock(start: u64, end: u64) -> Lock {
        let owner = LockOwner { sort: LockSort::Posix, id: 1 };
        Lock { owner, range: LockRange { start, end }, exclusive: true, pid: 1 }
    }

    #[test]
    fn a_wait_ends_once_however_often_it_is_told() {
        let locks = Locks::default();
        let wait = locks.begin_wait(FILE, &lock(0, 9), &LostMark::default());
        let granted = Notice::Granted { ticket: wait.ticket };
        // The notice overtakes the answer.
        locks.heard(granted.clone());
        assert_eq!(wait.state(), WaitState::Held);
        locks.answered(&wait, &MetaReply::Waiting);
        locks.heard(granted.clone());
        assert_eq!(wait.state(), WaitState::Held);
        assert_eq!(locks.all_held(), [(FILE, lock(0, 9))]);
        drop(locks.unlock(FILE, lock(0, 0).owner, LockRange::WHOLE));
        locks.heard(granted.clone());
        assert_eq!(locks.all_held(), []);
        locks.end_wait(&wait);
        assert!(!locks.is_used());
    }

    #[test]
    fn what_is_granted_during_an_unlock_is_asked_for_again() {
        let locks = Locks::default();
        let wait = locks.begin_wait(FILE, &lock(0, 9), &LostMark::default());
        locks.answered(&wait, &MetaReply::Waiting);
        let unlocking = locks.unlock(FILE, lock(0, 0).owner, LockRange { start: 5, end: 6 });
        locks.heard(Notice::Granted { ticket: wait.ticket });
        assert_eq!(wait.state(), WaitState::Unclear);
        drop(unlocking);
        assert_eq!(locks.all_held(), []);
    }

    #[test]
    fn what_a_refused_unlock_would_have_split_stays_whole() {
        let locks = Locks::default();
        locks.told(FILE, &lock(0, 9), &LostMark::default());
        let unlocking = locks.unlock(FILE, lock(0, 0).owner, LockRange { start: 5, end: 5 });
        assert_eq!(locks.all_held().len(), 2);
        unlocking.refused();
        assert_eq!(locks.all_held(), [(FILE, lock(0, 9))]);
    }

    #[test]
    fn only_files_that_took_a_lost_lock_are_marked() {
        let locks = Locks::default();
        let (taken, other) = (LostMark::default(), LostMark::default());
        let files: Rc<RefCell<Vec<Ino>>> = Rc::default();
        let heard = Rc::clone(&files);
        locks.set_on_lost(Rc::new(move |ino| heard.borrow_mut().push(ino)));
        locks.told(FILE, &lock(0, 9), &taken);
        locks.told(Ino(8), &lock(0, 9), &other);
        drop(locks.unlock(Ino(8), lock(0, 0).owner, LockRange::WHOLE));
        let waiting = locks.begin_wait(Ino(8), &lock(0, 0), &other);
        locks.answered(&waiting, &MetaReply::Waiting);
        locks.lose_all();
        locks.forgotten();
        assert!(taken.get() && !other.get());
        assert_eq!(*files.borrow(), [FILE]);
        assert_eq!(waiting.state(), WaitState::Forgotten);
    }
}
