//! A drive that answers at once, unless told otherwise, and remembers everything, so that a test can cut the power after any write.

use levada_base::buf::bytes_in;
use levada_base::reactor::{self, random_u64};
use levada_base::units::BLOCK_BYTES;
use levada_base::{Epoch, IoVec, IoVecMut};
use levada_device::{BlockError, Device, DeviceInfo, Durability, Health, IoFuture, check_range};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::future::ready;
use std::rc::Rc;
use std::time::Duration;

type Block = Rc<[u8]>;

enum Event {
    Write { member: usize, first: u64, blocks: Vec<Block>, durability: Durability },
    Flush { member: usize },
}

/// What happened to the drives of an array, in order.
#[derive(Default)]
pub struct Log(RefCell<Vec<Event>>);

/// What a power cut leaves of what was not flushed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Unflushed {
    Lost,
    Kept,
    /// Of each block any version, by chance.
    Any,
}

pub struct Drive {
    info: DeviceInfo,
    member: usize,
    blocks: RefCell<BTreeMap<u64, Block>>,
    unreadable: RefCell<BTreeSet<u64>>,
    log: Rc<Log>,
    /// Fails after so many more writes.
    pub writes_left: Cell<Option<u64>>,
    /// Reads and writes take less than this, by chance.
    pub delay_us: Cell<u64>,
}

impl Drive {
    pub fn new(member: usize, capacity_bytes: u64, log: Rc<Log>) -> Self {
        let info = DeviceInfo {
            name: format!("m{member}"),
            capacity_bytes,
            block_bytes: BLOCK_BYTES,
            atomic_write_bytes: BLOCK_BYTES,
            io_bytes_best: 1 << 20,
        };
        let (blocks, unreadable, writes_left, delay_us) = Default::default();
        Self { info, member, blocks, unreadable, log, writes_left, delay_us }
    }

    /// The blocks that begin with these bytes, by number.
    pub fn blocks_with(&self, bytes: &[u8]) -> Vec<u64> {
        let blocks = self.blocks.borrow();
        let found = blocks.iter().filter(|(_, block)| block.starts_with(bytes));
        found.map(|(number, _)| *number).collect()
    }

    /// A block cannot be read until it is written.
    pub fn make_unreadable(&self, number: u64) {
        self.unreadable.borrow_mut().insert(number);
    }

    /// How much has happened so far.
    pub fn events(&self) -> usize {
        self.log.0.borrow().len()
    }

    /// This drive as a power cut after so many events leaves it.
    pub fn after_cut(&self, events: usize, unflushed: Unflushed) -> Rc<Self> {
        let mut stable: BTreeMap<u64, Block> = BTreeMap::new();
        let mut cached: BTreeMap<u64, Vec<Block>> = BTreeMap::new();
        for event in &self.log.0.borrow()[..events] {
            match event {
                Event::Write { member, first, blocks, durability } if *member == self.member => {
                    for (number, block) in (*first..).zip(blocks) {
                        match durability {
                            Durability::Volatile => {
                                cached.entry(number).or_default().push(Rc::clone(block));
                            }
                            Durability::Fua => {
                                cached.remove(&number);
                                stable.insert(number, Rc::clone(block));
                            }
                        }
                    }
                }
                Event::Flush { member } if *member == self.member => {
                    let newest = |(number, mut versions): (u64, Vec<Block>)| {
                        versions.pop().map(|newest| (number, newest))
                    };
                    stable.extend(std::mem::take(&mut cached).into_iter().filter_map(newest));
                }
                Event::Write { .. } | Event::Flush { .. } => {}
            }
        }
        for (number, mut versions) in cached {
            let kept = match unflushed {
                Unflushed::Lost => 0,
                Unflushed::Kept => versions.len(),
                Unflushed::Any => random_u64() as usize % (versions.len() + 1),
            };
            if kept > 0 {
                stable.insert(number, versions.swap_remove(kept - 1));
            }
        }
        let drive = Self::new(self.member, self.info.capacity_bytes, Rc::default());
        *drive.blocks.borrow_mut() = stable;
        Rc::new(drive)
    }

    async fn delay(&self) {
        if self.delay_us.get() > 0 {
            let us = random_u64() % self.delay_us.get();
            reactor::sleep(Duration::from_micros(us)).await;
        }
    }

    fn is_gone(&self) -> bool {
        self.writes_left.get() == Some(0)
    }

    fn read_now(&self, at: u64, mut into: IoVecMut) -> Result<IoVecMut, BlockError> {
        check_range(&self.info, at, bytes_in(&into))?;
        if self.is_gone() {
            return Err(BlockError::Gone);
        }
        let blocks = self.blocks.borrow();
        let pieces = into.iter_mut().flat_map(|part| part.chunks_mut(BLOCK_BYTES as usize));
        for (number, piece) in (at / BLOCK_BYTES..).zip(pieces) {
            if self.unreadable.borrow().contains(&number) {
                return Err(BlockError::Medium { at: number * BLOCK_BYTES, bytes: BLOCK_BYTES });
            }
            match blocks.get(&number) {
                Some(block) => piece.copy_from_slice(block),
                None => piece.fill(0),
            }
        }
        Ok(into)
    }

    fn write_now(&self, at: u64, data: &[u8], durability: Durability) -> Result<(), BlockError> {
        check_range(&self.info, at, data.len() as u64)?;
        if self.is_gone() {
            return Err(BlockError::Gone);
        }
        if let Some(left) = self.writes_left.get() {
            self.writes_left.set(Some(left - 1));
        }
        let first = at / BLOCK_BYTES;
        let blocks: Vec<Block> = data.chunks(BLOCK_BYTES as usize).map(Into::into).collect();
        let written = first..first + blocks.len() as u64;
        self.unreadable.borrow_mut().retain(|number| !written.contains(number));
        self.blocks.borrow_mut().extend((first..).zip(blocks.iter().cloned()));
        let event = Event::Write { member: self.member, first, blocks, durability };
        self.log.0.borrow_mut().push(event);
        Ok(())
    }
}

impl Device for Drive {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn read(&self, at: u64, into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        Box::pin(async move {
            self.delay().await;
            self.read_now(at, into)
        })
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> IoFuture<'_, ()> {
        let data = levada_base::buf::joined(&from);
        Box::pin(async move {
            self.delay().await;
            self.write_now(at, &data, durability)
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        if self.is_gone() {
            return Box::pin(ready(Err(BlockError::Gone)));
        }
        self.log.0.borrow_mut().push(Event::Flush { member: self.member });
        Box::pin(ready(Ok(())))
    }

    fn discard(&self, _: u64, _: u64) -> IoFuture<'_, ()> {
        Box::pin(ready(Ok(())))
    }

    fn write_zeroes(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        Box::pin(ready(self.write_now(at, &vec![0; bytes as usize], Durability::Volatile)))
    }

    fn fence(&self, _: Epoch) -> IoFuture<'_, ()> {
        Box::pin(ready(Ok(())))
    }

    fn health(&self) -> Health {
        Health::default()
    }
}
