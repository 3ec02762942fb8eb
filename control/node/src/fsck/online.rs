//! The check of a running node: one at a time, beside everything else.

use super::report::{FoundItem, TargetReport};
use crate::assembly::{Cluster, Service};
use levada_base::reactor::{self, JoinHandle};
use levada_meta::{Fsck, FsckConfig, FsckProgress, MetaService};
use serde::{Deserialize, Serialize};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Findings in one answer.
const ITEMS_AT_ONCE: usize = 1024;

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
    now: RefCell<Option<(String, Rc<Fsck>)>>,
    items: RefCell<Vec<FoundItem>>,
    reports: RefCell<Vec<TargetReport>>,
    ended: Cell<bool>,
    task: RefCell<Option<JoinHandle<()>>>,
}

impl Checks {
    /// Starts a check of every metadata target; its number.
    ///
    /// # Errors
    ///
    /// [`Running`].
    pub fn start(&self, cluster: &Rc<Cluster>, config: FsckConfig) -> Result<u64, Running> {
        if self.last.borrow().as_ref().is_some_and(|last| !last.ended.get()) {
            return Err(Running);
        }
        self.count.set(self.count.get() + 1);
        let check = Rc::new(Check {
            number: self.count.get(),
            now: RefCell::default(),
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
    async fn run(&self, cluster: &Cluster, config: FsckConfig) {
        for target in &cluster.targets {
            let name = target.entry.name();
            let report = match &target.service {
                Service::Metadata { service, .. } => self.check(&name, service, config).await,
                Service::Stopped { why } if name.starts_with("mdt") => {
                    TargetReport::unread(&name, why.clone())
                }
                Service::Objects { .. } | Service::Stopped { .. } => continue,
            };
            self.add(report);
        }
        self.now.take();
        self.ended.set(true);
    }

    async fn check(
        &self,
        name: &str,
        service: &Rc<MetaService>,
        config: FsckConfig,
    ) -> TargetReport {
        let fsck = Fsck::of_service(Rc::clone(service), config);
        self.now.replace(Some((name.to_owned(), Rc::clone(&fsck))));
        let begun = reactor::now();
        let report = match fsck.run().await {
            Ok(report) => TargetReport::of(name, service.store(), report, begun.elapsed()).await,
            Err(error) => Err(error),
        };
        report.unwrap_or_else(|error| TargetReport::unread(name, error.to_string()))
    }

    fn add(&self, mut report: TargetReport) {
        self.items.borrow_mut().append(&mut report.items);
        self.reports.borrow_mut().push(report);
    }

    fn stop(&self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
        if let Some((name, _)) = self.now.take() {
            self.add(TargetReport::unread(&name, "the check was stopped".to_owned()));
        }
        self.ended.set(true);
    }

    fn state(&self, from: u64) -> FsckState {
        let now = self.now.borrow();
        let (target, progress) = now
            .as_ref()
            .map_or_else(Default::default, |(name, fsck)| (name.clone(), fsck.progress()));
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
