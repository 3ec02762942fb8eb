//! Holes and copies: `fallocate`, `lseek`, `copy_file_range`.
//!
//! The kernel has written its dirty pages of the range before it asks, and drops those pages afterwards. It refuses
//! what makes no sense: ranges that overlap, or end beyond the largest file or the caller's limit.

use super::Files;
use crate::codec::operation::CopyArgs;
use crate::codec::{Caller, Errno, Reply};
use levada_base::ids::Ino;
use levada_client::{File, Seek};

const KEEP_SIZE: u32 = libc::FALLOC_FL_KEEP_SIZE.cast_unsigned();
const ZERO: u32 = libc::FALLOC_FL_ZERO_RANGE.cast_unsigned();
const ZERO_KEEP_SIZE: u32 = ZERO | KEEP_SIZE;
const PUNCH: u32 = libc::FALLOC_FL_PUNCH_HOLE.cast_unsigned() | KEEP_SIZE;

impl Files {
    pub(super) async fn fallocate(
        &self,
        caller: Caller,
        ino: Ino,
        fh: u64,
        (offset, bytes): (u64, u64),
        mode: u32,
    ) -> Result<Reply, Errno> {
        let file = self.handles.file(ino, fh)?;
        let end = offset.checked_add(bytes).ok_or(Errno::FBIG)?;
        match mode {
            0 => {
                self.has_room(&file, offset, end).await?;
                file.grow(end).await?;
            }
            KEEP_SIZE => return self.has_room(&file, offset, end).await.map(|()| Reply::Done),
            ZERO => file.zero(offset, bytes).await?,
            ZERO_KEEP_SIZE | PUNCH => file.punch(offset, bytes).await?,
            _ => return Err(Errno::OPNOTSUPP),
        }
        self.changed_by(caller, &file, fh).await?;
        Ok(Reply::Done)
    }

    /// A log reserves nothing, so all that can be said is whether the space is there now: for what lies behind the
    /// end, as the rest may be stored already.
    async fn has_room(&self, file: &File, offset: u64, end: u64) -> Result<(), Errno> {
        let more = end.saturating_sub(file.attr().await?.size.max(offset));
        if more > 0 && more > self.client.space().await?.free_bytes {
            return Err(Errno::NOSPC);
        }
        Ok(())
    }

    pub(super) async fn seek(
        &self,
        ino: Ino,
        fh: u64,
        offset: u64,
        whence: u32,
    ) -> Result<Reply, Errno> {
        let what = match whence.cast_signed() {
            libc::SEEK_DATA => Seek::Data,
            libc::SEEK_HOLE => Seek::Hole,
            _ => return Err(Errno::INVAL),
        };
        let found = self.handles.file(ino, fh)?.seek(offset, what).await?;
        found.map(Reply::Offset).ok_or(Errno::NXIO)
    }

    /// Copies, and says how many bytes; a program asks again for what is left.
    pub(super) async fn copy(
        &self,
        caller: Caller,
        ino: Ino,
        args: CopyArgs,
    ) -> Result<u64, Errno> {
        let from = self.handles.file(ino, args.fh_in)?;
        let to = self.handles.file(Ino(args.inode_out), args.fh_out)?;
        let copied = from.copy(args.offset_in, &to, args.offset_out, args.length).await?;
        self.changed_by(caller, &to, args.fh_out).await?;
        Ok(copied)
    }

    /// As after a write. These requests do not say who may keep set-id bits, so root does.
    async fn changed_by(&self, caller: Caller, file: &File, fh: u64) -> Result<(), Errno> {
        self.changed(file, fh, caller.uid != 0, self.handles.is_sync(fh)).await
    }
}
