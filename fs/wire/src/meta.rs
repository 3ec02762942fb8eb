//! Requests to a metadata target.
//!
//! Requests that change something carry (client, slot, sequence) in the frame's header; their
//! reply is stored in the same transaction as the change and sent again on retry.

use crate::attr::{Attr, Kind, Time};
use crate::frame::BODY_BYTES_MAX;
use crate::lock::{Lock, LockOwner, LockRange};
use levada_base::ids::{BootVerifier, Ino, Seq, TargetId};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use std::cell::Cell;
use std::time::Duration;

/// Requests in a [`MetaRequest::Several`].
pub const SEVERAL_MAX: usize = 64;

/// Files in one part of a [`MetaRequest::Reclaim`]. However large its numbers are, a part fits a frame.
pub const RECLAIM_MAX: usize = 1 << 16;
const _: () = assert!(16 + RECLAIM_MAX * (VARINT_U64 + VARINT_U32) <= BODY_BYTES_MAX);
/// The longest that postcard makes of a number.
const VARINT_U64: usize = 10;
const VARINT_U32: usize = 5;

/// Locks, waits and notices of one client at a metadata target.
pub const LOCKS_MAX: usize = 1 << 16;
/// Notices in one [`ToClient::Notices`], and numbers in one [`ToService::Acks`].
pub const NOTICES_MAX: usize = 1 << 11;
const _: () =
    assert!(16 + NOTICES_MAX * (2 * VARINT_U64 + 1 + 2 + NAME_BYTES_MAX) <= BODY_BYTES_MAX);
/// The longest name, in bytes (NAME_MAX).
const NAME_BYTES_MAX: usize = 255;

/// How long a lease on names or attributes lasts, from when its request was sent.
pub const LEASE_TERM: Duration = Duration::from_secs(10);

/// Locks in one part of a [`MetaRequest::Reclaim`].
pub const RECLAIM_LOCKS_MAX: usize = 1 << 14;
const _: () = {
    let lock = 3 * VARINT_U64 + 2 + VARINT_U64 + VARINT_U32;
    assert!(16 + RECLAIM_LOCKS_MAX * lock <= BODY_BYTES_MAX);
};

/// Reads what may hold no more of its own kind, and not too many: a message of two bytes a level could else
/// exhaust the stack of whoever reads it, and a short one ask for a reply that no frame holds.
fn flat<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    thread_local!(static INSIDE: Cell<bool> = const { Cell::new(false) });
    if INSIDE.replace(true) {
        return Err(D::Error::custom("several in several"));
    }
    let items = Vec::deserialize(from);
    INSIDE.set(false);
    let items: Vec<T> = items?;
    if items.len() > SEVERAL_MAX {
        return Err(D::Error::custom("too many"));
    }
    Ok(items)
}

/// Who asks; the service checks nothing but ownership rules, the mount's kernel checks modes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caller {
    pub uid: u32,
    pub gid: u32,
}

/// What to change of an inode's attributes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttrChange {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    /// Recorded as pending with the write session until [`MetaRequest::Truncated`]: while it is
    /// pending this is the file's size, whatever the objects say, and a recovery truncates them.
    pub size: Option<u64>,
    pub atime: Option<SetTime>,
    pub mtime: Option<SetTime>,
    pub ctime: Option<Time>,
}

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SetTime {
    /// The service's clock.
    Now,
    To(Time),
}

/// What to make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NewInode {
    /// Opened for its maker in the same step when `open` is set.
    File {
        open: Option<OpenMode>,
    },
    Directory,
    Symlink {
        target: Vec<u8>,
    },
    Special {
        rdev: u32,
    },
}

/// The permissions of what is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewMode {
    /// The permission bits and, for Special, the type.
    pub bits: u32,
    /// Bits that whoever asks wants to be taken away, where the directory has no default access control list.
    pub umask: u32,
}

impl From<u32> for NewMode {
    /// Of somebody without a umask.
    fn from(bits: u32) -> Self {
        Self { bits, umask: 0 }
    }
}

/// How an extended attribute is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetXattr {
    /// XATTR_CREATE (1): it must not be there; XATTR_REPLACE (2): it must.
    pub flags: u32,
    /// With an access list set-group-id goes: the caller is not in the group, says whoever knows.
    pub clear_set_gid: bool,
}

/// For what a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenMode {
    pub write: bool,
    /// Truncate to 0 in the same step (O_TRUNC), as [`AttrChange::size`] does.
    pub truncate: bool,
}

