//! The drives of a cluster file: found, told apart by their labels, or formatted.
//!
//! What always holds:
//! - Nothing is formatted unless every drive of the cluster is new, or the operator gives the
//!   cluster up by name, so a cluster with a missing drive is never mistaken for a new one.
//! - Nor when a cluster was made here before and all its drives are away, as when their disk is not
//!   mounted, or when most of them are of another cluster with its name.
//! - A drive is known by its label, not by its path: drives may change places.
//! - Of two drives with one name, the one that the arrays know counts, and the other is absent.
//! - A drive of another cluster is never written to, unless the operator says so for that drive or
//!   for the whole cluster. Beside drives of this cluster it counts as absent.
//! - A drive on the network is written to only once every earlier owner is shut out, and the epoch of a start is after
//!   that of any owner which such a drive knows, whatever labels say. Where drives cannot shut owners out, a power fence does, before
//!   labels are believed.

mod error;
mod format;
mod found;

pub use error::DrivesError;
pub use format::{format_one, give_slices};

use crate::recorded::{Difference, Differences, Labelled};
use crate::told::{Absent, absent};
use format::{array_ids, check_room, format, refuse_used};
use found::{
    AtPath, Found, Known, away, latest_owner, look_again, look_at_all, named_like, refuse_namesake,
    renamed, shut_out, tell_apart,
};
use futures_util::future::{LocalBoxFuture, join_all, pending, ready};
use levada_base::ids::Uuid;
use levada_base::units::BLOCK_BYTES;
use levada_base::{Epoch, planted};
use levada_desk::PowerFenceError;
use levada_device::{BlockError, Device, Drive, DriveError, HealthPage};
use levada_health::PathStatus;
use levada_raid::look_until_steady;
use levada_spec::{ClusterFile, DriveSpec};
use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;

/// Where drives come from: files and block devices on a machine, memory in the simulator.
pub trait DriveSource {
    /// Opens the device of a drive.
    ///
    /// # Errors
    ///
    /// [`NoDevice`] with the reason.
    fn open<'a>(
        &'a self,
        drive: &'a DriveSpec,
    ) -> LocalBoxFuture<'a, Result<Rc<dyn Device>, NoDevice>>;

    /// Makes the file of a file-backed drive that is not there or empty, and opens it.
    ///
    /// # Errors
    ///
    /// [`NoDevice`] with the reason.
    fn create<'a>(
        &'a self,
        drive: &'a DriveSpec,
    ) -> LocalBoxFuture<'a, Result<Rc<dyn Device>, NoDevice>>;

    /// The cluster whose drives these were when they were last there.
    fn cluster(&self) -> Option<Uuid> {
        None
    }

    /// Forgets that cluster, which is given up; durable once this returns.
    ///
    /// # Errors
    ///
    /// What keeps the note of it from being removed.
    fn forget_cluster(&self) -> std::io::Result<()> {
        Ok(())
    }

    /// False when a drive that is open cannot be found any more by its path.
    fn in_place(&self, _drive: &DriveSpec) -> bool {
        true
    }

    /// False when requests to an open device would wait.
    fn is_reached(&self, _device: &str) -> bool {
        true
    }

    /// The latest owner, other than this process, of whom a drive that is open itself knows.
    fn owner<'a>(&'a self, _drive: &'a DriveSpec) -> LocalBoxFuture<'a, Epoch> {
        Box::pin(ready(Epoch::default()))
    }

    /// Shuts other servers out of drives that cannot do that themselves, of which `last` was the latest owner. False where nobody asks
    /// for that.
    ///
    /// # Errors
    ///
    /// What has failed: others may still write.
    fn shut_out<'a>(
        &'a self,
        _cluster: Option<Uuid>,
        _last: Epoch,
    ) -> LocalBoxFuture<'a, Result<bool, PowerFenceError>> {
        Box::pin(ready(Ok(false)))
    }

    /// A drive that is open keeps other servers from writing to it only by what [`DriveSource::shut_out`] does.
    fn needs_power_fence(&self, _drive: &DriveSpec) -> bool {
        false
    }

    /// The paths to a drive on the network that is open.
    fn paths(&self, _drive: &DriveSpec) -> Vec<PathStatus> {
        Vec::new()
    }

    /// What an open device says of its health now; `None`: it does not tell. Its own name is that of what was opened, as the drive may
    /// have been found at another one's path.
    fn look_at_health<'a>(&'a self, _device: &'a str) -> LocalBoxFuture<'a, Option<HealthPage>> {
        Box::pin(ready(None))
    }

    /// Completes when a later owner turns out to have an open device: which.
    fn lost(&self, _device: &str) -> LocalBoxFuture<'_, Epoch> {
        Box::pin(pending())
    }

    /// Completes when an open device says by itself, after this call, that it has something to warn of.
    fn warned(&self, _device: &str) -> LocalBoxFuture<'_, ()> {
        Box::pin(pending())
    }
}

