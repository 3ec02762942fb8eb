//! Buffers that go to another reactor of this process, without a copy.
//!
//! A [`Buf`] belongs to its thread, as its count of owners does. What is to go to another thread is filled in memory that has a count of
//! its own ([`Handed::buffer`]); it goes as a [`Handed`], and is a [`Buf`] again where it arrives.
//!
//! What always holds: from the moment the buffer is a [`Buf`] nobody writes to these bytes, on whichever thread.
#![allow(unsafe_code)] // Memory that two threads have views of.

use crate::buf::{Buf, BufMut};
use crate::units::BLOCK_BYTES;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Arc;

/// Memory at a multiple of a page.
struct Allocation {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory; who may write to it, and when, is the business of the views.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Allocation {
    fn new(bytes: usize) -> Arc<Self> {
        let bytes = bytes.max(1).next_multiple_of(BLOCK_BYTES as usize);
        let layout = Layout::from_size_align(bytes, BLOCK_BYTES as usize)
            .expect("a buffer fits the address space");
        // SAFETY: at least one block, so the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout));
        Arc::new(Self { start, layout })
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: allocated with this very layout, and no view is left.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// A buffer on its way to another thread.
pub struct Handed {
    allocation: Arc<Allocation>,
    start: usize,
    len: usize,
}

impl Handed {
    /// A buffer of zeroes that can be handed over once it is filled.
    #[must_use]
    pub fn buffer(len: usize) -> BufMut {
        let allocation = Allocation::new(len);
        let (start, keeper) = (allocation.start, Box::new(Arc::clone(&allocation)));
        // SAFETY: the only view of bytes that the keeper keeps.
        unsafe { BufMut::foreign(start, len, keeper) }
    }

    /// `buf` for another thread; a copy, if it was not made for that.
    #[must_use]
    pub fn new(buf: &Buf) -> Self {
        if let Some(allocation) = buf.keeper().and_then(|keeper| keeper.downcast_ref()) {
            let allocation: &Arc<Allocation> = allocation;
            let start = buf.as_ptr().addr() - allocation.start.as_ptr().addr();
            return Self { allocation: Arc::clone(allocation), start, len: buf.len() };
        }
        let mut copy = Self::buffer(buf.len());
        copy.copy_from_slice(buf);
        Self::new(&copy.freeze())
    }

    /// The buffer on the thread that has it now.
    #[must_use]
    pub fn into_buf(self) -> Buf {
        let Self { allocation, start, len } = self;
        // SAFETY: inside the allocation, as the view was that this was made from.
        let first = unsafe { allocation.start.add(start) };
        // SAFETY: the keeper keeps these bytes, to which nobody writes any more.
        unsafe { Buf::foreign(first, len, Box::new(allocation)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_goes_over_as_it_is_and_any_other_as_a_copy() {
        let mut buffer = Handed::buffer(10_000);
        assert!(buffer.as_ptr().addr().is_multiple_of(4096));
        buffer.copy_from_slice(&[7; 10_000]);
        let whole = buffer.freeze();
        let part = whole.slice(5000, 3000);
        let (place, handed) = (part.as_ptr().addr(), Handed::new(&part));
        drop((whole, part));
        let copied = Handed::new(&Buf::copy_of(&[8; 100]).slice(10, 50));
        std::thread::spawn(move || {
            let buf = handed.into_buf();
            assert_eq!((buf.as_ptr().addr(), &buf[..]), (place, &[7; 3000][..]));
            assert!(buf.clone().try_into_mut().is_err(), "others may have it");
            assert_eq!(copied.into_buf()[..], [8; 50]);
        })
        .join()
        .expect("as expected");
        assert!(Handed::new(&Buf::copy_of(&[])).into_buf().is_empty());
    }
}
