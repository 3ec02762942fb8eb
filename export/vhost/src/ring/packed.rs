//! Packed rings: one ring of descriptors, which the driver makes available and the device uses in place (virtio 1.2, 2.8).

use super::{
    Addresses, Broken, Chain, Descriptor, Gathering, INDIRECT, NEXT, Shape, Token, Used, WRITE,
    indirect_table, passes,
};
use crate::inflight::{Inflight, PackedNotes};
use crate::memory::{Memory, Window};
use std::collections::VecDeque;
use std::sync::atomic::{Ordering, fence};
use virtio_bindings::virtio_ring::{
    VRING_PACKED_DESC_F_AVAIL, VRING_PACKED_DESC_F_USED, VRING_PACKED_EVENT_F_WRAP_CTR,
    VRING_PACKED_EVENT_FLAG_DESC, VRING_PACKED_EVENT_FLAG_DISABLE, VRING_PACKED_EVENT_FLAG_ENABLE,
};

const AVAILABLE: u16 = 1 << VRING_PACKED_DESC_F_AVAIL;
const USED: u16 = 1 << VRING_PACKED_DESC_F_USED;
const WRAP: u16 = 1 << VRING_PACKED_EVENT_F_WRAP_CTR;
const EVENTS_ON: u16 = VRING_PACKED_EVENT_FLAG_ENABLE as u16;
const EVENTS_OFF: u16 = VRING_PACKED_EVENT_FLAG_DISABLE as u16;
const EVENT_AT: u16 = VRING_PACKED_EVENT_FLAG_DESC as u16;

/// A position in the ring, and whether this is a round of ones or of zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub index: u16,
    pub wrap: bool,
}

impl Position {
    pub(crate) fn after(self, entries: u16, size: u16) -> Self {
        let index = self.index + entries;
        if index < size {
            Self { index, ..self }
        } else {
            Self { index: index - size, wrap: !self.wrap }
        }
    }

    /// Index in bits 0 to 14, wrap in bit 15.
    pub(crate) fn from_bits(bits: u16) -> Self {
        Self { index: bits & !WRAP, wrap: bits & WRAP != 0 }
    }

    pub(crate) fn bits(self) -> u16 {
        self.index | if self.wrap { WRAP } else { 0 }
    }

    fn is_available(self, flags: u16) -> bool {
        (flags & AVAILABLE != 0) == self.wrap && (flags & USED != 0) != self.wrap
    }

    fn available_flags(self) -> u16 {
        if self.wrap { AVAILABLE } else { USED }
    }

    fn used_flags(self) -> u16 {
        if self.wrap { AVAILABLE | USED } else { 0 }
    }
}

struct Parts {
    ring: Window,
    driver: Window,
    device: Window,
}

impl Parts {
    fn new(memory: &Memory, shape: &Shape) -> Result<Self, Broken> {
        let Addresses { descriptors, driver, device } = shape.addresses;
        let parts = Self {
            ring: memory.window_at_user(descriptors, 16 * u64::from(shape.size))?,
            driver: memory.window_at_user(driver, 4)?,
            device: memory.window_at_user(device, 4)?,
        };
        let is_aligned =
            parts.ring.is_aligned(16) && parts.driver.is_aligned(4) && parts.device.is_aligned(4);
        is_aligned.then_some(parts).ok_or(Broken::Place)
    }

    fn flags(&self, at: Position) -> u16 {
        (self.ring.load_u64(16 * at.index as usize + 8, Ordering::Acquire) >> 48) as u16
    }
}

pub(crate) struct Packed {
    parts: Parts,
    size: u16,
    has_event_index: bool,
    /// The next descriptor to be made available.
    next: Position,
    /// The next descriptor to be used.
    used: Position,
    /// Descriptors of chains that are out.
    entries_out: u16,
    notes: Option<PackedNotes>,
    /// Chains that an earlier back end left, oldest first.
    left: VecDeque<(Token, Vec<Noted>)>,
}

