//! FUSE requests for the one file, answered by the array.
//!
//! What always holds: whoever changes a block holds it ([`RangeLocks`]), so that the bytes of a block
//! which a request leaves alone are those of the last acknowledged write, however small its neighbours' requests are.

use crate::attr;
use levada_base::units::{BLOCK_BYTES, round_down, round_up};
use levada_base::{Buf, BufMut, IoVec, RangeLocks};
use levada_device::{BlockError, Durability};
use levada_fuse::codec::operation::SetAttr;
use levada_fuse::codec::{
    Attr, Errno, InitFlags, Limits, OpenReply, OpenReplyFlags, Operation, Reply, Request,
};
use levada_fuse::handler::{Handler, write_data};
use levada_raid::Array;
use std::cell::Cell;
use std::ops::Range;
use std::time::Duration;

/// How long the kernel may trust attributes. Only this mount changes them.
const VALID: Duration = Duration::from_secs(3600);

/// An array as a file. Lives on one core.
pub struct ArrayFile<A> {
    array: A,
    capacity_bytes: u64,
    stripe_bytes: u64,
    attr: Cell<Attr>,
    /// Blocks that somebody changes.
    changing: RangeLocks,
}

/// The bytes of whole blocks around `at..at + bytes`.
fn blocks_around(at: u64, bytes: u64) -> Range<u64> {
    round_down(at, BLOCK_BYTES)..round_up(at + bytes, BLOCK_BYTES)
}

/// What a program is told. An array that cannot go on is a broken disk to it.
fn errno_of(error: &BlockError) -> Errno {
    match error {
        BlockError::Medium { .. }
        | BlockError::Gone
        | BlockError::Fenced { .. }
        | BlockError::TooManyLost { .. } => Errno::IO,
        // The handler asks for nothing of the kind.
        BlockError::OutOfRange { .. } | BlockError::Misaligned { .. } => Errno::INVAL,
        BlockError::NotFresh { .. } | BlockError::Unsupported { .. } => Errno::OPNOTSUPP,
        BlockError::Io { errno } => Errno::from_raw(*errno),
    }
}

impl<A: Array> ArrayFile<A> {
    /// Shows `array`, which nobody else changes meanwhile.
    #[must_use]
    pub fn new(array: A) -> Self {
        let capacity_bytes = array.info().capacity_bytes;
        let stripe_bytes = array.geometry().stripe_bytes;
        let attr = Cell::new(attr::fresh(capacity_bytes));
        Self { array, capacity_bytes, stripe_bytes, attr, changing: RangeLocks::default() }
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
                self.array.flush().await.map_err(|error| errno_of(&error))?;
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
            Operation::StatFs => Ok(Reply::StatFs(attr::space(self.capacity_bytes))),
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
            Some(bytes) if bytes == self.capacity_bytes => {}
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
        bytes.min(self.capacity_bytes.saturating_sub(at))
    }

    async fn read(&self, at: u64, bytes: u64) -> Result<IoVec, Errno> {
        let bytes = self.within(at, bytes);
        if bytes == 0 {
            return Ok(IoVec::new());
        }
        let blocks = blocks_around(at, bytes);
        let read = self.read_blocks(&blocks).await?;
        Ok(read.slice((at - blocks.start) as usize, bytes as usize).into_vec())
    }

    async fn read_blocks(&self, blocks: &Range<u64>) -> Result<Buf, Errno> {
        let into = BufMut::for_overwrite((blocks.end - blocks.start) as usize).into_vec();
        let mut read =
            self.array.read(blocks.start, into).await.map_err(|error| errno_of(&error))?;
        Ok(read.pop().ok_or(Errno::IO)?.freeze())
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
        let data = data.slice(0, bytes as usize);
        let blocks = blocks_around(at, bytes);
        let _turn = self.changing.lock(blocks.start, blocks.end).await;
        self.write_held(&blocks, at, data).await?;
        // Requests are far below 4 GiB.
        Ok(bytes as u32)
    }

    /// Writes `data` at `at` into `blocks`, which are held.
    async fn write_held(&self, blocks: &Range<u64>, at: u64, data: Buf) -> Result<(), Errno> {
        let is_whole = at == blocks.start && at + data.len() as u64 == blocks.end;
        let is_aligned = (data.as_ptr() as usize).is_multiple_of(BLOCK_BYTES as usize);
        let data = match is_whole && is_aligned {
            true => data,
            false => self.merged(blocks, at, &data).await?,
        };
        let written = self.array.write(blocks.start, data.into_vec(), Durability::Volatile).await;
        written.map_err(|error| errno_of(&error))
    }

