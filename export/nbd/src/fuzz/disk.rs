//! Two volumes in memory, which believe nobody.

use crate::server::Exports;
use futures_util::future::LocalBoxFuture;
use levada_base::buf::joined;
use levada_base::{Buf, IoVec};
use levada_device::Durability;
use levada_volume::{Extent, Shape, Volume, VolumeError, VolumeFuture, Zeroing};
use std::cell::RefCell;
use std::future::ready;
use std::ops::Range;
use std::rc::Rc;

pub(super) const BYTES: u64 = 1 << 16;
const BLOCK_BYTES: u64 = 4096;

/// What each of its bytes is; where all of a block are zeroes it is a hole.
pub(super) struct Disk {
    pub bytes: RefCell<Vec<u8>>,
    is_read_only: bool,
}

impl Disk {
    fn new(is_read_only: bool) -> Rc<Self> {
        Rc::new(Self { bytes: RefCell::new(vec![0; BYTES as usize]), is_read_only })
    }

    fn range(at: u64, bytes: u64) -> Result<Range<usize>, VolumeError> {
        match at.checked_add(bytes) {
            Some(end) if end <= BYTES => Ok(at as usize..end as usize),
            _ => Err(VolumeError::OutOfRange { at, bytes, size_bytes: BYTES }),
        }
    }

    fn change(&self, at: u64, bytes: u64, by: impl FnOnce(&mut [u8])) -> VolumeFuture<'_, ()> {
        assert!(!self.is_read_only, "who only may read has it changed");
        let range = Self::range(at, bytes);
        Box::pin(ready(range.map(|range| by(&mut self.bytes.borrow_mut()[range]))))
    }
}

impl Volume for Disk {
    fn size_bytes(&self) -> u64 {
        BYTES
    }

    fn shape(&self) -> Shape {
        Shape {
            block_bytes: BLOCK_BYTES,
            io_bytes_best: BLOCK_BYTES,
            discard_bytes: BLOCK_BYTES,
            is_read_only: self.is_read_only,
        }
    }

    fn read(&self, at: u64, bytes: u64) -> VolumeFuture<'_, IoVec> {
        let data = Self::range(at, bytes).map(|range| Buf::copy_of(&self.bytes.borrow()[range]));
        Box::pin(ready(data.map(Buf::into_vec)))
    }

    fn write(&self, at: u64, from: IoVec, _durability: Durability) -> VolumeFuture<'_, ()> {
        let data = joined(&from);
        self.change(at, data.len() as u64, |place| place.copy_from_slice(&data))
    }

    fn flush(&self) -> VolumeFuture<'_, ()> {
        Box::pin(ready(Ok(())))
    }

    fn discard(&self, at: u64, bytes: u64) -> VolumeFuture<'_, ()> {
        self.change(at, bytes, |place| place.fill(0))
    }

    fn write_zeroes(&self, at: u64, bytes: u64, _zeroing: Zeroing) -> VolumeFuture<'_, ()> {
        self.change(at, bytes, |place| place.fill(0))
    }

    fn extents(&self, at: u64, bytes: u64) -> VolumeFuture<'_, Vec<Extent>> {
        let extents = Self::range(at, bytes).map(|range| {
            let data = self.bytes.borrow();
            let mut extents: Vec<Extent> = Vec::new();
            for block in data[range].chunks(BLOCK_BYTES as usize) {
                let is_allocated = block.iter().any(|byte| *byte != 0);
                match extents.last_mut() {
                    Some(last) if last.is_allocated == is_allocated => {
                        last.bytes += block.len() as u64;
                    }
                    _ => extents.push(Extent { bytes: block.len() as u64, is_allocated }),
                }
            }
            extents
        });
        Box::pin(ready(extents))
    }
}

/// One that may be changed, which is the default, and one that may not.
pub(super) struct Shelf {
    pub disk: Rc<Disk>,
    pub kept: Rc<Disk>,
}

pub(super) const NAMES: [&str; 2] = ["disk", "kept"];

impl Shelf {
    pub fn new() -> Rc<Self> {
        Rc::new(Self { disk: Disk::new(false), kept: Disk::new(true) })
    }

    pub fn find(&self, name: &[u8]) -> Option<&Rc<Disk>> {
        match name {
            b"" | b"disk" => Some(&self.disk),
            b"kept" => Some(&self.kept),
            _ => None,
        }
    }
}

impl Exports for Shelf {
    fn list(&self) -> LocalBoxFuture<'_, Vec<String>> {
        Box::pin(ready(NAMES.map(String::from).to_vec()))
    }

    fn open<'a>(&'a self, name: &'a str) -> LocalBoxFuture<'a, Option<Rc<dyn Volume>>> {
        let found = self.find(name.as_bytes()).map(|disk| Rc::clone(disk) as Rc<dyn Volume>);
        Box::pin(ready(found))
    }
}
