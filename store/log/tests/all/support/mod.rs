//! An array for the tests: eight data members and two invisible ones, volatile until a flush,
//! slow by random amounts, and rotten where told.
#![allow(dead_code)] // Not every test uses every part.

pub mod damage;
pub mod model;

use levada_base::ids::ObjectId;
use levada_base::reactor::{self, Group, random_u64, sleep};
use levada_base::units::BLOCK_BYTES;
use levada_base::{Buf, Epoch, IoVec, IoVecMut, buf::bytes_in};
use levada_device::{
    BlockError, Device, DeviceInfo, Durability, FaultDevice, Faults, Health, IoFuture, RamDevice,
    VolatileDevice, check_range,
};
use levada_kv::Store;
use levada_log::{
    LogError, ObjectLog, RebuildReport, Rebuilt, SegmentReport, Stability, StagedRows, check_index,
};
use levada_raid::{Array, ArrayGeometry, Foreground, IoClass, MemberSet};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

const MEMBERS: u64 = 8;

/// What one stripe is.
#[derive(Default)]
struct Stripe {
    declared: bool,
    /// A declared stripe may be written once.
    taken: bool,
    /// What a power cut leaves.
    durable: Option<Vec<u8>>,
    /// Written and not flushed, or being written.
    volatile: Option<Vec<u8>>,
    /// The write has completed, at this count of writes.
    completed: Option<u64>,
}

pub struct RamArray {
    info: DeviceInfo,
    geometry: ArrayGeometry,
    stripes: RefCell<Vec<Stripe>>,
    writes: Cell<u64>,
    /// Blocks that read wrong, by the array's offset.
    rotten: RefCell<BTreeSet<u64>>,
    /// Blocks that cannot be read, whoever is avoided.
    pub unreadable: RefCell<BTreeSet<u64>>,
    /// After so many reads more than the array bears are lost.
    pub stops_after_reads: Cell<u64>,
    pub repairs: Cell<u64>,
    pub flushes: Cell<u64>,
    pub delay_us_max: Cell<u64>,
    /// Reads asked for, and their bytes.
    pub reads: Cell<u64>,
    pub read_bytes: Cell<u64>,
    /// Reads in flight, by offset and bytes, and the most bytes there ever were at once.
    reading: RefCell<Vec<(u64, u64)>>,
    pub reading_bytes_max: Cell<u64>,
    foreground: Foreground,
}

/// Waits a random while, so that operations overtake each other.
pub async fn dawdle(us_max: u64) {
    if us_max > 0 {
        sleep(Duration::from_micros(random_u64() % us_max)).await;
    }
}

impl RamArray {
    pub fn new(stripes: u64, chunk_bytes: u64) -> Self {
        let stripe_bytes = chunk_bytes * MEMBERS;
        Self {
            info: DeviceInfo {
                name: "test".into(),
                capacity_bytes: stripes * stripe_bytes,
                block_bytes: BLOCK_BYTES,
                atomic_write_bytes: BLOCK_BYTES,
                io_bytes_best: stripe_bytes,
            },
            geometry: ArrayGeometry { stripe_bytes, chunk_bytes, stripes, tolerates: 2 },
            stripes: RefCell::new((0..stripes).map(|_| Stripe::default()).collect()),
            writes: Cell::new(0),
            rotten: RefCell::default(),
            unreadable: RefCell::default(),
            stops_after_reads: Cell::new(u64::MAX),
            repairs: Cell::new(0),
            flushes: Cell::new(0),
            delay_us_max: Cell::new(100),
            reads: Cell::new(0),
            read_bytes: Cell::new(0),
            reading: RefCell::default(),
            reading_bytes_max: Cell::new(0),
            foreground: Foreground::default(),
        }
    }

    /// Loses what was not flushed: each block is old or new.
    pub fn cut_power(&self) {
        for stripe in self.stripes.borrow_mut().iter_mut() {
            let Some(new) = stripe.volatile.take() else { continue };
            stripe.completed = None;
            // What lay there before, as far as anybody knows.
            let mut left = stripe.durable.take().unwrap_or_else(|| vec![0xa5; new.len()]);
            for (old, new) in left.chunks_mut(4096).zip(new.chunks(4096)) {
                if reactor::random_u64().is_multiple_of(2) {
                    old.copy_from_slice(new);
                }
            }
            stripe.durable = Some(left);
        }
    }

