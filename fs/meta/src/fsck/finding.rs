//! What a check finds, and where.

use crate::row::{Damaged, Subject, SubjectKind};
use levada_base::ids::Ino;

/// What is wrong with the two rows of a directory's entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryFault {
    /// There is none by name.
    NoName { cookie: u64 },
    /// There is none in the order of listing.
    NoEntry { cookie: u64 },
    /// Both are there, and do not say the same.
    Differ { cookie: u64 },
}

/// The lists of inodes without a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum List {
    /// They may be open.
    Orphans,
    /// Their objects are to be destroyed.
    Destroy,
}

/// What a running service has in memory of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    Client,
    Reply,
    Session,
    Orphan,
    Usage,
}

/// Something that does not fit together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Finding {
    #[error("{damaged}")]
    Damaged { key: Vec<u8>, damaged: Damaged },
    #[error("there is no {0} row")]
    Missing(&'static str),
    #[error("a row of no known sort: {}", hex(.0))]
    UnknownRow(Vec<u8>),
    #[error("{}", entry_text(*.fault))]
    Entry { parent: Ino, name: Vec<u8>, fault: EntryFault },
    #[error("says it has {says} entries, and has {has}")]
    EntryCount { ino: Ino, says: u64, has: u64 },
    #[error("would give the place {last} in listings again, as {next} is next")]
    CookieReuse { ino: Ino, next: u64, last: u64 },
    #[error("entries are kept for it, and it is no directory")]
    NoDirectory(Ino),
    #[error("names inode {:#x}, which is not there", .ino.0)]
    Dangling { parent: Ino, name: Vec<u8>, ino: Ino },
    #[error("says another kind than inode {:#x}", .ino.0)]
    KindMismatch { parent: Ino, name: Vec<u8>, ino: Ino },
    #[error("says it has {says} links, and has {has}")]
    LinkCount { ino: Ino, says: u32, has: u64 },
    #[error("says it is in directory {:#x}, and is named in {}", .says.0, inodes(.named_in))]
    Parent { ino: Ino, says: Ino, named_in: Vec<Ino> },
    #[error("lies within itself, and not below the root")]
    Cycle(Ino),
    #[error("has no name, and is in no list of such")]
    Unlisted(Ino),
    #[error("is {}", list_text(*.list, *.is_there))]
    Listed {
        ino: Ino,
        list: List,
        /// Else there is no such inode.
        is_there: bool,
    },
    #[error("is open without a name and to be destroyed, both at once")]
    ListedTwice(Ino),
    #[error("{}", xattr_text(name, *.is_listed))]
    Xattr {
        ino: Ino,
        name: Vec<u8>,
        /// In the inode, and has no row; else it is the other way round.
        is_listed: bool,
    },
    #[error("its access control lists do not fit its mode")]
    Acl(Ino),
    #[error("a write session of client {client} on it makes no sense")]
    Session { ino: Ino, client: u64 },
    #[error("the counter of {what} stands at {says}, and should be {has}")]
    Counter { what: &'static str, says: u64, has: u64 },
    #[error("{} is said to use {says} {what}, and uses {has}", subject_text(*.subject))]
    Usage { subject: Subject, what: &'static str, says: u64, has: u64 },
    #[error("the stored reply in slot {slot} of client {client} {}",
        if *.is_sound { "is of a client that is not known" } else { "cannot be decoded" })]
    Reply { client: u64, slot: u32, is_sound: bool },
    #[error("the service has another {} in memory than row {}", known_text(*.what), hex(.key))]
    Known { what: Known, key: Vec<u8> },
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn inodes(inos: &[Ino]) -> String {
    if inos.is_empty() {
        return "none".to_owned();
    }
    inos.iter().map(|ino| format!("{:#x}", ino.0)).collect::<Vec<_>>().join(", ")
}

fn entry_text(fault: EntryFault) -> &'static str {
    match fault {
        EntryFault::NoName { .. } => "is listed, and cannot be found by name",
        EntryFault::NoEntry { .. } => "can be found by name, and is not listed",
        EntryFault::Differ { .. } => "its rows by name and in listings differ",
    }
}

