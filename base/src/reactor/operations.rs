//! Operations that an io_uring has under way: what each holds, and who waits for it.
//!
//! What always holds:
//! - What an operation refers to (buffers, addresses, its file descriptor) is kept from submission to completion, also when the future that
//!   waits for it is dropped.
//! - Dropping such a future asks for its end; the effect may still happen.
#![allow(unsafe_code)] // The kernel's descriptor of a connection that nobody waits for any more.

use io_uring::squeue;
use slab::Slab;
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{FromRawFd, OwnedFd};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// What is kept of an accept whose future may be dropped: then the new socket must be closed.
pub(super) struct Accepting(#[allow(dead_code)] pub(super) Rc<OwnedFd>);

enum Slot {
    Waiting { waker: Option<Waker>, kept: Box<dyn Any> },
    Done { result: i32, kept: Box<dyn Any> },
    Abandoned { kept: Box<dyn Any> },
}

/// See the module.
#[derive(Default)]
pub(super) struct Operations {
    slots: RefCell<Slab<Slot>>,
    /// Operations that the kernel has not completed.
    in_flight: Cell<usize>,
}

/// Who has submitted operations.
pub(super) trait Submitter {
    fn operations(&self) -> &Operations;

    /// Asks the kernel to give up the operation `key`.
    fn cancel(&self, key: usize);
}

impl Operations {
    /// One that is refused: a future that was carried out of its reactor asks for more.
    pub fn refuse<T: 'static>(&self, kept: T) -> usize {
        let done = Slot::Done { result: -libc::ECANCELED, kept: Box::new(kept) };
        self.slots.borrow_mut().insert(done)
    }

    /// Keeps what an operation needs, and makes its entry, which has to be submitted.
    pub fn begin<T: 'static>(
        &self,
        kept: T,
        entry: impl FnOnce(&mut T) -> squeue::Entry,
    ) -> (usize, squeue::Entry) {
        let mut kept = Box::new(kept);
        let entry = entry(&mut kept);
        let key = self.slots.borrow_mut().insert(Slot::Waiting { waker: None, kept });
        self.in_flight.set(self.in_flight.get() + 1);
        (key, entry.user_data(key as u64))
    }

    pub fn in_flight(&self) -> usize {
        self.in_flight.get()
    }

    /// Those whose futures are there.
    pub fn waiting(&self) -> Vec<usize> {
        let slots = self.slots.borrow();
        let waiting = slots.iter().filter(|(_, slot)| matches!(slot, Slot::Waiting { .. }));
        waiting.map(|(key, _)| key).collect()
    }

    /// The kernel is done with an operation.
    pub fn complete(&self, key: usize, result: i32) {
        self.in_flight.set(self.in_flight.get() - 1);
        let mut slots = self.slots.borrow_mut();
        let slot = slots.get_mut(key).expect("a completion of an operation in flight");
        let empty = Slot::Abandoned { kept: Box::new(()) };
        match std::mem::replace(slot, empty) {
            Slot::Waiting { waker, kept } => {
                *slot = Slot::Done { result, kept };
                drop(slots);
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
            Slot::Abandoned { kept } => {
                slots.remove(key);
                drop(slots);
                forget(&*kept, result);
            }
            Slot::Done { .. } => unreachable!("operation {key} completed twice"),
        }
    }
}

/// Closes what an operation made for nobody.
fn forget(kept: &dyn Any, result: i32) {
    if kept.is::<Accepting>() && result >= 0 {
        // SAFETY: the kernel just made this descriptor, and nobody else knows it.
        drop(unsafe { OwnedFd::from_raw_fd(result) });
    }
}

/// An operation in flight: completes with its result and with what was kept for it.
pub(super) struct Op<T> {
    submitter: Rc<dyn Submitter>,
    /// `None` once the result was handed out.
    key: Option<usize>,
    kept: PhantomData<Box<T>>,
}

impl<T> Op<T> {
    /// Of an operation that was begun with a `T`.
    pub fn of(submitter: Rc<dyn Submitter>, key: usize) -> Self {
        Self { submitter, key: Some(key), kept: PhantomData }
    }
}

impl<T: 'static> Future for Op<T> {
    type Output = (io::Result<usize>, T);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let key = self.key.expect("polled after it was done");
        let mut slots = self.submitter.operations().slots.borrow_mut();
        if let Slot::Waiting { waker, .. } = &mut slots[key] {
            match waker {
                Some(waker) => waker.clone_from(cx.waker()),
                None => *waker = Some(cx.waker().clone()),
            }
            return Poll::Pending;
        }
        let Slot::Done { result, kept } = slots.remove(key) else {
            unreachable!("an operation with a future is waiting or done")
        };
        drop(slots);
        self.key = None;
        let kept = *kept.downcast().expect("the type it was submitted with");
        let result = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
        Poll::Ready((result, kept))
    }
}

impl<T> Drop for Op<T> {
    fn drop(&mut self) {
        let Some(key) = self.key else { return };
        let mut slots = self.submitter.operations().slots.borrow_mut();
        let empty = Slot::Abandoned { kept: Box::new(()) };
        match std::mem::replace(&mut slots[key], empty) {
            Slot::Waiting { kept, .. } => {
                slots[key] = Slot::Abandoned { kept };
                drop(slots);
                self.submitter.cancel(key);
            }
            Slot::Done { result, kept } => {
                slots.remove(key);
                drop(slots);
                forget(&*kept, result);
            }
            Slot::Abandoned { .. } => unreachable!("dropped twice"),
        }
    }
}
