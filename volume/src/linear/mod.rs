//! Linear volumes: runs of whole stripes of an array, for who wants all of its speed.
//!
//! - `table`: which volume has which stripes; its form on the array.
//! - `space`: which stripes are free, and which of them a volume gets.
//! - `pool`: the volumes of an array, and orders for them.
//! - here: one that is open.
//!
//! What always holds: volumes share no stripe with each other nor with the table, so what one writes, and how a power
//! cut tears it, is nothing to another. Why it is built so: docs/design/0019-linear-volumes.md.

mod pool;
mod space;
mod table;

pub use pool::{Pool, PoolError};
pub use table::TableFault;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) use table::{Bounds, Table};

use crate::VolumeError;
use crate::array::ArrayVolume;
use crate::gate::Gate;
use crate::volume::{Extent, Shape, Volume, VolumeFuture, Zeroing};
use futures_util::future::join_all;
use levada_base::buf::bytes_in;
use levada_base::lent::{bytes_lent, cut_lent};
use levada_base::{IoVec, LentVec};
use levada_device::Durability;
use levada_raid::{Array, StripeRange};
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

/// Stripes that one question for extents is answered for at most, in however many pieces they lie: nothing else is done
/// meanwhile.
const STRIPES_PER_QUESTION: u64 = 1 << 16;

/// A linear volume that is open. Lives on one core.
pub struct LinearVolume {
    array: Rc<dyn Array>,
    gate: Gate,
    shape: Shape,
    pieces: RefCell<Vec<Piece>>,
}

/// A run of stripes in its place in the volume.
struct Piece {
    /// Bytes of the volume, to the end of the last stripe: the volume may end before.
    bytes: Range<u64>,
    stripes: Rc<ArrayVolume<StripeRange>>,
}

/// The part of a request that falls into one piece.
struct Part {
    stripes: Rc<ArrayVolume<StripeRange>>,
    /// Byte of the piece, and of the request.
    at: u64,
    of_request: u64,
    bytes: u64,
}

impl LinearVolume {
    /// A volume of `size_bytes` that has no stripes yet.
    fn new(array: Rc<dyn Array>, size_bytes: u64) -> Self {
        let stripe_bytes = array.geometry().stripe_bytes;
        let shape = Shape {
            block_bytes: array.info().block_bytes,
            io_bytes_best: stripe_bytes,
            discard_bytes: stripe_bytes,
            is_read_only: false,
        };
        Self { array, gate: Gate::new(size_bytes), shape, pieces: RefCell::default() }
    }

    fn gate(&self) -> &Gate {
        &self.gate
    }

    /// Puts these stripes behind those that it has.
    fn extend(&self, stripes: StripeRange) {
        let stripes = Rc::new(ArrayVolume::new(stripes));
        let mut pieces = self.pieces.borrow_mut();
        let start = pieces.last().map_or(0, |last| last.bytes.end);
        pieces.push(Piece { bytes: start..start + stripes.size_bytes(), stripes });
    }

    /// Lets go of the stripes behind byte `end`, a multiple of a stripe. The gate is closed.
    fn cut(&self, end: u64) {
        let mut pieces = self.pieces.borrow_mut();
        pieces.retain(|piece| piece.bytes.start < end);
        if let Some(last) = pieces.last_mut() {
            last.bytes.end = last.bytes.end.min(end);
        }
    }

    /// The parts of `at..at + bytes`, which lies within the pieces.
    fn parts(&self, at: u64, bytes: u64) -> Vec<Part> {
        let pieces = self.pieces.borrow();
        let end = at + bytes;
        let first = pieces.partition_point(|piece| piece.bytes.end <= at);
        let met = pieces[first..].iter().take_while(|piece| piece.bytes.start < end);
        met.map(|piece| {
            let from = at.max(piece.bytes.start);
            Part {
                stripes: Rc::clone(&piece.stripes),
                at: from - piece.bytes.start,
                of_request: from - at,
                bytes: end.min(piece.bytes.end) - from,
            }
        })
        .collect()
    }

