//! A drive as a volume: whole blocks only, as drives have it.

use levada_base::buf::bytes_in;
use levada_base::{BufMut, IoVec};
use levada_device::{BlockError, Device, Durability, check_range};
use levada_volume::{Extent, Shape, Volume, VolumeError, VolumeFuture, Zeroing};
use std::rc::Rc;

pub(crate) struct DriveVolume(pub Rc<dyn Device>);

impl DriveVolume {
    fn check(&self, at: u64, bytes: u64) -> Result<(), VolumeError> {
        check_range(self.0.info(), at, bytes).map_err(|error| match error {
            BlockError::OutOfRange { at, bytes, capacity_bytes } => {
                VolumeError::OutOfRange { at, bytes, size_bytes: capacity_bytes }
            }
            error => error.into(),
        })
    }
}

impl Volume for DriveVolume {
    fn size_bytes(&self) -> u64 {
        self.0.info().capacity_bytes
    }

    fn shape(&self) -> Shape {
        let info = self.0.info();
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
            let read = self.0.read(at, BufMut::for_overwrite(bytes as usize).into_vec()).await?;
            Ok(read.into_iter().map(BufMut::freeze).collect())
        })
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            self.check(at, bytes_in(&from))?;
            Ok(self.0.write(at, from, durability).await?)
        })
    }

    fn flush(&self) -> VolumeFuture<'_, ()> {
        Box::pin(async { Ok(self.0.flush().await?) })
    }

    fn discard(&self, at: u64, bytes: u64) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            self.check(at, bytes)?;
            Ok(self.0.discard(at, bytes).await?)
        })
    }

    fn write_zeroes(&self, at: u64, bytes: u64, _zeroing: Zeroing) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            self.check(at, bytes)?;
            Ok(self.0.write_zeroes(at, bytes).await?)
        })
    }

    fn extents(&self, at: u64, bytes: u64) -> VolumeFuture<'_, Vec<Extent>> {
        Box::pin(async move {
            self.check(at, bytes)?;
            Ok(vec![Extent { bytes, is_allocated: true }])
        })
    }
}
