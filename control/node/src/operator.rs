//! The operator's view of a running node: status, drives, scrub.

mod returns;
mod scrub;
mod shown;
mod spares;

use crate::arrays::{self, ClusterArray};
use crate::assembly::Cluster;
use crate::control::{ControlReply, ControlRequest, ObjectScrub, Traffic};
use crate::drives::{self, DriveSource, Intake, NoDevice};
use crate::exports::{Exporter, NoPath};
use crate::fsck::{self, CheckConfig, Checks};
use crate::quota;
use crate::recorded::{self, Differences, OnDrives};
use crate::volumes::{VolumeRefusal, Volumes};
use futures_util::future::{Either, pending, select, select_all};
use levada_base::Epoch;
use levada_base::reactor::{self, Instant};
use levada_base::sync::{Notify, Permit, Semaphore};
use levada_device::{BlockError, Drive};
use levada_health::Watch;
use levada_meta::FsckConfig;
use levada_raid::MemberState;
use levada_spec::{Bytes, ClusterFile, DriveSpec, ExportWay, SubtreeError, SubtreePath};
use levada_volume::Tenant;
use returns::{Looking, Returns};
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::pin::pin;
use std::rc::Rc;

/// A drive as the cluster file has it, open, or why it is not.
type KnownDrive = (DriveSpec, Result<Rc<Drive>, String>);

/// Answers what people ask of a node.
pub struct Operator {
    cluster: Rc<Cluster>,
    source: Rc<dyn DriveSource>,
    /// The cluster file, read again when drives change.
    file: PathBuf,
    address: String,
    /// Wakes whoever looks after the arrays.
    changed: Rc<Notify>,
    volumes: Rc<Volumes>,
    exports: OnceCell<Rc<Exporter>>,
    start: Instant,
    /// Tells this start from others.
    life: u64,
    /// Drives as they are now: those replaced or added since the start stand before the
    /// cluster's own.
    drives: RefCell<BTreeMap<String, KnownDrive>>,
    /// The cluster file as it was when a drive came in last.
    latest: RefCell<ClusterFile>,
    /// Drives come in one after the other: an order to replace or add one looks at what is there, formats
    /// the drive and gives it to array after array. Nothing waits to fail one, which is what helps
    /// when a drive hangs.
    admitting: Rc<Semaphore>,
    returns: Rc<Returns>,
    /// Why nobody takes the place of what is lost, for people.
    no_help: RefCell<Vec<String>>,
    health: Watch,
    traffic: Cell<Traffic>,
    checks: Checks,
    scrubbing: Cell<bool>,
    /// While objects are scrubbed: since when, and how many targets are done.
    objects_scrubbed: Cell<Option<(Instant, usize)>>,
    /// By target, the last scrub of its objects that came to its end, also in an earlier life.
    scrubbed: RefCell<BTreeMap<String, ObjectScrub>>,
}

