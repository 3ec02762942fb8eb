//! A seed: servers one after the other, and two at once, while everything between them and the drives fails now and then.
//!
//! In two of three seeds arrays must bear whatever happens: one shelf at a time is away for long. (A server that starts then may be refused, if
//! another shelf forgets whose it is.) In the others any may be, and servers are cut off from some shelves and not from others: then they may
//! stop, and never lose or confuse anything. In one of five seeds drives have no reservations, and a power fence keeps servers apart.

use super::around::Place;
use super::server::{End, Server, Stage};
use crate::remote::mischief;
use crate::remote::oracle::Oracle;
use crate::remote::shelf::{self, Build, Reservations, Shelf};
use crate::{Outcome, Rng, Shape, World};
use futures_util::future::join_all;
use levada_base::Epoch;
use levada_base::ids::Uuid;
use levada_base::reactor::{self, Reactor};
use levada_base::stream::MemoryNetwork;
use levada_base::units::MIB;
use levada_spec::{
    ArraySpec, Bytes, ClusterFile, DriveSpec, EnclosureSpec, Level, ParityKind, SliceSize,
};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

const SHELVES: usize = 3;
const DRIVES_EACH: usize = 2;
const DRIVE_BYTES: u64 = 12 * MIB;
/// Of those, the slice of the mirror.
const META_BYTES: u64 = 4 * MIB;
const CHUNK_KIB: u64 = 16;
/// Between two looks at how far a server has come.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// A server serves by then, or knows that it cannot; and has done its part.
const LIFE: Duration = Duration::from_secs(1200);
/// Once nothing befalls anybody any more, drives are back by then, and arrays are whole.
const RETURNED_WITHIN: Duration = Duration::from_secs(300);
const WHOLE_WITHIN: Duration = Duration::from_secs(3600);

/// What everybody shares.
pub struct Scene {
    pub world: Rc<World>,
    pub file: ClusterFile,
    pub net: MemoryNetwork,
    pub shelves: Vec<Rc<Shelf>>,
    /// Of each array.
    pub oracles: Vec<RefCell<Oracle>>,
    /// What was made of the drives.
    pub cluster: Cell<Option<Uuid>>,
    /// All members of the arrays were there and in step, when they were last looked at.
    was_whole: Cell<bool>,
    /// Under which servers had the arrays.
    pub epochs: RefCell<BTreeSet<Epoch>>,
    /// All servers so far, the dead ones too.
    servers: RefCell<Vec<Rc<Server>>>,
    /// Anybody may be away, from anybody.
    pub is_wild: bool,
    /// Drives keep nobody apart, and whoever takes them has all others' power cut before.
    pub has_power_fence: bool,
    /// Shelves that are away for long.
    pub away: RefCell<BTreeSet<usize>>,
    /// Shelves that servers which start now do not reach.
    out_of_reach: RefCell<Vec<usize>>,
    /// Nobody works any more, and nothing befalls anybody.
    pub is_over: Cell<bool>,
}

/// One seed.
pub fn enclosures(seed: u64) -> Outcome {
    let reactor = Reactor::simulated(seed);
    let coverage = reactor.block_on(async {
        let drives = SHELVES * DRIVES_EACH;
        let shape = Shape { drives, enclosures: SHELVES, drive_bytes: DRIVE_BYTES };
        let world = Rc::new(World::new(seed, shape));
        let net = MemoryNetwork::default();
        let mut shelves = Vec::new();
        let has_power_fence = seed % 5 == 4;
        for number in 0..SHELVES {
            let build = Build {
                number: number as u8,
                drives: number * DRIVES_EACH..(number + 1) * DRIVES_EACH,
                ports: if world.rng(|rng| rng.one_in(5)) { 1 } else { 2 },
                reservations: match has_power_fence {
                    true => Reservations::Lacking,
                    false => shelf::reservations(&world),
                },
            };
            let shelf = Rc::new(Shelf::new(&world, net.clone(), &build));
            shelf.start().await;
            shelves.push(shelf);
        }
        let file = cluster_file(&shelves);
        let stripe_blocks = CHUNK_KIB / 4 * 4;
        let scene = Rc::new(Scene {
            world,
            file,
            net,
            shelves,
            oracles: vec![RefCell::default(), RefCell::new(Oracle::of_stripes(stripe_blocks))],
            cluster: Cell::default(),
            was_whole: Cell::default(),
            epochs: RefCell::default(),
            servers: RefCell::default(),
            is_wild: seed.is_multiple_of(3),
            has_power_fence,
            away: RefCell::default(),
            out_of_reach: RefCell::default(),
            is_over: Cell::default(),
        });
        scene.play().await;
        scene.shelves.iter().for_each(|shelf| shelf.end());
        scene.world.end()
    });
    Outcome { trace_hash: reactor.trace_hash(), coverage }
}

