//! The keeper of an open array: carries out what is asked of it, rebuilds what waits for a rebuild, and ends what scrubs
//! were interrupted. Where the array is a pool, the keeper has its volumes.
//!
//! What always holds:
//! - One rebuild and one scrub at a time, each at the pace that was asked for last. Both go on when who asked for them goes
//!   away.
//! - An array is shown as a whole, or its volumes are: never both.
//! - A drive stays locked while it may be a member, also when its member is out: it may come back.
//!
//! After a crash the array is opened anew; a rebuild and a scrub go on where their cursors were stored.

use crate::drives::{array_of, check_age, check_members, name_of, sight_all, sight_aside, take};
use crate::enclosures::Enclosures;
use crate::error::ArrayError;
use crate::request::{Pace, Reply, Request};
use crate::run::Keeping;
use crate::status::{self, Io, MemberStatus, OpenBy, PoolStatus, Progress, ScrubResult, Status};
use crate::store::{Store, shut_out};
use crate::volumes::Volumes;
use futures_util::future::{Either, LocalBoxFuture, pending, select, select_all};
use levada_base::ids::Uuid;
use levada_base::reactor::{self, Group, Instant};
use levada_base::sync::{Notify, Semaphore};
use levada_device::{BlockError, Device};
use levada_export_nvmet::{self as nvmet, AnaState};
use levada_export_vhost::Directory;
use levada_health::{Record, Watch};
use levada_raid::{
    self as raid, Array, AssemblyReport, MemberSpec, MemberState, RaidArray, RaidError, Recorded,
    look_until_steady,
};
use levada_spec::HealthSpec;
use levada_volume::{Anyway, Pool, PoolError};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// Between two looks whether drives are still there, of which nobody may ask anything.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// Between two tries of a rebuild that failed although the array goes on.
const REBUILD_AGAIN_AFTER: Duration = Duration::from_secs(5);

/// What helps where a drive is not well.
const ANOTHER: &str = "`levada array fail`, and `levada array replace` with another";

/// What may be missing when an array is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Opening {
    /// Live members that are not given; they are out from then on.
    pub degraded: bool,
    /// As many of them that no majority is left.
    pub force: bool,
}

/// A drive that is, or was, a member.
struct Drive {
    path: PathBuf,
    store: Store,
    member: Uuid,
}

/// See the module.
pub(crate) struct Keeper {
    pub array: RaidArray,
    recorded: Recorded,
    drives: RefCell<Vec<Drive>>,
    /// The file that shows the array.
    pub at: RefCell<Option<PathBuf>>,
    /// Where NBD clients find it.
    pub nbd: RefCell<Vec<String>>,
    /// Where NVMe hosts find it.
    pub nvme: RefCell<Vec<String>>,
    /// The same, as paths.
    pub paths: RefCell<Vec<nvmet::Path>>,
    /// Sockets at which virtual machines find it.
    pub vhost: RefCell<Vec<PathBuf>>,
    /// The same of a pool, as directories with a socket for each volume.
    pub directories: RefCell<Vec<Rc<Directory>>>,
    rebuilds: Cell<bool>,
    pace: Cell<Pace>,
    /// Something happened to a member, or another pace is wanted.
    changed: Notify,
    /// A rebuild ended, one way or the other.
    rebuild_ended: Notify,
    /// How often a rebuild failed, and why it did last.
    failures: RefCell<(u64, String)>,
    /// When the work under way began.
    rebuild_begun: Cell<Option<Instant>>,
    scrub_begun: Cell<Option<Instant>>,
    scrubs: Scrubs,
    last_scrub: RefCell<Option<ScrubResult>>,
    content: RefCell<Content>,
    /// One at a time decides what the array is.
    deciding: Rc<Semaphore>,
    /// Who opened the array: drives that join are opened there.
    group: Group,
    /// Drives without reservations may join.
    has_power_fence: bool,
    /// Of the drives, by the names of members.
    pub health: Watch,
}

/// What the array is to those who use it.
enum Content {
    /// No pool, and nobody uses it.
    Unused,
    /// Shown as one disk, whatever is on it.
    Whole,
    Pool(Rc<Volumes>),
    /// A pool, whose volumes are out of reach.
    Broken(PoolError),
}

