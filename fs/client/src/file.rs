//! An open file.

use crate::client::Core;
use crate::error::Error;
use crate::inode::Inode;
use levada_base::IoVec;
use levada_base::ids::Ino;
use levada_wire::attr::Attr;
use std::rc::Rc;

/// An open file. Cheap to clone for concurrent requests; [`File::close`] is called once.
///
/// Durability: a write that returned is visible to everybody and survives any restart of any
/// service, because the client keeps it; it survives the end of this client once a later
/// [`File::fsync`] returned. A close makes it durable too, but in the background: a program that
/// must know calls `fsync`.
#[derive(Clone)]
pub struct File {
    core: Rc<Core>,
    inode: Rc<Inode>,
}

impl File {
    pub(crate) fn new(core: Rc<Core>, inode: Rc<Inode>) -> Self {
        Self { core, inode }
    }

    /// The service has opened the write session together with the file.
    pub(crate) fn session_began(&self) {
        self.inode.session_began();
    }

    /// The file's number.
    #[must_use]
    pub fn ino(&self) -> Ino {
        self.inode.ino
    }

    /// Reads up to `bytes` bytes from `offset` on; fewer at the end of the file, none behind
    /// it. Everything is asked for at once. Sees every write that returned.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`], [`Error::Missing`].
    pub async fn read(&self, offset: u64, bytes: u64) -> Result<IoVec, Error> {
        self.core.in_time(self.inode.read(offset, bytes)).await
    }

    /// Writes all of `data` at `offset`. Everything is sent at once.
    ///
    /// # Errors
    ///
    /// [`Error::Full`], [`Error::Invalid`]; a part may have been written.
    pub async fn write(&self, offset: u64, data: IoVec) -> Result<(), Error> {
        self.core.in_time(self.inode.write(offset, data)).await
    }

    /// Makes durable what was written before this call, with size and times. Returns an error
    /// of an earlier background write once.
    ///
    /// # Errors
    ///
    /// [`Error::Full`] and others, when data was lost.
    pub async fn fsync(&self) -> Result<(), Error> {
        self.core.in_time(self.inode.sync()).await
    }

    /// Exact attributes.
    ///
    /// # Errors
    ///
    /// What the metadata service says.
    pub async fn attr(&self) -> Result<Attr, Error> {
        self.core.in_time(self.core.attr(self.inode.ino)).await
    }

    /// Gives the handle back. Returns at once, unless very many closed files are on their way;
    /// what was written becomes durable in the background.
    pub async fn close(self) {
        self.core.close(self.inode).await;
    }
}
