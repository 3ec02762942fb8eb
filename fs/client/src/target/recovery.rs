//! What a target lost when it restarted is sent again.
//!
//! What always holds:
//! - Only what was lost is sent again. What survived may have been written over since, durably, by another
//!   client, and must not come back over that.
//! - Changes whose order matters arrive in the order of their first acknowledgements.
//! - A target that restarts meanwhile is sent everything of which it does not say that it survived.

use super::{ObjectTarget, UNAVAILABLE_WAIT};
use crate::error::Error;
use crate::unstable::Kept;
use futures_util::future::join_all;
use levada_base::ids::{BootVerifier, Seq};
use levada_base::reactor::Instant;
use levada_base::{planted, probe, reactor};
use levada_wire::frame::{Frame, decode_body, flags};
use levada_wire::object::{ObjectFault, ObjectReply, ObjectRequest, Restarted, Stability};
use levada_wire::rpc::{Call, RpcError};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// Changes that are sent again at the same time.
pub(super) const BATCH: usize = 32;
/// So long a recovery, in all, asks a target again that has no room for what it once acknowledged. The
/// target keeps room for this, so that should not happen; nothing else is sent meanwhile.
const FULL_MAX: Duration = Duration::from_secs(60);
const FULL_WAIT: Duration = Duration::from_millis(500);

/// A target restarted.
#[derive(Clone, Copy)]
pub(super) struct NewLife {
    verifier: BootVerifier,
    /// Of the life that the request named, the changes up to here are still there.
    survived: Seq,
}

impl NewLife {
    pub(super) fn told_by(frame: &Frame) -> Result<Self, Error> {
        let Restarted { survived } = decode_body(&frame.body).map_err(|_| Error::Dialect)?;
        let survived = if planted!("client-survivors-sent-again") { Seq(0) } else { survived };
        Ok(Self { verifier: frame.header.verifier, survived })
    }
}

/// A change to be sent again.
struct Pending {
    /// `None`: nothing is to be done for it any more.
    kept: Option<Kept>,
    /// The target took it in its present life.
    done: Option<Seq>,
}

impl Pending {
    fn new(kept: Kept) -> Self {
        Self { kept: Some(kept), done: None }
    }

    /// The life ended that it may have been sent to.
    fn begin_again(&mut self, survived: Seq) {
        if self.done.take().is_some_and(|seq| seq <= survived) {
            self.kept = None;
        }
    }
}

/// What came of sending a change again.
enum Again {
    Done(Seq, Seq),
    /// There was nothing to send, or nothing to do.
    Nothing,
    Restarted(NewLife),
    Lost(ObjectFault),
}

impl ObjectTarget {
    /// Sends kept changes to a new life of the target. A task of its own, so that it ends also when those
    /// who noticed have given up.
    pub(super) async fn recover(self: Rc<Self>, new: Option<NewLife>) {
        let mut life = match new {
            Some(life) => life,
            None => self.first_contact().await,
        };
        let kept = self.unstable.borrow_mut().take();
        let lost = kept.into_iter().filter(|(seq, _)| *seq > life.survived);
        let mut pending: Vec<_> = lost.map(|(_, kept)| Pending::new(kept)).collect();
        if planted!("client-sent-again-in-reverse") {
            pending.reverse();
        }
        let _busy = (!pending.is_empty()).then(|| probe::busy("client sends again"));
        let full_since = Cell::new(None);
        let mut durable = Seq(0);
        let mut at = 0;
        while at < pending.len() {
            let end = batch_end(&pending, at);
            let batch = pending[at..end]
                .iter()
                .map(|pending| self.send_again(pending.kept.as_ref(), life.verifier, &full_since));
            let mut another_life = None;
            for (place, outcome) in join_all(batch).await.into_iter().enumerate() {
                let pending = &mut pending[at + place];
                match outcome {
                    Again::Done(seq, upto) => {
                        pending.done = Some(seq);
                        durable = durable.max(upto);
                    }
                    // Also should the target restart once more: others may have written there by then.
                    Again::Nothing => pending.kept = None,
                    Again::Restarted(new) => another_life = Some(new),
                    Again::Lost(fault) => {
                        let lost = pending.kept.take().expect("was sent");
                        tracing::error!(object = ?lost.object, %fault, "lost a written change");
                        self.lost.borrow_mut().insert(lost.object, fault);
                    }
                }
            }
            at = end;
            if let Some(new) = another_life {
                tracing::info!(target_id = self.id.0, "an object target restarted once more");
                pending.iter_mut().for_each(|pending| pending.begin_again(new.survived));
                (life, at, durable) = (new, 0, Seq(0));
            }
        }
        {
            let mut unstable = self.unstable.borrow_mut();
            for Pending { kept, done } in pending {
                if let (Some(kept), Some(seq)) = (kept, done) {
                    unstable.keep(seq, kept);
                }
            }
            unstable.durable(durable);
        }
        self.verifier.set(Some(life.verifier));
        self.recovering.set(false);
        self.changed.notify_all();
        self.drain_soon();
    }

