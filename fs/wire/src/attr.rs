//! What is known of a file: shared by the wire, the metadata service and the client.

use levada_base::ids::{Ino, ObjectId, TargetId};
use serde::{Deserialize, Serialize};

/// What an inode is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    File,
    Directory,
    Symlink,
    /// Sockets, pipes and device nodes: `mode` says which.
    Special,
}

/// Nanoseconds since 1970-01-01 UTC; may be negative.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Time(pub i64);

/// How a file's bytes are dealt to objects (sparse: object offset = file offset).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Changes when the file gets new objects.
    pub version: u32,
    /// Contiguous bytes in one object before the next takes over; a multiple of 4 KiB.
    pub stripe_unit: u64,
    /// Component `i` lives on `targets[i]`; the length is the stripe count.
    pub targets: Vec<TargetId>,
}

impl Layout {
    /// The version of a file that never got new objects.
    pub const FIRST: u32 = 1;
    /// Nobody knows any more how the file lay: each component may be on any target, under [`Self::FIRST`].
    pub const UNKNOWN: u32 = 0;

    /// The component that holds byte `offset` of the file, and how many bytes from there on
    /// it holds without a break.
    #[must_use]
    pub fn locate(&self, offset: u64) -> (u32, u64) {
        let unit = offset / self.stripe_unit;
        let component = (unit % self.targets.len() as u64) as u32;
        (component, self.stripe_unit - offset % self.stripe_unit)
    }

    /// The object of a component.
    #[must_use]
    pub fn object(&self, fs: u64, ino: Ino, component: u32) -> ObjectId {
        ObjectId { fs, ino, component, version: self.version }
    }
}

/// The attributes of an inode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attr {
    pub ino: Ino,
    pub generation: u64,
    pub kind: Kind,
    /// File type and permission bits as in `st_mode`.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub nlink: u32,
    /// Bytes. Exact unless `writers` is set; then objects may hold more (the file's size is
    /// the larger of this and the size of each of its objects).
    pub size: u64,
    /// A write session is open somewhere and no truncation is pending. In the answer to a
    /// truncation: other clients have sessions, so every object must be cut.
    pub writers: bool,
    /// `writers` speaks of another client's session, or another client has cut the file since the
    /// asking client's began: what that one wrote does not tell the size. While `cut` is set: the truncation is
    /// another client's.
    pub others: bool,
    /// A truncation is pending: `size` alone counts, whatever the objects hold. In the answer to a truncation: the
    /// objects are to be cut, and then the service to be told `Truncated`. In the answer to a `CommitWrite`: the
    /// size was not taken, as it may be from before a truncation; the objects are to be asked again.
    pub cut: bool,
    pub rdev: u32,
    pub atime: Time,
    pub mtime: Time,
    pub ctime: Time,
    pub btime: Time,
    /// Counts changes. Goes back only with changes that nobody had synced and that were lost together with the client
    /// that was told of them (docs/design/0010-metadata-tail.md).
    pub change: u64,
    /// The directory that holds it (directories), else the one it was made in.
    pub parent: Ino,
    pub project: u32,
    pub tenant: u32,
    /// It has extended attributes, access control lists included.
    pub extended: bool,
    /// Files only.
    pub layout: Option<Layout>,
    /// Bit `i`: component `i` was written and committed, so its object must exist.
    pub components: u64,
}
