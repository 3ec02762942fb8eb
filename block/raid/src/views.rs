//! Views: parts of an array that behave like whole ones, so that each target has its own.
//!
//! What always holds: a view touches nothing outside its range, and two views of ranges that do
//! not overlap share no stripe. A view has no state; flush and fence are those of the whole.

use crate::array::{Array, ArrayGeometry, IoClass, MemberSet};
use crate::pace::Foreground;
use levada_base::buf::bytes_in;
use levada_base::lent::bytes_lent;
use levada_base::{Epoch, IoVec, IoVecMut, LentVec};
use levada_device::{
    BlockError, Device, DeviceInfo, Durability, Health, IoFuture, LentFuture, check_range,
};
use std::future::ready;
use std::rc::Rc;

/// A run of whole stripes of an array, as an array.
#[derive(Clone)]
pub struct StripeRange {
    array: Rc<dyn Array>,
    first: u64,
    stripes: u64,
    stripe_bytes: u64,
    info: DeviceInfo,
}

impl StripeRange {
    /// The `stripes` stripes of `array` from `first` on.
    ///
    /// # Errors
    ///
    /// [`BlockError::OutOfRange`] when the array has fewer.
    pub fn new(
        name: &str,
        array: Rc<dyn Array>,
        first: u64,
        stripes: u64,
    ) -> Result<Self, BlockError> {
        let geometry = array.geometry();
        let stripe_bytes = geometry.stripe_bytes;
        if first.checked_add(stripes).is_none_or(|end| end > geometry.stripes) {
            return Err(BlockError::OutOfRange {
                at: first.saturating_mul(stripe_bytes),
                bytes: stripes.saturating_mul(stripe_bytes),
                capacity_bytes: array.info().capacity_bytes,
            });
        }
        let info = DeviceInfo {
            name: name.to_owned(),
            capacity_bytes: stripes * stripe_bytes,
            ..array.info().clone()
        };
        Ok(Self { array, first, stripes, stripe_bytes, info })
    }

    /// The byte of the array at byte `at` of the view, if the view has `bytes` from there on.
    fn inside(&self, at: u64, bytes: u64) -> Result<u64, BlockError> {
        check_range(&self.info, at, bytes)?;
        Ok(self.first * self.stripe_bytes + at)
    }

    fn inside_stripes(&self, first: u64, count: u64) -> Result<u64, BlockError> {
        if first.checked_add(count).is_none_or(|end| end > self.stripes) {
            return Err(BlockError::OutOfRange {
                at: first.saturating_mul(self.stripe_bytes),
                bytes: count.saturating_mul(self.stripe_bytes),
                capacity_bytes: self.info.capacity_bytes,
            });
        }
        Ok(self.first + first)
    }
}

/// An operation that fails at once.
fn refused<'a, T: 'a>(error: BlockError) -> IoFuture<'a, T> {
    Box::pin(ready(Err(error)))
}

impl Device for StripeRange {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn read(&self, at: u64, into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        match self.inside(at, bytes_in(&into)) {
            Ok(at) => self.array.read(at, into),
            Err(error) => refused(error),
        }
    }

    fn read_lent(&self, at: u64, into: LentVec) -> Option<LentFuture<'_>> {
        let at = self.inside(at, bytes_lent(&into)).ok()?;
        self.array.read_lent(at, into)
    }

    fn read_agreed(&self, at: u64, into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        match self.inside(at, bytes_in(&into)) {
            Ok(at) => self.array.read_agreed(at, into),
            Err(error) => refused(error),
        }
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> IoFuture<'_, ()> {
        match self.inside(at, bytes_in(&from)) {
            Ok(at) => self.array.write(at, from, durability),
            Err(error) => refused(error),
        }
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        self.array.flush()
    }

    fn discard(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        match self.inside(at, bytes) {
            Ok(at) => self.array.discard(at, bytes),
            Err(error) => refused(error),
        }
    }

    fn write_zeroes(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        match self.inside(at, bytes) {
            Ok(at) => self.array.write_zeroes(at, bytes),
            Err(error) => refused(error),
        }
    }

    fn fence(&self, epoch: Epoch) -> IoFuture<'_, ()> {
        self.array.fence(epoch)
    }

    fn health(&self) -> Health {
        self.array.health()
    }
}

