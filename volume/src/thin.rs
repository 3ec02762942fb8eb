//! A thin volume: a file of the file system, whose bytes are objects of the log.
//!
//! It takes room as it is written, and gives it back as it is discarded. Checksums, repair and striping over
//! targets are those of every file; so are quotas, and what `levada fsck` checks.
//!
//! What always holds: the file is exactly as long as the volume, so no request moves its end.

use crate::VolumeError;
use crate::gate::Gate;
use crate::volume::{Extent, Shape, Volume, VolumeFuture, Zeroing};
use levada_base::buf::bytes_in;
use levada_base::units::{BLOCK_BYTES, MIB};
use levada_base::{BufMut, IoVec};
use levada_client::{Error, File, Seek};
use levada_device::{BlockError, Durability};
use levada_wire::meta::MetaFault;

/// Runs that one question for extents is answered with at most: each may cost a call to a target.
const RUNS_PER_QUESTION: usize = 64;
/// Zeroes that are really written go down in pieces of this size.
const ZEROES_BYTES: u64 = MIB;

/// A thin volume that is open. Lives on one core.
pub struct ThinVolume {
    file: File,
    gate: Gate,
    io_bytes_best: u64,
}

/// What a client of the volume is told of an error of the file.
fn volume_error(error: Error) -> VolumeError {
    match error {
        Error::Full | Error::Meta(MetaFault::Full | MetaFault::Quota) => VolumeError::NoSpace,
        Error::Damaged { offset, bytes } => BlockError::Medium { at: offset, bytes }.into(),
        error => BlockError::Io { errno: error.errno() }.into(),
    }
}

impl ThinVolume {
    /// Shows `file`, which is `size_bytes` long, and of which `io_bytes_best` lie together.
    pub(crate) fn new(file: File, size_bytes: u64, io_bytes_best: u64) -> Self {
        Self { file, gate: Gate::new(size_bytes), io_bytes_best }
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn gate(&self) -> &Gate {
        &self.gate
    }

    async fn write_out_zeroes(&self, at: u64, bytes: u64) -> Result<(), VolumeError> {
        let zeroes = BufMut::zeroed(bytes.min(ZEROES_BYTES) as usize).freeze();
        let (mut at, end) = (at, at + bytes);
        while at < end {
            let bytes = ZEROES_BYTES.min(end - at);
            let piece = zeroes.slice(0, bytes as usize).into_vec();
            self.file.write(at, piece).await.map_err(volume_error)?;
            at += bytes;
        }
        Ok(())
    }

    /// The next place from `at` on, before `end`, where `what` begins; else `end`.
    async fn next(&self, at: u64, end: u64, what: Seek) -> Result<u64, VolumeError> {
        let found = self.file.seek(at, what).await.map_err(volume_error)?;
        Ok(found.map_or(end, |found| found.clamp(at, end)))
    }

    async fn runs(&self, at: u64, end: u64) -> Result<Vec<Extent>, VolumeError> {
        let mut runs = Vec::new();
        let mut at = at;
        while at < end && runs.len() < RUNS_PER_QUESTION {
            let data = self.next(at, end, Seek::Data).await?;
            if data > at {
                runs.push(Extent { bytes: data - at, is_allocated: false });
                at = data;
            }
            if at < end {
                let hole = self.next(at, end, Seek::Hole).await?;
                // Somebody may have punched it meanwhile.
                if hole > at {
                    runs.push(Extent { bytes: hole - at, is_allocated: true });
                    at = hole;
                }
            }
        }
        Ok(merged(runs))
    }
}

/// Joins neighbours of one kind, which changes between two questions leave.
fn merged(runs: Vec<Extent>) -> Vec<Extent> {
    let mut merged: Vec<Extent> = Vec::with_capacity(runs.len());
    for run in runs {
        match merged.last_mut() {
            Some(last) if last.is_allocated == run.is_allocated => last.bytes += run.bytes,
            _ => merged.push(run),
        }
    }
    merged
}

impl Volume for ThinVolume {
    fn size_bytes(&self) -> u64 {
        self.gate.size_bytes()
    }

    fn shape(&self) -> Shape {
        Shape {
            // The log takes any bytes; its checksums are of blocks, and so is what guests write.
            block_bytes: BLOCK_BYTES,
            io_bytes_best: self.io_bytes_best,
            discard_bytes: BLOCK_BYTES,
            is_read_only: false,
        }
    }

    fn read(&self, at: u64, bytes: u64) -> VolumeFuture<'_, IoVec> {
        Box::pin(async move {
            self.gate.check(at, bytes)?;
            let read = self.file.read(at, bytes).await.map_err(volume_error)?;
            match bytes_in(&read) == bytes {
                true => Ok(read),
                // It was cut meanwhile.
                false => {
                    let size_bytes = self.gate.size_bytes();
                    Err(VolumeError::OutOfRange { at, bytes, size_bytes })
                }
            }
        })
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            let bytes = bytes_in(&from);
            let _turn = self.gate.pass(at, bytes).await?;
            if bytes > 0 {
                self.file.write(at, from).await.map_err(volume_error)?;
            }
            match durability {
                Durability::Volatile => Ok(()),
                Durability::Fua => self.file.fsync().await.map_err(volume_error),
            }
        })
    }

    fn flush(&self) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            self.gate.check(0, 0)?;
            self.file.fsync().await.map_err(volume_error)
        })
    }

    fn discard(&self, at: u64, bytes: u64) -> VolumeFuture<'_, ()> {
        self.write_zeroes(at, bytes, Zeroing::Free)
    }

    fn write_zeroes(&self, at: u64, bytes: u64, zeroing: Zeroing) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            let _turn = self.gate.pass(at, bytes).await?;
            match zeroing {
                _ if bytes == 0 => Ok(()),
                Zeroing::Free => self.file.punch(at, bytes).await.map_err(volume_error),
                Zeroing::Keep => self.write_out_zeroes(at, bytes).await,
            }
        })
    }

    fn extents(&self, at: u64, bytes: u64) -> VolumeFuture<'_, Vec<Extent>> {
        Box::pin(async move {
            self.gate.check(at, bytes)?;
            self.runs(at, at + bytes).await
        })
    }
}