/// What is wanted of scrubs, and how they went.
#[derive(Default)]
struct Scrubs {
    wanted: Cell<bool>,
    anew: Cell<bool>,
    pace: Cell<Pace>,
    /// Something else is wanted.
    changed: Notify,
    /// How many ended, and how the last one did; why, if it failed.
    ended: RefCell<(u64, Option<Result<ScrubResult, String>>)>,
    one_ended: Notify,
}

/// What the members are found to be, of an array that can be opened.
async fn may_be_opened(
    recorded: &Recorded,
    drives: &[Drive],
    opening: Opening,
) -> Result<AssemblyReport, ArrayError> {
    let devices: Vec<Rc<dyn Device>> = drives.iter().map(|drive| drive.store.device()).collect();
    let report = RaidArray::examine(recorded.uuid, &devices, opening.force).await?;
    if opening.degraded || opening.force {
        return Ok(report);
    }
    check_age(recorded, drives.iter().map(|drive| &*drive.path), &report)?;
    let is_given = |uuid: Uuid| drives.iter().any(|drive| drive.member == uuid);
    let missing = recorded.members.iter().filter(|it| it.state.is_live() && !is_given(it.uuid));
    let names: Vec<String> = missing.map(|member| member.name.clone()).collect();
    match names.is_empty() {
        true => Ok(report),
        false => Err(ArrayError::Missing { array: recorded.name.clone(), names }),
    }
}

impl Keeper {
    /// Opens the array that these drives belong to. `rebuilds`: what waits for a rebuild gets it without being asked.
    pub async fn open(
        paths: &[PathBuf],
        keeping: &Keeping,
        rebuilds: bool,
    ) -> Result<Rc<Self>, ArrayError> {
        let Keeping { opening, pace, .. } = *keeping;
        let power_fence = keeping.power_fence.as_deref();
        let sighted = sight_all(paths)?;
        let recorded = array_of(&sighted)?;
        check_members(&recorded, &sighted)?;
        let mut drives = Vec::new();
        for drive in &sighted {
            let Some(member) = drive.member_uuid() else { continue };
            let store = Store::open(&drive.path, power_fence.is_some()).await?;
            drives.push(Drive { path: drive.path.clone(), store, member });
        }
        if let Some(command) = power_fence {
            // Who cannot serve takes nobody's power.
            look_until_steady(async || may_be_opened(&recorded, &drives, opening).await).await?;
            let stores: Vec<Store> = drives.iter().map(|drive| drive.store.clone()).collect();
            let Recorded { name, uuid, order, .. } = &recorded;
            shut_out(command, name, *uuid, order.0, paths, &stores).await?;
        }
        // Files are locked now, or all others shut out: nobody changes what is seen. But drives with reservations are others' until they are
        // reserved, and one that is at work may record something on one after the other meanwhile.
        let looking = look_until_steady(async || {
            let recorded = array_of(&sight_all(paths)?).unwrap_or_else(|_| recorded.clone());
            let report = may_be_opened(&recorded, &drives, opening).await?;
            Ok::<_, ArrayError>((recorded, report))
        });
        let (recorded, report) = looking.await?;
        let devices: Vec<Rc<dyn Device>> =
            drives.iter().map(|drive| drive.store.device()).collect();
        // Of an owner that got no further a target may know, and no superblock.
        let mut last = recorded.order.0;
        for drive in &drives {
            drive.store.belongs_to(recorded.uuid, drive.member, false);
            last = last.max(drive.store.owner().await);
        }
        let epoch = last.next();
        if drives.iter().any(|drive| drive.store.is_remote()) {
            for (drive, (_, finding)) in drives.iter().zip(&report.devices) {
                if finding.member_taken().is_some()
                    && let Err(BlockError::Fenced { ours, seen }) = drive.store.reserve(epoch).await
                {
                    return Err(RaidError::Fenced { ours, seen }.into());
                }
            }
            // Reserved now, and so locked: was it still as it was seen?
            let now = RaidArray::examine(recorded.uuid, &devices, opening.force).await?;
            if now != report || now.generation != recorded.order.1 {
                return Err(ArrayError::Changed { array: recorded.name });
            }
        }
        let (array, report) = RaidArray::open(recorded.uuid, devices, epoch, opening.force).await?;
        let is_written = |drive: &&Drive| {
            let members = array.status().members;
            members.iter().any(|m| m.uuid == drive.member && m.state != MemberState::Faulty)
        };
        for drive in drives.iter().filter(is_written) {
            drive.store.belongs_to(recorded.uuid, drive.member, true);
        }
        if !report.missing.is_empty() {
            tracing::warn!(
                array = recorded.name,
                missing = report.missing.join(", "),
                "goes on without"
            );
        }
        array.avoid_slow_members(!keeping.read_slow);
        let content = match Pool::open(shared(&array), &recorded.name).await {
            Ok(Some(pool)) => Content::Pool(Volumes::new(pool)),
            Ok(None) => Content::Unused,
            // Scrubbed, rebuilt and looked at it can be all the same.
            Err(error) => {
                tracing::error!(%error, "volumes are out of reach");
                Content::Broken(error)
            }
        };
        let keeper = Rc::new(Self {
            array,
            recorded,
            drives: RefCell::new(drives),
            at: RefCell::default(),
            nbd: RefCell::default(),
            nvme: RefCell::default(),
            paths: RefCell::default(),
            vhost: RefCell::default(),
            directories: RefCell::default(),
            rebuilds: Cell::new(rebuilds),
            pace: Cell::new(pace),
            changed: Notify::default(),
            rebuild_ended: Notify::default(),
            failures: RefCell::default(),
            rebuild_begun: Cell::default(),
            scrub_begun: Cell::default(),
            scrubs: Scrubs::default(),
            last_scrub: RefCell::default(),
            content: RefCell::new(content),
            deciding: Semaphore::new(1),
            group: reactor::current_group(),
            has_power_fence: power_fence.is_some(),
            health: Watch::default(),
        });
        if rebuilds && keeper.array.status().scrubbed_below > 0 {
            tracing::info!(array = keeper.name(), "the scrub that was interrupted goes on");
            keeper.scrubs.pace.set(pace);
            keeper.scrubs.wanted.set(true);
        }
        keeper.listen();
        Ok(keeper)
    }

