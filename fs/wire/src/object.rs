//! Requests to an object target. Data travels as the frame's payload, not in the body.

use levada_base::ids::{BootVerifier, ObjectId, Seq};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Ranges in the answer to a [`ObjectRequest::DataRanges`].
pub const RANGES_MAX: u32 = 1024;

/// When a write may be acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stability {
    /// The client keeps the data until a COMMIT covers it, and sends it again when the
    /// verifier has changed.
    Unstable,
    /// Survives any crash once acknowledged.
    Durable,
    /// As `Unstable`, and an earlier life of the target acknowledged it: it is sent again, and must not
    /// be refused because the target is full.
    Again,
}

/// A range of an object that reads as zeroes and takes no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hole {
    pub offset: u64,
    pub bytes: u64,
    /// As zeroes that are written: the object is made if there is none, and reaches the end of the hole, which may
    /// be empty. Else the size stays, and there must be an object.
    pub grows: bool,
}

/// A request to an object target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ObjectRequest {
    /// Payload: the bytes. Creates the object.
    Write { object: ObjectId, offset: u64, stability: Stability },
    /// Reply payload: `bytes` bytes, zeroes in holes and past the end.
    Read { object: ObjectId, offset: u64, bytes: u64 },
    /// Makes everything up to `upto` durable (everything the target has, when it is `Seq(u64::MAX)`).
    Commit { upto: Seq },
    /// Size and existence.
    Stat { object: ObjectId },
    /// Sets the size exactly; bytes beyond read as zeroes when it grows again. Creates the
    /// object. Unstable.
    Truncate { object: ObjectId, size: u64 },
    /// Removes the object; durable when answered. Fine when there is none.
    Delete { object: ObjectId },
    /// Space of the target.
    Space,
    /// Makes a hole; `stability` as for Write.
    Punch { object: ObjectId, hole: Hole, stability: Stability },
    /// The first `ranges_max` (at most [`RANGES_MAX`], not 0) ranges that hold data, from `offset` on.
    DataRanges { object: ObjectId, offset: u64, ranges_max: u32 },
}

impl ObjectRequest {
    /// The request's kind, for logs.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Write { .. } => "Write",
            Self::Read { .. } => "Read",
            Self::Commit { .. } => "Commit",
            Self::Stat { .. } => "Stat",
            Self::Truncate { .. } => "Truncate",
            Self::Delete { .. } => "Delete",
            Self::Space => "Space",
            Self::Punch { .. } => "Punch",
            Self::DataRanges { .. } => "DataRanges",
        }
    }
}

/// What a target answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ObjectReply {
    /// For Write, Truncate, Punch, Delete and Commit.
    Done {
        verifier: BootVerifier,
        /// Of this change; for Commit the one that was asked for.
        seq: Seq,
        /// Everything up to here is durable.
        durable: Seq,
    },
    /// The payload holds the bytes.
    Data,
    /// For Stat; `None` when there is no such object.
    Stat {
        verifier: BootVerifier,
        stat: Option<ObjectStat>,
    },
    Space {
        total_bytes: u64,
        free_bytes: u64,
        /// Of the free ones those that must be cleaned before they can be written.
        coming_bytes: u64,
    },
    Failed(ObjectFault),
    DataRanges(DataRanges),
}

/// The body of an answer with the flag [`RESTARTED`](crate::frame::flags::RESTARTED).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restarted {
    /// The changes up to here that the life named in the request acknowledged are still there, and no later
    /// one is; `Seq(0)`: not known, perhaps none.
    pub survived: Seq,
}

/// What is known of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectStat {
    /// One past the last byte written, or as truncated.
    pub size: u64,
    /// Bytes that extents hold.
    pub stored_bytes: u64,
}

/// Where an object has data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataRanges {
    /// In order, none empty; neighbours are one.
    pub ranges: Vec<Range<u64>>,
    /// All data between the offset asked for and here, which is behind it, is in `ranges`; `u64::MAX` when nothing
    /// follows.
    pub upto: u64,
}

/// Why an object target refused; the variants differ by what the client does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum ObjectFault {
    /// For Read, DataRanges and a Punch that does not grow: the inode decides whether that is a hole or EIO.
    #[error("no such object")]
    NoSuchObject,
    /// ENOSPC.
    #[error("the target is full")]
    Full,
    /// EIO for these bytes only: lost beyond what parity repairs.
    #[error("{bytes} bytes at {offset} are damaged")]
    Damaged { offset: u64, bytes: u64 },
    /// The request makes no sense; a bug or an attack.
    #[error("invalid request")]
    Invalid,
    /// The target stops (array lost too many members, fenced, ...): reconnect and try again.
    #[error("the target is not available")]
    Unavailable,
}
