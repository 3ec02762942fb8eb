//! One object target, as the client sees it.
//!
//! Every request names the verifier of the life of the target that took the unstable data. A target that
//! restarted does nothing then and says so ([`flags::RESTARTED`]); the client first sends the kept changes that
//! were lost again, in order ([`recovery`]), and only then the request. So nothing overtakes what was lost.
//!
//! What always holds:
//! - While kept changes are sent again, nothing else is sent to the target.
//! - Where another cluster answers, everybody gets an error; kept changes stay until the right one is back.
//! - COMMITs are shared: all who wait while one is under way share the next.
//! - Unstable bytes, kept or in flight, stay below the bound; beyond half of it a COMMIT runs, and one runs
//!   [`DRAIN_AFTER`] at the latest after a change was kept.

mod recovery;

use crate::error::Error;
use crate::slots::{Slot, Slots};
use crate::unstable::{Change, Kept, Unstable};
use futures_util::future::{Either, select};
use levada_base::buf::bytes_in;
use levada_base::ids::{BootVerifier, ObjectId, Seq, TargetId};
use levada_base::sync::{Notify, Permit, Semaphore};
use levada_base::{IoVec, planted, reactor};
use levada_wire::frame::{Class, Frame, decode_body, encode_body, flags};
use levada_wire::object::{
    DataRanges, Hole, ObjectFault, ObjectReply, ObjectRequest, ObjectStat, Stability,
};
use levada_wire::rpc::{Call, Peer, SILENCE_MAX};
use recovery::NewLife;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// Changes in flight to one target; more wait for a slot.
const SLOTS: u32 = 256;
/// Kept changes are committed after this, whatever programs do. So a client that falls silent notices soon that a
/// target restarted: until it has sent again what was lost, others see an older state and write upon it.
const DRAIN_AFTER: Duration = Duration::from_secs(1);
/// A target that cannot serve now is asked again after this.
const UNAVAILABLE_WAIT: Duration = Duration::from_millis(100);
/// A target that has not answered after this is silent. By then a connection that died unnoticed has been given up
/// ([`SILENCE_MAX`]) and another one made.
const ANSWER_WITHIN: Duration = SILENCE_MAX.saturating_add(Duration::from_secs(5));

pub(crate) struct ObjectTarget {
    id: TargetId,
    peer: Rc<Peer>,
    class: Class,
    /// Drawn at random for this run of the client.
    client: u64,
    slots: Rc<Slots>,
    /// Apart from the others, which may all be held by requests that wait for the recovery.
    recovery_slots: Rc<Slots>,
    /// `None`: not known yet, or kept changes are being sent again.
    verifier: Cell<Option<BootVerifier>>,
    recovering: Cell<bool>,
    /// The service refuses this client, so that the recovery cannot go on.
    refused: Cell<Option<Error>>,
    unstable: RefCell<Unstable>,
    unstable_bytes_max: u64,
    room: Rc<Semaphore>,
    /// Objects that lost kept changes for good, until somebody was told.
    lost: RefCell<BTreeMap<ObjectId, ObjectFault>>,
    commits: Commits,
    /// A task is about to commit what is kept.
    draining: Cell<bool>,
    /// Any of the above changed.
    changed: Notify,
    /// It has let somebody wait for too long, and has not answered since.
    silent: Cell<bool>,
}

/// Space of a target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TargetSpace {
    pub(crate) total_bytes: u64,
    pub(crate) free_bytes: u64,
    /// Of the free ones those that must be cleaned before they can be written.
    pub(crate) coming_bytes: u64,
}

/// Rounds of COMMIT.
#[derive(Default)]
struct Commits {
    running: Cell<bool>,
    begun: Cell<u64>,
    ended: Cell<u64>,
    /// The last round that failed, and how.
    failure: Cell<Option<(u64, Error)>>,
}

impl Commits {
    fn failed_since(&self, round: u64) -> Option<Error> {
        self.failure.get().filter(|(failed, _)| *failed >= round).map(|(_, error)| error)
    }
}

