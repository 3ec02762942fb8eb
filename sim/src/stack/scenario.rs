//! One seed of the whole stack.
//!
//! 1. Workers run on one client while the node crashes, drives fail and connections break. No
//!    error reaches them, nothing acknowledged is lost, nothing happens twice.
//! 2. They go on; in some seeds the client alone dies and another takes over its files. Then client and node die together. Everything fsynced is there, and names are those of
//!    some moment since the last fsync of anybody, never a mixture.
//! 3. Everything is put right; the checks of every floor come out clean.

use super::attrs::PERMISSIONS;
use super::calm::Calm;
use super::cluster::{self, CLIENT, Stack};
use super::expected;
use super::floors;
use super::mischief;
use super::model::{Body, Names, Tree};
use super::worker::{self, Worker};
use crate::{Outcome, Rng, Shape, World};
use futures_util::future::{Either, select};
use futures_util::pin_mut;
use levada_base::ids::Ino;
use levada_base::probe;
use levada_base::reactor::{self, Group, Reactor};
use levada_client::{Client, Error};
use levada_meta::Census;
use levada_node::assembly::Service;
use levada_node::fsck::{CheckConfig, Sum};
use levada_raid::Limits;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

const WORKERS: u64 = 4;
/// Operations of the first part, at least, and power cuts in it; kills come in addition.
const OPERATIONS: u64 = 500;
const POWER_CUTS: u64 = 2;
const KILLS_MAX: u64 = 2;
/// Operations of the second part, roughly.
const OPERATIONS_BEFORE_THE_END: u64 = 80;
/// In every second seed one of the workers uses two clients in turn.
const GUEST_SEEDS: u64 = 2;
/// In every fourth seed, one of those with one client, that one dies alone first.
const HEIR_SEEDS: u64 = 4;
/// Files made at the end.
const FRESH_FILES: u32 = 8;
/// After this a client that is gone has lost its opens and sessions.
pub(super) const LEASE: Duration = Duration::from_secs(75);

/// A seed takes minutes of virtual time; one that takes longer than this hangs.
const SEED_TIME_MAX: Duration = Duration::from_secs(3600);

/// One seed of the whole stack.
pub fn stack(seed: u64) -> Outcome {
    in_a_world(seed, async |run| run.all().await)
}

/// Runs a scenario in a fresh world, on virtual time, to its end.
pub(super) fn in_a_world(seed: u64, scenario: impl AsyncFnOnce(&Run)) -> Outcome {
    let reactor = Reactor::simulated(seed);
    let coverage = reactor.block_on(async {
        let world = Rc::new(World::new(seed, Shape::of_12(cluster::drive_bytes(seed))));
        let stack = Stack::new(Rc::clone(&world));
        let run =
            Run { stack, world: Rc::clone(&world), workers: Rc::default(), calm: Rc::default() };
        if reactor::timeout(SEED_TIME_MAX, scenario(&run)).await.is_err() {
            let states = probe::states();
            panic!("seed {seed}: hangs after {SEED_TIME_MAX:?}; engines are in {states:?}");
        }
        let seconds = reactor::now().0 / 1_000_000_000;
        world.coverage.borrow_mut().count("virtual seconds", seconds);
        world.end()
    });
    Outcome { trace_hash: reactor.trace_hash(), coverage }
}

/// How often it looks whether the engine is in a certain state.
const LOOK_AGAIN: Duration = Duration::from_micros(100);

/// How the node dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Crash {
    PowerCut,
    Kill,
}

/// The crashes of the first part, in order.
fn draw_crashes(rng: &mut Rng) -> Vec<Crash> {
    let kills = rng.below(KILLS_MAX + 1);
    let mut crashes = vec![Crash::PowerCut; POWER_CUTS as usize];
    for _ in 0..kills {
        let at = rng.below(crashes.len() as u64 + 1) as usize;
        crashes.insert(at, Crash::Kill);
    }
    crashes
}

pub(super) type Shared = Rc<RefCell<worker::State>>;

/// A cluster and who works on it.
pub(super) struct Run {
    pub stack: Rc<Stack>,
    pub world: Rc<World>,
    pub workers: Rc<RefCell<Vec<Shared>>>,
    pub calm: Rc<Calm>,
}

