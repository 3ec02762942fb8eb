//! In-flight memory: what requests are out, told to the back end that comes after this one (vhost-user, "Inflight I/O
//! tracking").
//!
//! The front end keeps the memory; it outlives this process. A request is noted before anything is done for it, and its note
//! goes after the driver can see its answer. A back end that finds notes carries those requests out again, in their order.
//! That is harmless: the driver has no answer to them, so they may be carried out any number of times.
//!
//! What always holds:
//! - After a crash at any instruction, every request is noted, or still available in the ring, or used: never two of these, and
//!   never none.
//! - The memory is a client's: all that is read is checked, and what it says costs at most that client's queue.
//!
//! ```text
//! one region per queue, at multiples of its size
//! split   0 features 8 | 8 version 2 | 10 descriptors 2 | 12 last of batch 2 | 14 used 2
//!         16 ... per descriptor: 0 in flight 1 | 6 next of batch 2 | 8 counter 8
//! packed  0 features 8 | 8 version 2 | 10 descriptors 2 | 12 free 2 | 14 old free 2 | 16 used 2 | 18 old used 2
//!         20 used wrap 1 | 21 old used wrap 1
//!         32 ... per descriptor: 0 in flight 1 | 2 next 2 | 4 last 2 | 6 count 2 | 8 counter 8 | 16 the descriptor itself
//! ```

use crate::memory::Window;
use crate::ring::{Broken, Noted, Position};
use std::sync::atomic::Ordering::{Relaxed, Release};

const REGION_ALIGN: u64 = 64;
const VERSION_NOW: u16 = 1;

const VERSION: usize = 8;
const DESCRIPTORS: usize = 10;

/// Bytes of one queue's region.
pub(crate) fn region_bytes(size: u16, is_packed: bool) -> u64 {
    let bytes = match is_packed {
        false => split::FIRST + split::EACH * size as usize,
        true => packed::FIRST + packed::EACH * size as usize,
    };
    (bytes as u64).next_multiple_of(REGION_ALIGN)
}

/// The region of one queue.
#[derive(Clone)]
pub(crate) struct Inflight(pub(crate) Window);

impl Inflight {
    /// True when an earlier back end has used it. Else it is to be filled, and then marked.
    fn is_begun(&self, size: u16, bytes: usize) -> Result<bool, Broken> {
        if self.0.bytes() < bytes || !self.0.is_aligned(8) {
            return Err(Broken::Inflight);
        }
        match self.0.load_u16(VERSION, Relaxed) {
            0 => Ok(false),
            VERSION_NOW if self.0.load_u16(DESCRIPTORS, Relaxed) == size => Ok(true),
            _ => Err(Broken::Inflight),
        }
    }

    fn mark(&self, size: u16) {
        self.0.store_u16(DESCRIPTORS, size, Relaxed);
        self.0.store_u16(VERSION, VERSION_NOW, Release);
    }
}

/// The next counter behind those that were found.
fn counter_after(found: &[(u64, u16)]) -> u64 {
    found.last().map_or(0, |(counter, _)| counter.wrapping_add(1))
}

mod split {
    pub(super) const LAST_OF_BATCH: usize = 12;
    pub(super) const USED: usize = 14;
    pub(super) const FIRST: usize = 16;
    pub(super) const EACH: usize = 16;
    /// One byte, behind which is room.
    pub(super) const IN_FLIGHT: usize = 0;
    pub(super) const NEXT: usize = 6;
    pub(super) const COUNTER: usize = 8;
}

/// The notes on a split ring.
pub(crate) struct SplitNotes {
    region: Window,
    counter: u64,
    last_of_batch: u16,
}

