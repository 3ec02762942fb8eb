//! What layers are kept in: a file that knows where it has data.

use crate::VolumeError;
use levada_base::IoVec;
use levada_base::buf::bytes_in;
use levada_client::{Error, File, Seek};
use levada_device::{BlockError, Durability};
use levada_wire::meta::MetaFault;

/// A file with holes, which reads as zeroes where nothing was written. Changes are volatile until [`Sparse::sync`], but for writes
/// that are to be durable when they are answered.
pub(crate) trait Sparse: 'static {
    /// Exactly so many bytes.
    async fn read(&self, at: u64, bytes: u64) -> Result<IoVec, VolumeError>;
    /// Does not move the file's end.
    async fn write(&self, at: u64, from: IoVec, durability: Durability) -> Result<(), VolumeError>;
    /// Makes a hole.
    async fn punch(&self, at: u64, bytes: u64) -> Result<(), VolumeError>;
    /// The first place from `at` on, before `end`, that has data; else `end`.
    async fn data(&self, at: u64, end: u64) -> Result<u64, VolumeError>;
    /// As [`Sparse::data`], of a hole.
    async fn hole(&self, at: u64, end: u64) -> Result<u64, VolumeError>;
    async fn sync(&self) -> Result<(), VolumeError>;
}

/// What a client of a volume is told of an error of its file.
fn volume_error(error: Error) -> VolumeError {
    match error {
        Error::Full | Error::Meta(MetaFault::Full | MetaFault::Quota) => VolumeError::NoSpace,
        Error::Damaged { offset, bytes } => BlockError::Medium { at: offset, bytes }.into(),
        error => BlockError::Io { errno: error.errno() }.into(),
    }
}

impl Sparse for File {
    async fn read(&self, at: u64, bytes: u64) -> Result<IoVec, VolumeError> {
        let read = File::read(self, at, bytes).await.map_err(volume_error)?;
        match bytes_in(&read) {
            read_bytes if read_bytes == bytes => Ok(read),
            // It was cut meanwhile.
            fewer => Err(VolumeError::OutOfRange { at, bytes, size_bytes: at + fewer }),
        }
    }

    async fn write(&self, at: u64, from: IoVec, durability: Durability) -> Result<(), VolumeError> {
        let written = match durability {
            Durability::Volatile => File::write(self, at, from).await,
            Durability::Fua => self.write_durably(at, from).await,
        };
        written.map_err(volume_error)
    }

    async fn punch(&self, at: u64, bytes: u64) -> Result<(), VolumeError> {
        File::punch(self, at, bytes).await.map_err(volume_error)
    }

    async fn data(&self, at: u64, end: u64) -> Result<u64, VolumeError> {
        let found = self.seek(at, Seek::Data).await.map_err(volume_error)?;
        Ok(found.map_or(end, |found| found.clamp(at, end)))
    }

    async fn hole(&self, at: u64, end: u64) -> Result<u64, VolumeError> {
        let found = self.hole_or_enough(at, end - at).await.map_err(volume_error)?;
        Ok(found.map_or(end, |found| found.clamp(at, end)))
    }

    async fn sync(&self) -> Result<(), VolumeError> {
        self.fsync().await.map_err(volume_error)
    }
}
