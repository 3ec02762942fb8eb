//! An array as a volume: the edges of requests that are not whole blocks.
//!
//! What always holds: whoever changes a block holds it ([`RangeLocks`]), so that the bytes of a block
//! which a request leaves alone are those of the last acknowledged write, however small its neighbours' requests are.

use crate::VolumeError;
use crate::volume::{Extent, Shape, Volume, VolumeFuture, Zeroing};
use levada_base::buf::bytes_in;
use levada_base::lent::{bytes_lent, put_all};
use levada_base::units::{BLOCK_BYTES, round_down, round_up};
use levada_base::{Buf, BufMut, IoVec, LentVec, RangeLocks};
use levada_device::{BlockError, Durability};
use levada_raid::Array;
use std::ops::Range;

/// Stripes that one question for extents goes through at most.
const STRIPES_PER_QUESTION: u64 = 1 << 16;

/// An array as a volume. Lives on one core.
pub struct ArrayVolume<A> {
    array: A,
    size_bytes: u64,
    block_bytes: u64,
    stripe_bytes: u64,
    /// Blocks that somebody changes.
    changing: RangeLocks,
}

impl<A: Array> ArrayVolume<A> {
    /// Shows `array`, which nobody else changes meanwhile.
    #[must_use]
    pub fn new(array: A) -> Self {
        let info = array.info();
        let (size_bytes, block_bytes) = (info.capacity_bytes, info.block_bytes);
        let stripe_bytes = array.geometry().stripe_bytes;
        Self { array, size_bytes, block_bytes, stripe_bytes, changing: RangeLocks::default() }
    }

    /// The bytes of whole blocks around `at..at + bytes`.
    fn blocks_around(&self, at: u64, bytes: u64) -> Range<u64> {
        round_down(at, self.block_bytes)..round_up(at + bytes, self.block_bytes)
    }

    fn check(&self, at: u64, bytes: u64) -> Result<(), VolumeError> {
        match at.checked_add(bytes).is_some_and(|end| end <= self.size_bytes) {
            true => Ok(()),
            false => Err(VolumeError::OutOfRange { at, bytes, size_bytes: self.size_bytes }),
        }
    }

    /// Reads bytes that lie inside, with what lies around them in their blocks.
    async fn read_bytes(&self, at: u64, bytes: u64) -> Result<Buf, BlockError> {
        let blocks = self.blocks_around(at, bytes);
        let read = self.read_blocks(&blocks).await?;
        Ok(read.slice((at - blocks.start) as usize, bytes as usize))
    }

    async fn read_blocks(&self, blocks: &Range<u64>) -> Result<Buf, BlockError> {
        let into = BufMut::for_overwrite((blocks.end - blocks.start) as usize).into_vec();
        let mut read = self.array.read(blocks.start, into).await?;
        Ok(read.pop().expect("a read gives back what it was given").freeze())
    }

    /// Writes `from` at `at` into `blocks`, which are held.
    async fn write_held(
        &self,
        blocks: &Range<u64>,
        at: u64,
        from: IoVec,
        durability: Durability,
    ) -> Result<(), BlockError> {
        let is_whole = at == blocks.start && at + bytes_in(&from) == blocks.end;
        // Drives take memory at multiples of a page, and pieces of whole blocks.
        let is_aligned = |part: &Buf| {
            (part.as_ptr() as usize).is_multiple_of(BLOCK_BYTES as usize)
                && (part.len() as u64).is_multiple_of(self.block_bytes)
        };
        let from = match is_whole && from.iter().all(is_aligned) {
            true => from,
            false => self.merged(blocks, at, &from).await?.into_vec(),
        };
        self.array.write(blocks.start, from, durability).await
    }

    /// What `blocks` hold once `from` is at `at`: read at the edges only.
    async fn merged(&self, blocks: &Range<u64>, at: u64, from: &IoVec) -> Result<Buf, BlockError> {
        let end = at + bytes_in(from);
        let mut merged = BufMut::for_overwrite((blocks.end - blocks.start) as usize);
        let last = blocks.end - self.block_bytes;
        let first = (at > blocks.start).then_some(blocks.start);
        let last = (end < blocks.end && first != Some(last)).then_some(last);
        for edge in first.into_iter().chain(last) {
            let old = self.read_blocks(&(edge..edge + self.block_bytes)).await?;
            merged[(edge - blocks.start) as usize..][..old.len()].copy_from_slice(&old);
        }
        let mut into = &mut merged[(at - blocks.start) as usize..];
        for part in from {
            let (head, tail) = into.split_at_mut(part.len());
            head.copy_from_slice(part);
            into = tail;
        }
        Ok(merged.freeze())
    }

    async fn zero(&self, at: u64, bytes: u64, zeroing: Zeroing) -> Result<(), BlockError> {
        let (end, blocks) = (at + bytes, self.blocks_around(at, bytes));
        let _turn = self.changing.lock(blocks.start, blocks.end).await;
        let (first, past) = (round_up(at, self.block_bytes), round_down(end, self.block_bytes));
        if first >= past {
            // Not one whole block; at most the edges of two.
            return self.zero_edges(at, bytes).await;
        }
        for (from, to) in [(at, first), (past, end)] {
            if from < to {
                self.zero_edges(from, to - from).await?;
            }
        }
        match zeroing {
            Zeroing::Free => self.zero_blocks(first, past).await,
            Zeroing::Keep => self.array.write_zeroes(first, past - first).await,
        }
    }

