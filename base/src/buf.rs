//! Page-aligned, reference-counted buffers that travel from socket to drive without a copy.
//!
//! A [`BufMut`] is the only view of its bytes and can be split, so that several reads land in
//! one allocation; [`BufMut::freeze`] turns it into a [`Buf`], which is cheap to clone and slice.
//! Both belong to one thread (`Rc`, not `Arc`: no shared atomics on the data path).
//!
//! What always holds:
//! - The start of an allocation is aligned to [`BLOCK_BYTES`].
//! - No two live `BufMut` overlap, and no `Buf` overlaps a live `BufMut`.
//! - Memory handed out is initialised: fresh memory is zeroed, recycled memory holds old bytes.
//! - Memory of another process ([`crate::shared`]) is only read.
//! - Memory that is registered with a ring stays where it is: before it is freed, or its pages are
//!   given back, the ring is told ([`watch`]). The kernel holds on to the pages that it was shown; a
//!   region that got others meanwhile would be read and written past its owner.
#![allow(unsafe_code)] // Raw allocation with page alignment; disjoint mutable views of one allocation.

use crate::shared::Arena;
use crate::units::BLOCK_BYTES;
use smallvec::SmallVec;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::rc::Rc;

/// A list of buffers written one after the other.
pub type IoVec = SmallVec<[Buf; 4]>;
/// A list of buffers filled one after the other.
pub type IoVecMut = SmallVec<[BufMut; 4]>;

/// The bytes of a list of buffers, in one piece.
#[must_use]
pub fn joined<T: Deref<Target = [u8]>>(parts: &[T]) -> Vec<u8> {
    let mut all = Vec::with_capacity(bytes_in(parts) as usize);
    // Whole slices at a time: byte by byte was half of what some tests did.
    parts.iter().for_each(|part| all.extend_from_slice(part));
    all
}

/// The total length of a list of buffers, in bytes.
#[must_use]
pub fn bytes_in<T: Deref<Target = [u8]>>(parts: &[T]) -> u64 {
    parts.iter().map(|part| part.len() as u64).sum()
}

const SMALLEST_CLASS_BYTES: usize = BLOCK_BYTES as usize;
/// Classes are powers of two from 4 KiB to 8 MiB; larger allocations are not recycled.
const CLASSES: usize = 12;
/// Bytes that a thread keeps for reuse, over all classes.
const POOLED_BYTES_MAX: usize = 256 << 20;

/// What a ring knows of a region; it stays with the region while that waits to be used again.
#[derive(Clone, Copy, Default)]
pub(crate) struct Registration {
    /// The ring that has it in its table; 0 when none has.
    pub(crate) ring: u32,
    /// Where in the table.
    pub(crate) index: u16,
    /// Bytes that drives have moved to and from it, as far as anybody counted.
    pub(crate) moved_bytes: u32,
}

/// A region that nobody uses.
struct Free {
    start: NonNull<u8>,
    registration: Registration,
}

/// The ring that registers regions of this thread, and how it learns that one goes.
struct Watcher {
    ring: u32,
    goes: Box<dyn Fn(u16, usize)>,
}

#[derive(Default)]
struct Pool {
    /// All of the arena, once there is one.
    free: [Vec<Free>; CLASSES],
    pooled_bytes: usize,
    arena: Option<Arena>,
    watcher: Option<Watcher>,
}

impl Pool {
    fn take(&mut self, class: usize) -> Option<(Free, Origin)> {
        let capacity = SMALLEST_CLASS_BYTES << class;
        if let Some(free) = self.free[class].pop() {
            self.pooled_bytes -= capacity;
            let Some(arena) = &self.arena else { return Some((free, Origin::Private)) };
            arena.count(1);
            return Some((free, Origin::Arena));
        }
        let start = self.arena.as_ref()?.take(capacity)?;
        Some((Free { start, registration: Registration::default() }, Origin::Arena))
    }

