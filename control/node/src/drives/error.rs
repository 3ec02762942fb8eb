//! Why drives cannot be taken.

use super::NoDevice;
use crate::arrays::ArrayError;
use crate::fit::FitError;
use crate::recorded::Differences;
use levada_base::Epoch;
use levada_base::ids::Uuid;
use levada_desk::PowerFenceError;
use levada_device::DriveError;
use levada_spec::Bytes;

/// Why the drives do not make a cluster.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DrivesError {
    /// An array cannot be opened by the drives that are there; nobody was kept out of them.
    #[error(transparent)]
    Array(ArrayError),
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
    /// Another server was quicker.
    #[error(
        "another server made, or took over, cluster {cluster} on these drives, {drive} among them, while they were looked at; \
         nothing was written: `levada plan` says what is there now"
    )]
    MadeMeanwhile { drive: String, cluster: String },
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
