//! What a metadata target is told when it is made and when it starts.

use levada_base::ids::TargetId;
use levada_wire::rpc::ConnectionId;
use std::time::Duration;

/// Fixed when the file system is made, and kept in its superblock.
#[derive(Clone, Debug)]
pub struct FsConfig {
    pub uuid: [u8; 16],
    pub name: String,
    /// Number of this metadata target within the file system; 0 holds the root.
    pub target: u16,
    /// Objects per file, at most 64; fewer when there are fewer object targets.
    pub stripe_count: u32,
    /// Contiguous bytes per object; a multiple of 4 KiB.
    pub stripe_unit: u64,
    /// Inodes that the store has room for. Refusing the next one is what keeps room for
    /// deleting.
    pub inodes_max: u64,
    /// Permission bits and owner of the root directory.
    pub root_mode: u32,
    pub root_uid: u32,
    pub root_gid: u32,
}

/// Told anew at every start.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// Object targets and where they are served. New files use them in turn.
    pub objects: Vec<(TargetId, String)>,
    /// A client that is silent for this long loses its opens and sessions.
    pub lease: Duration,
    /// Changes that one client may have in flight.
    pub slots: u32,
    /// How long a restarted target waits for the client that was told what was not durable.
    pub recovery: Duration,
    /// Bytes of rows kept in memory.
    pub cache_bytes: usize,
}

impl Default for ServeConfig {
    fn default() -> Self {
        Self {
            objects: Vec::new(),
            lease: Duration::from_secs(60),
            slots: 64,
            recovery: Duration::from_secs(30),
            cache_bytes: 64 << 20,
        }
    }
}

/// Names a change, so that a repeat is not done twice. From the frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallHeader {
    /// The client's number; 0 is the housekeeper beside the services.
    pub client: u64,
    /// [`CallHeader::NO_SLOT`] for requests that change nothing, or that may be repeated.
    pub slot: u32,
    /// Counts up within the slot, from 1.
    pub sequence: u64,
    /// It may be answered before what it changes or sees is durable; the caller holds what
    /// the frames before the answers bring.
    pub unstable: bool,
    /// Over which it came.
    pub connection: ConnectionId,
}

impl CallHeader {
    /// The slot of requests without one.
    pub const NO_SLOT: u32 = u32::MAX;

    /// The header of a request that needs no slot.
    #[must_use]
    pub fn reading(client: u64) -> Self {
        Self::changing(client, Self::NO_SLOT, 0)
    }

    /// The header of a change that is answered when it is durable.
    #[must_use]
    pub fn changing(client: u64, slot: u32, sequence: u64) -> Self {
        let connection = ConnectionId::default();
        Self { client, slot, sequence, unstable: false, connection }
    }
}

/// Why a metadata target could not be made or started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MetaError {
    #[error(transparent)]
    Store(#[from] levada_kv::KvError),
    /// A stripe count or unit, or a list of object targets, that no file can have.
    #[error("the file system cannot have {what}")]
    Config { what: &'static str },
    /// The store holds no metadata target.
    #[error("the store holds no file system")]
    Empty,
    #[error(transparent)]
    Damaged(#[from] crate::row::Damaged),
}
