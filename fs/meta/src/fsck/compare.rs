//! Rows looked at one by one, where their sums differ.
//!
//! Rows that are held against each other are read together, as of one moment; so what is found held then, also
//! while others go on changing them.

use super::finding::{EntryFault, Finding};
use super::links::BadName;
use super::source::Source;
use crate::key;
use crate::row::{EntryRow, Inode, NameRow};
use levada_base::ids::Ino;
use levada_kv::{Bytes, KvError, Store};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// Entries of one directory that are told; more are counted.
const FAULTS_KEPT: usize = 1 << 16;
const PAGE_ROWS: usize = 1024;
/// Looks at a row that changes under the comparison; what is changed so often is in use, and sound.
const LOOKS_MAX: usize = 8;

/// What a comparison found.
#[derive(Default)]
pub struct Compared {
    pub findings: Vec<Finding>,
    /// Entries beyond those that are told.
    pub more: u64,
    /// Names that only the listing has: they count as names, as nothing else is wrong with what they name.
    pub names: Vec<(Ino, NameRow)>,
    /// Of these, those that have no row by name at all.
    pub unnamed: u64,
}

/// The rows with one tag of an inode, page by page, from [`start`] on.
pub async fn rows_of(
    store: &Store,
    tag: u8,
    ino: Ino,
    from: &mut Option<Vec<u8>>,
) -> Result<Option<Vec<(Bytes, Bytes)>>, KvError> {
    let Some(after) = from.take() else { return Ok(None) };
    let end = key::behind(tag, ino);
    let page = store.scan_page(Bound::Excluded(&after), Bound::Excluded(&end), PAGE_ROWS).await?;
    *from = page.upto.map(|upto| upto.to_vec());
    Ok(Some(page.rows))
}

/// Before the first of them.
pub fn start(tag: u8, ino: Ino) -> Option<Vec<u8>> {
    Some([&[tag][..], &ino.0.to_be_bytes()].concat())
}

/// A row of an entry, and its counterpart: that may be absent, or be damaged.
type Pair<A, B> = Option<(A, Option<Result<B, ()>>)>;

/// A name and the entry that it points to; nothing when it is gone or cannot be decoded.
async fn by_name(
    source: &Source,
    parent: Ino,
    name: &[u8],
) -> Result<Pair<NameRow, EntryRow>, KvError> {
    let by_name = key::name(parent, name);
    let decode = |row: &Option<Bytes>| row.as_ref().and_then(|row| NameRow::decode(row).ok());
    for _ in 0..LOOKS_MAX {
        let row = source.together(std::slice::from_ref(&by_name)).await?;
        // One that cannot be decoded has been told.
        let Some(first) = decode(&row[0]) else { return Ok(None) };
        let both = [by_name.clone(), key::entry(parent, first.cookie)];
        let rows = source.together(&both).await?;
        if decode(&rows[0]) == Some(first) {
            let entry = rows[1].as_ref().map(|row| EntryRow::decode(row).map_err(drop));
            return Ok(Some((first, entry)));
        }
    }
    Ok(None)
}

/// An entry in the order of listing, and the row of its name; nothing when it is gone or cannot be decoded.
async fn by_cookie(
    source: &Source,
    parent: Ino,
    cookie: u64,
) -> Result<Pair<EntryRow, NameRow>, KvError> {
    let by_cookie = key::entry(parent, cookie);
    let decode = |row: &Option<Bytes>| row.as_ref().and_then(|row| EntryRow::decode(row).ok());
    for _ in 0..LOOKS_MAX {
        let row = source.together(std::slice::from_ref(&by_cookie)).await?;
        let Some(first) = decode(&row[0]) else { return Ok(None) };
        let both = [by_cookie.clone(), key::name(parent, &first.name)];
        let rows = source.together(&both).await?;
        if decode(&rows[0]).as_ref() == Some(&first) {
            let name = rows[1].as_ref().map(|row| NameRow::decode(row).map_err(drop));
            return Ok(Some((first, name)));
        }
    }
    Ok(None)
}

