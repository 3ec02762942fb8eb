//! The check of a cluster that is down: drives and arrays are assembled as by `up`, each metadata target's
//! store is opened, and no service over it.
//!
//! What always holds: beside the recovery that every opening is, nothing is written; and nothing is formatted.

use super::report::TargetReport;
use crate::arrays;
use crate::assembly::{self, AssemblyError};
use crate::drives::{self, DriveSource};
use crate::targets::{TargetEntry, TargetKind};
use futures_util::future::{Either, select};
use levada_base::Epoch;
use levada_base::reactor;
use levada_meta::{Fsck, FsckConfig, FsckProgress};
use levada_raid::RaidArray;
use levada_spec::ClusterFile;
use std::pin::pin;
use std::time::Duration;

/// How often progress is told.
const TELL_EVERY: Duration = Duration::from_millis(200);

/// What [`offline`] is told besides the cluster file.
pub struct FsckOptions<'a> {
    /// Bytes for what grows with the number of directories.
    pub memory_bytes: u64,
    /// Called with a line for people at each longer step.
    pub says: &'a dyn Fn(&str),
    /// Called with a target's name several times a second.
    pub progress: &'a dyn Fn(&str, FsckProgress),
}

/// Checks the metadata of a cluster that no node serves.
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
    let arrays = arrays::open(file, &drives).await?;
    let metadata = &assembly::find(&arrays, &fs.metadata).array;
    let table = assembly::find_table(metadata, options.says).await?;
    let mut reports = Vec::new();
    for entry in table.targets.iter().filter(|entry| entry.kind == TargetKind::Metadata) {
        reports.push(check(metadata, entry, drives.epoch, options).await);
    }
    if let Err(error) = arrays::close(&arrays).await {
        (options.says)(&format!("closing an array failed ({error}); the next start resyncs it"));
    }
    Ok(reports)
}

async fn check(
    metadata: &RaidArray,
    entry: &TargetEntry,
    epoch: Epoch,
    options: &FsckOptions<'_>,
) -> TargetReport {
    let name = entry.name();
    let store = match assembly::open_store(metadata, entry, epoch, options.says).await {
        Ok(store) => store,
        Err(error) => return TargetReport::unread(&name, error.to_string()),
    };
    let begun = reactor::now();
    let fsck = Fsck::of_store(
        store.clone(),
        FsckConfig { memory_bytes: options.memory_bytes, ..FsckConfig::default() },
    );
    let told = async {
        loop {
            reactor::sleep(TELL_EVERY).await;
            (options.progress)(&name, fsck.progress());
        }
    };
    let checked = match select(pin!(fsck.run()), pin!(told)).await {
        Either::Left((checked, _)) => checked,
        Either::Right((never, _)) => never,
    };
    let report = match checked {
        Ok(report) => TargetReport::of(&name, &store, report, begun.elapsed()).await,
        Err(error) => Err(error),
    };
    if let Err(error) = store.close().await {
        (options.says)(&format!("target {name}: closing its store failed: {error}"));
    }
    report.unwrap_or_else(|error| TargetReport::unread(&name, error.to_string()))
}
