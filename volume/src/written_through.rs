//! A volume whose changes are durable when they are answered.

use crate::volume::{Extent, Shape, Volume, VolumeFuture, Zeroing};
use levada_base::IoVec;
use levada_device::Durability;
use std::rc::Rc;

/// For clients that may go on elsewhere, where a flush knows nothing of what was not durable here: hosts of a volume that another
/// server can take over do so without a word, and would believe that flush.
pub struct WrittenThrough(Rc<dyn Volume>);

impl WrittenThrough {
    #[must_use]
    pub fn new(volume: Rc<dyn Volume>) -> Self {
        Self(volume)
    }
}

impl Volume for WrittenThrough {
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    fn shape(&self) -> Shape {
        self.0.shape()
    }

    fn read(&self, at: u64, bytes: u64) -> VolumeFuture<'_, IoVec> {
        self.0.read(at, bytes)
    }

    fn write(&self, at: u64, from: IoVec, _durability: Durability) -> VolumeFuture<'_, ()> {
        self.0.write(at, from, Durability::Fua)
    }

    fn flush(&self) -> VolumeFuture<'_, ()> {
        self.0.flush()
    }

    // May read as old bytes in any case.
    fn discard(&self, at: u64, bytes: u64) -> VolumeFuture<'_, ()> {
        self.0.discard(at, bytes)
    }

    fn write_zeroes(&self, at: u64, bytes: u64, zeroing: Zeroing) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            self.0.write_zeroes(at, bytes, zeroing).await?;
            self.0.flush().await
        })
    }

    fn extents(&self, at: u64, bytes: u64) -> VolumeFuture<'_, Vec<Extent>> {
        self.0.extents(at, bytes)
    }
}
