//! Credits: how much a service lets a caller have in flight.
//!
//! Served in order of arrival, so that a large request is not starved by small ones. A permit
//! that is dropped before its request was sent gives its credits back; one that was sent gets
//! them back with the reply.

use levada_base::sync::oneshot;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};

#[derive(Default)]
pub(super) struct Credits {
    requests: Cell<u64>,
    bytes: Cell<u64>,
    waiting: RefCell<VecDeque<(u64, oneshot::Sender<Permit>)>>,
}

/// The right to send one request.
pub(super) struct Permit {
    of: Weak<Credits>,
    bytes: u64,
}

impl Permit {
    /// The request was sent: the credits come back with its reply.
    pub(super) fn spend(mut self) {
        self.of = Weak::new();
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(of) = self.of.upgrade() {
            of.grant(1, self.bytes);
        }
    }
}

impl Credits {
    fn take(self: &Rc<Self>, bytes: u64) -> Option<Permit> {
        if self.requests.get() == 0 || self.bytes.get() < bytes {
            return None;
        }
        self.requests.set(self.requests.get() - 1);
        self.bytes.set(self.bytes.get() - bytes);
        Some(Permit { of: Rc::downgrade(self), bytes })
    }

    /// Waits for the right to send a request of `bytes`; `None` when the connection ended.
    pub(super) async fn acquire(self: &Rc<Self>, bytes: u64) -> Option<Permit> {
        if self.waiting.borrow().is_empty()
            && let Some(permit) = self.take(bytes)
        {
            return Some(permit);
        }
        let (sender, receiver) = oneshot::channel();
        self.waiting.borrow_mut().push_back((bytes, sender));
        receiver.await.ok()
    }

    pub(super) fn grant(self: &Rc<Self>, requests: u64, bytes: u64) {
        self.requests.set(self.requests.get().saturating_add(requests));
        self.bytes.set(self.bytes.get().saturating_add(bytes));
        loop {
            let Some(bytes) = self.waiting.borrow().front().map(|(bytes, _)| *bytes) else { break };
            let Some(permit) = self.take(bytes) else { break };
            let front = self.waiting.borrow_mut().pop_front();
            let (_, waiter) = front.expect("seen");
            // When nobody waits any more the permit is dropped and gives the credits back.
            waiter.send(permit);
        }
    }

    /// The connection ended: all who wait get nothing.
    pub(super) fn close(&self) {
        let waiting = std::mem::take(&mut *self.waiting.borrow_mut());
        drop(waiting);
    }
}
