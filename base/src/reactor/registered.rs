//! Files and buffers registered with the ring, so that a request need not look them up.
//!
//! A request on a plain descriptor takes and drops a count on the open file, and one past the page
//! cache pins the pages of its buffer and lets them go. What is registered is held by the ring
//! all the time; a request names it by its index in a table. What that saves:
//! docs/design/0011-reactor.md.
//!
//! What always holds:
//! - An index is given to something else only when no request that names it is left: a request
//!   keeps its file and its buffers until the kernel has completed it, an index is given up when
//!   the last owner goes. (A request that waits to be submitted is looked up only then, and would
//!   reach somebody else's file.)
//! - A region is registered whole, and only one that the pool gives back through
//!   [`buf::watch`]: it is taken out of the table before its memory goes.
//! - At most [`BUFFER_BYTES_MAX`] bytes are registered, of regions whose memory drives have filled
//!   already: registering makes a process no larger. Where the kernel counts it against a limit of
//!   the user, most of the limit is left to others: the next ring needs some of it to be made.
//! - Where the kernel refuses, requests go the plain way, with the same effect.
//!
//! When a process is killed, the kernel takes its rings down shortly *after* the process has
//! gone, and closes the registered files then: their locks stay until no request of the dead
//! process is left, some 40 ms. Who opens drives after a crash must have that patience.
#![allow(unsafe_code)] // Addresses that the kernel holds on to.

use super::ring::Ring;
use crate::buf::{self, Region, Registration};
use io_uring::{squeue, types};
use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::{Rc, Weak};

/// Files that can be registered at once; others are used by their descriptors.
const FILES: u32 = 256;
/// Regions that can be registered at once; the kernel allows 16384.
const BUFFERS: u32 = 8192;
/// Bytes of all registered regions of a ring.
const BUFFER_BYTES_MAX: usize = 64 << 20;
/// This part of what the user may lock is used for it.
const LIMIT_PART: u64 = 16;
/// A region is registered when drives have moved so many times its size: that costs as much as
/// some requests, and most regions that drives fill only once are not filled again.
const REGISTER_AFTER: usize = 2;

/// What of this thread's reactor is registered with the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Registered {
    pub files: usize,
    /// Regions of memory, and their bytes.
    pub buffers: usize,
    pub buffer_bytes: usize,
    /// Requests on registered files, and those to registered memory, since the start.
    pub file_requests: u64,
    pub buffer_requests: u64,
}

/// The indices of one table of the kernel's.
#[derive(Default)]
struct Table {
    /// Whether the kernel made the table; `None` until it was asked.
    made: Option<bool>,
    given: u32,
    free: Vec<u32>,
}

impl Table {
    /// An index that nothing has, of a table of `size`.
    fn take(&mut self, size: u32) -> Option<u32> {
        self.free.pop().or_else(|| {
            let index = self.given;
            self.given += u32::from(index < size);
            (index < size).then_some(index)
        })
    }
}

/// The tables of a ring.
pub(super) struct Tables {
    /// Tells the rings of a process apart; not 0.
    ring: u32,
    enabled: Cell<bool>,
    files: RefCell<Table>,
    buffers: RefCell<Table>,
    /// What is registered, and how much may be.
    now: Cell<Registered>,
    bytes_max: Cell<usize>,
}

impl Tables {
    /// `enabled` is false for a kernel that had better not be asked.
    pub(super) fn new(ring: u32, enabled: bool) -> Self {
        Self {
            ring,
            enabled: Cell::new(enabled),
            files: RefCell::default(),
            buffers: RefCell::default(),
            now: Cell::default(),
            bytes_max: Cell::new(BUFFER_BYTES_MAX),
        }
    }

    pub(super) fn disable(&self) {
        self.enabled.set(false);
    }

    pub(super) fn now(&self) -> Registered {
        self.now.get()
    }

    fn change(&self, change: impl FnOnce(&mut Registered)) {
        let mut now = self.now.get();
        change(&mut now);
        self.now.set(now);
    }
}

