//! Clean rows kept in memory: what the checkpoint holds, or that it holds nothing.
//!
//! What always holds: an entry is what the checkpoint held when the checkpoint's messages were
//! last handled, because only their handler puts entries in, in order. A row changed since is
//! found in the overlay first.

use crate::store::Bytes;
use lru::LruCache;

/// What an entry takes besides key and value.
const ENTRY_OVERHEAD_BYTES: usize = 96;

/// Rows by key, least recently used ones dropped first; bounded by bytes.
pub(crate) struct Cache {
    rows: LruCache<Bytes, Option<Bytes>>,
    bytes: usize,
    bytes_max: usize,
}

fn size(key: &Bytes, value: Option<&Bytes>) -> usize {
    key.len() + value.map_or(0, |value| value.len()) + ENTRY_OVERHEAD_BYTES
}

impl Cache {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self { rows: LruCache::unbounded(), bytes: 0, bytes_max }
    }

    /// `Some(None)` when the checkpoint is known not to hold `key`.
    pub(crate) fn get(&mut self, key: &[u8]) -> Option<Option<Bytes>> {
        self.rows.get(key).cloned()
    }

    pub(crate) fn put(&mut self, key: Bytes, value: Option<Bytes>) {
        let bytes = size(&key, value.as_ref());
        // One value must not push everything else out; but an old value must not stay either.
        if bytes > self.bytes_max / 4 {
            if let Some((key, old)) = self.rows.pop_entry(&key) {
                self.bytes -= size(&key, old.as_ref());
            }
            return;
        }
        self.bytes += bytes;
        if let Some((key, old)) = self.rows.push(key, value) {
            self.bytes -= size(&key, old.as_ref());
        }
        while self.bytes > self.bytes_max {
            let Some((key, old)) = self.rows.pop_lru() else { break };
            self.bytes -= size(&key, old.as_ref());
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stays_within_its_bound_and_drops_the_oldest() {
        let mut cache = Cache::new(1000);
        for n in 0..20u8 {
            cache.put([n][..].into(), Some([n; 20][..].into()));
            assert!(cache.bytes() <= 1000);
            assert!(cache.get(&[0]).is_some(), "used every time");
        }
        assert_eq!(cache.get(&[1]), None);
        cache.put([0][..].into(), None);
        assert_eq!(cache.get(&[0]), Some(None));
        cache.put([0][..].into(), Some([0; 500][..].into()));
        assert_eq!(cache.get(&[0]), None, "too large to keep, too old to stay");
        while cache.rows.pop_lru().is_some() {}
    }
}
