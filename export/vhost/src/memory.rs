//! Memory of a client: the regions that it showed, and checked ways to read and write them.
//!
//! What always holds:
//! - Nothing outside the regions is touched, whatever address a client names.
//! - The client may change its memory at any time. It is never looked at through a reference: single fields are atomics, and
//!   bytes are copied out before anybody judges them.
//! - Only files in memory are mapped: any other file system could keep a page fault waiting for as long as its owner likes.
//! - A region whose file was shortened reads as zeroes from then on, and says so ([`Memory::is_lost`]).
//!
//! A mapping lives as long as a request that uses it, also when the client has taken the region away meanwhile.
#![allow(unsafe_code)] // Memory shared with another process.

use crate::fault::Guard;
use crate::stranger::{Kind, Stranger};
use levada_base::lent::Keeper;
use levada_base::units::{round_down, round_up};
use levada_base::{Lent, LentVec};
use rustix::fs::{fstat, fstatfs};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

/// Regions of a client at once.
pub(crate) const REGIONS_MAX: usize = 32;
/// Bytes of a client's regions together: this process has addresses for 128 TiB, and all its clients share those.
const BYTES_MAX: u64 = 1 << 40;
const PAGE_BYTES: u64 = 4096;
/// File systems whose pages are memory: tmpfs (also behind memfd_create), and huge pages.
const TMPFS_MAGIC: u64 = 0x0102_1994;
const HUGETLBFS_MAGIC: u64 = 0x958f_58f6;

/// Why memory of a client was not mapped.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    #[error("its file is not in memory")]
    NotMemory,
    #[error("it reaches past the end of its file")]
    PastEnd,
    #[error("it overlaps another region")]
    Overlaps,
    #[error("there are {REGIONS_MAX} regions already")]
    TooMany,
    #[error("it is more than {BYTES_MAX} bytes, with the other regions")]
    TooLarge,
    #[error("there is no such region")]
    Unknown,
    #[error("it cannot be mapped")]
    System(#[from] io::Error),
}

/// Some bytes of a file in memory, mapped to be read and written.
pub(crate) struct Mapping {
    guard: Option<Guard>,
    start: NonNull<u8>,
    /// Whole pages.
    bytes: usize,
    /// Where the bytes that were asked for begin.
    skip: usize,
    wanted: usize,
}

