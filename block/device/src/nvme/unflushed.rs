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
//! - Of each block what was confirmed last is written again, and nothing older: that would stand over newer data meanwhile, which may be
//!   durable by themselves (FUA), and stay there if this process died before it had written all.
//! - What is kept does not change: memory of another process is copied while the write is still under way.

use super::landing::window;
use super::unsettled::Change;
use levada_base::buf::bytes_in;
use levada_base::{Buf, IoVec, planted};
use std::collections::{BTreeMap, VecDeque};

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

    /// The part of it from `from` to `to`.
    fn part(&self, from: u64, to: u64) -> Self {
        let bytes = to - from;
        match self {
            Self::Write { at, data } => {
                Self::Write { at: from, data: window(data, (from - at) as usize, bytes as usize) }
            }
            Self::Zeroes { .. } => Self::Zeroes { at: from, bytes },
        }
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

    /// Changes are kept: what is written over them must be as well, also when it is durable by itself, or they would be written over it.
    pub fn keeps_any(&self) -> bool {
        !self.kept.is_empty()
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

    /// What is to be written again: of each block what was confirmed last, in that order.
    pub fn all(&self) -> Vec<(Change, Kept)> {
        // From where to where there is something newer; none overlap.
        let mut newer = BTreeMap::<u64, u64>::new();
        let mut all = Vec::new();
        for (_, change, kept) in self.kept.iter().rev() {
            if planted!("nvme-all-versions-written-again") {
                all.push((change.clone(), kept.clone()));
                continue;
            }
            let (from, to) = kept.range();
            let over = newer.range(..to).rev().map(|(from, to)| (*from, *to));
            let mut over: Vec<_> = over.take_while(|(_, end)| *end > from).collect();
            over.reverse();
            let mut at = from;
            for (start, end) in over.iter().copied().chain([(to, to)]) {
                if at < start {
                    all.push((change.part(at, start - at), kept.part(at, start)));
                }
                at = end.max(at);
            }
            let first = over.first().map_or(from, |(start, _)| from.min(*start));
            over.iter().for_each(|(start, _)| _ = newer.remove(start));
            newer.insert(first, at);
        }
        all.reverse();
        all
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

    #[test]
    fn of_each_block_the_last_is_written_again_and_nothing_else() {
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
                let is_zeroes = below(3) == 0;
                let data = Buf::copy_of(&vec![version; bytes as usize]).into_vec();
                let kept = match is_zeroes {
                    true => Kept::Zeroes { at, bytes },
                    false => Kept::write(at, &data),
                };
                unflushed.keep(changes.change(at, bytes), kept);
                let written = if is_zeroes { u8::MAX } else { version };
                expected[at as usize..(at + bytes) as usize].fill(written);
            }
            let mut written = [0; 40];
            for (_, kept) in unflushed.all() {
                let (from, to) = kept.range();
                let bytes = match kept {
                    Kept::Write { data, .. } => levada_base::buf::joined(&data),
                    Kept::Zeroes { bytes, .. } => vec![u8::MAX; bytes as usize],
                };
                let place = &mut written[from as usize..to as usize];
                assert!(place.iter().all(|byte| *byte == 0), "seed {seed}: twice");
                place.copy_from_slice(&bytes);
            }
            assert_eq!(written, expected, "seed {seed}");
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
