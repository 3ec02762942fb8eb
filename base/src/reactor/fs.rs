//! Files and block devices, read and written at offsets through the ring.
//!
//! A file is registered with the ring by its first read or write and taken out when it is closed;
//! a request past the page cache whose bytes lie together names registered memory
//! ([`super::Registered`]). Parts that lie apart go as a list.
//!
//! Opening, locking and asking for the length are plain system calls: they happen when a daemon
//! starts. Everything else is asynchronous. After a crash the kernel drops locks by itself.
#![allow(unsafe_code)] // Operations that point to buffers which the ring owns.

use super::Core;
use super::fd::{RawParts, raw_parts, raw_runs};
use super::registered::Opened;
use super::ring::Ring;
use crate::buf::{View, bytes_in};
use crate::lent::bytes_lent;
use crate::{IoVec, IoVecMut, LentVec};
use io_uring::{opcode, squeue, types};
use smallvec::SmallVec;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::rc::Rc;

/// `_IO(0x12, 104)` of `linux/fs.h`.
const BLKSSZGET: libc::Ioctl = 0x1268;
/// `_IO(0x12, 123)` of `linux/fs.h`.
const BLKPBSZGET: libc::Ioctl = 0x127b;

/// The kernel moves no more at a time (`MAX_RW_COUNT`).
const REQUEST_BYTES_MAX: usize = 0x7fff_f000;

/// How to open a [`File`]; reading is always allowed.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenOptions {
    /// Allow writing.
    pub write: bool,
    /// Bypass the page cache (`O_DIRECT`): offsets, lengths and buffers must be aligned.
    pub direct: bool,
    /// Create the file if it is missing.
    pub create: bool,
    /// With `create`: fail if it exists. On a block device without `create`: fail if it is
    /// mounted or otherwise claimed (`O_EXCL`).
    pub exclusive: bool,
}

/// An open file or block device. Clones share the descriptor, which stays open until the last
/// operation in flight has completed.
#[derive(Clone, Debug)]
pub struct File {
    opened: Rc<Opened>,
}

impl File {
    /// Opens a file. Blocks for as long as `open(2)` does.
    ///
    /// # Errors
    ///
    /// What `open(2)` says.
    pub fn open(path: &Path, options: OpenOptions) -> io::Result<Self> {
        let mut flags = libc::O_CLOEXEC;
        if options.direct {
            flags |= libc::O_DIRECT;
        }
        let mut open = std::fs::OpenOptions::new();
        // What lies here is for its owner alone: modes of the files inside mean nothing to who reads it raw.
        open.read(true).write(options.write).mode(0o600);
        match (options.create, options.exclusive) {
            (true, true) => {
                open.create_new(true);
            }
            (true, false) => {
                open.create(true).truncate(false);
            }
            (false, true) => flags |= libc::O_EXCL,
            (false, false) => {}
        }
        let file = open.custom_flags(flags).open(path)?;
        Ok(Self { opened: Rc::new(Opened::new(file.into(), options.direct)) })
    }

