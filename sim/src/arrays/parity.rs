//! RAID 6, 8 + 2 with two hot spares: fresh whole stripes, declared, written, flushed, discarded.

use crate::arrays::overwrites::contents;
use crate::arrays::rounds::{self, Work};
use crate::arrays::{Kind, Rack};
use crate::{Outcome, Rng, Shape, World, recognise};
use futures_util::future::join_all;
use levada_base::BufMut;
use levada_base::reactor::{self, Reactor};
use levada_base::units::{BLOCK_BYTES, MIB};
use levada_device::{BlockError, Device};
use levada_raid::{Array, IoClass, RaidArray};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

const WRITERS: u64 = 4;
const BLOCK: usize = BLOCK_BYTES as usize;

/// What a stripe may read.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Stripe {
    Zeroes,
    /// Declared and not written, or written and not flushed when the power went: anything, but
    /// the same at every read. The contents once seen.
    Anything(Option<Vec<u8>>),
    Written {
        version: u64,
        durable: bool,
    },
    /// Being discarded or declared at the crash: as before or as after.
    Either(Box<Stripe>, Box<Stripe>),
}

/// What is being done to a stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    Declare,
    Write,
    Discard,
    Read,
}

struct Parity {
    rack: Rc<Rack>,
    stripes: u64,
    stripe_bytes: u64,
    state: RefCell<BTreeMap<u64, Stripe>>,
    doing: RefCell<BTreeMap<u64, Doing>>,
    /// Stripes declared and free to be written.
    declared: RefCell<BTreeSet<u64>>,
    versions: Cell<u64>,
}

/// Stripes that are worked on at most, so that they are met again.
const STRIPES_MAX: u64 = 96;

/// One seed in four has drives so large that a rebuild's cursor is stored once in several steps.
fn drive_bytes(seed: u64) -> u64 {
    if seed % 4 == 3 { 32 * MIB } else { MIB }
}

/// One seed of RAID 6.
pub fn parity(seed: u64) -> Outcome {
    run(seed, None)
}

/// RAID 6, while exactly these drives are lost in the middle.
pub fn parity_loses(seed: u64, drives: &[usize]) -> Outcome {
    run(seed, Some(drives))
}

fn run(seed: u64, losses: Option<&[usize]>) -> Outcome {
    let reactor = Reactor::simulated(seed);
    let coverage = reactor.block_on(async {
        let world = Rc::new(World::new(seed, Shape::of_12(drive_bytes(seed))));
        let rack = Rack::create(Rc::clone(&world), Kind::Parity).await;
        let geometry = rack.array().geometry();
        let parity = Rc::new(Parity {
            rack,
            stripes: geometry.stripes.min(STRIPES_MAX),
            stripe_bytes: geometry.stripe_bytes,
            state: RefCell::default(),
            doing: RefCell::default(),
            declared: RefCell::default(),
            versions: Cell::new(0),
        });
        match losses {
            None => rounds::all(&parity).await,
            Some(drives) => parity.lose(drives).await,
        }
        world.end()
    });
    Outcome { trace_hash: reactor.trace_hash(), coverage }
}

impl Work for Parity {
    fn rack(&self) -> &Rc<Rack> {
        &self.rack
    }

    fn fail(&self, what: &str, error: &BlockError) -> ! {
        panic!(
            "seed {}: {what} failed although RAID 6 bears what was lost ({:?}): {error}",
            self.rack.world.seed,
            self.rack.lost()
        )
    }

    fn crashed(&self, power: bool) {
        let mut state = self.state.borrow_mut();
        for (stripe, doing) in self.doing.take() {
            let before = state.get(&stripe).cloned().unwrap_or(Stripe::Zeroes);
            let after = match doing {
                Doing::Read => continue,
                Doing::Declare => {
                    Stripe::Either(Box::new(before), Box::new(Stripe::Anything(None)))
                }
                Doing::Write => Stripe::Anything(None),
                Doing::Discard => Stripe::Either(Box::new(before), Box::new(Stripe::Zeroes)),
            };
            state.insert(stripe, after);
        }
        if power {
            for stripe in state.values_mut() {
                *stripe = after_power_cut(stripe);
            }
        }
        // Who wrote them is gone: the next owner discards them first.
        self.declared.borrow_mut().clear();
    }