/// An open file, and its place in the table of a ring.
pub(super) struct Opened {
    fd: OwnedFd,
    /// Past the page cache, where registered buffers save work.
    pub(super) is_direct: bool,
    /// The ring that was asked to register it, or 0, and the index that it gave.
    asked: Cell<(u32, Option<u32>)>,
    ring: RefCell<Weak<Ring>>,
}

impl Opened {
    pub(super) fn new(fd: OwnedFd, is_direct: bool) -> Self {
        Self { fd, is_direct, asked: Cell::default(), ring: RefCell::default() }
    }

    pub(super) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// How a request of `ring` names the file. The request must keep the file.
    pub(super) fn target(&self, ring: &Rc<Ring>) -> (types::Fd, squeue::Flags) {
        if let (number, Some(index)) = self.asked.get()
            && number == ring.tables.ring
        {
            ring.tables.change(|now| now.file_requests += 1);
            return (types::Fd(index as i32), squeue::Flags::FIXED_FILE);
        }
        (types::Fd(self.fd.as_raw_fd()), squeue::Flags::empty())
    }

    /// Registers it with `ring`, once.
    pub(super) fn register(&self, ring: &Rc<Ring>) {
        let (number, index) = self.asked.get();
        if number == ring.tables.ring || !ring.tables.enabled.get() {
            return;
        }
        if index.is_some() && self.ring.borrow().upgrade().is_some_and(|ring| !ring.is_closed()) {
            // Requests of the other ring may name it.
            return;
        }
        self.asked.set((ring.tables.ring, ring.register_file(&self.fd)));
        *self.ring.borrow_mut() = Rc::downgrade(ring);
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let (_, Some(index)) = self.asked.get()
            && let Some(ring) = self.ring.borrow().upgrade()
        {
            // Before the descriptor is closed, so that closing it lets go of its locks.
            ring.take_out_file(index);
        }
    }
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fd.fmt(f)
    }
}

impl Ring {
    fn register_file(&self, fd: &OwnedFd) -> Option<u32> {
        if self.is_closed() {
            return None;
        }
        let uring = self.uring.borrow();
        let mut table = self.tables.files.borrow_mut();
        let made = *table.made.get_or_insert_with(|| {
            let made = uring.submitter().register_files_sparse(FILES);
            said(made, "no table of registered files").is_ok()
        });
        if !made {
            return None;
        }
        let index = table.take(FILES)?;
        let put = uring.submitter().register_files_update(index, &[fd.as_raw_fd()]);
        if said(put, "a file is not registered").is_err() {
            table.free.push(index);
            return None;
        }
        self.tables.change(|now| now.files += 1);
        Some(index)
    }

    fn take_out_file(&self, index: u32) {
        if self.is_closed() {
            return;
        }
        let taken = self.uring.borrow().submitter().register_files_update(index, &[-1]);
        if taken.is_ok() {
            // Else nobody gets the index again.
            self.tables.files.borrow_mut().free.push(index);
        }
        self.tables.change(|now| now.files -= 1);
    }

    /// The index of a region for a request that moves `bytes` from `start` on, which must keep
    /// the region; `None` when it is not registered, or not all of them lie in it.
    pub(super) fn buffer_index(
        self: &Rc<Self>,
        region: &Region,
        start: *const u8,
        bytes: usize,
    ) -> Option<u16> {
        let place = region.registration()?;
        let offset = (start as usize).checked_sub(region.start() as usize)?;
        if offset + bytes > region.capacity() {
            return None;
        }
        let mut registration = place.get();
        if registration.ring != self.tables.ring {
            if !self.tables.enabled.get() {
                return None;
            }
            let moved = (registration.moved_bytes as usize).saturating_add(bytes);
            registration.moved_bytes = u32::try_from(moved).unwrap_or(u32::MAX);
            place.set(registration);
            if moved <= REGISTER_AFTER * region.capacity() {
                return None;
            }
            let index = self.register_buffer(region)?;
            registration = Registration { ring: self.tables.ring, index, ..registration };
            place.set(registration);
        }
        self.tables.change(|now| now.buffer_requests += 1);
        Some(registration.index)
    }

