//! Who is connected to a server.

use crate::reactor;
use crate::reactor::net::{Listener, Stream, accept_error_passes};
use crate::sync::Notify;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// After an error of the system that passes, as when there are no descriptors left.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(100);

struct State {
    most: usize,
    count: Cell<usize>,
    left: Notify,
}

/// The clients of a server, counted. Clones count the same ones.
#[derive(Clone)]
pub struct Clients(Rc<State>);

/// Counts a client for as long as it is there.
pub struct Present(Rc<State>);

impl Clients {
    /// None; `most` at once.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self(Rc::new(State { most, count: Cell::new(0), left: Notify::default() }))
    }

    #[must_use]
    pub fn count(&self) -> usize {
        self.0.count.get()
    }

    /// Counts one more. `None`: there are as many as may be.
    #[must_use]
    pub fn enter(&self) -> Option<Present> {
        let count = self.count();
        (count < self.0.most).then(|| {
            self.0.count.set(count + 1);
            Present(Rc::clone(&self.0))
        })
    }

    /// Returns when there is none.
    pub async fn all_left(&self) {
        self.0.left.until(|| (self.count() == 0).then_some(())).await;
    }

    /// Accepts connections, which are carried if anything is, and hands them to `serve` until the listener fails for good; `what` is how they are called in the log. One
    /// that is too many is closed.
    pub async fn accept_all(
        &self,
        listener: Listener,
        what: &'static str,
        mut serve: impl FnMut(Present, Stream),
    ) {
        loop {
            match listener.accept().await {
                Ok(stream) => match self.enter() {
                    Some(present) => serve(present, stream.carried()),
                    None => tracing::warn!(most = self.0.most, "{what} is turned away"),
                },
                Err(error) if accept_error_passes(&error) => {
                    tracing::warn!(%error, "{what} cannot be accepted now");
                    reactor::sleep(ACCEPT_AGAIN_AFTER).await;
                }
                Err(error) => {
                    tracing::error!(%error, "{what} cannot be accepted any more");
                    return;
                }
            }
        }
    }
}

impl Drop for Present {
    fn drop(&mut self) {
        self.0.count.set(self.0.count.get() - 1);
        self.0.left.notify_all();
    }
}
