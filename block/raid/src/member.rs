//! One member: its device, its standing, and what it has done so far.

use crate::engine::UNREADABLE_CHUNKS_MAX;
use crate::journal::Ring;
use crate::slow::Recent;
use levada_base::ids::Uuid;
use levada_base::meter::Latency;
use levada_base::planted;
use levada_base::reactor::Instant;
use levada_base::sync::Notify;
use levada_device::Device;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;

/// One member's standing in its array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberState {
    /// Plays a role, all its data is good.
    InSync,
    /// Plays a role; good data below `next_slot`, stale data from there on.
    Rebuilding { next_slot: u64 },
    /// Takes no I/O until it is replaced.
    Faulty,
    /// Good, without a role.
    Spare,
}

/// What a member that went away holds all the same: everything that it held when the array was at this generation, but for
/// the missed stripes; or nothing that can be relied upon, but it is wanted back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    /// Not 0. Its own superblock is of this generation or a later one, unless it was put back as it was before.
    pub generation: u64,
    /// It takes part again as soon as it is found. Else only when somebody says so: it has failed, or was taken out.
    pub by_itself: bool,
    /// The map tells what it misses, so that it catches up. Else it gets everything anew.
    pub is_told: bool,
}

impl Held {
    const BY_ITSELF: u64 = 1 << 63;
    /// Of members that are out alone: whoever does not know this bit takes one for older than it may be, and leaves it out. Of one that is
    /// rebuilt such a reader would believe that it catches up.
    const UNTOLD: u64 = 1 << 62;

    /// As superblocks have it; 0 says that there is no such thing.
    pub fn to_bits(self) -> u64 {
        let bit = |is_set: bool, bit: u64| if is_set { bit } else { 0 };
        self.generation | bit(self.by_itself, Self::BY_ITSELF) | bit(!self.is_told, Self::UNTOLD)
    }

    pub fn from_bits(bits: u64) -> Option<Self> {
        let generation = bits & !(Self::BY_ITSELF | Self::UNTOLD);
        let by_itself = bits & Self::BY_ITSELF != 0;
        let is_told = bits & Self::UNTOLD == 0;
        (generation > 0).then_some(Self { generation, by_itself, is_told })
    }
}

/// What may happen to a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemberEvent {
    /// An operation failed in a way that leaves the device's content unknown, or an operator
    /// said so.
    Failed,
    /// A spare takes a vacant role.
    TookRole,
    /// Every slot below this holds good data.
    RebuiltTo { next_slot: u64 },
    /// Every slot holds good data, flushed.
    RebuildDone,
}

impl MemberState {
    /// Every change of standing happens here.
    #[must_use]
    pub(crate) fn after(self, event: MemberEvent) -> Self {
        use {MemberEvent::*, MemberState::*};
        match (self, event) {
            (InSync | Rebuilding { .. } | Spare, Failed) => Faulty,
            (Spare, TookRole) => Rebuilding { next_slot: 0 },
            (Rebuilding { .. }, RebuiltTo { next_slot }) => Rebuilding { next_slot },
            (Rebuilding { .. }, RebuildDone) => InSync,
            // Completions already in flight when the member failed.
            (Faulty, Failed | RebuiltTo { .. } | RebuildDone) => Faulty,
            // The engine refuses these before they become events.
            (InSync | Rebuilding { .. } | Faulty, TookRole)
            | (InSync | Spare, RebuiltTo { .. } | RebuildDone) => {
                unreachable!("{event:?} while {self:?}")
            }
        }
    }

    /// True when superblocks and map pages go to it.
    #[must_use]
    pub fn is_live(self) -> bool {
        !matches!(self, Self::Faulty)
    }
}

/// A member. A replacement is a new one, so that completions of the old device cannot be taken
/// for the new one's.
pub(crate) struct Member {
    /// Place in the table of the superblock.
    pub index: usize,
    pub uuid: Uuid,
    pub name: String,
    pub enclosure: u16,
    pub device: Option<Rc<dyn Device>>,
    pub role: Cell<Option<usize>>,
    pub state: Cell<MemberState>,
    /// Where on it its newest superblock lies, if it has one.
    pub superblock_at: Cell<Option<u64>>,
    /// While it rebuilds: every slot below this holds good data, flushed. Behind the cursor in
    /// `state`, which reads may follow but no superblock may tell.
    slots_flushed: Cell<u64>,
    /// It is rebuilt, and the next superblock says so; until that is on record nobody may rely on it.
    pub is_rebuilt: Cell<bool>,
    /// While it is out or rebuilt: what it holds nevertheless.
    pub held: Cell<Option<Held>>,
    /// It vanished, and until then no spare takes its role.
    pub awaited_until: Cell<Option<Instant>>,
    /// Volatile writes completed, and how many of them a flush covers.
    pub writes: Cell<u64>,
    pub flushed: Cell<u64>,
    pub flushing: Cell<bool>,
    pub flush_ended: Notify,
    pub in_flight: Cell<u32>,
    /// Its records of the journal.
    pub ring: RefCell<Ring>,
    /// Chunks in which something could not be read since open, until there are too many.
    unreadable: RefCell<BTreeSet<u64>>,
    /// Blocks that a rebuild left out, by their offset: what the device holds there is not what the member should.
    /// Seldom any. At the next start [`crate::lost`] tells of them again, on mirrors [`crate::mark`]s.
    left_out: RefCell<BTreeSet<u64>>,
    pub stats: Stats,
    pub recent: Recent,
}

