//! A model of a store and callers that make random changes to both. Also the workload of the
//! simulator's scenario: `sim/src/stores`.

use levada_base::ids::Seq;
use levada_base::reactor;
use levada_kv::{Batch, Bytes, KvError, Store};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::rc::Rc;
use std::time::Duration;

pub fn random(below: u64) -> u64 {
    reactor::random_u64() % below
}

/// Every batch that was applied, and what is known to be durable.
#[derive(Default)]
pub struct Model {
    pub batches: RefCell<Vec<Batch>>,
    rows: RefCell<BTreeMap<Bytes, Bytes>>,
    pub durable: Cell<u64>,
    pub changes: Cell<u64>,
}

impl Model {
    fn put_in(rows: &mut BTreeMap<Bytes, Bytes>, batch: &Batch) {
        for (key, value) in &batch.changes {
            match value {
                Some(value) => rows.insert(Rc::clone(key), Rc::clone(value)),
                None => rows.remove(key),
            };
        }
    }

    fn applied(&self, seq: Seq, batch: Batch) {
        Self::put_in(&mut self.rows.borrow_mut(), &batch);
        self.batches.borrow_mut().push(batch);
        assert_eq!(seq.0, self.batches.borrow().len() as u64);
        self.changes.set(self.changes.get() + 1);
    }

    /// Forgets every batch after the first `len`.
    pub fn cut_to(&self, len: u64) {
        let mut batches = self.batches.borrow_mut();
        assert!(len >= self.durable.get(), "{len} left, {} durable", self.durable.get());
        assert!(len <= batches.len() as u64, "{len} left of {}", batches.len());
        batches.truncate(len as usize);
        let mut rows = BTreeMap::new();
        batches.iter().for_each(|batch| Self::put_in(&mut rows, batch));
        *self.rows.borrow_mut() = rows;
        self.durable.set(len);
    }
}

fn key() -> Vec<u8> {
    // Few keys, so that they meet; some with long names.
    let name = random(120);
    let mut key = format!("k{name:03}").into_bytes();
    if name.is_multiple_of(7) {
        key.resize(200, b'x');
    }
    key
}

fn batch() -> Batch {
    let mut batch = Batch::default();
    for _ in 0..random(6) {
        let bytes = match random(20) {
            0 => random(9000),
            1..4 => random(2500),
            _ => random(100),
        };
        match random(4) {
            0 => batch.delete(&key()),
            _ => batch.put(&key(), &vec![random(256) as u8; bytes as usize]),
        }
    }
    batch
}

/// One caller: puts, reads and waits, until the store fails or the power goes.
pub async fn work(store: Store, model: Rc<Model>) -> Result<(), KvError> {
    let greedy = random(3) == 0;
    loop {
        match random(10) {
            0..5 => {
                // Some do not ask for room: the log gets full, and waits for the checkpoint.
                if !greedy || random(50) == 0 {
                    store.room().await?;
                }
                let batch = batch();
                let seq = match store.apply(batch.clone()) {
                    Err(KvError::TooLarge { .. }) => continue,
                    Err(KvError::Full) => {
                        store.room().await?;
                        continue;
                    }
                    applied => applied?,
                };
                model.applied(seq, batch);
                if random(2) == 0 {
                    store.durable(seq).await?;
                    model.durable.set(model.durable.get().max(seq.0));
                }
            }
            5..7 => {
                let key = key();
                let (expected, before) =
                    (model.rows.borrow().get(&key[..]).cloned(), model.changes.get());
                let found = store.get(&key).await?;
                if before == model.changes.get() {
                    assert_eq!(found, expected, "{key:?}");
                }
            }
            7 => {
                let (from, to) = (key(), key());
                let bounds = (Bound::Excluded(&from[..]), Bound::Included(&to[..]));
                let limit = 1 + random(40) as usize;
                let before = model.changes.get();
                let found = store.scan(bounds.0, bounds.1, limit).await?;
                if before == model.changes.get() && from < to {
                    let rows = model.rows.borrow();
                    let expected = rows.range::<[u8], _>(bounds).take(limit);
                    assert!(found.iter().map(|(k, v)| (k, v)).eq(expected));
                }
                // And from the end, page by page.
                let (mut upto, mut back) = (Bound::Included(to.clone()), Vec::new());
                let before = model.changes.get();
                loop {
                    let to = upto.as_ref().map(|key| &key[..]);
                    let page = store.scan_page_back(bounds.0, to, limit).await?;
                    back.extend(page.rows);
                    match page.upto {
                        Some(key) => upto = Bound::Excluded(key.to_vec()),
                        None => break,
                    }
                }
                if before == model.changes.get() && from < to {
                    let rows = model.rows.borrow();
                    let expected = rows.range::<[u8], _>(bounds).rev();
                    assert!(back.iter().map(|(k, v)| (k, v)).eq(expected));
                }
            }
            _ => reactor::sleep(Duration::from_micros(random(500))).await,
        }
    }
}

/// The store as it is now equals the model.
pub async fn check(store: &Store, model: &Model) {
    let found = store.scan(Bound::Unbounded, Bound::Unbounded, usize::MAX).await.expect("reads");
    let rows = model.rows.borrow();
    assert_eq!(found.len(), rows.len());
    assert!(found.iter().map(|(k, v)| (k, v)).eq(rows.iter()));
}
