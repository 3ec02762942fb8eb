//! What `levada up` would meet. Looks at the drives as it does, by the same checks, and changes nothing.

use crate::arrays;
use crate::assembly::{self, AssemblyError};
use crate::drives::{self, DriveSource, Sight};
use crate::placed::{Placed, displaced};
use crate::recorded::{Labelled, OnDrives};
use levada_base::ids::Uuid;
use levada_device::{Device, SliceEntry};
use levada_raid::ByteRange;
use levada_spec::{ArraySpec, ClusterFile};
use std::rc::Rc;

/// What `levada up` would meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outlook {
    /// It would make the cluster, once these drives are there, each with why it is not.
    New { missing: Vec<(String, String)> },
    /// It would open the cluster that is there.
    Exists {
        /// Without these drives, each with why.
        missing: Vec<(String, String)>,
        /// Arrays whose members have come to sit where they bear less than the file would make them bear.
        displaced: Vec<Placed>,
    },
}

/// Looks at the drives of a cluster, whose object logs have segments of `segment_stripes`.
///
/// # Errors
///
/// What [`assembly::start`] would refuse, as far as it can be seen without being the owner.
pub async fn outlook(
    source: &dyn DriveSource,
    cluster: &ClusterFile,
    segment_stripes: u32,
) -> Result<Outlook, AssemblyError> {
    assembly::refuse_unserved(cluster)?;
    match drives::sight(source, cluster, segment_stripes).await? {
        Sight::New { missing } => Ok(Outlook::New { missing }),
        Sight::Exists { missing, drives } => {
            arrays::examine(cluster, |spec| members_of(spec, &drives)).await?;
            let drives: Vec<&Labelled> = drives.iter().collect();
            let standing = OnDrives::read(&drives).await;
            let displaced = cluster.arrays.iter().filter_map(|array| {
                let (level, roles) = standing.roles(&array.name, cluster)?;
                displaced(cluster, array, level, &roles)
            });
            Ok(Outlook::Exists { missing, displaced: displaced.collect() })
        }
    }
}

/// The UUID of an array and its part of each drive.
fn members_of(spec: &ArraySpec, drives: &[Labelled]) -> (Uuid, Vec<Rc<dyn Device>>) {
    let parts: Vec<(&Labelled, &SliceEntry)> = drives
        .iter()
        .flat_map(|drive| drive.label.slices.iter().map(move |slice| (drive, slice)))
        .filter(|(_, slice)| slice.array_name == spec.name)
        .collect();
    let uuid = parts.first().map(|(_, slice)| slice.array_uuid).unwrap_or_default();
    let part = |(drive, slice): (&Labelled, &SliceEntry)| {
        // Of a drive that has shrunk, what is left.
        let there = drive.device.info().capacity_bytes.checked_sub(slice.start)?;
        let (device, bytes) = (Rc::clone(&drive.device), slice.bytes.min(there));
        let part = ByteRange::new(&drive.label.drive_name, device, slice.start, bytes).ok()?;
        Some(Rc::new(part) as Rc<dyn Device>)
    };
    (uuid, parts.into_iter().filter_map(part).collect())
}
