//! Changes of which nobody knows whether they will still happen.
//!
//! A connection is lost, and with it the answer to a write. The target may have carried it out, may never do so, or may do so later: the
//! command can lie in its memory, or wait for a drive, long after the connection is gone. The write is sent again on another path at
//! once, which is harmless: should the first copy be carried out later, it writes the same bytes. But not behind a later change of the
//! same blocks, which it would undo. So:
//!
//! What always holds:
//! - A change of blocks is not sent while another one of any of these blocks is open: sent, and not answered. Whoever asked for it may
//!   have given up waiting.
//! - Nor while another one, lost with its controller, may still be carried out.
//! - That may be until the target has noticed that its host is gone, and has had time to finish what it was at: from the moment at which
//!   nothing more is sent to the controller, [`super::Timing::settle`]. Sooner, where the target says so: an owner has it end what a lost
//!   connection has under way, or acquires the reservation of a target of ours anew (`fence`).
//! - It does not matter whether somebody still waits for the lost change, or whether it was sent again, and how that went. Nor whether the
//!   namespace is opened anew meanwhile: [`Changes`] outlive what sent them.
//!
//! Linux sends such writes again without waiting for anything, and later ones as well. The specification came to these rules with 2.1
//! (Base 2.1, 9.6: communication loss); they ask for the wait before the first is sent again, which only a target needs that would make
//! something else of the same bytes.

use super::host::HostId;
use futures_util::future::select;
use levada_base::planted;
use levada_base::reactor::{self, Instant};
use levada_base::sync::Notify;
use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// A change of blocks, as long as it is asked for: by one command after the other, until one is answered.
#[derive(Clone)]
pub(crate) struct Change {
    of: Rc<Unsettled>,
    /// Ascends in the order in which changes are asked for.
    id: u64,
    at: u64,
    bytes: u64,
}

/// A change that was sent; dropped, it is answered, or lost.
pub(crate) struct Sent(Change);

struct Lost {
    change: u64,
    connection: HostId,
    at: u64,
    end: u64,
    until: Instant,
}

/// Changes of a namespace that are open, and those that were lost with their controllers.
#[derive(Default)]
pub(crate) struct Unsettled {
    open: RefCell<Vec<(u64, u64, u64)>>,
    answered: Notify,
    lost: RefCell<Vec<Lost>>,
    settled: Notify,
    next_id: Cell<u64>,
}

/// What has become of changes of a namespace, for who opens it anew.
#[derive(Clone, Default)]
pub struct Changes(pub(super) Rc<Unsettled>);

impl Changes {
    /// None of them can still be carried out.
    #[must_use]
    pub fn are_settled(&self) -> bool {
        let now = reactor::now();
        self.0.open.borrow().is_empty() && self.0.lost.borrow().iter().all(|lost| lost.until <= now)
    }
}

/// What a change waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blocked {
    /// One that is open.
    Open,
    /// One that was lost.
    Until(Instant),
}

impl Unsettled {
    /// A change that is about to be asked for.
    pub fn change(self: &Rc<Self>, at: u64, bytes: u64) -> Change {
        let id = self.next_id.get();
        self.next_id.set(id + 1);
        Change { of: Rc::clone(self), id, at, bytes }
    }

    /// Nothing that was sent over a connection, which is lost, is carried out any more.
    pub fn settled(&self, connection: HostId) {
        self.settle(|lost| lost == connection);
    }

    /// The same for all connections that `is_over` names, of those that are lost.
    pub fn settle(&self, is_over: impl Fn(HostId) -> bool) {
        self.lost.borrow_mut().retain(|lost| !is_over(lost.connection));
        self.settled.notify_all();
    }

    /// Whether changes were lost with a connection that may still be carried out.
    pub fn has_lost(&self, connection: HostId) -> bool {
        self.lost.borrow().iter().any(|lost| lost.connection == connection)
    }
}

impl Change {
    /// It is sent.
    pub fn send(&self) -> Sent {
        self.of.open.borrow_mut().push((self.id, self.at, self.at + self.bytes));
        Sent(self.clone())
    }

    /// A part of it.
    pub fn part(&self, at: u64, bytes: u64) -> Self {
        Self { at, bytes, ..self.clone() }
    }

