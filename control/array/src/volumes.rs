//! The linear volumes of an array that is a pool: what is asked for them, what they may use, and what exports show.
//!
//! What always holds: what goes to all volumes of the array goes through one governor.

use crate::error::ArrayError;
use crate::status::PoolStatus;
use futures_util::future::LocalBoxFuture;
use levada_base::ids::Uuid;
use levada_base::sync::Semaphore;
use levada_base::units::MIB;
use levada_export_nbd::Exports;
use levada_export_nvmet::{self as nvmet, KeepError, Opened, VolumeShown};
use levada_export_vhost::Disks;
use levada_spec::Bytes;
use levada_volume::qos::{Governed, Governor, Limits, LimitsChange, Rates, Share, Terms};
use levada_volume::{
    Anyway, NewSize, OrderError, Pool, Volume, VolumeName, VolumeOrder, VolumeRow, VolumeStatus,
};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Guests send requests of up to so much; a larger one passes all the same, and is paid for afterwards. What all can be
/// guaranteed together is not known.
const TERMS: Terms = Terms { request_bytes_max: MIB, capacity: Rates::NONE };

/// See the module. Lives on the reactor of the array.
pub(crate) struct Volumes {
    pool: Pool,
    governor: Governor,
    /// Of volumes that were used since the start.
    shares: RefCell<BTreeMap<VolumeName, Share>>,
    /// Orders look first and act then, one after the other.
    turn: Rc<Semaphore>,
}

impl Volumes {
    pub fn new(pool: Pool) -> Rc<Self> {
        let (governor, shares) = (Governor::new(TERMS), RefCell::default());
        Rc::new(Self { pool, governor, shares, turn: Semaphore::new(1) })
    }

    /// Carries out what is asked for a volume.
    pub async fn carry_out(&self, order: VolumeOrder) -> Result<(), ArrayError> {
        let _turn = self.turn.acquire(1).await;
        match order {
            // A linear volume has its room from the beginning: there is nothing that could be meant.
            VolumeOrder::Create { name, size_bytes, is_meant: _ } => {
                Ok(self.pool.create(&name, size_bytes).await?)
            }
            VolumeOrder::Resize { name, size, is_meant } => {
                self.resize(&name, size, Anyway { is_meant }).await
            }
            VolumeOrder::Set { name, change } => Ok(self.set(&name, change).await?),
            VolumeOrder::Rename { from, to } => {
                self.pool.rename(&from, &to).await?;
                let share = self.shares.borrow_mut().remove(&from);
                if let Some(share) = share {
                    self.shares.borrow_mut().insert(to, share);
                }
                Ok(())
            }
            VolumeOrder::Delete { name, is_meant } => {
                self.pool.delete(&name, Anyway { is_meant }).await?;
                let share = self.shares.borrow_mut().remove(&name);
                if let Some(share) = share {
                    share.remove();
                }
                Ok(())
            }
            VolumeOrder::Snapshot { .. }
            | VolumeOrder::DeleteSnapshot { .. }
            | VolumeOrder::Clone { .. }
            | VolumeOrder::RollBack { .. } => Err(OrderError::LinearSnapshot.into()),
        }
    }

    async fn resize(
        &self,
        name: &VolumeName,
        size: NewSize,
        anyway: Anyway,
    ) -> Result<(), ArrayError> {
        let old_bytes = self.pool.size_bytes(name)?;
        let not_that = || ArrayError::NotThatSize { name: name.clone(), size: Bytes(old_bytes) };
        let bytes = size.of(old_bytes).ok_or_else(not_that)?;
        Ok(self.pool.resize(name, bytes, anyway).await?)
    }

    /// The volume, for an export.
    async fn volume(&self, name: &VolumeName) -> Result<Rc<dyn Volume>, OrderError> {
        let volume = self.pool.volume(name).await?;
        Ok(Rc::new(Governed::new(volume, self.share(name)?)))
    }

    /// What governs a volume.
    fn share(&self, name: &VolumeName) -> Result<Share, OrderError> {
        if let Some(share) = self.shares.borrow().get(name) {
            return Ok(share.clone());
        }
        let share = self.governor.share(self.pool.limits(name)?)?;
        self.shares.borrow_mut().insert(name.clone(), share.clone());
        Ok(share)
    }

