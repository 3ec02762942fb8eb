//! The log on real arrays: RAID 6 over drives with volatile caches that lose power, go away, and
//! rot.

use crate::support::model::{Model, TASKS, below, check_all, flat, object, payload, work};
use crate::support::{Parts, seeds};
use futures_util::future::join_all;
use levada_base::Epoch;
use levada_base::ids::Uuid;
use levada_base::reactor::{self, Group, Reactor, random_u64};
use levada_base::units::{KIB, MIB};
use levada_device::{Device, FaultDevice, Faults, RamDevice, VolatileDevice};
use levada_log::{Counters, ObjectLog, Stability};
use levada_raid::{ArraySpec, Level, Limits, MemberSpec, RaidArray};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

const MEMBERS: usize = 10;
const SPARES: usize = 1;
const ARRAY: Uuid = Uuid::from_u128(0xa55a);
const CHUNK_BYTES: u64 = 8 * KIB;
const SLOTS: u64 = 100;

struct Drive {
    ram: Rc<RamDevice>,
    faults: Faults,
    top: Rc<VolatileDevice>,
}

struct Cluster {
    drives: Vec<Drive>,
    store: Rc<VolatileDevice>,
    epoch: u64,
}

impl Cluster {
    fn new() -> Self {
        let drive = |n| {
            let ram = Rc::new(RamDevice::new(&format!("drive-{n}"), MIB + SLOTS * CHUNK_BYTES));
            let faults = Faults::none();
            let below = FaultDevice::new(ram.clone(), faults.clone());
            Drive { ram, faults, top: Rc::new(VolatileDevice::new(Rc::new(below))) }
        };
        Self {
            drives: (0..MEMBERS + SPARES).map(drive).collect(),
            store: Rc::new(VolatileDevice::new(Rc::new(RamDevice::new("kv", 16 * MIB)))),
            epoch: 0,
        }
    }

    fn member(&self, n: usize) -> MemberSpec {
        MemberSpec {
            device: self.drives[n].top.clone(),
            uuid: Uuid::from_u128(1000 + n as u128),
            name: format!("drive-{n}"),
            enclosure: n as u16 / 2,
        }
    }

    /// What a node needs to open everything; called in the node's own task.
    fn next_life(&mut self) -> Bring {
        self.epoch += 1;
        let create = self.epoch == 1;
        let spec = ArraySpec {
            uuid: ARRAY,
            name: "test".to_owned(),
            level: Level::Raid6,
            chunk_bytes: CHUNK_BYTES,
            block_bytes: None,
            journal_bytes: Some(0),
            members: (0..self.drives.len()).map(|n| self.member(n)).collect(),
            spares: SPARES,
        };
        Bring { spec, store: self.store.clone(), epoch: Epoch(self.epoch), create }
    }

    async fn cut_power(&self) {
        for drive in &self.drives {
            drive.top.power_cut(random_u64()).await.expect("a cut");
            drive.top.power_on();
        }
        self.store.power_cut(random_u64()).await.expect("a cut");
        self.store.power_on();
    }

    /// Writes `objects` objects of `bytes()` each, and leaves nothing that would hide what the drives
    /// hold: no cache of theirs, no memory of the log. Returns the contents, object 0 first.
    async fn fill(&self, log: &ObjectLog, objects: u64, bytes: impl Fn() -> u64) -> Vec<Vec<u8>> {
        let mut contents = Vec::new();
        for n in 0..objects {
            let (data, bytes) = payload(bytes());
            log.write(object(n), 0, data, Stability::Unstable).await.expect("room");
            contents.push(bytes);
        }
        log.settle().await.expect("settled");
        for drive in &self.drives {
            drive.top.flush().await.expect("flushed");
        }
        contents
    }

    /// Where the superblock says that a member's data begins (docs/design/0003-array-format.md).
    async fn data_at(&self, n: usize) -> u64 {
        let mut found = 0;
        for block in 0..2 {
            let into = levada_base::BufMut::zeroed(4096).into_vec();
            let read = self.drives[n].ram.read(block * 4096, into).await.expect("read");
            found = found.max(u64::from_le_bytes(read[0][96..104].try_into().expect("8")));
        }
        found
    }
}

