//! A volume that answers at once and keeps nothing: what is measured with it is the export.

use levada_base::units::{BLOCK_BYTES, MIB};
use levada_base::{Buf, BufMut, IoVec, LentVec};
use levada_device::Durability;
use levada_volume::{Extent, Shape, Volume, VolumeFuture, Zeroing};
use std::future::ready;

/// Reads are the same bytes, of which there are 1 MiB.
pub(crate) struct NullVolume {
    size_bytes: u64,
    bytes: Buf,
}

impl NullVolume {
    pub(crate) fn new(size_bytes: u64) -> Self {
        Self { size_bytes, bytes: BufMut::zeroed(MIB as usize).freeze() }
    }
}

fn done() -> VolumeFuture<'static, ()> {
    Box::pin(ready(Ok(())))
}

impl Volume for NullVolume {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn shape(&self) -> Shape {
        Shape {
            block_bytes: BLOCK_BYTES,
            io_bytes_best: BLOCK_BYTES,
            discard_bytes: BLOCK_BYTES,
            is_read_only: false,
        }
    }

    fn read(&self, _at: u64, bytes: u64) -> VolumeFuture<'_, IoVec> {
        Box::pin(ready(Ok(self.bytes.slice(0, bytes as usize).into_vec())))
    }

    /// They stay as they are, as with null members.
    fn read_into(&self, _at: u64, _into: LentVec) -> VolumeFuture<'_, ()> {
        done()
    }

    fn write(&self, _at: u64, _from: IoVec, _durability: Durability) -> VolumeFuture<'_, ()> {
        done()
    }

    fn flush(&self) -> VolumeFuture<'_, ()> {
        done()
    }

    fn discard(&self, _at: u64, _bytes: u64) -> VolumeFuture<'_, ()> {
        done()
    }

    fn write_zeroes(&self, _at: u64, _bytes: u64, _zeroing: Zeroing) -> VolumeFuture<'_, ()> {
        done()
    }

    fn extents(&self, _at: u64, bytes: u64) -> VolumeFuture<'_, Vec<Extent>> {
        Box::pin(ready(Ok(vec![Extent { bytes, is_allocated: true }])))
    }
}
