//! What `levada up` would meet. Looks at the drives as it does, by the same checks, and changes nothing.

use crate::arrays;
use crate::assembly::{self, AssemblyError};
use crate::drives::{self, DriveSource, Sight};
use crate::placed::{Placed, displaced};
use crate::recorded::{Labelled, OnDrives, parts_of};
use levada_spec::ClusterFile;

/// An array without some of its drives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reduced {
    pub array: String,
    /// It bears the loss of so many more drives, whichever.
    pub drives: usize,
}

/// What `levada up` would meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outlook {
    /// It would make the cluster, once these drives are there, each with why it is not.
    New { missing: Vec<(String, String)> },
    /// It would open the cluster that is there.
    Exists {
        /// Without these drives, each with why.
        missing: Vec<(String, String)>,
        /// Arrays that lack some of their drives, or whose data are not on all of them.
        reduced: Vec<Reduced>,
        /// Arrays whose members have come to sit where they bear less than the file would make them bear.
        displaced: Vec<Placed>,
    },
    /// It would refuse the cluster that is there, without these drives.
    Refused { missing: Vec<(String, String)>, why: String },
}

/// Looks at the drives of a cluster, whose object logs have segments of `segment_stripes`.
///
/// # Errors
///
/// What [`assembly::start`] would refuse whatever drives are there, as far as it can be seen without being the owner.
pub async fn outlook(
    source: &dyn DriveSource,
    cluster: &ClusterFile,
    segment_stripes: u32,
) -> Result<Outlook, AssemblyError> {
    assembly::refuse_unserved(cluster)?;
    match drives::sight(source, cluster, segment_stripes).await? {
        Sight::New { missing } => Ok(Outlook::New { missing }),
        Sight::Exists { missing, drives } => {
            let drives: Vec<&Labelled> = drives.iter().collect();
            if let Err(error) =
                arrays::examine(cluster, false, |spec| parts_of(spec, &drives)).await
            {
                let why = AssemblyError::from(error).to_string();
                return Ok(Outlook::Refused { missing, why });
            }
            let standing = OnDrives::read(&drives).await;
            let displaced = cluster.arrays.iter().filter_map(|array| {
                let (level, roles) = standing.roles(&array.name, cluster)?;
                displaced(cluster, array, level, &roles)
            });
            let is_there = |drive: &str| missing.iter().all(|(absent, _)| absent != drive);
            let reduced = cluster.arrays.iter().filter_map(|array| {
                let drives = standing.bears_without_some(&array.name, is_there)?;
                Some(Reduced { array: array.name.clone(), drives })
            });
            let (reduced, displaced) = (reduced.collect(), displaced.collect());
            Ok(Outlook::Exists { missing, reduced, displaced })
        }
    }
}