    pub fn uuid(&self) -> Uuid {
        self.recorded.uuid
    }

    fn name(&self) -> &str {
        &self.recorded.name
    }

    /// Tells people what happens, and wakes who waits for it.
    fn listen(self: &Rc<Self>) {
        let mut events = self.array.events();
        let keeper = Rc::downgrade(self);
        reactor::spawn(async move {
            while let Some(event) = events.recv().await {
                let Some(keeper) = keeper.upgrade() else { break };
                event.log(keeper.name());
                keeper.changed.notify_all();
            }
        });
    }

    /// Has members tell of their health, as long as this is polled.
    pub async fn look_after_health(self: Rc<Self>) {
        let in_use = || {
            let drives = self.drives.borrow();
            let members = self.array.status().members.into_iter();
            let used = members.filter(|member| member.state.is_live()).filter_map(|member| {
                let drive = drives.iter().find(|drive| drive.member == member.uuid)?;
                Some((member.name, drive.store.clone()))
            });
            used.collect()
        };
        let worn_percent = HealthSpec::default().used_percent;
        let ask = async |store: &Store| store.look_at_health().await;
        let warns = async |store: &Store| store.warned().await;
        self.health.run(in_use, ask, warns, worn_percent).await;
    }

    /// Notices members that are gone, as long as this is polled: also while nothing is asked of them.
    pub async fn look_at_drives(self: Rc<Self>) {
        loop {
            reactor::sleep(LOOK_EVERY).await;
            self.array.look_at_members().await;
        }
    }

    /// Stops the array when a later owner turns out to have one of its drives, as long as this is polled: also while nothing is asked of it.
    pub async fn heed_owners(self: Rc<Self>) {
        while self.array.status().stopped.is_none() {
            let changed = self.changed.changed();
            let stores: Vec<Store> = {
                let members = self.array.status().members;
                let is_live = |drive: &&Drive| {
                    members.iter().any(|m| m.uuid == drive.member && m.state.is_live())
                };
                self.drives.borrow().iter().filter(is_live).map(|it| it.store.clone()).collect()
            };
            let lost = async {
                match stores.is_empty() {
                    true => pending().await,
                    false => select_all(stores.iter().map(|it| Box::pin(it.lost()))).await.0,
                }
            };
            if let Either::Left((seen, _)) = select(pin!(lost), pin!(changed)).await {
                self.array.lose_to(seen);
            }
        }
    }

