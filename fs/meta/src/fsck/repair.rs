//! Repairs of what a check of a store at rest found: what follows from other rows, and nothing that would be a guess.
//!
//! One pass over the findings of one check. What is counted (entries, links, counters) is set only when that check found
//! no row damaged, and no entry in doubt, that could have been counted: so damaged rows are made from others first, and
//! the next check counts. Each repair looks again at what it changes, raises the inode's `change`, and is one batch; so a
//! crash leaves a prefix of the repairs.
//!
//! docs/design/0013-fsck-space-quotas.md.

use super::compare::{rows_of, start};
use super::finding::{EntryFault, Finding, List};
use super::{FsckReport, reattach};
use crate::key;
use crate::row::{
    Body, Counters, Damaged, EntryRow, Inode, NameRow, OrphanRow, Subject, Superblock, Usage,
    first_ino,
};
use levada_base::ids::Ino;
use levada_kv::{Batch, KvError, Store};
use levada_wire::attr::Kind;
use std::collections::BTreeSet;

/// Where no counters are left, the next numbers are so much above all that are seen: what was given out and left no row
/// is below.
const NUMBERS_SKIPPED: u64 = 1 << 32;
/// A number that is higher than these is a damaged one.
const NUMBERS_MAX: u64 = 1 << 46;

/// What repairs are told.
#[derive(Clone, Copy, Debug, Default)]
pub struct RepairOptions {
    /// Give inodes whose names were lost one in `/lost+found`.
    pub reattach: bool,
    /// The highest inode number that an object has.
    pub last_object_ino: u64,
}

/// Repairs what a check found just now of a store that nothing else changes; how much of it. What is repaired may lead to
/// more: check again until nothing is repaired.
///
/// # Errors
///
/// When the store fails.
pub async fn repair(
    store: &Store,
    report: &FsckReport,
    options: RepairOptions,
) -> Result<u64, KvError> {
    // A client that brings back what it was told must find the store as the crash left it.
    if store.get(key::TAIL).await?.is_some() {
        return Ok(0);
    }
    let mut repairs = Repairs::new(store, report, options);
    let mut repaired = 0;
    for finding in &report.findings {
        let batch = repairs.of(finding).await?;
        let Some(batch) = batch.filter(|batch| !batch.changes.is_empty()) else { continue };
        store.room_to_free().await?;
        store.apply(batch)?;
        repaired += 1;
    }
    store.durable(store.last_seq()).await?;
    Ok(repaired)
}

/// One pass.
struct Repairs<'a> {
    store: &'a Store,
    report: &'a FsckReport,
    options: RepairOptions,
    /// All that is counted could be read.
    counts: bool,
    /// Those whose links are not what they say.
    miscounted: BTreeSet<Ino>,
    /// Places in directories of which one row says other than another.
    in_doubt: BTreeSet<(Ino, u64)>,
}

impl<'a> Repairs<'a> {
    fn new(store: &'a Store, report: &'a FsckReport, options: RepairOptions) -> Self {
        let spoils = |finding: &Finding| match finding {
            Finding::Damaged { key, .. } | Finding::UnknownRow(key) => {
                matches!(key.first(), Some(&(key::INODE | key::ENTRY | key::NAME)))
            }
            Finding::Entry { .. } | Finding::KindMismatch { .. } => true,
            _ => false,
        };
        // What is not told could be any.
        let untold = report.found() > report.findings.len() as u64;
        let unread = !report.not_checked.is_empty();
        let counts = !untold && !unread && !report.findings.iter().any(spoils);
        let miscounted = report.findings.iter().filter_map(|finding| match finding {
            Finding::LinkCount { ino, .. } => Some(*ino),
            _ => None,
        });
        let in_doubt = report.findings.iter().filter_map(|finding| match finding {
            Finding::Entry { parent, fault: EntryFault::Differ { cookie }, .. } => {
                Some((*parent, *cookie))
            }
            _ => None,
        });
        let (miscounted, in_doubt) = (miscounted.collect(), in_doubt.collect());
        Self { store, report, options, counts, miscounted, in_doubt }
    }