    /// Takes the advisory lock that only one opener of the file can have (`flock(2)`), until the
    /// file is closed. False when another opener has it.
    ///
    /// # Errors
    ///
    /// What `flock(2)` says.
    pub fn try_lock(&self) -> io::Result<bool> {
        // SAFETY: the descriptor is open; no memory is involved.
        if unsafe { libc::flock(self.opened.fd().as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0
        {
            return Ok(true);
        }
        let error = io::Error::last_os_error();
        if error.kind() == io::ErrorKind::WouldBlock { Ok(false) } else { Err(error) }
    }

    /// The length in bytes, of a block device too.
    ///
    /// # Errors
    ///
    /// What `lseek(2)` says.
    pub fn len(&self) -> io::Result<u64> {
        // SAFETY: the descriptor is open; its position is used by nobody.
        let end = unsafe { libc::lseek(self.opened.fd().as_raw_fd(), 0, libc::SEEK_END) };
        u64::try_from(end).map_err(|_| io::Error::last_os_error())
    }

    /// Bytes of the smallest unit that a block device transfers (`BLKSSZGET`).
    ///
    /// # Errors
    ///
    /// What `ioctl(2)` says; `ENOTTY` when this is no block device.
    pub fn logical_block_bytes(&self) -> io::Result<u64> {
        self.block_size(BLKSSZGET)
    }

    /// Bytes of the unit that a block device writes at once (`BLKPBSZGET`): of NVMe drives no more than they say they write
    /// atomically at a power failure.
    ///
    /// # Errors
    ///
    /// As [`File::logical_block_bytes`].
    pub fn physical_block_bytes(&self) -> io::Result<u64> {
        self.block_size(BLKPBSZGET)
    }

    fn block_size(&self, which: libc::Ioctl) -> io::Result<u64> {
        let mut bytes: libc::c_int = 0;
        // SAFETY: the requests write one int, and `bytes` is one.
        let got = unsafe { libc::ioctl(self.opened.fd().as_raw_fd(), which, &raw mut bytes) };
        if got < 0 {
            return Err(io::Error::last_os_error());
        }
        u64::try_from(bytes).map_err(|_| io::ErrorKind::InvalidData.into())
    }

    /// True when the length is zero.
    ///
    /// # Errors
    ///
    /// What `lseek(2)` says.
    pub fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Fills `into` from `at` on and hands it back.
    ///
    /// # Errors
    ///
    /// What `preadv(2)` says; [`io::ErrorKind::UnexpectedEof`] when the file ends first.
    pub async fn read_at(&self, at: u64, into: IoVecMut) -> io::Result<IoVecMut> {
        // SAFETY: the buffers belong to nobody else.
        unsafe { self.transfer(Transfer::Read, at, into) }.await
    }

    /// Fills `into` from `at` on, as [`File::read_at`]. What was read past the page cache was never anywhere else.
    ///
    /// # Errors
    ///
    /// As [`File::read_at`], and `EFAULT` where memory is gone. Some of it may have been filled.
    pub async fn read_into(&self, at: u64, into: LentVec) -> io::Result<()> {
        let ring = Core::current_ring();
        self.opened.register(&ring);
        let (total, mut kept) = (bytes_lent(&into) as usize, into);
        let mut done = 0;
        while done < total {
            let raw = raw_runs(kept.iter().map(|part| (part.start(), part.len())), done);
            // SAFETY: file, memory and list are kept, and the memory may be written to, whoever has it.
            let op = unsafe {
                ring.submit((Rc::clone(&self.opened), kept, raw), |(opened, _, raw)| {
                    let (fd, flags) = opened.target(&ring);
                    Transfer::Read.parts(fd, at + done as u64, raw).flags(flags)
                })
            };
            let (moved, (_, lent, _)) = op.await;
            kept = lent;
            match moved {
                Ok(0) => return Err(Transfer::Read.moved_nothing().into()),
                Ok(moved) => done += moved,
                Err(error) if is_passing(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Writes `from` at `at`; with `fua`, durably (`RWF_DSYNC`).
    ///
    /// # Errors
    ///
    /// What `pwritev2(2)` says. The write may have taken effect in part.
    pub async fn write_at(&self, at: u64, from: IoVec, fua: bool) -> io::Result<()> {
        let rw_flags = if fua { libc::RWF_DSYNC } else { 0 };
        // SAFETY: a write fills no buffer.
        unsafe { self.transfer(Transfer::Write { rw_flags }, at, from) }.await.map(drop)
    }

    /// Moves all of `parts`, by as many requests as it takes, and hands them back.
    ///
    /// # Safety
    ///
    /// For a read, the memory of `parts` belongs to nobody else.
    async unsafe fn transfer<V: View + 'static>(
        &self,
        transfer: Transfer,
        at: u64,
        mut parts: SmallVec<[V; 4]>,
    ) -> io::Result<SmallVec<[V; 4]>> {
        let ring = Core::current_ring();
        self.opened.register(&ring);
        let total = bytes_in(&parts) as usize;
        let mut done = 0;
        while done < total {
            let offset = at + done as u64;
            let moved = match self.next_piece(&ring, &parts, done) {
                Piece::Whole { start, len, index } => {
                    // SAFETY: file and buffers are kept; the caller's promise for a read.
                    let op = unsafe {
                        ring.submit((Rc::clone(&self.opened), parts), |(opened, _)| {
                            let (fd, flags) = opened.target(&ring);
                            transfer.whole(fd, offset, start, len, index).flags(flags)
                        })
                    };
                    let (moved, kept) = op.await;
                    parts = kept.1;
                    moved
                }
                Piece::Parts(raw) => {
                    // SAFETY: as above, and the list is kept too.
                    let op = unsafe {
                        ring.submit((Rc::clone(&self.opened), parts, raw), |(opened, _, raw)| {
                            let (fd, flags) = opened.target(&ring);
                            transfer.parts(fd, offset, raw).flags(flags)
                        })
                    };
                    let (moved, kept) = op.await;
                    parts = kept.1;
                    moved
                }
            };
            match moved {
                Ok(0) => return Err(transfer.moved_nothing().into()),
                Ok(moved) => done += moved,
                Err(error) if is_passing(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(parts)
    }

    /// What the next request moves, behind the first `done` bytes of `parts`.
    fn next_piece<V: View>(&self, ring: &Rc<Ring>, parts: &[V], done: usize) -> Piece {
        let raw = raw_parts(parts.iter().map(|part| &part[..]), done);
        let &[libc::iovec { iov_base, iov_len }] = &raw[..] else { return Piece::Parts(raw) };
        let len = iov_len.min(REQUEST_BYTES_MAX);
        let start = iov_base.cast::<u8>();
        let mut skip = done;
        let first = parts.iter().find(|part| {
            let is_behind = skip >= part.len();
            skip -= if is_behind { part.len() } else { 0 };
            !is_behind
        });
        let index = first
            .filter(|_| self.opened.is_direct)
            .and_then(|part| ring.buffer_index(part.region(), start, len));
        Piece::Whole { start, len: len as u32, index }
    }

    /// Makes every write durable that completed before this call (`fdatasync(2)`).
    ///
    /// # Errors
    ///
    /// What `fdatasync(2)` says; then it is unknown what became durable.
    pub async fn sync_data(&self) -> io::Result<()> {
        let ring = Core::current_ring();
        // SAFETY: the file is kept.
        let op = unsafe {
            ring.submit(Rc::clone(&self.opened), |opened| {
                let (fd, flags) = opened.target(&ring);
                let entry = opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build();
                entry.flags(flags)
            })
        };
        op.await.0.map(drop)
    }

    /// Reserves space for `at..at + bytes` and grows the file to its end if it is shorter.
    ///
    /// # Errors
    ///
    /// What `fallocate(2)` says.
    pub async fn allocate(&self, at: u64, bytes: u64) -> io::Result<()> {
        self.fallocate(0, at, bytes).await
    }

    /// Gives the space of `at..at + bytes` back; reads as zeroes.
    ///
    /// # Errors
    ///
    /// What `fallocate(2)` says.
    pub async fn punch_hole(&self, at: u64, bytes: u64) -> io::Result<()> {
        self.fallocate(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, at, bytes).await
    }

    /// Makes `at..at + bytes` read as zeroes and keeps the space reserved.
    ///
    /// # Errors
    ///
    /// What `fallocate(2)` says.
    pub async fn zero_range(&self, at: u64, bytes: u64) -> io::Result<()> {
        self.fallocate(libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE, at, bytes).await
    }

    async fn fallocate(&self, mode: i32, at: u64, bytes: u64) -> io::Result<()> {
        let ring = Core::current_ring();
        loop {
            // SAFETY: the file is kept.
            let op = unsafe {
                ring.submit(Rc::clone(&self.opened), |opened| {
                    let (fd, flags) = opened.target(&ring);
                    opcode::Fallocate::new(fd, bytes).offset(at).mode(mode).build().flags(flags)
                })
            };
            match op.await.0 {
                Err(error) if is_passing(&error) => {}
                result => return result.map(drop),
            }
        }
    }
}

/// Which way bytes go, and the requests for that.
#[derive(Clone, Copy)]
enum Transfer {
    Read,
    Write { rw_flags: i32 },
}

impl Transfer {
    /// For [`Piece::Whole`].
    fn whole(
        self,
        fd: types::Fd,
        offset: u64,
        start: *mut u8,
        len: u32,
        index: Option<u16>,
    ) -> squeue::Entry {
        match (self, index) {
            (Self::Read, Some(index)) => {
                opcode::ReadFixed::new(fd, start, len, index).offset(offset).build()
            }
            (Self::Read, None) => opcode::Read::new(fd, start, len).offset(offset).build(),
            (Self::Write { rw_flags }, Some(index)) => {
                let write = opcode::WriteFixed::new(fd, start, len, index);
                write.offset(offset).rw_flags(rw_flags).build()
            }
            (Self::Write { rw_flags }, None) => {
                opcode::Write::new(fd, start, len).offset(offset).rw_flags(rw_flags).build()
            }
        }
    }

    /// For [`Piece::Parts`]; the entry points to `raw`.
    fn parts(self, fd: types::Fd, offset: u64, raw: &RawParts) -> squeue::Entry {
        let (list, count) = (raw.as_ptr(), raw.len() as u32);
        match self {
            Self::Read => opcode::Readv::new(fd, list, count).offset(offset).build(),
            Self::Write { rw_flags } => {
                opcode::Writev::new(fd, list, count).offset(offset).rw_flags(rw_flags).build()
            }
        }
    }

    /// The error when a request succeeds and moves no byte.
    fn moved_nothing(self) -> io::ErrorKind {
        match self {
            Self::Read => io::ErrorKind::UnexpectedEof,
            Self::Write { .. } => io::ErrorKind::WriteZero,
        }
    }
}

/// What one request moves.
enum Piece {
    /// Bytes that lie together; in the region at `index` of the table of registered buffers.
    Whole { start: *mut u8, len: u32, index: Option<u16> },
    /// Bytes that lie apart.
    Parts(RawParts),
}

/// Errors after which the same call is simply repeated.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.opened.fd().as_fd()
    }
}
