//! Snapshots of thin volumes: taken, cloned, rolled back to, deleted.
//!
//! What always holds:
//! - A volume's name goes from one file to another in one step, so after a crash it is what it was or what was asked for.
//! - A snapshot gets its name once the volume goes on in another file.

use super::directories::ROOT;
use super::layers::{LAYERS_MAX, Lower, New, Note, Spare, close, close_unused};
use super::{Catalogue, RENAME_NOREPLACE};
use crate::gate::Gate;
use crate::name::{SnapshotName, Tenant, VolumeName};
use crate::order::{Anyway, OrderError, SnapshotRow, check_rename};
use crate::qos::Governed;
use crate::thin::{Below, FileLayer, ThinVolume};
use levada_base::ids::Ino;
use levada_base::sync::Permit;
use levada_base::units::MIB;
use levada_client::{Error, File};
use levada_wire::meta::{AttrChange, MetaFault};
use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::{Rc, Weak};

/// How often what was written meanwhile is copied before requests wait for the rest of it.
const SINKS_MAX: usize = 8;
/// Less than this may be left for when they wait.
const SUNK_AT_LAST: u64 = 4 * MIB;

/// What became of deleted snapshots on which something lies.
#[derive(Debug, Default)]
pub struct Settled {
    /// So many are merged with it.
    pub merged: usize,
    /// So many are left: something came in between, or failed.
    pub left: usize,
    /// Why the first of them that failed did.
    pub error: Option<OrderError>,
}

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

    /// Frees the room of deleted snapshots on which one file lies: the two become one. Takes as long as copying the smaller part, beside
    /// requests; goes on where it was interrupted. What cannot be done is left, and told: it may be tried again.
    pub async fn settle(&self) -> Settled {
        let _alone = self.settling.acquire(1).await;
        let (mut settled, mut tried) = (Settled::default(), BTreeSet::new());
        let tenants = match self.directories.tenants().await {
            Ok(tenants) => tenants,
            Err(error) => return Settled { error: Some(error.into()), ..settled },
        };
        for tenant in tenants {
            loop {
                let merged = match self.spare(&tenant, &tried).await {
                    Ok(None) => break,
                    Ok(Some(spare)) => {
                        tried.insert((spare.ino, spare.on_it));
                        self.merged(&tenant, spare).await
                    }
                    Err(error) => {
                        settled.error.get_or_insert(error);
                        break;
                    }
                };
                match merged {
                    Ok(true) => settled.merged += 1,
                    Ok(false) => settled.left += 1,
                    Err(error) => {
                        settled.left += 1;
                        settled.error.get_or_insert(error);
                    }
                }
            }
        }
        self.layers.close_unused().await;
        settled
    }

    /// The next that could be merged, and was not tried.
    async fn spare(
        &self,
        tenant: &Tenant,
        tried: &BTreeSet<(Ino, Ino)>,
    ) -> Result<Option<Spare>, OrderError> {
        let _turn = self.turn.acquire(1).await;
        let Some(directory) = self.directories.of(tenant).await? else { return Ok(None) };
        let survey = self.layers.tidy(&self.directories, directory).await?;
        let is_new = |spare: &Spare| !tried.contains(&(spare.ino, spare.on_it));
        Ok(survey.spares().into_iter().find(is_new))
    }

    /// The volume of a tenant whose topmost file this is, opened.
    async fn volume_on_top(
        &self,
        tenant: &Tenant,
        ino: Ino,
    ) -> Result<Option<Rc<ThinVolume>>, OrderError> {
        match self.name_of(tenant, ino).await? {
            Some(name) => Ok(Some(self.opened(&name).await?)),
            None => Ok(None),
        }
    }

    /// Merges two layers; false: something came in between.
    async fn merged(&self, tenant: &Tenant, spare: Spare) -> Result<bool, OrderError> {
        let Some(merging) = self.merging(tenant, spare).await? else { return Ok(false) };
        let merged = async {
            let size = merging.upper_bytes();
            let (up, down) = merging.upper.weigh(size).await?;
            tracing::debug!(up, down, "a deleted snapshot is merged with what lies on it");
            if up <= down {
                self.rise(&merging).await
            } else if merging.volume.is_some() {
                self.sink_top(tenant, &merging).await
            } else {
                self.sink_frozen(&merging).await
            }
        };
        let merged = merged.await;
        *self.merging.borrow_mut() = Weak::new();
        merged
    }

    async fn merging(&self, tenant: &Tenant, spare: Spare) -> Result<Option<Merging>, OrderError> {
        let _turn = self.turn.acquire(1).await;
        let Some(directory) = self.directories.of(tenant).await? else { return Ok(None) };
        let volume = match spare.is_below_top {
            true => self.volume_on_top(tenant, spare.on_it).await?,
            false => None,
        };
        if spare.is_below_top && volume.is_none() {
            // A file that is no volume's.
            return Ok(None);
        }
        let upper = match &volume {
            Some(volume) => volume.top(),
            None => {
                let whose = layer_called(spare.on_it);
                self.layers.frozen(&self.directories, directory, spare.on_it, &whose).await?
            }
        };
        let frozen_bytes = self.client.attr(spare.on_it).await?.size;
        *self.merging.borrow_mut() = volume.as_ref().map_or_else(Weak::new, Rc::downgrade);
        Ok(Some(Merging { directory, spare, upper, volume, frozen_bytes }))
    }

    /// That the two of them still lie on each other, and nothing else on the lower one.
    async fn is_still(&self, merging: &Merging) -> Result<bool, OrderError> {
        let survey = self.layers.survey(&self.directories, merging.directory).await?;
        let spare = survey.spares().into_iter().find(|spare| spare.ino == merging.spare.ino);
        let is_upper = spare.is_some_and(|spare| spare.on_it == merging.spare.on_it);
        Ok(is_upper && merging.upper.file().ino() == merging.spare.on_it)
    }

    /// As [`Self::is_still`], and that the upper one is the topmost of its volume.
    async fn is_still_top(&self, merging: &Merging) -> Result<bool, OrderError> {
        let is_top = |volume: &Rc<ThinVolume>| Rc::ptr_eq(&volume.top(), &merging.upper);
        Ok(merging.volume.as_ref().is_some_and(is_top) && self.is_still(merging).await?)
    }

    /// The upper one takes over what is seen of the lower one.
    async fn rise(&self, merging: &Merging) -> Result<bool, OrderError> {
        let (upper, spare) = (&merging.upper, merging.spare);
        match &merging.volume {
            Some(volume) => upper.rise(volume.gate()).await?,
            // Nobody changes it, nor its size.
            None => upper.rise(&Gate::new(u64::MAX)).await?,
        }
        let _turn = self.turn.acquire(1).await;
        if !self.is_still(merging).await? {
            return Ok(false);
        }
        let _quiet = merging.quiet().await;
        upper.sync().await?;
        let note = self.layers.note(spare.on_it, || layer_called(spare.on_it)).await?;
        let without = upper.without();
        let below = without
            .as_ref()
            .map(|below| Lower { ino: below.layer.file().ino().0, bytes: below.bytes });
        self.layers.keep(spare.on_it, Note { below, ..note }).await?;
        self.client.sync_meta().await?;
        upper.set_below(without);
        self.tidy(merging.directory).await;
        self.client.sync_meta().await?;
        Ok(true)
    }

    /// Makes the lower one as long as the upper one of `size` bytes, and empty behind what is seen of it. Nothing else lies on it, and
    /// orders wait.
    async fn fit(
        &self,
        merging: &Merging,
        below: &Below<File>,
        size: u64,
    ) -> Result<(), OrderError> {
        let ino = merging.spare.ino;
        let old_bytes = self.client.attr(ino).await?.size;
        self.layers.cut(ino, below.bytes, layer_called(ino)).await?;
        below.layer.cut(below.bytes, old_bytes);
        for size in [below.bytes, size.max(below.bytes)] {
            let change = AttrChange { size: Some(size), ..AttrChange::default() };
            self.client.set_attr(ROOT, ino, change).await?;
        }
        Ok(())
    }

    /// The lower one takes over what the topmost layer of a volume holds, and becomes the topmost one.
    async fn sink_top(&self, tenant: &Tenant, merging: &Merging) -> Result<bool, OrderError> {
        let Some(volume) = &merging.volume else { return Ok(false) };
        let (upper, spare) = (&merging.upper, merging.spare);
        let begun = async {
            let _turn = self.turn.acquire(1).await;
            let Some(below) = upper.below() else { return Ok(None) };
            if !self.is_still_top(merging).await? {
                return Ok(None);
            }
            let size = volume.gate().size_bytes();
            self.fit(merging, &below, size).await?;
            upper.tell_changed();
            Ok::<_, OrderError>(Some((below, size)))
        };
        let Some((below, size)) = begun.await? else { return Ok(false) };
        let _told = TellNoMore(upper);
        upper.sink_all(size).await?;
        // What was written meanwhile, and while that was copied.
        for _ in 0..SINKS_MAX {
            let changed = upper.take_changed(size);
            upper.sink(&changed).await?;
            if bytes_of(&changed) <= SUNK_AT_LAST {
                break;
            }
        }
        below.layer.sync().await?;

        let _turn = self.turn.acquire(1).await;
        let _quiet = volume.gate().closed().await;
        let is_cut = volume.gate().size_bytes() != size
            || upper.below().is_none_or(|now| now.bytes != below.bytes);
        if is_cut || !self.is_still_top(merging).await? {
            return Ok(false);
        }
        let Some(name) = self.name_of(tenant, spare.on_it).await? else { return Ok(false) };
        let changed = upper.take_changed(size);
        if bytes_of(&changed) > SUNK_AT_LAST {
            // Guests write faster than that is copied: rather another time than that they wait.
            return Ok(false);
        }
        upper.sink(&changed).await?;
        below.layer.sync().await?;
        let top = self.layers.note(spare.on_it, || format!("volume {name}")).await?;
        let lower = self.layers.note(spare.ino, || layer_called(spare.ino)).await?;
        let note = Note { volume: top.volume, below: lower.below, frozen_ns: None };
        self.layers.keep(spare.ino, note).await?;
        self.limits.copy(spare.on_it, spare.ino).await?;
        let (directories, directory) = (&self.directories, merging.directory);
        self.layers.name_again(directories, directory, spare.ino).await?;
        self.layers.name(directories, directory, spare.ino, &name, 0).await?;
        self.layers.thawed(spare.ino);
        volume.set_top(below.layer);
        self.client.sync_meta().await?;
        close_unused(Rc::clone(upper));
        self.tidy(directory).await;
        self.client.sync_meta().await?;
        Ok(true)
    }

    /// The lower one takes over what a frozen one holds, and whatever that is for.
    async fn sink_frozen(&self, merging: &Merging) -> Result<bool, OrderError> {
        let (upper, spare) = (&merging.upper, merging.spare);
        let begun = async {
            let _turn = self.turn.acquire(1).await;
            let Some(below) = upper.below() else { return Ok(None) };
            if !self.is_still(merging).await? {
                return Ok(None);
            }
            self.fit(merging, &below, merging.frozen_bytes).await?;
            Ok::<_, OrderError>(Some(below))
        };
        let Some(below) = begun.await? else { return Ok(false) };
        upper.sink_all(merging.frozen_bytes).await?;
        below.layer.sync().await?;

        let _turn = self.turn.acquire(1).await;
        if !self.is_still(merging).await? {
            return Ok(false);
        }
        let note = self.layers.note(spare.on_it, || layer_called(spare.on_it)).await?;
        let lower = self.layers.note(spare.ino, || layer_called(spare.ino)).await?;
        self.layers.keep(spare.ino, Note { below: lower.below, ..note }).await?;
        let (directories, directory) = (&self.directories, merging.directory);
        let survey = self.layers.survey(directories, directory).await?;
        for on_it in survey.lie_on(spare.on_it) {
            let note = self.layers.note(on_it, || layer_called(on_it)).await?;
            let below = note.below.map(|below| Lower { ino: spare.ino.0, ..below });
            self.layers.keep(on_it, Note { below, ..note }).await?;
        }
        self.layers.take_snapshot_name(directories, directory, spare.on_it, spare.ino).await?;
        for layer in self.known_layers() {
            let on_upper = layer.below().filter(|below| Rc::ptr_eq(&below.layer, upper));
            if let Some(on_upper) = on_upper {
                layer.set_below(Some(Below { layer: Rc::clone(&below.layer), ..on_upper }));
            }
        }
        self.client.sync_meta().await?;
        self.tidy(directory).await;
        self.client.sync_meta().await?;
        Ok(true)
    }

    /// Every layer that is open.
    fn known_layers(&self) -> Vec<Rc<FileLayer>> {
        let tops = self.open.borrow();
        let tops = tops.values().map(|volume| volume.top());
        tops.chain(self.layers.known()).collect()
    }

    async fn name_of(&self, tenant: &Tenant, ino: Ino) -> Result<Option<VolumeName>, OrderError> {
        for (name, _) in self.directories.volumes_of(tenant).await? {
            if self.directories.find(&name).await?.1 == ino {
                return Ok(Some(name));
            }
        }
        Ok(None)
    }
}

