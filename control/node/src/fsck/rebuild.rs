//! The index of an object target made anew from its segments, while the cluster is down.
//!
//! First as a trial, into memory: what the index would hold, and how that fits the files, is known before the old one
//! is given up. A segment that cannot be read ends it there.
//!
//! What always holds:
//! - Without being told to, nothing is written beside the recovery that every opening is.
//! - What the old store holds of changes that reached no segment is in the state directory, durably, before that store
//!   is given up, and until the new one holds a log.
//!
//! After a crash the old index is there, or the store holds no log: `up` keeps the target stopped and names the command,
//! which begins anew.

use super::join::Side;
use super::objects::{Compared, compare};
use super::offline::item_of;
use super::report::{Done, TargetReport};
use crate::arrays;
use crate::assembly::{self, AssemblyError, TargetError, Tuning};
use crate::drives::{self, DriveSource};
use crate::state::{StateDir, StateError};
use crate::targets::{TargetEntry, TargetKind, TargetTable};
use levada_base::Epoch;
use levada_base::reactor;
use levada_device::RamDevice;
use levada_kv::{KvError, Store};
use levada_log::{LogError, Rebuilt, StagedRows, check_index};
use levada_meta::{Numbers, Paths};
use levada_raid::{Array, RaidArray};
use levada_spec::ClusterFile;
use std::rc::Rc;

pub use levada_log::RebuildReport;

/// What [`rebuild()`] is told besides the cluster file.
pub struct RebuildOptions<'a> {
    /// The name of the target.
    pub target: &'a str,
    /// Make it anew; else say what it would hold.
    pub writes: bool,
    /// Where staged changes are kept meanwhile; it is locked.
    pub state: &'a StateDir,
    /// Called with a line for people at each longer step.
    pub says: &'a dyn Fn(&str),
}

/// What came of it.
pub struct Rebuild {
    pub held: RebuildReport,
    /// The old store could not be read, and nothing was kept of it: what it held staged is lost.
    pub staged_unknown: bool,
    /// The new index by itself and against the files.
    pub report: TargetReport,
    /// The index was made anew.
    pub is_written: bool,
}

/// Why the index of a target was not made anew.
#[derive(Debug, thiserror::Error)]
pub enum RebuildError {
    #[error(transparent)]
    Assembly(#[from] AssemblyError),
    #[error("there is no object target {target}; there are {known}")]
    NoTarget { target: String, known: String },
    /// Before anything was given up.
    #[error("target {target}: {source}; its index is as it was")]
    Trial { target: String, source: TargetError },
    #[error(transparent)]
    State(#[from] StateError),
    /// It can be begun again.
    #[error("target {target}: {source}; it has no index now: run the command again")]
    CutOff { target: String, source: TargetError },
}

/// Makes the index of a target anew from its segments, or says what it would hold.
///
/// # Errors
///
/// [`RebuildError`], which says whether the old index is still there.
pub async fn rebuild(
    file: &ClusterFile,
    source: &dyn DriveSource,
    options: &RebuildOptions<'_>,
) -> Result<Rebuild, RebuildError> {
    let [fs] = &file.filesystems[..] else {
        return Err(AssemblyError::NotServed { what: "other than one file system" }.into());
    };
    let drives = drives::take_existing(source, file).await.map_err(AssemblyError::from)?;
    let arrays = arrays::open(file, &drives, false).await.map_err(AssemblyError::from)?;
    let metadata = assembly::find(&arrays, &fs.metadata).array.clone();
    let data: Rc<dyn Array> = Rc::new(assembly::find(&arrays, &fs.data).array.clone());
    let made = match assembly::find_table(&metadata, options.says).await {
        Ok(table) => {
            let parts = Parts { metadata, data, table, epoch: drives.epoch, options };
            parts.rebuild().await
        }
        Err(error) => Err(error.into()),
    };
    for (array, error) in arrays::close(&arrays).await {
        (options.says)(&format!(
            "closing array {array} failed ({error}); the next start resyncs it"
        ));
    }
    made
}

struct Parts<'a> {
    metadata: RaidArray,
    data: Rc<dyn Array>,
    table: TargetTable,
    epoch: Epoch,
    options: &'a RebuildOptions<'a>,
}

impl Parts<'_> {
    async fn rebuild(&self) -> Result<Rebuild, RebuildError> {
        let target = self.options.target.to_owned();
        let objects = self.table.targets.iter().filter(|entry| entry.kind == TargetKind::Objects);
        let objects: Vec<TargetEntry> = objects.copied().collect();
        let Some(entry) = objects.iter().find(|entry| entry.name() == target).copied() else {
            let known: Vec<_> = objects.iter().map(TargetEntry::name).collect();
            return Err(RebuildError::NoTarget { target, known: known.join(", ") });
        };
        let begun = reactor::now();
        let trial_failed = |source| RebuildError::Trial { target: target.clone(), source };
        let (staged, staged_unknown) = self.staged(&entry).await?;
        let (rebuilt, trial) = self.try_out(&entry, &staged).await.map_err(trial_failed)?;
        let mut report = TargetReport::empty(&target);
        if self.check(&entry, &trial, &mut report).await.map_err(trial_failed)? {
            let source = LogError::Index { row: "of the trial" }.into();
            return Err(RebuildError::Trial { target, source });
        }
        if self.options.writes {
            // Nothing is kept of what nobody knows, so that a second try says so, too.
            if !staged_unknown {
                self.options.state.keep_staged(&target, &staged.encode())?;
            }
            self.write(&entry, &rebuilt)
                .await
                .map_err(|source| RebuildError::CutOff { target: target.clone(), source })?;
            self.options.state.forget_staged(&target)?;
        }
        report.seconds = begun.elapsed().as_secs_f64();
        let held = rebuilt.report();
        Ok(Rebuild { held, staged_unknown, report, is_written: self.options.writes })
    }

