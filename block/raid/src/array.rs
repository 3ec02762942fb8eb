//! The array trait: a device plus what a store needs to know about stripes.

use crate::pace::Foreground;
use levada_base::{IoVec, IoVecMut};
use levada_device::{Device, IoFuture};

/// On whose behalf an I/O happens; quality of service tells them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoClass {
    Foreground,
    Rebuild,
    Scrub,
    Clean,
}

/// A set of members by index, at most 64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MemberSet(pub u64);

impl MemberSet {
    /// The empty set.
    pub const NONE: Self = Self(0);

    /// The set of one member.
    #[must_use]
    pub fn only(member: usize) -> Self {
        Self(1 << member)
    }

    /// This set and `member`.
    #[must_use]
    pub fn with(self, member: usize) -> Self {
        Self(self.0 | 1 << member)
    }

    #[must_use]
    pub fn contains(self, member: usize) -> bool {
        self.0 >> member & 1 == 1
    }

    #[must_use]
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// How an array lays data out, as its users see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrayGeometry {
    /// Data bytes of one stripe: what [`Array::write_fresh`] takes.
    pub stripe_bytes: u64,
    /// Contiguous data bytes on one member.
    pub chunk_bytes: u64,
    /// `capacity_bytes / stripe_bytes`.
    pub stripes: u64,
    /// Members that may be lost without losing data.
    pub tolerates: usize,
}

/// A device made of members. Device offset `stripe * stripe_bytes` is the start of that stripe.
///
/// Unwritten stripes read as zeroes. Where a level with parity has no room for its journal,
/// [`Device::write`] fails with `NotFresh`.
pub trait Array: Device {
    fn geometry(&self) -> ArrayGeometry;

    /// Declares that `count` stripes from `first` on hold nothing and are about to be written:
    /// durable before any of them is. From now until it is written, such a stripe reads as
    /// anything, so on a mirror its copies may disagree ([`Device::read_agreed`]). Cheap per call, not per stripe:
    /// declare a whole segment at once.
    fn declare_fresh(&self, first: u64, count: u64) -> IoFuture<'_, ()>;

    /// Writes one whole stripe that was declared fresh. Needs no log and reads nothing.
    /// Volatile until a flush. `data` totals `stripe_bytes`.
    fn write_fresh(&self, stripe: u64, data: IoVec, class: IoClass) -> IoFuture<'_, ()>;

    /// Reads like [`Device::read`], but takes nothing from `avoid`: what they hold is
    /// reconstructed from the others, and nothing else is. For data whose checksum proved a member wrong.
    fn read_avoiding(
        &self,
        at: u64,
        into: IoVecMut,
        avoid: MemberSet,
        class: IoClass,
    ) -> IoFuture<'_, IoVecMut>;

    /// The members that hold the data bytes of `at..at + bytes`, for [`Array::read_avoiding`].
    fn members_of(&self, at: u64, bytes: u64) -> MemberSet;

    /// Writes a chunk-aligned block range of a stripe anew from the good contents `data`
    /// (which parity already agrees with): repair after a checksum error, not an overwrite. Fails with `NotFresh` where the
    /// stripe was overwritten in place, as then what the caller read says nothing any more.
    fn repair(&self, at: u64, data: IoVec) -> IoFuture<'_, ()>;

    /// Gives whole stripes back: durable when this completes. They read as zeroes, and rebuild
    /// and scrub skip them.
    fn discard_stripes(&self, first: u64, count: u64) -> IoFuture<'_, ()>;

    /// True when `stripe` was declared fresh and not discarded since.
    fn is_written(&self, stripe: u64) -> bool;

    /// What foreground I/O the array has, for a store's own work on it to give way ([`crate::Pace`]).
    fn foreground(&self) -> &Foreground;
}
