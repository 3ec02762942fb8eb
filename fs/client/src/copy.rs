//! Copies from file to file, which need not pass through the program that wants them.

use crate::error::Error;
use crate::file::File;
use crate::inode::Seek;
use futures_util::future::join_all;
use levada_base::buf::bytes_in;
use levada_base::units::{GIB, MIB};

/// One call copies at most this, so that it holds no more in memory and ends soon.
const DATA_BYTES_MAX: u64 = 16 * MIB;
/// Read and written at once.
const PIECE_BYTES: u64 = MIB;
/// Of a hole.
const HOLE_BYTES_MAX: u64 = GIB;

impl File {
    /// Copies up to `bytes` bytes from `offset` on to `to_offset` of `to`, and says how many: fewer at the end of this
    /// file, where data ends or a hole, and at 16 MiB of data or 1 GiB of a hole. Holes are holes in the copy.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for ranges of one file that overlap. As [`File::read`] and [`File::write`], when nothing in
    /// front of the error was copied; something behind it may have been.
    pub async fn copy(
        &self,
        offset: u64,
        to: &Self,
        to_offset: u64,
        bytes: u64,
    ) -> Result<u64, Error> {
        let starts_within = |a: u64, b: u64| (b..b.saturating_add(bytes)).contains(&a);
        let overlap = starts_within(offset, to_offset) || starts_within(to_offset, offset);
        if overlap && self.ino() == to.ino() {
            return Err(Error::Invalid);
        }
        let data_bytes = bytes.min(DATA_BYTES_MAX);
        let Some(hole) = self.hole_or_enough(offset, data_bytes).await? else { return Ok(0) };
        if hole > offset {
            let bytes = data_bytes.min(hole - offset);
            return self.copy_data(offset, to, to_offset, bytes).await;
        }
        let end = match self.seek(offset, Seek::Data).await? {
            Some(data) => data,
            None => self.attr().await?.size,
        };
        let bytes = bytes.min(end.saturating_sub(offset)).min(HOLE_BYTES_MAX);
        to.zero(to_offset, bytes).await?;
        Ok(bytes)
    }

    /// All pieces are under way together.
    async fn copy_data(
        &self,
        offset: u64,
        to: &Self,
        to_offset: u64,
        bytes: u64,
    ) -> Result<u64, Error> {
        let pieces = (0..bytes).step_by(PIECE_BYTES as usize).map(|at| async move {
            let wanted = PIECE_BYTES.min(bytes - at);
            let data = self.read(offset + at, wanted).await?;
            let found = bytes_in(&data);
            to.write(to_offset.saturating_add(at), data).await?;
            Ok::<_, Error>((found, found == wanted))
        });
        let mut copied = 0;
        for piece in join_all(pieces).await {
            match piece {
                Ok((found, is_whole)) => {
                    copied += found;
                    if !is_whole {
                        break;
                    }
                }
                Err(error) if copied == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(copied)
    }
}