/// Why an order cannot be carried out.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error(
        "tenant {tenant} has no path {path} over NVMe/TCP: there are {count}, numbered from 1 on"
    )]
    NoPath { tenant: Tenant, path: usize, count: usize },
    #[error("nobody can come over path {path} of tenant {tenant}: {why}")]
    SilentPath { tenant: Tenant, path: usize, why: String },
    #[error("{path:?} is no directory to show by itself: {reason}")]
    NoSubtree { path: String, reason: SubtreeError },
    #[error(
        "an [[export]] shows {subtree} to guests of tenant {tenant}: take that out of the cluster file first, and `levada umount` \
         its socket"
    )]
    HasSubtree { tenant: Tenant, subtree: SubtreePath },
    #[error("there is no drive {drive:?}; there are {known}")]
    NoSuchDrive { drive: String, known: String },
    #[error("drive {drive} is in use; take it out with `levada drive fail {drive}` first")]
    InUse { drive: String },
    #[error(
        "drive {drive} serves from what is not at {} any more, and its rebuild would be lost with it at the next \
         start: put that back, or take it out with `levada drive fail {drive}` and replace it by what is there now",
        path.display()
    )]
    NotInPlace { drive: String, path: PathBuf },
    #[error("drive {drive} is in use already")]
    Known { drive: String },
    #[error(
        "drive {drive} gives array {array} a slice of {slice}, and {needed} are needed; nothing was changed"
    )]
    TooSmall { drive: String, array: String, slice: Bytes, needed: Bytes },
    #[error("a scrub is running already")]
    Scrubbing,
    #[error(transparent)]
    Checking(#[from] fsck::Running),
    #[error("no check is running")]
    NoCheck,
    #[error(transparent)]
    Quota(quota::QuotaError),
    #[error(transparent)]
    Volume(#[from] VolumeRefusal),
    #[error(transparent)]
    Spec(#[from] levada_spec::SpecError),
    #[error("drive {drive}: {source}")]
    NoDevice { drive: String, source: NoDevice },
    #[error(transparent)]
    Drives(#[from] drives::DrivesError),
    #[error(transparent)]
    Array(#[from] arrays::ArrayError),
    #[error(transparent)]
    Fail(#[from] arrays::FailError),
    #[error("drive {drive} is not in {}, which has {known}; write it there first", .file.display())]
    NotInFile { drive: String, file: PathBuf, known: String },
    #[error(
        "the cluster file must say what there is once drive {drive} is in; nothing was changed:{differences}"
    )]
    Changed { drive: String, differences: Differences },
}

impl Operator {
    /// An operator of `cluster`.
    #[must_use]
    pub fn new(
        cluster: Rc<Cluster>,
        source: Rc<dyn DriveSource>,
        file: PathBuf,
        address: String,
        changed: Rc<Notify>,
        volumes: Rc<Volumes>,
    ) -> Rc<Self> {
        let drives = cluster
            .drives
            .drives
            .iter()
            .map(|drive| (drive.spec.name.clone(), (drive.spec.clone(), drive.found.clone())));
        Rc::new(Self {
            drives: RefCell::new(drives.collect()),
            latest: RefCell::new(cluster.file.clone()),
            source,
            file,
            address,
            changed,
            volumes,
            exports: OnceCell::new(),
            start: reactor::now(),
            // As much as a program that takes JSON's numbers for floating ones keeps.
            life: reactor::random_u64() >> 11,
            admitting: Semaphore::new(1),
            returns: Rc::default(),
            no_help: RefCell::default(),
            health: Watch::default(),
            traffic: Cell::default(),
            checks: Checks::default(),
            scrubbing: Cell::new(false),
            objects_scrubbed: Cell::new(None),
            scrubbed: RefCell::default(),
            cluster,
        })
    }

    /// Shows these exports, too.
    pub fn show_exports(&self, exports: Rc<Exporter>) {
        // There is one.
        let _first = self.exports.set(exports);
    }

    /// Looks after the health of the drives for as long as the caller's group lives.
    pub async fn watch_health(self: Rc<Self>) {
        let in_use = || {
            let drives = self.drives.borrow();
            let open = drives.iter().filter_map(|(name, (_, found))| {
                let drive = found.as_ref().ok().filter(|drive| !drive.is_failed())?;
                Some((name.clone(), Rc::clone(drive)))
            });
            open.collect()
        };
        let ask =
            async |drive: &Rc<Drive>| self.source.look_at_health(&drive.device().info().name).await;
        let warns = async |drive: &Rc<Drive>| self.source.warned(&drive.device().info().name).await;
        self.health.run(in_use, ask, warns, self.cluster.file.health.used_percent).await;
    }

    /// Stops arrays whose drives another server has taken, for as long as the caller's group lives: also while nothing is asked of them.
    pub async fn heed_owners(self: Rc<Self>) {
        loop {
            let change = self.changed.changed();
            let open: Vec<Rc<Drive>> = {
                let drives = self.drives.borrow();
                let open = drives.iter().filter(|(name, _)| self.serves_from(name));
                open.filter_map(|(_, (_, found))| found.as_ref().ok().map(Rc::clone)).collect()
            };
            let source = &self.source;
            let lost = open.iter().map(|drive| Box::pin(source.lost(&drive.device().info().name)));
            let lost = async {
                match open.is_empty() {
                    true => pending().await,
                    false => select_all(lost).await.0,
                }
            };
            if let Either::Left((seen, _)) = select(pin!(lost), pin!(change)).await {
                self.lose_to(seen);
            }
        }
    }

    /// An array that no later owner is known to have has a live member on the drive: one that is out may be anybody's by now.
    fn serves_from(&self, drive: &str) -> bool {
        self.cluster.arrays.iter().any(|array| {
            let status = array.array.status();
            let is_fenced = matches!(status.stopped, Some(BlockError::Fenced { .. }));
            !is_fenced && status.members.iter().any(|it| it.name == drive && it.state.is_live())
        })
    }

    /// `seen`, a later owner, has a drive of the cluster: it has or will have the others, so nothing is answered any more.
    fn lose_to(&self, seen: Epoch) {
        for array in &self.cluster.arrays {
            array.array.lose_to(seen);
        }
        self.changed.notify_all();
    }

    /// Carries a request out.
    pub async fn answer(self: &Rc<Self>, request: ControlRequest) -> ControlReply {
        let done = match request {
            ControlRequest::Status => {
                self.health.refresh().await;
                return ControlReply::Status(Box::new(self.status()));
            }
            ControlRequest::Meters => return ControlReply::Meters(Box::new(self.meters())),
            ControlRequest::DriveFail { drive, force } => self.fail(&drive, force).await,
            ControlRequest::DriveReplace { drive, force } => self.replace(&drive, force).await,
            ControlRequest::DriveAdd { drive, force } => self.add(&drive, force).await,
            ControlRequest::Scrub => self.scrub(),
            ControlRequest::Fsck { memory_bytes, fast } => {
                let metadata = FsckConfig { memory_bytes, yields: !fast };
                let config = CheckConfig { metadata, patience: None };
                match self.checks.start(&self.cluster, config) {
                    Ok(number) => return ControlReply::FsckStarted { number },
                    Err(running) => Err(running.into()),
                }
            }
            ControlRequest::FsckState { from } => match self.checks.state(from) {
                Some(state) => return ControlReply::Fsck(Box::new(state)),
                None => Err(Refusal::NoCheck),
            },
            ControlRequest::QuotaSet { who, change } => {
                quota::set(&self.cluster, who, change).await.map_err(Refusal::Quota)
            }
            ControlRequest::Quotas { who } => match quota::show(&self.cluster, who) {
                Ok(quotas) => return ControlReply::Quotas { quotas },
                Err(error) => Err(Refusal::Quota(error)),
            },
            ControlRequest::ProjectSet { path, project, recursive } => {
                let set = quota::set_project(&self.cluster, &path, project, recursive);
                set.await.map_err(Refusal::Quota)
            }
            ControlRequest::Volume { order } => {
                self.volumes.carry_out(order).await.map_err(Refusal::Volume)
            }
            ControlRequest::TenantSet { tenant, change, capacity_bytes } => {
                let set = self.volumes.set_tenant(&tenant, change, capacity_bytes);
                set.await.map_err(Refusal::Volume)
            }
            ControlRequest::TenantPath { tenant, path, state } => {
                let none = Err(NoPath::Number { count: 0 });
                let set = |all: &Rc<Exporter>| all.set_path(&tenant, path, state);
                self.exports.get().map_or(none, set).map_err(|no_path| match no_path {
                    NoPath::Number { count } => Refusal::NoPath { tenant, path, count },
                    NoPath::Silent { why } => Refusal::SilentPath { tenant, path, why },
                })
            }
            ControlRequest::TenantDelete { tenant } => self.delete_tenant(&tenant).await,
            ControlRequest::SubtreeGive { path, tenant } => match path.parse() {
                Ok(path) => match self.volumes.give_subtree(&path, &tenant).await {
                    Ok(number) => return ControlReply::SubtreeOf { number },
                    Err(refusal) => Err(Refusal::Volume(refusal)),
                },
                Err(reason) => Err(Refusal::NoSubtree { path, reason }),
            },
            ControlRequest::Tenants => match self.volumes.tenants().await {
                Ok(tenants) => return ControlReply::Tenants { tenants },
                Err(refusal) => Err(Refusal::Volume(refusal)),
            },
            ControlRequest::Volumes { tenant } => match self.volumes.list(tenant.as_ref()).await {
                Ok(volumes) => return ControlReply::Volumes { volumes },
                Err(refusal) => Err(Refusal::Volume(refusal)),
            },
            ControlRequest::Snapshots { of } => match self.volumes.snapshots(of.as_ref()).await {
                Ok(snapshots) => return ControlReply::Snapshots { snapshots },
                Err(refusal) => Err(Refusal::Volume(refusal)),
            },
            ControlRequest::FsckStop if self.checks.stop() => Ok(()),
            ControlRequest::FsckStop => Err(Refusal::NoCheck),
            // The process's main loop carries this one out.
            ControlRequest::Down => Ok(()),
        };
        match done {
            Ok(()) => ControlReply::Done,
            Err(refusal) => ControlReply::Failed { why: refusal.to_string() },
        }
    }

    /// Forgets a tenant, of whom the cluster file, as it is now, shows nothing to guests: they would go on without its limits.
    async fn delete_tenant(&self, tenant: &Tenant) -> Result<(), Refusal> {
        let file = ClusterFile::load(&self.file)?.cluster;
        for export in file.exports {
            if let ExportWay::Virtiofs { subtree, .. } = export.way
                && export.tenant == tenant.as_str()
            {
                return Err(Refusal::HasSubtree { tenant: tenant.clone(), subtree });
            }
        }
        Ok(self.volumes.delete_tenant(tenant).await?)
    }

    fn drive(&self, name: &str) -> Result<KnownDrive, Refusal> {
        let drives = self.drives.borrow();
        drives.get(name).cloned().ok_or_else(|| Refusal::NoSuchDrive {
            drive: name.to_owned(),
            known: drives.keys().cloned().collect::<Vec<_>>().join(", "),
        })
    }

    async fn fail(&self, name: &str, force: bool) -> Result<(), Refusal> {
        let (_, drive) = self.drive(name)?;
        let failed =
            arrays::fail_drive(&self.cluster.arrays, name, drive.as_ref().ok(), force).await;
        self.changed.notify_all();
        Ok(failed?)
    }

    /// The drive as the cluster file has it now, and that file, which else must say of the cluster
    /// what it is, as at the next start.
    fn reread(&self, name: &str) -> Result<(ClusterFile, DriveSpec), Refusal> {
        let file = ClusterFile::load(&self.file)?.cluster;
        let spec = file.drive(name).cloned().ok_or_else(|| Refusal::NotInFile {
            drive: name.to_owned(),
            file: self.file.clone(),
            known: file
                .drives
                .iter()
                .map(|drive| drive.name.clone())
                .collect::<Vec<_>>()
                .join(", "),
        })?;
        let drives = self.drives.borrow();
        let others = drives.iter().filter(|(other, _)| *other != name);
        let labels = others
            .filter_map(|(_, (_, drive))| Some(drive.as_ref().ok()?.label().clone()))
            .collect();
        let arrays: Vec<_> = self.cluster.arrays.iter().map(|array| array.array.status()).collect();
        let holder = self.cluster.file.filesystems.iter().map(|fs| fs.metadata.clone()).next();
        let table = (holder.unwrap_or_default(), self.cluster.table.clone());
        let differences = OnDrives::of(labels, &arrays, table).differences(&file, Some(name));
        if !differences.0.is_empty() {
            return Err(Refusal::Changed { drive: name.to_owned(), differences });
        }
        Ok((file, spec))
    }

    /// A turn of [`Operator::admitting`] for a drive that nobody takes back meanwhile: who opens it anew shuts out whoever had it open.
    async fn turn_for(&self, name: &str) -> (Permit, Looking) {
        loop {
            let turn = self.admitting.acquire(1).await;
            if let Some(looking) = Looking::begin(&self.returns, name) {
                return (turn, looking);
            }
            drop(turn);
            self.returns.nobody_looks_for(name).await;
        }
    }

    async fn replace(&self, name: &str, force: bool) -> Result<(), Refusal> {
        let _turn = self.turn_for(name).await;
        let (known, old) = self.drive(name)?;
        match &old {
            Ok(drive) if !drive.is_failed() && !self.is_out(name) => {
                self.readmit(&known, drive).await
            }
            _ => self.admit(name, old.ok(), Intake::Replace, force).await,
        }
    }

    /// Gives a drive that is ours already to the arrays that are without it: some lost it, or an
    /// order to take it was cut short.
    async fn readmit(&self, known: &DriveSpec, drive: &Rc<Drive>) -> Result<(), Refusal> {
        let name = &known.name;
        let (file, spec) = self.reread(name)?;
        let is_without =
            |array: &&Rc<ClusterArray>| array.is_without(name) || is_promised(array, drive);
        let without: Vec<_> = self.cluster.arrays.iter().filter(is_without).collect();
        // Another drive in its place would take it from the arrays that it serves.
        if without.is_empty() || spec != *known {
            return Err(Refusal::InUse { drive: name.clone() });
        }
        if !self.source.in_place(known) {
            return Err(Refusal::NotInPlace { drive: name.clone(), path: known.path.clone() });
        }
        for array in without {
            let admitted = array.admit(&file, name, drive).await;
            admitted
                .map_err(|source| arrays::ArrayError { array: array.spec.name.clone(), source })?;
        }
        self.returns.forget(name);
        self.changed.notify_all();
        Ok(())
    }

    async fn add(&self, name: &str, force: bool) -> Result<(), Refusal> {
        let _turn = self.turn_for(name).await;
        let known = self.drives.borrow().get(name).cloned();
        let arrays = &self.cluster.arrays;
        match known {
            None => self.admit(name, None, Intake::Add, force).await,
            // Taken before, and not to the end.
            Some((spec, Ok(drive))) if arrays.iter().any(|array| is_promised(array, &drive)) => {
                self.readmit(&spec, &drive).await
            }
            // The file had it before it was there.
            Some((_, Err(_))) if arrays.iter().all(|array| array.member_on(name).is_none()) => {
                self.admit(name, None, Intake::Add, force).await
            }
            Some(_) => Err(Refusal::Known { drive: name.to_owned() }),
        }
    }

    /// True when no array uses the drive any more.
    fn is_out(&self, name: &str) -> bool {
        self.cluster.arrays.iter().all(|array| {
            let members = array.array.status().members;
            let mut on_drive = members.iter().filter(|member| member.name == name);
            on_drive.all(|member| member.state == MemberState::Faulty)
        })
    }

    /// Formats the drive and gives it to every array that lists it.
    async fn admit(
        &self,
        name: &str,
        old: Option<Rc<Drive>>,
        intake: Intake,
        force: bool,
    ) -> Result<(), Refusal> {
        let (file, spec) = self.reread(name)?;
        let known = self.drives.borrow().get(name).map(|(known, _)| known.path.clone());
        let is_same_place =
            known.is_some_and(|path| path == spec.path) && self.source.in_place(&spec);
        let failed = |source| Refusal::NoDevice { drive: name.to_owned(), source };
        if let Some(size) = spec.size {
            // Before its file is made.
            self.refuse_small(&file, name, size).await?;
        }
        let device = match self.source.open(&spec).await {
            Ok(device) => device,
            Err(none) if none.can_be_made(&spec) => {
                self.source.create(&spec).await.map_err(failed)?
            }
            // Still open here: the drive that failed comes back. Not when another was named, or
            // is there, which alone would be found at the next start.
            Err(error) => match old.filter(|_| is_same_place) {
                Some(old) => Rc::clone(old.device()),
                None => return Err(failed(error)),
            },
        };
        self.refuse_small(&file, name, Bytes(device.info().capacity_bytes)).await?;
        let drive = drives::format_one(
            &*self.source,
            &file,
            &spec,
            device,
            &self.cluster.drives,
            intake,
            force,
        )
        .await?;
        // It is ours from here on: where an array does not take it, the same order completes it.
        let known = (spec, Ok(Rc::clone(&drive)));
        self.drives.borrow_mut().insert(name.to_owned(), known);
        self.latest.replace(file.clone());
        for array in &self.cluster.arrays {
            let admitted = array.admit(&file, name, &drive).await;
            admitted
                .map_err(|source| arrays::ArrayError { array: array.spec.name.clone(), source })?;
        }
        self.returns.forget(name);
        self.changed.notify_all();
        Ok(())
    }

    /// Looks whether every array that lists the drive could take it, before any of them does.
    async fn refuse_small(
        &self,
        file: &ClusterFile,
        name: &str,
        capacity: Bytes,
    ) -> Result<(), Refusal> {
        let listing = self.cluster.arrays.iter().filter_map(|array| {
            let spec = file.array(&array.spec.name)?;
            spec.drives.iter().any(|drive| drive == name).then_some((array, spec))
        });
        for (array, spec) in listing {
            let slice = file.slice_bytes(spec, name, capacity).unwrap_or_default();
            match self.needed_bytes(array).await {
                Some(needed) if slice < needed => {
                    let (drive, array) = (name.to_owned(), spec.name.clone());
                    return Err(Refusal::TooSmall { drive, array, slice, needed });
                }
                // Where no member can be read, the array finds out when it takes the drive.
                Some(_) | None => {}
            }
        }
        Ok(())
    }

    /// Bytes that an array uses of each member, by the first that can be read.
    async fn needed_bytes(&self, array: &ClusterArray) -> Option<Bytes> {
        let status = array.array.status();
        let live = status.members.iter().filter(|member| member.state != MemberState::Faulty);
        for member in live {
            let known = self.drives.borrow().get(&member.name).cloned();
            let Some((_, Ok(drive))) = known else { continue };
            let Some(slice) = drive.slice_of(status.uuid) else { continue };
            if let Some(bytes) = recorded::member_bytes(slice, &status).await {
                return Some(Bytes(bytes));
            }
        }
        None
    }
}

/// True when the drive has room for the array, and the array never took it: taking a drive goes from
/// array to array and was cut short, or the file named more drives than the array deals out.
fn is_promised(array: &ClusterArray, drive: &Rc<Drive>) -> bool {
    let name = drive.label().drive_name.clone();
    array.member_on(&name).is_none() && drive.slice_of(array.array.status().uuid).is_some()
}