/// A mirror of three copies and a 4+2 over all drives.
fn cluster_file(shelves: &[Rc<Shelf>]) -> ClusterFile {
    let mut file =
        ClusterFile::box_default(Path::new("/sim"), 1 << 50).expect("there is room for a box");
    file.drives.clear();
    file.enclosures.clear();
    file.mounts.clear();
    file.filesystems.clear();
    for (number, shelf) in shelves.iter().enumerate() {
        let enclosure = format!("e{number}");
        let addresses: Vec<String> = shelf.addresses.iter().map(ToString::to_string).collect();
        let at = format!("nvme+tcp://{}/{}", addresses.join(","), shelf.subsystem);
        for bay in 1..=DRIVES_EACH {
            file.drives.push(DriveSpec {
                name: format!("{enclosure}-{bay}"),
                path: format!("{at}?ns={bay}").into(),
                enclosure: enclosure.clone(),
                size: None,
            });
        }
        file.enclosures.push(EnclosureSpec { name: enclosure, host: None, url: None });
    }
    let names: Vec<String> = file.drives.iter().map(|drive| drive.name.clone()).collect();
    let [meta, data] = &mut file.arrays[..] else { panic!("a box has two arrays") };
    *meta = ArraySpec {
        slice: SliceSize::Bytes(Bytes(META_BYTES)),
        drives: names.clone(),
        ..meta.clone()
    };
    let level = Level::Parity { kind: ParityKind::Raid6, data: 4, chunk: Bytes::kib(CHUNK_KIB) };
    *data = ArraySpec { level, spares: 0, drives: names, ..data.clone() };
    file
}

impl Scene {
    pub fn rng<T>(&self, draw: impl FnOnce(&mut Rng) -> T) -> T {
        self.world.rng(draw)
    }

    /// Counts something that happens, by how far the latest server has come.
    pub fn note(&self, what: &'static str) {
        let stage = self.latest().map_or(Stage::Starts, |server| server.stage());
        self.world.tell(|| format!("{what} ({})", stage.name()));
        self.world.coverage.borrow_mut().fault_in(what, stage.name());
    }

    /// What all servers have done.
    pub fn operations(&self) -> u64 {
        self.servers.borrow().iter().map(|server| server.operations()).sum()
    }

    pub fn loses_power(&self) {
        self.oracles.iter().for_each(|oracle| oracle.borrow_mut().loses_power());
    }

    /// Servers that are about to start may have to do without this shelf: it does not know any more whose it is, and its drives do not yet.
    pub fn may_lack(&self, shelf: usize) {
        let servers = self.servers.borrow();
        for server in servers.iter().filter(|server| server.stage() < Stage::Works) {
            server.lacks.borrow_mut().insert(shelf);
        }
    }

    fn latest(&self) -> Option<Rc<Server>> {
        self.servers.borrow().last().cloned()
    }

    /// A shelf may be away for so long that its drives are lost to the arrays.
    pub fn bears_an_outage(&self) -> bool {
        self.is_wild
            || self.away.borrow().is_empty()
                && self.latest().is_some_and(|latest| latest.end().is_none() && latest.is_whole())
    }

