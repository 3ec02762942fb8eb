//! Changes that the target has confirmed and need not have made durable.
//!
//! A target that loses power loses its volatile cache, and then, when it is connected anew, says nothing of it: what it had confirmed is
//! old again, and a flush goes well. While one path stays connected that has not happened. When all were lost, whatever was not flushed
//! is written again before anything else is (as a client of the file system does with data that no commit has covered).
//!
//! What always holds:
//! - What is kept is bounded: whoever changes something takes room for it before, and waits for a flush where there is none.
//! - Changes of the same blocks are carried out one after the other (by the caller), so that they are kept in the order in which they
//!   happened.
//! - What is durable by itself (FUA) is not kept, and nothing older of its blocks any more: written again, that would stand over durable
//!   data, and stay if this process died before it had written all.
//! - What is kept does not change: memory of another process is copied while the write is still under way.

use super::landing::window;
use super::unsettled::Change;
use levada_base::buf::bytes_in;
use levada_base::{Buf, IoVec};
use std::collections::VecDeque;

/// Data that are kept at most, and changes.
pub(crate) const KEPT_BYTES_MAX: u64 = 32 << 20;
const KEPT_MAX: usize = 16 << 10;
/// With so much kept it is time for a flush.
const FLUSH_AT_BYTES: u64 = KEPT_BYTES_MAX / 2;
const FLUSH_AT: usize = KEPT_MAX / 2;

/// A change that is written again. Discards are not: what was discarded may read as before.
#[derive(Clone)]
pub(crate) enum Kept {
    Write { at: u64, data: IoVec },
    Zeroes { at: u64, bytes: u64 },
}

/// See the module.
#[derive(Default)]
pub(crate) struct Unflushed {
    kept: VecDeque<(u64, Change, Kept)>,
    bytes: u64,
    /// Changes that are under way and may be kept, and their bytes.
    reserved: usize,
    reserved_bytes: u64,
    /// Counts changes.
    last: u64,
}

impl Kept {
    /// Data as they are when they can be kept so, else a copy.
    pub fn write(at: u64, data: &IoVec) -> Self {
        let keep = |part: &Buf| match part.is_foreign() || part.allocated_bytes() > 2 * part.len() {
            true => Buf::copy_of(part),
            false => part.clone(),
        };
        Self::Write { at, data: data.iter().map(keep).collect() }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Write { data, .. } => bytes_in(data),
            Self::Zeroes { .. } => 0,
        }
    }

    fn range(&self) -> (u64, u64) {
        match self {
            Self::Write { at, data } => (*at, at + bytes_in(data)),
            Self::Zeroes { at, bytes } => (*at, at + bytes),
        }
    }

    /// The part of it from `from` to `to`; `None`: that is nothing.
    fn part(&self, from: u64, to: u64) -> Option<Self> {
        (from < to).then(|| match self {
            Self::Write { at, data } => {
                Self::write(from, &window(data, (from - at) as usize, (to - from) as usize))
            }
            Self::Zeroes { .. } => Self::Zeroes { at: from, bytes: to - from },
        })
    }
}

impl Unflushed {
    /// Takes room for a change of so many bytes; false: there is none.
    #[must_use]
    pub fn reserve(&mut self, bytes: u64) -> bool {
        let has_room = self.bytes + self.reserved_bytes + bytes <= KEPT_BYTES_MAX
            && self.kept.len() + self.reserved < KEPT_MAX;
        if has_room {
            self.reserved += 1;
            self.reserved_bytes += bytes;
        }
        has_room
    }

    /// Gives the room back.
    pub fn release(&mut self, bytes: u64) {
        self.reserved -= 1;
        self.reserved_bytes -= bytes;
    }

    /// Something is kept.
    pub fn keeps_any(&self) -> bool {
        !self.kept.is_empty()
    }

    /// These blocks hold something durable now, and nothing older is to be written there again.
    pub fn supersede(&mut self, at: u64, bytes: u64) {
        let end = at + bytes;
        let is_clear = |kept: &Kept| {
            let (from, to) = kept.range();
            to <= at || end <= from
        };
        if self.kept.iter().all(|(_, _, kept)| is_clear(kept)) {
            return;
        }
        for (number, change, kept) in std::mem::take(&mut self.kept) {
            if is_clear(&kept) {
                self.kept.push_back((number, change, kept));
                continue;
            }
            self.bytes -= kept.bytes();
            let (from, to) = kept.range();
            for (from, to) in [(from, at), (end, to)] {
                if let Some(part) = kept.part(from, to) {
                    self.bytes += part.bytes();
                    self.kept.push_back((number, change.part(from, to - from), part));
                }
            }
        }
    }

