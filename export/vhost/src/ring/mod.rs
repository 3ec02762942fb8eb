//! Vrings: the queues in a client's memory, split and packed (virtio 1.2, 2.7 and 2.8).
//!
//! [`Ring::pop`] takes the next chain that the driver has made available, [`Ring::push`] gives chains back in batches. No
//! I/O: whether the other side must be told is an answer, telling it is the caller's.
//!
//! What always holds:
//! - Every field of the client's memory is read once, and what was read is checked: the client may change it meanwhile.
//! - No more chains are out than the ring has room for, and none twice. A ring that breaks the rules is [`Broken`], which
//!   costs its client that queue and nobody else anything.
//! - With in-flight memory ([`crate::inflight`]), a chain is noted there before anything is done for it, until the driver has it
//!   back.

#[cfg(test)]
mod crash;
#[cfg(test)]
mod driver;
mod packed;
mod split;

use crate::inflight::Inflight;
use crate::memory::{Memory, Outside, Window};
use smallvec::SmallVec;
use std::sync::atomic::Ordering;
use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};

pub(crate) use packed::{Noted, Packed, Position};
pub(crate) use split::Split;

/// Descriptors of a ring, and of a chain.
pub(crate) const DESCRIPTORS_MAX: u16 = 1024;
const DESCRIPTOR_BYTES: u32 = 16;

const NEXT: u16 = VRING_DESC_F_NEXT as u16;
const WRITE: u16 = VRING_DESC_F_WRITE as u16;
const INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;

/// How a driver, or who pretends to be one, broke its ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    #[error("the ring is not in the memory of its client, or not aligned")]
    Place,
    #[error("a ring of {0} descriptors")]
    Size(u32),
    #[error("its size or features changed while it was in use")]
    Changed,
    #[error("more chains are available than the ring holds")]
    Overrun,
    #[error("descriptor {0}, which the ring does not have")]
    Index(u16),
    #[error("a chain was made available again before it was used")]
    Again,
    #[error("a chain is too long, or goes round")]
    TooLong,
    #[error("a table of indirect descriptors is no such, or not in the client's memory")]
    Indirect,
    #[error("a descriptor to be read follows one to be written")]
    Order,
    #[error("a request without room for its status")]
    NoStatus,
    #[error("the memory of the client is gone")]
    Lost,
    #[error("what was in flight before is told wrongly")]
    Inflight,
}

impl From<Outside> for Broken {
    fn from(_: Outside) -> Self {
        Self::Place
    }
}

/// Where the parts of a ring lie, as addresses of the client's process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Addresses {
    pub descriptors: u64,
    /// What the driver writes: available ring or event suppression.
    pub driver: u64,
    /// What the device writes: used ring or event suppression.
    pub device: u64,
}

/// What a ring is made from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub size: u16,
    pub addresses: Addresses,
    /// `VIRTIO_F_RING_PACKED`
    pub is_packed: bool,
    /// `VIRTIO_F_EVENT_IDX`
    pub has_event_index: bool,
}

/// Bytes of the client, next to each other in its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub at: u64,
    pub bytes: u32,
}

pub(crate) type Spans = SmallVec<[Span; 4]>;

/// What tells a chain from others while it is out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token {
    /// Split: the first descriptor. Packed: the buffer's ID.
    id: u16,
    /// Entries of the ring that it takes: 1 in split rings, descriptors in packed ones.
    entries: u16,
    /// Where in-flight memory has it.
    note: u16,
}

#[cfg(any(test, feature = "fuzz"))]
impl Token {
    /// Of a chain that comes from no ring.
    pub(crate) fn of_none() -> Self {
        Self { id: 0, entries: 1, note: 0 }
    }
}

/// A request: what the device may read, and what it is to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chain {
    pub token: Token,
    pub readable: Spans,
    pub writable: Spans,
}

/// A chain that is done with, and how many bytes were written to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Used {
    pub token: Token,
    pub bytes: u32,
}

pub(crate) enum Ring {
    Split(Split),
    Packed(Packed),
}

impl Ring {
    /// The ring that `shape` says, from `base` on, which is as [`Ring::base`] gave it. With `inflight`, chains that were out
    /// when an earlier back end ended are the first to be popped.
    pub(crate) fn new(
        memory: &Memory,
        shape: &Shape,
        base: u32,
        inflight: Option<Inflight>,
    ) -> Result<Self, Broken> {
        let size = shape.size;
        if size == 0 || size > DESCRIPTORS_MAX || (!shape.is_packed && !size.is_power_of_two()) {
            return Err(Broken::Size(size.into()));
        }
        Ok(match shape.is_packed {
            true => Self::Packed(Packed::new(memory, shape, base, inflight)?),
            false => Self::Split(Split::new(memory, shape, base, inflight)?),
        })
    }

