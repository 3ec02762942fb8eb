//! The operator's view of a running node: status, drives, scrub.

use crate::arrays::{self, ClusterArray};
use crate::assembly::{Cluster, Service};
use crate::control::{
    ArrayStatus, ClientStatus, ControlReply, ControlRequest, DriveStatus, MemberStatus, Progress,
    ScrubResult, Segments, Status, TargetStatus, Traffic,
};
use crate::drives::{self, DriveSource, Intake, NoDevice};
use crate::fsck::{self, CheckConfig, Checks};
use crate::meters::{CacheMeters, DriveMeters, Meters, OpMeters, TargetMeters, percentiles};
use crate::quota;
use crate::recorded::{self, Differences, OnDrives};
use crate::targets::TargetKind;
use levada_base::reactor::{self, Instant};
use levada_base::sync::{Notify, Semaphore};
use levada_device::Drive;
use levada_kv::KvError;
use levada_log::ObjectLog;
use levada_meta::FsckConfig;
use levada_raid::{Level, Limits, MemberState};
use levada_spec::{Bytes, ClusterFile, DriveSpec};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

/// Throughput "now" is that of so much time.
const MEASURE_EVERY: Duration = Duration::from_secs(1);

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
    start: Instant,
    /// Tells this start from others.
    life: u64,
    /// Drives as they are now: those replaced or added since the start stand before the
    /// cluster's own.
    drives: RefCell<BTreeMap<String, KnownDrive>>,
    /// Drives come in one after the other: an order to replace or add one looks at what is there, formats
    /// the drive and gives it to array after array. Nothing waits to fail one, which is what helps
    /// when a drive hangs.
    admitting: Rc<Semaphore>,
    traffic: Cell<Traffic>,
    checks: Checks,
    scrubbing: Cell<bool>,
    /// While objects are scrubbed: since when, and how many targets are done.
    objects_scrubbed: Cell<Option<(Instant, usize)>>,
}