    /// Rebuilds what waits for it, as long as this is polled.
    pub async fn look_after(self: Rc<Self>) {
        loop {
            let changed = self.changed.changed();
            let waits = self.rebuilds.get()
                && self.array.needs_rebuild()
                && self.array.status().stopped.is_none();
            if !waits {
                self.rebuild_ended.notify_all();
                changed.await;
                continue;
            }
            self.rebuild_begun.set(Some(reactor::now()));
            let pace = self.pace.get();
            let repaced = self.changed.until(|| (self.pace.get() != pace).then_some(()));
            // A rebuild that is dropped pauses, and goes on where it was.
            let failure = match select(pin!(self.array.rebuild(pace.limits())), pin!(repaced)).await
            {
                Either::Left((ended, _)) => ended.err(),
                Either::Right(_) => None,
            };
            self.rebuild_begun.set(None);
            if let Some(error) = failure {
                tracing::error!(array = self.name(), %error, "the rebuild stopped");
                let blocked = self.array.status().rebuild_blocked;
                let why = match blocked {
                    Some(stripe) => format!(
                        "at stripe {stripe}: more is beyond repair than the array can list; write or discard what \
                         cannot be read, or make the drives readable, and rebuild again"
                    ),
                    None => error.to_string(),
                };
                {
                    let mut failures = self.failures.borrow_mut();
                    *failures = (failures.0 + 1, why);
                }
                self.rebuild_ended.notify_all();
                match blocked {
                    // Not by itself: it would end there again.
                    Some(_) => changed.await,
                    None => {
                        select(pin!(reactor::sleep(REBUILD_AGAIN_AFTER)), pin!(changed)).await;
                    }
                }
            }
        }
    }

    async fn carry_out(&self, request: Request) -> Result<Reply, ArrayError> {
        match request {
            Request::Show => self.health.refresh().await,
            Request::Scrub { pace, restart } => {
                return Ok(Reply::Scrubbed(self.scrub(pace, restart).await?));
            }
            Request::Rebuild { pace } => self.rebuild(pace).await?,
            Request::Fail { member } => self.fail(&member).await?,
            Request::Replace { member, new, force } => self.replace(&member, &new, force).await?,
            Request::AddSpare { new, force } => self.add_spare(&new, force).await?,
            Request::Path { path, state } => self.set_path(path, state)?,
            Request::MakePool { force } => self.make_pool(force).await?,
            Request::Volume { order } => self.volumes()?.carry_out(order).await?,
        }
        Ok(Reply::Status(Box::new(self.status())))
    }

    fn set_path(&self, path: usize, state: AnaState) -> Result<(), ArrayError> {
        let paths = self.paths.borrow();
        let found = path.checked_sub(1).and_then(|index| paths.get(index));
        found.ok_or(ArrayError::NoPath { path, count: paths.len() })?.set_state(state);
        Ok(())
    }

    /// The volumes to be shown. `None`: it is no pool, and cannot become one from now on, as the array is shown as a whole.
    pub async fn to_be_shown(&self) -> Result<Option<Rc<Volumes>>, ArrayError> {
        let _turn = self.deciding.acquire(1).await;
        let mut content = self.content.borrow_mut();
        match &*content {
            Content::Pool(volumes) => Ok(Some(Rc::clone(volumes))),
            Content::Broken(error) => Err(error.clone().into()),
            Content::Unused | Content::Whole => {
                *content = Content::Whole;
                Ok(None)
            }
        }
    }

    async fn make_pool(&self, force: bool) -> Result<(), ArrayError> {
        let _turn = self.deciding.acquire(1).await;
        let array = || self.name().to_owned();
        match &*self.content.borrow() {
            Content::Whole => return Err(ArrayError::ShownWhole { array: array() }),
            // Also when its table was damaged meanwhile: somebody may use the volumes.
            Content::Pool(_) => return Err(PoolError::Already { array: array() }.into()),
            Content::Unused | Content::Broken(_) => {}
        }
        let anyway = Anyway { is_meant: force };
        let pool = Pool::make(shared(&self.array), self.name(), anyway).await?;
        *self.content.borrow_mut() = Content::Pool(Volumes::new(pool));
        Ok(())
    }