    /// A call of the recovery; whoever waits for that is told meanwhile when the service refuses it.
    async fn reach(&self, call: &Call) -> Result<Frame, RpcError> {
        let answer = self.peer.call(call, None).await;
        let refused = match answer {
            Err(error @ RpcError::Refused(_)) => Some(error.into()),
            _ => None,
        };
        if self.refused.replace(refused) != refused {
            self.changed.notify_all();
        }
        answer
    }

    /// Nothing is kept yet.
    async fn first_contact(&self) -> NewLife {
        let call = self.call(&ObjectRequest::Commit { upto: Seq(0) });
        loop {
            match self.reach(&call).await {
                Ok(frame) if frame.header.verifier != BootVerifier(0) => {
                    return NewLife { verifier: frame.header.verifier, survived: Seq(0) };
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(target_id = self.id.0, %error, "cannot reach an object target");
                }
            }
            reactor::sleep(UNAVAILABLE_WAIT).await;
        }
    }

    /// Sends one kept change. `full_since`: when the target had no room first in this recovery.
    async fn send_again(
        &self,
        kept: Option<&Kept>,
        verifier: BootVerifier,
        full_since: &Cell<Option<Instant>>,
    ) -> Again {
        let Some(kept) = kept else { return Again::Nothing };
        loop {
            let slot = self.recovery_slots.take().await;
            let mut call = self.change_call(&slot, kept.object, &kept.change, Stability::Again);
            call.verifier = verifier;
            let frame = match self.reach(&call).await {
                Ok(frame) => frame,
                Err(error) => {
                    tracing::warn!(target_id = self.id.0, %error, "cannot send again");
                    reactor::sleep(UNAVAILABLE_WAIT).await;
                    continue;
                }
            };
            if frame.header.flags & flags::RESTARTED != 0 {
                if let Ok(life) = NewLife::told_by(&frame) {
                    return Again::Restarted(life);
                }
                reactor::sleep(UNAVAILABLE_WAIT).await;
                continue;
            }
            match decode_body(&frame.body) {
                Ok(ObjectReply::Done { seq, durable, .. }) => return Again::Done(seq, durable),
                Ok(ObjectReply::Failed(ObjectFault::Unavailable)) | Err(_) => {
                    reactor::sleep(UNAVAILABLE_WAIT).await;
                }
                Ok(ObjectReply::Failed(ObjectFault::Full)) => {
                    let now = reactor::now();
                    let since = full_since.get().unwrap_or(now);
                    if full_since.replace(Some(since)).is_none() {
                        tracing::warn!(
                            target_id = self.id.0,
                            "no room for what is sent again; waiting"
                        );
                    }
                    if now.since(since) >= FULL_MAX {
                        return Again::Lost(ObjectFault::Full);
                    }
                    reactor::sleep(FULL_WAIT).await;
                }
                // A hole in what is gone: deleted, or another client's that has not come back yet.
                Ok(ObjectReply::Failed(ObjectFault::NoSuchObject)) => return Again::Nothing,
                Ok(ObjectReply::Failed(fault)) => return Again::Lost(fault),
                Ok(
                    ObjectReply::Data
                    | ObjectReply::Stat { .. }
                    | ObjectReply::Space { .. }
                    | ObjectReply::DataRanges(_),
                ) => return Again::Lost(ObjectFault::Invalid),
            }
        }
    }
}

/// The end of the longest run from `at` on in which no two changes conflict.
fn batch_end(pending: &[Pending], at: usize) -> usize {
    let last = pending.len().min(at + BATCH);
    let kept = |place: usize| pending[place].kept.as_ref();
    let conflicts = |end: &usize| {
        let Some(next) = kept(*end) else { return false };
        (at..*end).filter_map(kept).any(|earlier| earlier.conflicts_with(next))
    };
    (at + 1..last).find(conflicts).unwrap_or(last)
}
