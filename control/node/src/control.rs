//! What people and programs may ask a node: one JSON object per line over a Unix socket in the
//! node's state directory, one line back per answer.
//!
//! A REST API will carry the same values. Nothing on the data path passes here.

use crate::fsck::FsckState;
use crate::meters::{CacheMeters, Meters, MountMeters};
use crate::quota::{Quota, QuotaChange, Who};
use crate::state::{Phase, RunningNode, StateDir, StateError};
use levada_desk::AskError;
use levada_export_nvmet::AnaState;
use levada_health::{DriveHealth, PathStatus};
use levada_volume::qos::{Limits, LimitsChange};
use levada_volume::{SnapshotRow, Tenant, VolumeName, VolumeOrder, VolumeStatus};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A question or an order to a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum ControlRequest {
    /// Answered by [`ControlReply::Status`].
    Status,
    /// Answered by [`ControlReply::Meters`].
    Meters,
    /// Stops using a drive at once, as if it had been pulled. With `force`, also when its data
    /// is nowhere else.
    DriveFail { drive: String, force: bool },
    /// Reads the cluster file again and puts the drive that it names in the place of a failed
    /// one, to be rebuilt. A drive that only some arrays are without goes back to those. `force`
    /// overwrites what is on it.
    DriveReplace { drive: String, force: bool },
    /// Reads the cluster file again and takes a drive that is new in it as a spare, also where
    /// that was begun before and cut short.
    DriveAdd { drive: String, force: bool },
    /// Starts a scrub of every array and every object target, unless one runs.
    Scrub,
    /// Starts a check of all targets, unless one runs. Answered by [`ControlReply::FsckStarted`].
    Fsck {
        /// For what grows with the number of directories.
        memory_bytes: u64,
        /// Without leaving half of the time to others.
        fast: bool,
    },
    /// Answered by [`ControlReply::Fsck`], with findings from this number on.
    FsckState { from: u64 },
    /// Ends the check that runs.
    FsckStop,
    /// Sets what somebody may use.
    QuotaSet { who: Who, change: QuotaChange },
    /// Who uses what; of all of whom something is known, or of one. Answered by [`ControlReply::Quotas`].
    Quotas { who: Option<Who> },
    /// Gives a directory to a project (0: to none); with `recursive` all that is below it, too.
    ProjectSet { path: String, project: u32, recursive: bool },
    /// Something to be done with a thin volume.
    Volume { order: VolumeOrder },
    /// Answered by [`ControlReply::Volumes`]: all, or those of a tenant.
    Volumes { tenant: Option<Tenant> },
    /// Answered by [`ControlReply::Snapshots`]: all, or those of a volume.
    Snapshots { of: Option<VolumeName> },
    /// Changes what all volumes of a tenant may use and store together; it need not have any yet.
    TenantSet {
        tenant: Tenant,
        change: LimitsChange,
        /// 0: as much as there is.
        capacity_bytes: Option<u64>,
    },
    /// Forgets a tenant that has no volumes.
    TenantDelete { tenant: Tenant },
    /// How good a path is over which hosts reach a tenant's volumes by NVMe/TCP; from 1 on, as the cluster file has them.
    TenantPath { tenant: Tenant, path: usize, state: AnaState },
    /// Makes a directory within the file system, unless it is there, and gives it to a tenant. One that is there must be empty, or belong
    /// to that one. Answered by [`ControlReply::SubtreeOf`].
    SubtreeGive { path: String, tenant: Tenant },
    /// Answered by [`ControlReply::Tenants`].
    Tenants,
    /// Everything durable, then ends the node.
    Down,
}

