//! The checkpoint space as the engine sees it: a file whose bytes lie on the area.
//!
//! Runs on the worker thread. Writes are kept in memory until the engine syncs or too many wait,
//! so that a transaction reaches the device in few large runs; every other access is a message to
//! the reactor, which does the I/O.
//!
//! The file is as long as the space at every open, whatever the engine made of it before: the
//! engine then takes all of it, and its own growth (by doubling) never has to fit. Within one
//! opening its length is only a number.

use super::message::{Down, Up};
use levada_base::reactor::worker::Port;
use levada_base::units::{BLOCK_BYTES, MIB};
use redb::StorageBackend;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

const PAGE: usize = BLOCK_BYTES as usize;
/// Pages that wait for a sync, at most: 4 MiB.
const PENDING_PAGES_MAX: usize = 1024;
/// The largest run.
const RUN_BYTES_MAX: usize = MIB as usize;

/// The worker's line to its reactor. The engine wants its files to be `Sync`, hence the lock;
/// only the worker thread ever takes it.
pub(super) struct Link {
    port: Mutex<Port<Up, Down>>,
    /// The engine wanted more space than there is.
    no_space: AtomicBool,
}

impl Link {
    pub(super) fn new(port: Port<Up, Down>) -> Arc<Self> {
        Arc::new(Self { port: Mutex::new(port), no_space: AtomicBool::new(false) })
    }

    /// Sends `up` and waits for the answer; `None` when the reactor is gone.
    pub(super) fn call(&self, up: Up) -> Option<Down> {
        let port = self.port.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        port.call(up).ok()
    }

    /// True when the engine failed for want of space; forgets it.
    pub(super) fn take_no_space(&self) -> bool {
        self.no_space.swap(false, Ordering::Relaxed)
    }

    fn out_of_space(&self) -> io::Error {
        self.no_space.store(true, Ordering::Relaxed);
        io::ErrorKind::StorageFull.into()
    }
}

struct File {
    bytes: u64,
    /// Pages by number that the device does not have yet.
    pending: BTreeMap<u64, Box<[u8]>>,
}

/// The engine's file.
pub(super) struct Space {
    link: Arc<Link>,
    bytes_max: u64,
    file: Mutex<File>,
}

impl fmt::Debug for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Space({} bytes)", self.bytes_max)
    }
}

impl Space {
    /// The space of `bytes_max` bytes; an empty file when `fresh`.
    pub(super) fn new(link: Arc<Link>, bytes_max: u64, fresh: bool) -> Self {
        let bytes = if fresh { 0 } else { bytes_max };
        let file = Mutex::new(File { bytes, pending: BTreeMap::new() });
        Self { link, bytes_max, file }
    }

    fn file(&self) -> std::sync::MutexGuard<'_, File> {
        self.file.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn read_device(&self, at: u64, bytes: usize) -> io::Result<Vec<u8>> {
        match self.link.call(Up::Read { at, bytes }) {
            Some(Down::Bytes(read)) if read.len() == bytes => Ok(read),
            _ => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// Sends every waiting page to the device.
    fn send(&self, file: &mut File, flush: bool) -> io::Result<()> {
        let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
        for (page, bytes) in std::mem::take(&mut file.pending) {
            let at = page * BLOCK_BYTES;
            match runs.last_mut() {
                Some((start, run))
                    if *start + run.len() as u64 == at && run.len() < RUN_BYTES_MAX =>
                {
                    run.extend_from_slice(&bytes);
                }
                _ => runs.push((at, bytes.into_vec())),
            }
        }
        match self.link.call(Up::Write { runs, flush }) {
            Some(Down::Done) => Ok(()),
            _ => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }
}

impl StorageBackend for Space {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file().bytes)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        if len > self.bytes_max {
            return Err(self.link.out_of_space());
        }
        let mut file = self.file();
        file.bytes = len;
        file.pending.retain(|page, _| *page * BLOCK_BYTES < len);
        Ok(())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let file = self.file();
        let end = offset + out.len() as u64;
        if end > file.bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let pages = offset / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES);
        let start = pages.start * BLOCK_BYTES;
        let all_pending = pages.clone().all(|page| file.pending.contains_key(&page));
        let mut bytes = if all_pending {
            vec![0; (pages.end - pages.start) as usize * PAGE]
        } else {
            self.read_device(start, (pages.end - pages.start) as usize * PAGE)?
        };
        for (page, newer) in file.pending.range(pages.clone()) {
            let at = (page - pages.start) as usize * PAGE;
            bytes[at..at + PAGE].copy_from_slice(newer);
        }
        let at = (offset - start) as usize;
        out.copy_from_slice(&bytes[at..at + out.len()]);
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut file = self.file();
        let end = offset + data.len() as u64;
        if end > self.bytes_max {
            return Err(self.link.out_of_space());
        }
        let mut at = offset;
        while at < end {
            let page = at / BLOCK_BYTES;
            let inside = (at % BLOCK_BYTES) as usize;
            let len = (PAGE - inside).min((end - at) as usize);
            // The engine writes part of a page for its header only.
            if len < PAGE && !file.pending.contains_key(&page) {
                let old = self.read_device(page * BLOCK_BYTES, PAGE)?;
                file.pending.insert(page, old.into_boxed_slice());
            }
            let from = (at - offset) as usize;
            let pending = file.pending.entry(page).or_insert_with(|| vec![0; PAGE].into());
            pending[inside..inside + len].copy_from_slice(&data[from..from + len]);
            at += len as u64;
        }
        if file.pending.len() >= PENDING_PAGES_MAX {
            self.send(&mut file, false)?;
        }
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut file = self.file();
        self.send(&mut file, true)
    }
}
