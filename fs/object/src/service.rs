//! One object target: frames in, replies out.
//!
//! What always holds:
//! - A request that names another verifier than the target's is not carried out
//!   (`docs/design/0006-wire.md` says why).
//! - A change with the slot and sequence of one that was done is not done again.
//! - A change that ended with `Unavailable` is not remembered: its repetition is carried out.

use crate::meters::{Meters, Op};
use crate::objects::{Ack, Objects, Space};
use crate::repeats::{Claim, Repeats};
use futures_util::future::LocalBoxFuture;
use levada_base::buf::bytes_in;
use levada_base::ids::{BootVerifier, Seq};
use levada_base::meter::{InFlight, raise};
use levada_base::{IoVec, planted, reactor};
use levada_wire::frame::{
    Frame, Header, NO_SLOT, PAYLOAD_BYTES_MAX, decode_body, encode_body, flags,
};
use levada_wire::object::{ObjectFault, ObjectReply, ObjectRequest, RANGES_MAX, Restarted};
use levada_wire::rpc::{Handler, Pusher, Reply};
use std::cell::RefCell;
use std::rc::Rc;

/// No object reaches beyond this: file offsets are signed 64-bit numbers.
pub(crate) const OFFSET_MAX: u64 = i64::MAX as u64;

/// One object target.
pub struct ObjectService {
    objects: Rc<dyn Objects>,
    repeats: RefCell<Repeats>,
    meters: Meters,
}

impl ObjectService {
    /// Serves `objects`.
    #[must_use]
    pub fn new(objects: Rc<dyn Objects>) -> Rc<Self> {
        Rc::new(Self { objects, repeats: RefCell::default(), meters: Meters::default() })
    }

    /// What was done since the start.
    #[must_use]
    pub fn meters(&self) -> &Meters {
        &self.meters
    }

    async fn answer(&self, frame: Frame) -> Reply {
        let header = frame.header;
        let verifier = self.objects.verifier();
        let Ok(request) = decode_body::<ObjectRequest>(&frame.body) else {
            return Reply::flagged(flags::MALFORMED);
        };
        let another_life = header.verifier != BootVerifier(0) && header.verifier != verifier;
        if another_life && !planted!("object-verifier-ignored") {
            raise(&self.meters.restarted, 1);
            let survived = self.objects.survived(header.verifier).unwrap_or(Seq(0));
            let body = encode_body(&Restarted { survived });
            return Reply { verifier, body, ..Reply::flagged(flags::RESTARTED) };
        }
        let (reply, payload) = if is_change(&request) && header.slot != NO_SLOT {
            (self.change_once(&header, request, frame.payload).await, IoVec::new())
        } else {
            self.carry_out(&header, request, frame.payload).await
        };
        Reply { verifier, payload, ..Reply::new(encode_body(&reply)) }
    }

    /// Carries out a change unless it was done before.
    async fn change_once(
        &self,
        header: &Header,
        request: ObjectRequest,
        payload: IoVec,
    ) -> ObjectReply {
        loop {
            let claim =
                self.repeats.borrow_mut().claim(header.client, header.slot, header.sequence);
            match claim {
                Claim::Fresh => break,
                // Nothing runs between the claim and this wait, so the end is not missed.
                Claim::Wait(ended) => ended.changed().await,
                Claim::Done(reply) => {
                    raise(&self.meters.repeated, 1);
                    return reply;
                }
                Claim::Straggler | Claim::TooMany => {
                    return ObjectReply::Failed(ObjectFault::Invalid);
                }
            }
        }
        let (reply, _) = self.carry_out(header, request, payload).await;
        let done = (reply != ObjectReply::Failed(ObjectFault::Unavailable)).then_some(&reply);
        self.repeats.borrow_mut().finish(header.client, header.slot, done);
        reply
    }

