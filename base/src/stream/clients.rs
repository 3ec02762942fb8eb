//! Who is connected to a server.
//!
//! A client is a stranger until its server knows what it wants ([`Present::settle`]). Where there are as many clients as may be, the stranger
//! that came first makes room for the next: who only opens connections keeps nobody out for longer than it takes others to say who they
//! are.
//!
//! Descriptors are the process's. Where hardly any are left, the server of this core with the most strangers has some of them make room,
//! whosever the next client is.

use crate::reactor;
use crate::reactor::net::{Listener, Stream, accept_error_is_of_room, accept_error_passes};
use crate::sync::{Notify, Once};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::time::Duration;

/// After an error of the system that passes, as when there are no descriptors left, or hardly any.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(100);
/// A part of all those that may be there: so many are waited for that have to go.
const LEAVING_SHARE: usize = 8;
/// Looks at whether there is a descriptor for a client, at most; and after how many of them others have to go, when those before do not.
const ROOM_LOOKS: u32 = 50;
const ROOM_PATIENCE: u32 = 10;

struct State {
    most: usize,
    count: Cell<usize>,
    left: Notify,
    /// In the order in which they came.
    strangers: RefCell<VecDeque<Rc<Once>>>,
}

thread_local! {
    /// Those of every server of this core.
    static HERE: RefCell<Vec<Weak<State>>> = const { RefCell::new(Vec::new()) };
    /// Those of them that make room, and have not gone yet.
    static LEAVING: Cell<usize> = const { Cell::new(0) };
}

impl State {
    /// Has the first of the strangers make room. False: there is none.
    fn displace(&self) -> bool {
        let first = self.strangers.borrow_mut().pop_front();
        let Some(first) = first else { return false };
        LEAVING.set(LEAVING.get() + 1);
        first.happen();
        true
    }
}

/// Has some strangers make room, of the server of this core that has the most. False: there are none.
fn free_descriptors() -> bool {
    let here: Vec<_> = HERE.with_borrow(|here| here.iter().filter_map(Weak::upgrade).collect());
    let strangers = |server: &Rc<State>| server.strangers.borrow().len();
    let Some(server) = here.iter().max_by_key(|server| strangers(server)) else { return false };
    let leaving = strangers(server).div_ceil(LEAVING_SHARE);
    (0..leaving).fold(false, |_, _| server.displace())
}

/// Each client has a descriptor, of which the process may have fewer than clients are let in. The last ones are not for strangers: this
/// one has others make room, before it is served. `None`: nobody does, or not in time.
async fn with_room(mut stream: Stream) -> Option<Stream> {
    for look in 0..ROOM_LOOKS {
        if !stream.takes_a_last_descriptor() {
            return Some(stream);
        }
        // At first nobody: who came just before has this time to say who it is. Several servers may wait for the same ones, and not everybody
        // goes.
        let are_more_to_go = look > 0 && LEAVING.get() == 0 || look % ROOM_PATIENCE == 1;
        if are_more_to_go && !free_descriptors() && LEAVING.get() == 0 {
            return None;
        }
        reactor::sleep(ACCEPT_AGAIN_AFTER).await;
        stream = stream.moved_down();
    }
    (!stream.takes_a_last_descriptor()).then_some(stream)
}

/// The clients of a server, counted. Clones count the same ones.
#[derive(Clone)]
pub struct Clients(Rc<State>);

/// Counts a client for as long as it is there.
pub struct Present {
    among: Rc<State>,
    displaced: Rc<Once>,
    is_settled: Cell<bool>,
}

impl Clients {
    /// None; `most` at once.
    #[must_use]
    pub fn new(most: usize) -> Self {
        let (count, left, strangers) = Default::default();
        let state = Rc::new(State { most, count, left, strangers });
        HERE.with_borrow_mut(|here| {
            here.retain(|state| state.strong_count() > 0);
            here.push(Rc::downgrade(&state));
        });
        Self(state)
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
        if is_full || count >= most && !self.0.displace() {
            return None;
        }
        let displaced = Rc::new(Once::default());
        self.0.strangers.borrow_mut().push_back(Rc::clone(&displaced));
        self.0.count.set(count + 1);
        Some(Present { among: Rc::clone(&self.0), displaced, is_settled: Cell::default() })
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
        let mut shortages = 0;
        loop {
            match listener.accept().await {
                Ok(stream) => match with_room(stream).await {
                    Some(stream) => match self.enter() {
                        Some(present) => serve(present, stream.carried()),
                        None => tracing::warn!(most = self.0.most, "{what} is turned away"),
                    },
                    None => {
                        tracing::warn!(
                            "{what} is turned away, as there are hardly any descriptors left: raise how many there may be (ulimit -n)"
                        );
                        reactor::sleep(ACCEPT_AGAIN_AFTER).await;
                    }
                },
                Err(error) if accept_error_passes(&error) => {
                    tracing::warn!(%error, "{what} cannot be accepted now");
                    // Also where nobody waits, as the system takes the descriptor first.
                    if accept_error_is_of_room(&error) {
                        shortages += 1;
                        if LEAVING.get() == 0 || shortages % ROOM_PATIENCE == 0 {
                            free_descriptors();
                        }
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
    /// It is no stranger any more, and stays, also if it was to make room just now.
    pub fn settle(&self) {
        if self.is_displaced() && !self.is_settled.replace(true) {
            LEAVING.set(LEAVING.get() - 1);
        }
        self.among.strangers.borrow_mut().retain(|other| !Rc::ptr_eq(other, &self.displaced));
    }

    /// Returns when it is to make room, and has to go at once.
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

    #[test]
    fn who_has_the_most_strangers_frees_descriptors() {
        assert!(!free_descriptors(), "there is nobody");
        let (few, many) = (Clients::new(99), Clients::new(99));
        let enter = |clients: &Clients| clients.enter().expect("room");
        let of_few = [enter(&few), enter(&few)];
        of_few[0].settle();
        let of_many: [_; LEAVING_SHARE + 1] = std::array::from_fn(|_| enter(&many));
        assert!(free_descriptors());
        let leaving = of_many.iter().take_while(|present| present.is_displaced()).count();
        assert_eq!(leaving, 2, "the first of them");
        assert_eq!(LEAVING.get(), 2);
        of_many.iter().for_each(Present::settle);
        assert_eq!(LEAVING.get(), 0, "they stay");
        assert!(!of_few[1].is_displaced());
        assert!(free_descriptors() && of_few[1].is_displaced(), "whoever is left");
        assert!(!free_descriptors());
        assert_eq!(LEAVING.get(), 1);
        drop(of_few);
        assert_eq!(LEAVING.get(), 0);
    }
}
