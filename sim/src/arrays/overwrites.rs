//! Overwrites in place by several writers: on the three-copy mirror, and on levels with parity, which have a journal.

use crate::arrays::rounds::{self, Work};
use crate::arrays::{Kind, Rack};
use crate::{BlockModel, Outcome, Rng, Shape, World, fill, runs_of};
use futures_util::future::join_all;
use levada_base::reactor::{self, Reactor};
use levada_base::units::{BLOCK_BYTES, MIB};
use levada_base::{BufMut, IoVec};
use levada_device::{BlockError, Device, Durability};
use levada_raid::{Array, RaidArray};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

const WRITERS: u64 = 4;
const BLOCK: usize = BLOCK_BYTES as usize;

struct Overwrites {
    rack: Rc<Rack>,
    model: RefCell<BlockModel>,
    /// Blocks that a writer works on.
    taken: RefCell<BTreeSet<u64>>,
    /// Stripes of which a block was lost when it was read.
    lost: RefCell<BTreeSet<u64>>,
    blocks: u64,
    /// Of a stripe.
    stripe_blocks: u64,
}

/// One seed of the mirror: rounds of writes and faults, each ended by a power cut, a kill or an
/// orderly close.
pub fn mirror(seed: u64) -> Outcome {
    run(seed, Kind::Mirror, None)
}

/// The same on a level with parity, another one with each seed.
pub fn journaled(seed: u64) -> Outcome {
    run(seed, Kind::journaled(seed), None)
}

/// The mirror, while exactly these drives are lost in the middle.
pub fn mirror_loses(seed: u64, drives: &[usize]) -> Outcome {
    run(seed, Kind::Mirror, Some(drives))
}

fn run(seed: u64, kind: Kind, losses: Option<&[usize]>) -> Outcome {
    let reactor = Reactor::simulated(seed);
    let coverage = reactor.block_on(async {
        let world = Rc::new(World::new(seed, Shape::of_12(2 * MIB)));
        let rack = Rack::create(Rc::clone(&world), kind).await;
        let blocks = rack.array().info().capacity_bytes / BLOCK_BYTES;
        let stripe_blocks = rack.array().geometry().stripe_bytes / BLOCK_BYTES;
        let (model, taken, lost) = Default::default();
        let all = Rc::new(Overwrites { rack, model, taken, lost, blocks, stripe_blocks });
        match losses {
            None => rounds::all(&all).await,
            Some(drives) => all.lose(drives).await,
        }
        world.end()
    });
    Outcome { trace_hash: reactor.trace_hash(), coverage }
}

/// A node is killed with writes in the drives' caches; what its successor flushes survives a
/// power cut. (Open once skipped the flush because it had not written anything itself.)
pub fn a_predecessors_cached_write_is_flushed(seed: u64) -> Outcome {
    let reactor = Reactor::simulated(seed);
    reactor.block_on(async {
        let world = Rc::new(World::new(seed, Shape::of_12(2 * MIB)));
        let rack = Rack::create(Rc::clone(&world), Kind::Mirror).await;
        let array = rack.array();
        let write = |version| array.write(0, contents(version, 0, 1), Durability::Volatile);
        write(1).await.expect("healthy");
        array.flush().await.expect("healthy");
        write(2).await.expect("healthy");
        world.kill();
        let open = async || {
            let rack = Rc::clone(&rack);
            let opened = reactor::spawn_in(&world.node(), async move { rack.open().await });
            opened.await.expect("nobody kills the node meanwhile")
        };
        open().await.flush().await.expect("healthy");
        world.power_cut().await;
        let into = BufMut::zeroed(BLOCK).into_vec();
        let read = open().await.read(0, into).await.expect("healthy");
        let seen = crate::recognise(&read[0], 0, &[1, 2]);
        assert_eq!(seen, Some(2), "seed {seed}: a flushed write is gone");
    });
    Outcome { trace_hash: reactor.trace_hash(), ..Outcome::default() }
}

