//! What the rows of one inode say of each other: its entries in both orders, its attributes, lists
//! and sessions.
//!
//! Filled row by row, in any order, by a walk that passes all rows of an inode at about the same time; what is added
//! up can be taken off again. Where sums differ the rows are looked at one by one (`compare`).

use super::finding::{Finding, List};
use super::hash::{Fact, FactHash};
use super::links::Sign;
use crate::acl::{Acl, PERMISSIONS};
use crate::row::{Body, EntryRow, Inode, NameRow, Session};
use levada_base::ids::Ino;
use levada_wire::attr::Kind;
use smallvec::SmallVec;

/// See the module.
#[derive(Default)]
pub struct Slot {
    inode: InodeRow,
    /// What is listed, less what is named.
    entries: u128,
    listed: u64,
    named: u64,
    /// Rows of entries that cannot be decoded.
    bad_entries: u64,
    last_cookie: u64,
    /// The attributes that the inode lists, less those that have rows.
    xattrs: u128,
    xattr_rows: u64,
    is_orphan: bool,
    is_to_destroy: bool,
    sessions: SmallVec<[(u64, Session); 1]>,
}

#[derive(Default)]
enum InodeRow {
    #[default]
    Absent,
    /// What it says is unknown, so nothing is held against it.
    Damaged,
    Sound(Note),
}

/// What an inode says of the rows beside it.
struct Note {
    kind: Kind,
    nlink: u32,
    size: u64,
    directory: Option<Directory>,
    acl_fits: bool,
}

/// What has to be looked at row by row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suspect {
    Entries {
        ino: Ino,
        /// What the directory says of them, where it is one.
        said: Option<Directory>,
        /// Entries by name.
        named: u64,
        last_cookie: u64,
    },
    Xattrs(Ino),
}

/// What a directory says of its entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Directory {
    ino: Ino,
    next_cookie: u64,
    entries: u64,
    size: u64,
}

impl Slot {
    /// `inode` is none where the row cannot be decoded.
    pub fn inode(&mut self, hash: &FactHash, sign: Sign, ino: Ino, inode: Option<&Inode>) {
        for name in inode.into_iter().flat_map(|inode| &inode.xattrs) {
            sign.apply(&mut self.xattrs, hash.of(Fact::Xattr, &[ino.0], name));
        }
        self.inode = match (sign, inode) {
            (Sign::Minus, _) => InodeRow::Absent,
            (Sign::Plus, None) => InodeRow::Damaged,
            (Sign::Plus, Some(inode)) => InodeRow::Sound(Note::of(ino, inode)),
        };
    }

    /// `row` is none where it cannot be decoded.
    pub fn entry(
        &mut self,
        hash: &FactHash,
        sign: Sign,
        (parent, cookie): (Ino, u64),
        row: Option<&EntryRow>,
    ) {
        sign.count(&mut self.listed);
        self.last_cookie = self.last_cookie.max(cookie);
        match row {
            Some(row) => {
                let facts = [parent.0, cookie, row.ino.0, row.kind as u64];
                sign.apply(&mut self.entries, hash.of(Fact::Entry, &facts, &row.name));
            }
            None => sign.count(&mut self.bad_entries),
        }
    }

    /// `row` is none where it cannot be decoded.
    pub fn name(
        &mut self,
        hash: &FactHash,
        sign: Sign,
        (parent, name): (Ino, &[u8]),
        row: Option<&NameRow>,
    ) {
        sign.count(&mut self.named);
        match row {
            Some(row) => {
                let facts = [parent.0, row.cookie, row.ino.0, row.kind as u64];
                sign.opposite().apply(&mut self.entries, hash.of(Fact::Entry, &facts, name));
            }
            None => sign.count(&mut self.bad_entries),
        }
    }

    pub fn xattr(&mut self, hash: &FactHash, sign: Sign, ino: Ino, name: &[u8]) {
        sign.count(&mut self.xattr_rows);
        sign.opposite().apply(&mut self.xattrs, hash.of(Fact::Xattr, &[ino.0], name));
    }

    pub fn list(&mut self, sign: Sign, list: List) {
        match list {
            List::Orphans => self.is_orphan = sign == Sign::Plus,
            List::Destroy => self.is_to_destroy = sign == Sign::Plus,
        }
    }

