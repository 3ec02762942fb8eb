//! A volume whose requests wait for their turn at a [`Share`].

use super::{Cost, Share};
use crate::volume::{Extent, Shape, Volume, VolumeFuture, Zeroing};
use levada_base::buf::bytes_in;
use levada_base::lent::bytes_lent;
use levada_base::{IoVec, LentVec};
use levada_device::Durability;

/// A volume under a governor. Flushes and questions for extents are free: they would only keep others waiting.
pub struct Governed<V> {
    volume: V,
    share: Share,
}

impl<V: Volume> Governed<V> {
    #[must_use]
    pub fn new(volume: V, share: Share) -> Self {
        Self { volume, share }
    }

    #[must_use]
    pub fn share(&self) -> &Share {
        &self.share
    }

    fn in_turn<'a, T: 'a>(
        &'a self,
        cost: Cost,
        request: VolumeFuture<'a, T>,
    ) -> VolumeFuture<'a, T> {
        if self.share.lets_pass(cost) {
            return request;
        }
        Box::pin(async move {
            let _admitted = self.share.admit(cost).await;
            request.await
        })
    }
}

impl<V: Volume> Volume for Governed<V> {
    fn size_bytes(&self) -> u64 {
        self.volume.size_bytes()
    }

    fn shape(&self) -> Shape {
        self.volume.shape()
    }

    fn read(&self, at: u64, bytes: u64) -> VolumeFuture<'_, IoVec> {
        self.in_turn(Cost::read(bytes), self.volume.read(at, bytes))
    }

    fn read_into(&self, at: u64, into: LentVec) -> VolumeFuture<'_, ()> {
        self.in_turn(Cost::read(bytes_lent(&into)), self.volume.read_into(at, into))
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> VolumeFuture<'_, ()> {
        let bytes = bytes_in(&from);
        self.in_turn(Cost::write(bytes), self.volume.write(at, from, durability))
    }

    fn flush(&self) -> VolumeFuture<'_, ()> {
        self.volume.flush()
    }

    fn discard(&self, at: u64, bytes: u64) -> VolumeFuture<'_, ()> {
        self.in_turn(Cost::write(0), self.volume.discard(at, bytes))
    }

    fn write_zeroes(&self, at: u64, bytes: u64, zeroing: Zeroing) -> VolumeFuture<'_, ()> {
        self.in_turn(Cost::write(0), self.volume.write_zeroes(at, bytes, zeroing))
    }

    fn extents(&self, at: u64, bytes: u64) -> VolumeFuture<'_, Vec<Extent>> {
        self.volume.extents(at, bytes)
    }
}
