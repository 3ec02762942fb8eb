//! Assembly: from a cluster file and its drives to targets that serve.
//!
//! Drives are taken under a new epoch, arrays opened over their slices, the target table read,
//! and each target opened on its part of the arrays. The simulator calls this very code with
//! drives of its own.
//!
//! What always holds:
//! - The target table is written last, so a cluster is whole or was never there.
//! - A target that cannot be opened does not keep the others from serving.
//!
//! After a crash the same steps are taken again under the next epoch; each floor recovers by
//! itself when it is opened.

use crate::arrays::{self, ArrayError, ClusterArray};
use crate::counted::Counted;
use crate::damage::BeyondRepair;
use crate::drives::{self, DriveSource, Drives, DrivesError, MayOverwrite};
use crate::recorded;
use crate::targets::{TableError, TargetEntry, TargetKind, TargetTable, deal};
use levada_base::ids::Uuid;
use levada_base::units::{BLOCK_BYTES, MIB};
use levada_base::{Buf, BufMut, Epoch};
use levada_device::{BlockError, Device, Durability};
use levada_kv::{KvError, Store};
use levada_log::{LogError, ObjectLog};
use levada_meta::{FsConfig, MetaError, MetaService, ServeConfig};
use levada_object::ObjectService;
use levada_raid::{
    Array, ByteRange, IoClass, Limits, MemberSet, RaidArray, ScrubReport, StripeRange,
};
use levada_spec::{ArraySpec, ClusterFile, FileSystemSpec};
use levada_wire::rpc::{Handler, Router};
use std::collections::BTreeSet;
use std::rc::Rc;

