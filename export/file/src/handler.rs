//! FUSE requests for the one file, answered by a volume.

use crate::attr;
use levada_base::{Buf, HasErrno, IoVec};
use levada_device::Durability;
use levada_fuse::codec::operation::SetAttr;
use levada_fuse::codec::{
    Attr, Errno, InitFlags, Limits, OpenReply, OpenReplyFlags, Operation, Reply, Request,
};
use levada_fuse::handler::{Handler, write_data};
use levada_volume::{Volume, VolumeError, Zeroing};
use std::cell::Cell;
use std::time::Duration;

/// How long the kernel may trust attributes. Only this mount changes them.
const VALID: Duration = Duration::from_secs(3600);

/// A volume as a file. Lives on one core.
pub struct VolumeFile<V> {
    volume: V,
    size_bytes: u64,
    attr: Cell<Attr>,
}

fn errno_of(error: VolumeError) -> Errno {
    Errno::from_raw(error.errno())
}

impl<V: Volume> VolumeFile<V> {
    /// Shows `volume`, whose size does not change meanwhile.
    #[must_use]
    pub fn new(volume: V) -> Self {
        let size_bytes = volume.size_bytes();
        Self { volume, size_bytes, attr: Cell::new(attr::fresh(size_bytes)) }
    }

    /// What to offer the kernel.
    #[must_use]
    pub fn limits() -> Limits {
        // Without ATOMIC_O_TRUNC the kernel asks before it believes that an open has cut the file.
        let wanted = InitFlags::ATOMIC_O_TRUNC | InitFlags::EXPORT_SUPPORT;
        let limits = Limits::default();
        Limits { wanted: limits.wanted - wanted, ..limits }
    }

    async fn answer(&self, request: Request<'_>, message: &Buf) -> Result<Reply, Errno> {
        match request.operation {
            Operation::Read(args) => {
                Ok(Reply::Data(self.read(args.offset, u64::from(args.size)).await?))
            }
            Operation::Write(write) => {
                let data = write_data(message, &write);
                Ok(Reply::Written(self.write(write.offset, data).await?))
            }
            Operation::Fsync { .. } | Operation::FsyncDir { .. } | Operation::SyncFs => {
                self.volume.flush().await.map_err(errno_of)?;
                Ok(Reply::Done)
            }
            Operation::Fallocate { offset, length, mode, .. } => {
                self.allocate(offset, length, mode).await?;
                Ok(Reply::Done)
            }
            Operation::GetAttr { .. } => Ok(self.attr_reply()),
            Operation::Statx { .. } => {
                Ok(Reply::Statx { statx: attr::extended(self.attr.get()), valid: VALID })
            }
            Operation::SetAttr(set) => self.set_attr(&set),
            Operation::StatFs => Ok(Reply::StatFs(attr::space(self.size_bytes))),
            // Past the page cache, so that an answered write is in the array; in parallel, as nobody
            // extends the file.
            Operation::Open(_) => Ok(Reply::Open(OpenReply {
                fh: 0,
                flags: OpenReplyFlags::DIRECT_IO | OpenReplyFlags::PARALLEL_DIRECT_WRITES,
            })),
            // The kernel has kept nothing back that close could hand over.
            Operation::Flush { .. } | Operation::Release(_) | Operation::Destroy => Ok(Reply::Done),
            Operation::Forget { .. } | Operation::BatchForget(_) | Operation::Interrupt { .. } => {
                Ok(Reply::Silent)
            }
            Operation::Lookup { .. }
            | Operation::OpenDir(_)
            | Operation::ReadDir(_)
            | Operation::ReadDirPlus(_)
            | Operation::ReleaseDir(_)
            | Operation::Create { .. }
            | Operation::TmpFile { .. }
            | Operation::MkNod { .. }
            | Operation::MkDir { .. }
            | Operation::Symlink { .. }
            | Operation::Unlink { .. }
            | Operation::RmDir { .. }
            | Operation::Rename { .. }
            | Operation::Link { .. } => Err(Errno::NOTDIR),
            Operation::ReadLink => Err(Errno::INVAL),
            // The kernel does without: it checks modes, keeps locks, seeks and copies by itself.
            Operation::Access { .. }
            | Operation::GetXattr { .. }
            | Operation::SetXattr { .. }
            | Operation::ListXattr { .. }
            | Operation::RemoveXattr { .. }
            | Operation::GetLk(_)
            | Operation::SetLk(_)
            | Operation::SetLkW(_)
            | Operation::LSeek { .. }
            | Operation::CopyFileRange(_)
            | Operation::CopyFileRange64(_) => Err(Errno::NOSYS),
            // The session answers these.
            Operation::Init(_) | Operation::Unknown { .. } => Err(Errno::IO),
        }
    }