impl Run {
    /// Operations that were begun.
    pub fn operations(&self) -> u64 {
        self.workers.borrow().iter().map(|state| state.borrow().operations).sum()
    }

    async fn all(&self) {
        self.stack.start().await;
        let crowd = self.crowd().await;
        let machine = Group::new();
        self.first_part(&machine).await;
        let (operations, cuts) = (self.operations(), self.world.power_cuts());
        assert!(
            operations >= OPERATIONS && cuts >= POWER_CUTS,
            "seed {}: only {operations} operations and {cuts} power cuts",
            self.world.seed
        );
        let heir = Group::new();
        if self.world.seed % HEIR_SEEDS == 1 {
            self.work_with_faults(operations + OPERATIONS_BEFORE_THE_END / 2).await;
            let workers = self.client_alone_dies(&machine, &heir).await;
            // They go on until they are killed.
            drop(self.start_workers(&heir, workers, &Rc::new(Cell::new(false))));
        }
        self.second_part(&[machine, heir]).await;
        let refused = self.workers.borrow().iter().map(|state| state.borrow().refused).sum();
        self.world.coverage.borrow_mut().count("client operations", self.operations());
        self.world.coverage.borrow_mut().count("writes refused for want of room", refused);
        self.after_the_end().await;
        self.check_crowd(crowd).await;
        self.runs_full().await;
        self.check_floors().await;
    }

    /// Starts the workers in the client's group; each gives itself back when `enough`.
    pub fn start_workers(
        &self,
        machine: &Group,
        workers: Vec<Worker>,
        enough: &Rc<Cell<bool>>,
    ) -> Vec<reactor::JoinHandle<Worker>> {
        let run = |mut worker: Worker| {
            let enough = Rc::clone(enough);
            reactor::spawn_in(machine, async move {
                while !enough.get() {
                    worker.step().await;
                }
                worker
            })
        };
        workers.into_iter().map(run).collect()
    }

    /// Workers on one client, which is in the group with them.
    pub async fn make_workers(&self, machine: &Group) -> Vec<Worker> {
        let seed = self.world.seed;
        let config = self.stack.client_config(CLIENT, uuid(seed, 1));
        let rng = self.world.rng(Rng::fork);
        let all = Rc::clone(&self.workers);
        let calm = Rc::clone(&self.calm);
        let second = self.stack.client_config(CLIENT, uuid(seed, 3));
        let made = reactor::spawn_in(machine, async move {
            let client = Client::connect(config).await.expect("nothing refuses the client");
            let mut rng = rng;
            let mut workers = Vec::new();
            for number in 0..WORKERS {
                let (client, all) = (client.clone(), Rc::clone(&all));
                workers.push(Worker::new(seed, number, client, rng.fork(), all).await);
            }
            if seed.is_multiple_of(GUEST_SEEDS) {
                let guest = Client::connect(second).await.expect("nothing refuses the client");
                workers[0].guest = Some(guest);
                workers[0].calm = calm;
            }
            workers
        });
        made.await.expect("the client lives")
    }

    /// Stops them, and compares everything with what it must be.
    pub async fn stop_and_verify(
        &self,
        running: Vec<reactor::JoinHandle<Worker>>,
        enough: &Cell<bool>,
    ) -> Vec<Worker> {
        enough.set(true);
        let mut workers = Vec::new();
        for worker in running {
            workers.push(worker.await.expect("the client lives"));
        }
        for worker in &mut workers {
            worker.verify(&self.world.coverage).await;
        }
        workers
    }

    async fn first_part(&self, machine: &Group) {
        let workers = self.make_workers(machine).await;
        let enough = Rc::new(Cell::new(false));
        let running = self.start_workers(machine, workers, &enough);
        let crashes = self.world.rng(draw_crashes);
        let mut done = 0;
        while self.operations() < OPERATIONS || done < crashes.len() {
            self.moment(500, 25_000, expected::STATES).await;
            let wanted = OPERATIONS * (done as u64 + 1) / (crashes.len() as u64 + 1);
            let due = done < crashes.len() && self.operations() >= wanted;
            if due && self.world.rng(|rng| rng.one_in(4)) {
                self.crash(crashes[done]).await;
                done += 1;
            } else {
                self.stack.fault();
            }
        }
        let workers = self.stop_and_verify(running, &enough).await;
        self.stack.scrub_ends().await;
        let enough = Rc::new(Cell::new(false));
        // They go on until they are killed.
        drop(self.start_workers(machine, workers, &enough));
    }

