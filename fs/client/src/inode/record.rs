//! What the metadata service is told of a file: size, time and components, once the objects are durable.

use super::{Inode, Session};
use crate::error::Error;
use crate::meta::UNAVAILABLE_WAIT;
use futures_util::future::{join, join_all};
use levada_base::{planted, reactor};
use levada_wire::attr::Attr;
use levada_wire::meta::{AttrChange, Caller, MetaFault, MetaReply, MetaRequest};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// How long a closed file waits for others before it is made durable.
const GATHER: Duration = Duration::from_millis(5);
/// How long after a durable write the service is told of its time, and of what is stored.
const RECORD_AFTER: Duration = Duration::from_secs(1);

/// Why the metadata service is told of what was written.
#[derive(Clone, Copy)]
pub(super) enum Why<'a> {
    /// Somebody waits until it is durable.
    Sync,
    /// A handle was given back; the cell notes that the service was told of that, too.
    Close(&'a Cell<bool>),
    /// Nobody has a handle any more.
    End,
}

/// What came of telling the metadata service.
enum Recorded {
    Done,
    /// A truncation came between: the size was that from before.
    Overtaken,
    /// Another client's truncation is under way.
    Refused,
}

impl Inode {
    /// Makes durable what was written here before this call.
    pub(crate) async fn sync(self: &Rc<Self>) -> Result<(), Error> {
        let inode = Rc::clone(self);
        // A task, so that the service is told nothing any more once the turn for that is given back, also when
        // the caller gives up; the next one is then told of an error.
        let recording = reactor::spawn(async move {
            let recorded = inode.record(Why::Sync).await;
            if let Err(error) = recorded {
                inode.failure.set(Some(error));
            }
            recorded
        });
        if let Err(error) = recording.await.unwrap_or(Err(Error::Closed)) {
            self.failure.set(None);
            return Err(error);
        }
        // The file itself may be new.
        self.core.meta.sync().await?;
        self.failure.take().map_or(Ok(()), Err)
    }

    /// Has the service told of durable writes, for whoever looks at the file: their callers need not wait for that.
    pub(super) fn record_soon(self: &Rc<Self>) {
        if self.recording.replace(true) {
            return;
        }
        let inode = Rc::downgrade(self);
        reactor::spawn(async move {
            loop {
                reactor::sleep(RECORD_AFTER).await;
                let Some(inode) = inode.upgrade() else { return };
                // A close tells it, too.
                if inode.handles.get() == 0 || !inode.is_dirty() {
                    return inode.recording.set(false);
                }
                inode.closing.set(inode.closing.get() + 1);
                if let Err(error) = inode.record(Why::Sync).await {
                    inode.failure.set(Some(error));
                }
                Rc::clone(&inode.core).let_go(inode);
            }
        });
    }

    /// COMMIT on the objects, then `CommitWrite`: durable for a sync; after a close together with the end
    /// of the session and the `Close`, if nobody uses the file any more.
    pub(super) async fn record(self: &Rc<Self>, why: Why<'_>) -> Result<(), Error> {
        loop {
            match self.record_unless_cut(why).await? {
                Recorded::Done => return Ok(()),
                Recorded::Overtaken => {}
                Recorded::Refused => reactor::sleep(UNAVAILABLE_WAIT).await,
            }
        }
    }