    /// What repairs a finding; none where nothing does, or not yet.
    async fn of(&mut self, finding: &Finding) -> Result<Option<Batch>, KvError> {
        match finding {
            Finding::Damaged { key, .. } => self.damaged(key).await,
            Finding::Reply { client, .. } => self.forget(*client).await.map(Some),
            Finding::Missing("counters") => self.new_counters().await,
            Finding::Entry { parent, name, fault } => self.entry(*parent, name, *fault).await,
            Finding::Listed { ino, list, is_there } => self.listed(*ino, *list, *is_there).await,
            Finding::ListedTwice(ino) => Ok(Some(delete(&key::destroy(*ino)))),
            Finding::Session { ino, client } => self.session(*ino, *client).await,
            // The rest is counted.
            _ if !self.counts => Ok(None),
            Finding::EntryCount { ino, .. } | Finding::CookieReuse { ino, .. } => {
                self.directory(*ino).await
            }
            Finding::LinkCount { ino, says, has } => self.links(*ino, *says, *has).await,
            Finding::Parent { ino, named_in, .. } => self.parent(*ino, named_in).await,
            Finding::Unlisted(ino) => self.unlisted(*ino).await,
            Finding::Counter { says, has, what } => self.counter(what, *says, *has).await,
            Finding::Usage { subject, what, has, .. } => self.usage(*subject, what, *has).await,
            Finding::Missing(_)
            | Finding::UnknownRow(_)
            | Finding::NoDirectory(_)
            | Finding::Dangling { .. }
            | Finding::KindMismatch { .. }
            | Finding::Cycle(_)
            | Finding::Xattr { .. }
            | Finding::Acl(_)
            | Finding::Known { .. } => Ok(None),
        }
    }

    /// An inode; `Err` where its row cannot be decoded.
    async fn inode(&self, ino: Ino) -> Result<Option<Result<Inode, Damaged>>, KvError> {
        let row = self.store.get(&key::inode(ino)).await?;
        Ok(row.map(|row| Inode::decode(&row)))
    }

    async fn sound_inode(&self, ino: Ino) -> Result<Option<Inode>, KvError> {
        Ok(self.inode(ino).await?.and_then(Result::ok))
    }

    async fn has(&self, key: &[u8]) -> Result<bool, KvError> {
        Ok(self.store.get(key).await?.is_some())
    }

    async fn damaged(&mut self, key: &[u8]) -> Result<Option<Batch>, KvError> {
        // The next check counts what there is.
        if let Some((_, key::USED)) = key::subject_of(key) {
            return Ok(Some(delete(key)));
        }
        let Some(number) = key::first_number(key) else {
            let is_counters = key == key::COUNTERS;
            return if is_counters { self.new_counters().await } else { Ok(None) };
        };
        let ino = Ino(number);
        match key[0] {
            key::CLIENT | key::REPLY => self.forget(number).await.map(Some),
            key::NAME => self.name_of_entry(ino, &key[9..]).await,
            key::ENTRY => match key::second_number(key).filter(|_| key.len() == 17) {
                Some(cookie) => self.entry_of_name(ino, cookie).await,
                None => Ok(None),
            },
            // That it is listed says the key; only a name it is not given any more.
            key::ORPHAN => Ok(self
                .sound_inode(ino)
                .await?
                .filter(|inode| inode.nlink == 0)
                .map(|_| put(&key::orphan(ino), OrphanRow { may_get_name: false }.encode()))),
            _ => Ok(None),
        }
    }

    /// As if the lease of a client had ended. Its sessions stay, as chores.
    async fn forget(&self, client: u64) -> Result<Batch, KvError> {
        let mut batch = Batch::default();
        if self.has(&key::client(client)).await? {
            batch.delete(&key::client(client));
        }
        let mut from = start(key::REPLY, Ino(client));
        while let Some(rows) = rows_of(self.store, key::REPLY, Ino(client), &mut from).await? {
            rows.iter().for_each(|(key, _)| batch.delete(key));
        }
        Ok(batch)
    }

