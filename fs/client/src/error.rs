//! Why the client could not do what it was asked.

use levada_wire::meta::MetaFault;
use levada_wire::object::ObjectFault;
use levada_wire::rpc::{Refusal, RpcError};

/// The variants differ by what the caller does next; [`Error::errno`] says what a program sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The metadata service said no.
    #[error(transparent)]
    Meta(#[from] MetaFault),
    /// An object target has no room.
    #[error("no space left on an object target")]
    Full,
    /// These bytes of the file are lost; others can be read.
    #[error("{bytes} bytes at {offset} are damaged")]
    Damaged { offset: u64, bytes: u64 },
    /// An object that must exist does not.
    #[error("component {component} of the file is missing")]
    Missing { component: u32 },
    /// The metadata service waited for this client in vain, and went on without what was not synced.
    #[error("changes of names that were not synced are lost")]
    Lost,
    /// The lease ended while it was under way, and with it the memory of whether it was carried out.
    #[error("the lease ended meanwhile; whether it was carried out is not known")]
    InDoubt,
    /// A wait for a lock was ended before it was granted.
    #[error("interrupted")]
    Interrupted,
    /// A lock that was taken through this open file ended with the lease; others may have had it since.
    #[error("a lock of this open file was lost")]
    LockLost,
    /// The request makes no sense (an offset beyond what a file can hold, not a file).
    #[error("invalid argument")]
    Invalid,
    /// The deadline of the configuration passed; the request may still be carried out.
    #[error("the service did not answer in time")]
    Deadline,
    /// The service belongs to another cluster, or has another file system, or speaks another version.
    #[error("the service refused: {0}")]
    Refused(Refusal),
    /// The service answered with something that makes no sense here.
    #[error("the service speaks another dialect")]
    Dialect,
    /// The client is shutting down.
    #[error("the client is closed")]
    Closed,
}

impl levada_base::HasErrno for Error {
    fn errno(&self) -> i32 {
        (*self).errno()
    }
}

impl Error {
    /// The error number that a program sees.
    #[must_use]
    pub fn errno(self) -> i32 {
        match self {
            Self::Meta(fault) => match fault {
                MetaFault::NotFound => libc::ENOENT,
                MetaFault::Exists => libc::EEXIST,
                MetaFault::NotDirectory => libc::ENOTDIR,
                MetaFault::IsDirectory => libc::EISDIR,
                MetaFault::NotEmpty => libc::ENOTEMPTY,
                MetaFault::NameTooLong => libc::ENAMETOOLONG,
                MetaFault::TooManyLinks => libc::EMLINK,
                MetaFault::NotPermitted => libc::EPERM,
                MetaFault::Invalid => libc::EINVAL,
                MetaFault::Full => libc::ENOSPC,
                MetaFault::Stale => libc::ESTALE,
                MetaFault::NoAttribute => libc::ENODATA,
                MetaFault::TooLarge => libc::E2BIG,
                MetaFault::NotSupported => libc::EOPNOTSUPP,
                MetaFault::LockHeld => libc::EAGAIN,
                MetaFault::Deadlock => libc::EDEADLK,
                MetaFault::TooManyLocks => libc::ENOLCK,
                MetaFault::NotOpen => libc::EBADF,
                MetaFault::Quota => libc::EDQUOT,
                MetaFault::OtherProject => libc::EXDEV,
                // The client repeats the last two itself; here they mean that it gave up.
                MetaFault::Damaged | MetaFault::NotRegistered | MetaFault::Unavailable => libc::EIO,
            },
            Self::Full => libc::ENOSPC,
            Self::Damaged { .. }
            | Self::Missing { .. }
            | Self::Lost
            | Self::InDoubt
            | Self::LockLost
            | Self::Dialect
            | Self::Refused(Refusal::Version { .. }) => libc::EIO,
            // Whatever a program holds here is of another file system.
            Self::Refused(Refusal::Cluster) => libc::ESTALE,
            Self::Interrupted => libc::EINTR,
            Self::Invalid => libc::EINVAL,
            Self::Deadline => libc::ETIMEDOUT,
            Self::Closed => libc::ENOTCONN,
        }
    }
}

impl From<RpcError> for Error {
    fn from(error: RpcError) -> Self {
        match error {
            RpcError::Deadline => Self::Deadline,
            RpcError::Refused(refusal) => Self::Refused(refusal),
            RpcError::TooLong(_) => Self::Invalid,
            RpcError::Malformed => Self::Dialect,
            // A peer repeats over disconnects; it ends only with the client.
            RpcError::Disconnected => Self::Closed,
        }
    }
}

impl From<ObjectFault> for Error {
    fn from(fault: ObjectFault) -> Self {
        match fault {
            ObjectFault::Full => Self::Full,
            ObjectFault::Damaged { offset, bytes } => Self::Damaged { offset, bytes },
            ObjectFault::Invalid => Self::Invalid,
            // Handled where they arise: a hole or a missing component, and a repetition.
            ObjectFault::NoSuchObject | ObjectFault::Unavailable => Self::Dialect,
        }
    }
}
