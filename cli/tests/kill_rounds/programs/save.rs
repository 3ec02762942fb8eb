//! Documents saved as editors do it: a new file, fsync, a rename over the old one, which others
//! still have open. Now and then two of them change places (RENAME_EXCHANGE).

use super::{
    Program, create_new, listing, read_through, same_bytes, same_file, same_names, same_open_file,
};
use crate::random::{Random, contents};
use anyhow::{Context, Result, ensure};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

const DOCUMENTS: usize = 3;
/// Descriptors of files that were replaced.
const HELD_MAX: usize = 4;
const BYTES_MAX: u64 = 120_000;

/// The number of the file that each name leads to.
type State = [u64; DOCUMENTS];

pub struct Save {
    dir: PathBuf,
    last: u64,
    now: State,
    /// What may be there after node and mount ended at once, oldest first: the state of the last
    /// sync of any file and every one after it, also one under way. Names change in order.
    states: Vec<State>,
    /// Opened before they were replaced.
    held: Vec<(File, u64)>,
}

fn name(index: usize) -> String {
    format!("document.{index}")
}

fn unsaved(number: u64) -> String {
    format!("unsaved.{number}")
}

fn text(number: u64) -> Vec<u8> {
    let len = Random::new(number).between(1, BYTES_MAX) as usize;
    contents(number, len)
}

impl Save {
    pub fn new(dir: PathBuf) -> Result<Self> {
        let now: State = std::array::from_fn(|index| index as u64);
        for (index, number) in now.iter().enumerate() {
            let mut file = create_new(&dir.join(name(index)))?;
            file.write_all(&text(*number)).context("fill a document")?;
            file.sync_all().context("fsync of a document")?;
        }
        Ok(Self { dir, last: DOCUMENTS as u64, now, states: vec![now], held: Vec::new() })
    }

    /// What the last change of names made is what is there.
    fn changed(&mut self) {
        self.now = self.states.last().copied().unwrap_or(self.now);
    }

    fn save(&mut self, index: usize, random: &mut Random) -> Result<()> {
        let path = self.dir.join(name(index));
        let old = (File::open(&path).context("open the old one")?, self.now[index]);
        self.last += 1;
        let fresh = self.dir.join(unsaved(self.last));
        let mut file = create_new(&fresh)?;
        for part in text(self.last).chunks(random.between(4000, 60_000) as usize) {
            file.write_all(part).context("write")?;
        }
        file.sync_all().context("fsync")?;
        // A sync of a file is one of all names before it.
        self.states = vec![self.now];
        let mut then = self.now;
        then[index] = self.last;
        self.states.push(then);
        fs::rename(&fresh, &path).with_context(|| format!("rename over {}", name(index)))?;
        self.changed();
        if random.once_in(3) {
            File::open(&self.dir)
                .and_then(|dir| dir.sync_all())
                .context("fsync of the directory")?;
            self.states = vec![self.now];
        }
        same_open_file("the replaced one, at once", &old.0, &text(old.1))?;
        if self.held.len() == HELD_MAX {
            self.held.remove(random.below(HELD_MAX as u64) as usize);
        }
        self.held.push(old);
        Ok(())
    }

    fn exchange(&mut self, random: &mut Random) -> Result<()> {
        let one = random.below(DOCUMENTS as u64) as usize;
        let other = (one + 1) % DOCUMENTS;
        let mut then = self.now;
        then.swap(one, other);
        self.states.push(then);
        let path = |index| self.dir.join(name(index));
        renameat_with(CWD, path(one), CWD, path(other), RenameFlags::EXCHANGE)
            .with_context(|| format!("exchange {} and {}", name(one), name(other)))?;
        self.changed();
        for index in [one, other] {
            let found = fs::read(self.dir.join(name(index))).context("read")?;
            same_bytes("a document, exchanged", &found, &text(self.now[index]))?;
        }
        Ok(())
    }

    fn read_held(&self, random: &mut Random) -> Result<()> {
        let Some((file, number)) = self.held.get(random.below(HELD_MAX as u64) as usize) else {
            return Ok(());
        };
        let expected = text(*number);
        let at = random.below(expected.len() as u64) as usize;
        let len = random.between(1, 20_000).min((expected.len() - at) as u64) as usize;
        let mut found = vec![0; len];
        file.read_exact_at(&mut found, at as u64)
            .with_context(|| format!("read {len} at {at} of a replaced one"))?;
        same_bytes("a part of a replaced one", &found, &expected[at..at + len])
    }
}

impl Program for Save {
    fn name(&self) -> &'static str {
        "save"
    }

    fn step(&mut self, random: &mut Random) -> Result<()> {
        match random.below(8) {
            0 => self.exchange(random),
            1..4 => self.read_held(random),
            _ => self.save(random.below(DOCUMENTS as u64) as usize, random),
        }
    }

    fn check(&mut self) -> Result<()> {
        same_names(&self.dir, &(0..DOCUMENTS).map(name).collect())?;
        for (index, number) in self.now.iter().enumerate() {
            same_file(&self.dir.join(name(index)), &text(*number))?;
        }
        for (file, number) in &self.held {
            same_open_file("a replaced one", file, &text(*number))?;
        }
        Ok(())
    }

    fn knows_what_is_synced(&self) -> bool {
        true
    }

    fn check_after_loss(&mut self) -> Result<()> {
        let mut names = listing(&self.dir)?;
        // Its rename was lost, of the last one or, before the next one was synced, the one before.
        if !names.remove(&unsaved(self.last)) {
            names.remove(&unsaved(self.last - 1));
        }
        ensure!(names == (0..DOCUMENTS).map(name).collect(), "strange names: {names:?}");
        let mut found = Vec::new();
        for index in 0..DOCUMENTS {
            found.push(read_through(&self.dir.join(name(index)))?);
        }
        let is =
            |state: &State| state.iter().zip(&found).all(|(number, found)| text(*number) == *found);
        if !self.states.iter().any(is) {
            let last = self.now.iter().enumerate().zip(&found);
            for ((index, number), found) in last {
                same_bytes(
                    &format!("none of {:?}, {}", self.states, name(index)),
                    found,
                    &text(*number),
                )?;
            }
        }
        Ok(())
    }

    fn close(&mut self) {
        self.held.clear();
    }
}
