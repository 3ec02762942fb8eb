//! What the processes of mounts tell of themselves.

use super::{mounts, record, served};
use levada_node::control::{self, ControlReply, ControlRequest, MountNow, MountStatus};
use levada_node::meters::{MountMeters, percentiles};
use levada_node::state::StateDir;
use std::path::Path;
use std::time::Duration;

/// A mount whose process has stopped keeps nobody who looks.
const LIMIT: Duration = Duration::from_secs(1);

/// What the mounts of this cluster that have a process say of themselves. One that does not answer at once is left out.
pub fn meters(state: &StateDir) -> Vec<MountMeters> {
    mounts(state).iter().filter_map(|dir| meters_of(state, dir)).collect()
}

fn meters_of(state: &StateDir, dir: &Path) -> Option<MountMeters> {
    let socket = state.mount_socket(served(&record(state, dir).ok()?)?.pid);
    match control::ask_within(&socket, &ControlRequest::Meters, LIMIT).ok()? {
        // After a mount that was killed another one may have its number.
        ControlReply::MountMeters(meters) if Path::new(&meters.dir) == dir => Some(*meters),
        _ => None,
    }
}

/// The mounts of this cluster that are there now, with what they have done.
pub fn status(state: &StateDir) -> Vec<MountStatus> {
    let told = |meters: MountMeters| {
        let (p50_us, p99_us) = percentiles(&meters.ops);
        let requests = meters.ops.iter().map(|op| op.count).sum();
        let (in_flight, cache) = (meters.in_flight, meters.cache);
        MountNow { requests, in_flight, p50_us, p99_us, cache }
    };
    let mounts = mounts(state).into_iter();
    mounts.map(|dir| MountStatus { now: meters_of(state, &dir).map(told), dir }).collect()
}