    /// Goes on in other memory, which is where the ring lies now.
    pub(crate) fn moved(&mut self, memory: &Memory, shape: &Shape) -> Result<(), Broken> {
        match self {
            Self::Split(ring) => ring.moved(memory, shape),
            Self::Packed(ring) => ring.moved(memory, shape),
        }
    }

    /// Where to go on once all chains are back, for `VHOST_USER_GET_VRING_BASE`.
    pub(crate) fn base(&self) -> u32 {
        match self {
            Self::Split(ring) => ring.base(),
            Self::Packed(ring) => ring.base(),
        }
    }

    /// True when [`Ring::pop`] has something to give, or to complain of.
    #[inline]
    pub(crate) fn has_available(&self) -> bool {
        match self {
            Self::Split(ring) => ring.has_available(),
            Self::Packed(ring) => ring.has_available(),
        }
    }

    /// Takes the next chain.
    #[inline]
    pub(crate) fn pop(&mut self, memory: &Memory) -> Result<Option<Chain>, Broken> {
        match self {
            Self::Split(ring) => ring.pop(memory),
            Self::Packed(ring) => ring.pop(memory),
        }
    }

    /// Gives chains back; true when the driver wants to be told.
    pub(crate) fn push(&mut self, used: &[Used]) -> bool {
        if used.is_empty() {
            return false;
        }
        match self {
            Self::Split(ring) => ring.push(used),
            Self::Packed(ring) => ring.push(used),
        }
    }

    /// Says whether the driver is to tell of chains that it makes available. After saying so look once more: one that came
    /// before the driver saw it is not told of.
    pub(crate) fn want_kicks(&self, wanted: bool) {
        match self {
            Self::Split(ring) => ring.want_kicks(wanted),
            Self::Packed(ring) => ring.want_kicks(wanted),
        }
    }
}

/// A descriptor, read once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Descriptor {
    at: u64,
    bytes: u32,
    /// The last two fields, which split and packed rings use differently.
    third: u16,
    fourth: u16,
}

impl Descriptor {
    /// Reads number `index` of a table, the second half first: in packed rings that says whether the rest is there.
    #[inline]
    fn read(table: &Window, index: u16) -> Self {
        let offset = index as usize * DESCRIPTOR_BYTES as usize;
        let rest = table.load_u64(offset + 8, Ordering::Acquire);
        let at = table.load_u64(offset, Ordering::Relaxed);
        Self { at, bytes: rest as u32, third: (rest >> 32) as u16, fourth: (rest >> 48) as u16 }
    }
}

/// The spans of a chain as its descriptors are read.
#[derive(Default)]
struct Gathering {
    readable: Spans,
    writable: Spans,
    descriptors: u16,
}

impl Gathering {
    /// The next descriptor that names data.
    #[inline]
    fn add(&mut self, descriptor: Descriptor, flags: u16) -> Result<(), Broken> {
        self.descriptors += 1;
        if self.descriptors > DESCRIPTORS_MAX {
            return Err(Broken::TooLong);
        }
        let span = Span { at: descriptor.at, bytes: descriptor.bytes };
        if flags & WRITE != 0 {
            self.writable.push(span);
        } else if self.writable.is_empty() {
            self.readable.push(span);
        } else {
            return Err(Broken::Order);
        }
        Ok(())
    }
}

/// The table that an indirect descriptor names, and how many descriptors it holds.
fn indirect_table(memory: &Memory, descriptor: Descriptor) -> Result<(Window, u16), Broken> {
    let bytes = descriptor.bytes;
    let count = bytes / DESCRIPTOR_BYTES;
    if !bytes.is_multiple_of(DESCRIPTOR_BYTES) || count == 0 || count > DESCRIPTORS_MAX.into() {
        return Err(Broken::Indirect);
    }
    let table = memory.window(descriptor.at, bytes.into()).map_err(|_| Broken::Indirect)?;
    // The specification asks for no alignment of tables, but every driver aligns them; fields are read as atomics.
    if !table.is_aligned(8) {
        return Err(Broken::Indirect);
    }
    Ok((table, count as u16))
}

/// True when `event` lies among the `new - old` entries that end with `new` (virtio 1.2, 2.7.7.1).
#[inline]
fn passes(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}
