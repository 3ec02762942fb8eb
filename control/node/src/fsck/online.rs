//! The check of a running node: one at a time, beside everything else. Each target by itself first, then objects against
//! files.

use super::objects::Compared;
use super::offline::item_of;
use super::report::{Done, FoundItem, TargetReport};
use super::suspects::{Beside, Settled};
use crate::assembly::{Cluster, Service};
use crate::targets::TargetKind;
use levada_base::ids::TargetId;
use levada_base::reactor::{self, JoinHandle};
use levada_kv::Store;
use levada_log::{LogError, ObjectLog};
use levada_meta::{Fsck, FsckConfig, FsckProgress, MetaService, Paths};
use serde::{Deserialize, Serialize};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// Findings in one answer.
const ITEMS_AT_ONCE: usize = 1024;

/// Leases for which a file in use is looked at again: one may end in that time, and what it held be settled.
const PATIENCE_LEASES: u32 = 2;

/// What a check is told.
#[derive(Clone, Copy, Debug, Default)]
pub struct CheckConfig {
    pub metadata: FsckConfig,
    /// How long a file in use is looked at again, if not the usual time.
    pub patience: Option<Duration>,
}

/// How a check goes, or how the last one ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FsckState {
    /// Tells one check from the next.
    pub number: u64,
    /// The target that is checked now.
    pub target: String,
    /// In words.
    pub phase: String,
    pub done_rows: u64,
    pub total_rows: u64,
    /// Its findings from the number on that was asked for, at most 1024.
    pub items: Vec<FoundItem>,
    /// What was checked so far, without the findings.
    pub reports: Vec<TargetReport>,
    /// No more will come.
    pub ended: bool,
}

/// The check that runs, or ran last.
#[derive(Default)]
pub struct Checks {
    last: RefCell<Option<Rc<Check>>>,
    count: Cell<u64>,
}

/// Why no check was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a check is running already; `levada fsck --stop` ends it")]
pub struct Running;

struct Check {
    number: u64,
    /// What is being checked of which target, and how far that is.
    now: RefCell<Option<(String, Progress)>>,
    /// Targets of which something is not checked yet.
    unfinished: RefCell<Vec<String>>,
    items: RefCell<Vec<FoundItem>>,
    reports: RefCell<Vec<TargetReport>>,
    ended: Cell<bool>,
    task: RefCell<Option<JoinHandle<()>>>,
}

type Progress = Rc<dyn Fn() -> FsckProgress>;

impl Checks {
    /// Starts a check of every target; its number.
    ///
    /// # Errors
    ///
    /// [`Running`].
    pub fn start(&self, cluster: &Rc<Cluster>, config: CheckConfig) -> Result<u64, Running> {
        if self.last.borrow().as_ref().is_some_and(|last| !last.ended.get()) {
            return Err(Running);
        }
        self.count.set(self.count.get() + 1);
        let names = cluster.targets.iter().map(|target| target.entry.name());
        let check = Rc::new(Check {
            number: self.count.get(),
            now: RefCell::default(),
            unfinished: RefCell::new(names.collect()),
            items: RefCell::default(),
            reports: RefCell::default(),
            ended: Cell::new(false),
            task: RefCell::default(),
        });
        self.last.replace(Some(Rc::clone(&check)));
        let (run, cluster) = (Rc::clone(&check), Rc::clone(cluster));
        let task = reactor::spawn(async move { run.run(&cluster, config).await });
        check.task.replace(Some(task));
        Ok(check.number)
    }

    /// How the check that runs goes, or how the last one ended; `None` when there was none.
    #[must_use]
    pub fn state(&self, from: u64) -> Option<FsckState> {
        let last = self.last.borrow();
        last.as_ref().map(|check| check.state(from))
    }

    /// Ends the check that runs; false when none does.
    pub fn stop(&self) -> bool {
        let last = self.last.borrow();
        let Some(check) = last.as_ref().filter(|check| !check.ended.get()) else { return false };
        check.stop();
        true
    }
}