impl SplitNotes {
    /// Takes over what an earlier back end noted, or begins: then there is nothing found. `used` is the index of the used
    /// ring.
    pub(crate) fn open(
        inflight: Inflight,
        size: u16,
        used: u16,
    ) -> Result<(Self, Option<Vec<u16>>), Broken> {
        let is_begun = inflight.is_begun(size, split::FIRST + split::EACH * size as usize)?;
        let mut notes = Self { region: inflight.0.clone(), counter: 0, last_of_batch: 0 };
        if !is_begun {
            notes.region.store_u16(split::USED, used, Relaxed);
            inflight.mark(size);
            return Ok((notes, None));
        }
        notes.last_of_batch = notes.region.load_u16(split::LAST_OF_BATCH, Relaxed);
        let batch = used.wrapping_sub(notes.region.load_u16(split::USED, Relaxed));
        if batch > size {
            // The ring began anew. Notes about another one are no notes.
            if (0..size).any(|head| notes.is_noted(head)) {
                return Err(Broken::Inflight);
            }
        } else {
            // The driver has these already.
            let mut head = notes.last_of_batch;
            for _ in 0..batch {
                if head >= size {
                    return Err(Broken::Inflight);
                }
                notes.note(head, false);
                head = notes.region.load_u16(at(head) + split::NEXT, Relaxed);
            }
        }
        notes.region.store_u16(split::USED, used, Release);
        let counter = |head| notes.region.load_u64(at(head) + split::COUNTER, Relaxed);
        let noted = (0..size).filter(|head| notes.is_noted(*head));
        let mut found: Vec<(u64, u16)> = noted.map(|head| (counter(head), head)).collect();
        found.sort_unstable();
        notes.counter = counter_after(&found);
        Ok((notes, Some(found.into_iter().map(|(_, head)| head).collect())))
    }

    fn is_noted(&self, head: u16) -> bool {
        self.region.load_u16(at(head) + split::IN_FLIGHT, Relaxed) & 0xff != 0
    }

    fn note(&self, head: u16, is_out: bool) {
        self.region.store_u16(at(head) + split::IN_FLIGHT, is_out.into(), Release);
    }

    /// A chain was taken, which the ring has.
    pub(crate) fn taken(&mut self, head: u16) {
        self.region.store_u64(at(head) + split::COUNTER, self.counter, Relaxed);
        self.counter = self.counter.wrapping_add(1);
        self.note(head, true);
    }

    /// A chain is part of the batch that is about to be used.
    pub(crate) fn using(&mut self, head: u16) {
        self.region.store_u16(at(head) + split::NEXT, self.last_of_batch, Relaxed);
        self.last_of_batch = head;
        self.region.store_u16(split::LAST_OF_BATCH, head, Release);
    }

    /// The driver can see the batch; the index of the used ring is `used` now.
    pub(crate) fn used(&mut self, heads: impl Iterator<Item = u16>, used: u16) {
        for head in heads {
            self.note(head, false);
        }
        self.region.store_u16(split::USED, used, Release);
    }
}

/// Where the note on a chain of a split ring lies.
fn at(head: u16) -> usize {
    split::FIRST + split::EACH * head as usize
}

mod packed {
    pub(super) const FREE: usize = 12;
    pub(super) const OLD_FREE: usize = 14;
    pub(super) const USED: usize = 16;
    pub(super) const OLD_USED: usize = 18;
    /// Two bytes: the wrap counter now, and the old one.
    pub(super) const WRAPS: usize = 20;
    pub(super) const FIRST: usize = 32;
    pub(super) const EACH: usize = 32;
    /// One byte, behind which is room.
    pub(super) const IN_FLIGHT: usize = 0;
    pub(super) const NEXT: usize = 2;
    pub(super) const LAST: usize = 4;
    pub(super) const COUNT: usize = 6;
    pub(super) const COUNTER: usize = 8;
    pub(super) const ID: usize = 16;
    pub(super) const FLAGS: usize = 18;
    pub(super) const BYTES: usize = 20;
    pub(super) const AT: usize = 24;
}

