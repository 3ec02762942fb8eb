//! Orders for volumes, and why they are refused.

use crate::VolumeError;
use crate::name::{SnapshotName, Tenant, VolumeName};
use crate::qos::{Limits, LimitsChange, QosError};
use levada_base::ids::Uuid;
use levada_base::units::BLOCK_BYTES;
use levada_client::Error;
use levada_device::BlockError;
use serde::{Deserialize, Serialize};

/// What an operator says explicitly, because it could be a slip.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Anyway {
    /// A new or grown thin volume may be larger than the store, a shrunk one may lose data, a deleted one be in use.
    pub is_meant: bool,
}

/// A size to be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NewSize {
    /// Refused where the volume is that large already.
    GrowTo {
        bytes: u64,
    },
    GrowBy {
        bytes: u64,
    },
    /// Refused where the volume is that small already.
    ShrinkTo {
        bytes: u64,
    },
}

impl NewSize {
    /// The size of a volume that had `old_bytes`; `None`: it would not become larger, or smaller, as was asked.
    #[must_use]
    pub fn of(self, old_bytes: u64) -> Option<u64> {
        match self {
            Self::GrowTo { bytes } => (bytes > old_bytes).then_some(bytes),
            Self::GrowBy { bytes } => Some(old_bytes.saturating_add(bytes)),
            Self::ShrinkTo { bytes } => (bytes < old_bytes).then_some(bytes),
        }
    }
}

/// What may be asked for a volume, wherever it lies. `is_meant`: see [`Anyway`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "kebab-case")]
pub enum VolumeOrder {
    Create {
        name: VolumeName,
        size_bytes: u64,
        is_meant: bool,
    },
    Resize {
        name: VolumeName,
        size: NewSize,
        is_meant: bool,
    },
    /// Changes what a volume may use, while it is used.
    Set {
        name: VolumeName,
        change: LimitsChange,
    },
    Rename {
        from: VolumeName,
        to: VolumeName,
    },
    Delete {
        name: VolumeName,
        is_meant: bool,
    },
    /// Keeps a volume as it is now.
    Snapshot {
        name: SnapshotName,
    },
    DeleteSnapshot {
        name: SnapshotName,
    },
    /// Makes a volume that begins as a snapshot.
    Clone {
        from: SnapshotName,
        to: VolumeName,
    },
    /// Makes a volume what it was.
    RollBack {
        to: SnapshotName,
        is_meant: bool,
    },
}

/// A volume, as programs are told of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeStatus {
    pub name: VolumeName,
    /// `thin`, `linear`.
    pub kind: String,
    pub size_bytes: u64,
    /// Clients that have it open now, over all exports.
    pub users: usize,
    #[serde(default)]
    pub limits: Limits,
    #[serde(default)]
    pub snapshots: usize,
    /// Files of snapshots, deleted ones included, on which its own lies.
    #[serde(default)]
    pub layers: usize,
}

/// A volume as it is listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeRow {
    pub name: VolumeName,
    /// Of this volume alone, for ever, whatever it is called.
    pub id: Uuid,
    pub size_bytes: u64,
    /// Exports and requests that hold it.
    pub users: usize,
}

/// A snapshot as it is listed, and as programs are told of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotRow {
    pub name: SnapshotName,
    pub size_bytes: u64,
    /// When it was taken: nanoseconds since 1970.
    pub taken_ns: i64,
}

/// A tenant as it is listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantRow {
    pub tenant: Tenant,
    pub volumes: usize,
    /// What clients see of all of them together.
    pub size_bytes: u64,
    pub limits: Limits,
}

