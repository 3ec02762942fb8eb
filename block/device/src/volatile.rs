//! A device with a write cache that loses power: what the simulator and the kill tests stand on.
//!
//! Writes stay in this process's memory, block by block with their last versions, until a flush
//! or a FUA write takes them down, or the background write-back happens to. Reads see them.
//! [`VolatileDevice::power_cut`] lets each cached block land in any of its cached versions or
//! not at all, so a large write is torn at block boundaries and writes are reordered; the rest
//! is lost. For a real daemon the process is the cache: killing it is the power cut.
//!
//! What always holds:
//! - What a completed flush or FUA write covered is on the device below.
//! - No block is written down by two requests at once, so an older version never wins.
//! - A block is never torn inside.
//! - From a power cut to `power_on` every request, also one in flight, answers `Gone`.
//!
//! The device below must take writes when they are issued (RAM), or be idle, for a power cut to
//! be the end of all writing.

use crate::device::read_lent_by_copy;
use crate::{
    BlockError, Device, DeviceInfo, Durability, Health, IoFuture, LentFuture, Witness, check_range,
};
use futures_util::future::join_all;
use levada_base::buf::bytes_in;
use levada_base::reactor::{self, JoinHandle};
use levada_base::sync::Notify;
use levada_base::units::{BLOCK_BYTES, MIB};
use levada_base::{Buf, BufMut, Epoch, IoVec, IoVecMut, LentVec};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

/// Versions kept of one block; more would only make old ones as likely as new ones.
const VERSIONS_MAX: usize = 4;
/// Unless told otherwise, this much is cached before writes wait for write-back.
const CACHED_BYTES_MAX: u64 = 64 * MIB;
/// Larger ranges of zeroes go down at once.
const CACHED_ZEROES_MAX: u64 = 16 * MIB;
/// Blocks written down by one request.
const RUN_BLOCKS_MAX: usize = 256;

/// A cached block contents, numbered in the order of writing.
struct Version {
    number: u64,
    data: Buf,
}

#[derive(Default)]
struct Cache {
    /// By block; versions from old to new, never empty.
    blocks: BTreeMap<u64, SmallVec<[Version; 1]>>,
    cached_bytes: u64,
    /// Blocks being written down.
    busy: BTreeSet<u64>,
    last_number: u64,
}

impl Cache {
    fn insert(&mut self, block: u64, data: Buf) {
        self.last_number += 1;
        let versions = self.blocks.entry(block).or_default();
        if versions.len() == VERSIONS_MAX {
            versions.remove(0);
        } else {
            self.cached_bytes += BLOCK_BYTES;
        }
        versions.push(Version { number: self.last_number, data });
    }

    /// Forgets what has been written down.
    fn written(&mut self, block: u64, number: u64) {
        let Some(versions) = self.blocks.get_mut(&block) else { return };
        let before = versions.len();
        versions.retain(|version| version.number > number);
        self.cached_bytes -= (before - versions.len()) as u64 * BLOCK_BYTES;
        if versions.is_empty() {
            self.blocks.remove(&block);
        }
    }
}

/// A device with a volatile write cache.
pub struct VolatileDevice {
    inner: Rc<dyn Device>,
    cache: RefCell<Cache>,
    /// Something was cached, or blocks are no longer busy.
    changed: Notify,
    cached_bytes_max: u64,
    /// Power cuts so far: a request must notice that the power went and came back meanwhile.
    cuts: Cell<u64>,
    off: Cell<bool>,
}

/// Blocks that one request writes down: busy until dropped.
struct Batch<'a> {
    of: &'a VolatileDevice,
    cut: u64,
    /// Block, number of the version, contents; in order of blocks.
    blocks: Vec<(u64, u64, Buf)>,
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        if self.cut == self.of.cuts.get() {
            let mut cache = self.of.cache.borrow_mut();
            for (block, _, _) in &self.blocks {
                cache.busy.remove(block);
            }
        }
        self.of.changed.notify_all();
    }
}

