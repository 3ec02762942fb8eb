//! Memory that processes of one machine share, so that data need not be copied between them.
//!
//! Each thread that asks for it ([`share_buffers`]) takes its buffers from an [`Arena`]: a file in
//! memory, mapped. Another process maps the same file to read ([`PeerMemory`]) and so sees a
//! buffer where it lies. Who may read what, and for how long, is up to those who tell each other
//! where buffers lie.
//!
//! What always holds:
//! - What others are given of an arena can be read and not written to, and nobody can shorten it. (A
//!   process of the same user could get more, as it could read and write any memory of this one.)
//! - What a peer's memory holds may change at any time; only an agreement with the peer says that it
//!   does not.
//! - A [`PeerMemory`] holds the peer's lifeline: the peer learns when nothing here reads its
//!   memory any more, also when this process dies.
#![allow(unsafe_code)] // Mappings that other processes see.

use crate::buf::{Buf, with_arena};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::ptr::NonNull;
use std::rc::Rc;

/// Address space of an arena. Memory is taken as it is used.
const ARENA_BYTES: usize = 2 << 30;
/// No peer's memory is mapped beyond this.
const PEER_BYTES_MAX: u64 = 64 << 30;

/// A file in memory from which buffers are taken; of one thread.
pub(crate) struct Arena {
    start: NonNull<u8>,
    /// Another view of the file, which cannot write.
    read_only: OwnedFd,
    /// Bytes from the start that were handed out once.
    used: Cell<usize>,
    /// Regions in use.
    live: Cell<usize>,
    /// Regions that hold no memory, by capacity.
    empty: RefCell<BTreeMap<usize, Vec<NonNull<u8>>>>,
}

impl Arena {
    pub(crate) fn new() -> io::Result<Self> {
        let file = sealed_memory(ARENA_BYTES)?;
        let read_only = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_CLOEXEC)
            .open(format!("/proc/self/fd/{}", file.as_raw_fd()))?
            .into();
        let start = map(file.as_fd(), ARENA_BYTES, libc::PROT_READ | libc::PROT_WRITE)?;
        let (used, live, empty) = (Cell::new(0), Cell::new(0), RefCell::default());
        Ok(Self { start, read_only, used, live, empty })
    }

    /// Takes a region of a power of two bytes, at least a page; it holds zeroes.
    pub(crate) fn take(&self, capacity: usize) -> Option<NonNull<u8>> {
        let empty = self.empty.borrow_mut().get_mut(&capacity).and_then(Vec::pop);
        let start = if let Some(start) = empty {
            start
        } else {
            let used = self.used.get();
            if ARENA_BYTES - used < capacity {
                return None;
            }
            self.used.set(used + capacity);
            // SAFETY: inside the mapping.
            unsafe { self.start.add(used) }
        };
        self.live.set(self.live.get() + 1);
        Some(start)
    }

    /// A region that [`Arena::take`] gave is kept in a pool (and counts as not in use), or
    /// leaves it.
    pub(crate) fn count(&self, live: isize) {
        self.live.set(self.live.get().checked_add_signed(live).expect("regions are counted"));
    }

    /// Gives the memory of a region back; no view of it is left.
    pub(crate) fn empty(&self, start: NonNull<u8>, capacity: usize) {
        // Should it fail, the region just keeps its memory.
        // SAFETY: a region of the mapping that nobody looks at.
        unsafe { libc::madvise(start.as_ptr().cast(), capacity, libc::MADV_REMOVE) };
        self.empty.borrow_mut().entry(capacity).or_default().push(start);
    }

    /// Where in the arena an address lies.
    pub(crate) fn offset_of(&self, at: *const u8) -> u64 {
        at as u64 - self.start.as_ptr() as u64
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // Views that outlive their thread's pool keep the mapping for good.
        if self.live.get() == 0 {
            // SAFETY: the mapping that `new` made, into which nothing points any more.
            unsafe { libc::munmap(self.start.as_ptr().cast(), ARENA_BYTES) };
        }
    }
}

/// This thread's memory, as a peer gets it.
pub struct OwnMemory {
    pub file: OwnedFd,
}