/// The notes on a packed ring: its descriptors are written over as they are used, so copies are kept, in entries of a list.
pub(crate) struct PackedNotes {
    region: Window,
    size: u16,
    counter: u64,
    /// What follows an entry in its list; `size` ends it. A copy, so that the client cannot change it.
    next: Vec<u16>,
    /// By first entry of a chain: its last one.
    last: Vec<u16>,
    free: u16,
    used: Position,
}

/// What an earlier back end left.
pub(crate) struct Found {
    pub used: Position,
    /// First entries and descriptors of chains, oldest first.
    pub chains: Vec<(u16, Vec<Noted>)>,
}

impl PackedNotes {
    /// Takes over what an earlier back end noted, or begins: then there is nothing found, and `used` is where the ring
    /// is. `is_used` looks whether the descriptor at a position is no longer available, `take_back` makes it so again.
    pub(crate) fn open(
        inflight: Inflight,
        size: u16,
        used: Position,
        is_used: impl Fn(Position) -> bool,
        take_back: impl Fn(Position),
    ) -> Result<(Self, Option<Found>), Broken> {
        let is_begun = inflight.is_begun(size, packed::FIRST + packed::EACH * size as usize)?;
        let next = (1..=size).collect();
        let last = vec![0; size.into()];
        let region = inflight.0.clone();
        let mut notes = Self { region, size, counter: 0, next, last, free: 0, used };
        if !is_begun {
            for entry in 0..size {
                notes.store(entry, packed::NEXT, notes.next[entry as usize]);
            }
            notes.settle();
            inflight.mark(size);
            return Ok((notes, None));
        }
        let found = notes.recover(is_used, take_back)?;
        Ok((notes, Some(found)))
    }

    fn recover(
        &mut self,
        is_used: impl Fn(Position) -> bool,
        take_back: impl Fn(Position),
    ) -> Result<Found, Broken> {
        let size = self.size;
        let word = |offset| self.region.load_u16(offset, Relaxed);
        let wraps = word(packed::WRAPS);
        let now = Position { index: word(packed::USED), wrap: wraps & 0xff != 0 };
        let old = Position { index: word(packed::OLD_USED), wrap: wraps >> 8 != 0 };
        let (free, old_free) = (word(packed::FREE), word(packed::OLD_FREE));
        if [now.index, old.index].into_iter().any(|index| index >= size) {
            return Err(Broken::Inflight);
        }
        // Under way from old to now, the batch was shown to the driver or it was not.
        let is_shown = now != old && is_used(old);
        (self.used, self.free) = if is_shown { (now, free) } else { (old, old_free) };
        if !is_shown {
            // Behind the first descriptor of a batch, which is written last, others may be used already. The driver would take
            // them for used as soon as the next batch brings it there.
            let mut at = old;
            while at != now {
                take_back(at);
                at = at.after(1, size);
            }
        }
        let mut is_free = vec![false; size.into()];
        let mut entry = self.free;
        while entry < size && !std::mem::replace(&mut is_free[entry as usize], true) {
            self.store(entry, packed::IN_FLIGHT, 0);
            self.next[entry as usize] = self.load(entry, packed::NEXT);
            entry = self.next[entry as usize];
        }
        if entry != size {
            // It goes round, or elsewhere.
            return Err(Broken::Inflight);
        }
        let is_noted = |entry: &u16| {
            !is_free[*entry as usize] && self.load(*entry, packed::IN_FLIGHT) & 0xff != 0
        };
        let counter = |entry| self.region.load_u64(place(entry) + packed::COUNTER, Relaxed);
        let noted = (0..size).filter(is_noted);
        let mut found: Vec<(u64, u16)> = noted.map(|entry| (counter(entry), entry)).collect();
        found.sort_unstable();
        self.counter = counter_after(&found);
        let mut chains = Vec::new();
        // Entries that are free or were found in a chain; each is one of these.
        let mut seen = is_free;
        for (_, first) in found {
            let mut chain = Vec::new();
            let mut entry = first;
            for _ in 0..self.load(first, packed::COUNT) {
                if entry >= size || std::mem::replace(&mut seen[entry as usize], true) {
                    return Err(Broken::Inflight);
                }
                chain.push(self.noted(entry));
                self.last[first as usize] = entry;
                self.next[entry as usize] = self.load(entry, packed::NEXT);
                entry = self.next[entry as usize];
            }
            chains.push((first, chain));
        }
        self.settle();
        Ok(Found { used: self.used, chains })
    }

