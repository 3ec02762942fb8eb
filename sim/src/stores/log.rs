//! The object log on RAID 6, its index on a drive that loses power and nothing else: committed
//! changes survive, later ones are there or not, and the index can be made anew from segments.
//!
//! The array is small: in some seeds cleaning keeps up with the writers, in some it is full again
//! and again and refuses.

use super::objects::{Model, TASKS, check_all, config, object, payload, work};
use super::{end_round, ended, open};
use crate::arrays::rounds;
use crate::arrays::{Kind, Rack};
use crate::{LOSSES_MAX, Outcome, Rng, Shape, SimDrive, World};
use levada_base::Epoch;
use levada_base::ids::Seq;
use levada_base::probe;
use levada_base::reactor::{self, Reactor};
use levada_base::units::{KIB, MIB};
use levada_kv::{KvError, Store};
use levada_log::{Config, ObjectLog, ScrubOrder, Stability, StagedRows, check_segments};
use levada_raid::{Array, Limits};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// Bytes of the index's drive.
const INDEX_BYTES: u64 = 8 * MIB;
/// Memory for maps: all of them stay there, some do, nearly none.
const CACHED_BYTES: [u64; 4] = [4 * MIB, 32 * KIB, 8 * KIB, KIB];
const KV: levada_kv::Config = levada_kv::Config { log_bytes: MIB, cache_bytes: 256 * KIB as usize };
/// Bytes of a drive.
const DRIVE_BYTES: [u64; 3] = [768 * KIB, 864 * KIB, 2 * MIB];
/// Of the smallest drives' log, bytes that are left by what stays, so that it is full again and again.
const LEFT_BYTES: u64 = 150_000;

fn config_of(seed: u64) -> Config {
    Config { cached_bytes_max: CACHED_BYTES[(seed / 3 % 4) as usize], ..config() }
}

/// One seed of the object log.
pub fn log(seed: u64) -> Outcome {
    let reactor = Reactor::simulated(seed);
    let coverage = reactor.block_on(async {
        let drive_bytes = DRIVE_BYTES[(seed % 3) as usize];
        let world = Rc::new(World::new(seed, Shape::of_12(drive_bytes)));
        let index = Rc::new(SimDrive::new("index", u16::MAX, INDEX_BYTES));
        let rack = Rack::create(Rc::clone(&world), Kind::Parity).await;
        rack.may_miswrite.set(world.rng(|rng| rng.one_in(2)));
        // Cut off with the others, and never lost: no fault looks beyond the shape.
        world.drives.borrow_mut().push(Rc::clone(&index));
        let run = Run { rack, index, model: Rc::default(), scrub: Rc::default() };
        run.rounds().await;
        {
            let (model, mut coverage) = (run.model.borrow(), world.coverage.borrow_mut());
            coverage.count("changes", model.changes);
            coverage.count("changes refused: full", model.refused);
        }
        world.end()
    });
    Outcome { trace_hash: reactor.trace_hash(), coverage }
}

struct Run {
    rack: Rc<Rack>,
    index: Rc<SimDrive>,
    model: Rc<RefCell<Model>>,
    /// The number of the scrub that runs, or was interrupted and goes on.
    scrub: Rc<Cell<u64>>,
}