    async fn carry_out(
        &self,
        header: &Header,
        request: ObjectRequest,
        payload: IoVec,
    ) -> (ObjectReply, IoVec) {
        let start = reactor::now();
        let _in_flight = InFlight::begin(&self.meters.in_flight);
        let op = Op::of(&request);
        let written_bytes = bytes_in(&payload);
        let result = match check(header, &request, written_bytes) {
            Ok(()) => self.ask(request, payload).await,
            Err(fault) => Err(fault),
        };
        let bytes = result.as_ref().map_or(0, |(_, read)| written_bytes + bytes_in(read));
        self.meters.of(op, bytes).add(bytes, start.elapsed(), result.is_err());
        result.unwrap_or_else(|fault| (ObjectReply::Failed(fault), IoVec::new()))
    }

    async fn ask(
        &self,
        request: ObjectRequest,
        payload: IoVec,
    ) -> Result<(ObjectReply, IoVec), ObjectFault> {
        let objects = &*self.objects;
        let verifier = objects.verifier();
        let done = |ack: Ack| ObjectReply::Done { verifier, seq: ack.seq, durable: ack.durable };
        let reply = match request {
            ObjectRequest::Write { object, offset, stability } => {
                done(objects.write(object, offset, payload, stability).await?)
            }
            ObjectRequest::Read { object, offset, bytes } => {
                let data = objects.read(object, offset, bytes).await?;
                assert_eq!(bytes_in(&data), bytes, "a read gives what was asked for");
                return Ok((ObjectReply::Data, data));
            }
            ObjectRequest::Commit { upto } => {
                let durable = objects.commit(upto).await?;
                done(Ack { seq: upto, durable })
            }
            ObjectRequest::Stat { object } => {
                ObjectReply::Stat { verifier, stat: objects.stat(object).await? }
            }
            ObjectRequest::Truncate { object, size } => done(objects.truncate(object, size).await?),
            ObjectRequest::Delete { object } => done(objects.delete(object).await?),
            ObjectRequest::Space => {
                let Space { total_bytes, free_bytes, coming_bytes } = objects.space().await?;
                ObjectReply::Space { total_bytes, free_bytes, coming_bytes }
            }
            ObjectRequest::Punch { object, hole, stability } => {
                done(objects.punch(object, hole, stability).await?)
            }
            ObjectRequest::DataRanges { object, offset, ranges_max } => {
                ObjectReply::DataRanges(objects.data_ranges(object, offset, ranges_max).await?)
            }
        };
        Ok((reply, IoVec::new()))
    }
}

fn is_change(request: &ObjectRequest) -> bool {
    match request {
        ObjectRequest::Write { .. }
        | ObjectRequest::Truncate { .. }
        | ObjectRequest::Punch { .. }
        | ObjectRequest::Delete { .. } => true,
        ObjectRequest::Read { .. }
        | ObjectRequest::Commit { .. }
        | ObjectRequest::Stat { .. }
        | ObjectRequest::Space
        | ObjectRequest::DataRanges { .. } => false,
    }
}

/// Bounds of what comes from outside.
fn check(header: &Header, request: &ObjectRequest, payload: u64) -> Result<(), ObjectFault> {
    let fits = |offset: u64, bytes: u64| offset.checked_add(bytes).is_some_and(|e| e <= OFFSET_MAX);
    let sound = match request {
        ObjectRequest::Write { offset, .. } => payload > 0 && fits(*offset, payload),
        ObjectRequest::Read { offset, bytes, .. } => {
            *bytes <= u64::from(header.reply_bytes_max)
                && *bytes <= PAYLOAD_BYTES_MAX as u64
                && fits(*offset, *bytes)
        }
        ObjectRequest::Truncate { size, .. } => *size <= OFFSET_MAX,
        ObjectRequest::Punch { hole, .. } => {
            (hole.bytes > 0 || hole.grows) && fits(hole.offset, hole.bytes)
        }
        ObjectRequest::DataRanges { offset, ranges_max, .. } => {
            *offset <= OFFSET_MAX && (1..=RANGES_MAX).contains(ranges_max)
        }
        ObjectRequest::Commit { .. }
        | ObjectRequest::Stat { .. }
        | ObjectRequest::Delete { .. }
        | ObjectRequest::Space => true,
    };
    if sound { Ok(()) } else { Err(ObjectFault::Invalid) }
}

impl Handler for ObjectService {
    fn handle(&self, request: Frame, _from: Pusher) -> LocalBoxFuture<'_, Reply> {
        Box::pin(self.answer(request))
    }
}