    /// Both rows of an entry say all that the other one says.
    async fn entry(
        &self,
        parent: Ino,
        name: &[u8],
        fault: EntryFault,
    ) -> Result<Option<Batch>, KvError> {
        let by_name = key::name(parent, name);
        let (EntryFault::NoName { cookie }
        | EntryFault::NoEntry { cookie }
        | EntryFault::Differ { cookie }) = fault;
        // Its row may be there under another name, or in another place.
        let is_untold = self.report.found() > self.report.findings.len() as u64;
        if is_untold || self.in_doubt.contains(&(parent, cookie)) {
            return Ok(None);
        }
        match fault {
            EntryFault::NoName { cookie } => {
                let entry = self.store.get(&key::entry(parent, cookie)).await?;
                let entry = entry.and_then(|row| EntryRow::decode(&row).ok());
                let Some(entry) = entry.filter(|entry| entry.name == name) else { return Ok(None) };
                if self.has(&by_name).await? {
                    return Ok(None);
                }
                let row = NameRow { cookie, ino: entry.ino, kind: entry.kind };
                Ok(Some(put(&by_name, &row.encode())))
            }
            EntryFault::NoEntry { cookie } => {
                let by_cookie = key::entry(parent, cookie);
                let row = self.store.get(&by_name).await?;
                let row = row.and_then(|row| NameRow::decode(&row).ok());
                let Some(row) = row.filter(|row| row.cookie == cookie) else { return Ok(None) };
                if self.has(&by_cookie).await? {
                    return Ok(None);
                }
                let entry = EntryRow::encode(row.ino, row.kind, name);
                Ok(Some(put(&by_cookie, &entry)))
            }
            // Nothing tells which is right.
            EntryFault::Differ { .. } => Ok(None),
        }
    }

    /// The row by name is damaged: made from the only entry with that name.
    async fn name_of_entry(&self, parent: Ino, name: &[u8]) -> Result<Option<Batch>, KvError> {
        let mut found = Vec::new();
        let mut from = start(key::ENTRY, parent);
        while let Some(rows) = rows_of(self.store, key::ENTRY, parent, &mut from).await? {
            for (key, value) in rows {
                // One that cannot be decoded may be the one.
                let Ok(entry) = EntryRow::decode(&value) else { return Ok(None) };
                let cookie = key::second_number(&key).filter(|_| key.len() == 17);
                if let Some(cookie) = cookie.filter(|_| entry.name == name) {
                    found.push(NameRow { cookie, ino: entry.ino, kind: entry.kind });
                }
            }
        }
        let [row] = found[..] else { return Ok(None) };
        Ok(Some(put(&key::name(parent, name), &row.encode())))
    }

    /// The row in the order of listing is damaged: made from the only name that points to it.
    async fn entry_of_name(&self, parent: Ino, cookie: u64) -> Result<Option<Batch>, KvError> {
        let mut found = Vec::new();
        let mut from = start(key::NAME, parent);
        while let Some(rows) = rows_of(self.store, key::NAME, parent, &mut from).await? {
            for (key, value) in rows {
                let Ok(row) = NameRow::decode(&value) else { return Ok(None) };
                if row.cookie == cookie {
                    found.push(EntryRow::encode(row.ino, row.kind, &key[9..]));
                }
            }
        }
        let [row] = &found[..] else { return Ok(None) };
        Ok(Some(put(&key::entry(parent, cookie), row)))
    }

    /// Counts a directory's entries, which have all rows by now.
    async fn directory(&self, ino: Ino) -> Result<Option<Batch>, KvError> {
        let Some(mut inode) = self.sound_inode(ino).await? else { return Ok(None) };
        let Body::Directory { next_cookie, .. } = inode.body else { return Ok(None) };
        let (mut count, mut last) = (0, 0);
        let mut from = start(key::ENTRY, ino);
        while let Some(rows) = rows_of(self.store, key::ENTRY, ino, &mut from).await? {
            count += rows.len() as u64;
            last = rows.last().and_then(|(key, _)| key::second_number(key)).unwrap_or(last);
        }
        let behind = if count > 0 { last.checked_add(1) } else { Some(0) };
        let Some(behind) = behind else { return Ok(None) };
        let body = Body::Directory { next_cookie: next_cookie.max(behind), entries: count };
        if (inode.size, &inode.body) == (count, &body) {
            return Ok(None);
        }
        (inode.size, inode.body) = (count, body);
        Ok(Some(put_inode(ino, inode)))
    }