    /// Forgets the reads counted so far.
    pub fn count_reads(&self) {
        self.reads.set(0);
        self.read_bytes.set(0);
        self.reading_bytes_max.set(0);
    }

    /// Counts a read, and knows of it until it is dropped.
    fn begin_read(&self, at: u64, bytes: u64) -> Reading<'_> {
        self.reads.set(self.reads.get() + 1);
        self.read_bytes.set(self.read_bytes.get() + bytes);
        self.reading.borrow_mut().push((at, bytes));
        let now = self.reading.borrow().iter().map(|(_, bytes)| bytes).sum();
        self.reading_bytes_max.set(self.reading_bytes_max.get().max(now));
        Reading { array: self, range: (at, bytes) }
    }

    pub fn written(&self) -> u64 {
        self.stripes.borrow().iter().filter(|stripe| stripe.declared).count() as u64
    }

    /// Stripes that were written since they were declared.
    pub fn written_stripes(&self) -> u64 {
        self.stripes.borrow().iter().filter(|stripe| stripe.declared && stripe.taken).count() as u64
    }

    /// Makes the block at `at` read wrong until it is repaired.
    pub fn rot(&self, at: u64) {
        self.rotten.borrow_mut().insert(at / BLOCK_BYTES * BLOCK_BYTES);
    }

    /// As [`RamArray::rot`], if the row of the stripe has less than `count_max` such blocks yet.
    pub fn rot_within(&self, at: u64, count_max: usize) {
        let stripe = at - at % self.geometry.stripe_bytes;
        let row = at % self.geometry.chunk_bytes;
        let others = (0..MEMBERS)
            .filter(|member| {
                let other = stripe + member * self.geometry.chunk_bytes + row;
                self.rotten.borrow().contains(&other)
            })
            .count();
        if others < count_max {
            self.rot(at);
        }
    }

    /// Offsets of all blocks of stripes that hold something.
    pub fn filled_blocks(&self) -> Vec<u64> {
        let stripes = self.stripes.borrow();
        let filled = stripes.iter().enumerate().filter(|(_, stripe)| stripe.durable.is_some());
        let bytes = self.geometry.stripe_bytes;
        filled
            .flat_map(|(at, _)| (0..bytes / BLOCK_BYTES).map(move |n| at as u64 * bytes + n * 4096))
            .collect()
    }

    fn member(&self, at: u64) -> usize {
        (at % self.geometry.stripe_bytes / self.geometry.chunk_bytes) as usize
    }

    /// True when the block cannot be told right with these members left out.
    fn reads_wrong(&self, at: u64, avoid: MemberSet) -> bool {
        let rotten = self.rotten.borrow();
        if !avoid.contains(self.member(at)) {
            return rotten.contains(&at);
        }
        // Rebuilt from the same row of the others, which must be right.
        let stripe = at - at % self.geometry.stripe_bytes;
        let row = at % self.geometry.chunk_bytes;
        (0..MEMBERS).any(|member| {
            let other = stripe + member * self.geometry.chunk_bytes + row;
            !avoid.contains(member as usize) && rotten.contains(&other)
        })
    }

    fn fill(&self, at: u64, into: &mut IoVecMut, avoid: MemberSet) -> Result<(), BlockError> {
        check_range(&self.info, at, bytes_in(into))?;
        if self.reads.get() > self.stops_after_reads.get() {
            return Err(BlockError::TooManyLost { lost: 3, tolerated: 2 });
        }
        if let Some(at) = self.unreadable.borrow().range(at..at + bytes_in(into)).next() {
            return Err(BlockError::Medium { at: *at, bytes: BLOCK_BYTES });
        }
        let stripes = self.stripes.borrow();
        let bytes = self.geometry.stripe_bytes;
        let mut at = at;
        for part in into {
            for block in part.chunks_mut(4096) {
                let stripe = &stripes[(at / bytes) as usize];
                let inside = (at % bytes) as usize;
                match stripe.volatile.as_ref().or(stripe.durable.as_ref()) {
                    Some(data) if stripe.declared => {
                        block.copy_from_slice(&data[inside..inside + block.len()]);
                    }
                    Some(_) | None => block.fill(if stripe.declared { 0x5a } else { 0 }),
                }
                if self.reads_wrong(at, avoid) {
                    block[7] ^= 0x10;
                }
                at += block.len() as u64;
            }
        }
        Ok(())
    }
}