impl VolatileDevice {
    /// A cache above `inner`.
    #[must_use]
    pub fn new(inner: Rc<dyn Device>) -> Self {
        Self::with_cache(inner, CACHED_BYTES_MAX)
    }

    /// A cache of at most about `cached_bytes_max` above `inner`.
    #[must_use]
    pub fn with_cache(inner: Rc<dyn Device>, cached_bytes_max: u64) -> Self {
        Self {
            inner,
            cache: RefCell::default(),
            changed: Notify::default(),
            cached_bytes_max,
            cuts: Cell::new(0),
            off: Cell::new(false),
        }
    }

    /// Bytes cached now, all versions counted.
    #[must_use]
    pub fn cached_bytes(&self) -> u64 {
        self.cache.borrow().cached_bytes
    }

    /// Cuts the power: a part of the cache, which `seed` picks, reaches the device below, and the
    /// rest is lost. Afterwards the device is off.
    ///
    /// # Errors
    ///
    /// What the device below says.
    pub async fn power_cut(&self, seed: u64) -> Result<(), BlockError> {
        self.off.set(true);
        self.cuts.set(self.cuts.get() + 1);
        let cache = self.cache.take();
        self.changed.notify_all();
        let mut random = SplitMix(seed);
        // From "nothing landed" to "everything did", each about as often.
        let landing_percent = random.below(5) * 25;
        let mut landing = Vec::new();
        for (block, versions) in cache.blocks {
            if random.below(100) < landing_percent {
                let version = random.below(versions.len() as u64) as usize;
                landing.push((block, 0, versions[version].data.clone()));
            }
        }
        self.write_down(&landing, Durability::Volatile).await?;
        self.inner.flush().await
    }

    /// Switches the power on again.
    pub fn power_on(&self) {
        self.off.set(false);
    }

    /// Starts a task that now and then writes down a random part of the cache, as real drives
    /// do. It ends with the device, and sleeps while nothing is cached.
    pub fn spawn_write_back(self: &Rc<Self>, every: Duration) -> JoinHandle<()> {
        let weak = Rc::downgrade(self);
        reactor::spawn(async move {
            while let Some(device) = weak.upgrade() {
                device.write_some_back(every).await;
                drop(device);
                reactor::sleep(every).await;
            }
        })
    }

    async fn write_some_back(&self, every: Duration) {
        let changed = self.changed.changed();
        if self.cache.borrow().blocks.is_empty() {
            // Whoever waits here keeps the device alive, so not for ever.
            let _ = reactor::timeout(every * 64, changed).await;
        }
        let number = self.cache.borrow().last_number;
        let percent = reactor::random_u64() % 101;
        let pick = |_| reactor::random_u64() % 100 < percent;
        if let Some(batch) = self.take_batch(0..u64::MAX, number, pick) {
            // A failure shows at the next flush, which must write the same blocks.
            let _ = self.write_batch(batch, Durability::Volatile).await;
        }
    }

    fn powered(&self, cut: u64) -> Result<(), BlockError> {
        if self.off.get() || cut != self.cuts.get() { Err(BlockError::Gone) } else { Ok(()) }
    }

    fn insert(&self, at: u64, from: &IoVec) {
        let mut cache = self.cache.borrow_mut();
        for_each_block(at, from, |block, data| cache.insert(block, data));
        drop(cache);
        self.changed.notify_all();
    }

