//! What a node shows of itself: its status for people, its meters for whoever watches.

use super::returns::NotBack;
use super::{Operator, is_promised};
use crate::arrays::ClusterArray;
use crate::assembly::{Service, Target};
use crate::control::{
    ArrayStatus, ClientStatus, DriveStatus, MemberStatus, Progress, Segments, Status, TargetStatus,
    Traffic,
};
use crate::meters::{CacheMeters, DriveMeters, Meters, OpMeters, TargetMeters, percentiles};
use crate::placed::{displaced, played};
use crate::told::{Absent, absent, named_in, some_of, survives_now};
use levada_base::reactor;
use levada_device::{BlockError, Drive};
use levada_health::Record;
use levada_kv::KvError;
use levada_raid::{Level, MemberState};
use levada_spec::DriveSpec;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;
/// Throughput "now" is that of so much time.
const MEASURE_EVERY: Duration = Duration::from_secs(1);

impl Operator {
    /// Keeps the traffic of the last second, for as long as the node serves.
    pub async fn measure(self: Rc<Self>) {
        let mut before = (self.totals(), reactor::now());
        loop {
            reactor::sleep(MEASURE_EVERY).await;
            let (totals, now) = (self.totals(), reactor::now());
            let seconds = now.since(before.1).as_secs_f64().max(1e-3);
            let rate = |now: u64, then: u64| (now.saturating_sub(then) as f64 / seconds) as u64;
            let (read_bytes, written_bytes, metadata) = totals;
            let (read_before, written_before, metadata_before) = before.0;
            self.traffic.set(Traffic {
                read_bytes,
                written_bytes,
                read_bytes_per_s: rate(read_bytes, read_before),
                written_bytes_per_s: rate(written_bytes, written_before),
                metadata_per_s: rate(metadata, metadata_before),
            });
            before = (totals, now);
        }
    }

    /// Bytes read and written by clients, and metadata requests, since the start.
    fn totals(&self) -> (u64, u64, u64) {
        let mut totals = (0, 0, 0);
        for target in &self.cluster.targets {
            match &target.service {
                Service::Objects { service, .. } => {
                    let meters = service.meters();
                    totals.0 += meters.bytes_read();
                    totals.1 += meters.bytes_written();
                }
                Service::Metadata { counted, .. } => totals.2 += counted.requests(),
                Service::Stopped { .. } => {}
            }
        }
        totals
    }

    /// Everything that was counted since the start.
    pub(super) fn meters(&self) -> Meters {
        let drives = self.cluster.arrays.iter().flat_map(|array| {
            let members = array.array.status().members.into_iter();
            members.map(|member| DriveMeters {
                drive: member.name,
                array: array.spec.name.clone(),
                bytes_read: member.bytes_read,
                bytes_written: member.bytes_written,
                latency: member.latency.buckets(),
            })
        });
        let status = self.status();
        Meters {
            cluster: status.cluster,
            at_us: self.start.elapsed().as_micros() as u64,
            life: self.life,
            problems: status.problems.len() as u64,
            clients: status.clients.len() as u64,
            targets: self.cluster.targets.iter().map(|target| self.target_meters(target)).collect(),
            drives: drives.collect(),
            mounts: Vec::new(),
        }
    }

