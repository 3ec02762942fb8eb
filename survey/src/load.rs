//! A load: which bytes to touch, in what order, in pieces of what size, and how many at once.
//!
//! The same load drives every layer, so two figures of it can be compared.

use crate::harness::{Meter, Run};
use anyhow::Result;
use levada_base::reactor;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

/// The order of the pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// One behind the other, from the start again at the end.
    Sequential,
    /// Any piece, the choice fixed by the seed.
    Random { seed: u64 },
}

/// One load.
#[derive(Clone, Debug)]
pub struct Load {
    pub order: Order,
    /// Bytes of one operation.
    pub piece_bytes: u64,
    /// Operations in flight at any time.
    pub depth: usize,
    /// Bytes that may be touched; a whole number of pieces.
    pub span: Range<u64>,
    pub ops: u64,
}

impl Load {
    /// Goes through `span` once, in order.
    #[must_use]
    pub fn sequential(span: Range<u64>, piece_bytes: u64, depth: usize) -> Self {
        let ops = (span.end - span.start) / piece_bytes;
        Self { order: Order::Sequential, piece_bytes, depth, span, ops }
    }

    /// Touches `ops` pieces of `span`.
    #[must_use]
    pub fn random(span: Range<u64>, piece_bytes: u64, depth: usize, ops: u64, seed: u64) -> Self {
        Self { order: Order::Random { seed }, piece_bytes, depth, span, ops }
    }

    /// The offsets in the order in which they are dealt.
    #[must_use]
    pub fn offsets(&self) -> Vec<u64> {
        let offsets = Offsets::new(self);
        std::iter::from_fn(|| offsets.next()).collect()
    }

    /// Runs the load and measures it: `one` does the operation at an offset.
    ///
    /// # Errors
    ///
    /// The first error of `one`; operations in flight are given up.
    pub async fn run<F, Work>(&self, one: F) -> Result<Run>
    where
        F: Fn(u64) -> Work + 'static,
        Work: Future<Output = Result<()>> + 'static,
    {
        let meter = Meter::start()?;
        self.drive(one).await?;
        meter.stop(self.ops * self.piece_bytes, self.ops)
    }

    /// Runs the load without measuring it, so that a span can be made of several steps.
    ///
    /// # Errors
    ///
    /// As [`Load::run`].
    pub async fn drive<F, Work>(&self, one: F) -> Result<()>
    where
        F: Fn(u64) -> Work + 'static,
        Work: Future<Output = Result<()>> + 'static,
    {
        let offsets = Rc::new(Offsets::new(self));
        let one = Rc::new(one);
        let workers: Vec<_> = (0..self.depth)
            .map(|_| {
                let (offsets, one) = (Rc::clone(&offsets), Rc::clone(&one));
                reactor::spawn(async move {
                    while let Some(at) = offsets.next() {
                        one(at).await?;
                    }
                    anyhow::Ok(())
                })
            })
            .collect();
        for worker in workers {
            worker.await.unwrap_or_else(|| Err(anyhow::anyhow!("the load was killed")))?;
        }
        Ok(())
    }
}

/// Lets `workers` each do one operation after the other until `span` is over; `one` gets the worker and
/// the number of its operation. How many were done.
///
/// # Errors
///
/// The first error of `one`; operations in flight are given up.
pub async fn for_span<F, Work>(span: Duration, workers: usize, one: F) -> Result<u64>
where
    F: Fn(usize, u64) -> Work + 'static,
    Work: Future<Output = Result<()>> + 'static,
{
    let (one, end) = (Rc::new(one), reactor::now() + span);
    let workers: Vec<_> = (0..workers)
        .map(|worker| {
            let one = Rc::clone(&one);
            reactor::spawn(async move {
                let mut done = 0;
                while reactor::now() < end {
                    one(worker, done).await?;
                    done += 1;
                    // What is done at once must not keep the others from their turns.
                    reactor::yield_now().await;
                }
                anyhow::Ok(done)
            })
        })
        .collect();
    let mut done = 0;
    for worker in workers {
        done += worker.await.unwrap_or_else(|| Err(anyhow::anyhow!("the load was killed")))?;
    }
    Ok(done)
}

/// Deals the offsets of a load to its workers.
struct Offsets {
    order: Order,
    piece_bytes: u64,
    span: Range<u64>,
    ops: u64,
    issued: Cell<u64>,
    rng: RefCell<Xoshiro256PlusPlus>,
}

impl Offsets {
    fn new(load: &Load) -> Self {
        let seed = match load.order {
            Order::Sequential => 0,
            Order::Random { seed } => seed,
        };
        Self {
            order: load.order,
            piece_bytes: load.piece_bytes,
            span: load.span.clone(),
            ops: load.ops,
            issued: Cell::new(0),
            rng: RefCell::new(Xoshiro256PlusPlus::seed_from_u64(seed)),
        }
    }

    fn next(&self) -> Option<u64> {
        let number = self.issued.get();
        if number == self.ops {
            return None;
        }
        self.issued.set(number + 1);
        let pieces = (self.span.end - self.span.start) / self.piece_bytes;
        let piece = match self.order {
            Order::Sequential => number % pieces,
            Order::Random { .. } => self.rng.borrow_mut().random_range(0..pieces),
        };
        Some(self.span.start + piece * self.piece_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::Reactor;
    use std::collections::BTreeSet;

    /// Runs a load on virtual time: what it touched, and how many operations were in flight.
    fn touched(load: &Load) -> (Vec<u64>, usize) {
        Reactor::simulated(3).block_on(async {
            let seen = Rc::new(RefCell::new((Vec::new(), 0usize, 0usize)));
            let inner = Rc::clone(&seen);
            let one = move |at| {
                let seen = Rc::clone(&inner);
                async move {
                    let in_flight = {
                        let (touched, in_flight, _) = &mut *seen.borrow_mut();
                        touched.push(at);
                        *in_flight += 1;
                        *in_flight
                    };
                    let most = seen.borrow().2.max(in_flight);
                    seen.borrow_mut().2 = most;
                    reactor::sleep(Duration::from_micros(10)).await;
                    seen.borrow_mut().1 -= 1;
                    Ok(())
                }
            };
            load.drive(one).await.expect("no error");
            let (touched, _, most) = &*seen.borrow();
            (touched.clone(), *most)
        })
    }

    #[test]
    fn sequential_touches_every_piece_once_at_the_stated_depth() {
        let (touched, most) = touched(&Load::sequential(4096..20 * 4096, 4096, 4));
        let all: BTreeSet<u64> = touched.iter().copied().collect();
        assert_eq!(all, (1..20).map(|piece| piece * 4096).collect());
        assert_eq!((touched.len(), most), (19, 4));
    }

    #[test]
    fn a_span_ends_when_its_time_is_over() {
        Reactor::simulated(3).block_on(async {
            let start = reactor::now();
            let one = |worker, _| async move {
                reactor::sleep(Duration::from_millis(1 + worker as u64)).await;
                Ok(())
            };
            let done = for_span(Duration::from_millis(100), 2, one).await.expect("no error");
            assert_eq!((done, start.elapsed()), (150, Duration::from_millis(100)));
        });
    }

    #[test]
    fn random_is_fixed_by_its_seed() {
        let load = |seed| Load::random(0..1 << 20, 4096, 8, 100, seed);
        assert_eq!(touched(&load(1)), touched(&load(1)));
        assert_ne!(touched(&load(1)).0, touched(&load(2)).0);
        assert!(touched(&load(1)).0.iter().all(|at| at % 4096 == 0 && *at < 1 << 20));
    }
}
