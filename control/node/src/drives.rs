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

use crate::control::PathStatus;
use crate::fit::{self, FitError};
use crate::recorded::{Difference, Differences, Labelled, OnDrives};
use futures_util::future::{LocalBoxFuture, join_all, ready};
use levada_base::Epoch;
use levada_base::ids::Uuid;
use levada_base::units::{BLOCK_BYTES, round_down};
use levada_desk::PowerFenceError;
use levada_device::{
    BlockError, Device, Drive, DriveError, DriveIdentity, HealthPage, Label, Overwrite, SliceEntry,
    SliceKind, read_label,
};
use levada_spec::{ArraySpec, Bytes, ClusterFile, DRIVE_RESERVED_BYTES, DriveSpec, Level};
use std::cmp::Ordering;
use std::collections::BTreeMap;
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

    /// The paths to a drive on the network that is open.
    fn paths(&self, _drive: &DriveSpec) -> Vec<PathStatus> {
        Vec::new()
    }

    /// What an open device says of its health now; `None`: it does not tell. Its own name is that of what was opened, as the drive may
    /// have been found at another one's path.
    fn look_at_health<'a>(&'a self, _device: &'a str) -> LocalBoxFuture<'a, Option<HealthPage>> {
        Box::pin(ready(None))
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

/// Why the drives do not make a cluster.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DrivesError {
    /// A drive carries data of somebody else.
    #[error("drive {drive} ({path}): {source}; `{overwrite}` overwrites it")]
    InUse {
        drive: String,
        path: String,
        source: Box<DriveError>,
        /// The command that does it nevertheless.
        overwrite: String,
    },
    /// Drives were to be overwritten, and the cluster is there.
    #[error(
        "{drives} carry cluster {cluster:?} already, with all that is stored in it; nothing was changed. \
         For one drive that carries something else: `levada up`, then `levada drive replace DRIVE --force`. \
         To give up everything: `levada up --destroy {cluster}`"
    )]
    Exists { cluster: String, drives: String },
    /// The cluster is known here, and none of its drives is there.
    #[error(
        "no drive of cluster {cluster} ({uuid}) is there, which was up here before; nothing was changed. \
         Bring its drives back ({place}: is everything mounted?). To give up everything that is stored in it: \
         `levada up --destroy {cluster}`"
    )]
    Away {
        cluster: String,
        uuid: Uuid,
        /// The path of the first drive.
        place: String,
    },
    /// The cluster is known here, and most drives with its name are of another: many boxes have one name.
    #[error(
        "these paths lead to drives of another cluster: {cluster} ({noted}) was up here before, and {drives} are of \
         {found}, which has the same name; nothing was changed. Bring its drives back ({place}: is the right disk \
         mounted there?), or write their paths. Where these are the drives to go on with, remove the file `cluster` \
         in the state directory, which notes the other, and repeat the command. To give up both: \
         `levada up --destroy {cluster} --force-format`"
    )]
    Namesake {
        cluster: String,
        noted: Uuid,
        found: Uuid,
        /// Those of the other one.
        drives: String,
        /// The path of the first of them.
        place: String,
    },
    /// The cluster was never made, or not here.
    #[error(
        "no drive here carries cluster {cluster}, and none was up here before; nothing was changed. `levada up` makes it"
    )]
    NotMade { cluster: String },
    /// The note of a cluster that is given up stays.
    #[error(
        "the file `cluster` in the state directory, which notes the cluster that is given up, \
         cannot be removed: {why}; no drive was changed"
    )]
    Noted { why: String },
    /// A drive belongs to another cluster, and none to this one.
    #[error(
        "drive {drive} ({path}) belongs to another cluster, {other:?}, as its drive {label:?}; nothing was changed. \
         To give up what it holds: `{overwrite}`"
    )]
    OtherCluster {
        drive: String,
        path: String,
        other: String,
        label: String,
        /// The command that overwrites it nevertheless.
        overwrite: String,
    },
    /// The file says of the cluster what cannot be changed any more.
    #[error(
        "the cluster file differs from cluster {cluster} in what is fixed since it was made; nothing was changed:{differences}\n\
         Write there what is on the drives. A single drive gets another size or enclosure by `levada drive fail` \
         and `levada drive replace`; all of it can only be made anew, giving up what is stored: `levada up --destroy {cluster}`"
    )]
    Changed { cluster: String, differences: Differences },
    /// A file is there and has another size than the cluster file says.
    #[error(
        "drive {drive} ({path}) has {found}, its size is {wanted} in the cluster file: remove it to have it made anew, \
         or write its size"
    )]
    OtherSize { drive: String, path: String, found: Bytes, wanted: Bytes },
    /// Two paths lead to one drive.
    #[error("drives {first} and {second} are one and the same: both carry the label of {label:?}")]
    SameDrive { first: String, second: String, label: String },
    /// Two drives were given one name, and neither stays behind the other.
    #[error(
        "drives {first} and {second} both carry the label of {label:?}, and the arrays do not tell which of them came \
         later; nothing was changed: leave only the right one at the paths of the cluster file"
    )]
    Twins { first: String, second: String, label: String },
    /// A new drive's device cannot be had.
    #[error("drive {drive}: {source}")]
    NoDevice { drive: String, source: NoDevice },
    /// A single drive on the network has an owner of a later epoch, which no label told.
    #[error(
        "drive {drive} is reserved by an owner of epoch {seen}, and this node has {ours}; nothing was changed. Where nobody \
         uses it any more: `levada down` and `levada up`, which takes an epoch after that one, and the same command again"
    )]
    Reserved { drive: String, ours: Epoch, seen: Epoch },
    #[error(transparent)]
    PowerFence(#[from] PowerFenceError),
    /// A drive cannot be labelled or fenced.
    #[error("drive {drive}: {source}")]
    Drive { drive: String, source: Box<DriveError> },
    /// The slices do not fit.
    #[error("drive {drive} has {}: too small for the slice of array {array}", Bytes(*capacity_bytes))]
    TooSmall { drive: String, array: String, capacity_bytes: u64 },
    /// They fit, and are too small for what is to be on them.
    #[error("{0}; nothing was changed")]
    Fit(#[from] FitError),
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

/// What was found at a drive's path.
enum Found {
    Labelled(Rc<dyn Device>, Label),
    /// Without a label; the error says what it is.
    Blank(Rc<dyn Device>, DriveError),
    Nothing(NoDevice),
}

impl Found {
    async fn on(device: Rc<dyn Device>) -> Self {
        match read_label(&*device).await {
            Ok(label) => Self::Labelled(device, label),
            Err(error) => Self::Blank(device, error),
        }
    }

    /// As it is by now.
    async fn again(self) -> Self {
        match self {
            Self::Labelled(device, _) | Self::Blank(device, _) => Self::on(device).await,
            nothing @ Self::Nothing(_) => nothing,
        }
    }

    fn label(&self) -> Option<&Label> {
        match self {
            Self::Labelled(_, label) => Some(label),
            Self::Blank(..) | Self::Nothing(_) => None,
        }
    }
}

async fn look(source: &dyn DriveSource, spec: &DriveSpec) -> Found {
    match source.open(spec).await {
        Err(none) => Found::Nothing(none),
        Ok(device) => Found::on(device).await,
    }
}

/// What there is at the places of the cluster's drives. Where that is something, nobody else writes to them any more.
async fn look_at_all(
    source: &dyn DriveSource,
    cluster: &ClusterFile,
) -> Result<Vec<Found>, DrivesError> {
    let found = join_all(cluster.drives.iter().map(|spec| look(source, spec))).await;
    let labels = || found.iter().filter_map(Found::label);
    let Some(last) = labels().map(|label| label.owner_epoch).max() else { return Ok(found) };
    let cluster = labels().map(|label| label.cluster_uuid).next();
    match source.shut_out(cluster, last).await? {
        // They may have written until then.
        true => Ok(join_all(found.into_iter().map(Found::again)).await),
        false => Ok(found),
    }
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
    segment_stripes: u32,
    progress: &dyn Fn(&str),
) -> Result<Drives, DrivesError> {
    let found = look_at_all(source, cluster).await?;
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
        MayOverwrite::Nothing if !known.is_empty() => open(source, cluster, found).await,
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
    let found = look_at_all(source, cluster).await?;
    if let Some(name) = renamed(source, cluster, &found) {
        let differences = Differences(vec![Difference::of_name(&cluster.name, &name)]);
        return Err(DrivesError::Changed { cluster: name, differences });
    }
    refuse_namesake(source, cluster, &found)?;
    match source.cluster() {
        _ if !named_like(cluster, &found).is_empty() => open(source, cluster, found).await,
        Some(_) => Err(away(source, cluster)),
        None => Err(DrivesError::NotMade { cluster: cluster.name.clone() }),
    }
}

/// The drives whose label has the name of the cluster.
fn named_like(cluster: &ClusterFile, found: &[Found]) -> Vec<String> {
    let known = |(spec, found): (&DriveSpec, &Found)| match found {
        Found::Labelled(_, label) if label.cluster_name == cluster.name => Some(spec.name.clone()),
        Found::Labelled(..) | Found::Blank(..) | Found::Nothing(_) => None,
    };
    cluster.drives.iter().zip(found).filter_map(known).collect()
}

/// None of the drives of the cluster that was up here is there.
fn away(source: &dyn DriveSource, cluster: &ClusterFile) -> DrivesError {
    let first = cluster.drives.first();
    DrivesError::Away {
        cluster: cluster.name.clone(),
        uuid: source.cluster().unwrap_or_default(),
        place: first.map_or(String::new(), |drive| drive.path.display().to_string()),
    }
}

/// The name that the cluster has on its drives, where the file has another: it is told by the note
/// of the cluster that was up last.
fn renamed(source: &dyn DriveSource, cluster: &ClusterFile, found: &[Found]) -> Option<String> {
    let noted = source.cluster()?;
    found.iter().find_map(|found| match found {
        Found::Labelled(_, label)
            if label.cluster_uuid == noted && label.cluster_name != cluster.name =>
        {
            Some(label.cluster_name.clone())
        }
        Found::Labelled(..) | Found::Blank(..) | Found::Nothing(_) => None,
    })
}

/// Another cluster with the name of the noted one is neither opened nor given up in its place.
fn refuse_namesake(
    source: &dyn DriveSource,
    cluster: &ClusterFile,
    found: &[Found],
) -> Result<(), DrivesError> {
    let noted = source.cluster();
    let (Some(noted), Some(other)) = (noted, cluster_of(cluster, noted, found)) else {
        return Ok(());
    };
    if other == noted {
        return Ok(());
    }
    let is_of_other =
        |found: &Found| matches!(found, Found::Labelled(_, label) if label.cluster_uuid == other);
    let theirs = cluster.drives.iter().zip(found).filter(|(_, found)| is_of_other(found));
    let theirs: Vec<&DriveSpec> = theirs.map(|(spec, _)| spec).collect();
    let names: Vec<&str> = theirs.iter().map(|spec| spec.name.as_str()).collect();
    Err(DrivesError::Namesake {
        cluster: cluster.name.clone(),
        noted,
        found: other,
        drives: names.join(", "),
        place: theirs.first().map_or(String::new(), |spec| spec.path.display().to_string()),
    })
}

/// What `levada up` would meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outlook {
    /// It would make the cluster, once these drives are there, each with why it is not.
    New { missing: Vec<(String, String)> },
    /// It would open the cluster that is there, without these drives, each with why.
    Exists { missing: Vec<(String, String)> },
}

/// Looks at the drives as [`take`] does, and changes nothing.
///
/// # Errors
///
/// What `take` would refuse.
pub async fn outlook(
    source: &dyn DriveSource,
    cluster: &ClusterFile,
) -> Result<Outlook, DrivesError> {
    let found = join_all(cluster.drives.iter().map(|spec| look(source, spec))).await;
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
        return Ok(Outlook::Exists { missing: missing.collect() });
    }
    if source.cluster().is_some() {
        return Err(away(source, cluster));
    }
    refuse_used(source, cluster, &found, MayOverwrite::Nothing).await?;
    let missing = cluster.drives.iter().zip(&found).filter_map(|(spec, found)| match found {
        Found::Nothing(none) if !none.can_be_made(spec) => {
            Some((spec.name.clone(), none.to_string()))
        }
        Found::Labelled(..) | Found::Blank(..) | Found::Nothing(_) => None,
    });
    Ok(Outlook::New { missing: missing.collect() })
}

