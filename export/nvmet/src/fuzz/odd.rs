//! A volume of which some blocks are slow, and some cannot be used.

use super::{BLOCK_BYTES, BLOCKS};
use crate::{Open, Opened};
use levada_base::buf::bytes_in;
use levada_base::reactor;
use levada_base::{Buf, IoVec};
use levada_device::{BlockError, Durability};
use levada_volume::{Extent, Shape, Volume, VolumeError, VolumeFuture, Zeroing};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

/// A volume in memory of which some blocks are slow, and some cannot be used.
pub(super) struct Odd {
    pub bytes: RefCell<Vec<u8>>,
    /// Whose data may be written, by what they all are; `None`: anybody's.
    pub writers: Option<RefCell<BTreeSet<u8>>>,
}

impl Odd {
    pub fn new() -> Rc<Self> {
        Rc::new(Self { bytes: Self::zeroes(), writers: None })
    }

    /// One that nobody may write yet.
    pub fn guarded() -> Rc<Self> {
        Rc::new(Self { bytes: Self::zeroes(), writers: Some(RefCell::default()) })
    }

    fn zeroes() -> RefCell<Vec<u8>> {
        RefCell::new(vec![0; (BLOCKS * BLOCK_BYTES) as usize])
    }

    /// Who has written this, of which single bits may have changed, and units may have got into it.
    fn may_be_written(&self, data: &[u8]) -> bool {
        let Some(writers) = &self.writers else { return true };
        let mut counts = [0u32; 256];
        data.iter().for_each(|byte| counts[usize::from(*byte)] += 1);
        let most = counts.iter().max();
        let tag = (0..=u8::MAX).find(|tag| Some(&counts[usize::from(*tag)]) == most);
        tag.is_some_and(|tag| writers.borrow().contains(&tag))
    }

    pub async fn reach(&self, at: u64, bytes: u64) -> Result<std::ops::Range<usize>, VolumeError> {
        let size_bytes = self.size_bytes();
        let end = at.checked_add(bytes).filter(|end| *end <= size_bytes);
        let end = end.ok_or(VolumeError::OutOfRange { at, bytes, size_bytes })?;
        match at / BLOCK_BYTES % 16 {
            9 => reactor::sleep(Duration::from_millis(3)).await,
            10 => reactor::sleep(Duration::from_secs(20)).await,
            11 => return Err(VolumeError::Block(BlockError::Medium { at, bytes })),
            12 => return Err(VolumeError::NoSpace),
            _ => {}
        }
        Ok(at as usize..end as usize)
    }
}

impl Volume for Odd {
    fn size_bytes(&self) -> u64 {
        self.bytes.borrow().len() as u64
    }

    fn shape(&self) -> Shape {
        Shape { block_bytes: 4096, io_bytes_best: 65536, discard_bytes: 4096, is_read_only: false }
    }

    fn read(&self, at: u64, bytes: u64) -> VolumeFuture<'_, IoVec> {
        Box::pin(async move {
            let range = self.reach(at, bytes).await?;
            Ok(Buf::copy_of(&self.bytes.borrow()[range]).into_vec())
        })
    }

    fn write(&self, at: u64, from: IoVec, _: Durability) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            let range = self.reach(at, bytes_in(&from)).await?;
            let data: Vec<u8> = from.iter().flat_map(|part| part.to_vec()).collect();
            assert!(self.may_be_written(&data), "written without a proof by {}", data[0]);
            self.bytes.borrow_mut()[range].copy_from_slice(&data);
            Ok(())
        })
    }

    fn flush(&self) -> VolumeFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    fn discard(&self, at: u64, bytes: u64) -> VolumeFuture<'_, ()> {
        Box::pin(async move { self.reach(at, bytes).await.map(|_| ()) })
    }

    fn write_zeroes(&self, at: u64, bytes: u64, _: Zeroing) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            let range = self.reach(at, bytes).await?;
            self.bytes.borrow_mut()[range].fill(0);
            Ok(())
        })
    }

    fn extents(&self, _at: u64, bytes: u64) -> VolumeFuture<'_, Vec<Extent>> {
        Box::pin(async move { Ok(vec![Extent { bytes, is_allocated: true }]) })
    }
}

pub(super) fn opens(volume: &Rc<Odd>, guid: u8) -> Open {
    let volume = Rc::clone(volume);
    Rc::new(move || {
        let volume = Rc::clone(&volume) as Rc<dyn Volume>;
        Box::pin(async move { Some(Opened { volume, guid: [guid; 16] }) })
    })
}
