//! A device with a volatile cache, for power cuts: what is not flushed survives block by block,
//! by chance.

pub mod model;
pub mod world;

use levada_base::buf::bytes_in;
use levada_base::units::{BLOCK_BYTES, MIB};
use levada_base::{BufMut, Epoch, IoVec, IoVecMut, reactor};
use levada_device::{BlockError, Device, DeviceInfo, Durability, Health, IoFuture, check_range};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::Duration;

const BLOCK: usize = BLOCK_BYTES as usize;

/// Blocks by number, each with the number of the write that brought it.
type Blocks = BTreeMap<u64, (u64, Vec<u8>)>;

pub struct Volatile {
    info: DeviceInfo,
    durable: RefCell<Vec<u8>>,
    cached: RefCell<Blocks>,
    /// Writes that were asked for and have not completed.
    in_flight: RefCell<BTreeMap<u64, Blocks>>,
    writes: Cell<u64>,
    epoch: Cell<Epoch>,
    /// Operations until everything fails.
    pub fails_after: Cell<Option<u64>>,
}

impl Volatile {
    pub fn new(bytes: u64) -> Self {
        Self {
            info: DeviceInfo {
                name: "volatile".to_owned(),
                capacity_bytes: bytes,
                block_bytes: BLOCK_BYTES,
                atomic_write_bytes: BLOCK_BYTES,
                io_bytes_best: MIB,
            },
            durable: RefCell::new(vec![0; bytes as usize]),
            cached: RefCell::default(),
            in_flight: RefCell::default(),
            writes: Cell::new(0),
            epoch: Cell::default(),
            fails_after: Cell::new(None),
        }
    }

    /// Power goes: of every block on its way, the durable or any newer state may be left.
    pub fn cut(&self) {
        let mut durable = self.durable.borrow_mut();
        // In some cuts nearly everything is lost, in some nearly nothing.
        let survives = reactor::random_u64() % 101;
        let mut settle = |blocks: Blocks| {
            for (block, (_, bytes)) in blocks {
                if reactor::random_u64() % 100 < survives {
                    let at = block as usize * BLOCK;
                    durable[at..at + BLOCK].copy_from_slice(&bytes);
                }
            }
        };
        settle(self.cached.take());
        self.in_flight.take().into_values().for_each(settle);
    }

    /// The process is killed, the power stays: what was asked for still happens, but none of it is
    /// durable yet, as in a drive that has taken the data and not finished the command.
    pub fn settle(&self) {
        for blocks in self.in_flight.take().into_values() {
            if reactor::random_u64().is_multiple_of(2) {
                self.keep(blocks, Durability::Volatile);
            }
        }
    }

    /// Changes one durable byte, behind the store's back.
    pub fn damage(&self, at: u64) {
        self.durable.borrow_mut()[at as usize] ^= 0x55;
    }

    pub fn peek(&self, at: u64, bytes: usize) -> Vec<u8> {
        self.durable.borrow()[at as usize..at as usize + bytes].to_vec()
    }

    fn check(&self) -> Result<(), BlockError> {
        match self.fails_after.get() {
            Some(0) => Err(BlockError::Gone),
            Some(n) => {
                self.fails_after.set(Some(n - 1));
                Ok(())
            }
            None => Ok(()),
        }
    }

    async fn takes_time() {
        // Now and then an operation takes very long, so that all others overtake it.
        let most_ns = if reactor::random_u64().is_multiple_of(24) { 10_000_000 } else { 200_000 };
        reactor::sleep(Duration::from_nanos(10_000 + reactor::random_u64() % most_ns)).await;
    }

    fn keep(&self, blocks: Blocks, durability: Durability) {
        let mut cached = self.cached.borrow_mut();
        for (block, (write, bytes)) in blocks {
            if durability == Durability::Fua {
                let at = block as usize * BLOCK;
                self.durable.borrow_mut()[at..at + BLOCK].copy_from_slice(&bytes);
                cached.remove(&block);
            } else {
                cached.insert(block, (write, bytes));
            }
        }
    }
}

impl Device for Volatile {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn read(&self, at: u64, mut into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        Box::pin(async move {
            check_range(&self.info, at, bytes_in(&into))?;
            self.check()?;
            Self::takes_time().await;
            let (durable, cached) = (self.durable.borrow(), self.cached.borrow());
            let pieces = into.iter_mut().flat_map(|part| part.chunks_mut(BLOCK));
            for (block, piece) in (at / BLOCK_BYTES..).zip(pieces) {
                let start = block as usize * BLOCK;
                let bytes = cached.get(&block).map_or(&durable[start..start + BLOCK], |b| &b.1);
                piece.copy_from_slice(bytes);
            }
            drop((durable, cached));
            Ok(into)
        })
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> IoFuture<'_, ()> {
        let checked = check_range(&self.info, at, bytes_in(&from)).and_then(|()| self.check());
        let write = self.writes.get();
        self.writes.set(write + 1);
        let pieces = from.iter().flat_map(|part| part.chunks(BLOCK));
        let blocks: Blocks =
            (at / BLOCK_BYTES..).zip(pieces).map(|(n, b)| (n, (write, b.to_vec()))).collect();
        if checked.is_ok() {
            self.in_flight.borrow_mut().insert(write, blocks);
        }
        Box::pin(async move {
            checked?;
            Self::takes_time().await;
            let blocks = self.in_flight.borrow_mut().remove(&write);
            self.keep(blocks.unwrap_or_default(), durability);
            Ok(())
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        let checked = self.check();
        let before = self.cached.borrow().clone();
        Box::pin(async move {
            checked?;
            Self::takes_time().await;
            let mut cached = self.cached.borrow_mut();
            for (block, (write, bytes)) in before {
                // Newer bytes may have become durable by themselves meanwhile.
                if cached.get(&block).is_some_and(|(newest, _)| *newest >= write) {
                    let at = block as usize * BLOCK;
                    self.durable.borrow_mut()[at..at + BLOCK].copy_from_slice(&bytes);
                    if cached[&block].0 == write {
                        cached.remove(&block);
                    }
                }
            }
            Ok(())
        })
    }

    fn discard(&self, _: u64, _: u64) -> IoFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    fn write_zeroes(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        let zeroes = BufMut::zeroed(bytes as usize).freeze();
        self.write(at, zeroes.into_vec(), Durability::Volatile)
    }

    fn fence(&self, epoch: Epoch) -> IoFuture<'_, ()> {
        let seen = self.epoch.get();
        self.epoch.set(seen.max(epoch));
        Box::pin(async move {
            if epoch < seen { Err(BlockError::Fenced { ours: epoch, seen }) } else { Ok(()) }
        })
    }

    fn health(&self) -> Health {
        Health::default()
    }
}
