//! A thin volume: a file of the file system, whose bytes are objects of the log; or several that lie on each other, once
//! it has snapshots or is a clone.
//!
//! It takes room as it is written, and gives it back as it is discarded. Checksums, repair and striping over
//! targets are those of every file; so are quotas, and what `levada fsck` checks.
//!
//! - `layer`: a file, and what is seen through its holes. `merge`: two of them become one. `cover`: where that is so. `sparse`: what a layer needs of a file.
//!
//! What always holds: the topmost file is exactly as long as the volume, so no request moves its end.

mod cover;
mod layer;
mod merge;
mod sparse;
#[cfg(test)]
mod tests;

use crate::VolumeError;
use crate::gate::Gate;
use crate::volume::{Extent, Shape, Volume, VolumeFuture, Zeroing};
use layer::Layer;
use levada_base::IoVec;
use levada_base::buf::bytes_in;
use levada_base::reactor;
use levada_base::sync::Permit;
use levada_base::units::BLOCK_BYTES;
use levada_client::File;
use levada_device::{BlockError, Durability};
use std::cell::RefCell;
use std::rc::Rc;

pub(crate) use layer::{Below, hidden_bytes};
pub(crate) type FileLayer = Layer<File>;

/// A thin volume that is open, or a snapshot of one. Lives on one core.
pub struct ThinVolume {
    top: RefCell<Rc<FileLayer>>,
    gate: Gate,
    io_bytes_best: u64,
    is_read_only: bool,
}

impl ThinVolume {
    /// Shows `top`, whose file is `size_bytes` long, and of which `io_bytes_best` lie together.
    pub(crate) fn new(top: Rc<FileLayer>, size_bytes: u64, io_bytes_best: u64) -> Self {
        let (top, gate) = (RefCell::new(top), Gate::new(size_bytes));
        Self { top, gate, io_bytes_best, is_read_only: false }
    }

    /// Shows a layer that does not change any more.
    pub(crate) fn frozen(top: Rc<FileLayer>, size_bytes: u64, io_bytes_best: u64) -> Self {
        Self { is_read_only: true, ..Self::new(top, size_bytes, io_bytes_best) }
    }

    pub(crate) fn top(&self) -> Rc<FileLayer> {
        Rc::clone(&self.top.borrow())
    }

    /// Puts another layer in the place of the topmost one. The gate is closed.
    pub(crate) fn set_top(&self, top: Rc<FileLayer>) {
        *self.top.borrow_mut() = top;
    }

    pub(crate) fn gate(&self) -> &Gate {
        &self.gate
    }

    /// Lets a change of `bytes` in.
    async fn pass(&self, at: u64, bytes: u64) -> Result<Permit, VolumeError> {
        match self.is_read_only {
            true => Err(VolumeError::ReadOnly),
            false => self.gate.pass(at, bytes).await,
        }
    }

    /// Carries a change of the topmost layer out, which has passed the gate. Where others lie below it, to its end also when nobody
    /// waits for it any more.
    async fn change<C>(
        &self,
        turn: Permit,
        change: impl FnOnce(Rc<FileLayer>) -> C,
    ) -> Result<(), VolumeError>
    where
        C: Future<Output = Result<(), VolumeError>> + 'static,
    {
        let top = self.top();
        if top.below().is_none() {
            let _turn = turn;
            return change(top).await;
        }
        let changing = change(top);
        let changed = reactor::spawn(async move {
            let _turn = turn;
            changing.await
        });
        // None: everything ends.
        changed.await.unwrap_or(Err(BlockError::Gone.into()))
    }
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
            is_read_only: self.is_read_only,
        }
    }

    fn read(&self, at: u64, bytes: u64) -> VolumeFuture<'_, IoVec> {
        Box::pin(async move {
            self.gate.check(at, bytes)?;
            match self.top().read(at, bytes).await {
                // It was cut meanwhile.
                Err(VolumeError::OutOfRange { .. }) => {
                    let size_bytes = self.gate.size_bytes();
                    Err(VolumeError::OutOfRange { at, bytes, size_bytes })
                }
                read => read,
            }
        })
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            let bytes = bytes_in(&from);
            let turn = self.pass(at, bytes).await?;
            self.change(turn, move |top| async move {
                match bytes {
                    0 => Ok(()),
                    _ => top.write(at, from, durability).await,
                }
            })
            .await
        })
    }

    fn flush(&self) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            self.gate.check(0, 0)?;
            self.top().sync().await
        })
    }

    fn discard(&self, at: u64, bytes: u64) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            let turn = self.pass(at, bytes).await?;
            if bytes == 0 {
                return Ok(());
            }
            self.change(turn, move |top| async move { top.discard(at, bytes).await }).await
        })
    }

    fn write_zeroes(&self, at: u64, bytes: u64, zeroing: Zeroing) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            let turn = self.pass(at, bytes).await?;
            if bytes == 0 {
                return Ok(());
            }
            self.change(turn, move |top| async move {
                match zeroing {
                    Zeroing::Free => top.punch(at, bytes).await,
                    Zeroing::Keep => top.write_zeroes(at, bytes).await,
                }
            })
            .await
        })
    }

    fn extents(&self, at: u64, bytes: u64) -> VolumeFuture<'_, Vec<Extent>> {
        Box::pin(async move {
            self.gate.check(at, bytes)?;
            match bytes {
                0 => Ok(Vec::new()),
                bytes => self.top().extents(at, at + bytes).await,
            }
        })
    }
}
