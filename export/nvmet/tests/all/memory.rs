//! A volume in memory, whose reads and writes can be held up.

use levada_base::buf::bytes_in;
use levada_base::sync::Notify;
use levada_base::{Buf, IoVec};
use levada_device::{BlockError, Durability};
use levada_volume::{Extent, Shape, Volume, VolumeError, VolumeFuture, Zeroing};
use std::cell::{Cell, RefCell};

pub struct Memory {
    bytes: RefCell<Vec<u8>>,
    pub size_bytes: Cell<u64>,
    /// Writes wait until it is false.
    pub holds_writes: Cell<bool>,
    /// The same of reads.
    pub holds_reads: Cell<bool>,
    /// A write, or a read, is held up.
    pub is_held: Cell<bool>,
    pub released: Notify,
    pub writes: Cell<u64>,
    pub flushes: Cell<u64>,
    pub durable_writes: Cell<u64>,
    pub discarded: RefCell<Vec<(u64, u64)>>,
    pub zeroed: RefCell<Vec<Zeroing>>,
    /// What every request fails with.
    pub fails: RefCell<Option<VolumeError>>,
}

impl Memory {
    pub fn new(size_bytes: u64) -> Self {
        Self {
            bytes: RefCell::new(vec![0; size_bytes as usize]),
            size_bytes: Cell::new(size_bytes),
            holds_writes: Cell::default(),
            holds_reads: Cell::default(),
            is_held: Cell::default(),
            released: Notify::default(),
            writes: Cell::default(),
            flushes: Cell::default(),
            durable_writes: Cell::default(),
            discarded: RefCell::default(),
            zeroed: RefCell::default(),
            fails: RefCell::default(),
        }
    }

    pub fn all(&self) -> Vec<u8> {
        self.bytes.borrow().clone()
    }

    /// Writes that come now are not held up; those that are wait on.
    pub fn holds_only_first(&self) {
        self.holds_writes.set(false);
    }

    pub fn release(&self) {
        self.holds_writes.set(false);
        self.holds_reads.set(false);
        self.is_held.set(false);
        self.released.notify_all();
    }

    async fn hold(&self) {
        self.is_held.set(true);
        self.released.until(|| (!self.is_held.get()).then_some(())).await;
    }

    fn check(&self, at: u64, bytes: u64) -> Result<std::ops::Range<usize>, VolumeError> {
        if let Some(error) = &*self.fails.borrow() {
            return Err(error.clone());
        }
        let size_bytes = self.size_bytes.get();
        match at.checked_add(bytes) {
            Some(end) if end <= size_bytes => Ok(at as usize..end as usize),
            _ => Err(VolumeError::OutOfRange { at, bytes, size_bytes }),
        }
    }
}

impl Volume for Memory {
    fn size_bytes(&self) -> u64 {
        self.size_bytes.get()
    }

    fn shape(&self) -> Shape {
        Shape { block_bytes: 4096, io_bytes_best: 65536, discard_bytes: 4096, is_read_only: false }
    }

    fn read(&self, at: u64, bytes: u64) -> VolumeFuture<'_, IoVec> {
        Box::pin(async move {
            let range = self.check(at, bytes)?;
            if self.holds_reads.get() {
                self.hold().await;
            }
            let bytes = self.bytes.borrow();
            // In two pieces, as arrays answer.
            let (one, other) = bytes[range.clone()].split_at(range.len() / 3);
            Ok([one, other].into_iter().map(Buf::copy_of).collect())
        })
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            let range = self.check(at, bytes_in(&from))?;
            if self.holds_writes.get() {
                self.hold().await;
            }
            let data: Vec<u8> = from.iter().flat_map(|part| part.to_vec()).collect();
            self.bytes.borrow_mut()[range].copy_from_slice(&data);
            self.writes.set(self.writes.get() + 1);
            if durability == Durability::Fua {
                self.durable_writes.set(self.durable_writes.get() + 1);
            }
            Ok(())
        })
    }

    fn flush(&self) -> VolumeFuture<'_, ()> {
        self.flushes.set(self.flushes.get() + 1);
        Box::pin(async { self.check(0, 0).map(|_| ()) })
    }

    fn discard(&self, at: u64, bytes: u64) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            self.check(at, bytes)?;
            self.discarded.borrow_mut().push((at, bytes));
            Ok(())
        })
    }

    fn write_zeroes(&self, at: u64, bytes: u64, zeroing: Zeroing) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            let range = self.check(at, bytes)?;
            self.bytes.borrow_mut()[range].fill(0);
            self.zeroed.borrow_mut().push(zeroing);
            Ok(())
        })
    }

    fn extents(&self, _at: u64, bytes: u64) -> VolumeFuture<'_, Vec<Extent>> {
        Box::pin(async move { Ok(vec![Extent { bytes, is_allocated: true }]) })
    }
}

/// A medium error.
pub fn medium_error() -> VolumeError {
    VolumeError::Block(BlockError::Medium { at: 0, bytes: 4096 })
}