/// The entries of a directory, of which one order says other than the other.
pub async fn entries(source: &Source, parent: Ino) -> Result<Compared, KvError> {
    let store = source.store();
    let mut faults = Faults::default();
    let mut from = start(key::NAME, parent);
    while let Some(rows) = rows_of(store, key::NAME, parent, &mut from).await? {
        for (key, _) in rows.iter().filter(|(key, _)| key.len() > 9) {
            let name = &key[9..];
            let Some((row, entry)) = by_name(source, parent, name).await? else { continue };
            let cookie = row.cookie;
            match entry {
                None => faults.add(name, EntryFault::NoEntry { cookie }),
                Some(Ok(entry))
                    if entry.ino != row.ino || entry.kind != row.kind || entry.name != name =>
                {
                    faults.add(name, EntryFault::Differ { cookie });
                }
                Some(_) => {}
            }
        }
    }
    let (mut names, mut unnamed) = (Vec::new(), 0);
    let mut from = start(key::ENTRY, parent);
    while let Some(rows) = rows_of(store, key::ENTRY, parent, &mut from).await? {
        for (key, _) in rows.iter().filter(|(key, _)| key.len() == 17) {
            let Some(cookie) = key::second_number(key) else { continue };
            let Some((entry, name)) = by_cookie(source, parent, cookie).await? else { continue };
            let only_listed = NameRow { cookie, ino: entry.ino, kind: entry.kind };
            match name {
                None => {
                    unnamed += 1;
                    names.push((parent, only_listed));
                    faults.add(&entry.name, EntryFault::NoName { cookie });
                }
                Some(Err(())) => names.push((parent, only_listed)),
                Some(Ok(row)) if row.cookie != cookie => {
                    faults.add(&entry.name, EntryFault::Differ { cookie });
                }
                Some(Ok(_)) => {}
            }
        }
    }
    let found = faults.by_name.into_iter();
    let findings = found.map(|(name, fault)| Finding::Entry { parent, name, fault }).collect();
    Ok(Compared { findings, more: faults.more, names, unnamed })
}

/// What is wrong with names of one directory: each is told once.
#[derive(Default)]
struct Faults {
    by_name: BTreeMap<Vec<u8>, EntryFault>,
    more: u64,
}

impl Faults {
    fn add(&mut self, name: &[u8], fault: EntryFault) {
        if self.by_name.len() >= FAULTS_KEPT && !self.by_name.contains_key(name) {
            self.more += 1;
        } else {
            self.by_name.insert(name.to_vec(), fault);
        }
    }
}

/// The attributes that an inode lists against those that have rows.
pub async fn xattrs(source: &Source, ino: Ino) -> Result<Vec<Finding>, KvError> {
    let mut names = BTreeSet::new();
    let mut from = start(key::XATTR, ino);
    while let Some(rows) = rows_of(source.store(), key::XATTR, ino, &mut from).await? {
        let named = rows.iter().filter(|(key, _)| key.len() > 9);
        names.extend(named.map(|(key, _)| key[9..].to_vec()));
    }
    let row = source.together(&[key::inode(ino)]).await?;
    names.extend(listed(&row[0]));
    // All that either side ever had, looked at as of one moment.
    let keys = names.iter().map(|name| key::xattr(ino, name));
    let keys: Vec<_> = [key::inode(ino)].into_iter().chain(keys).collect();
    let rows = source.together(&keys).await?;
    let is_damaged = rows[0].as_ref().is_some_and(|row| Inode::decode(row).is_err());
    if is_damaged {
        return Ok(Vec::new());
    }
    let listed = listed(&rows[0]);
    let differ = names.into_iter().zip(&rows[1..]).filter_map(|(name, row)| {
        let is_listed = listed.contains(&name);
        (is_listed != row.is_some()).then_some(Finding::Xattr { ino, name, is_listed })
    });
    Ok(differ.collect())
}

/// The attributes that an inode lists.
fn listed(row: &Option<Bytes>) -> BTreeSet<Vec<u8>> {
    let inode = row.as_ref().and_then(|row| Inode::decode(row).ok());
    inode.map_or(BTreeSet::new(), |inode| inode.xattrs)
}

/// A name of what is not there, or of another kind, by its place in its directory's listing.
pub async fn bad_name(store: &Store, bad: BadName) -> Result<Option<Finding>, KvError> {
    let BadName { parent, cookie, ino, is_there } = bad;
    let entry = store.get(&key::entry(parent, cookie)).await?;
    let entry = entry.and_then(|row| EntryRow::decode(&row).ok());
    // Without a listing of it the entry itself is what was told.
    let Some(EntryRow { name, .. }) = entry else { return Ok(None) };
    Ok(Some(match is_there {
        true => Finding::KindMismatch { parent, name, ino },
        false => Finding::Dangling { parent, name, ino },
    }))
}
