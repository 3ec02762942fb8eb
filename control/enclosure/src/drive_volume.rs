//! A drive as a volume: whole blocks only, as drives have it. It counts what hosts move.

use levada_base::buf::bytes_in;
use levada_base::{BufMut, IoVec};
use levada_device::{BlockError, Device, Durability, check_range};
use levada_volume::{Extent, Shape, Volume, VolumeError, VolumeFuture, Zeroing};
use std::cell::Cell;
use std::rc::Rc;

pub(crate) struct DriveVolume {
    device: Rc<dyn Device>,
    moved: Cell<Moved>,
}

/// What hosts have read and written, and the drive has answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Moved {
    pub reads: u64,
    pub writes: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
}

impl DriveVolume {
    pub fn new(device: Rc<dyn Device>) -> Self {
        Self { device, moved: Cell::default() }
    }

    pub fn moved(&self) -> Moved {
        self.moved.get()
    }

    fn count(&self, change: impl FnOnce(&mut Moved)) {
        let mut moved = self.moved.get();
        change(&mut moved);
        self.moved.set(moved);
    }

    fn check(&self, at: u64, bytes: u64) -> Result<(), VolumeError> {
        check_range(self.device.info(), at, bytes).map_err(|error| match error {
            BlockError::OutOfRange { at, bytes, capacity_bytes } => {
                VolumeError::OutOfRange { at, bytes, size_bytes: capacity_bytes }
            }
            error => error.into(),
        })
    }
}

impl Volume for DriveVolume {
    fn size_bytes(&self) -> u64 {
        self.device.info().capacity_bytes
    }

    fn shape(&self) -> Shape {
        let info = self.device.info();
        Shape {
            block_bytes: info.block_bytes,
            io_bytes_best: info.io_bytes_best,
            discard_bytes: info.block_bytes,
            is_read_only: false,
        }
    }

    fn read(&self, at: u64, bytes: u64) -> VolumeFuture<'_, IoVec> {
        Box::pin(async move {
            self.check(at, bytes)?;
            let read =
                self.device.read(at, BufMut::for_overwrite(bytes as usize).into_vec()).await?;
            self.count(|moved| {
                moved.reads += 1;
                moved.read_bytes += bytes;
            });
            Ok(read.into_iter().map(BufMut::freeze).collect())
        })
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            let bytes = bytes_in(&from);
            self.check(at, bytes)?;
            self.device.write(at, from, durability).await?;
            self.count(|moved| {
                moved.writes += 1;
                moved.written_bytes += bytes;
            });
            Ok(())
        })
    }

    fn flush(&self) -> VolumeFuture<'_, ()> {
        Box::pin(async { Ok(self.device.flush().await?) })
    }

    fn discard(&self, at: u64, bytes: u64) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            self.check(at, bytes)?;
            Ok(self.device.discard(at, bytes).await?)
        })
    }

    fn write_zeroes(&self, at: u64, bytes: u64, _zeroing: Zeroing) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            self.check(at, bytes)?;
            Ok(self.device.write_zeroes(at, bytes).await?)
        })
    }

    fn extents(&self, at: u64, bytes: u64) -> VolumeFuture<'_, Vec<Extent>> {
        Box::pin(async move {
            self.check(at, bytes)?;
            Ok(vec![Extent { bytes, is_allocated: true }])
        })
    }
}
