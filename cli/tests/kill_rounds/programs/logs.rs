//! Two programs append to one log. A record that is there twice, not at all, torn or out of
//! order is a lost or repeated append.

use super::{Program, create_new, read_through};
use crate::random::{Random, contents};
use anyhow::{Context, Result, ensure};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

const RECORD_BYTES: usize = 96;

/// An empty log.
pub fn create(dir: &Path) -> Result<PathBuf> {
    let path = dir.join("log");
    create_new(&path)?;
    Ok(path)
}

pub struct Appender {
    path: PathBuf,
    file: Option<File>,
    id: u64,
    records: u64,
}

impl Appender {
    pub fn new(path: &Path, id: u64) -> Result<Self> {
        let file = OpenOptions::new().append(true).open(path).context("open the log")?;
        Ok(Self { path: path.to_owned(), file: Some(file), id, records: 0 })
    }
}

/// Who wrote it, its number, and bytes that only these two give.
fn record(id: u64, number: u64) -> Vec<u8> {
    let mut record = [id.to_le_bytes(), number.to_le_bytes()].concat();
    record.extend(contents(id << 40 | number, RECORD_BYTES - 16));
    record
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

impl Program for Appender {
    fn name(&self) -> &'static str {
        if self.id == 0 { "first appender" } else { "second appender" }
    }

    fn step(&mut self, random: &mut Random) -> Result<()> {
        let file = self.file.as_mut().context("closed")?;
        if random.once_in(30) {
            return file.sync_data().context("fdatasync");
        }
        file.write_all(&record(self.id, self.records)).context("append")?;
        self.records += 1;
        Ok(())
    }

    fn check(&mut self) -> Result<()> {
        let log = read_through(&self.path)?;
        let mut own = 0;
        for (index, found) in log.chunks(RECORD_BYTES).enumerate() {
            ensure!(found.len() == RECORD_BYTES, "the log ends in the middle of record {index}");
            let (id, number) = (u64_at(found, 0), u64_at(found, 8));
            ensure!(found == record(id, number), "record {index} was never written");
            if id == self.id {
                ensure!(number == own, "at {index} stands record {number}, {own} is due");
                own += 1;
            }
        }
        ensure!(own == self.records, "{own} records, {} were appended", self.records);
        Ok(())
    }

    fn close(&mut self) {
        self.file = None;
    }
}
