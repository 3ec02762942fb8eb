//! A device in this process's memory: the `ram` members of benchmarks, and tests.
//!
//! Durable for as long as the process lives; a power cut is the business of the `volatile`
//! wrapper above it.

use crate::{
    BlockError, Device, DeviceInfo, Durability, Health, IoFuture, LentFuture, check_range,
};
use levada_base::buf::bytes_in;
use levada_base::lent::bytes_lent;
use levada_base::units::{BLOCK_BYTES, MIB};
use levada_base::{BufMut, Epoch, IoVec, IoVecMut, LentVec};
use std::cell::{Cell, RefCell};
use std::future::ready;

/// Bytes per lazily allocated piece, so that a large empty device costs nothing.
const PIECE_BYTES: u64 = MIB;

/// A RAM device.
pub struct RamDevice {
    info: DeviceInfo,
    pieces: RefCell<Vec<Option<BufMut>>>,
    epoch: Cell<Epoch>,
    health: Cell<Health>,
}

impl RamDevice {
    /// A device of `capacity_bytes` zero bytes, rounded down to whole blocks.
    #[must_use]
    pub fn new(name: &str, capacity_bytes: u64) -> Self {
        let capacity_bytes = levada_base::units::round_down(capacity_bytes, BLOCK_BYTES);
        let pieces = capacity_bytes.div_ceil(PIECE_BYTES) as usize;
        Self {
            info: DeviceInfo {
                name: name.to_owned(),
                capacity_bytes,
                block_bytes: BLOCK_BYTES,
                atomic_write_bytes: BLOCK_BYTES,
                io_bytes_best: MIB,
            },
            pieces: RefCell::new((0..pieces).map(|_| None).collect()),
            epoch: Cell::default(),
            health: Cell::default(),
        }
    }

    /// Calls `visit` with each run of `bytes` from `at` on: piece number, offset in it, length.
    fn runs(at: u64, bytes: u64, mut visit: impl FnMut(usize, usize, usize)) {
        let end = at + bytes;
        let mut at = at;
        while at < end {
            let inside = at % PIECE_BYTES;
            let run = (PIECE_BYTES - inside).min(end - at);
            visit((at / PIECE_BYTES) as usize, inside as usize, run as usize);
            at += run;
        }
    }

    fn read_now(&self, at: u64, mut into: IoVecMut) -> Result<IoVecMut, BlockError> {
        let bytes = bytes_in(&into);
        check_range(&self.info, at, bytes)?;
        let pieces = self.pieces.borrow();
        let mut at = at;
        for part in &mut into {
            let mut done = 0;
            Self::runs(at, part.len() as u64, |piece, start, run| {
                let target = &mut part[done..done + run];
                match &pieces[piece] {
                    Some(piece) => target.copy_from_slice(&piece[start..start + run]),
                    None => target.fill(0),
                }
                done += run;
            });
            at += part.len() as u64;
        }
        self.count_read(bytes);
        Ok(into)
    }

    /// Of a range that is inside.
    fn read_lent_now(&self, at: u64, into: &LentVec) {
        let pieces = self.pieces.borrow();
        let mut at = at;
        for part in into {
            let mut done = 0;
            Self::runs(at, part.len() as u64, |piece, start, run| {
                let target = part.part(done, run);
                match &pieces[piece] {
                    Some(piece) => target.put(&piece[start..start + run]),
                    None => target.clear(),
                }
                done += run;
            });
            at += part.len() as u64;
        }
        self.count_read(bytes_lent(into));
    }

    fn count_read(&self, bytes: u64) {
        let health = self.health.get();
        self.health.set(Health { bytes_read: health.bytes_read + bytes, ..health });
    }

    fn write_now(&self, at: u64, from: &IoVec) -> Result<(), BlockError> {
        let bytes = bytes_in(from);
        check_range(&self.info, at, bytes)?;
        let mut pieces = self.pieces.borrow_mut();
        let mut at = at;
        for part in from {
            let mut done = 0;
            Self::runs(at, part.len() as u64, |piece, start, run| {
                let piece = pieces[piece]
                    .get_or_insert_with(|| BufMut::zeroed_to_stay(PIECE_BYTES as usize));
                piece[start..start + run].copy_from_slice(&part[done..done + run]);
                done += run;
            });
            at += part.len() as u64;
        }
        let health = self.health.get();
        self.health.set(Health { bytes_written: health.bytes_written + bytes, ..health });
        Ok(())
    }

    fn zero_now(&self, at: u64, bytes: u64) -> Result<(), BlockError> {
        check_range(&self.info, at, bytes)?;
        let mut pieces = self.pieces.borrow_mut();
        Self::runs(at, bytes, |piece, start, run| {
            if run as u64 == PIECE_BYTES {
                pieces[piece] = None;
            } else if let Some(piece) = &mut pieces[piece] {
                piece[start..start + run].fill(0);
            }
        });
        Ok(())
    }
}

impl Device for RamDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn read(&self, at: u64, into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        Box::pin(ready(self.read_now(at, into)))
    }

    fn read_lent(&self, at: u64, into: LentVec) -> Option<LentFuture<'_>> {
        check_range(&self.info, at, bytes_lent(&into)).ok()?;
        Some(Box::pin(async move {
            self.read_lent_now(at, &into);
            true
        }))
    }

    fn write(&self, at: u64, from: IoVec, _: Durability) -> IoFuture<'_, ()> {
        Box::pin(ready(self.write_now(at, &from)))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(ready(Ok(())))
    }

    fn discard(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        self.write_zeroes(at, bytes)
    }

    fn write_zeroes(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        Box::pin(ready(self.zero_now(at, bytes)))
    }

    fn fence(&self, epoch: Epoch) -> IoFuture<'_, ()> {
        let seen = self.epoch.get();
        let result = if epoch < seen {
            Err(BlockError::Fenced { ours: epoch, seen })
        } else {
            self.epoch.set(epoch);
            Ok(())
        };
        Box::pin(ready(result))
    }

    fn health(&self) -> Health {
        self.health.get()
    }
}