/// The drives of a cluster that was made, told apart.
struct Known<'a> {
    cluster: Option<Uuid>,
    by_name: BTreeMap<String, AtPath<'a>>,
    /// Why a drive is not among them, by its name in the file.
    absent: BTreeMap<&'a str, String>,
}

impl Known<'_> {
    fn why_absent(&mut self, drive: &str) -> String {
        self.absent.remove(drive).unwrap_or_else(|| "another drive is at its path".into())
    }
}

/// Finds out which drive is which, and whether the file says of them what they are.
async fn tell_apart<'a>(
    source: &dyn DriveSource,
    cluster: &'a ClusterFile,
    found: Vec<Found>,
) -> Result<Known<'a>, DrivesError> {
    let uuid = cluster_of(cluster, source.cluster(), &found);
    let mut by_name: BTreeMap<String, AtPath<'_>> = BTreeMap::new();
    let mut absent: BTreeMap<&str, String> = BTreeMap::new();
    for (spec, found) in cluster.drives.iter().zip(found) {
        match found {
            Found::Labelled(device, label) if Some(label.cluster_uuid) == uuid => {
                let name = label.drive_name.clone();
                let mut later = (spec, Labelled { device, label });
                if let Some(known) = by_name.remove(&name) {
                    let earlier;
                    (earlier, later) = in_turn(known, later).await?;
                    let told = was_replaced(earlier.0, &name);
                    tracing::warn!("{told}");
                    absent.insert(&earlier.0.name, told);
                }
                by_name.insert(name, later);
            }
            Found::Labelled(_, label) => {
                absent.insert(&spec.name, belongs_elsewhere(cluster, spec, &label));
            }
            Found::Blank(_, error) => {
                absent.insert(&spec.name, error.to_string());
            }
            Found::Nothing(none) => {
                absent.insert(&spec.name, none.to_string());
            }
        }
    }
    let labelled: Vec<&Labelled> = by_name.values().map(|(_, drive)| drive).collect();
    let differences = OnDrives::read(&labelled).await.differences(cluster, None);
    if !differences.0.is_empty() {
        return Err(DrivesError::Changed { cluster: cluster.name.clone(), differences });
    }
    Ok(Known { cluster: uuid, by_name, absent })
}