/// Bytes that extents hold, by component; those that are not named are as they were.
pub type Stored = Vec<(u32, u64)>;

/// A request to a metadata target. Names are bytes without `/` and NUL, at most 255.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetaRequest {
    /// First on every connection: makes or finds the client's durable row.
    Register {
        uuid: [u8; 16],
    },
    /// After `Register` with another verifier, by a client that holds a tail: the batches that it
    /// was told of before they were durable, in order, without a gap. See [`Tail`].
    Replay {
        /// The life of the target that handed them out.
        life: BootVerifier,
        batches: Vec<(Seq, Vec<u8>)>,
    },
    /// After `Register` with another verifier or number, and before anything that changes something: the files
    /// that this client holds open, as far as it was told, and its locks of them. In as many parts of [`RECLAIM_MAX`]
    /// files or [`RECLAIM_LOCKS_MAX`] locks as it takes, one after the other on the connection that registered last; all of them together count, from
    /// the `last` on: what none of them names is released. A connection that ends leaves nothing of its parts.
    /// `Stale`: the opens count, but the client has no lock.
    Reclaim {
        opens: Vec<(Ino, u32)>,
        locks: Vec<(Ino, Lock)>,
        last: bool,
    },
    Lookup {
        parent: Ino,
        name: Vec<u8>,
    },
    GetAttr {
        ino: Ino,
    },
    SetAttr {
        caller: Caller,
        ino: Ino,
        change: AttrChange,
    },
    Create {
        caller: Caller,
        parent: Ino,
        name: Vec<u8>,
        mode: NewMode,
        new: NewInode,
        /// Fail when the name exists; else open what is there.
        exclusive: bool,
    },
    Link {
        caller: Caller,
        ino: Ino,
        parent: Ino,
        name: Vec<u8>,
    },
    Unlink {
        caller: Caller,
        parent: Ino,
        name: Vec<u8>,
    },
    RemoveDir {
        caller: Caller,
        parent: Ino,
        name: Vec<u8>,
    },
    Rename {
        caller: Caller,
        from: Ino,
        from_name: Vec<u8>,
        to: Ino,
        to_name: Vec<u8>,
        /// RENAME_NOREPLACE (1), RENAME_EXCHANGE (2).
        flags: u32,
    },
    ReadLink {
        ino: Ino,
    },
    /// Entries after `cookie` (0 = from the start), in cookie order.
    ReadDir {
        ino: Ino,
        cookie: u64,
        entries_max: u32,
        attrs: bool,
    },
    Open {
        ino: Ino,
        mode: OpenMode,
    },
    /// One open less. The last one of an unlinked file lets its objects be destroyed.
    Close {
        ino: Ino,
    },
    /// Before the first write of a file by this client: opens a durable write session.
    BeginWrite {
        ino: Ino,
    },
    /// The objects are durable up to here: records size, times and written components.
    /// `end` closes the session (no dirty data left at this client). Without `mtime` the time
    /// stays: nothing was written since it was set or recorded.
    /// `Unavailable` while another client's truncation is pending; `cut` in the answer: the size was not taken.
    CommitWrite {
        ino: Ino,
        size: u64,
        mtime: Option<Time>,
        components: u64,
        end: bool,
        /// Asked of the objects after the answers to all writes that this tells of.
        stored: Stored,
    },
    /// The objects have been truncated as [`AttrChange::size`] asked, and hold so much since.
    Truncated {
        ino: Ino,
        size: u64,
        stored: Stored,
    },
    /// `CommitWrite` and `Close` of several files, in this order, as one change. Each is done or
    /// refused by itself. At most [`SEVERAL_MAX`].
    Several {
        #[serde(deserialize_with = "flat")]
        requests: Vec<Self>,
    },
    /// Everything acknowledged so far is durable.
    Sync,
    Space,
    /// Files whose objects are to be destroyed, and sessions whose client is gone: for the
    /// housekeeper that runs beside the services. Of the latter, one without
    /// [`Attr::writers`] was being truncated: its objects must be cut to its size. Those of inodes
    /// after `after`, in order, so that what cannot be done now holds up nothing behind it.
    Chores {
        limit: u32,
        after: Ino,
    },
    /// A chore is done: the objects of this inode are gone.
    Destroyed {
        ino: Ino,
    },
    /// A chore is done: the session of a client that is gone is settled. `change` is that of the chore: if the inode
    /// has changed since, `size` may be from before a truncation, the answer is `Unavailable`, and the chore stays.
    Settled {
        ino: Ino,
        size: u64,
        components: u64,
        change: u64,
        /// Of all components.
        stored: Stored,
    },
    /// The client goes for good and has nothing open: what it was told is durable with the answer, and a
    /// service that restarts later waits for nothing of it. What it asks afterwards it asks as a new
    /// client.
    Leave,
    /// The value of an extended attribute; names and limits are those of [`crate::xattr`].
    GetXattr {
        ino: Ino,
        name: Vec<u8>,
    },
    /// The names of all extended attributes, each with a NUL behind it.
    ListXattrs {
        ino: Ino,
    },
    SetXattr {
        caller: Caller,
        ino: Ino,
        name: Vec<u8>,
        value: Vec<u8>,
        how: SetXattr,
    },
    RemoveXattr {
        caller: Caller,
        ino: Ino,
        name: Vec<u8>,
    },
    /// Takes a lock on a file that the client has open, at once or not at all. With a ticket, which the client draws, it
    /// may be answered `Waiting`: then a [`Notice`] tells how that ends. A ticket that is known already is told
    /// what came of it, and nothing else happens.
    Lock {
        ino: Ino,
        lock: Lock,
        ticket: Option<u64>,
    },
    /// Releases what the owner holds of a range; `Done` also when that is nothing.
    Unlock {
        ino: Ino,
        owner: LockOwner,
        range: LockRange,
    },
    /// Ends a wait. `Done`: there is no lock; `Locked`: it had been granted before.
    CancelWait {
        ino: Ino,
        ticket: u64,
    },
    /// Which lock would be in the way of this one?
    TestLock {
        ino: Ino,
        lock: Lock,
    },
    /// Makes and opens a file that has no name (O_TMPFILE), for `parent` to hand on what it hands on to what is made in it;
    /// `parent` itself stays as it is. The answer is `Entry`.
    CreateUnnamed {
        caller: Caller,
        parent: Ino,
        mode: NewMode,
        open: OpenMode,
        /// `Link` gives it its first name, if it is still there; else that is `NotFound` (O_EXCL).
        may_link: bool,
    },
    /// The client that registered as `uuid` is dead, says somebody who knows: it ends now, as it would with its lease.
    /// `Done` also when there is none, and then it is durable. `NotPermitted`: it has a connection, was heard of
    /// meanwhile, or died within a truncation; its lease decides.
    Bury {
        uuid: [u8; 16],
    },
    /// As `Space`, with what deleted files still take; waits a moment for deletions under way.
    SpaceNow,
    /// How many bytes this client may add to a file in which it has a write session: `want` or less, but `need` at least;
    /// in the place of what it was granted before. What it has written before it has told with `CommitWrite`.
    /// `Quota`: there is no room for `need`.
    Grant {
        ino: Ino,
        need: u64,
        want: u64,
    },
    /// What the limits of the project and the tenant of an inode leave to what is in it; nothing while neither has any.
    Allowance {
        ino: Ino,
    },
}