/// Why a cluster cannot be brought up.
#[derive(Debug, thiserror::Error)]
pub enum AssemblyError {
    #[error(transparent)]
    Drives(DrivesError),
    #[error(transparent)]
    Array(#[from] ArrayError),
    #[error(transparent)]
    Table(#[from] TableError),
    #[error("the target table cannot be read or written: {0}")]
    TableIo(BlockError),
    #[error("target {target}: {source}")]
    Target { target: String, source: TargetError },
    /// A part of the file that this release does not serve.
    #[error("{what} is not served by this release")]
    NotServed { what: &'static str },
}

impl From<DrivesError> for AssemblyError {
    fn from(error: DrivesError) -> Self {
        match error {
            DrivesError::Array(error) => Self::Array(error),
            error => Self::Drives(error),
        }
    }
}

/// Why a target cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    #[error(transparent)]
    Block(#[from] BlockError),
    #[error(transparent)]
    Store(#[from] KvError),
    #[error(transparent)]
    Log(#[from] LogError),
    #[error(transparent)]
    Meta(#[from] MetaError),
}

impl TargetError {
    /// True when its key-value store holds what it was not given: another copy may be right, whoever
    /// met the wrong one.
    fn is_damage(&self) -> bool {
        match self {
            Self::Store(error)
            | Self::Log(LogError::Kv(error))
            | Self::Meta(MetaError::Store(error)) => matches!(error, KvError::Damaged { .. }),
            Self::Log(LogError::Index { .. }) | Self::Meta(MetaError::Damaged(_)) => true,
            Self::Block(_) | Self::Log(_) | Self::Meta(_) => false,
        }
    }

    /// For people: what it was, and what would help.
    fn told_of(&self, entry: &TargetEntry) -> String {
        // A store without a log is what a rebuild leaves that was cut off.
        let no_log = LogError::Foreign { what: "the store holds no log" };
        let is_index = self.is_damage() || matches!(self, Self::Log(error) if *error == no_log);
        match entry.kind {
            TargetKind::Objects if is_index => format!(
                "{self}; `levada fsck --rebuild-index {}` makes its index anew from its segments",
                entry.name()
            ),
            TargetKind::Objects | TargetKind::Metadata => self.to_string(),
        }
    }
}

/// What one inode with its names, replies and sessions takes of the metadata store, at most on
/// average: names of 100 bytes.
const INODE_BYTES: u64 = 1024;

/// What a target serves.
pub enum Service {
    Objects {
        log: ObjectLog,
        service: Rc<ObjectService>,
    },
    Metadata {
        service: Rc<MetaService>,
        counted: Rc<Counted>,
    },
    /// It could not be opened; the reason is for people.
    Stopped {
        why: String,
    },
}

/// A target of this node.
pub struct Target {
    pub entry: TargetEntry,
    pub store: Option<Store>,
    pub service: Service,
}

impl Target {
    /// Why it has stopped serving since it was opened, if it has.
    #[must_use]
    pub fn failure(&self) -> Option<KvError> {
        self.store.as_ref()?.failure()
    }
}

/// A cluster that serves.
pub struct Cluster {
    pub file: ClusterFile,
    pub drives: Drives,
    pub arrays: Vec<Rc<ClusterArray>>,
    pub table: TargetTable,
    pub targets: Vec<Target>,
    /// Hands requests to the targets.
    pub router: Rc<Router>,
    /// What of the cluster file has no effect; empty when all has.
    pub remarks: Vec<String>,
    pub beyond_repair: BeyondRepair,
}

/// What a node keeps in memory, and how it cuts.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    /// Bytes of each target's intent log, at most a sixteenth of its part of the mirror.
    pub log_bytes_max: u64,
    /// Bytes of clean rows that each key-value store keeps.
    pub cache_bytes: usize,
    /// Stripes per segment of the object log.
    pub segment_stripes: u32,
}

impl Default for Tuning {
    fn default() -> Self {
        Self { log_bytes_max: 64 * MIB, cache_bytes: 64 * MIB as usize, segment_stripes: 32 }
    }
}

impl Tuning {
    pub(crate) fn store(&self, entry: &TargetEntry) -> levada_kv::Config {
        let log_bytes = (entry.store_bytes / 16 / MIB).max(4) * MIB;
        levada_kv::Config {
            log_bytes: log_bytes.min(self.log_bytes_max),
            cache_bytes: self.cache_bytes,
        }
    }
}

/// What [`start`] is told besides the cluster file.
pub struct StartOptions<'a> {
    pub may_overwrite: MayOverwrite,
    /// Arrays are opened, if what is there holds all data, also where half or more of the members are away: nobody else has them.
    pub without_majority: bool,
    pub tuning: Tuning,
    /// Where clients reach this node's targets.
    pub address: String,
    /// Called with a line for people at each longer step.
    pub progress: &'a dyn Fn(&str),
}

/// The file system of a cluster, unless its file asks for what cannot be served yet.
pub(crate) fn refuse_unserved(file: &ClusterFile) -> Result<&FileSystemSpec, AssemblyError> {
    let [fs] = &file.filesystems[..] else {
        return Err(AssemblyError::NotServed { what: "other than one file system" });
    };
    if file.hosts.len() > 1 {
        return Err(AssemblyError::NotServed { what: "a cluster of several hosts" });
    }
    Ok(fs)
}

/// Brings a cluster up: formats it when all its drives are new, else opens it.
///
/// # Errors
///
/// [`AssemblyError`], which says what would help.
pub async fn start(
    file: ClusterFile,
    source: &dyn DriveSource,
    options: StartOptions<'_>,
) -> Result<Cluster, AssemblyError> {
    let fs = refuse_unserved(&file)?;
    let drives = drives::take(
        source,
        &file,
        options.may_overwrite,
        options.without_majority,
        options.tuning.segment_stripes,
        options.progress,
    )
    .await?;
    let arrays = if drives.fresh {
        (options.progress)("creating arrays");
        arrays::create(&file, &drives).await?
    } else {
        match arrays::open(&file, &drives, options.without_majority).await {
            Ok(arrays) => arrays,
            Err(error) => {
                for drive in &drives.drives {
                    if let Err(why) = &drive.found {
                        (options.progress)(&format!("drive {}: {why}", drive.spec.name));
                    }
                }
                return Err(error.into());
            }
        }
    };
    let metadata = find(&arrays, &fs.metadata);
    let data = find(&arrays, &fs.data);
    let table = if drives.fresh {
        None
    } else {
        Some(find_table(&metadata.array, options.progress).await?)
    };
    let (table, fresh) = match table {
        Some(table) => (table, false),
        None => (new_table(&file, fs, &drives, metadata, data, options.tuning)?, true),
    };
    let opener = Opener {
        fs,
        epoch: drives.epoch,
        fresh,
        table: &table,
        metadata: metadata.array.clone(),
        data: Rc::new(data.array.clone()),
        options: &options,
    };
    let mut targets = Vec::new();
    for entry in &table.targets {
        targets.push(opener.open(*entry).await?);
    }
    if fresh {
        metadata.array.flush().await.map_err(AssemblyError::TableIo)?;
        write_table(&metadata.array, &table).await?;
    }
    let router = Rc::new(Router::default());
    for target in &targets {
        match &target.service {
            Service::Objects { service, .. } => {
                router.insert(target.entry.id, Rc::clone(service) as Rc<_>);
            }
            Service::Metadata { counted, .. } => {
                router.insert(target.entry.id, Rc::clone(counted) as Rc<_>);
            }
            Service::Stopped { .. } => {}
        }
    }
    let stopped = targets.iter().filter(|target| matches!(target.service, Service::Stopped { .. }));
    let stopped: BTreeSet<_> = stopped.map(|target| target.entry.id).collect();
    for target in &targets {
        if let Service::Metadata { service, .. } = &target.service {
            service.avoid(&stopped);
        }
    }
    let remarks = remarks(&targets, fs).await;
    let beyond_repair = BeyondRepair::default();
    Ok(Cluster { drives, arrays, table, targets, router, remarks, beyond_repair, file })
}

/// What the file says of a file system that was made otherwise.
async fn remarks(targets: &[Target], fs: &FileSystemSpec) -> Vec<String> {
    let mut remarks = Vec::new();
    for target in targets {
        if let (Service::Metadata { .. }, Some(store)) = (&target.service, &target.store)
            && let Ok(Some(row)) = store.get(b"M\0").await
        {
            remarks.extend(recorded::stripe_remark(&row, fs));
        }
    }
    remarks
}

pub(crate) fn find<'a>(arrays: &'a [Rc<ClusterArray>], name: &str) -> &'a ClusterArray {
    let found = arrays.iter().find(|array| array.spec.name == name);
    found.expect("a checked cluster file names its arrays")
}

/// Reads the table, after repair if need be.
pub(crate) async fn find_table(
    mirror: &RaidArray,
    progress: &dyn Fn(&str),
) -> Result<TargetTable, AssemblyError> {
    match read_table(mirror).await {
        Err(AssemblyError::Table(error)) => {
            compare_copies(mirror, &error.to_string(), progress).await;
            read_table(mirror).await
        }
        read => read,
    }
}

/// One wrong copy is outvoted by two others; but whoever reads a mirror gets just one of them.
async fn compare_copies(mirror: &RaidArray, why: &str, progress: &dyn Fn(&str)) {
    tracing::error!(why, "comparing all copies to repair it");
    progress(&format!("{why}; comparing all copies to repair it"));
    compare(mirror).await;
}

/// Compares the copies of a mirror everywhere, and puts right what is outvoted.
/// What was found; `None` when the mirror stopped.
pub(crate) async fn compare(mirror: &RaidArray) -> Option<ScrubReport> {
    match mirror.scrub_anew(Limits::NONE).await {
        Ok(report) => {
            tracing::info!(?report, "compared");
            Some(report)
        }
        Err(error) => {
            tracing::error!(%error, "the comparison stopped");
            None
        }
    }
}

async fn read_table(mirror: &RaidArray) -> Result<TargetTable, AssemblyError> {
    let block = || BufMut::for_overwrite(BLOCK_BYTES as usize).into_vec();
    let error = match mirror.read_agreed(0, block()).await {
        Ok(read) => return Ok(TargetTable::decode(&read[0])?),
        Err(error) => error,
    };
    // Where two copies are left and disagree, the checksum tells the right one.
    let members = 0..mirror.status().members.len();
    for only in members.clone() {
        let others = members.clone().filter(|member| *member != only);
        let others = others.fold(MemberSet::NONE, MemberSet::with);
        if let Ok(read) = mirror.read_avoiding(0, block(), others, IoClass::Foreground).await
            && let Ok(table) = TargetTable::decode(&read[0])
        {
            tracing::warn!(only, "the target table is read from one copy alone");
            return Ok(table);
        }
    }
    Err(AssemblyError::TableIo(error))
}

async fn write_table(mirror: &dyn Device, table: &TargetTable) -> Result<(), AssemblyError> {
    let block = Buf::copy_of(&table.encode()).into_vec();
    mirror.write(0, block, Durability::Fua).await.map_err(AssemblyError::TableIo)
}

fn new_table(
    file: &ClusterFile,
    fs: &FileSystemSpec,
    drives: &Drives,
    metadata: &ClusterArray,
    data: &ClusterArray,
    tuning: Tuning,
) -> Result<TargetTable, AssemblyError> {
    let targets = deal(
        metadata.array.info().capacity_bytes,
        data.array.geometry().stripes,
        u64::from(tuning.segment_stripes),
        fs.metadata_targets,
        fs.object_targets,
    )?;
    debug_assert_eq!(file.filesystems.len(), 1);
    let random = levada_base::reactor::random_u64;
    Ok(TargetTable {
        cluster: drives.cluster,
        fs: Uuid::from_u64_pair(random(), random()),
        fs_name: fs.name.clone(),
        epoch: drives.epoch,
        targets,
    })
}

/// The part of the metadata array that holds a target's store.
pub(crate) fn store_area(
    metadata: &RaidArray,
    entry: &TargetEntry,
) -> Result<Rc<dyn Device>, BlockError> {
    let mirror: Rc<dyn Device> = Rc::new(metadata.clone());
    let area = ByteRange::new(&entry.name(), mirror, entry.store_at, entry.store_bytes)?;
    Ok(Rc::new(area))
}

/// The part of the data array that holds a target's objects.
pub(crate) fn stripes_of(
    data: &Rc<dyn Array>,
    entry: &TargetEntry,
) -> Result<Rc<dyn Array>, BlockError> {
    let data = Rc::clone(data);
    let stripes = StripeRange::new(&entry.name(), data, entry.first_stripe, entry.stripes)?;
    Ok(Rc::new(stripes))
}

/// How a target's log is opened; `fs` is the number of the file system in object names.
pub(crate) fn log_config(fs: u64, entry: &TargetEntry, tuning: Tuning) -> levada_log::Config {
    let segment_stripes = tuning.segment_stripes;
    levada_log::Config { segment_stripes, ..levada_log::Config::new(fs, entry.id) }
}

/// Opens a target's store and not its service; after repair, if need be.
///
/// # Errors
///
/// When it cannot be opened.
pub(crate) async fn open_store(
    metadata: &RaidArray,
    entry: &TargetEntry,
    epoch: Epoch,
    progress: &dyn Fn(&str),
) -> Result<Store, TargetError> {
    let config = Tuning::default().store(entry);
    match Store::open(store_area(metadata, entry)?, epoch, config).await {
        Err(error @ KvError::Damaged { .. }) => {
            compare_copies(metadata, &format!("target {}: {error}", entry.name()), progress).await;
            Ok(Store::open(store_area(metadata, entry)?, epoch, config).await?)
        }
        opened => Ok(opened?),
    }
}

/// What opening a target needs.
struct Opener<'a> {
    fs: &'a FileSystemSpec,
    epoch: Epoch,
    /// Make the target rather than open it.
    fresh: bool,
    table: &'a TargetTable,
    metadata: RaidArray,
    data: Rc<dyn Array>,
    options: &'a StartOptions<'a>,
}

impl Opener<'_> {
    /// Opens a target. One that cannot be opened is stopped; one that cannot be made is an error.
    async fn open(&self, entry: TargetEntry) -> Result<Target, AssemblyError> {
        let mut opened = self.try_open(entry).await;
        if let Err(error) = &opened
            && error.is_damage()
            && !self.fresh
        {
            let why = format!("target {}: {error}", entry.name());
            compare_copies(&self.metadata, &why, self.options.progress).await;
            opened = self.try_open(entry).await;
        }
        match opened {
            Ok((store, service)) => Ok(Target { entry, store: Some(store), service }),
            Err(source) if self.fresh => {
                Err(AssemblyError::Target { target: entry.name(), source })
            }
            Err(error) => {
                tracing::error!(target = entry.name(), %error, "the target cannot be opened");
                let service = Service::Stopped { why: error.told_of(&entry) };
                Ok(Target { entry, store: None, service })
            }
        }
    }

