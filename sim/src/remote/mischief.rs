//! What befalls network, target and drives of a shelf, while one owner after the other works on them.
//!
//! What always holds: there is never no way to the drives for longer than [`DARK_MAX`], so that nobody may be told that they are gone, but for
//! outages that the scene allows; and a request of a drive takes no longer than a target may take to end what it was at.

use super::shelf::Shelf;
use crate::Rng;
use levada_base::reactor::{self, JoinHandle};
use levada_base::stream::{Connection, Delay, Side};
use levada_export_nvmet::{AnaState, Passage};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// How long something that takes every way lasts, at most.
const DARK_MAX: Duration = Duration::from_secs(5);
/// How much longer a request of a slow drive takes.
const SLOW_MAX_US: u64 = 6_000_000;

/// Something befalls those who wait, too.
const PATIENCE: Duration = Duration::from_secs(8);
/// Not again and again: to write again what was not flushed takes ten seconds over a slow network, and begins anew with every loss of the last
/// path.
const PATIENCE_AFTERWARDS: Duration = Duration::from_secs(35);

/// The scene around a shelf.
pub trait Around: 'static {
    fn shelf(&self) -> &Rc<Shelf>;

    /// The world's chance.
    fn rng<T>(&self, draw: impl FnOnce(&mut Rng) -> T) -> T;

    /// Counts something that happens.
    fn note(&self, what: &'static str);

    /// What all owners have done.
    fn operations(&self) -> u64;

    /// Nobody works any more, and nothing befalls anybody.
    fn is_over(&self) -> bool;

    /// The target is about to lose power.
    fn loses_power(&self);

    /// The target's process is about to end.
    fn crashes(&self) {}

    /// The target is about to be away: for so long, instead of what a host bears.
    fn outage_begins(&self) -> Option<Duration> {
        None
    }

    fn outage_ends(&self) {}
}

struct Mischief<A> {
    scene: Rc<A>,
    /// Ports that something lasting has befallen.
    is_bad: Vec<Cell<bool>>,
    /// Something has befallen all of it.
    is_dark: Cell<bool>,
    /// Something has befallen those who had done nothing since the last time.
    was_impatient: Cell<bool>,
}

/// Goes on until the scene is over and everything is as it should be.
pub fn start<A: Around>(scene: &Rc<A>) -> JoinHandle<()> {
    let mischief = Mischief {
        scene: Rc::clone(scene),
        is_bad: scene.shelf().addresses.iter().map(|_| Cell::default()).collect(),
        is_dark: Cell::default(),
        was_impatient: Cell::default(),
    };
    let mischief = Rc::new(mischief);
    reactor::spawn(async move {
        mischief.weather();
        while !mischief.scene.is_over() {
            mischief.pause().await;
            mischief.befall();
        }
        while mischief.is_dark.get() || mischief.is_bad.iter().any(Cell::get) {
            reactor::sleep(Duration::from_millis(10)).await;
        }
        mischief.scene.shelf().slow(Duration::ZERO);
    })
}

impl<A: Around> Mischief<A> {
    /// Mostly until something else has been done, as little is met while everybody waits.
    async fn pause(&self) {
        let (operations, us) = self.scene.rng(|rng| (rng.below(40), rng.below(60_000)));
        reactor::sleep(Duration::from_micros(us)).await;
        if self.scene.rng(|rng| rng.one_in(4)) {
            return;
        }
        let goal = self.scene.operations() + operations;
        let patience = if self.was_impatient.get() { PATIENCE_AFTERWARDS } else { PATIENCE };
        let begun = reactor::now();
        while self.scene.operations() < goal && begun.elapsed() < patience && !self.scene.is_over()
        {
            reactor::sleep(Duration::from_millis(1)).await;
        }
        self.was_impatient.set(self.scene.operations() < goal);
    }

    /// Mostly short, so that it meets much; some for longer than somebody waits.
    fn lasts(&self) -> Duration {
        let max_us = self.scene.rng(|rng| *rng.pick(&[3000, 3000, 300_000, 300_000, 5_000_000]));
        Duration::from_micros(self.scene.rng(|rng| rng.below(max_us))).min(DARK_MAX)
    }

    fn befall(self: &Rc<Self>) {
        let ports = self.is_bad.len() as u64;
        let port = self.scene.rng(|rng| rng.below(ports)) as usize;
        match self.scene.rng(|rng| rng.weighted(&[8, 4, 6, 4, 4, 4, 3, 3, 4, 3, 3])) {
            0 => self.connection("connection reset", port, Connection::reset),
            1 => {
                let side = self.side();
                self.connection("half open", port, move |it| it.reset_for(side));
            }
            2 => self.hold(port),
            3 => self.port("port silent", port, |all, at, is_bad| {
                let shelf = all.scene.shelf();
                let address = shelf.addresses[at];
                if is_bad {
                    shelf.net.connections(address).iter().for_each(Connection::lose);
                }
                shelf.net.set_silent(address, is_bad);
            }),
            4 => {
                let passages =
                    [Passage::Closed, Passage::Hung, Passage::Slow(Duration::from_millis(300))];
                let passage = self.scene.rng(|rng| *rng.pick(&passages));
                let what = match passage {
                    Passage::Closed => "port closed",
                    Passage::Hung => "port hung",
                    Passage::Slow(_) | Passage::Open => "port slow",
                };
                self.port(what, port, move |all, at, is_bad| {
                    let passage = if is_bad { passage } else { Passage::Open };
                    all.scene.shelf().set_passage(at, passage);
                });
            }
            5 => {
                let states = [AnaState::NonOptimized, AnaState::Inaccessible, AnaState::Change];
                let state = self.scene.rng(|rng| *rng.pick(&states));
                self.port("another ANA state", port, move |all, at, is_bad| {
                    all.scene
                        .shelf()
                        .set_state(at, if is_bad { state } else { AnaState::Optimized });
                });
            }
            6 => self.crash(true),
            7 => self.crash(false),
            8 => self.slow(),
            9 => self.weather(),
            _ => self.out_of_reach(port),
        }
    }