    /// Takes the blocks of `range` that hold a version up to `number`, that nobody writes down,
    /// and that `pick` wants. `None` when there are none but some that somebody writes down.
    fn take_batch(
        &self,
        range: Range<u64>,
        number: u64,
        mut pick: impl FnMut(u64) -> bool,
    ) -> Option<Batch<'_>> {
        let mut cache = self.cache.borrow_mut();
        let cache = &mut *cache;
        let mut blocks = Vec::new();
        let mut some_are_busy = false;
        for (block, versions) in cache.blocks.range(range) {
            if versions[0].number > number || !pick(*block) {
                continue;
            }
            if cache.busy.contains(block) {
                some_are_busy = true;
                continue;
            }
            let newest = &versions[versions.len() - 1];
            blocks.push((*block, newest.number, newest.data.clone()));
        }
        if blocks.is_empty() && some_are_busy {
            return None;
        }
        cache.busy.extend(blocks.iter().map(|(block, _, _)| *block));
        Some(Batch { of: self, cut: self.cuts.get(), blocks })
    }

    /// Writes down a batch and forgets it.
    async fn write_batch(
        &self,
        batch: Batch<'_>,
        durability: Durability,
    ) -> Result<(), BlockError> {
        let written = self.write_down(&batch.blocks, durability).await;
        self.powered(batch.cut)?;
        written?;
        let mut cache = self.cache.borrow_mut();
        for (block, number, _) in &batch.blocks {
            cache.written(*block, *number);
        }
        Ok(())
    }

    /// Writes blocks, in order of their numbers, neighbours together.
    async fn write_down(
        &self,
        blocks: &[(u64, u64, Buf)],
        durability: Durability,
    ) -> Result<(), BlockError> {
        let neighbours = blocks.chunk_by(|before, after| before.0 + 1 == after.0);
        let runs = neighbours.flat_map(|run| run.chunks(RUN_BLOCKS_MAX));
        let writes = runs.map(|run| {
            let from: IoVec = run.iter().map(|(_, _, data)| data.clone()).collect();
            self.inner.write(run[0].0 * BLOCK_BYTES, from, durability)
        });
        let writes: Vec<_> = writes.collect();
        join_all(writes).await.into_iter().collect()
    }

    /// Writes down everything cached in a byte range.
    async fn write_back(
        &self,
        at: u64,
        bytes: u64,
        durability: Durability,
    ) -> Result<(), BlockError> {
        let cut = self.cuts.get();
        let range = at / BLOCK_BYTES..(at + bytes) / BLOCK_BYTES;
        let number = self.cache.borrow().last_number;
        loop {
            self.powered(cut)?;
            let changed = self.changed.changed();
            match self.take_batch(range.clone(), number, |_| true) {
                None => changed.await,
                Some(batch) if batch.blocks.is_empty() => return Ok(()),
                Some(batch) => self.write_batch(batch, durability).await?,
            }
        }
    }
}

impl Device for VolatileDevice {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn read(&self, at: u64, into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        Box::pin(async move {
            let cut = self.cuts.get();
            self.powered(cut)?;
            let bytes = bytes_in(&into);
            check_range(self.info(), at, bytes)?;
            // What is cached now counts, even if it is written down while we read.
            let range = at / BLOCK_BYTES..(at + bytes) / BLOCK_BYTES;
            let cached: Vec<(u64, Buf)> = {
                let cache = self.cache.borrow();
                let newest =
                    |versions: &SmallVec<[Version; 1]>| versions[versions.len() - 1].data.clone();
                cache.blocks.range(range).map(|(block, v)| (*block, newest(v))).collect()
            };
            let mut into = if cached.len() as u64 * BLOCK_BYTES == bytes {
                into
            } else {
                self.inner.read(at, into).await?
            };
            self.powered(cut)?;
            overlay(at, &mut into, &cached);
            Ok(into)
        })
    }

