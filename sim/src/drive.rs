//! A simulated drive: memory, below a cache that loses power, below faults, below random delays.
//!
//! What always holds:
//! - A write takes effect at some moment between its request and its answer, also when whoever
//!   asked has given up. A FUA write may be torn between blocks until it is answered.
//! - Nothing happens after the power is cut until it is on again.

use crate::Rng;
use levada_base::reactor::{self, Group};
use levada_base::{Epoch, IoVec, IoVecMut};
use levada_device::{
    BlockError, Device, DeviceInfo, Durability, FaultDevice, Faults, Health, IoFuture, RamDevice,
    VolatileDevice,
};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

/// How often drives write back a part of their caches by themselves.
const WRITE_BACK: Duration = Duration::from_millis(20);

/// One drive of a world, with everything that can befall it.
pub struct SimDrive {
    pub name: String,
    pub enclosure: u16,
    pub faults: Faults,
    memory: Rc<RamDevice>,
    cache: Rc<VolatileDevice>,
    device: Rc<Delayed>,
}

impl SimDrive {
    #[must_use]
    pub fn new(name: &str, enclosure: u16, capacity_bytes: u64) -> Self {
        let memory = Rc::new(RamDevice::new(name, capacity_bytes));
        let cache = Rc::new(VolatileDevice::new(Rc::clone(&memory) as Rc<dyn Device>));
        let faults = Faults::none();
        let faulty = Rc::new(FaultDevice::new(Rc::clone(&cache) as Rc<dyn Device>, faults.clone()));
        let device = Rc::new(Delayed { inner: faulty, power: RefCell::new(Group::new()) });
        let drive = Self { name: name.to_owned(), enclosure, faults, memory, cache, device };
        drive.power_on();
        drive
    }

    /// What the node sees.
    #[must_use]
    pub fn device(&self) -> Rc<dyn Device> {
        Rc::clone(&self.device) as Rc<dyn Device>
    }

    /// Cuts the power and switches it on again: requests in flight are lost or land in part, as
    /// does what the cache held.
    pub async fn power_cycle(&self, rng: &mut Rng) {
        self.device.power.borrow().kill();
        self.cache.power_cut(rng.next_u64()).await.expect("memory takes writes");
        self.cache.power_on();
        self.power_on();
    }

    /// Requests in flight are lost or land in part; what the cache holds stays.
    pub fn disconnect(&self) {
        self.device.power.borrow().kill();
        self.power_on();
    }

    fn power_on(&self) {
        let power = Group::new();
        let cache = Rc::clone(&self.cache);
        reactor::spawn_in(&power, async move {
            let _ = cache.spawn_write_back(WRITE_BACK).await;
        });
        *self.device.power.borrow_mut() = power;
    }

    /// Bytes that a power cut could lose now.
    #[must_use]
    pub fn cached_bytes(&self) -> u64 {
        self.cache.cached_bytes()
    }
}

impl Drop for SimDrive {
    fn drop(&mut self) {
        // A node killed where it stood may leave circles of references behind, as a killed
        // process would; its memory is returned by the system, a drive's contents by this.
        self.device.power.borrow().kill();
        drop(self.memory.discard(0, self.memory.info().capacity_bytes));
    }
}

/// Lets every request take a while.
struct Delayed {
    inner: Rc<FaultDevice>,
    /// Tasks of requests under way.
    power: RefCell<Group>,
}

async fn delay() {
    let draw = reactor::random_u64();
    // Most requests take tens of microseconds, one in 64 some milliseconds.
    let us = if draw.is_multiple_of(64) { (draw >> 8) % 4000 } else { (draw >> 8) % 60 };
    reactor::sleep(Duration::from_micros(us)).await;
}

impl Delayed {
    /// Runs a request to its end even if the asker gives up.
    fn run<T, F>(&self, request: impl FnOnce(Rc<FaultDevice>) -> F) -> IoFuture<'_, T>
    where
        T: 'static,
        F: Future<Output = Result<T, BlockError>> + 'static,
    {
        let task = reactor::spawn_in(&self.power.borrow(), request(Rc::clone(&self.inner)));
        Box::pin(async move { task.await.unwrap_or(Err(BlockError::Gone)) })
    }
}

impl Device for Delayed {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn read(&self, at: u64, into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        self.run(move |inner| async move {
            delay().await;
            let read = inner.read(at, into).await;
            delay().await;
            read
        })
    }

    fn write(&self, at: u64, from: IoVec, durability: Durability) -> IoFuture<'_, ()> {
        self.run(move |inner| async move {
            delay().await;
            if durability == Durability::Fua
                && from.len() + from.first().map_or(0, |part| part.len()) > 4097
            {
                // Torn between blocks if the power goes now.
                inner.write(at, from.clone(), Durability::Volatile).await?;
                delay().await;
            }
            inner.write(at, from, durability).await?;
            delay().await;
            Ok(())
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        self.run(|inner| async move {
            delay().await;
            inner.flush().await?;
            delay().await;
            Ok(())
        })
    }

    fn discard(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        self.run(move |inner| async move {
            delay().await;
            inner.discard(at, bytes).await
        })
    }

    fn write_zeroes(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        self.run(move |inner| async move {
            delay().await;
            inner.write_zeroes(at, bytes).await?;
            delay().await;
            Ok(())
        })
    }

    fn fence(&self, epoch: Epoch) -> IoFuture<'_, ()> {
        self.run(move |inner| async move { inner.fence(epoch).await })
    }

    fn health(&self) -> Health {
        self.inner.health()
    }
}
