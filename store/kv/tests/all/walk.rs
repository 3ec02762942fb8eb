//! What is added up along a walk, with the changes that are told, is what the rows are at its end.

use crate::common::world::Ground;
use levada_base::planted;
use levada_base::reactor::{self, Group, Reactor};
use levada_kv::{Batch, Bytes, Store, Walk};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Bound;
use std::rc::Rc;
use std::time::Duration;

fn random(below: u64) -> u64 {
    reactor::random_u64() % below
}

/// More rows than two pages have.
const KEYS: u64 = 5000;
const CHANGERS: u64 = 3;

fn key(n: u64) -> [u8; 8] {
    (n * 7).to_be_bytes()
}

fn worth(key: &[u8], value: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (key, value).hash(&mut hasher);
    hasher.finish()
}

/// Rows, a walk over some of them, and their sum as the walk knows it.
struct Walker {
    rows: RefCell<BTreeMap<Vec<u8>, Vec<u8>>>,
    walk: Walk,
    sum: Cell<u64>,
    told: Cell<u64>,
    is_done: Cell<bool>,
}

impl Walker {
    /// Makes a change, and tells the walk of it when it must be told.
    fn apply(&self, store: &Store, changes: Vec<(Vec<u8>, Option<Vec<u8>>)>) {
        let mut batch = Batch::default();
        for (key, value) in changes {
            match &value {
                Some(value) => batch.put(&key, value),
                None => batch.delete(&key),
            }
            let mut rows = self.rows.borrow_mut();
            let old = match &value {
                Some(value) => rows.insert(key.clone(), value.clone()),
                None => rows.remove(&key),
            };
            if self.walk.has_passed(&key) {
                self.told.set(self.told.get() + 1);
                let old = old.map_or(0, |old| worth(&key, &old));
                let new = value.map_or(0, |new| worth(&key, &new));
                self.sum.set(self.sum.get().wrapping_sub(old).wrapping_add(new));
            }
        }
        store.apply(batch).expect("room");
    }

    fn take(&self, rows: &[(Bytes, Bytes)]) {
        let page = rows.iter().fold(0u64, |sum, (key, value)| sum.wrapping_add(worth(key, value)));
        self.sum.set(self.sum.get().wrapping_add(page));
    }

    async fn change(self: Rc<Self>, store: Store) {
        while !self.is_done.get() {
            store.room().await.expect("room");
            let many = if random(50) == 0 { 400 } else { random(8) };
            let start = random(KEYS);
            let one = |n| {
                let near = random(2) == 0;
                let n = if near { (start + n) % KEYS } else { random(KEYS) };
                let value = (random(3) > 0).then(|| vec![random(256) as u8; random(40) as usize]);
                (key(n).to_vec(), value)
            };
            let changes = (0..many).map(one).collect();
            self.apply(&store, changes);
            reactor::sleep(Duration::from_micros(random(300))).await;
        }
    }
}

/// Runs a walk among changes; how many of them were told.
fn walk(seed: u64) -> u64 {
    Reactor::simulated(seed).block_on(async {
        let node = Group::new();
        let store = Ground::drive().start(&node, 1, true).await.expect("alive");
        let (from, to) = match random(3) {
            0 => (Vec::new(), None),
            _ => (key(random(KEYS / 3)).to_vec(), Some(key(KEYS / 2 + random(KEYS)).to_vec())),
        };
        let walker = Rc::new(Walker {
            rows: RefCell::default(),
            walk: Walk::new(&from, to.as_deref()),
            sum: Cell::new(0),
            told: Cell::new(0),
            is_done: Cell::new(false),
        });
        let density = 1 + random(10);
        for n in (0..KEYS).filter(|_| random(10) < density).collect::<Vec<_>>() {
            store.room().await.expect("room");
            walker.apply(&store, vec![(key(n).to_vec(), Some(vec![1; random(60) as usize]))]);
        }
        let changers: Vec<_> = (0..CHANGERS)
            .map(|_| reactor::spawn_in(&node, Rc::clone(&walker).change(store.clone())))
            .collect();
        while !walker.walk.is_over() {
            reactor::sleep(Duration::from_micros(random(3000))).await;
            walker.walk.page(&store, |rows| walker.take(rows)).await.expect("reads");
        }
        // At the end, and at any moment after it.
        let mut moments = vec![(walker.sum.get(), walker.rows.borrow().clone())];
        reactor::sleep(Duration::from_micros(random(20_000))).await;
        walker.is_done.set(true);
        for changer in changers {
            changer.await.expect("ends");
        }
        moments.push((walker.sum.get(), walker.rows.borrow().clone()));
        for (sum, rows) in moments {
            let from = Bound::Included(from.clone());
            let to = to.clone().map_or(Bound::Unbounded, Bound::Excluded);
            let rows = rows.range::<Vec<u8>, _>((from, to));
            let expected = rows.fold(0u64, |sum, (key, value)| sum.wrapping_add(worth(key, value)));
            assert_eq!(sum, expected, "seed {seed}");
        }
        let told = walker.told.get();
        node.kill();
        told
    })
}

#[test]
fn a_walk_among_changes_adds_up_to_what_is_there_at_its_end() {
    let told: u64 = (0..12).map(walk).sum();
    assert!(told > 300, "{told} changes were told");
}

#[test]
fn a_walk_that_moves_after_its_rows_were_taken_is_found() {
    let is_found = (0..40).any(|seed| {
        planted::choose(Some("kv-walk-passes-late"));
        let outcome = std::panic::catch_unwind(|| walk(seed));
        planted::choose(None);
        outcome.is_err()
    });
    assert!(is_found);
}

#[test]
fn pages_are_of_one_moment_and_end_where_they_say() {
    Reactor::simulated(1).block_on(async {
        let node = Group::new();
        let store = Ground::drive().start(&node, 1, true).await.expect("alive");
        let mut batch = Batch::default();
        for n in 0..100 {
            batch.put(&key(n), b"row");
        }
        store.apply(batch).expect("room");
        let first = key(10);
        let from = Bound::Excluded(&first[..]);
        let page = store.scan_page(from, Bound::Unbounded, 20).await.expect("reads");
        assert_eq!(page.rows.len(), 20);
        assert_eq!(page.upto.as_deref(), Some(&key(30)[..]));
        let last = key(99);
        let page = store.scan_page(from, Bound::Included(&last), 1000).await.expect("reads");
        assert_eq!((page.rows.len(), page.upto), (89, None));
        let page = store.scan_page(from, Bound::Unbounded, 0).await.expect("reads");
        assert!(page.rows.is_empty() && page.upto.is_none());
        node.kill();
    });
}
