//! The frame: a fixed header, a body (one message), a payload (raw bytes).
//!
//! Without I/O: bytes in, frames or errors out. `docs/design/0006-wire.md` draws the header.
//!
//! What always holds:
//! - Lengths are checked against [`BODY_BYTES_MAX`] and [`PAYLOAD_BYTES_MAX`], and the header's
//!   checksum is verified, before anything is allocated for what follows.
//! - No sequence of bytes makes the decoder panic.

use levada_base::buf::bytes_in;
use levada_base::checksum::{crc32c, crc32c_parts};
use levada_base::ids::{BootVerifier, TargetId};
use levada_base::{Buf, BufMut, Epoch, IoVec};
use serde::{Serialize, de::DeserializeOwned};

/// Bytes of the header.
pub const HEADER_BYTES: usize = 128;
/// The longest body, in bytes.
pub const BODY_BYTES_MAX: usize = 1 << 20;
/// The longest payload, in bytes.
pub const PAYLOAD_BYTES_MAX: usize = 8 << 20;
/// The version of the frame and of the messages in it.
pub const VERSION: u16 = 3;
/// The version that a frame of [`Kind::Hello`] is written in for ever, so that whoever speaks another can be told so.
const HELLO_VERSION: u16 = 1;
/// In [`Header::slot`]: the request changes nothing and needs no slot.
pub const NO_SLOT: u32 = u32::MAX;

const MAGIC: u32 = u32::from_le_bytes(*b"LVDW");
/// [`Kind::Hello`] in a header.
const HELLO: u8 = 4;
const CRC_AT: usize = HEADER_BYTES - 4;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Gets exactly one reply with the same request id, unless the connection ends.
    Request,
    Reply,
    /// Gets no reply.
    OneWay,
    /// The first frame in each direction.
    Hello,
    /// Answered by [`Kind::Pong`] at once, also when every credit is used.
    Ping,
    Pong,
}

/// Class of service: whose work gives way to whose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Class {
    #[default]
    Foreground,
    /// Housekeeping.
    Background,
}

/// Flags of requests and replies; no other bit is set in version 3.
pub mod flags {
    /// The target is not served here (now): nothing was done, try again later or elsewhere.
    pub const NOT_HERE: u32 = 1;
    /// The request could not be decoded: nothing was done, repeating it cannot help.
    pub const MALFORMED: u32 = 2;
    /// The target no longer has the verifier that the request names; the reply's header says
    /// which one it has. Nothing was done: send again what was unstable, then this.
    pub const RESTARTED: u32 = 4;
    /// Of a request: it may be answered before what it changes, or has seen, is durable. The
    /// caller takes in the one-way frames that come before such an answer.
    pub const UNSTABLE: u32 = 8;
    /// Of a request: the caller knows what to do with a directory's attributes beside the answer
    /// ([`MetaReply::Made`](crate::meta::MetaReply::Made)).
    pub const WITH_DIRECTORY: u32 = 16;
    /// Of a reply of a metadata target: bytes are limited for somebody, so ask
    /// ([`MetaRequest::Grant`](crate::meta::MetaRequest::Grant)) before what is written grows.
    pub const LIMITED: u32 = 512;
    /// Of a request: the caller gives heed to the notices that come with leases, so it may be given some. Of a reply: a lease
    /// on the names of each directory that it tells names of (docs/design/0012-locks-and-leases.md).
    pub const NAMES: u32 = 32;
    /// Of a reply: a lease on each inode of which it tells attributes, as that document says.
    pub const NODE: u32 = 64;
    /// Of a reply that tells of a directory: a lease on the directory's attributes.
    pub const DIRECTORY: u32 = 128;
    /// The leases that a reply may grant.
    pub const LEASES: u32 = NAMES | NODE | DIRECTORY;
    /// What a reply says instead of an answer: nothing was done.
    pub const REFUSALS: u32 = NOT_HERE | MALFORMED | RESTARTED;
    /// Every flag that version 3 knows.
    pub const ALL: u32 = REFUSALS | UNSTABLE | WITH_DIRECTORY | LEASES | LIMITED;
}

