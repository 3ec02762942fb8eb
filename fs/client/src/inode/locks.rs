//! Locks of one file, as programs ask for them.
//!
//! What always holds:
//! - Requests about locks of one file are under way one at a time.
//! - Whoever gives up waiting is told so only when the service said that there is no lock.
//! - What was taken for somebody who does not wait for it any more is released again.
//! - What was taken through handles that are closed is released before the service is told of the last close, which would
//!   drop it there alone: this client would go on to say, after a restart, that it holds what others have by then.

use super::Inode;
use crate::error::Error;
use crate::locks::{LostMark, Wait, WaitState};
use crate::meta::UNAVAILABLE_WAIT;
use futures_util::future::{Either, join_all, select};
use levada_base::reactor::{self, JoinHandle};
use levada_base::sync::Notify;
use levada_wire::attr::Attr;
use levada_wire::lock::{Lock, LockOwner, LockRange};
use levada_wire::meta::{MetaFault, MetaReply, MetaRequest};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::future::Future;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker};

/// Ends a wait for a lock. All clones are the same.
#[derive(Clone, Default)]
pub struct Cancel(Rc<CancelState>);

#[derive(Default)]
struct CancelState {
    is_asked: Cell<bool>,
    asked: Notify,
}

impl Cancel {
    /// Asks for the end. The wait may end with the lock nevertheless.
    pub fn cancel(&self) {
        self.0.is_asked.set(true);
        self.0.asked.notify_all();
    }

    fn is_cancelled(&self) -> bool {
        self.0.is_asked.get()
    }

    async fn cancelled(&self) {
        self.0.asked.until(|| self.is_cancelled().then_some(())).await;
    }
}

/// What ends the wait of somebody who asked for a lock.
struct Ends {
    /// None: there is no wait.
    asked: Option<Cancel>,
    /// Nobody wants the answer any more.
    abandoned: Cancel,
    /// The last handle is closed: whatever came of it is undone by [`Inode::unlock_all`].
    closed: Cell<bool>,
}

impl Ends {
    fn is_due(&self) -> bool {
        self.asked.as_ref().is_some_and(Cancel::is_cancelled) || self.abandoned.is_cancelled()
    }

    async fn due(&self) {
        match &self.asked {
            Some(asked) => {
                select(pin!(asked.cancelled()), pin!(self.abandoned.cancelled())).await;
            }
            None => self.abandoned.cancelled().await,
        }
    }
}

/// A lock that is being taken for somebody.
pub(super) struct Taking {
    inode: Rc<Inode>,
    lock: Lock,
    ends: Ends,
    taken: RefCell<Option<Result<Attr, Error>>>,
}

/// Dropped when whoever asked has the answer, or does not want it any more.
struct Asker(Rc<Taking>);

impl Drop for Asker {
    fn drop(&mut self) {
        let taking = &self.0;
        taking.ends.abandoned.cancel();
        if let Some(Ok(_)) = taking.taken.take() {
            taking.undo();
        }
    }
}

impl Taking {
    /// Releases what nobody wants.
    fn undo(&self) {
        if self.ends.closed.get() {
            return;
        }
        let (inode, Lock { owner, range, .. }) = (Rc::clone(&self.inode), self.lock);
        reactor::spawn(async move {
            if let Err(error) = inode.unlock(owner, range).await {
                tracing::debug!(ino = inode.ino.0, %error, "a lock that nobody waits for stays");
            }
        });
    }
}

/// What comes of asking once.
enum Asked {
    Locked(Attr),
    /// Ask again: there is no lock.
    Again,
    /// Ask again: there may be one.
    Unclear,
}

impl Inode {
    /// Takes a lock, at once or, with `cancel`, when it is free; the attributes of the file from then or later. A
    /// task, so that nothing is left behind when the caller gives up.
    pub(crate) async fn lock(
        self: &Rc<Self>,
        lock: Lock,
        lost: &LostMark,
        cancel: Option<Cancel>,
    ) -> Result<Attr, Error> {
        if self.handles.get() == 0 {
            return Err(MetaFault::NotOpen.into());
        }
        let (abandoned, closed) = (Cancel::default(), Cell::default());
        let taking = Rc::new(Taking {
            inode: Rc::clone(self),
            lock,
            ends: Ends { asked: cancel, abandoned, closed },
            taken: RefCell::default(),
        });
        let asker = Asker(Rc::clone(&taking));
        self.note_taking(&taking);
        self.closing.set(self.closing.get() + 1);
        let lost = Rc::clone(lost);
        let task = reactor::spawn(async move {
            let inode = &taking.inode;
            let taken = inode.take_lock(&taking.lock, &lost, &taking.ends).await;
            if taken.is_ok() && taking.ends.abandoned.is_cancelled() {
                taking.undo();
            }
            *taking.taken.borrow_mut() = Some(taken);
            Rc::clone(&inode.core).let_go(Rc::clone(inode));
        });
        let _ = task.await;
        if asker.0.ends.closed.get() {
            return Err(MetaFault::NotOpen.into());
        }
        asker.0.taken.take().unwrap_or(Err(Error::Closed))
    }