    /// A server is about to take the drives.
    pub fn somebody_starts(&self) -> bool {
        let starts = |server: &Rc<Server>| !server.is_dead() && server.stage() < Stage::Works;
        self.servers.borrow().iter().any(starts)
    }

    /// Arrays lacked nothing when somebody last had them.
    pub fn is_whole(&self) -> bool {
        self.was_whole.get()
    }

    /// Another server may have taken the drives since this one began.
    pub fn may_be_fenced(&self, server: &Server) -> bool {
        server.began_beside_others
            || self.servers.borrow().iter().any(|other| other.number > server.number)
    }

    /// All servers but this one have no power any more.
    pub async fn power_fence(&self, but: u64) {
        self.note("the power fence");
        if self.rng(|rng| rng.one_in(2)) {
            // What they have under way takes longer than the next one to take the drives.
            self.shelves.iter().for_each(|shelf| shelf.slow(Duration::from_secs(16)));
            reactor::sleep(Duration::from_millis(100)).await;
            self.shelves.iter().for_each(|shelf| shelf.slow(Duration::ZERO));
        }
        for server in self.servers.borrow().iter().filter(|server| server.number != but) {
            server.kill(false);
        }
    }

    /// A server has the arrays, unless a later one has them already. What the one before it says to have flushed, though it was not asked to, must
    /// be there.
    pub fn has_arrays(&self, epoch: Epoch) {
        for (at, oracle) in self.oracles.iter().enumerate() {
            let former = oracle.borrow().owner();
            if former < epoch.0 {
                for server in &*self.servers.borrow() {
                    server.is_succeeded(at, former);
                }
            }
            oracle.borrow_mut().takes(epoch.0);
        }
    }

    fn start_server(self: &Rc<Self>) -> Rc<Server> {
        let number = self.servers.borrow().len() as u64 + 1;
        self.world.tell(|| format!("server {number} starts"));
        let server = Server::start(self, number);
        self.cut_off(&server, &self.out_of_reach.borrow());
        self.servers.borrow_mut().push(Rc::clone(&server));
        server
    }

    /// Everybody who started in a part of the network reaches the rest of it.
    fn join(&self) {
        if !self.out_of_reach.take().is_empty() {
            for server in &*self.servers.borrow() {
                server.uplink.join();
            }
        }
    }

    async fn within(&self, limit: Duration, server: &Server, until: impl Fn() -> bool) {
        let begun = reactor::now();
        while !until() {
            assert!(begun.elapsed() < limit, "{server} hangs");
            reactor::sleep(LOOK_EVERY).await;
            if server.stage() >= Stage::Checks && !server.is_dead() {
                self.was_whole.set(server.is_whole());
            }
        }
    }

    async fn play(self: &Rc<Self>) {
        let first = self.start_server();
        self.within(LIFE, &first, || first.stage() == Stage::Works).await;
        let places = (0..SHELVES).map(|number| Place { scene: Rc::clone(self), number });
        let mischief: Vec<_> = places.map(|place| mischief::start(&Rc::new(place))).collect();
        let mut server = first;
        let lives = self.rng(|rng| rng.between(2, 4));
        for life in 0..lives {
            if life > 0 {
                server = self.start_server();
                if self.rng(|rng| rng.one_in(5)) {
                    // Two at once, of which one gets the drives, or both do in turn.
                    self.note("two servers start");
                    let us = self.rng(|rng| rng.below(3_000_000));
                    reactor::sleep(Duration::from_micros(us)).await;
                    server = self.start_server();
                }
            }
            if self.rng(|rng| rng.one_in(8)) {
                // It dies, perhaps while it is about to take the drives.
                let after = self.rng(|rng| rng.below(4_000_000));
                reactor::sleep(Duration::from_micros(after)).await;
            } else {
                let goal = self.rng(|rng| rng.between(20, 300));
                let is_done =
                    || server.is_dead() || server.end().is_some() || server.operations() >= goal;
                self.within(LIFE, &server, is_done).await;
            }
            if !server.is_dead() {
                self.leave(&server).await;
            }
        }
        self.is_over.set(true);
        join_all(mischief).await;
        self.finish().await;
    }