/// The header but for lengths and checksums, which the codec fills in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub kind: Kind,
    pub class: Class,
    /// See [`flags`].
    pub flags: u32,
    pub tenant: u32,
    /// Version of the cluster map that the sender acts on.
    pub map_version: u64,
    /// Epoch of the target's owner, as the sender knows it; 0 when it does not.
    pub epoch: Epoch,
    /// Request: the verifier that the target must still have (0: any). Reply: the target's.
    pub verifier: BootVerifier,
    /// The node that the frame comes from, and the one it is for: a relay passes it on.
    pub source: u32,
    pub destination: u32,
    pub target: TargetId,
    /// With `client` and `sequence` names a change, so that a repeat is not done twice.
    pub slot: u32,
    pub client: u64,
    pub sequence: u64,
    /// Pairs a reply with its request; counts up within a connection.
    pub request: u64,
    /// Requests that the receiver of this frame may send beyond what it was allowed before.
    pub credits: u32,
    /// Bytes (see [`Header::charge`]) likewise.
    pub credit_bytes: u32,
    /// Request: the longest payload that the reply may have.
    pub reply_bytes_max: u32,
}

impl Header {
    /// A header of `kind` with everything else empty.
    #[must_use]
    pub fn new(kind: Kind) -> Self {
        Self {
            kind,
            class: Class::Foreground,
            flags: 0,
            tenant: 0,
            map_version: 0,
            epoch: Epoch(0),
            verifier: BootVerifier(0),
            source: 0,
            destination: 0,
            target: TargetId(0),
            slot: NO_SLOT,
            client: 0,
            sequence: 0,
            request: 0,
            credits: 0,
            credit_bytes: 0,
            reply_bytes_max: 0,
        }
    }

    /// What a request takes of the byte credits: the memory that the service needs for its
    /// payload and for that of the reply.
    #[must_use]
    pub fn charge(&self, payload_bytes: usize) -> u64 {
        payload_bytes as u64 + u64::from(self.reply_bytes_max)
    }
}

/// A message on the wire.
#[derive(Clone, Debug)]
pub struct Frame {
    pub header: Header,
    /// A message, encoded by [`encode_body`].
    pub body: Vec<u8>,
    /// Raw bytes; as received one page-aligned buffer, or none, or a neighbour's buffers as they
    /// lie in its memory.
    pub payload: IoVec,
}

/// What is wrong with received bytes. The connection they came on cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("not a frame: magic {found:#010x}")]
    Magic { found: u32 },
    #[error("frame version {found} is not spoken here")]
    Version { found: u16 },
    #[error("the header's checksum does not match")]
    HeaderChecksum,
    #[error("header field at byte {at} has a value that version 3 does not know")]
    Field { at: usize },
    #[error("a body of {bytes} bytes is too long")]
    BodyTooLong { bytes: usize },
    #[error("a payload of {bytes} bytes is too long")]
    PayloadTooLong { bytes: usize },
    #[error("the body's checksum does not match")]
    BodyChecksum,
    #[error("the payload's checksum does not match")]
    PayloadChecksum,
    /// What is said about shared memory makes no sense.
    #[error("shared memory is not used as agreed")]
    Sharing,
    /// The body is not the message that belongs here.
    #[error("the message cannot be decoded")]
    Message,
}

/// A decoded header, which tells what must follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announced {
    pub header: Header,
    /// At most [`BODY_BYTES_MAX`].
    pub body_bytes: usize,
    /// At most [`PAYLOAD_BYTES_MAX`].
    pub payload_bytes: usize,
    body_crc: u32,
    payload_crc: u32,
}

