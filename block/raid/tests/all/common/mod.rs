//! A drive that a test can switch off, and helpers to build arrays from such drives.
#![allow(dead_code, missing_docs)] // Every test binary uses another part.

use levada_base::buf::bytes_in;
use levada_base::ids::Uuid;
use levada_base::lent::{Lender, bytes_lent, put_all};
use levada_base::reactor;
use levada_base::{Buf, BufMut, Epoch, IoVec, IoVecMut, LentVec};
use levada_device::{
    BlockError, Device, DeviceInfo, Durability, Health, IoFuture, LentFuture, check_range,
};
use levada_raid::{Array, ArraySpec, IoClass, Level, MemberSpec, RaidArray};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

pub const BLOCK: usize = 4096;
pub const ARRAY: Uuid = Uuid::from_u128(0xa55a);

type Block = Box<[u8]>;

/// What a drive holds.
#[derive(Clone)]
pub struct Media {
    /// Bytes of a block, which is written as a whole or not.
    block_bytes: usize,
    /// What survives a power cut for sure; absent blocks are zero.
    stable: BTreeMap<u64, Block>,
    /// Writes acknowledged since, per block, oldest first.
    cached: BTreeMap<u64, Vec<Block>>,
    /// Writes not acknowledged yet.
    in_flight: BTreeMap<u64, Vec<(u64, Block)>>,
    next_write: u64,
    unreadable: BTreeSet<u64>,
    epoch: Epoch,
}

/// A drive with a volatile cache, random delays, and faults on request.
pub struct TestDrive {
    info: DeviceInfo,
    media: RefCell<Media>,
    gone: Cell<bool>,
    /// Goes away after so many more writes.
    writes_left: Cell<Option<u64>>,
    pub flushes: Cell<u64>,
    pub writes: Cell<u64>,
    pub reads: Cell<u64>,
    /// A request takes less than this, by chance, besides `least_us`.
    pub delay_us: Cell<u64>,
    pub least_us: Cell<u64>,
    /// Reads into memory that is lent take so much longer.
    pub lent_us: Cell<u64>,
    /// It cannot read into such memory.
    pub lends_not: Cell<bool>,
    /// Other machines reach it as well.
    pub is_shared: Cell<bool>,
}

impl TestDrive {
    pub fn new(name: &str, capacity_bytes: u64) -> Rc<Self> {
        Self::with_blocks(name, capacity_bytes, BLOCK)
    }

    /// A drive that writes blocks of so many bytes.
    pub fn with_blocks(name: &str, capacity_bytes: u64, block_bytes: usize) -> Rc<Self> {
        Rc::new(Self {
            info: DeviceInfo {
                name: name.to_owned(),
                capacity_bytes,
                block_bytes: block_bytes as u64,
                atomic_write_bytes: block_bytes as u64,
                io_bytes_best: 1 << 20,
            },
            media: RefCell::new(Media::new(block_bytes)),
            gone: Cell::new(false),
            writes_left: Cell::new(None),
            flushes: Cell::new(0),
            writes: Cell::new(0),
            reads: Cell::new(0),
            delay_us: Cell::new(30),
            least_us: Cell::new(0),
            lent_us: Cell::new(0),
            lends_not: Cell::new(false),
            is_shared: Cell::new(false),
        })
    }

    /// From now on every request fails.
    pub fn pull(&self) {
        self.gone.set(true);
    }

    pub fn is_gone(&self) -> bool {
        self.gone.get()
    }

    pub fn pull_after_writes(&self, writes: u64) {
        self.writes_left.set(Some(writes));
    }

    pub fn plug_in(&self) {
        // Writes that failed when it went do not land any more.
        if self.gone.replace(false) {
            self.lose_in_flight();
        }
        self.writes_left.set(None);
    }

    /// Power fails: of what was not flushed, any block may hold any version since.
    pub fn cut_power(&self) {
        let mut media = self.media.borrow_mut();
        let mut versions = std::mem::take(&mut media.cached);
        for write in std::mem::take(&mut media.in_flight).into_values() {
            for (block, data) in write {
                versions.entry(block).or_default().push(data);
            }
        }
        for (block, mut of_block) in versions {
            let kept = (reactor::random_u64() % (of_block.len() as u64 + 1)) as usize;
            if kept > 0 {
                media.stable.insert(block, of_block.swap_remove(kept - 1));
            }
        }
    }

    /// A copy of all that it holds, as of a backup.
    pub fn image(&self) -> Media {
        self.media.borrow().clone()
    }

