//! Slots: names for changes in flight, so that a repetition is recognised.
//!
//! What always holds: a slot names one change at a time, and its sequence grows with each.

use levada_base::sync::{Permit, Semaphore};
use std::cell::RefCell;
use std::rc::Rc;

/// The slots of this client at one target.
pub(crate) struct Slots {
    first: u32,
    /// Free ones; the last returned is used next, so that a quiet client uses few.
    free: RefCell<Vec<u32>>,
    sequences: RefCell<Vec<u64>>,
    permits: Rc<Semaphore>,
}

/// One slot for one change; free again when dropped.
pub(crate) struct Slot {
    of: Rc<Slots>,
    pub(crate) number: u32,
    pub(crate) sequence: u64,
    _permit: Permit,
}

impl Slots {
    /// `count` slots, numbered from `first` on.
    pub(crate) fn new(first: u32, count: u32) -> Rc<Self> {
        Rc::new(Self {
            first,
            free: RefCell::new((0..count).rev().collect()),
            sequences: RefCell::new(vec![0; count as usize]),
            permits: Semaphore::new(u64::from(count)),
        })
    }

    /// Sequences that the service has seen of an earlier life of this client.
    pub(crate) fn skip(&self, used: &[(u32, u64)]) {
        let mut sequences = self.sequences.borrow_mut();
        for (slot, sequence) in used {
            let index = slot.wrapping_sub(self.first);
            if let Some(held) = sequences.get_mut(index as usize) {
                *held = (*held).max(*sequence);
            }
        }
    }

    pub(crate) async fn take(self: &Rc<Self>) -> Slot {
        let permit = self.permits.acquire(1).await;
        let index = self.free.borrow_mut().pop().expect("as many as permits");
        let mut sequences = self.sequences.borrow_mut();
        let sequence = &mut sequences[index as usize];
        *sequence += 1;
        let number = self.first + index;
        Slot { of: Rc::clone(self), number, sequence: *sequence, _permit: permit }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.of.free.borrow_mut().push(self.number - self.of.first);
    }
}