/// A deleted snapshot and the one layer on it.
struct Merging {
    /// Of their tenant.
    directory: Ino,
    spare: Spare,
    upper: Rc<FileLayer>,
    /// Whose topmost layer the upper one is; else that is frozen.
    volume: Option<Rc<ThinVolume>>,
    /// Of the upper one's file, which stays so long if it is frozen.
    frozen_bytes: u64,
}

impl Merging {
    fn upper_bytes(&self) -> u64 {
        self.volume.as_ref().map_or(self.frozen_bytes, |volume| volume.gate().size_bytes())
    }

    /// No request is under way while this is held.
    async fn quiet(&self) -> Option<Permit> {
        match &self.volume {
            Some(volume) => Some(volume.gate().closed().await),
            None => None,
        }
    }
}

/// Ends what [`FileLayer::tell_changed`] began.
struct TellNoMore<'a>(&'a FileLayer);

impl Drop for TellNoMore<'_> {
    fn drop(&mut self) {
        self.0.tell_no_more();
    }
}

fn bytes_of(parts: &[Range<u64>]) -> u64 {
    parts.iter().map(|part| part.end - part.start).sum()
}

/// A layer as an operator may see it: by the number of its file.
fn layer_called(ino: Ino) -> String {
    format!("layer {:x}", ino.0)
}
