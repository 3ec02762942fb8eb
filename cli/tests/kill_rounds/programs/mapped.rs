//! A file mapped shared, changed there and by write(2), synced in halves.
//!
//! The mapping is in a process of its own, this test's program once more: a page fault may hold
//! the address space while it waits for the node, and who has to start the node must not wait
//! for it.

use super::syscalls::Mapping;
use super::versions::Versions;
use super::{Program, read_through, same_bytes, same_file};
use crate::random::{Random, contents};
use anyhow::{Context, Result, ensure};
use rustix::fs::{Advice, fadvise};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const PAGE_BYTES: usize = 4096;
const HALF_BYTES: usize = 26 * PAGE_BYTES;
/// It ends in the middle of a page.
const FILE_BYTES: usize = 50 * PAGE_BYTES + 1234;
const CHANGE_BYTES_MAX: u64 = 20_000;

/// Tells the other process what to map.
const MAPPED: &str = "LEVADA_KILL_MAPPED";

/// What the other process is asked to do with `len` bytes from `at`. It answers with zero or an
/// error's number, and after `READ` with all bytes.
type Request = [u64; 4];
const WRITE: u64 = 1;
const SYNC: u64 = 2;
const FORGET: u64 = 3;
const READ: u64 = 4;

fn half(index: usize) -> (usize, usize) {
    if index == 0 { (0, HALF_BYTES) } else { (HALF_BYTES, FILE_BYTES - HALF_BYTES) }
}

/// The other process.
struct Mapper {
    process: Child,
    socket: UnixStream,
}

impl Mapper {
    fn start(path: &Path) -> Result<Self> {
        let (socket, other) = UnixStream::pair()?;
        let test = module_path!().split_once("::").context("not in a module")?.1;
        let process = Command::new(std::env::current_exe()?)
            .args([&format!("{test}::map"), "--exact", "--ignored", "--nocapture"])
            .env(MAPPED, path)
            .stdin(Stdio::from(OwnedFd::from(other)))
            .stdout(Stdio::null())
            .spawn()?;
        Ok(Self { process, socket })
    }