    /// True when it was kept.
    fn give(&mut self, free: Free, class: usize, origin: &Origin) -> bool {
        let capacity = SMALLEST_CLASS_BYTES << class;
        // Only for what could be kept.
        let is_kind =
            matches!((origin, &self.arena), (Origin::Arena, Some(_)) | (Origin::Private, None));
        let fits = is_kind && self.make_room(class);
        match (origin, &self.arena) {
            (Origin::Arena, Some(arena)) => {
                arena.count(-1);
                if !fits {
                    goes(self.watcher.as_ref(), free.registration, capacity);
                    arena.empty(free.start, capacity);
                    return true;
                }
            }
            (Origin::Private, None) if fits => {}
            (Origin::Private | Origin::Apart | Origin::Arena | Origin::Foreign(_), _) => {
                goes(self.watcher.as_ref(), free.registration, capacity);
                return false;
            }
        }
        self.pooled_bytes += capacity;
        self.free[class].push(free);
        true
    }

    /// Makes room for a region of `class` by letting go of those of which most lie idle: else what was
    /// used once would keep out what is used now. False when that is this class itself.
    fn make_room(&mut self, class: usize) -> bool {
        let bytes_of = |class| SMALLEST_CLASS_BYTES << class;
        while self.pooled_bytes + bytes_of(class) > POOLED_BYTES_MAX {
            let held =
                self.free.iter().enumerate().map(|(of, free)| (free.len() * bytes_of(of), of));
            let Some((_, most)) = held.max().filter(|(_, most)| *most != class) else {
                return false;
            };
            let Some(free) = self.free[most].pop() else { return false };
            self.pooled_bytes -= bytes_of(most);
            self.let_go(free, bytes_of(most));
        }
        true
    }

    /// Gives back the memory of a region that was pooled.
    fn let_go(&self, free: Free, capacity: usize) {
        goes(self.watcher.as_ref(), free.registration, capacity);
        match &self.arena {
            Some(arena) => arena.empty(free.start, capacity),
            // SAFETY: every pooled region of this capacity was allocated with this layout.
            None => unsafe { dealloc(free.start.as_ptr(), layout_of(capacity)) },
        }
    }

    /// Forgets what is free.
    fn drain(&mut self) {
        for class in 0..CLASSES {
            let capacity = SMALLEST_CLASS_BYTES << class;
            for free in std::mem::take(&mut self.free[class]) {
                match &self.arena {
                    // It goes as a whole.
                    Some(_) => goes(self.watcher.as_ref(), free.registration, capacity),
                    None => self.let_go(free, capacity),
                }
            }
        }
        self.pooled_bytes = 0;
    }
}

/// Tells the ring that has a region in its table that the region goes.
fn goes(watcher: Option<&Watcher>, registration: Registration, capacity: usize) {
    if let Some(watcher) = watcher
        && watcher.ring == registration.ring
    {
        (watcher.goes)(registration.index, capacity);
    }
}

/// From now on `goes` is called with the index and the capacity of a region that is registered
/// with `ring` (not 0), before its memory goes; it must not use buffers. False when another ring
/// of this thread watches already.
pub(crate) fn watch(ring: u32, goes: Box<dyn Fn(u16, usize)>) -> bool {
    POOL.with_borrow_mut(|pool| {
        let is_first = pool.watcher.is_none();
        if is_first {
            pool.watcher = Some(Watcher { ring, goes });
        }
        is_first
    })
}

/// `ring` holds no region any more.
pub(crate) fn unwatch(ring: u32) {
    // At thread exit the pool may be gone already.
    let _ = POOL.try_with(|pool| {
        let mut pool = pool.borrow_mut();
        pool.watcher.take_if(|watcher| watcher.ring == ring);
    });
}

/// Does something with the arena of this thread, which is made if need be.
pub(crate) fn with_arena<T>(then: impl FnOnce(&Arena) -> io::Result<T>) -> io::Result<T> {
    POOL.with_borrow_mut(|pool| {
        if pool.arena.is_none() {
            let arena = Arena::new()?;
            pool.drain();
            pool.arena = Some(arena);
        }
        then(pool.arena.as_ref().expect("made above"))
    })
}

thread_local! {
    static POOL: RefCell<Pool> = RefCell::default();
}

fn class_of(len: usize) -> Option<usize> {
    let class = len.max(1).div_ceil(SMALLEST_CLASS_BYTES).next_power_of_two().trailing_zeros();
    ((class as usize) < CLASSES).then_some(class as usize)
}

