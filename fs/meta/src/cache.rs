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
//! - A *complete* directory has all its names here: a name that is not here does not exist.
//!
//! Rows are kept in two generations: when the younger one is full it becomes the older one,
//! and what was not used since the last time is forgotten. A directory that loses a name to this
//! is no longer complete. It is complete from its making on, or after [`Listing`] brought in its
//! names, which happens once the lookups that missed are worth it.

use crate::key;
use levada_base::ids::{Ino, Seq};
use levada_base::meter::HitMeter;
use levada_base::planted;
use levada_kv::Bytes;
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
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
    complete: HashSet<Ino>,
    listings: HashMap<Ino, Rc<Touched>>,
    /// Names asked for in vain, of directories that are not complete.
    misses: HashMap<Ino, u64>,
    /// What is known of a name that a complete directory does not have.
    absent: Cached,
    /// Rows that were looked at.
    pub looks: HitMeter,
}

/// The names of a directory that changed while it was being listed.
type Touched = RefCell<HashSet<Bytes>>;

/// All names of a directory on their way from the store.
pub struct Listing {
    pub directory: Ino,
    /// It is given up when there are more.
    pub rows_max: usize,
    touched: Rc<Touched>,
}

/// A fetch under way. It is void once its key has changed.
pub struct Fetch {
    key: Bytes,
    void: Rc<Cell<bool>>,
}

/// Roughly what a row costs beside its bytes.
const ROW_BYTES: usize = 96;
/// A larger directory is never complete, unless it grew while it was.
const LISTED_ROWS_MAX: u64 = 10_000;
/// A directory is listed when it has at most so many entries per lookup that missed: then listing
/// costs about as much as the lookups did, and it never comes as a surprise.
const LISTED_ROWS_PER_MISS: u64 = 64;
/// Directories of which is noted that they are complete, or that lookups missed.
const DIRECTORIES_MAX: usize = 1 << 16;

impl Cache {
    /// A cache that holds about `bytes`, and what is not durable yet on top.
    pub fn new(bytes: usize) -> Self {
        Self {
            young: HashMap::new(),
            old: HashMap::new(),
            young_bytes: 0,
            generation_bytes: bytes / 2,
            fetches: HashMap::new(),
            complete: HashSet::new(),
            listings: HashMap::new(),
            misses: HashMap::new(),
            absent: Cached { value: None, seq: Seq(0) },
            looks: HitMeter::default(),
        }
    }

    /// The row, if it is known.
    pub fn get(&mut self, key: &[u8]) -> Option<&Cached> {
        let is_here = self.young.contains_key(key) || self.bring(key);
        // Its removal, if there was one, is durable: else it were here.
        let is_absent =
            !is_here && directory_of(key).is_some_and(|dir| self.complete.contains(&dir));
        self.looks.count(is_here || is_absent);
        if is_absent { Some(&self.absent) } else { self.young.get(key) }
    }

    /// Takes a row among the younger ones, as it is used.
    fn bring(&mut self, key: &[u8]) -> bool {
        let found = self.old.remove_entry(key);
        found.map(|(key, cached)| self.insert(key, cached)).is_some()
    }

    /// Every name of this directory is here; the caller has just made it, or listed it.
    pub fn completed(&mut self, directory: Ino) {
        if self.complete.len() >= DIRECTORIES_MAX {
            self.complete.clear();
        }
        self.complete.insert(directory);
    }

    /// A name of a directory with so many entries is not here and is about to be fetched: says
    /// whether to fetch them all.
    pub fn missed(&mut self, directory: Ino, entries: u64) -> Option<Listing> {
        let rows_max = LISTED_ROWS_MAX.min((self.generation_bytes / 4 / ROW_BYTES) as u64);
        if self.listings.contains_key(&directory) || entries > rows_max {
            return None;
        }
        if self.misses.len() >= DIRECTORIES_MAX {
            self.misses.clear();
        }
        let misses = self.misses.entry(directory).or_default();
        *misses += 1;
        if entries > *misses * LISTED_ROWS_PER_MISS {
            return None;
        }
        self.misses.remove(&directory);
        let touched = Rc::<Touched>::default();
        self.listings.insert(directory, Rc::clone(&touched));
        Some(Listing { directory, rows_max: rows_max as usize, touched })
    }

    /// What the store listed; nothing when that failed, was given up, or there are too many.
    pub fn listed(&mut self, listing: Listing, rows: Option<Vec<(Bytes, Bytes)>>) {
        let Listing { directory, touched, .. } = listing;
        self.listings.remove(&directory);
        let (Some(rows), touched) = (rows, touched.take()) else { return };
        // What changed meanwhile is as the change left it, unless that was forgotten again.
        if !planted!("meta-listing-forgets-changes")
            && !touched.iter().all(|key| self.young.contains_key(key) || self.old.contains_key(key))
        {
            return;
        }
        for (key, value) in rows {
            if self.get(&key).is_none() {
                self.insert(key, Cached { value: Some(value), seq: Seq(0) });
            }
        }
        self.completed(directory);
    }