    fn ask(&mut self, what: u64, at: usize, len: usize, key: u64) -> io::Result<()> {
        let request: Request = [what, at as u64, len as u64, key];
        self.socket.write_all(&request.map(u64::to_le_bytes).concat())?;
        let mut status = [0; 4];
        self.socket.read_exact(&mut status)?;
        match i32::from_le_bytes(status) {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }

    fn read(&mut self) -> io::Result<Vec<u8>> {
        self.ask(READ, 0, FILE_BYTES, 0)?;
        let mut bytes = vec![0; FILE_BYTES];
        self.socket.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

impl Drop for Mapper {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
#[ignore = "the other process of the program that maps a file; that one starts it"]
fn map() {
    let Some(path) = std::env::var_os(MAPPED) else {
        return;
    };
    let file = OpenOptions::new().read(true).write(true).open(path).expect("opened");
    let mapping = Mapping::new(&file, FILE_BYTES).expect("mapped");
    let socket = io::stdin().as_fd().try_clone_to_owned().expect("a socket");
    match serve(&mapping, &mut UnixStream::from(socket)) {
        Err(error) if error.kind() != ErrorKind::UnexpectedEof => panic!("{error}"),
        _ => {}
    }
}

/// Does what it is asked until nobody asks.
fn serve(mapping: &Mapping, socket: &mut UnixStream) -> io::Result<()> {
    loop {
        let mut words = [[0; 8]; 4];
        socket.read_exact(words.as_flattened_mut())?;
        let [what, at, len, key] = words.map(u64::from_le_bytes);
        let (at, len) = (at as usize, len as usize);
        let mut reply = Vec::new();
        let result = match what {
            WRITE => {
                mapping.write(at, &contents(key, len));
                Ok(())
            }
            SYNC => mapping.sync(at, len),
            FORGET => mapping.forget(),
            READ => {
                reply = mapping.read();
                Ok(())
            }
            _ => Err(io::Error::from_raw_os_error(libc::EINVAL)),
        };
        let status = result.map_or_else(|error| error.raw_os_error().unwrap_or(libc::EIO), |()| 0);
        socket.write_all(&status.to_le_bytes())?;
        socket.write_all(&reply)?;
    }
}

pub struct Mapped {
    path: PathBuf,
    open: Option<(Mapper, File)>,
    /// Each synced on its own.
    halves: [Versions; 2],
}

impl Mapped {
    pub fn new(dir: &Path) -> Result<Self> {
        let path = dir.join("mapped");
        let bytes = contents(3, FILE_BYTES);
        fs::write(&path, &bytes).and_then(|()| File::open(&path)?.sync_all())?;
        let halves = [&bytes[..HALF_BYTES], &bytes[HALF_BYTES..]];
        Ok(Self { path, open: None, halves: halves.map(|half| Versions::new(half.to_vec())) })
    }

    fn expected(&self) -> Vec<u8> {
        [self.halves[0].now(), self.halves[1].now()].concat()
    }

    fn change(&mut self, index: usize, random: &mut Random) -> Result<()> {
        let (mapper, file) = self.open.as_mut().context("not mapped")?;
        let (from, half_len) = half(index);
        let at = random.below(half_len as u64) as usize;
        let len = random.between(1, CHANGE_BYTES_MAX).min((half_len - at) as u64) as usize;
        let key = random.next();
        self.halves[index].begin_write(at, &contents(key, len));
        if random.once_in(6) {
            file.write_all_at(&contents(key, len), (from + at) as u64)
                .with_context(|| format!("write {len} at {} beside the mapping", from + at))?;
        } else {
            mapper
                .ask(WRITE, from + at, len, key)
                .with_context(|| format!("change {len} at {} in the mapping", from + at))?;
        }
        self.halves[index].done();
        Ok(())
    }

    /// msync of one half; then it is the same by way of the node.
    fn sync(&mut self, index: usize) -> Result<()> {
        let (mapper, _) = self.open.as_mut().context("not mapped")?;
        let (at, len) = half(index);
        mapper.ask(SYNC, at, len, 0).with_context(|| format!("msync of half {index}"))?;
        self.halves[index].synced();
        let found = read_through(&self.path)?;
        ensure!(found.len() == FILE_BYTES, "{} bytes after an msync", found.len());
        same_bytes("a synced half", &found[at..at + len], self.halves[index].now())
    }

    fn read_part(&self, random: &mut Random) -> Result<()> {
        let (_, file) = self.open.as_ref().context("not mapped")?;
        let at = random.below(FILE_BYTES as u64) as usize;
        let len = random.between(1, CHANGE_BYTES_MAX).min((FILE_BYTES - at) as u64) as usize;
        let mut found = vec![0; len];
        file.read_exact_at(&mut found, at as u64).with_context(|| format!("read {len} at {at}"))?;
        same_bytes("a part read beside the mapping", &found, &self.expected()[at..at + len])
    }

    /// Drops what is cached and clean, so that the next page faults ask the node.
    fn forget(&mut self) -> Result<()> {
        let (mapper, file) = self.open.as_mut().context("not mapped")?;
        mapper.ask(FORGET, 0, FILE_BYTES, 0).context("madvise")?;
        fadvise(file, 0, None, Advice::DontNeed).context("fadvise")
    }

    fn same_mapping(&mut self) -> Result<()> {
        let expected = self.expected();
        let Some((mapper, _)) = self.open.as_mut() else {
            return Ok(());
        };
        let found = mapper.read().context("read through the mapping")?;
        same_bytes("the mapping", &found, &expected)
    }
}

impl Program for Mapped {
    fn name(&self) -> &'static str {
        "mapped"
    }

    fn step(&mut self, random: &mut Random) -> Result<()> {
        if self.open.is_none() {
            let file =
                OpenOptions::new().read(true).write(true).open(&self.path).context("open")?;
            self.open = Some((Mapper::start(&self.path).context("start the mapper")?, file));
        }
        let index = random.below(2) as usize;
        if self.halves[index].wants_sync() {
            return self.sync(index);
        }
        match random.below(60) {
            0 => {
                // The last unmapping: what was changed goes to the file.
                self.open = None;
                Ok(())
            }
            1..4 => self.forget().and_then(|()| self.same_mapping()),
            4..12 => self.sync(index),
            12..18 => self.read_part(random),
            _ => self.change(index, random),
        }
    }

    fn check(&mut self) -> Result<()> {
        self.same_mapping()?;
        same_file(&self.path, &self.expected())
    }

    fn knows_what_is_synced(&self) -> bool {
        true
    }

    fn check_after_loss(&mut self) -> Result<()> {
        let found = read_through(&self.path)?;
        ensure!(found.len() == FILE_BYTES, "{} bytes", found.len());
        for (index, versions) in self.halves.iter().enumerate() {
            let (at, len) = half(index);
            versions.check_after_loss(&format!("half {index}"), &found[at..at + len])?;
        }
        Ok(())
    }

    fn close(&mut self) {
        self.open = None;
    }
}
