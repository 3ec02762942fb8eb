//! One log under test: its drives, its array, its store; and how it is opened again.

use crate::array::{DATA_CHUNKS, MEMBER_METADATA_BYTES, WIDTH, mirror, raid6};
use crate::members::{Speed, Storage, members};
use anyhow::Result;
use levada_base::Epoch;
use levada_base::ids::{ObjectId, TargetId};
use levada_base::reactor::{Group, sleep, spawn_in};
use levada_base::units::MIB;
use levada_device::Device;
use levada_kv::Store;
use levada_log::{Config, ObjectLog};
use levada_raid::{Array, ByteRange};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// How large a target is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub data_bytes: u64,
    /// Of each drive for the store's mirror.
    pub meta_bytes: u64,
    /// False: what lies behind the store's slices is dropped, and reads as zeroes.
    pub keeps_data: bool,
}

pub(crate) struct Target {
    pub array: Rc<dyn Array>,
    meta: Rc<dyn Device>,
    epoch: Cell<u64>,
    life: RefCell<Life>,
}

/// From one opening to the next.
#[derive(Clone)]
struct Life {
    group: Group,
    store: Store,
    log: ObjectLog,
}

const KV: levada_kv::Config = levada_kv::Config { log_bytes: 32 * MIB, cache_bytes: 64 << 20 };
/// Settling what was deleted takes less.
const QUIET_WITHIN: Duration = Duration::from_secs(60);

fn config() -> Config {
    Config::new(1, TargetId(1))
}

impl Target {
    /// A new log on ten drives; its store lies on a mirror over slices of the same drives, as in a cluster.
    pub async fn new(speed: Speed, sizes: Sizes) -> Result<Self> {
        let data_bytes = sizes.data_bytes / DATA_CHUNKS + MEMBER_METADATA_BYTES;
        let storage = match sizes.keeps_data {
            true => Storage::Ram,
            false => Storage::KeepsFirst(sizes.meta_bytes),
        };
        let drives = members(speed, storage, WIDTH, sizes.meta_bytes + data_bytes);
        let slices = |start: u64, bytes: u64| -> Result<Vec<Rc<dyn Device>>> {
            let slice = |drive: &Rc<dyn Device>| -> Result<Rc<dyn Device>> {
                Ok(Rc::new(ByteRange::new(&drive.info().name, Rc::clone(drive), start, bytes)?))
            };
            drives.iter().map(slice).collect()
        };
        let meta = mirror(&slices(0, sizes.meta_bytes)?).await?;
        let array = raid6(&slices(sizes.meta_bytes, data_bytes)?).await?;
        let group = Group::new();
        let (area, data) = (Rc::clone(&meta), Rc::clone(&array));
        let made = spawn_in(&group, async move {
            let store = Store::create(area, Epoch(1), KV).await?;
            let log = ObjectLog::create(data, store.clone(), config(), Epoch(1)).await?;
            anyhow::Ok((store, log))
        });
        let (store, log) = made.await.unwrap_or_else(|| Err(anyhow::anyhow!("it was killed")))?;
        let life = RefCell::new(Life { group, store, log });
        Ok(Self { array, meta, epoch: Cell::new(1), life })
    }

    pub fn log(&self) -> ObjectLog {
        self.life.borrow().log.clone()
    }

    pub fn store(&self) -> Store {
        self.life.borrow().store.clone()
    }

    /// Drops all tasks where they stand, as a kill does.
    pub fn kill(&self) {
        self.life.borrow().group.kill();
    }

    /// Opens the log that was killed.
    pub async fn open(&self) -> Result<()> {
        self.epoch.set(self.epoch.get() + 1);
        let (epoch, group) = (Epoch(self.epoch.get()), Group::new());
        let (area, data) = (Rc::clone(&self.meta), Rc::clone(&self.array));
        let opened = spawn_in(&group, async move {
            let store = Store::open(area, epoch, KV).await?;
            let log = ObjectLog::open(data, store.clone(), config(), epoch).await?;
            anyhow::Ok((store, log))
        });
        let (store, log) = opened.await.unwrap_or_else(|| Err(anyhow::anyhow!("it was killed")))?;
        *self.life.borrow_mut() = Life { group, store, log };
        Ok(())
    }

    /// Stops in good order and opens again: nothing is in memory any more.
    pub async fn reopen(&self) -> Result<()> {
        let life = self.life.borrow().clone();
        life.log.settle().await?;
        life.store.close().await?;
        life.group.kill();
        drop(life);
        self.open().await
    }

    /// Deletes objects, and waits until their space is there again and the store is at rest.
    pub async fn forget(&self, objects: impl Iterator<Item = ObjectId>) -> Result<()> {
        let log = self.log();
        for object in objects {
            log.delete(object).await?;
        }
        log.settle().await?;
        self.rest().await
    }

    /// Waits until the store carries nothing into its checkpoint any more.
    pub async fn rest(&self) -> Result<()> {
        let (store, step) = (self.store(), Duration::from_millis(20));
        for _ in 0..QUIET_WITHIN.as_millis() / step.as_millis() {
            let usage = store.usage();
            if usage.log_bytes_used < usage.log_bytes_max / 2 {
                return Ok(());
            }
            sleep(step).await;
        }
        anyhow::bail!("the store did not come to rest: {:?}", store.usage())
    }
}