    async fn links(&mut self, ino: Ino, says: u32, has: u64) -> Result<Option<Batch>, KvError> {
        let inode = self.sound_inode(ino).await?.filter(|inode| inode.nlink == says);
        let Some(mut inode) = inode else { return Ok(None) };
        let is_orphan = self.has(&key::orphan(ino)).await?;
        if has == 0 && !is_orphan {
            // Its name was lost. A directory is told by its parent.
            let is_directory = inode.kind() == Kind::Directory;
            return match self.options.reattach && !is_directory {
                true => reattach::attach(self.store, ino, inode).await,
                false => Ok(None),
            };
        }
        let Ok(nlink) = u32::try_from(has) else { return Ok(None) };
        inode.nlink = nlink;
        let mut batch = put_inode(ino, inode);
        if nlink > 0 {
            // In one batch: with a name it is in no list, and must not be reaped.
            for list in [key::destroy(ino), key::orphan(ino)] {
                if self.has(&list).await? {
                    batch.delete(&list);
                }
            }
        }
        Ok(Some(batch))
    }

    async fn parent(&self, ino: Ino, named_in: &[Ino]) -> Result<Option<Batch>, KvError> {
        let inode = self.sound_inode(ino).await?.filter(|_| ino != Ino::ROOT);
        let Some(mut inode) = inode else { return Ok(None) };
        match named_in {
            [only] => {
                inode.parent = *only;
                Ok(Some(put_inode(ino, inode)))
            }
            [] if self.options.reattach && !self.has(&key::orphan(ino)).await? => {
                reattach::attach(self.store, ino, inode).await
            }
            _ => Ok(None),
        }
    }

    /// Without a name, by all that there is: it is reaped like any orphan.
    async fn unlisted(&self, ino: Ino) -> Result<Option<Batch>, KvError> {
        let inode = self.sound_inode(ino).await?.filter(|inode| inode.nlink == 0);
        let Some(_) = inode.filter(|_| !self.miscounted.contains(&ino)) else { return Ok(None) };
        for tag in [key::ENTRY, key::NAME] {
            let mut from = start(tag, ino);
            while let Some(rows) = rows_of(self.store, tag, ino, &mut from).await? {
                if !rows.is_empty() {
                    return Ok(None);
                }
            }
        }
        Ok(Some(put(&key::orphan(ino), OrphanRow { may_get_name: false }.encode())))
    }

    async fn listed(&self, ino: Ino, list: List, is_there: bool) -> Result<Option<Batch>, KvError> {
        let inode = self.inode(ino).await?;
        let row = match list {
            List::Orphans => key::orphan(ino),
            List::Destroy => key::destroy(ino),
        };
        let is_needless = match (inode, list) {
            (None, _) => !is_there,
            (Some(Err(_)), _) => false,
            // Whatever its names: what says that it has some is not destroyed.
            (Some(Ok(inode)), List::Destroy) => inode.nlink > 0,
            (Some(Ok(inode)), List::Orphans) => {
                inode.nlink > 0 && self.counts && !self.miscounted.contains(&ino)
            }
        };
        Ok(is_needless.then(|| delete(&row)))
    }

    /// A write session of what is no file.
    async fn session(&self, ino: Ino, client: u64) -> Result<Option<Batch>, KvError> {
        let is_file = match self.inode(ino).await? {
            None => false,
            Some(Ok(inode)) => inode.kind() == Kind::File,
            Some(Err(_)) => true,
        };
        Ok((!is_file).then(|| delete(&key::session(ino, client))))
    }