    /// What stands in the way; `None`: nothing does now.
    pub fn blocked(&self) -> Option<Blocked> {
        self.blocked_by(|other| other != self.id)
    }

    /// The same for a change that was confirmed long ago, and is made again: what was asked for after it is made again after it.
    pub fn blocked_by_older(&self) -> Option<Blocked> {
        self.blocked_by(|other| other < self.id)
    }

    fn blocked_by(&self, is_other: impl Fn(u64) -> bool) -> Option<Blocked> {
        let end = self.at + self.bytes;
        let overlaps = |at: u64, other_end: u64| at < end && self.at < other_end;
        let open = self.of.open.borrow();
        if open.iter().any(|&(id, at, end)| is_other(id) && overlaps(at, end))
            && !planted!("nvme-overwrites-an-open-change")
        {
            return Some(Blocked::Open);
        }
        let mut lost = self.of.lost.borrow_mut();
        if lost.is_empty() || planted!("nvme-overwrites-a-lost-change") {
            return None;
        }
        let now = reactor::now();
        lost.retain(|lost| lost.until > now);
        let others = lost.iter().filter(|lost| is_other(lost.change));
        let in_the_way = others.filter(|lost| overlaps(lost.at, lost.end));
        in_the_way.map(|lost| lost.until).max().map(Blocked::Until)
    }

    /// Waits for it; afterwards something else may stand in the way.
    pub async fn wait(&self, blocked: Blocked) {
        match blocked {
            Blocked::Open => self.of.answered.changed().await,
            Blocked::Until(until) => {
                let settled = pin!(self.of.settled.changed());
                select(settled, pin!(reactor::sleep_until(until))).await;
            }
        }
    }
}

impl Sent {
    /// The command was lost with its connection, and may be carried out for so long.
    pub fn is_lost(&self, connection: HostId, settle: Duration) {
        let until = reactor::now() + settle;
        let Change { of, id, at, bytes } = &self.0;
        let lost = Lost { change: *id, connection, at: *at, end: at + bytes, until };
        of.lost.borrow_mut().push(lost);
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        let of = &self.0.of;
        let mut open = of.open.borrow_mut();
        let Change { id, at, bytes, .. } = self.0;
        // Parts of one change are sent side by side.
        let at = open.iter().position(|sent| *sent == (id, at, at + bytes));
        open.swap_remove(at.expect("it was sent"));
        drop(open);
        of.answered.notify_all();
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
            let older = all.change(100, 50);
            let first = all.change(100, 50);
            assert_eq!(first.blocked(), None);
            let sent = first.send();
            let until = reactor::now() + Duration::from_secs(10);
            let look = |in_the_way| {
                // Not of itself, nor of its neighbours.
                assert_eq!(first.blocked(), None);
                for (at, bytes, expected) in [
                    (0, 100, None),
                    (150, 10, None),
                    (0, 101, Some(in_the_way)),
                    (149, 1, Some(in_the_way)),
                    (120, 1, Some(in_the_way)),
                    (0, 1000, Some(in_the_way)),
                ] {
                    let other = all.change(at, bytes);
                    assert_eq!(other.blocked(), expected, "{at}");
                    assert_eq!(other.blocked_by_older(), expected, "{at}");
                }
                assert_eq!(older.blocked(), Some(in_the_way));
                assert_eq!(older.blocked_by_older(), None);
            };
            look(Blocked::Open);
            sent.is_lost([1; 16], Duration::from_secs(10));
            drop(sent);
            look(Blocked::Until(until));
            let second = all.change(120, 1);
            second.wait(Blocked::Until(until)).await;
            assert_eq!(second.blocked(), None);
            // Sooner, when it is over with its connection, and only then.
            let sent = first.send();
            sent.is_lost([2; 16], Duration::from_secs(10));
            drop(sent);
            let begun = reactor::now();
            let settle = async {
                all.settled([1; 16]);
                reactor::sleep(Duration::from_secs(1)).await;
                all.settled([2; 16]);
            };
            let waiting = async {
                while let Some(blocked) = second.blocked() {
                    second.wait(blocked).await;
                }
                begun.elapsed()
            };
            let (waited, ()) = futures_util::future::join(waiting, settle).await;
            assert_eq!(waited, Duration::from_secs(1));
        });
    }
}
