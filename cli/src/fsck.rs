//! `fsck`: reads a file system's metadata and its indexes of objects, says what does not fit together, and puts right
//! what it can.

use crate::out::{print, say};
use crate::place;
use crate::status::bytes;
use anyhow::{Context, Result, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use levada_base::reactor::Reactor;
use levada_node::FileDrives;
use levada_node::control::{self, ControlReply, ControlRequest};
use levada_node::fsck::{self, FoundItem, FsckOptions, Rebuild, RebuildOptions, Sum, TargetReport};
use levada_node::state::{RunningNode, StateDir};
use levada_spec::{Bytes, Loaded};
use std::cell::{Cell, RefCell};
use std::fmt::Write;
use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Nothing could be checked.
const NOT_CHECKED: u8 = 8;
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Off a terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

#[derive(Args)]
#[command(
    after_help = "A cluster that is up is checked beside everything else, by its node; one that is down, here. \
    Without --repair nothing is changed.\n\nExit code: 0 when all was checked and is right; else the sum of 1 (something was \
    wrong, and was repaired), 4 (something is wrong) and 8 (not all was checked, or nothing could be)."
)]
pub struct FsckArgs {
    /// A line of JSON for each finding, and a last one with the sums
    #[arg(long)]
    json: bool,
    /// At most so much memory for what grows with the number of directories; what does not fit is told as not checked
    #[arg(long, value_name = "SIZE", default_value = "1 GiB")]
    memory: Bytes,
    /// Of a cluster that is up: do not leave half of the time to others
    #[arg(long)]
    fast: bool,
    /// Refuse to check a cluster that is up
    #[arg(long)]
    offline: bool,
    /// Put right what follows from other rows; of a cluster that is down
    #[arg(long)]
    repair: bool,
    /// With --repair: what has lost its last name is given one in /lost+found
    #[arg(long, requires = "repair")]
    reattach: bool,
    /// Hold the indexes of objects against their segments: every byte is where they say, and nothing is missing; of a
    /// cluster that is down
    #[arg(long)]
    deep: bool,
    /// Read all data and hold it against its checksums; of a cluster that is down (`levada scrub` does it in one that is
    /// up)
    #[arg(long)]
    data: bool,
    /// Make the index of an object target anew from its segments; of a cluster that is down. Without --yes: say what
    /// it would hold, and change nothing
    #[arg(long, value_name = "TARGET", conflicts_with_all = ["fast", "offline", "repair", "deep", "data", "stop"])]
    rebuild_index: Option<String>,
    /// With --rebuild-index: do it
    #[arg(long, requires = "rebuild_index")]
    yes: bool,
    /// End the check that a node is at
    #[arg(long, conflicts_with_all = ["json", "fast", "offline", "repair", "deep", "data"])]
    stop: bool,
}

/// Checks, and says how it ended; an error is a check that did not come to anything.
pub fn fsck(file: Option<&Path>, args: &FsckArgs) -> ExitCode {
    let ended = if args.stop { stop(file).map(|()| 0) } else { check(file, args) };
    match ended {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("levada: {}", crate::out::chain(&error));
            ExitCode::from(NOT_CHECKED)
        }
    }
}

fn stop(file: Option<&Path>) -> Result<()> {
    let state = place::state(&place::load(file)?);
    control::ask(&state.control_socket(), &ControlRequest::FsckStop)?;
    say!("the check was stopped");
    Ok(())
}

