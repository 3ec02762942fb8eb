//! A device on a file or a block device, by io_uring and, where the file system can, past the
//! page cache.
//!
//! What always holds:
//! - One opener at a time: a lock on the file, and `O_EXCL` on a block device.
//! - The space of a regular file stays reserved: discarding does not punch holes, so a write can
//!   never fail for want of space below.
//!
//! After a crash the kernel drops the lock, once no request of the dead process is left: some 40 ms
//! later (docs/design/0011-reactor.md). What was not flushed may be lost, block by block.

use crate::local_nvme::Looking;
use crate::{
    BlockError, Device, DeviceInfo, Durability, Health, HealthPage, IoFuture, LentFuture,
    check_range,
};
use levada_base::buf::bytes_in;
use levada_base::lent::bytes_lent;
use levada_base::reactor::fs::{File, OpenOptions};
use levada_base::units::{BLOCK_BYTES, MIB, round_down};
use levada_base::{BufMut, Epoch, IoVec, IoVecMut, Lent, LentVec};
use std::cell::Cell;
use std::fs::Metadata;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Zeroes are written by requests of this size, and ranges up to it by plain writes.
const ZEROES_BYTES: u64 = MIB;

/// Why a file cannot serve as a device.
#[derive(Debug, thiserror::Error)]
pub enum FileDeviceError {
    /// Opening or preparing it failed.
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    /// Another process, or this one, has it open as a device, or it is mounted.
    #[error("{} is in use", path.display())]
    InUse { path: PathBuf },
    /// Neither a regular file nor a block device.
    #[error("{} is neither a regular file nor a block device", path.display())]
    NotAStore { path: PathBuf },
    /// Not even one block.
    #[error("{} has only {bytes} bytes", path.display())]
    TooSmall { path: PathBuf, bytes: u64 },
    /// Its smallest unit is larger than the blocks used here.
    #[error("{} has blocks of {bytes} bytes; at most {BLOCK_BYTES} are supported", path.display())]
    BlocksTooLarge { path: PathBuf, bytes: u64 },
    /// The file to be created is there.
    #[error("{} exists already", path.display())]
    Exists { path: PathBuf },
}

/// How a new file is prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prepare {
    /// Its space is reserved: at once, but each first write of a block makes the next flush also
    /// write the file system's own records.
    Reserve,
    /// Its space is reserved and zeroes are written: takes as long as writing the whole file.
    Zero,
}

/// What tells a file or block device from every other one while it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Identity {
    File {
        file_system: u64,
        inode: u64,
    },
    /// Many paths lead to one, each a file of its own.
    BlockDevice {
        number: u64,
    },
}

impl Identity {
    fn of(metadata: &Metadata) -> Self {
        match metadata.file_type().is_block_device() {
            true => Self::BlockDevice { number: metadata.rdev() },
            false => Self::File { file_system: metadata.dev(), inode: metadata.ino() },
        }
    }

    fn of_open(file: &File) -> io::Result<Self> {
        let file = std::fs::File::from(file.as_fd().try_clone_to_owned()?);
        Ok(Self::of(&file.metadata()?))
    }
}

/// A file or block device as a device.
#[derive(Debug)]
pub struct FileDevice {
    info: DeviceInfo,
    file: File,
    identity: Identity,
    is_block_device: bool,
    is_direct: bool,
    epoch: Cell<Epoch>,
    health: Cell<Health>,
    looking: Looking,
}

impl FileDevice {
    /// Creates a regular file of `capacity_bytes`, rounded down to whole blocks, and opens it.
    ///
    /// # Errors
    ///
    /// A [`FileDeviceError`]. A file whose preparation failed is removed again.
    pub async fn create(
        path: &Path,
        capacity_bytes: u64,
        prepare: Prepare,
    ) -> Result<Self, FileDeviceError> {
        let capacity_bytes = round_down(capacity_bytes, BLOCK_BYTES);
        if capacity_bytes == 0 {
            return Err(FileDeviceError::TooSmall { path: path.into(), bytes: 0 });
        }
        let options = OpenOptions { write: true, create: true, exclusive: true, direct: false };
        let failed = |source| FileDeviceError::Io { path: path.into(), source };
        let file = File::open(path, options).map_err(|source| match source.kind() {
            io::ErrorKind::AlreadyExists => FileDeviceError::Exists { path: path.into() },
            _ => failed(source),
        })?;
        let prepared = async {
            file.allocate(0, capacity_bytes).await.map_err(failed)?;
            drop(file);
            let device = Self::open(path)?;
            if prepare == Prepare::Zero {
                device.zero(0, capacity_bytes).await.map_err(failed)?;
            }
            device.file.sync_data().await.map_err(failed)?;
            Ok(device)
        }
        .await;
        if prepared.is_err() {
            // It is of no use, and the next attempt must not find it.
            let _ = std::fs::remove_file(path);
        }
        prepared
    }