    fn load(&self, entry: u16, field: usize) -> u16 {
        self.region.load_u16(place(entry) + field, Relaxed)
    }

    fn store(&self, entry: u16, field: usize, value: u16) {
        self.region.store_u16(place(entry) + field, value, Release);
    }

    /// The descriptor in an entry.
    fn noted(&self, entry: u16) -> Noted {
        Noted {
            at: self.region.load_u64(place(entry) + packed::AT, Relaxed),
            bytes: self.region.load_u32(place(entry) + packed::BYTES, Relaxed),
            id: self.load(entry, packed::ID),
            flags: self.load(entry, packed::FLAGS),
        }
    }

    /// A chain was taken: its first entry. `None` when there is no room, which the ring rules out.
    pub(crate) fn taken(&mut self, chain: &[Noted]) -> Option<u16> {
        let first = self.free;
        let mut last = first;
        if first >= self.size {
            return None;
        }
        self.store(first, packed::COUNT, 0);
        self.region.store_u64(place(first) + packed::COUNTER, self.counter, Release);
        self.counter = self.counter.wrapping_add(1);
        self.store(first, packed::IN_FLIGHT, 1);
        for (number, descriptor) in chain.iter().enumerate() {
            let entry = self.free;
            if entry >= self.size {
                return None;
            }
            self.store(first, packed::COUNT, number as u16 + 1);
            self.region.store_u64(place(entry) + packed::AT, descriptor.at, Relaxed);
            self.region.store_u32(place(entry) + packed::BYTES, descriptor.bytes, Relaxed);
            self.store(entry, packed::FLAGS, descriptor.flags);
            self.store(entry, packed::ID, descriptor.id);
            last = entry;
            self.free = self.next[entry as usize];
        }
        self.store(first, packed::LAST, last);
        self.last[first as usize] = last;
        self.region.store_u16(packed::FREE, self.free, Release);
        // With this it is in flight: until here the entries count as free.
        self.region.store_u16(packed::OLD_FREE, self.free, Release);
        Some(first)
    }

    /// A chain is part of the batch that is about to be used.
    pub(crate) fn using(&mut self, first: u16) {
        let last = self.last[first as usize];
        self.next[last as usize] = self.free;
        self.store(last, packed::NEXT, self.free);
        self.free = first;
        self.region.store_u16(packed::FREE, first, Release);
    }

    /// The batch will bring the ring to `used`, and is shown to the driver after this.
    pub(crate) fn moving(&mut self, used: Position) {
        let old = self.used;
        self.used = used;
        self.store_positions(used, old);
    }

    /// The driver can see the batch.
    pub(crate) fn used(&mut self, firsts: impl Iterator<Item = u16>) {
        for first in firsts {
            self.store(first, packed::IN_FLIGHT, 0);
        }
        self.settle();
    }

    /// What was under way is over.
    fn settle(&self) {
        self.region.store_u16(packed::FREE, self.free, Release);
        self.region.store_u16(packed::OLD_FREE, self.free, Release);
        self.store_positions(self.used, self.used);
    }

    /// Both and their wrap counters by one store, padding included: a crash between an index and its wrap counter would name
    /// a place one round away.
    fn store_positions(&self, now: Position, old: Position) {
        let indices = u64::from(now.index) | u64::from(old.index) << 16;
        let wraps = u64::from(now.wrap) | u64::from(old.wrap) << 8;
        self.region.store_u64(packed::USED, indices | wraps << 32, Release);
    }
}

/// Where an entry of a packed ring's notes lies.
fn place(entry: u16) -> usize {
    packed::FIRST + packed::EACH * entry as usize
}