fn check(file: Option<&Path>, args: &FsckArgs) -> Result<u8> {
    let loaded = place::load(file)?;
    let state = place::state(&loaded);
    if let Some(target) = &args.rebuild_index {
        return rebuild(&loaded, state, target, args);
    }
    let reports = match state.node()?.map(|node| node.pid) {
        Some(pid) if args.offline => bail!(
            "{} is up (node process {pid}): `levada down` first, or check it without --offline",
            loaded.cluster.name
        ),
        Some(pid) if args.repair => bail!(
            "{} is up (node process {pid}), and only one that is down is repaired: `levada down` first",
            loaded.cluster.name
        ),
        Some(pid) if args.deep || args.data => bail!(
            "{} is up (node process {pid}), and segments and data are checked of one that is down: `levada down` first, or \
             `levada scrub` for data",
            loaded.cluster.name
        ),
        Some(_) => online(&state, args)?,
        None => offline(loaded, state, args)?,
    };
    let sum = Sum::of(&reports);
    if args.json {
        for item in reports.iter().flat_map(|report| &report.items) {
            say!("{}", serde_json::to_string(item)?);
        }
        say!("{}", serde_json::json!({ "sum": sum }));
    } else {
        print(&render(&reports, &sum));
    }
    Ok(sum.exit_code())
}

/// Makes an index anew, or says what it would hold.
fn rebuild(loaded: &Loaded, state: StateDir, target: &str, args: &FsckArgs) -> Result<u8> {
    let name = &loaded.cluster.name;
    if let Some(RunningNode { pid, .. }) = state.node()? {
        bail!(
            "{name} is up (node process {pid}), and an index is made anew of one that is down: `levada down` first"
        );
    }
    if !state.0.exists() {
        bail!("{name} was never up here: there is no index");
    }
    let _lock = state.lock()?;
    let options = RebuildOptions {
        target,
        writes: args.yes,
        state: &state,
        says: &|line| eprintln!("levada: {line}"),
    };
    let reactor = Reactor::new().context("cannot use io_uring")?;
    let made = reactor.block_on(async {
        let source = FileDrives::new(loaded.clone(), state.clone());
        fsck::rebuild(&loaded.cluster, &source, &options).await
    })?;
    let reports = std::slice::from_ref(&made.report);
    let sum = Sum::of(reports);
    if args.json {
        for item in &made.report.items {
            say!("{}", serde_json::to_string(item)?);
        }
        say!("{}", serde_json::json!({ "rebuilt": json_of(&made), "sum": sum }));
    } else {
        print(&told(target, &made));
        print(&render(reports, &sum));
    }
    Ok(sum.exit_code() | u8::from(made.is_written))
}

fn json_of(made: &Rebuild) -> serde_json::Value {
    let held = &made.held;
    serde_json::json!({
        "objects": held.objects, "extents": held.extents, "bytes": held.bytes, "sequence": held.seq.0,
        "staged": held.staged, "staged_left_out": held.staged_left_out, "staged_unknown": made.staged_unknown,
        "dropped_stripes": held.dropped_stripes, "written": made.is_written,
    })
}

/// What an index that was made anew holds, for people.
fn told(target: &str, made: &Rebuild) -> String {
    let held = &made.held;
    let mut lines = vec![format!(
        "{target}: its segments hold {} objects, {} in {} extents, up to change {}",
        held.objects,
        bytes(held.bytes),
        held.extents,
        held.seq.0
    )];
    if made.staged_unknown {
        lines.push(
            "  the old store cannot be read: what was committed last may be lost with it"
                .to_owned(),
        );
    }
    if held.staged > 0 {
        lines.push(format!("  {} changes that are in no segment are kept", held.staged));
    }
    if held.staged_left_out > 0 {
        lines.push(format!("  {} changes that make no sense are left out", held.staged_left_out));
    }
    if held.dropped_stripes > 0 {
        let text = "stripes at the end were not written whole, or came after such a one: they are left out";
        lines.push(format!("  {} {text}", held.dropped_stripes));
    }
    lines.push(match made.is_written {
        true => "  the index was made anew".to_owned(),
        false => "  nothing was changed; with --yes the index is made anew like this".to_owned(),
    });
    lines.join("\n") + "\n"
}