// SAFETY: an address of memory that anybody may change at any time, on whichever thread: it is only looked at through atomics, and copied.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a file that a client sent.
    pub(crate) fn new(file: Stranger, offset: u64, bytes: u64) -> Result<Arc<Self>, MapError> {
        let file = file.take(Kind::Memory).ok_or(MapError::NotMemory)?;
        Self::of(file.as_fd(), offset, bytes)
    }

    /// Maps a file that is known to be in memory.
    pub(crate) fn of(file: BorrowedFd<'_>, offset: u64, bytes: u64) -> Result<Arc<Self>, MapError> {
        let system = |errno: rustix::io::Errno| MapError::System(errno.into());
        let (stat, place) = (fstat(file).map_err(system)?, fstatfs(file).map_err(system)?);
        let page_bytes = match place.f_type as u64 {
            TMPFS_MAGIC => PAGE_BYTES,
            HUGETLBFS_MAGIC => (place.f_bsize as u64).max(PAGE_BYTES),
            _ => return Err(MapError::NotMemory),
        };
        let end = offset.checked_add(bytes).ok_or(MapError::PastEnd)?;
        if bytes == 0 || end > stat.st_size.cast_unsigned() {
            return Err(MapError::PastEnd);
        }
        let from = round_down(offset, page_bytes);
        let whole = round_up(end - from, page_bytes) as usize;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, away from every other.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                whole,
                protection,
                flags,
                file.as_raw_fd(),
                from as libc::off_t,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error().into());
        }
        // A core dump of this process is not to hold the memory of its clients.
        // SAFETY: the mapping that was just made; its contents stay.
        unsafe { libc::madvise(start, whole, libc::MADV_DONTDUMP) };
        let start = NonNull::new(start.cast()).expect("a mapping is not at 0");
        let guard = Some(Guard::new(start.as_ptr(), whole));
        let (skip, wanted) = ((offset - from) as usize, bytes as usize);
        Ok(Arc::new(Self { guard, start, bytes: whole, skip, wanted }))
    }

    /// True once its pages are gone.
    pub(crate) fn is_lost(&self) -> bool {
        self.guard.as_ref().is_some_and(Guard::is_lost)
    }

    /// The whole of it.
    pub(crate) fn window(self: &Arc<Self>) -> Window {
        self.part(0, self.wanted as u64).expect("the whole is inside")
    }

    fn part(self: &Arc<Self>, offset: u64, bytes: u64) -> Option<Window> {
        let end = offset.checked_add(bytes)?;
        if end > self.wanted as u64 {
            return None;
        }
        // SAFETY: inside the mapping, as just checked.
        let start = unsafe { self.start.add(self.skip + offset as usize) };
        Some(Window { mapping: Arc::clone(self), start, bytes: bytes as usize })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.guard = None;
        // SAFETY: the mapping that `new` made; whoever looks into it keeps it alive.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// A few bytes that lie together, with fields in them: a ring, say. Fields are little-endian, aligned to their size.
#[derive(Clone)]
pub(crate) struct Window {
    mapping: Arc<Mapping>,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: as of the mapping that it is a part of.
unsafe impl Send for Window {}

impl Window {
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.mapping.is_lost()
    }

    /// The part from `offset` on.
    pub(crate) fn part(&self, offset: usize, bytes: usize) -> Option<Self> {
        let is_inside = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        // SAFETY: inside the mapping, as just checked.
        let start = is_inside.then(|| unsafe { self.start.add(offset) })?;
        Some(Self { mapping: Arc::clone(&self.mapping), start, bytes })
    }

    /// True when fields of `align` bytes at multiples of that are aligned.
    pub(crate) fn is_aligned(&self, align: usize) -> bool {
        (self.start.as_ptr() as usize).is_multiple_of(align)
    }

    /// Where a field of type `T` lies.
    ///
    /// # Panics
    ///
    /// When it is not inside or not aligned: offsets are ours, computed within what was checked when the window was made.
    #[inline]
    fn field<T>(&self, offset: usize) -> *mut T {
        assert!(offset + size_of::<T>() <= self.bytes, "{offset} of {}", self.bytes);
        // SAFETY: inside, as just checked.
        let at = unsafe { self.start.add(offset) }.as_ptr().cast::<T>();
        assert!(at.is_aligned());
        at
    }

    #[inline]
    pub(crate) fn load_u16(&self, offset: usize, order: Ordering) -> u16 {
        // SAFETY: inside the mapping and aligned; an atomic may change at any time.
        u16::from_le(unsafe { AtomicU16::from_ptr(self.field(offset)) }.load(order))
    }

    #[inline]
    pub(crate) fn store_u16(&self, offset: usize, value: u16, order: Ordering) {
        #[cfg(test)]
        crash::before_store();
        // SAFETY: inside the mapping and aligned; an atomic may change at any time.
        unsafe { AtomicU16::from_ptr(self.field(offset)) }.store(value.to_le(), order);
    }

    #[inline]
    pub(crate) fn load_u32(&self, offset: usize, order: Ordering) -> u32 {
        // SAFETY: inside the mapping and aligned; an atomic may change at any time.
        u32::from_le(unsafe { AtomicU32::from_ptr(self.field(offset)) }.load(order))
    }

    #[inline]
    pub(crate) fn store_u32(&self, offset: usize, value: u32, order: Ordering) {
        #[cfg(test)]
        crash::before_store();
        // SAFETY: inside the mapping and aligned; an atomic may change at any time.
        unsafe { AtomicU32::from_ptr(self.field(offset)) }.store(value.to_le(), order);
    }

    #[inline]
    pub(crate) fn load_u64(&self, offset: usize, order: Ordering) -> u64 {
        // SAFETY: inside the mapping and aligned; an atomic may change at any time.
        u64::from_le(unsafe { AtomicU64::from_ptr(self.field(offset)) }.load(order))
    }

    #[inline]
    pub(crate) fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        #[cfg(test)]
        crash::before_store();
        // SAFETY: inside the mapping and aligned; an atomic may change at any time.
        unsafe { AtomicU64::from_ptr(self.field(offset)) }.store(value.to_le(), order);
    }
}

