//! A server: it takes the drives, opens the arrays, flushes what the last one has left, reads all of it, and works until it dies, or learns that
//! there is a later one.

use super::scenario::Scene;
use crate::arrays::contents;
use crate::remote::oracle::{Answer, Asked};
use crate::remote::uplink::Uplink;
use crate::{BlockModel, Rng, runs_of};
use futures_util::future::{LocalBoxFuture, join_all};
use levada_base::ids::Uuid;
use levada_base::reactor::{self, Group};
use levada_base::sync::Notify;
use levada_base::units::BLOCK_BYTES;
use levada_base::{BufMut, Epoch};
use levada_desk::PowerFenceError;
use levada_device::nvme::{Host, NvmeNamespace, NvmeUrl, Options};
use levada_device::{BlockError, Device, Durability};
use levada_export_nvmet::Nqn;
use levada_node::RemoteDrives;
use levada_node::arrays::{self, ClusterArray};
use levada_node::assembly::Cluster;
use levada_node::damage::BeyondRepair;
use levada_node::drives::{self, DriveSource, MayOverwrite, NoDevice};
use levada_node::operator::Operator;
use levada_node::targets::TargetTable;
use levada_node::volumes::Volumes;
use levada_raid::{Limits, MemberState, RaidArray};
use levada_spec::DriveSpec;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

const BLOCK: usize = BLOCK_BYTES as usize;
const WORKERS: u64 = 4;
/// No file system is made.
const SEGMENT_STRIPES: u32 = 4;
/// Whatever is asked for ends within this, faults and waits for lost drives included.
const ENDS_WITHIN: Duration = Duration::from_secs(300);
/// What former servers write: nobody may ever read it.
const FORBIDDEN: u64 = 1 << 39;

/// How far a server has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    Starts,
    Opens,
    Checks,
    Works,
}

impl Stage {
    pub fn name(self) -> &'static str {
        match self {
            Self::Starts => "starts",
            Self::Opens => "opens",
            Self::Checks => "checks",
            Self::Works => "works",
        }
    }
}

/// Why a server serves no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It could not take the drives, or not open an array.
    Refused,
    /// There is a later one.
    Fenced,
    /// An array has lost more drives than it bears.
    Stopped,
}

/// See the module.
pub struct Server {
    pub number: u64,
    pub uplink: Uplink,
    /// When it started others were about to.
    pub began_beside_others: bool,
    /// When it started no array lacked anything, as far as the server before knew.
    pub began_whole: bool,
    /// Shelves that it may have had to do without since.
    pub lacks: RefCell<BTreeSet<usize>>,
    /// From shelves that others reach.
    pub is_cut_off: Cell<bool>,
    scene: Rc<Scene>,
    group: Group,
    /// What it does beside serving, which ends before its arrays do.
    services: Group,
    cluster: RefCell<Option<Rc<Cluster>>>,
    stage: Cell<Stage>,
    end: Cell<Option<End>>,
    /// Of each array: something that it has written was never flushed since, as far as it knows.
    unflushed: Vec<Cell<bool>>,
    /// Its workers are to come to an end.
    is_leaving: Cell<bool>,
    workers: Cell<u64>,
    operations: Cell<u64>,
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seed, stage) = (self.scene.world.seed, self.stage.get());
        write!(f, "seed {seed}: server {} ({stage:?}, {:?})", self.number, self.end.get())?;
        for array in self.cluster.borrow().iter().flat_map(|cluster| &cluster.arrays) {
            let status = array.array.status();
            let members = status.members.iter().map(|it| (&it.name, it.state, it.catches_up));
            let (name, members): (_, Vec<_>) = (&array.spec.name, members.collect());
            write!(f, "; {name}: stopped {:?}, {members:?}", status.stopped)?;
        }
        Ok(())
    }
}

impl Server {
    /// Starts the process.
    pub fn start(scene: &Rc<Scene>, number: u64) -> Rc<Self> {
        let (began_beside_others, began_whole) = (scene.somebody_starts(), scene.is_whole());
        let group = Group::new();
        let server = Rc::new(Self {
            services: group.child(),
            number,
            uplink: Uplink::new(scene.net.clone()),
            began_beside_others,
            began_whole,
            lacks: scene.away.clone(),
            is_cut_off: Cell::default(),
            scene: Rc::clone(scene),
            group,
            cluster: RefCell::default(),
            stage: Cell::new(Stage::Starts),
            end: Cell::default(),
            unflushed: scene.oracles.iter().map(|_| Cell::default()).collect(),
            is_leaving: Cell::default(),
            workers: Cell::default(),
            operations: Cell::default(),
        });
        let running = Rc::clone(&server);
        reactor::spawn_in(&server.group, async move { running.run().await });
        server
    }