    /// What is staged: by the store, or, where that holds no log any more, as a rebuild that was cut off kept it.
    /// True when nobody knows.
    async fn staged(&self, entry: &TargetEntry) -> Result<(StagedRows, bool), RebuildError> {
        let name = entry.name();
        let (mut of_store, mut has_log) = (None, false);
        match self.read_staged(entry).await {
            Ok((rows, is_log)) => (of_store, has_log) = (Some(rows), is_log),
            // It may be back later, and then it can be read.
            Err(source @ (TargetError::Block(_) | TargetError::Store(KvError::Block(_)))) => {
                return Err(RebuildError::Trial { target: name, source });
            }
            Err(error) => {
                (self.options.says)(&format!("target {name}: its old store is lost: {error}"));
            }
        }
        if !has_log {
            let kept = self.options.state.staged(&name)?;
            if let Some(kept) = kept.as_deref().and_then(StagedRows::decode) {
                return Ok((kept, false));
            }
        }
        // A store without a log, of which nothing was kept, was lost already to a rebuild that was cut off.
        Ok((of_store.unwrap_or_default(), !has_log))
    }

    async fn read_staged(&self, entry: &TargetEntry) -> Result<(StagedRows, bool), TargetError> {
        let store =
            assembly::open_store(&self.metadata, entry, self.epoch, self.options.says).await?;
        let rows = StagedRows::of(&store).await;
        let has_log = StagedRows::has_log(&store).await;
        store.close().await?;
        Ok((rows?, has_log?))
    }

    /// The index as it would be, in a store of the same size in memory.
    async fn try_out(
        &self,
        entry: &TargetEntry,
        staged: &StagedRows,
    ) -> Result<(Rebuilt, Store), TargetError> {
        (self.options.says)(&format!("target {}: reading its segments", entry.name()));
        let area = Rc::new(RamDevice::new("trial", entry.store_bytes));
        let config = Tuning::default().store(entry);
        let trial = Store::create(area, self.epoch, config).await?;
        let fs = self.table.fs.as_u64_pair().0;
        let config = assembly::log_config(fs, entry, Tuning::default());
        let stripes = assembly::stripes_of(&self.data, entry)?;
        let rebuilt = Rebuilt::read(stripes, trial.clone(), config, self.epoch, staged).await?;
        rebuilt.write(&trial).await?;
        Ok((rebuilt, trial))
    }

    /// The new index by itself, and against the files. True when it is not sound by itself.
    async fn check(
        &self,
        entry: &TargetEntry,
        trial: &Store,
        report: &mut TargetReport,
    ) -> Result<bool, TargetError> {
        let index = check_index(trial, &|_| {}).await?;
        report.rows = index.rows;
        report.objects = index.objects;
        for finding in &index.findings {
            let item = item_of(&entry.name(), finding, None).await;
            report.add([item], Done::Left);
        }
        if let Err(error) = self.compare(entry, trial, report).await {
            report.not_checked.push(format!("objects against files: {error}"));
        }
        Ok(index.found > 0)
    }

    async fn compare(
        &self,
        entry: &TargetEntry,
        trial: &Store,
        report: &mut TargetReport,
    ) -> Result<(), TargetError> {
        let is_metadata = |other: &&TargetEntry| other.kind == TargetKind::Metadata;
        let Some(metadata) = self.table.targets.iter().find(is_metadata) else { return Ok(()) };
        let files =
            assembly::open_store(&self.metadata, metadata, self.epoch, self.options.says).await?;
        let others = self.table.targets.iter().map(|other| other.id);
        let others: Vec<_> = others.filter(|id| *id != entry.id).collect();
        let fs = self.table.fs.as_u64_pair().0;
        let numbers = Numbers::of(&files).await?;
        let mut sides = [Side::new(entry.id, trial).await?];
        let Compared { findings, found, awaited } =
            compare(&files, fs, numbers, &mut sides, &others).await?;
        report.objects = sides[0].count;
        if awaited > 0 {
            let what = format!("{awaited} objects whose files a client may bring back");
            report.not_checked.push(what);
        }
        report.found += found - findings.len() as u64;
        let mut paths = Paths::new(&files);
        for (_, finding) in findings {
            let item = finding.item(&entry.name(), &mut paths).await?;
            report.add([item], Done::Left);
        }
        Ok(files.close().await?)
    }

    async fn write(&self, entry: &TargetEntry, rebuilt: &Rebuilt) -> Result<(), TargetError> {
        (self.options.says)(&format!("target {}: writing its index", entry.name()));
        let area = assembly::store_area(&self.metadata, entry)?;
        let store = Store::create(area, self.epoch, Tuning::default().store(entry)).await?;
        rebuilt.write(&store).await?;
        let index = check_index(&store, &|_| {}).await?;
        if let Some(finding) = index.findings.first() {
            tracing::error!(%finding, "the index that was made anew is not sound");
            return Err(LogError::Index { row: "of the new index" }.into());
        }
        Ok(store.close().await?)
    }
}