/// Counters since open.
#[derive(Default)]
pub(crate) struct Stats {
    pub bytes_read: Cell<u64>,
    pub bytes_written: Cell<u64>,
    pub medium_errors: Cell<u64>,
    pub io_errors: Cell<u64>,
    /// Chunks rewritten from redundancy, by read repair and scrub.
    pub repairs: Cell<u64>,
    pub latency: Latency,
}

pub(crate) fn add(counter: &Cell<u64>, amount: u64) {
    counter.set(counter.get() + amount);
}

impl Member {
    pub fn new(
        index: usize,
        identity: (Uuid, String, u16),
        device: Option<Rc<dyn Device>>,
        role: Option<usize>,
        state: MemberState,
    ) -> Rc<Self> {
        let (uuid, name, enclosure) = identity;
        let slots_flushed = match state {
            MemberState::Rebuilding { next_slot } => next_slot,
            MemberState::InSync | MemberState::Faulty | MemberState::Spare => 0,
        };
        Rc::new(Self {
            index,
            uuid,
            name,
            enclosure,
            device,
            role: Cell::new(role),
            state: Cell::new(state),
            superblock_at: Cell::new(None),
            slots_flushed: Cell::new(slots_flushed),
            is_rebuilt: Cell::new(false),
            held: Cell::new(None),
            awaited_until: Cell::new(None),
            // An owner that was killed may have left writes in the drive's cache: the first flush is
            // never for nothing.
            writes: Cell::new(1),
            flushed: Cell::new(0),
            flushing: Cell::new(false),
            flush_ended: Notify::default(),
            in_flight: Cell::new(0),
            ring: RefCell::default(),
            unreadable: RefCell::default(),
            left_out: RefCell::default(),
            stats: Stats::default(),
            recent: Recent::default(),
        })
    }

    /// Other machines reach it as well.
    pub fn is_shared(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.is_shared())
    }

    /// Whether it has everything that its role is to have.
    pub fn is_in_sync(&self) -> bool {
        self.state.get() == MemberState::InSync
    }

    pub fn is_live(&self) -> bool {
        self.state.get().is_live()
    }

    /// True when this slot can be read from it.
    pub fn has(&self, slot: u64) -> bool {
        match self.state.get() {
            MemberState::InSync => true,
            MemberState::Rebuilding { next_slot } => slot < next_slot,
            MemberState::Faulty | MemberState::Spare => false,
        }
    }

    /// The standing as a superblock may tell it: whoever records one, for whatever reason, the
    /// cursor on disk stays behind a flush.
    pub fn recorded_state(&self) -> MemberState {
        match self.state.get() {
            MemberState::Rebuilding { .. } if self.is_rebuilt.get() => MemberState::InSync,
            MemberState::Rebuilding { .. } if !planted!("raid-cursor-told-early") => {
                MemberState::Rebuilding { next_slot: self.slots_flushed.get() }
            }
            state => state,
        }
    }

    /// A flush covers every slot that was rebuilt below this.
    pub fn flushed_to(&self, next_slot: u64) {
        self.slots_flushed.set(next_slot);
    }

    /// Something in this chunk could not be read: true when that is so in too many by now.
    pub fn is_unreadable_in_many(&self, chunk: u64) -> bool {
        let mut unreadable = self.unreadable.borrow_mut();
        if unreadable.len() < UNREADABLE_CHUNKS_MAX {
            unreadable.insert(chunk);
        }
        unreadable.len() >= UNREADABLE_CHUNKS_MAX
    }

    /// Chunks in which something could not be read since open.
    pub fn unreadable_chunks(&self) -> u64 {
        self.unreadable.borrow().len() as u64
    }

    /// A rebuild could not make the block at this offset.
    pub fn leave_out(&self, at: u64) {
        self.left_out.borrow_mut().insert(at);
    }

    /// How many blocks were left out, as far as is known.
    pub fn lacks_blocks(&self) -> u64 {
        self.left_out.borrow().len() as u64
    }

    /// True when a block in this range was left out.
    pub fn lacks(&self, range: &Range<u64>) -> bool {
        let left_out = self.left_out.borrow();
        !left_out.is_empty() && left_out.range(range.clone()).next().is_some()
    }

    /// This range was written, or has no content any more.
    pub fn lacks_no_more(&self, range: &Range<u64>) {
        let mut left_out = self.left_out.borrow_mut();
        // Every write passes here, and there may be very many.
        while let Some(at) = left_out.range(range.clone()).next().copied() {
            left_out.remove(&at);
        }
    }

    pub fn apply(&self, event: MemberEvent) {
        self.state.set(self.state.get().after(event));
    }
}