    fn register_buffer(self: &Rc<Self>, region: &Region) -> Option<u16> {
        let capacity = region.capacity();
        let now = &self.tables.now;
        let has_room = || now.get().buffer_bytes + capacity <= self.tables.bytes_max.get();
        if self.is_closed() || !has_room() {
            return None;
        }
        let uring = self.uring.borrow();
        let mut table = self.tables.buffers.borrow_mut();
        let made = *table.made.get_or_insert_with(|| {
            let ring = Rc::downgrade(self);
            let goes = move |index, capacity| {
                if let Some(ring) = Weak::upgrade(&ring) {
                    ring.take_out_buffer(index, capacity);
                }
            };
            if let Some(limit) = lock_limit() {
                let part = usize::try_from(limit / LIMIT_PART).unwrap_or(usize::MAX);
                self.tables.bytes_max.set(part.min(BUFFER_BYTES_MAX));
            }
            let made = uring.submitter().register_buffers_sparse(BUFFERS);
            said(made, "no table of registered buffers").is_ok()
                && buf::watch(self.tables.ring, Box::new(goes))
        });
        if !made {
            self.tables.bytes_max.set(0);
            return None;
        }
        if !has_room() {
            return None;
        }
        let index = table.take(BUFFERS)?;
        let whole = libc::iovec { iov_base: region.start().cast(), iov_len: capacity };
        // SAFETY: the memory of a region of the pool. The pool calls `goes` before that memory is
        // freed or gets other pages, and who has a view of the region does so until then.
        let put = unsafe { uring.submitter().register_buffers_update(index, &[whole], None) };
        if said(put, "registered buffers have reached their limit").is_err() {
            table.free.push(index);
            // The rest of the limit is not asked for again and again.
            self.tables.bytes_max.set(self.tables.now().buffer_bytes);
            return None;
        }
        self.tables.change(|now| {
            now.buffers += 1;
            now.buffer_bytes += capacity;
        });
        u16::try_from(index).ok()
    }

    fn take_out_buffer(&self, index: u16, capacity: usize) {
        if self.is_closed() {
            return;
        }
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let index = u32::from(index);
        let uring = self.uring.borrow();
        // SAFETY: names no memory.
        if unsafe { uring.submitter().register_buffers_update(index, &[nothing], None) }.is_ok() {
            // Else nobody gets the index again, and the kernel keeps the pages, which then are
            // nobody's.
            self.tables.buffers.borrow_mut().free.push(index);
        }
        self.tables.change(|now| {
            now.buffers -= 1;
            now.buffer_bytes -= capacity;
        });
    }

    /// Gives everything up; no request is in flight. The kernel would do so too, but some time
    /// after the ring is gone.
    pub(super) fn drop_tables(&self) {
        let uring = self.uring.borrow();
        if self.tables.files.borrow().made == Some(true) {
            let _ = uring.submitter().unregister_files();
        }
        if self.tables.buffers.borrow().made == Some(true) {
            let _ = uring.submitter().unregister_buffers();
        }
        buf::unwatch(self.tables.ring);
        self.tables.now.set(Registered::default());
    }
}

/// Bytes that all processes of this user may keep the kernel from moving; `None` when that is not
/// counted for this one, which takes a privilege (`CAP_IPC_LOCK`) of the machine and not just of
/// a container.
fn lock_limit() -> Option<u64> {
    const CAP_IPC_LOCK: u32 = 14;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    let users = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let is_of_machine = users.split_whitespace().eq(["0", "0", "4294967295"]);
    if is_of_machine && effective.is_some_and(|bits| bits >> CAP_IPC_LOCK & 1 == 1) {
        return None;
    }
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: fills one structure.
    let got = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    if got < 0 {
        return Some(0);
    }
    (limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Passes a result on, and says an error to who looks for it: everything works without.
fn said<T>(result: io::Result<T>, what: &str) -> io::Result<T> {
    result.inspect_err(|error| tracing::debug!(%error, "{what}"))
}