    /// What is on it for sure, block by block; blocks that are absent hold zeroes.
    pub fn stable_blocks(&self) -> BTreeMap<u64, Box<[u8]>> {
        self.media.borrow().stable.clone()
    }

    /// The drive holds these blocks and nothing else.
    pub fn put_blocks(&self, blocks: BTreeMap<u64, Box<[u8]>>) {
        *self.media.borrow_mut() = Media { stable: blocks, ..Media::new(BLOCK) };
    }

    /// The drive is again as it was.
    pub fn put_back(&self, image: &Media) {
        *self.media.borrow_mut() = image.clone();
    }

    /// Writes that are not acknowledged never get there.
    pub fn lose_in_flight(&self) {
        self.media.borrow_mut().in_flight.clear();
    }

    pub fn make_unreadable(&self, at: u64, bytes: u64) {
        let block_bytes = self.info.block_bytes;
        let blocks = at / block_bytes..(at + bytes).div_ceil(block_bytes);
        self.media.borrow_mut().unreadable.extend(blocks);
    }

    /// What could not be read can be read again.
    pub fn make_readable(&self) {
        self.media.borrow_mut().unreadable.clear();
    }

    /// Changes bytes behind the array's back.
    pub fn corrupt(&self, at: u64) {
        let mut media = self.media.borrow_mut();
        let block = at / self.info.block_bytes;
        let mut data = media.block(block);
        data[(at % self.info.block_bytes) as usize] ^= 0x5a;
        media.cached.remove(&block);
        media.stable.insert(block, data);
    }

    /// Where the superblock says that the data begins (docs/design/0003-array-format.md).
    pub fn data_at(&self) -> u64 {
        let media = self.media.borrow();
        let field = |at| {
            let block = media.block(at / self.info.block_bytes);
            u64::from_le_bytes(block[96..104].try_into().expect("8"))
        };
        field(0).max(field(BLOCK as u64))
    }

    /// Generation in the superblock at `slot`, a byte offset; 0 when there is none.
    pub fn generation_at(&self, slot: u64) -> u64 {
        let superblock = self.media.borrow().block(slot / self.info.block_bytes);
        u64::from_le_bytes(superblock[32..40].try_into().expect("8 bytes"))
    }

    pub fn newest_generation(&self) -> u64 {
        self.generation_at(0).max(self.generation_at(BLOCK as u64))
    }

    /// What the newest superblock says that a member which is out or rebuilt holds (the last field of its entry in the table).
    pub fn newest_held_bits(&self, member: usize) -> u64 {
        let is_first = self.generation_at(0) >= self.generation_at(BLOCK as u64);
        let slot = if is_first { 0 } else { BLOCK as u64 };
        let superblock = self.media.borrow().block(slot / self.info.block_bytes);
        let at = 512 + 64 * member + 56;
        u64::from_le_bytes(superblock[at..at + 8].try_into().expect("8 bytes"))
    }

    async fn delay(&self) -> Result<(), BlockError> {
        if self.delay_us.get() > 0 {
            let us = self.least_us.get() + reactor::random_u64() % self.delay_us.get();
            reactor::sleep(Duration::from_micros(us)).await;
        }
        if self.gone.get() { Err(BlockError::Gone) } else { Ok(()) }
    }

    async fn write_blocks(
        &self,
        at: u64,
        data: Vec<u8>,
        durability: Durability,
    ) -> Result<(), BlockError> {
        check_range(&self.info, at, data.len() as u64)?;
        if let Some(left) = self.writes_left.get() {
            if left == 0 {
                self.gone.set(true);
            }
            self.writes_left.set(Some(left.saturating_sub(1)));
        }
        let blocks: Vec<(u64, Block)> = data
            .chunks(self.info.block_bytes as usize)
            .zip(at / self.info.block_bytes..)
            .map(|(data, block)| (block, data.into()))
            .collect();
        let id = {
            let mut media = self.media.borrow_mut();
            media.next_write += 1;
            let id = media.next_write;
            if !self.gone.get() {
                media.in_flight.insert(id, blocks.clone());
            }
            id
        };
        self.delay().await?;
        self.writes.set(self.writes.get() + 1);
        let mut media = self.media.borrow_mut();
        media.in_flight.remove(&id);
        for (block, data) in blocks {
            media.unreadable.remove(&block);
            match durability {
                Durability::Volatile => media.cached.entry(block).or_default().push(data),
                Durability::Fua => {
                    media.cached.remove(&block);
                    media.stable.insert(block, data);
                }
            }
        }
        Ok(())
    }
}

