//! Bytes that are written over: anywhere, without fsync; in slots; through a deleted name.

use super::{Program, create_new, same_file, same_names, same_open_file};
use crate::random::{Random, contents};
use anyhow::{Context, Result};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;

const FILES: usize = 5;
const FILE_BYTES_MAX: u64 = 3 << 19;
const WRITE_BYTES_MAX: u64 = 96 << 10;

/// Writes at random places of a file as the model has it.
fn scribble(file: &File, model: &mut Vec<u8>, random: &mut Random) -> Result<()> {
    let at = random.below(FILE_BYTES_MAX.min(model.len() as u64 + 4096)) as usize;
    let len = random.between(1, WRITE_BYTES_MAX) as usize;
    let bytes = contents(random.next(), len);
    file.write_all_at(&bytes, at as u64).with_context(|| format!("write {len} bytes at {at}"))?;
    if model.len() < at + len {
        model.resize(at + len, 0);
    }
    model[at..at + len].copy_from_slice(&bytes);
    Ok(())
}

fn cut(file: &File, model: &mut Vec<u8>, random: &mut Random) -> Result<()> {
    let len = random.below(model.len() as u64 + 8192) as usize;
    file.set_len(len as u64).with_context(|| format!("truncate to {len}"))?;
    model.resize(len, 0);
    Ok(())
}

/// Buffered writes and cuts, hardly ever synced: the client sends again what a power cut took.
pub struct Buffered {
    dir: PathBuf,
    files: Vec<(Option<File>, Vec<u8>)>,
}

impl Buffered {
    pub fn new(dir: PathBuf) -> Self {
        Self { dir, files: Vec::new() }
    }

    fn path(&self, index: usize) -> PathBuf {
        self.dir.join(format!("f.{index}"))
    }
}

impl Program for Buffered {
    fn name(&self) -> &'static str {
        "buffered writes"
    }

    fn step(&mut self, random: &mut Random) -> Result<()> {
        if self.files.len() < FILES {
            let file = create_new(&self.path(self.files.len()))?;
            self.files.push((Some(file), Vec::new()));
            return Ok(());
        }
        let index = random.below(FILES as u64) as usize;
        let path = self.path(index);
        let (open, model) = &mut self.files[index];
        let file = match open {
            Some(file) => file,
            None => {
                open.insert(OpenOptions::new().read(true).write(true).open(&path).context("open")?)
            }
        };
        match random.below(20) {
            0 => file.sync_data().context("fdatasync"),
            1 => cut(file, model, random),
            2 => {
                *open = None;
                Ok(())
            }
            _ => scribble(file, model, random),
        }
    }

    fn check(&mut self) -> Result<()> {
        for (index, (_, model)) in self.files.iter().enumerate() {
            same_file(&self.path(index), model)?;
        }
        Ok(())
    }

    fn close(&mut self) {
        for (open, _) in &mut self.files {
            *open = None;
        }
    }
}

/// Files that have no name any more, but are open.
pub struct Unlinked {
    dir: PathBuf,
    last: u64,
    files: Vec<(File, Vec<u8>)>,
}

impl Unlinked {
    pub fn new(dir: PathBuf) -> Self {
        Self { dir, last: 0, files: Vec::new() }
    }
}

impl Program for Unlinked {
    fn name(&self) -> &'static str {
        "unlinked files"
    }

    fn step(&mut self, random: &mut Random) -> Result<()> {
        if self.files.len() < 3 {
            self.last += 1;
            let path = self.dir.join(format!("gone.{}", self.last));
            let file = create_new(&path)?;
            let mut model = Vec::new();
            scribble(&file, &mut model, random)?;
            fs::remove_file(&path).context("unlink")?;
            self.files.push((file, model));
            return Ok(());
        }
        let index = random.below(self.files.len() as u64) as usize;
        if random.once_in(40) {
            self.files.remove(index);
            return Ok(());
        }
        let (file, model) = &mut self.files[index];
        if random.once_in(20) {
            file.sync_all().context("fsync")
        } else {
            scribble(file, model, random)
        }
    }

    fn check(&mut self) -> Result<()> {
        same_names(&self.dir, &Default::default())?;
        for (file, model) in &self.files {
            same_open_file("a file without a name", file, model)?;
        }
        Ok(())
    }

    fn close(&mut self) {
        self.files.clear();
    }
}

const SLOTS: u64 = 48;

/// One file of equal slots, each written whole again and again, some of it synced.
pub struct Slots {
    name: &'static str,
    path: PathBuf,
    file: Option<File>,
    slot_bytes: usize,
    /// Key of what each slot holds.
    keys: Vec<u64>,
}

impl Slots {
    pub fn new(dir: PathBuf, name: &'static str, slot_bytes: usize, direct: bool) -> Result<Self> {
        let path = dir.join("slots");
        let flags = if direct { rustix::fs::OFlags::DIRECT.bits() as i32 } else { 0 };
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).custom_flags(flags);
        let file = options.open(&path).context("create the slots")?;
        let keys: Vec<u64> = (0..SLOTS).collect();
        for slot in 0..SLOTS {
            let bytes = contents(slot, slot_bytes);
            file.write_all_at(&bytes, slot * slot_bytes as u64).context("fill the slots")?;
        }
        Ok(Self { name, path, file: Some(file), slot_bytes, keys })
    }
}

impl Program for Slots {
    fn name(&self) -> &'static str {
        self.name
    }

    fn step(&mut self, random: &mut Random) -> Result<()> {
        let file = self.file.as_ref().context("closed")?;
        if random.once_in(10) {
            return file.sync_data().context("fdatasync");
        }
        let slot = random.below(SLOTS);
        let key = random.next();
        file.write_all_at(&contents(key, self.slot_bytes), slot * self.slot_bytes as u64)
            .with_context(|| format!("write slot {slot}"))?;
        self.keys[slot as usize] = key;
        Ok(())
    }

    fn check(&mut self) -> Result<()> {
        let whole: Vec<u8> =
            self.keys.iter().flat_map(|key| contents(*key, self.slot_bytes)).collect();
        same_file(&self.path, &whole)
    }

    fn close(&mut self) {
        self.file = None;
    }
}
