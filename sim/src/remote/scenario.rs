//! A seed: owners one after the other, while everything between them and the drive fails now and then.

use super::mischief::{self, Around};
use super::oracle::Oracle;
use super::owner::{End, Owner, Stage};
use super::shelf::{self, Build, Shelf};
use crate::{Outcome, Rng, Shape, World};
use levada_base::reactor::{self, Reactor};
use levada_base::stream::MemoryNetwork;
use levada_base::units::MIB;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// Between two looks at how far an owner has come.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// An owner has taken the drive by then, or knows that it cannot; and has done its part.
const LIFE: Duration = Duration::from_secs(600);
/// Once nothing is held up any more, everybody has noticed by then what was.
const CALM: Duration = Duration::from_secs(60);

/// What everybody shares.
pub struct Scene {
    pub world: Rc<World>,
    pub shelf: Rc<Shelf>,
    pub oracle: RefCell<Oracle>,
    /// All owners so far, the dead ones too.
    pub owners: RefCell<Vec<Rc<Owner>>>,
    /// Nobody works any more, and nothing befalls anybody.
    pub is_over: Cell<bool>,
}

/// One seed.
pub fn nvme(seed: u64) -> Outcome {
    let reactor = Reactor::simulated(seed);
    let coverage = reactor.block_on(async {
        let shape = Shape { drives: 1, enclosures: 1, drive_bytes: 2 * MIB };
        let world = Rc::new(World::new(seed, shape));
        let reservations = shelf::reservations(&world);
        let ports = if world.rng(|rng| rng.one_in(5)) { 1 } else { 2 };
        let build = Build { number: 0, drives: 0..1, ports, reservations };
        let shelf = Rc::new(Shelf::new(&world, MemoryNetwork::default(), &build));
        shelf.start().await;
        let scene = Rc::new(Scene {
            world,
            shelf,
            oracle: RefCell::default(),
            owners: RefCell::default(),
            is_over: Cell::default(),
        });
        scene.play().await;
        scene.shelf.end();
        scene.world.end()
    });
    Outcome { trace_hash: reactor.trace_hash(), coverage }
}

impl Around for Scene {
    fn shelf(&self) -> &Rc<Shelf> {
        &self.shelf
    }

    fn rng<T>(&self, draw: impl FnOnce(&mut Rng) -> T) -> T {
        self.world.rng(draw)
    }

    /// By how far the latest owner has come.
    fn note(&self, what: &'static str) {
        let stage = self.owners.borrow().last().map_or(Stage::Opens, |owner| owner.stage());
        self.world.tell(|| format!("{what} ({})", stage.name()));
        self.world.coverage.borrow_mut().fault_in(what, stage.name());
    }

    fn operations(&self) -> u64 {
        self.owners.borrow().iter().map(|owner| owner.operations()).sum()
    }

    fn is_over(&self) -> bool {
        self.is_over.get()
    }

    fn loses_power(&self) {
        self.oracle.borrow_mut().loses_power();
    }
}

impl Scene {
    fn start_owner(self: &Rc<Self>) -> Rc<Owner> {
        let epoch = self.owners.borrow().len() as u64 + 1;
        self.world.tell(|| format!("owner {epoch} starts"));
        let owner = Owner::start(self, epoch);
        self.owners.borrow_mut().push(Rc::clone(&owner));
        owner
    }

    async fn within(&self, limit: Duration, owner: &Owner, until: impl Fn() -> bool) {
        let begun = reactor::now();
        while !until() {
            let stage = owner.stage();
            let (seed, epoch) = (self.world.seed, owner.epoch);
            assert!(begun.elapsed() < limit, "seed {seed}: owner {epoch} hangs ({stage:?})");
            reactor::sleep(LOOK_EVERY).await;
        }
    }

    async fn play(self: &Rc<Self>) {
        let mischief = mischief::start(self);
        let lives = self.rng(|rng| rng.between(2, 4));
        for _ in 0..lives {
            let owner = self.start_owner();
            if self.rng(|rng| rng.one_in(6)) {
                // It dies, perhaps while it is about to take the drive.
                let after = self.rng(|rng| rng.below(100_000));
                reactor::sleep(Duration::from_micros(after)).await;
            } else {
                let goal = self.rng(|rng| rng.between(20, 200));
                let is_done = || owner.end().is_some() || owner.operations() >= goal;
                self.within(LIFE, &owner, is_done).await;
            }
            if owner.end().is_none() {
                self.leave(&owner).await;
            }
        }
        self.is_over.set(true);
        mischief.await;
        self.finish().await;
    }

    /// An owner makes way for the next one, knowing it or not.
    async fn leave(self: &Rc<Self>, owner: &Rc<Owner>) {
        match self.rng(|rng| rng.below(6)) {
            0 | 1 => {
                self.note("an owner dies");
                owner.kill(true);
            }
            2 => {
                self.note("an owner's machine dies");
                owner.kill(false);
            }
            3 => {
                // It comes back when the next one may have the drive.
                self.note("an owner is cut off");
                owner.uplink.cut();
                let (uplink, scene) = (owner.uplink.clone(), Rc::clone(self));
                let after = self.rng(|rng| rng.below(20_000_000));
                reactor::spawn(async move {
                    reactor::sleep(Duration::from_micros(after)).await;
                    scene.note("a former owner is back");
                    uplink.mend();
                });
            }
            4 => {
                self.note("an owner's commands are held up");
                owner.uplink.hold();
                let (uplink, scene) = (owner.uplink.clone(), Rc::clone(self));
                let after = self.rng(|rng| rng.below(3_000_000));
                reactor::spawn(async move {
                    reactor::sleep(Duration::from_micros(after)).await;
                    scene.note("a former owner's commands go on");
                    uplink.release();
                });
            }
            _ => {
                self.note("an owner is preempted");
                if self.rng(|rng| rng.one_in(2)) {
                    // What it has under way takes longer than the next one to take the drive.
                    self.shelf.slow(Duration::from_secs(4));
                    reactor::sleep(Duration::from_millis(10)).await;
                    self.shelf.slow(Duration::ZERO);
                }
            }
        }
    }

    /// The last owner finds everything; all others know that they are none.
    async fn finish(self: &Rc<Self>) {
        for owner in &*self.owners.borrow() {
            owner.uplink.mend();
            owner.uplink.release();
        }
        let mut last = self.start_owner();
        loop {
            let is_done = || last.end().is_some() || last.stage() == Stage::Works;
            self.within(LIFE, &last, is_done).await;
            match last.end() {
                None => break,
                // By a restart of before that it has only now noticed.
                Some(End::GivenUp) => last = self.start_owner(),
                Some(End::Fenced) => panic!("seed {}: the last owner is fenced", self.world.seed),
            }
        }
        last.check().await;
        let owners = self.owners.borrow().clone();
        for owner in owners.iter().filter(|owner| owner.epoch < last.epoch && !owner.is_dead()) {
            // One that is still about to take it, and registered for that, knows that it has nothing to change yet.
            if owner.stage() > Stage::Takes {
                owner.learns_its_end().await;
            }
            owner.kill(true);
        }
        reactor::sleep(Duration::from_millis(10)).await;
        last.close().await;
        reactor::sleep(CALM).await;
        assert_eq!(self.shelf.controllers(), 0, "seed {}", self.world.seed);
        for owner in &owners {
            owner.kill(true);
        }
        self.owners.borrow_mut().clear();
    }
}
