//! Truncations: the metadata service has the new size, the objects follow, and then it is told.
//!
//! A client whose lease ended has lost its truncations to the housekeeper, and others may have written since where
//! it would cut. So an object is cut only while the service is certain to know this client under the number under
//! which the truncation was begun; under another it is asked first whose that is now. (A restart of the service
//! takes no number and no pending cut away.) Two ways are left in which an object may be cut too late: a request that
//! was given to a connection in time and arrives after more than a quarter of the lease, because the process, its
//! machine or the network stood still just then, or its target found no room for it; and a cut that was carried out, that its target lost in a restart, and
//! that is sent again, as everything that was lost.

use super::{Inode, Session};
use crate::error::Error;
use crate::meta::UNAVAILABLE_WAIT;
use crate::target::ObjectTarget;
use futures_util::future::{Either, join_all, select};
use levada_base::ids::ObjectId;
use levada_base::sync::Permit;
use levada_base::{planted, reactor};
use levada_wire::attr::Attr;
use levada_wire::meta::{AttrChange, Caller, MetaFault, MetaReply, MetaRequest};
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// A truncation that failed half-way is tried again after this.
const CUT_AGAIN: Duration = Duration::from_secs(1);

/// Under what a truncation was begun.
#[derive(Clone, Copy)]
struct Begun {
    /// The client's number.
    client: u64,
    /// How often the service had lost the tail.
    losses: u64,
}

/// Whether a truncation still was this client's to carry out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ours {
    Yes,
    /// The client has another number now.
    Perhaps,
}

/// A truncation under way.
struct Cutting<'a> {
    of: &'a Inode,
    _turn: Permit,
}

impl Drop for Cutting<'_> {
    fn drop(&mut self) {
        self.of.cuts.set(self.of.cuts.get() + 1);
    }
}

impl Inode {
    /// Sets the size: at the metadata service, then of the objects. Takes its turn with writes.
    pub(crate) async fn truncate(
        self: &Rc<Self>,
        caller: Caller,
        change: AttrChange,
    ) -> Result<Attr, Error> {
        let mut asked_as = None;
        loop {
            self.finish_cut().await?;
            let turn = self.ranges.write(0, u64::MAX).await;
            let size_turn = self.begin_cut().await;
            let begun = self.begun();
            // "Unavailable" is also said of what was done and could not be made durable then.
            if *asked_as.get_or_insert(begun.client) != begun.client {
                return Err(Error::InDoubt);
            }
            let request = MetaRequest::SetAttr { caller, ino: self.ino, change };
            let reply = self.core.meta.try_change(request).await;
            // Done perhaps, all the same.
            let reply = reply.inspect_err(|_| self.uncut.set(true))?;
            if reply != MetaReply::Failed(MetaFault::Unavailable) {
                let attr = self.core.attr_of(reply)?;
                self.uncut.set(attr.cut);
                if self.cut_objects(&attr, begun, false, &size_turn).await? == Ours::Yes {
                    return Ok(attr);
                }
                drop((turn, size_turn));
                self.finish_cut().await?;
                // The size was set; it was another one who saw to the objects, or will.
                let attr = self.core.attr(self.ino).await?;
                let is_lost = self.core.meta.tail_losses() != begun.losses;
                return if is_lost { Err(Error::Lost) } else { Ok(attr) };
            }
            // Another client's truncation is under way, or one of this client that it did not hear of.
            self.uncut.set(true);
            drop((turn, size_turn));
            reactor::sleep(UNAVAILABLE_WAIT).await;
        }
    }

    /// True when a truncation ended half-way that no task sees to; whoever is told so calls
    /// [`Inode::finish_cut_patiently`].
    pub(crate) fn takes_over_cut(&self) -> bool {
        self.uncut.get() && !self.finishing.replace(true)
    }

    /// Until a truncation that failed has been carried to its end: others wait for it.
    pub(crate) async fn finish_cut_patiently(self: &Rc<Self>) {
        let mut is_told = false;
        while let Err(error) = self.finish_cut().await {
            if !is_told {
                let ino = self.ino.0;
                tracing::warn!(ino, %error, "a truncation ended half-way; it is tried again each second, and others wait for it");
            }
            is_told = true;
            reactor::sleep(CUT_AGAIN).await;
        }
        self.finishing.set(false);
    }

