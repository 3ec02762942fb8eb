//! What works on the mount while its node is killed.
//!
//! What always holds: a program writes its model down only after the call returned, and its
//! model lies in this process's memory. Between two steps nothing of a program is under way, so
//! a check compares all that it has with all that is there.

mod bytes;
mod files;
mod logs;
mod mapped;
mod names;
mod rewrite;
mod save;
#[allow(unsafe_code, reason = "a mapping, and a call that std does not have")]
mod syscalls;
mod versions;

use crate::random::Random;
use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{Advice, fadvise};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

pub trait Program: Send {
    fn name(&self) -> &'static str;
    /// One thing a program does; any error is one that it must not see.
    fn step(&mut self, random: &mut Random) -> Result<()>;
    /// Compares all that was acknowledged with what is there, by path.
    fn check(&mut self) -> Result<()>;
    /// True when it also knows what the end of node and mount together may take, and goes on after
    /// a close.
    fn knows_what_is_synced(&self) -> bool {
        false
    }
    /// Compares what is there after node and mount ended together, perhaps in the middle of a
    /// step, with what was synced and what may have come of the rest.
    fn check_after_loss(&mut self) -> Result<()> {
        self.check()
    }
    /// Closes what is open, so that the mount can be taken away.
    fn close(&mut self) {}
}

/// Every program, each in a directory of its own.
pub fn all(mnt: PathBuf) -> Result<Vec<Box<dyn Program>>> {
    let dir = |name: &str| -> Result<PathBuf> {
        let dir = mnt.join(name);
        fs::create_dir(&dir).with_context(|| format!("mkdir {name}"))?;
        Ok(dir)
    };
    let log = logs::create(&dir("logs")?)?;
    Ok(vec![
        Box::new(names::Names::new(dir("names")?)),
        Box::new(names::Tree::new(dir("tree")?)),
        Box::new(bytes::Buffered::new(dir("buffered")?)),
        Box::new(bytes::Unlinked::new(dir("unlinked")?)),
        Box::new(files::Synced::new(dir("synced")?)),
        Box::new(bytes::Slots::new(dir("slots")?, "slots of 47008 bytes", 47_008, false)?),
        Box::new(bytes::Slots::new(dir("direct")?, "direct writes", 64 << 10, true)?),
        Box::new(logs::Appender::new(&log, 0)?),
        Box::new(logs::Appender::new(&log, 1)?),
        Box::new(files::Reader::new(dir("reader")?)?),
        Box::new(rewrite::Rewrite::new(dir("rewrite")?)?),
        Box::new(save::Save::new(dir("save")?)?),
        Box::new(mapped::Mapped::new(&dir("mapped")?)?),
    ])
}

/// The names in a directory; one that is listed twice is an error.
fn listing(dir: &Path) -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))? {
        let name = entry.context("list on")?.file_name().to_string_lossy().into_owned();
        ensure!(names.insert(name.clone()), "{name} is listed twice in {}", dir.display());
    }
    Ok(names)
}

fn same_names(dir: &Path, expected: &BTreeSet<String>) -> Result<()> {
    let found = listing(dir)?;
    let missing: Vec<_> = expected.difference(&found).collect();
    let strange: Vec<_> = found.difference(expected).collect();
    ensure!(
        missing.is_empty() && strange.is_empty(),
        "{}: {missing:?} are missing, {strange:?} should not be there",
        dir.display()
    );
    Ok(())
}

/// Reads a whole file past the kernel's cache, so that the bytes come from the node.
fn read_through(path: &Path) -> Result<Vec<u8>> {
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    let mut file = OpenOptions::new()
        .read(true)
        .custom_flags(direct)
        .open(path)
        .with_context(|| format!("open {}", path.display()))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).with_context(|| format!("read {}", path.display()))?;
    Ok(bytes)
}

/// Compares and says where the first difference lies.
fn same_bytes(what: &str, found: &[u8], expected: &[u8]) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    let first = found.iter().zip(expected).position(|(found, expected)| found != expected);
    let differing =
        found.iter().zip(expected).filter(|(found, expected)| found != expected).count();
    let first = first.unwrap_or(found.len().min(expected.len()));
    let zeroes = found[first.min(found.len())..].iter().take_while(|byte| **byte == 0).count();
    bail!(
        "{what}: {} bytes, {} expected; the first difference is at {first}, {differing} bytes differ; \
         {zeroes} zeroes stand there",
        found.len(),
        expected.len()
    )
}

fn same_file(path: &Path, expected: &[u8]) -> Result<()> {
    let size = fs::metadata(path).with_context(|| format!("stat {}", path.display()))?.len();
    let found = read_through(path)?;
    same_bytes(&path.display().to_string(), &found, expected)?;
    ensure!(size == expected.len() as u64, "{}: stat says {size} bytes", path.display());
    Ok(())
}

/// The same for a file that may have no name any more.
fn same_open_file(what: &str, file: &File, expected: &[u8]) -> Result<()> {
    let size = file.metadata().with_context(|| format!("fstat of {what}"))?.len();
    ensure!(size == expected.len() as u64, "{what}: {size} bytes, {} expected", expected.len());
    // From the drives, as far as the kernel holds nothing that it has yet to write.
    fadvise(file, 0, None, Advice::DontNeed).context("fadvise")?;
    let mut found = vec![0; expected.len()];
    file.read_exact_at(&mut found, 0).with_context(|| format!("read {what}"))?;
    same_bytes(what, &found, expected)
}

/// A new file; that it is there already means that something was done twice.
fn create_new(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true);
    options.open(path).with_context(|| format!("create {}", path.display()))
}
