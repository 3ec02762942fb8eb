//! Counts the requests that pass on their way to a service.

use futures_util::future::LocalBoxFuture;
use levada_wire::frame::Frame;
use levada_wire::rpc::{ConnectionId, Handler, Pusher, Reply};
use std::cell::Cell;
use std::rc::Rc;

/// A service whose requests are counted.
pub struct Counted {
    inner: Rc<dyn Handler>,
    requests: Cell<u64>,
}

impl Counted {
    /// Counts what goes to `inner`.
    #[must_use]
    pub fn new(inner: Rc<dyn Handler>) -> Rc<Self> {
        Rc::new(Self { inner, requests: Cell::new(0) })
    }

    /// Requests so far.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.requests.get()
    }
}

impl Handler for Counted {
    fn handle(&self, request: Frame, from: Pusher) -> LocalBoxFuture<'_, Reply> {
        self.requests.set(self.requests.get() + 1);
        self.inner.handle(request, from)
    }

    fn one_way(&self, frame: Frame, from: ConnectionId) {
        self.inner.one_way(frame, from);
    }
}
