//! Changes of which nobody knows whether they will still happen.
//!
//! A connection is lost, and with it the answer to a write. The target may have carried it out, may never do so, or may do so later: the
//! command can lie in its memory, or wait for a drive, long after the connection is gone. The write is sent again on another path at
//! once, which is harmless: should the first copy be carried out later, it writes the same bytes. But not behind a later change of the
//! same blocks, which it would undo. So:
//!
//! What always holds:
//! - A change of blocks is not sent while another one of any of these blocks, lost with its controller, may still be carried out.
//! - That may be until the target has noticed that its host is gone, and has had time to finish what it was at: from the moment at which
//!   nothing more is sent to the controller, [`super::Timing::settle`]. Nobody asks the target to say so earlier: not all can.
//! - It does not matter whether somebody still waits for the lost change, or whether it was sent again, and how that went.
//!
//! Linux sends such writes again without waiting for anything, and later ones as well. The specification came to these rules with 2.1
//! (Base 2.1, 9.6: communication loss); they ask for the wait before the first is sent again, which only a target needs that would make
//! something else of the same bytes.

use levada_base::reactor::{self, Instant};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// A change of blocks, as long as it is asked for: by one command after the other, until one is answered.
#[derive(Clone)]
pub(crate) struct Change {
    of: Rc<Unsettled>,
    id: u64,
    at: u64,
    bytes: u64,
}

struct Lost {
    change: u64,
    at: u64,
    end: u64,
    until: Instant,
}

/// Changes of a namespace that were lost with their controllers.
#[derive(Default)]
pub(crate) struct Unsettled {
    lost: RefCell<Vec<Lost>>,
    next_id: Cell<u64>,
}

impl Unsettled {
    /// A change that is about to be asked for.
    pub fn change(self: &Rc<Self>, at: u64, bytes: u64) -> Change {
        let id = self.next_id.get();
        self.next_id.set(id + 1);
        Change { of: Rc::clone(self), id, at, bytes }
    }
}

impl Change {
    /// The command was lost, and may be carried out for so long.
    pub fn is_lost(&self, settle: Duration) {
        let until = reactor::now() + settle;
        let lost = Lost { change: self.id, at: self.at, end: self.at + self.bytes, until };
        self.of.lost.borrow_mut().push(lost);
    }

    /// When nothing that was lost stands in the way; `None`: nothing does now.
    pub fn blocked_until(&self) -> Option<Instant> {
        let mut lost = self.of.lost.borrow_mut();
        if lost.is_empty() {
            return None;
        }
        let now = reactor::now();
        lost.retain(|lost| lost.until > now);
        let end = self.at + self.bytes;
        let others = lost.iter().filter(|lost| lost.change != self.id);
        let in_the_way = others.filter(|lost| lost.at < end && self.at < lost.end);
        in_the_way.map(|lost| lost.until).max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::Reactor;

    #[test]
    fn a_lost_change_stands_in_the_way_of_others() {
        Reactor::simulated(1).block_on(async {
            let all = Rc::new(Unsettled::default());
            let first = all.change(100, 50);
            assert_eq!(first.blocked_until(), None);
            first.is_lost(Duration::from_secs(10));
            let until = reactor::now() + Duration::from_secs(10);
            // Not of itself, nor of its neighbours.
            assert_eq!(first.blocked_until(), None);
            for (at, bytes, expected) in [
                (0, 100, None),
                (150, 10, None),
                (0, 101, Some(until)),
                (149, 1, Some(until)),
                (120, 1, Some(until)),
                (0, 1000, Some(until)),
            ] {
                assert_eq!(all.change(at, bytes).blocked_until(), expected, "{at}");
            }
            let second = all.change(120, 1);
            reactor::sleep_until(until).await;
            assert_eq!(second.blocked_until(), None);
        });
    }
}
