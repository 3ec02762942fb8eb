//! What a file is, and what it may be after node and mount ended at once.
//!
//! What always holds: a change is begun before its call and done after it, so a change that was
//! under way at the end is among those that may have come.

use super::same_bytes;
use anyhow::{Result, ensure};

/// So many changes without a sync are enough to remember: who makes them syncs then.
const UNSYNCED_MAX: usize = 48;

enum Change {
    Write { at: usize, bytes: Vec<u8> },
    Cut { len: usize },
}

impl Change {
    fn apply(&self, to: &mut Vec<u8>) {
        match self {
            Self::Write { at, bytes } => {
                to.resize(to.len().max(at + bytes.len()), 0);
                to[*at..at + bytes.len()].copy_from_slice(bytes);
            }
            Self::Cut { len } => to.resize(*len, 0),
        }
    }
}

pub struct Versions {
    synced: Vec<u8>,
    now: Vec<u8>,
    /// Since the last sync, oldest first.
    unsynced: Vec<Change>,
    /// How many of them are done; the others are under way.
    done: usize,
}

impl Versions {
    /// A file that was synced as it is.
    pub fn new(synced: Vec<u8>) -> Self {
        Self { now: synced.clone(), synced, unsynced: Vec::new(), done: 0 }
    }

    /// As every reader sees it while the mount lives.
    pub fn now(&self) -> &[u8] {
        &self.now
    }

    pub fn begin_write(&mut self, at: usize, bytes: &[u8]) {
        self.unsynced.push(Change::Write { at, bytes: bytes.to_vec() });
    }

    pub fn begin_cut(&mut self, len: usize) {
        self.unsynced.push(Change::Cut { len });
    }

    /// All that was begun is acknowledged.
    pub fn done(&mut self) {
        for change in &self.unsynced[self.done..] {
            change.apply(&mut self.now);
        }
        self.done = self.unsynced.len();
    }

    pub fn synced(&mut self) {
        assert_eq!(self.done, self.unsynced.len(), "synced in the middle of a change");
        self.unsynced.clear();
        self.done = 0;
        self.synced.clone_from(&self.now);
    }

    pub fn wants_sync(&self) -> bool {
        self.unsynced.len() >= UNSYNCED_MAX
    }

    /// Every byte is one that was synced or written there since; where a cut went, also zero. No
    /// byte that was synced is missing unless it was cut off.
    pub fn check_after_loss(&self, what: &str, found: &[u8]) -> Result<()> {
        if self.unsynced.is_empty() {
            return same_bytes(what, found, &self.synced);
        }
        let mut lens = vec![self.synced.len()];
        for change in &self.unsynced {
            let before = lens.last().copied().unwrap_or_default();
            lens.push(match change {
                Change::Write { at, bytes } => before.max(at + bytes.len()),
                Change::Cut { len } => *len,
            });
        }
        let shortest = lens.iter().min().copied().unwrap_or_default();
        let longest = lens.iter().max().copied().unwrap_or_default();
        ensure!(
            (shortest..=longest).contains(&found.len()),
            "{what}: {} bytes, but it had {shortest} to {longest} since its last sync",
            found.len()
        );
        let had = |at: usize, byte: u8| {
            (at >= shortest && byte == 0)
                || self.synced.get(at) == Some(&byte)
                || self.unsynced.iter().any(|change| match change {
                    Change::Write { at: from, bytes } => {
                        at.checked_sub(*from).and_then(|within| bytes.get(within)) == Some(&byte)
                    }
                    Change::Cut { .. } => false,
                })
        };
        let strange = found.iter().enumerate().find(|(at, byte)| !had(*at, **byte));
        ensure!(
            strange.is_none(),
            "{what}: {:?} (place, byte) was neither synced nor written since; {} changes, {shortest} to {longest} bytes",
            strange,
            self.unsynced.len()
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after_loss(versions: &Versions, found: &[u8]) -> bool {
        versions.check_after_loss("a file", found).is_ok()
    }

    #[test]
    fn what_was_synced_last_is_all_there() {
        let mut versions = Versions::new(b"old".to_vec());
        versions.begin_cut(0);
        versions.begin_write(0, b"new");
        versions.done();
        versions.synced();
        assert!(after_loss(&versions, b"new"));
        for lost in [&b"old"[..], b"", b"ne", b"ne\0"] {
            assert!(!after_loss(&versions, lost), "{lost:?}");
        }
    }

    #[test]
    fn what_was_not_synced_may_come_or_not() {
        let mut versions = Versions::new(b"synced".to_vec());
        versions.begin_write(4, b"12345");
        versions.done();
        assert_eq!(versions.now(), b"sync12345");
        for may_be in [&b"synced"[..], b"sync12345", b"sync1d", b"synced\0\x34"] {
            assert!(after_loss(&versions, may_be), "{may_be:?}");
        }
        // Bytes that nobody wrote over are there, and nothing is that nobody wrote.
        for lost in [&b"sync"[..], b"s\0nced", b"syncxd", b"sync123456"] {
            assert!(!after_loss(&versions, lost), "{lost:?}");
        }
    }

    #[test]
    fn a_cut_takes_what_lies_behind_it_only() {
        let mut versions = Versions::new(b"synced".to_vec());
        versions.begin_cut(2);
        versions.done();
        // Under way at the end.
        versions.begin_cut(4);
        assert_eq!(versions.now(), b"sy");
        for may_be in [&b"synced"[..], b"sy", b"sy\0\0"] {
            assert!(after_loss(&versions, may_be), "{may_be:?}");
        }
        for lost in [&b"s"[..], b"\0\0", b"synced\0"] {
            assert!(!after_loss(&versions, lost), "{lost:?}");
        }
    }
}