    fn note_taking(&self, taking: &Rc<Taking>) {
        let mut takings = self.takings.borrow_mut();
        takings.retain(|taking| taking.strong_count() > 0);
        takings.push(Rc::downgrade(taking));
    }

    async fn take_lock(
        self: &Rc<Self>,
        lock: &Lock,
        lost: &LostMark,
        ends: &Ends,
    ) -> Result<Attr, Error> {
        let locks = &self.core.meta.locks;
        let mut is_unclear = false;
        loop {
            // A ticket of its own each time: what is said of an earlier one is void.
            let wait = locks.begin_wait(self.ino, lock, lost);
            let asked = self.ask_lock(lock, &wait, ends, is_unclear).await;
            locks.end_wait(&wait);
            match asked? {
                Asked::Locked(attr) => return Ok(attr),
                Asked::Again => is_unclear = false,
                Asked::Unclear => is_unclear = true,
            }
        }
    }

    async fn ask_lock(
        self: &Rc<Self>,
        lock: &Lock,
        wait: &Rc<Wait>,
        ends: &Ends,
        is_unclear: bool,
    ) -> Result<Asked, Error> {
        let meta = &self.core.meta;
        let turn = self.lock_turn.acquire(1).await;
        if ends.closed.get() || ends.is_due() && !is_unclear {
            return Err(Error::Interrupted);
        }
        let asked_at = self.changes();
        let ticket = ends.asked.is_some().then_some(wait.ticket);
        meta.stay_connected();
        let request = MetaRequest::Lock { ino: self.ino, lock: *lock, ticket };
        let reply = meta.try_change_seen(request, self.sees_for(wait)).await?;
        drop(turn);
        match reply {
            MetaReply::Locked(attr) => {
                Ok(Asked::Locked(self.attr_under_lock(*attr, asked_at).await))
            }
            MetaReply::Waiting => self.queued(lock, wait, ends).await,
            // Not while the turn is held: what others release must get through.
            MetaReply::Failed(MetaFault::Unavailable) => {
                reactor::sleep(UNAVAILABLE_WAIT).await;
                Ok(if is_unclear { Asked::Unclear } else { Asked::Again })
            }
            MetaReply::Failed(fault) => Err(fault.into()),
            _ => Err(Error::Dialect),
        }
    }

    /// The ticket is queued; waits for its end.
    async fn queued(
        self: &Rc<Self>,
        lock: &Lock,
        wait: &Rc<Wait>,
        ends: &Ends,
    ) -> Result<Asked, Error> {
        let ended = match select(pin!(wait.ended()), pin!(ends.due())).await {
            Either::Left((state, _)) => state,
            Either::Right(_) => {
                let _turn = self.lock_turn.acquire(1).await;
                if !ends.closed.get() {
                    self.end_wait(wait).await?;
                }
                wait.state()
            }
        };
        if ends.closed.get() {
            return Err(Error::Interrupted);
        }
        match ended {
            WaitState::Held => {
                let asked_at = self.changes();
                let reply = self.core.meta.read(&MetaRequest::GetAttr { ino: self.ino }).await;
                match reply.and_then(|reply| self.core.attr_of(reply)) {
                    Ok(attr) => Ok(Asked::Locked(self.attr_under_lock(attr, asked_at).await)),
                    Err(error) => {
                        // Whoever asked is told that there is none.
                        let _ = self.unlock(lock.owner, lock.range).await;
                        Err(error)
                    }
                }
            }
            WaitState::Refused => Err(MetaFault::Deadlock.into()),
            WaitState::Unclear => Ok(Asked::Unclear),
            WaitState::Forgotten if !ends.is_due() => Ok(Asked::Again),
            // The service says that there is no lock.
            WaitState::Forgotten | WaitState::Queued | WaitState::Asking => Err(Error::Interrupted),
        }
    }

    /// Ends a wait that is queued; it may end with the lock.
    async fn end_wait(&self, wait: &Rc<Wait>) -> Result<(), Error> {
        if wait.state() != WaitState::Queued {
            return Ok(());
        }
        let end = MetaRequest::CancelWait { ino: self.ino, ticket: wait.ticket };
        match self.core.meta.change_seen(end, self.sees_for(wait)).await? {
            MetaReply::Done | MetaReply::Locked(_) => Ok(()),
            MetaReply::Failed(fault) => Err(fault.into()),
            _ => Err(Error::Dialect),
        }
    }