/// Where a region lies, as the client says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Its address in descriptors.
    pub guest: u64,
    pub bytes: u64,
    /// Its address in the client's process: those of rings are such.
    pub user: u64,
    /// Where in its file it begins.
    pub offset: u64,
}

#[derive(Clone)]
struct Region {
    place: Place,
    mapping: Arc<Mapping>,
}

/// An address that is not in the client's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Outside;

/// The regions of a client, by address. Changed by making another one.
#[derive(Clone, Default)]
pub(crate) struct Memory {
    regions: Vec<Region>,
}

impl Memory {
    /// The same with another region.
    pub(crate) fn with(&self, place: Place, file: Stranger) -> Result<Self, MapError> {
        if self.regions.len() == REGIONS_MAX {
            return Err(MapError::TooMany);
        }
        let bytes: u64 = self.regions.iter().map(|region| region.place.bytes).sum();
        if place.bytes > BYTES_MAX - bytes {
            return Err(MapError::TooLarge);
        }
        let ends = |place: &Place| {
            Some((place.guest.checked_add(place.bytes)?, place.user.checked_add(place.bytes)?))
        };
        let (guest_end, user_end) = ends(&place).ok_or(MapError::PastEnd)?;
        for Region { place: other, .. } in &self.regions {
            let (other_guest_end, other_user_end) = ends(other).expect("checked when it came");
            let is_apart = (guest_end <= other.guest || other_guest_end <= place.guest)
                && (user_end <= other.user || other_user_end <= place.user);
            if !is_apart {
                return Err(MapError::Overlaps);
            }
        }
        let mapping = Mapping::new(file, place.offset, place.bytes)?;
        let mut regions = self.regions.clone();
        let at = regions.partition_point(|other| other.place.guest < place.guest);
        regions.insert(at, Region { place, mapping });
        Ok(Self { regions })
    }

    /// The same without a region.
    pub(crate) fn without(&self, place: &Place) -> Result<Self, MapError> {
        let is_it = |region: &Region| {
            let other = region.place;
            (other.guest, other.user, other.bytes) == (place.guest, place.user, place.bytes)
        };
        let at = self.regions.iter().position(is_it).ok_or(MapError::Unknown)?;
        let mut regions = self.regions.clone();
        regions.remove(at);
        Ok(Self { regions })
    }

    /// True once pages of it are gone: what was read may be zeroes.
    pub(crate) fn is_lost(&self) -> bool {
        self.regions.iter().any(|region| region.mapping.is_lost())
    }

    /// Bytes at an address of the client's process, which lie within one region.
    pub(crate) fn window_at_user(&self, user: u64, bytes: u64) -> Result<Window, Outside> {
        let found = self
            .regions
            .iter()
            .find_map(|region| region.mapping.part(user.checked_sub(region.place.user)?, bytes));
        found.ok_or(Outside)
    }

    /// Bytes at an address as in descriptors, which lie within one region.
    pub(crate) fn window(&self, guest: u64, bytes: u64) -> Result<Window, Outside> {
        let region = self.region(guest).ok_or(Outside)?;
        region.mapping.part(guest - region.place.guest, bytes).ok_or(Outside)
    }

    fn region(&self, guest: u64) -> Option<&Region> {
        let is_in = |region: &&Region| {
            guest.checked_sub(region.place.guest).is_some_and(|offset| offset < region.place.bytes)
        };
        self.regions.iter().find(is_in)
    }