    pub fn stage(&self) -> Stage {
        self.stage.get()
    }

    pub fn end(&self) -> Option<End> {
        self.end.get()
    }

    pub fn operations(&self) -> u64 {
        self.operations.get()
    }

    pub fn is_dead(&self) -> bool {
        self.group.is_dead()
    }

    /// All drives are members that hold what they should.
    pub fn is_whole(&self) -> bool {
        let cluster = self.cluster.borrow();
        let is_whole = |array: &Rc<ClusterArray>| {
            let status = array.array.status();
            let is_in_step = |member: &levada_raid::MemberStatus| {
                member.state == MemberState::InSync && !member.catches_up
            };
            status.stopped.is_none() && status.members.iter().all(is_in_step)
        };
        cluster.as_ref().is_some_and(|cluster| cluster.arrays.iter().all(is_whole))
    }

    /// Nobody is out: drives fail in no other way than by vanishing.
    pub fn all_are_back(&self) {
        let cluster = self.cluster.borrow().clone().expect("it is open");
        for array in &cluster.arrays {
            let members = array.array.status().members;
            let out = members.iter().find(|member| member.state == MemberState::Faulty);
            if let Some(member) = out {
                let why = if member.vanished { "waits for" } else { "has given up" };
                self.fail(&format!("{why} drive {}, which is there", member.name));
            }
        }
    }

    /// The process dies; its targets hear of it, unless its machine dies as well.
    pub fn kill(&self, targets_are_told: bool) {
        match targets_are_told {
            true => self.uplink.die(),
            // Before anything of it ends in order.
            false => self.uplink.cut(),
        }
        self.group.kill();
        self.cluster.take();
    }

    /// Ends in order, as far as it can: how many arrays could not be closed.
    pub async fn stop(&self) -> usize {
        self.is_leaving.set(true);
        let idle = async {
            while self.workers.get() > 0 {
                reactor::sleep(Duration::from_millis(1)).await;
            }
        };
        self.bounded("the end of its work", idle).await;
        self.services.kill();
        let cluster = self.cluster.borrow().clone().expect("it works");
        let closing = async { arrays::close(&cluster.arrays).await.len() };
        let left_open = self.bounded("close", closing).await;
        self.tell(|| format!("is closed, but for {left_open}"));
        self.kill(true);
        left_open
    }

    fn tell(&self, what: impl FnOnce() -> String) {
        self.scene.world.tell(|| format!("server {} {}", self.number, what()));
    }

    pub fn fail(&self, what: &str) -> ! {
        panic!("{self}: {what}")
    }

    async fn bounded<T>(&self, what: &str, work: impl Future<Output = T>) -> T {
        let done = reactor::timeout(ENDS_WITHIN, work).await;
        done.unwrap_or_else(|_| self.fail(&format!("{what} does not end")))
    }

    fn ends(&self, end: End, why: &dyn fmt::Display) {
        if self.end.get().is_none() {
            self.end.set(Some(end));
            self.tell(|| format!("ends: {end:?}: {why}"));
            let counted = match end {
                End::Refused => "servers refused",
                End::Fenced => "servers fenced",
                End::Stopped => "servers stopped",
            };
            self.scene.world.coverage.borrow_mut().count(counted, 1);
        }
    }

    /// It does not come to serve. Who is alone, reaches its shelves, lacks one of them at most and finds arrays that were whole does.
    fn is_refused(&self, why: &dyn fmt::Display) {
        let is_alone = !self.is_cut_off.get() && !self.scene.may_be_fenced(self);
        let has_enough = self.began_whole && self.lacks.borrow().len() <= 1;
        if !self.scene.is_wild && is_alone && has_enough {
            self.fail(&format!("is refused: {why}"));
        }
        self.ends(End::Refused, why);
    }

