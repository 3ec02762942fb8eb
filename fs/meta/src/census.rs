//! Census: what a metadata target says of objects, for whoever compares it with the object logs.
//!
//! For a store at rest, as [`crate::check()`]; that one says what does not fit together within it.
//! Memory grows with the number of files.

use crate::config::MetaError;
use crate::key;
use crate::row::{Body, Counters, Inode, Session};
use levada_base::ids::Ino;
use levada_kv::{Bytes, Store};
use levada_wire::attr::Layout;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// A file, named or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileNote {
    /// Bytes.
    pub size: u64,
    /// As in [`levada_wire::attr::Attr`]: a bit for each object that must exist.
    pub components: u64,
    pub layout: Layout,
    /// Bytes that its objects are said to hold, by component; those behind the last have none.
    pub stored: Option<Vec<u64>>,
}

impl FileNote {
    /// `None` of what is no file.
    pub(crate) fn of(inode: Inode) -> Option<Self> {
        let Body::File(layout) = inode.body else { return None };
        let (size, components) = (inode.size, inode.components);
        let stored = inode.stored.map(|stored| stored.by_component().to_vec());
        Some(Self { size, components, layout, stored })
    }
}

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census {
    pub files: BTreeMap<Ino, FileNote>,
    /// Write sessions: the file, the client's number, and the size of a cut that is pending.
    pub sessions: Vec<(Ino, u64, Option<u64>)>,
    /// Without a name, and not yet to be destroyed.
    pub orphans: BTreeSet<Ino>,
    /// Their objects are to be destroyed.
    pub destroy: BTreeSet<Ino>,
    /// No inode was ever given this number or a higher one.
    pub next_ino: u64,
}

/// Reads the rows that speak of objects.
///
/// # Errors
///
/// When the store cannot be read, or a row of it not be decoded.
pub async fn census(store: &Store) -> Result<Census, MetaError> {
    const ROWS: usize = 4096;
    let mut census = Census::default();
    for tag in [key::INODE, key::SESSION, key::ORPHAN, key::DESTROY] {
        let (mut last, end) = (vec![tag], [tag + 1]);
        loop {
            let rows = store.scan(Bound::Excluded(&last), Bound::Excluded(&end), ROWS).await?;
            for (key, value) in &rows {
                census.add(key, value)?;
            }
            match rows.last() {
                Some((key, _)) if rows.len() == ROWS => last = key.to_vec(),
                _ => break,
            }
        }
    }
    let counters: Option<Bytes> = store.get(key::COUNTERS).await?;
    if let Some(counters) = counters {
        census.next_ino = Counters::decode(&counters)?.next_ino;
    }
    Ok(census)
}

impl Census {
    fn add(&mut self, key: &[u8], value: &[u8]) -> Result<(), MetaError> {
        let Some(ino) = key::first_number(key).map(Ino) else { return Ok(()) };
        match key[0] {
            key::INODE => {
                if let Some(file) = FileNote::of(Inode::decode(value)?) {
                    self.files.insert(ino, file);
                }
            }
            key::SESSION => {
                let client = key::second_number(key).unwrap_or_default();
                self.sessions.push((ino, client, Session::decode(value)?.cut));
            }
            key::ORPHAN => {
                self.orphans.insert(ino);
            }
            _ => {
                self.destroy.insert(ino);
            }
        }
        Ok(())
    }
}