    fn volumes(&self) -> Result<Rc<Volumes>, ArrayError> {
        match &*self.content.borrow() {
            Content::Pool(volumes) => Ok(Rc::clone(volumes)),
            Content::Broken(error) => Err(error.clone().into()),
            Content::Unused | Content::Whole => {
                Err(ArrayError::NoPool { array: self.name().into() })
            }
        }
    }

    fn pool_status(&self) -> Option<PoolStatus> {
        match &*self.content.borrow() {
            Content::Unused | Content::Whole => None,
            Content::Pool(volumes) => Some(volumes.status()),
            Content::Broken(error) => {
                let (problem, volumes) = (Some(error.to_string()), Vec::new());
                Some(PoolStatus { problem, free_bytes: 0, volumes })
            }
        }
    }

    /// Scrubs when that is wanted, as long as this is polled.
    pub async fn look_after_scrubs(self: Rc<Self>) {
        let scrubs = &self.scrubs;
        loop {
            let changed = scrubs.changed.changed();
            if !scrubs.wanted.get() {
                changed.await;
                continue;
            }
            let (pace, anew) = (scrubs.pace.get(), scrubs.anew.take());
            let is_other = || (scrubs.pace.get() != pace || scrubs.anew.get()).then_some(());
            self.scrub_begun.set(Some(reactor::now()));
            let scrub = async {
                match anew {
                    true => self.array.scrub_anew(pace.limits()).await,
                    false => self.array.scrub(pace.limits()).await,
                }
            };
            // A scrub that is dropped is interrupted, and goes on where it was.
            let ended = match select(pin!(scrub), pin!(scrubs.changed.until(is_other))).await {
                Either::Left((ended, _)) => Some(ended),
                Either::Right(_) => None,
            };
            self.scrub_begun.set(None);
            let Some(ended) = ended else { continue };
            let result = ended.map(|found| ScrubResult {
                name: self.name().into(),
                uuid: self.uuid(),
                stripes: found.stripes,
                skipped: found.skipped,
                unreadable_repaired: found.unreadable_repaired,
                wrong_repaired: found.wrong_repaired,
                mismatched: found.mismatched,
                lost: found.lost,
            });
            match &result {
                Ok(result) => {
                    tracing::info!(array = self.name(), ?result, "scrubbed");
                    *self.last_scrub.borrow_mut() = Some(result.clone());
                }
                Err(error) => tracing::error!(array = self.name(), %error, "the scrub stopped"),
            }
            scrubs.wanted.set(false);
            {
                let mut ended = scrubs.ended.borrow_mut();
                *ended = (ended.0 + 1, Some(result.map_err(|error| error.to_string())));
            }
            scrubs.one_ended.notify_all();
        }
    }

    /// Waits for the end of a scrub: of the one that runs, if one does.
    async fn scrub(&self, pace: Pace, restart: bool) -> Result<ScrubResult, ArrayError> {
        let scrubs = &self.scrubs;
        scrubs.pace.set(self.paced(pace));
        if restart {
            scrubs.anew.set(true);
        }
        scrubs.wanted.set(true);
        scrubs.changed.notify_all();
        let ended_before = scrubs.ended.borrow().0;
        let outcome = scrubs.one_ended.until(|| {
            let (ended, outcome) = &*scrubs.ended.borrow();
            outcome.clone().filter(|_| *ended > ended_before)
        });
        outcome.await.map_err(|why| ArrayError::Scrub { why })
    }

    /// Who asks for no pace gets the one that is in force.
    fn paced(&self, asked: Pace) -> Pace {
        if asked == Pace::default() { self.pace.get() } else { asked }
    }

    /// Waits until nothing waits for a rebuild, or one fails.
    async fn rebuild(&self, pace: Pace) -> Result<(), ArrayError> {
        self.rebuilds.set(true);
        self.pace.set(self.paced(pace));
        let failed_before = self.failures.borrow().0;
        self.changed.notify_all();
        self.rebuild_ended
            .until(|| {
                if let Some(error) = self.array.status().stopped {
                    return Some(Err(error.into()));
                }
                let (failed, why) = &*self.failures.borrow();
                if *failed > failed_before {
                    return Some(Err(ArrayError::Rebuild { why: why.clone() }));
                }
                (!self.array.needs_rebuild()).then_some(Ok(()))
            })
            .await
    }

