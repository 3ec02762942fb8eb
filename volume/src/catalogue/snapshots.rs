//! Snapshots of thin volumes: taken, cloned, rolled back to, deleted.
//!
//! What always holds:
//! - A volume's name goes from one file to another in one step, so after a crash it is what it was or what was asked for.
//! - A snapshot gets its name once the volume goes on in another file.

use super::directories::ROOT;
use super::layers::{LAYERS_MAX, Lower, New, Note, close, close_unused};
use super::{Catalogue, RENAME_NOREPLACE};
use crate::name::{SnapshotName, VolumeName};
use crate::order::{Anyway, OrderError, SnapshotRow, check_rename};
use crate::qos::Governed;
use crate::thin::{FileLayer, ThinVolume};
use levada_base::ids::Ino;
use levada_client::Error;
use levada_wire::meta::MetaFault;
use std::rc::{Rc, Weak};

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
        if let Some(snapshots) = self.layers.snapshots(&self.directories, tenant, id).await?
            && self.directories.below(snapshots, name.name()).await?.is_some()
        {
            return Err(OrderError::SnapshotExists { name: name.clone() });
        }
        self.check_depth(&volume.top(), &name.volume)?;
        let snapshots = self.layers.made_snapshots(&self.directories, tenant, id).await?;

        let _quiet = volume.gate().closed().await;
        let (top, bytes) = (volume.top(), volume.gate().size_bytes());
        top.sync().await?;
        let new_note = Note { volume: Some(id), ..Note::default() };
        let below = (Rc::clone(&top), Lower { ino: ino.0, bytes });
        let new = self.layers.make(&self.directories, tenant, bytes, new_note, below).await?;
        let frozen = Note { volume: Some(id), frozen_ns: Some(new.made_ns), ..note };
        let named = async {
            self.layers.keep(ino, frozen).await?;
            self.layers.keep_frozen(&self.directories, tenant, ino).await?;
            self.take_name(tenant, ino, &new, &name.volume).await
        };
        self.closed_unless(named.await, &new).await?;
        self.layers.froze(top);
        volume.set_top(new.layer);
        self.client.sync_meta().await?;
        self.client.link(ROOT, ino, snapshots, name.name().as_bytes()).await?;
        Ok(self.client.sync_meta().await?)
    }

    /// Gives a file the name of the volume whose topmost one was `old`, and what that may use.
    async fn take_name(
        &self,
        tenant: Ino,
        old: Ino,
        new: &New,
        name: &VolumeName,
    ) -> Result<(), OrderError> {
        self.limits.copy(old, new.ino).await?;
        self.layers.name(&self.directories, tenant, new.ino, name, 0).await
    }

    /// Closes a file that did not become what it was made for.
    async fn closed_unless(
        &self,
        done: Result<(), OrderError>,
        new: &New,
    ) -> Result<(), OrderError> {
        if done.is_err() {
            close(&new.layer).await;
        }
        done
    }

    /// Takes away what nobody needs any more. The order that made it so is carried out, whatever becomes of this: the next tries again.
    pub(super) async fn tidy(&self, tenant: Ino) {
        if let Err(error) = self.layers.tidy(&self.directories, tenant).await {
            tracing::warn!(%error, "layers of volumes that nobody needs stay");
        }
    }

    fn check_depth(&self, below: &FileLayer, name: &VolumeName) -> Result<(), OrderError> {
        match below.depth() + 1 > LAYERS_MAX {
            true => Err(OrderError::TooManyLayers { name: name.clone(), layers_max: LAYERS_MAX }),
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
            let note = match self.layers.note(entry.ino, || format!("snapshot {name}")).await {
                Err(OrderError::Client(Error::Meta(MetaFault::Stale))) => continue,
                note => note?,
            };
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
    ) -> Result<Governed<Rc<ThinVolume>>, OrderError> {
        let _turn = self.turn.acquire(1).await;
        let found = self.found(name).await?;
        let layer = self.frozen_layer(&found, &name.volume).await?;
        let place = self.directories.find(&name.volume).await?;
        let share = self.limits.share(&name.volume, place).await?;
        self.layers.close_unused().await;
        let volume = Rc::new(ThinVolume::frozen(layer, found.size_bytes, super::IO_BYTES_BEST));
        let mut shown = self.shown.borrow_mut();
        shown.retain(|_, shown| shown.strong_count() > 0);
        let key = (found.volume, name.name().to_owned());
        let shared = shown.get(&key).and_then(Weak::upgrade);
        let volume = shared.unwrap_or(volume);
        shown.insert(key, Rc::downgrade(&volume));
        Ok(Governed::new(volume, share))
    }

    async fn frozen_layer(
        &self,
        found: &Found,
        whose: &VolumeName,
    ) -> Result<Rc<FileLayer>, OrderError> {
        let whose = format!("a snapshot of {whose}");
        self.layers.frozen(&self.directories, found.tenant, found.ino, &whose).await
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
        let (directories, tenant) = (&self.directories, found.tenant);
        let named = self.layers.name(directories, tenant, made.ino, to, RENAME_NOREPLACE).await;
        close(&made.layer).await;
        if named.is_err() {
            self.tidy(tenant).await;
        }
        named?;
        self.layers.close_unused().await;
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
        let named = self.take_name(found.tenant, old.file().ino(), &made, &to.volume).await;
        self.closed_unless(named, &made).await?;
        volume.set_top(made.layer);
        volume.gate().set_size_bytes(bytes);
        self.client.sync_meta().await?;
        close_unused(old);
        self.tidy(found.tenant).await;
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
        let key = (found.volume, name.name().to_owned());
        let users = self.shown.borrow().get(&key).map_or(0, Weak::strong_count);
        if users > 0 {
            return Err(OrderError::SnapshotInUse { name: name.clone(), users });
        }
        self.client.unlink(ROOT, found.directory, name.name().as_bytes()).await?;
        self.client.sync_meta().await?;
        self.layers.forget_snapshots(&self.directories, found.tenant, found.volume).await?;
        self.tidy(found.tenant).await;
        Ok(self.client.sync_meta().await?)
    }
}