    /// Something that it asked an array for has failed: it serves no more, if that may be.
    fn failed(&self, array: &RaidArray, error: &BlockError) {
        let may_be_fenced = self.scene.may_be_fenced(self);
        match array.status().stopped {
            Some(why @ BlockError::Fenced { .. }) if may_be_fenced => self.ends(End::Fenced, &why),
            Some(why @ BlockError::TooManyLost { .. })
                if self.is_cut_off.get() || self.scene.is_wild =>
            {
                self.ends(End::Stopped, &why);
            }
            stopped => self.fail(&format!("fails: {error}; stopped: {stopped:?}")),
        }
    }

    /// Opens drives as a machine of its own.
    fn source(&self) -> RemoteDrives<Uplink> {
        let nqn = Nqn::new(format!("nqn.2026-11.io.levada:server{}", self.number));
        let mut host = Host::new(nqn.expect("a name"));
        // Of this run.
        host.process = self.scene.rng(Rng::next_u64).to_le_bytes();
        let uplink = self.uplink.clone();
        let opener = move |url: NvmeUrl| {
            let (host, uplink) = (host.clone(), uplink.clone());
            let opening = async move {
                let addresses = url.addresses.iter().map(|(host, port)| {
                    let host = host.parse().expect("addresses of the scene are numbers");
                    std::net::SocketAddr::new(host, *port)
                });
                let addresses: Vec<_> = addresses.collect();
                let (subsystem, name) = (url.subsystem.clone(), url.to_string());
                let mut options = Options::new(host);
                options.queues = 1;
                NvmeNamespace::open_on(uplink, &addresses, subsystem, url.namespace, options, name)
                    .await
            };
            Box::pin(opening) as LocalBoxFuture<'static, _>
        };
        RemoteDrives::over(self.scene.has_power_fence, opener)
    }

    async fn run(self: &Rc<Self>) {
        let scene = Rc::clone(&self.scene);
        let file = &scene.file;
        let (number, drives) = (self.number, self.source());
        let source: Rc<dyn DriveSource> =
            Rc::new(Fencing { number, drives, scene: Rc::clone(&scene) });
        let progress = |line: &str| self.tell(|| format!("says: {line}"));
        let taking =
            drives::take(&*source, file, MayOverwrite::Nothing, false, SEGMENT_STRIPES, &progress);
        let drives = match self.bounded("start", taking).await {
            Ok(drives) => drives,
            Err(error) => return self.is_refused(&error),
        };
        if drives.fresh != (self.number == 1) {
            self.fail("takes a cluster that is there for a new one");
        }
        scene.cluster.set(Some(drives.cluster));
        self.stage.set(Stage::Opens);
        let opening = async {
            match drives.fresh {
                true => arrays::create(file, &drives).await,
                false => arrays::open(file, &drives, false).await,
            }
        };
        let arrays = match self.bounded("open", opening).await {
            Ok(arrays) => arrays,
            Err(error) => return self.is_refused(&error),
        };
        let epoch = drives.epoch;
        // One that has no array wrote its epoch to few drives or none; who comes later may not have those, and takes the same.
        if !scene.epochs.borrow_mut().insert(epoch) {
            self.fail("is the second owner of an epoch");
        }
        self.tell(|| format!("has the arrays, as owner {epoch}"));
        scene.has_arrays(epoch);
        let table = TargetTable {
            cluster: drives.cluster,
            fs: Uuid::nil(),
            fs_name: String::new(),
            epoch,
            targets: Vec::new(),
        };
        let (router, beyond_repair) = (Rc::default(), BeyondRepair::default());
        let (targets, remarks, file) = (Vec::new(), Vec::new(), file.clone());
        let cluster =
            Cluster { file, drives, arrays, table, targets, router, remarks, beyond_repair };
        let cluster = Rc::new(cluster);
        *self.cluster.borrow_mut() = Some(Rc::clone(&cluster));
        self.look_after(&cluster, source);
        self.stage.set(Stage::Checks);
        for at in 0..cluster.arrays.len() {
            if !self.flush(at).await || !self.check_array(at).await {
                return;
            }
        }
        self.stage.set(Stage::Works);
        let mut rng = scene.rng(Rng::fork);
        for _ in 0..WORKERS {
            let (server, mut rng) = (Rc::clone(self), rng.fork());
            self.workers.set(self.workers.get() + 1);
            reactor::spawn(async move {
                while !server.is_leaving.get() && !server.scene.is_over.get() {
                    let open = server.open_arrays();
                    if open.is_empty() {
                        break;
                    }
                    let at = *rng.pick(&open);
                    server.step(at, &mut rng).await;
                    server.operations.set(server.operations.get() + 1);
                    if rng.one_in(2) {
                        reactor::sleep(Duration::from_micros(rng.below(8000))).await;
                    }
                }
                server.workers.set(server.workers.get() - 1);
            });
        }
    }