/// Why an order for a volume cannot be carried out; nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    #[error("there is no volume {name}")]
    Missing { name: VolumeName },
    #[error("there is a volume {name} already")]
    Exists { name: VolumeName },
    #[error("a volume belongs to one tenant: {from} cannot become {to}")]
    OtherTenant { from: VolumeName, to: VolumeName },
    #[error(
        "{bytes} bytes are no size of a volume: it must be a multiple of {BLOCK_BYTES}, and not 0"
    )]
    Size { bytes: u64 },
    #[error(
        "{bytes} bytes are more than the whole store has ({store_bytes}): it could never be filled; --overcommit makes it all the same"
    )]
    LargerThanStore { bytes: u64, store_bytes: u64 },
    /// A linear volume has its room from the beginning.
    #[error("array {array} has no room for {bytes} bytes more: {free_bytes} are free")]
    NoRoom { array: String, bytes: u64, free_bytes: u64 },
    #[error("array {array} has as many volumes as its table holds")]
    TableFull { array: String },
    /// Whether the last order was carried out is known when it is opened anew.
    #[error("the table of volumes of array {array} could not be written: serve it anew first")]
    PoolUnsettled { array: String },
    #[error(
        "volume {name} holds data beyond {bytes} bytes (at {data_at}): discard it first, or give --discard-data"
    )]
    WouldCut { name: VolumeName, bytes: u64, data_at: u64 },
    #[error("volume {name} has {users} users: end that first, or give --force")]
    InUse { name: VolumeName, users: usize },
    #[error("there is no snapshot {name}")]
    NoSnapshot { name: SnapshotName },
    #[error("there is a snapshot {name} already")]
    SnapshotExists { name: SnapshotName },
    #[error("snapshot {name} has {users} users: end that first")]
    SnapshotInUse { name: SnapshotName, users: usize },
    #[error("volume {name} has {snapshots} snapshots: delete those first")]
    HasSnapshots { name: VolumeName, snapshots: usize },
    #[error(
        "volume {name} would lie on more than {layers_max} snapshots: delete some, and wait until `levada volume list --json` shows \
         fewer layers"
    )]
    TooManyLayers { name: VolumeName, layers_max: usize },
    #[error("a linear volume has no snapshots: its bytes are written in place")]
    LinearSnapshot,
    #[error(
        "on what {whose} lies is said in words that are not understood, or is not there: nothing of its tenant is taken away meanwhile"
    )]
    LayerUnknown { whose: String },
    #[error("volume {name} is a file's name for something else: remove that first")]
    NotAVolume { name: VolumeName },
    #[error("there is no tenant {tenant}")]
    NoTenant { tenant: Tenant },
    #[error("tenant {tenant} has volumes: delete those first")]
    TenantInUse { tenant: Tenant },
    #[error(
        "the limits of {whose} are kept in words that are not understood; the command that sets them writes them anew"
    )]
    LimitsUnknown { whose: String },
    #[error(transparent)]
    Limits(#[from] QosError),
    #[error(transparent)]
    Client(#[from] Error),
    #[error(transparent)]
    Block(#[from] BlockError),
    #[error(transparent)]
    Volume(#[from] VolumeError),
}

/// That `bytes` can be the size of a volume.
pub(crate) fn check_size(bytes: u64) -> Result<(), OrderError> {
    match bytes > 0 && bytes.is_multiple_of(BLOCK_BYTES) && bytes <= i64::MAX as u64 {
        true => Ok(()),
        false => Err(OrderError::Size { bytes }),
    }
}

/// That a volume stays with its tenant.
pub(crate) fn check_rename(from: &VolumeName, to: &VolumeName) -> Result<(), OrderError> {
    match from.tenant == to.tenant {
        true => Ok(()),
        false => Err(OrderError::OtherTenant { from: from.clone(), to: to.clone() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_grows_or_shrinks_as_was_asked_or_not_at_all() {
        let of = |size: NewSize| size.of(100);
        assert_eq!(of(NewSize::GrowTo { bytes: 101 }), Some(101));
        assert_eq!(of(NewSize::GrowTo { bytes: 100 }), None);
        assert_eq!(of(NewSize::GrowBy { bytes: 100 }), Some(200));
        assert_eq!(of(NewSize::GrowBy { bytes: u64::MAX }), Some(u64::MAX), "which is no size");
        assert_eq!(of(NewSize::ShrinkTo { bytes: 99 }), Some(99));
        assert_eq!(of(NewSize::ShrinkTo { bytes: 100 }), None);
    }
}