/// Reads back what [`Cluster::fill`] wrote.
async fn check_contents(log: &ObjectLog, expected: &[Vec<u8>], seed: u64) {
    for (n, bytes) in expected.iter().enumerate() {
        let read = log.read(object(n as u64), 0, bytes.len() as u64).await;
        let read = flat(&read.unwrap_or_else(|error| panic!("seed {seed}: {n}: {error}")));
        assert!(read == *bytes, "seed {seed}: object {n}");
    }
}

struct Bring {
    spec: ArraySpec,
    store: Rc<dyn Device>,
    epoch: Epoch,
    create: bool,
}

impl Bring {
    async fn up(self) -> (RaidArray, ObjectLog) {
        let array = if self.create {
            RaidArray::create(self.spec, self.epoch).await.expect("an array")
        } else {
            let devices = self.spec.members.iter().map(|member| Rc::clone(&member.device));
            let opened = RaidArray::open(ARRAY, devices.collect(), self.epoch, false).await;
            opened.expect("an array").0
        };
        let parts = Parts::new(Rc::new(array.clone()), self.store, self.epoch);
        (array, parts.open(self.create).await)
    }
}

#[test]
fn power_cuts_and_lost_members_lose_nothing_that_was_committed() {
    for seed in seeds(3) {
        Reactor::simulated(seed).block_on(async {
            let mut cluster = Cluster::new();
            let model = Rc::new(RefCell::new(Model::default()));
            let mut sum = Counters::default();
            for life in 0..4 {
                let node = Group::new();
                let bring = cluster.next_life();
                let model = Rc::clone(&model);
                let alive: Rc<RefCell<Option<(RaidArray, ObjectLog)>>> = Rc::default();
                let of_node = Rc::clone(&alive);
                reactor::spawn_in(&node, async move {
                    let (array, log) = bring.up().await;
                    check_all(&log, &model, seed).await;
                    for task in 0..TASKS {
                        reactor::spawn(work(log.clone(), Rc::clone(&model), task, 10_000));
                    }
                    *of_node.borrow_mut() = Some((array, log));
                });
                for drive in &cluster.drives {
                    drive.faults.slow(Duration::from_micros(20 + below(60)));
                }
                reactor::sleep(Duration::from_micros(200_000 + below(100_000))).await;
                let up = alive.borrow().clone();
                if let Some((array, _)) = &up
                    && life < 2
                {
                    // One drive goes for good, under load, and the spare takes over.
                    let member = below(MEMBERS as u64) as usize;
                    let _ = array.fail(member).await;
                    let rebuilding = array.clone();
                    reactor::spawn_in(&node, async move {
                        let _ = rebuilding.rebuild(Limits::NONE).await;
                    });
                    reactor::sleep(Duration::from_micros(below(100_000))).await;
                }
                if let Some((_, log)) = up {
                    sum.stripes += log.counters().stripes;
                    sum.damaged_blocks += log.counters().damaged_blocks;
                }
                alive.take();
                node.kill();
                cluster.cut_power().await;
            }
            for drive in &cluster.drives {
                drive.faults.slow(Duration::ZERO);
            }
            let bring = cluster.next_life();
            let (_, log) = bring.up().await;
            check_all(&log, &model, seed).await;
            assert!(sum.stripes > 50, "seed {seed}: {sum:?}");
            assert_eq!(sum.damaged_blocks, 0, "seed {seed}");
        });
    }
}

#[test]
fn silent_rot_on_two_members_is_repaired_through_parity() {
    for seed in seeds(20) {
        Reactor::simulated(seed).block_on(async {
            let mut cluster = Cluster::new();
            let bring = cluster.next_life();
            let (array, log) = bring.up().await;
            let expected = cluster.fill(&log, 30, || 1 + below(90_000)).await;
            let first = below(MEMBERS as u64) as usize;
            let second = (first + 1 + below(MEMBERS as u64 - 1) as usize) % MEMBERS;
            for member in [first, second] {
                let data_at = cluster.data_at(member).await;
                for _ in 0..200 {
                    let at = data_at + below(SLOTS / 2 * CHUNK_BYTES);
                    cluster.drives[member].faults.rot(at, 1, 0x40);
                }
            }
            check_contents(&log, &expected, seed).await;
            assert!(log.counters().repaired_blocks > 0, "seed {seed}");
            let report = log.scrub().await.expect("scrubbed");
            assert_eq!((report.repaired_blocks, report.damaged.len()), (0, 0), "seed {seed}");
            drop(array);
        });
    }
}