impl Work for Overwrites {
    fn rack(&self) -> &Rc<Rack> {
        &self.rack
    }

    fn fail(&self, what: &str, error: &BlockError) -> ! {
        panic!(
            "seed {}: {what} failed although {} bears what was lost ({:?}): {error}",
            self.rack.world.seed,
            self.rack.kind,
            self.rack.lost()
        )
    }

    fn crashed(&self, power: bool) {
        self.taken.borrow_mut().clear();
        if self.rack.kind.is_journaled() {
            self.model.borrow_mut().stripes_may_be_lost(self.stripe_blocks);
        }
        match power {
            true => self.model.borrow_mut().power_cut(),
            false => self.model.borrow_mut().killed(),
        }
    }

    fn spawn(self: &Rc<Self>) {
        for _ in 0..WRITERS {
            let (all, mut rng) = (Rc::clone(self), self.rack.world.rng(Rng::fork));
            reactor::spawn_in(&self.rack.world.node(), async move {
                let array = all.rack.array();
                loop {
                    all.step(&array, &mut rng).await;
                    if rng.one_in(4) {
                        reactor::sleep(Duration::from_micros(rng.below(400))).await;
                    }
                }
            });
        }
    }

    /// Reads everything that was ever written.
    async fn verify(&self) {
        let array = self.rack.array();
        let written = self.model.borrow().written();
        let runs = runs_of(&written, 64);
        for some in runs.chunks(16) {
            join_all(some.iter().map(|(first, count)| self.read(&array, *first, *count))).await;
        }
        self.rack.world.coverage.borrow_mut().count("full checks", 1);
    }
}

impl Overwrites {
    /// Writes, loses `drives` at once, works on, replaces them, and checks everything each time.
    async fn lose(self: &Rc<Self>, drives: &[usize]) {
        let world = Rc::clone(&self.rack.world);
        self.spawn();
        reactor::sleep(Duration::from_millis(20)).await;
        for at in drives {
            self.rack.lose(*at, 0);
        }
        reactor::sleep(Duration::from_millis(20)).await;
        world.power_cut().await;
        self.crashed(true);
        rounds::open(&self.rack, || self.crashed(true)).await;
        self.verify().await;
        self.spawn();
        reactor::sleep(Duration::from_millis(10)).await;
        world.kill();
        self.crashed(false);
        rounds::open(&self.rack, || self.crashed(true)).await;
        self.rack.finish().await;
        self.verify().await;
    }

    fn take(&self, first: u64, count: u64) -> bool {
        let mut taken = self.taken.borrow_mut();
        let free = taken.range(first..first + count).next().is_none();
        if free {
            taken.extend(first..first + count);
        }
        free
    }

    fn give_back(&self, first: u64, count: u64) {
        let mut taken = self.taken.borrow_mut();
        (first..first + count).for_each(|block| _ = taken.remove(&block));
    }