impl Check {
    async fn run(&self, cluster: &Cluster, config: CheckConfig) {
        let metadata = cluster.targets.iter().find_map(|target| match &target.service {
            Service::Metadata { service, .. } => Some(service.store()),
            Service::Objects { .. } | Service::Stopped { .. } => None,
        });
        let mut served = Vec::new();
        let (mut logs, mut unread) = (Vec::new(), Vec::new());
        for target in &cluster.targets {
            let (name, id) = (target.entry.name(), target.entry.id);
            match &target.service {
                Service::Metadata { service, .. } => {
                    self.add(self.check(&name, service, config.metadata).await);
                    served.push((name, service));
                }
                Service::Objects { log, .. } => {
                    let yields = config.metadata.yields;
                    match self.check_index(&name, log, metadata, yields).await {
                        Ok(report) => {
                            self.add(report);
                            logs.push((id, name, log.clone()));
                        }
                        // It has stopped since it was opened.
                        Err(error) => {
                            self.add(TargetReport::unread(&name, error.to_string()));
                            unread.push(id);
                        }
                    }
                }
                Service::Stopped { why } => {
                    self.add(TargetReport::unread(&name, why.clone()));
                    if target.entry.kind == TargetKind::Objects {
                        unread.push(id);
                    }
                }
            }
        }
        match &served[..] {
            // Inode numbers name their metadata target, and there is one.
            [(name, service)] => {
                let fs = cluster.table.fs.as_u64_pair().0;
                self.check_objects(name, service, fs, &logs, &unread, config).await;
            }
            _ => {
                for (_, name, _) in &logs {
                    let what = "objects against files: the metadata is not served".to_owned();
                    self.amend(name, |report| report.not_checked.push(what));
                }
            }
        }
        self.now.take();
        self.unfinished.take();
        self.ended.set(true);
    }

    async fn check(
        &self,
        name: &str,
        service: &Rc<MetaService>,
        config: FsckConfig,
    ) -> TargetReport {
        let fsck = Fsck::of_service(Rc::clone(service), config);
        let shown = Rc::clone(&fsck);
        self.now.replace(Some((name.to_owned(), Rc::new(move || shown.progress()))));
        let begun = reactor::now();
        let report = match fsck.run().await {
            Ok(report) => TargetReport::of(name, service.store(), report, begun.elapsed()).await,
            Err(error) => Err(error),
        };
        report.unwrap_or_else(|error| TargetReport::unread(name, error.to_string()))
    }

    /// The index of an object target by itself.
    async fn check_index(
        &self,
        name: &str,
        log: &ObjectLog,
        metadata: Option<&Store>,
        yields: bool,
    ) -> Result<TargetReport, LogError> {
        let progress = Rc::new(Cell::new(FsckProgress::default()));
        let shown = Rc::clone(&progress);
        self.now.replace(Some((name.to_owned(), Rc::new(move || shown.get()))));
        let rows = log.index_rows();
        let told = |done_rows: u64| {
            let (phase, total_rows) = ("checking the index", rows.max(done_rows));
            progress.set(FsckProgress { phase, done_rows, total_rows });
        };
        told(0);
        let begun = reactor::now();
        let mut report = TargetReport::empty(name);
        match log.check_index(yields, &told).await? {
            Some(index) => {
                (report.rows, report.objects) = (index.rows, index.objects);
                report.memory_bytes = index.memory_bytes;
                for finding in &index.findings {
                    report.add([item_of(name, finding, metadata).await], Done::Left);
                }
                report.found += index.found - index.findings.len() as u64;
                if index.unsettled > 0 {
                    let what = format!("the extents of {} objects: in use", index.unsettled);
                    report.not_checked.push(what);
                }
            }
            None => report.not_checked.push("its index: another check is running".to_owned()),
        }
        report.seconds = begun.elapsed().as_secs_f64();
        Ok(report)
    }