/// Has the node check, and waits for it.
fn online(state: &StateDir, args: &FsckArgs) -> Result<Vec<TargetReport>> {
    let socket = state.control_socket();
    let order = ControlRequest::Fsck { memory_bytes: args.memory.0, fast: args.fast };
    let ControlReply::FsckStarted { number } = control::ask(&socket, &order)? else {
        bail!("the node gave another answer than that a check was started");
    };
    let meter = Meter::new();
    let mut items: Vec<FoundItem> = Vec::new();
    loop {
        let from = items.len() as u64;
        let reply = control::ask(&socket, &ControlRequest::FsckState { from });
        let ControlReply::Fsck(now) = reply.context("the check was cut off")? else {
            bail!("the node gave another answer than how the check goes");
        };
        if now.number != number {
            bail!("the check was cut off: the node is at another one");
        }
        let came = now.items.len();
        items.extend(now.items);
        if now.ended && came == 0 {
            meter.end();
            return Ok(gather(now.reports, items));
        }
        if came == 0 {
            meter.tell(&now.target, &now.phase, now.done_rows, now.total_rows);
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// Puts findings where they belong.
fn gather(mut reports: Vec<TargetReport>, items: Vec<FoundItem>) -> Vec<TargetReport> {
    for item in items {
        if let Some(report) = reports.iter_mut().find(|report| report.target == item.target) {
            report.items.push(item);
        }
    }
    reports
}

fn offline(loaded: Loaded, state: StateDir, args: &FsckArgs) -> Result<Vec<TargetReport>> {
    let name = loaded.cluster.name.clone();
    // A cluster that was never up has no state directory, and none is made for it.
    if !state.0.exists() {
        bail!("{name} was never up here: there is nothing to check");
    }
    let _lock = state.lock()?;
    let meter = Meter::new();
    let options = FsckOptions {
        memory_bytes: args.memory.0,
        repair: args.repair,
        reattach: args.reattach,
        deep: args.deep,
        data: args.data,
        says: &|line| eprintln!("levada: {line}"),
        progress: &|target, now| meter.tell(target, now.phase, now.done_rows, now.total_rows),
    };
    let reactor = Reactor::new().context("cannot use io_uring")?;
    let reports = reactor.block_on(async {
        let source = FileDrives::new(loaded.clone(), state);
        fsck::offline(&loaded.cluster, &source, &options).await
    });
    meter.end();
    reports.with_context(|| format!("cannot check {name}"))
}

/// Tells progress on standard error: a bar on a terminal, else a line now and then.
struct Meter {
    bar: Option<ProgressBar>,
    shown: RefCell<String>,
    line_at: Cell<Instant>,
}

impl Meter {
    fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = "{prefix} {bar:40} {percent:>3} %  {msg}  {elapsed}";
            let style = ProgressStyle::with_template(style).expect("a template");
            ProgressBar::new(0).with_style(style)
        });
        let line_at = Cell::new(Instant::now() + LINE_EVERY);
        Self { bar, shown: RefCell::default(), line_at }
    }

    fn tell(&self, target: &str, phase: &str, done: u64, total: u64) {
        let what = format!("{target}: {phase}");
        match &self.bar {
            Some(bar) => {
                if *self.shown.borrow() != what {
                    bar.set_prefix(what.clone());
                    self.shown.replace(what);
                }
                bar.set_length(total);
                bar.set_position(done);
                bar.set_message(format!("{done} of {total}"));
            }
            None if Instant::now() >= self.line_at.get() => {
                eprintln!("levada: {what}: {done} of {total}");
                self.line_at.set(Instant::now() + LINE_EVERY);
            }
            None => {}
        }
    }

    fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn render(reports: &[TargetReport], sum: &Sum) -> String {
    let mut out = String::new();
    // Writing into a String cannot fail.
    let _ = draw(reports, sum, &mut out);
    out
}

fn draw(reports: &[TargetReport], sum: &Sum, out: &mut String) -> std::fmt::Result {
    for report in reports {
        let what = match report.inodes {
            0 => format!("{} objects", report.objects),
            inodes => format!("{inodes} inodes, {} names", report.names),
        };
        let stripes = match report.stripes {
            0 => String::new(),
            stripes => format!(" and {stripes} stripes"),
        };
        writeln!(
            out,
            "{}: {what}, {} rows{stripes} checked in {:.1} s, {}",
            report.target,
            report.rows,
            report.seconds,
            bytes(report.memory_bytes)
        )?;
        for item in &report.items {
            writeln!(out, "  {}: {:<60} {}", place_of(item), item.text, item.done)?;
        }
        let untold = report.found.saturating_sub(report.items.len() as u64);
        if untold > 0 {
            writeln!(out, "  and {untold} more")?;
        }
        for why in &report.refused {
            writeln!(out, "  {why}")?;
        }
    }
    for what in &sum.not_checked {
        writeln!(out, "not checked: {what}")?;
    }
    let parts = [
        (sum.repaired > 0, format!("{} repaired", sum.repaired)),
        (sum.found > 0, format!("{} left", sum.left)),
        (!sum.not_checked.is_empty(), format!("{} not checked", sum.not_checked.len())),
    ];
    let parts: Vec<_> =
        parts.into_iter().filter_map(|(is_told, part)| is_told.then_some(part)).collect();
    match parts.is_empty() {
        true => writeln!(out, "everything fits together"),
        false => writeln!(out, "{}", parts.join(", ")),
    }
}

/// Where a finding is, for people.
fn place_of(item: &FoundItem) -> String {
    let path = item.path.as_ref().or(item.path_b64.as_ref());
    match (path, item.ino) {
        (Some(path), Some(ino)) => format!("{} (inode {ino:#x})", path.escape_debug()),
        (Some(path), None) => path.escape_debug().to_string(),
        (None, Some(ino)) => format!("inode {ino:#x}"),
        (None, None) => item.find.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_reads_well() {
        let item = FoundItem {
            target: "mdt0".into(),
            find: "links".into(),
            ino: Some(0x2a41),
            path: Some("/home/ann/x".into()),
            text: "says it has 2 links, and has 1".into(),
            done: "left".into(),
            ..FoundItem::default()
        };
        let hidden = FoundItem { path: Some("/a\u{1b}[2J\nb".into()), ino: None, ..item.clone() };
        let report = TargetReport {
            target: "mdt0".into(),
            inodes: 5,
            names: 4,
            rows: 30,
            seconds: 0.25,
            memory_bytes: 4 << 20,
            items: vec![item, hidden],
            found: 5,
            not_checked: vec!["the rest".into()],
            ..TargetReport::default()
        };
        let reports = [report];
        let text = render(&reports, &Sum::of(&reports));
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "mdt0: 5 inodes, 4 names, 30 rows checked in 0.2 s, 4.0 MiB");
        assert!(
            lines[1].starts_with("  /home/ann/x (inode 0x2a41): says it has 2 links"),
            "{text}"
        );
        assert!(lines[2].starts_with(r"  /a\u{1b}[2J\nb: says"), "a name moves no cursor: {text}");
        let end = ["  and 3 more", "not checked: mdt0: the rest", "5 left, 1 not checked"];
        assert_eq!(lines[3..], end);
        let repaired = [TargetReport {
            target: "ost1".into(),
            objects: 7,
            found: 2,
            repaired: 1,
            stripes: 3,
            refused: vec!["no object was deleted".into()],
            ..TargetReport::default()
        }];
        let text = render(&repaired, &Sum::of(&repaired));
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].starts_with("ost1: 7 objects, 0 rows and 3 stripes checked"), "{text}");
        assert_eq!(lines[1..], ["  and 2 more", "  no object was deleted", "1 repaired, 1 left"]);
        let clean = [TargetReport { target: "mdt0".into(), ..TargetReport::default() }];
        let text = render(&clean, &Sum::of(&clean));
        assert!(text.ends_with("everything fits together\n"), "{text}");
    }
}
