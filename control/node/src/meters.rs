//! What a node has counted since its start, for whoever watches it.
//!
//! Everything here only rises, but for what is said to be as of now. A viewer looks twice and takes the difference; when
//! `life` changed in between the node was started anew, and it begins again.

use crate::control::TargetStatus;
use levada_base::meter::Meter;
use serde::{Deserialize, Serialize};

/// All meters of a node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Meters {
    pub cluster: String,
    /// When this was read, by a clock that only rises.
    pub at_us: u64,
    /// Drawn at the node's start.
    pub life: u64,
    /// Things that want attention, as `status` tells them, now.
    pub problems: u64,
    /// Clients now.
    pub clients: u64,
    pub targets: Vec<TargetMeters>,
    pub drives: Vec<DriveMeters>,
}

/// The meters of a target.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TargetMeters {
    /// As of now.
    #[serde(flatten)]
    pub status: TargetStatus,
    pub ops: Vec<OpMeters>,
}

/// The meter of one kind of request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpMeters {
    pub kind: String,
    /// Of the payload, for reads and writes of objects; else empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub size: String,
    pub count: u64,
    pub failed: u64,
    pub bytes: u64,
    pub total_ns: u64,
    /// The buckets that are not empty, each with its count: bucket b ends at (5 + b % 4) * 2^(b / 4 - 2) ns.
    pub latency: Vec<(u16, u64)>,
}

/// The meters of a drive's part in an array.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveMeters {
    pub drive: String,
    pub array: String,
    pub bytes_read: u64,
    pub bytes_written: u64,
    pub latency: Vec<(u16, u64)>,
}

impl OpMeters {
    /// What a meter says.
    #[must_use]
    pub fn of(kind: &str, size: &str, meter: &Meter) -> Self {
        Self {
            kind: kind.to_owned(),
            size: size.to_owned(),
            count: meter.count.get(),
            failed: meter.failed.get(),
            bytes: meter.bytes.get(),
            total_ns: meter.total_ns.get(),
            latency: meter.latency.buckets(),
        }
    }
}