impl Announced {
    /// Decodes a header.
    ///
    /// # Errors
    ///
    /// When it is not a sound header of this version.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let u16_at = |at: usize| u16::from_le_bytes(bytes[at..at + 2].try_into().expect("2 bytes"));
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        if u32_at(0) != MAGIC {
            return Err(FrameError::Magic { found: u32_at(0) });
        }
        // Before the checksum: another version may place it elsewhere.
        if u16_at(4) != version_of(bytes[6]) {
            return Err(FrameError::Version { found: u16_at(4) });
        }
        if u32_at(CRC_AT) != crc32c(&bytes[..CRC_AT]) {
            return Err(FrameError::HeaderChecksum);
        }
        let kind = match bytes[6] {
            1 => Kind::Request,
            2 => Kind::Reply,
            3 => Kind::OneWay,
            HELLO => Kind::Hello,
            5 => Kind::Ping,
            6 => Kind::Pong,
            _ => return Err(FrameError::Field { at: 6 }),
        };
        let class = match bytes[7] {
            0 => Class::Foreground,
            1 => Class::Background,
            _ => return Err(FrameError::Field { at: 7 }),
        };
        if u32_at(8) & !flags::ALL != 0 {
            return Err(FrameError::Field { at: 8 });
        }
        if let Some(at) = bytes[108..CRC_AT].iter().position(|byte| *byte != 0) {
            return Err(FrameError::Field { at: 108 + at });
        }
        let (body_bytes, payload_bytes) = (u32_at(92) as usize, u32_at(96) as usize);
        if body_bytes > BODY_BYTES_MAX {
            return Err(FrameError::BodyTooLong { bytes: body_bytes });
        }
        if payload_bytes > PAYLOAD_BYTES_MAX {
            return Err(FrameError::PayloadTooLong { bytes: payload_bytes });
        }
        let header = Header {
            kind,
            class,
            flags: u32_at(8),
            tenant: u32_at(12),
            map_version: u64_at(16),
            epoch: Epoch(u64_at(24)),
            verifier: BootVerifier(u64_at(32)),
            source: u32_at(40),
            destination: u32_at(44),
            target: TargetId(u32_at(48)),
            slot: u32_at(52),
            client: u64_at(56),
            sequence: u64_at(64),
            request: u64_at(72),
            credits: u32_at(80),
            credit_bytes: u32_at(84),
            reply_bytes_max: u32_at(88),
        };
        let (body_crc, payload_crc) = (u32_at(100), u32_at(104));
        Ok(Self { header, body_bytes, payload_bytes, body_crc, payload_crc })
    }

    /// Puts the frame together from what followed the header.
    ///
    /// # Errors
    ///
    /// When a checksum does not match.
    ///
    /// # Panics
    ///
    /// When the lengths are not those announced.
    pub fn complete(self, body: Vec<u8>, payload: Option<Buf>) -> Result<Frame, FrameError> {
        assert_eq!(body.len(), self.body_bytes, "as announced");
        assert_eq!(payload.as_ref().map_or(0, |p| p.len()), self.payload_bytes, "as announced");
        if crc32c(&body) != self.body_crc {
            return Err(FrameError::BodyChecksum);
        }
        if payload.as_ref().map_or(0, |payload| crc32c(payload)) != self.payload_crc {
            return Err(FrameError::PayloadChecksum);
        }
        Ok(Frame { header: self.header, body, payload: payload.into_iter().collect() })
    }

    /// As [`Announced::complete`], for a payload that did not travel and so has no checksum.
    pub(crate) fn complete_in_place(
        self,
        body: Vec<u8>,
        payload: IoVec,
    ) -> Result<Frame, FrameError> {
        assert_eq!(bytes_in(&payload) as usize, self.payload_bytes, "as announced");
        if crc32c(&body) != self.body_crc {
            return Err(FrameError::BodyChecksum);
        }
        if self.payload_crc != 0 {
            return Err(FrameError::PayloadChecksum);
        }
        Ok(Frame { header: self.header, body, payload })
    }
}

impl Frame {
    /// A frame without a payload.
    #[must_use]
    pub fn new(header: Header, body: Vec<u8>) -> Self {
        Self { header, body, payload: IoVec::new() }
    }

    /// Bytes of the payload.
    #[must_use]
    pub fn payload_bytes(&self) -> usize {
        bytes_in(&self.payload) as usize
    }

    /// The payload as one buffer: copied only when it has several parts.
    #[must_use]
    pub fn payload_joined(&self) -> Buf {
        match self.payload.as_slice() {
            [] => BufMut::for_overwrite(0).freeze(),
            [whole] => whole.clone(),
            parts => join(parts),
        }
    }

    /// Checks the lengths; a frame that passes can be encoded.
    ///
    /// # Errors
    ///
    /// [`FrameError::BodyTooLong`] or [`FrameError::PayloadTooLong`].
    pub fn check(&self) -> Result<(), FrameError> {
        if self.body.len() > BODY_BYTES_MAX {
            return Err(FrameError::BodyTooLong { bytes: self.body.len() });
        }
        if self.payload_bytes() > PAYLOAD_BYTES_MAX {
            return Err(FrameError::PayloadTooLong { bytes: self.payload_bytes() });
        }
        Ok(())
    }