    /// A port stays connected and reaches nothing, while hosts come back over the others, where they put right at leisure what may be lost.
    /// It can be used again any moment.
    fn out_of_reach(self: &Rc<Self>, port: usize) {
        if self.is_bad[port].replace(true) {
            return;
        }
        self.scene.note("out of reach");
        let shelf = self.scene.shelf();
        shelf.set_state(port, AnaState::Inaccessible);
        for other in (0..self.is_bad.len()).filter(|other| *other != port) {
            let usual_max = Duration::from_millis(self.scene.rng(|rng| rng.below(6)));
            let delay = Delay { usual_max, rare_max: usual_max, part_bytes_max: 0 };
            shelf.net.set_delay(shelf.addresses[other], delay);
            self.connection("connection reset", other, Connection::reset);
        }
        let max_us = self.scene.rng(|rng| *rng.pick(&[10_000, 100_000, 300_000]));
        let (all, us) = (Rc::clone(self), self.scene.rng(|rng| rng.below(max_us)));
        reactor::spawn(async move {
            reactor::sleep(Duration::from_micros(us)).await;
            all.scene.shelf().set_state(port, AnaState::Optimized);
            all.is_bad[port].set(false);
        });
    }

    fn side(&self) -> Side {
        if self.scene.rng(|rng| rng.one_in(2)) { Side::Caller } else { Side::Called }
    }

    /// Something befalls one connection, or all of a port.
    fn connection(&self, what: &'static str, port: usize, fault: impl Fn(&Connection)) {
        let all = self.scene.shelf().net.connections(self.scene.shelf().addresses[port]);
        if all.is_empty() {
            return;
        }
        self.scene.note(what);
        if self.scene.rng(|rng| rng.one_in(2)) {
            all.iter().for_each(fault);
        } else {
            fault(&self.scene.rng(|rng| rng.pick(&all).clone()));
        }
    }

    fn hold(self: &Rc<Self>, port: usize) {
        let side = self.side();
        let held = self.scene.shelf().net.connections(self.scene.shelf().addresses[port]);
        if held.is_empty() {
            return;
        }
        self.scene.note("connections held");
        held.iter().for_each(|connection| connection.hold(side));
        let lasts = self.lasts();
        reactor::spawn(async move {
            reactor::sleep(lasts).await;
            held.iter().for_each(|connection| connection.release(side));
        });
    }

    /// Something lasting befalls a port, and ends.
    fn port(
        self: &Rc<Self>,
        what: &'static str,
        port: usize,
        change: impl Fn(&Self, usize, bool) + 'static,
    ) {
        if self.is_bad[port].get() {
            return;
        }
        self.scene.note(what);
        self.is_bad[port].set(true);
        change(self, port, true);
        let (all, lasts) = (Rc::clone(self), self.lasts());
        reactor::spawn(async move {
            reactor::sleep(lasts).await;
            change(&all, port, false);
            all.is_bad[port].set(false);
        });
    }

    /// The target's process dies, or its power goes.
    fn crash(self: &Rc<Self>, has_power: bool) {
        if self.is_dark.replace(true) {
            return;
        }
        self.scene.note(if has_power { "target killed" } else { "power cut" });
        let (all, lasts) = (Rc::clone(self), self.lasts());
        reactor::spawn(async move {
            let hosts_are_told = all.scene.rng(|rng| rng.one_in(2));
            let scene = &all.scene;
            scene.crashes();
            if !has_power {
                scene.loses_power();
            }
            let outage = scene.outage_begins();
            scene.shelf().crash(has_power, hosts_are_told).await;
            if let Some(outage) = outage {
                reactor::sleep(outage).await;
            } else if scene.rng(|rng| rng.one_in(3)) {
                reactor::sleep(lasts).await;
            }
            scene.shelf().start().await;
            if outage.is_some() {
                scene.outage_ends();
            }
            for (port, is_bad) in all.is_bad.iter().enumerate() {
                if !is_bad.get() {
                    // What was lost is reset by a system that knows nothing of it.
                    scene.shelf().net.reset(scene.shelf().addresses[port]);
                }
            }
            all.is_dark.set(false);
        });
    }

    fn slow(self: &Rc<Self>) {
        self.scene.note("drive slow");
        let max_us = self.scene.rng(|rng| *rng.pick(&[2000, 50_000, SLOW_MAX_US]));
        let most = Duration::from_micros(self.scene.rng(|rng| rng.below(max_us)));
        self.scene.shelf().slow(most);
        let (all, lasts) = (Rc::clone(self), self.lasts());
        reactor::spawn(async move {
            reactor::sleep(lasts).await;
            all.scene.shelf().slow(Duration::ZERO);
        });
    }

    /// How long bytes are under way, from now on.
    fn weather(&self) {
        let shelf = self.scene.shelf();
        for &address in &shelf.addresses {
            let draw = |of: &[u64]| Duration::from_micros(self.scene.rng(|rng| *rng.pick(of)));
            let usual_max = draw(&[0, 30, 30, 200, 5000]);
            let rare_max = usual_max + draw(&[0, 1000, 20_000, 400_000]);
            let part_bytes_max = self.scene.rng(|rng| *rng.pick(&[0, 0, 100, 3000]));
            shelf.net.set_delay(address, Delay { usual_max, rare_max, part_bytes_max });
        }
        self.scene.note("other delays");
    }
}
