//! The cluster file as plain values: what other crates read.
//!
//! Names have been resolved: patterns are expanded, defaults filled in, and every name that
//! one value mentions is the name of another. Paths stay as written; [`Loaded::path`] makes
//! them absolute.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::remote::{EnclosureUrl, is_url, namespace_of};
use crate::survive::Required;
use crate::{Bytes, Problem, SubtreePath};

/// Bytes at the two ends of every drive that no slice may use: 1 MiB each for label, slice
/// table and growth. The drive label's own layout (docs/design) must fit in it.
pub const DRIVE_RESERVED_BYTES: u64 = 2 * Bytes::MIB;

/// Slices start and end on this boundary.
pub const SLICE_ALIGN_BYTES: u64 = Bytes::MIB;

/// The most chunks of a stripe with parity, data and parity together.
pub const STRIPE_CHUNKS_MAX: u32 = 32;

/// The most drives of an array, spares included: a superblock names no more.
pub const ARRAY_DRIVES_MAX: usize = 55;

/// The most cores that carry connections of one process.
pub const NETWORK_CORES_MAX: usize = 64;
/// The most cores that serve the rings of guests of one process.
pub const RING_CORES_MAX: usize = 64;

/// A whole cluster file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterFile {
    /// The cluster's name; it is part of every drive's label.
    pub name: String,
    /// Where a node keeps sockets, its process id and its log; relative to the cluster file.
    pub state_dir: PathBuf,
    /// What takes the power of every other server that reaches the drives, by `/bin/sh`; `None`: drives keep servers apart themselves.
    pub power_fence: Option<String>,
    /// Cores beside the node's own that carry the connections of exports, clients and remote drives.
    pub network_cores: usize,
    /// Cores beside the node's own that serve the rings of guests.
    pub ring_cores: usize,
    /// The machines; empty means "the machine that reads this file".
    pub hosts: Vec<HostSpec>,
    /// Groups of drives that fail together, in file order.
    pub enclosures: Vec<EnclosureSpec>,
    /// All drives, by enclosure, in file order.
    pub drives: Vec<DriveSpec>,
    /// Names of drives that belong to no array, and take the place of a lost one in any.
    pub spares: Vec<String>,
    /// How fast lost members are rebuilt, and how soon.
    pub rebuild: RebuildSpec,
    /// How fast arrays and objects are scrubbed.
    pub scrub: ScrubSpec,
    pub health: HealthSpec,
    /// All arrays, in file order. Slices lie on a drive in this order.
    pub arrays: Vec<ArraySpec>,
    /// The file systems; exactly one in this release.
    pub filesystems: Vec<FileSystemSpec>,
    /// Where file systems are mounted by `levada up`.
    pub mounts: Vec<MountSpec>,
    /// Where volumes are shown to clients.
    pub exports: Vec<ExportSpec>,
    /// Present when the file asks for test wrappers around its drives.
    pub testing: Option<TestingSpec>,
}

/// How the members of an array are rebuilt beside other I/O; rates are bytes per second, moved on all of them together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RebuildSpec {
    /// At least this, whatever else there is to do.
    pub floor: Bytes,
    /// At most this; `None`: as fast as the drives are.
    pub ceiling: Option<Bytes>,
    /// Seconds that a drive which vanished is waited for before a spare takes its place.
    pub grace_s: u32,
}

impl Default for RebuildSpec {
    /// So much that a drive of 1 TB of an 8 + 2 comes back within a day under any load.
    fn default() -> Self {
        Self { floor: Bytes(200_000_000), ceiling: None, grace_s: 60 }
    }
}

/// When drives count as not well, beside what they say of themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthSpec {
    /// Used so much of its endurance, a drive is worn.
    pub used_percent: u8,
}

impl Default for HealthSpec {
    /// Time is left to get another.
    fn default() -> Self {
        Self { used_percent: 90 }
    }
}

