//! The disk that a client sees: what it offers, and its configuration space (virtio 1.2, 5.2.3 and 5.2.4).

use crate::served::{Features, protocol};
use levada_volume::Volume;
use virtio_bindings::virtio_blk as blk;

/// The unit of every address in the protocol, and the logical block.
pub(crate) const SECTOR_BYTES: u64 = 512;
/// Spans of one request: as many as fit a ring of 128 beside header and status.
const SEGMENTS_MAX: u32 = 126;
/// Bytes of one span.
const SEGMENT_BYTES_MAX: u32 = 1 << 20;
/// Data of one request.
pub(crate) const REQUEST_BYTES_MAX: u64 = SEGMENTS_MAX as u64 * SEGMENT_BYTES_MAX as u64;
/// Ranges of one discard or write zeroes.
pub(crate) const RANGES_MAX: u32 = 32;
/// Sectors of one such range.
pub(crate) const RANGE_SECTORS_MAX: u32 = 1 << 22;

/// Messages of the protocol beyond the plain ones.
pub(crate) const PROTOCOL: u64 = protocol::MQ
    | protocol::REPLY_ACK
    | protocol::BACKEND_REQ
    | protocol::CONFIG
    | protocol::INFLIGHT_SHMFD
    | protocol::CONFIGURE_MEM_SLOTS;

/// What a volume offers.
pub(crate) fn offered(volume: &(impl Volume + ?Sized)) -> Features {
    let bits = [
        blk::VIRTIO_BLK_F_SIZE_MAX,
        blk::VIRTIO_BLK_F_SEG_MAX,
        blk::VIRTIO_BLK_F_BLK_SIZE,
        blk::VIRTIO_BLK_F_TOPOLOGY,
        blk::VIRTIO_BLK_F_MQ,
        blk::VIRTIO_BLK_F_FLUSH,
    ];
    let written = match volume.shape().is_read_only {
        true => &[blk::VIRTIO_BLK_F_RO][..],
        false => &[blk::VIRTIO_BLK_F_DISCARD, blk::VIRTIO_BLK_F_WRITE_ZEROES],
    };
    bits.iter().chain(written).fold(Features::RINGS, |all, bit| all.with(*bit))
}

/// True when the driver will flush: else a write is done when it is durable.
pub(crate) fn has_flush(features: Features) -> bool {
    features.has(blk::VIRTIO_BLK_F_FLUSH)
}

/// `struct virtio_blk_config`.
pub(crate) fn configuration(volume: &(impl Volume + ?Sized), queues: u16) -> Vec<u8> {
    let shape = volume.shape();
    let sectors = |bytes: u64| u32::try_from(bytes / SECTOR_BYTES).unwrap_or(u32::MAX).max(1);
    let mut bytes = Vec::with_capacity(64);
    bytes.extend((volume.size_bytes() / SECTOR_BYTES).to_le_bytes());
    bytes.extend(SEGMENT_BYTES_MAX.to_le_bytes());
    bytes.extend(SEGMENTS_MAX.to_le_bytes());
    // No geometry: cylinders, heads and sectors.
    bytes.extend([0; 4]);
    bytes.extend((SECTOR_BYTES as u32).to_le_bytes());
    // The logarithm of sectors per block, and the sectors before the first whole block.
    bytes.push(sectors(shape.block_bytes).ilog2() as u8);
    bytes.push(0);
    let block_sectors = u16::try_from(sectors(shape.block_bytes)).unwrap_or(u16::MAX);
    bytes.extend(block_sectors.to_le_bytes());
    bytes.extend(sectors(shape.io_bytes_best).to_le_bytes());
    // Writes may be cached until a flush; what the guest would rather have cannot be set (`VIRTIO_BLK_F_CONFIG_WCE`), as front ends
    // do not say it again to who serves next.
    bytes.push(1);
    bytes.push(0);
    bytes.extend(queues.to_le_bytes());
    bytes.extend(RANGE_SECTORS_MAX.to_le_bytes());
    bytes.extend(RANGES_MAX.to_le_bytes());
    bytes.extend(sectors(shape.discard_bytes).to_le_bytes());
    bytes.extend(RANGE_SECTORS_MAX.to_le_bytes());
    bytes.extend(RANGES_MAX.to_le_bytes());
    // Zeroes may give room back.
    bytes.extend([1, 0, 0, 0]);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::IoVec;
    use levada_device::Durability;
    use levada_volume::{Extent, Shape, VolumeError, VolumeFuture, Zeroing};

    struct Sized(u64);

    impl Volume for Sized {
        fn size_bytes(&self) -> u64 {
            self.0
        }
        fn shape(&self) -> Shape {
            let (block_bytes, io_bytes_best, discard_bytes) = (4096, 1 << 20, 1 << 20);
            Shape { block_bytes, io_bytes_best, discard_bytes, is_read_only: self.0 == 0 }
        }
        fn read(&self, _: u64, _: u64) -> VolumeFuture<'_, IoVec> {
            Box::pin(async { Err(VolumeError::NoSpace) })
        }
        fn write(&self, _: u64, _: IoVec, _: Durability) -> VolumeFuture<'_, ()> {
            Box::pin(async { Err(VolumeError::NoSpace) })
        }
        fn flush(&self) -> VolumeFuture<'_, ()> {
            Box::pin(async { Err(VolumeError::NoSpace) })
        }
        fn discard(&self, _: u64, _: u64) -> VolumeFuture<'_, ()> {
            Box::pin(async { Err(VolumeError::NoSpace) })
        }
        fn write_zeroes(&self, _: u64, _: u64, _: Zeroing) -> VolumeFuture<'_, ()> {
            Box::pin(async { Err(VolumeError::NoSpace) })
        }
        fn extents(&self, _: u64, _: u64) -> VolumeFuture<'_, Vec<Extent>> {
            Box::pin(async { Err(VolumeError::NoSpace) })
        }
    }

    /// Offsets are those of the specification's structure, as drivers have it.
    #[test]
    fn fields_lie_where_drivers_look_for_them() {
        let bytes = configuration(&Sized(10 << 20), 4);
        assert_eq!(bytes.len(), 60);
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four"));
        assert_eq!(word(0), 20 << 10, "capacity in sectors");
        assert_eq!((word(12), word(20)), (126, 512), "seg_max, blk_size");
        assert_eq!((bytes[24], bytes[26], word(28)), (3, 8, 2048), "topology");
        assert_eq!((bytes[32], bytes[34]), (1, 4), "writeback, num_queues");
        assert_eq!((word(36), word(40), word(44)), (1 << 22, 32, 2048), "discard");
        assert_eq!((word(48), word(52), bytes[56]), (1 << 22, 32, 1), "write zeroes");
    }

    #[test]
    fn what_is_read_only_offers_nothing_that_writes() {
        let (written, fixed) = (offered(&Sized(1 << 20)), offered(&Sized(0)));
        assert!(fixed.has(blk::VIRTIO_BLK_F_RO) && !written.has(blk::VIRTIO_BLK_F_RO));
        assert!(written.has(blk::VIRTIO_BLK_F_DISCARD) && !fixed.has(blk::VIRTIO_BLK_F_DISCARD));
    }
}