/// What an operator lets a start overwrite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MayOverwrite {
    /// Drives that carry nothing.
    #[default]
    Nothing,
    /// Also what is not this cluster, as long as no drive carries this cluster.
    Others,
    /// This cluster, with all that is stored in it, and nothing else.
    Cluster,
    /// Whatever the drives carry.
    Everything,
}

/// What the operator has a single drive formatted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intake {
    /// It is new to the cluster.
    Add,
    /// It takes the place of one that is out.
    Replace,
}

impl Intake {
    /// The command that does it whatever the drive carries.
    fn by_force(self, drive: &str) -> String {
        let intake = match self {
            Self::Add => "add",
            Self::Replace => "replace",
        };
        format!("levada drive {intake} {drive} --force")
    }
}

/// Why there is no device for a drive.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoDevice {
    /// Nothing is at its path.
    #[error("there is nothing at {path}")]
    Absent { path: String },
    /// A file without a byte is: a node was killed before the drive that it made had room.
    #[error("the file {path} is empty")]
    Empty { path: String },
    /// None of the paths leads there.
    #[error("{why}")]
    Away { why: String },
    /// It is open already, and can be reached.
    #[error("{path} is in use by this node")]
    Open { path: String },
    /// Something is, but it cannot be used.
    #[error("{why}")]
    Unusable { why: String },
}

impl NoDevice {
    /// True when the drive is a file that can be made.
    pub(crate) fn can_be_made(&self, drive: &DriveSpec) -> bool {
        matches!(self, Self::Absent { .. } | Self::Empty { .. }) && drive.size.is_some()
    }
}

/// One drive of the cluster file.
pub struct ClusterDrive {
    pub spec: DriveSpec,
    /// Its place in the cluster file.
    pub index: u32,
    /// The open drive, or why there is none.
    pub found: Result<Rc<Drive>, String>,
}

/// The drives of a cluster.
pub struct Drives {
    pub cluster: Uuid,
    pub epoch: Epoch,
    pub drives: Vec<ClusterDrive>,
    /// True when they were formatted just now.
    pub fresh: bool,
}

/// Finds the cluster's drives and takes them under a new epoch; formats them when all are new and
/// what is to be on them has room, object logs in segments of `segment_stripes`.
///
/// # Errors
///
/// [`DrivesError`]; nothing was changed unless it is `Drive`.
pub async fn take(
    source: &dyn DriveSource,
    cluster: &ClusterFile,
    may_overwrite: MayOverwrite,
    without_majority: bool,
    segment_stripes: u32,
    progress: &dyn Fn(&str),
) -> Result<Drives, DrivesError> {
    let found = look_at_all(source, cluster).await;
    let known = named_like(cluster, &found);
    let is_given_up = matches!(may_overwrite, MayOverwrite::Cluster | MayOverwrite::Everything);
    if let Some(name) = renamed(source, cluster, &found).filter(|_| !is_given_up) {
        let differences = Differences(vec![Difference::of_name(&cluster.name, &name)]);
        return Err(DrivesError::Changed { cluster: name, differences });
    }
    if may_overwrite != MayOverwrite::Everything {
        refuse_namesake(source, cluster, &found)?;
    }
    match may_overwrite {
        MayOverwrite::Nothing if !known.is_empty() => {
            open(source, cluster, without_majority, found, progress).await
        }
        MayOverwrite::Others if !known.is_empty() => {
            Err(DrivesError::Exists { cluster: cluster.name.clone(), drives: known.join(", ") })
        }
        MayOverwrite::Nothing | MayOverwrite::Others if source.cluster().is_some() => {
            Err(away(source, cluster))
        }
        MayOverwrite::Nothing
        | MayOverwrite::Others
        | MayOverwrite::Cluster
        | MayOverwrite::Everything => {
            format(source, cluster, found, may_overwrite, segment_stripes, progress).await
        }
    }
}

