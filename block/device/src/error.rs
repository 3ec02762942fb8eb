//! Why a block device or an array could not do what it was asked.

use levada_base::Epoch;

/// The variants differ by what the caller does next.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlockError {
    /// The request lies outside the device; repeating it cannot help.
    #[error("{bytes} bytes at {at} are outside a device of {capacity_bytes} bytes")]
    OutOfRange { at: u64, bytes: u64, capacity_bytes: u64 },
    /// Offset or length is not a multiple of the block size; repeating it cannot help.
    #[error("{bytes} bytes at {at} are not whole blocks of {block_bytes} bytes")]
    Misaligned { at: u64, bytes: u64, block_bytes: u64 },
    /// The device cannot read these bytes (a latent sector error, or fewer good chunks than
    /// needed). Other bytes are fine; writing them anew may repair it.
    #[error("medium error: {bytes} bytes at {at}")]
    Medium { at: u64, bytes: u64 },
    /// The device is gone: pulled, failed, or powered off. Nothing on it can be reached.
    #[error("the device is gone")]
    Gone,
    /// A later owner has taken over; this one must stop.
    #[error("fenced: this owner holds {ours}, the device has seen {seen}")]
    Fenced { ours: Epoch, seen: Epoch },
    /// More members are lost than the level tolerates. The array stops until they are back.
    #[error("{lost} members lost, {tolerated} tolerated")]
    TooManyLost { lost: usize, tolerated: usize },
    /// The array takes whole fresh stripes only: its members have no room for a journal, without which a level with parity
    /// does not overwrite in place.
    #[error("stripe {stripe} was not declared fresh, and this array has no journal for overwrites")]
    NotFresh { stripe: u64 },
    /// The device does not offer this operation.
    #[error("{operation} is not supported here")]
    Unsupported { operation: &'static str },
    /// The operating system refused (an `errno` value).
    #[error("I/O error: {}", std::io::Error::from_raw_os_error(*.errno))]
    Io { errno: i32 },
}

impl From<std::io::Error> for BlockError {
    fn from(error: std::io::Error) -> Self {
        // Errors without a number come from std itself and mean a broken file.
        Self::Io { errno: error.raw_os_error().unwrap_or(libc::EIO) }
    }
}
