//! The check of a cluster that is down: drives and arrays are assembled as by `up`, each target's store is opened, and
//! nothing over it.
//!
//! The indexes of the object targets first, then the metadata, then objects against files: so it is known whether the
//! metadata is as new as the objects before any of it is repaired.
//!
//! What always holds: without being told to repair, nothing is written beside the recovery that every opening is; and
//! nothing is formatted.

use super::join::Side;
use super::objects::{Compared, ObjectFinding, compare};
use super::report::{Done, FoundItem, TargetReport};
use crate::arrays;
use crate::assembly::{self, AssemblyError, TargetError};
use crate::drives::{self, DriveSource};
use crate::targets::{TargetEntry, TargetKind, TargetTable};
use futures_util::future::{Either, select};
use levada_base::Epoch;
use levada_base::ids::{ObjectId, TargetId};
use levada_base::reactor;
use levada_kv::{KvError, Store};
use levada_log::{IndexFinding, IndexReport, ObjectLog, SegmentReport, check_index};
use levada_meta::{
    Fsck, FsckConfig, FsckProgress, FsckReport, MetaError, Numbers, Paths, RepairOptions,
    note_components, repair,
};
use levada_raid::{Array, RaidArray};
use levada_spec::ClusterFile;
use std::collections::BTreeSet;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// How often progress is told.
const TELL_EVERY: Duration = Duration::from_millis(200);
/// A repair may lead to more; what then is left is left.
const PASSES_MAX: usize = 8;

/// What [`offline`] is told besides the cluster file.
pub struct FsckOptions<'a> {
    /// Bytes for what grows with the number of directories.
    pub memory_bytes: u64,
    /// Put right what follows from other rows.
    pub repair: bool,
    /// And give inodes whose names were lost one in `/lost+found`.
    pub reattach: bool,
    /// Hold the indexes of objects against their segments.
    pub deep: bool,
    /// Hold all data against its checksums.
    pub data: bool,
    /// Called with a line for people at each longer step.
    pub says: &'a dyn Fn(&str),
    /// Called with a target's name several times a second.
    pub progress: &'a dyn Fn(&str, FsckProgress),
}

/// Checks a cluster that no node serves.
///
/// # Errors
///
/// When the cluster cannot be assembled; a target that cannot be read is in the reports.
pub async fn offline(
    file: &ClusterFile,
    source: &dyn DriveSource,
    options: &FsckOptions<'_>,
) -> Result<Vec<TargetReport>, AssemblyError> {
    let [fs] = &file.filesystems[..] else {
        return Err(AssemblyError::NotServed { what: "other than one file system" });
    };
    let drives = drives::take_existing(source, file).await?;
    let arrays = arrays::open(file, &drives, false).await?;
    let metadata = assembly::find(&arrays, &fs.metadata).array.clone();
    let data: Rc<dyn Array> = Rc::new(assembly::find(&arrays, &fs.data).array.clone());
    let table = assembly::find_table(&metadata, options.says).await?;
    let parts = Parts { metadata, data, table, epoch: drives.epoch, options };
    let reports = parts.check().await;
    drop(parts);
    for (array, error) in arrays::close(&arrays).await {
        (options.says)(&format!(
            "closing array {array} failed ({error}); the next start resyncs it"
        ));
    }
    Ok(reports)
}

/// A cluster that is assembled and not served.
pub(super) struct Parts<'a> {
    metadata: RaidArray,
    pub data: Rc<dyn Array>,
    pub table: TargetTable,
    pub epoch: Epoch,
    pub options: &'a FsckOptions<'a>,
}

/// A target under check.
pub(super) struct Checked {
    pub entry: TargetEntry,
    pub name: String,
    pub store: Option<Store>,
    pub report: TargetReport,
    /// Of an object target.
    pub index: Option<IndexReport>,
    /// Of one whose index was held against its segments.
    pub segments: Option<SegmentReport>,
    /// Why nothing may be changed, or opened, that goes by its index.
    pub doubt: Option<String>,
    /// There is one over a store and no second, as it works in the background.
    pub log: Option<ObjectLog>,
}

