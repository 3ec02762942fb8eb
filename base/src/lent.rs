//! Memory that somebody else lends to be read into: a guest's, say, which its owner sees and may change at any time.
//!
//! What always holds:
//! - It is only written to, and never looked at: what lies there a moment later may be anything, and nothing can be concluded from it.
//! - No reference to it is made, only raw pointers: two requests may name the same bytes.
//! - It may be sent to another reactor, and filled from there.
//! - It stays mapped for as long as a [`Lent`] of it is held, also by an operation of the kernel that nobody waits for any more.
#![allow(unsafe_code)] // Memory that another process changes.

use smallvec::SmallVec;
use std::any::Any;
use std::cell::UnsafeCell;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// A list of lent memory that is filled in order. Mostly it is one piece, and it is handed down a long way.
pub type LentVec = SmallVec<[Lent; 1]>;

/// What keeps memory mapped.
pub type Keeper = Arc<dyn Any + Send + Sync>;

/// Bytes of somebody else, to be filled.
#[derive(Clone)]
pub struct Lent {
    start: NonNull<u8>,
    len: usize,
    #[allow(dead_code)] // held to be dropped
    keeper: Keeper,
}

// SAFETY: it is an address to write to, which no thread has a reference to, and whose keeper may go anywhere.
unsafe impl Send for Lent {}

impl Lent {
    /// The `len` bytes from `start` on, which `keeper` keeps mapped.
    ///
    /// # Safety
    ///
    /// Until the last clone of `keeper` is dropped the bytes can be written to, and nobody makes a reference to them. A page that is gone
    /// nevertheless is the business of whoever lends them, who catches its fault.
    #[must_use]
    pub unsafe fn new(start: NonNull<u8>, len: usize, keeper: Keeper) -> Self {
        Self { start, len, keeper }
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// True when it begins at a multiple of `bytes`.
    #[must_use]
    pub fn is_aligned(&self, bytes: usize) -> bool {
        self.start.as_ptr().addr().is_multiple_of(bytes)
    }

    /// The `len` bytes from `start` on.
    ///
    /// # Panics
    ///
    /// When they are not inside.
    #[must_use]
    pub fn part(&self, start: usize, len: usize) -> Self {
        assert!(start <= self.len && len <= self.len - start, "{start}+{len} of {}", self.len);
        // SAFETY: inside, as just checked.
        Self { start: unsafe { self.start.add(start) }, len, keeper: Arc::clone(&self.keeper) }
    }

    /// Fills its first bytes.
    ///
    /// # Panics
    ///
    /// When `from` is longer.
    pub fn put(&self, from: &[u8]) {
        assert!(from.len() <= self.len, "{} into {}", from.len(), self.len);
        // SAFETY: as many bytes can be written to, and nobody has a reference to them, as `new` was promised.
        unsafe { std::ptr::copy(from.as_ptr(), self.start.as_ptr(), from.len()) };
    }

    /// Fills all of it with zeroes.
    pub fn clear(&self) {
        // SAFETY: as in `put`.
        unsafe { self.start.as_ptr().write_bytes(0, self.len) };
    }

    /// For an operation of the kernel, which keeps this.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} lent bytes", self.len)
    }
}

/// The total length of a list of lent memory, in bytes.
#[must_use]
pub fn bytes_lent(parts: &[Lent]) -> u64 {
    parts.iter().map(|part| part.len as u64).sum()
}

/// Fills a list of lent memory with what a list of buffers holds, of which no less is there.
///
/// # Panics
///
/// When there is less.
pub fn put_all<B: std::ops::Deref<Target = [u8]>>(parts: &[Lent], from: &[B]) {
    let mut buffers = from.iter().map(|buffer| &buffer[..]);
    let mut rest: &[u8] = &[];
    for part in parts {
        let mut done = 0;
        while done < part.len {
            while rest.is_empty() {
                rest = buffers.next().expect("as many bytes as are lent");
            }
            let (now, later) = rest.split_at(rest.len().min(part.len - done));
            part.part(done, now.len()).put(now);
            (rest, done) = (later, done + now.len());
        }
    }
}