/// From now on this thread takes its buffers from memory that can be shared, as long as there is
/// room in it; not those above 8 MiB.
///
/// # Errors
///
/// What the system says; buffers then are as before.
pub fn share_buffers() -> io::Result<OwnMemory> {
    with_arena(|arena| Ok(OwnMemory { file: arena.read_only.try_clone()? }))
}

/// Memory of a peer, mapped to be read.
pub struct PeerMemory {
    start: NonNull<u8>,
    bytes: usize,
    /// Closed with the last view of the memory.
    _lifeline: OwnedFd,
}

impl PeerMemory {
    /// Maps what a peer's [`share_buffers`] gave it.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::InvalidData`] when it is not such memory, or what the system says.
    pub fn map(file: &OwnedFd, lifeline: OwnedFd) -> io::Result<Rc<Self>> {
        let bytes = sealed_memory_bytes(file)?;
        if bytes == 0 || bytes > PEER_BYTES_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let bytes = bytes as usize;
        let start = map(file.as_fd(), bytes, libc::PROT_READ)?;
        Ok(Rc::new(Self { start, bytes, _lifeline: lifeline }))
    }

    /// A view of some bytes; `None` when they are not inside. `lease` is dropped with the last
    /// view.
    #[must_use]
    pub fn view<T: 'static>(self: &Rc<Self>, offset: u64, bytes: u64, lease: T) -> Option<Buf> {
        let end = offset.checked_add(bytes)?;
        if end > self.bytes as u64 {
            return None;
        }
        // SAFETY: inside the mapping, which the keeper keeps. That the bytes do not change
        // meanwhile is what the peer has promised; if it breaks its word, wrong bytes are read.
        Some(unsafe {
            let start = self.start.add(offset as usize);
            Buf::foreign(start, bytes as usize, Box::new((lease, Rc::clone(self))))
        })
    }
}

impl Drop for PeerMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping that `map` made; every view kept this alive.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// A file in memory of so many bytes, which nobody can shorten or lengthen, and only the own user can open.
pub(crate) fn sealed_memory(bytes: usize) -> io::Result<OwnedFd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: a literal that ends in NUL.
    let fd = check(unsafe { libc::memfd_create(c"levada".as_ptr(), flags) })?;
    // SAFETY: the kernel just made this descriptor for us.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    let raw = file.as_raw_fd();
    // SAFETY: these calls touch no memory.
    unsafe {
        // Only the own user may ask for another view of it.
        check(libc::fchmod(raw, 0o600))?;
        check(libc::ftruncate(raw, bytes as i64))?;
        // A file that could be shortened would kill its readers.
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        check(libc::fcntl(raw, libc::F_ADD_SEALS, seals))?;
    }
    Ok(file)
}

/// The bytes of a peer's file, if it is plain memory that cannot be shortened.
///
/// # Errors
///
/// [`io::ErrorKind::InvalidData`] when it is not, or what the system says.
pub(crate) fn sealed_memory_bytes(file: &OwnedFd) -> io::Result<u64> {
    // SAFETY: touches no memory. Fails for what is not a file in memory.
    let seals = check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) })?;
    let mut stat = std::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: room for the answer.
    check(unsafe { libc::fstat(file.as_raw_fd(), stat.as_mut_ptr()) })?;
    // SAFETY: plain integers, all zero before the call.
    let bytes = unsafe { stat.assume_init() }.st_size.cast_unsigned();
    let mut system = std::mem::MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: room for the answer.
    check(unsafe { libc::fstatfs(file.as_raw_fd(), system.as_mut_ptr()) })?;
    // Huge pages of their own file system run out, and then kill who reads a hole.
    // SAFETY: plain integers, all zero before the call.
    let is_plain = unsafe { system.assume_init() }.f_type == libc::TMPFS_MAGIC;
    let is_sealed = seals & libc::F_SEAL_SHRINK != 0;
    if is_plain && is_sealed { Ok(bytes) } else { Err(io::ErrorKind::InvalidData.into()) }
}