    /// Where bytes at an address lie, in which mapping, and how many of at most `bytes` lie together.
    #[inline]
    fn run(
        &self,
        guest: u64,
        bytes: usize,
    ) -> Result<(NonNull<u8>, usize, &Arc<Mapping>), Outside> {
        let region = self.region(guest).ok_or(Outside)?;
        let offset = (guest - region.place.guest) as usize;
        let mapping = &region.mapping;
        // SAFETY: `offset` is within the region, and so inside the mapping.
        let start = unsafe { mapping.start.add(mapping.skip + offset) };
        Ok((start, bytes.min(mapping.wanted - offset), mapping))
    }

    /// Adds memory that is to be filled to `lent`.
    pub(crate) fn lend(
        &self,
        mut guest: u64,
        mut bytes: usize,
        lent: &mut LentVec,
    ) -> Result<(), Outside> {
        while bytes > 0 {
            let (start, len, mapping) = self.run(guest, bytes)?;
            let keeper = Arc::clone(mapping) as Keeper;
            // SAFETY: so many bytes lie behind `start` in the mapping, which is writable and kept; they are only ever copied to and from. The
            // faults of pages that are gone are caught.
            lent.push(unsafe { Lent::new(start, len, keeper) });
            bytes -= len;
            guest = guest.checked_add(len as u64).ok_or(Outside)?;
        }
        Ok(())
    }

    /// Copies bytes out. They may be changing: what was copied is some mixture then.
    pub(crate) fn read(&self, mut guest: u64, mut into: &mut [u8]) -> Result<(), Outside> {
        while !into.is_empty() {
            let (from, bytes, _) = self.run(guest, into.len())?;
            // SAFETY: `bytes` lie behind `from` in the mapping, and as many fit into `into`, which is not in it. The client may
            // write meanwhile; nothing is concluded from these bytes before they are copied.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into.as_mut_ptr(), bytes) };
            into = &mut into[bytes..];
            guest = guest.checked_add(bytes as u64).ok_or(Outside)?;
        }
        Ok(())
    }

    /// Copies bytes in.
    pub(crate) fn write(&self, mut guest: u64, mut from: &[u8]) -> Result<(), Outside> {
        while !from.is_empty() {
            let (into, bytes, _) = self.run(guest, from.len())?;
            // SAFETY: as many bytes lie behind `into` in the mapping, and `from` is not in it. The client may look meanwhile; what
            // it sees is its own affair.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into.as_ptr(), bytes) };
            from = &from[bytes..];
            guest = guest.checked_add(bytes as u64).ok_or(Outside)?;
        }
        Ok(())
    }
}