    /// The member that a person means.
    fn member(&self, word: &str) -> Result<raid::MemberStatus, ArrayError> {
        let members = self.array.status().members;
        if let Some(member) = word.parse().ok().and_then(|index: usize| members.get(index)) {
            return Ok(member.clone());
        }
        let by_path = || {
            let drives = self.drives.borrow();
            let drive = drives.iter().find(|drive| drive.store.is_at(Path::new(word)));
            drive.map(|drive| drive.member)
        };
        let named: Vec<_> = members.iter().filter(|member| member.name == word).collect();
        match named[..] {
            [member] => Ok(member.clone()),
            [] => {
                let uuid = by_path();
                let found = members.iter().find(|member| Some(member.uuid) == uuid);
                found.cloned().ok_or_else(|| {
                    let names: Vec<String> =
                        members.iter().map(|m| format!("{} ({})", m.name, m.index)).collect();
                    ArrayError::NoSuchMember {
                        array: self.name().into(),
                        word: word.into(),
                        members: names.join(", "),
                    }
                })
            }
            _ => {
                let numbers: Vec<String> = named.iter().map(|m| m.index.to_string()).collect();
                Err(ArrayError::Ambiguous {
                    array: self.name().into(),
                    word: word.into(),
                    numbers: numbers.join(", "),
                })
            }
        }
    }

    async fn fail(&self, word: &str) -> Result<(), ArrayError> {
        let member = self.member(word)?;
        if member.state == MemberState::Faulty {
            return Err(ArrayError::OutAlready { member: member.name });
        }
        match self.array.fail(member.index).await {
            Err(RaidError::Member { .. }) => Err(ArrayError::LastCopy { member: member.name }),
            failed => Ok(failed?),
        }
    }

    async fn replace(&self, word: &str, new: &Path, force: bool) -> Result<(), ArrayError> {
        let member = self.member(word)?;
        if member.state != MemberState::Faulty {
            return Err(ArrayError::NotOut { member: member.name });
        }
        let (with, device) = self.newcomer(new, force, Some(member.index)).await?;
        let uuid = with.uuid;
        self.array.replace(member.index, with).await?;
        self.drives.borrow_mut().retain(|drive| drive.member != member.uuid);
        self.admitted(new, device, uuid);
        Ok(())
    }

    async fn add_spare(&self, new: &Path, force: bool) -> Result<(), ArrayError> {
        let (with, device) = self.newcomer(new, force, None).await?;
        let uuid = with.uuid;
        self.array.add_spare(with).await?;
        self.admitted(new, device, uuid);
        Ok(())
    }

    /// A drive that is to be a member, in the place of number `instead`.
    async fn newcomer(
        &self,
        new: &Path,
        force: bool,
        instead: Option<usize>,
    ) -> Result<(MemberSpec, Store), ArrayError> {
        let members = self.array.status().members;
        let (held, earlier) = {
            let drives = self.drives.borrow();
            let there = drives.iter().filter(|drive| drive.store.is_at(new));
            let (given_up, held): (Vec<_>, Vec<_>) =
                there.partition(|drive| drive.store.is_given_up());
            let held = held.first().map(|drive| (drive.store.clone(), drive.member));
            (held, given_up.last().map(|drive| drive.store.clone()))
        };
        let device = match held {
            // Ours, and locked by us.
            Some((device, uuid)) => {
                let live = |m: &&raid::MemberStatus| m.uuid == uuid && m.state.is_live();
                if let Some(member) = members.iter().find(live) {
                    let (path, member) = (new.into(), member.name.clone());
                    return Err(ArrayError::InUseHere { path, member });
                }
                device
            }
            // What its connections need outlives who asks for it, and the desk: the array is closed after that.
            None => {
                let (new, array, fence) = (new.to_owned(), self.uuid(), self.has_power_fence);
                let epoch = self.array.epoch();
                let taking = async move { take(&new, array, epoch, force, fence, earlier).await };
                let taken = reactor::spawn_in(&self.group, taking).await;
                taken.ok_or(ArrayError::Interrupted)??
            }
        };
        device.belongs_nowhere();
        let others = members.iter().filter(|member| Some(member.index) != instead);
        let taken: BTreeSet<String> = others.map(|member| member.name.clone()).collect();
        let name = name_of(new, &taken);
        // The member itself, come back, need not get everything, unless that is asked for.
        let uuid = sight_aside(new).await?.member_uuid().filter(|uuid| {
            !force && members.iter().any(|m| Some(m.index) == instead && m.uuid == *uuid)
        });
        let spec = MemberSpec {
            device: device.device(),
            uuid: uuid.unwrap_or_else(Uuid::new_v4),
            name,
            enclosure: self.enclosures().number(new),
        };
        Ok((spec, device))
    }