/// How what is stored is scrubbed beside other I/O; rates are bytes per second, read on all members of an array together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrubSpec {
    /// At least this, whatever else there is to do.
    pub floor: Bytes,
    /// At most this; `None`: as fast as the drives are.
    pub ceiling: Option<Bytes>,
}

impl Default for ScrubSpec {
    /// So much that ten drives of 4 TB are through within a week under any load.
    fn default() -> Self {
        Self { floor: Bytes(75_000_000), ceiling: None }
    }
}

/// A machine that holds enclosures or mounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostSpec {
    /// Unique among hosts.
    pub name: String,
    /// `host:port` addresses at which its services listen, one per network path.
    pub addresses: Vec<String>,
}

/// Drives that share power, cabling or a box, and may therefore be lost together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnclosureSpec {
    /// Unique among enclosures.
    pub name: String,
    /// The host it hangs on; `None` when the file names no hosts, or it is on the network.
    pub host: Option<String>,
    /// Where it is on the network; `None`: its drives are on its host.
    pub url: Option<EnclosureUrl>,
}

/// One drive: a block device, a preallocated file, or a namespace of an enclosure on the network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriveSpec {
    /// Unique in the cluster; what `levada drive fail NAME` takes.
    pub name: String,
    /// As written; relative paths start at the cluster file. Of a namespace its URL.
    pub path: PathBuf,
    /// The enclosure it sits in.
    pub enclosure: String,
    /// The size of a file-backed drive; `None` for others, which know their own.
    pub size: Option<Bytes>,
}

/// How an array protects data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Striping only: the loss of any member loses data.
    Raid0 {
        /// Contiguous bytes on one member before the next takes over.
        chunk: Bytes,
    },
    /// Every extent is kept `copies` times; extents are dealt over all drives.
    Raid1 {
        /// How many copies of each extent.
        copies: u32,
        /// What no two copies of an extent may share.
        spread: Spread,
    },
    /// Parity: of each group, any so many members may be lost as a stripe has parity chunks.
    Parity {
        /// Which of them.
        kind: ParityKind,
        /// Data chunks per stripe; the parity chunks join them.
        data: u32,
        /// Contiguous bytes on one member before the next takes over.
        chunk: Bytes,
    },
}

/// The levels with parity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParityKind {
    /// One parity.
    Raid5,
    /// Two parities.
    Raid6,
    /// Stripes dealt to equal groups of one parity each.
    Raid50 {
        /// How many.
        groups: u32,
    },
    /// Stripes dealt to equal groups of two parities each.
    Raid60 {
        /// How many.
        groups: u32,
    },
    /// Any number of parities.
    NPlusM {
        /// How many.
        parity: u32,
    },
}

impl ParityKind {
    /// Parity chunks per stripe.
    #[must_use]
    pub fn parity(self) -> u32 {
        match self {
            ParityKind::Raid5 | ParityKind::Raid50 { .. } => 1,
            ParityKind::Raid6 | ParityKind::Raid60 { .. } => 2,
            ParityKind::NPlusM { parity } => parity,
        }
    }

    /// Groups of members to which stripes are dealt.
    #[must_use]
    pub fn groups(self) -> u32 {
        match self {
            ParityKind::Raid5 | ParityKind::Raid6 | ParityKind::NPlusM { .. } => 1,
            ParityKind::Raid50 { groups } | ParityKind::Raid60 { groups } => groups,
        }
    }
}

/// What the copies of a mirrored extent must not share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Spread {
    /// Copies lie in different enclosures, and so on different drives.
    #[default]
    Enclosure,
    /// Copies lie on different drives, perhaps in one enclosure.
    Drive,
}

/// How much of each drive an array takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SliceSize {
    /// So many bytes of every drive.
    Bytes(Bytes),
    /// So many percent (1 to 99) of every drive, rounded down to [`SLICE_ALIGN_BYTES`].
    Percent(u8),
    /// All that the other arrays leave. At most one array on a drive may say this.
    Rest,
}

