//! Who is connected to a server.
//!
//! A client is a stranger until its server knows what it wants ([`Present::settle`]). Where there are as many clients as may be, the stranger
//! that came first makes room for the next: who only opens connections keeps nobody out for longer than it takes others to say who they
//! are.

use crate::reactor;
use crate::reactor::net::{Listener, Stream, accept_error_is_of_room, accept_error_passes};
use crate::sync::{Notify, Once};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

/// After an error of the system that passes, as when there are no descriptors left, or hardly any.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(100);
/// A part of all those that may be there: so many are waited for that have to go.
const LEAVING_SHARE: usize = 8;

struct State {
    most: usize,
    count: Cell<usize>,
    left: Notify,
    /// In the order in which they came.
    strangers: RefCell<VecDeque<Rc<Once>>>,
}

/// The clients of a server, counted. Clones count the same ones.
#[derive(Clone)]
pub struct Clients(Rc<State>);

/// Counts a client for as long as it is there.
pub struct Present {
    among: Rc<State>,
    displaced: Rc<Once>,
}

impl Clients {
    /// None; `most` at once.
    #[must_use]
    pub fn new(most: usize) -> Self {
        let (count, left, strangers) = Default::default();
        Self(Rc::new(State { most, count, left, strangers }))
    }

    #[must_use]
    pub fn count(&self) -> usize {
        self.0.count.get()
    }

    /// Counts one more, a stranger. `None`: there are as many as may be, and none of them is to go.
    #[must_use]
    pub fn enter(&self) -> Option<Present> {
        let (count, most) = (self.count(), self.0.most);
        // Who goes is counted until it has gone, and not for too many of them is waited at a time.
        let is_full = count >= most + most.div_ceil(LEAVING_SHARE);
        if is_full || count >= most && !self.displace() {
            return None;
        }
        let displaced = Rc::new(Once::default());
        self.0.strangers.borrow_mut().push_back(Rc::clone(&displaced));
        self.0.count.set(count + 1);
        Some(Present { among: Rc::clone(&self.0), displaced })
    }

    /// Has the first of the strangers make room, if there is one.
    fn displace(&self) -> bool {
        let first = self.0.strangers.borrow_mut().pop_front();
        first.inspect(|first| first.happen()).is_some()
    }

    /// Has some of the strangers make room. False: there are none.
    fn displace_some(&self) -> bool {
        let leaving = self.0.strangers.borrow().len().div_ceil(LEAVING_SHARE);
        for _ in 0..leaving {
            self.displace();
        }
        leaving > 0
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
                // Each has a descriptor, of which the process may have fewer than clients are let in. The last ones are not for strangers.
                Ok(stream) if stream.takes_a_last_descriptor() => {
                    match self.displace_some().then(|| self.enter()).flatten() {
                        Some(present) => serve(present, stream.carried()),
                        None => tracing::warn!("{what} is turned away, no descriptors are left"),
                    }
                    reactor::sleep(ACCEPT_AGAIN_AFTER).await;
                }
                Ok(stream) => match self.enter() {
                    Some(present) => serve(present, stream.carried()),
                    None => tracing::warn!(most = self.0.most, "{what} is turned away"),
                },
                Err(error) if accept_error_passes(&error) => {
                    tracing::warn!(%error, "{what} cannot be accepted now");
                    if accept_error_is_of_room(&error) {
                        self.displace_some();
                    }
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

impl Present {
    /// It is no stranger any more, and stays.
    pub fn settle(&self) {
        self.among.strangers.borrow_mut().retain(|other| !Rc::ptr_eq(other, &self.displaced));
    }

    /// Returns when a stranger is to make room, which has to go at once.
    pub async fn displaced(&self) {
        self.displaced.happened().await;
    }

    #[must_use]
    pub fn is_displaced(&self) -> bool {
        self.displaced.has_happened()
    }
}

impl Drop for Present {
    fn drop(&mut self) {
        self.settle();
        self.among.count.set(self.among.count.get() - 1);
        self.among.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_make_room_in_the_order_in_which_they_came() {
        let clients = Clients::new(3);
        let enter = || clients.enter().expect("room");
        let (first, second, third) = (enter(), enter(), enter());
        second.settle();
        let fourth = enter();
        assert!(first.is_displaced() && !second.is_displaced() && !third.is_displaced());
        assert!(clients.enter().is_none(), "one at a time goes");
        assert!(!third.is_displaced());
        drop(first);
        let fifth = enter();
        assert!(third.is_displaced() && !fourth.is_displaced());
        drop(third);
        fourth.settle();
        fifth.settle();
        assert!(clients.enter().is_none(), "all of them are known");
        drop(second);
        let sixth = enter();
        assert_eq!(clients.count(), 3);
        drop(sixth);
        assert!(clients.0.strangers.borrow().is_empty());
    }
}