/// The part of a list of lent memory that begins at its byte `at` and has `bytes`.
///
/// # Panics
///
/// When it is not inside.
#[must_use]
pub fn cut_lent(parts: &[Lent], at: u64, bytes: u64) -> LentVec {
    let mut cut = LentVec::new();
    let (mut skip, mut left) = (at as usize, bytes as usize);
    for part in parts {
        let from = skip.min(part.len);
        skip -= from;
        let len = left.min(part.len - from);
        if len > 0 {
            cut.push(part.part(from, len));
            left -= len;
        }
    }
    assert!(left == 0, "{at}+{bytes} of {}", bytes_lent(parts));
    cut
}

/// Memory of this process to lend, for those who have none of another one: tests, and measurements.
pub struct Lender(Arc<Cells>);

struct Cells(Box<[UnsafeCell<u8>]>);

// SAFETY: threads that write to them at once leave some mixture, as with all that is lent.
unsafe impl Sync for Cells {}

impl Lender {
    /// `bytes`, at a multiple of nothing in particular.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self(Arc::new(Cells((0..bytes).map(|_| UnsafeCell::new(0xee)).collect())))
    }

    /// Lends `len` bytes from `start` on, which may be lent already.
    ///
    /// # Panics
    ///
    /// When they are not inside.
    #[must_use]
    pub fn lend(&self, start: usize, len: usize) -> Lent {
        let bytes = &self.0.0[start..start + len];
        let at = NonNull::new(bytes.as_ptr().cast::<u8>().cast_mut()).expect("not at 0");
        // SAFETY: cells, to which nobody has a reference beyond them, and which the clone keeps.
        unsafe { Lent::new(at, len, Arc::clone(&self.0) as Keeper) }
    }

    /// What lies there now.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        // SAFETY: what was lent is filled by this thread, or by the kernel at any moment: then it is some mixture.
        self.0.0.iter().map(|cell| unsafe { cell.get().read_volatile() }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Buf;

    #[test]
    fn parts_are_filled_in_order_however_the_buffers_lie() {
        let memory = Lender::new(10);
        let parts = [memory.lend(6, 3), memory.lend(2, 0), memory.lend(0, 4)];
        let from = [Buf::copy_of(&[1, 2]), Buf::copy_of(&[]), Buf::copy_of(&[3, 4, 5, 6, 7])];
        put_all(&parts, &from);
        assert_eq!(memory.bytes(), [4, 5, 6, 7, 0xee, 0xee, 1, 2, 3, 0xee]);
    }

    #[test]
    fn a_cut_has_the_bytes_that_were_asked_for() {
        for at in 0..=9_u64 {
            for bytes in 0..=9 - at {
                let all = Lender::new(12);
                let parts = [all.lend(0, 3), all.lend(6, 4), all.lend(10, 2)];
                let cut = cut_lent(&parts, at, bytes);
                assert_eq!(bytes_lent(&cut), bytes);
                cut.iter().for_each(Lent::clear);
                let places = [0, 1, 2, 6, 7, 8, 9, 10, 11];
                let bytes_there = all.bytes();
                for (number, place) in places.into_iter().enumerate() {
                    let is_in = (at..at + bytes).contains(&(number as u64));
                    assert_eq!(bytes_there[place] == 0, is_in, "{at}+{bytes}, {place}");
                }
            }
        }
        let lent = Lender::new(3).lend(0, 3);
        let outside = std::panic::AssertUnwindSafe(|| drop(lent.part(2, 2)));
        assert!(std::panic::catch_unwind(outside).is_err());
    }

    #[test]
    fn what_is_lent_is_kept() {
        let memory = Lender::new(8);
        let weak = Arc::downgrade(&memory.0);
        let lent = memory.lend(0, 8).part(4, 4);
        drop(memory);
        assert!(weak.upgrade().is_some());
        lent.put(&[1; 4]);
        drop(lent);
        assert!(weak.upgrade().is_none());
    }
}