/// An array: one slice of each of its drives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArraySpec {
    /// Unique among arrays.
    pub name: String,
    /// Level with the numbers that belong to it.
    pub level: Level,
    /// How much of each drive it takes.
    pub slice: SliceSize,
    /// Drives held ready to replace a lost member.
    pub spares: u32,
    /// Names of its drives, spares included, in cluster order.
    pub drives: Vec<String>,
    /// What it must survive at least.
    pub required: Required,
}

/// A file system over two arrays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSystemSpec {
    /// Unique among file systems.
    pub name: String,
    /// The array that holds file data.
    pub data: String,
    /// The mirror that holds names, indexes and intent logs.
    pub metadata: String,
    /// Object targets; all on the node's one reactor.
    pub object_targets: u32,
    /// Metadata targets; 1 in this release.
    pub metadata_targets: u32,
    /// Contiguous bytes of a file in one object; the default for new files.
    pub stripe_unit: Bytes,
    /// Objects a file is spread over; the default for new files.
    pub stripe_count: u32,
    /// What it must survive at least.
    pub required: Required,
}

/// A mount that `levada up` makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountSpec {
    /// As written; relative paths start at the cluster file.
    pub path: PathBuf,
    /// Which file system.
    pub filesystem: String,
    /// On which host; `None` when the file names no hosts.
    pub host: Option<String>,
}

/// A place where what belongs to one tenant, and no other, is shown: its volumes, or a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportSpec {
    /// Whose.
    pub tenant: String,
    /// How.
    pub way: ExportWay,
}

/// How it is shown. Paths start at the cluster file when they are relative.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExportWay {
    Nbd {
        /// Where a server listens: `host:port`, or `unix:` and a path.
        address: String,
        /// A directory with `ca-cert.pem`, `server-cert.pem` and `server-key.pem`: clients must use TLS.
        tls: Option<PathBuf>,
        /// Clients must show a certificate of that authority.
        verify_clients: bool,
    },
    /// A directory with a socket for each volume, for virtual machines.
    Vhost { directory: PathBuf },
    /// A subsystem for each volume, over NVMe/TCP.
    Nvme {
        /// Where a target listens: `host:port`, one for each path.
        addresses: Vec<String>,
        /// Names of hosts that may connect; empty: all, unless there are secrets.
        hosts: Vec<String>,
        /// A file with secrets of hosts, which may connect as well and have to prove who they are, and with their keys of TLS.
        keys: Option<PathBuf>,
        /// No connections in the clear.
        tls_only: bool,
    },
    /// A socket at which one virtual machine at a time mounts a directory.
    Virtiofs {
        /// Where machine monitors connect.
        socket: PathBuf,
        /// All that it sees of the file system.
        subtree: SubtreePath,
        /// What a guest mounts it by; `None`: the cluster's name.
        tag: Option<String>,
        /// What a guest may keep of the contents of files.
        cache: GuestCacheSpec,
    },
}

/// Bytes of what a guest mounts by (virtio 1.2, 5.11.4).
pub const TAG_BYTES_MOST: usize = 36;

/// What a guest may keep of the contents of files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GuestCacheSpec {
    /// Nothing: what others write shows at once.
    #[default]
    None,
    /// While a file is open.
    Open,
}

impl GuestCacheSpec {
    /// As they are written.
    pub const WORDS: [&str; 2] = ["none", "open"];
}

impl fmt::Display for GuestCacheSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::WORDS[*self as usize])
    }
}

impl FromStr for GuestCacheSpec {
    type Err = UnknownWord;

    fn from_str(text: &str) -> Result<Self, UnknownWord> {
        let all = [Self::None, Self::Open];
        all.into_iter().find(|cache| cache.to_string() == text).ok_or(UnknownWord)
    }
}