    /// Header and body as one buffer; the payload's buffers follow it on the wire as they are.
    ///
    /// # Panics
    ///
    /// When [`Frame::check`] would fail.
    #[must_use]
    pub fn encode_head(&self) -> Buf {
        self.encode_head_with(crc32c_parts(self.payload.iter().map(|part| &part[..])))
    }

    /// As [`Frame::encode_head`], for a payload that stays where it lies.
    pub(crate) fn encode_head_without_payload_sum(&self) -> Buf {
        self.encode_head_with(0)
    }

    fn encode_head_with(&self, payload_crc: u32) -> Buf {
        self.check().expect("checked by its maker");
        let mut head = BufMut::for_overwrite(HEADER_BYTES + self.body.len());
        let (fixed, body) = head.split_at_mut(HEADER_BYTES);
        body.copy_from_slice(&self.body);
        fixed.copy_from_slice(&self.encode_header(payload_crc));
        head.freeze()
    }

    fn encode_header(&self, payload_crc: u32) -> [u8; HEADER_BYTES] {
        let header = &self.header;
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC.to_le_bytes());
        let kind = match header.kind {
            Kind::Request => 1,
            Kind::Reply => 2,
            Kind::OneWay => 3,
            Kind::Hello => HELLO,
            Kind::Ping => 5,
            Kind::Pong => 6,
        };
        put(4, &version_of(kind).to_le_bytes());
        put(6, &[kind]);
        put(
            7,
            &[match header.class {
                Class::Foreground => 0,
                Class::Background => 1,
            }],
        );
        put(8, &header.flags.to_le_bytes());
        put(12, &header.tenant.to_le_bytes());
        put(16, &header.map_version.to_le_bytes());
        put(24, &header.epoch.0.to_le_bytes());
        put(32, &header.verifier.0.to_le_bytes());
        put(40, &header.source.to_le_bytes());
        put(44, &header.destination.to_le_bytes());
        put(48, &header.target.0.to_le_bytes());
        put(52, &header.slot.to_le_bytes());
        put(56, &header.client.to_le_bytes());
        put(64, &header.sequence.to_le_bytes());
        put(72, &header.request.to_le_bytes());
        put(80, &header.credits.to_le_bytes());
        put(84, &header.credit_bytes.to_le_bytes());
        put(88, &header.reply_bytes_max.to_le_bytes());
        put(92, &(self.body.len() as u32).to_le_bytes());
        put(96, &(self.payload_bytes() as u32).to_le_bytes());
        put(100, &crc32c(&self.body).to_le_bytes());
        put(104, &payload_crc.to_le_bytes());
        let crc = crc32c(&bytes[..CRC_AT]);
        bytes[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Takes one frame off the front of `bytes`: the frame and its length, or `None` when more
    /// bytes are needed. Copies; a socket reads the parts into place instead.
    ///
    /// # Errors
    ///
    /// When the bytes are no frame.
    pub fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, FrameError> {
        let Some((fixed, rest)) = bytes.split_first_chunk() else { return Ok(None) };
        let announced = Announced::decode(fixed)?;
        let total = announced.body_bytes + announced.payload_bytes;
        let Some(rest) = rest.get(..total) else { return Ok(None) };
        let (body, payload) = rest.split_at(announced.body_bytes);
        let payload = (!payload.is_empty()).then(|| Buf::copy_of(payload));
        Ok(Some((announced.complete(body.to_vec(), payload)?, HEADER_BYTES + total)))
    }
}

/// The version of frames of this kind.
fn version_of(kind: u8) -> u16 {
    if kind == HELLO { HELLO_VERSION } else { VERSION }
}

fn join(parts: &[Buf]) -> Buf {
    let mut whole = BufMut::for_overwrite(bytes_in(parts) as usize);
    let mut at = 0;
    for part in parts {
        whole[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    }
    whole.freeze()
}

/// Encodes a message (postcard).
///
/// # Panics
///
/// Never for the messages of this crate: they hold nothing that postcard cannot encode.
#[must_use]
pub fn encode_body<T: Serialize>(message: &T) -> Vec<u8> {
    postcard::to_stdvec(message).expect("every message can be encoded")
}

/// Decodes a message; all bytes must belong to it.
///
/// # Errors
///
/// [`FrameError::Message`].
pub fn decode_body<T: DeserializeOwned>(body: &[u8]) -> Result<T, FrameError> {
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        Ok(_) | Err(_) => Err(FrameError::Message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::{Lock, LockOwner, LockRange, LockSort};
    use crate::meta::{MetaReply, MetaRequest};
    use crate::object::{ObjectReply, ObjectRequest};
    use proptest::prelude::*;

    fn flat(frame: &Frame) -> Vec<u8> {
        let mut bytes = frame.encode_head().to_vec();
        for part in &frame.payload {
            bytes.extend_from_slice(part);
        }
        bytes
    }

    fn any_header() -> impl Strategy<Value = Header> {
        let small = (1..7u8, 0..2u8, 0..8u32, any::<[u32; 8]>());
        (small, any::<[u64; 6]>()).prop_map(|((kind, class, flags, a), b)| Header {
            kind: [Kind::Request, Kind::Reply, Kind::OneWay, Kind::Hello, Kind::Ping, Kind::Pong]
                [usize::from(kind) - 1],
            class: [Class::Foreground, Class::Background][usize::from(class)],
            flags,
            tenant: a[0],
            source: a[1],
            destination: a[2],
            target: TargetId(a[3]),
            slot: a[4],
            credits: a[5],
            credit_bytes: a[6],
            reply_bytes_max: a[7],
            map_version: b[0],
            epoch: Epoch(b[1]),
            verifier: BootVerifier(b[2]),
            client: b[3],
            sequence: b[4],
            request: b[5],
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn what_is_encoded_is_decoded(
            header in any_header(),
            body in proptest::collection::vec(any::<u8>(), 0..300),
            parts in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..5000), 0..4),
        ) {
            let payload = parts.iter().map(|part| Buf::copy_of(part)).collect();
            let frame = Frame { header, body, payload };
            let bytes = flat(&frame);
            for short in [0, 1, HEADER_BYTES, bytes.len() - 1] {
                prop_assume!(short < bytes.len());
                prop_assert!(Frame::parse(&bytes[..short]).expect("sound").is_none());
            }
            let (parsed, length) = Frame::parse(&bytes).expect("sound").expect("whole");
            prop_assert_eq!(length, bytes.len());
            prop_assert_eq!(parsed.header, frame.header);
            prop_assert_eq!(&parsed.body, &frame.body);
            prop_assert_eq!(&parsed.payload_joined()[..], &parts.concat()[..]);
        }

        #[test]
        fn a_changed_byte_is_found(
            header in any_header(),
            body in proptest::collection::vec(any::<u8>(), 1..60),
            at in any::<prop::sample::Index>(),
            flip in 1..=255u8,
        ) {
            let payload = Buf::copy_of(&body).into_vec();
            let mut bytes = flat(&Frame { header, body, payload });
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            prop_assert!(Frame::parse(&bytes).is_err());
        }

        /// Sound checksums around garbage: only the field checks and the decoder stand.
        #[test]
        fn garbage_never_panics(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..400),
            disguised in any::<bool>(),
        ) {
            if disguised && bytes.len() >= HEADER_BYTES {
                bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
                let version = version_of(bytes[6]);
                bytes[4..6].copy_from_slice(&version.to_le_bytes());
                let crc = crc32c(&bytes[..CRC_AT]);
                bytes[CRC_AT..HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
            }
            let _ = Frame::parse(&bytes);
            let _ = decode_body::<MetaRequest>(&bytes);
            let _ = decode_body::<MetaReply>(&bytes);
            let _ = decode_body::<ObjectRequest>(&bytes);
            let _ = decode_body::<ObjectReply>(&bytes);
        }
    }

    #[test]
    fn lengths_are_refused_before_anything_is_allocated() {
        let mut bytes = Frame::new(Header::new(Kind::Request), Vec::new()).encode_header(0);
        bytes[92..96].copy_from_slice(&u32::MAX.to_le_bytes());
        let crc = crc32c(&bytes[..CRC_AT]);
        bytes[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        let refused = Announced::decode(&bytes).expect_err("too long");
        assert_eq!(refused, FrameError::BodyTooLong { bytes: u32::MAX as usize });
    }

    /// Whoever speaks another version can say so, and be told so.
    #[test]
    fn a_hello_is_written_as_in_version_1() {
        let version = |kind| flat(&Frame::new(Header::new(kind), Vec::new()))[4];
        assert_eq!((version(Kind::Hello), version(Kind::Request)), (1, 3));
        let mut old = flat(&Frame::new(Header::new(Kind::Request), Vec::new()));
        old[4] = 1;
        assert_eq!(Frame::parse(&old).expect_err("old"), FrameError::Version { found: 1 });
    }

    #[test]
    fn a_message_in_itself_is_refused() {
        let close = || MetaRequest::Close { ino: levada_base::ids::Ino(1) };
        let several = |requests| MetaRequest::Several { requests };
        let body = encode_body(&several(vec![close(), close()]));
        assert_eq!(decode_body::<MetaRequest>(&body), Ok(several(vec![close(), close()])));
        let nested = encode_body(&several(vec![several(vec![close()])]));
        assert_eq!(decode_body::<MetaRequest>(&nested), Err(FrameError::Message));
        // Decoding goes on after that.
        assert!(decode_body::<MetaRequest>(&body).is_ok());
        let many = encode_body(&several((0..=crate::meta::SEVERAL_MAX).map(|_| close()).collect()));
        assert_eq!(decode_body::<MetaRequest>(&many), Err(FrameError::Message));
        // Two bytes a level: its kind, and that one follows.
        let deep = nested[..2].repeat(500_000);
        assert_eq!(decode_body::<MetaRequest>(&deep), Err(FrameError::Message));
        let reply = encode_body(&MetaReply::Several(vec![MetaReply::Several(Vec::new())]));
        assert_eq!(decode_body::<MetaReply>(&reply), Err(FrameError::Message));
    }

    #[test]
    fn a_vector_that_claims_a_huge_length_allocates_little() {
        // ObjectRequest has no vectors; Reclaim is the third variant of MetaRequest.
        let mut body = vec![2];
        body.extend([0xff; 9]);
        body.push(1);
        assert_eq!(decode_body::<MetaRequest>(&body), Err(FrameError::Message));
    }

    #[test]
    fn the_longest_attribute_fits_a_frame() {
        let set = MetaRequest::SetXattr {
            caller: crate::meta::Caller { uid: u32::MAX, gid: u32::MAX },
            ino: levada_base::ids::Ino(u64::MAX),
            name: vec![b'x'; crate::xattr::NAME_BYTES_MAX],
            value: vec![255; crate::xattr::VALUE_BYTES_MAX],
            how: crate::meta::SetXattr { flags: u32::MAX, clear_set_gid: true },
        };
        let body = encode_body(&set);
        assert_eq!(decode_body::<MetaRequest>(&body), Ok(set));
        assert_eq!(Frame::new(Header::new(Kind::Request), body).check(), Ok(()));
        let reply = MetaReply::Xattr(vec![255; crate::xattr::VALUE_BYTES_MAX]);
        let body = encode_body(&reply);
        assert_eq!(decode_body::<MetaReply>(&body), Ok(reply));
        assert_eq!(Frame::new(Header::new(Kind::Reply), body).check(), Ok(()));
    }

    #[test]
    fn the_longest_part_of_a_reclaim_fits_a_frame() {
        let opens = vec![(levada_base::ids::Ino(u64::MAX), u32::MAX); crate::meta::RECLAIM_MAX];
        let part = MetaRequest::Reclaim { opens, locks: Vec::new(), last: true };
        let body = encode_body(&part);
        assert_eq!(decode_body::<MetaRequest>(&body), Ok(part));
        // `last` is all that is missing.
        assert_eq!(decode_body::<MetaRequest>(&body[..body.len() - 1]), Err(FrameError::Message));
        assert_eq!(Frame::new(Header::new(Kind::Request), body).check(), Ok(()));
        let owner = LockOwner { sort: LockSort::Flock, id: u64::MAX };
        let range = LockRange { start: u64::MAX, end: u64::MAX };
        let lock = Lock { owner, range, exclusive: true, pid: u32::MAX };
        let locks = vec![(levada_base::ids::Ino(u64::MAX), lock); crate::meta::RECLAIM_LOCKS_MAX];
        let part = MetaRequest::Reclaim { opens: Vec::new(), locks, last: true };
        let body = encode_body(&part);
        assert_eq!(decode_body::<MetaRequest>(&body), Ok(part));
        assert_eq!(Frame::new(Header::new(Kind::Request), body).check(), Ok(()));
    }
}