    async fn try_open(&self, entry: TargetEntry) -> Result<(Store, Service), TargetError> {
        let area = store_area(&self.metadata, &entry)?;
        let config = self.options.tuning.store(&entry);
        let store = if self.fresh {
            Store::create(area, self.epoch, config).await?
        } else {
            Store::open(area, self.epoch, config).await?
        };
        let service = match entry.kind {
            TargetKind::Objects => self.open_objects(entry, store.clone()).await?,
            TargetKind::Metadata => self.open_metadata(entry, store.clone()).await?,
        };
        Ok((store, service))
    }

    /// The number of the file system in object names.
    fn fs_id(&self) -> u64 {
        self.table.fs.as_u64_pair().0
    }

    async fn open_objects(&self, entry: TargetEntry, store: Store) -> Result<Service, TargetError> {
        let stripes = stripes_of(&self.data, &entry)?;
        let config = log_config(self.fs_id(), &entry, self.options.tuning);
        let log = if self.fresh {
            ObjectLog::create(stripes, store, config, self.epoch).await?
        } else {
            ObjectLog::open(stripes, store, config, self.epoch).await?
        };
        let service = ObjectService::new(Rc::new(log.clone()));
        Ok(Service::Objects { log, service })
    }

    async fn open_metadata(
        &self,
        entry: TargetEntry,
        store: Store,
    ) -> Result<Service, TargetError> {
        let objects = self.table.targets.iter().filter(|entry| entry.kind == TargetKind::Objects);
        let serve = ServeConfig {
            objects: objects.map(|entry| (entry.id, self.options.address.clone())).collect(),
            cache_bytes: self.options.tuning.cache_bytes,
            ..ServeConfig::default()
        };
        let service = if self.fresh {
            let usage = store.usage();
            let fs = FsConfig {
                uuid: *self.table.fs.as_bytes(),
                name: self.fs.name.clone(),
                target: entry.id.0 as u16,
                stripe_count: self.fs.stripe_count,
                stripe_unit: self.fs.stripe_unit.0,
                inodes_max: (usage.bytes_max - usage.bytes_kept) / INODE_BYTES,
                root_mode: 0o755,
                root_uid: 0,
                root_gid: 0,
            };
            MetaService::create(store, fs, serve).await?
        } else {
            MetaService::open(store, serve).await?
        };
        let service = Rc::new(service);
        let counted = Counted::new(Rc::clone(&service) as Rc<dyn Handler>);
        Ok(Service::Metadata { service, counted })
    }
}

