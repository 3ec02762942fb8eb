//! Snapshots of thin volumes: taken, cloned, rolled back to, deleted.
//!
//! What always holds:
//! - A volume's name goes from one file to another in one step, so after a crash it is what it was or what was asked for.
//! - A snapshot gets its name once the volume goes on in another file.

use super::directories::ROOT;
use super::layers::{Lower, Note, Spare, close};
use super::{Catalogue, RENAME_NOREPLACE};
use crate::gate::Gate;
use crate::name::{SnapshotName, Tenant, VolumeName};
use crate::order::{Anyway, OrderError, SnapshotRow, check_rename};
use crate::thin::{FileLayer, ThinVolume};
use levada_base::ids::Ino;
use levada_client::Error;
use levada_wire::meta::MetaFault;
use std::rc::Rc;

/// Layers below that of a volume at most: what lies in the lowest is looked for in all of them.
const LAYERS_MAX: usize = 128;

/// A snapshot that there is.
struct Found {
    tenant: Ino,
    /// Where it has its name.
    directory: Ino,
    ino: Ino,
    size_bytes: u64,
    /// Under which those of its volume are kept.
    volume: u64,
}

impl Catalogue {
    /// Keeps a volume as it is now. Requests wait meanwhile: as long as a flush, and a few changes of the metadata.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn snapshot(&self, name: &SnapshotName) -> Result<(), OrderError> {
        let _turn = self.turn.acquire(1).await;
        let volume = self.opened(&name.volume).await?;
        let (tenant, ino) = self.directories.find(&name.volume).await?;
        let note = self.layers.note(ino, || format!("volume {}", name.volume)).await?;
        let id = note.volume.unwrap_or(ino.0);
        let snapshots = self.layers.made_snapshots(&self.directories, tenant, id).await?;
        if self.directories.below(snapshots, name.name()).await?.is_some() {
            return Err(OrderError::SnapshotExists { name: name.clone() });
        }
        self.check_depth(&volume.top(), &name.volume)?;

