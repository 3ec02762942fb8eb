//! Where in the tree an inode or a name is, for people.

use super::finding::Finding;
use crate::key;
use crate::row::{EntryRow, Inode};
use levada_base::ids::Ino;
use levada_kv::{KvError, Store};
use levada_wire::attr::Kind;
use std::collections::HashMap;
use std::ops::Bound;

/// Rows of one directory that are read to find a name in it.
const ROWS_OF_ONE_MAX: usize = 100_000;
/// Rows that are read for all paths together: a check must not end in days of looking for names.
const ROWS_MAX: usize = 20_000_000;
const PAGE_ROWS: usize = 1024;
/// A path has 4096 bytes at most where a program gives one.
const DEPTH_MAX: usize = 2048;

/// See the module.
pub struct Paths<'a> {
    store: &'a Store,
    directories: HashMap<Ino, Option<Vec<u8>>>,
    rows_left: usize,
}

impl<'a> Paths<'a> {
    #[must_use]
    pub fn new(store: &'a Store) -> Self {
        Self { store, directories: HashMap::new(), rows_left: ROWS_MAX }
    }

    /// Where a finding is, from the root of the file system; `None` where that cannot be told.
    ///
    /// # Errors
    ///
    /// When the store cannot be read.
    pub async fn of(&mut self, finding: &Finding) -> Result<Option<Vec<u8>>, KvError> {
        if let Some((parent, name)) = finding.name() {
            let parent = self.directory(parent).await?;
            return Ok(parent.map(|parent| join(&parent, name)));
        }
        let Some(ino) = finding.ino() else { return Ok(None) };
        self.of_inode(ino).await
    }

    /// Where an inode is: one of its names.
    ///
    /// # Errors
    ///
    /// When the store cannot be read.
    pub async fn of_inode(&mut self, ino: Ino) -> Result<Option<Vec<u8>>, KvError> {
        match self.inode(ino).await? {
            Some(inode) if inode.kind() == Kind::Directory => self.directory(ino).await,
            Some(inode) => {
                let Some(parent) = self.directory(inode.parent).await? else { return Ok(None) };
                let name = self.name_in(inode.parent, ino).await?;
                Ok(name.map(|name| join(&parent, &name)))
            }
            None => Ok(None),
        }
    }

    async fn inode(&self, ino: Ino) -> Result<Option<Inode>, KvError> {
        let row = self.store.get(&key::inode(ino)).await?;
        Ok(row.and_then(|row| Inode::decode(&row).ok()))
    }

    async fn directory(&mut self, ino: Ino) -> Result<Option<Vec<u8>>, KvError> {
        let mut below = Vec::new();
        let mut at = ino;
        let mut path = loop {
            if at == Ino::ROOT {
                break Some(b"/".to_vec());
            }
            if let Some(known) = self.directories.get(&at) {
                break known.clone();
            }
            let inode = self.inode(at).await?.filter(|_| below.len() < DEPTH_MAX);
            let Some(inode) = inode else { break None };
            let name = self.name_in(inode.parent, at).await?;
            below.push((at, name));
            at = inode.parent;
        };
        for (at, name) in below.into_iter().rev() {
            path = path.zip(name).map(|(path, name)| join(&path, &name));
            self.directories.insert(at, path.clone());
        }
        Ok(path)
    }

    /// The name of `ino` in a directory.
    async fn name_in(&mut self, parent: Ino, ino: Ino) -> Result<Option<Vec<u8>>, KvError> {
        let mut from = key::entry(parent, 0).to_vec();
        let end = key::behind(key::ENTRY, parent);
        let mut left = ROWS_OF_ONE_MAX.min(self.rows_left);
        while left > 0 {
            let bounds = (Bound::Excluded(&from[..]), Bound::Excluded(&end[..]));
            let page = self.store.scan_page(bounds.0, bounds.1, PAGE_ROWS.min(left)).await?;
            left = left.saturating_sub(page.rows.len().max(1));
            self.rows_left = self.rows_left.saturating_sub(page.rows.len());
            for (_, value) in &page.rows {
                if let Ok(entry) = EntryRow::decode(value)
                    && entry.ino == ino
                {
                    return Ok(Some(entry.name));
                }
            }
            match page.upto {
                Some(upto) => from = upto.to_vec(),
                None => break,
            }
        }
        Ok(None)
    }
}

fn join(parent: &[u8], name: &[u8]) -> Vec<u8> {
    let slash: &[u8] = if parent.ends_with(b"/") { b"" } else { b"/" };
    [parent, slash, name].concat()
}
