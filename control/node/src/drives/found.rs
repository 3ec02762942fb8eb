//! What is found at the places of a cluster's drives, and which of it is the cluster's.

use super::{DriveSource, DrivesError, NoDevice};
use crate::arrays::{self, ArrayError};
use crate::recorded::{Labelled, OnDrives, parts_of};
use futures_util::future::join_all;
use levada_base::Epoch;
use levada_base::ids::Uuid;
use levada_device::{Device, Drive, DriveError, Label, read_label};
use levada_spec::{ClusterFile, DriveSpec};
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::rc::Rc;

/// What was found at a drive's path.
#[derive(Clone)]
pub(super) enum Found {
    Labelled(Rc<dyn Device>, Label),
    /// Without a label; the error says what it is.
    Blank(Rc<dyn Device>, DriveError),
    Nothing(NoDevice),
}

impl Found {
    pub(super) async fn on(device: Rc<dyn Device>) -> Self {
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

    /// The label that is there by now, where it is another one.
    async fn later_label(&self) -> Option<Label> {
        let (Self::Labelled(device, _) | Self::Blank(device, _)) = self else { return None };
        let label = read_label(&**device).await.ok()?;
        (self.label() != Some(&label)).then_some(label)
    }

    pub(super) fn label(&self) -> Option<&Label> {
        match self {
            Self::Labelled(_, label) => Some(label),
            Self::Blank(..) | Self::Nothing(_) => None,
        }
    }
}

pub(super) async fn look(source: &dyn DriveSource, spec: &DriveSpec) -> Found {
    match source.open(spec).await {
        Err(none) => Found::Nothing(none),
        Ok(device) => Found::on(device).await,
    }
}

/// What there is at the places of the cluster's drives.
pub(super) async fn look_at_all(source: &dyn DriveSource, cluster: &ClusterFile) -> Vec<Found> {
    join_all(cluster.drives.iter().map(|spec| look(source, spec))).await
}

/// All of it, as it is by now.
pub(super) async fn look_again(found: Vec<Found>) -> Vec<Found> {
    join_all(found.into_iter().map(Found::again)).await
}

/// Shuts other servers out of the drives of the cluster `uuid`, of which `last` was the latest owner, where something is asked to; false: they
/// were not, and may be by reservations.
pub(super) async fn shut_out(
    source: &dyn DriveSource,
    cluster: &ClusterFile,
    uuid: Option<Uuid>,
    last: Epoch,
    progress: &dyn Fn(&str),
) -> Result<bool, DrivesError> {
    if cluster.power_fence.is_some() {
        progress("running the power fence, and waiting for what other servers had under way");
    }
    Ok(source.shut_out(uuid, last).await?)
}

/// Of drives that are about to be overwritten: where somebody has something there, nobody else writes any more. Nor has made a cluster
/// there until then.
pub(super) async fn shut_out_strangers(
    source: &dyn DriveSource,
    cluster: &ClusterFile,
    found: Vec<Found>,
    progress: &dyn Fn(&str),
) -> Result<Vec<Found>, DrivesError> {
    let used = found.iter().map(async |found| match found {
        Found::Blank(device, _) => Drive::refuse_used(&**device).await.is_err(),
        Found::Labelled(..) => true,
        Found::Nothing(_) => false,
    });
    let labels = || found.iter().filter_map(Found::label);
    let uuid = labels().map(|label| label.cluster_uuid).next();
    let its = labels().filter(|label| Some(label.cluster_uuid) == uuid);
    let last = its.map(Label::last_epoch).max().unwrap_or_default();
    if !join_all(used).await.contains(&true)
        || !shut_out(source, cluster, uuid, last, progress).await?
    {
        return Ok(found);
    }
    refuse_later(&found).await?;
    Ok(look_again(found).await)
}

/// Refuses drives on which another server has made a cluster, or taken one over, since they were looked at.
pub(super) async fn refuse_later(found: &[Found]) -> Result<(), DrivesError> {
    let later = join_all(found.iter().map(Found::later_label)).await;
    match later.into_iter().flatten().next() {
        Some(label) => {
            Err(DrivesError::MadeMeanwhile { drive: label.drive_name, cluster: label.cluster_name })
        }
        None => Ok(()),
    }
}

/// The drives whose label has the name of the cluster.
pub(super) fn named_like(cluster: &ClusterFile, found: &[Found]) -> Vec<String> {
    let known = |(spec, found): (&DriveSpec, &Found)| match found {
        Found::Labelled(_, label) if label.cluster_name == cluster.name => Some(spec.name.clone()),
        Found::Labelled(..) | Found::Blank(..) | Found::Nothing(_) => None,
    };
    cluster.drives.iter().zip(found).filter_map(known).collect()
}

/// None of the drives of the cluster that was up here is there.
pub(super) fn away(source: &dyn DriveSource, cluster: &ClusterFile) -> DrivesError {
    let first = cluster.drives.first();
    DrivesError::Away {
        cluster: cluster.name.clone(),
        uuid: source.cluster().unwrap_or_default(),
        place: first.map_or(String::new(), |drive| drive.path.display().to_string()),
    }
}

/// The name that the cluster has on its drives, where the file has another: it is told by the note
/// of the cluster that was up last.
pub(super) fn renamed(
    source: &dyn DriveSource,
    cluster: &ClusterFile,
    found: &[Found],
) -> Option<String> {
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
pub(super) fn refuse_namesake(
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

/// The drives of a cluster that was made, told apart.
pub(super) struct Known<'a> {
    pub cluster: Option<Uuid>,
    pub by_name: BTreeMap<String, AtPath<'a>>,
    /// Why a drive is not among them, by its name in the file.
    absent: BTreeMap<&'a str, String>,
}

impl Known<'_> {
    /// The latest owner, as the labels tell.
    pub fn last_epoch(&self) -> Epoch {
        let labels = self.by_name.values().map(|(_, drive)| drive.label.last_epoch());
        labels.max().unwrap_or_default()
    }

    /// Whether all arrays can be opened by these drives.
    pub async fn examine(
        &self,
        cluster: &ClusterFile,
        without_majority: bool,
    ) -> Result<(), ArrayError> {
        let drives: Vec<&Labelled> = self.by_name.values().map(|(_, drive)| drive).collect();
        arrays::examine(cluster, without_majority, |spec| parts_of(spec, &drives)).await
    }

    pub fn why_absent(&mut self, drive: &str) -> String {
        self.absent.remove(drive).unwrap_or_else(|| "another drive is at its path".into())
    }
}

/// Finds out which drive is which, and whether the file says of them what they are.
pub(super) async fn tell_apart<'a>(
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

/// A drive and the entry of the file that leads to it.
pub(super) type AtPath<'a> = (&'a DriveSpec, Labelled);

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
pub(super) async fn latest_owner(
    source: &dyn DriveSource,
    cluster: &ClusterFile,
    found: &[Found],
) -> Epoch {
    let is_there = |found: &Found| !matches!(found, Found::Nothing(_));
    let there = cluster.drives.iter().zip(found).filter(|(_, found)| is_there(found));
    let owners = join_all(there.map(|(spec, _)| source.owner(spec))).await;
    owners.into_iter().max().unwrap_or_default()
}

/// The cluster that most labelled drives belong to; of two with as many, the noted one.
pub(super) fn cluster_of(
    cluster: &ClusterFile,
    noted: Option<Uuid>,
    found: &[Found],
) -> Option<Uuid> {
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