    /// Opens a regular file or a block device with all its bytes.
    ///
    /// # Errors
    ///
    /// A [`FileDeviceError`].
    pub fn open(path: &Path) -> Result<Self, FileDeviceError> {
        let failed = |source| FileDeviceError::Io { path: path.into(), source };
        let file_type = std::fs::metadata(path).map_err(failed)?.file_type();
        let is_block_device = file_type.is_block_device();
        if !is_block_device && !file_type.is_file() {
            return Err(FileDeviceError::NotAStore { path: path.into() });
        }
        let options =
            OpenOptions { write: true, direct: true, create: false, exclusive: is_block_device };
        let opened = match File::open(path, options) {
            // Some file systems (FUSE, older tmpfs) do not offer direct I/O.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                File::open(path, OpenOptions { direct: false, ..options }).map(|file| (file, false))
            }
            opened => opened.map(|file| (file, true)),
        };
        let (file, is_direct) = opened.map_err(|source| match source.kind() {
            io::ErrorKind::ResourceBusy => FileDeviceError::InUse { path: path.into() },
            _ => failed(source),
        })?;
        if !file.try_lock().map_err(failed)? {
            return Err(FileDeviceError::InUse { path: path.into() });
        }
        // Of a regular file: those of the file systems that people put them on.
        let (mut block_bytes, mut atomic_write_bytes) = (BLOCK_BYTES, BLOCK_BYTES);
        if is_block_device {
            block_bytes = file.logical_block_bytes().map_err(failed)?;
            if block_bytes > BLOCK_BYTES {
                let (path, bytes) = (path.into(), block_bytes);
                return Err(FileDeviceError::BlocksTooLarge { path, bytes });
            }
            let physical_bytes = file.physical_block_bytes().map_err(failed)?;
            atomic_write_bytes = physical_bytes.clamp(block_bytes, BLOCK_BYTES);
        }
        let bytes = file.len().map_err(failed)?;
        let capacity_bytes = round_down(bytes, BLOCK_BYTES);
        if capacity_bytes == 0 {
            return Err(FileDeviceError::TooSmall { path: path.into(), bytes });
        }
        Ok(Self {
            info: DeviceInfo {
                name: path.display().to_string(),
                capacity_bytes,
                block_bytes,
                atomic_write_bytes,
                io_bytes_best: MIB,
            },
            identity: Identity::of_open(&file).map_err(failed)?,
            file,
            is_block_device,
            is_direct,
            epoch: Cell::default(),
            health: Cell::default(),
            looking: Looking::default(),
        })
    }

    /// False when the file system only offers I/O through the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// True while `path` leads to this very file or block device: not when that was removed there,
    /// nor when another was put in its place.
    #[must_use]
    pub fn is_at(&self, path: &Path) -> bool {
        std::fs::metadata(path).is_ok_and(|there| Identity::of(&there) == self.identity)
    }

    /// What the drive says of its health, now: `None` for all but the NVMe drives of this machine.
    pub async fn look_at_health(&self) -> Option<HealthPage> {
        if !self.is_block_device {
            return None;
        }
        let fd = self.file.as_fd().try_clone_to_owned().ok()?;
        let page = self.looking.look(fd).await?;
        self.count(|health| health.failing = page.warnings.ask_for_replacement());
        Some(page)
    }

    async fn zero(&self, at: u64, bytes: u64) -> io::Result<()> {
        let zeroes = BufMut::zeroed(bytes.min(ZEROES_BYTES) as usize).freeze();
        let end = at + bytes;
        let mut at = at;
        while at < end {
            let step = (end - at).min(ZEROES_BYTES);
            let part = zeroes.slice(0, step as usize);
            self.file.write_at(at, part.into_vec(), false).await?;
            at += step;
        }
        Ok(())
    }

    fn count(&self, change: impl FnOnce(&mut Health)) {
        let mut health = self.health.get();
        change(&mut health);
        self.health.set(health);
    }

    fn failed(&self, error: &io::Error, at: u64, bytes: u64, reading: bool) -> BlockError {
        self.count(|health| {
            if reading {
                health.read_errors += 1;
            } else {
                health.write_errors += 1;
            }
        });
        match error.raw_os_error() {
            Some(libc::ENODEV | libc::ENXIO | libc::ENOMEDIUM | libc::ESHUTDOWN) => {
                BlockError::Gone
            }
            // What the block layer says of a bad sector; a read past the end of a file that
            // somebody cut has no number.
            Some(libc::ENODATA | libc::EILSEQ) => BlockError::Medium { at, bytes },
            Some(libc::EIO) | None if reading => BlockError::Medium { at, bytes },
            Some(errno) => BlockError::Io { errno },
            None => BlockError::Io { errno: libc::EIO },
        }
    }
}