/// As [`take`], for a cluster that was made: nothing is formatted.
///
/// # Errors
///
/// [`DrivesError`]; nothing was changed unless it is `Drive`.
pub async fn take_existing(
    source: &dyn DriveSource,
    cluster: &ClusterFile,
) -> Result<Drives, DrivesError> {
    let found = look_at_all(source, cluster).await;
    if let Some(name) = renamed(source, cluster, &found) {
        let differences = Differences(vec![Difference::of_name(&cluster.name, &name)]);
        return Err(DrivesError::Changed { cluster: name, differences });
    }
    refuse_namesake(source, cluster, &found)?;
    match source.cluster() {
        _ if !named_like(cluster, &found).is_empty() => {
            open(source, cluster, false, found, &|_| ()).await
        }
        Some(_) => Err(away(source, cluster)),
        None => Err(DrivesError::NotMade { cluster: cluster.name.clone() }),
    }
}

/// What is at the places of a cluster's drives, for those who only look.
pub(crate) enum Sight {
    /// The cluster would be made, once these drives are there, each with why it is not.
    New { missing: Vec<(String, String)> },
    /// The cluster that is there would be opened, without these drives, each with why.
    Exists { missing: Vec<(String, String)>, drives: Vec<Labelled> },
}

/// Looks at the drives as [`take`] does, and changes nothing.
///
/// # Errors
///
/// What `take` would refuse.
pub(crate) async fn sight(
    source: &dyn DriveSource,
    cluster: &ClusterFile,
    segment_stripes: u32,
) -> Result<Sight, DrivesError> {
    let found = look_at_all(source, cluster).await;
    if let Some(name) = renamed(source, cluster, &found) {
        let differences = Differences(vec![Difference::of_name(&cluster.name, &name)]);
        return Err(DrivesError::Changed { cluster: name, differences });
    }
    refuse_namesake(source, cluster, &found)?;
    if !named_like(cluster, &found).is_empty() {
        let mut known = tell_apart(source, cluster, found).await?;
        let gone = cluster.drives.iter().filter(|spec| !known.by_name.contains_key(&spec.name));
        let gone: Vec<String> = gone.map(|spec| spec.name.clone()).collect();
        let missing = gone.into_iter().map(|name| {
            let why = known.why_absent(&name);
            (name, why)
        });
        let missing = missing.collect();
        let drives = known.by_name.into_values().map(|(_, drive)| drive).collect();
        return Ok(Sight::Exists { missing, drives });
    }
    if source.cluster().is_some() {
        return Err(away(source, cluster));
    }
    refuse_used(source, cluster, &found, MayOverwrite::Nothing).await?;
    check_room(cluster, &found, &array_ids(cluster), segment_stripes).await?;
    let missing = cluster.drives.iter().zip(&found).filter_map(|(spec, found)| match found {
        Found::Nothing(none) if !none.can_be_made(spec) => {
            Some((spec.name.clone(), none.to_string()))
        }
        Found::Labelled(..) | Found::Blank(..) | Found::Nothing(_) => None,
    });
    Ok(Sight::New { missing: missing.collect() })
}

async fn open(
    source: &dyn DriveSource,
    cluster: &ClusterFile,
    without_majority: bool,
    mut found: Vec<Found>,
    progress: &dyn Fn(&str),
) -> Result<Drives, DrivesError> {
    let openable =
        async |found: &[Found]| openable(source, cluster, without_majority, found.to_vec()).await;
    // Who cannot serve takes nothing away from who does.
    let mut is_first = true;
    let looking = look_until_steady(async || {
        if !std::mem::take(&mut is_first) {
            found = look_again(std::mem::take(&mut found)).await;
        }
        openable(&found).await
    });
    let mut known = looking.await.map_err(|refusal| refusal.told(progress))?;
    if shut_out(source, cluster, known.cluster, known.last_epoch(), progress).await? {
        // They may have written until then.
        found = look_again(found).await;
        known = openable(&found).await.map_err(|refusal| refusal.told(progress))?;
    }
    let owner = latest_owner(source, cluster, &found).await;
    let epoch = known.last_epoch().max(owner).next();
    if owner > Epoch::default() {
        // Whether it is still there nobody can tell: a server that has crashed is one as well.
        let what = "drives on the network are reserved for a server that was here before, which is shut out";
        tracing::info!(cluster = cluster.name, earlier = %owner, epoch = %epoch, "{what}");
    }
    let claim_one = async |(name, (at, drive)): (&String, &AtPath<'_>)| {
        (name.clone(), claim(at, &*drive.device, epoch).await)
    };
    // One for all, which of several servers that start at once one gets; then the others together, as a target may take a while to end
    // what an earlier owner has under way.
    let mut all: Vec<_> = known.by_name.iter().collect();
    all.sort_by_key(|(_, (at, _))| !at.is_remote());
    let mut all = all.into_iter();
    let mut claims = BTreeMap::new();
    if let Some(first) = all.next() {
        let (name, claimed) = claim_one(first).await;
        let is_lost = matches!(claimed, Err(DriveError::Block(BlockError::Fenced { .. })));
        claims.insert(name, claimed);
        if !is_lost {
            claims.extend(join_all(all.map(claim_one)).await);
        }
    }
    let mut drives = Vec::new();
    let mut gone = None;
    for (index, spec) in cluster.drives.iter().enumerate() {
        let found = match (known.by_name.remove(&spec.name), claims.remove(&spec.name)) {
            (Some((_, drive)), Some(claimed)) => {
                let taken = async {
                    claimed?;
                    open_claimed(drive.device, epoch).await
                };
                match taken.await {
                    // Without its drives another server would serve the rest: nobody goes on in halves.
                    Err(error @ DriveError::Block(BlockError::Fenced { .. })) => {
                        let (drive, source) = (spec.name.clone(), Box::new(error));
                        return Err(DrivesError::Drive { drive, source });
                    }
                    taken => taken.map_err(|error| {
                        let why = error.to_string();
                        gone = Some((spec.name.clone(), Box::new(error)));
                        why
                    }),
                }
            }
            _ => Err(known.why_absent(&spec.name)),
        };
        drives.push(ClusterDrive { spec: spec.clone(), index: index as u32, found });
    }
    // They were there, and went while they were taken: nobody has this epoch, and arrays would say that nothing was ever stored.
    if drives.iter().all(|drive| drive.found.is_err())
        && let Some((drive, source)) = gone
    {
        return Err(DrivesError::Drive { drive, source });
    }
    Ok(Drives { cluster: known.cluster.unwrap_or_default(), epoch, drives, fresh: false })
}