impl Run {
    async fn rounds(&self) {
        let (world, seed) = (&self.rack.world, self.rack.world.seed);
        let (index, rack) = (self.index.device(), Rc::clone(&self.rack));
        let made = reactor::spawn_in(&world.node(), async move {
            let store = Store::create(index, rack.epoch(), KV).await.expect("a store");
            let array = Rc::new(rack.array());
            ObjectLog::create(array, store, config_of(seed), rack.epoch()).await
        });
        let mut log = made.await.expect("alive").unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        if world.shape.drive_bytes == DRIVE_BYTES[0] {
            self.write_ballast(&log).await;
        }
        let rounds = world.rng(|rng| rng.between(3, 5));
        for _ in 0..rounds {
            for task in 0..TASKS {
                let work = work(log.clone(), Rc::clone(&self.model), task, u64::MAX);
                reactor::spawn_in(&world.node(), work);
            }
            if world.rng(|rng| rng.one_in(2)) {
                reactor::spawn_in(&world.node(), self.scrub(log.clone()));
            }
            let length = world.rng(|rng| rng.between(5_000, 150_000));
            rounds::faults_for(&self.rack, Duration::from_micros(length)).await;
            let settled = log.clone();
            end_round(&self.rack, || async move {
                settled.settle().await.unwrap_or_else(|e| panic!("seed {seed}: settle: {e}"));
            })
            .await;
            drop(log);
            // With what was in flight, and what no footer tells to be flushed.
            let loses_its_index = !self.rack.may_miswrite.get() && world.rng(|rng| rng.one_in(4));
            log = if loses_its_index {
                self.make_the_index(false).await
            } else {
                self.reopen().await
            };
            check_all(&log, &self.model, seed).await;
            world.coverage.borrow_mut().count("full checks", 1);
            if world.rng(|rng| rng.one_in(2)) {
                self.put_right(&log).await;
            }
        }
        self.put_right(&log).await;
        self.rack.finish().await;
        if self.rack.may_miswrite.get() {
            self.miswritten_by_two(&log).await;
        }
        let report = log.scrub().await.unwrap_or_else(|e| panic!("seed {seed}: scrub: {e}"));
        assert!(report.damaged.is_empty(), "seed {seed}: {report:?}");
        // What lies beside the data in a stripe is for the array to put right, and two wrong chunks it cannot.
        if !self.rack.has_miswritten() && world.rng(|rng| rng.one_in(2)) {
            log = self.lose_the_index(log).await;
        }
        check_all(&log, &self.model, seed).await;
    }

