//! A bay: a drive, as far as it is in, and what happens to it.

use crate::drive_volume::DriveVolume;
use crate::wear::{Wear, WearChange};
use futures_util::future::LocalBoxFuture;
use levada_device::{
    BlockError, Device, DriveModel, FaultDevice, Faults, ModelDevice, VolatileDevice,
};
use levada_export_nvmet::{Claims, Health, Open, Opened, TellHealth, Warnings};
use levada_volume::Volume;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// How often a drive writes some of its cache down by itself.
const WRITE_BACK_EVERY: Duration = Duration::from_millis(50);

/// A drive in its bay, from what it is made of upwards: media, a cache that power takes, speed, faults.
pub(crate) struct Bay {
    pub number: u32,
    pub is_in: Cell<bool>,
    cache: Option<Rc<VolatileDevice>>,
    faults: Faults,
    volume: Rc<DriveVolume>,
    wear: Rc<Cell<Wear>>,
    /// Who has reserved it: the drive knows, wherever it is.
    pub claims: Claims,
    /// Of its namespace. No other drive has it, of an enclosure of the same name neither.
    pub guid: u128,
}

impl Bay {
    pub fn new(
        (number, guid): (u32, u128),
        media: Rc<dyn Device>,
        has_cache: bool,
        model: Option<&DriveModel>,
        endurance_bytes: Option<u64>,
        claims: Claims,
    ) -> Self {
        let cache = has_cache.then(|| Rc::new(VolatileDevice::new(Rc::clone(&media))));
        let mut device = media;
        if let Some(cache) = &cache {
            // It ends with the drive.
            drop(cache.spawn_write_back(WRITE_BACK_EVERY));
            device = Rc::clone(cache) as Rc<dyn Device>;
        }
        if let Some(model) = model {
            device = Rc::new(ModelDevice::new(device, *model));
        }
        let faults = Faults::none();
        let device = Rc::new(FaultDevice::new(device, faults.clone()));
        let volume = Rc::new(DriveVolume::new(device));
        Self {
            number,
            is_in: Cell::new(true),
            cache,
            faults,
            volume,
            wear: Rc::new(Cell::new(Wear::none(endurance_bytes))),
            claims,
            guid,
        }
    }

    /// How a target opens it.
    pub fn open(&self) -> Open {
        let volume = Rc::clone(&self.volume) as Rc<dyn Volume>;
        let opened = Opened { volume, guid: self.guid.to_be_bytes() };
        Rc::new(move || -> LocalBoxFuture<'static, Option<Opened>> {
            Box::pin(std::future::ready(Some(opened.clone())))
        })
    }

    /// How a target tells its health.
    pub fn tell_health(&self) -> TellHealth {
        let (volume, wear) = (Rc::clone(&self.volume), Rc::clone(&self.wear));
        Rc::new(move || wear.get().health(volume.moved()))
    }

    pub fn health(&self) -> Health {
        self.wear.get().health(self.volume.moved())
    }

    /// What it warns of that it did not warn of before.
    pub fn wear(&self, change: WearChange) -> Warnings {
        let before = self.health().warnings;
        let written_bytes = self.volume.moved().written_bytes;
        self.wear.set(self.wear.get().after(change, written_bytes));
        self.health().warnings.difference(before)
    }

    pub fn size_bytes(&self) -> u64 {
        self.volume.size_bytes()
    }

    /// Pulled while in use: whatever is under way fails, and its power is gone with the bay's, unless that had none.
    pub async fn pull(&self, seed: u64, had_power: bool) -> Result<(), BlockError> {
        self.is_in.set(false);
        self.faults.fail();
        if had_power { self.lose_power(seed).await } else { Ok(()) }
    }

    pub fn insert(&self, has_power: bool) {
        self.is_in.set(true);
        if has_power {
            self.power_on();
        }
        self.faults.restore();
    }

    /// Every request takes so much longer.
    pub fn slow(&self, extra: Duration) {
        self.faults.slow(extra);
    }

    pub fn slowness(&self) -> Duration {
        self.faults.slowness()
    }

    /// The enclosure's power goes: a drive that was pulled has none already.
    pub async fn power_off(&self, seed: u64) -> Result<(), BlockError> {
        if self.is_in.get() { self.lose_power(seed).await } else { Ok(()) }
    }

    async fn lose_power(&self, seed: u64) -> Result<(), BlockError> {
        self.wear.set(self.wear.get().after_power_cut());
        self.claims.lose_power();
        match &self.cache {
            Some(cache) => cache.power_cut(seed ^ u64::from(self.number)).await,
            None => Ok(()),
        }
    }

    pub async fn flush(&self) -> Result<(), BlockError> {
        match &self.cache {
            Some(cache) => cache.flush().await,
            None => Ok(()),
        }
    }

    pub fn power_on(&self) {
        if !self.is_in.get() {
            return;
        }
        self.wear.set(self.wear.get().after_power_on());
        if let Some(cache) = &self.cache {
            cache.power_on();
        }
    }
}
