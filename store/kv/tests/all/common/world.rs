//! A world of one store: callers, power cuts at any moment, also during recovery, and a model. What is left after each
//! cut must be a prefix of what was applied, with everything durable in it.

use super::Volatile;
use super::model::{Model, check, random, work};
use levada_base::Epoch;
use levada_base::ids::Uuid;
use levada_base::reactor::{self, Group, JoinHandle, Reactor};
use levada_base::units::{KIB, MIB};
use levada_device::Device;
use levada_kv::{Config, KvError, Store};
use levada_raid::{ArraySpec, Level, MemberSpec, RaidArray};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

const CONFIG: Config = Config { log_bytes: 64 << 10, cache_bytes: 64 << 10 };

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
                block_bytes: None,
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
    pub fn start(&self, node: &Group, epoch: u64, create: bool) -> JoinHandle<Store> {
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
