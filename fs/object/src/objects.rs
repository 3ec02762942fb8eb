//! What the service needs of a store of objects.

use levada_base::IoVec;
use levada_base::ids::{BootVerifier, ObjectId, Seq};
use levada_wire::object::{DataRanges, Hole, ObjectFault, ObjectStat, Stability};
use std::future::Future;
use std::pin::Pin;

/// An operation in flight; when dropped it may still happen.
pub type ObjectFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, ObjectFault>> + 'a>>;

/// A change was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack {
    /// Of the change.
    pub seq: Seq,
    /// Everything up to here is durable.
    pub durable: Seq,
}

/// Space of a target, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    pub total_bytes: u64,
    pub free_bytes: u64,
    /// Of the free ones those that must be cleaned before they can be written.
    pub coming_bytes: u64,
}

/// The objects of one target: the object log, or [`crate::MemoryObjects`].
pub trait Objects {
    /// Drawn anew whenever unstable data may have been lost.
    fn verifier(&self) -> BootVerifier;

    /// Up to where the changes that an earlier life acknowledged are still there, and no later one;
    /// `None` when none are, or that is not known.
    fn survived(&self, life: BootVerifier) -> Option<Seq>;

    /// Writes; visible when it completes. Creates the object.
    fn write(
        &self,
        object: ObjectId,
        offset: u64,
        data: IoVec,
        stability: Stability,
    ) -> ObjectFuture<'_, Ack>;

    /// Reads exactly `bytes` bytes: zeroes in holes and past the end.
    fn read(&self, object: ObjectId, offset: u64, bytes: u64) -> ObjectFuture<'_, IoVec>;

    /// Makes everything up to `upto` durable (everything there is, when that is less) and
    /// says what is durable now.
    fn commit(&self, upto: Seq) -> ObjectFuture<'_, Seq>;

    /// Sets the size exactly. Creates the object. Unstable.
    fn truncate(&self, object: ObjectId, size: u64) -> ObjectFuture<'_, Ack>;

    /// Makes a hole; visible when it completes.
    fn punch(&self, object: ObjectId, hole: Hole, stability: Stability) -> ObjectFuture<'_, Ack>;

    /// Where there is data from `offset` on: `ranges_max` ranges (not 0) at most.
    fn data_ranges(
        &self,
        object: ObjectId,
        offset: u64,
        ranges_max: u32,
    ) -> ObjectFuture<'_, DataRanges>;

    /// Removes the object if there is one; durable when it completes.
    fn delete(&self, object: ObjectId) -> ObjectFuture<'_, Ack>;

    /// `None` when there is no such object.
    fn stat(&self, object: ObjectId) -> ObjectFuture<'_, Option<ObjectStat>>;

    fn space(&self) -> ObjectFuture<'_, Space>;
}