    /// Carries a truncation to its end that was left half-way. Not to be called by who has a turn.
    pub(super) async fn finish_cut(self: &Rc<Self>) -> Result<(), Error> {
        if !self.uncut.get() {
            return Ok(());
        }
        let inode = Rc::clone(self);
        let finishing = reactor::spawn(async move {
            let _turn = inode.ranges.write(0, u64::MAX).await;
            let size_turn = inode.begin_cut().await;
            while inode.uncut.get() {
                let begun = inode.begun();
                let asked = inode.core.meta.read(&MetaRequest::GetAttr { ino: inode.ino }).await?;
                match inode.core.attr_of(asked) {
                    Ok(attr) if attr.cut && !attr.others => {
                        inode.cut_objects(&attr, begun, true, &size_turn).await?;
                    }
                    // It was lost with the tail, or it is another's now; or the file is gone.
                    Ok(_) | Err(Error::Meta(MetaFault::Stale)) => inode.uncut.set(false),
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        });
        finishing.await.unwrap_or(Err(Error::Closed))
    }

    /// To be asked before the request that begins a truncation, or says that one is this client's.
    fn begun(&self) -> Begun {
        let meta = &self.core.meta;
        Begun { client: meta.client(), losses: meta.tail_losses() }
    }

    /// No size from before goes to the metadata service any more.
    async fn begin_cut(&self) -> Cutting<'_> {
        let turn = self.size_turn.acquire(1).await;
        self.cuts.set(self.cuts.get() + 1);
        Cutting { of: self, _turn: turn }
    }

    /// The metadata service has set the size; the objects follow, unless others may have seen to them.
    ///
    /// `writers` says here that other clients have written: then every object is asked, and also when an earlier
    /// attempt ended half-way; else those that are known. None is made, and none that is short enough is touched.
    async fn cut_objects(
        self: &Rc<Self>,
        attr: &Attr,
        begun: Begun,
        again: bool,
        _turn: &Cutting<'_>,
    ) -> Result<Ours, Error> {
        let size = attr.size;
        let here = self.written.get() | self.doubtful.get();
        let known = attr.components | self.components.get() | here;
        // A session of which this client knows nothing is from before a loss.
        let is_unknown = known == 0 && self.session.get() == Session::Closed;
        let asked =
            if again || attr.writers || is_unknown { self.every_component() } else { known };
        if attr.cut {
            if asked != 0 {
                // What is cut off must not come back with the old size.
                self.core.meta.make_durable().await?;
            }
            if self.core.meta.tail_losses() != begun.losses {
                return Err(Error::Lost);
            }
            let cuts = self.components_in(asked).map(|component| {
                let (target, object) = (self.target(component), self.object(component));
                async move {
                    if planted!("client-objects-not-cut") {
                        return Ok(Some((component, 0)));
                    }
                    let stat = target.stat(object).await?;
                    let is_longer = stat.is_some_and(|stat| stat.size > size);
                    if is_longer
                        && self.cut_one(&target, object, size, begun).await? == Ours::Perhaps
                    {
                        return Ok(None);
                    }
                    if is_longer || again {
                        target.settle(object).await?;
                    }
                    let left = match stat {
                        _ if size == 0 => 0,
                        Some(_) if is_longer => {
                            target.stat(object).await?.map_or(0, |stat| stat.stored_bytes)
                        }
                        stat => stat.map_or(0, |stat| stat.stored_bytes),
                    };
                    Ok(Some((component, left)))
                }
            });
            let cuts = join_all(cuts).await.into_iter().collect::<Result<Vec<_>, Error>>()?;
            // Of each component what it holds now; nothing where that is no more for this client to say.
            let cuts: Option<Vec<(u32, u64)>> = cuts.into_iter().collect();
            let Some(stored) = cuts else { return Ok(Ours::Perhaps) };
            // Durable: a cut that stays pending holds up everybody, and is made again when we die.
            let truncated = MetaRequest::Truncated { ino: self.ino, size, stored };
            match self.core.meta.change_durably(truncated).await? {
                MetaReply::Done => {}
                reply => self.core.attr_of(reply).map(drop)?,
            }
            if self.core.meta.client() != begun.client {
                return Ok(Ours::Perhaps);
            }
        }
        self.uncut.set(false);
        // The service has set the time too; no write came between.
        self.mtime.set(None);
        self.changes.set(self.changes.get() + 1);
        self.size.set(size);
        self.written_end.set(self.written_end.get().min(size));
        Ok(Ours::Yes)
    }

    /// Cuts an object, while that is certain to be this client's to do.
    async fn cut_one(
        &self,
        target: &Rc<ObjectTarget>,
        object: ObjectId,
        size: u64,
        begun: Begun,
    ) -> Result<Ours, Error> {
        while let Some(left) = self.core.meta.certain_as(begun.client).await? {
            // The limit first: who wakes from a long sleep must not send before noticing it.
            let limit = pin!(reactor::sleep(left));
            let cut = pin!(target.truncate(object, size));
            if let Either::Right((cut, _)) = select(limit, cut).await {
                return cut.map(|()| Ours::Yes);
            }
        }
        Ok(Ours::Perhaps)
    }
}
