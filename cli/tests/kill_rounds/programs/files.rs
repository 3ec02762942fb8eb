//! Whole files: written and synced, or read all the time.

use super::{Program, create_new, same_file, same_names};
use crate::random::{Random, contents};
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

const KEPT_MAX: usize = 24;

/// Writes files with fsync of file and directory, and removes the oldest.
pub struct Synced {
    dir: PathBuf,
    last: u64,
    /// Number to length; the number is the key of the contents.
    files: BTreeMap<u64, usize>,
}

impl Synced {
    pub fn new(dir: PathBuf) -> Self {
        Self { dir, last: 0, files: BTreeMap::new() }
    }

    fn path(&self, number: u64) -> PathBuf {
        self.dir.join(format!("synced.{number}"))
    }
}

impl Program for Synced {
    fn name(&self) -> &'static str {
        "write and fsync"
    }

    fn step(&mut self, random: &mut Random) -> Result<()> {
        if self.files.len() >= KEPT_MAX
            && let Some(oldest) = self.files.keys().next().copied()
        {
            fs::remove_file(self.path(oldest)).context("unlink")?;
            self.files.remove(&oldest);
            return Ok(());
        }
        self.last += 1;
        let len = random.between(1, 200_000) as usize;
        let mut file = create_new(&self.path(self.last))?;
        for part in contents(self.last, len).chunks(50_000) {
            file.write_all(part).context("write")?;
        }
        file.sync_all().context("fsync")?;
        self.files.insert(self.last, len);
        File::open(&self.dir).and_then(|dir| dir.sync_all()).context("fsync of the directory")
    }

    fn check(&mut self) -> Result<()> {
        let names = self.files.keys().map(|number| format!("synced.{number}")).collect();
        same_names(&self.dir, &names)?;
        for (number, len) in &self.files {
            same_file(&self.path(*number), &contents(*number, *len))?;
        }
        Ok(())
    }
}

const READ_FILE_BYTES: usize = 6 << 20;

/// Reads at random places of a file that nobody changes.
pub struct Reader {
    path: PathBuf,
    expected: Vec<u8>,
}

impl Reader {
    pub fn new(dir: PathBuf) -> Result<Self> {
        let path = dir.join("read");
        let expected = contents(7, READ_FILE_BYTES);
        fs::write(&path, &expected).context("write what is to be read")?;
        Ok(Self { path, expected })
    }
}

impl Program for Reader {
    fn name(&self) -> &'static str {
        "reader"
    }

    fn step(&mut self, random: &mut Random) -> Result<()> {
        if random.once_in(20) {
            return same_file(&self.path, &self.expected);
        }
        let at = random.below(READ_FILE_BYTES as u64 - 1) as usize;
        let len = random.between(1, 300_000).min((READ_FILE_BYTES - at) as u64) as usize;
        let mut found = vec![0; len];
        let file = File::open(&self.path).context("open")?;
        file.read_exact_at(&mut found, at as u64).with_context(|| format!("read {len} at {at}"))?;
        super::same_bytes("a part read", &found, &self.expected[at..at + len])
    }

    fn check(&mut self) -> Result<()> {
        same_file(&self.path, &self.expected)
    }
}