/// A scrub meets rot in stripes of which other places cannot be read: it repairs the one while it repairs
/// the other, and comes to an end.
#[test]
fn a_scrub_of_rot_beside_unreadable_places_ends() {
    for seed in seeds(20) {
        Reactor::simulated(seed).block_on(async {
            let mut cluster = Cluster::new();
            let (array, log) = cluster.next_life().up().await;
            let expected = cluster.fill(&log, 60, || 1 + below(60_000)).await;
            let rotten = below(MEMBERS as u64) as usize;
            let unreadable = (rotten + 1 + below(MEMBERS as u64 - 1) as usize) % MEMBERS;
            for (member, is_rotten) in [(rotten, true), (unreadable, false)] {
                let (data_at, faults) =
                    (cluster.data_at(member).await, &cluster.drives[member].faults);
                let bytes = SLOTS / 2 * CHUNK_BYTES;
                match is_rotten {
                    true => faults.rot(data_at, bytes, 0x40),
                    false => faults.medium_error(data_at, bytes),
                }
            }
            let report = reactor::timeout(Duration::from_secs(600), log.scrub()).await;
            let report =
                report.unwrap_or_else(|_| panic!("seed {seed}: no end")).expect("scrubbed");
            assert_eq!(report.damaged, [], "seed {seed}");
            check_contents(&log, &expected, seed).await;
            drop(array);
        });
    }
}

/// A block holds several small records. What repairs it for one of them repairs it for its
/// neighbours too: nobody else may come by before two other members are lost.
#[test]
fn a_repair_leaves_no_rot_beside_it() {
    const OBJECTS: u64 = 200;
    const BYTES: u64 = 700;
    for seed in seeds(10) {
        Reactor::simulated(seed).block_on(async {
            let mut cluster = Cluster::new();
            let (array, log) = cluster.next_life().up().await;
            let expected = cluster.fill(&log, OBJECTS, || BYTES).await;
            let rotten = below(MEMBERS as u64) as usize;
            let (data_at, faults) = (cluster.data_at(rotten).await, &cluster.drives[rotten].faults);
            faults.rot(data_at, SLOTS / 2 * CHUNK_BYTES, 0x40);
            for n in 0..OBJECTS {
                log.read(object(n), 0, BYTES).await.expect("repaired");
                if log.counters().repaired_blocks > 0 {
                    break;
                }
            }
            // What nobody has written again was only read wrong.
            faults.heal();
            for at in [1, 2] {
                array.fail((rotten + at) % MEMBERS).await.expect("borne");
            }
            check_contents(&log, &expected, seed).await;
        });
    }
}

/// Many at once repair the records of one block, of which a repair proves its own bytes only: none undoes what another
/// one has just put right.
#[test]
fn repairs_in_one_block_do_not_undo_each_other() {
    const OBJECTS: u64 = 200;
    const BYTES: u64 = 700;
    for seed in seeds(20) {
        Reactor::simulated(seed).block_on(async {
            let mut cluster = Cluster::new();
            let (array, log) = cluster.next_life().up().await;
            cluster.fill(&log, OBJECTS, || BYTES).await;
            // Rot in two chunks of a stripe: the rest of it is not of one mind about the neighbours.
            let first = below(MEMBERS as u64) as usize;
            for member in [first, (first + 1 + below(MEMBERS as u64 - 1) as usize) % MEMBERS] {
                let data_at = cluster.data_at(member).await;
                for _ in 0..200 {
                    let at = data_at + below(4 * CHUNK_BYTES);
                    cluster.drives[member].faults.rot(at, 1, 0x40);
                }
            }
            // Every one at its own pace, so that they meet half-way.
            for drive in &cluster.drives {
                drive.faults.slow(Duration::from_micros(50 + below(500)));
            }
            let reads = (0..OBJECTS).map(|n| log.read(object(n), 0, BYTES));
            for read in join_all(reads).await {
                read.expect("repaired");
            }
            assert!(log.counters().repaired_blocks > 0, "seed {seed}");
            let report = log.scrub().await.expect("scrubbed");
            assert_eq!((report.repaired_blocks, report.damaged.len()), (0, 0), "seed {seed}");
            drop(array);
        });
    }
}