/// Why a cluster is not opened, and each of its drives that are not there.
struct Refusal {
    error: DrivesError,
    absent: Vec<String>,
}

impl Refusal {
    fn told(self, progress: &dyn Fn(&str)) -> DrivesError {
        self.absent.iter().for_each(|line| progress(line));
        self.error
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

/// The drives of a cluster all of whose arrays can be opened.
async fn openable<'a>(
    source: &dyn DriveSource,
    cluster: &'a ClusterFile,
    without_majority: bool,
    found: Vec<Found>,
) -> Result<Known<'a>, Refusal> {
    let known = tell_apart(source, cluster, found).await;
    let mut known = known.map_err(|error| Refusal { error, absent: Vec::new() })?;
    if let Err(error) = known.examine(cluster, without_majority).await {
        let names = cluster.drives.iter().map(|spec| &spec.name);
        let gone: Vec<_> = names.filter(|name| !known.by_name.contains_key(*name)).collect();
        let gone: Vec<_> = gone.into_iter().map(|name| (name, known.why_absent(name))).collect();
        let gone = gone.iter().map(|(name, why)| (name.as_str(), why.as_str()));
        let told = |Absent { drives, why, .. }| format!("{drives}: {why}");
        let absent = absent(cluster, gone).into_iter().map(told).collect();
        return Err(Refusal { error: DrivesError::Array(error), absent });
    }
    Ok(known)
}

/// Shuts earlier owners of a drive on the network out. Drives of this machine are locked as long as they are open.
async fn claim(spec: &DriveSpec, device: &dyn Device, epoch: Epoch) -> Result<(), DriveError> {
    if spec.is_remote() && !planted!("node-drives-not-claimed") {
        device.fence(epoch).await?;
    }
    Ok(())
}

/// Opens the drive that is at the place of `spec`, for the owner of `epoch`.
pub(crate) async fn take_one(
    spec: &DriveSpec,
    device: Rc<dyn Device>,
    epoch: Epoch,
) -> Result<Rc<Drive>, DriveError> {
    claim(spec, &*device, epoch).await?;
    open_claimed(device, epoch).await
}

async fn open_claimed(device: Rc<dyn Device>, epoch: Epoch) -> Result<Rc<Drive>, DriveError> {
    let drive = Drive::open(device).await?;
    drive.fence(epoch).await?;
    let (used_bytes, capacity_bytes) =
        (drive.label().capacity_bytes, drive.device().info().capacity_bytes);
    // Bytes that are no whole block were never used.
    if capacity_bytes >= used_bytes + BLOCK_BYTES {
        tracing::warn!(
            drive = drive.label().drive_name,
            used_bytes,
            capacity_bytes,
            "the drive has grown since it was formatted; what came after used_bytes is not used"
        );
    }
    Ok(drive)
}