impl Parts<'_> {
    async fn check(&self) -> Vec<TargetReport> {
        let mut objects = Vec::new();
        let mut metadata = Vec::new();
        for entry in &self.table.targets {
            let target = self.open(*entry).await;
            match entry.kind {
                TargetKind::Metadata => metadata.push(target),
                TargetKind::Objects => objects.push(target),
            }
        }
        for target in &mut objects {
            self.check_index(target).await;
            if self.options.deep {
                self.check_deep(target).await;
            }
        }
        // Inode numbers name their metadata target, and there is one.
        if let [target] = &mut metadata[..] {
            self.check_files(target, &mut objects).await;
        }
        if self.options.data {
            let files = metadata.iter().find_map(|target| target.store.as_ref());
            for target in &mut objects {
                self.check_data(target, files).await;
            }
        }
        let mut reports = Vec::new();
        for target in metadata.into_iter().chain(objects) {
            drop(target.log);
            if let Some(store) = &target.store
                && let Err(error) = store.close().await
            {
                let name = &target.name;
                (self.options.says)(&format!("target {name}: closing its store failed: {error}"));
            }
            reports.push(target.report);
        }
        reports
    }

    async fn open(&self, entry: TargetEntry) -> Checked {
        let name = entry.name();
        let opened =
            assembly::open_store(&self.metadata, &entry, self.epoch, self.options.says).await;
        let (store, report) = match opened {
            Ok(store) => (Some(store), TargetReport::empty(&name)),
            Err(error) => (None, TargetReport::unread(&name, error.to_string())),
        };
        Checked { entry, name, store, report, index: None, segments: None, doubt: None, log: None }
    }

    /// The index of an object target by itself.
    async fn check_index(&self, target: &mut Checked) {
        let Some(store) = &target.store else { return };
        let begun = reactor::now();
        match self.read_index(&target.name, store).await {
            Ok(index) => {
                target.report.rows = index.rows;
                target.report.memory_bytes = index.memory_bytes;
                target.index = Some(index);
            }
            Err(error) => target.unread(&error),
        }
        target.report.seconds = begun.elapsed().as_secs_f64();
    }

    async fn read_index(&self, name: &str, store: &Store) -> Result<IndexReport, KvError> {
        let total_rows = store.usage().rows;
        let told = |done_rows| {
            let phase = "checking the index";
            (self.options.progress)(name, FsckProgress { phase, done_rows, total_rows });
        };
        check_index(store, &told).await
    }

    /// The metadata, and objects against it.
    async fn check_files(&self, target: &mut Checked, objects: &mut [Checked]) {
        let begun = reactor::now();
        let Some(store) = target.store.clone() else {
            for target in &mut *objects {
                self.tell_index(target, None, false).await;
            }
            return;
        };
        match self.check_metadata(&store, target, objects).await {
            Ok(()) => {}
            Err(error) => target.unread(&error),
        }
        target.report.seconds = begun.elapsed().as_secs_f64();
    }

    async fn check_metadata(
        &self,
        store: &Store,
        target: &mut Checked,
        objects: &mut [Checked],
    ) -> Result<(), TargetError> {
        let fs = self.table.fs.as_u64_pair().0;
        let last_ino =
            |target: &Checked| target.index.as_ref().map_or(0, |index| index.last_ino(fs));
        let last_object_ino = objects.iter().map(last_ino).max().unwrap_or(0);
        let mut report = self.read_metadata(&target.name, store).await?;
        let numbers = Numbers::of(store).await?;
        let given_out = report.last_ino.saturating_add(1).max(numbers.awaited_ino.unwrap_or(0));
        // Lost counters say nothing of how old it is.
        let is_older = numbers.next_ino > 0 && last_object_ino >= numbers.next_ino.max(given_out);
        let mut repairs = self.options.repair;
        if repairs && is_older {
            repairs = false;
            target.report.refused.push(
                "nothing was repaired: objects have inode numbers that were not given out yet, so the metadata is older"
                    .to_owned(),
            );
        }
        let is_awaited = numbers.awaited_ino.is_some();
        if repairs && is_awaited {
            target.report.refused.push(
                "no metadata was repaired: a client may bring back what it was told before the crash; \
                 `levada up`, and `levada down` once it is healthy, come first"
                    .to_owned(),
            );
        }
        for target in &mut *objects {
            self.tell_index(target, Some(store), repairs).await;
        }
        // What is not there any more when nothing more is repaired, was repaired.
        let mut paths = Paths::new(store);
        let mut met: Vec<(String, FoundItem)> = Vec::new();
        let options = RepairOptions { reattach: self.options.reattach, last_object_ino };
        for _ in 0..PASSES_MAX {
            if !repairs || is_awaited || report.found() == 0 {
                break;
            }
            for finding in &report.findings {
                let item = FoundItem::of(&target.name, finding, &mut paths).await?;
                met.push((format!("{finding:?}"), item));
            }
            if repair(store, &report, options).await? == 0 {
                break;
            }
            // Names may have changed with it.
            paths = Paths::new(store);
            report = self.read_metadata(&target.name, store).await?;
        }
        let left: BTreeSet<String> =
            report.findings.iter().map(|found| format!("{found:?}")).collect();
        let mut told = BTreeSet::new();
        let gone =
            met.into_iter().filter(|(key, _)| !left.contains(key) && told.insert(key.clone()));
        target.report.add(gone.map(|(_, item)| item), Done::Repaired);
        for finding in &report.findings {
            let item = FoundItem::of(&target.name, finding, &mut paths).await?;
            target.report.add([item], Done::Left);
        }
        target.report.found += report.found() - report.findings.len() as u64;
        target.report.take_sums(&report);
        self.check_objects(store, &report, target, objects, repairs && !is_awaited).await
    }

    async fn read_metadata(&self, name: &str, store: &Store) -> Result<FsckReport, KvError> {
        let config =
            FsckConfig { memory_bytes: self.options.memory_bytes, ..FsckConfig::default() };
        let fsck = Fsck::of_store(store.clone(), config);
        let told = async {
            loop {
                reactor::sleep(TELL_EVERY).await;
                (self.options.progress)(name, fsck.progress());
            }
        };
        match select(pin!(fsck.run()), pin!(told)).await {
            Either::Left((checked, _)) => checked,
            Either::Right((never, _)) => never,
        }
    }

    /// What was found of an index; its sums are set where they are to be repaired.
    async fn tell_index(&self, target: &mut Checked, metadata: Option<&Store>, repairs: bool) {
        if let Some(segments) = target.segments.take() {
            for finding in &segments.findings {
                let (sort, object) = (finding.sort(), finding.object());
                let item = object_item(&target.name, sort, object, finding.to_string(), metadata);
                let (says, has) = finding.says_has().unzip();
                target.report.add([FoundItem { says, has, ..item.await }], Done::Left);
            }
            target.report.found += segments.found - segments.findings.len() as u64;
        }
        if repairs && let Some(doubt) = &target.doubt {
            target.report.refused.push(format!("nothing was repaired: {doubt}"));
        }
        let repairs = repairs && target.doubt.is_none();
        let (Some(store), Some(index)) = (target.store.clone(), target.index.take()) else {
            return;
        };
        match self.mend_index(&store, index, &target.name, repairs).await {
            Ok((index, gone)) => {
                for (findings, done) in [(&gone, Done::Repaired), (&index.findings, Done::Left)] {
                    for finding in findings {
                        let item = item_of(&target.name, finding, metadata).await;
                        target.report.add([item], done);
                    }
                }
                target.report.found += index.found - index.findings.len() as u64;
                target.index = Some(index);
            }
            Err(error) => target.unread(&error),
        }
    }

    /// The index as it is afterwards, and what is not found any more.
    async fn mend_index(
        &self,
        store: &Store,
        index: IndexReport,
        name: &str,
        repairs: bool,
    ) -> Result<(IndexReport, Vec<IndexFinding>), TargetError> {
        if !repairs || !index.findings.iter().any(IndexFinding::is_sum) {
            return Ok((index, Vec::new()));
        }
        index.mend(store).await?;
        let after = self.read_index(name, store).await?;
        let gone = index.findings.into_iter().filter(|found| !after.findings.contains(found));
        let gone = gone.collect();
        Ok((after, gone))
    }

    /// Objects against files.
    async fn check_objects(
        &self,
        metadata: &Store,
        report: &FsckReport,
        target: &mut Checked,
        objects: &mut [Checked],
        repairs: bool,
    ) -> Result<(), TargetError> {
        let stores: Vec<(TargetId, Option<Store>)> = objects
            .iter()
            .map(|target| {
                (target.entry.id, target.store.clone().filter(|_| target.index.is_some()))
            })
            .collect();
        let (mut sides, mut unread) = (Vec::new(), Vec::new());
        for (id, store) in &stores {
            match store {
                Some(store) => sides.push(Side::new(*id, store).await?),
                None => unread.push(*id),
            }
        }
        let fs = self.table.fs.as_u64_pair().0;
        let numbers = Numbers::of(metadata).await?;
        let phase = "comparing objects with files";
        let total_rows = report.inodes;
        (self.options.progress)(&target.name, FsckProgress { phase, done_rows: 0, total_rows });
        let Compared { findings, found, awaited } =
            compare(metadata, fs, numbers, &mut sides, &unread).await?;
        for side in &sides {
            if let Some(target) = objects.iter_mut().find(|target| target.entry.id == side.id) {
                target.report.objects = side.count;
            }
        }
        drop(sides);
        if awaited > 0 {
            let what = format!("{awaited} objects whose files a client may bring back");
            target.report.not_checked.push(what);
        }
        let untold = found - findings.len() as u64;
        target.report.found += untold;
        // Below the next number, and everything that could name it is sound.
        let may_delete = repairs && is_sound(report) && untold == 0;
        let mut paths = Paths::new(metadata);
        let mut strays: Vec<(TargetId, ObjectId, FoundItem)> = Vec::new();
        for (on, finding) in findings {
            let at = objects.iter_mut().find(|target| Some(target.entry.id) == on);
            let at = at.unwrap_or(&mut *target);
            let item = finding.item(&at.name, &mut paths).await?;
            let mut done = Done::Left;
            match finding {
                ObjectFinding::Unlisted { object } if repairs => {
                    let noted = note_components(metadata, object.ino, 1 << object.component).await;
                    match noted {
                        Ok(true) => done = Done::Repaired,
                        Ok(false) | Err(MetaError::Damaged(_)) => {}
                        Err(MetaError::Store(error)) => return Err(error.into()),
                        Err(error) => at.report.refused.push(error.to_string()),
                    }
                }
                ObjectFinding::Stray { object } if may_delete => {
                    strays.push((at.entry.id, object, item));
                    continue;
                }
                _ => {}
            }
            at.report.add([item], done);
        }
        self.delete_strays(objects, strays).await;
        Ok(())
    }

    /// Deletes objects of no file.
    async fn delete_strays(
        &self,
        objects: &mut [Checked],
        mut strays: Vec<(TargetId, ObjectId, FoundItem)>,
    ) {
        for target in objects {
            let here: Vec<_> = strays.extract_if(.., |stray| stray.0 == target.entry.id).collect();
            let (ids, items): (Vec<_>, Vec<_>) =
                here.into_iter().map(|(_, object, item)| (object, item)).unzip();
            if ids.is_empty() {
                continue;
            }
            let done = match self.delete(target, &ids).await {
                Ok(()) => Done::Repaired,
                Err(error) => {
                    target.report.refused.push(format!("no object was deleted: {error}"));
                    Done::Left
                }
            };
            target.report.add(items, done);
        }
    }
}

