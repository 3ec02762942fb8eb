//! Ranges of a file that are being written: overlapping writes go one after the other, in
//! order of arrival, and a read waits for the writes before it.

use levada_base::sync::Notify;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

#[derive(Default)]
pub(crate) struct Ranges {
    next_ticket: Cell<u64>,
    /// Start and end by ticket, of writes that run or wait.
    writes: RefCell<BTreeMap<u64, (u64, u64)>>,
    changed: Notify,
}

/// The right to write a range, until dropped.
pub(crate) struct Writing<'a> {
    of: &'a Ranges,
    ticket: u64,
}

impl Ranges {
    /// Waits for the turn to write `start..end`.
    pub(crate) async fn write(&self, start: u64, end: u64) -> Writing<'_> {
        let ticket = self.next_ticket.get();
        self.next_ticket.set(ticket + 1);
        self.writes.borrow_mut().insert(ticket, (start, end));
        let writing = Writing { of: self, ticket };
        self.passed_before(ticket, start, end).await;
        writing
    }

    /// Waits for all writes of `start..end` that came before this call.
    pub(crate) async fn passed(&self, start: u64, end: u64) {
        self.passed_before(self.next_ticket.get(), start, end).await;
    }

    /// True while nobody writes or waits to.
    pub(crate) fn is_idle(&self) -> bool {
        self.writes.borrow().is_empty()
    }

    async fn passed_before(&self, ticket: u64, start: u64, end: u64) {
        let passed = || {
            let writes = self.writes.borrow();
            let mut before = writes.range(..ticket);
            (!before.any(|(_, (s, e))| *s < end && start < *e)).then_some(())
        };
        if passed().is_none() {
            self.changed.until(passed).await;
        }
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.of.writes.borrow_mut().remove(&self.ticket);
        self.of.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::{self, Reactor};
    use std::rc::Rc;
    use std::time::Duration;

    #[test]
    fn overlapping_writes_take_turns_and_others_do_not_wait() {
        Reactor::simulated(1).block_on(async {
            let ranges = Rc::new(Ranges::default());
            let log = Rc::new(RefCell::new(Vec::new()));
            let mut tasks = Vec::new();
            for (name, start, end) in [("a", 0, 10), ("b", 5, 15), ("c", 12, 20), ("d", 30, 40)] {
                let (ranges, log) = (Rc::clone(&ranges), Rc::clone(&log));
                tasks.push(reactor::spawn(async move {
                    let writing = ranges.write(start, end).await;
                    reactor::sleep(Duration::from_millis(10)).await;
                    log.borrow_mut().push((name, reactor::now().0 / 10_000_000));
                    drop(writing);
                }));
                reactor::sleep(Duration::from_micros(1)).await;
            }
            ranges.passed(0, 8).await;
            assert_eq!(log.borrow().iter().filter(|(name, _)| *name == "b").count(), 1);
            for task in tasks {
                task.await;
            }
            assert_eq!(*log.borrow(), [("a", 1), ("d", 1), ("b", 2), ("c", 3)]);
        });
    }
}
