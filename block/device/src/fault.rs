//! Makes a device fail as real drives do, on order.
//!
//! A [`Faults`] handle, shared with the device, orders faults while requests run: a drive that
//! is gone, blocks that cannot be read, bits that rot silently, writes that are lost or go
//! astray, slowness.
//!
//! What always holds:
//! - A block with a medium error or with rot is healed by writing it anew, as on a drive that
//!   reallocates.
//! - Lost and misdirected writes are acknowledged like any other.
//!
//! Faults live in memory: opened anew, the device is healthy.

use crate::device::read_lent_by_copy;
use crate::{
    BlockError, Device, DeviceInfo, Durability, Health, IoFuture, LentFuture, Witness, check_range,
};
use levada_base::buf::bytes_in;
use levada_base::units::{BLOCK_BYTES, round_down};
use levada_base::{Epoch, IoVec, IoVecMut, LentVec, reactor};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

/// What becomes of one write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteFate {
    Lost,
    /// Lands here instead.
    Misdirected(u64),
}

#[derive(Default)]
struct State {
    gone: Cell<bool>,
    /// Requests that still succeed before the device goes.
    gone_after: Cell<Option<u64>>,
    /// Numbers of blocks that cannot be read.
    bad: RefCell<BTreeSet<u64>>,
    /// By byte address: what rot flips in it.
    rot: RefCell<BTreeMap<u64, u8>>,
    /// By number of the write.
    fates: RefCell<BTreeMap<u64, WriteFate>>,
    /// Of the next write at or behind a place, and of the one after it.
    fates_behind: RefCell<VecDeque<(u64, WriteFate)>>,
    /// Writes that met one of these.
    miswritten: Cell<u64>,
    writes: Cell<u64>,
    reads: Cell<u64>,
    extra: Cell<Duration>,
    failing: Cell<bool>,
    read_errors: Cell<u64>,
    write_errors: Cell<u64>,
}

/// Orders faults of one device.
#[derive(Clone, Default)]
pub struct Faults(Rc<State>);

impl Faults {
    /// A handle that orders nothing yet; give it to [`FaultDevice::new`].
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// The device is gone from now on, for requests in flight too.
    pub fn fail(&self) {
        self.0.gone.set(true);
    }

    /// The device goes after `requests` more requests.
    pub fn fail_after(&self, requests: u64) {
        self.0.gone_after.set(Some(requests));
    }

    /// A device that was gone is back, with what it held.
    pub fn restore(&self) {
        self.0.gone.set(false);
        self.0.gone_after.set(None);
    }