/// A descriptor as it was read from the ring: its place there may be used since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Noted {
    pub at: u64,
    pub bytes: u32,
    pub id: u16,
    pub flags: u16,
}

impl Packed {
    pub(crate) fn new(
        memory: &Memory,
        shape: &Shape,
        base: u32,
        inflight: Option<Inflight>,
    ) -> Result<Self, Broken> {
        let parts = Parts::new(memory, shape)?;
        let (size, has_event_index) = (shape.size, shape.has_event_index);
        // In its upper half the base says where the ring is used up to. All that was taken is used when a ring stops, so that
        // is the same place, and who knows of no upper half need not give it.
        let mut next = Position::from_bits(base as u16);
        // Rings begin with a round of ones. A front end that means the beginning may say 0, which is also the beginning of
        // a round of zeroes; but before such a one the last descriptor was written.
        if base == 0 && Descriptor::read(&parts.ring, size - 1) == Descriptor::default() {
            next.wrap = true;
        }
        let mut used = next;
        let (mut entries_out, mut left) = (0, VecDeque::new());
        let notes = match inflight {
            None => None,
            Some(inflight) => {
                let is_used = |at: Position| !at.is_available(parts.flags(at));
                let take_back = |at: Position| {
                    let offset = 16 * at.index as usize + 14;
                    parts.ring.store_u16(offset, at.available_flags(), Ordering::Relaxed);
                };
                let (notes, found) = PackedNotes::open(inflight, size, used, is_used, take_back)?;
                if let Some(found) = found {
                    used = found.used;
                    for (note, chain) in found.chains {
                        let last = chain.last().ok_or(Broken::Inflight)?;
                        let entries = chain.len() as u16;
                        left.push_back((Token { id: last.id, entries, note }, chain));
                        entries_out += entries;
                    }
                    if used.index >= size || entries_out > size {
                        return Err(Broken::Inflight);
                    }
                    next = used.after(entries_out, size);
                }
                Some(notes)
            }
        };
        if next.index >= size || used.index >= size {
            return Err(Broken::Index(next.index.max(used.index)));
        }
        Ok(Self { parts, size, has_event_index, next, used, entries_out, notes, left })
    }

    pub(crate) fn moved(&mut self, memory: &Memory, shape: &Shape) -> Result<(), Broken> {
        if (shape.size, shape.has_event_index, shape.is_packed)
            != (self.size, self.has_event_index, true)
        {
            return Err(Broken::Changed);
        }
        self.parts = Parts::new(memory, shape)?;
        Ok(())
    }

    pub(crate) fn base(&self) -> u32 {
        u32::from(self.next.bits()) | u32::from(self.used.bits()) << 16
    }

    #[inline]
    pub(crate) fn has_available(&self) -> bool {
        !self.left.is_empty() || self.next.is_available(self.parts.flags(self.next))
    }

    pub(crate) fn pop(&mut self, memory: &Memory) -> Result<Option<Chain>, Broken> {
        if let Some((token, chain)) = self.left.pop_front() {
            // It is noted, and counts among those that are out.
            return self.gather(memory, token, chain.into_iter()).map(Some);
        }
        let first = Descriptor::read(&self.parts.ring, self.next.index);
        if !self.next.is_available(first.fourth) {
            return Ok(None);
        }
        if self.parts.ring.is_lost() {
            return Err(Broken::Lost);
        }
        let mut chain = smallvec::SmallVec::<[Noted; 8]>::new();
        let mut descriptor = first;
        loop {
            let Descriptor { at, bytes, third: id, fourth: flags } = descriptor;
            chain.push(Noted { at, bytes, id, flags });
            if self.entries_out as usize + chain.len() > self.size as usize {
                return Err(Broken::Overrun);
            }
            if flags & NEXT == 0 {
                break;
            }
            let at = self.next.after(chain.len() as u16, self.size);
            descriptor = Descriptor::read(&self.parts.ring, at.index);
        }
        let entries = chain.len() as u16;
        // The ID is that of the last descriptor.
        let id = chain.last().map_or(0, |last| last.id);
        let note = match &mut self.notes {
            Some(notes) => notes.taken(&chain).ok_or(Broken::Inflight)?,
            None => 0,
        };
        self.next = self.next.after(entries, self.size);
        self.entries_out += entries;
        self.gather(memory, Token { id, entries, note }, chain.into_iter()).map(Some)
    }

