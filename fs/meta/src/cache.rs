//! Rows in memory, also rows known to be absent.
//!
//! Every change goes through here in the same step in which the store applies it, so what is
//! here is what the store holds, and reading it needs no wait: that is what makes a check and
//! the change that rests on it one step.
//!
//! What always holds:
//! - A row that is not durable yet is here, with the sequence that it waits for. So a row that
//!   comes from the store is durable.
//! - A fetch from the store never replaces a row that changed while it was under way.
//!
//! Rows are kept in two generations: when the younger one is full it becomes the older one,
//! and what was not used since the last time is forgotten.

use levada_base::ids::Seq;
use levada_kv::Bytes;
use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;

/// A row, or that there is none.
#[derive(Clone)]
pub struct Cached {
    pub value: Option<Bytes>,
    /// The batch that made it so; zero when it came from the store.
    pub seq: Seq,
}

/// See the module.
pub struct Cache {
    young: HashMap<Bytes, Cached>,
    old: HashMap<Bytes, Cached>,
    young_bytes: usize,
    /// Bytes of one generation.
    generation_bytes: usize,
    fetches: HashMap<Bytes, Rc<Cell<bool>>>,
}

/// A fetch under way. It is void once its key has changed.
pub struct Fetch {
    key: Bytes,
    void: Rc<Cell<bool>>,
}

/// Roughly what a row costs beside its bytes.
const ROW_BYTES: usize = 96;

impl Cache {
    /// A cache that holds about `bytes`, and what is not durable yet on top.
    pub fn new(bytes: usize) -> Self {
        Self {
            young: HashMap::new(),
            old: HashMap::new(),
            young_bytes: 0,
            generation_bytes: bytes / 2,
            fetches: HashMap::new(),
        }
    }

    /// The row, if it is known.
    pub fn get(&mut self, key: &[u8]) -> Option<&Cached> {
        if !self.young.contains_key(key) {
            let (key, cached) = self.old.remove_entry(key)?;
            self.insert(key, cached);
        }
        self.young.get(key)
    }

    /// A row as the batch `seq` changed it.
    pub fn changed(&mut self, key: Bytes, value: Option<Bytes>, seq: Seq) {
        if let Some(void) = self.fetches.get(&key) {
            void.set(true);
        }
        self.old.remove(&key);
        self.insert(key, Cached { value, seq });
    }

    fn insert(&mut self, key: Bytes, cached: Cached) {
        self.young_bytes += ROW_BYTES + key.len() + cached.value.as_ref().map_or(0, |v| v.len());
        self.young.insert(key, cached);
    }

    /// Makes room, but forgets nothing that came after `durable`.
    pub fn trim(&mut self, durable: Seq) {
        if self.young_bytes <= self.generation_bytes {
            return;
        }
        let forgotten = std::mem::replace(&mut self.old, std::mem::take(&mut self.young));
        self.young_bytes = 0;
        for (key, cached) in forgotten {
            if cached.seq > durable {
                self.insert(key, cached);
            }
        }
    }

    /// Says that `key` is about to be read from the store.
    pub fn fetch(&mut self, key: Bytes) -> Fetch {
        let void = Rc::clone(self.fetches.entry(Rc::clone(&key)).or_default());
        Fetch { key, void }
    }

    /// What the store answered; nothing when the read failed or was given up.
    pub fn fetched(&mut self, fetch: Fetch, value: Option<Option<Bytes>>) {
        let Fetch { key, void } = fetch;
        // This one and the map's.
        if Rc::strong_count(&void) == 2 {
            self.fetches.remove(&key);
        }
        if let Some(value) = value
            && !void.get()
            && self.get(&key).is_none()
        {
            self.insert(key, Cached { value, seq: Seq(0) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> Bytes {
        text.as_bytes().into()
    }

    fn value(cache: &mut Cache, key: &str) -> Option<Option<Bytes>> {
        cache.get(key.as_bytes()).map(|cached| cached.value.clone())
    }

    #[test]
    fn only_durable_rows_are_forgotten() {
        let mut cache = Cache::new(500);
        for n in 1..=100 {
            cache.changed(bytes(&format!("row{n}")), Some(bytes("x")), Seq(n));
            cache.trim(Seq(60));
        }
        for n in 61..=100 {
            let key = format!("row{n}");
            assert_eq!(cache.get(key.as_bytes()).map(|cached| cached.seq), Some(Seq(n)));
        }
        assert!(cache.get(b"row1").is_none());
        for _ in 0..3 {
            cache.changed(bytes("big"), Some(bytes(&"x".repeat(500))), Seq(101));
            cache.trim(Seq(101));
        }
        assert!(cache.get(b"row100").is_none());
    }

    #[test]
    fn a_fetch_never_replaces_a_change() {
        let mut cache = Cache::new(0);
        let (first, second) = (cache.fetch(bytes("k")), cache.fetch(bytes("k")));
        cache.changed(bytes("k"), Some(bytes("new")), Seq(1));
        cache.fetched(first, Some(Some(bytes("old"))));
        assert_eq!(value(&mut cache, "k"), Some(Some(bytes("new"))));
        // Forgotten meanwhile: what the fetch brings is still old.
        cache.trim(Seq(1));
        cache.changed(bytes("other"), None, Seq(2));
        cache.trim(Seq(2));
        assert_eq!(value(&mut cache, "k"), None);
        cache.fetched(second, Some(Some(bytes("old"))));
        assert_eq!(value(&mut cache, "k"), None);
        let third = cache.fetch(bytes("k"));
        cache.fetched(third, Some(None));
        assert_eq!(value(&mut cache, "k"), Some(None));
        assert!(cache.fetches.is_empty());
        let given_up = cache.fetch(bytes("z"));
        cache.fetched(given_up, None);
        assert_eq!(value(&mut cache, "z"), None);
    }
}