/// A read in flight.
struct Reading<'a> {
    array: &'a RamArray,
    range: (u64, u64),
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let mut reading = self.array.reading.borrow_mut();
        let at = reading.iter().position(|range| *range == self.range).expect("it was begun");
        reading.swap_remove(at);
    }
}

impl Device for RamArray {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn read(&self, at: u64, mut into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        Box::pin(async move {
            let _reading = self.begin_read(at, bytes_in(&into));
            dawdle(self.delay_us_max.get()).await;
            self.fill(at, &mut into, MemberSet::NONE)?;
            Ok(into)
        })
    }

    fn write(&self, at: u64, _: IoVec, _: Durability) -> IoFuture<'_, ()> {
        Box::pin(async move { Err(BlockError::NotFresh { stripe: at }) })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        // What completed before this call, whenever it is polled.
        let upto = self.writes.get();
        Box::pin(async move {
            dawdle(self.delay_us_max.get()).await;
            self.flushes.set(self.flushes.get() + 1);
            for stripe in self.stripes.borrow_mut().iter_mut() {
                if stripe.completed.is_some_and(|at| at <= upto) {
                    stripe.durable = stripe.volatile.take();
                    stripe.completed = None;
                }
            }
            Ok(())
        })
    }

    fn discard(&self, _: u64, _: u64) -> IoFuture<'_, ()> {
        Box::pin(async { Err(BlockError::Unsupported { operation: "discard" }) })
    }

    fn write_zeroes(&self, _: u64, _: u64) -> IoFuture<'_, ()> {
        Box::pin(async { Err(BlockError::Unsupported { operation: "write_zeroes" }) })
    }

    fn fence(&self, _: Epoch) -> IoFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    fn health(&self) -> Health {
        Health::default()
    }
}

impl Array for RamArray {
    fn geometry(&self) -> ArrayGeometry {
        self.geometry
    }

    fn declare_fresh(&self, first: u64, count: u64) -> IoFuture<'_, ()> {
        Box::pin(async move {
            dawdle(self.delay_us_max.get()).await;
            for stripe in &mut self.stripes.borrow_mut()[first as usize..(first + count) as usize] {
                assert!(!stripe.declared, "declared twice");
                stripe.declared = true;
                stripe.taken = false;
            }
            Ok(())
        })
    }

    fn write_fresh(&self, stripe: u64, data: IoVec, _: IoClass) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let bytes = levada_base::buf::joined(&data);
            assert_eq!(bytes.len() as u64, self.geometry.stripe_bytes);
            {
                let slot = &mut self.stripes.borrow_mut()[stripe as usize];
                assert!(slot.declared && !slot.taken, "stripe {stripe} is not fresh");
                slot.taken = true;
                // From now on a cut may leave part of it.
                slot.volatile = Some(bytes);
            }
            dawdle(self.delay_us_max.get() * 2).await;
            self.writes.set(self.writes.get() + 1);
            self.stripes.borrow_mut()[stripe as usize].completed = Some(self.writes.get());
            Ok(())
        })
    }

    fn read_avoiding(
        &self,
        at: u64,
        mut into: IoVecMut,
        avoid: MemberSet,
        _: IoClass,
    ) -> IoFuture<'_, IoVecMut> {
        Box::pin(async move {
            let _reading = self.begin_read(at, bytes_in(&into));
            dawdle(self.delay_us_max.get()).await;
            if avoid.len() > 2 {
                return Err(BlockError::TooManyLost { lost: avoid.len(), tolerated: 2 });
            }
            self.fill(at, &mut into, avoid)?;
            Ok(into)
        })
    }

    fn members_of(&self, at: u64, bytes: u64) -> MemberSet {
        (at..at + bytes)
            .step_by(BLOCK_BYTES as usize)
            .fold(MemberSet::NONE, |set, at| set.with(self.member(at)))
    }

    fn repair(&self, at: u64, data: IoVec) -> IoFuture<'_, ()> {
        Box::pin(async move {
            self.repairs.set(self.repairs.get() + 1);
            for block in 0..bytes_in(&data) / BLOCK_BYTES {
                self.rotten.borrow_mut().remove(&(at + block * BLOCK_BYTES));
            }
            Ok(())
        })
    }

    fn discard_stripes(&self, first: u64, count: u64) -> IoFuture<'_, ()> {
        Box::pin(async move {
            dawdle(self.delay_us_max.get()).await;
            let bytes = self.geometry.stripe_bytes;
            let range = first * bytes..(first + count) * bytes;
            let is_in_it = |(at, len): &(u64, u64)| *at < range.end && at + len > range.start;
            assert!(!self.reading.borrow().iter().any(is_in_it), "given back while it is read");
            for stripe in &mut self.stripes.borrow_mut()[first as usize..(first + count) as usize] {
                // The bytes stay where they were until they are written over.
                stripe.declared = false;
                stripe.volatile = None;
                stripe.completed = None;
            }
            self.rotten.borrow_mut().retain(|at| !range.contains(at));
            Ok(())
        })
    }

    fn is_written(&self, stripe: u64) -> bool {
        self.stripes.borrow()[stripe as usize].declared
    }

    fn foreground(&self) -> &Foreground {
        &self.foreground
    }
}