impl ObjectTarget {
    pub(crate) fn new(
        id: TargetId,
        peer: Rc<Peer>,
        class: Class,
        client: u64,
        unstable_bytes_max: u64,
    ) -> Rc<Self> {
        Rc::new(Self {
            id,
            peer,
            class,
            client,
            slots: Slots::new(0, SLOTS),
            recovery_slots: Slots::new(SLOTS, recovery::BATCH as u32),
            verifier: Cell::new(None),
            recovering: Cell::new(false),
            refused: Cell::new(None),
            unstable: RefCell::default(),
            unstable_bytes_max,
            room: Semaphore::new(unstable_bytes_max),
            lost: RefCell::default(),
            commits: Commits::default(),
            draining: Cell::new(false),
            changed: Notify::default(),
            silent: Cell::new(false),
        })
    }

    /// Runs `call`, a request to this target, for somebody who can do without it for now. The request may still be
    /// carried out afterwards: not for one that does harm when it comes late.
    ///
    /// # Errors
    ///
    /// What the call says; [`Error::Deadline`] when the target is silent. Only the first to find that out wait for it.
    pub(crate) async fn unless_silent<T>(
        self: &Rc<Self>,
        call: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        if self.silent.get() {
            return Err(Error::Deadline);
        }
        self.in_time(call).await
    }

    /// As [`Self::unless_silent`], but asks again who has been silent.
    pub(crate) async fn in_time<T>(
        self: &Rc<Self>,
        call: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let answer = reactor::timeout(ANSWER_WITHIN, call).await;
        answer.unwrap_or_else(|_| {
            self.fell_silent();
            Err(Error::Deadline)
        })
    }

    fn fell_silent(self: &Rc<Self>) {
        if self.silent.replace(true) {
            return;
        }
        tracing::warn!(
            target_id = self.id.0,
            "an object target does not answer; `df` leaves it out, and what is deleted there goes later"
        );
        let target = Rc::clone(self);
        reactor::spawn(async move {
            // One request, however long it takes: each that is given up holds its place on the connection, which
            // other targets share. A COMMIT, because a log that stopped still knows its space.
            let answer = target.commit_everything().await;
            target.silent.set(false);
            tracing::info!(target_id = target.id.0, ?answer, "the object target answers again");
        });
    }

    pub(crate) fn id(&self) -> TargetId {
        self.id
    }

    pub(crate) fn unstable_bytes(&self) -> u64 {
        self.unstable.borrow().bytes()
    }

    /// Writes; what is unstable is kept until it is durable.
    pub(crate) async fn write(
        self: &Rc<Self>,
        object: ObjectId,
        offset: u64,
        data: IoVec,
        stability: Stability,
    ) -> Result<(), Error> {
        let permit = self.room_for(bytes_in(&data)).await?;
        self.change(object, Change::Write { offset, data }, Some(permit), stability).await
    }

    /// Sets an object's size; unstable, and kept until it is durable.
    pub(crate) async fn truncate(
        self: &Rc<Self>,
        object: ObjectId,
        size: u64,
    ) -> Result<(), Error> {
        self.change(object, Change::Truncate { size }, None, Stability::Unstable).await
    }

    /// Makes a hole; unstable, and kept until it is durable. [`Error::Missing`] when there is no object and the hole
    /// does not grow one.
    pub(crate) async fn punch(self: &Rc<Self>, object: ObjectId, hole: Hole) -> Result<(), Error> {
        self.change(object, Change::Punch(hole), None, Stability::Unstable).await
    }