/// Nothing is wrong with what could name a file.
fn is_sound(report: &FsckReport) -> bool {
    let beside = ["counter", "reply"];
    report.not_checked.is_empty() && report.counts.keys().all(|sort| beside.contains(sort))
}

pub(super) async fn item_of(
    target: &str,
    finding: &IndexFinding,
    metadata: Option<&Store>,
) -> FoundItem {
    let (says, has) = finding.says_has().unzip();
    let (sort, object) = (finding.sort(), finding.object());
    let item = object_item(target, sort, object, finding.to_string(), metadata).await;
    FoundItem { says, has, ..item }
}

/// A finding about an object, or none, with its file's place in the tree.
pub(super) async fn object_item(
    target: &str,
    sort: &str,
    object: Option<ObjectId>,
    text: String,
    metadata: Option<&Store>,
) -> FoundItem {
    let text = match object {
        Some(object) => format!("component {}: {text}", object.component),
        None => text,
    };
    let item = FoundItem {
        target: target.to_owned(),
        find: sort.to_owned(),
        ino: object.map(|object| object.ino.0),
        text,
        ..FoundItem::default()
    };
    let path = match (metadata, object) {
        // It is told without its path where that cannot be read.
        (Some(metadata), Some(object)) => {
            Paths::new(metadata).of_inode(object.ino).await.unwrap_or_default()
        }
        _ => None,
    };
    item.at(path)
}

impl Checked {
    fn unread(&mut self, error: &dyn std::error::Error) {
        self.report.not_checked.push(format!("the rest: {error}"));
    }
}