    async fn record_unless_cut(self: &Rc<Self>, why: Why<'_>) -> Result<Recorded, Error> {
        self.finish_cut().await?;
        self.ranges.passed(0, u64::MAX).await;
        let cuts = self.cuts.get();
        let writes = self.writes.get();
        let written_end = self.written_end.get();
        // Another client may have cut what was written here, so the objects are asked too.
        let recorded = self.recorded.get() >= writes;
        let (mut size, mut components, mut stored) = (0, self.written.get(), Vec::new());
        let doubtful = self.doubtful.get();
        let settled = self.components_in(components | doubtful).map(|component| {
            let (target, object) = (self.target(component), self.object(component));
            async move {
                if doubtful >> component & 1 == 1 {
                    // Nothing of what failed is kept to be sent again: what it left in this life of the
                    // target is there for good once it is durable.
                    target.commit_everything().await?;
                    let is_known = components >> component & 1 == 1;
                    if !is_known && target.stat(object).await?.is_none() {
                        return Ok((component, None));
                    }
                }
                let stat = async { if recorded { Ok(None) } else { target.stat(object).await } };
                let settled = async {
                    if planted!("client-size-before-commit") {
                        return Ok(());
                    }
                    target.settle(object).await
                };
                let (settled, stat) = join(settled, stat).await;
                settled?;
                Ok::<_, Error>((component, stat?))
            }
        });
        for settled in join_all(settled).await {
            if let (component, Some(stat)) = settled? {
                size = stat.size.max(size);
                components |= 1 << component;
                stored.push((component, stat.stored_bytes));
            }
        }
        let size = size.min(written_end);
        let _turn = self.size_turn.acquire(1).await;
        if self.cuts.get() != cuts && !planted!("client-records-over-a-cut") {
            return Ok(Recorded::Overtaken);
        }
        let session = self.session.get();
        // From here to `Ending` nothing can begin; later writes wait for the end.
        let end = !matches!(why, Why::Sync)
            && self.handles.get() == 0
            && self.ranges.is_idle()
            && self.writes.get() == writes
            && matches!(session, Session::Open(_));
        if self.recorded.get() >= writes && !end {
            return Ok(Recorded::Done);
        }
        if end {
            self.session.set(Session::Ending);
        }
        let (ino, mtime) = (self.ino, self.mtime.get());
        let request = MetaRequest::CommitWrite { ino, size, mtime, components, end, stored };
        let reply = match why {
            Why::Sync => self.core.meta.try_change_durably(request).await,
            Why::Close(_) | Why::End => {
                let untold = match why {
                    Why::Close(told) if end && !told.get() => Some(told),
                    _ => None,
                };
                let mut requests = vec![request];
                requests.extend(untold.map(|_| MetaRequest::Close { ino }));
                let replies = self.core.ends.send(&self.core.meta, requests).await;
                if let Some(told) = untold {
                    told.set(replies.is_ok());
                }
                replies.and_then(|replies| replies.into_iter().next().ok_or(Error::Dialect))
            }
        };
        let is_refused = reply == Ok(MetaReply::Failed(MetaFault::Unavailable));
        let result = reply.and_then(|reply| self.core.attr_of(reply));
        let is_taken = result.as_ref().is_ok_and(|attr| !attr.cut);
        if end {
            self.session.set(if is_taken { Session::Closed } else { session });
            self.session_changed.notify_all();
        }
        if is_refused {
            // Another client's truncation comes first.
            return Ok(Recorded::Refused);
        }
        if result == Err(Error::Meta(MetaFault::Stale)) {
            // The file is gone: nothing is left to be recorded.
            self.session.set(Session::Closed);
            self.session_changed.notify_all();
            self.recorded.set(self.recorded.get().max(writes));
            self.delete_remains();
        }
        result?;
        if !is_taken {
            if !matches!(self.session.get(), Session::Opening | Session::Ending) {
                // The service has one now, if it had not.
                self.session.set(Session::Open(self.core.meta.client()));
            }
            // Cut meanwhile by another client; or by this one, which did not hear of it. Sizes that others here have
            // asked for are from before that, too.
            self.cuts.set(self.cuts.get() + 1);
            self.uncut.set(true);
            return Ok(Recorded::Overtaken);
        }
        if self.writes.get() == writes {
            self.mtime.set(None);
            self.doubtful.set(self.doubtful.get() & !doubtful);
            if !recorded && self.unsure.replace(false) {
                self.written_end.set(size);
            }
        }
        self.recorded.set(self.recorded.get().max(writes));
        self.written.set(self.written.get() | components);
        self.components.set(self.components.get() | components);
        Ok(Recorded::Done)
    }

    /// The file is gone, for good: its number is never given again. Its objects may be back all the same: what a
    /// restart of their target lost is sent again from here, also after the housekeeper has deleted them.
    fn delete_remains(self: &Rc<Self>) {
        self.closing.set(self.closing.get() + 1);
        let inode = Rc::clone(self);
        reactor::spawn(async move {
            // Who holds the tail is told early that the name is gone, and it might come back with the node.
            if inode.core.meta.make_durable().await.is_err() {
                return Rc::clone(&inode.core).let_go(inode);
            }
            let reached = inode.written.get() | inode.doubtful.get();
            let deleted = join_all(inode.components_in(reached).map(|component| {
                let (target, object) = (inode.target(component), inode.object(component));
                async move { target.delete(object).await }
            }));
            if let Err(error) = deleted.await.into_iter().collect::<Result<(), Error>>() {
                let ino = inode.ino.0;
                tracing::warn!(ino, %error, "what was written to a deleted file may still take room");
            }
            Rc::clone(&inode.core).let_go(inode);
        });
    }

    /// What a close leaves to the background: everything durable, and the session ended when
    /// this was the last handle. Says whether the service was told of the close, too.
    pub(crate) async fn settle_after_close(self: &Rc<Self>) -> bool {
        if !self.is_unsettled() {
            return false;
        }
        if self.is_dirty() {
            // Files closed together share COMMITs.
            reactor::sleep(GATHER).await;
        }
        let told = Cell::new(false);
        self.record_in_background(Why::Close(&told)).await;
        told.get()
    }

    /// Ends the session of a file that nobody uses.
    pub(crate) async fn settle_unused(self: &Rc<Self>) {
        self.record_in_background(Why::End).await;
    }

    async fn record_in_background(self: &Rc<Self>, why: Why<'_>) {
        if let Err(error) = self.record(why).await {
            tracing::error!(ino = self.ino.0, %error, "a closed file could not be written");
            self.failure.set(Some(error));
        }
    }

    /// Changes attributes but the size. A time of modification takes its turn with what writes
    /// made here before tell the metadata service, and outdates theirs.
    pub(crate) async fn set_times(
        self: &Rc<Self>,
        caller: Caller,
        change: AttrChange,
    ) -> Result<Attr, Error> {
        let _turn = self.size_turn.acquire(1).await;
        let (asked_at, writes) = (self.changes(), self.writes.get());
        let request = MetaRequest::SetAttr { caller, ino: self.ino, change };
        let attr = self.core.attr_of(self.core.meta.change(request).await?)?;
        if self.writes.get() == writes {
            self.mtime.set(None);
        }
        self.complete(attr, asked_at).await
    }
}