impl Media {
    fn block(&self, block: u64) -> Block {
        let cached = self.cached.get(&block).and_then(|versions| versions.last());
        cached
            .or(self.stable.get(&block))
            .cloned()
            .unwrap_or_else(|| vec![0; self.block_bytes].into())
    }

    fn new(block_bytes: usize) -> Self {
        Self {
            block_bytes,
            stable: BTreeMap::new(),
            cached: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            next_write: 0,
            unreadable: BTreeSet::new(),
            epoch: Epoch::default(),
        }
    }
}

impl Device for TestDrive {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn read(&self, at: u64, mut into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        Box::pin(async move {
            let bytes = bytes_in(&into);
            check_range(&self.info, at, bytes)?;
            self.delay().await?;
            self.reads.set(self.reads.get() + 1);
            let media = self.media.borrow();
            let bytes = self.info.block_bytes;
            let mut block = at / bytes;
            for part in &mut into {
                for piece in part.chunks_mut(bytes as usize) {
                    if media.unreadable.contains(&block) {
                        return Err(BlockError::Medium { at: block * bytes, bytes });
                    }
                    piece.copy_from_slice(&media.block(block));
                    block += 1;
                }
            }
            Ok(into)
        })
    }

    /// One that fails leaves rubbish.
    fn read_lent(&self, at: u64, into: LentVec) -> Option<LentFuture<'_>> {
        if self.lends_not.get() {
            return None;
        }
        Some(Box::pin(async move {
            reactor::sleep(Duration::from_micros(self.lent_us.get())).await;
            let bytes = bytes_lent(&into) as usize;
            let read = self.read(at, BufMut::for_overwrite(bytes).into_vec()).await;
            let is_read = read.is_ok();
            let rubbish = || BufMut::copy_of(&vec![0xa5; bytes]).into_vec();
            put_all(&into, &read.unwrap_or_else(|_| rubbish()));
            is_read
        }))
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> IoFuture<'_, ()> {
        let data = levada_base::buf::joined(&from);
        Box::pin(self.write_blocks(at, data, durability))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            // Covers what was acknowledged before it began, no more.
            let covered: Vec<(u64, usize)> = {
                let media = self.media.borrow();
                media.cached.iter().map(|(block, v)| (*block, v.len())).collect()
            };
            self.delay().await?;
            self.flushes.set(self.flushes.get() + 1);
            let mut media = self.media.borrow_mut();
            for (block, count) in covered {
                let Some(mut versions) = media.cached.remove(&block) else { continue };
                let later = versions.split_off(count.min(versions.len()));
                if let Some(newest) = versions.pop() {
                    media.stable.insert(block, newest);
                }
                if !later.is_empty() {
                    media.cached.insert(block, later);
                }
            }
            Ok(())
        })
    }

    fn discard(&self, _: u64, _: u64) -> IoFuture<'_, ()> {
        Box::pin(self.delay())
    }

    fn write_zeroes(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        Box::pin(self.write_blocks(at, vec![0; bytes as usize], Durability::Volatile))
    }

    fn is_shared(&self) -> bool {
        self.is_shared.get()
    }

    fn fence(&self, epoch: Epoch) -> IoFuture<'_, ()> {
        Box::pin(async move {
            self.delay().await?;
            let mut media = self.media.borrow_mut();
            if epoch < media.epoch {
                return Err(BlockError::Fenced { ours: epoch, seen: media.epoch });
            }
            media.epoch = epoch;
            Ok(())
        })
    }

    fn health(&self) -> Health {
        Health::default()
    }
}

/// Drives and what an array is made of.
pub struct Rig {
    pub drives: Vec<Rc<TestDrive>>,
    pub spares: usize,
    pub level: Level,
    pub chunk_bytes: u64,
    pub epoch: Cell<u64>,
}

impl Rig {
    /// `members` drives, two to an enclosure, the last `spares` of them hot spares.
    pub fn new(level: Level, members: usize, spares: usize, chunk_bytes: u64, slots: u64) -> Self {
        Self::with_blocks(level, members, spares, chunk_bytes, slots, BLOCK)
    }

    /// Of drives that write blocks of so many bytes.
    pub fn with_blocks(
        level: Level,
        members: usize,
        spares: usize,
        chunk_bytes: u64,
        slots: u64,
        block_bytes: usize,
    ) -> Self {
        let capacity_bytes = (512 << 10) + slots * chunk_bytes;
        let drive = |i| TestDrive::with_blocks(&format!("drive-{i}"), capacity_bytes, block_bytes);
        Self {
            drives: (0..members).map(drive).collect(),
            spares,
            level,
            chunk_bytes,
            epoch: Cell::new(1),
        }
    }

