//! Byte ranges of a device that one task at a time may change.
//!
//! Served in order of arrival: a range waits for every earlier one that overlaps it, so rebuild
//! is not starved by writers, nor a writer by rebuild. Nothing here is shared between threads.

use crate::sync::Notify;
use std::cell::{Cell, RefCell};

#[derive(Clone, Copy)]
struct Held {
    ticket: u64,
    start: u64,
    end: u64,
}

/// The ranges held or waited for, in order of arrival.
#[derive(Default)]
pub struct RangeLocks {
    held: RefCell<Vec<Held>>,
    tickets: Cell<u64>,
    changed: Notify,
}

/// A range held; given back when dropped.
pub struct RangeGuard<'a> {
    of: &'a RangeLocks,
    ticket: u64,
}

impl RangeLocks {
    /// Takes `start..end`, waiting in line for it.
    pub async fn lock(&self, start: u64, end: u64) -> RangeGuard<'_> {
        let ticket = self.tickets.get();
        self.tickets.set(ticket + 1);
        self.held.borrow_mut().push(Held { ticket, start, end });
        let guard = RangeGuard { of: self, ticket };
        self.changed.until(|| self.is_first(ticket, start, end).then_some(())).await;
        guard
    }

    /// True when nobody holds or waits for any of `start..end`.
    #[must_use]
    pub fn is_free(&self, start: u64, end: u64) -> bool {
        self.is_first(u64::MAX, start, end)
    }

    fn is_first(&self, ticket: u64, start: u64, end: u64) -> bool {
        let held = self.held.borrow();
        let mut earlier = held.iter().take_while(|other| other.ticket < ticket);
        !earlier.any(|other| other.start < end && start < other.end)
    }
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        self.of.held.borrow_mut().retain(|held| held.ticket != self.ticket);
        self.of.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reactor::{self, Reactor};
    use std::rc::Rc;
    use std::time::Duration;

    #[test]
    fn overlapping_ranges_take_turns_and_others_do_not_wait() {
        Reactor::simulated(1).block_on(async {
            let locks = Rc::new(RangeLocks::default());
            let order = Rc::new(RefCell::new(Vec::new()));
            let first = locks.lock(0, 10).await;
            let mut tasks = Vec::new();
            for (name, start, end) in [("wide", 5, 30), ("behind", 20, 25), ("apart", 40, 50)] {
                let (locks, order) = (Rc::clone(&locks), Rc::clone(&order));
                tasks.push(reactor::spawn(async move {
                    let _guard = locks.lock(start, end).await;
                    order.borrow_mut().push(name);
                }));
                reactor::sleep(Duration::from_micros(1)).await;
            }
            assert_eq!(*order.borrow(), ["apart"]);
            drop(first);
            for task in tasks {
                task.await;
            }
            assert_eq!(*order.borrow(), ["apart", "wide", "behind"]);
            assert!(locks.is_free(0, 100));
        });
    }
}