pub(crate) fn map(
    file: BorrowedFd<'_>,
    bytes: usize,
    protection: libc::c_int,
) -> io::Result<NonNull<u8>> {
    let (anywhere, fd) = (std::ptr::null_mut(), file.as_raw_fd());
    // SAFETY: a new mapping, away from every other.
    let start = unsafe { libc::mmap(anywhere, bytes, protection, libc::MAP_SHARED, fd, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(NonNull::new(start.cast()).expect("a mapping is not at 0"))
}

fn check(status: libc::c_int) -> io::Result<libc::c_int> {
    if status < 0 { Err(io::Error::last_os_error()) } else { Ok(status) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BufMut;

    fn lifeline() -> (OwnedFd, OwnedFd) {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        (reader.into(), writer.into())
    }

    #[test]
    fn a_peer_sees_a_buffer_where_it_lies() {
        let own = share_buffers().expect("memory");
        let mut buf = BufMut::for_overwrite(100_000);
        buf.fill(7);
        let buf = buf.freeze().slice(5000, 90_000);
        let at = buf.shared_offset().expect("buffers are shared");
        let (reader, writer) = lifeline();
        let peer = PeerMemory::map(&own.file, writer).expect("maps");
        let token = Rc::new(());
        let view = peer.view(at, 90_000, Rc::clone(&token)).expect("inside");
        assert!(view.iter().all(|byte| *byte == 7) && view.len() == 90_000);
        assert!(view.shared_offset().is_none(), "it is not ours");
        let view = view.try_into_mut().expect_err("not ours to write to");
        drop(peer);
        let part = view.slice(10, 10);
        drop(view);
        assert_eq!((part[0], Rc::strong_count(&token)), (7, 2));
        drop(part);
        assert_eq!(Rc::strong_count(&token), 1);
        let mut end = [0];
        let read = std::io::Read::read(&mut std::fs::File::from(reader), &mut end);
        assert_eq!(read.expect("a read"), 0, "the lifeline ends with the last view");
    }

    #[test]
    fn nothing_outside_is_seen_and_nothing_else_is_mapped() {
        let own = share_buffers().expect("memory");
        let peer = PeerMemory::map(&own.file, lifeline().1).expect("maps");
        assert!(peer.view(ARENA_BYTES as u64 - 10, 11, ()).is_none());
        assert!(peer.view(u64::MAX, 2, ()).is_none());
        let file = tempfile::tempfile().expect("a file").into();
        assert!(PeerMemory::map(&file, lifeline().1).is_err(), "could be shortened");
        let kind = |flags: libc::c_uint, seals: libc::c_int, bytes: i64| {
            let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | flags;
            // SAFETY: a literal that ends in NUL; the other calls touch no memory.
            let file = unsafe {
                let fd = check(libc::memfd_create(c"peer".as_ptr(), flags)).ok()?;
                let file = OwnedFd::from_raw_fd(fd);
                check(libc::ftruncate(fd, bytes)).ok()?;
                check(libc::fcntl(fd, libc::F_ADD_SEALS, seals)).ok()?;
                file
            };
            Some(PeerMemory::map(&file, lifeline().1).map(drop).map_err(|error| error.kind()))
        };
        let refused = Some(Err(io::ErrorKind::InvalidData));
        assert_eq!(kind(0, libc::F_SEAL_GROW, 4096), refused, "could be shortened");
        assert_eq!(kind(0, libc::F_SEAL_SHRINK, 0), refused, "empty");
        assert_eq!(kind(0, libc::F_SEAL_SHRINK, 128 << 30), refused, "takes too much room");
        assert_eq!(kind(0, libc::F_SEAL_SHRINK, 4096), Some(Ok(())));
        let huge = kind(libc::MFD_HUGETLB, libc::F_SEAL_SHRINK, 2 << 20);
        // Not every system has them.
        assert!(huge.is_none() || huge == refused, "{huge:?}: pages that run out");
        let writable = map(own.file.as_fd(), 4096, libc::PROT_READ | libc::PROT_WRITE);
        assert!(writable.is_err(), "peers only read");
    }

    #[test]
    fn buffers_come_back_to_the_arena() {
        share_buffers().expect("memory");
        let first = BufMut::for_overwrite(1 << 20).freeze();
        let at = first.shared_offset().expect("shared");
        drop(first);
        let again = BufMut::for_overwrite(1 << 20).freeze();
        assert_eq!(again.shared_offset(), Some(at));
        let other = BufMut::for_overwrite(4096).freeze();
        assert!(other.shared_offset().is_some_and(|at| at >= 1 << 20));
        assert!(BufMut::zeroed_to_stay(4096).freeze().shared_offset().is_none(), "apart");
    }
}
