//! Makes a device as slow as a stated drive: rate, operations per second, latency, flush.
//!
//! One server serves requests in order of arrival: each occupies it for the time its bytes need
//! at the rate, or for one operation's share of a second, whichever is longer. A request
//! completes when it has been served, but not sooner than the latency after it was issued (so
//! the latency of a drive at rest includes its transfer, as data sheets give it). Reads and
//! writes share the server.
//!
//! What always holds:
//! - Over any busy time, neither bytes nor operations exceed the model's rate.
//! - The device below sees each request at once, in order; only the answer is held back.

use crate::{Device, DeviceInfo, Durability, Health, IoFuture, LentFuture, Witness};
use levada_base::buf::bytes_in;
use levada_base::lent::bytes_lent;
use levada_base::reactor::{self, Instant};
use levada_base::{Epoch, IoVec, IoVecMut, LentVec};
use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

/// How fast a drive is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriveModel {
    /// Reads and writes together.
    pub bytes_per_s: u64,
    /// Operations of any kind.
    pub iops: u64,
    pub latency: Duration,
    /// What a flush takes, and what a FUA write takes longer. Zero: free.
    pub flush: Duration,
}

impl DriveModel {
    /// The `nvme` members of benchmarks: 400 MB/s, 20,000 IOPS, 80 us, flush free.
    #[must_use]
    pub fn nvme() -> Self {
        Self {
            bytes_per_s: 400_000_000,
            iops: 20_000,
            latency: Duration::from_micros(80),
            flush: Duration::ZERO,
        }
    }

    /// Like [`DriveModel::nvme`], with a flush of 100 us.
    #[must_use]
    pub fn nvme_flush_100us() -> Self {
        Self { flush: Duration::from_micros(100), ..Self::nvme() }
    }

    /// The `slow` members: 150 MB/s, 10,000 IOPS, 80 us, flush free.
    #[must_use]
    pub fn slow() -> Self {
        Self { bytes_per_s: 150_000_000, iops: 10_000, ..Self::nvme() }
    }

    /// How long one request occupies the server.
    fn service_ns(&self, bytes: u64) -> u64 {
        let transfer = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_s.max(1));
        let operation = 1_000_000_000 / u128::from(self.iops.max(1));
        u64::try_from(transfer.max(operation)).unwrap_or(u64::MAX)
    }
}

/// A device held to a [`DriveModel`].
pub struct ModelDevice {
    inner: Rc<dyn Device>,
    model: DriveModel,
    /// When the server will have served everything that was issued so far.
    busy_until: Cell<Instant>,
}

impl ModelDevice {
    #[must_use]
    pub fn new(inner: Rc<dyn Device>, model: DriveModel) -> Self {
        Self { inner, model, busy_until: Cell::default() }
    }

    /// Queues a request now: when it will be answered.
    fn answer_at(&self, bytes: u64) -> Instant {
        let now = reactor::now();
        let start = now.max(self.busy_until.get());
        let served = Instant(start.0.saturating_add(self.model.service_ns(bytes)));
        self.busy_until.set(served);
        served.max(now + self.model.latency)
    }

    fn hold<'a, T: 'a>(
        &self,
        answer_at: Instant,
        request: impl Future<Output = T> + 'a,
    ) -> Pin<Box<dyn Future<Output = T> + 'a>> {
        Box::pin(async move {
            let result = request.await;
            reactor::sleep_until(answer_at).await;
            result
        })
    }
}

impl Device for ModelDevice {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn read(&self, at: u64, into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        let answer_at = self.answer_at(bytes_in(&into));
        self.hold(answer_at, self.inner.read(at, into))
    }

    fn read_lent(&self, at: u64, into: LentVec) -> Option<LentFuture<'_>> {
        let bytes = bytes_lent(&into);
        let reading = self.inner.read_lent(at, into)?;
        Some(Box::pin(async move { self.hold(self.answer_at(bytes), reading).await }))
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> IoFuture<'_, ()> {
        let answer_at = self.answer_at(bytes_in(&from));
        let answer_at = match durability {
            Durability::Volatile => answer_at,
            Durability::Fua => answer_at + self.model.flush,
        };
        self.hold(answer_at, self.inner.write(at, from, durability))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        let answer_at = reactor::now() + self.model.flush;
        self.hold(answer_at, self.inner.flush())
    }

    fn discard(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        let answer_at = self.answer_at(0);
        self.hold(answer_at, self.inner.discard(at, bytes))
    }

    fn write_zeroes(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        let answer_at = self.answer_at(0);
        self.hold(answer_at, self.inner.write_zeroes(at, bytes))
    }

    fn fence(&self, epoch: Epoch) -> IoFuture<'_, ()> {
        self.inner.fence(epoch)
    }

    fn recognise_by(&self, witness: Option<Witness>) {
        self.inner.recognise_by(witness);
    }

    fn is_shared(&self) -> bool {
        self.inner.is_shared()
    }

    fn health(&self) -> Health {
        self.inner.health()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RamDevice;
    use levada_base::BufMut;
    use levada_base::reactor::Reactor;
    use levada_base::units::{KIB, MIB};

    /// Runs `count` reads of `bytes` each, all issued at once: the virtual time they take.
    fn time_of(model: DriveModel, count: u64, bytes: u64) -> Duration {
        Reactor::simulated(1).block_on(async move {
            let ram = Rc::new(RamDevice::new("ram", 64 * MIB));
            let device = Rc::new(ModelDevice::new(ram, model));
            let start = reactor::now();
            let reads: Vec<_> = (0..count)
                .map(|_| {
                    let device = Rc::clone(&device);
                    reactor::spawn(async move {
                        let into = BufMut::for_overwrite(bytes as usize).into_vec();
                        device.read(0, into).await.expect("a read");
                    })
                })
                .collect();
            for read in reads {
                read.await;
            }
            start.elapsed()
        })
    }

    #[test]
    fn a_deep_queue_gets_the_rate() {
        let model = DriveModel::nvme();
        assert_eq!(time_of(model, 2000, 4 * KIB), Duration::from_millis(100));
        assert_eq!(time_of(model, 40, 1_000 * 4096), Duration::from_nanos(409_600_000));
    }

    #[test]
    fn a_lone_request_takes_the_latency() {
        let model = DriveModel::nvme();
        assert_eq!(time_of(model, 1, 4 * KIB), Duration::from_micros(80));
        assert_eq!(time_of(model, 1, 400 * 4096), Duration::from_nanos(4_096_000));
    }

    #[test]
    fn flushes_and_fua_take_their_time() {
        Reactor::simulated(1).block_on(async {
            let ram = Rc::new(RamDevice::new("ram", MIB));
            let device = ModelDevice::new(ram, DriveModel::nvme_flush_100us());
            let start = reactor::now();
            device.flush().await.expect("a flush");
            assert_eq!(start.elapsed(), Duration::from_micros(100));
            let data = BufMut::zeroed(4096).freeze().into_vec();
            device.write(0, data, Durability::Fua).await.expect("a write");
            assert_eq!(start.elapsed(), Duration::from_micros(280));
        });
    }
}