    async fn counter(&self, what: &str, says: u64, has: u64) -> Result<Option<Batch>, KvError> {
        let row = self.store.get(key::COUNTERS).await?;
        let Some(mut counters) = row.and_then(|row| Counters::decode(&row).ok()) else {
            return Ok(None);
        };
        let Some(target) = self.target().await? else { return Ok(None) };
        let counter = match what {
            "inode numbers" if !is_plausible(target, has) => return Ok(None),
            "inode numbers" => &mut counters.next_ino,
            "client numbers" if has > NUMBERS_MAX => return Ok(None),
            "client numbers" => &mut counters.next_client,
            "deleted inodes" => &mut counters.doomed_inodes,
            "bytes of deleted files" => &mut counters.doomed_bytes,
            _ => &mut counters.inodes,
        };
        // Another repair of this pass may have moved it.
        if *counter != says {
            return Ok(None);
        }
        *counter = has;
        Ok(Some(put(key::COUNTERS, &counters.encode())))
    }

    /// An account, of inodes or bytes. A damaged one is made anew with all that was counted.
    async fn usage(
        &self,
        subject: Subject,
        what: &str,
        has: u64,
    ) -> Result<Option<Batch>, KvError> {
        let key = key::usage(subject);
        let row = self.store.get(&key).await?;
        let mut usage = row.and_then(|row| Usage::decode(&row).ok()).unwrap_or_default();
        match what {
            "inodes" => usage.inodes = has,
            _ => usage.bytes = has,
        }
        Ok(Some(match usage == Usage::default() {
            true => delete(&key),
            false => put(&key, &usage.encode()),
        }))
    }

    /// The number of this metadata target.
    async fn target(&self) -> Result<Option<u16>, KvError> {
        let row = self.store.get(key::SUPERBLOCK).await?;
        Ok(row.and_then(|row| Superblock::decode(&row).ok()).map(|row| row.target))
    }

    /// Counters in the place of lost ones. A number must not be given out twice, so those that left no row
    /// are skipped.
    async fn new_counters(&mut self) -> Result<Option<Batch>, KvError> {
        let Some(target) = self.target().await? else { return Ok(None) };
        let last_ino = self.report.last_ino.max(self.options.last_object_ino);
        let next_ino = last_ino.saturating_add(1).max(first_ino(target));
        let mut last_client = 0;
        for tag in [key::CLIENT, key::REPLY, key::SESSION] {
            let (mut last, end) = (vec![tag], [tag + 1]);
            loop {
                let from = std::ops::Bound::Excluded(&last[..]);
                let to = std::ops::Bound::Excluded(&end[..]);
                let rows = self.store.scan(from, to, 1024).await?;
                for (key, _) in &rows {
                    let client = match tag {
                        key::SESSION => key::second_number(key),
                        _ => key::first_number(key),
                    };
                    last_client = last_client.max(client.unwrap_or(0));
                }
                match rows.last() {
                    Some((key, _)) if rows.len() == 1024 => last = key.to_vec(),
                    _ => break,
                }
            }
        }
        if !is_plausible(target, next_ino) || last_client > NUMBERS_MAX {
            return Ok(None);
        }
        let counters = Counters {
            next_ino: next_ino + NUMBERS_SKIPPED,
            next_client: last_client + NUMBERS_SKIPPED,
            inodes: self.report.inodes,
            // The next check counts them.
            doomed_inodes: 0,
            doomed_bytes: 0,
        };
        Ok(Some(put(key::COUNTERS, &counters.encode())))
    }
}

/// A target may have come to give out this number next.
pub(super) fn is_plausible(target: u16, next_ino: u64) -> bool {
    let first = first_ino(target);
    (first..first + NUMBERS_MAX).contains(&next_ino)
}

fn put(key: &[u8], value: &[u8]) -> Batch {
    let mut batch = Batch::default();
    batch.put(key, value);
    batch
}

fn delete(key: &[u8]) -> Batch {
    let mut batch = Batch::default();
    batch.delete(key);
    batch
}

/// A changed inode.
pub(super) fn put_inode(ino: Ino, mut inode: Inode) -> Batch {
    inode.change = inode.change.wrapping_add(1);
    put(&key::inode(ino), &inode.encode())
}