    /// A scrub beside everything else, which goes on in the next life if this one is too short.
    fn scrub(&self, log: ObjectLog) -> impl Future<Output = ()> + 'static {
        let (world, number) = (Rc::clone(&self.rack.world), Rc::clone(&self.scrub));
        let bytes_per_second = world.rng(|rng| rng.between(2, 200)) * MIB;
        async move {
            let (seed, run) = (world.seed, number.get());
            let limits = Limits {
                floor_bytes_per_second: bytes_per_second,
                ceiling_bytes_per_second: bytes_per_second,
            };
            let order = ScrubOrder { run, limits, clock_s: || 0 };
            let before = log.scrub_record().await;
            let before = before.unwrap_or_else(|e| panic!("seed {seed}: a record: {e}"));
            let goes_on = before.filter(|record| record.run == run);
            let report = log.scrub_by_order(order).await;
            let report = report.unwrap_or_else(|e| panic!("seed {seed}: scrub: {e}"));
            assert_eq!(report.places(), 0, "seed {seed}: {report:?}");
            number.set(run + 1);
            let mut coverage = world.coverage.borrow_mut();
            coverage.count("scrubs beside faults", 1);
            coverage.count("of these interrupted before", u64::from(goes_on.is_some()));
        }
    }

    /// As many drives as may be lost write wrong while the log is used: of a stripe as many chunks are wrong as it has of
    /// parity.
    async fn miswritten_by_two(&self, log: &ObjectLog) {
        let (world, seed) = (&self.rack.world, self.rack.world.seed);
        let mut rng = world.rng(Rng::fork);
        self.rack.miswrite(&mut rng, LOSSES_MAX);
        let works: Vec<_> = (0..TASKS)
            .map(|task| {
                let work = work(log.clone(), Rc::clone(&self.model), task, 50);
                reactor::spawn_in(&world.node(), work)
            })
            .collect();
        for work in works {
            ended(work, "what uses the log").await;
        }
        log.settle().await.unwrap_or_else(|e| panic!("seed {seed}: settle: {e}"));
        check_all(log, &self.model, seed).await;
        self.put_right(log).await;
    }

    /// Finds what drives wrote wrong: the log what is needed, then the array what is not.
    async fn put_right(&self, log: &ObjectLog) {
        let seed = self.rack.world.seed;
        if !self.rack.write_well() {
            return;
        }
        let report = log.scrub().await.unwrap_or_else(|e| panic!("seed {seed}: scrub: {e}"));
        assert!(report.damaged.is_empty(), "seed {seed}: {report:?}");
        self.rack.make_agree().await;
        {
            let mut coverage = self.rack.world.coverage.borrow_mut();
            coverage.count("miswritten blocks found by a scrub", report.repaired_blocks);
        }
        check_all(log, &self.model, seed).await;
    }

    async fn write_ballast(&self, log: &ObjectLog) {
        let ballast_bytes = log.space().free_bytes.saturating_sub(LEFT_BYTES);
        let (id, (data, flat)) = (object(u64::MAX), payload(ballast_bytes));
        self.model.borrow_mut().of(id).next = Some(Some(flat));
        let ack = log.write(id, 0, data, Stability::Durable).await.expect("an empty log has room");
        let mut model = self.model.borrow_mut();
        model.done(id, ack.seq.0);
        model.durable(ack.durable.0);
    }

    async fn reopen(&self) -> ObjectLog {
        let index = &self.index;
        open(&self.rack, |rack| {
            let index = index.device();
            async move {
                let array = rack.open().await;
                let _busy = probe::busy("recovering");
                let store = Store::open(index, rack.epoch(), KV).await;
                let store =
                    store.unwrap_or_else(|e| panic!("seed {}: the index: {e}", rack.world.seed));
                let log = ObjectLog::open(
                    Rc::new(array),
                    store,
                    config_of(rack.world.seed),
                    rack.epoch(),
                )
                .await;
                log.unwrap_or_else(|error| {
                    panic!("seed {}: the log does not open: {error}", rack.world.seed)
                })
            }
        })
        .await
    }

    /// The index is gone, and made anew from the segments.
    async fn lose_the_index(&self, log: ObjectLog) -> ObjectLog {
        let seed = self.rack.world.seed;
        log.commit(Seq(u64::MAX)).await.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        // Else what was committed last is staged, and in no stripe.
        if self.rack.world.rng(|rng| rng.one_in(2)) {
            log.settle().await.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        }
        let total_bytes = log.space().total_bytes;
        drop(log);
        self.rack.world.kill();
        let log = self.make_the_index(true).await;
        assert_eq!(log.space().total_bytes, total_bytes, "seed {seed}");
        log
    }

    /// The index is lost, of a log that is at rest or not, and made anew from the segments and what is left of it that is staged.
    async fn make_the_index(&self, is_at_rest: bool) -> ObjectLog {
        self.rack.world.note("index lost");
        let index = &self.index;
        // As a file beside the drives: from before the old store is given up until the log is there.
        let kept: Rc<RefCell<Option<Vec<u8>>>> = Rc::default();
        open(&self.rack, |rack| {
            let (index, kept) = (index.device(), Rc::clone(&kept));
            async move {
                let array: Rc<dyn Array> = Rc::new(rack.open().await);
                let _busy = probe::busy("recovering");
                let (seed, epoch) = (rack.world.seed, rack.epoch());
                let old = Store::open(Rc::clone(&index), epoch, KV).await;
                let before = kept.borrow().clone();
                if let Ok(old) = &old
                    && is_at_rest
                {
                    fits_its_segments(&array, old, seed, epoch).await;
                }
                let staged = still_staged(old, before.as_deref()).await;
                let staged =
                    staged.unwrap_or_else(|| panic!("seed {seed}: what was staged is lost"));
                kept.replace(Some(staged.encode()));
                let store = Store::create(index, epoch, KV).await.expect("a store");
                let log =
                    ObjectLog::rebuild_index(array, store, config_of(seed), epoch, &staged).await;
                log.unwrap_or_else(|error| panic!("seed {seed}: the index is not rebuilt: {error}"))
            }
        })
        .await
    }
}

/// What the segments amount to is what an index says that nobody gave up.
async fn fits_its_segments(array: &Rc<dyn Array>, index: &Store, seed: u64, epoch: Epoch) {
    if !StagedRows::has_log(index).await.expect("readable") {
        return;
    }
    let checked = check_segments(Rc::clone(array), index, config_of(seed), epoch, &|_, _| {}).await;
    let checked = checked.unwrap_or_else(|error| panic!("seed {seed}: a deep check: {error}"));
    assert_eq!(checked.findings, [], "seed {seed}: {checked:?}");
}

/// What is staged, by a store that may have been given up already, or as it was kept before that.
async fn still_staged(store: Result<Store, KvError>, kept: Option<&[u8]>) -> Option<StagedRows> {
    if let Ok(store) = store
        && StagedRows::has_log(&store).await.expect("readable")
    {
        return Some(StagedRows::of(&store).await.expect("readable"));
    }
    StagedRows::decode(kept?)
}
