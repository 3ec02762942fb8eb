//! What the processes of mounts tell of themselves.

use super::{guest, mounts, record, served};
use anyhow::Result;
use levada_node::control::{
    self, ControlReply, ControlRequest, ExportStatus, MountNow, MountStatus,
};
use levada_node::meters::{MountMeters, percentiles};
use levada_node::state::StateDir;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A mount whose process has stopped keeps nobody who looks.
const LIMIT: Duration = Duration::from_secs(1);

/// What the mounts of this cluster that have a process say of themselves. One that does not answer at once is left out.
pub fn meters(state: &StateDir) -> Vec<MountMeters> {
    let at_sockets = guest::sockets(state).into_iter();
    let at_sockets = at_sockets.filter_map(|at| meters_in(state, &at, guest::record(state, &at)));
    mounts(state).iter().filter_map(|dir| meters_of(state, dir)).chain(at_sockets).collect()
}

fn meters_of(state: &StateDir, dir: &Path) -> Option<MountMeters> {
    meters_in(state, dir, record(state, dir))
}

/// What the process says of which `record` is the note.
pub(super) fn meters_in(
    state: &StateDir,
    dir: &Path,
    record: Result<PathBuf>,
) -> Option<MountMeters> {
    let socket = state.mount_socket(served(&record.ok()?)?.pid);
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
    let mounts =
        mounts.map(|dir| MountStatus { now: meters_of(state, &dir).map(told), dir, subtree: None });
    let at_sockets = guest::sockets(state).into_iter().map(|at| {
        let record = guest::record(state, &at);
        let part = record.as_deref().ok().and_then(guest::view_of).and_then(|view| view.part);
        let now = meters_in(state, &at, record).map(told);
        MountStatus { now, dir: at, subtree: part.map(|part| part.path.to_string()) }
    });
    mounts.chain(at_sockets).collect()
}

/// Fills in what is known here of exports to guests: whether one is there, and whether it could be.
pub fn exports(state: &StateDir, exports: &mut [ExportStatus]) {
    let served = guest::sockets(state);
    for export in exports {
        let Some(socket) = &export.virtiofs else { continue };
        // Not even its directory may be there.
        let at = guest::place_of(socket).unwrap_or_else(|_| socket.clone());
        if !served.contains(&at) {
            export.problem = Some("nobody serves it; `levada up` does".into());
            continue;
        }
        let record = guest::record(state, &at);
        let part = record.as_deref().ok().and_then(guest::view_of).and_then(|view| view.part);
        let shown = part.map(|part| part.path.to_string());
        if shown.as_ref() != Some(&export.subtree) {
            let shown = shown.unwrap_or_else(|| "all of the file system".into());
            let at = at.display();
            export.problem =
                Some(format!("it shows {shown} instead: `levada umount {at}`, then `levada up`"));
        }
        let meters = meters_in(state, &at, record);
        export.clients = meters.map_or(0, |meters| usize::from(meters.has_guest));
    }
}
