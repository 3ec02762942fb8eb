//! Locks of files, and what taking or releasing a range makes of those that its owner holds.
//!
//! The service and the client count with the same [`Held`], so that what a client says after a restart
//! is what the service knew before.

use serde::{Deserialize, Serialize};

/// The last byte that can be locked (`OFFSET_MAX` of Linux).
pub const LAST_BYTE: u64 = i64::MAX as u64;

/// Locks of two sorts never meet, as in Linux.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LockSort {
    /// fcntl(2): of a process, or of an open file (OFD).
    Posix,
    /// flock(2): of an open file, always the whole file.
    Flock,
    /// No program's: turns that clients take in appending to a file that they share.
    Turn,
}

/// Who holds a lock, within one client: never in its own way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LockOwner {
    pub sort: LockSort,
    /// Drawn by the client.
    pub id: u64,
}

impl LockOwner {
    /// In the order of owners.
    pub const FIRST: Self = Self { sort: LockSort::Posix, id: 0 };
    pub const LAST: Self = Self { sort: LockSort::Turn, id: u64::MAX };
}

/// Bytes of a file, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LockRange {
    pub start: u64,
    pub end: u64,
}

impl LockRange {
    /// The whole file, however long it becomes.
    pub const WHOLE: Self = Self { start: 0, end: LAST_BYTE };

    /// Whether it can be locked.
    #[must_use]
    pub fn is_sound(self) -> bool {
        self.start <= self.end && self.end <= LAST_BYTE
    }

    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.start <= other.end && other.start <= self.end
    }
}

/// A lock, held or wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lock {
    pub owner: LockOwner,
    pub range: LockRange,
    pub exclusive: bool,
    /// The process, for people; 0 where it is another client's.
    pub pid: u32,
}

/// A range that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub range: LockRange,
    pub exclusive: bool,
    pub pid: u32,
}

/// What one owner holds of one file: in order, without overlap, and neighbours of one kind are one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held(Vec<Span>);

impl Held {
    /// Takes a range, which replaces what the owner held of it (fcntl(2): converts, splits and merges).
    pub fn take(&mut self, lock: &Lock) {
        self.release(lock.range);
        let mut span = Span { range: lock.range, exclusive: lock.exclusive, pid: lock.pid };
        let at = self.0.partition_point(|held| held.range.end < span.range.start);
        let joins = |held: &Span| held.exclusive == span.exclusive;
        let after =
            self.0.get(at).filter(|held| joins(held) && held.range.start - 1 == span.range.end);
        let after = after.map(|held| held.range.end);
        let before = at.checked_sub(1).and_then(|at| self.0.get(at));
        let before = before.filter(|held| joins(held) && held.range.end + 1 == span.range.start);
        let before = before.map(|held| held.range.start);
        span.range.end = after.unwrap_or(span.range.end);
        span.range.start = before.unwrap_or(span.range.start);
        let replaced = at - usize::from(before.is_some())..at + usize::from(after.is_some());
        self.0.splice(replaced, [span]);
    }

    /// Releases a range; what is held on both sides of it stays.
    pub fn release(&mut self, range: LockRange) {
        let from = self.0.partition_point(|held| held.range.end < range.start);
        let to = self.0.partition_point(|held| held.range.start <= range.end);
        if from >= to {
            return;
        }
        let (first, last) = (self.0[from], self.0[to - 1]);
        let left = (first.range.start < range.start)
            .then(|| Span { range: LockRange { end: range.start - 1, ..first.range }, ..first });
        let right = (last.range.end > range.end)
            .then(|| Span { range: LockRange { start: range.end + 1, ..last.range }, ..last });
        self.0.splice(from..to, left.into_iter().chain(right));
    }

    /// The first range that is in the way of somebody else's.
    #[must_use]
    pub fn in_the_way(&self, range: LockRange, exclusive: bool) -> Option<&Span> {
        let from = self.0.partition_point(|held| held.range.end < range.start);
        let overlapping = self.0[from..].iter().take_while(|held| held.range.start <= range.end);
        overlapping.into_iter().find(|held| exclusive || held.exclusive)
    }

    /// How many ranges there would be without this one.
    #[must_use]
    pub fn len_without(&self, range: LockRange) -> usize {
        let mut rest = self.clone();
        rest.release(range);
        rest.len()
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Span> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Of each byte is known whether and how it is locked: that needs no arithmetic.
        #[test]
        fn ranges_agree_with_bytes(
            changes in proptest::collection::vec((0..3u8, 0..40u64, 0..40u64), 1..40),
        ) {
            const OWNER: LockOwner = LockOwner { sort: LockSort::Posix, id: 1 };
            let mut held = Held::default();
            let mut bytes = [None; 42];
            for (what, a, b) in changes {
                let range = LockRange { start: a.min(b), end: a.max(b) };
                let how = match what {
                    0 => None,
                    kind => Some(kind == 1),
                };
                let fewer = held.len_without(range);
                match how {
                    None => held.release(range),
                    Some(exclusive) => held.take(&Lock { owner: OWNER, range, exclusive, pid: 7 }),
                }
                prop_assert!(how.is_some() || fewer == held.len());
                bytes[range.start as usize..=range.end as usize].fill(how);
                let mut again = [None; 42];
                for span in held.iter() {
                    again[span.range.start as usize..=span.range.end as usize].fill(Some(span.exclusive));
                }
                prop_assert_eq!(bytes, again);
                let runs = bytes.chunk_by(|a, b| a == b).filter(|run| run[0].is_some());
                prop_assert_eq!(held.len(), runs.count());
                for at in 0..42 {
                    let range = LockRange { start: at, end: at };
                    let (shared, any) = (held.in_the_way(range, false), held.in_the_way(range, true));
                    prop_assert_eq!(shared.is_some(), bytes[at as usize] == Some(true));
                    prop_assert_eq!(any.is_some(), bytes[at as usize].is_some());
                }
            }
        }
    }

    #[test]
    fn the_ends_of_a_file_can_be_locked() {
        let owner = LockOwner { sort: LockSort::Flock, id: 1 };
        let lock =
            |start, end| Lock { owner, range: LockRange { start, end }, exclusive: true, pid: 1 };
        let mut held = Held::default();
        held.take(&lock(0, 0));
        held.take(&lock(LAST_BYTE, LAST_BYTE));
        held.take(&lock(1, LAST_BYTE - 1));
        assert_eq!(held.iter().map(|span| span.range).collect::<Vec<_>>(), [LockRange::WHOLE]);
        held.release(LockRange::WHOLE);
        assert!(held.is_empty());
        for (range, is_sound) in [((3, 3), true), ((3, 2), false), ((0, LAST_BYTE + 1), false)] {
            assert_eq!(LockRange { start: range.0, end: range.1 }.is_sound(), is_sound);
        }
    }
}
