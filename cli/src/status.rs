//! `status`: what a node is and does, for people and as JSON.

use crate::out::{print, say};
use crate::{mount, place, work};
use anyhow::{Result, bail};
use clap::Args;
use levada_export_nvmet::AnaState;
use levada_node::control::{
    self, ControlReply, ControlRequest, ExportStatus, MountNow, ObjectScrub, Status,
};
use levada_node::meters::CacheMeters;
use levada_node::state::StateDir;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

#[derive(Args)]
pub struct StatusArgs {
    /// As JSON, for programs
    #[arg(long)]
    json: bool,
}

/// Asks the node for its status.
pub fn ask(state: &StateDir) -> Result<Status> {
    let reply = control::ask(&state.control_socket(), &ControlRequest::Status)?;
    let ControlReply::Status(mut status) = reply else {
        bail!("the node gave another answer than its status");
    };
    status.mounts = mount::status(state);
    status.problems.extend(mount::strangers(state));
    status.problems.extend(mount::dead(state));
    Ok(*status)
}

/// The same, and what is the matter with directories for guests, which are served when all else is.
fn ask_of_guests_too(state: &StateDir) -> Result<Status> {
    let mut status = ask(state)?;
    mount::exports(state, &mut status.exports);
    for export in &status.exports {
        if let (Some(socket), Some(problem)) = (&export.virtiofs, &export.problem) {
            status.problems.push(format!(
                "export of {} at {}: {problem}",
                export.subtree,
                socket.display()
            ));
        }
    }
    Ok(status)
}

/// Prints the status.
pub fn status(file: Option<&Path>, args: &StatusArgs) -> Result<()> {
    let loaded = place::load(file)?;
    let state = place::state(&loaded);
    let status = ask_of_guests_too(&state)?;
    if args.json {
        say!("{}", serde_json::to_string_pretty(&status)?);
    } else {
        print(&render(&status, &mount::leaving(&state)));
    }
    Ok(())
}

/// A size for people: `1.5 GiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

fn render(status: &Status, leaving: &[String]) -> String {
    let mut out = String::new();
    // Writing into a String cannot fail.
    let _ = draw(status, leaving, &mut out);
    out
}

fn draw(status: &Status, leaving: &[String], out: &mut String) -> std::fmt::Result {
    let health = if status.problems.is_empty() { "healthy" } else { "needs attention" };
    writeln!(
        out,
        "{}: {health}; node process {}, up {:.0} s, at {}",
        status.cluster, status.pid, status.uptime_s, status.address
    )?;
    for problem in &status.problems {
        writeln!(out, "  ! {problem}")?;
    }
    for line in &status.survives {
        writeln!(out, "  {line}")?;
    }
    writeln!(out, "\narrays")?;
    for array in &status.arrays {
        writeln!(
            out,
            "  {:<8} {:<12} {}, {} written of {}",
            array.name,
            array.state,
            array.level,
            bytes(array.written_bytes),
            bytes(array.capacity_bytes)
        )?;
        for member in &array.members {
            writeln!(
                out,
                "    {:<8} {:<12} errors {} (repaired {})  latency p50 {} us, p99 {} us",
                member.drive,
                if member.slow { format!("{}, slow", member.state) } else { member.state.clone() },
                member.medium_errors + member.io_errors,
                member.repairs,
                member.p50_us,
                member.p99_us
            )?;
        }
        for (what, progress) in [("rebuild", &array.rebuild), ("scrub", &array.scrub)] {
            if let Some(progress) = progress {
                writeln!(out, "    {what}: {}", work::progress_text(progress))?;
            }
        }
        if let Some(result) = &array.last_scrub {
            writeln!(out, "    last scrub: {}", work::result_text(result))?;
        }
    }
    let spares: Vec<_> = status.drives.iter().filter(|drive| drive.spare.is_some()).collect();
    if !spares.is_empty() {
        writeln!(out, "\nspares of the cluster")?;
    }
    for drive in spares {
        let state = match (&*drive.state, &drive.spare) {
            ("ok", Some(spare)) => spare,
            (state, _) => state,
        };
        writeln!(
            out,
            "  {:<8} {:<12} {}, in enclosure {}",
            drive.name,
            state,
            bytes(drive.capacity_bytes),
            drive.enclosure
        )?;
    }
    draw_enclosures(status, out)?;
    writeln!(out, "\ntargets")?;
    for target in &status.targets {
        write!(
            out,
            "  {:<8} {:<12} {} free of {}; {} requests, latency p50 {} us, p99 {} us",
            target.name,
            target.state,
            bytes(target.free_bytes),
            bytes(target.total_bytes),
            target.requests,
            target.p50_us,
            target.p99_us
        )?;
        write!(out, "{}", cache_text(target.cache))?;
        match target.segments {
            Some(segments) => {
                writeln!(out, "; {} of {} segments free", segments.free, segments.total)?
            }
            None => writeln!(out)?,
        }
        if let Some(scrub) = &target.last_scrub {
            writeln!(out, "    last scrub: {}", scrub_text(scrub))?;
        }
    }
    writeln!(out, "\nmounts")?;
    if status.mounts.is_empty() && leaving.is_empty() {
        writeln!(out, "  none")?;
    }
    for mount in &status.mounts {
        write!(out, "  {}", mount.dir.display())?;
        if let Some(subtree) = &mount.subtree {
            write!(out, " ({subtree})")?;
        }
        if let Some(MountNow { requests, in_flight, p50_us, p99_us, cache }) = mount.now {
            write!(
                out,
                ": {requests} requests, {in_flight} in flight, latency p50 {p50_us} us, p99 {p99_us} us{}",
                cache_text(cache)
            )?;
        }
        writeln!(out)?;
    }
    for line in leaving {
        writeln!(out, "  {line}")?;
    }
    if !status.exports.is_empty() {
        writeln!(out, "\nexports")?;
    }
    for export in &status.exports {
        let (tenant, clients) = (&export.tenant, export.clients);
        if let Some(socket) = &export.virtiofs {
            let (socket, subtree) = (socket.display(), &export.subtree);
            writeln!(out, "  virtio-fs at {socket}: {subtree} of {tenant}, {clients} connections")?;
            continue;
        }
        let tls = if export.tls { " (TLS)" } else { "" };
        let place = match &export.vhost {
            Some(directory) => format!("vhost sockets in {}", directory.display()),
            None if !export.nvme.is_empty() => format!("NVMe/TCP at {}", nvme_paths(export)),
            None => format!("NBD at {}", export.nbd),
        };
        writeln!(out, "  {place}{tls}: volumes of {tenant}, {clients} connections")?;
    }
    writeln!(out, "\nclients")?;
    if status.clients.is_empty() {
        writeln!(out, "  none")?;
    }
    for client in &status.clients {
        writeln!(out, "  client {}: {} files open", client.id, client.open_files)?;
    }
    let traffic = &status.traffic;
    writeln!(
        out,
        "\nnow: read {}/s, write {}/s, {} metadata operations/s",
        bytes(traffic.read_bytes_per_s),
        bytes(traffic.written_bytes_per_s),
        traffic.metadata_per_s
    )
}