    /// A change was confirmed, for which there was room.
    pub fn keep(&mut self, change: Change, kept: Kept) {
        self.last += 1;
        self.bytes += kept.bytes();
        self.kept.push_back((self.last, change, kept));
    }

    /// Nothing is to be written again: another owner decides what is there.
    pub fn clear(&mut self) {
        self.kept.clear();
        self.bytes = 0;
    }

    /// Where a flush begins: it covers what was confirmed until now.
    pub fn mark(&self) -> u64 {
        self.last
    }

    /// A flush that began at `mark` went well.
    pub fn flushed(&mut self, mark: u64) {
        while let Some((number, _, kept)) = self.kept.front() {
            if *number > mark {
                break;
            }
            self.bytes -= kept.bytes();
            self.kept.pop_front();
        }
    }

    /// It is time for a flush.
    pub fn is_much(&self) -> bool {
        self.bytes >= FLUSH_AT_BYTES || self.kept.len() >= FLUSH_AT
    }

    /// What is to be written again, in the order in which it was confirmed.
    pub fn all(&self) -> Vec<(Change, Kept)> {
        self.kept.iter().map(|(_, change, kept)| (change.clone(), kept.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::unsettled::Unsettled;
    use super::*;
    use std::rc::Rc;

    fn write(at: u64) -> Kept {
        Kept::write(at, &Buf::copy_of(&[7; 4096]).into_vec())
    }

    #[test]
    fn a_flush_covers_what_was_confirmed_before_it() {
        let changes = Rc::new(Unsettled::default());
        let mut unflushed = Unflushed::default();
        let places = |unflushed: &Unflushed| {
            let place = |(_, kept): &(_, Kept)| match kept {
                Kept::Write { at, .. } | Kept::Zeroes { at, .. } => *at,
            };
            unflushed.all().iter().map(place).collect::<Vec<_>>()
        };
        unflushed.keep(changes.change(0, 4096), write(0));
        unflushed.keep(changes.change(8192, 4096), Kept::Zeroes { at: 8192, bytes: 4096 });
        let mark = unflushed.mark();
        unflushed.keep(changes.change(4096, 4096), write(4096));
        assert_eq!(places(&unflushed), [0, 8192, 4096]);
        unflushed.flushed(mark);
        assert_eq!(places(&unflushed), [4096]);
        unflushed.clear();
        assert!(places(&unflushed).is_empty());
    }

    /// Written again, what is left changes no block that has become durable, and leaves the others as they were.
    #[test]
    fn what_is_durable_is_not_written_over() {
        let changes = Rc::new(Unsettled::default());
        for seed in 0..500_u64 {
            let mut unflushed = Unflushed::default();
            let mut draw = seed * 7919 + 1;
            let mut below = |bound: u64| {
                draw = draw.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                (draw >> 33) % bound
            };
            let mut expected = [0; 40];
            for version in 1..20_u8 {
                let (at, bytes) = (below(30), 1 + below(10));
                let places = at as usize..(at + bytes) as usize;
                match below(4) {
                    0 => {
                        unflushed.supersede(at, bytes);
                        expected[places].fill(0);
                    }
                    1 => {
                        unflushed.keep(changes.change(at, bytes), Kept::Zeroes { at, bytes });
                        expected[places].fill(u8::MAX);
                    }
                    _ => {
                        let data = Buf::copy_of(&vec![version; bytes as usize]).into_vec();
                        unflushed.keep(changes.change(at, bytes), Kept::write(at, &data));
                        expected[places].fill(version);
                    }
                }
            }
            let mut written = [0; 40];
            for (_, kept) in unflushed.all() {
                let (from, to) = kept.range();
                let bytes = match kept {
                    Kept::Write { data, .. } => levada_base::buf::joined(&data),
                    Kept::Zeroes { bytes, .. } => vec![u8::MAX; bytes as usize],
                };
                written[from as usize..to as usize].copy_from_slice(&bytes);
            }
            assert_eq!(written, expected, "seed {seed}");
            let kept_bytes: u64 = unflushed.all().iter().map(|(_, kept)| kept.bytes()).sum();
            assert_eq!(unflushed.bytes, kept_bytes);
        }
    }

    #[test]
    fn room_is_taken_before() {
        let changes = Rc::new(Unsettled::default());
        let mut unflushed = Unflushed::default();
        let half = KEPT_BYTES_MAX / 2;
        assert!(!unflushed.reserve(KEPT_BYTES_MAX + 1));
        assert!(unflushed.reserve(half) && unflushed.reserve(half) && !unflushed.reserve(1));
        unflushed.keep(changes.change(0, 4096), write(0));
        unflushed.release(half);
        assert!(!unflushed.reserve(half) && unflushed.reserve(half - 4096));
        unflushed.flushed(unflushed.mark());
        assert!(unflushed.reserve(4096) && !unflushed.reserve(1));
    }
}