impl Device for FileDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn read(&self, at: u64, into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        Box::pin(async move {
            let bytes = bytes_in(&into);
            check_range(&self.info, at, bytes)?;
            let read = self.file.read_at(at, into).await;
            let into = read.map_err(|error| self.failed(&error, at, bytes, true))?;
            self.count(|health| health.bytes_read += bytes);
            Ok(into)
        })
    }

    fn read_lent(&self, at: u64, into: LentVec) -> Option<LentFuture<'_>> {
        // Past the page cache, drives take memory at multiples of a page, and pieces of whole blocks.
        let is_fit = |part: &Lent| {
            part.is_aligned(BLOCK_BYTES as usize)
                && (part.len() as u64).is_multiple_of(self.info.block_bytes)
        };
        let bytes = bytes_lent(&into);
        if check_range(&self.info, at, bytes).is_err() || !into.iter().all(is_fit) {
            return None;
        }
        Some(Box::pin(async move {
            // What it says of a failure may be said of that memory.
            let is_read = self.file.read_into(at, into).await.is_ok();
            if is_read {
                self.count(|health| health.bytes_read += bytes);
            }
            is_read
        }))
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let bytes = bytes_in(&from);
            check_range(&self.info, at, bytes)?;
            let written = self.file.write_at(at, from, durability == Durability::Fua).await;
            written.map_err(|error| self.failed(&error, at, bytes, false))?;
            self.count(|health| health.bytes_written += bytes);
            Ok(())
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let synced = self.file.sync_data().await;
            synced.map_err(|error| self.failed(&error, 0, 0, false))
        })
    }

    fn discard(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        Box::pin(async move {
            check_range(&self.info, at, bytes)?;
            if !self.is_block_device || bytes == 0 {
                return Ok(());
            }
            match self.file.punch_hole(at, bytes).await {
                // A drive that cannot discard keeps the old bytes, which is allowed.
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(()),
                result => result.map_err(|error| self.failed(&error, at, bytes, false)),
            }
        })
    }

    fn write_zeroes(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        Box::pin(async move {
            check_range(&self.info, at, bytes)?;
            let zeroed = if bytes <= ZEROES_BYTES {
                self.zero(at, bytes).await
            } else {
                match self.file.zero_range(at, bytes).await {
                    Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                        self.zero(at, bytes).await
                    }
                    result => result,
                }
            };
            zeroed.map_err(|error| self.failed(&error, at, bytes, false))
        })
    }

    fn fence(&self, epoch: Epoch) -> IoFuture<'_, ()> {
        let seen = self.epoch.get();
        let fenced = if epoch < seen {
            Err(BlockError::Fenced { ours: epoch, seen })
        } else {
            self.epoch.set(epoch);
            Ok(())
        };
        Box::pin(std::future::ready(fenced))
    }

    fn health(&self) -> Health {
        self.health.get()
    }
}
