//! Identities that several floors share.

use serde::{Deserialize, Serialize};
use std::fmt;

pub use uuid::Uuid;

/// A term of ownership. Every durable record carries the epoch of the owner that wrote it;
/// a record or request of an older epoch than the one seen last is refused. Epochs only grow.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Epoch(pub u64);

impl Epoch {
    /// The epoch that the next owner takes.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "e{}", self.0)
    }
}

/// An inode number: 64 bits, never reused. The root directory is 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Ino(pub u64);

impl Ino {
    /// The root directory of a file system.
    pub const ROOT: Self = Self(1);
}

/// The name of an object: one component of one file's layout.
///
/// Byte `x` of the file is byte `x` of the object that holds it; where other components hold
/// the data, an object has holes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ObjectId {
    /// The first 8 bytes of the file system's UUID.
    pub fs: u64,
    pub ino: Ino,
    /// Place in the layout, from 0.
    pub component: u32,
    /// Version of the layout; a file that is re-striped gets new objects.
    pub version: u32,
}

impl ObjectId {
    /// Bytes of the key form.
    pub const KEY_BYTES: usize = 24;

    /// Big-endian, so that keys sort by file system, inode, component, version.
    #[must_use]
    pub fn to_key(self) -> [u8; Self::KEY_BYTES] {
        let mut key = [0; Self::KEY_BYTES];
        key[..8].copy_from_slice(&self.fs.to_be_bytes());
        key[8..16].copy_from_slice(&self.ino.0.to_be_bytes());
        key[16..20].copy_from_slice(&self.component.to_be_bytes());
        key[20..].copy_from_slice(&self.version.to_be_bytes());
        key
    }

    /// The inverse of [`ObjectId::to_key`].
    #[must_use]
    pub fn from_key(key: [u8; Self::KEY_BYTES]) -> Self {
        let u64_at = |at: usize| u64::from_be_bytes(key[at..at + 8].try_into().expect("8 bytes"));
        let u32_at = |at: usize| u32::from_be_bytes(key[at..at + 4].try_into().expect("4 bytes"));
        Self { fs: u64_at(0), ino: Ino(u64_at(8)), component: u32_at(16), version: u32_at(20) }
    }
}

/// A place that serves objects or metadata, by number in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TargetId(pub u32);

/// Changes whenever a target may have lost unstable data: drawn anew at every start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BootVerifier(pub u64);

/// The order in which a target made changes. A target's sequence numbers only grow, also over
/// restarts; everything up to its durable sequence survives any crash.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Seq(pub u64);