    /// Changes what a volume may use: in force at once, also for requests that wait, and kept.
    async fn set(&self, name: &VolumeName, change: LimitsChange) -> Result<(), OrderError> {
        let share = match self.share(name) {
            Err(OrderError::LimitsUnknown { .. }) => {
                let new = change.of(Limits::NONE);
                let share = self.governor.share(new)?;
                self.pool.set_limits(name, &new).await?;
                self.shares.borrow_mut().insert(name.clone(), share);
                return Ok(());
            }
            share => share?,
        };
        let old = share.limits();
        share.set(change.of(old))?;
        let kept = self.pool.set_limits(name, &share.limits()).await;
        if kept.is_err() {
            // They were in force before.
            let _ = share.set(old);
        }
        kept
    }

    pub fn status(&self) -> PoolStatus {
        let status = |VolumeRow { name, size_bytes, users, id: _ }: VolumeRow| {
            let limits = self.pool.limits(&name).unwrap_or_default();
            let kind = "linear".to_owned();
            VolumeStatus { name, kind, size_bytes, users, limits, snapshots: 0, layers: 0 }
        };
        let volumes = self.pool.list(None).into_iter().map(status).collect();
        PoolStatus { problem: None, free_bytes: self.pool.free_bytes(), volumes }
    }
}

impl Volumes {
    /// The volume for an export, by the name that a client asks for.
    async fn named(&self, name: &str) -> Option<Rc<dyn Volume>> {
        let name: VolumeName = name.parse().ok()?;
        match self.volume(&name).await {
            Ok(volume) => Some(volume),
            Err(OrderError::Missing { .. }) => None,
            Err(error) => {
                tracing::warn!(%name, %error, "a volume cannot be opened");
                None
            }
        }
    }
}

/// All volumes: whose they are, an address of an array does not ask.
impl Exports for Volumes {
    fn list(&self) -> LocalBoxFuture<'_, Vec<String>> {
        let names = self.pool.list(None).into_iter().map(|volume| volume.name.to_string());
        let names = names.collect();
        Box::pin(async move { names })
    }

    fn open<'a>(&'a self, name: &'a str) -> LocalBoxFuture<'a, Option<Rc<dyn Volume>>> {
        Box::pin(self.named(name))
    }
}

/// As over NBD: all of them, those of a tenant in a directory of its name.
impl Disks for Volumes {
    fn list(&self) -> LocalBoxFuture<'_, Option<BTreeMap<String, u64>>> {
        let disk = |row: VolumeRow| (row.name.to_string(), row.size_bytes);
        let all = self.pool.list(None).into_iter().map(disk).collect();
        Box::pin(async move { Some(all) })
    }

    fn open<'a>(&'a self, name: &'a str) -> LocalBoxFuture<'a, Option<Rc<dyn Volume>>> {
        Box::pin(self.named(name))
    }
}

/// As over NBD: all of them.
impl nvmet::Volumes for Volumes {
    fn list(&self) -> LocalBoxFuture<'_, Option<Vec<VolumeShown>>> {
        let shown = |row: VolumeRow| VolumeShown {
            name: row.name.to_string(),
            size_bytes: row.size_bytes,
            guid: row.id.into_bytes(),
        };
        let all = self.pool.list(None).into_iter().map(shown).collect();
        Box::pin(async move { Some(all) })
    }

    fn open<'a>(&'a self, name: &'a str) -> LocalBoxFuture<'a, Option<Opened>> {
        Box::pin(async move {
            let volume = self.named(name).await?;
            let row = self.pool.list(None).into_iter().find(|row| row.name.to_string() == name)?;
            Some(Opened { volume, guid: row.id.into_bytes() })
        })
    }

    fn reservations(&self, guid: [u8; 16]) -> LocalBoxFuture<'_, Result<Vec<u8>, KeepError>> {
        Box::pin(async move { Ok(self.pool.reservations(Uuid::from_bytes(guid))) })
    }

    fn keep_reservations(
        &self,
        guid: [u8; 16],
        bytes: Vec<u8>,
    ) -> LocalBoxFuture<'_, Result<(), KeepError>> {
        Box::pin(async move {
            let id = Uuid::from_bytes(guid);
            self.pool.keep_reservations(id, bytes).await.map_err(KeepError::store)
        })
    }
}
