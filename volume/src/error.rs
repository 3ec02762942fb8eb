//! Why a volume could not do what it was asked.

use levada_base::HasErrno;
use levada_device::BlockError;

/// The variants differ by what a client is told.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VolumeError {
    /// The request lies outside the volume, by itself or since it shrank.
    #[error("{bytes} bytes at {at} are outside a volume of {size_bytes} bytes")]
    OutOfRange { at: u64, bytes: u64, size_bytes: u64 },
    /// A thin volume found no room on what it lies on; what it held is unchanged.
    #[error("no room is left for the volume")]
    NoSpace,
    /// A snapshot, or a volume shown read-only.
    #[error("the volume is read-only")]
    ReadOnly,
    /// It is there no more, though a client still holds on to it.
    #[error("the volume was deleted")]
    Deleted,
    /// What it lies on failed.
    #[error(transparent)]
    Block(#[from] BlockError),
}

impl HasErrno for VolumeError {
    fn errno(&self) -> i32 {
        match self {
            Self::OutOfRange { .. } => libc::EINVAL,
            Self::NoSpace => libc::ENOSPC,
            Self::ReadOnly => libc::EROFS,
            Self::Deleted => libc::ESHUTDOWN,
            Self::Block(error) => errno_of(error),
        }
    }
}

/// An array that cannot go on is a broken disk to a client.
fn errno_of(error: &BlockError) -> i32 {
    match error {
        BlockError::Medium { .. }
        | BlockError::Gone
        | BlockError::Fenced { .. }
        | BlockError::TooManyLost { .. } => libc::EIO,
        BlockError::OutOfRange { .. } | BlockError::Misaligned { .. } => libc::EINVAL,
        BlockError::NotFresh { .. } | BlockError::Unsupported { .. } => libc::EOPNOTSUPP,
        BlockError::Io { errno } => *errno,
    }
}
