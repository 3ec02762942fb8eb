//! Changes that the target has confirmed and need not have made durable.
//!
//! A target that loses power loses its volatile cache, and then, when it is connected anew, says nothing of it: what it had confirmed is
//! old again, and a flush goes well. While one path stays connected that has not happened. When all were lost, whatever was not flushed
//! is written again before anything else is (as a client of the file system does with data that no commit has covered).
//!
//! What always holds:
//! - What is kept is bounded. When it would not be, or cannot be kept, that is remembered until a flush: a target that comes back then
//!   cannot be told apart from one that has lost data, and the device is gone.
//! - Changes of the same blocks are carried out one after the other (by the caller), so that they are kept in the order in which they
//!   happened.
//! - What is kept does not change: memory of another process is copied while the write is still under way.

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
    /// Counts changes.
    last: u64,
    /// The last one that could not be kept.
    forgotten: Option<u64>,
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
}

impl Unflushed {
    /// Whether there is room for a write of so many bytes. If not, [`Unflushed::forget`] it.
    pub fn has_room(&self, bytes: u64) -> bool {
        self.forgotten.is_none()
            && self.bytes + bytes <= KEPT_BYTES_MAX
            && self.kept.len() < KEPT_MAX
    }

    /// Changes are kept: what is written over them must be as well, also when it is durable by itself, or they would be written over it.
    pub fn keeps_any(&self) -> bool {
        !self.kept.is_empty()
    }

    /// A change was confirmed.
    pub fn keep(&mut self, change: Change, kept: Kept) {
        self.last += 1;
        self.bytes += kept.bytes();
        self.kept.push_back((self.last, change, kept));
    }

    /// A change was confirmed, and is not kept: then there is no use in those before it.
    pub fn forget(&mut self) {
        self.last += 1;
        self.forgotten = Some(self.last);
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
        self.forgotten = self.forgotten.filter(|forgotten| *forgotten > mark);
    }

    /// It is time for a flush.
    pub fn is_much(&self) -> bool {
        self.forgotten.is_some() || self.bytes >= FLUSH_AT_BYTES || self.kept.len() >= FLUSH_AT
    }

    /// What is to be written again, in the order in which it was confirmed. `None`: that is not known.
    pub fn all(&self) -> Option<Vec<(Change, Kept)>> {
        match self.forgotten {
            Some(_) => None,
            None => Some(
                self.kept.iter().map(|(_, change, kept)| (change.clone(), kept.clone())).collect(),
            ),
        }
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
            let all = unflushed.all()?;
            let places = all.iter().map(|(_, kept)| match kept {
                Kept::Write { at, .. } | Kept::Zeroes { at, .. } => *at,
            });
            Some(places.collect::<Vec<_>>())
        };
        unflushed.keep(changes.change(0, 4096), write(0));
        unflushed.keep(changes.change(8192, 4096), Kept::Zeroes { at: 8192, bytes: 4096 });
        let mark = unflushed.mark();
        unflushed.keep(changes.change(4096, 4096), write(4096));
        assert_eq!(places(&unflushed), Some(vec![0, 8192, 4096]));
        unflushed.flushed(mark);
        assert_eq!(places(&unflushed), Some(vec![4096]));
        unflushed.forget();
        let mark = unflushed.mark();
        assert!(places(&unflushed).is_none() && !unflushed.has_room(1));
        unflushed.flushed(mark - 1);
        assert!(places(&unflushed).is_none());
        unflushed.flushed(mark);
        assert_eq!(places(&unflushed), Some(vec![]));
        assert!(unflushed.has_room(KEPT_BYTES_MAX) && !unflushed.has_room(KEPT_BYTES_MAX + 1));
    }
}