    /// True while the device is gone.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.0.gone.get()
    }

    /// The blocks that `at..at + bytes` touches cannot be read until they are written anew.
    pub fn medium_error(&self, at: u64, bytes: u64) {
        self.0.bad.borrow_mut().extend(blocks_of(at, bytes));
    }

    /// Flips the bits of `mask` in every byte of `at..at + bytes`, silently, until the block is
    /// written anew. Flipping twice heals.
    pub fn rot(&self, at: u64, bytes: u64, mask: u8) {
        let mut rot = self.0.rot.borrow_mut();
        for byte in at..at + bytes {
            let flipped = rot.get(&byte).unwrap_or(&0) ^ mask;
            if flipped == 0 {
                rot.remove(&byte);
            } else {
                rot.insert(byte, flipped);
            }
        }
    }

    /// The `nth` write from now on (1 is the next) is acknowledged and forgotten.
    pub fn lose_write(&self, nth: u64) {
        self.0.fates.borrow_mut().insert(self.0.writes.get() + nth, WriteFate::Lost);
    }

    /// The `nth` write from now on (1 is the next) lands at `to`, which must leave it room;
    /// where it should have landed, nothing changes.
    pub fn misdirect_write(&self, nth: u64, to: u64) {
        let fate = WriteFate::Misdirected(round_down(to, BLOCK_BYTES));
        self.0.fates.borrow_mut().insert(self.0.writes.get() + nth, fate);
    }

    /// The next write that begins at or behind `from` is acknowledged and forgotten; ordered again, the one after it too.
    pub fn lose_write_behind(&self, from: u64) {
        self.0.fates_behind.borrow_mut().push_back((from, WriteFate::Lost));
    }

    /// The next write that begins at or behind `from` lands at `to`, or where the device still has room for it.
    pub fn misdirect_write_behind(&self, from: u64, to: u64) {
        let fate = WriteFate::Misdirected(round_down(to, BLOCK_BYTES));
        self.0.fates_behind.borrow_mut().push_back((from, fate));
    }

    /// Writes that were lost or went astray so.
    #[must_use]
    pub fn miswritten(&self) -> u64 {
        self.0.miswritten.get()
    }

    /// Writes do what they say again.
    pub fn write_well(&self) {
        self.0.fates.borrow_mut().clear();
        self.0.fates_behind.borrow_mut().clear();
    }

    /// Every request takes this much longer; zero ends it.
    pub fn slow(&self, extra: Duration) {
        self.0.extra.set(extra);
    }

    /// How much longer every request takes.
    #[must_use]
    pub fn slowness(&self) -> Duration {
        self.0.extra.get()
    }

    /// The device's health page asks for replacement, or no longer.
    pub fn ask_for_replacement(&self, failing: bool) {
        self.0.failing.set(failing);
    }

    /// Heals everything but what lost and misdirected writes have done.
    pub fn heal(&self) {
        self.restore();
        self.0.bad.borrow_mut().clear();
        self.0.rot.borrow_mut().clear();
        self.write_well();
        self.slow(Duration::ZERO);
        self.ask_for_replacement(false);
    }

    /// Writes seen so far.
    #[must_use]
    pub fn writes(&self) -> u64 {
        self.0.writes.get()
    }

    /// Reads seen so far.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.0.reads.get()
    }

    /// True when any block of the range has a medium error or rot.
    #[must_use]
    pub fn has_damage(&self, at: u64, bytes: u64) -> bool {
        self.0.bad.borrow().range(blocks_of(at, bytes)).next().is_some()
            || self.0.rot.borrow().range(at..at + bytes).next().is_some()
    }
}

fn blocks_of(at: u64, bytes: u64) -> Range<u64> {
    at / BLOCK_BYTES..(at + bytes).div_ceil(BLOCK_BYTES)
}

/// A device with faults.
pub struct FaultDevice {
    inner: Rc<dyn Device>,
    faults: Faults,
}

impl FaultDevice {
    #[must_use]
    pub fn new(inner: Rc<dyn Device>, faults: Faults) -> Self {
        Self { inner, faults }
    }

    /// The handle that orders this device's faults.
    #[must_use]
    pub fn faults(&self) -> &Faults {
        &self.faults
    }

    fn admit(&self) -> Result<(), BlockError> {
        let state = &self.faults.0;
        if let Some(left) = state.gone_after.get() {
            if left == 0 {
                state.gone.set(true);
            }
            state.gone_after.set(left.checked_sub(1));
        }
        self.still_there()
    }

    fn still_there(&self) -> Result<(), BlockError> {
        if self.faults.0.gone.get() { Err(BlockError::Gone) } else { Ok(()) }
    }

    async fn delay(&self) {
        let extra = self.faults.0.extra.get();
        if !extra.is_zero() {
            reactor::sleep(extra).await;
        }
    }

    /// Ends a request: a device that went meanwhile gives no answer but that.
    async fn finish<T>(&self, result: Result<T, BlockError>) -> Result<T, BlockError> {
        self.delay().await;
        self.still_there()?;
        result
    }

    /// New contents: errors and rot of these blocks are gone.
    fn rewritten(&self, at: u64, bytes: u64) {
        let mut bad = self.faults.0.bad.borrow_mut();
        if !bad.is_empty() {
            bad.retain(|block| !blocks_of(at, bytes).contains(block));
        }
        let mut rot = self.faults.0.rot.borrow_mut();
        if !rot.is_empty() {
            let healed: Vec<u64> = rot.range(at..at + bytes).map(|(byte, _)| *byte).collect();
            for byte in healed {
                rot.remove(&byte);
            }
        }
    }