    pub(super) fn status(&self) -> Status {
        let arrays: Vec<_> = self.cluster.arrays.iter().map(|array| self.array(array)).collect();
        let drives: Vec<_> = self
            .drives
            .borrow()
            .values()
            .map(|(spec, drive)| self.drive_shown(spec, drive))
            .collect();
        let targets: Vec<_> =
            self.cluster.targets.iter().map(|target| self.target_status(target)).collect();
        let clients = self.clients();
        let mut problems = Vec::new();
        let vanished = self.vanished().into_keys();
        let why_not: BTreeMap<String, NotBack> = vanished
            .filter_map(|drive| Some((drive.clone(), self.returns.why_not(&drive)?)))
            .collect();
        let known = self.drives.borrow();
        let mut missing: Vec<(&str, &str)> = Vec::new();
        let mut away: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (drive, (spec, found)) in known.iter() {
            match (found, why_not.get(drive)) {
                (Err(_), Some(NotBack::Away { why } | NotBack::Refused { why }))
                | (Err(why), None) => missing.push((&**drive, &**why)),
                // Something is there, which the advice to replace it would be about.
                (Ok(_), Some(NotBack::Refused { why })) => {
                    problems.push(format!("drive {drive} is not taken back: {why}"));
                }
                (Ok(open), _) if open.is_failed() && spec.is_remote() && self.is_away(drive) => {
                    away.entry(&spec.enclosure).or_default().push(drive);
                }
                (Ok(open), _) if open.is_failed() => problems.push(format!(
                    "drive {drive} has failed; replace it with `levada drive replace {drive}`"
                )),
                (Ok(_), _) if !self.source.in_place(spec) => problems.push(format!(
                    "drive {drive} is not at {} any more, which was removed or replaced: put it back, or \
                     `levada drive fail {drive}` and `levada drive replace {drive}`; \
                     it serves while the node runs, and is missing at the next start",
                    spec.path.display()
                )),
                // An array that is the worse for it says so itself.
                (Ok(open), _) => {
                    let arrays = self.cluster.arrays.iter();
                    let promised = arrays.filter(|array| is_promised(array, open));
                    let names: Vec<_> = promised.map(|array| &*array.spec.name).collect();
                    // An order that is under way now gets there by itself.
                    let comes_in = self.spare_state(drive).is_none() && self.admitting.available() > 0;
                    if !names.is_empty() && comes_in {
                        problems.push(format!(
                            "drive {drive} has room for {}, and neither serves nor waits there; \
                             `levada drive add {drive}` has it taken",
                            names.join(", ")
                        ));
                    }
                    // One that is a spare of the cluster again has nothing of the array that it was in.
                    let is_spare = self.spare_state(drive) == Some("spare");
                    let is_out = |array: &&Rc<ClusterArray>| {
                        let is_free = is_spare && open.slice_of(array.array.status().uuid).is_none();
                        array.is_without(drive) && !array.out().contains(drive) && !is_free
                    };
                    let out: Vec<_> = self.cluster.arrays.iter().filter(is_out).collect();
                    if !out.is_empty() {
                        let names: Vec<_> = out.iter().map(|array| &*array.spec.name).collect();
                        problems.push(format!(
                            "drive {drive} is out of {}, another has its place; `levada drive replace {drive}` makes it a spare",
                            names.join(", ")
                        ));
                    }
                    let another = format!(
                        "`levada drive fail {drive}`, another in its place, and `levada drive replace {drive}`"
                    );
                    let problem = self.health.with(drive, |record| record.problem(&another)).flatten();
                    problems.extend(problem.map(|problem| format!("drive {drive}: {problem}")));
                }
            }
        }
        let absent = absent(&self.latest.borrow(), missing);
        problems.extend(
            absent.into_iter().map(|Absent { drives, why, .. }| format!("{drives}: {why}")),
        );
        problems.extend(away.iter().map(|(enclosure, drives)| {
            let (named, is) =
                (named_in(enclosure, drives), if drives.len() > 1 { "are" } else { "is" });
            format!(
                "{named} {is} away, as no path leads there, and taken back when there is one again"
            )
        }));
        problems.extend(bad_paths(&drives));
        for (array, shown) in self.cluster.arrays.iter().zip(&arrays) {
            problems.extend(self.problem_of(array, &shown.state));
            let status = array.array.status();
            let file = &self.cluster.file;
            let roles = played(file, &status);
            let displaced = displaced(file, &array.spec, status.level, &roles);
            problems.extend(displaced.map(|placed| placed.to_string()));
            let has_spare = status.members.iter().any(|member| member.state == MemberState::Spare)
                || self
                    .latest
                    .borrow()
                    .spares
                    .iter()
                    .any(|spare| self.spare_state(spare) == Some("spare"));
            // Those of an enclosure mostly went together.
            let mut awaited: BTreeMap<(&str, u64), Vec<&str>> = BTreeMap::new();
            for member in &status.members {
                let Some(left) = member.awaited else { continue };
                let enclosure = known.get(&member.name).map_or("", |(spec, _)| &*spec.enclosure);
                awaited.entry((enclosure, left.as_secs())).or_default().push(&member.name);
            }
            problems.extend(awaited.iter().map(|((enclosure, seconds), names)| {
                let (named, array) = (named_in(enclosure, names), &array.spec.name);
                match (has_spare, names.len()) {
                    (true, 1) => format!(
                        "{named} has vanished from array {array}; a spare takes its place in {seconds} s, unless it is there again"
                    ),
                    (true, _) => format!(
                        "{named} have vanished from array {array}; spares take their places in {seconds} s, unless they are there again"
                    ),
                    (false, 1) => format!("{named} has vanished from array {array}; there is no spare for it"),
                    (false, _) => format!("{named} have vanished from array {array}; there are no spares for them"),
                }
            }));
            let lacks: u64 = status.members.iter().map(|member| member.lacks_blocks).sum();
            if lacks > 0 {
                problems.push(format!(
                    "array {} was rebuilt around {lacks} blocks of 4 KiB that too few drives could read: they stay \
                     unreadable until they are written, or those drives can be read again; the log of `levada scrub` names what lies there",
                    array.spec.name
                ));
            }
            problems.extend(status.rebuild_blocked.map(|stripe| {
                format!(
                    "array {}: the rebuild cannot go on at stripe {stripe}: more is beyond repair than it can list; the rest \
                     stays as it is until drives that could not be read can be, or files there are written anew or removed",
                    array.spec.name
                )
            }));
            problems.extend(shown.last_scrub.as_ref().and_then(|found| {
                let name = &array.spec.name;
                (found.unrepairable > 0).then(|| {
                    let places = found.unrepairable;
                    format!("the last scrub of {name} found {places} places beyond repair; the node's log names them")
                })
            }));
        }
        let exports = self.exports.get().map_or_else(Vec::new, |exports| exports.status());
        problems.extend(exports.iter().filter_map(|export| {
            let why = export.problem.as_ref()?;
            let tenant = &export.tenant;
            // Addresses are in the reasons: not all of them need be without.
            if !export.nvme.is_empty() {
                return Some(format!(
                    "volumes of {tenant} are not shown over NVMe/TCP everywhere: {why}"
                ));
            }
            let place =
                export.vhost.as_ref().map_or(export.nbd.clone(), |at| at.display().to_string());
            Some(format!("volumes of {tenant} are not shown at {place}: {why}"))
        }));
        problems.extend(self.no_help.borrow().iter().cloned());
        problems.extend(self.cluster.remarks.iter().cloned());
        for target in &self.cluster.targets {
            let name = target.entry.name();
            if let Some(error) = target.failure() {
                let helps = what_helps(&error, self.cluster.beyond_repair.has(&name));
                problems.push(format!("target {name} has stopped: {error}{helps}"));
                continue;
            }
            if self.cluster.beyond_repair.has(&name) {
                problems.push(format!(
                    "target {name} met damage that no copy repairs; it serves what else it holds until that is met again"
                ));
            }
            match &target.service {
                Service::Stopped { why } => {
                    problems.push(format!("target {name} is stopped: {why}"));
                }
                Service::Metadata { service, .. } => {
                    problems.extend(service.awaited().map(|(client, left)| {
                        let seconds = left.as_secs();
                        format!(
                            "target {name} waits up to {seconds} s for client {client}, which holds changes that are not durable"
                        )
                    }));
                }
                Service::Objects { .. } => {}
            }
        }
        Status {
            cluster: self.cluster.file.name.clone(),
            pid: std::process::id(),
            uptime_s: self.start.elapsed().as_secs_f64(),
            address: self.address.clone(),
            problems,
            survives: self.survives(),
            drives,
            arrays,
            targets,
            clients,
            exports,
            mounts: Vec::new(),
            traffic: self.traffic.get(),
        }
    }

