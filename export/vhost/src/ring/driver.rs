//! The other side of a ring, for tests: as simple as a driver can be.

use super::packed::Position;
use super::{Addresses, NEXT, Shape, WRITE};
use crate::inflight::{Inflight, region_bytes};
use crate::memory::{Mapping, Memory, Place, Window, sealed};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

const GUEST: u64 = 0x10_0000;
const USER: u64 = 0x7000_0000;
const BYTES: u64 = 1 << 16;
const DRIVER_AT: u64 = 0x4000;
const DEVICE_AT: u64 = 0x6000;
/// Where chains point to.
const DATA_AT: u64 = 0x8000;

/// Memory with a ring in it, and what a driver remembers of that.
pub(super) struct Driver {
    pub memory: Memory,
    pub shape: Shape,
    pub inflight: Inflight,
    window: Window,
    /// Chains that it may have out: their entries, by number.
    lengths: Vec<Option<u16>>,
    entries_out: u16,
    /// Split: counts. Packed: positions.
    available: Position,
    used: Position,
}

impl Driver {
    pub(super) fn new(size: u16, is_packed: bool, has_event_index: bool) -> Self {
        let file = sealed(BYTES).expect("memory");
        let window = Mapping::of(file.as_fd(), 0, BYTES).expect("mapped").window();
        let place = Place { guest: GUEST, bytes: BYTES, user: USER, offset: 0 };
        let memory = Memory::default().with(place, file.into()).expect("mapped");
        let addresses =
            Addresses { descriptors: USER, driver: USER + DRIVER_AT, device: USER + DEVICE_AT };
        let shape = Shape { size, addresses, is_packed, has_event_index };
        let bytes = region_bytes(size, is_packed);
        let notes = sealed(bytes).expect("memory");
        let inflight = Inflight(Mapping::of(notes.as_fd(), 0, bytes).expect("mapped").window());
        let begin = Position { index: 0, wrap: true };
        let lengths = vec![None; size.into()];
        let (available, used, entries_out) = (begin, begin, 0);
        Self { memory, shape, inflight, window, lengths, entries_out, available, used }
    }

    /// As a front end says at first where the ring is.
    pub(super) fn base(&self) -> u32 {
        if self.shape.is_packed { 0x8000_8000 } else { 0 }
    }

    /// Numbers of chains that are out.
    pub(super) fn out(&self) -> Vec<u16> {
        (0..self.shape.size).filter(|number| self.lengths[*number as usize].is_some()).collect()
    }

    fn descriptor(&self, index: u16, flags: u16, last: u16) {
        let offset = 16 * index as usize;
        self.window.store_u64(offset, GUEST + DATA_AT + 16 * u64::from(index), Relaxed);
        let (third, fourth) = if self.shape.is_packed { (last, flags) } else { (flags, last) };
        let rest = 16 | u64::from(third) << 32 | u64::from(fourth) << 48;
        self.window.store_u64(offset + 8, rest, Release);
    }

    /// Makes a chain of so many descriptors available: its number; `None` when the ring is full. The last is to be written.
    pub(super) fn offer(&mut self, length: u16) -> Option<u16> {
        match self.shape.is_packed {
            true => self.offer_packed(length),
            false => self.offer_split(length),
        }
    }

    fn offer_split(&mut self, length: u16) -> Option<u16> {
        // Descriptors of the chains that are out are not touched; those of a chain lie together.
        let is_taken = |index: u16| {
            let mut out = self.out().into_iter();
            out.any(|head| (head..head + self.lengths[head as usize].unwrap_or(0)).contains(&index))
        };
        let last_head = self.shape.size.checked_sub(length)?;
        let head = (0..=last_head).find(|head| !(*head..head + length).any(is_taken))?;
        for number in 0..length {
            let is_last = number + 1 == length;
            let flags = if is_last { WRITE } else { NEXT };
            self.descriptor(head + number, flags, head + number + 1);
        }
        let index = self.available.index;
        let entry = DRIVER_AT as usize + 4 + 2 * usize::from(index % self.shape.size);
        self.window.store_u16(entry, head, Relaxed);
        self.available.index = index.wrapping_add(1);
        self.window.store_u16(DRIVER_AT as usize + 2, self.available.index, Release);
        self.lengths[head as usize] = Some(length);
        Some(head)
    }

    fn offer_packed(&mut self, length: u16) -> Option<u16> {
        let size = self.shape.size;
        if self.entries_out + length > size {
            return None;
        }
        let id = (0..size).find(|id| self.lengths[*id as usize].is_none())?;
        let marks = |at: Position| if at.wrap { 1 << 7 } else { 1 << 15 };
        // The first one last: with it the others are available.
        for number in (0..length).rev() {
            let at = self.available.after(number, size);
            let flags = if number + 1 == length { WRITE } else { NEXT };
            self.descriptor(at.index, flags | marks(at), id);
        }
        self.available = self.available.after(length, size);
        self.entries_out += length;
        self.lengths[id as usize] = Some(length);
        Some(id)
    }

    /// Chains that were used since the last look.
    pub(super) fn take(&mut self) -> Vec<u16> {
        let mut all = Vec::new();
        while let Some(number) = self.next_used() {
            let length = self.lengths[number as usize].take();
            let length = length.unwrap_or_else(|| panic!("chain {number} is used, but not out"));
            if self.shape.is_packed {
                self.used = self.used.after(length, self.shape.size);
                self.entries_out -= length;
            } else {
                self.used.index = self.used.index.wrapping_add(1);
            }
            all.push(number);
        }
        all
    }

    fn next_used(&self) -> Option<u16> {
        let index = self.used.index;
        if self.shape.is_packed {
            let rest = self.window.load_u64(16 * index as usize + 8, Acquire);
            let (id, flags) = ((rest >> 32) as u16, (rest >> 48) as u16);
            let marks = (flags & 1 << 7 != 0, flags & 1 << 15 != 0);
            return (marks == (self.used.wrap, self.used.wrap)).then_some(id);
        }
        let device = DEVICE_AT as usize;
        if self.window.load_u16(device + 2, Acquire) == index {
            return None;
        }
        let entry = device + 4 + 8 * usize::from(index % self.shape.size);
        Some(self.window.load_u32(entry, Relaxed) as u16)
    }
}