    /// Does the same to every part of a request, all at once. Ends when all have, also where one fails: what is still under way
    /// must not outlive the request.
    async fn in_parts<T>(
        &self,
        at: u64,
        bytes: u64,
        request: impl AsyncFn(Part) -> Result<T, VolumeError>,
    ) -> Result<Vec<T>, VolumeError> {
        let parts = self.parts(at, bytes).into_iter();
        join_all(parts.map(|part| request(part))).await.into_iter().collect()
    }
}

/// `bytes` of the buffers, which total more, from byte `at` of them on.
fn cut_out(buffers: &IoVec, at: u64, bytes: u64) -> IoVec {
    let mut cut = IoVec::new();
    let (mut before, end) = (0, at + bytes);
    for buffer in buffers {
        let behind = before + buffer.len() as u64;
        let (from, to) = (at.max(before), end.min(behind));
        if from < to {
            cut.push(buffer.slice((from - before) as usize, (to - from) as usize));
        }
        before = behind;
    }
    cut
}

/// Every request passes the gate, reads too: what lies behind it may be another tenant's a moment later.
impl Volume for LinearVolume {
    fn size_bytes(&self) -> u64 {
        self.gate.size_bytes()
    }

    fn shape(&self) -> Shape {
        self.shape
    }

    fn read(&self, at: u64, bytes: u64) -> VolumeFuture<'_, IoVec> {
        Box::pin(async move {
            let _turn = self.gate.pass(at, bytes).await?;
            let read = async |part: Part| part.stripes.read(part.at, part.bytes).await;
            Ok(self.in_parts(at, bytes, read).await?.into_iter().flatten().collect())
        })
    }

    fn read_into(&self, at: u64, into: LentVec) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            let bytes = bytes_lent(&into);
            let _turn = self.gate.pass(at, bytes).await?;
            let read = async |part: Part| {
                let into = cut_lent(&into, part.of_request, part.bytes);
                part.stripes.read_into(part.at, into).await
            };
            self.in_parts(at, bytes, read).await?;
            Ok(())
        })
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            let bytes = bytes_in(&from);
            let _turn = self.gate.pass(at, bytes).await?;
            let write = async |part: Part| {
                let data = cut_out(&from, part.of_request, part.bytes);
                part.stripes.write(part.at, data, durability).await
            };
            self.in_parts(at, bytes, write).await?;
            Ok(())
        })
    }

    fn flush(&self) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            let _turn = self.gate.pass(0, 0).await?;
            Ok(self.array.flush().await?)
        })
    }

    fn discard(&self, at: u64, bytes: u64) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            let _turn = self.gate.pass(at, bytes).await?;
            let discard = async |part: Part| part.stripes.discard(part.at, part.bytes).await;
            self.in_parts(at, bytes, discard).await?;
            Ok(())
        })
    }

    fn write_zeroes(&self, at: u64, bytes: u64, zeroing: Zeroing) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            let _turn = self.gate.pass(at, bytes).await?;
            let zero =
                async |part: Part| part.stripes.write_zeroes(part.at, part.bytes, zeroing).await;
            self.in_parts(at, bytes, zero).await?;
            Ok(())
        })
    }

    fn extents(&self, at: u64, bytes: u64) -> VolumeFuture<'_, Vec<Extent>> {
        Box::pin(async move {
            let _turn = self.gate.pass(at, bytes).await?;
            let mut told: Vec<Extent> = Vec::new();
            let mut left = STRIPES_PER_QUESTION * self.shape.io_bytes_best;
            for part in self.parts(at, bytes) {
                if left == 0 {
                    break;
                }
                let part = Part { bytes: part.bytes.min(left), ..part };
                left -= part.bytes;
                let mut covered = 0;
                for extent in part.stripes.extents(part.at, part.bytes).await? {
                    covered += extent.bytes;
                    match told.last_mut() {
                        Some(last) if last.is_allocated == extent.is_allocated => {
                            last.bytes += extent.bytes;
                        }
                        _ => told.push(extent),
                    }
                }
                // It has told as much as it does at once; what follows must not be taken for the rest.
                if covered < part.bytes {
                    break;
                }
            }
            Ok(told)
        })
    }
}

#[cfg(test)]
mod tests;