    fn target_status(&self, target: &Target) -> TargetStatus {
        let last_scrub = self.scrubbed.borrow().get(&target.entry.name()).copied();
        TargetStatus { last_scrub, ..target_status(target) }
    }

    fn target_meters(&self, target: &Target) -> TargetMeters {
        TargetMeters { status: self.target_status(target), ops: ops_of(target) }
    }

    fn drive_shown(&self, spec: &DriveSpec, found: &Result<Rc<Drive>, String>) -> DriveStatus {
        DriveStatus {
            spare: self.spare_state(&spec.name).map(str::to_owned),
            paths: self.source.paths(spec),
            // Of one that is gone it would be what it told when it was there.
            health: found
                .as_ref()
                .ok()
                .filter(|drive| !drive.is_failed())
                .and_then(|_| self.health.with(&spec.name, Record::shown)),
            ..drive_status(spec, found)
        }
    }

    /// What is the matter with an array and what helps, if anything.
    fn problem_of(&self, array: &ClusterArray, state: &str) -> Option<String> {
        let name = &array.spec.name;
        let out = array.out();
        match state {
            "healthy" => None,
            "stopped" => {
                if let Some(BlockError::Fenced { .. }) = array.array.status().stopped {
                    return Some(format!(
                        "array {name} has stopped: another server has taken its drives over; what was acknowledged is there. \
                         `levada down` ends this node; `levada up` would take the drives back from that server"
                    ));
                }
                let members = array.array.status().members;
                let drives = self.drives.borrow();
                // The loss that stopped it is not on record, so that the drive may come back.
                let is_gone = |drive: &String| {
                    let known = drives.get(drive).map(|(_, found)| found);
                    known.is_some_and(|found| found.as_ref().map_or(true, |open| open.is_failed()))
                };
                let broken = |member: &levada_raid::MemberStatus| {
                    member.role.is_some()
                        && (member.io_errors > 0
                            || out.contains(&member.name)
                            || is_gone(&member.name))
                };
                let helps: Vec<_> =
                    members.iter().filter(|m| broken(m)).map(|m| m.name.clone()).collect();
                let why = array
                    .array
                    .status()
                    .stopped
                    .map_or_else(String::new, |why| format!(" ({why})"));
                Some(format!(
                    "array {name} has stopped{why}, nothing on it was given up: bring back {}, then `levada down` and `levada up`",
                    helps.join(", ")
                ))
            }
            "rebuilding" => Some(format!("array {name} is rebuilding {}", out.join(", "))),
            _ => {
                let first = out.first().map_or("DRIVE", |first| first);
                Some(format!(
                    "array {name} is degraded: {} out; `levada drive replace {first}` rebuilds it",
                    if out.is_empty() { "drives".into() } else { out.join(", ") },
                ))
            }
        }
    }

