//! A process that owns the drive: it opens and takes it, makes its mark, flushes what the last one has left, reads all of it, and works on
//! it until it dies, or learns that there is a later one.

use super::oracle::{Answer, Asked};
use super::scenario::Scene;
use super::uplink::Uplink;
use crate::arrays::contents;
use crate::{BlockModel, Rng, runs_of};
use futures_util::future::join_all;
use levada_base::reactor::{self, Group};
use levada_base::units::BLOCK_BYTES;
use levada_base::{Buf, BufMut, Epoch};
use levada_device::nvme::{Host, NvmeNamespace, Options};
use levada_device::{BlockError, Device, Durability, Witness};
use levada_export_nvmet::Nqn;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

const BLOCK: usize = BLOCK_BYTES as usize;
const WORKERS: u64 = 4;
/// Whatever is asked for ends within this, faults and waits for lost changes included.
const ENDS_WITHIN: Duration = Duration::from_secs(120);
/// What former owners write: nobody may ever read it.
const FORBIDDEN: u64 = 1 << 39;
/// Stands at the beginning of the drive, before the epoch of its owner.
const MARK: [u8; 8] = *b"LVDAMARK";

pub type Namespace = NvmeNamespace<Uplink>;

/// How far an owner has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    Opens,
    Takes,
    Checks,
    Works,
}

impl Stage {
    pub fn name(self) -> &'static str {
        match self {
            Self::Opens => "opens",
            Self::Takes => "takes",
            Self::Checks => "checks",
            Self::Works => "works",
        }
    }
}

/// Why an owner is none any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// There is a later one.
    Fenced,
    /// The target has forgotten it before it could make its mark.
    GivenUp,
}

/// See the module.
pub struct Owner {
    pub epoch: u64,
    pub uplink: Uplink,
    scene: Rc<Scene>,
    group: Group,
    device: RefCell<Option<Rc<Namespace>>>,
    stage: Cell<Stage>,
    end: Cell<Option<End>>,
    /// Its mark is on the drive.
    has_marked: Cell<bool>,
    /// What it has done.
    operations: Cell<u64>,
}

fn mark(epoch: u64) -> Buf {
    let mut mark = BufMut::zeroed(BLOCK);
    mark[..8].copy_from_slice(&MARK);
    mark[8..16].copy_from_slice(&epoch.to_le_bytes());
    mark.freeze()
}

fn owner_of(mark: &[u8]) -> Option<Epoch> {
    let (head, rest) = mark.split_first_chunk()?;
    (*head == MARK).then(|| Epoch(u64::from_le_bytes(*rest.first_chunk().expect("a block"))))
}

