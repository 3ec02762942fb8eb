//! A device that answers at once and keeps nothing: the `null` members of benchmarks, which
//! show what the layers above cost by themselves.
//!
//! Reads leave the buffer as it was.

use crate::{
    BlockError, Device, DeviceInfo, Durability, Health, IoFuture, LentFuture, check_range,
};
use levada_base::buf::bytes_in;
use levada_base::lent::bytes_lent;
use levada_base::units::{BLOCK_BYTES, MIB, round_down};
use levada_base::{Epoch, IoVec, IoVecMut, LentVec};
use std::cell::Cell;
use std::future::ready;

/// A null device.
pub struct NullDevice {
    info: DeviceInfo,
    epoch: Cell<Epoch>,
    health: Cell<Health>,
}

impl NullDevice {
    /// A device that pretends to hold `capacity_bytes`, rounded down to whole blocks.
    #[must_use]
    pub fn new(name: &str, capacity_bytes: u64) -> Self {
        Self {
            info: DeviceInfo {
                name: name.to_owned(),
                capacity_bytes: round_down(capacity_bytes, BLOCK_BYTES),
                block_bytes: BLOCK_BYTES,
                atomic_write_bytes: BLOCK_BYTES,
                io_bytes_best: MIB,
            },
            epoch: Cell::default(),
            health: Cell::default(),
        }
    }
}

impl Device for NullDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn read(&self, at: u64, into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        let bytes = bytes_in(&into);
        let mut health = self.health.get();
        health.bytes_read += bytes;
        self.health.set(health);
        Box::pin(ready(check_range(&self.info, at, bytes).map(|()| into)))
    }

    fn read_lent(&self, at: u64, into: LentVec) -> Option<LentFuture<'_>> {
        let bytes = bytes_lent(&into);
        check_range(&self.info, at, bytes).ok()?;
        Some(Box::pin(async move {
            let mut health = self.health.get();
            health.bytes_read += bytes;
            self.health.set(health);
            true
        }))
    }

    fn write(&self, at: u64, from: IoVec, _: Durability) -> IoFuture<'_, ()> {
        let bytes = bytes_in(&from);
        let mut health = self.health.get();
        health.bytes_written += bytes;
        self.health.set(health);
        Box::pin(ready(check_range(&self.info, at, bytes)))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(ready(Ok(())))
    }

    fn discard(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        Box::pin(ready(check_range(&self.info, at, bytes)))
    }

    fn write_zeroes(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        Box::pin(ready(check_range(&self.info, at, bytes)))
    }

    fn fence(&self, epoch: Epoch) -> IoFuture<'_, ()> {
        let seen = self.epoch.get();
        let fenced = if epoch < seen {
            Err(BlockError::Fenced { ours: epoch, seen })
        } else {
            self.epoch.set(epoch);
            Ok(())
        };
        Box::pin(ready(fenced))
    }

    fn health(&self) -> Health {
        self.health.get()
    }
}