impl Array for StripeRange {
    fn geometry(&self) -> ArrayGeometry {
        ArrayGeometry { stripes: self.stripes, ..self.array.geometry() }
    }

    fn declare_fresh(&self, first: u64, count: u64) -> IoFuture<'_, ()> {
        match self.inside_stripes(first, count) {
            Ok(first) => self.array.declare_fresh(first, count),
            Err(error) => refused(error),
        }
    }

    fn write_fresh(&self, stripe: u64, data: IoVec, class: IoClass) -> IoFuture<'_, ()> {
        match self.inside_stripes(stripe, 1) {
            Ok(stripe) => self.array.write_fresh(stripe, data, class),
            Err(error) => refused(error),
        }
    }

    fn read_avoiding(
        &self,
        at: u64,
        into: IoVecMut,
        avoid: MemberSet,
        class: IoClass,
    ) -> IoFuture<'_, IoVecMut> {
        match self.inside(at, bytes_in(&into)) {
            Ok(at) => self.array.read_avoiding(at, into, avoid, class),
            Err(error) => refused(error),
        }
    }

    fn members_of(&self, at: u64, bytes: u64) -> MemberSet {
        match self.inside(at, bytes) {
            Ok(at) => self.array.members_of(at, bytes),
            Err(_) => MemberSet::NONE,
        }
    }

    fn repair(&self, at: u64, data: IoVec) -> IoFuture<'_, ()> {
        match self.inside(at, bytes_in(&data)) {
            Ok(at) => self.array.repair(at, data),
            Err(error) => refused(error),
        }
    }

    fn discard_stripes(&self, first: u64, count: u64) -> IoFuture<'_, ()> {
        match self.inside_stripes(first, count) {
            Ok(first) => self.array.discard_stripes(first, count),
            Err(error) => refused(error),
        }
    }

    fn is_written(&self, stripe: u64) -> bool {
        stripe < self.stripes && self.array.is_written(self.first + stripe)
    }

    fn foreground(&self) -> &Foreground {
        self.array.foreground()
    }
}

/// A run of bytes of a device, as a device: a target's window on a mirror.
#[derive(Clone)]
pub struct ByteRange {
    device: Rc<dyn Device>,
    start: u64,
    info: DeviceInfo,
}

impl ByteRange {
    /// The `bytes` bytes of `device` from `start` on.
    ///
    /// # Errors
    ///
    /// [`BlockError::OutOfRange`] or [`BlockError::Misaligned`].
    pub fn new(
        name: &str,
        device: Rc<dyn Device>,
        start: u64,
        bytes: u64,
    ) -> Result<Self, BlockError> {
        check_range(device.info(), start, bytes)?;
        let info =
            DeviceInfo { name: name.to_owned(), capacity_bytes: bytes, ..device.info().clone() };
        Ok(Self { device, start, info })
    }
}

impl Device for ByteRange {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn read(&self, at: u64, into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        match check_range(&self.info, at, bytes_in(&into)) {
            Ok(()) => self.device.read(self.start + at, into),
            Err(error) => refused(error),
        }
    }

    fn read_lent(&self, at: u64, into: LentVec) -> Option<LentFuture<'_>> {
        check_range(&self.info, at, bytes_lent(&into)).ok()?;
        self.device.read_lent(self.start + at, into)
    }

    fn read_agreed(&self, at: u64, into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        match check_range(&self.info, at, bytes_in(&into)) {
            Ok(()) => self.device.read_agreed(self.start + at, into),
            Err(error) => refused(error),
        }
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> IoFuture<'_, ()> {
        match check_range(&self.info, at, bytes_in(&from)) {
            Ok(()) => self.device.write(self.start + at, from, durability),
            Err(error) => refused(error),
        }
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        self.device.flush()
    }

    fn discard(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        match check_range(&self.info, at, bytes) {
            Ok(()) => self.device.discard(self.start + at, bytes),
            Err(error) => refused(error),
        }
    }

    fn write_zeroes(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        match check_range(&self.info, at, bytes) {
            Ok(()) => self.device.write_zeroes(self.start + at, bytes),
            Err(error) => refused(error),
        }
    }

    fn fence(&self, epoch: Epoch) -> IoFuture<'_, ()> {
        self.device.fence(epoch)
    }

    fn health(&self) -> Health {
        self.device.health()
    }
}