/// The drives of a target: what survives a power cut.
pub struct World {
    pub array: Rc<RamArray>,
    pub store: Rc<VolatileDevice>,
    epoch: u64,
}

/// What a node needs to open its log.
pub struct Parts {
    pub array: Rc<dyn Array>,
    store: Rc<dyn Device>,
    pub epoch: Epoch,
}

/// A small intent log, so that it turns over.
pub const KV: levada_kv::Config = levada_kv::Config { log_bytes: 1 << 20, cache_bytes: 256 << 10 };

impl World {
    pub async fn new(stripes: u64) -> Self {
        Self::with_index(stripes, 16 << 20).await
    }

    /// With room for an index of so many bytes.
    pub async fn with_index(stripes: u64, index_bytes: u64) -> Self {
        let area = Rc::new(RamDevice::new("kv", index_bytes));
        Self {
            array: Rc::new(RamArray::new(stripes, 8192)),
            store: Rc::new(VolatileDevice::new(area)),
            epoch: 0,
        }
    }

    pub fn next_life(&mut self) -> Parts {
        self.epoch += 1;
        Parts { array: self.array.clone(), store: self.slow_store(), epoch: Epoch(self.epoch) }
    }

    /// Takes its time, so that a cut finds requests on their way.
    fn slow_store(&self) -> Rc<dyn Device> {
        let faults = Faults::none();
        faults.slow(Duration::from_micros(40));
        Rc::new(FaultDevice::new(self.store.clone(), faults))
    }

    /// Holds an index over which no log is open against its segments.
    pub async fn check_segments(&self, store: &Store) -> Result<SegmentReport, LogError> {
        let (array, epoch) = (self.array.clone(), Epoch(self.epoch));
        levada_log::check_segments(array, store, model::config(), epoch, &|_, _| {}).await
    }

    pub async fn cut_power(&self) {
        self.array.cut_power();
        self.store.power_cut(random_u64()).await.expect("a cut");
        self.store.power_on();
    }

    /// Loses the index and makes it anew.
    pub async fn rebuild(&mut self) -> ObjectLog {
        self.try_rebuild().await.expect("a log")
    }

    pub async fn try_rebuild(&mut self) -> Result<ObjectLog, LogError> {
        let parts = self.next_life();
        let store = Store::create(parts.store, parts.epoch, KV).await.expect("a store");
        let staged = StagedRows::default();
        ObjectLog::rebuild_index(parts.array, store, model::config(), parts.epoch, &staged).await
    }

