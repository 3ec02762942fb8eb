//! Whether the arrays and targets of a cluster file have room, before anything is written.
//!
//! Each array is laid out over members that keep nothing, by the code that lays out the real
//! ones; so what passes here can be made.

use crate::arrays::raid_spec;
use crate::targets::{TARGETS_MAX, TableError, deal};
use levada_base::Epoch;
use levada_base::ids::Uuid;
use levada_device::{Device, NullDevice};
use levada_raid::{Array, MemberSpec, RaidArray, RaidError};
use levada_spec::{ArraySpec, Bytes, ClusterFile, DriveSpec, FileSystemSpec, SLICE_ALIGN_BYTES};
use std::rc::Rc;

/// More than this of each drive is enough for any number of targets, and laid out quickly.
const SLICE_MOST: Bytes = Bytes::gib(64);

/// Why a cluster file cannot be made into a cluster on these drives.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FitError {
    /// A slice is too small for its array, or for the targets on it.
    #[error(
        "array {array} gets a slice of {slice} of drive {drive}; {} is needed for {what}: \
         raise its `slice`, use larger drives, or ask for fewer `object_targets`",
        needed.map_or("more".into(), |bytes| format!("at least {bytes}"))
    )]
    SliceTooSmall {
        array: String,
        /// The drive that gives least.
        drive: String,
        slice: Bytes,
        /// `None` when no slice would do.
        needed: Option<Bytes>,
        /// What it is for: `the array itself`, `5 targets`.
        what: String,
    },
    /// There is no such array, whatever its slices.
    #[error("array {array}: {source}")]
    Array { array: String, source: RaidError },
    /// The target table has no room for so many.
    #[error("[[filesystem]] {fs}: {targets} targets; {TARGETS_MAX} at most")]
    TooManyTargets { fs: String, targets: usize },
}

/// What an array of a given slice is for.
enum Need<'a> {
    Itself,
    /// Indexes and names, beside a data array that has room for anything.
    Metadata(&'a FileSystemSpec),
    Data(&'a FileSystemSpec),
}

/// Looks whether everything has room on drives of these capacities; a drive whose capacity is not
/// known is left out.
///
/// # Errors
///
/// [`FitError`] for the first that has none.
pub async fn check(
    cluster: &ClusterFile,
    capacity_bytes: impl Fn(&DriveSpec) -> Option<u64>,
    segment_stripes: u32,
) -> Result<(), FitError> {
    for fs in &cluster.filesystems {
        let targets = (fs.metadata_targets + fs.object_targets) as usize;
        if targets > TARGETS_MAX {
            return Err(FitError::TooManyTargets { fs: fs.name.clone(), targets });
        }
    }
    for array in &cluster.arrays {
        let placement = array.placement(cluster);
        let members = placement.members.iter().chain(&placement.spares);
        let slices = members.filter_map(|name| {
            let capacity = capacity_bytes(cluster.drive(name)?)?;
            let slice = cluster.slice_bytes(array, name, Bytes(capacity)).unwrap_or_default();
            Some((slice, name))
        });
        let Some((slice, drive)) = slices.min() else { continue };
        let used = cluster.filesystems.iter().filter_map(|fs| match &array.name {
            name if fs.metadata == *name => Some(Need::Metadata(fs)),
            name if fs.data == *name => Some(Need::Data(fs)),
            _ => None,
        });
        for need in std::iter::once(Need::Itself).chain(used) {
            let has_room =
                async |slice: Bytes| fits(cluster, array, slice, &need, segment_stripes).await;
            if has_room(slice.min(SLICE_MOST)).await? {
                continue;
            }
            let mut needed = has_room(SLICE_MOST).await?.then_some(SLICE_MOST);
            let mut least = slice;
            while let Some(most) = needed
                && most.0 - least.0 > SLICE_ALIGN_BYTES
            {
                let middle = Bytes(u64::midpoint(least.0, most.0)).floor_to(SLICE_ALIGN_BYTES);
                match has_room(middle).await? {
                    true => needed = Some(middle),
                    false => least = middle,
                }
            }
            let (array, drive) = (array.name.clone(), drive.clone());
            let what = match &need {
                Need::Itself => "the array itself".into(),
                Need::Metadata(fs) => {
                    format!("{} targets", fs.metadata_targets + fs.object_targets)
                }
                Need::Data(fs) => format!("{} object targets", fs.object_targets),
            };
            return Err(FitError::SliceTooSmall { array, drive, slice, needed, what });
        }
    }
    Ok(())
}

/// Whether an array over slices of this size serves its need.
async fn fits(
    cluster: &ClusterFile,
    array: &ArraySpec,
    slice: Bytes,
    need: &Need<'_>,
    segment_stripes: u32,
) -> Result<bool, FitError> {
    let placement = array.placement(cluster);
    let member = |(index, name): (usize, &String)| MemberSpec {
        uuid: Uuid::from_u128(index as u128 + 1),
        device: Rc::new(NullDevice::new(name, slice.0)),
        name: name.clone(),
        enclosure: 0,
    };
    let names = placement.members.iter().chain(&placement.spares);
    let members = names.enumerate().map(member).collect();
    let spec = raid_spec(array, Uuid::default(), members, placement.spares.len());
    let made = match RaidArray::create(spec, Epoch(1)).await {
        Ok(made) => made,
        Err(RaidError::TooSmall { .. } | RaidError::Block(_)) => return Ok(false),
        Err(source) => return Err(FitError::Array { array: array.name.clone(), source }),
    };
    let (enough, segment) = (1 << 40, u64::from(segment_stripes));
    let dealt = match need {
        Need::Itself => return Ok(true),
        Need::Metadata(fs) => {
            let bytes = made.info().capacity_bytes;
            deal(bytes, enough, segment, fs.metadata_targets, fs.object_targets)
        }
        Need::Data(fs) => {
            let stripes = made.geometry().stripes;
            deal(enough, stripes, segment, fs.metadata_targets, fs.object_targets)
        }
    };
    Ok(!matches!(dealt, Err(TableError::StoresTooSmall { .. } | TableError::TooFewStripes { .. })))
}