    /// The node dies and comes back.
    async fn crash(&self, mut how: Crash) {
        self.calm.ends().await;
        loop {
            self.stack.end_rot();
            self.stack.settle_now();
            match how {
                Crash::Kill => self.world.kill(),
                Crash::PowerCut => self.world.power_cut().await,
            }
            let down = self.world.rng(|rng| rng.below(2) * rng.below(1_000_000));
            reactor::sleep(Duration::from_micros(down)).await;
            if self.starts().await && !self.dies_soon().await {
                return self.calm.returns();
            }
            let kill = self.world.rng(|rng| rng.one_in(3));
            how = if kill { Crash::Kill } else { Crash::PowerCut };
        }
    }

    /// The node starts; drives and connections may fail meanwhile. False when it shall die before it
    /// serves.
    async fn starts(&self) -> bool {
        let mut starting = self.stack.start();
        let (dies, with_faults) = self.world.rng(|rng| (rng.one_in(4), rng.one_in(2)));
        loop {
            let moment = self.moment(200, 15_000, expected::STARTING);
            pin_mut!(moment);
            if let Either::Left(_) = select(&mut starting, moment).await {
                return true;
            }
            if dies && self.world.rng(|rng| rng.one_in(2)) {
                return false;
            }
            if with_faults {
                self.stack.fault();
            }
        }
    }

    /// Now and then something happens while the client tells the node what it may have lost. True
    /// when that is the node's death.
    async fn dies_soon(&self) -> bool {
        if !self.world.rng(|rng| rng.one_in(4)) {
            return false;
        }
        self.moment(100, 15_000, expected::AFTER_START).await;
        let dies = self.world.rng(|rng| rng.one_in(2));
        if !dies {
            self.stack.fault();
        }
        dies
    }

