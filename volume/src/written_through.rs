//! A volume whose changes are durable when they are answered.

use crate::volume::{Extent, Shape, Volume, VolumeFuture, Zeroing};
use levada_base::{IoVec, LentVec};
use levada_device::Durability;
use std::rc::Rc;

/// For clients that go on where a flush knows nothing of what was not durable before: hosts and guests of a volume do so without a word when its server
/// was killed and is there again, or another one is, and would believe that flush.
pub struct WrittenThrough(Rc<dyn Volume>);

impl WrittenThrough {
    #[must_use]
    pub fn new(volume: Rc<dyn Volume>) -> Self {
        Self(volume)
    }
}

impl Volume for WrittenThrough {
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    fn shape(&self) -> Shape {
        self.0.shape()
    }

    fn read(&self, at: u64, bytes: u64) -> VolumeFuture<'_, IoVec> {
        self.0.read(at, bytes)
    }

    fn read_into(&self, at: u64, into: LentVec) -> VolumeFuture<'_, ()> {
        self.0.read_into(at, into)
    }

    fn write(&self, at: u64, from: IoVec, _durability: Durability) -> VolumeFuture<'_, ()> {
        self.0.write(at, from, Durability::Fua)
    }

    fn flush(&self) -> VolumeFuture<'_, ()> {
        self.0.flush()
    }

    // May read as old bytes in any case.
    fn discard(&self, at: u64, bytes: u64) -> VolumeFuture<'_, ()> {
        self.0.discard(at, bytes)
    }

    fn write_zeroes(&self, at: u64, bytes: u64, zeroing: Zeroing) -> VolumeFuture<'_, ()> {
        Box::pin(async move {
            self.0.write_zeroes(at, bytes, zeroing).await?;
            self.0.flush().await
        })
    }

    fn extents(&self, at: u64, bytes: u64) -> VolumeFuture<'_, Vec<Extent>> {
        self.0.extents(at, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::Buf;
    use levada_base::reactor::Reactor;
    use std::cell::RefCell;
    use std::future::ready;

    /// Notes what it is asked for.
    #[derive(Default)]
    struct Asked(RefCell<Vec<&'static str>>);

    impl Asked {
        fn note(&self, what: &'static str) -> VolumeFuture<'static, ()> {
            self.0.borrow_mut().push(what);
            Box::pin(ready(Ok(())))
        }
    }

    impl Volume for Asked {
        fn size_bytes(&self) -> u64 {
            1 << 20
        }

        fn shape(&self) -> Shape {
            Shape {
                block_bytes: 4096,
                io_bytes_best: 4096,
                discard_bytes: 4096,
                is_read_only: false,
            }
        }

        fn read(&self, _at: u64, _bytes: u64) -> VolumeFuture<'_, IoVec> {
            Box::pin(ready(Ok(IoVec::new())))
        }

        fn write(&self, _at: u64, _from: IoVec, durability: Durability) -> VolumeFuture<'_, ()> {
            self.note(if durability == Durability::Fua { "durable write" } else { "write" })
        }

        fn flush(&self) -> VolumeFuture<'_, ()> {
            self.note("flush")
        }

        fn discard(&self, _at: u64, _bytes: u64) -> VolumeFuture<'_, ()> {
            self.note("discard")
        }

        fn write_zeroes(&self, _at: u64, _bytes: u64, _zeroing: Zeroing) -> VolumeFuture<'_, ()> {
            self.note("zeroes")
        }

        fn extents(&self, _at: u64, _bytes: u64) -> VolumeFuture<'_, Vec<Extent>> {
            Box::pin(ready(Ok(Vec::new())))
        }
    }

    #[test]
    fn changes_that_are_read_back_are_durable_when_they_are_answered() {
        Reactor::simulated(0).block_on(async {
            let below = Rc::new(Asked::default());
            let volume = WrittenThrough::new(Rc::clone(&below) as Rc<dyn Volume>);
            let block = || Buf::copy_of(&[1; 4096]).into_vec();
            volume.write(0, block(), Durability::Volatile).await.expect("written");
            volume.write_zeroes(0, 4096, Zeroing::Keep).await.expect("zeroed");
            volume.discard(0, 4096).await.expect("discarded");
            let asked = below.0.borrow();
            assert_eq!(*asked, ["durable write", "zeroes", "flush", "discard"]);
        });
    }
}