    pub fn member(&self, index: usize) -> MemberSpec {
        MemberSpec {
            device: Rc::clone(&self.drives[index]) as Rc<dyn Device>,
            uuid: Uuid::from_u128(1000 + index as u128),
            name: format!("drive-{index}"),
            enclosure: index as u16 / 2,
        }
    }

    /// The drive as somebody who knows nothing of what it was: it gets everything.
    pub fn newcomer(&self, index: usize) -> MemberSpec {
        let uuid = Uuid::from_u128(u128::from(reactor::random_u64()) << 64 | index as u128);
        MemberSpec { uuid, ..self.member(index) }
    }

    pub fn spec(&self) -> ArraySpec {
        ArraySpec {
            uuid: ARRAY,
            name: "test".to_owned(),
            level: self.level,
            chunk_bytes: self.chunk_bytes,
            block_bytes: None,
            journal_bytes: None,
            members: (0..self.drives.len()).map(|i| self.member(i)).collect(),
            spares: self.spares,
        }
    }

    pub async fn create(&self) -> RaidArray {
        RaidArray::create(self.spec(), Epoch(self.epoch.get())).await.expect("created")
    }

    pub fn devices(&self) -> Vec<Rc<dyn Device>> {
        self.drives.iter().map(|drive| Rc::clone(drive) as Rc<dyn Device>).collect()
    }

    /// Opens with all drives and the next epoch.
    pub async fn open(&self) -> Result<RaidArray, levada_raid::RaidError> {
        self.epoch.set(self.epoch.get() + 1);
        let opened = RaidArray::open(ARRAY, self.devices(), Epoch(self.epoch.get()), false).await;
        opened.map(|(array, _)| array)
    }

    /// Opens without these drives.
    pub async fn open_without(&self, lost: &[usize]) -> Result<RaidArray, levada_raid::RaidError> {
        self.epoch.set(self.epoch.get() + 1);
        let mut devices = self.devices();
        let mut at = 0;
        devices.retain(|_| {
            at += 1;
            !lost.contains(&(at - 1))
        });
        let opened = RaidArray::open(ARRAY, devices, Epoch(self.epoch.get()), false).await;
        opened.map(|(array, _)| array)
    }

    pub fn cut_power(&self) {
        for drive in &self.drives {
            drive.cut_power();
        }
    }
}

/// Bytes that tell where they belong and of which version they are.
pub fn pattern(at: u64, bytes: usize, version: u64) -> Buf {
    let mut buf = BufMut::for_overwrite(bytes);
    for (i, word) in buf.chunks_mut(8).enumerate() {
        let value = (at + i as u64 * 8).wrapping_mul(0x9e37_79b9_7f4a_7c15)
            ^ version.wrapping_mul(0xff51_afd7_ed55_8ccd);
        word.copy_from_slice(&value.to_le_bytes()[..word.len()]);
    }
    buf.freeze()
}

pub async fn read(array: &dyn Device, at: u64, bytes: usize) -> Result<Vec<u8>, BlockError> {
    let parts = array.read(at, BufMut::for_overwrite(bytes).into_vec()).await?;
    Ok(levada_base::buf::joined(&parts))
}

/// As [`read`], straight into memory that is lent, of these parts; `None` where that cannot be.
pub async fn read_lent(array: &dyn Device, at: u64, parts: &[usize]) -> Option<Vec<u8>> {
    let bytes = parts.iter().sum();
    let lender = Lender::new(bytes);
    let mut start = 0;
    let lent = parts.iter().map(|len| {
        start += len;
        lender.lend(start - len, *len)
    });
    let is_read = array.read_lent(at, lent.collect())?.await;
    is_read.then(|| lender.bytes())
}

/// As [`read`], from two copies.
pub async fn read_agreed(array: &dyn Device, at: u64, bytes: usize) -> Result<Vec<u8>, BlockError> {
    let parts = array.read_agreed(at, BufMut::for_overwrite(bytes).into_vec()).await?;
    Ok(levada_base::buf::joined(&parts))
}

/// Declares, writes and returns what stripe `stripe` now holds.
pub async fn write_stripe(array: &RaidArray, stripe: u64, version: u64) -> Result<Buf, BlockError> {
    let bytes = array.geometry().stripe_bytes;
    let data = pattern(stripe * bytes, bytes as usize, version);
    array.declare_fresh(stripe, 1).await?;
    array.write_fresh(stripe, data.clone().into_vec(), IoClass::Foreground).await?;
    Ok(data)
}