    fn enclosures(&self) -> Enclosures {
        let members = self.array.status().members;
        let drives = self.drives.borrow();
        let known = drives.iter().filter_map(|drive| {
            let member = members.iter().find(|member| member.uuid == drive.member)?;
            Some((&*drive.path, member.enclosure))
        });
        Enclosures::of(known)
    }

    fn admitted(&self, new: &Path, store: Store, member: Uuid) {
        let mut drives = self.drives.borrow_mut();
        drives.retain(|drive| !drive.store.is(&store));
        store.belongs_to(self.uuid(), member, true);
        drives.push(Drive { path: new.into(), store, member });
        self.changed.notify_all();
    }

    /// The array as it is now.
    pub fn status(&self) -> Status {
        let now = self.array.status();
        let drives = self.drives.borrow();
        let path_of = |uuid: Uuid| {
            drives.iter().find(|drive| drive.member == uuid).map(|drive| drive.path.clone())
        };
        let slots = self.recorded.data_bytes / self.recorded.chunk_bytes;
        let member = |member: &raid::MemberStatus| MemberStatus {
            index: member.index,
            name: member.name.clone(),
            uuid: member.uuid,
            path: path_of(member.uuid),
            role: member.role,
            state: status::word_of(member.state).into(),
            catches_up: member.catches_up,
            rebuilt_percent: status::percent_of(member.state, slots),
            slow: member.slow,
            io: Some(Io::from(member)),
            paths: drives
                .iter()
                .find(|drive| drive.member == member.uuid)
                .map_or_else(Vec::new, |drive| drive.store.paths()),
            health: self.health.with(&member.name, Record::shown),
            problem: self.health.with(&member.name, |record| record.problem(ANOTHER)).flatten(),
        };
        let since =
            |begun: &Cell<Option<Instant>>| begun.get().map_or(Duration::ZERO, Instant::elapsed);
        let progress = |of: &Option<raid::Progress>, begun: &Cell<Option<Instant>>| {
            of.as_ref().map(|progress| Progress::of(progress, since(begun)))
        };
        let open_by = OpenBy {
            pid: std::process::id(),
            at: self.at.borrow().clone(),
            nbd: self.nbd.borrow().clone(),
            nvme: self.nvme.borrow().clone(),
            nvme_states: self.paths.borrow().iter().map(nvmet::Path::state).collect(),
            vhost: self.vhost.borrow().clone(),
            vhost_problem: self.directories.borrow().iter().find_map(|at| at.problem()),
        };
        let mut status = Status {
            open_by: Some(open_by),
            problem: now.stopped.as_ref().map(ToString::to_string),
            lost: now.degraded,
            stripes_written: Some(now.stripes_written),
            lost_blocks: Some(now.lost_blocks),
            generation: now.generation,
            members: now.members.iter().map(member).collect(),
            rebuild: progress(&now.rebuild, &self.rebuild_begun),
            rebuild_blocked: now.rebuild_blocked,
            scrub: progress(&now.scrub, &self.scrub_begun),
            scrubbed_below: now.scrubbed_below,
            last_scrub: self.last_scrub.borrow().clone(),
            pool: self.pool_status(),
            ..Status::recorded(&self.recorded)
        };
        status.judge();
        status
    }
}

fn shared(array: &RaidArray) -> Rc<dyn Array> {
    Rc::new(array.clone())
}

/// Who answers at the desk.
pub(crate) struct Clerk(pub Rc<Keeper>);

impl levada_desk::Clerk for Clerk {
    type Request = Request;
    type Reply = Reply;

    fn answer(&self, request: Request) -> LocalBoxFuture<'_, Reply> {
        Box::pin(async move {
            let carried_out = self.0.carry_out(request).await;
            carried_out.unwrap_or_else(|error| Reply::Failed { why: error.to_string() })
        })
    }

    fn refuse(&self, why: String) -> Reply {
        Reply::Failed { why }
    }
}