/// Why an order cannot be carried out.
#[derive(Debug, thiserror::Error)]
enum Refusal {
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
    ) -> Rc<Self> {
        let drives = cluster
            .drives
            .drives
            .iter()
            .map(|drive| (drive.spec.name.clone(), (drive.spec.clone(), drive.found.clone())));
        Rc::new(Self {
            drives: RefCell::new(drives.collect()),
            source,
            file,
            address,
            changed,
            start: reactor::now(),
            // As much as a program that takes JSON's numbers for floating ones keeps.
            life: reactor::random_u64() >> 11,
            admitting: Semaphore::new(1),
            traffic: Cell::default(),
            checks: Checks::default(),
            scrubbing: Cell::new(false),
            objects_scrubbed: Cell::new(None),
            cluster,
        })
    }

    /// Carries a request out.
    pub async fn answer(self: &Rc<Self>, request: ControlRequest) -> ControlReply {
        let done = match request {
            ControlRequest::Status => return ControlReply::Status(Box::new(self.status())),
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

    async fn replace(&self, name: &str, force: bool) -> Result<(), Refusal> {
        let _turn = self.admitting.acquire(1).await;
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
        self.changed.notify_all();
        Ok(())
    }

    async fn add(&self, name: &str, force: bool) -> Result<(), Refusal> {
        let _turn = self.admitting.acquire(1).await;
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
        let drive =
            drives::format_one(&file, &spec, device, &self.cluster.drives, intake, force).await?;
        // It is ours from here on: where an array does not take it, the same order completes it.
        let known = (spec, Ok(Rc::clone(&drive)));
        self.drives.borrow_mut().insert(name.to_owned(), known);
        for array in &self.cluster.arrays {
            let admitted = array.admit(&file, name, &drive).await;
            admitted
                .map_err(|source| arrays::ArrayError { array: array.spec.name.clone(), source })?;
        }
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

    fn scrub(self: &Rc<Self>) -> Result<(), Refusal> {
        if self.scrubbing.replace(true) {
            return Err(Refusal::Scrubbing);
        }
        for array in &self.cluster.arrays {
            array.last_scrub.take();
        }
        let operator = Rc::clone(self);
        // A task of its own: whoever asked may go away.
        reactor::spawn(async move {
            operator.scrub_everything().await;
            operator.scrubbing.set(false);
        });
        Ok(())
    }

    /// Metadata first, then objects, and what holds these last: an array only knows that chunks disagree, and may
    /// take a rotten one for the truth; an object log knows which bytes are right, and what it has put right agrees.
    async fn scrub_everything(&self) {
        let (data, others): (Vec<_>, Vec<_>) =
            self.cluster.arrays.iter().partition(|array| self.holds_objects(array));
        for array in others {
            *array.last_scrub.borrow_mut() = Some(scrub_array(array).await);
        }
        let objects = self.scrub_objects().await;
        for array in data {
            let result = if objects.unrepairable == 0 && objects.not_checked.is_empty() {
                scrub_array(array).await
            } else {
                let name = &array.spec.name;
                let left = format!(
                    "array {name}: its redundancy is left as it is while objects on it are damaged or not checked"
                );
                ScrubResult { not_checked: vec![left], ..ScrubResult::default() }
            };
            *array.last_scrub.borrow_mut() = Some(ScrubResult {
                repaired: objects.repaired + result.repaired,
                unrepairable: objects.unrepairable + result.unrepairable,
                not_checked: [objects.not_checked.clone(), result.not_checked].concat(),
                ..result
            });
        }
    }

    /// Scrubs every object target.
    async fn scrub_objects(&self) -> ScrubResult {
        let mut found = ScrubResult::default();
        for target in &self.cluster.targets {
            if let (TargetKind::Objects, Service::Stopped { why }) =
                (target.entry.kind, &target.service)
            {
                let left_out = format!("target {} is stopped: {why}", target.entry.name());
                found.not_checked.push(left_out);
            }
        }
        let begun = reactor::now();
        for (done, (name, log)) in self.object_logs().enumerate() {
            self.objects_scrubbed.set(Some((begun, done)));
            match log.scrub().await {
                Ok(report) => {
                    for (object, offset, bytes) in &report.damaged {
                        tracing::error!(target = name, ?object, offset, bytes, "beyond repair");
                    }
                    tracing::info!(
                        target = name,
                        objects = report.objects,
                        bytes = report.bytes,
                        repaired_blocks = report.repaired_blocks,
                        "objects scrubbed"
                    );
                    found.repaired += report.repaired_blocks;
                    found.unrepairable += report.damaged.len() as u64;
                }
                Err(error) => {
                    tracing::error!(target = name, %error, "the scrub of objects stopped");
                    found.not_checked.push(format!("target {name}: {error}"));
                }
            }
        }
        self.objects_scrubbed.set(None);
        found
    }

    fn object_logs(&self) -> impl Iterator<Item = (String, &ObjectLog)> {
        self.cluster.targets.iter().filter_map(|target| match &target.service {
            Service::Objects { log, .. } => Some((target.entry.name(), log)),
            Service::Metadata { .. } | Service::Stopped { .. } => None,
        })
    }

    fn holds_objects(&self, array: &ClusterArray) -> bool {
        self.cluster.file.filesystems.iter().any(|fs| fs.data == array.spec.name)
    }

    /// How far the scrub of objects is, over all targets; `None` when none runs.
    fn object_scrub(&self) -> Option<Progress> {
        let (begun, done) = self.objects_scrubbed.get()?;
        let mut progress = Progress::default();
        for (at, (_, log)) in self.object_logs().enumerate() {
            let of_log = log.scrub_progress();
            progress.total_bytes += of_log.total_bytes;
            progress.done_bytes +=
                if at < done { of_log.total_bytes } else { of_log.checked_bytes };
        }
        let seconds = begun.elapsed().as_secs_f64().max(1e-3);
        progress.bytes_per_s = (progress.done_bytes as f64 / seconds) as u64;
        Some(progress)
    }

    /// Keeps the traffic of the last second, for as long as the node serves.
    pub async fn measure(self: Rc<Self>) {
        let mut before = (self.totals(), reactor::now());
        loop {
            reactor::sleep(MEASURE_EVERY).await;
            let (totals, now) = (self.totals(), reactor::now());
            let seconds = now.since(before.1).as_secs_f64().max(1e-3);
            let rate = |now: u64, then: u64| (now.saturating_sub(then) as f64 / seconds) as u64;
            let (read_bytes, written_bytes, metadata) = totals;
            let (read_before, written_before, metadata_before) = before.0;
            self.traffic.set(Traffic {
                read_bytes,
                written_bytes,
                read_bytes_per_s: rate(read_bytes, read_before),
                written_bytes_per_s: rate(written_bytes, written_before),
                metadata_per_s: rate(metadata, metadata_before),
            });
            before = (totals, now);
        }
    }

    /// Bytes read and written by clients, and metadata requests, since the start.
    fn totals(&self) -> (u64, u64, u64) {
        let mut totals = (0, 0, 0);
        for target in &self.cluster.targets {
            match &target.service {
                Service::Objects { service, .. } => {
                    let meters = service.meters();
                    totals.0 += meters.bytes_read();
                    totals.1 += meters.bytes_written();
                }
                Service::Metadata { counted, .. } => totals.2 += counted.requests(),
                Service::Stopped { .. } => {}
            }
        }
        totals
    }

    /// Everything that was counted since the start.
    fn meters(&self) -> Meters {
        let drives = self.cluster.arrays.iter().flat_map(|array| {
            let members = array.array.status().members.into_iter();
            members.map(|member| DriveMeters {
                drive: member.name,
                array: array.spec.name.clone(),
                bytes_read: member.bytes_read,
                bytes_written: member.bytes_written,
                latency: member.latency.buckets(),
            })
        });
        let status = self.status();
        Meters {
            cluster: status.cluster,
            at_us: self.start.elapsed().as_micros() as u64,
            life: self.life,
            problems: status.problems.len() as u64,
            clients: status.clients.len() as u64,
            targets: self.cluster.targets.iter().map(target_meters).collect(),
            drives: drives.collect(),
            mounts: Vec::new(),
        }
    }

    fn status(&self) -> Status {
        let arrays: Vec<_> = self.cluster.arrays.iter().map(|array| self.array(array)).collect();
        let drives: Vec<_> =
            self.drives.borrow().values().map(|(spec, drive)| drive_status(spec, drive)).collect();
        let targets: Vec<_> = self.cluster.targets.iter().map(target_status).collect();
        let clients = self.clients();
        let mut problems = Vec::new();
        for (drive, (spec, found)) in self.drives.borrow().iter() {
            match found {
                Err(why) => problems.push(format!("drive {drive}: {why}")),
                Ok(open) if open.is_failed() => problems.push(format!(
                    "drive {drive} has failed; replace it with `levada drive replace {drive}`"
                )),
                Ok(_) if !self.source.in_place(spec) => problems.push(format!(
                    "drive {drive} is not at {} any more, which was removed or replaced: put it back, or \
                     `levada drive fail {drive}` and `levada drive replace {drive}`; \
                     it serves while the node runs, and is missing at the next start",
                    spec.path.display()
                )),
                // An array that is the worse for it says so itself.
                Ok(open) => {
                    let arrays = self.cluster.arrays.iter();
                    let promised = arrays.filter(|array| is_promised(array, open));
                    let names: Vec<_> = promised.map(|array| &*array.spec.name).collect();
                    // An order that is under way now gets there by itself.
                    if !names.is_empty() && self.admitting.available() > 0 {
                        problems.push(format!(
                            "drive {drive} has not come into {} yet, taking it was cut short; \
                             `levada drive add {drive}` completes it",
                            names.join(", ")
                        ));
                    }
                    let is_out = |array: &&Rc<ClusterArray>| {
                        array.is_without(drive) && !array.out().contains(drive)
                    };
                    let out: Vec<_> = self.cluster.arrays.iter().filter(is_out).collect();
                    if !out.is_empty() {
                        let names: Vec<_> = out.iter().map(|array| &*array.spec.name).collect();
                        problems.push(format!(
                            "drive {drive} is out of {}, another has its place; `levada drive replace {drive}` makes it a spare",
                            names.join(", ")
                        ));
                    }
                }
            }
        }
        for (array, shown) in self.cluster.arrays.iter().zip(&arrays) {
            problems.extend(self.problem_of(array, &shown.state));
            let lacks: u64 =
                array.array.status().members.iter().map(|member| member.lacks_blocks).sum();
            if lacks > 0 {
                problems.push(format!(
                    "array {} was rebuilt around {lacks} blocks of 4 KiB that too few drives could read: they stay \
                     unreadable until they are written, or those drives can be read again; the log of `levada scrub` names what lies there",
                    array.spec.name
                ));
            }
            problems.extend(shown.last_scrub.as_ref().and_then(|found| {
                let name = &array.spec.name;
                (found.unrepairable > 0).then(|| {
                    let places = found.unrepairable;
                    format!("the last scrub of {name} found {places} places beyond repair; the node's log names them")
                })
            }));
        }
        problems.extend(self.cluster.remarks.iter().cloned());
        for target in &self.cluster.targets {
            let name = target.entry.name();
            if let Some(error) = target.failure() {
                let helps = what_helps(&error, self.cluster.beyond_repair.has(&name));
                problems.push(format!("target {name} has stopped: {error}{helps}"));
                continue;
            }
            if self.cluster.beyond_repair.has(&name) {
                problems.push(format!(
                    "target {name} met damage that no copy repairs; it serves what else it holds until that is met again"
                ));
            }
            match &target.service {
                Service::Stopped { why } => {
                    problems.push(format!("target {name} is stopped: {why}"));
                }
                Service::Metadata { service, .. } => {
                    problems.extend(service.awaited().map(|(client, left)| {
                        let seconds = left.as_secs();
                        format!(
                            "target {name} waits up to {seconds} s for client {client}, which holds changes that are not durable"
                        )
                    }));
                }
                Service::Objects { .. } => {}
            }
        }
        Status {
            cluster: self.cluster.file.name.clone(),
            pid: std::process::id(),
            uptime_s: self.start.elapsed().as_secs_f64(),
            address: self.address.clone(),
            problems,
            survives: self.survives(),
            drives,
            arrays,
            targets,
            clients,
            mounts: Vec::new(),
            traffic: self.traffic.get(),
        }
    }

    /// What is the matter with an array and what helps, if anything.
    fn problem_of(&self, array: &ClusterArray, state: &str) -> Option<String> {
        let name = &array.spec.name;
        let out = array.out();
        match state {
            "healthy" => None,
            "stopped" => {
                let members = array.array.status().members;
                let drives = self.drives.borrow();
                // The loss that stopped it is not on record, so that the drive may come back.
                let is_gone = |drive: &String| {
                    let known = drives.get(drive).map(|(_, found)| found);
                    known.is_some_and(|found| found.as_ref().map_or(true, |open| open.is_failed()))
                };
                let broken = |member: &levada_raid::MemberStatus| {
                    member.role.is_some()
                        && (member.io_errors > 0
                            || out.contains(&member.name)
                            || is_gone(&member.name))
                };
                let helps: Vec<_> =
                    members.iter().filter(|m| broken(m)).map(|m| m.name.clone()).collect();
                let why = array
                    .array
                    .status()
                    .stopped
                    .map_or_else(String::new, |why| format!(" ({why})"));
                Some(format!(
                    "array {name} has stopped{why}, nothing on it was given up: bring back {}, then `levada down` and `levada up`",
                    helps.join(", ")
                ))
            }
            "rebuilding" => Some(format!("array {name} is rebuilding {}", out.join(", "))),
            _ => {
                let first = out.first().map_or("DRIVE", |first| first);
                Some(format!(
                    "array {name} is degraded: {} out; `levada drive replace {first}` rebuilds it",
                    if out.is_empty() { "drives".into() } else { out.join(", ") },
                ))
            }
        }
    }

    /// The clients that are there, without the node's own.
    fn clients(&self) -> Vec<ClientStatus> {
        let services = self.cluster.targets.iter().filter_map(|target| match &target.service {
            Service::Metadata { service, .. } => Some(service.clients()),
            Service::Objects { .. } | Service::Stopped { .. } => None,
        });
        let own = *self.cluster.table.fs.as_bytes();
        services
            .flatten()
            .filter(|client| client.uuid != own)
            .map(|client| ClientStatus { id: client.id, open_files: client.open_files })
            .collect()
    }

    /// What each array can still lose.
    fn survives(&self) -> Vec<String> {
        let left = |array: &Rc<ClusterArray>| {
            let status = array.array.status();
            let name = &array.spec.name;
            let left = status.tolerates.saturating_sub(status.degraded);
            match left {
                _ if status.stopped.is_some() => format!("{name} serves nothing now"),
                0 => format!("{name} survives no further loss now"),
                1 => format!("{name} survives the loss of any 1 drive now"),
                _ => format!("{name} survives the loss of any {left} drives now"),
            }
        };
        self.cluster.arrays.iter().map(left).collect()
    }

    fn array(&self, array: &Rc<ClusterArray>) -> ArrayStatus {
        let status = array.array.status();
        let stripe_bytes = stripe_bytes(array);
        let progress = |progress: levada_raid::Progress| Progress {
            done_bytes: progress.stripes_done * stripe_bytes,
            total_bytes: progress.stripes_total * stripe_bytes,
            bytes_per_s: progress.bytes_per_second as u64,
        };
        let state = if status.stopped.is_some() {
            "stopped"
        } else if status.rebuild.is_some() || array.array.needs_rebuild() {
            "rebuilding"
        } else if status.degraded > 0 {
            "degraded"
        } else {
            "healthy"
        };
        let chunk_kib = status.chunk_bytes >> 10;
        let width = status.members.iter().filter(|member| member.role.is_some()).count();
        let level = match status.level {
            Level::Raid0 => format!("RAID 0 over {width}, {chunk_kib} KiB chunks"),
            Level::Raid1 { copies } => format!("mirror of {copies} copies over {width} drives"),
            Level::Raid6 => format!("RAID 6 {}+2, {chunk_kib} KiB chunks", width.saturating_sub(2)),
        };
        ArrayStatus {
            name: status.name,
            level,
            state: state.to_owned(),
            capacity_bytes: status.capacity_bytes,
            written_bytes: status.stripes_written * stripe_bytes,
            members: status
                .members
                .iter()
                .map(|member| MemberStatus {
                    drive: member.name.clone(),
                    state: match member.state {
                        MemberState::InSync => "in sync",
                        MemberState::Rebuilding { .. } => "rebuilding",
                        MemberState::Faulty => "out",
                        MemberState::Spare => "spare",
                    }
                    .to_owned(),
                    medium_errors: member.medium_errors,
                    io_errors: member.io_errors,
                    repairs: member.repairs,
                    p50_us: member.latency.quantile(0.5).as_micros() as u64,
                    p99_us: member.latency.quantile(0.99).as_micros() as u64,
                })
                .collect(),
            rebuild: status.rebuild.map(progress).or_else(|| {
                array.array.needs_rebuild().then_some(Progress {
                    total_bytes: status.stripes_written * stripe_bytes,
                    ..Progress::default()
                })
            }),
            scrub: status.scrub.map(progress).or_else(|| {
                if !self.scrubbing.get() {
                    return None;
                }
                // Before its turn the objects in it have theirs.
                let objects = self.object_scrub().filter(|_| self.holds_objects(array));
                if objects.is_some() || array.last_scrub.borrow().is_some() {
                    return objects;
                }
                let total_bytes = status.stripes_written * stripe_bytes;
                Some(Progress { total_bytes, ..Progress::default() })
            }),
            last_scrub: array.last_scrub.borrow().clone().filter(|_| !self.scrubbing.get()),
        }
    }
}

/// True when the drive has room for the array, and the array never took it: taking a drive goes from
/// array to array, and was cut short.
fn is_promised(array: &ClusterArray, drive: &Rc<Drive>) -> bool {
    let name = drive.label().drive_name.clone();
    array.member_on(&name).is_none() && drive.slice_of(array.array.status().uuid).is_some()
}

async fn scrub_array(array: &ClusterArray) -> ScrubResult {
    let name = &array.spec.name;
    match array.array.scrub(Limits::NONE).await {
        Ok(report) => {
            tracing::info!(array = name, ?report, "scrubbed");
            ScrubResult {
                checked_bytes: report.stripes * stripe_bytes(array),
                repaired: report.unreadable_repaired + report.wrong_repaired,
                unrepairable: report.mismatched + report.lost,
                skipped_bytes: report.skipped * stripe_bytes(array),
                not_checked: Vec::new(),
            }
        }
        Err(error) => {
            tracing::error!(array = name, %error, "the scrub stopped");
            let not_checked = vec![format!("array {name}: {error}")];
            ScrubResult { not_checked, ..ScrubResult::default() }
        }
    }
}

fn stripe_bytes(array: &ClusterArray) -> u64 {
    use levada_raid::Array;
    array.array.geometry().stripe_bytes
}

fn drive_status(spec: &DriveSpec, found: &Result<Rc<Drive>, String>) -> DriveStatus {
    let blank = DriveStatus {
        name: spec.name.clone(),
        enclosure: spec.enclosure.clone(),
        path: spec.path.clone(),
        ..DriveStatus::default()
    };
    let Ok(drive) = found else {
        return DriveStatus { state: "missing".into(), ..blank };
    };
    let health = drive.device().health();
    DriveStatus {
        capacity_bytes: drive.device().info().capacity_bytes,
        state: if drive.is_failed() { "failed" } else { "ok" }.into(),
        bytes_read: health.bytes_read,
        bytes_written: health.bytes_written,
        errors: health.read_errors + health.write_errors,
        ..blank
    }
}

/// What brings a target back whose store has stopped, as far as the array below does not say it.
fn what_helps(error: &KvError, is_beyond_repair: bool) -> &'static str {
    match error {
        KvError::Damaged { .. } if is_beyond_repair => {
            "; all copies were compared, and none could be told to be right: programs that need it wait, the other \
             targets serve. With drives that are out back in place, `levada down` and `levada up` try again"
        }
        KvError::Damaged { .. } => {
            "; all copies are compared and it is opened anew if that helps, programs wait"
        }
        _ => "",
    }
}

fn target_status(target: &crate::assembly::Target) -> TargetStatus {
    let stopped =
        TargetStatus { name: target.entry.name(), state: "stopped".into(), ..Default::default() };
    let Some(store) = target.store.as_ref().filter(|_| target.failure().is_none()) else {
        return stopped;
    };
    let usage = store.usage();
    let ops = ops_of(target);
    let (p50_us, p99_us) = percentiles(&ops);
    let both = TargetStatus {
        state: "serving".into(),
        requests: ops.iter().map(|op| op.count).sum(),
        p50_us,
        p99_us,
        log_percent: usage.log_bytes_used * 100 / usage.log_bytes_max.max(1),
        ..stopped.clone()
    };
    match &target.service {
        Service::Objects { log, service } => {
            let space = log.space();
            let (free, total) = log.segments();
            let cleaned_bytes = log.counters().cleaned_bytes;
            TargetStatus {
                cache: CacheMeters::of(log.asked()),
                total_bytes: space.total_bytes,
                free_bytes: space.free_bytes,
                in_flight: service.meters().in_flight.get(),
                segments: Some(Segments { free: free.into(), total: total.into(), cleaned_bytes }),
                ..both
            }
        }
        Service::Metadata { counted, service } => TargetStatus {
            state: if service.is_recovering() { "recovering" } else { "serving" }.into(),
            total_bytes: usage.bytes_max,
            free_bytes: usage.bytes_max - usage.bytes_used.min(usage.bytes_max),
            in_flight: counted.in_flight(),
            cache: CacheMeters::of(&service.looks()),
            ..both
        },
        Service::Stopped { .. } => stopped,
    }
}

/// What a target counted, by the kind of request.
fn ops_of(target: &crate::assembly::Target) -> Vec<OpMeters> {
    match &target.service {
        Service::Objects { service, .. } => {
            let all = service.meters().all();
            all.map(|(kind, size, meter)| OpMeters::of(kind, size, meter)).collect()
        }
        Service::Metadata { counted, .. } => {
            let all = counted.meters();
            all.iter().map(|(kind, meter)| OpMeters::of(kind, "", meter)).collect()
        }
        Service::Stopped { .. } => Vec::new(),
    }
}

fn target_meters(target: &crate::assembly::Target) -> TargetMeters {
    TargetMeters { status: target_status(target), ops: ops_of(target) }
}
