//! Split rings: a table of descriptors, a ring of available chains, a ring of used ones (virtio 1.2, 2.7).

use super::{
    Addresses, Broken, Chain, Descriptor, Gathering, INDIRECT, NEXT, Shape, Token, Used,
    indirect_table, passes,
};
use crate::inflight::{Inflight, SplitNotes};
use crate::memory::{Memory, Window};
use std::collections::VecDeque;
use std::sync::atomic::{Ordering, fence};
use virtio_bindings::virtio_ring::{VRING_AVAIL_F_NO_INTERRUPT, VRING_USED_F_NO_NOTIFY};

const NO_INTERRUPT: u16 = VRING_AVAIL_F_NO_INTERRUPT as u16;
const NO_NOTIFY: u16 = VRING_USED_F_NO_NOTIFY as u16;
/// In the available ring and the used ring alike.
const FLAGS: usize = 0;
const INDEX: usize = 2;
const ENTRIES: usize = 4;

struct Parts {
    descriptors: Window,
    available: Window,
    used: Window,
}

impl Parts {
    fn new(memory: &Memory, shape: &Shape) -> Result<Self, Broken> {
        let Addresses { descriptors, driver, device } = shape.addresses;
        let size = u64::from(shape.size);
        // The event index is the last field of each ring.
        let event = if shape.has_event_index { 2 } else { 0 };
        let parts = Self {
            descriptors: memory.window_at_user(descriptors, 16 * size)?,
            available: memory.window_at_user(driver, 4 + 2 * size + event)?,
            used: memory.window_at_user(device, 4 + 8 * size + event)?,
        };
        let is_aligned = parts.descriptors.is_aligned(16)
            && parts.available.is_aligned(2)
            && parts.used.is_aligned(4);
        is_aligned.then_some(parts).ok_or(Broken::Place)
    }

    fn is_lost(&self) -> bool {
        self.descriptors.is_lost() || self.available.is_lost() || self.used.is_lost()
    }
}

pub(crate) struct Split {
    parts: Parts,
    size: u16,
    has_event_index: bool,
    /// The next entry of the available ring.
    next: u16,
    /// Entries before this one are known to be available.
    seen: u16,
    /// The next entry of the used ring.
    used: u16,
    /// By first descriptor: whether that chain is out.
    out: Vec<bool>,
    notes: Option<SplitNotes>,
    /// First descriptors of chains that an earlier back end left, oldest first.
    left: VecDeque<u16>,
}

impl Split {
    pub(crate) fn new(
        memory: &Memory,
        shape: &Shape,
        base: u32,
        inflight: Option<Inflight>,
    ) -> Result<Self, Broken> {
        let parts = Parts::new(memory, shape)?;
        let (size, has_event_index) = (shape.size, shape.has_event_index);
        let used = parts.used.load_u16(INDEX, Ordering::Acquire);
        let mut next = base as u16;
        let mut left = VecDeque::new();
        let notes = match inflight {
            None => None,
            Some(inflight) => {
                let (notes, found) = SplitNotes::open(inflight, size, used)?;
                if let Some(found) = found {
                    // The front end may not know how far the back end before this one had come: all that is used and all
                    // that is noted was taken.
                    next = used.wrapping_add(found.len() as u16);
                    left = found.into();
                }
                Some(notes)
            }
        };
        let out = vec![false; size.into()];
        Ok(Self { parts, size, has_event_index, next, seen: next, used, out, notes, left })
    }

    pub(crate) fn moved(&mut self, memory: &Memory, shape: &Shape) -> Result<(), Broken> {
        if (shape.size, shape.has_event_index, shape.is_packed)
            != (self.size, self.has_event_index, false)
        {
            return Err(Broken::Changed);
        }
        self.parts = Parts::new(memory, shape)?;
        Ok(())
    }

    pub(crate) fn base(&self) -> u32 {
        self.next.into()
    }

    #[inline]
    pub(crate) fn has_available(&self) -> bool {
        !self.left.is_empty()
            || self.seen != self.next
            || self.parts.available.load_u16(INDEX, Ordering::Acquire) != self.next
    }

    pub(crate) fn pop(&mut self, memory: &Memory) -> Result<Option<Chain>, Broken> {
        let head = match self.left.pop_front() {
            Some(head) => head,
            None => match self.next_available()? {
                Some(head) => head,
                None => return Ok(None),
            },
        };
        let out = self.out.get_mut(head as usize).ok_or(Broken::Index(head))?;
        if std::mem::replace(out, true) {
            return Err(Broken::Again);
        }
        if let Some(notes) = &mut self.notes {
            notes.taken(head);
        }
        let gathered = self.gather(memory, head)?;
        let token = Token { id: head, entries: 1, note: head };
        Ok(Some(Chain { token, readable: gathered.readable, writable: gathered.writable }))
    }