    fn spawn(self: &Rc<Self>) {
        for _ in 0..WRITERS {
            let (parity, mut rng) = (Rc::clone(self), self.rack.world.rng(Rng::fork));
            reactor::spawn_in(&self.rack.world.node(), async move {
                let array = parity.rack.array();
                loop {
                    parity.step(&array, &mut rng).await;
                    if rng.one_in(4) {
                        reactor::sleep(Duration::from_micros(rng.below(400))).await;
                    }
                }
            });
        }
    }

    async fn verify(&self) {
        let array = self.rack.array();
        let stripes: Vec<u64> = (0..self.stripes).collect();
        for some in stripes.chunks(16) {
            join_all(some.iter().map(|stripe| self.read(&array, *stripe, 1))).await;
        }
        self.rack.world.coverage.borrow_mut().count("full checks", 1);
    }
}

impl Parity {
    async fn lose(self: &Rc<Self>, drives: &[usize]) {
        let world = Rc::clone(&self.rack.world);
        self.spawn();
        reactor::sleep(Duration::from_millis(20)).await;
        for at in drives {
            self.rack.lose(*at, 0);
        }
        self.rack.spawn_rebuild();
        reactor::sleep(Duration::from_millis(20)).await;
        world.power_cut().await;
        self.crashed(true);
        rounds::open(&self.rack, || self.crashed(true)).await;
        self.verify().await;
        self.spawn();
        self.rack.spawn_rebuild();
        reactor::sleep(Duration::from_millis(10)).await;
        world.kill();
        self.crashed(false);
        rounds::open(&self.rack, || self.crashed(true)).await;
        self.rack.finish().await;
        self.verify().await;
    }

    /// Takes stripes for an operation, if nobody works on them.
    fn begin(&self, first: u64, count: u64, what: Doing) -> bool {
        let mut doing = self.doing.borrow_mut();
        let free =
            first + count <= self.stripes && doing.range(first..first + count).next().is_none();
        if free {
            doing.extend((first..first + count).map(|stripe| (stripe, what)));
        }
        free
    }

    fn end(&self, first: u64, count: u64, becomes: Option<&Stripe>) {
        for stripe in first..first + count {
            self.doing.borrow_mut().remove(&stripe);
            if let Some(becomes) = becomes {
                self.state.borrow_mut().insert(stripe, becomes.clone());
            }
        }
    }

    async fn step(&self, array: &RaidArray, rng: &mut Rng) {
        self.rack.world.coverage.borrow_mut().count("operations", 1);
        let count = rng.between(1, 4);
        let first = rng.below(self.stripes);
        match rng.weighted(&[15, 50, 14, 16, 8]) {
            0 => {
                let of = |stripe| self.state.borrow().get(&stripe).cloned();
                let empty = (first..first + count)
                    .all(|stripe| of(stripe).is_none_or(|state| state == Stripe::Zeroes));
                if !empty || !self.begin(first, count, Doing::Declare) {
                    return;
                }
                let declared = array.declare_fresh(first, count).await;
                declared.unwrap_or_else(|error| self.fail("declare_fresh", &error));
                self.end(first, count, Some(&Stripe::Anything(None)));
                self.declared.borrow_mut().extend(first..first + count);
            }
            1 => {
                let declared: Vec<u64> = self.declared.borrow().iter().copied().collect();
                if declared.is_empty() {
                    return;
                }
                let stripe = *rng.pick(&declared);
                if !self.begin(stripe, 1, Doing::Write) {
                    return;
                }
                self.declared.borrow_mut().remove(&stripe);
                let version = self.versions.get() + 1;
                self.versions.set(version);
                let blocks = self.stripe_bytes / BLOCK_BYTES;
                let data = contents(version, stripe * blocks, blocks);
                let _busy = levada_base::probe::busy("writing");
                let written = array.write_fresh(stripe, data, IoClass::Foreground).await;
                written.unwrap_or_else(|error| self.fail("write_fresh", &error));
                self.end(stripe, 1, Some(&Stripe::Written { version, durable: false }));
            }
            2 => {
                let covered: Vec<(u64, Stripe)> = self
                    .state
                    .borrow()
                    .iter()
                    .filter(|(_, state)| matches!(state, Stripe::Written { durable: false, .. }))
                    .map(|(stripe, state)| (*stripe, state.clone()))
                    .collect();
                let _busy = levada_base::probe::busy("committing");
                array.flush().await.unwrap_or_else(|error| self.fail("flush", &error));
                for (stripe, then) in covered {
                    // Unless it was discarded and written anew meanwhile.
                    let mut state = self.state.borrow_mut();
                    if state.get(&stripe) == Some(&then)
                        && let Stripe::Written { version, .. } = then
                    {
                        state.insert(stripe, Stripe::Written { version, durable: true });
                    }
                }
            }
            3 => self.read(array, first, count.min(self.stripes - first)).await,
            _ => {
                if !self.begin(first, count, Doing::Discard) {
                    return;
                }
                (first..first + count).for_each(|s| _ = self.declared.borrow_mut().remove(&s));
                let discarded = array.discard_stripes(first, count).await;
                discarded.unwrap_or_else(|error| self.fail("discard", &error));
                self.end(first, count, Some(&Stripe::Zeroes));
            }
        }
    }