    fn read_lent(&self, at: u64, into: LentVec) -> Option<LentFuture<'_>> {
        read_lent_by_copy(self, at, into)
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let cut = self.cuts.get();
            self.powered(cut)?;
            let bytes = bytes_in(&from);
            check_range(self.info(), at, bytes)?;
            self.insert(at, &from);
            match durability {
                Durability::Fua => self.write_back(at, bytes, Durability::Fua).await,
                Durability::Volatile if self.cached_bytes() > self.cached_bytes_max => {
                    self.write_back(0, self.info().capacity_bytes, Durability::Volatile).await
                }
                Durability::Volatile => Ok(()),
            }
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let cut = self.cuts.get();
            self.powered(cut)?;
            let capacity_bytes = self.info().capacity_bytes;
            self.write_back(0, capacity_bytes, Durability::Volatile).await?;
            self.inner.flush().await?;
            self.powered(cut)
        })
    }

    fn discard(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let cut = self.cuts.get();
            self.powered(cut)?;
            check_range(self.info(), at, bytes)?;
            self.write_back(at, bytes, Durability::Volatile).await?;
            self.inner.discard(at, bytes).await?;
            self.powered(cut)
        })
    }

    fn write_zeroes(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let cut = self.cuts.get();
            self.powered(cut)?;
            check_range(self.info(), at, bytes)?;
            if bytes <= CACHED_ZEROES_MAX {
                let block = BufMut::zeroed(BLOCK_BYTES as usize).freeze();
                let zeroes: IoVec = (0..bytes / BLOCK_BYTES).map(|_| block.clone()).collect();
                return self.write(at, zeroes, Durability::Volatile).await;
            }
            self.write_back(at, bytes, Durability::Volatile).await?;
            self.inner.write_zeroes(at, bytes).await?;
            self.powered(cut)
        })
    }

    fn fence(&self, epoch: Epoch) -> IoFuture<'_, ()> {
        Box::pin(async move {
            self.powered(self.cuts.get())?;
            self.inner.fence(epoch).await
        })
    }

    fn recognise_by(&self, witness: Option<Witness>) {
        self.inner.recognise_by(witness);
    }

    fn is_shared(&self) -> bool {
        self.inner.is_shared()
    }

    fn health(&self) -> Health {
        self.inner.health()
    }
}

/// Cuts `from`, which starts at the byte address `at`, into blocks; copies only those that lie
/// in several parts.
fn for_each_block(at: u64, from: &IoVec, mut take: impl FnMut(u64, Buf)) {
    const BLOCK: usize = BLOCK_BYTES as usize;
    let mut block = at / BLOCK_BYTES;
    let mut begun: Option<(BufMut, usize)> = None;
    for part in from {
        let mut done = 0;
        while done < part.len() {
            let left = part.len() - done;
            match begun.take() {
                None if left >= BLOCK => {
                    take(block, part.slice(done, BLOCK));
                    block += 1;
                    done += BLOCK;
                }
                begin => {
                    let (mut data, filled) =
                        begin.unwrap_or_else(|| (BufMut::for_overwrite(BLOCK), 0));
                    let step = left.min(BLOCK - filled);
                    data[filled..filled + step].copy_from_slice(&part[done..done + step]);
                    done += step;
                    if filled + step == BLOCK {
                        take(block, data.freeze());
                        block += 1;
                    } else {
                        begun = Some((data, filled + step));
                    }
                }
            }
        }
    }
}

/// Puts cached blocks over what was read from the byte address `at` on.
fn overlay(at: u64, into: &mut IoVecMut, cached: &[(u64, Buf)]) {
    let mut start = at;
    for part in into {
        let end = start + part.len() as u64;
        let first = cached.partition_point(|(block, _)| (block + 1) * BLOCK_BYTES <= start);
        for (block, data) in &cached[first..] {
            let block_at = block * BLOCK_BYTES;
            if block_at >= end {
                break;
            }
            let (from, to) = (block_at.max(start), (block_at + BLOCK_BYTES).min(end));
            part[(from - start) as usize..(to - start) as usize]
                .copy_from_slice(&data[(from - block_at) as usize..(to - block_at) as usize]);
        }
        start = end;
    }
}

/// A small generator (Steele, Lea, Flood 2014), so that a cut depends on its seed alone.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}