fn subject_text(subject: Subject) -> String {
    let kind = match subject.kind {
        SubjectKind::User => "user",
        SubjectKind::Group => "group",
        SubjectKind::Project => "project",
        SubjectKind::Tenant => "tenant",
    };
    format!("{kind} {}", subject.id)
}

fn list_text(list: List, is_there: bool) -> &'static str {
    match (list, is_there) {
        (List::Orphans, true) => "listed as open without a name, and has a name",
        (List::Orphans, false) => "listed as open without a name, and not there",
        (List::Destroy, true) => "listed to be destroyed, and has a name",
        (List::Destroy, false) => "listed to be destroyed, and not there",
    }
}

fn known_text(what: Known) -> &'static str {
    match what {
        Known::Client => "client",
        Known::Reply => "reply of a client",
        Known::Session => "write session",
        Known::Orphan => "inode without a name",
        Known::Usage => "account",
    }
}

fn xattr_text(name: &[u8], is_listed: bool) -> String {
    let name = String::from_utf8_lossy(name);
    match is_listed {
        true => format!("lists the attribute {name:?}, which has no row"),
        false => format!("does not list the attribute {name:?}, which has a row"),
    }
}

impl Finding {
    /// The sort of finding, for programs: `docs/fsck.md` lists them.
    #[must_use]
    pub fn sort(&self) -> &'static str {
        match self {
            Self::Damaged { .. } => "row",
            Self::Missing(_) => "missing",
            Self::UnknownRow(_) => "unknown-row",
            Self::Entry { .. } => "entry",
            Self::EntryCount { .. } => "entries",
            Self::CookieReuse { .. } => "cookie",
            Self::NoDirectory(_) => "no-directory",
            Self::Dangling { .. } => "dangling",
            Self::KindMismatch { .. } => "kind",
            Self::LinkCount { .. } => "links",
            Self::Parent { .. } => "parent",
            Self::Cycle(_) => "cycle",
            Self::Unlisted(_) => "unlisted",
            Self::Listed { .. } | Self::ListedTwice(_) => "listed",
            Self::Xattr { .. } => "xattr",
            Self::Acl(_) => "acl",
            Self::Session { .. } => "session",
            Self::Counter { .. } => "counter",
            Self::Usage { .. } => "usage",
            Self::Reply { .. } => "reply",
            Self::Known { .. } => "memory",
        }
    }

    /// The inode that it is about; of a name, the inode which that names is another.
    #[must_use]
    pub fn ino(&self) -> Option<Ino> {
        match self {
            Self::EntryCount { ino, .. }
            | Self::CookieReuse { ino, .. }
            | Self::NoDirectory(ino)
            | Self::LinkCount { ino, .. }
            | Self::Parent { ino, .. }
            | Self::Cycle(ino)
            | Self::Unlisted(ino)
            | Self::Listed { ino, .. }
            | Self::ListedTwice(ino)
            | Self::Xattr { ino, .. }
            | Self::Acl(ino)
            | Self::Session { ino, .. } => Some(*ino),
            Self::Damaged { key, .. } | Self::Known { key, .. } => crate::key::ino_of(key),
            Self::Entry { .. }
            | Self::Dangling { .. }
            | Self::KindMismatch { .. }
            | Self::Missing(_)
            | Self::UnknownRow(_)
            | Self::Counter { .. }
            | Self::Usage { .. }
            | Self::Reply { .. } => None,
        }
    }

    /// The name that it is about, and the directory which that is in.
    #[must_use]
    pub fn name(&self) -> Option<(Ino, &[u8])> {
        match self {
            Self::Entry { parent, name, .. }
            | Self::Dangling { parent, name, .. }
            | Self::KindMismatch { parent, name, .. } => Some((*parent, name)),
            _ => None,
        }
    }

    /// What the row says, and what was counted.
    #[must_use]
    pub fn says_has(&self) -> Option<(u64, u64)> {
        match *self {
            Self::EntryCount { says, has, .. }
            | Self::Counter { says, has, .. }
            | Self::Usage { says, has, .. } => Some((says, has)),
            Self::LinkCount { says, has, .. } => Some((says.into(), has)),
            _ => None,
        }
    }
}