    /// What a node does beside serving.
    fn look_after(&self, cluster: &Rc<Cluster>, source: Rc<dyn DriveSource>) {
        let changed = Rc::new(Notify::default());
        let (all, wakes) = (cluster.arrays.clone(), Rc::clone(&changed));
        reactor::spawn_in(&self.services, async { arrays::look_after(all, wakes, Limits::NONE) });
        let volumes = Volumes::new(Rc::clone(cluster), "nowhere", None);
        let (file, nowhere) = (PathBuf::new(), "nowhere".to_owned());
        let operator = Operator::new(Rc::clone(cluster), source, file, nowhere, changed, volumes);
        reactor::spawn_in(&self.services, Rc::clone(&operator).keep_spares());
        reactor::spawn_in(&self.services, operator.heed_owners());
    }

    /// Those that go on, though others have stopped: perhaps while nothing was asked of them.
    fn open_arrays(&self) -> Vec<usize> {
        let goes_on = |at: &usize| {
            let array = self.array(*at);
            let stopped = array.status().stopped;
            stopped.inspect(|why| self.failed(&array, why)).is_none()
        };
        (0..self.scene.oracles.len()).filter(goes_on).collect()
    }

    fn array(&self, at: usize) -> RaidArray {
        let cluster = self.cluster.borrow();
        cluster.as_ref().expect("it is open").arrays[at].array.clone()
    }

    /// Another server is about to have the array, which has been this one's, if its epoch is `former`. The array may have made all durable by
    /// itself: then a flush may succeed that is asked for later, and nothing may be lost.
    pub fn is_succeeded(&self, at: usize, former: u64) {
        if self.is_dead() || self.cluster.borrow().is_none() || self.epoch() != former {
            return;
        }
        if self.unflushed[at].get() && !self.array(at).has_unflushed() {
            self.unflushed[at].set(false);
            self.model(at, |model| model.flush_done(model.flush_begins()));
        }
    }

    fn epoch(&self) -> u64 {
        self.cluster.borrow().as_ref().expect("it is open").drives.epoch.0
    }

    fn asks(&self, at: usize) -> Asked {
        self.scene.oracles[at].borrow().asks(self.epoch())
    }

    fn model<T>(&self, at: usize, then: impl FnOnce(&mut BlockModel) -> T) -> T {
        then(&mut self.scene.oracles[at].borrow_mut().model)
    }

    /// A change that was asked for is made: whether the oracle hears of it.
    fn is_made(&self, at: usize, asked: Asked) -> bool {
        let answer = self.scene.oracles[at].borrow_mut().answered(asked, false);
        if answer == Answer::OfFormerOwner {
            let owner = self.scene.oracles[at].borrow().owner();
            self.fail(&format!("is told that a change is made, and owner {owner} has the array"));
        }
        answer == Answer::Counts
    }

    /// Whether it worked.
    async fn flush(&self, at: usize) -> bool {
        let (array, asked) = (self.array(at), self.asks(at));
        let begun = self.model(at, |model| model.flush_begins());
        let had_unflushed = self.unflushed[at].replace(false);
        if let Err(error) = self.bounded("flush", array.flush()).await {
            self.unflushed[at].set(had_unflushed || self.unflushed[at].get());
            self.failed(&array, &error);
            return false;
        }
        let answer = self.scene.oracles[at].borrow_mut().answered(asked, true);
        match answer {
            Answer::Counts => {
                self.tell(|| format!("has flushed {begun:?} of {at}"));
                let mut oracle = self.scene.oracles[at].borrow_mut();
                oracle.inheritance_is_flushed();
                oracle.model.flush_done(begun);
            }
            Answer::OfFormerOwner if had_unflushed => {
                self.fail(&format!("is told that what it had written to array {at} is durable"));
            }
            Answer::OfFormerOwner | Answer::Late => {}
        }
        true
    }

    /// Reads all that was ever written to an array; whether that worked. Nobody else is at work.
    async fn check_array(&self, at: usize) -> bool {
        let written = self.model(at, |model| model.written());
        self.check_blocks(at, &written).await
    }