    /// As [`World::rebuild`] with what the old store still tells of staged changes, which is kept beside it.
    pub async fn rebuild_with_staged(&mut self) -> (ObjectLog, RebuildReport) {
        let parts = self.next_life();
        let store = Store::open(parts.store, parts.epoch, KV).await.expect("a store");
        let staged = StagedRows::of(&store).await.expect("reads");
        store.close().await.expect("closes");
        drop(store);
        // Begun and cut off, and begun again.
        for last in [false, true] {
            let parts = self.next_life();
            let (array, config, epoch) = (parts.array, model::config(), parts.epoch);
            let store = Store::create(parts.store, epoch, KV).await.expect("a store");
            let array_again = Rc::clone(&array);
            let rebuilt = Rebuilt::read(array_again, store.clone(), config, epoch, &staged).await;
            let rebuilt = rebuilt.expect("readable");
            if !last {
                let (node, half) = (Group::new(), store.clone());
                reactor::spawn_in(&node, async move { rebuilt.write(&half).await });
                sleep(Duration::from_micros(random_u64() % 300)).await;
                node.kill();
                drop(store);
                self.store.power_cut(random_u64()).await.expect("a cut");
                self.store.power_on();
                continue;
            }
            rebuilt.write(&store).await.expect("room");
            let found = check_index(&store, &|_| {}).await.expect("reads");
            assert_eq!(found.findings, []);
            let log = ObjectLog::open(array, store, config, epoch).await.expect("a log");
            return (log, rebuilt.report());
        }
        unreachable!("the last one returns")
    }
}

impl Parts {
    pub fn new(array: Rc<dyn Array>, store: Rc<dyn Device>, epoch: Epoch) -> Self {
        Self { array, store, epoch }
    }

    pub async fn open(self, create: bool) -> ObjectLog {
        self.open_with(model::config(), create).await
    }

    /// The index as the last life left it.
    pub async fn open_store(self) -> Store {
        Store::open(self.store, self.epoch, KV).await.expect("a store")
    }

    pub async fn open_with(self, config: levada_log::Config, create: bool) -> ObjectLog {
        let log = if create {
            let store = Store::create(self.store, self.epoch, KV).await.expect("a store");
            ObjectLog::create(self.array, store, config, self.epoch).await
        } else {
            let store = Store::open(self.store, self.epoch, KV).await.expect("a store");
            ObjectLog::open(self.array, store, config, self.epoch).await
        };
        log.expect("a log")
    }
}

/// The key of an object's row, or of its extent at 0 (docs/design/0005-object-log.md).
pub fn key(tag: u8, id: ObjectId) -> Vec<u8> {
    let mut key = vec![tag];
    key.extend_from_slice(&id.to_key());
    if tag == b'E' {
        key.extend_from_slice(&[0; 8]);
    }
    key
}

/// `len` times the same byte, in one buffer.
pub fn bytes(byte: u8, len: u64) -> IoVec {
    Buf::copy_of(&vec![byte; len as usize]).into_vec()
}

/// Short-lived objects (from object 1 on), so many that the records of their deletions alone would
/// more than fill the log; then settles it.
pub async fn churn_deletions(log: &ObjectLog) {
    const TASKS: u64 = 32;
    let each = log.space().total_bytes * 5 / 4 / 96 / TASKS;
    let tasks: Vec<_> = (1..=TASKS)
        .map(|task| {
            let log = log.clone();
            reactor::spawn(async move {
                for n in 0..each {
                    let id = model::object(task + TASKS * n);
                    let written = log.write(id, 0, bytes(1, 10), Stability::Unstable).await;
                    written.unwrap_or_else(|error| panic!("{n} of {each}: {error}"));
                    log.delete(id).await.expect("deleted");
                }
            })
        })
        .collect();
    for task in tasks {
        assert!(task.await.is_some());
    }
    log.settle().await.expect("settled");
}

/// The seeds to run; `SIM_SEED` replays one.
pub fn seeds(count: u64) -> std::ops::Range<u64> {
    match std::env::var("SIM_SEED").ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => seed..seed + 1,
        None => 0..count,
    }
}