async fn open(
    source: &dyn DriveSource,
    cluster: &ClusterFile,
    found: Vec<Found>,
) -> Result<Drives, DrivesError> {
    let owner = latest_owner(source, cluster, &found).await;
    let mut known = tell_apart(source, cluster, found).await?;
    let seen = known.by_name.values().flat_map(|(_, Labelled { label, .. })| {
        label.slices.iter().map(|slice| slice.owner_epoch).chain([label.owner_epoch])
    });
    let epoch = seen.max().unwrap_or_default().max(owner).next();
    let mut drives = Vec::new();
    for (index, spec) in cluster.drives.iter().enumerate() {
        let found = match known.by_name.remove(&spec.name) {
            Some((at, drive)) => match take_one(at, drive.device, epoch).await {
                // Without its drives another server would serve the rest: nobody goes on in halves.
                Err(error @ DriveError::Block(BlockError::Fenced { .. })) => {
                    let (drive, source) = (spec.name.clone(), Box::new(error));
                    return Err(DrivesError::Drive { drive, source });
                }
                taken => taken.map_err(|error| error.to_string()),
            },
            None => Err(known.why_absent(&spec.name)),
        };
        drives.push(ClusterDrive { spec: spec.clone(), index: index as u32, found });
    }
    Ok(Drives { cluster: known.cluster.unwrap_or_default(), epoch, drives, fresh: false })
}

