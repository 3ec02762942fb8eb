//! Why something cannot be done with an array, in terms of what a person does next.

use crate::level::LevelError;
use levada_base::ids::Uuid;
use levada_base::units::BLOCK_BYTES;
use levada_desk::{AskError, PowerFenceError};
use levada_device::nvme::{KeysError, NamespaceError, UrlError};
use levada_device::{BlockError, FileDeviceError};
use levada_export_file::ExportError;
use levada_export_nbd::{ListenError, TlsError};
use levada_raid::RaidError;
use levada_spec::Bytes;
use levada_volume::{OrderError, PoolError, VolumeName};
use std::path::PathBuf;

/// See the module.
#[derive(Debug, thiserror::Error)]
pub enum ArrayError {
    /// A drive cannot be opened: not there, in use, no store at all.
    #[error(transparent)]
    Drive(#[from] FileDeviceError),
    /// A remote drive cannot be reached.
    #[error(transparent)]
    Remote(#[from] NamespaceError),
    #[error(transparent)]
    Keys(#[from] KeysError),
    #[error("{url}: {source}")]
    Url { url: String, source: UrlError },
    /// Nothing would keep another process from writing there as well.
    #[error(
        "{url}: the target has no reservations, by which the servers of an array are kept apart; where a command can take the power of every other server, give that: --power-fence COMMAND"
    )]
    Unguarded { url: String },
    #[error(transparent)]
    PowerFence(#[from] PowerFenceError),
    #[error("{}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} and {} are the same drive", first.display(), second.display())]
    Twice { first: PathBuf, second: PathBuf },
    #[error("{} is no member of an array; it holds {holds}", path.display())]
    NoMember { path: PathBuf, holds: String },
    #[error("these drives belong to several arrays: {}", join(drives, |(path, array, uuid)| format!("{} to {array} ({uuid})", path.display())))]
    SeveralArrays { drives: Vec<(PathBuf, String, Uuid)> },
    #[error(
        "{} and {} both claim to be {member}: one is a copy of the other; leave out the older one",
        first.display(), second.display()
    )]
    Claimed { first: PathBuf, second: PathBuf, member: String },
    #[error(
        "{} has {bytes} bytes, and its superblock says that it had at least {needed_bytes}: it was cut short; leave it out \
         with --degraded, or restore it",
        path.display()
    )]
    CutShort { path: PathBuf, bytes: u64, needed_bytes: u64 },
    #[error("{} was written over by another array: it has superblocks of {first} and of {second}; leave it out", path.display())]
    TwoArrays { path: PathBuf, first: String, second: String },
    #[error(
        "{}: an older copy, put back; go on without it by --degraded, and give it back by `levada array replace`",
        join(drives, |(path, member, generation)| format!(
            "{} is {member} as it was at generation {generation}, and the array is at {newest}", path.display()
        ))
    )]
    Older { drives: Vec<(PathBuf, String, u64)>, newest: u64 },
    /// Another server was there between two looks.
    #[error(
        "another server has changed {array} meanwhile, or still does; nothing was changed here"
    )]
    Changed { array: String },
    /// Nothing would stop the array from opening, but it would go on without these.
    #[error(
        "{array} has live members that are not among the drives given: {}; name their drives too, or go on without \
         them by --degraded",
        names.join(", ")
    )]
    Missing { array: String, names: Vec<String> },
    /// What would be overwritten.
    #[error("{}; nothing was changed: {option} overwrites it", join(drives, |(path, holds)| format!("{} holds {holds}", path.display())))]
    Holds { drives: Vec<(PathBuf, String)>, option: &'static str },
    #[error("{} does not exist; --size SIZE makes it", path.display())]
    NotThere { path: PathBuf },
    #[error(
        "the journal of such an array needs {needed_bytes} bytes or more on each drive, --journal says {bytes}"
    )]
    JournalTooSmall { bytes: u64, needed_bytes: u64 },
    #[error("{bytes} bytes are no size for {what}: a multiple of {BLOCK_BYTES}, and not 0")]
    Unaligned { what: &'static str, bytes: u64 },
    #[error(transparent)]
    Level(#[from] LevelError),
    #[error(transparent)]
    Raid(#[from] RaidError),
    /// The array's members failed meanwhile.
    #[error("the array cannot go on: {0}")]
    Block(#[from] BlockError),
    #[error("{array} has no member {word:?}; its members are {members}")]
    NoSuchMember { array: String, word: String, members: String },
    #[error("several members of {array} are named {word:?}: say which by its number ({numbers})")]
    Ambiguous { array: String, word: String, numbers: String },
    #[error("{member} is out already; `levada array replace` puts a drive in its place")]
    OutAlready { member: String },
    #[error("{member} cannot be taken out: its data is nowhere else now")]
    LastCopy { member: String },
    #[error("{member} is not out: `levada array fail` first")]
    NotOut { member: String },
    #[error("{} is {member} of this array, and live", path.display())]
    InUseHere { path: PathBuf, member: String },
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error(
        "{array} is no pool of volumes: `levada volume pool` makes it one, if it holds nothing"
    )]
    NoPool { array: String },
    /// Whoever writes there does not know what is whose.
    #[error(
        "{array} is a pool of volumes, and who writes to all of it would overwrite them: show them with --nbd, --nvme or --vhost"
    )]
    PoolAsWhole { array: String },
    #[error("cannot make the directory {}", .at.display())]
    SocketDirectory { at: PathBuf, source: std::io::Error },
    #[error("{array} is shown as a whole, and somebody may use it: end that first")]
    ShownWhole { array: String },
    #[error(transparent)]
    Order(#[from] OrderError),
    #[error("volume {name} has {size} now: `grow` makes it larger, `shrink` smaller")]
    NotThatSize { name: VolumeName, size: Bytes },
    /// What a scrub met.
    #[error("the scrub stopped: {why}")]
    Scrub { why: String },
    /// What a rebuild met.
    #[error("the rebuild stopped: {why}")]
    Rebuild { why: String },
    #[error("{array} is open already, by process {pid}")]
    OpenAlready { array: String, pid: u32 },
    #[error("there is no path {path} over NVMe/TCP: there are {count}, numbered from 1 on")]
    NoPath { path: usize, count: usize },
    #[error("cannot listen at {}", socket.display())]
    Desk { socket: PathBuf, source: std::io::Error },
    #[error("cannot {what}")]
    System { what: &'static str, source: std::io::Error },
    #[error(transparent)]
    Export(#[from] ExportError),
    #[error(transparent)]
    Nbd(#[from] ListenError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(transparent)]
    Nvme(#[from] levada_export_nvmet::ListenError),
    #[error(transparent)]
    Nqn(#[from] levada_export_nvmet::NqnError),
    #[error(transparent)]
    Vhost(#[from] levada_export_vhost::ListenError),
    /// The process that has the array open refused; it says why.
    #[error("{why}")]
    Refused { why: String },
    #[error("permission denied: the process that has the array open belongs to another user")]
    Denied,
    #[error("the process that had the array open stopped answering")]
    Gone(#[source] std::io::Error),
    #[error("the process that has the array open is of another version")]
    Version(#[source] serde_json::Error),
    /// A signal came before the work was done.
    #[error("interrupted")]
    Interrupted,
}

impl ArrayError {
    pub(crate) fn system(what: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::System { what, source }
    }

    /// Of a desk that did not answer; `None` when nobody is there.
    pub(crate) fn of_desk(error: AskError) -> Option<Self> {
        match error {
            AskError::NobodyThere => None,
            AskError::Denied => Some(Self::Denied),
            AskError::Broken(error) => Some(Self::Gone(error)),
            AskError::NotUnderstood(error) => Some(Self::Version(error)),
        }
    }
}

fn join<T>(all: &[T], text: impl Fn(&T) -> String) -> String {
    all.iter().map(text).collect::<Vec<_>>().join(", ")
}