    /// The clients that are there, without the node's own.
    fn clients(&self) -> Vec<ClientStatus> {
        let services = self.cluster.targets.iter().filter_map(|target| match &target.service {
            Service::Metadata { service, .. } => Some(service.clients()),
            Service::Objects { .. } | Service::Stopped { .. } => None,
        });
        let own = *self.cluster.table.fs.as_bytes();
        services
            .flatten()
            .filter(|client| client.uuid != own)
            .map(|client| ClientStatus { id: client.id, open_files: client.open_files })
            .collect()
    }

    /// What each array can still lose.
    fn survives(&self) -> Vec<String> {
        let left = |array: &Rc<ClusterArray>| {
            let status = array.array.status();
            let name = &array.spec.name;
            // Those that no path leads to count as lost, though they are waited for.
            let is_away = |member: &&levada_raid::MemberStatus| self.is_away(&member.name);
            let away: Vec<usize> =
                status.members.iter().filter(is_away).map(|member| member.index).collect();
            let left = array.array.bears_without(&away);
            match left {
                _ if status.stopped.is_some() => format!("{name} serves nothing now"),
                _ => format!("{name} {}", survives_now(left)),
            }
        };
        self.cluster.arrays.iter().map(left).collect()
    }

    /// Nobody reaches the drive just now.
    fn is_away(&self, drive: &str) -> bool {
        let drives = self.drives.borrow();
        let open = drives.get(drive).and_then(|(_, found)| found.as_ref().ok());
        open.is_some_and(|open| !self.source.is_reached(&open.device().info().name))
    }