impl Owner {
    /// Starts the process.
    pub fn start(scene: &Rc<Scene>, epoch: u64) -> Rc<Self> {
        let uplink = Uplink::new(scene.shelf.net.clone());
        let owner = Rc::new(Self {
            epoch,
            uplink,
            scene: Rc::clone(scene),
            group: Group::new(),
            device: RefCell::default(),
            stage: Cell::new(Stage::Opens),
            end: Cell::default(),
            has_marked: Cell::default(),
            operations: Cell::default(),
        });
        let running = Rc::clone(&owner);
        reactor::spawn_in(&owner.group, async move {
            if let Err(error) = running.run().await {
                running.ends(&error);
            }
        });
        owner
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

    /// The process dies; the target hears of it, unless its machine dies as well.
    pub fn kill(&self, target_is_told: bool) {
        if !target_is_told {
            self.uplink.cut();
        }
        self.group.kill();
        self.device.take();
    }

    /// Lets go of the drive in order, when nobody works on it.
    pub async fn close(&self) {
        let device = self.device.take().expect("it was opened");
        let device = Rc::try_unwrap(device).ok().expect("nobody works on it");
        self.bounded("close", device.close()).await;
    }

    pub fn device(&self) -> Option<Rc<Namespace>> {
        self.device.borrow().clone()
    }

    fn tell(&self, what: impl FnOnce() -> String) {
        self.scene.world.tell(|| format!("owner {} {}", self.epoch, what()));
    }

    fn fail(&self, what: &str) -> ! {
        let Scene { world, .. } = &*self.scene;
        panic!("seed {}: owner {} ({:?}): {what}", world.seed, self.epoch, self.stage.get())
    }

    async fn bounded<T>(&self, what: &str, work: impl Future<Output = T>) -> T {
        let done = reactor::timeout(ENDS_WITHIN, work).await;
        done.unwrap_or_else(|_| self.fail(&format!("{what} does not end")))
    }

    /// It owns the drive no more, if that may be.
    fn ends(&self, error: &BlockError) {
        let may_be_fenced = self.scene.oracle.borrow().may_be_fenced(self.epoch);
        let may_be_another = !self.scene.shelf.keeps_reservations() && !self.has_marked.get();
        // Who comes back late and meets other faults then may be away for longer than a drive is waited for.
        let may_be_given_up = may_be_another || may_be_fenced && self.uplink.was_cut();
        let end = match error {
            BlockError::Fenced { .. } if may_be_fenced => End::Fenced,
            BlockError::Gone if may_be_given_up => End::GivenUp,
            error => self.fail(&format!("fails: {error}")),
        };
        if self.end.replace(Some(end)).is_none() {
            self.scene.world.tell(|| format!("owner {} ends: {end:?}", self.epoch));
        }
    }

    fn options(&self, rng: &mut Rng) -> Options {
        let nqn = Nqn::new(format!("nqn.2026-11.io.levada:owner{}", self.epoch)).expect("a name");
        let mut host = Host::new(nqn);
        // Of this run.
        host.process = rng.next_u64().to_le_bytes();
        let mut options = Options::new(host);
        options.queues = rng.between(1, 3) as u16;
        options.queue_entries = *rng.pick(&[3, 9, 128]);
        options.digests.header = rng.one_in(4);
        options.digests.data = rng.one_in(4);
        options
    }

    async fn run(self: &Rc<Self>) -> Result<(), BlockError> {
        let scene = &self.scene;
        let mut rng = scene.world.rng(Rng::fork);
        let options = self.options(&mut rng);
        let device = Rc::new(self.bounded("open", self.open(options)).await);
        *self.device.borrow_mut() = Some(Rc::clone(&device));
        // What nobody has marked yet is nobody's.
        let owner = |mark: &[u8]| Some(owner_of(mark).unwrap_or_default());
        let witness = |is_there| Some(Witness { blocks: vec![0], owner: Rc::new(owner), is_there });
        device.recognise_by(witness(false));
        self.stage.set(Stage::Takes);
        scene.oracle.borrow_mut().tries(self.epoch);
        self.bounded("fence", device.fence(Epoch(self.epoch))).await?;
        if scene.shelf.keeps_reservations() {
            self.takes();
        }
        let marked = scene.oracle.borrow().marked();
        let into = BufMut::for_overwrite(BLOCK).into_vec();
        let found = self.bounded("read", device.read(0, into)).await?;
        let found = owner_of(&found[0]).map_or(0, |found| found.0);
        if found < marked {
            self.fail(&format!("finds the mark of owner {found}, after owner {marked}"));
        }
        if found > self.epoch {
            // It has come late, to a target that has forgotten the later one.
            let (ours, seen) = (Epoch(self.epoch), Epoch(found));
            return Err(BlockError::Fenced { ours, seen });
        }
        let marked = device.write(0, mark(self.epoch).into_vec(), Durability::Fua);
        self.bounded("write", marked).await?;
        self.has_marked.set(true);
        device.recognise_by(witness(true));
        scene.oracle.borrow_mut().marks(self.epoch);
        // A target that forgets its reservations has made nobody an owner before.
        if !scene.shelf.keeps_reservations() {
            self.takes();
        }
        let asked = self.asks();
        self.bounded("flush", device.flush()).await?;
        if self.answered(asked, true) == Answer::Counts {
            scene.oracle.borrow_mut().inheritance_is_flushed();
        }
        self.stage.set(Stage::Checks);
        self.check_all(&device).await?;
        self.stage.set(Stage::Works);
        for _ in 0..WORKERS {
            let (owner, device) = (Rc::clone(self), Rc::clone(&device));
            let mut rng = rng.fork();
            reactor::spawn(async move {
                while owner.end.get().is_none() && !owner.scene.is_over.get() {
                    if let Err(error) = owner.step(&device, &mut rng).await {
                        owner.ends(&error);
                    }
                    owner.operations.set(owner.operations.get() + 1);
                    if rng.one_in(2) {
                        reactor::sleep(Duration::from_micros(rng.below(8000))).await;
                    }
                }
            });
        }
        Ok(())
    }

    async fn open(&self, options: Options) -> Namespace {
        let shelf = &self.scene.shelf;
        loop {
            let (subsystem, name) = (shelf.subsystem.clone(), format!("owner{}", self.epoch));
            let (uplink, paths) = (self.uplink.clone(), &shelf.addresses);
            match Namespace::open_on(uplink, paths, subsystem, 1, options.clone(), name).await {
                Ok(device) => return device,
                Err(error) => self.scene.world.tell(|| format!("not opened: {error}")),
            }
            reactor::sleep(Duration::from_millis(100)).await;
        }
    }

    fn takes(&self) {
        self.scene.world.tell(|| format!("owner {} has the drive", self.epoch));
        self.scene.oracle.borrow_mut().takes(self.epoch);
    }

    fn asks(&self) -> Asked {
        self.scene.oracle.borrow().asks(self.epoch)
    }

    /// Something that was asked for has been done: whether the oracle hears of it.
    fn answered(&self, asked: Asked, is_change: bool) -> Answer {
        let answer = self.scene.oracle.borrow_mut().answered(asked, true);
        if answer == Answer::OfFormerOwner && is_change {
            let owner = self.scene.oracle.borrow().owner();
            self.fail(&format!("is told that a change is made, and owner {owner} has the drive"));
        }
        answer
    }

    fn model<T>(&self, then: impl FnOnce(&mut BlockModel) -> T) -> T {
        then(&mut self.scene.oracle.borrow_mut().model)
    }

    /// Reads all that was ever written. Nobody else is at work.
    async fn check_all(&self, device: &Namespace) -> Result<(), BlockError> {
        let written = self.model(|model| model.written());
        let runs = runs_of(&written, 32);
        for some in runs.chunks(8) {
            let reads = some.iter().map(|(first, count)| self.read(device, *first, *count));
            join_all(reads).await.into_iter().collect::<Result<(), _>>()?;
        }
        self.scene.world.coverage.borrow_mut().count("full checks", 1);
        Ok(())
    }

    /// All of it once more, at the end.
    pub async fn check(&self) {
        let device = self.device().expect("it was opened");
        self.check_all(&device).await.unwrap_or_else(|error| self.fail(&format!("fails: {error}")));
    }

    async fn read(&self, device: &Namespace, first: u64, count: u64) -> Result<(), BlockError> {
        let asked = self.asks();
        let mut into = BufMut::for_overwrite(count as usize * BLOCK);
        into.fill(0xee);
        let read = device.read(first * BLOCK_BYTES, into.into_vec());
        let read = self.bounded("read", read).await?;
        assert_eq!((read.len(), read[0].len()), (1, count as usize * BLOCK), "the same memory");
        // Who has met a later owner has forgotten what it had not flushed.
        if !device.is_given_up()
            && self.answered(asked, false) == Answer::Counts
            && let Err(what) = self.model(|model| model.check_read(first, &read[0]))
        {
            self.fail(&what);
        }
        Ok(())
    }

    async fn step(&self, device: &Namespace, rng: &mut Rng) -> Result<(), BlockError> {
        let blocks = device.info().capacity_bytes / BLOCK_BYTES;
        // Block 0 has the mark. A few are written again and again.
        let first = 1 + match rng.one_in(3) {
            true => rng.below(blocks - 1),
            false => rng.below(32),
        };
        let longest = if rng.one_in(12) { 80 } else { 6 };
        let count = rng.between(1, longest).min(blocks - first);
        let asked = self.asks();
        if !self.scene.oracle.borrow().is_of(self.epoch) {
            return self.trespass(device, rng, asked, first, count).await;
        }
        let operation = rng.weighted(&[40, 15, 25, 10, 5, 4, 6]);
        if operation == 3 {
            let begun = self.model(|model| model.flush_begins());
            self.bounded("flush", device.flush()).await?;
            if self.answered(asked, true) == Answer::Counts {
                self.tell(|| format!("has flushed {begun:?}"));
                self.model(|model| model.flush_done(begun));
            }
            return Ok(());
        }
        if !self.scene.oracle.borrow_mut().take(first, count) {
            return Ok(());
        }
        match operation {
            0 => self.write(device, first, count, Durability::Volatile).await?,
            1 => self.write(device, first, count, Durability::Fua).await?,
            2 => self.read(device, first, count).await?,
            4 => {
                self.model(|model| model.zeroes_begin(first, count));
                self.tell(|| format!("zeroes {first} + {count}"));
                let zeroed = device.write_zeroes(first * BLOCK_BYTES, count * BLOCK_BYTES);
                self.bounded("write zeroes", zeroed).await?;
                self.is_written(asked, first, count, Durability::Volatile);
            }
            5 => {
                // They are old bytes or zeroes then, and which of both may change until they are written.
                self.model(|model| model.zeroes_begin(first, count));
                self.tell(|| format!("discards {first} + {count}"));
                let discarded = device.discard(first * BLOCK_BYTES, count * BLOCK_BYTES);
                self.bounded("discard", discarded).await?;
                if self.answered(asked, true) == Answer::Counts {
                    self.model(|model| model.gives_up(first, count));
                    self.write(device, first, count, Durability::Volatile).await?;
                }
            }
            _ => {
                // Whoever asked gives up, and writes something else.
                let version = self.model(|model| model.write_begins(first, count));
                self.tell(|| format!("writes {version} to {first} + {count}, and gives up"));
                let data = contents(version, first, count);
                let written = device.write(first * BLOCK_BYTES, data, Durability::Volatile);
                let limit = Duration::from_micros(rng.below(2000));
                match reactor::timeout(limit, written).await {
                    Ok(written) => {
                        written?;
                        self.is_written(asked, first, count, Durability::Volatile);
                    }
                    Err(_) if self.scene.oracle.borrow().is_of(self.epoch) => {
                        self.model(|model| model.gives_up(first, count));
                        self.write(device, first, count, Durability::Fua).await?;
                    }
                    Err(_) => {}
                }
            }
        }
        if self.scene.oracle.borrow().is_of(self.epoch) {
            self.scene.oracle.borrow_mut().give_back(first, count);
        }
        Ok(())
    }

    async fn write(
        &self,
        device: &Namespace,
        first: u64,
        count: u64,
        durability: Durability,
    ) -> Result<(), BlockError> {
        let asked = self.asks();
        let version = self.model(|model| model.write_begins(first, count));
        self.tell(|| format!("writes {version} to {first} + {count}, {durability:?}"));
        let data = contents(version, first, count);
        self.bounded("write", device.write(first * BLOCK_BYTES, data, durability)).await?;
        self.is_written(asked, first, count, durability);
        Ok(())
    }

    fn is_written(&self, asked: Asked, first: u64, count: u64, durability: Durability) {
        if self.answered(asked, true) == Answer::Counts {
            self.tell(|| format!("has changed {first} + {count}, {durability:?}"));
            self.model(|model| model.write_done(first, count, durability == Durability::Fua));
        }
    }

    /// What a former owner does that has not noticed.
    async fn trespass(
        &self,
        device: &Namespace,
        rng: &mut Rng,
        asked: Asked,
        first: u64,
        count: u64,
    ) -> Result<(), BlockError> {
        let (at, bytes) = (first * BLOCK_BYTES, count * BLOCK_BYTES);
        match rng.below(4) {
            0 => self.bounded("flush", device.flush()).await?,
            1 => self.bounded("write zeroes", device.write_zeroes(at, bytes)).await?,
            _ => {
                let data = contents(FORBIDDEN + self.epoch, first, count);
                self.bounded("write", device.write(at, data, Durability::Volatile)).await?;
            }
        }
        self.answered(asked, true);
        Ok(())
    }

    /// A former owner learns that it is one, at the latest when it changes something.
    pub async fn learns_its_end(&self) {
        let Some(device) = self.device() else { return };
        let (asked, mut rng) = (self.asks(), Rng::new(self.epoch));
        if let Err(error) = self.trespass(&device, &mut rng, asked, 1, 1).await {
            self.ends(&error);
        }
    }
}
