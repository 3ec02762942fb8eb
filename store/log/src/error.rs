//! Why an object target could not do what it was asked.

use levada_base::Epoch;
use levada_device::BlockError;
use levada_kv::KvError;

/// The variants differ by what the caller does next.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LogError {
    /// There is no such object; its inode decides whether that is a hole or an error.
    #[error("no such object")]
    NoSuchObject,
    /// No space that the cleaner could find; deleting still works.
    #[error("the object log is full")]
    Full,
    /// These bytes of the object are lost beyond what parity repairs; others are fine.
    #[error("{bytes} bytes at {offset} are damaged")]
    Damaged { offset: u64, bytes: u64 },
    /// The request makes no sense: it ends past the largest offset.
    #[error("{bytes} bytes at {offset} are not a range of an object")]
    OutOfRange { offset: u64, bytes: u64 },
    /// The array or the configuration cannot hold a log.
    #[error("{what}: {value}, where {bound} is the limit")]
    Geometry { what: &'static str, value: u64, bound: u64 },
    /// The key-value store holds no log, or another one.
    #[error("this is not the index of this log: {what}")]
    Foreign { what: &'static str },
    /// A later owner was here; this one must stop.
    #[error("this owner holds {ours}, the log has seen {seen}")]
    Stale { ours: Epoch, seen: Epoch },
    /// A row of the index cannot be read: rebuild the index from the segments. A row of an object
    /// concerns that object only; the log goes on with the others.
    #[error("the index is damaged: row {row}")]
    Index { row: &'static str },
    /// The array failed. After a failed write or flush the log stops and must be reopened.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// The index's store failed; the log stops and must be reopened.
    #[error(transparent)]
    Kv(#[from] KvError),
}
