//! Rows: the unit in which levels with parity work, 4 KiB of each chunk, also where the array's blocks are smaller.
//!
//! The journal records rows, parity is computed by rows, and what is lost or left out is a row. On arrays with blocks of 512
//! bytes a smaller read is cut out of rows, and a smaller write is laid over the row that is there, under the stripe's lock, and
//! recorded with it. So what the drive may tear are blocks, each old or new, and nobody else's.
//!
//! Costs nothing where requests are whole rows.

use crate::array::MemberSet;
use crate::engine::Engine;
use crate::update::Patch;
use levada_base::buf::bytes_in;
use levada_base::units::{BLOCK_BYTES, round_down, round_up};
use levada_base::{Buf, BufMut, IoVecMut};
use levada_device::{BlockError, check_range};
use std::ops::Range;
use std::rc::Rc;

/// Bytes of a row in one chunk.
pub(crate) const ROW_BYTES: u64 = BLOCK_BYTES;

/// The rows that a range touches.
fn rows_of(range: &Range<u64>) -> Range<u64> {
    round_down(range.start, ROW_BYTES)..round_up(range.end, ROW_BYTES)
}

impl Engine {
    /// Whether requests may be smaller than rows, and rows matter.
    pub fn has_parts_of_rows(&self) -> bool {
        self.info.block_bytes < ROW_BYTES && self.layout.level.has_parity()
    }

    /// The least that is read, recomputed or written at once.
    pub fn least_bytes(&self) -> u64 {
        if self.layout.level.has_parity() { ROW_BYTES } else { self.info.block_bytes }
    }

    /// Whether a read must be made of rows first.
    pub fn reads_parts_of_rows(&self, at: u64, into: &IoVecMut) -> bool {
        let is_whole = |bytes: u64| bytes.is_multiple_of(ROW_BYTES);
        self.has_parts_of_rows()
            && !(is_whole(at) && into.iter().all(|part| is_whole(part.len() as u64)))
    }

    /// Reads the rows that a range touches, and cuts it out of them.
    pub async fn read_of_rows(
        self: &Rc<Self>,
        at: u64,
        mut into: IoVecMut,
        avoid: MemberSet,
        from_holders: bool,
    ) -> Result<IoVecMut, BlockError> {
        let bytes = bytes_in(&into);
        check_range(&self.info, at, bytes)?;
        let rows = rows_of(&(at..at + bytes));
        let whole = BufMut::for_overwrite((rows.end - rows.start) as usize).into_vec();
        let whole = match from_holders {
            true => Box::pin(self.read_from_holders(rows.start, whole, avoid)).await?,
            false => Box::pin(self.read(rows.start, whole, avoid)).await?,
        };
        let mut from = (at - rows.start) as usize;
        for part in &mut into {
            let bytes = part.len();
            part.copy_from_slice(&whole[0][from..from + bytes]);
            from += bytes;
        }
        Ok(into)
    }

    /// Patches of a stripe, of which later ones win, as whole rows. The caller holds the stripe's lock.
    pub async fn in_rows(
        &self,
        stripe: u64,
        patches: Vec<Patch>,
    ) -> Result<Vec<Patch>, BlockError> {
        let range = |patch: &Patch| patch.at..patch.at + patch.bytes.len() as u64;
        let is_whole = |patch: &Patch| rows_of(&range(patch)) == range(patch);
        if patches.iter().all(is_whole) {
            return Ok(patches);
        }
        let mut whole: Vec<Patch> = Vec::new();
        for patch in patches {
            let (range, rows) = (range(&patch), rows_of(&range(&patch)));
            let mut bytes = BufMut::for_overwrite((rows.end - rows.start) as usize);
            for row in [rows.start, rows.end - ROW_BYTES] {
                if row < range.start || row + ROW_BYTES > range.end {
                    let at = (row - rows.start) as usize;
                    let held = self.row(stripe, row, &whole).await?;
                    bytes[at..at + ROW_BYTES as usize].copy_from_slice(&held);
                }
            }
            bytes[(range.start - rows.start) as usize..][..patch.bytes.len()]
                .copy_from_slice(&patch.bytes);
            whole.push(Patch { at: rows.start, bytes: bytes.freeze() });
        }
        Ok(whole)
    }

    /// What the row at this offset of a stripe's data holds, `laid_over` it included.
    async fn row(&self, stripe: u64, row: u64, laid_over: &[Patch]) -> Result<Buf, BlockError> {
        let covers =
            |patch: &&Patch| (patch.at..patch.at + patch.bytes.len() as u64).contains(&row);
        if let Some(patch) = laid_over.iter().rev().find(covers) {
            return Ok(patch.bytes.slice((row - patch.at) as usize, ROW_BYTES as usize));
        }
        let at = stripe * self.layout.stripe_bytes() + row;
        self.check_not_lost(at, ROW_BYTES)?;
        let chunk_bytes = self.layout.chunk_bytes;
        let (chunk, within) = ((row / chunk_bytes) as usize, row % chunk_bytes);
        let place = self.layout.place(stripe, chunk);
        if let Some(member) = self.holder(place, MemberSet::NONE) {
            let into = BufMut::for_overwrite(ROW_BYTES as usize).into_vec();
            let read = self.member_read(&member, self.member_offset(place.slot, within), into);
            if let Ok(mut parts) = read.await
                && let Some(bytes) = parts.pop()
            {
                return Ok(bytes.freeze());
            }
        }
        let mut bytes = BufMut::for_overwrite(ROW_BYTES as usize);
        let within = within..within + ROW_BYTES;
        self.reconstruct(stripe, chunk, within, MemberSet::NONE, 0, &mut bytes).await?;
        Ok(bytes.freeze())
    }
}