    async fn step(&self, array: &RaidArray, rng: &mut Rng) {
        // A few hot stripes, so that blocks are written again and again.
        let first = match rng.one_in(3) {
            true => rng.below(self.blocks),
            false => rng.below(self.blocks.min(96)),
        };
        let mut count = (1 + rng.below(8) * rng.below(5)).min(self.blocks - first);
        let mut first = first;
        if self.rack.kind.is_journaled() && rng.one_in(5) {
            // Whole stripes, which take another way.
            first = first / self.stripe_blocks * self.stripe_blocks;
            count = self.stripe_blocks * rng.between(1, 2);
            if first + count > self.blocks {
                return;
            }
        }
        let mut weights = [45, 20, 25, 12, 4, 2];
        let lost: Vec<u64> = self.lost.borrow().iter().copied().collect();
        if !lost.is_empty() && rng.one_in(6) {
            // Lost blocks are written, or given back.
            let stripe = *rng.pick(&lost);
            if rng.one_in(4) {
                self.lost.borrow_mut().remove(&stripe);
            }
            first = stripe * self.stripe_blocks;
            count = self.stripe_blocks;
            weights = [2, 2, 1, 0, 0, 4];
            if rng.one_in(3) {
                count = 1 + rng.below(count);
            }
        }
        self.rack.world.coverage.borrow_mut().count("operations", 1);
        match rng.weighted(&weights) {
            op @ (0 | 1 | 4) => {
                if !self.take(first, count) {
                    return;
                }
                let durability = if op == 1 { Durability::Fua } else { Durability::Volatile };
                let result = if op == 4 {
                    self.model.borrow_mut().zeroes_begin(first, count);
                    array.write_zeroes(first * BLOCK_BYTES, count * BLOCK_BYTES).await
                } else {
                    let version = self.model.borrow_mut().write_begins(first, count);
                    let data = contents(version, first, count);
                    let _busy = levada_base::probe::busy("writing");
                    array.write(first * BLOCK_BYTES, data, durability).await
                };
                result.unwrap_or_else(|error| self.fail("write", &error));
                self.model.borrow_mut().write_done(first, count, durability == Durability::Fua);
                self.give_back(first, count);
            }
            2 => self.read(array, first, count).await,
            3 => {
                let begun = self.model.borrow().flush_begins();
                let _busy = levada_base::probe::busy("committing");
                array.flush().await.unwrap_or_else(|error| self.fail("flush", &error));
                self.model.borrow_mut().flush_done(begun);
            }
            _ => {
                // Whole stripes are given back and read as zeroes.
                let (stripe, count) = (first / self.stripe_blocks, self.stripe_blocks);
                let first = stripe * count;
                if first + count > self.blocks || !self.take(first, count) {
                    return;
                }
                self.model.borrow_mut().zeroes_begin(first, count);
                let discarded = array.discard_stripes(stripe, 1).await;
                discarded.unwrap_or_else(|error| self.fail("discard", &error));
                self.model.borrow_mut().write_done(first, count, true);
                self.give_back(first, count);
            }
        }
    }

    async fn read(&self, array: &RaidArray, first: u64, count: u64) {
        if !self.take(first, count) {
            return;
        }
        let into = BufMut::for_overwrite(count as usize * BLOCK).into_vec();
        // Nobody is rotten here, so copies agree whatever is written, lost or rebuilt beside the read.
        let read = match self.rack.world.rng(|rng| rng.one_in(2)) {
            true => array.read_agreed(first * BLOCK_BYTES, into).await,
            false => array.read(first * BLOCK_BYTES, into).await,
        };
        match read {
            Ok(read) => self.check(self.model.borrow_mut().check_read(first, &read[0])),
            Err(BlockError::Medium { .. }) if array.status().lost_blocks > 0 => {
                for block in first..first + count {
                    self.read_block(array, block).await;
                }
            }
            Err(error) => self.fail("read", &error),
        }
        self.give_back(first, count);
    }

    /// One block, which may be lost.
    async fn read_block(&self, array: &RaidArray, block: u64) {
        let into = BufMut::for_overwrite(BLOCK).into_vec();
        match array.read(block * BLOCK_BYTES, into).await {
            Ok(read) => self.check(self.model.borrow_mut().check_read(block, &read[0])),
            Err(BlockError::Medium { .. }) => {
                self.rack.world.coverage.borrow_mut().count("lost blocks met", 1);
                self.lost.borrow_mut().insert(block / self.stripe_blocks);
                self.check(self.model.borrow_mut().check_lost(block));
            }
            Err(error) => self.fail("read", &error),
        }
    }

    fn check(&self, checked: Result<(), String>) {
        if let Err(what) = checked {
            panic!("seed {}: {}: {what}", self.rack.world.seed, self.rack.kind);
        }
    }
}

pub(crate) fn contents(version: u64, first: u64, count: u64) -> IoVec {
    let mut bytes = BufMut::for_overwrite(count as usize * BLOCK);
    for (at, block) in bytes.chunks_exact_mut(BLOCK).enumerate() {
        fill(block, version, first + at as u64);
    }
    bytes.freeze().into_vec()
}
