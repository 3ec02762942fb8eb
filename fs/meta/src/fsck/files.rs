//! What a metadata target says of objects, inode by inode, for whoever holds it against the objects.
//!
//! Of a store at rest all together; while it changes each page is of another moment. Memory: a page of rows.

use crate::census::FileNote;
use crate::config::MetaError;
use crate::key;
use crate::row::{Body, Counters, Inode, TailRow};
use levada_base::ids::Ino;
use levada_kv::{Batch, Bytes, KvError, Store};
use std::collections::VecDeque;
use std::ops::Bound;

const PAGE_ROWS: usize = 1024;

/// What an inode says of objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileRow {
    File(FileNote),
    /// It is no file, and has none.
    NoFile,
    /// Its row cannot be decoded: what it says is unknown.
    Damaged,
}

/// The inodes of a store, in the order of their numbers.
pub struct Files<'a> {
    store: &'a Store,
    /// Behind this key; `None`: all were read.
    from: Option<Vec<u8>>,
    page: VecDeque<(Bytes, Bytes)>,
}

impl<'a> Files<'a> {
    #[must_use]
    pub fn new(store: &'a Store) -> Self {
        Self { store, from: Some(vec![key::INODE]), page: VecDeque::new() }
    }

    /// The next inode, and what its row says.
    ///
    /// # Errors
    ///
    /// When the store cannot be read.
    pub async fn next(&mut self) -> Result<Option<(Ino, FileRow)>, KvError> {
        loop {
            if let Some((key, value)) = self.page.pop_front() {
                let Some(ino) = key::ino_of(&key).filter(|_| key.len() == 9) else { continue };
                return Ok(Some((ino, FileRow::of(&value))));
            }
            let Some(from) = self.from.take() else { return Ok(None) };
            let to = [key::INODE + 1];
            let (from, to) = (Bound::Excluded(&from[..]), Bound::Excluded(&to[..]));
            let page = self.store.scan_page(from, to, PAGE_ROWS).await?;
            self.from = page.upto.map(|upto| upto.to_vec());
            self.page = page.rows.into();
        }
    }
}

impl FileRow {
    pub(super) fn of(value: &[u8]) -> Self {
        let Ok(inode) = Inode::decode(value) else { return Self::Damaged };
        FileNote::of(inode).map_or(Self::NoFile, Self::File)
    }
}

/// What beside a file's row tells of its objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileUse {
    /// They may be other than the row says: the file is being written or cut.
    pub is_written: bool,
    /// They are to be destroyed, and some may be already.
    pub is_doomed: bool,
}

impl FileUse {
    /// Reads it.
    ///
    /// # Errors
    ///
    /// When the store cannot be read.
    pub async fn of(store: &Store, ino: Ino) -> Result<Self, KvError> {
        let is_doomed = store.get(&key::destroy(ino)).await?.is_some();
        let (from, to) = (key::session(ino, 0), key::behind(key::SESSION, ino));
        let sessions = store.scan(Bound::Included(&from), Bound::Excluded(&to), 1).await?;
        Ok(Self { is_written: !sessions.is_empty(), is_doomed })
    }
}

/// The numbers that tell whether the metadata is as new as the objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    /// No inode was given this number or a higher one, as far as is durable; 0: that is not known.
    pub next_ino: u64,
    /// A client is awaited that may bring back files with numbers below.
    pub awaited_ino: Option<u64>,
}

impl Numbers {
    /// Reads them.
    ///
    /// # Errors
    ///
    /// When the store cannot be read.
    pub async fn of(store: &Store) -> Result<Self, KvError> {
        let counters = store.get(key::COUNTERS).await?;
        let counters = counters.and_then(|row| Counters::decode(&row).ok());
        let tail = store.get(key::TAIL).await?;
        // One that cannot be decoded is there all the same.
        let awaited_ino =
            tail.map(|row| TailRow::decode(&row).map_or(u64::MAX, |tail| tail.numbers));
        Ok(Self { next_ino: counters.map_or(0, |counters| counters.next_ino), awaited_ino })
    }
}

/// Notes in a file that these of its components have objects. False when it is not there any more.
///
/// # Errors
///
/// When the store fails.
pub async fn note_components(store: &Store, ino: Ino, components: u64) -> Result<bool, MetaError> {
    let Some(row) = store.get(&key::inode(ino)).await? else { return Ok(false) };
    let mut inode = Inode::decode(&row)?;
    if !matches!(inode.body, Body::File(_)) {
        return Ok(false);
    }
    inode.components |= components;
    inode.change = inode.change.wrapping_add(1);
    store.room_to_free().await?;
    let mut batch = Batch::default();
    batch.put(&key::inode(ino), &inode.encode());
    let applied = store.apply(batch)?;
    store.durable(applied).await?;
    Ok(true)
}