/// A drive and the entry of the file that leads to it.
type AtPath<'a> = (&'a DriveSpec, Labelled);

/// Of two drives with one name, the earlier one and the one that took its place.
async fn in_turn<'a>(
    first: AtPath<'a>,
    second: AtPath<'a>,
) -> Result<(AtPath<'a>, AtPath<'a>), DrivesError> {
    let names = || (first.0.name.clone(), second.0.name.clone(), first.1.label.drive_name.clone());
    if first.1.label.drive_uuid == second.1.label.drive_uuid {
        let (first, second, label) = names();
        return Err(DrivesError::SameDrive { first, second, label });
    }
    match first.1.compare(&second.1).await {
        Ordering::Less => Ok((first, second)),
        Ordering::Greater => Ok((second, first)),
        Ordering::Equal => {
            let (first, second, label) = names();
            Err(DrivesError::Twins { first, second, label })
        }
    }
}

/// What is said of a drive that counts as absent since a later one has its name.
fn was_replaced(spec: &DriveSpec, name: &str) -> String {
    let path = spec.path.display();
    format!(
        "{path} is an earlier {name}, which was replaced; not touched: put the right drive back, or overwrite this \
         one with `levada drive replace {} --force`",
        spec.name
    )
}

/// What is said of a drive of another cluster at a path of this one, which counts as absent.
fn belongs_elsewhere(cluster: &ClusterFile, spec: &DriveSpec, label: &Label) -> String {
    let namesake = match label.cluster_name == cluster.name {
        true => ", another cluster of that name,",
        false => "",
    };
    let (path, name) = (spec.path.display(), &spec.name);
    format!(
        "{path} belongs to cluster {:?}{namesake} as its drive {:?}; not touched: put the right drive back, \
         or overwrite this one with `levada drive replace {name} --force`",
        label.cluster_name, label.drive_name
    )
}