impl MetaRequest {
    /// The directory whose names it changes; of a Rename the one of the new name.
    #[must_use]
    pub fn changes_names_of(&self) -> Option<Ino> {
        match self {
            Self::Create { parent, .. }
            | Self::Link { parent, .. }
            | Self::Unlink { parent, .. }
            | Self::RemoveDir { parent, .. } => Some(*parent),
            Self::Rename { to, .. } => Some(*to),
            _ => None,
        }
    }

    /// The request's kind, for logs.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Register { .. } => "Register",
            Self::Replay { .. } => "Replay",
            Self::Reclaim { .. } => "Reclaim",
            Self::Lookup { .. } => "Lookup",
            Self::GetAttr { .. } => "GetAttr",
            Self::SetAttr { .. } => "SetAttr",
            Self::Create { .. } => "Create",
            Self::Link { .. } => "Link",
            Self::Unlink { .. } => "Unlink",
            Self::RemoveDir { .. } => "RemoveDir",
            Self::Rename { .. } => "Rename",
            Self::ReadLink { .. } => "ReadLink",
            Self::ReadDir { .. } => "ReadDir",
            Self::Open { .. } => "Open",
            Self::Close { .. } => "Close",
            Self::BeginWrite { .. } => "BeginWrite",
            Self::CommitWrite { .. } => "CommitWrite",
            Self::Truncated { .. } => "Truncated",
            Self::Several { .. } => "Several",
            Self::Sync => "Sync",
            Self::Space => "Space",
            Self::Chores { .. } => "Chores",
            Self::Destroyed { .. } => "Destroyed",
            Self::Settled { .. } => "Settled",
            Self::Leave => "Leave",
            Self::GetXattr { .. } => "GetXattr",
            Self::ListXattrs { .. } => "ListXattrs",
            Self::SetXattr { .. } => "SetXattr",
            Self::RemoveXattr { .. } => "RemoveXattr",
            Self::Lock { .. } => "Lock",
            Self::Unlock { .. } => "Unlock",
            Self::CancelWait { .. } => "CancelWait",
            Self::TestLock { .. } => "TestLock",
            Self::CreateUnnamed { .. } => "CreateUnnamed",
            Self::Bury { .. } => "Bury",
            Self::SpaceNow => "SpaceNow",
            Self::Grant { .. } => "Grant",
            Self::Allowance { .. } => "Allowance",
        }
    }
}