/// Enclosures on the network: how many of their drives each path leads to.
fn draw_enclosures(status: &Status, out: &mut String) -> std::fmt::Result {
    #[derive(Default)]
    struct Led {
        usable: usize,
        non_optimized: usize,
        all: usize,
    }
    let mut enclosures: BTreeMap<&str, BTreeMap<&str, Led>> = BTreeMap::new();
    for drive in &status.drives {
        for path in &drive.paths {
            let paths = enclosures.entry(&drive.enclosure).or_default();
            let led = paths.entry(&path.address).or_default();
            led.usable += usize::from(path.is_usable());
            led.non_optimized += usize::from(path.state == "non-optimized");
            led.all += 1;
        }
    }
    if !enclosures.is_empty() {
        writeln!(out, "\nenclosures on the network")?;
    }
    for (enclosure, paths) in enclosures {
        for (address, Led { usable, non_optimized, all }) in paths {
            let state = match usable {
                0 => "down",
                some if some == all => "up",
                _ => "partly up",
            };
            write!(out, "  {enclosure:<8} {state:<12} {address}, to {usable} of {all} drives")?;
            match non_optimized {
                0 => writeln!(out)?,
                some if some == usable => writeln!(out, ", non-optimized")?,
                some => writeln!(out, ", {some} of them non-optimized")?,
            }
        }
    }
    Ok(())
}

/// What the last scrub of a target's objects found, and how long ago.
fn scrub_text(scrub: &ObjectScrub) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let minutes = now.as_secs().saturating_sub(scrub.ended_s) / 60;
    let ago = match minutes / 60 {
        0 => format!("{minutes} min"),
        hours if hours < 48 => format!("{hours} h"),
        hours => format!("{} days", hours / 24),
    };
    format!(
        "{} checked, {} repaired, {} beyond repair, {ago} ago",
        bytes(scrub.checked_bytes),
        scrub.repaired_blocks,
        scrub.damaged
    )
}

fn cache_text(cache: CacheMeters) -> String {
    cache.percent().map_or(String::new(), |percent| format!(", cache {percent} %"))
}

/// Addresses, with what there is to be said of their paths.
fn nvme_paths(export: &ExportStatus) -> String {
    let path = |(at, address): (usize, &String)| match export.nvme_states.get(at) {
        Some(Some(AnaState::Optimized)) => address.clone(),
        Some(Some(state)) => format!("{address} ({state})"),
        Some(None) | None => format!("{address} (not served)"),
    };
    export.nvme.iter().enumerate().map(path).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn sizes_read_well() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(3 << 30), "3.0 GiB");
    }
}
