//! Background processes: started detached from the terminal, and heard until they are ready.

use anyhow::{Context, Result, bail};
use levada_node::state::make_private;
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// The line by which a background process says that it serves.
pub const READY: &str = "ready";

/// Starts this program again in the background with `arguments`; what it says goes to `log`.
/// Lines on its standard output are shown until it says [`READY`].
///
/// # Errors
///
/// When it ends before that, with the end of its log.
pub fn start(
    log: &Path,
    arguments: &[&std::ffi::OsStr],
    mut progress: impl FnMut(&str),
) -> Result<()> {
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
    let mut child = Command::new(program)
        .args(arguments)
        // It must not keep busy the mount, or the disk, that the caller stands in.
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log_file)
        .process_group(0)
        .spawn()
        .context("cannot start a background process")?;
    let output = child.stdout.take().context("the background process has no output")?;
    for line in BufReader::new(output).lines() {
        match line {
            Ok(line) if line == READY => return Ok(()),
            Ok(line) => progress(&line),
            Err(_) => break,
        }
    }
    fail(child, log, log_start)
}

fn fail(mut child: Child, log: &Path, log_start: u64) -> Result<()> {
    let status = child.wait().context("cannot wait for the background process")?;
    let text = std::fs::read(log).unwrap_or_default();
    let text =
        String::from_utf8_lossy(text.get(log_start as usize..).unwrap_or_default()).into_owned();
    // The last thing it said is why it ended.
    match text.lines().rev().find_map(|line| line.strip_prefix("levada: ")) {
        Some(why) => bail!("{why}"),
        None => bail!("the background process ended ({status}); its log is {}", log.display()),
    }
}