fn layout_of(capacity: usize) -> Layout {
    Layout::from_size_align(capacity, BLOCK_BYTES as usize)
        .expect("a buffer fits the address space")
}

fn allocate_zeroed(capacity: usize) -> NonNull<u8> {
    let layout = layout_of(capacity);
    // SAFETY: `capacity` is at least one block, so the layout is not empty.
    let start = unsafe { alloc_zeroed(layout) };
    NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout))
}

/// Where the memory of a region comes from.
enum Origin {
    /// Allocated, and pooled afterwards.
    Private,
    /// Allocated, and freed afterwards.
    Apart,
    /// The arena of the thread.
    Arena,
    /// Another process, or several threads. What is held keeps it in place.
    Foreign(Box<dyn Any>),
}

/// One allocation; dropped with its last view.
pub(crate) struct Region {
    start: NonNull<u8>,
    capacity: usize,
    origin: Origin,
    registration: Cell<Registration>,
}

impl Region {
    fn new(len: usize) -> Self {
        let class = class_of(len);
        let capacity = match class {
            Some(class) => SMALLEST_CLASS_BYTES << class,
            None => len.next_multiple_of(SMALLEST_CLASS_BYTES),
        };
        let taken = class.and_then(|class| POOL.with_borrow_mut(|pool| pool.take(class)));
        if let Some((Free { start, registration }, origin)) = taken {
            return Self { start, capacity, origin, registration: Cell::new(registration) };
        }
        Self::unregistered(allocate_zeroed(capacity), capacity, Origin::Private)
    }

    fn unregistered(start: NonNull<u8>, capacity: usize, origin: Origin) -> Self {
        Self { start, capacity, origin, registration: Cell::default() }
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// What a ring knows of it; `None` when it must not be registered: nobody would be told
    /// before the memory goes, or it is not ours.
    pub(crate) fn registration(&self) -> Option<&Cell<Registration>> {
        match self.origin {
            Origin::Private | Origin::Arena => {
                class_of(self.capacity).is_some().then_some(&self.registration)
            }
            Origin::Apart | Origin::Foreign(_) => None,
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // At thread exit the pool may be gone already; then the memory is simply freed.
        let kept = class_of(self.capacity).is_some_and(|class| {
            POOL.try_with(|pool| {
                let Ok(mut pool) = pool.try_borrow_mut() else { return false };
                let free = Free { start: self.start, registration: self.registration.get() };
                pool.give(free, class, &self.origin)
            })
            .unwrap_or(false)
        });
        match &self.origin {
            Origin::Private | Origin::Apart if !kept => {
                // SAFETY: allocated with this very layout, and no view is left.
                unsafe { dealloc(self.start.as_ptr(), layout_of(self.capacity)) }
            }
            // An arena that a region outlives stays for good.
            Origin::Private | Origin::Apart | Origin::Arena | Origin::Foreign(_) => {}
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.drain();
    }
}

/// An immutable view of a buffer.
#[derive(Clone)]
pub struct Buf {
    region: Rc<Region>,
    start: usize,
    len: usize,
}

/// The only view of some bytes of a buffer.
pub struct BufMut {
    region: Rc<Region>,
    start: usize,
    len: usize,
}

/// A view of a buffer that a drive is to fill or to take.
pub(crate) trait View: Deref<Target = [u8]> {
    fn region(&self) -> &Region;
}

impl View for Buf {
    fn region(&self) -> &Region {
        &self.region
    }
}

impl View for BufMut {
    fn region(&self) -> &Region {
        &self.region
    }
}

impl BufMut {
    /// A buffer of `len` zero bytes.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        let mut buf = Self::for_overwrite(len);
        buf.fill(0);
        buf
    }

    /// A buffer of `len` bytes whose contents are old and must all be overwritten.
    #[must_use]
    pub fn for_overwrite(len: usize) -> Self {
        Self { region: Rc::new(Region::new(len)), start: 0, len }
    }

    /// A buffer of `len` zero bytes that is to stay for long: it takes nothing from the pool and
    /// gives nothing back, and takes no room in shared memory.
    #[must_use]
    pub fn zeroed_to_stay(len: usize) -> Self {
        let capacity = len.max(1).next_multiple_of(SMALLEST_CLASS_BYTES);
        let start = allocate_zeroed(capacity);
        let region = Region::unregistered(start, capacity, Origin::Apart);
        Self { region: Rc::new(region), start: 0, len }
    }

    /// A buffer that holds a copy of `bytes`.
    #[must_use]
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut buf = Self::for_overwrite(bytes.len());
        buf.copy_from_slice(bytes);
        buf
    }

    /// The only view of memory that somebody else keeps.
    ///
    /// # Safety
    ///
    /// The bytes can be read and written to until `keeper` is dropped, and nobody else does either before this is a [`Buf`].
    pub(crate) unsafe fn foreign(start: NonNull<u8>, len: usize, keeper: Box<dyn Any>) -> Self {
        let region = Region::unregistered(start, len, Origin::Foreign(keeper));
        Self { region: Rc::new(region), start: 0, len }
    }

    /// Splits off and returns the first `at` bytes.
    ///
    /// # Panics
    ///
    /// When `at` is past the end.
    #[must_use]
    pub fn split_to(&mut self, at: usize) -> Self {
        assert!(at <= self.len, "split at {at} of {}", self.len);
        let head = Self { region: Rc::clone(&self.region), start: self.start, len: at };
        self.start += at;
        self.len -= at;
        head
    }

    /// Joins `tail` again, which must lie directly behind `self` in the same allocation.
    ///
    /// # Panics
    ///
    /// When it does not.
    pub fn unsplit(&mut self, tail: Self) {
        assert!(
            Rc::ptr_eq(&self.region, &tail.region) && self.start + self.len == tail.start,
            "only neighbours of one allocation can be joined"
        );
        self.len += tail.len;
    }

    /// Shortens the view to its first `len` bytes; does nothing when it is shorter.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Gives up the right to write, so that the bytes can be shared.
    #[must_use]
    pub fn freeze(self) -> Buf {
        Buf { region: self.region, start: self.start, len: self.len }
    }

    /// This buffer as a list of one.
    #[must_use]
    pub fn into_vec(self) -> IoVecMut {
        smallvec::smallvec![self]
    }
}

impl Buf {
    /// A buffer that holds a copy of `bytes`.
    #[must_use]
    pub fn copy_of(bytes: &[u8]) -> Self {
        BufMut::copy_of(bytes).freeze()
    }