/// A node's answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "kebab-case")]
pub enum ControlReply {
    Done,
    Status(Box<Status>),
    Meters(Box<Meters>),
    /// Answers [`ControlRequest::Meters`], too, where a mount is asked.
    MountMeters(Box<MountMeters>),
    FsckStarted {
        number: u64,
    },
    Fsck(Box<FsckState>),
    Quotas {
        quotas: Vec<Quota>,
    },
    Volumes {
        volumes: Vec<VolumeStatus>,
    },
    Snapshots {
        snapshots: Vec<SnapshotRow>,
    },
    Tenants {
        tenants: Vec<TenantStatus>,
    },
    SubtreeOf {
        /// The tenant's, as quotas call it.
        number: u32,
    },
    /// It could not be done; the text says what, where, and what to do.
    Failed {
        why: String,
    },
}

/// A node as it is now.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    pub cluster: String,
    pub pid: u32,
    pub uptime_s: f64,
    /// Where clients connect.
    pub address: String,
    /// One line per thing that wants attention; empty when all is well.
    pub problems: Vec<String>,
    /// What the arrays survive now, in words.
    pub survives: Vec<String>,
    pub drives: Vec<DriveStatus>,
    pub arrays: Vec<ArrayStatus>,
    pub targets: Vec<TargetStatus>,
    pub clients: Vec<ClientStatus>,
    #[serde(default)]
    pub exports: Vec<ExportStatus>,
    /// Where it is mounted on this machine; filled in by the program that asks.
    #[serde(default)]
    pub mounts: Vec<MountStatus>,
    /// Bytes moved by clients since the node started, and over the last second.
    pub traffic: Traffic,
}

impl Status {
    /// The arrays that have stopped, each with the reason.
    #[must_use]
    pub fn stopped(&self) -> Vec<String> {
        let of = |what: &str| -> Vec<String> {
            self.problems.iter().filter(|problem| problem.starts_with(what)).cloned().collect()
        };
        let arrays = self.arrays.iter().filter(|array| array.state == "stopped");
        arrays.flat_map(|array| of(&format!("array {} ", array.name))).collect()
    }

    /// The drives that serve now and cannot be found at the next start, in words.
    #[must_use]
    pub fn gone_next_time(&self) -> Vec<String> {
        let is_gone = |problem: &&String| problem.ends_with("is missing at the next start");
        self.problems.iter().filter(is_gone).cloned().collect()
    }

    /// Why no name can be looked up, when that is so.
    #[must_use]
    pub fn stopped_metadata(&self) -> Option<String> {
        let is_stopped =
            |target: &&TargetStatus| target.name.starts_with("mdt") && target.state == "stopped";
        let target = &self.targets.iter().find(is_stopped)?.name;
        let start = format!("target {target} ");
        self.problems.iter().find(|problem| problem.starts_with(&start)).cloned()
    }
}

/// A drive.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DriveStatus {
    pub name: String,
    pub enclosure: String,
    pub path: PathBuf,
    pub capacity_bytes: u64,
    /// `ok`, `failed`, `missing`.
    pub state: String,
    /// Of a spare of the cluster: `spare`, or `in use` when it has the place of a lost drive.
    #[serde(default)]
    pub spare: Option<String>,
    pub bytes_read: u64,
    pub bytes_written: u64,
    pub errors: u64,
    /// Of a drive on the network.
    #[serde(default)]
    pub paths: Vec<PathStatus>,
    /// As it says itself; `None` where it does not.
    #[serde(default)]
    pub health: Option<DriveHealth>,
}

/// An array.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ArrayStatus {
    pub name: String,
    /// As in `RAID 6 8+2, 128 KiB chunks`.
    pub level: String,
    /// `healthy`, `degraded`, `rebuilding`, `stopped`.
    pub state: String,
    pub capacity_bytes: u64,
    pub written_bytes: u64,
    pub members: Vec<MemberStatus>,
    pub rebuild: Option<Progress>,
    pub scrub: Option<Progress>,
    pub last_scrub: Option<ScrubResult>,
}

/// A member of an array.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MemberStatus {
    pub drive: String,
    /// `in sync`, `rebuilding`, `spare`, `out`.
    pub state: String,
    /// Much slower than the others.
    #[serde(default)]
    pub slow: bool,
    /// Unreadable places, each repaired from redundancy where that could be.
    pub medium_errors: u64,
    pub io_errors: u64,
    pub repairs: u64,
    /// Latency of its reads and writes, microseconds.
    pub p50_us: u64,
    pub p99_us: u64,
}

