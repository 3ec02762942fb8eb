//! Deleted snapshots give their room back: each is merged with the one file that lies on it ([`FileLayer::rise`],
//! [`FileLayer::sink`]), beside requests and orders.
//!
//! What always holds: orders wait only for the steps that change which file lies on which; whatever came in between is looked at
//! anew before each.

use super::Catalogue;
use super::directories::ROOT;
use super::layers::{Lower, Note, Spare, close_unused};
use crate::gate::Gate;
use crate::name::{Tenant, VolumeName};
use crate::order::OrderError;
use crate::thin::{Below, FileLayer, ThinVolume};
use levada_base::ids::Ino;
use levada_base::sync::Permit;
use levada_base::units::MIB;
use levada_client::File;
use levada_wire::meta::AttrChange;
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

impl Catalogue {
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
        let is_cut = upper.is_cut()
            || volume.gate().size_bytes() != size
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
        // It stays the volume that it is: the lower file may have been the first one of another, of which this is a clone.
        let number = top.volume.unwrap_or(spare.on_it.0);
        let note = Note { volume: Some(number), below: lower.below, frozen_ns: None };
        self.layers.keep(spare.ino, note).await?;
        self.numbers.borrow_mut().insert(spare.ino, number);
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
        for (name, _, _) in self.directories.volumes_of(tenant).await? {
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