    /// A view of `len` bytes from `start` on.
    ///
    /// # Panics
    ///
    /// When the range is not inside this view.
    #[must_use]
    #[inline]
    pub fn slice(&self, start: usize, len: usize) -> Self {
        assert!(start + len <= self.len, "{start}+{len} of {}", self.len);
        Self { region: Rc::clone(&self.region), start: self.start + start, len }
    }

    /// A view of memory that belongs to somebody else, who must not be written to.
    ///
    /// # Safety
    ///
    /// The bytes are readable until `keeper` is dropped.
    pub(crate) unsafe fn foreign(start: NonNull<u8>, len: usize, keeper: Box<dyn Any>) -> Self {
        let origin = Origin::Foreign(keeper);
        let region = Region::unregistered(start, len, origin);
        Self { region: Rc::new(region), start: 0, len }
    }

    /// What keeps its memory, where that is not ours.
    pub(crate) fn keeper(&self) -> Option<&dyn Any> {
        match &self.region.origin {
            Origin::Foreign(keeper) => Some(&**keeper),
            Origin::Private | Origin::Apart | Origin::Arena => None,
        }
    }

    /// Where the bytes lie in the memory that this thread shares
    /// ([`crate::shared::share_buffers`]); `None` when they are not in it.
    #[must_use]
    pub fn shared_offset(&self) -> Option<u64> {
        if !matches!(self.region.origin, Origin::Arena) {
            return None;
        }
        POOL.with_borrow(|pool| Some(pool.arena.as_ref()?.offset_of(self.as_ptr())))
    }

    /// True for memory of another process, which may change it once it was told that nobody needs it, and for what was handed over by another
    /// thread ([`crate::Handed`]).
    #[must_use]
    pub fn is_foreign(&self) -> bool {
        matches!(self.region.origin, Origin::Foreign(_))
    }