    /// Objects against files.
    async fn check_objects(
        &self,
        name: &str,
        metadata: &MetaService,
        fs: u64,
        targets: &[(TargetId, String, ObjectLog)],
        unread: &[TargetId],
        config: CheckConfig,
    ) {
        let begun = reactor::now();
        // What a client may bring back is of files that are not known.
        let compared = if metadata.is_recovering() {
            Err("the target waits for a client".to_owned())
        } else {
            let compared = self.compare(name, metadata, fs, targets, unread, config).await;
            compared.map_err(|error| error.to_string())
        };
        if let Err(why) = compared {
            let what = format!("objects against files: {why}");
            self.amend(name, |report| report.not_checked.push(what));
        }
        self.amend(name, |report| report.seconds += begun.elapsed().as_secs_f64());
    }

    async fn compare(
        &self,
        name: &str,
        metadata: &MetaService,
        fs: u64,
        targets: &[(TargetId, String, ObjectLog)],
        unread: &[TargetId],
        config: CheckConfig,
    ) -> Result<(), LogError> {
        let progress = Rc::new(Cell::new(FsckProgress::default()));
        let shown = Rc::clone(&progress);
        self.now.replace(Some((name.to_owned(), Rc::new(move || shown.get()))));
        let logs: Vec<_> = targets.iter().map(|(id, _, log)| (*id, log.clone())).collect();
        let read: Vec<_> = targets.iter().map(|(id, ..)| *id).collect();
        let beside = Beside {
            metadata,
            logs: &logs,
            read: &read,
            unread,
            fs,
            yields: config.metadata.yields,
            patience: config.patience.unwrap_or(metadata.client_lease() * PATIENCE_LEASES),
            progress: &|now| progress.set(now),
        };
        let inodes = self.reports.borrow().iter().map(|report| report.inodes).sum();
        let Settled { compared, in_use, unsettled, counts } = beside.compare(inodes).await?;
        let Compared { findings, found, .. } = compared;
        let name_of = |id| targets.iter().find(|(of, ..)| *of == id).map(|(_, name, _)| &**name);
        for (id, objects) in counts {
            self.amend(name_of(id).unwrap_or(name), |report| report.objects = objects);
        }
        let untold = found - findings.len() as u64;
        self.amend(name, |report| {
            report.found += untold;
            if in_use > 0 {
                report.not_checked.push(format!("the objects of {in_use} files: in use"));
            }
            if unsettled > 0 {
                let what = format!("{unsettled} objects that did not fit at first sight: too many");
                report.not_checked.push(what);
            }
        });
        let mut paths = Paths::new(metadata.store());
        for (on, finding) in findings {
            let at = on.and_then(name_of).unwrap_or(name);
            let item = finding.item(at, &mut paths).await?;
            self.amend(at, |report| report.add([item], Done::Left));
        }
        Ok(())
    }

    fn add(&self, mut report: TargetReport) {
        self.items.borrow_mut().append(&mut report.items);
        self.reports.borrow_mut().push(report);
    }

    /// Adds to the report of a target.
    fn amend(&self, target: &str, amend: impl FnOnce(&mut TargetReport)) {
        let mut reports = self.reports.borrow_mut();
        let report = reports.iter_mut().find(|report| report.target == target);
        let report = report.expect("each target that is checked has one");
        amend(report);
        self.items.borrow_mut().append(&mut report.items);
    }

    fn stop(&self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
        self.now.take();
        for name in self.unfinished.take() {
            let is_begun = self.reports.borrow().iter().any(|report| report.target == name);
            if is_begun {
                let what = "the rest: the check was stopped".to_owned();
                self.amend(&name, |report| report.not_checked.push(what));
            } else {
                self.add(TargetReport::unread(&name, "the check was stopped".to_owned()));
            }
        }
        self.ended.set(true);
    }

    fn state(&self, from: u64) -> FsckState {
        let now = self.now.borrow();
        let (target, progress) = now
            .as_ref()
            .map_or_else(Default::default, |(name, progress)| (name.clone(), progress()));
        let FsckProgress { phase, done_rows, total_rows } = progress;
        let items = self.items.borrow();
        let from = usize::try_from(from).unwrap_or(usize::MAX).min(items.len());
        FsckState {
            number: self.number,
            target,
            phase: phase.to_owned(),
            done_rows,
            total_rows,
            items: items[from..].iter().take(ITEMS_AT_ONCE).cloned().collect(),
            reports: self.reports.borrow().clone(),
            ended: self.ended.get(),
        }
    }
}