    /// What `blocks` hold once `data` is at `at`: read at the edges only.
    async fn merged(&self, blocks: &Range<u64>, at: u64, data: &[u8]) -> Result<Buf, Errno> {
        let end = at + data.len() as u64;
        let mut merged = BufMut::for_overwrite((blocks.end - blocks.start) as usize);
        let last = blocks.end - BLOCK_BYTES;
        let mut edges = Vec::with_capacity(2);
        if at > blocks.start {
            edges.push(blocks.start);
        }
        if end < blocks.end && !edges.contains(&last) {
            edges.push(last);
        }
        for edge in edges {
            let old = self.read_blocks(&(edge..edge + BLOCK_BYTES)).await?;
            merged[(edge - blocks.start) as usize..][..old.len()].copy_from_slice(&old);
        }
        merged[(at - blocks.start) as usize..][..data.len()].copy_from_slice(data);
        Ok(merged.freeze())
    }

    /// fallocate(2): what is allocated has its space already.
    async fn allocate(&self, at: u64, bytes: u64, mode: u32) -> Result<(), Errno> {
        const KEEP_SIZE: u32 = libc::FALLOC_FL_KEEP_SIZE.cast_unsigned();
        const PUNCH_HOLE: u32 = libc::FALLOC_FL_PUNCH_HOLE.cast_unsigned() | KEEP_SIZE;
        const ZERO_RANGE: u32 = libc::FALLOC_FL_ZERO_RANGE.cast_unsigned();
        const ZERO_WITHIN: u32 = ZERO_RANGE | KEEP_SIZE;
        let is_past = at.checked_add(bytes).is_none_or(|end| end > self.capacity_bytes);
        match mode {
            0 | KEEP_SIZE | ZERO_RANGE if is_past => Err(Errno::NOSPC),
            0 | KEEP_SIZE => Ok(()),
            PUNCH_HOLE | ZERO_RANGE | ZERO_WITHIN => self.zero(at, self.within(at, bytes)).await,
            _ => Err(Errno::OPNOTSUPP),
        }
    }

    /// Makes bytes within the file read as zeroes.
    async fn zero(&self, at: u64, bytes: u64) -> Result<(), Errno> {
        if bytes == 0 {
            return Ok(());
        }
        let (end, blocks) = (at + bytes, blocks_around(at, bytes));
        let _turn = self.changing.lock(blocks.start, blocks.end).await;
        let (first, past) = (round_up(at, BLOCK_BYTES), round_down(end, BLOCK_BYTES));
        if first >= past {
            // Not one whole block; at most the edges of two.
            let zeroes = BufMut::zeroed(bytes as usize).freeze();
            return self.write_held(&blocks, at, zeroes).await;
        }
        for (from, to) in [(at, first), (past, end)] {
            if from < to {
                let zeroes = BufMut::zeroed((to - from) as usize).freeze();
                self.write_held(&blocks_around(from, to - from), from, zeroes).await?;
            }
        }
        self.zero_blocks(first, past).await.map_err(|error| errno_of(&error))
    }

    /// Whole stripes are given back: they read as zeroes, and neither rebuild nor scrub looks at them.
    async fn zero_blocks(&self, from: u64, to: u64) -> Result<(), BlockError> {
        let (first, end) = (from.div_ceil(self.stripe_bytes), to / self.stripe_bytes);
        if first >= end {
            return self.array.write_zeroes(from, to - from).await;
        }
        let (discard_from, discard_to) = (first * self.stripe_bytes, end * self.stripe_bytes);
        for (from, to) in [(from, discard_from), (discard_to, to)] {
            if from < to {
                self.array.write_zeroes(from, to - from).await?;
            }
        }
        self.array.discard_stripes(first, end - first).await
    }
}

impl<A: Array> Handler for ArrayFile<A> {
    async fn handle(&self, request: Request<'_>, message: &Buf) -> Reply {
        self.answer(request, message).await.unwrap_or_else(Reply::Error)
    }
}

#[cfg(test)]
mod tests;
