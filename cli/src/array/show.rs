//! What an array is, for people and as JSON.

use crate::out::{print, say};
use crate::status::bytes;
use anyhow::Result;
use levada_array::{MemberStatus, PoolStatus, Progress, Status};
use levada_export_nvmet::AnaState;
use levada_health::DriveHealth;
use std::fmt::Write;

/// Prints an array.
pub fn print_status(status: &Status, json: bool) -> Result<()> {
    match json {
        true => say!("{}", serde_json::to_string(status)?),
        false => print(&render(status)),
    }
    Ok(())
}

/// An array in a line.
pub fn headline(status: &Status) -> String {
    format!(
        "{}: {}, {}, {}; {}",
        status.name,
        status.state,
        status.description,
        bytes(status.capacity_bytes),
        survives(status)
    )
}

/// What it bears from here on.
pub fn survives(status: &Status) -> String {
    let left = status.tolerates.saturating_sub(status.lost);
    let of = match status.level.as_str() {
        "10" => " (more where no two of them are neighbours)",
        "50" | "60" if status.lost == 0 => " in each group",
        _ => "",
    };
    match (left, status.lost) {
        (0, 0) => "no drive may be lost".into(),
        (0, _) => "no further drive may be lost".into(),
        (1, 0) => format!("any 1 drive may be lost{of}"),
        (left, 0) => format!("any {left} drives may be lost{of}"),
        (left, _) => format!("{left} more may be lost{of}"),
    }
}

/// How far some work is.
pub fn progress_text(progress: &Progress) -> String {
    let percent = 100.0 * progress.stripes_done as f64 / progress.stripes_total.max(1) as f64;
    let left = progress.seconds_left.map_or("?".into(), |seconds| format!("{seconds:.0}"));
    format!(
        "{percent:.1} %, stripe {} of {}, {}/s, {left} s left",
        progress.stripes_done,
        progress.stripes_total,
        bytes(progress.bytes_per_s)
    )
}

fn render(status: &Status) -> String {
    let mut out = String::new();
    // Writing into a String cannot fail.
    let _ = draw(status, &mut out);
    out
}

fn draw(status: &Status, out: &mut String) -> std::fmt::Result {
    writeln!(out, "{}", headline(status))?;
    if let Some(problem) = &status.problem {
        writeln!(out, "  ! {problem}")?;
    }
    match &status.open_by {
        Some(by) => {
            write!(out, "  {}  open by process {}", status.uuid, by.pid)?;
            let file = by.at.iter().map(|at| at.display().to_string());
            let vhost = by.vhost.iter().map(|at| format!("vhost:{}", at.display()));
            // What is as it should be need not be said.
            let nvme = by.nvme.iter().enumerate().map(|(at, url)| match by.nvme_states.get(at) {
                Some(state) if *state != AnaState::Optimized => format!("{url} ({state})"),
                _ => url.clone(),
            });
            for place in file.chain(by.nbd.clone()).chain(nvme).chain(vhost) {
                write!(out, ", shown as {place}")?;
            }
            writeln!(out)?;
            if let Some(problem) = &by.vhost_problem {
                writeln!(out, "  ! {problem}")?;
            }
        }
        None => writeln!(out, "  {}  not open", status.uuid)?,
    }
    write!(
        out,
        "  {} stripes of {}, blocks of {}",
        status.stripes,
        bytes(status.stripe_bytes),
        status.block_bytes
    )?;
    if let Some(written) = status.stripes_written {
        write!(out, ", {written} written")?;
    }
    writeln!(out, "; generation {}", status.generation)?;
    if let Some(lost @ 1..) = status.lost_blocks {
        writeln!(
            out,
            "  ! {lost} blocks are lost (a power cut during writes, then a member missing): EIO until they are written"
        )?;
    }
    if let Some(stripe) = status.rebuild_blocked {
        writeln!(
            out,
            "  ! the rebuild cannot go on at stripe {stripe}: more is beyond repair than the array can list; write or discard \
             what cannot be read, then `levada array rebuild`"
        )?;
    }
    for member in &status.members {
        draw_member(member, out)?;
    }
    for (what, progress) in [("rebuild", &status.rebuild), ("scrub", &status.scrub)] {
        if let Some(progress) = progress {
            writeln!(out, "  {what}: {}", progress_text(progress))?;
        }
    }
    if status.scrub.is_none() && status.scrubbed_below > 0 {
        let at = status.scrubbed_below;
        writeln!(out, "  scrub: was cut short at stripe {at}, and goes on there")?;
    }
    if let Some(result) = &status.last_scrub {
        writeln!(out, "  last scrub: {}", super::work::result_text(result))?;
    }
    match &status.pool {
        Some(PoolStatus { problem: Some(problem), .. }) => writeln!(out, "  ! {problem}"),
        Some(PoolStatus { problem: None, free_bytes, volumes }) => {
            writeln!(out, "  a pool of {} volumes, {} free", volumes.len(), bytes(*free_bytes))
        }
        None => Ok(()),
    }
}

fn draw_member(member: &MemberStatus, out: &mut String) -> std::fmt::Result {
    let role = member.role.map_or("-".into(), |role| role.to_string());
    let state = match (member.rebuilt_percent, member.catches_up) {
        (Some(percent), true) => format!("catching up {percent} %"),
        (Some(percent), false) => format!("{} {percent} %", member.state),
        (None, true) => format!("{}, may catch up", member.state),
        (None, false) if member.slow => format!("{}, slow", member.state),
        (None, false) => member.state.clone(),
    };
    write!(out, "  {:>2}  {:<28} role {role:<3} {state:<18}", member.index, member.name)?;
    if let Some(io) = &member.io {
        let latency = &io.latency_us;
        write!(
            out,
            " errors {} (medium {}), repaired {}; {} us p50, {} us p99",
            io.io_errors + io.medium_errors,
            io.medium_errors,
            io.repairs,
            latency.p50.round(),
            latency.p99.round()
        )?;
        if io.unreadable_chunks > 0 {
            let (unreadable, most) = (io.unreadable_chunks, io.unreadable_chunks_max);
            write!(out, "; unreadable chunks {unreadable} (out at {most})")?;
        }
        if io.lacks_blocks > 0 {
            write!(out, "; lacks {} blocks", io.lacks_blocks)?;
        }
    }
    match &member.path {
        Some(path) => writeln!(out, "  {}", path.display())?,
        None => writeln!(out)?,
    }
    if let Some(health) = &member.health {
        let celsius = health.celsius.map_or_else(String::new, |celsius| format!("{celsius} °C, "));
        let DriveHealth { used_percent, spare_percent, media_errors, .. } = health;
        writeln!(
            out,
            "      {celsius}{used_percent} % of its endurance used, spare {spare_percent} %, {media_errors} media errors"
        )?;
    }
    for path in &member.paths {
        let Some(why) = path.problem() else { continue };
        let what = if path.is_usable() { "the path" } else { "no path" };
        writeln!(out, "      ! {what} over {}: {why}", path.address)?;
    }
    match &member.problem {
        Some(problem) => writeln!(out, "      ! {problem}"),
        None => Ok(()),
    }
}