    /// What becomes of a write that is let through.
    fn fate(&self, number: u64, at: u64, bytes: u64) -> Option<WriteFate> {
        let state = &self.faults.0;
        let mut behind = state.fates_behind.borrow_mut();
        let meets = behind.front().is_some_and(|(from, _)| at >= *from);
        let next = if meets { behind.pop_front().map(|(_, fate)| fate) } else { None };
        state.miswritten.set(state.miswritten.get() + u64::from(next.is_some()));
        let fate = state.fates.borrow_mut().remove(&number).or(next);
        let last = self.info().capacity_bytes - bytes;
        fate.map(|fate| match fate {
            WriteFate::Misdirected(to) => WriteFate::Misdirected(to.min(last)),
            WriteFate::Lost => WriteFate::Lost,
        })
    }

    fn first_bad(&self, at: u64, bytes: u64) -> Option<BlockError> {
        let bad = self.faults.0.bad.borrow();
        let mut inside = bad.range(blocks_of(at, bytes));
        let first = *inside.next()?;
        let run = 1 + inside.zip(first + 1..).take_while(|(bad, next)| *bad == next).count();
        Some(BlockError::Medium { at: first * BLOCK_BYTES, bytes: run as u64 * BLOCK_BYTES })
    }

    fn apply_rot(&self, at: u64, into: &mut IoVecMut) {
        let rot = self.faults.0.rot.borrow();
        let mut at = at;
        for part in into {
            let end = at + part.len() as u64;
            for (byte, mask) in rot.range(at..end) {
                part[(byte - at) as usize] ^= mask;
            }
            at = end;
        }
    }
}

impl Device for FaultDevice {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn read(&self, at: u64, into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        let state = &self.faults.0;
        state.reads.set(state.reads.get() + 1);
        let bytes = bytes_in(&into);
        let admitted = self.admit().and_then(|()| check_range(self.info(), at, bytes));
        let request = admitted.map(|()| self.inner.read(at, into));
        Box::pin(async move {
            let mut into = self.finish(request?.await).await?;
            if let Some(error) = self.first_bad(at, bytes) {
                self.faults.0.read_errors.set(self.faults.0.read_errors.get() + 1);
                return Err(error);
            }
            self.apply_rot(at, &mut into);
            Ok(into)
        })
    }

    fn read_lent(&self, at: u64, into: LentVec) -> Option<LentFuture<'_>> {
        read_lent_by_copy(self, at, into)
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> IoFuture<'_, ()> {
        let state = &self.faults.0;
        let number = state.writes.get() + 1;
        state.writes.set(number);
        let bytes = bytes_in(&from);
        let admitted = self.admit().and_then(|()| check_range(self.info(), at, bytes));
        let request = admitted.map(|()| {
            let to = match self.fate(number, at, bytes) {
                Some(WriteFate::Lost) => return None,
                Some(WriteFate::Misdirected(to)) => to,
                None => at,
            };
            self.rewritten(to, bytes);
            Some(self.inner.write(to, from, durability))
        });
        if request.is_err() {
            state.write_errors.set(state.write_errors.get() + 1);
        }
        Box::pin(async move {
            match request? {
                Some(request) => self.finish(request.await).await,
                None => self.finish(Ok(())).await,
            }
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        let request = self.admit().map(|()| self.inner.flush());
        Box::pin(async move { self.finish(request?.await).await })
    }

    fn discard(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        let request = self.admit().map(|()| self.inner.discard(at, bytes));
        Box::pin(async move { self.finish(request?.await).await })
    }

    fn write_zeroes(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        let request = self.admit().map(|()| {
            self.rewritten(at, bytes);
            self.inner.write_zeroes(at, bytes)
        });
        Box::pin(async move { self.finish(request?.await).await })
    }

    fn fence(&self, epoch: Epoch) -> IoFuture<'_, ()> {
        let request = self.admit().map(|()| self.inner.fence(epoch));
        Box::pin(async move { self.finish(request?.await).await })
    }

    fn recognise_by(&self, witness: Option<Witness>) {
        self.inner.recognise_by(witness);
    }

    fn is_shared(&self) -> bool {
        self.inner.is_shared()
    }

    fn health(&self) -> Health {
        let state = &self.faults.0;
        let health = self.inner.health();
        Health {
            read_errors: health.read_errors + state.read_errors.get(),
            write_errors: health.write_errors + state.write_errors.get(),
            failing: health.failing || state.failing.get(),
            ..health
        }
    }
}