/// It is none of those that are allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is none of the words that are allowed here")]
pub struct UnknownWord;

impl ExportWay {
    /// The key that names the place, and the place.
    #[must_use]
    pub fn place(&self) -> (&'static str, String) {
        match self {
            Self::Nbd { address, .. } => ("nbd", address.clone()),
            Self::Vhost { directory } => ("vhost", directory.display().to_string()),
            Self::Nvme { addresses, .. } => ("nvme", addresses.join(", ")),
            Self::Virtiofs { socket, .. } => ("virtiofs", socket.display().to_string()),
        }
    }

    /// The places, none of which another export may have.
    #[must_use]
    pub fn places(&self) -> Vec<String> {
        match self {
            Self::Nbd { .. } | Self::Vhost { .. } | Self::Virtiofs { .. } => vec![self.place().1],
            Self::Nvme { addresses, .. } => addresses.clone(),
        }
    }
}

/// Wrappers around every drive, for tests and measurements only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestingSpec {
    /// What is put around each drive's writes.
    pub wrapper: Wrapper,
    /// Seed of the wrapper's random choices.
    pub seed: u64,
    /// Drives as fast as this, however fast they are; `None` leaves them alone.
    pub model: Option<ModelSpec>,
}

/// What is put around each drive in tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wrapper {
    /// Nothing.
    #[default]
    None,
    /// Unflushed writes stay in the daemon's memory, so that killing it is a power cut.
    Volatile,
}

/// How fast a modelled drive is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSpec {
    /// Its name; `nvme` and `slow` are built in.
    pub name: String,
    /// Bytes per second, reads and writes together.
    pub rate: Bytes,
    /// Operations per second.
    pub iops: u64,
    /// Time of one operation, microseconds.
    pub latency_us: u64,
    /// Time of one flush, microseconds.
    pub flush_us: u64,
}

/// A cluster file with the place it was read from.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// What it says.
    pub cluster: ClusterFile,
    /// The directory that relative paths in it start from; absolute.
    pub directory: PathBuf,
    /// What is allowed but probably not meant.
    pub warnings: crate::Report,
}

impl Loaded {
    /// The absolute form of a path written in the file; a URL stays as it is.
    #[must_use]
    pub fn path(&self, written: &Path) -> PathBuf {
        if written.to_str().is_some_and(is_url) {
            return written.to_owned();
        }
        self.directory.join(written)
    }

    /// Each warning.
    #[must_use]
    pub fn warnings(&self) -> &[Problem] {
        &self.warnings.problems
    }
}

impl ModelSpec {
    /// The models known by name: `nvme` and `slow`.
    ///
    /// `nvme`: 400 MB/s, 20 K operations/s, 80 us. `slow`: 150 MB/s, 10 K, 80 us. Flush is free
    /// in both; a model of one's own can make it cost.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let (rate, iops) = match name {
            "nvme" => (Bytes(400_000_000), 20_000),
            "slow" => (Bytes(150_000_000), 10_000),
            _ => return None,
        };
        Some(ModelSpec { name: name.into(), rate, iops, latency_us: 80, flush_us: 0 })
    }
}

impl DriveSpec {
    /// Whether the drive is a block device of this machine (it has no size of its own in the file).
    #[must_use]
    pub fn is_block_device(&self) -> bool {
        self.size.is_none() && !self.is_remote()
    }

    /// Whether it is a namespace that is reached over the network; its path is a URL then.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        self.path.to_str().is_some_and(is_url)
    }

    /// The number of the namespace, of a drive that is one.
    #[must_use]
    pub fn namespace(&self) -> Option<u32> {
        self.path.to_str().and_then(namespace_of)
    }
}