    /// Where there is data from `offset` on; `None` when there is no such object.
    pub(crate) async fn data_ranges(
        self: &Rc<Self>,
        object: ObjectId,
        offset: u64,
        ranges_max: u32,
    ) -> Result<Option<DataRanges>, Error> {
        let request = ObjectRequest::DataRanges { object, offset, ranges_max };
        match self.ask(self.call(&request)).await?.1 {
            ObjectReply::DataRanges(found) if found.upto > offset => Ok(Some(found)),
            ObjectReply::Failed(ObjectFault::NoSuchObject) => Ok(None),
            ObjectReply::Failed(fault) => Err(fault.into()),
            ObjectReply::DataRanges(_)
            | ObjectReply::Data
            | ObjectReply::Done { .. }
            | ObjectReply::Stat { .. }
            | ObjectReply::Space { .. } => Err(Error::Dialect),
        }
    }

    /// Reads `bytes` bytes; `None` when there is no such object.
    pub(crate) async fn read(
        self: &Rc<Self>,
        object: ObjectId,
        offset: u64,
        bytes: u64,
    ) -> Result<Option<IoVec>, Error> {
        let mut call = self.call(&ObjectRequest::Read { object, offset, bytes });
        call.reply_bytes_max = bytes as u32;
        let (_, reply, frame) = self.ask(call).await?;
        match reply {
            ObjectReply::Data if frame.payload_bytes() as u64 == bytes => Ok(Some(frame.payload)),
            ObjectReply::Failed(ObjectFault::NoSuchObject) => Ok(None),
            ObjectReply::Failed(fault) => Err(fault.into()),
            ObjectReply::Data
            | ObjectReply::Done { .. }
            | ObjectReply::Stat { .. }
            | ObjectReply::Space { .. }
            | ObjectReply::DataRanges(_) => Err(Error::Dialect),
        }
    }

    pub(crate) async fn stat(
        self: &Rc<Self>,
        object: ObjectId,
    ) -> Result<Option<ObjectStat>, Error> {
        match self.ask(self.call(&ObjectRequest::Stat { object })).await?.1 {
            ObjectReply::Stat { stat, .. } => Ok(stat),
            ObjectReply::Failed(fault) => Err(fault.into()),
            ObjectReply::Data
            | ObjectReply::Done { .. }
            | ObjectReply::Space { .. }
            | ObjectReply::DataRanges(_) => Err(Error::Dialect),
        }
    }

    pub(crate) async fn space(self: &Rc<Self>) -> Result<TargetSpace, Error> {
        match self.ask(self.call(&ObjectRequest::Space)).await?.1 {
            ObjectReply::Space { total_bytes, free_bytes, coming_bytes } => {
                Ok(TargetSpace { total_bytes, free_bytes, coming_bytes })
            }
            ObjectReply::Failed(fault) => Err(fault.into()),
            ObjectReply::Data
            | ObjectReply::Done { .. }
            | ObjectReply::Stat { .. }
            | ObjectReply::DataRanges(_) => Err(Error::Dialect),
        }
    }

    /// Removes an object; durable when this returns.
    pub(crate) async fn delete(self: &Rc<Self>, object: ObjectId) -> Result<(), Error> {
        let slot = self.slots.take().await;
        let call = self.call_in(&slot, &ObjectRequest::Delete { object });
        match self.ask(call).await?.1 {
            ObjectReply::Done { .. } => Ok(()),
            ObjectReply::Failed(fault) => Err(fault.into()),
            ObjectReply::Data
            | ObjectReply::Stat { .. }
            | ObjectReply::Space { .. }
            | ObjectReply::DataRanges(_) => Err(Error::Dialect),
        }
    }

    /// Makes durable whatever anybody wrote to the target.
    pub(crate) async fn commit_everything(self: &Rc<Self>) -> Result<(), Error> {
        self.commit(Seq(u64::MAX)).await
    }

    /// Waits until every change of `object` that was acknowledged is durable.
    pub(crate) async fn settle(self: &Rc<Self>, object: ObjectId) -> Result<(), Error> {
        loop {
            self.ready().await?;
            let lost = self.lost.borrow_mut().remove(&object);
            if let Some(fault) = lost {
                return Err(fault.into());
            }
            if !self.unstable.borrow().holds(object) {
                return Ok(());
            }
            self.commit_round().await?;
        }
    }

