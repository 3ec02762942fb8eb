//! The device trait: small, because the simulator and every wrapper implement it too.

use crate::BlockError;
use levada_base::lent::{bytes_lent, put_all};
use levada_base::{BufMut, Epoch, IoVec, IoVecMut, LentVec};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;

/// An operation in flight. Dropping it gives up the answer, not the effect: what was asked may
/// still happen, as with real hardware.
pub type IoFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, BlockError>> + 'a>>;

/// A read into lent memory that is under way ([`Device::read_lent`]).
pub type LentFuture<'a> = Pin<Box<dyn Future<Output = bool> + 'a>>;

/// When a write may be acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// Accepted; survives power loss only after a later [`Device::flush`].
    Volatile,
    /// Survives power loss (force unit access).
    Fua,
}

/// What a device is. Fixed while it is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// For messages to people: a path, `ram`, an array's name.
    pub name: String,
    pub capacity_bytes: u64,
    /// Offsets and lengths are multiples of this.
    pub block_bytes: u64,
    /// A write of this many aligned bytes is never torn by power loss.
    pub atomic_write_bytes: u64,
    /// Larger requests are split by the device itself; smaller ones are not faster.
    pub io_bytes_best: u64,
}

/// A device's own account of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Health {
    pub read_errors: u64,
    pub write_errors: u64,
    /// Bytes moved since open.
    pub bytes_read: u64,
    pub bytes_written: u64,
    /// False when the device asks to be replaced.
    pub failing: bool,
}

/// Who can tell from a few blocks of a device whether it is still what its owner has there, and which owner was the last to write.
#[derive(Clone)]
pub struct Witness {
    /// Where the blocks are, of 4 KiB each. One that is damaged says nothing; of several the latest owner counts.
    pub blocks: Vec<u64>,
    /// The epoch of the last owner, by one of them. `None`: it is not what this owner has there.
    pub owner: Rc<OwnerOf>,
    /// This owner is the last to have written them, so that an earlier one there is of another device, or of a copy.
    pub is_there: bool,
}

/// What a block tells of the last owner.
type OwnerOf = dyn Fn(&[u8]) -> Option<Epoch>;

/// Something that stores blocks. Object-safe; used from one thread.
///
/// Offsets and lengths are in bytes and multiples of `block_bytes`. Operations in flight
/// together complete in any order; overlapping ones leave either result, block by block. A
/// write that fails may have taken effect in part.
pub trait Device {
    fn info(&self) -> &DeviceInfo;

    /// Fills `into` from `at` on and hands it back.
    fn read(&self, at: u64, into: IoVecMut) -> IoFuture<'_, IoVecMut>;

    /// Reads like [`Device::read`], for data without checksums: a device with copies hands out what two of
    /// them hold alike, or [`BlockError::Medium`] where none agree. Others just read. Whoever wraps a device
    /// must pass this on.
    fn read_agreed(&self, at: u64, into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        self.read(at, into)
    }

    /// Fills `into` from `at` on, without a copy of its own in between. `None`: not in this way; nothing begins before the future is polled, so
    /// that several devices can be asked first. `false`: it did not succeed, and then nothing is known but that `into` may hold anything. Memory
    /// that is not ours can fail as well as the device can, and be slow: so who asks reads again, into memory of his own, before he thinks ill of
    /// anybody. Nothing that is kept may be made from what lies in such memory, as its owner may change it.
    fn read_lent(&self, _at: u64, _into: LentVec) -> Option<LentFuture<'_>> {
        None
    }

    /// Writes `from` at `at`. The buffers must not change meanwhile, which `Buf` guarantees.
    fn write(&self, at: u64, from: IoVec, durability: Durability) -> IoFuture<'_, ()>;

    /// Makes every write durable that completed before this call.
    fn flush(&self) -> IoFuture<'_, ()>;

    /// Says that these bytes are no longer needed. They read as old bytes or as zeroes.
    fn discard(&self, at: u64, bytes: u64) -> IoFuture<'_, ()>;

    /// Makes these bytes read as zeroes; volatile until a flush.
    fn write_zeroes(&self, at: u64, bytes: u64) -> IoFuture<'_, ()>;

    /// Takes the device for the owner of `epoch`: from now on, requests of owners with an older
    /// epoch fail with [`BlockError::Fenced`], and so does this call if a newer one was here.
    fn fence(&self, epoch: Epoch) -> IoFuture<'_, ()>;

    /// From now on `witness` knows its bytes. A device that can be away looks at them when it is back: somebody else may have had it
    /// meanwhile, or it may be another one. Others have no use for it.
    fn recognise_by(&self, _witness: Option<Witness>) {}

    /// Other machines reach it as well: one of them may have it while this one does not.
    fn is_shared(&self) -> bool {
        false
    }

    fn health(&self) -> Health;
}

/// Checks that a request is inside a device and made of whole blocks.
///
/// # Errors
///
/// [`BlockError::OutOfRange`] or [`BlockError::Misaligned`].
pub fn check_range(info: &DeviceInfo, at: u64, bytes: u64) -> Result<(), BlockError> {
    if !at.is_multiple_of(info.block_bytes) || !bytes.is_multiple_of(info.block_bytes) {
        return Err(BlockError::Misaligned { at, bytes, block_bytes: info.block_bytes });
    }
    if at.checked_add(bytes).is_none_or(|end| end > info.capacity_bytes) {
        return Err(BlockError::OutOfRange { at, bytes, capacity_bytes: info.capacity_bytes });
    }
    Ok(())
}

/// [`Device::read_lent`] by way of memory of one's own: for devices that are there to be wrong now and then, and must be so here too.
pub(crate) fn read_lent_by_copy(
    device: &dyn Device,
    at: u64,
    into: LentVec,
) -> Option<LentFuture<'_>> {
    Some(Box::pin(async move {
        let own = BufMut::for_overwrite(bytes_lent(&into) as usize).into_vec();
        let read = device.read(at, own).await;
        if let Ok(read) = &read {
            put_all(&into, read);
        }
        read.is_ok()
    }))
}
