//! The interface between volumes and exports.

use crate::VolumeError;
use levada_base::lent::{bytes_lent, put_all};
use levada_base::{BufMut, IoVec, LentVec};
use levada_device::Durability;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;

/// A request in flight. Dropping it gives up the answer, not the effect: what was asked may still happen.
pub type VolumeFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, VolumeError>> + 'a>>;

/// What a client should know of a volume to use it well. Fixed while it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Requests of whole blocks of this size cost no reading; a power of two. Others are carried out as well.
    pub block_bytes: u64,
    /// Writes of whole multiples of this at multiples of it are the cheapest: a full stripe.
    pub io_bytes_best: u64,
    /// Discards free room in units of this; smaller ones are accepted.
    pub discard_bytes: u64,
    pub is_read_only: bool,
}

/// What becomes of the room of bytes that are made zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zeroing {
    /// It may be given back.
    Free,
    /// It stays, so that a later write needs none: where a volume cannot promise that, it writes zeroes.
    Keep,
}

/// A run of bytes of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub bytes: u64,
    /// False: nothing is stored, and the bytes read as zeroes.
    pub is_allocated: bool,
}

/// Bytes that clients read and write. Object-safe; used from one thread.
///
/// Offsets and lengths are in bytes and need not be whole blocks; lengths may be 0, which does nothing. Requests in flight
/// together complete in any order; overlapping writes leave either result, block by block, and never bytes of a request
/// that named others. A write that fails may have taken effect in part. Every request outside the volume fails with
/// [`VolumeError::OutOfRange`], and changes nothing.
pub trait Volume {
    /// Its size, which may change while it is in use.
    fn size_bytes(&self) -> u64;

    fn shape(&self) -> Shape;

    /// Reads `bytes` from `at` on; the buffers total exactly so many.
    fn read(&self, at: u64, bytes: u64) -> VolumeFuture<'_, IoVec>;

    /// Reads from `at` on into memory that somebody else lends, all of it, and may change meanwhile: nothing is concluded from what lies there.
    /// Whoever can fills it without a copy in between ([`levada_device::Device::read_lent`]).
    fn read_into(&self, at: u64, into: LentVec) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            let read = self.read(at, bytes_lent(&into)).await?;
            put_all(&into, &read);
            Ok(())
        })
    }

    /// A buffer of which a write is carried out without a copy; its contents are old and must all be overwritten. Others are as good, but may be
    /// copied.
    fn buffer(&self, bytes: usize) -> BufMut {
        BufMut::for_overwrite(bytes)
    }

    /// Writes `from` at `at`. The buffers must not change meanwhile, which `Buf` guarantees.
    fn write(&self, at: u64, from: IoVec, durability: Durability) -> VolumeFuture<'_, ()>;

    /// Makes every change durable that completed before this call, through whichever connection it came.
    fn flush(&self) -> VolumeFuture<'_, ()>;

    /// Says that these bytes are no longer needed. They read as old bytes or as zeroes.
    fn discard(&self, at: u64, bytes: u64) -> VolumeFuture<'_, ()>;

    /// Makes these bytes read as zeroes; volatile until a flush.
    fn write_zeroes(&self, at: u64, bytes: u64, zeroing: Zeroing) -> VolumeFuture<'_, ()>;

    /// What is stored from `at` on: runs that follow each other, neighbours of different kind. They cover `bytes`, or less
    /// of them but never nothing, as answering for all may cost much.
    fn extents(&self, at: u64, bytes: u64) -> VolumeFuture<'_, Vec<Extent>>;
}

/// Shared by several exports.
impl<V: Volume + ?Sized> Volume for Rc<V> {
    fn size_bytes(&self) -> u64 {
        (**self).size_bytes()
    }

    fn shape(&self) -> Shape {
        (**self).shape()
    }

    fn read(&self, at: u64, bytes: u64) -> VolumeFuture<'_, IoVec> {
        (**self).read(at, bytes)
    }

    fn read_into(&self, at: u64, into: LentVec) -> VolumeFuture<'_, ()> {
        (**self).read_into(at, into)
    }

    fn buffer(&self, bytes: usize) -> BufMut {
        (**self).buffer(bytes)
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> VolumeFuture<'_, ()> {
        (**self).write(at, from, durability)
    }

    fn flush(&self) -> VolumeFuture<'_, ()> {
        (**self).flush()
    }

    fn discard(&self, at: u64, bytes: u64) -> VolumeFuture<'_, ()> {
        (**self).discard(at, bytes)
    }

    fn write_zeroes(&self, at: u64, bytes: u64, zeroing: Zeroing) -> VolumeFuture<'_, ()> {
        (**self).write_zeroes(at, bytes, zeroing)
    }

    fn extents(&self, at: u64, bytes: u64) -> VolumeFuture<'_, Vec<Extent>> {
        (**self).extents(at, bytes)
    }
}
