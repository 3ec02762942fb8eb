//! Background processes: started detached from the terminal, and heard until they are ready. Whoever is told to stop
//! until then stops what he has started.

use anyhow::{Context, Result, bail};
use futures_util::future::{Either, select};
use levada_base::BufMut;
use levada_base::reactor::signal::{Signal, Signals};
use levada_base::reactor::{Fd, Reactor};
use levada_node::state::make_private;
use rustix::process::{self, Pid, kill_process};
use std::fs::{File, OpenOptions};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::{Child, ChildStdout, Command, Stdio};

/// The line by which a background process says that it serves.
pub const READY: &str = "ready";
/// Of its output that is taken at a time.
const PART_BYTES: usize = 4096;

/// Starts this program again in the background with `arguments`; what it says goes to `log`.
/// Lines on its standard output are shown until it says [`READY`]. When this program is told to stop before that, so is
/// the other.
///
/// # Errors
///
/// When it ends before that, with the end of its log.
pub fn start(log: &Path, arguments: &[&std::ffi::OsStr], progress: impl FnMut(&str)) -> Result<()> {
    if let Some(dir) = log.parent() {
        make_private(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    let log_file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(log)
        .with_context(|| format!("cannot write {}", log.display()))?;
    let log_start = log_file.metadata().map_or(0, |meta| meta.len());
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    // Before there is a process that would be left alone.
    let signals = Signals::new().context("cannot receive signals")?;
    let heard = begin(program, arguments, log_file, &signals, progress);
    // From here on they end this program, and leave the other to what it is at.
    signals.release();
    match heard? {
        (_, Heard::Ready) => Ok(()),
        (child, Heard::Told | Heard::End) => fail(child, log, log_start),
    }
}

/// Starts it, and hears how that went.
fn begin(
    program: PathBuf,
    arguments: &[&std::ffi::OsStr],
    log: File,
    signals: &Signals,
    progress: impl FnMut(&str),
) -> Result<(Child, Heard)> {
    let reactor = Reactor::new().context("cannot use io_uring")?;
    let mut child = Command::new(program)
        .args(arguments)
        // It must not keep busy the mount, or the disk, that the caller stands in.
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .process_group(0)
        .spawn()
        .context("cannot start a background process")?;
    let output = child.stdout.take().context("the background process has no output")?;
    let heard = reactor.block_on(hear(output, signals, progress))?;
    if let Heard::Told = heard {
        let pid = child.id();
        eprintln!("levada: told to stop; ending process {pid}, which was starting");
        let told = kill_process(Pid::from_child(&child), process::Signal::TERM);
        told.with_context(|| format!("cannot end process {pid}"))?;
    }
    Ok((child, heard))
}

/// How the wait for a process that starts ended.
enum Heard {
    Ready,
    /// It has closed its output.
    End,
    /// This program is told to stop.
    Told,
}

async fn hear(output: ChildStdout, signals: &Signals, progress: impl FnMut(&str)) -> Result<Heard> {
    let output = Fd::new(output.into()).context("cannot hear the background process")?;
    let mut hearing = pin!(hear_ready(&output, progress));
    loop {
        match select(hearing.as_mut(), pin!(signals.recv())).await {
            Either::Left((true, _)) => return Ok(Heard::Ready),
            Either::Left((false, _)) => return Ok(Heard::End),
            // Without its terminal it goes on.
            Either::Right((Ok(Signal::Hangup), _)) => {}
            Either::Right((told, _)) => {
                told.context("cannot receive signals")?;
                return Ok(Heard::Told);
            }
        }
    }
}

/// Whether it says [`READY`]; what it says before that is progress.
async fn hear_ready(output: &Fd, mut progress: impl FnMut(&str)) -> bool {
    let mut said = Vec::new();
    loop {
        while let Some(end) = said.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = said.drain(..=end).collect();
            match String::from_utf8_lossy(&line[..end]) {
                line if line == READY => return true,
                line => progress(&line),
            }
        }
        match output.read(BufMut::zeroed(PART_BYTES)).await {
            Ok((part, len)) if len > 0 => said.extend_from_slice(&part[..len]),
            _ => return false,
        }
    }
}

fn fail(mut child: Child, log: &Path, log_start: u64) -> Result<()> {
    let status = child.wait().context("cannot wait for the background process")?;
    if status.success() {
        bail!("it was told to stop, and has ended");
    }
    let text = std::fs::read(log).unwrap_or_default();
    let text =
        String::from_utf8_lossy(text.get(log_start as usize..).unwrap_or_default()).into_owned();
    // The last thing it said is why it ended.
    match text.lines().rev().find_map(|line| line.strip_prefix("levada: ")) {
        Some(why) => bail!("{why}"),
        None => bail!("the background process ended ({status}); its log is {}", log.display()),
    }
}
