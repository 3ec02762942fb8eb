//! The catalogue of thin volumes: a directory of the file system, in it one for each tenant.
//!
//! ```text
//! /.levada/volumes/TENANT/NAME      root's alone; a file as long as the volume
//! ```
//!
//! - `directories`: what is where. `limits`: what volumes and tenants may use. `layers`: which file lies on which.
//! - `snapshots`: what may be ordered of them. `settle`: what becomes of deleted ones.
//!
//! What always holds:
//! - A volume that has a name is whole: it is made without one, and gets it once it has its size.
//! - What an order acknowledged is durable.
//! - A volume is open here once, however many exports show it.
//!
//! After a crash nothing is left to be done: a volume without a name goes with the client that made it.

mod directories;
mod layers;
mod limits;
mod settle;
mod snapshots;

use crate::name::{Tenant, VolumeName};
use crate::order::{self, Anyway, OrderError, TenantRow, VolumeRow};
use crate::qos::{Governed, Governor, Limits, LimitsChange, Share};
use crate::thin::ThinVolume;
use crate::volume::Volume;
use directories::{Directories, ROOT, of_name};
use layers::{Layers, close, close_unused};
use levada_base::ids::Ino;
use levada_base::sync::Semaphore;
use levada_base::units::MIB;
use levada_client::{Client, Error};
use levada_wire::meta::{AttrChange, OpenMode};
use limits::KeptLimits;

pub use settle::Settled;
use siphasher::sip128::{Hasher128, SipHasher13};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::hash::Hasher;
use std::rc::{Rc, Weak};
use uuid::Uuid;

const WRITE: OpenMode = OpenMode { write: true, truncate: false };
const FILE_MODE: u32 = 0o600;
const RENAME_NOREPLACE: u32 = 1;
/// Volumes whose numbers are remembered.
const NUMBERS_MAX: usize = 1 << 16;
/// What a guest may do at once without a seam, where the layout says nothing.
const IO_BYTES_BEST: u64 = MIB;

/// The thin volumes of a file system. Lives on one core.
pub struct Catalogue {
    client: Client,
    directories: Directories,
    layers: Layers,
    limits: KeptLimits,
    open: RefCell<BTreeMap<VolumeName, Rc<ThinVolume>>>,
    /// Snapshots that are shown, by the number of their volume's and their names.
    shown: RefCell<BTreeMap<(u64, String), Weak<ThinVolume>>>,
    /// Under which snapshots of volumes are kept, by topmost file: while it is one, neither changes.
    numbers: RefCell<BTreeMap<Ino, u64>>,
    /// The volume that is merged with a deleted snapshot, so that this is not taken for a user.
    merging: RefCell<Weak<ThinVolume>>,
    /// Deleted snapshots are merged one after the other.
    settling: Rc<Semaphore>,
    /// Orders are carried out one after the other.
    turn: Rc<Semaphore>,
}

impl Catalogue {
    /// The directory of the tenants' directories.
    pub const HOME: &str = "/.levada/volumes";

    /// The catalogue of the file system that `client` is of. Nothing is made in it before there is a volume. `governor` decides whose
    /// request goes next.
    #[must_use]
    pub fn new(client: Client, governor: Governor) -> Self {
        Self {
            directories: Directories::new(client.clone()),
            layers: Layers::new(client.clone()),
            limits: KeptLimits::new(client.clone(), governor),
            client,
            open: RefCell::default(),
            shown: RefCell::default(),
            numbers: RefCell::default(),
            merging: RefCell::default(),
            settling: Semaphore::new(1),
            turn: Semaphore::new(1),
        }
    }

    /// Makes a tenant, unless it is there: it may have limits before it has volumes.
    ///
    /// # Errors
    ///
    /// What the file system says.
    pub async fn create_tenant(&self, tenant: &Tenant) -> Result<(), Error> {
        let _turn = self.turn.acquire(1).await;
        if self.directories.of(tenant).await?.is_none() {
            self.directories.made_of(tenant).await?;
            self.client.sync_meta().await?;
        }
        Ok(())
    }