impl Cluster {
    /// The first metadata target.
    #[must_use]
    pub fn metadata_target(&self) -> Option<levada_base::ids::TargetId> {
        let is_metadata = |entry: &&TargetEntry| entry.kind == TargetKind::Metadata;
        self.table.targets.iter().find(is_metadata).map(|entry| entry.id)
    }

    /// The arrays of a role first: metadata before data, the order of rebuilds.
    #[must_use]
    pub fn metadata_first(&self) -> Vec<Rc<ClusterArray>> {
        let is_metadata =
            |spec: &ArraySpec| self.file.filesystems.iter().any(|fs| fs.metadata == spec.name);
        let mut arrays = self.arrays.clone();
        arrays.sort_by_key(|array| !is_metadata(&array.spec));
        arrays
    }

    /// Makes everything durable and closes every floor in order. No request may be in flight. Returns what could not be closed, and what
    /// comes of it, a line for each; not of what lies on arrays that had stopped before, which is told while the cluster is up.
    pub async fn stop(&self) -> Vec<String> {
        let had_stopped = |array: &Rc<ClusterArray>| array.array.status().stopped.is_some();
        let stopped = self.arrays.iter().filter(|array| had_stopped(array));
        let stopped: Vec<&str> = stopped.map(|array| &*array.spec.name).collect();
        let is_of_files = |array: &&str| {
            self.file.filesystems.iter().any(|fs| [&*fs.data, &*fs.metadata].contains(array))
        };
        let have_files_stopped = stopped.iter().any(is_of_files);
        let mut left_open = Vec::new();
        let mut leave = |what: String, is_known: bool| {
            tracing::error!("{what}");
            if !is_known {
                left_open.push(what);
            }
        };
        for target in &self.targets {
            self.router.remove(target.entry.id);
        }
        for target in &self.targets {
            let name = target.entry.name();
            if let Service::Objects { log, .. } = &target.service
                && let Err(error) = log.settle().await
            {
                let what = format!("target {name}: settling the object log failed: {error}");
                leave(what, have_files_stopped);
            }
            if let Service::Metadata { service, .. } = &target.service
                && let Err(fault) = service.close_tail().await
            {
                let what = format!("target {name}: {fault}; the next start waits for a client");
                leave(what, have_files_stopped);
            }
            if let Some(store) = &target.store
                && let Err(error) = store.close().await
            {
                let what = format!("target {name}: closing the key-value store failed: {error}");
                leave(what, have_files_stopped);
            }
        }
        for (array, error) in arrays::close(&self.arrays).await {
            // It is in order where it is now.
            if matches!(error, BlockError::Fenced { .. }) {
                tracing::warn!(array, %error, "another server has taken the array over");
                continue;
            }
            let what =
                format!("array {array}: closing it failed: {error}; the next start resyncs it");
            leave(what, stopped.contains(&array));
        }
        left_open
    }
}