impl Level {
    /// As written in the file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Level::Raid0 { .. } => "raid0",
            Level::Raid1 { .. } => "raid1",
            Level::Parity { kind, .. } => match kind {
                ParityKind::Raid5 => "raid5",
                ParityKind::Raid6 => "raid6",
                ParityKind::Raid50 { .. } => "raid50",
                ParityKind::Raid60 { .. } => "raid60",
                ParityKind::NPlusM { .. } => "n+m",
            },
        }
    }

    /// Groups of members that bear their losses each for itself.
    #[must_use]
    pub fn groups(self) -> u32 {
        match self {
            Level::Raid0 { .. } | Level::Raid1 { .. } => 1,
            Level::Parity { kind, .. } => kind.groups(),
        }
    }

    /// Drives that play a role; `None` where all but the spares do.
    #[must_use]
    pub fn roles(self) -> Option<usize> {
        match self {
            Level::Raid0 { .. } | Level::Raid1 { .. } => None,
            Level::Parity { kind, data, .. } => {
                Some(kind.groups() as usize * (data as usize + kind.parity() as usize))
            }
        }
    }

    /// Lost drives that it bears, whichever they are.
    #[must_use]
    pub fn drives_borne(self) -> u32 {
        match self {
            Level::Raid0 { .. } => 0,
            Level::Raid1 { copies, .. } => copies.saturating_sub(1),
            Level::Parity { kind, .. } => kind.parity(),
        }
    }

    /// Chunk size of a striped level.
    #[must_use]
    pub fn chunk(self) -> Option<Bytes> {
        match self {
            Level::Raid0 { chunk } | Level::Parity { chunk, .. } => Some(chunk),
            Level::Raid1 { .. } => None,
        }
    }
}

impl ClusterFile {
    /// The drive of that name.
    #[must_use]
    pub fn drive(&self, name: &str) -> Option<&DriveSpec> {
        self.drives.iter().find(|drive| drive.name == name)
    }

    /// The array of that name.
    #[must_use]
    pub fn array(&self, name: &str) -> Option<&ArraySpec> {
        self.arrays.iter().find(|array| array.name == name)
    }

    /// The enclosure of that name.
    #[must_use]
    pub fn enclosure(&self, name: &str) -> Option<&EnclosureSpec> {
        self.enclosures.iter().find(|enclosure| enclosure.name == name)
    }

    /// The file system of that name.
    #[must_use]
    pub fn filesystem(&self, name: &str) -> Option<&FileSystemSpec> {
        self.filesystems.iter().find(|filesystem| filesystem.name == name)
    }

    /// The slice that `array` takes of a drive of `drive_bytes`, in bytes, or `None` when
    /// what it asks for does not fit beside the other arrays of that drive.
    ///
    /// The sum over all arrays never exceeds `drive_bytes` less [`DRIVE_RESERVED_BYTES`].
    #[must_use]
    pub fn slice_bytes(&self, array: &ArraySpec, drive: &str, drive_bytes: Bytes) -> Option<Bytes> {
        let usable =
            Bytes(drive_bytes.0.checked_sub(DRIVE_RESERVED_BYTES)?).floor_to(SLICE_ALIGN_BYTES);
        let fixed = |slice: SliceSize| match slice {
            SliceSize::Bytes(bytes) => Some(bytes.floor_to(SLICE_ALIGN_BYTES).0),
            // In 128 bits, because a drive's size times 100 may not fit in 64.
            SliceSize::Percent(percent) => {
                let share = u128::from(drive_bytes.0) * u128::from(percent) / 100;
                Some(Bytes(share as u64).floor_to(SLICE_ALIGN_BYTES).0)
            }
            SliceSize::Rest => None,
        };
        let mut taken = 0u64;
        for other in
            self.arrays.iter().filter(|other| other.drives.iter().any(|name| name == drive))
        {
            taken = taken.checked_add(fixed(other.slice).unwrap_or(0))?;
        }
        let rest = usable.0.checked_sub(taken)?;
        let bytes = fixed(array.slice).unwrap_or(rest);
        (bytes > 0).then_some(Bytes(bytes))
    }
}