/// A file in memory that a client can be given, and that nobody shortens.
pub(crate) fn sealed(bytes: u64) -> io::Result<std::os::fd::OwnedFd> {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    let file = memfd_create(c"levada-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, bytes)?;
    fcntl_add_seals(file.as_fd(), SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(file)
}

/// Lets a test end this process, as far as shared memory can tell, before any store.
#[cfg(test)]
pub(crate) mod crash {
    use std::cell::Cell;
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    thread_local!(static STORES_LEFT: Cell<Option<u32>> = const { Cell::new(None) });

    /// What unwinds instead.
    struct Crash;

    pub(super) fn before_store() {
        match STORES_LEFT.get() {
            Some(0) => {
                STORES_LEFT.set(None);
                resume_unwind(Box::new(Crash));
            }
            Some(left) => STORES_LEFT.set(Some(left - 1)),
            None => {}
        }
    }

    /// Runs `what` for as long as it stores no more often than `stores` times; `None` when it wanted to.
    pub(crate) fn after<T>(stores: u32, what: impl FnOnce() -> T) -> Option<T> {
        STORES_LEFT.set(Some(stores));
        let ended = catch_unwind(AssertUnwindSafe(what));
        STORES_LEFT.set(None);
        match ended {
            Ok(done) => Some(done),
            Err(crash) if crash.is::<Crash>() => None,
            Err(panic) => resume_unwind(panic),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::lent::bytes_lent;
    use levada_base::reactor::Reactor;
    use levada_base::units::MIB;
    use levada_device::{Device, FileDevice, Prepare, RamDevice};
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::fd::OwnedFd;

    const PAGES: u64 = 4;

    fn file() -> OwnedFd {
        let file =
            memfd_create(c"memory of a guest", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
                .expect("a memfd");
        ftruncate(&file, PAGES * PAGE_BYTES).expect("room");
        file
    }

    /// Two regions beside each other in the guest, of a file each, and a third one apart.
    fn memory(files: &[OwnedFd; 3]) -> Memory {
        let guest = [0, PAGES * PAGE_BYTES, 100 * PAGE_BYTES];
        files.iter().zip(guest).fold(Memory::default(), |memory, (file, guest)| {
            let file = Stranger::from(file.try_clone().expect("a descriptor"));
            let place =
                Place { guest, bytes: PAGES * PAGE_BYTES, user: 1 << 40 | guest, offset: 0 };
            memory.with(place, file).expect("mapped")
        })
    }

    fn lend(memory: &Memory, guest: u64, pages: u64) -> Result<LentVec, Outside> {
        let mut lent = LentVec::new();
        memory.lend(guest, (pages * PAGE_BYTES) as usize, &mut lent).map(|()| lent)
    }

    /// The first byte of so many pages.
    fn pages(memory: &Memory, guest: u64, count: u64) -> Vec<u8> {
        let first = |page: u64| {
            let mut byte = [0];
            memory.read(guest + page * PAGE_BYTES, &mut byte).expect("inside");
            byte[0]
        };
        (0..count).map(first).collect()
    }

    #[test]
    fn what_is_lent_lies_where_the_guest_said() {
        let memory = memory(&[file(), file(), file()]);
        let lent = lend(&memory, 3 * PAGE_BYTES, 2).expect("inside, in two regions");
        assert_eq!((lent.len(), bytes_lent(&lent)), (2, 2 * PAGE_BYTES));
        lent[0].put(&[1; PAGE_BYTES as usize]);
        lent[1].put(&[2; PAGE_BYTES as usize]);
        assert_eq!(pages(&memory, 2 * PAGE_BYTES, 4), [0, 1, 2, 0]);
        for (guest, pages) in [(7, 2), (8, 1), (99, 1), (99, 2), (103, 2), (u64::MAX >> 12, 1)] {
            assert_eq!(lend(&memory, guest * PAGE_BYTES, pages).err(), Some(Outside), "{guest}");
        }
        // Also when the guest has taken it away.
        drop(memory);
        lent[0].clear();
    }

    /// No device, and so no drive of an array, is to blame for memory that is gone.
    #[test]
    fn memory_that_is_gone_is_no_fault_of_a_device() {
        let dir = tempfile::tempdir().expect("a directory");
        Reactor::new().expect("io_uring").block_on(async {
            let path = dir.path().join("drive");
            let drive = FileDevice::create(&path, MIB, Prepare::Zero).await.expect("a drive");
            let ram = RamDevice::new("ram", MIB);
            for is_ram in [false, true] {
                let device: &dyn Device = if is_ram { &ram } else { &drive };
                let files = [file(), file(), file()];
                let memory = memory(&files);
                let read = async |pages| {
                    let lent = lend(&memory, 0, pages).expect("inside");
                    device.read_lent(0, lent).expect("they can").await
                };
                assert!(read(8).await);
                ftruncate(&files[1], PAGE_BYTES).expect("shortened");
                let is_read = read(8).await;
                // A copy finds zeroes there by now.
                assert_eq!((is_read, memory.is_lost()), (is_ram, is_ram));
                assert_eq!(device.health().read_errors, 0);
                assert!(read(4).await);
                assert_eq!(memory.is_lost(), is_ram, "of others nothing is lost");
            }
        });
    }
}