    pub fn session(&mut self, sign: Sign, client: u64, session: Session) {
        self.sessions.retain(|(held, _)| *held != client);
        if sign == Sign::Plus {
            self.sessions.push((client, session));
        }
    }

    /// All rows of this inode were passed: says what does not fit, and what must be looked at row by row.
    pub fn settle(&self, ino: Ino, findings: &mut Vec<Finding>, suspects: &mut Vec<Suspect>) {
        let note = match &self.inode {
            InodeRow::Damaged | InodeRow::Absent => None,
            InodeRow::Sound(note) => Some(note),
        };
        let said = note.and_then(|note| note.directory);
        let entries_differ = self.entries != 0 || self.bad_entries > 0;
        if entries_differ {
            let (named, last_cookie) = (self.named, self.last_cookie);
            suspects.push(Suspect::Entries { ino, said, named, last_cookie });
        } else if let Some(said) = said {
            findings.extend(said.against(self.listed, self.last_cookie));
        }
        if matches!(self.inode, InodeRow::Damaged) {
            return;
        }
        if said.is_none() && self.listed + self.named > 0 {
            findings.push(Finding::NoDirectory(ino));
        }
        if self.xattrs != 0 {
            suspects.push(Suspect::Xattrs(ino));
        }
        if note.is_some_and(|note| !note.acl_fits) {
            findings.push(Finding::Acl(ino));
        }
        self.settle_lists(ino, note, findings);
        self.settle_sessions(ino, note, findings);
    }

    fn settle_lists(&self, ino: Ino, note: Option<&Note>, findings: &mut Vec<Finding>) {
        match (note, self.is_orphan, self.is_to_destroy) {
            (Some(Note { nlink: 0, .. }), false, false) => findings.push(Finding::Unlisted(ino)),
            (Some(Note { nlink: 0, .. }), true, true) => findings.push(Finding::ListedTwice(ino)),
            (Some(Note { nlink: 0, .. }), _, _) => {}
            (note, is_orphan, is_to_destroy) => {
                let lists = [(List::Orphans, is_orphan), (List::Destroy, is_to_destroy)];
                let is_there = note.is_some();
                for (list, _) in lists.into_iter().filter(|(_, is_in)| *is_in) {
                    findings.push(Finding::Listed { ino, list, is_there });
                }
            }
        }
    }

    fn settle_sessions(&self, ino: Ino, note: Option<&Note>, findings: &mut Vec<Finding>) {
        for (client, session) in &self.sessions {
            let is_file = note.is_some_and(|note| note.kind == Kind::File);
            let cut_fits = session.cut.is_none_or(|cut| note.is_some_and(|note| note.size == cut));
            let mut others = self.sessions.iter().filter(|(other, _)| other > client);
            let is_only_cut = session.cut.is_none() || others.all(|(_, held)| held.cut.is_none());
            if !is_file || !cut_fits || !is_only_cut || *session == Session::default() {
                findings.push(Finding::Session { ino, client: *client });
            }
        }
    }
}

impl Note {
    fn of(ino: Ino, inode: &Inode) -> Self {
        let kind = inode.kind();
        let fits = |acl: &Acl| acl.mode() == inode.mode & PERMISSIONS && !acl.is_minimal();
        let access_fits = inode.access_acl.as_ref().is_none_or(fits);
        Self {
            kind,
            nlink: inode.nlink,
            size: inode.size,
            directory: match inode.body {
                Body::Directory { next_cookie, entries } => {
                    Some(Directory { ino, next_cookie, entries, size: inode.size })
                }
                Body::File(_) | Body::Symlink(_) | Body::Special => None,
            },
            acl_fits: access_fits && (inode.default_acl.is_none() || kind == Kind::Directory),
        }
    }
}

impl Directory {
    /// What it says against what it has.
    pub fn against(self, has: u64, last: u64) -> impl Iterator<Item = Finding> {
        let Self { ino, next_cookie: next, entries, size } = self;
        let wrong_count = (entries != has || size != has).then(|| {
            // Both are meant to say the same; the one that is wrong is told.
            let says = if entries == has { size } else { entries };
            Finding::EntryCount { ino, says, has }
        });
        let reuse = (has > 0 && last >= next).then_some(Finding::CookieReuse { ino, next, last });
        wrong_count.into_iter().chain(reuse)
    }
}