    fn array(&self, array: &Rc<ClusterArray>) -> ArrayStatus {
        let status = array.array.status();
        let stripe_bytes = stripe_bytes(array);
        let progress = |progress: levada_raid::Progress| Progress {
            done_bytes: progress.stripes_done * stripe_bytes,
            total_bytes: progress.stripes_total * stripe_bytes,
            bytes_per_s: progress.bytes_per_second as u64,
        };
        let state = if status.stopped.is_some() {
            "stopped"
        } else if status.rebuild.is_some() || array.array.needs_rebuild() {
            "rebuilding"
        } else if status.degraded > 0 {
            "degraded"
        } else {
            "healthy"
        };
        let chunk_kib = status.chunk_bytes >> 10;
        let width = status.members.iter().filter(|member| member.role.is_some()).count();
        let level = match status.level {
            Level::Raid1 { copies } => format!("mirror of {copies} copies over {width} drives"),
            level @ (Level::Raid5 | Level::Raid6 | Level::NPlusM { .. }) => {
                let parity = level.tolerates();
                let data = width.saturating_sub(parity);
                match level {
                    Level::NPlusM { .. } => format!("{data}+{parity}, {chunk_kib} KiB chunks"),
                    level => format!("{level} {data}+{parity}, {chunk_kib} KiB chunks"),
                }
            }
            level => format!("{level} over {width}, {chunk_kib} KiB chunks"),
        };
        ArrayStatus {
            name: status.name,
            level,
            state: state.to_owned(),
            capacity_bytes: status.capacity_bytes,
            written_bytes: status.stripes_written * stripe_bytes,
            members: status
                .members
                .iter()
                .map(|member| MemberStatus {
                    drive: member.name.clone(),
                    state: match member.state {
                        MemberState::InSync => "in sync",
                        MemberState::Rebuilding { .. } => "rebuilding",
                        MemberState::Faulty => "out",
                        MemberState::Spare => "spare",
                    }
                    .to_owned(),
                    slow: member.slow,
                    medium_errors: member.medium_errors,
                    io_errors: member.io_errors,
                    repairs: member.repairs,
                    p50_us: member.latency.quantile(0.5).as_micros() as u64,
                    p99_us: member.latency.quantile(0.99).as_micros() as u64,
                })
                .collect(),
            rebuild: status.rebuild.map(progress).or_else(|| {
                array.array.needs_rebuild().then_some(Progress {
                    total_bytes: status.stripes_written * stripe_bytes,
                    ..Progress::default()
                })
            }),
            scrub: status.scrub.map(progress).or_else(|| {
                if !self.scrubbing.get() {
                    return None;
                }
                // Before its turn the objects in it have theirs.
                let objects = self.object_scrub().filter(|_| self.holds_objects(array));
                if objects.is_some() || array.last_scrub.borrow().is_some() {
                    return objects;
                }
                let total_bytes = status.stripes_written * stripe_bytes;
                Some(Progress { total_bytes, ..Progress::default() })
            }),
            last_scrub: array.last_scrub.borrow().clone().filter(|_| !self.scrubbing.get()),
        }
    }
}

pub(super) fn stripe_bytes(array: &ClusterArray) -> u64 {
    use levada_raid::Array;
    array.array.geometry().stripe_bytes
}

/// Paths that drives on the network have lost, and those with which something is the matter, path by path: most often it is the same for all of
/// an enclosure.
fn bad_paths(drives: &[DriveStatus]) -> Vec<String> {
    // One reason is told, that of the first: they differ by the moment at which each was asked.
    let mut bad: BTreeMap<(&str, &str, bool), (&str, Vec<&str>)> = BTreeMap::new();
    for drive in drives {
        for path in &drive.paths {
            let Some(why) = path.problem() else { continue };
            let of = (&*drive.enclosure, &*path.address, path.is_usable());
            bad.entry(of).or_insert((why, Vec::new())).1.push(&drive.name);
        }
    }
    let told = bad.into_iter().map(|((enclosure, address, is_usable), (why, drives))| {
        let path = if is_usable { "the path" } else { "no path" };
        format!("enclosure {enclosure}: {path} over {address} to {}: {why}", some_of(&drives))
    });
    told.collect()
}

