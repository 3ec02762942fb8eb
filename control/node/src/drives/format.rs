//! New drives: labels and slices, and what must not be overwritten.

use super::found::{Found, cluster_of, latest_owner, refuse_later, shut_out_strangers};
use super::{ClusterDrive, DriveSource, Drives, DrivesError, Intake, MayOverwrite, claim};
use crate::fit;
use levada_base::Epoch;
use levada_base::ids::Uuid;
use levada_base::units::{BLOCK_BYTES, round_down};
use levada_device::{
    BlockError, Device, Drive, DriveError, DriveIdentity, Label, Overwrite, SliceEntry, SliceKind,
};
use levada_spec::{ArraySpec, Bytes, ClusterFile, DRIVE_RESERVED_BYTES, DriveSpec, Level};
use std::collections::BTreeMap;
use std::rc::Rc;

pub(super) async fn format(
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
    check_room(cluster, &found, &slices, segment_stripes).await?;
    let found = shut_out_strangers(source, cluster, found, progress).await?;
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
    // Drives may have been waited for meanwhile. Whoever was quicker is not disturbed ...
    refuse_later(&found).await?;
    let epoch = latest_owner(source, cluster, &found).await.next();
    let failed = |spec: &DriveSpec| {
        let drive = spec.name.clone();
        |source| DrivesError::Drive { drive, source: Box::new(source) }
    };
    for (spec, device) in cluster.drives.iter().zip(&devices) {
        claim(spec, &**device, epoch).await.map_err(failed(spec))?;
    }
    // ... nor overwritten, now that nobody else writes there.
    refuse_later(&found).await?;
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

/// Whether the arrays, and what is to be on them, have room on what was found; a drive that is not there, and is no file, is as large
/// as need be.
pub(super) async fn check_room(
    cluster: &ClusterFile,
    found: &[Found],
    arrays: &[(ArraySpec, Uuid)],
    segment_stripes: u32,
) -> Result<(), DrivesError> {
    let mut capacities = BTreeMap::new();
    for (spec, found) in cluster.drives.iter().zip(found) {
        let capacity_bytes = match found {
            Found::Labelled(device, _) | Found::Blank(device, _) => device.info().capacity_bytes,
            Found::Nothing(_) => spec.size.map_or(u64::MAX, |size| size.0),
        };
        slice_table(cluster, spec, capacity_bytes, arrays)?;
        check_size(spec, capacity_bytes)?;
        capacities.insert(&spec.name, capacity_bytes);
    }
    let capacity = |spec: &DriveSpec| capacities.get(&spec.name).copied();
    fit::check(cluster, |spec| capacity(spec).filter(|bytes| *bytes != u64::MAX), segment_stripes)
        .await?;
    Ok(())
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
    source: &dyn DriveSource,
    cluster: &ClusterFile,
    spec: &DriveSpec,
    device: Rc<dyn Device>,
    drives: &Drives,
    intake: Intake,
    force: bool,
) -> Result<Rc<Drive>, DrivesError> {
    let failed = |source| DrivesError::Drive { drive: spec.name.clone(), source: Box::new(source) };
    // The drive of this name of this very cluster may come back without force.
    let found = Found::on(Rc::clone(&device)).await;
    let own = found
        .label()
        .is_some_and(|label| label.cluster_uuid == drives.cluster && label.drive_name == spec.name);
    let refuse_used = async || match Drive::refuse_used(&*device).await {
        Err(source) if !own => Err(DrivesError::InUse {
            drive: spec.name.clone(),
            path: spec.path.display().to_string(),
            source: Box::new(source),
            overwrite: intake.by_force(&spec.name),
        }),
        _ => Ok(()),
    };
    let used = refuse_used().await;
    let is_used = used.is_err();
    if !force {
        used?;
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
    // Another server may write there, and the drive itself would let it.
    if is_used && source.needs_power_fence(spec) {
        let label = found.label();
        let last = label.map(Label::last_epoch).unwrap_or_default();
        source.shut_out(label.map(|label| label.cluster_uuid), last).await?;
    }
    claim(spec, &*device, drives.epoch).await.map_err(|error| match error {
        DriveError::Block(BlockError::Fenced { ours, seen }) => {
            DrivesError::Reserved { drive: spec.name.clone(), ours, seen }
        }
        error => failed(error),
    })?;
    // Until then another server may have begun to use it.
    refuse_later(&[found]).await?;
    if !force {
        refuse_used().await?;
    }
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
pub(super) async fn refuse_used(
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
pub(super) fn array_ids(cluster: &ClusterFile) -> Vec<(ArraySpec, Uuid)> {
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