/// What somebody may have of something, and what is left of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allowance {
    pub most: u64,
    pub left: u64,
}

impl Allowance {
    /// Where both hold.
    #[must_use]
    pub fn tighter(self, other: Self) -> Self {
        Self { most: self.most.min(other.most), left: self.left.min(other.left) }
    }
}

/// A directory entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirEntry {
    pub cookie: u64,
    pub name: Vec<u8>,
    pub ino: Ino,
    pub kind: Kind,
    /// When asked for.
    pub attr: Option<Box<Attr>>,
}

/// An answer of a metadata target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetaReply {
    Registered {
        /// The client's number in frame headers.
        client: u64,
        /// Slots this client may use, from 0: that many changes in flight.
        slots: u32,
        verifier: BootVerifier,
        /// The highest sequence stored per slot, for a client that came back.
        used: Vec<(u32, u64)>,
        fs: FsInfo,
    },
    Attr(Box<Attr>),
    /// Create: the second says whether it was made now.
    Entry(Box<Attr>, bool),
    Link(Vec<u8>),
    Entries {
        entries: Vec<DirEntry>,
        end: bool,
    },
    /// Unlink and Rename say what lost a name, for the client's caches.
    Removed {
        ino: Option<Ino>,
        nlink: u32,
    },
    Done,
    /// An answer for each of the requests.
    Several(#[serde(deserialize_with = "flat")] Vec<Self>),
    Space {
        inodes: u64,
        inodes_free: u64,
    },
    Chores {
        destroy: Vec<Attr>,
        settle: Vec<Attr>,
        /// These are all up to here, and there may be more behind; `None`: there are no more.
        upto: Option<Ino>,
    },
    Failed(MetaFault),
    /// As `Entry`, of something made now, or as `Attr`, of what got another name, with the directory as it was then or
    /// later: for a caller that asks for it with the flag `WITH_DIRECTORY`, when it costs no wait. Never stored.
    Made {
        attr: Box<Attr>,
        directory: Box<Attr>,
    },
    /// The value, or the names, of extended attributes.
    Xattr(Vec<u8>),
    /// The lock is held; the attributes tell whether what is known of the file is still so.
    Locked(Box<Attr>),
    /// The ticket is queued.
    Waiting,
    /// A lock in the way; its pid is 0 where another client holds it.
    Tested(Option<Lock>),
    SpaceNow {
        inodes: u64,
        /// Those of deleted files included.
        inodes_free: u64,
        /// What the objects of deleted files hold, of those that nobody is at.
        doomed_bytes: u64,
        /// The same of those that are being deleted just now: the objects may count them as free already.
        deleting_bytes: u64,
        /// Deletions begun and ended. While it stays, `doomed_bytes` and what the objects say can be added up.
        deletions: u64,
    },
    /// For a `Grant`; `u64::MAX`: any number. Less than was needed: others have been granted the rest, and may give it
    /// back soon.
    Granted {
        bytes: u64,
    },
    /// As `Removed`, with the directory that lost the name, or got the new one of a Rename; likewise.
    RemovedFrom {
        ino: Option<Ino>,
        nlink: u32,
        directory: Box<Attr>,
    },
    /// For an `Allowance`: of the tightest limit.
    Allowance {
        bytes: Option<Allowance>,
        inodes: Option<Allowance>,
    },
}

impl MetaReply {
    /// Beside this answer the directory may be told whose names the request changed: as it is now.
    #[must_use]
    pub fn with_directory(self, directory: Box<Attr>) -> Self {
        match self {
            Self::Entry(attr, true) | Self::Attr(attr) => Self::Made { attr, directory },
            Self::Removed { ino, nlink } => Self::RemovedFrom { ino, nlink, directory },
            other => other,
        }
    }

