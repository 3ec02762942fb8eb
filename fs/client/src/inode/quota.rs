//! What may be added to a file: where bytes are limited, a write first gets what it may add, from the metadata service.
//!
//! What always holds:
//! - Nothing is written that may add more than was granted; so a program hears of a limit from `write`, never from
//!   `fsync` or `close`.
//! - Before more is asked for, the service is told what the file holds, so that nothing counts twice.
//! - What only takes the place of other bytes needs no grant.

use super::record::Why;
use super::{Inode, Session};
use crate::error::Error;
use levada_base::reactor;
use levada_wire::meta::{MetaFault, MetaReply, MetaRequest};
use std::rc::Rc;
use std::time::Duration;

/// Asked for at once, so that there is not a question for every write.
const WANTED_BYTES: u64 = 256 << 20;
/// Others may give back what they were granted; asked again after this, for so long.
const AGAIN: Duration = Duration::from_millis(500);
const PATIENCE: Duration = Duration::from_secs(6);
/// What is left of a grant goes back when nothing was written for so long.
const IDLE: Duration = Duration::from_secs(2);

impl Inode {
    /// Waits until `bytes` bytes may be written from `offset` on. Not to be called by who has a turn.
    pub(super) async fn admit(self: &Rc<Self>, offset: u64, bytes: u64) -> Result<(), Error> {
        self.finish_cut().await?;
        self.begin_session().await?;
        if !self.core.meta.is_limited() || self.spend(bytes) {
            return Ok(());
        }
        match self.grant(bytes).await {
            Err(Error::Meta(MetaFault::Quota)) => {}
            granted => return granted,
        }
        let replaced = self.data_bytes(offset, offset + bytes).await?;
        let grows = bytes.saturating_sub(replaced);
        if grows == 0 { Ok(()) } else { self.grant(grows).await }
    }

    fn spend(&self, bytes: u64) -> bool {
        let left = self.allowance.get().and_then(|left| match left {
            u64::MAX => Some(left),
            _ => left.checked_sub(bytes),
        });
        if left.is_some() {
            self.allowance.set(left);
        }
        left.is_some()
    }

    /// Gets so much, and spends it.
    async fn grant(self: &Rc<Self>, need: u64) -> Result<(), Error> {
        let begun = reactor::now();
        loop {
            if self.is_dirty() {
                self.record(Why::Sync).await?;
            }
            let bytes = self.ask_for(need, WANTED_BYTES.max(need)).await?;
            if bytes >= need {
                self.allowance.set(Some(bytes));
                if bytes < u64::MAX {
                    self.give_back_when_idle();
                }
                self.spend(need);
                return Ok(());
            }
            if begun.elapsed() > PATIENCE {
                return Err(MetaFault::Quota.into());
            }
            reactor::sleep(AGAIN).await;
        }
    }

    async fn ask_for(&self, need: u64, want: u64) -> Result<u64, Error> {
        match self.core.meta.read(&MetaRequest::Grant { ino: self.ino, need, want }).await? {
            MetaReply::Granted { bytes } => Ok(bytes),
            MetaReply::Failed(fault) => Err(fault.into()),
            _ => Err(Error::Dialect),
        }
    }

    /// Bytes of data between two places.
    async fn data_bytes(self: &Rc<Self>, start: u64, end: u64) -> Result<u64, Error> {
        let (mut at, mut sum) = (start, 0);
        while at < end {
            let found = self.data_ranges(at, 64).await?;
            let upto = found.upto.min(end);
            let within = |range: &std::ops::Range<u64>| {
                range.end.min(upto).saturating_sub(range.start.max(at))
            };
            sum += found.ranges.iter().map(within).sum::<u64>();
            at = upto;
        }
        Ok(sum)
    }

    fn give_back_when_idle(self: &Rc<Self>) {
        if self.giving_back.replace(true) {
            return;
        }
        self.closing.set(self.closing.get() + 1);
        let inode = Rc::clone(self);
        reactor::spawn(async move {
            loop {
                let writes = inode.writes.get();
                reactor::sleep(IDLE).await;
                let is_open = matches!(inode.session.get(), Session::Open(_));
                let has_left =
                    inode.allowance.get().is_some_and(|left| left > 0 && left < u64::MAX);
                if !is_open || !has_left || inode.handles.get() == 0 {
                    break;
                }
                if inode.writes.get() != writes {
                    continue;
                }
                inode.allowance.set(Some(0));
                let told = if inode.is_dirty() { inode.record(Why::Sync).await } else { Ok(()) };
                if told.is_ok() {
                    // Should it fail, the rest comes back with the end of the session.
                    let _ = inode.ask_for(0, 0).await;
                }
                break;
            }
            inode.giving_back.set(false);
            Rc::clone(&inode.core).let_go(inode);
        });
    }
}
