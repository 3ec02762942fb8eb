//! A world of one store: callers, power cuts at any moment, also during recovery, and a model. What is left after each
//! cut must be a prefix of what was applied, with everything durable in it.

use super::Volatile;
use levada_base::ids::Seq;
use levada_base::reactor::{self, Group, Reactor};
use levada_base::{Epoch, units::KIB};
use levada_device::Device;
use levada_kv::{Batch, Bytes, Config, KvError, Store};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::rc::Rc;
use std::time::Duration;

const CONFIG: Config = Config { log_bytes: 64 << 10, cache_bytes: 64 << 10 };

fn random(below: u64) -> u64 {
    reactor::random_u64() % below
}

/// Every batch that was applied, and what is known to be durable.
#[derive(Default)]
struct Model {
    batches: RefCell<Vec<Batch>>,
    rows: RefCell<BTreeMap<Bytes, Bytes>>,
    durable: Cell<u64>,
    changes: Cell<u64>,
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
    fn cut_to(&self, len: u64) {
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
async fn work(store: Store, model: Rc<Model>) -> Result<(), KvError> {
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
            }
            _ => reactor::sleep(Duration::from_micros(random(500))).await,
        }
    }
}

/// The store as it is now equals the model.
async fn check(store: &Store, model: &Model) {
    let found = store.scan(Bound::Unbounded, Bound::Unbounded, usize::MAX).await.expect("reads");
    let rows = model.rows.borrow();
    assert_eq!(found.len(), rows.len());
    assert!(found.iter().map(|(k, v)| (k, v)).eq(rows.iter()));
}

/// Opens the store in a node that may lose power at any moment; `None` when it did.
async fn open(device: &Rc<Volatile>, epoch: u64, may_cut: bool) -> Option<(Group, Store)> {
    let node = Group::new();
    let area = Rc::clone(device) as Rc<dyn Device>;
    let opening = reactor::spawn_in(&node, async move {
        Store::open(area, Epoch(epoch), CONFIG).await.expect("opens")
    });
    if may_cut && random(2) == 0 {
        let limit = Duration::from_micros(random(3000));
        let opened = reactor::timeout(limit, opening).await;
        if let Ok(opened) = opened {
            return opened.map(|store| (node, store));
        }
        node.kill();
        device.cut();
        return None;
    }
    opening.await.map(|store| (node, store))
}

/// Runs the world of a seed; the batches that were left, and the trace.
pub fn world(seed: u64, cuts: u64) -> (u64, u64) {
    let reactor = Reactor::simulated(seed);
    let batches = reactor.block_on(async {
        let device = Rc::new(Volatile::new(3 * 1024 * KIB));
        let model = Rc::new(Model::default());
        let mut epoch = 1;
        let mut node = Group::new();
        let area = Rc::clone(&device) as Rc<dyn Device>;
        let making = reactor::spawn_in(&node, Store::create(area, Epoch(epoch), CONFIG));
        let mut store = making.await.expect("alive").expect("created");
        for _ in 0..cuts {
            let callers: Vec<_> = (0..1 + random(6))
                .map(|_| reactor::spawn_in(&node, work(store.clone(), Rc::clone(&model))))
                .collect();
            reactor::sleep(Duration::from_micros(random(200_000))).await;
            let clean = random(5) == 0;
            if clean {
                let closing = store.clone();
                let closed = reactor::spawn_in(&node, async move { closing.close().await });
                closed.await.expect("alive").expect("closes");
                model.durable.set(model.batches.borrow().len() as u64);
                for caller in callers {
                    assert_eq!(caller.await, Some(Err(KvError::Stopped)));
                }
            }
            drop(store);
            node.kill();
            if random(4) == 0 {
                device.settle();
            } else {
                device.cut();
            }
            (node, store) = loop {
                epoch += random(2);
                if let Some(opened) = open(&device, epoch, true).await {
                    break opened;
                }
            };
            model.cut_to(store.last_seq().0);
            assert_eq!(store.durable_seq(), store.last_seq());
            // A cut right behind recovery takes nothing of what it showed.
            if random(3) == 0 {
                node.kill();
                device.cut();
                (node, store) = open(&device, epoch, false).await.expect("no cut");
                assert_eq!(store.last_seq().0, model.durable.get());
            }
            check(&store, &model).await;
        }
        drop(store);
        node.kill();
        model.batches.borrow().len() as u64
    });
    (batches, reactor.trace_hash())
}