    /// The answer to `request` alone.
    #[must_use]
    pub fn without_directory(self, request: &MetaRequest) -> Self {
        match (self, request) {
            (Self::Made { attr, .. }, MetaRequest::Link { .. }) => Self::Attr(attr),
            (Self::Made { attr, .. }, _) => Self::Entry(attr, true),
            (Self::RemovedFrom { ino, nlink, .. }, _) => Self::Removed { ino, nlink },
            (other, _) => other,
        }
    }

    /// Whether [`Self::with_directory`] tells more.
    #[must_use]
    pub fn changed_names(&self) -> bool {
        matches!(self, Self::Entry(_, true) | Self::Attr(_) | Self::Removed { .. })
    }
}

/// The body of a one-way frame to a client. The header's verifier says which life of the target speaks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToClient {
    Tail(Tail),
    /// With their numbers, which count up for each client. Each is said again over every new connection until it is
    /// acknowledged, or until what it is about has ended. At most [`NOTICES_MAX`].
    Notices(Vec<(u64, Notice)>),
}

/// What a client waits to hear, or others wait for it to hear.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Notice {
    /// The wait has ended with the lock.
    Granted { ticket: u64 },
    /// The wait has ended without: it had come to wait for itself (EDEADLK).
    Refused { ticket: u64 },
    /// A lease is in the way: what this name means in `dir`, or whether it is there, is about to change.
    Names { dir: Ino, name: Vec<u8> },
    /// A lease is in the way: the attributes are about to change.
    Node { ino: Ino },
    /// The client has this file open, and another one is about to write it: from now on what it reads and where it ends
    /// is only known by asking.
    Shared { ino: Ino },
}

/// The body of a one-way frame to a service; the header names the client and the life of the target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToService {
    /// These notices were taken in, and nothing here trusts any more what is about to change. At most [`NOTICES_MAX`].
    Acks(Vec<Ack>),
}

/// A notice was taken in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ack {
    pub number: u64,
    /// Of [`Notice::Names`]: the lease goes on for the directory's other names.
    pub keeps: bool,
}

/// What the client must hold for the answers that follow (`docs/design/0010-metadata-tail.md`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tail {
    /// Everything up to here is durable and need not be held.
    pub durable: Seq,
    /// Batches as the intent log holds them, in order.
    pub batches: Vec<(Seq, Vec<u8>)>,
}

/// What a client must know of the file system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsInfo {
    pub id: u64,
    pub name: String,
    /// Object targets and where they are served.
    pub objects: Vec<(TargetId, String)>,
    /// A client that is silent for this long loses its opens and sessions.
    pub lease_ms: u64,
}

/// Why a metadata target refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum MetaFault {
    #[error("no such file or directory")]
    NotFound,
    #[error("file exists")]
    Exists,
    #[error("not a directory")]
    NotDirectory,
    #[error("is a directory")]
    IsDirectory,
    #[error("directory not empty")]
    NotEmpty,
    #[error("name too long")]
    NameTooLong,
    #[error("too many links")]
    TooManyLinks,
    #[error("operation not permitted")]
    NotPermitted,
    #[error("invalid argument")]
    Invalid,
    #[error("no space left")]
    Full,
    /// The inode is gone although a handle names it.
    #[error("stale handle")]
    Stale,
    /// Metadata of this item is damaged.
    #[error("input/output error")]
    Damaged,
    /// The client's row is gone (its lease ran out): register anew.
    #[error("the client is not registered")]
    NotRegistered,
    /// The target stops or recovers: try again.
    #[error("not available")]
    Unavailable,
    #[error("no such attribute")]
    NoAttribute,
    /// A value beyond what an attribute may hold.
    #[error("argument too long")]
    TooLarge,
    #[error("operation not supported")]
    NotSupported,
    /// Somebody else has a lock that is in the way.
    #[error("locked by somebody else")]
    LockHeld,
    /// To wait for this lock would be to wait for oneself.
    #[error("deadlock")]
    Deadlock,
    /// The client has as many locks and waits as it may.
    #[error("too many locks")]
    TooManyLocks,
    /// The client does not have the file open.
    #[error("the file is not open")]
    NotOpen,
    /// Somebody to whom the file belongs has used up what he may.
    #[error("disk quota exceeded")]
    Quota,
    /// The directory belongs to another project or tenant.
    #[error("belongs to another project")]
    OtherProject,
}
