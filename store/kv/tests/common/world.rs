//! A world of one store: callers, power cuts at any moment, also during recovery, and a model. What is left after each
//! cut must be a prefix of what was applied, with everything durable in it.

use super::Volatile;
use levada_base::Epoch;
use levada_base::ids::{Seq, Uuid};
use levada_base::reactor::{self, Group, JoinHandle, Reactor};
use levada_base::units::{KIB, MIB};
use levada_device::Device;
use levada_kv::{Batch, Bytes, Config, KvError, Store};
use levada_raid::{ArraySpec, Level, MemberSpec, RaidArray};
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

/// What the store's area lies on.
pub struct Ground {
    drives: Vec<Rc<Volatile>>,
    mirrored: bool,
    failed: Cell<usize>,
}

const ARRAY: Uuid = Uuid::from_u128(7);

impl Ground {
    /// One drive that never fails.
    pub fn drive() -> Self {
        let drives = vec![Rc::new(Volatile::new(3 * MIB))];
        Self { drives, mirrored: false, failed: Cell::new(0) }
    }

    /// A mirror of three copies over six drives in three enclosures, two of which may fail.
    pub fn mirror() -> Self {
        let drives = (0..6).map(|_| Rc::new(Volatile::new(2 * MIB))).collect();
        Self { drives, mirrored: true, failed: Cell::new(0) }
    }

    async fn area(drives: Vec<Rc<Volatile>>, epoch: Epoch, create: bool) -> Rc<dyn Device> {
        let found = drives.iter().map(|drive| Rc::clone(drive) as Rc<dyn Device>);
        if create {
            let member = |(i, device)| MemberSpec {
                device,
                uuid: Uuid::from_u128(100 + i as u128),
                name: format!("drive-{i}"),
                enclosure: i as u16 / 2,
            };
            let spec = ArraySpec {
                uuid: ARRAY,
                name: "meta".to_owned(),
                level: Level::Raid1 { copies: 3 },
                chunk_bytes: 128 * KIB,
                journal_bytes: None,
                members: found.enumerate().map(member).collect(),
                spares: 0,
            };
            return Rc::new(RaidArray::create(spec, epoch).await.expect("array created"));
        }
        let opened = RaidArray::open(ARRAY, found.collect(), epoch, false).await;
        Rc::new(opened.expect("array opens").0)
    }

    /// Makes or opens the store in `node`.
    fn start(&self, node: &Group, epoch: u64, create: bool) -> JoinHandle<Store> {
        let (drives, mirrored) = (self.drives.clone(), self.mirrored);
        reactor::spawn_in(node, async move {
            let epoch = Epoch(epoch);
            let area = if mirrored {
                Self::area(drives, epoch, create).await
            } else {
                Rc::clone(&drives[0]) as Rc<dyn Device>
            };
            let store = if create {
                Store::create(area, epoch, CONFIG).await
            } else {
                Store::open(area, epoch, CONFIG).await
            };
            store.expect("the store starts")
        })
    }

    fn cut(&self) {
        self.drives.iter().for_each(|drive| drive.cut());
    }

    fn settle(&self) {
        self.drives.iter().for_each(|drive| drive.settle());
    }

    /// Lets a drive fail for good, soon.
    fn fail_one(&self) {
        let drive = &self.drives[random(self.drives.len() as u64) as usize];
        if self.mirrored && self.failed.get() < 2 && drive.fails_after.get().is_none() {
            drive.fails_after.set(Some(random(300)));
            self.failed.set(self.failed.get() + 1);
        }
    }
}

/// Opens the store in a node that may lose power at any moment; `None` when it did.
async fn open(ground: &Ground, epoch: u64, may_cut: bool) -> Option<(Group, Store)> {
    let node = Group::new();
    let opening = ground.start(&node, epoch, false);
    if may_cut && random(2) == 0 {
        let limit = Duration::from_micros(random(if ground.mirrored { 50_000 } else { 3000 }));
        let opened = reactor::timeout(limit, opening).await;
        if let Ok(opened) = opened {
            return opened.map(|store| (node, store));
        }
        node.kill();
        ground.cut();
        return None;
    }
    opening.await.map(|store| (node, store))
}

/// Runs the world of a seed; the batches that were left, and the trace.
pub fn world(seed: u64, cuts: u64, ground: fn() -> Ground) -> (u64, u64) {
    let reactor = Reactor::simulated(seed);
    let batches = reactor.block_on(async {
        let ground = ground();
        let model = Rc::new(Model::default());
        let mut epoch = 1;
        let mut node = Group::new();
        let mut store = ground.start(&node, epoch, true).await.expect("alive");
        for _ in 0..cuts {
            if random(2) == 0 {
                ground.fail_one();
            }
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
                ground.settle();
            } else {
                ground.cut();
            }
            (node, store) = loop {
                // An array's owner is always a new one.
                epoch += if ground.mirrored { 1 } else { random(2) };
                if let Some(opened) = open(&ground, epoch, true).await {
                    break opened;
                }
            };
            model.cut_to(store.last_seq().0);
            assert_eq!(store.durable_seq(), store.last_seq());
            // A cut right behind recovery takes nothing of what it showed.
            if random(3) == 0 {
                node.kill();
                ground.cut();
                epoch += u64::from(ground.mirrored);
                (node, store) = open(&ground, epoch, false).await.expect("no cut");
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