    /// Zeroes a few bytes within blocks that are held.
    async fn zero_edges(&self, at: u64, bytes: u64) -> Result<(), BlockError> {
        let zeroes = BufMut::zeroed(bytes as usize).freeze().into_vec();
        self.write_held(&self.blocks_around(at, bytes), at, zeroes, Durability::Volatile).await
    }

    /// The whole stripes within `from..to`, by number.
    fn stripes_within(&self, from: u64, to: u64) -> Range<u64> {
        let (first, end) = (from.div_ceil(self.stripe_bytes), to / self.stripe_bytes);
        first..end.max(first)
    }

    /// Whole stripes are given back: they read as zeroes, and neither rebuild nor scrub looks at them.
    async fn zero_blocks(&self, from: u64, to: u64) -> Result<(), BlockError> {
        let stripes = self.stripes_within(from, to);
        if stripes.is_empty() {
            return self.array.write_zeroes(from, to - from).await;
        }
        let inner = (stripes.start * self.stripe_bytes, stripes.end * self.stripe_bytes);
        for (from, to) in [(from, inner.0), (inner.1, to)] {
            if from < to {
                self.array.write_zeroes(from, to - from).await?;
            }
        }
        self.array.discard_stripes(stripes.start, stripes.end - stripes.start).await
    }

    async fn give_back(&self, at: u64, bytes: u64) -> Result<(), BlockError> {
        let stripes = self.stripes_within(at, at + bytes);
        if stripes.is_empty() {
            return Ok(());
        }
        let (from, to) = (stripes.start * self.stripe_bytes, stripes.end * self.stripe_bytes);
        let _turn = self.changing.lock(from, to).await;
        self.array.discard_stripes(stripes.start, stripes.end - stripes.start).await
    }

    fn runs(&self, at: u64, bytes: u64) -> Vec<Extent> {
        let mut runs: Vec<Extent> = Vec::new();
        let first = at / self.stripe_bytes;
        let limit = (first + STRIPES_PER_QUESTION).saturating_mul(self.stripe_bytes);
        let (mut at, end) = (at, (at + bytes).min(limit));
        while at < end {
            let stripe = at / self.stripe_bytes;
            let bytes = ((stripe + 1) * self.stripe_bytes).min(end) - at;
            let is_allocated = self.array.is_written(stripe);
            match runs.last_mut() {
                Some(last) if last.is_allocated == is_allocated => last.bytes += bytes,
                _ => runs.push(Extent { bytes, is_allocated }),
            }
            at += bytes;
        }
        runs
    }
}

impl<A: Array> Volume for ArrayVolume<A> {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn shape(&self) -> Shape {
        Shape {
            block_bytes: self.block_bytes,
            io_bytes_best: self.stripe_bytes,
            discard_bytes: self.stripe_bytes,
            is_read_only: false,
        }
    }

    fn read(&self, at: u64, bytes: u64) -> VolumeFuture<'_, IoVec> {
        Box::pin(async move {
            self.check(at, bytes)?;
            if bytes == 0 {
                return Ok(IoVec::new());
            }
            Ok(self.read_bytes(at, bytes).await?.into_vec())
        })
    }

    fn read_into(&self, at: u64, into: LentVec) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            let bytes = bytes_lent(&into);
            self.check(at, bytes)?;
            let is_whole = |bytes: u64| bytes.is_multiple_of(self.block_bytes);
            let are_blocks = is_whole(at) && into.iter().all(|part| is_whole(part.len() as u64));
            if bytes == 0 {
                return Ok(());
            }
            if are_blocks
                && let Some(reading) = self.array.read_lent(at, into.clone())
                && reading.await
            {
                return Ok(());
            }
            put_all(&into, &[self.read_bytes(at, bytes).await?]);
            Ok(())
        })
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            let bytes = bytes_in(&from);
            self.check(at, bytes)?;
            if bytes == 0 {
                return Ok(());
            }
            let blocks = self.blocks_around(at, bytes);
            let _turn = self.changing.lock(blocks.start, blocks.end).await;
            Ok(self.write_held(&blocks, at, from, durability).await?)
        })
    }

    fn flush(&self) -> VolumeFuture<'_, ()> {
        Box::pin(async move { Ok(self.array.flush().await?) })
    }

    fn discard(&self, at: u64, bytes: u64) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            self.check(at, bytes)?;
            Ok(self.give_back(at, bytes).await?)
        })
    }

    fn write_zeroes(&self, at: u64, bytes: u64, zeroing: Zeroing) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            self.check(at, bytes)?;
            match bytes {
                0 => Ok(()),
                _ => Ok(self.zero(at, bytes, zeroing).await?),
            }
        })
    }

    fn extents(&self, at: u64, bytes: u64) -> VolumeFuture<'_, Vec<Extent>> {
        Box::pin(async move {
            self.check(at, bytes)?;
            Ok(self.runs(at, bytes))
        })
    }
}

#[cfg(test)]
pub(crate) mod tests;