/// Work under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    pub done_bytes: u64,
    pub total_bytes: u64,
    pub bytes_per_s: u64,
}

/// What a scrub found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubResult {
    pub checked_bytes: u64,
    pub repaired: u64,
    /// Wrong beyond what redundancy repairs.
    pub unrepairable: u64,
    /// Left out because it was being written, or because too few members are there to tell.
    #[serde(default)]
    pub skipped_bytes: u64,
    /// What was not checked, or not to its end, each with the reason; then the rest says nothing of that.
    #[serde(default)]
    pub not_checked: Vec<String>,
}

/// A target.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TargetStatus {
    pub name: String,
    /// `serving`, `recovering` (a client that holds names not yet durable is awaited), `stopped`.
    pub state: String,
    pub total_bytes: u64,
    pub free_bytes: u64,
    pub requests: u64,
    /// Requests that have begun and not ended.
    #[serde(default)]
    pub in_flight: u64,
    /// Latency of its requests since the start, microseconds.
    #[serde(default)]
    pub p50_us: u64,
    #[serde(default)]
    pub p99_us: u64,
    /// Of the intent log, what a restart would replay, percent.
    #[serde(default)]
    pub log_percent: u64,
    /// Segments of an object log, and those that are free.
    #[serde(default)]
    pub segments: Option<Segments>,
    /// Rows of the metadata, or objects of an index, that were asked for since the start.
    #[serde(default)]
    pub cache: CacheMeters,
    /// The last scrub of an object log.
    #[serde(default)]
    pub last_scrub: Option<ObjectScrub>,
}

/// What a scrub of an object log found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectScrub {
    /// Seconds since 1970.
    pub ended_s: u64,
    pub checked_bytes: u64,
    pub repaired_blocks: u64,
    /// Places beyond repair.
    pub damaged: u64,
}

/// The segments of an object log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segments {
    pub free: u64,
    pub total: u64,
    /// Bytes that the cleaner copied since the start.
    pub cleaned_bytes: u64,
}

/// A tenant of volumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantStatus {
    pub tenant: Tenant,
    /// As quotas call it; 0: they do not count for it yet.
    pub number: u32,
    pub volumes: usize,
    /// What clients see of all of them together.
    pub size_bytes: u64,
    pub stored_bytes: u64,
    /// What it may store.
    pub capacity_bytes: Option<u64>,
    /// Of all of them together.
    pub limits: Limits,
}

/// Where volumes of a tenant, or a directory, are shown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportStatus {
    pub tenant: String,
    /// Where its NBD server listens; empty when it shows volumes in another way.
    #[serde(default)]
    pub nbd: String,
    /// The directory with its vhost-user-blk sockets.
    #[serde(default)]
    pub vhost: Option<PathBuf>,
    /// Where its NVMe/TCP target listens.
    #[serde(default)]
    pub nvme: Vec<String>,
    /// How good each of those says it is; `None` for one that does not serve.
    #[serde(default)]
    pub nvme_states: Vec<Option<AnaState>>,
    /// The socket at which a guest mounts a directory.
    #[serde(default)]
    pub virtiofs: Option<PathBuf>,
    /// That directory.
    #[serde(default)]
    pub subtree: String,
    pub tls: bool,
    /// Connections now; of a socket for a guest filled in by the program that asks, as a process of its own serves it.
    pub clients: usize,
    /// Why it does not serve.
    pub problem: Option<String>,
}

/// A mount on this machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MountStatus {
    pub dir: PathBuf,
    /// All that a guest sees there, when that is not the whole file system.
    #[serde(default)]
    pub subtree: Option<String>,
    /// What its process has done since it began; `None` where it does not say.
    pub now: Option<MountNow>,
}