    /// Whether they could be read.
    async fn check_blocks(&self, at: usize, written: &[u64]) -> bool {
        let runs = runs_of(written, 32);
        for some in runs.chunks(8) {
            let reads = some.iter().map(|(first, count)| self.read(at, *first, *count));
            if join_all(reads).await.contains(&false) {
                return false;
            }
        }
        self.scene.world.coverage.borrow_mut().count("full checks", 1);
        true
    }

    /// All of it once more, at the end: also where nobody has written, or should not have.
    pub async fn check(&self) {
        for at in 0..self.scene.oracles.len() {
            let blocks = self.array(at).info().capacity_bytes / BLOCK_BYTES;
            let all: Vec<u64> = (0..blocks).collect();
            if !self.check_blocks(at, &all).await {
                self.fail("cannot read what it has");
            }
        }
    }

    /// All copies say the same, and parity fits.
    pub async fn scrub(&self) {
        for at in 0..self.scene.oracles.len() {
            let array = self.array(at);
            let scrubbed = self.bounded("scrub", array.scrub_anew(Limits::NONE)).await;
            let report =
                scrubbed.unwrap_or_else(|error| self.fail(&format!("cannot scrub: {error}")));
            let found = [report.wrong_repaired, report.mismatched, report.unreadable_repaired];
            let lost = if array.status().lost_blocks > 0 { 0 } else { report.lost };
            if found != [0; 3] || lost > 0 {
                self.fail(&format!("array {at} is not in step: {report:?}"));
            }
        }
    }

    /// Whether it worked.
    async fn read(&self, at: usize, first: u64, count: u64) -> bool {
        let (array, asked) = (self.array(at), self.asks(at));
        let into = BufMut::for_overwrite(count as usize * BLOCK).into_vec();
        let read = self.bounded("read", array.read(first * BLOCK_BYTES, into)).await;
        let answer = self.scene.oracles[at].borrow_mut().answered(asked, false);
        // Who has met a later owner has forgotten what it had not flushed.
        let counts = answer == Answer::Counts && array.status().stopped.is_none();
        match read {
            Ok(read) if counts => {
                if let Err(what) = self.model(at, |model| model.check_read(first, &read[0])) {
                    self.fail(&format!("array {at}: {what}"));
                }
                true
            }
            Ok(_) => true,
            Err(BlockError::Medium { .. }) if counts && array.status().lost_blocks > 0 => {
                if count > 1 {
                    for block in first..first + count {
                        if !Box::pin(self.read(at, block, 1)).await {
                            return false;
                        }
                    }
                } else if let Err(what) = self.model(at, |model| model.check_lost(first)) {
                    self.fail(&format!("array {at}: {what}"));
                }
                true
            }
            Err(error) => {
                self.failed(&array, &error);
                false
            }
        }
    }

    async fn step(&self, at: usize, rng: &mut Rng) {
        let array = self.array(at);
        let blocks = array.info().capacity_bytes / BLOCK_BYTES;
        // A few are written again and again.
        let hot = if rng.one_in(3) { blocks } else { 48.min(blocks) };
        let first = rng.below(hot);
        let longest = if rng.one_in(12) { 64 } else { 6 };
        let count = rng.between(1, longest).min(blocks - first);
        let (epoch, asked) = (self.epoch(), self.asks(at));
        if !self.scene.oracles[at].borrow().is_of(epoch) {
            return self.trespass(at, rng, asked, first, count).await;
        }
        let operation = rng.weighted(&[40, 15, 25, 10, 5]);
        if operation == 3 {
            self.flush(at).await;
            return;
        }
        if !self.scene.oracles[at].borrow_mut().take(first, count) {
            return;
        }
        match operation {
            2 => _ = self.read(at, first, count).await,
            _ => self.change(at, &array, asked, first, count, operation).await,
        }
        if self.scene.oracles[at].borrow().is_of(epoch) {
            self.scene.oracles[at].borrow_mut().give_back(first, count);
        }
    }

