//! A slice: a window of a drive, as a device. Arrays take slices as members.
//!
//! It shares the drive's fate and obeys the drive's epochs: see `docs/design/0002-drive-label.md`.

use crate::drive::{Drive, DriveError};
use crate::label::SliceEntry;
use crate::{
    BlockError, Device, DeviceInfo, Durability, Health, IoFuture, LentFuture, check_range,
};
use levada_base::buf::bytes_in;
use levada_base::lent::bytes_lent;
use levada_base::{Epoch, IoVec, IoVecMut, LentVec};
use std::cell::Cell;
use std::rc::Rc;

/// A window of a drive.
pub struct Slice {
    drive: Rc<Drive>,
    index: usize,
    entry: SliceEntry,
    info: DeviceInfo,
    /// The epoch with which this handle last took the slice.
    ours: Cell<Epoch>,
}

impl Slice {
    pub(crate) fn new(drive: Rc<Drive>, index: usize, entry: SliceEntry) -> Self {
        let info = DeviceInfo {
            name: format!("{}/{}", drive.label().drive_name, entry.array_name),
            capacity_bytes: entry.bytes,
            ..drive.device().info().clone()
        };
        let ours = Cell::new(drive.slice_epoch(index));
        Self { drive, index, entry, info, ours }
    }

    /// The slice's line in the slice table, as it was when the slice was opened.
    #[must_use]
    pub fn entry(&self) -> &SliceEntry {
        &self.entry
    }

    /// The drive it lies on.
    #[must_use]
    pub fn drive(&self) -> &Rc<Drive> {
        &self.drive
    }

    fn admit(&self) -> Result<(), BlockError> {
        if self.drive.is_failed() {
            return Err(BlockError::Gone);
        }
        let (ours, seen) = (self.ours.get(), self.drive.slice_epoch(self.index));
        if ours < seen { Err(BlockError::Fenced { ours, seen }) } else { Ok(()) }
    }

    fn admit_range(&self, at: u64, bytes: u64) -> Result<(), BlockError> {
        self.admit()?;
        check_range(&self.info, at, bytes)
    }

    /// Spreads a lost drive to its other slices, and gives offsets as this slice counts them.
    fn settle<T>(&self, result: Result<T, BlockError>) -> Result<T, BlockError> {
        if self.drive.is_failed() {
            return Err(BlockError::Gone);
        }
        result.map_err(|error| match error {
            BlockError::Gone => {
                self.drive.fail();
                error
            }
            BlockError::Medium { at, bytes } => {
                BlockError::Medium { at: at.saturating_sub(self.entry.start), bytes }
            }
            other => other,
        })
    }
}

impl Device for Slice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn read(&self, at: u64, into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        Box::pin(async move {
            self.admit_range(at, bytes_in(&into))?;
            self.settle(self.drive.device().read(self.entry.start + at, into).await)
        })
    }

    fn read_lent(&self, at: u64, into: LentVec) -> Option<LentFuture<'_>> {
        self.admit_range(at, bytes_lent(&into)).ok()?;
        let reading = self.drive.device().read_lent(self.entry.start + at, into)?;
        Some(Box::pin(async move { reading.await && !self.drive.is_failed() }))
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> IoFuture<'_, ()> {
        Box::pin(async move {
            self.admit_range(at, bytes_in(&from))?;
            self.settle(self.drive.device().write(self.entry.start + at, from, durability).await)
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            self.admit()?;
            self.settle(self.drive.device().flush().await)
        })
    }

    fn discard(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        Box::pin(async move {
            self.admit_range(at, bytes)?;
            self.settle(self.drive.device().discard(self.entry.start + at, bytes).await)
        })
    }

    fn is_shared(&self) -> bool {
        self.drive.device().is_shared()
    }

    fn write_zeroes(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        Box::pin(async move {
            self.admit_range(at, bytes)?;
            self.settle(self.drive.device().write_zeroes(self.entry.start + at, bytes).await)
        })
    }

    fn fence(&self, epoch: Epoch) -> IoFuture<'_, ()> {
        Box::pin(async move {
            if self.drive.is_failed() {
                return Err(BlockError::Gone);
            }
            let fenced = self.drive.fence_slice(self.index, epoch).await;
            self.settle(fenced.map_err(|error| match error {
                DriveError::Block(error) => error,
                // The label is gone or another drive's: this is not the drive we opened.
                _ => BlockError::Gone,
            }))?;
            self.ours.set(epoch);
            Ok(())
        })
    }

    fn health(&self) -> Health {
        let health = self.drive.device().health();
        Health { failing: health.failing || self.drive.is_failed(), ..health }
    }
}
