//! What a node has counted since its start, for whoever watches it.
//!
//! Everything here only rises, but for what is said to be as of now. A viewer looks twice and takes the difference; when
//! `life` changed in between the node was started anew, and it begins again.

use crate::control::TargetStatus;
use levada_base::meter::{HitMeter, Meter, quantile};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

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
    /// The mounts on this machine; filled in by the program that asks.
    #[serde(default)]
    pub mounts: Vec<MountMeters>,
}

/// The meters of a mount, from its own process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MountMeters {
    /// Where it is mounted, or the socket at which virtual machines mount it.
    pub dir: String,
    /// Its process: another one has begun to count anew.
    pub pid: u32,
    /// Calls of programs that have begun and not ended, now.
    pub in_flight: u64,
    /// By what the kernel asks.
    pub ops: Vec<OpMeters>,
    pub cache: CacheMeters,
    /// It is at a socket, and a virtual machine has it mounted.
    #[serde(default)]
    pub has_guest: bool,
}

/// What was asked of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheMeters {
    pub hits: u64,
    pub misses: u64,
}

impl CacheMeters {
    /// What a meter says.
    #[must_use]
    pub fn of(meter: &HitMeter) -> Self {
        Self { hits: meter.hits.get(), misses: meter.misses.get() }
    }

    /// With those of another one.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self { hits: self.hits + other.hits, misses: self.misses + other.misses }
    }

    /// Hits, in percent; `None` when nothing was asked.
    #[must_use]
    pub fn percent(&self) -> Option<u64> {
        (self.hits * 100).checked_div(self.hits + self.misses)
    }
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

/// The median and the 99th percentile of all kinds together, in microseconds.
#[must_use]
pub fn percentiles(ops: &[OpMeters]) -> (u64, u64) {
    let mut buckets: BTreeMap<u16, u64> = BTreeMap::new();
    for (bucket, count) in ops.iter().flat_map(|op| &op.latency) {
        *buckets.entry(*bucket).or_default() += count;
    }
    let buckets: Vec<(u16, u64)> = buckets.into_iter().collect();
    let at = |fraction| quantile(&buckets, fraction).as_micros() as u64;
    (at(0.5), at(0.99))
}