    fn attr_reply(&self) -> Reply {
        Reply::Attr { attr: self.attr.get(), valid: VALID }
    }

    fn set_attr(&self, set: &SetAttr) -> Result<Reply, Errno> {
        match set.size {
            Some(bytes) if bytes == self.size_bytes => {}
            // An open with O_TRUNC, which a block device ignores as well.
            Some(0) if set.fh.is_none() => {}
            Some(_) => return Err(Errno::PERM),
            None => {}
        }
        self.attr.set(attr::changed(self.attr.get(), set));
        Ok(self.attr_reply())
    }

    /// Of `bytes` from `at` on, how many are in the file.
    fn within(&self, at: u64, bytes: u64) -> u64 {
        bytes.min(self.size_bytes.saturating_sub(at))
    }

    async fn read(&self, at: u64, bytes: u64) -> Result<IoVec, Errno> {
        match self.within(at, bytes) {
            0 => Ok(IoVec::new()),
            bytes => self.volume.read(at, bytes).await.map_err(errno_of),
        }
    }

    /// Writes what is within the file; the bytes taken.
    async fn write(&self, at: u64, data: Buf) -> Result<u32, Errno> {
        if data.is_empty() {
            return Ok(0);
        }
        let bytes = self.within(at, data.len() as u64);
        if bytes == 0 {
            return Err(Errno::NOSPC);
        }
        let data = data.slice(0, bytes as usize).into_vec();
        self.volume.write(at, data, Durability::Volatile).await.map_err(errno_of)?;
        // Requests are far below 4 GiB.
        Ok(bytes as u32)
    }

    /// fallocate(2): what is allocated has its space already.
    async fn allocate(&self, at: u64, bytes: u64, mode: u32) -> Result<(), Errno> {
        const KEEP_SIZE: u32 = libc::FALLOC_FL_KEEP_SIZE.cast_unsigned();
        const PUNCH_HOLE: u32 = libc::FALLOC_FL_PUNCH_HOLE.cast_unsigned() | KEEP_SIZE;
        const ZERO_RANGE: u32 = libc::FALLOC_FL_ZERO_RANGE.cast_unsigned();
        const ZERO_WITHIN: u32 = ZERO_RANGE | KEEP_SIZE;
        let is_past = at.checked_add(bytes).is_none_or(|end| end > self.size_bytes);
        match mode {
            0 | KEEP_SIZE | ZERO_RANGE if is_past => Err(Errno::NOSPC),
            0 | KEEP_SIZE => Ok(()),
            PUNCH_HOLE | ZERO_RANGE | ZERO_WITHIN => self.zero(at, self.within(at, bytes)).await,
            _ => Err(Errno::OPNOTSUPP),
        }
    }

    /// Makes bytes within the file read as zeroes.
    async fn zero(&self, at: u64, bytes: u64) -> Result<(), Errno> {
        match bytes {
            0 => Ok(()),
            _ => self.volume.write_zeroes(at, bytes, Zeroing::Free).await.map_err(errno_of),
        }
    }
}

impl<V: Volume> Handler for VolumeFile<V> {
    async fn handle(&self, request: Request<'_>, message: &Buf) -> Reply {
        self.answer(request, message).await.unwrap_or_else(Reply::Error)
    }
}

#[cfg(test)]
mod tests;