    /// Makes a volume, which reads as zeroes and takes no room.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn create(
        &self,
        name: &VolumeName,
        size_bytes: u64,
        anyway: Anyway,
    ) -> Result<(), OrderError> {
        let _turn = self.turn.acquire(1).await;
        self.check_new(size_bytes, anyway).await?;
        let tenant = self.directories.made_of(&name.tenant).await?;
        let (file, attr) = self.client.create_unnamed(ROOT, tenant, FILE_MODE, WRITE, true).await?;
        let made = async {
            let change = AttrChange { size: Some(size_bytes), ..AttrChange::default() };
            self.client.set_attr(ROOT, attr.ino, change).await?;
            self.client.link(ROOT, attr.ino, tenant, name.name().as_bytes()).await?;
            self.client.sync_meta().await
        };
        let made = made.await;
        file.close().await;
        made.map_err(|error| of_name(error, name))
    }

    /// That a volume may have, or grow to, `bytes`.
    ///
    /// # Errors
    ///
    /// [`OrderError::Size`], [`OrderError::LargerThanStore`], and what the file system says.
    pub async fn check_new(&self, bytes: u64, anyway: Anyway) -> Result<(), OrderError> {
        order::check_size(bytes)?;
        let store_bytes = self.client.space().await?.total_bytes;
        match bytes > store_bytes && !anyway.is_meant {
            true => Err(OrderError::LargerThanStore { bytes, store_bytes }),
            false => Ok(()),
        }
    }

    /// All volumes, those of `tenant` if one is named, by name.
    ///
    /// # Errors
    ///
    /// What the file system says.
    pub async fn list(&self, tenant: Option<&Tenant>) -> Result<Vec<VolumeRow>, Error> {
        let tenants = match tenant {
            Some(tenant) => vec![tenant.clone()],
            None => self.directories.tenants().await?,
        };
        let mut rows = Vec::new();
        for tenant in tenants {
            for (name, top, size_bytes) in self.directories.volumes_of(&tenant).await? {
                let id = self.id(&name, top).await?;
                let open = self.open.borrow();
                let size_bytes = open.get(&name).map_or(size_bytes, |open| open.size_bytes());
                drop(open);
                let users = self.users(&name);
                rows.push(VolumeRow { name, id, size_bytes, users });
            }
        }
        rows.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(rows)
    }

    /// What a volume is called whatever its name is, also when it has snapshots, whose topmost file is `top` now.
    async fn id(&self, name: &VolumeName, top: Ino) -> Result<Uuid, Error> {
        let known = self.numbers.borrow().get(&top).copied();
        let number = match known {
            Some(number) => number,
            None => {
                // As with its first snapshot: see there.
                let note = match self.layers.note(top, || format!("volume {name}")).await {
                    Err(OrderError::Client(error)) => return Err(error),
                    note => note.unwrap_or_default(),
                };
                let number = note.volume.unwrap_or(top.0);
                let mut numbers = self.numbers.borrow_mut();
                if numbers.len() >= NUMBERS_MAX {
                    numbers.clear();
                }
                numbers.insert(top, number);
                number
            }
        };
        let mut hasher = SipHasher13::new();
        hasher.write_u64(self.client.fs_id());
        hasher.write_u64(number);
        let hash: u128 = hasher.finish128().into();
        Ok(uuid::Builder::from_custom_bytes(hash.to_be_bytes()).into_uuid())
    }

    /// All tenants that have or had volumes, or limits, by name.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn tenants(&self) -> Result<Vec<TenantRow>, OrderError> {
        let mut rows = Vec::new();
        for tenant in self.directories.tenants().await? {
            // It may have been deleted meanwhile.
            let Some(directory) = self.directories.of(&tenant).await? else { continue };
            let volumes = self.list(Some(&tenant)).await?;
            rows.push(TenantRow {
                volumes: volumes.len(),
                size_bytes: volumes.iter().fold(0, |sum, row| sum.saturating_add(row.size_bytes)),
                limits: match self.limits.tenant_limits(&tenant, directory).await {
                    Err(OrderError::LimitsUnknown { .. }) => Limits::NONE,
                    limits => limits?,
                },
                tenant,
            });
        }
        Ok(rows)
    }

    /// The volume, for an export: its requests wait for what it and its tenant may use.
    ///
    /// # Errors
    ///
    /// [`OrderError::Missing`], and what the file system says.
    pub async fn volume(&self, name: &VolumeName) -> Result<Governed<Rc<ThinVolume>>, OrderError> {
        let _turn = self.turn.acquire(1).await;
        let share = self.limits.share(name, self.directories.find(name).await?).await?;
        Ok(Governed::new(self.opened(name).await?, share))
    }

    async fn opened(&self, name: &VolumeName) -> Result<Rc<ThinVolume>, OrderError> {
        if let Some(open) = self.open.borrow().get(name) {
            return Ok(Rc::clone(open));
        }
        let (tenant, ino) = self.directories.find(name).await?;
        let (file, attr) = self.client.open(ino, WRITE).await?;
        let io_bytes_best = attr.layout.as_ref().map_or(IO_BYTES_BEST, |layout| {
            layout.stripe_unit * layout.targets.len().max(1) as u64
        });
        let whose = format!("volume {name}");
        let layer = self.layers.opened(&self.directories, tenant, file, &whose).await?;
        let volume = Rc::new(ThinVolume::new(layer, attr.size, io_bytes_best));
        self.open.borrow_mut().insert(name.clone(), Rc::clone(&volume));
        Ok(volume)
    }

    /// Gives a volume another size; exports learn of it.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn resize(
        &self,
        name: &VolumeName,
        size_bytes: u64,
        anyway: Anyway,
    ) -> Result<(), OrderError> {
        let _turn = self.turn.acquire(1).await;
        let volume = self.opened(name).await?;
        let old_bytes = volume.size_bytes();
        if size_bytes > old_bytes {
            self.check_new(size_bytes, anyway).await?;
        } else {
            order::check_size(size_bytes)?;
        }
        let _quiet = volume.gate().closed().await;
        let top = volume.top();
        if size_bytes < old_bytes {
            if !anyway.is_meant
                && let Some(data_at) = top.data(size_bytes, old_bytes).await?
            {
                return Err(OrderError::WouldCut {
                    name: name.clone(),
                    bytes: size_bytes,
                    data_at,
                });
            }
            // Before the cut: should it grow again, nothing comes back.
            let whose = format!("volume {name}");
            self.layers.cut(top.file().ino(), size_bytes, whose).await?;
            top.cut(size_bytes, old_bytes);
        }
        let change = AttrChange { size: Some(size_bytes), ..AttrChange::default() };
        self.client.set_attr(ROOT, top.file().ino(), change).await?;
        volume.gate().set_size_bytes(size_bytes);
        Ok(self.client.sync_meta().await?)
    }

    /// What a volume may use; [`Limits::NONE`] where nothing was ever set.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn limits(&self, name: &VolumeName) -> Result<Limits, OrderError> {
        let (_, ino) = self.directories.find(name).await?;
        self.limits.volume_limits(name, ino).await
    }

    /// Changes what a volume may use: in force at once, also for requests that wait, and kept.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn set_limits(
        &self,
        name: &VolumeName,
        change: LimitsChange,
    ) -> Result<(), OrderError> {
        let _turn = self.turn.acquire(1).await;
        self.limits.set_volume(name, self.directories.find(name).await?, change).await
    }

    /// What is kept of the reservations of a tenant's volume, by its identity; empty: nothing, or it is gone.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn reservations(&self, tenant: &Tenant, id: Uuid) -> Result<Vec<u8>, OrderError> {
        let _turn = self.turn.acquire(1).await;
        match self.top_of(tenant, id).await? {
            Some(ino) => Ok(self.limits.reservations(ino).await?),
            None => Ok(Vec::new()),
        }
    }

    /// Keeps this in the place of it, whatever the volume is called by then, also in snapshots' stead: it goes with the volume's topmost
    /// file. One that is gone needs none.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn keep_reservations(
        &self,
        tenant: &Tenant,
        id: Uuid,
        bytes: &[u8],
    ) -> Result<(), OrderError> {
        let _turn = self.turn.acquire(1).await;
        match self.top_of(tenant, id).await? {
            Some(ino) => Ok(self.limits.keep_reservations(ino, bytes).await?),
            None => Ok(()),
        }
    }

    /// The topmost file of the volume with this identity; `None`: it is gone. Who has the turn asks: until then no name changes.
    async fn top_of(&self, tenant: &Tenant, id: Uuid) -> Result<Option<Ino>, Error> {
        for (name, top, _) in self.directories.volumes_of(tenant).await? {
            if self.id(&name, top).await? == id {
                return Ok(Some(top));
            }
        }
        Ok(None)
    }

    /// As [`Self::set_limits`], for all volumes of a tenant together; it need not have any yet.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn set_tenant_limits(
        &self,
        tenant: &Tenant,
        change: LimitsChange,
    ) -> Result<(), OrderError> {
        let _turn = self.turn.acquire(1).await;
        let directory = self.directories.made_of(tenant).await?;
        self.limits.set_tenant(tenant, directory, change).await
    }

    /// What requests for a tenant's files wait at, within the caps that hold for its volumes; `None`: there is no such tenant. Waits for no
    /// order, which may take long.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn share_of_files(&self, tenant: &Tenant) -> Result<Option<Share>, OrderError> {
        let Some(directory) = self.directories.of(tenant).await? else { return Ok(None) };
        self.limits.share_of_files(tenant, directory).await.map(Some)
    }

    /// Closes a tenant's volumes that nobody uses now, as limits of what is stored hold for files that are opened afterwards.
    pub async fn close_unused(&self, tenant: &Tenant) {
        let _turn = self.turn.acquire(1).await;
        let mut unused = Vec::new();
        self.open.borrow_mut().retain(|name, open| {
            let is_kept = name.tenant != *tenant || Rc::strong_count(open) > 1;
            if !is_kept {
                unused.push(Rc::clone(open));
            }
            is_kept
        });
        for volume in unused {
            close(&volume.top()).await;
        }
    }

    /// Forgets a tenant that has no volumes, and what it may use.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn delete_tenant(&self, tenant: &Tenant) -> Result<(), OrderError> {
        let _turn = self.turn.acquire(1).await;
        self.directories.remove(tenant).await?;
        self.limits.tenant_removed(tenant);
        Ok(self.client.sync_meta().await?)
    }

    /// Gives a volume another name; who uses it goes on.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn rename(&self, from: &VolumeName, to: &VolumeName) -> Result<(), OrderError> {
        let _turn = self.turn.acquire(1).await;
        order::check_rename(from, to)?;
        let (tenant, _) = self.directories.find(from).await?;
        let (old, new) = (from.name().as_bytes(), to.name().as_bytes());
        let renamed = self.client.rename(ROOT, (tenant, old), (tenant, new), RENAME_NOREPLACE);
        renamed.await.map_err(|error| of_name(error, to))?;
        let open = self.open.borrow_mut().remove(from);
        if let Some(open) = open {
            self.open.borrow_mut().insert(to.clone(), open);
        }
        self.limits.renamed(from, to);
        Ok(self.client.sync_meta().await?)
    }

    /// Deletes a volume; its room is free at once.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn delete(&self, name: &VolumeName, anyway: Anyway) -> Result<(), OrderError> {
        let _turn = self.turn.acquire(1).await;
        let (tenant, _) = self.directories.find(name).await?;
        let users = self.users(name);
        if users > 0 && !anyway.is_meant {
            return Err(OrderError::InUse { name: name.clone(), users });
        }
        let snapshots = self.snapshots(name).await?.len();
        if snapshots > 0 {
            return Err(OrderError::HasSnapshots { name: name.clone(), snapshots });
        }
        self.client.unlink(ROOT, tenant, name.name().as_bytes()).await?;
        let open = self.open.borrow_mut().remove(name);
        if let Some(open) = open {
            open.gate().set_gone();
            let top = open.top();
            // Whoever still holds on to it needs nothing below.
            if let Some(below) = top.below() {
                top.set_below(None);
                (*below.hidden).clone().close().await;
            }
            close_unused(top);
        }
        self.limits.removed(name);
        self.client.sync_meta().await?;
        self.tidy(tenant).await;
        Ok(self.client.sync_meta().await?)
    }

    /// Those who hold it besides the catalogue.
    fn users(&self, name: &VolumeName) -> usize {
        let open = self.open.borrow();
        let Some(open) = open.get(name) else { return 0 };
        let is_merging = self.merging.borrow().ptr_eq(&Rc::downgrade(open));
        Rc::strong_count(open).saturating_sub(1 + usize::from(is_merging))
    }

    /// Makes everything durable and takes leave of the file system. Nobody may use a volume any more.
    ///
    /// # Errors
    ///
    /// What the file system says; then something that was not flushed may be lost.
    pub async fn close(&self) -> Result<(), Error> {
        let _turn = self.turn.acquire(1).await;
        let open = std::mem::take(&mut *self.open.borrow_mut());
        for volume in open.into_values() {
            close(&volume.top()).await;
        }
        self.layers.close().await;
        self.client.shutdown().await
    }
}
