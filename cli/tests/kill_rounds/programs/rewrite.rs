//! The same few files made anew again and again, as shells, editors and builds do it.

use super::versions::Versions;
use super::{Program, read_through, same_bytes, same_file, same_names, syscalls};
use crate::random::{Random, contents};
use anyhow::{Context, Result};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

const FILES: usize = 4;
/// Things done to files in one step, without a pause.
const BURST_MAX: u64 = 12;

struct Rewritten {
    path: PathBuf,
    versions: Versions,
}

/// Mostly small: an object or two, a block more or less; now and then some stripe units.
fn any_len(random: &mut Random) -> usize {
    let len = match random.below(8) {
        0 => random.below(2) * 4096,
        1 => random.between(4000, 70_000),
        2 => random.between(60_000, 200_000),
        _ => random.between(1, 5000),
    };
    len as usize
}

impl Rewritten {
    /// What fs::write does: O_CREAT | O_TRUNC, write, close; perhaps a sync before the close.
    fn rewrite(&mut self, random: &mut Random) -> Result<()> {
        let bytes = contents(random.next(), any_len(random));
        self.versions.begin_cut(0);
        self.versions.begin_write(0, &bytes);
        if !random.once_in(6) {
            fs::write(&self.path, &bytes).context("write anew")?;
            self.versions.done();
            return Ok(());
        }
        let mut file = File::create(&self.path).context("open to write anew")?;
        file.write_all(&bytes).context("write anew")?;
        self.versions.done();
        self.sync(&file)
    }

    /// `: > f` and then some `>> f`, each with an open and a close of its own.
    fn empty_and_append(&mut self, random: &mut Random) -> Result<()> {
        self.versions.begin_cut(0);
        File::create(&self.path).context("open to empty")?;
        self.versions.done();
        for _ in 0..random.between(1, 4) {
            let at = self.versions.now().len();
            let bytes = contents(random.next(), random.between(1, 6000) as usize);
            self.versions.begin_write(at, &bytes);
            let mut file =
                OpenOptions::new().append(true).open(&self.path).context("open to append")?;
            file.write_all(&bytes).with_context(|| format!("append at {at}"))?;
            self.versions.done();
        }
        Ok(())
    }

    fn truncate(&mut self, random: &mut Random) -> Result<()> {
        let len = random.below(self.versions.now().len() as u64 + 10_000) as usize;
        self.versions.begin_cut(len);
        syscalls::truncate(&self.path, len).with_context(|| format!("truncate to {len}"))?;
        self.versions.done();
        Ok(())
    }

    fn sync(&mut self, file: &File) -> Result<()> {
        file.sync_all().context("fsync")?;
        self.versions.synced();
        Ok(())
    }

    fn change(&mut self, random: &mut Random) -> Result<&'static str> {
        if self.versions.wants_sync() {
            let file = File::open(&self.path).context("open")?;
            return self.sync(&file).map(|()| "a sync");
        }
        match random.below(10) {
            0 | 1 => self.truncate(random).map(|()| "a truncation"),
            2..5 => self.empty_and_append(random).map(|()| "appends to the emptied"),
            _ => self.rewrite(random).map(|()| "a whole write"),
        }
    }
}

pub struct Rewrite {
    dir: PathBuf,
    files: Vec<Rewritten>,
}

fn name(index: usize) -> String {
    format!("same.{index}")
}

impl Rewrite {
    pub fn new(dir: PathBuf) -> Result<Self> {
        let fresh = |index| {
            let path = dir.join(name(index));
            let bytes = contents(index as u64, 5000);
            fs::write(&path, &bytes).and_then(|()| File::open(&path)?.sync_all())?;
            Ok(Rewritten { path, versions: Versions::new(bytes) })
        };
        let files = (0..FILES).map(fresh).collect::<Result<_>>().context("fill the files")?;
        Ok(Self { dir, files })
    }
}

/// As programs read: through the kernel's cache.
fn same_at_once(path: &Path, expected: &[u8], after: &str) -> Result<()> {
    let found = fs::read(path).with_context(|| format!("read {}", path.display()))?;
    same_bytes(&format!("{} at once after {after}", path.display()), &found, expected)
}

impl Program for Rewrite {
    fn name(&self) -> &'static str {
        "rewrite"
    }

    fn step(&mut self, random: &mut Random) -> Result<()> {
        let mut index = random.below(FILES as u64) as usize;
        for _ in 0..random.between(1, BURST_MAX) {
            if random.once_in(4) {
                index = random.below(FILES as u64) as usize;
            }
            let file = &mut self.files[index];
            let after = file.change(random).with_context(|| name(index))?;
            if random.once_in(3) {
                same_at_once(&file.path, file.versions.now(), after)?;
            }
        }
        Ok(())
    }

    fn check(&mut self) -> Result<()> {
        same_names(&self.dir, &(0..FILES).map(name).collect())?;
        for file in &self.files {
            same_at_once(&file.path, file.versions.now(), "the steps")?;
            same_file(&file.path, file.versions.now())?;
        }
        Ok(())
    }

    fn knows_what_is_synced(&self) -> bool {
        true
    }

    fn check_after_loss(&mut self) -> Result<()> {
        same_names(&self.dir, &(0..FILES).map(name).collect())?;
        for file in &self.files {
            let found = read_through(&file.path)?;
            file.versions.check_after_loss(&file.path.display().to_string(), &found)?;
        }
        Ok(())
    }
}