    /// Lets so many microseconds pass, or half of the time only until the engine is in a certain
    /// state: many last so shortly that chance alone would seldom find them.
    async fn moment(&self, min: u64, max: u64, states: &[&'static str]) {
        let (time, sought) =
            self.world.rng(|rng| (rng.between(min, max), rng.one_in(2).then(|| *rng.pick(states))));
        let until = reactor::now() + Duration::from_micros(time);
        let Some(sought) = sought else { return reactor::sleep_until(until).await };
        reactor::sleep(Duration::from_micros(min)).await;
        while reactor::now() < until && !probe::states().contains(&sought) {
            reactor::sleep(LOOK_AGAIN).await;
        }
    }

    async fn work_with_faults(&self, operations: u64) {
        while self.operations() < operations {
            self.moment(500, 15_000, expected::STATES).await;
            self.stack.fault();
        }
    }

    async fn second_part(&self, machines: &[Group]) {
        self.work_with_faults(self.operations() + OPERATIONS_BEFORE_THE_END).await;
        self.stack.end_rot();
        self.world.coverage.borrow_mut().fault("client and node die");
        machines.iter().for_each(Group::kill);
        self.world.power_cut().await;
        self.stack.start().await;
    }

    /// A new client looks at what is left.
    async fn after_the_end(&self) {
        let config = self.stack.client_config(CLIENT, uuid(self.world.seed, 2));
        let client = Client::connect(config).await.expect("nothing refuses the client");
        reactor::sleep(LEASE).await;
        let states: Vec<Shared> = self.workers.borrow().clone();
        for (number, state) in states.iter().enumerate() {
            self.check_survivors(&client, number as u64, state).await;
        }
        self.check_fresh_files(&client).await;
        client.shutdown().await.expect("it has nothing to lose");
    }

    /// Nothing of a file that was lost with its name appears in a new one, not even its number: handles
    /// that name it lead nowhere.
    async fn check_fresh_files(&self, client: &Client) {
        const HOLE: usize = 100_000;
        let states: Vec<Shared> = self.workers.borrow().clone();
        let told =
            states.iter().flat_map(|state| state.borrow().tree.inos()).collect::<BTreeSet<_>>();
        for number in 0..FRESH_FILES {
            let name = format!("fresh{number}");
            let (file, attr) = worker::create(client, Ino::ROOT, name.as_bytes()).await;
            let is_new = !told.contains(&attr.ino);
            assert!(is_new, "seed {}: {:?} was given to two files", self.world.seed, attr.ino);
            let byte = levada_base::Buf::copy_of(&[1]).into_vec();
            let written = file.write(HOLE as u64, byte).await;
            file.close().await;
            if written == Err(Error::Full) {
                continue;
            }
            written.unwrap_or_else(|error| panic!("seed {}: a new file: {error}", self.world.seed));
            let read = worker::read_whole(client, attr.ino).await.expect("it was just written");
            let is_clean = read.len() == HOLE + 1 && read[..HOLE].iter().all(|byte| *byte == 0);
            assert!(is_clean, "seed {}: a new file holds old bytes", self.world.seed);
        }
    }

    async fn check_survivors(&self, client: &Client, number: u64, state: &Shared) {
        let tree = state.borrow().tree.clone();
        let pending = state.borrow().pending.clone();
        let found = self.look(client, number, state).await;
        let shape = found.shape(&tree);
        let mut possible = state.borrow().past[state.borrow().durable..].to_vec();
        possible.extend(pending.as_ref().map(|pending| tree.names(Some(pending))));
        if !possible.contains(&shape) {
            self.fail(
                number,
                state,
                &format!("names after the crash are {shape:?}, expected one of {possible:?}"),
            );
        }
        let lost = possible.len() > 1 && shape == possible[0];
        self.world.coverage.borrow_mut().count("ends of names lost", u64::from(lost));
        let named: BTreeSet<Ino> = found.inos().collect();
        for (id, node) in tree.nodes.iter().filter(|(_, node)| named.contains(&node.ino)) {
            let Body::File(file) = &node.body else { continue };
            let read = worker::read_whole(client, node.ino).await;
            let read = read.unwrap_or_else(|error| {
                self.fail(number, state, &format!("file {id} does not read: {error}"))
            });
            if let Err(what) = file.may_survive(&read) {
                self.fail(number, state, &format!("file {id} after the crash: {what}"));
            }
            self.world.coverage.borrow_mut().count("survivors compared", 1);
        }
    }

    /// Everything below a worker's directory.
    pub(super) async fn look(&self, client: &Client, number: u64, state: &Shared) -> Found {
        let root = state.borrow().tree.ino(0);
        let mut found = Found::default();
        let mut looked = vec![root];
        while let Some(ino) = looked.pop() {
            let listed = worker::list(client, ino).await;
            let listed =
                listed.unwrap_or_else(|error| self.fail(number, state, &error.to_string()));
            for (name, child) in &listed {
                let attr = client.lookup(ino, name).await;
                let attr = attr.unwrap_or_else(|e| self.fail(number, state, &e.to_string()));
                found.modes.insert(*child, attr.mode & PERMISSIONS);
                if attr.kind == levada_wire::attr::Kind::Directory {
                    looked.push(*child);
                }
            }
            found.entries.insert(ino, listed);
        }
        found
    }

    pub(super) fn fail(&self, number: u64, state: &Shared, what: &str) -> ! {
        panic!("{}", worker::describe(self.world.seed, number, what, &state.borrow()))
    }

    /// Fails with the inodes of every worker's files, so that what is told of one leads to its history.
    fn fail_with_all(&self, what: &str) -> ! {
        let states = self.workers.borrow();
        for (number, state) in (0..).zip(states.iter()) {
            let nodes: Vec<(u64, Ino)> =
                state.borrow().tree.nodes.iter().map(|(id, node)| (*id, node.ino)).collect();
            let named = nodes.into_iter().find(|(_, ino)| what.contains(&format!("{ino:?}")));
            if let Some((id, _)) = named {
                self.fail(number, state, &format!("node {id} at the end: {what}"));
            }
        }
        panic!("seed {}: at the end: {what}", self.world.seed)
    }

    /// Puts everything right; what every floor says of itself must be clean.
    pub async fn check_floors(&self) {
        let seed = self.world.seed;
        self.stack.recover_drives().await;
        // Chores: orphans of the client that is gone are destroyed.
        reactor::sleep(Duration::from_secs(30)).await;
        let cluster = self.stack.cluster().expect("the node serves");
        let checked = mischief::checked(&cluster, CheckConfig::default()).await;
        let is_clean = Sum::of(&checked.reports).exit_code() == 0 && checked.items.is_empty();
        assert!(is_clean, "seed {seed}: {checked:?}");
        let mut objects = 0;
        let mut scrubbed = Vec::new();
        let mut census = Census::default();
        for target in &cluster.targets {
            let name = target.entry.name();
            match &target.service {
                Service::Metadata { service, .. } => {
                    let problems = levada_meta::check(service.store()).await;
                    let problems = problems.unwrap_or_else(|e| panic!("seed {seed}: {name}: {e}"));
                    assert!(problems.is_empty(), "seed {seed}: {name}: {problems:?}");
                    let counted = levada_meta::census(service.store()).await;
                    census = counted.unwrap_or_else(|e| panic!("seed {seed}: {name}: {e}"));
                }
                Service::Objects { log, .. } => {
                    let report = log.scrub().await;
                    let report = report.unwrap_or_else(|e| panic!("seed {seed}: {name}: {e}"));
                    assert!(report.damaged.is_empty(), "seed {seed}: {name}: {report:?}");
                    objects += report.objects;
                    scrubbed.push((target.entry.id, log));
                }
                Service::Stopped { why } => panic!("seed {seed}: {name} stopped: {why}"),
            }
        }
        if let Some(what) = floors::leftovers(&census) {
            self.fail_with_all(&what);
        }
        let fs = u64::from_be_bytes(cluster.table.fs.as_bytes()[..8].try_into().expect("8 bytes"));
        for (target, log) in scrubbed {
            let found = floors::disagreement(&census, fs, target, log).await;
            match found.unwrap_or_else(|e| panic!("seed {seed}: {target:?}: {e}")) {
                None => {}
                Some(what) => self.fail_with_all(&what),
            }
        }
        self.world.coverage.borrow_mut().count("objects scrubbed", objects);
        for array in &cluster.arrays {
            let report = array.array.scrub_anew(Limits::NONE).await;
            let report = report.unwrap_or_else(|e| panic!("seed {seed}: {}: {e}", array.spec.name));
            assert!(
                report.mismatched == 0 && report.lost == 0 && report.wrong_repaired == 0,
                "seed {seed}: array {}: {report:?}",
                array.spec.name
            );
        }
    }
}

pub(super) fn uuid(seed: u64, number: u8) -> [u8; 16] {
    let mut uuid = [number; 16];
    uuid[..8].copy_from_slice(&seed.to_le_bytes());
    uuid
}

/// The names and modes that were seen.
#[derive(Default)]
pub(super) struct Found {
    entries: BTreeMap<Ino, Vec<(Vec<u8>, Ino)>>,
    modes: BTreeMap<Ino, u32>,
}

impl Found {
    pub fn inos(&self) -> impl Iterator<Item = Ino> + '_ {
        self.entries.values().flatten().map(|(_, ino)| *ino)
    }

    /// As a model of the tree says it.
    pub fn shape(&self, tree: &Tree) -> Names {
        let known: BTreeMap<Ino, u64> =
            tree.nodes.iter().map(|(id, node)| (node.ino, *id)).collect();
        let mut names = Names::new();
        let mut looked = vec![(tree.ino(0), Vec::new())];
        while let Some((ino, path)) = looked.pop() {
            for (name, child) in self.entries.get(&ino).into_iter().flatten() {
                let path = [&path[..], b"/", name].concat();
                looked.push((*child, path.clone()));
                names.insert(path, (known.get(child).copied(), self.modes[child]));
            }
        }
        names
    }
}