    /// A row as the batch `seq` changed it.
    pub fn changed(&mut self, key: Bytes, value: Option<Bytes>, seq: Seq) {
        if let Some(void) = self.fetches.get(&key) {
            void.set(true);
        }
        if let Some(directory) = directory_of(&key)
            && let Some(touched) = self.listings.get(&directory)
        {
            touched.borrow_mut().insert(Rc::clone(&key));
        }
        if value.is_none() && key.first() == Some(&key::INODE) {
            // Its number never comes back.
            key::first_number(&key).map(|ino| self.complete.remove(&Ino(ino)));
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
            } else if cached.value.is_some()
                && let Some(directory) = directory_of(&key)
                && !planted!("meta-complete-after-trim")
            {
                self.complete.remove(&directory);
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

/// The directory to which the row of a name belongs.
fn directory_of(key: &[u8]) -> Option<Ino> {
    let name = key.first() == Some(&key::NAME);
    if name { key::first_number(key).map(Ino) } else { None }
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

    fn name(directory: u64, name: &str) -> Bytes {
        key::name(Ino(directory), name.as_bytes()).as_slice().into()
    }

    fn is_absent(cache: &mut Cache, key: &Bytes) -> bool {
        cache.get(key).is_some_and(|cached| cached.value.is_none())
    }

    #[test]
    fn a_complete_directory_answers_until_it_forgets_a_name() {
        let mut cache = Cache::new(2000);
        assert!(!is_absent(&mut cache, &name(5, "none")));
        cache.completed(Ino(5));
        assert!(is_absent(&mut cache, &name(5, "none")));
        assert!(!is_absent(&mut cache, &name(6, "none")));
        cache.changed(name(5, "one"), Some(bytes("row")), Seq(1));
        assert!(!is_absent(&mut cache, &name(5, "one")));
        // Forgetting a name that was removed takes nothing away, one that is there does.
        cache.changed(name(5, "two"), Some(bytes("row")), Seq(2));
        cache.changed(name(5, "two"), None, Seq(3));
        for n in 4..40 {
            cache.changed(bytes(&format!("other{n}")), Some(bytes("x")), Seq(n));
            assert!(cache.get(&name(5, "one")).is_some());
            cache.trim(Seq(n));
        }
        assert!(is_absent(&mut cache, &name(5, "two")));
        for n in 40..80 {
            cache.changed(bytes(&format!("other{n}")), Some(bytes("x")), Seq(n));
            cache.trim(Seq(n));
        }
        assert!(cache.get(&name(5, "one")).is_none());
        assert!(cache.get(&name(5, "none")).is_none());
    }

    #[test]
    fn a_listing_never_replaces_a_change() {
        let mut cache = Cache::new(1 << 20);
        let listing = cache.missed(Ino(5), 2).expect("a small directory");
        assert!(cache.missed(Ino(5), 2).is_none(), "one at a time");
        cache.changed(name(5, "old"), None, Seq(1));
        cache.changed(name(5, "new"), Some(bytes("new")), Seq(2));
        let rows = vec![(name(5, "kept"), bytes("row")), (name(5, "old"), bytes("row"))];
        cache.listed(listing, Some(rows));
        assert!(is_absent(&mut cache, &name(5, "old")) && is_absent(&mut cache, &name(5, "none")));
        assert_eq!(cache.get(&name(5, "new")).map(|new| new.seq), Some(Seq(2)));
        assert!(cache.get(&name(5, "kept")).is_some_and(|kept| kept.value.is_some()));
    }

    #[test]
    fn a_listing_whose_changes_were_forgotten_is_void() {
        let mut cache = Cache::new(800);
        let listing = cache.missed(Ino(5), 0).expect("an empty directory");
        cache.changed(name(5, "new"), Some(bytes("new")), Seq(1));
        for n in 2..20 {
            cache.changed(bytes(&format!("other{n}")), Some(bytes("x")), Seq(n));
            cache.trim(Seq(n));
        }
        cache.listed(listing, Some(Vec::new()));
        assert!(cache.get(&name(5, "new")).is_none());
        let given_up = cache.missed(Ino(5), 0).expect("an empty directory");
        cache.listed(given_up, None);
        assert!(cache.get(&name(5, "none")).is_none() && cache.listings.is_empty());
    }

    #[test]
    fn a_planted_bug_of_listings_is_found() {
        planted::choose(Some("meta-listing-forgets-changes"));
        let found = std::panic::catch_unwind(a_listing_whose_changes_were_forgotten_is_void);
        planted::choose(None);
        assert!(found.is_err());
    }

    #[test]
    fn large_directories_are_listed_only_when_it_is_worth_it() {
        let mut cache = Cache::new(64 << 20);
        assert!(cache.missed(Ino(5), 10_001).is_none());
        let misses = (0..).find(|_| cache.missed(Ino(6), 10_000).is_some());
        assert_eq!(misses, Some(10_000 / LISTED_ROWS_PER_MISS));
    }
}