    async fn read(&self, array: &RaidArray, first: u64, count: u64) {
        if !self.begin(first, count, Doing::Read) {
            return;
        }
        let into = BufMut::for_overwrite((count * self.stripe_bytes) as usize).into_vec();
        let read = array.read(first * self.stripe_bytes, into).await;
        let read = read.unwrap_or_else(|error| self.fail("read", &error));
        let parts = read[0].chunks_exact(self.stripe_bytes as usize);
        for (stripe, bytes) in (first..).zip(parts) {
            let state = self.state.borrow().get(&stripe).cloned().unwrap_or(Stripe::Zeroes);
            match self.seen(stripe, &state, bytes) {
                // What is declared and may still be written is not looked at twice.
                Some(now) if !self.declared.borrow().contains(&stripe) => {
                    self.state.borrow_mut().insert(stripe, now);
                }
                Some(_) => {}
                None => panic!(
                    "seed {}: RAID 6: stripe {stripe} reads something else than {}",
                    self.rack.world.seed,
                    described(&state)
                ),
            }
        }
        self.end(first, count, None);
    }

    /// What the stripe is known to be after reading `bytes`; `None` when that cannot be.
    fn seen(&self, stripe: u64, state: &Stripe, bytes: &[u8]) -> Option<Stripe> {
        match state {
            Stripe::Zeroes => bytes.iter().all(|byte| *byte == 0).then_some(Stripe::Zeroes),
            Stripe::Anything(None) => Some(Stripe::Anything(Some(bytes.to_vec()))),
            Stripe::Anything(Some(before)) => (before == bytes).then(|| state.clone()),
            Stripe::Written { version, .. } => {
                let blocks = self.stripe_bytes / BLOCK_BYTES;
                let good = bytes.chunks_exact(BLOCK).enumerate().all(|(at, part)| {
                    recognise(part, stripe * blocks + at as u64, &[*version]).is_some()
                });
                good.then(|| state.clone())
            }
            Stripe::Either(one, other) => match self.seen(stripe, one, bytes) {
                // Contents alone do not tell a stripe that reads as zeroes from one that is
                // declared and reads so.
                Some(one) if matches!(**other, Stripe::Anything(_)) => {
                    let same = Stripe::Anything(Some(bytes.to_vec()));
                    Some(if one == Stripe::Zeroes { same } else { one })
                }
                Some(one) => Some(one),
                None => self.seen(stripe, other, bytes),
            },
        }
    }
}

fn after_power_cut(stripe: &Stripe) -> Stripe {
    match stripe {
        Stripe::Written { durable: false, .. } => Stripe::Anything(None),
        Stripe::Either(one, other) => {
            Stripe::Either(Box::new(after_power_cut(one)), Box::new(after_power_cut(other)))
        }
        Stripe::Zeroes | Stripe::Anything(_) | Stripe::Written { durable: true, .. } => {
            stripe.clone()
        }
    }
}

fn described(state: &Stripe) -> String {
    match state {
        Stripe::Zeroes => "zeroes".into(),
        Stripe::Anything(_) => "what it read before".into(),
        Stripe::Written { version, durable } => format!("version {version} (flushed: {durable})"),
        Stripe::Either(one, other) => format!("{} or {}", described(one), described(other)),
    }
}