    #[inline]
    fn gather(
        &self,
        memory: &Memory,
        token: Token,
        chain: impl Iterator<Item = Noted>,
    ) -> Result<Chain, Broken> {
        let mut gathering = Gathering::default();
        for Noted { at, bytes, flags, .. } in chain {
            let descriptor = Descriptor { at, bytes, ..Descriptor::default() };
            if flags & INDIRECT == 0 {
                gathering.add(descriptor, flags)?;
                continue;
            }
            if flags & NEXT != 0 || token.entries != 1 {
                return Err(Broken::Indirect);
            }
            // Of the flags only the direction counts here; one follows the other.
            let (table, count) = indirect_table(memory, descriptor)?;
            for index in 0..count {
                let descriptor = Descriptor::read(&table, index);
                gathering.add(descriptor, descriptor.fourth)?;
            }
        }
        Ok(Chain { token, readable: gathering.readable, writable: gathering.writable })
    }

    pub(crate) fn push(&mut self, used: &[Used]) -> bool {
        let old = self.used;
        let mut entries = 0;
        if let Some(notes) = &mut self.notes {
            for Used { token, .. } in used {
                notes.using(token.note);
                entries += token.entries;
            }
            notes.moving(old.after(entries, self.size));
        }
        entries = 0;
        let mut first = None;
        for Used { token, bytes } in used {
            let written = if *bytes > 0 { WRITE } else { 0 };
            let flags = u64::from(self.used.used_flags() | written);
            let rest = u64::from(*bytes) | u64::from(token.id) << 32 | flags << 48;
            let offset = 16 * self.used.index as usize + 8;
            match first {
                // What comes first is shown last: then the driver sees all of them, or none.
                None => first = Some((offset, rest)),
                Some(_) => self.parts.ring.store_u64(offset, rest, Ordering::Relaxed),
            }
            self.used = self.used.after(token.entries, self.size);
            entries += token.entries;
        }
        self.entries_out -= entries;
        if let Some((offset, rest)) = first {
            self.parts.ring.store_u64(offset, rest, Ordering::Release);
        }
        if let Some(notes) = &mut self.notes {
            notes.used(used.iter().map(|used| used.token.note));
        }
        // The driver says what it waits for and then looks at the flags; this is the other way round.
        fence(Ordering::SeqCst);
        self.is_call_wanted(entries)
    }

    /// Whether the driver is to be told that the last `entries` were used.
    fn is_call_wanted(&self, entries: u16) -> bool {
        let wanted = self.parts.driver.load_u32(0, Ordering::Relaxed);
        let (event, flags) = (Position::from_bits(wanted as u16), (wanted >> 16) as u16);
        if flags != EVENT_AT || !self.has_event_index {
            return flags != EVENTS_OFF;
        }
        // In a round before this one the event counts from below zero.
        let before = if event.wrap == self.used.wrap { 0 } else { self.size };
        let new = self.used.index;
        passes(event.index.wrapping_sub(before), new, new.wrapping_sub(entries))
    }

    pub(crate) fn want_kicks(&self, wanted: bool) {
        let flags = match (wanted, self.has_event_index) {
            (false, _) => EVENTS_OFF,
            (true, false) => EVENTS_ON,
            (true, true) => EVENT_AT,
        };
        let both = u32::from(self.next.bits()) | u32::from(flags) << 16;
        self.parts.device.store_u32(0, both, Ordering::Relaxed);
    }
}