    fn sees_for(&self, wait: &Rc<Wait>) -> impl FnOnce(&MetaReply) + 'static {
        let (locks, wait) = (Rc::clone(&self.core.meta.locks), Rc::clone(wait));
        move |reply| locks.answered(&wait, reply)
    }

    /// What others wrote before they released the lock must be seen under it. Where the objects cannot be asked
    /// the lock is held all the same, and the attributes say that others write.
    async fn attr_under_lock(self: &Rc<Self>, attr: Attr, asked_at: u64) -> Attr {
        let ctime = attr.ctime;
        let uncertain = Attr { writers: true, others: true, ..attr.clone() };
        // The service's time, without what was written here since: it goes with the counter.
        let attr = self.complete(attr, asked_at).await.unwrap_or(uncertain);
        Attr { ctime, ..attr }
    }

    /// Releases a range. A task, carried to its end also when the caller gives up.
    pub(crate) async fn unlock(
        self: &Rc<Self>,
        owner: LockOwner,
        range: LockRange,
    ) -> Result<(), Error> {
        self.closing.set(self.closing.get() + 1);
        let inode = Rc::clone(self);
        let task = reactor::spawn(async move {
            let unlocked = inode.unlock_here(owner, range).await;
            Rc::clone(&inode.core).let_go(inode);
            unlocked
        });
        task.await.unwrap_or(Err(Error::Closed))
    }

    async fn unlock_here(&self, owner: LockOwner, range: LockRange) -> Result<(), Error> {
        let _turn = self.lock_turn.acquire(1).await;
        self.unlock_in_turn(owner, range).await
    }

    async fn unlock_in_turn(&self, owner: LockOwner, range: LockRange) -> Result<(), Error> {
        let meta = &self.core.meta;
        let unlocking = meta.locks.unlock(self.ino, owner, range);
        match meta.change(MetaRequest::Unlock { ino: self.ino, owner, range }).await? {
            MetaReply::Done => Ok(()),
            MetaReply::Failed(fault) => {
                unlocking.refused();
                Err(fault.into())
            }
            _ => Err(Error::Dialect),
        }
    }

    /// The last handle is closed: a task that ends what is waited for and releases what is held. `None`: there is
    /// nothing. It has its turn before whatever is asked for from now on, through a handle that is opened next.
    pub(crate) fn unlock_all(self: &Rc<Self>) -> Option<JoinHandle<()>> {
        let takings = self.takings.take();
        let takings: Vec<Rc<Taking>> = takings.iter().filter_map(Weak::upgrade).collect();
        if takings.is_empty() && self.core.meta.locks.owners(self.ino).is_empty() {
            return None;
        }
        for taking in &takings {
            taking.ends.closed.set(true);
            taking.ends.abandoned.cancel();
        }
        let turns = Rc::clone(&self.lock_turn);
        let mut turn = Box::pin(async move { turns.acquire(1).await });
        // Takes its place in the line. The task looks again at its beginning.
        let place = turn.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        let inode = Rc::clone(self);
        Some(reactor::spawn(async move {
            let _turn = match place {
                Poll::Ready(turn) => turn,
                Poll::Pending => turn.await,
            };
            let locks = &inode.core.meta.locks;
            let waits = locks.waits(inode.ino);
            let ended = join_all(waits.iter().map(|wait| inode.end_wait(wait))).await;
            let mut owners: BTreeSet<LockOwner> = locks.owners(inode.ino);
            // Of these it may not be clear whether they hold something.
            owners.extend(takings.iter().map(|taking| taking.lock.owner));
            let unlock = |owner| inode.unlock_in_turn(owner, LockRange::WHOLE);
            let released = join_all(owners.into_iter().map(unlock)).await;
            if let Err(error) = ended.into_iter().chain(released).collect::<Result<(), Error>>() {
                tracing::debug!(ino = inode.ino.0, %error, "a lock of a closed file stays");
            }
        }))
    }

    pub(crate) fn has_locks(&self, owner: LockOwner) -> bool {
        self.core.meta.locks.has_any(self.ino, owner)
    }

    pub(crate) async fn test_lock(&self, lock: Lock) -> Result<Option<Lock>, Error> {
        let test = MetaRequest::TestLock { ino: self.ino, lock };
        match self.core.meta.read(&test).await? {
            MetaReply::Tested(in_the_way) => Ok(in_the_way),
            MetaReply::Failed(fault) => Err(fault.into()),
            _ => Err(Error::Dialect),
        }
    }
}
