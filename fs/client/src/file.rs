//! An open file.

use crate::client::Core;
use crate::error::Error;
use crate::inode::{Cancel, Inode, Seek};
use crate::locks::LostMark;
use levada_base::IoVec;
use levada_base::ids::Ino;
use levada_wire::attr::Attr;
use levada_wire::lock::{Lock, LockOwner, LockRange};
use levada_wire::object::Hole;
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
    /// A lock that was taken through it is lost: what is done under its cover must not go on.
    lost: LostMark,
}

impl File {
    pub(crate) fn new(core: Rc<Core>, inode: Rc<Inode>) -> Self {
        Self { core, inode, lost: LostMark::default() }
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
        self.check_locks()?;
        self.core.in_time(self.inode.read(offset, bytes)).await
    }

    /// Writes all of `data` at `offset`. Everything is sent at once.
    ///
    /// # Errors
    ///
    /// [`Error::Full`], [`Error::Invalid`]; a part may have been written.
    pub async fn write(&self, offset: u64, data: IoVec) -> Result<(), Error> {
        self.check_locks()?;
        self.core.in_time(self.inode.write(offset, data)).await
    }

    /// As [`File::write`], and the bytes are durable when it returns; those that were written before need not be. For what
    /// lies within the file: where its end moves, this is a write and an [`File::fsync`].
    ///
    /// # Errors
    ///
    /// As [`File::write`] and [`File::fsync`].
    pub async fn write_durably(&self, offset: u64, data: IoVec) -> Result<(), Error> {
        self.check_locks()?;
        self.core.in_time(self.inode.write_durably(offset, data)).await
    }

    /// Writes all of `data` behind the last byte of the file, as it is with what all clients appended before; says
    /// where that is.
    ///
    /// # Errors
    ///
    /// As [`File::write`].
    pub async fn append(&self, data: IoVec) -> Result<u64, Error> {
        self.check_locks()?;
        self.core.in_time(self.inode.append(data)).await
    }

    /// True when other clients write it, too: what was read may be old as soon as it is read.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.inode.is_shared()
    }

    /// Makes `offset..offset + bytes` read as zeroes and take no room; the size stays.
    ///
    /// # Errors
    ///
    /// As [`File::write`].
    pub async fn punch(&self, offset: u64, bytes: u64) -> Result<(), Error> {
        self.check_locks()?;
        self.core.in_time(self.inode.punch(Hole { offset, bytes, grows: false })).await
    }

    /// Writes zeroes, which take no room.
    ///
    /// # Errors
    ///
    /// As [`File::write`].
    pub async fn zero(&self, offset: u64, bytes: u64) -> Result<(), Error> {
        self.check_locks()?;
        self.core.in_time(self.inode.punch(Hole { offset, bytes, grows: true })).await
    }

    /// Makes the file `size` bytes long if it is shorter, and changes nothing else.
    ///
    /// # Errors
    ///
    /// As [`File::write`].
    pub async fn grow(&self, size: u64) -> Result<(), Error> {
        self.check_locks()?;
        self.core.in_time(self.inode.grow(size)).await
    }

    /// The first byte of data, or of a hole, from `offset` on; behind the last one is a hole. `None` where the file
    /// ends before. What is written counts as data, also zeroes, and what was never written or punched does not.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`], [`Error::Missing`].
    pub async fn seek(&self, offset: u64, what: Seek) -> Result<Option<u64>, Error> {
        self.check_locks()?;
        self.core.in_time(self.inode.seek(offset, what, u64::MAX)).await
    }

    /// As [`File::seek`] for a hole, but data that goes on for `bytes` is not followed further.
    pub async fn hole_or_enough(&self, offset: u64, bytes: u64) -> Result<Option<u64>, Error> {
        let enough = offset.saturating_add(bytes);
        self.core.in_time(self.inode.seek(offset, Seek::Hole, enough)).await
    }

    /// Makes durable what was written before this call, with size and times. Returns an error
    /// of an earlier background write once.
    ///
    /// # Errors
    ///
    /// [`Error::Full`] and others, when data was lost.
    pub async fn fsync(&self) -> Result<(), Error> {
        self.check_locks()?;
        self.core.in_time(self.inode.sync()).await
    }

    /// Takes a lock, in place of what its owner held of that range; with `wait` when it is free. The owner is drawn by
    /// the caller. The attributes are those of the file from then on or later: what others wrote before they released
    /// it is seen. A caller that drops the future gets no lock.
    ///
    /// # Errors
    ///
    /// `LockHeld`, `Deadlock`, `TooManyLocks`; [`Error::Interrupted`] when `wait` was cancelled.
    pub async fn lock(&self, lock: Lock, wait: Option<Cancel>) -> Result<Attr, Error> {
        self.check_locks()?;
        self.core.in_time(self.inode.lock(lock, &self.lost, wait)).await
    }

    /// Releases what the owner holds of a range; carried to its end also when the caller gives up.
    ///
    /// # Errors
    ///
    /// `TooManyLocks` when that would split a range too many.
    pub async fn unlock(&self, owner: LockOwner, range: LockRange) -> Result<(), Error> {
        self.core.in_time(self.inode.unlock(owner, range)).await
    }

    /// True when the owner holds something of this file, or waits for it.
    #[must_use]
    pub fn has_locks(&self, owner: LockOwner) -> bool {
        self.inode.has_locks(owner)
    }

    /// A lock that would be in the way of this one; its pid is 0 when another client holds it.
    ///
    /// # Errors
    ///
    /// What the metadata service says.
    pub async fn test_lock(&self, lock: Lock) -> Result<Option<Lock>, Error> {
        self.core.in_time(self.inode.test_lock(lock)).await
    }

    fn check_locks(&self) -> Result<(), Error> {
        if self.lost.get() { Err(Error::LockLost) } else { Ok(()) }
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
    /// what was written becomes durable in the background. The last one of a file releases what this client had locked of
    /// it, and ends what is waited for (`NotOpen`).
    pub async fn close(self) {
        self.core.close(self.inode).await;
    }
}