        let _quiet = volume.gate().closed().await;
        let (top, bytes) = (volume.top(), volume.gate().size_bytes());
        top.sync().await?;
        let new_note = Note { volume: Some(id), ..Note::default() };
        let lower = Lower { ino: ino.0, bytes };
        let below = (Rc::clone(&top), lower);
        let new = self.layers.make(&self.directories, tenant, bytes, new_note, below).await?;
        let frozen = Note { volume: Some(id), frozen_ns: Some(new.made_ns), ..note };
        self.layers.keep(ino, frozen).await?;
        self.limits.copy(ino, new.ino).await?;
        self.layers.keep_frozen(&self.directories, tenant, ino).await?;
        self.layers.name(&self.directories, tenant, new.ino, &name.volume, 0).await?;
        self.layers.froze(top);
        volume.set_top(new.layer);
        self.client.sync_meta().await?;
        self.client.link(ROOT, ino, snapshots, name.name().as_bytes()).await?;
        Ok(self.client.sync_meta().await?)
    }

    fn check_depth(&self, below: &FileLayer, name: &VolumeName) -> Result<(), OrderError> {
        match below.depth() + 1 > LAYERS_MAX {
            true => {
                Err(OrderError::TooManyLayers { name: name.clone(), layers_max: LAYERS_MAX })
            }
            false => Ok(()),
        }
    }

    async fn found(&self, name: &SnapshotName) -> Result<Found, OrderError> {
        let missing = || OrderError::NoSnapshot { name: name.clone() };
        let (tenant, ino) = self.directories.find(&name.volume).await?;
        let note = self.layers.note(ino, || format!("volume {}", name.volume)).await?;
        let volume = note.volume.ok_or_else(missing)?;
        let directory = self.layers.snapshots(&self.directories, tenant, volume).await?;
        let directory = directory.ok_or_else(missing)?;
        match self.client.lookup(directory, name.name().as_bytes()).await {
            Ok(attr) => {
                let (ino, size_bytes) = (attr.ino, attr.size);
                Ok(Found { tenant, directory, ino, size_bytes, volume })
            }
            Err(Error::Meta(MetaFault::NotFound)) => Err(missing()),
            Err(error) => Err(error.into()),
        }
    }

    /// The snapshots of a volume, the oldest first.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn snapshots(&self, of: &VolumeName) -> Result<Vec<SnapshotRow>, OrderError> {
        let (tenant, ino) = self.directories.find(of).await?;
        let note = self.layers.note(ino, || format!("volume {of}")).await?;
        let Some(volume) = note.volume else { return Ok(Vec::new()) };
        let directory = self.layers.snapshots(&self.directories, tenant, volume).await?;
        let Some(directory) = directory else { return Ok(Vec::new()) };
        let mut rows = Vec::new();
        for entry in self.directories.entries(directory).await? {
            let Ok(name) = SnapshotName::new(of.clone(), &entry.name) else { continue };
            let note = self.layers.note(entry.ino, || format!("snapshot {name}")).await?;
            let taken_ns = note.frozen_ns.unwrap_or(0);
            rows.push(SnapshotRow { name, size_bytes: entry.size_bytes, taken_ns });
        }
        rows.sort_by(|one, other| (one.taken_ns, &one.name).cmp(&(other.taken_ns, &other.name)));
        Ok(rows)
    }

    /// Layers on which that of a volume lies.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn layers(&self, of: &VolumeName) -> Result<usize, OrderError> {
        let (_, ino) = self.directories.find(of).await?;
        let (mut layers, mut at) = (0, ino);
        // A file that lies on itself would be damage.
        while layers <= LAYERS_MAX {
            let note = self.layers.note(at, || format!("volume {of}")).await?;
            let Some(below) = note.below else { break };
            (layers, at) = (layers + 1, Ino(below.ino));
        }
        Ok(layers)
    }

    /// A snapshot, for an export: read-only. Its requests wait for what its volume and tenant may use.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn snapshot_volume(
        &self,
        name: &SnapshotName,
    ) -> Result<crate::qos::Governed<Rc<ThinVolume>>, OrderError> {
        let _turn = self.turn.acquire(1).await;
        let found = self.found(name).await?;
        let layer = self.frozen_layer(&found, &name.volume).await?;
        let place = self.directories.find(&name.volume).await?;
        let share = self.limits.share(&name.volume, place).await?;
        let volume = ThinVolume::frozen(layer, found.size_bytes, super::IO_BYTES_BEST);
        Ok(crate::qos::Governed::new(Rc::new(volume), share))
    }

    async fn frozen_layer(
        &self,
        found: &Found,
        whose: &VolumeName,
    ) -> Result<Rc<FileLayer>, OrderError> {
        self.layers.frozen(&self.directories, found.tenant, found.ino, whose).await
    }

    /// Makes a volume that begins as a snapshot, and shares with it what it does not change.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn clone_of(&self, from: &SnapshotName, to: &VolumeName) -> Result<(), OrderError> {
        let _turn = self.turn.acquire(1).await;
        check_rename(&from.volume, to)?;
        let found = self.found(from).await?;
        let layer = self.frozen_layer(&found, &from.volume).await?;
        self.check_depth(&layer, to)?;
        let bytes = found.size_bytes;
        let below = (layer, Lower { ino: found.ino.0, bytes });
        let note = Note::default();
        let made = self.layers.make(&self.directories, found.tenant, bytes, note, below).await?;
        let named = self
            .layers
            .name(&self.directories, found.tenant, made.ino, to, RENAME_NOREPLACE)
            .await;
        close(&made.layer).await;
        if named.is_err() {
            self.layers.tidy(&self.directories, found.tenant).await?;
        }
        named?;
        Ok(self.client.sync_meta().await?)
    }

    /// Makes a volume what it was; what was written since is lost, unless another snapshot has it. Its clients see other bytes from
    /// one request to the next.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn roll_back(&self, to: &SnapshotName, anyway: Anyway) -> Result<(), OrderError> {
        let _turn = self.turn.acquire(1).await;
        let found = self.found(to).await?;
        let layer = self.frozen_layer(&found, &to.volume).await?;
        let users = self.users(&to.volume);
        if users > 0 && !anyway.is_meant {
            return Err(OrderError::InUse { name: to.volume.clone(), users });
        }
        let volume = self.opened(&to.volume).await?;
        self.check_depth(&layer, &to.volume)?;
        let _quiet = volume.gate().closed().await;
        let (old, bytes) = (volume.top(), found.size_bytes);
        let note = Note { volume: Some(found.volume), ..Note::default() };
        let below = (layer, Lower { ino: found.ino.0, bytes });
        let made = self.layers.make(&self.directories, found.tenant, bytes, note, below).await?;
        self.limits.copy(old.file().ino(), made.ino).await?;
        self.layers.name(&self.directories, found.tenant, made.ino, &to.volume, 0).await?;
        volume.set_top(made.layer);
        volume.gate().set_size_bytes(bytes);
        self.client.sync_meta().await?;
        close(&old).await;
        self.layers.tidy(&self.directories, found.tenant).await?;
        Ok(self.client.sync_meta().await?)
    }

    /// Deletes a snapshot. What only it held is free at once, unless something lies on it: then once [`Self::settle`] was there.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn delete_snapshot(&self, name: &SnapshotName) -> Result<(), OrderError> {
        let _turn = self.turn.acquire(1).await;
        let found = self.found(name).await?;
        self.client.unlink(ROOT, found.directory, name.name().as_bytes()).await?;
        self.client.sync_meta().await?;
        self.layers.forget_snapshots(&self.directories, found.tenant, found.volume).await?;
        self.layers.tidy(&self.directories, found.tenant).await?;
        Ok(self.client.sync_meta().await?)
    }

    /// Frees the room of deleted snapshots on which one file lies: that one takes over what is seen of them. Takes as long as copying
    /// that does, beside requests; goes on where it was interrupted. Says whether anything was done.
    ///
    /// # Errors
    ///
    /// [`OrderError`]; then it can be tried again.
    pub async fn settle(&self) -> Result<bool, OrderError> {
        let mut has_settled = false;
        for tenant in self.directories.tenants().await? {
            while let Some(spare) = self.spare(&tenant).await? {
                self.spared(&tenant, spare).await?;
                has_settled = true;
            }
        }
        Ok(has_settled)
    }

    async fn spare(&self, tenant: &Tenant) -> Result<Option<Spare>, OrderError> {
        let _turn = self.turn.acquire(1).await;
        let Some(directory) = self.directories.of(tenant).await? else { return Ok(None) };
        let survey = self.layers.tidy(&self.directories, directory).await?;
        Ok(survey.spares().first().copied())
    }

    /// The volume of a tenant whose topmost file this is, opened.
    async fn volume_on_top(
        &self,
        tenant: &Tenant,
        ino: Ino,
    ) -> Result<Option<Rc<ThinVolume>>, OrderError> {
        for (name, _) in self.directories.volumes_of(tenant).await? {
            if self.directories.find(&name).await?.1 == ino {
                return Ok(Some(self.opened(&name).await?));
            }
        }
        Ok(None)
    }

    async fn spared(&self, tenant: &Tenant, spare: Spare) -> Result<(), OrderError> {
        let opened = async {
            let _turn = self.turn.acquire(1).await;
            let Some(directory) = self.directories.of(tenant).await? else { return Ok(None) };
            let whose = VolumeName::new(tenant.clone(), "of-a-layer").expect("a name");
            let volume = match spare.is_below_top {
                true => self.volume_on_top(tenant, spare.on_it).await?,
                false => None,
            };
            let layer = match &volume {
                Some(volume) => volume.top(),
                None => {
                    self.layers.frozen(&self.directories, directory, spare.on_it, &whose).await?
                }
            };
            Ok::<_, OrderError>(Some((directory, layer, volume)))
        };
        let Some((directory, layer, volume)) = opened.await? else { return Ok(()) };
        match &volume {
            Some(volume) => volume.rise(&layer).await?,
            // Nobody changes it, nor its size.
            None => layer.rise(&Gate::new(u64::MAX)).await?,
        }

        let _turn = self.turn.acquire(1).await;
        // Something may have come to lie on the one or the other, or have gone.
        let survey = self.layers.survey(&self.directories, directory).await?;
        let is_still = survey.spares().iter().any(|now| now.ino == spare.ino && now.on_it == spare.on_it);
        if !is_still || layer.file().ino() != spare.on_it {
            return Ok(());
        }
        let _quiet = match &volume {
            Some(volume) => Some(volume.gate().closed().await),
            None => None,
        };
        layer.sync().await?;
        let note = self.layers.note(spare.on_it, || format!("layer {:x}", spare.on_it.0)).await?;
        let without = layer.without();
        let below = without.as_ref().map(|below| Lower {
            ino: below.layer.file().ino().0,
            bytes: below.bytes,
        });
        self.layers.keep(spare.on_it, Note { below, ..note }).await?;
        self.client.sync_meta().await?;
        layer.set_below(without);
        self.layers.tidy(&self.directories, directory).await?;
        Ok(self.client.sync_meta().await?)
    }
}
