//! A file that other clients write, too.
//!
//! A client that has a file open takes for granted that nobody else changes its data, until it is told, which is before
//! another's first write or change of the size is carried out; or, with its own open or its own first write, that another one does already.
//! From then on, until its last handle is closed, the file is *shared* here: who caches what was read of it does so no more, and
//! appends take turns with those of all clients ([`LockSort::Turn`]): the end is asked of the objects, and what is
//! appended is durable before the next one's turn, as that one could else not see it after a restart of the node.
//!
//! What always holds: of two clients one of which writes none takes for granted that it is alone.

use super::{Inode, Session};
use crate::error::Error;
use crate::locks::LostMark;
use futures_util::future::{LocalBoxFuture, join_all};
use levada_base::IoVec;
use levada_base::reactor;
use levada_wire::lock::{Lock, LockOwner, LockRange, LockSort};
use std::rc::Rc;

/// A turn at the end of a shared file; it is over when this is dropped.
struct Turn {
    inode: Rc<Inode>,
    owner: LockOwner,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let (inode, owner) = (Rc::clone(&self.inode), self.owner);
        reactor::spawn(async move {
            if let Err(error) = inode.unlock(owner, LockRange::WHOLE).await {
                tracing::debug!(ino = inode.ino.0, %error, "a turn stays until the last close");
            }
        });
    }
}

impl Inode {
    pub(crate) fn is_shared(&self) -> bool {
        self.shared.get()
    }

    /// A handle more is opened; others may write by now, or not.
    pub(crate) fn opened(&self, is_shared: bool) {
        let is_first = self.handles.get() == 0;
        self.shared.set(is_shared || !is_first && self.shared.get());
        self.handles.set(self.handles.get() + 1);
    }

    /// Another client is about to write: what ends when everything appended here is where that one finds it.
    pub(crate) fn becomes_shared(self: &Rc<Self>) -> LocalBoxFuture<'static, ()> {
        self.shared.set(true);
        self.closing.set(self.closing.get() + 1);
        let inode = Rc::clone(self);
        Box::pin(async move {
            drop(inode.append_turn.acquire(1).await);
            if inode.appended.get()
                && let Err(error) = inode.settle_objects().await
            {
                tracing::warn!(ino = inode.ino.0, %error, "what was appended is not durable");
            }
            Rc::clone(&inode.core).let_go(inode);
        })
    }

    /// Writes behind the last byte; says where that is.
    pub(crate) async fn append(self: &Rc<Self>, data: IoVec) -> Result<u64, Error> {
        loop {
            // Not while the turn is held: another client that begins waits for it, and this one may wait for that.
            self.begin_session().await?;
            let turn = self.append_turn.acquire(1).await;
            if self.shared.get() {
                break;
            }
            if self.session.get() != Session::Open(self.core.meta.client()) {
                continue;
            }
            // Who was not heard of for so long may have missed that it is not alone any more.
            if !self.core.meta.is_in_touch() && self.core.attr(self.ino).await?.others {
                self.shared.set(true);
                break;
            }
            if self.unsure.get() {
                self.core.attr(self.ino).await?;
            }
            let at = self.size.get();
            self.appended.set(true);
            self.write(at, data).await?;
            drop(turn);
            return Ok(at);
        }
        let _turn = self.turn().await?;
        let at = self.core.attr(self.ino).await?.size;
        self.write(at, data).await?;
        self.settle_objects().await?;
        Ok(at)
    }

    async fn turn(self: &Rc<Self>) -> Result<Turn, Error> {
        let owner = LockOwner { sort: LockSort::Turn, id: self.core.next_turn() };
        // A file whose turn is lost does not fail: the next append takes another.
        let lost = LostMark::default();
        let lock = Lock { owner, range: LockRange::WHOLE, exclusive: true, pid: 0 };
        self.lock(lock, &lost, Some(Default::default())).await?;
        Ok(Turn { inode: Rc::clone(self), owner })
    }

    /// What was written here survives a restart of the node.
    async fn settle_objects(&self) -> Result<(), Error> {
        let reached = self.written.get() | self.doubtful.get();
        let settled = self.components_in(reached).map(|component| {
            let (target, object) = (self.target(component), self.object(component));
            async move { target.settle(object).await }
        });
        join_all(settled).await.into_iter().collect()
    }
}