    fn call(&self, request: &ObjectRequest) -> Call {
        Call {
            kind: request.kind(),
            client: self.client,
            class: self.class,
            ..Call::new(self.id, encode_body(request))
        }
    }

    fn call_in(&self, slot: &Slot, request: &ObjectRequest) -> Call {
        Call { slot: slot.number, sequence: slot.sequence, ..self.call(request) }
    }

    fn change_call(
        &self,
        slot: &Slot,
        object: ObjectId,
        change: &Change,
        stability: Stability,
    ) -> Call {
        match change {
            Change::Write { offset, data } => {
                let request = ObjectRequest::Write { object, offset: *offset, stability };
                Call { payload: data.clone(), ..self.call_in(slot, &request) }
            }
            Change::Truncate { size } => {
                self.call_in(slot, &ObjectRequest::Truncate { object, size: *size })
            }
            Change::Punch(hole) => {
                self.call_in(slot, &ObjectRequest::Punch { object, hole: *hole, stability })
            }
        }
    }

    async fn change(
        self: &Rc<Self>,
        object: ObjectId,
        change: Change,
        permit: Option<Permit>,
        stability: Stability,
    ) -> Result<(), Error> {
        let slot = self.slots.take().await;
        let call = self.change_call(&slot, object, &change, stability);
        loop {
            let (verifier, reply, _) = self.ask(call.clone()).await?;
            let (seq, durable) = match reply {
                ObjectReply::Done { seq, durable, .. } => (seq, durable),
                ObjectReply::Failed(ObjectFault::NoSuchObject) => {
                    return Err(Error::Missing { component: object.component });
                }
                ObjectReply::Failed(fault) => return Err(fault.into()),
                ObjectReply::Data
                | ObjectReply::Stat { .. }
                | ObjectReply::Space { .. }
                | ObjectReply::DataRanges(_) => return Err(Error::Dialect),
            };
            // An answer from an earlier life, overtaken by the news of its end: ask again.
            if self.verifier.get() != Some(verifier) {
                continue;
            }
            let kept = Kept { object, change, _permit: permit };
            if !planted!("client-written-not-kept") {
                self.unstable.borrow_mut().keep(seq, kept);
            }
            // With a durable change so is all that came before it, and what is durable is kept no longer: sent again it would
            // go over what was written later.
            self.heard_durable(durable);
            if stability == Stability::Durable && durable >= seq {
                return Ok(());
            }
            self.drain_soon();
            if self.unstable.borrow().bytes() * 2 > self.unstable_bytes_max {
                self.start_round();
            }
            return match stability {
                Stability::Durable => self.settle(object).await,
                Stability::Unstable | Stability::Again => Ok(()),
            };
        }
    }

    /// Waits for room below the bound on unstable bytes.
    async fn room_for(self: &Rc<Self>, bytes: u64) -> Result<Permit, Error> {
        if let Some(permit) = self.room.try_acquire(bytes) {
            return Ok(permit);
        }
        if self.unstable.borrow().bytes() * 2 > self.unstable_bytes_max {
            self.start_round();
        }
        let next = self.commits.ended.get() + 1;
        let acquired = pin!(self.room.acquire(bytes));
        // A COMMIT that fails for good would let writers wait for ever.
        let failed = pin!(self.changed.until(|| self.commits.failed_since(next)));
        match select(acquired, failed).await {
            Either::Left((permit, _)) => Ok(permit),
            Either::Right((error, _)) => Err(error),
        }
    }

    /// Sends a request until it is answered by the life of the target that holds the kept
    /// changes; returns that life's verifier.
    async fn ask(
        self: &Rc<Self>,
        mut call: Call,
    ) -> Result<(BootVerifier, ObjectReply, Frame), Error> {
        loop {
            let verifier = self.ready().await?;
            call.verifier = verifier;
            let frame = self.peer.call(&call, None).await?;
            if frame.header.flags & flags::RESTARTED != 0 {
                self.restarted(verifier, NewLife::told_by(&frame)?);
                continue;
            }
            let reply = decode_body(&frame.body).map_err(|_| Error::Dialect)?;
            if reply == ObjectReply::Failed(ObjectFault::Unavailable) {
                reactor::sleep(UNAVAILABLE_WAIT).await;
                continue;
            }
            return Ok((verifier, reply, frame));
        }
    }

