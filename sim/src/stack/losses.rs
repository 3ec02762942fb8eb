//! The stack while exactly two drives are lost: every pair in the box, and every enclosure.
//!
//! 1. Workers run on one client; in the middle of it the drives go, those of a pair each at a moment of
//!    its own, those of an enclosure at once. Work goes on; everything acknowledged reads back.
//! 2. The power fails, so the node opens without them, and while the spares are filled. Work goes on;
//!    everything reads back.
//! 3. Empty drives take their places, work goes on beside the rebuild, everything reads back, and
//!    the checks of every floor come out clean.

use super::scenario::{LEASE, Run, in_a_world};
use super::worker::Worker;
use crate::Outcome;
use levada_base::reactor::{self, Group, JoinHandle};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

const DRIVES: usize = 12;
const PAIRS: usize = DRIVES * (DRIVES - 1) / 2;
const ENCLOSURES: usize = 6;
/// The pairs, and behind them the enclosures.
pub const LOSSES: usize = PAIRS + ENCLOSURES;
/// Operations between two events.
const OPERATIONS: u64 = 40;

/// Drives that are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss {
    pub drives: [usize; 2],
    /// They are in one enclosure, and it is the enclosure that fails.
    pub at_once: bool,
}

/// One of [`LOSSES`].
#[must_use]
pub fn loss(number: usize) -> Loss {
    let pairs = (0..DRIVES).flat_map(|a| (a + 1..DRIVES).map(move |b| [a, b]));
    let pairs = pairs.map(|drives| Loss { drives, at_once: false });
    let per = DRIVES / ENCLOSURES;
    let enclosures = (0..ENCLOSURES)
        .map(|enclosure| Loss { drives: [enclosure * per, enclosure * per + 1], at_once: true });
    pairs.chain(enclosures).nth(number % LOSSES).expect("below their number")
}

/// The whole stack while two drives are lost: every `LOSSES` seeds are all there are.
pub fn losses(seed: u64) -> Outcome {
    let loss = loss((seed % LOSSES as u64) as usize);
    in_a_world(seed, async |run| run.loses(loss).await)
}

/// Workers under way.
struct Running {
    workers: Vec<JoinHandle<Worker>>,
    enough: Rc<Cell<bool>>,
}

impl Run {
    async fn loses(&self, loss: Loss) {
        self.stack.start().await;
        let machine = Group::new();
        let workers = self.make_workers(&machine).await;
        let running = self.go_on(&machine, workers);
        self.work(OPERATIONS).await;
        for (number, at) in loss.drives.into_iter().enumerate() {
            if number > 0 && !loss.at_once {
                self.work(OPERATIONS / 2).await;
            }
            let now = loss.at_once || self.world.rng(|rng| rng.one_in(2));
            let within = if now { 0 } else { self.world.rng(|rng| rng.between(1, 80)) };
            self.stack.lose(at, within);
        }
        let what = if loss.at_once { "enclosures lost" } else { "pairs lost" };
        self.world.coverage.borrow_mut().count(what, 1);
        self.work(OPERATIONS).await;
        let workers = self.stop_and_verify(running.workers, &running.enough).await;

        let running = self.go_on(&machine, workers);
        self.work(OPERATIONS / 2).await;
        self.calm.ends().await;
        self.world.power_cut().await;
        self.stack.start().await;
        self.calm.returns();
        self.work(OPERATIONS).await;
        let workers = self.stop_and_verify(running.workers, &running.enough).await;

        let running = self.go_on(&machine, workers);
        self.stack.recover_drives().await;
        self.work(OPERATIONS / 2).await;
        let mut workers = self.stop_and_verify(running.workers, &running.enough).await;
        for worker in &mut workers {
            worker.close_all().await;
        }
        let operations = self.operations();
        self.world.coverage.borrow_mut().count("client operations", operations);
        let clients = [Some(workers[0].client.clone()), workers[0].guest.clone()];
        drop(workers);
        for client in clients.into_iter().flatten() {
            client.shutdown().await.expect("it has nothing to lose");
        }
        // A file without a name is kept for a lease after a start of the node.
        reactor::sleep(LEASE).await;
        self.check_floors().await;
    }

    fn go_on(&self, machine: &Group, workers: Vec<Worker>) -> Running {
        let enough = Rc::new(Cell::new(false));
        Running { workers: self.start_workers(machine, workers, &enough), enough }
    }

    /// Until so many more operations have begun.
    async fn work(&self, operations: u64) {
        let until = self.operations() + operations;
        while self.operations() < until {
            reactor::sleep(Duration::from_micros(300)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_pair_and_every_enclosure_is_lost_once() {
        let all: Vec<Loss> = (0..LOSSES).map(loss).collect();
        let (enclosures, pairs): (Vec<&Loss>, Vec<&Loss>) =
            all.iter().partition(|loss| loss.at_once);
        let different: BTreeSet<[usize; 2]> = pairs.iter().map(|loss| loss.drives).collect();
        assert_eq!((different.len(), enclosures.len()), (66, 6));
        assert!(different.iter().all(|[a, b]| a < b && *b < DRIVES));
        assert!(enclosures.iter().all(|loss| loss.drives[0] / 2 == loss.drives[1] / 2));
    }
}
