//! Room that is about to come: what deleted files still take counts as free, and who writes into it waits for it.
//!
//! What always holds:
//! - A change that a full target refused is tried again only while its bytes are promised, and what is still to be
//!   won back becomes less: with a sequence of its own, since a refusal is remembered.
//! - Nobody waits for longer than [`STUCK`] while nothing moves.

use crate::client::Core;
use crate::error::Error;
use crate::target::ObjectTarget;
use levada_base::ids::{Ino, ObjectId};
use levada_base::reactor::{self, Instant};
use levada_base::sync::Notify;
use levada_wire::meta::{MetaReply, MetaRequest};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

/// A refused change is tried again after this.
const AGAIN: Duration = Duration::from_millis(50);
/// Room of which none came for so long does not come.
const STUCK: Duration = Duration::from_secs(5);

/// What the metadata service says of space.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MetaSpace {
    pub(crate) inodes: u64,
    pub(crate) inodes_free: u64,
    /// What deleted files hold that nobody is at.
    pub(crate) doomed_bytes: u64,
    /// And of those that are being deleted.
    pub(crate) deleting_bytes: u64,
    /// Counts beginnings and ends of deletions.
    pub(crate) deletions: u64,
}

/// Closes that the metadata service has not been told of yet.
#[derive(Default)]
pub(crate) struct Closes {
    begun: Cell<u64>,
    under_way: RefCell<BTreeMap<u64, Ino>>,
    changed: Notify,
}

impl Closes {
    pub(crate) fn begin(&self, ino: Ino) -> u64 {
        let number = self.begun.get() + 1;
        self.begun.set(number);
        self.under_way.borrow_mut().insert(number, ino);
        number
    }

    pub(crate) fn end(&self, number: u64) {
        self.under_way.borrow_mut().remove(&number);
        self.changed.notify_all();
    }

    /// Waits for those that have begun by now, but no longer than `limit`, nor for those of `but`, which may wait for
    /// the caller.
    pub(crate) async fn passed(&self, limit: Duration, but: Option<Ino>) {
        let begun = self.begun.get();
        let passed = self.changed.until(|| {
            let under_way = self.under_way.borrow();
            let mut waited_for = under_way.range(..=begun).filter(|(_, ino)| Some(**ino) != but);
            waited_for.next().is_none().then_some(())
        });
        let _ = reactor::timeout(limit, passed).await;
    }
}

/// Somebody who was refused.
struct Waiting {
    /// The least that was seen to be still to come, and when.
    coming_bytes: u64,
    since: Instant,
    /// He has tried again although nothing is to come.
    tried_last: bool,
}

impl Core {
    pub(crate) async fn space_now(&self) -> Result<MetaSpace, Error> {
        match self.meta.read(&MetaRequest::SpaceNow).await? {
            MetaReply::SpaceNow {
                inodes,
                inodes_free,
                doomed_bytes,
                deleting_bytes,
                deletions,
            } => Ok(MetaSpace { inodes, inodes_free, doomed_bytes, deleting_bytes, deletions }),
            MetaReply::Failed(fault) => Err(fault.into()),
            _ => Err(Error::Dialect),
        }
    }

    /// Makes a change of an object that needs room for at most `bytes` bytes, and waits for room that is promised.
    pub(crate) async fn with_room<F: Future<Output = Result<(), Error>>>(
        &self,
        target: &Rc<ObjectTarget>,
        (object, bytes): (ObjectId, u64),
        change: impl Fn() -> F,
    ) -> Result<(), Error> {
        let mut waiting = None;
        loop {
            match change().await {
                Err(Error::Full) => {}
                done => return done,
            }
            if waiting.is_none() {
                // A file that was deleted while its close was on its way is not counted yet.
                self.closes.passed(STUCK, Some(object.ino)).await;
            }
            if !self.room_comes(target, bytes, &mut waiting).await? {
                return Err(Error::Full);
            }
            reactor::sleep(AGAIN).await;
        }
    }

    async fn room_comes(
        &self,
        target: &Rc<ObjectTarget>,
        bytes: u64,
        waiting: &mut Option<Waiting>,
    ) -> Result<bool, Error> {
        let meta = self.space_now().await?;
        let space = target.space().await?;
        let doomed_bytes = meta.doomed_bytes + meta.deleting_bytes;
        let coming_bytes = doomed_bytes + space.coming_bytes;
        let (since, tried_last) = (reactor::now(), false);
        let waiting = waiting.get_or_insert(Waiting { coming_bytes, since, tried_last });
        if coming_bytes < waiting.coming_bytes {
            (waiting.coming_bytes, waiting.since) = (coming_bytes, since);
        }
        if space.free_bytes + doomed_bytes < bytes || waiting.since.elapsed() > STUCK {
            return Ok(false);
        }
        // It may have come just now.
        Ok(coming_bytes > 0 || !std::mem::replace(&mut waiting.tried_last, true))
    }
}
