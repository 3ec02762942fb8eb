//! Any file descriptor that can be polled: `/dev/fuse`, eventfds, pipes.
#![allow(unsafe_code)] // Operations that point to buffers which the ring owns.

use super::Core;
use super::operations::Op;
use crate::sync::Semaphore;
use crate::{BufMut, IoVec};
use io_uring::{opcode, types};
use smallvec::SmallVec;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

/// The longest list of buffers that one system call takes (`IOV_MAX`).
pub(super) const PARTS_MAX: usize = 1024;

pub(super) type RawParts = SmallVec<[libc::iovec; 8]>;

/// The first [`PARTS_MAX`] runs of `parts` behind the first `skip` bytes.
pub(super) fn raw_parts<'a>(parts: impl Iterator<Item = &'a [u8]>, skip: usize) -> RawParts {
    raw_runs(parts.map(|part| (part.as_ptr().cast_mut(), part.len())), skip)
}

/// The same of memory that nobody may have a reference to: where each part begins, and its bytes.
pub(super) fn raw_runs(parts: impl Iterator<Item = (*mut u8, usize)>, mut skip: usize) -> RawParts {
    let mut raw = RawParts::new();
    for (start, len) in parts {
        if skip >= len {
            skip -= len;
            continue;
        }
        if raw.len() == PARTS_MAX {
            break;
        }
        let (start, len) = (start.wrapping_add(skip), len - skip);
        skip = 0;
        if let Some(last) = raw.last_mut()
            && last.iov_base as usize + last.iov_len == start as usize
        {
            // Neighbours: for the kernel one buffer is less work than two.
            last.iov_len += len;
            continue;
        }
        raw.push(libc::iovec { iov_base: start.cast(), iov_len: len });
    }
    raw
}

/// Waits until one of `events` (as in `poll(2)`) holds.
pub(super) fn poll_fd(fd: &Rc<OwnedFd>, events: libc::c_short) -> Op<Rc<OwnedFd>> {
    let ring = Core::current_ring();
    // SAFETY: the descriptor is kept.
    unsafe {
        ring.submit(Rc::clone(fd), |fd| {
            opcode::PollAdd::new(types::Fd(fd.as_raw_fd()), events as u32).build()
        })
    }
}

/// A descriptor read and written without blocking. Any number of tasks may use it at once; they
/// read in order of arrival, one at a time, so that one event does not wake them all for nothing.
#[derive(Clone)]
pub struct Fd {
    fd: Rc<OwnedFd>,
    reading: Rc<Semaphore>,
}

impl Fd {
    /// Takes a descriptor and makes it non-blocking.
    ///
    /// # Errors
    ///
    /// What `fcntl(2)` says.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        // SAFETY: the descriptor is open; these commands touch no memory.
        let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
        if flags < 0
            // SAFETY: as above.
            || unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0
        {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { fd: Rc::new(fd), reading: Semaphore::new(1) })
    }

    /// Takes a descriptor whose flags another process sees as well, and leaves them as they are: only to be polled.
    #[must_use]
    pub fn of_others(fd: OwnedFd) -> Self {
        Self { fd: Rc::new(fd), reading: Semaphore::new(1) }
    }

    /// Completes when a read would not block, also because of an error or the end.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub async fn readable(&self) -> io::Result<()> {
        poll_fd(&self.fd, libc::POLLIN).await.0.map(drop)
    }

    /// Completes when a write would not block.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub async fn writable(&self) -> io::Result<()> {
        poll_fd(&self.fd, libc::POLLOUT).await.0.map(drop)
    }

    /// Reads once, waiting until there is something: the buffer and how much of it was filled.
    /// From `/dev/fuse` that is one request. Dropping the future may lose what was read.
    ///
    /// # Errors
    ///
    /// What `read(2)` says.
    pub async fn read(&self, mut into: BufMut) -> io::Result<(BufMut, usize)> {
        let ring = Core::current_ring();
        let _turn = self.reading.acquire(1).await;
        loop {
            // SAFETY: descriptor and buffer are kept.
            let op = unsafe {
                ring.submit((Rc::clone(&self.fd), into), |(fd, into)| {
                    let fd = types::Fd(fd.as_raw_fd());
                    let len = u32::try_from(into.len()).unwrap_or(u32::MAX);
                    // Offset -1: the descriptor's own position, or none.
                    opcode::Read::new(fd, into.as_mut_ptr(), len).offset(u64::MAX).build()
                })
            };
            let (read, kept) = op.await;
            into = kept.1;
            match read {
                Ok(read) => return Ok((into, read)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable().await?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Writes all parts by one call, waiting until there is room: how much was taken. To
    /// `/dev/fuse` that is one reply.
    ///
    /// # Errors
    ///
    /// What `writev(2)` says.
    pub async fn writev(&self, mut from: IoVec) -> io::Result<usize> {
        let ring = Core::current_ring();
        loop {
            let raw = raw_parts(from.iter().map(|part| &part[..]), 0);
            // SAFETY: descriptor, list and buffers are kept.
            let op = unsafe {
                ring.submit((Rc::clone(&self.fd), from, raw), |(fd, _, raw)| {
                    let fd = types::Fd(fd.as_raw_fd());
                    opcode::Writev::new(fd, raw.as_ptr(), raw.len() as u32).offset(u64::MAX).build()
                })
            };
            let (written, kept) = op.await;
            from = kept.1;
            match written {
                Ok(written) => return Ok(written),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable().await?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