    /// Bytes of the whole allocation that this view keeps alive.
    #[must_use]
    pub fn allocated_bytes(&self) -> usize {
        self.region.capacity
    }

    /// Joins `tail`, which must lie directly behind `self` in the same allocation.
    ///
    /// # Panics
    ///
    /// When it does not.
    pub fn unsplit(&mut self, tail: Self) {
        assert!(
            Rc::ptr_eq(&self.region, &tail.region) && self.start + self.len == tail.start,
            "only neighbours of one allocation can be joined"
        );
        self.len += tail.len;
    }

    /// Gets the right to write back, when no other view of the allocation is left.
    ///
    /// # Errors
    ///
    /// `self` when there is another view, or when the memory is another process's.
    pub fn try_into_mut(self) -> Result<BufMut, Self> {
        let is_ours = !matches!(self.region.origin, Origin::Foreign(_));
        if is_ours && Rc::strong_count(&self.region) == 1 {
            Ok(BufMut { region: self.region, start: self.start, len: self.len })
        } else {
            Err(self)
        }
    }

    /// This buffer as a list of one.
    #[must_use]
    #[inline]
    pub fn into_vec(self) -> IoVec {
        smallvec::smallvec![self]
    }
}

impl Deref for Buf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the range lies inside the initialised allocation, and no `BufMut` overlaps it.
        unsafe { std::slice::from_raw_parts(self.region.start.as_ptr().add(self.start), self.len) }
    }
}

impl Deref for BufMut {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the range lies inside the initialised allocation, and only this view has it.
        unsafe { std::slice::from_raw_parts(self.region.start.as_ptr().add(self.start), self.len) }
    }
}

impl DerefMut for BufMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the range lies inside the initialised allocation, and only this view has it.
        unsafe {
            std::slice::from_raw_parts_mut(self.region.start.as_ptr().add(self.start), self.len)
        }
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} bytes)", self.len)
    }
}

impl fmt::Debug for BufMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufMut({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_one_allocation_are_filled_apart_and_joined() {
        let mut whole = BufMut::zeroed(3 * 4096);
        assert_eq!(whole.as_ptr() as usize % 4096, 0);
        let mut head = whole.split_to(4096);
        head.fill(1);
        whole.fill(2);
        head.unsplit(whole);
        let frozen = head.freeze();
        assert!(frozen[..4096].iter().all(|b| *b == 1));
        assert!(frozen.slice(4096, 8192).iter().all(|b| *b == 2));
    }

    #[test]
    fn a_shared_buffer_stays_read_only() {
        let buf = Buf::copy_of(b"levada");
        let other = buf.clone();
        let buf = buf.try_into_mut().expect_err("shared");
        drop(other);
        assert_eq!(&buf.try_into_mut().expect("unique")[..], b"levada");
    }

    #[test]
    fn frozen_neighbours_are_joined() {
        let mut rest = BufMut::zeroed(4 * 4096);
        let mut all = rest.split_to(0).freeze();
        for n in 1..4 {
            let mut part = rest.split_to(4096);
            part.fill(n);
            all.unsplit(part.freeze());
        }
        assert_eq!((all.len(), all[0], all[3 * 4096 - 1]), (3 * 4096, 1, 3));
    }

    #[test]
    fn freed_memory_is_recycled() {
        let first = BufMut::zeroed(10_000);
        let at = first.as_ptr();
        drop(first);
        assert_eq!(BufMut::for_overwrite(16_000).as_ptr(), at);
    }

    #[test]
    fn idle_memory_of_one_size_does_not_keep_another_size_out() {
        const SMALL: usize = 128 << 10;
        let small = |_| BufMut::for_overwrite(SMALL);
        drop((0..POOLED_BYTES_MAX / SMALL + 5).map(small).collect::<Vec<_>>());
        let pooled = || POOL.with_borrow(|pool| pool.pooled_bytes);
        assert_eq!(pooled(), POOLED_BYTES_MAX);
        let large = BufMut::for_overwrite(1 << 20);
        let at = large.as_ptr();
        drop(large);
        assert_eq!(pooled(), POOLED_BYTES_MAX);
        assert_eq!(BufMut::for_overwrite(1 << 20).as_ptr(), at, "kept");
    }
}