    async fn change(
        &self,
        at: usize,
        array: &RaidArray,
        asked: Asked,
        first: u64,
        count: u64,
        operation: usize,
    ) {
        let durability = if operation == 1 { Durability::Fua } else { Durability::Volatile };
        let offset = first * BLOCK_BYTES;
        let changed = if operation == 4 {
            self.model(at, |model| model.zeroes_begin(first, count));
            self.tell(|| format!("zeroes {first} + {count} of {at}"));
            self.bounded("write zeroes", array.write_zeroes(offset, count * BLOCK_BYTES)).await
        } else {
            let version = self.model(at, |model| model.write_begins(first, count));
            self.tell(|| format!("writes {version} to {first} + {count} of {at}, {durability:?}"));
            let data = contents(version, first, count);
            self.bounded("write", array.write(offset, data, durability)).await
        };
        match changed {
            Ok(()) if self.is_made(at, asked) => {
                let is_durable = durability == Durability::Fua;
                self.unflushed[at].set(self.unflushed[at].get() || !is_durable);
                self.tell(|| format!("has changed {first} + {count} of {at}, {durability:?}"));
                self.model(at, |model| model.write_done(first, count, is_durable));
            }
            Ok(()) => {}
            Err(error) => self.failed(array, &error),
        }
    }

    /// What a former owner does that has not noticed.
    async fn trespass(&self, at: usize, rng: &mut Rng, asked: Asked, first: u64, count: u64) {
        let array = self.array(at);
        let (offset, bytes) = (first * BLOCK_BYTES, count * BLOCK_BYTES);
        let is_flush = rng.one_in(4);
        let done = match rng.below(3) {
            _ if is_flush => {
                self.tell(|| format!("trespasses: flushes {at}"));
                self.bounded("flush", array.flush()).await
            }
            0 => {
                self.tell(|| format!("trespasses: zeroes {first} + {count} of {at}"));
                self.bounded("write zeroes", array.write_zeroes(offset, bytes)).await
            }
            _ => {
                self.tell(|| format!("trespasses: writes {first} + {count} of {at}"));
                let data = contents(FORBIDDEN + self.number, first, count);
                self.bounded("write", array.write(offset, data, Durability::Volatile)).await
            }
        };
        match done {
            // It may be told so where it had nothing to be flushed.
            Ok(()) if is_flush && !self.unflushed[at].get() => {}
            Ok(()) => _ = self.is_made(at, asked),
            Err(error) => self.failed(&array, &error),
        }
    }

    /// A former owner learns that it is one, at the latest when it changes something.
    pub async fn learns_its_end(&self) {
        for at in 0..self.scene.oracles.len() {
            let (array, asked) = (self.array(at), self.asks(at));
            let data = contents(FORBIDDEN + self.number, 1, 1);
            let written = array.write(BLOCK_BYTES, data, Durability::Fua);
            match self.bounded("write", written).await {
                Ok(()) => _ = self.is_made(at, asked),
                Err(error) => self.failed(&array, &error),
            }
            if array.status().stopped.is_none() {
                self.fail(&format!("does not know that it has lost array {at}"));
            }
        }
    }
}

/// Drives, and what takes the power of all other servers where these cannot be shut out of them.
struct Fencing {
    number: u64,
    drives: RemoteDrives<Uplink>,
    scene: Rc<Scene>,
}

impl DriveSource for Fencing {
    fn open<'a>(
        &'a self,
        drive: &'a DriveSpec,
    ) -> LocalBoxFuture<'a, Result<Rc<dyn Device>, NoDevice>> {
        self.drives.open(drive)
    }

    fn create<'a>(
        &'a self,
        drive: &'a DriveSpec,
    ) -> LocalBoxFuture<'a, Result<Rc<dyn Device>, NoDevice>> {
        self.drives.create(drive)
    }

    /// A server that had it before knows it, in every second.
    fn cluster(&self) -> Option<Uuid> {
        self.scene.cluster.get().filter(|_| self.number.is_multiple_of(2))
    }

    fn is_reached(&self, device: &str) -> bool {
        self.drives.is_reached(device)
    }

    fn owner<'a>(&'a self, drive: &'a DriveSpec) -> LocalBoxFuture<'a, Epoch> {
        self.drives.owner(drive)
    }

    fn shut_out<'a>(
        &'a self,
        _cluster: Option<Uuid>,
        _last: Epoch,
    ) -> LocalBoxFuture<'a, Result<bool, PowerFenceError>> {
        Box::pin(async {
            if !self.scene.has_power_fence {
                return Ok(false);
            }
            self.scene.power_fence(self.number).await;
            reactor::sleep(self.drives.settle()).await;
            self.drives.were_shut_out();
            Ok(true)
        })
    }

    fn needs_power_fence(&self, drive: &DriveSpec) -> bool {
        self.drives.needs_power_fence(drive)
    }

    fn lost(&self, device: &str) -> LocalBoxFuture<'_, Epoch> {
        self.drives.lost(device)
    }
}
