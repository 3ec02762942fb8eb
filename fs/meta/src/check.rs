//! Check: reads every row and says what does not fit together.
//!
//! For a store at rest, or one of which a copy is checked: it reads in several steps. Memory
//! grows with the number of inodes and names.

use crate::acl::{Acl, PERMISSIONS};
use crate::key;
use crate::row::{
    Body, Charge, ClientRow, Counters, Damaged, DoomedRow, EntryRow, Inode, NameRow, OrphanRow,
    QuotaRow, ReplyRow, Session, Subject, Superblock, TailRow, Usage, XattrRow,
};
use levada_base::ids::Ino;
use levada_kv::{Bytes, KvError, Store};
use levada_wire::attr::Kind;
use levada_wire::meta::MetaReply;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// Something that does not fit together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    #[error("{0}")]
    Damaged(#[from] Damaged),
    #[error("there is no {0} row")]
    Missing(&'static str),
    #[error("row {0:?} is of no known sort")]
    UnknownRow(Vec<u8>),
    #[error("directory {parent:?}: the rows of {name:?} by name and by cookie differ")]
    EntryMismatch { parent: Ino, name: Vec<u8> },
    #[error("directory {parent:?}: {name:?} names {ino:?}, which is not there")]
    Dangling { parent: Ino, name: Vec<u8>, ino: Ino },
    #[error("directory {parent:?}: {name:?} has another kind than {ino:?}")]
    KindMismatch { parent: Ino, name: Vec<u8>, ino: Ino },
    #[error("entries are kept for {0:?}, which is no directory")]
    NoDirectory(Ino),
    #[error("directory {ino:?} says it has {says} entries, and has {has}")]
    EntryCount { ino: Ino, says: u64, has: u64 },
    #[error("directory {ino:?} would give cookie {next} again")]
    CookieReuse { ino: Ino, next: u64 },
    #[error("{ino:?} says it has {says} links, and has {has}")]
    LinkCount { ino: Ino, says: u32, has: u32 },
    #[error("directory {ino:?} says it is in {says:?}, and is named in {named_in:?}")]
    Parent { ino: Ino, says: Ino, named_in: Vec<Ino> },
    #[error("directory {0:?} cannot be reached from the root")]
    Unreachable(Ino),
    #[error("{0:?} has no name, and is neither an orphan nor to be destroyed, or it is both")]
    Leaked(Ino),
    #[error("{0:?} has a name or is not there, but is listed as orphan or to be destroyed")]
    FalselyListed(Ino),
    #[error("{ino:?} lists no attribute {name:?}, or it has no row")]
    Xattr { ino: Ino, name: Vec<u8> },
    #[error("the access control lists of {0:?} do not fit its mode")]
    Acl(Ino),
    #[error("a write session of client {client} on {ino:?} makes no sense")]
    Session { ino: Ino, client: u64 },
    #[error("the {what} counter stands at {says}, and should be {has}")]
    Counter { what: &'static str, says: u64, has: u64 },
    #[error("slot {slot} of client {client} holds no reply, or its client is not there")]
    Reply { client: u64, slot: u32 },
    #[error("{subject:?} is said to use {says:?}, and uses {has:?}")]
    Usage { subject: Subject, says: Usage, has: Usage },
}

#[derive(Default)]
struct Rows {
    superblock: bool,
    counters: Option<Counters>,
    inodes: BTreeMap<Ino, Inode>,
    entries: BTreeMap<(Ino, u64), EntryRow>,
    names: BTreeMap<(Ino, Vec<u8>), NameRow>,
    orphans: BTreeSet<Ino>,
    destroy: BTreeMap<Ino, u64>,
    sessions: BTreeMap<(Ino, u64), Session>,
    xattrs: BTreeSet<(Ino, Vec<u8>)>,
    usage: BTreeMap<Subject, Usage>,
    clients: BTreeSet<u64>,
    replies: BTreeMap<(u64, u32), bool>,
}

/// Reads every row of a metadata target and lists what does not fit together.
///
/// # Errors
///
/// When the store cannot be read.
pub async fn check(store: &Store) -> Result<Vec<Problem>, KvError> {
    const ROWS: usize = 4096;
    let mut rows = Rows::default();
    let mut problems = Vec::new();
    let mut last: Option<Bytes> = None;
    loop {
        let from = last.as_ref().map_or(Bound::Unbounded, |key| Bound::Excluded(&key[..]));
        let some = store.scan(from, Bound::Unbounded, ROWS).await?;
        for (key, value) in &some {
            if let Err(problem) = rows.add(key, value) {
                problems.push(problem);
            }
        }
        let Some((key, _)) = some.last().filter(|_| some.len() == ROWS) else { break };
        last = Some(Bytes::clone(key));
    }
    rows.check_entries(&mut problems);
    rows.check_inodes(&mut problems);
    rows.check_xattrs(&mut problems);
    rows.check_tree(&mut problems);
    rows.check_beside(&mut problems);
    Ok(problems)
}

impl Rows {
    fn add(&mut self, key: &[u8], value: &[u8]) -> Result<(), Problem> {
        let unknown = || Problem::UnknownRow(key.to_vec());
        if key == key::SUPERBLOCK {
            Superblock::decode(value)?;
            self.superblock = true;
            return Ok(());
        }
        if key == key::COUNTERS {
            self.counters = Some(Counters::decode(value)?);
            return Ok(());
        }
        if key == key::TAIL {
            TailRow::decode(value)?;
            return Ok(());
        }
        if key.first() == Some(&key::USAGE) {
            match key::subject_of(key).ok_or_else(unknown)? {
                (subject, key::USED) => drop(self.usage.insert(subject, Usage::decode(value)?)),
                _ => drop(QuotaRow::decode(value)?),
            }
            return Ok(());
        }
        let first = key::first_number(key).ok_or_else(unknown)?;
        let second = || key::second_number(key).filter(|_| key.len() == 17).ok_or_else(unknown);
        let ino = Ino(first);
        match key[0] {
            key::INODE if key.len() == 9 => {
                self.inodes.insert(ino, Inode::decode(value)?);
            }
            key::ENTRY => {
                self.entries.insert((ino, second()?), EntryRow::decode(value)?);
            }
            key::NAME => {
                self.names.insert((ino, key[9..].to_vec()), NameRow::decode(value)?);
            }
            key::ORPHAN if key.len() == 9 => {
                // It is listed, whatever its row says.
                self.orphans.insert(ino);
                OrphanRow::decode(value)?;
            }
            key::DESTROY if key.len() == 9 => {
                self.destroy.insert(ino, DoomedRow::decode(value)?.bytes);
            }
            key::SESSION => {
                self.sessions.insert((ino, second()?), Session::decode(value)?);
            }
            key::XATTR if key.len() > 9 => {
                XattrRow::decode(value)?;
                self.xattrs.insert((ino, key[9..].to_vec()));
            }
            key::CLIENT if key.len() == 9 => {
                ClientRow::decode(value)?;
                self.clients.insert(first);
            }
            key::REPLY => {
                let slot = key::second_u32(key).ok_or_else(unknown)?;
                let row = ReplyRow::decode(value)?;
                let sound = postcard::from_bytes::<MetaReply>(&row.reply).is_ok();
                self.replies.insert((first, slot), sound);
            }
            _ => return Err(unknown()),
        }
        Ok(())
    }

    fn check_entries(&self, problems: &mut Vec<Problem>) {
        for ((parent, name), row) in &self.names {
            let (parent, ino) = (*parent, row.ino);
            let entry = self.entries.get(&(parent, row.cookie));
            let same = entry.is_some_and(|e| e.ino == ino && e.kind == row.kind && e.name == *name);
            if !same {
                problems.push(Problem::EntryMismatch { parent, name: name.clone() });
            }
            match self.inodes.get(&ino) {
                None => problems.push(Problem::Dangling { parent, name: name.clone(), ino }),
                Some(inode) if inode.kind() != row.kind => {
                    problems.push(Problem::KindMismatch { parent, name: name.clone(), ino });
                }
                Some(_) => {}
            }
        }
        for ((parent, cookie), entry) in &self.entries {
            let row = self.names.get(&(*parent, entry.name.clone()));
            if row.is_none_or(|row| row.cookie != *cookie) {
                let name = entry.name.clone();
                problems.push(Problem::EntryMismatch { parent: *parent, name });
            }
        }
        let parents: BTreeSet<Ino> = self.entries.keys().map(|(parent, _)| *parent).collect();
        let is_directory =
            |ino: &Ino| self.inodes.get(ino).is_some_and(|i| i.kind() == Kind::Directory);
        problems.extend(parents.into_iter().filter(|p| !is_directory(p)).map(Problem::NoDirectory));
    }

    fn check_inodes(&self, problems: &mut Vec<Problem>) {
        let mut named_in: BTreeMap<Ino, Vec<Ino>> = BTreeMap::new();
        let mut subdirectories: BTreeMap<Ino, u32> = BTreeMap::new();
        for ((parent, _), row) in &self.names {
            named_in.entry(row.ino).or_default().push(*parent);
            if row.kind == Kind::Directory {
                *subdirectories.entry(*parent).or_default() += 1;
            }
        }
        for (&ino, inode) in &self.inodes {
            let parents = named_in.remove(&ino).unwrap_or_default();
            let names = parents.len() as u32;
            let has = match inode.body {
                Body::Directory { .. } if ino == Ino::ROOT || names > 0 => {
                    2 + subdirectories.get(&ino).copied().unwrap_or(0)
                }
                Body::Directory { .. } => 0,
                _ => names,
            };
            if inode.nlink != has {
                problems.push(Problem::LinkCount { ino, says: inode.nlink, has });
            }
            if let Body::Directory { next_cookie, entries } = inode.body {
                let mut cookies = self.entries.range((ino, 0)..=(ino, u64::MAX)).map(|(k, _)| k.1);
                let count = cookies.clone().count() as u64;
                if entries != count || inode.size != count {
                    problems.push(Problem::EntryCount { ino, says: entries, has: count });
                }
                if cookies.next_back().is_some_and(|last| last >= next_cookie) {
                    problems.push(Problem::CookieReuse { ino, next: next_cookie });
                }
                let expected = if ino == Ino::ROOT { vec![] } else { vec![inode.parent] };
                if inode.nlink > 0 && parents != expected {
                    let says = inode.parent;
                    problems.push(Problem::Parent { ino, says, named_in: parents });
                }
            }
            let lists = [self.orphans.contains(&ino), self.destroy.contains_key(&ino)];
            let listed = lists.into_iter().filter(|is_in| *is_in).count();
            if inode.nlink == 0 && listed != 1 {
                problems.push(Problem::Leaked(ino));
            }
            if inode.nlink > 0 && listed > 0 {
                problems.push(Problem::FalselyListed(ino));
            }
        }
        let listed: BTreeSet<Ino> =
            self.orphans.iter().chain(self.destroy.keys()).copied().collect();
        let gone = listed.iter().filter(|ino| !self.inodes.contains_key(ino));
        problems.extend(gone.map(|ino| Problem::FalselyListed(*ino)));
    }

    fn check_xattrs(&self, problems: &mut Vec<Problem>) {
        let listed = |(&ino, inode): (&Ino, &Inode)| {
            let names: Vec<_> = inode.xattrs.iter().map(|name| (ino, name.clone())).collect();
            names
        };
        let listed: BTreeSet<_> = self.inodes.iter().flat_map(listed).collect();
        let differ = listed.symmetric_difference(&self.xattrs).cloned();
        problems.extend(differ.map(|(ino, name)| Problem::Xattr { ino, name }));
        for (&ino, inode) in &self.inodes {
            let fits = |acl: &Acl| acl.mode() == inode.mode & PERMISSIONS && !acl.is_minimal();
            let fits = inode.access_acl.as_ref().is_none_or(fits);
            let has_default = inode.default_acl.is_some();
            if !fits || has_default && inode.kind() != Kind::Directory {
                problems.push(Problem::Acl(ino));
            }
        }
    }

    /// Every directory's parents lead to the root.
    fn check_tree(&self, problems: &mut Vec<Problem>) {
        let mut reached = BTreeSet::from([Ino::ROOT]);
        for (&ino, inode) in &self.inodes {
            if inode.kind() != Kind::Directory || inode.nlink == 0 {
                continue;
            }
            let (mut at, mut path) = (ino, Vec::new());
            while !reached.contains(&at) {
                path.push(at);
                let parent = self.inodes.get(&at).map(|inode| inode.parent);
                match parent.filter(|parent| !path.contains(parent)) {
                    Some(parent) => at = parent,
                    None => {
                        problems.push(Problem::Unreachable(ino));
                        break;
                    }
                }
            }
            reached.extend(path);
        }
    }

    fn check_beside(&self, problems: &mut Vec<Problem>) {
        if !self.superblock {
            problems.push(Problem::Missing("superblock"));
        }
        for (&(ino, client), session) in &self.sessions {
            let inode = self.inodes.get(&ino);
            let file = inode.is_some_and(|inode| inode.kind() == Kind::File);
            let cut = session.cut.is_none_or(|cut| inode.is_some_and(|inode| inode.size == cut));
            let others = self.sessions.range((ino, client + 1)..=(ino, u64::MAX));
            let one_cut =
                session.cut.is_none() || !others.into_iter().any(|(_, o)| o.cut.is_some());
            if !file || !cut || !one_cut || *session == Session::default() {
                problems.push(Problem::Session { ino, client });
            }
        }
        for (&(client, slot), sound) in &self.replies {
            if !sound || !self.clients.contains(&client) {
                problems.push(Problem::Reply { client, slot });
            }
        }
        let mut used: BTreeMap<Subject, Usage> = BTreeMap::new();
        for charge in self.inodes.values().filter_map(Charge::of) {
            for subject in charge.subjects() {
                let sum = used.entry(subject).or_default();
                *sum = sum.plus(charge.usage());
            }
        }
        let subjects: BTreeSet<Subject> = used.keys().chain(self.usage.keys()).copied().collect();
        for subject in subjects {
            let of = |all: &BTreeMap<_, _>| all.get(&subject).copied().unwrap_or_default();
            let (says, has): (Usage, Usage) = (of(&self.usage), of(&used));
            if says != has {
                problems.push(Problem::Usage { subject, says, has });
            }
        }
        let Some(counters) = self.counters else {
            problems.push(Problem::Missing("counters"));
            return;
        };
        let inodes = self.inodes.len() as u64;
        let last_ino = self.inodes.keys().next_back().map_or(0, |ino| ino.0);
        let last_client = self.clients.last().copied().unwrap_or(0);
        let mut at_least = |what, says, has| {
            if says < has {
                problems.push(Problem::Counter { what, says, has });
            }
        };
        at_least("next inode", counters.next_ino, last_ino + 1);
        at_least("next client", counters.next_client, last_client + 1);
        for (what, says, has) in [
            ("inode", counters.inodes, inodes),
            ("doomed inode", counters.doomed_inodes, self.destroy.len() as u64),
            (
                "doomed byte",
                counters.doomed_bytes,
                self.destroy.values().fold(0, |sum, bytes| sum.wrapping_add(*bytes)),
            ),
        ] {
            if says != has {
                problems.push(Problem::Counter { what, says, has });
            }
        }
    }
}