/// The latest owner that the drives which are there know by themselves.
async fn latest_owner(source: &dyn DriveSource, cluster: &ClusterFile, found: &[Found]) -> Epoch {
    let is_there = |found: &Found| !matches!(found, Found::Nothing(_));
    let there = cluster.drives.iter().zip(found).filter(|(_, found)| is_there(found));
    let owners = join_all(there.map(|(spec, _)| source.owner(spec))).await;
    owners.into_iter().max().unwrap_or_default()
}

/// Shuts earlier owners of a drive on the network out. Drives of this machine are locked as long as they are open.
async fn claim(spec: &DriveSpec, device: &dyn Device, epoch: Epoch) -> Result<(), DriveError> {
    if spec.is_remote() {
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

/// The cluster that most labelled drives belong to; of two with as many, the noted one.
fn cluster_of(cluster: &ClusterFile, noted: Option<Uuid>, found: &[Found]) -> Option<Uuid> {
    let mut votes: BTreeMap<Uuid, usize> = BTreeMap::new();
    for found in found {
        if let Found::Labelled(_, label) = found
            && label.cluster_name == cluster.name
        {
            *votes.entry(label.cluster_uuid).or_default() += 1;
        }
    }
    votes
        .into_iter()
        .max_by_key(|(uuid, votes)| (*votes, Some(*uuid) == noted))
        .map(|(uuid, _)| uuid)
}

async fn format(
    source: &dyn DriveSource,
    cluster: &ClusterFile,
    found: Vec<Found>,
    may_overwrite: MayOverwrite,
    segment_stripes: u32,
    progress: &dyn Fn(&str),
) -> Result<Drives, DrivesError> {
    let uuid = Uuid::from_u64_pair(random(), random());
    if matches!(may_overwrite, MayOverwrite::Nothing | MayOverwrite::Cluster) {
        refuse_used(source, cluster, &found, may_overwrite).await?;
    }
    let slices = array_ids(cluster);
    // Before the first drive is made or written.
    let mut capacities = BTreeMap::new();
    for (spec, found) in cluster.drives.iter().zip(&found) {
        let capacity_bytes = match found {
            Found::Labelled(device, _) | Found::Blank(device, _) => device.info().capacity_bytes,
            Found::Nothing(_) => spec.size.map_or(u64::MAX, |size| size.0),
        };
        slice_table(cluster, spec, capacity_bytes, &slices)?;
        check_size(spec, capacity_bytes)?;
        capacities.insert(&spec.name, capacity_bytes);
    }
    let capacity = |spec: &DriveSpec| capacities.get(&spec.name).copied();
    fit::check(cluster, |spec| capacity(spec).filter(|bytes| *bytes != u64::MAX), segment_stripes)
        .await?;
    let mut devices = Vec::new();
    for (index, (spec, found)) in cluster.drives.iter().zip(&found).enumerate() {
        let device = match found {
            Found::Labelled(device, _) | Found::Blank(device, _) => Rc::clone(device),
            Found::Nothing(none) if none.can_be_made(spec) => {
                progress(&format!(
                    "preparing drive {} of {}: {}",
                    index + 1,
                    cluster.drives.len(),
                    spec.name
                ));
                let made = source.create(spec).await;
                made.map_err(|source| DrivesError::NoDevice { drive: spec.name.clone(), source })?
            }
            Found::Nothing(source) => {
                let (drive, source) = (spec.name.clone(), source.clone());
                return Err(DrivesError::NoDevice { drive, source });
            }
        };
        devices.push(device);
    }
    let epoch = latest_owner(source, cluster, &found).await.next();
    let failed = |spec: &DriveSpec| {
        let drive = spec.name.clone();
        |source| DrivesError::Drive { drive, source: Box::new(source) }
    };
    for (spec, device) in cluster.drives.iter().zip(&devices) {
        claim(spec, &**device, epoch).await.map_err(failed(spec))?;
    }
    give_up(source, cluster, &found).await?;
    let mut drives = Vec::new();
    for (index, (spec, device)) in cluster.drives.iter().zip(devices).enumerate() {
        let identity = DriveIdentity {
            cluster_uuid: uuid,
            cluster_name: cluster.name.clone(),
            drive_uuid: Uuid::from_u64_pair(random(), random()),
            drive_name: spec.name.clone(),
            drive_index: index as u32,
            enclosure_name: spec.enclosure.clone(),
        };
        let table = slice_table(cluster, spec, device.info().capacity_bytes, &slices)?;
        let formatted = Drive::format(device, identity, table, Overwrite::Anything).await;
        let drive = formatted.map_err(failed(spec))?;
        drive.fence(epoch).await.map_err(failed(spec))?;
        drives.push(ClusterDrive { spec: spec.clone(), index: index as u32, found: Ok(drive) });
    }
    Ok(Drives { cluster: uuid, epoch, drives, fresh: true })
}

/// Forgets what is overwritten, all of it before the first new label is there. Where this or what
/// follows is cut short, the labels that are left name one cluster, and no note another: the same
/// order completes it.
async fn give_up(
    source: &dyn DriveSource,
    cluster: &ClusterFile,
    found: &[Found],
) -> Result<(), DrivesError> {
    let failed = |error: std::io::Error| DrivesError::Noted { why: error.to_string() };
    source.forget_cluster().map_err(failed)?;
    for (spec, found) in cluster.drives.iter().zip(found) {
        let Found::Labelled(device, _) = found else { continue };
        erase_labels(&**device).await.map_err(|error| DrivesError::Drive {
            drive: spec.name.clone(),
            source: Box::new(error.into()),
        })?;
    }
    Ok(())
}

/// Makes a drive blank where its labels are, at both ends.
async fn erase_labels(device: &dyn Device) -> Result<(), BlockError> {
    let end_bytes = DRIVE_RESERVED_BYTES / 2;
    let capacity_bytes = round_down(device.info().capacity_bytes, BLOCK_BYTES);
    device.write_zeroes(0, end_bytes).await?;
    device.write_zeroes(capacity_bytes - end_bytes, end_bytes).await?;
    device.flush().await
}

/// Formats one drive of a cluster that is up: a replacement, or a new one. Its arrays' UUIDs are
/// those of the other drives.
///
/// # Errors
///
/// [`DrivesError`]; a drive with data of somebody else is refused unless `force`.
pub async fn format_one(
    cluster: &ClusterFile,
    spec: &DriveSpec,
    device: Rc<dyn Device>,
    drives: &Drives,
    intake: Intake,
    force: bool,
) -> Result<Rc<Drive>, DrivesError> {
    let failed = |source| DrivesError::Drive { drive: spec.name.clone(), source: Box::new(source) };
    // The drive of this name of this very cluster may come back without force.
    let label = read_label(&*device).await.ok();
    let own = label
        .is_some_and(|label| label.cluster_uuid == drives.cluster && label.drive_name == spec.name);
    if !force && !own {
        Drive::refuse_used(&*device).await.map_err(|source| DrivesError::InUse {
            drive: spec.name.clone(),
            path: spec.path.display().to_string(),
            source: Box::new(source),
            overwrite: intake.by_force(&spec.name),
        })?;
    }
    let index = cluster.drives.iter().position(|known| known.name == spec.name);
    let identity = DriveIdentity {
        cluster_uuid: drives.cluster,
        cluster_name: cluster.name.clone(),
        drive_uuid: Uuid::from_u64_pair(random(), random()),
        drive_name: spec.name.clone(),
        drive_index: index.unwrap_or_default() as u32,
        enclosure_name: spec.enclosure.clone(),
    };
    let known = drives.drives.iter().filter_map(|drive| drive.found.as_ref().ok());
    let mut ids = BTreeMap::new();
    for drive in known {
        for slice in &drive.label().slices {
            ids.insert(slice.array_name.clone(), slice.array_uuid);
        }
    }
    let arrays: Vec<_> = cluster
        .arrays
        .iter()
        .filter_map(|array| Some((array.clone(), *ids.get(&array.name)?)))
        .collect();
    let table = slice_table(cluster, spec, device.info().capacity_bytes, &arrays)?;
    check_size(spec, device.info().capacity_bytes)?;
    claim(spec, &*device, drives.epoch).await.map_err(|error| match error {
        DriveError::Block(BlockError::Fenced { ours, seen }) => {
            DrivesError::Reserved { drive: spec.name.clone(), ours, seen }
        }
        error => failed(error),
    })?;
    let drive =
        Drive::format(device, identity, table, Overwrite::Anything).await.map_err(failed)?;
    drive.fence(drives.epoch).await.map_err(failed)?;
    Ok(drive)
}

/// Formats a spare of the cluster, which holds nothing, for these parts of arrays, one behind the other: as many bytes of each.
///
/// # Errors
///
/// [`DrivesError::Drive`].
pub async fn give_slices(
    drive: &Rc<Drive>,
    epoch: Epoch,
    parts: &[(&ArraySpec, Uuid, u64)],
) -> Result<Rc<Drive>, DrivesError> {
    let label = drive.label().clone();
    let name = label.drive_name.clone();
    let failed = |source| DrivesError::Drive { drive: name.clone(), source: Box::new(source) };
    let identity = DriveIdentity {
        cluster_uuid: label.cluster_uuid,
        cluster_name: label.cluster_name,
        drive_uuid: Uuid::from_u64_pair(random(), random()),
        drive_name: label.drive_name,
        drive_index: label.drive_index,
        enclosure_name: label.enclosure_name,
    };
    let mut start = DRIVE_RESERVED_BYTES / 2;
    let mut table = Vec::new();
    for (array, uuid, bytes) in parts {
        table.push(slice_entry(array, *uuid, start, *bytes));
        start += bytes;
    }
    let device = Rc::clone(drive.device());
    let given =
        Drive::format(device, identity, table, Overwrite::Anything).await.map_err(failed)?;
    given.fence(epoch).await.map_err(failed)?;
    Ok(given)
}

fn slice_entry(array: &ArraySpec, array_uuid: Uuid, start: u64, bytes: u64) -> SliceEntry {
    let kind = match array.level {
        Level::Raid1 { .. } => SliceKind::Metadata,
        Level::Raid0 { .. } | Level::Parity { .. } => SliceKind::Data,
    };
    let array_name = array.name.clone();
    SliceEntry { array_uuid, array_name, kind, start, bytes, owner_epoch: Epoch::default() }
}

fn random() -> u64 {
    levada_base::reactor::random_u64()
}

/// Looks for anything worth keeping before the first byte is written.
async fn refuse_used(
    source: &dyn DriveSource,
    cluster: &ClusterFile,
    found: &[Found],
    may_overwrite: MayOverwrite,
) -> Result<(), DrivesError> {
    let overwrite = || match may_overwrite {
        MayOverwrite::Cluster => format!("levada up --destroy {} --force-format", cluster.name),
        _ => "levada up --force-format".to_owned(),
    };
    // By its identity: many boxes have one name.
    let of_name = cluster_of(cluster, source.cluster(), found);
    let given_up = of_name.filter(|_| may_overwrite == MayOverwrite::Cluster);
    for (spec, found) in cluster.drives.iter().zip(found) {
        let path = spec.path.display().to_string();
        match found {
            Found::Labelled(_, label) if Some(label.cluster_uuid) == given_up => {}
            Found::Labelled(_, label) => {
                return Err(DrivesError::OtherCluster {
                    drive: spec.name.clone(),
                    path,
                    other: label.cluster_name.clone(),
                    label: label.drive_name.clone(),
                    overwrite: overwrite(),
                });
            }
            Found::Blank(device, _) => {
                if let Err(source) = Drive::refuse_used(&**device).await {
                    return Err(DrivesError::InUse {
                        drive: spec.name.clone(),
                        path,
                        source: Box::new(source),
                        overwrite: overwrite(),
                    });
                }
            }
            Found::Nothing(_) => {}
        }
    }
    Ok(())
}

/// A file-backed drive has the size that the cluster file says.
fn check_size(spec: &DriveSpec, capacity_bytes: u64) -> Result<(), DrivesError> {
    match spec.size {
        Some(wanted) if capacity_bytes != wanted.0 && capacity_bytes != u64::MAX => {
            Err(DrivesError::OtherSize {
                drive: spec.name.clone(),
                path: spec.path.display().to_string(),
                found: Bytes(capacity_bytes),
                wanted,
            })
        }
        _ => Ok(()),
    }
}

/// A UUID for each array of a new cluster.
fn array_ids(cluster: &ClusterFile) -> Vec<(ArraySpec, Uuid)> {
    cluster
        .arrays
        .iter()
        .map(|array| (array.clone(), Uuid::from_u64_pair(random(), random())))
        .collect()
}

/// Lays the slices of the arrays that use this drive one behind the other.
///
/// # Errors
///
/// [`DrivesError::TooSmall`].
fn slice_table(
    cluster: &ClusterFile,
    spec: &DriveSpec,
    capacity_bytes: u64,
    arrays: &[(ArraySpec, Uuid)],
) -> Result<Vec<SliceEntry>, DrivesError> {
    let mut start = DRIVE_RESERVED_BYTES / 2;
    let mut table = Vec::new();
    for (array, array_uuid) in arrays {
        if !array.drives.contains(&spec.name) {
            continue;
        }
        let too_small = || DrivesError::TooSmall {
            drive: spec.name.clone(),
            array: array.name.clone(),
            capacity_bytes,
        };
        let bytes =
            cluster.slice_bytes(array, &spec.name, Bytes(capacity_bytes)).ok_or_else(too_small)?.0;
        if bytes == 0 || start + bytes > capacity_bytes.saturating_sub(DRIVE_RESERVED_BYTES / 2) {
            return Err(too_small());
        }
        table.push(slice_entry(array, *array_uuid, start, bytes));
        start += bytes;
    }
    Ok(table)
}