fn drive_status(spec: &DriveSpec, found: &Result<Rc<Drive>, String>) -> DriveStatus {
    let blank = DriveStatus {
        name: spec.name.clone(),
        enclosure: spec.enclosure.clone(),
        path: spec.path.clone(),
        ..DriveStatus::default()
    };
    let Ok(drive) = found else {
        return DriveStatus { state: "missing".into(), ..blank };
    };
    let health = drive.device().health();
    DriveStatus {
        capacity_bytes: drive.device().info().capacity_bytes,
        state: if drive.is_failed() { "failed" } else { "ok" }.into(),
        bytes_read: health.bytes_read,
        bytes_written: health.bytes_written,
        errors: health.read_errors + health.write_errors,
        ..blank
    }
}

/// What brings a target back whose store has stopped, as far as the array below does not say it.
fn what_helps(error: &KvError, is_beyond_repair: bool) -> &'static str {
    match error {
        KvError::Damaged { .. } if is_beyond_repair => {
            "; all copies were compared, and none could be told to be right: programs that need it wait, the other \
             targets serve. With drives that are out back in place, `levada down` and `levada up` try again"
        }
        KvError::Damaged { .. } => {
            "; all copies are compared and it is opened anew if that helps, programs wait"
        }
        _ => "",
    }
}

fn target_status(target: &Target) -> TargetStatus {
    let stopped =
        TargetStatus { name: target.entry.name(), state: "stopped".into(), ..Default::default() };
    let Some(store) = target.store.as_ref().filter(|_| target.failure().is_none()) else {
        return stopped;
    };
    let usage = store.usage();
    let ops = ops_of(target);
    let (p50_us, p99_us) = percentiles(&ops);
    let both = TargetStatus {
        state: "serving".into(),
        requests: ops.iter().map(|op| op.count).sum(),
        p50_us,
        p99_us,
        log_percent: usage.log_bytes_used * 100 / usage.log_bytes_max.max(1),
        ..stopped.clone()
    };
    match &target.service {
        Service::Objects { log, service } => {
            let space = log.space();
            let (free, total) = log.segments();
            let cleaned_bytes = log.counters().cleaned_bytes;
            TargetStatus {
                cache: CacheMeters::of(log.asked()),
                total_bytes: space.total_bytes,
                free_bytes: space.free_bytes,
                in_flight: service.meters().in_flight.get(),
                segments: Some(Segments { free: free.into(), total: total.into(), cleaned_bytes }),
                ..both
            }
        }
        Service::Metadata { counted, service } => TargetStatus {
            state: if service.is_recovering() { "recovering" } else { "serving" }.into(),
            total_bytes: usage.bytes_max,
            free_bytes: usage.bytes_max - usage.bytes_used.min(usage.bytes_max),
            in_flight: counted.in_flight(),
            cache: CacheMeters::of(&service.looks()),
            ..both
        },
        Service::Stopped { .. } => stopped,
    }
}

/// What a target counted, by the kind of request.
fn ops_of(target: &Target) -> Vec<OpMeters> {
    match &target.service {
        Service::Objects { service, .. } => {
            let all = service.meters().all();
            all.map(|(kind, size, meter)| OpMeters::of(kind, size, meter)).collect()
        }
        Service::Metadata { counted, .. } => {
            let all = counted.meters();
            all.iter().map(|(kind, meter)| OpMeters::of(kind, "", meter)).collect()
        }
        Service::Stopped { .. } => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_health::PathStatus;

    #[test]
    fn paths_are_told_of_that_are_lost_or_damage_data() {
        let path = |address: &str, state: &str, why: Option<&str>| PathStatus {
            address: address.into(),
            state: state.into(),
            why: why.map(Into::into),
        };
        let drive = |number: u32| DriveStatus {
            name: format!("e1-{number}"),
            enclosure: "e1".into(),
            paths: vec![
                path(
                    "10.0.0.1:4420",
                    "optimized",
                    (number > 1).then_some("data arrive damaged over it"),
                ),
                path("10.0.1.1:4420", "down", None),
                path("10.0.2.1:4420", "non-optimized", None),
            ],
            ..DriveStatus::default()
        };
        let told = bad_paths(&[drive(1), drive(2), drive(3)]);
        let expected = [
            "enclosure e1: the path over 10.0.0.1:4420 to e1-2, e1-3: data arrive damaged over it",
            "enclosure e1: no path over 10.0.1.1:4420 to e1-1, e1-2, e1-3: not connected",
        ];
        assert_eq!(told, expected);
    }
}