    /// A server makes way for the next one, knowing it or not.
    async fn leave(self: &Rc<Self>, server: &Rc<Server>) {
        match self.rng(|rng| rng.below(9)) {
            0 => {
                self.note("a server dies");
                server.kill(true);
            }
            1 => {
                self.note("a server's machine dies");
                server.kill(false);
            }
            2 if server.stage() == Stage::Works && server.end().is_none() => {
                self.note("a server is stopped");
                server.stop().await;
            }
            3 => {
                // It comes back when the next one may have the drives.
                self.note("a server is cut off");
                server.is_cut_off.set(true);
                server.uplink.cut();
                self.mend_later(server, 90_000_000);
            }
            4 if self.is_wild => {
                self.note("a server is cut off from some shelves");
                let cut: Vec<usize> =
                    (0..SHELVES).filter(|_| self.rng(|rng| rng.one_in(2))).collect();
                self.cut_off(server, &cut);
                self.mend_later(server, 90_000_000);
            }
            5 if self.is_wild => {
                self.note("the network is in two parts");
                let one = self.rng(|rng| rng.below(SHELVES as u64)) as usize;
                let rest = (0..SHELVES).filter(|at| *at != one).collect();
                let mut lacks: (Vec<usize>, Vec<usize>) = (rest, vec![one]);
                if self.rng(|rng| rng.one_in(3)) {
                    lacks = (lacks.1, lacks.0);
                }
                let (server_lacks, next_lack) = lacks;
                self.cut_off(server, &server_lacks);
                self.out_of_reach.replace(next_lack);
                let scene = Rc::clone(self);
                let after = Duration::from_micros(self.rng(|rng| rng.below(90_000_000)));
                reactor::spawn(async move {
                    reactor::sleep(after).await;
                    scene.note("the network is one again");
                    scene.join();
                });
            }
            6 => {
                self.note("a server's commands are held up");
                server.uplink.hold();
                self.mend_later(server, 3_000_000);
            }
            _ => self.note("a server is to be preempted"),
        }
    }

    fn cut_off(&self, server: &Server, from: &[usize]) {
        for at in from {
            server.is_cut_off.set(true);
            server.uplink.cut_from(&self.shelves[*at].addresses);
        }
    }

    fn mend_later(self: &Rc<Self>, server: &Rc<Server>, us_max: u64) {
        let (server, scene) = (Rc::clone(server), Rc::clone(self));
        let after = Duration::from_micros(self.rng(|rng| rng.below(us_max)));
        reactor::spawn(async move {
            reactor::sleep(after).await;
            if !server.is_dead() {
                scene.note("a former server is back");
                server.uplink.mend();
                server.uplink.release();
            }
        });
    }

    /// The last server finds everything, and makes the arrays whole; all others know that they have nothing.
    async fn finish(self: &Rc<Self>) {
        self.join();
        for server in &*self.servers.borrow() {
            if server.stage() < Stage::Works || server.end().is_some() {
                server.kill(true);
            } else if !server.is_dead() {
                server.uplink.mend();
                server.uplink.release();
            }
        }
        let last = self.start_server();
        let is_done = || last.end().is_some() || last.stage() == Stage::Works;
        self.within(LIFE, &last, is_done).await;
        if let Some(End::Refused | End::Fenced | End::Stopped) = last.end() {
            last.fail("does not serve, though nothing is the matter");
        }
        let others = self.servers.borrow().clone();
        for other in others.iter().filter(|it| it.number < last.number && !it.is_dead()) {
            other.learns_its_end().await;
            other.kill(true);
        }
        // What comes back by itself has by then.
        reactor::sleep(RETURNED_WITHIN).await;
        last.all_are_back();
        self.within(WHOLE_WITHIN, &last, || last.end().is_some() || last.is_whole()).await;
        last.check().await;
        last.scrub().await;
        last.check().await;
        if last.stop().await > 0 {
            last.fail("cannot close its arrays, though nothing is the matter");
        }
        for server in self.servers.take() {
            server.kill(true);
        }
    }
}