    /// Waits until kept changes have been sent again, if need be; the verifier to name.
    async fn ready(self: &Rc<Self>) -> Result<BootVerifier, Error> {
        loop {
            let changed = self.changed.changed();
            if let Some(verifier) = self.verifier.get() {
                return Ok(verifier);
            }
            if let Some(error) = self.refused.get() {
                return Err(error);
            }
            if !self.recovering.replace(true) {
                // First contact: ask for the verifier.
                let target = Rc::clone(self);
                reactor::spawn(async move { target.recover(None).await });
            }
            changed.await;
        }
    }

    /// The target no longer has verifier `old`.
    fn restarted(self: &Rc<Self>, old: BootVerifier, new: NewLife) {
        if self.verifier.get() == Some(old) && !self.recovering.replace(true) {
            self.verifier.set(None);
            tracing::info!(target_id = self.id.0, "an object target restarted");
            let target = Rc::clone(self);
            reactor::spawn(async move { target.recover(Some(new)).await });
        }
    }

    fn heard_durable(&self, durable: Seq) {
        self.unstable.borrow_mut().durable(durable);
    }

    async fn commit(self: &Rc<Self>, upto: Seq) -> Result<(), Error> {
        loop {
            let call = self.call(&ObjectRequest::Commit { upto });
            let (verifier, reply, _) = self.ask(call).await?;
            match reply {
                ObjectReply::Done { durable, .. } => {
                    if self.verifier.get() == Some(verifier) {
                        self.heard_durable(durable);
                        return Ok(());
                    }
                }
                ObjectReply::Failed(fault) => return Err(fault.into()),
                ObjectReply::Data
                | ObjectReply::Stat { .. }
                | ObjectReply::Space { .. }
                | ObjectReply::DataRanges(_) => return Err(Error::Dialect),
            }
        }
    }

    /// Waits for a round of COMMIT that begins after this call.
    async fn commit_round(self: &Rc<Self>) -> Result<(), Error> {
        let wanted = self.commits.begun.get() + 1;
        loop {
            let changed = self.changed.changed();
            if self.commits.ended.get() >= wanted {
                return self.commits.failed_since(wanted).map_or(Ok(()), Err);
            }
            self.start_round();
            changed.await;
        }
    }

    /// See [`DRAIN_AFTER`].
    fn drain_soon(self: &Rc<Self>) {
        if self.draining.replace(true) {
            return;
        }
        let target = Rc::downgrade(self);
        reactor::spawn(async move {
            reactor::sleep(DRAIN_AFTER).await;
            let Some(target) = target.upgrade() else { return };
            target.draining.set(false);
            if target.commit_round().await.is_err() {
                target.drain_soon();
            }
        });
    }

    /// Starts a round unless one is under way.
    fn start_round(self: &Rc<Self>) {
        if self.commits.running.replace(true) {
            return;
        }
        self.commits.begun.set(self.commits.begun.get() + 1);
        let target = Rc::clone(self);
        reactor::spawn(async move {
            let last = target.unstable.borrow().last();
            let result = match last {
                Some(last) => target.commit(last).await,
                None => Ok(()),
            };
            let commits = &target.commits;
            if let Err(error) = result {
                commits.failure.set(Some((commits.begun.get(), error)));
            }
            commits.ended.set(commits.begun.get());
            commits.running.set(false);
            target.changed.notify_all();
            // Writers may have filled the bound meanwhile.
            if result.is_ok() && target.unstable.borrow().bytes() * 2 > target.unstable_bytes_max {
                target.start_round();
            }
        });
    }
}