/// What programs asked of a mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountNow {
    pub requests: u64,
    pub in_flight: u64,
    /// Latency of its requests, microseconds.
    pub p50_us: u64,
    pub p99_us: u64,
    /// Names and attributes that were known without asking, and that were not.
    pub cache: CacheMeters,
}

/// A client with a lease: a mount or a program.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClientStatus {
    pub id: u64,
    pub open_files: u64,
}

/// Bytes moved for clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    pub read_bytes: u64,
    pub written_bytes: u64,
    pub read_bytes_per_s: u64,
    pub written_bytes_per_s: u64,
    pub metadata_per_s: u64,
}

/// Why a node could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// No node listens there.
    #[error("no node is running here (nothing answers at {}); start one with `levada up`", .socket.display())]
    NotRunning { socket: PathBuf },
    /// It listens when it is up.
    #[error(
        "a node is starting here (process {pid}), and answers when it is up; `levada down` stops it"
    )]
    Starting { pid: u32 },
    /// It listens no more.
    #[error(
        "a node is ending here (process {pid}), and answers no more; `levada down` waits for its end"
    )]
    Ending { pid: u32 },
    /// A node may listen there, for its own user only.
    #[error(
        "permission denied: the node at {} belongs to another user; ask as that user, or as root",
        .socket.display()
    )]
    Denied { socket: PathBuf },
    /// The connection broke.
    #[error("the node stopped answering")]
    Broken(#[source] std::io::Error),
    /// The answer was not understood: program and node are of different versions.
    #[error("the node's answer was not understood; program and node differ in version")]
    Version(#[source] serde_json::Error),
    /// The node refused.
    #[error("{why}")]
    Refused { why: String },
}

impl ControlError {
    /// What a desk that gave no answer means, when it is a node's.
    fn of(error: AskError, socket: &Path) -> Self {
        let socket = socket.to_owned();
        match error {
            AskError::NobodyThere => {
                let state = StateDir(socket.parent().unwrap_or(&socket).to_owned());
                match state.node() {
                    Ok(Some(RunningNode { pid, phase: Phase::Starting })) => Self::Starting { pid },
                    Ok(Some(RunningNode { pid, phase: Phase::Ending })) => Self::Ending { pid },
                    Err(StateError::Denied { .. }) => Self::Denied { socket },
                    _ => Self::NotRunning { socket },
                }
            }
            AskError::Denied => Self::Denied { socket },
            AskError::Broken(error) => Self::Broken(error),
            AskError::NotUnderstood(error) => Self::Version(error),
        }
    }
}

/// Asks the node whose control socket is `socket`. Blocks; for programs, not for reactors.
///
/// # Errors
///
/// [`ControlError`].
pub fn ask(socket: &Path, request: &ControlRequest) -> Result<ControlReply, ControlError> {
    ask_within(socket, request, Duration::from_secs(120))
}

/// As [`ask`], for so long.
///
/// # Errors
///
/// [`ControlError`].
pub fn ask_within(
    socket: &Path,
    request: &ControlRequest,
    limit: Duration,
) -> Result<ControlReply, ControlError> {
    let reply = levada_desk::ask(socket, request, Some(limit));
    match reply.map_err(|error| ControlError::of(error, socket))? {
        ControlReply::Failed { why } => Err(ControlError::Refused { why }),
        reply => Ok(reply),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_users_node_is_not_called_absent() {
        let socket = Path::new("state/control.sock");
        let text = |error| ControlError::of(error, socket).to_string();
        let denied = text(AskError::Denied);
        assert!(denied.contains("permission denied"), "{denied}");
        let absent = text(AskError::NobodyThere);
        assert!(absent.contains("no node is running"), "{absent}");
    }

    #[test]
    fn requests_are_readable_json() {
        let fail = ControlRequest::DriveFail { drive: "d03".into(), force: false };
        let text = serde_json::to_string(&fail).expect("plain data");
        assert_eq!(text, r#"{"do":"drive-fail","drive":"d03","force":false}"#);
        assert_eq!(serde_json::from_str::<ControlRequest>(&text).expect("own text"), fail);
    }
}
