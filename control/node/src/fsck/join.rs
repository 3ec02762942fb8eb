//! The inodes of the metadata and the objects of all targets, side by side in the order of inode numbers; so memory is a
//! page of each.
//!
//! Where they change meanwhile each page is of another moment, and what does not fit is a suspect at most.

use levada_base::ids::{Ino, ObjectId, TargetId};
use levada_kv::Store;
use levada_log::{IndexedObject, IndexedObjects, ListedObjects, LogError, ObjectLog};
use levada_meta::{FileRow, Files};

/// An object target.
pub struct Side<'a> {
    pub id: TargetId,
    objects: Objects<'a>,
    head: Option<IndexedObject>,
    pub count: u64,
}

enum Objects<'a> {
    Still(IndexedObjects<'a>),
    Serving(ListedObjects),
}

impl<'a> Side<'a> {
    /// That of the index in a store over which no log is open.
    pub async fn new(id: TargetId, store: &'a Store) -> Result<Self, LogError> {
        Self::of(id, Objects::Still(IndexedObjects::new(store).await?)).await
    }

    /// That of a log that goes on.
    pub async fn serving(id: TargetId, log: &ObjectLog) -> Result<Self, LogError> {
        Self::of(id, Objects::Serving(log.list())).await
    }

    async fn of(id: TargetId, objects: Objects<'a>) -> Result<Self, LogError> {
        let mut side = Self { id, objects, head: None, count: 0 };
        side.head = side.next().await?;
        Ok(side)
    }

    async fn next(&mut self) -> Result<Option<IndexedObject>, LogError> {
        match &mut self.objects {
            Objects::Still(objects) => Ok(objects.next().await?),
            Objects::Serving(objects) => objects.next().await,
        }
    }

    async fn take(&mut self) -> Result<Option<IndexedObject>, LogError> {
        let object = self.head.take();
        if object.is_some() {
            self.count += 1;
            self.head = self.next().await?;
        }
        Ok(object)
    }
}

/// What is met next.
pub enum Met {
    /// An object of another file system.
    Foreign(TargetId, ObjectId),
    /// One without an inode.
    Ownerless(TargetId, ObjectId),
    /// An inode, and its objects.
    Inode(Ino, FileRow, Vec<(TargetId, IndexedObject)>),
}

/// An inode, and what was met of its objects.
type File = (Ino, FileRow, Vec<(TargetId, IndexedObject)>);

/// See the module.
pub struct Join<'a, 'b> {
    fs: u64,
    files: Files<'a>,
    sides: &'b mut [Side<'a>],
    /// The one whose turn it is.
    file: Option<File>,
    has_begun: bool,
}

impl<'a, 'b> Join<'a, 'b> {
    /// `fs` is the number of the file system in the names of objects.
    pub fn new(metadata: &'a Store, fs: u64, sides: &'b mut [Side<'a>]) -> Self {
        Self { fs, files: Files::new(metadata), sides, file: None, has_begun: false }
    }

    /// What comes next.
    ///
    /// # Errors
    ///
    /// When the metadata, or a target, cannot be read.
    pub async fn next(&mut self) -> Result<Option<Met>, LogError> {
        if !self.has_begun {
            self.has_begun = true;
            self.file = self.next_file().await?;
        }
        let end = self.file.as_ref().map(|(ino, ..)| *ino);
        for side in &mut *self.sides {
            // Those of other file systems come before and behind.
            while let Some(IndexedObject { id, .. }) = side.head
                && (id.fs != self.fs || end.is_none_or(|end| id.ino <= end))
            {
                let Some(object) = side.take().await? else { break };
                match &mut self.file {
                    _ if id.fs != self.fs => return Ok(Some(Met::Foreign(side.id, id))),
                    Some((ino, _, objects)) if *ino == id.ino => objects.push((side.id, object)),
                    _ => return Ok(Some(Met::Ownerless(side.id, id))),
                }
            }
        }
        let Some((ino, row, objects)) = self.file.take() else { return Ok(None) };
        self.file = self.next_file().await?;
        Ok(Some(Met::Inode(ino, row, objects)))
    }

    async fn next_file(&mut self) -> Result<Option<File>, LogError> {
        let file = self.files.next().await?;
        Ok(file.map(|(ino, row)| (ino, row, Vec::new())))
    }
}