    /// The first descriptor of the next chain.
    #[inline]
    fn next_available(&mut self) -> Result<Option<u16>, Broken> {
        if self.seen == self.next {
            self.seen = self.parts.available.load_u16(INDEX, Ordering::Acquire);
            let available = self.seen.wrapping_sub(self.next);
            if available == 0 {
                return Ok(None);
            }
            if self.parts.is_lost() {
                return Err(Broken::Lost);
            }
            if available > self.size {
                return Err(Broken::Overrun);
            }
        }
        let entry = usize::from(self.next & (self.size - 1));
        let head = self.parts.available.load_u16(ENTRIES + 2 * entry, Ordering::Relaxed);
        self.next = self.next.wrapping_add(1);
        Ok(Some(head))
    }

    fn gather(&self, memory: &Memory, head: u16) -> Result<Gathering, Broken> {
        let mut gathering = Gathering::default();
        let mut index = head;
        loop {
            if index >= self.size {
                return Err(Broken::Index(index));
            }
            let descriptor = Descriptor::read(&self.parts.descriptors, index);
            let (flags, next) = (descriptor.third, descriptor.fourth);
            if flags & INDIRECT != 0 {
                // The table ends the chain; a driver may have put plain descriptors in front of it.
                if flags & NEXT != 0 {
                    return Err(Broken::Indirect);
                }
                gather_table(memory, descriptor, &mut gathering)?;
                return Ok(gathering);
            }
            gathering.add(descriptor, flags)?;
            if flags & NEXT == 0 {
                return Ok(gathering);
            }
            if gathering.descriptors >= self.size {
                return Err(Broken::TooLong);
            }
            index = next;
        }
    }

    pub(crate) fn push(&mut self, used: &[Used]) -> bool {
        for Used { token, bytes } in used {
            let entry = ENTRIES + 8 * usize::from(self.used & (self.size - 1));
            self.parts.used.store_u32(entry, token.id.into(), Ordering::Relaxed);
            self.parts.used.store_u32(entry + 4, *bytes, Ordering::Relaxed);
            self.used = self.used.wrapping_add(1);
            self.out[token.id as usize] = false;
            if let Some(notes) = &mut self.notes {
                notes.using(token.note);
            }
        }
        self.parts.used.store_u16(INDEX, self.used, Ordering::Release);
        if let Some(notes) = &mut self.notes {
            notes.used(used.iter().map(|used| used.token.note), self.used);
        }
        // The driver says what it waits for and then looks at the index; this is the other way round.
        fence(Ordering::SeqCst);
        if self.has_event_index {
            let event =
                self.parts.available.load_u16(ENTRIES + 2 * self.size as usize, Ordering::Relaxed);
            return passes(event, self.used, self.used.wrapping_sub(used.len() as u16));
        }
        self.parts.available.load_u16(FLAGS, Ordering::Relaxed) & NO_INTERRUPT == 0
    }

    pub(crate) fn want_kicks(&self, wanted: bool) {
        if !self.has_event_index {
            let flags = if wanted { 0 } else { NO_NOTIFY };
            self.parts.used.store_u16(FLAGS, flags, Ordering::Relaxed);
        } else if wanted {
            let event = ENTRIES + 8 * self.size as usize;
            self.parts.used.store_u16(event, self.next, Ordering::Relaxed);
        }
        // Otherwise the index that was wanted last lies behind already, and comes again after 65,536 chains.
    }
}

/// Reads a table of indirect descriptors, which name each other as those of the ring do.
fn gather_table(
    memory: &Memory,
    descriptor: Descriptor,
    gathering: &mut Gathering,
) -> Result<(), Broken> {
    let (table, count) = indirect_table(memory, descriptor)?;
    let mut index = 0;
    for _ in 0..count {
        let descriptor = Descriptor::read(&table, index);
        let (flags, next) = (descriptor.third, descriptor.fourth);
        if flags & INDIRECT != 0 {
            return Err(Broken::Indirect);
        }
        gathering.add(descriptor, flags)?;
        if flags & NEXT == 0 {
            return Ok(());
        }
        if next >= count {
            return Err(Broken::Index(next));
        }
        index = next;
    }
    Err(Broken::TooLong)
}
