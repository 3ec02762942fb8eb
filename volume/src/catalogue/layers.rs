//! The files that volumes are made of: which lies on which.
//!
//! ```text
//! TENANT/NAME                      the topmost file of a volume
//! TENANT/.layers/INO               one that is frozen: another lies on it, or a snapshot is kept of it
//! TENANT/.layers/INO.hidden        of a file on another: a bit for each granule of that one that is not seen
//! TENANT/.layers/INO.new           one that is being made
//! TENANT/.snapshots/VOLUME/NAME    the same file as .layers/INO; VOLUME stays through renames
//! ```
//!
//! What always holds:
//! - A file says in an attribute on which it lies; nothing says what lies on it, so that there is nothing to disagree.
//! - A file of `.layers` goes when it has no snapshot's name and nothing lies on it ([`Layers::tidy`]); one whose attribute cannot be
//!   read keeps all of them.

use super::directories::{Directories, Entry, LAYERS, ROOT, SNAPSHOTS, of_name};
use super::{FILE_MODE, WRITE};
use crate::name::VolumeName;
use crate::order::OrderError;
use crate::thin::{Below, FileLayer, hidden_bytes};
use futures_util::future::LocalBoxFuture;
use levada_base::ids::Ino;
use levada_base::reactor;
use levada_client::{Client, Error, File};
use levada_wire::attr::Kind;
use levada_wire::meta::{AttrChange, MetaFault, SetXattr};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

/// The attribute that says on what a file lies, as JSON.
const NOTE: &[u8] = b"trusted.levada.layer";
/// Layers below that of a volume at most: what lies in the lowest is looked for in all of them.
pub(super) const LAYERS_MAX: usize = 128;
const HIDDEN: &str = ".hidden";
const NEW: &str = ".new";
/// Between looks whether a layer that is gone is still read.
const UNUSED_AFTER: Duration = Duration::from_millis(10);

/// What a file of a volume says of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Note {
    /// Under which snapshots of its volume are kept, and which tells that from all others; none as long as it is the file's own.
    pub volume: Option<u64>,
    /// On what it lies.
    pub below: Option<Lower>,
    /// When it was frozen: nanoseconds since 1970.
    pub frozen_ns: Option<i64>,
}

/// On what a file lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Lower {
    pub ino: u64,
    /// So many bytes of it are seen.
    pub bytes: u64,
}

/// A file that will be the topmost one of a volume.
pub(super) struct New {
    pub layer: Rc<FileLayer>,
    pub ino: Ino,
    /// When it was made: nanoseconds since 1970.
    pub made_ns: i64,
}

/// One that is frozen, that nobody wants as a snapshot, and on which one file lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spare {
    pub ino: Ino,
    pub on_it: Ino,
    /// The one on it is the topmost of a volume.
    pub is_below_top: bool,
}

/// What a tenant's directories say.
pub(super) struct Survey {
    layers: Option<Ino>,
    entries: Vec<Entry>,
    /// The topmost files of volumes.
    tops: BTreeMap<Ino, Note>,
    frozen: BTreeMap<Ino, Note>,
    /// Frozen ones that are snapshots.
    snapshots: BTreeSet<Ino>,
}

/// Files that are frozen, and how more are made.
pub(super) struct Layers {
    client: Client,
    frozen: RefCell<BTreeMap<Ino, Rc<FileLayer>>>,
}

fn named(ino: Ino, what: &str) -> String {
    format!("{:x}{what}", ino.0)
}

impl Survey {
    /// What lies on a file.
    pub(super) fn lie_on(&self, ino: Ino) -> Vec<Ino> {
        self.on(ino).collect()
    }

    fn on(&self, ino: Ino) -> impl Iterator<Item = Ino> {
        let notes = self.tops.iter().chain(&self.frozen);
        let lies_on_it = move |note: &Note| note.below.is_some_and(|below| below.ino == ino.0);
        notes.filter(move |(_, note)| lies_on_it(note)).map(|(on_it, _)| *on_it)
    }

    /// What could be spared if what lies on it held its bytes itself.
    pub(super) fn spares(&self) -> Vec<Spare> {
        let unwanted = self.frozen.keys().filter(|ino| !self.snapshots.contains(ino));
        let spares = unwanted.filter_map(|ino| {
            let mut on = self.on(*ino);
            let (on_it, None) = (on.next()?, on.next()) else { return None };
            Some(Spare { ino: *ino, on_it, is_below_top: self.tops.contains_key(&on_it) })
        });
        spares.collect()
    }

    /// Somebody wants it as a snapshot, or lies on it.
    fn has_use(&self, ino: Ino) -> bool {
        self.snapshots.contains(&ino) || self.on(ino).next().is_some()
    }
}

impl Layers {
    pub(super) fn new(client: Client) -> Self {
        Self { client, frozen: RefCell::default() }
    }

    /// What a file says of itself. `whose`: as an operator calls it.
    pub(super) async fn note(
        &self,
        ino: Ino,
        whose: impl FnOnce() -> String,
    ) -> Result<Note, OrderError> {
        match self.client.xattr(ino, NOTE).await {
            Ok(text) => serde_json::from_slice(&text)
                .map_err(|_| OrderError::LayerUnknown { whose: whose() }),
            Err(Error::Meta(MetaFault::NoAttribute)) => Ok(Note::default()),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) async fn keep(&self, ino: Ino, note: Note) -> Result<(), Error> {
        // Plain numbers.
        let text = serde_json::to_vec(&note).unwrap_or_default();
        self.client.set_xattr(ROOT, ino, NOTE, &text, SetXattr::default()).await
    }

    /// A volume becomes so small: of what its file lies on no more is seen. Durable before what is asked afterwards.
    pub(super) async fn cut(&self, ino: Ino, bytes: u64, whose: String) -> Result<(), OrderError> {
        let note = self.note(ino, || whose).await?;
        match note.below {
            Some(below) if below.bytes > bytes => {
                let below = Some(Lower { bytes, ..below });
                Ok(self.keep(ino, Note { below, ..note }).await?)
            }
            _ => Ok(()),
        }
    }

    /// A file with what lies below it; closed where that cannot be had. `tenant`: the tenant's directory. `whose`: as an operator
    /// calls it.
    pub(super) async fn opened(
        &self,
        directories: &Directories,
        tenant: Ino,
        file: File,
        whose: &str,
    ) -> Result<Rc<FileLayer>, OrderError> {
        self.opened_at(0, directories, tenant, file, whose).await
    }

    async fn opened_at(
        &self,
        depth: usize,
        directories: &Directories,
        tenant: Ino,
        file: File,
        whose: &str,
    ) -> Result<Rc<FileLayer>, OrderError> {
        let below = self.below(depth, directories, tenant, file.ino(), whose).await;
        match below {
            Ok(None) => Ok(Rc::new(FileLayer::flat(file))),
            Ok(Some(below)) => Ok(Rc::new(FileLayer::on(file, below))),
            Err(error) => {
                file.close().await;
                Err(error)
            }
        }
    }

    async fn below(
        &self,
        depth: usize,
        directories: &Directories,
        tenant: Ino,
        ino: Ino,
        whose: &str,
    ) -> Result<Option<Below<File>>, OrderError> {
        let lost = || OrderError::LayerUnknown { whose: whose.to_owned() };
        let Some(lower) = self.note(ino, || whose.to_owned()).await?.below else { return Ok(None) };
        if depth > LAYERS_MAX {
            // It lies on itself.
            return Err(lost());
        }
        let layer = self.frozen_at(depth + 1, directories, tenant, Ino(lower.ino), whose).await?;
        let layers = directories.below(tenant, LAYERS).await?.ok_or_else(lost)?;
        let hidden = directories.below(layers, &named(ino, HIDDEN)).await?;
        let (hidden, _) = self.client.open(hidden.ok_or_else(lost)?, WRITE).await?;
        Ok(Some(Below { layer, bytes: lower.bytes, hidden: Rc::new(hidden) }))
    }

    /// A file that is frozen, which may be open already. `whose`: what it is, or what lies on it.
    pub(super) async fn frozen(
        &self,
        directories: &Directories,
        tenant: Ino,
        ino: Ino,
        whose: &str,
    ) -> Result<Rc<FileLayer>, OrderError> {
        self.frozen_at(0, directories, tenant, ino, whose).await
    }

    fn frozen_at<'a>(
        &'a self,
        depth: usize,
        directories: &'a Directories,
        tenant: Ino,
        ino: Ino,
        whose: &'a str,
    ) -> LocalBoxFuture<'a, Result<Rc<FileLayer>, OrderError>> {
        Box::pin(async move {
            if let Some(layer) = self.frozen.borrow().get(&ino) {
                return Ok(Rc::clone(layer));
            }
            let (file, _) = self.client.open(ino, WRITE).await.map_err(|error| match error {
                Error::Meta(MetaFault::Stale | MetaFault::NotFound) => {
                    OrderError::LayerUnknown { whose: whose.to_owned() }
                }
                error => error.into(),
            })?;
            let layer = self.opened_at(depth, directories, tenant, file, whose).await?;
            self.frozen.borrow_mut().insert(ino, Rc::clone(&layer));
            Ok(layer)
        })
    }

    /// Closes those on which nothing lies that is open.
    pub(super) async fn close_unused(&self) {
        loop {
            let mut unused = Vec::new();
            self.frozen.borrow_mut().retain(|_, layer| {
                let is_used = Rc::strong_count(layer) > 1;
                if !is_used {
                    unused.push(Rc::clone(layer));
                }
                is_used
            });
            if unused.is_empty() {
                return;
            }
            for layer in unused {
                close(&layer).await;
            }
        }
    }

    /// The file of a volume is changed no more.
    pub(super) fn froze(&self, layer: Rc<FileLayer>) {
        self.frozen.borrow_mut().insert(layer.file().ino(), layer);
    }

    /// Makes a file of `size_bytes` that shows `layer`, the file of `note.below`. It has the name `.layers/INO.new`.
    pub(super) async fn make(
        &self,
        directories: &Directories,
        tenant: Ino,
        size_bytes: u64,
        note: Note,
        (layer, lower): (Rc<FileLayer>, Lower),
    ) -> Result<New, Error> {
        let layers = directories.made_below(tenant, LAYERS).await?;
        let (file, attr) = self.client.create_unnamed(ROOT, tenant, FILE_MODE, WRITE, true).await?;
        let ino = attr.ino;
        let made = async {
            let change = AttrChange { size: Some(size_bytes), ..AttrChange::default() };
            self.client.set_attr(ROOT, ino, change).await?;
            self.keep(ino, Note { below: Some(lower), ..note }).await?;
            let name = named(ino, HIDDEN);
            let hidden =
                self.client.create_file(ROOT, layers, name.as_bytes(), FILE_MODE, WRITE, true);
            let (hidden, hidden_attr, _) = hidden.await?;
            let size = Some(hidden_bytes(lower.bytes));
            let change = AttrChange { size, ..AttrChange::default() };
            self.client.set_attr(ROOT, hidden_attr.ino, change).await?;
            let new = named(ino, NEW);
            if let Err(error) = self.client.link(ROOT, ino, layers, new.as_bytes()).await {
                hidden.close().await;
                return Err(error);
            }
            Ok(hidden)
        };
        match made.await {
            Ok(hidden) => {
                let below = Below { layer, bytes: lower.bytes, hidden: Rc::new(hidden) };
                let layer = Rc::new(FileLayer::on(file, below));
                Ok(New { layer, ino, made_ns: attr.btime.0 })
            }
            Err(error) => {
                file.close().await;
                Err(error)
            }
        }
    }

    /// Gives a file that [`Self::make`] made the name of a volume, in the place of what has it. `flags` as in
    /// [`levada_wire::meta::MetaRequest::Rename`].
    pub(super) async fn name(
        &self,
        directories: &Directories,
        tenant: Ino,
        ino: Ino,
        name: &VolumeName,
        flags: u32,
    ) -> Result<(), OrderError> {
        let layers = directories.made_below(tenant, LAYERS).await?;
        let (new, to) = (named(ino, NEW), name.name().as_bytes());
        let renamed = self.client.rename(ROOT, (layers, new.as_bytes()), (tenant, to), flags).await;
        match renamed {
            Ok(_) => Ok(()),
            // Who does not hear of it looks.
            Err(error) => match self.client.lookup(tenant, to).await {
                Ok(attr) if attr.ino == ino => Ok(()),
                _ => Err(of_name(error, name)),
            },
        }
    }

    /// Lets [`Self::name`] give a file that is frozen the name of a volume.
    pub(super) async fn name_again(
        &self,
        directories: &Directories,
        tenant: Ino,
        ino: Ino,
    ) -> Result<(), Error> {
        let layers = directories.made_below(tenant, LAYERS).await?;
        self.client.link(ROOT, ino, layers, named(ino, NEW).as_bytes()).await.map(drop)
    }

    /// Gives the name of the snapshot that one file is, if it is one, to another.
    pub(super) async fn take_snapshot_name(
        &self,
        directories: &Directories,
        tenant: Ino,
        from: Ino,
        to: Ino,
    ) -> Result<(), Error> {
        let Some(all) = directories.below(tenant, SNAPSHOTS).await? else { return Ok(()) };
        for volume in directories.entries(all).await? {
            for entry in directories.entries(volume.ino).await? {
                if entry.ino == from {
                    self.name_again(directories, tenant, to).await?;
                    let layers = directories.made_below(tenant, LAYERS).await?;
                    let new = named(to, NEW);
                    let place = (volume.ino, entry.name.as_bytes());
                    self.client.rename(ROOT, (layers, new.as_bytes()), place, 0).await?;
                }
            }
        }
        Ok(())
    }

    /// A file is the topmost one of a volume again.
    pub(super) fn thawed(&self, ino: Ino) {
        self.frozen.borrow_mut().remove(&ino);
    }

    /// Those that are open.
    pub(super) fn known(&self) -> Vec<Rc<FileLayer>> {
        self.frozen.borrow().values().cloned().collect()
    }

    /// Keeps a file whose volume's name another will have.
    pub(super) async fn keep_frozen(
        &self,
        directories: &Directories,
        tenant: Ino,
        ino: Ino,
    ) -> Result<(), Error> {
        let layers = directories.made_below(tenant, LAYERS).await?;
        match self.client.link(ROOT, ino, layers, named(ino, "").as_bytes()).await {
            // An order before that was not carried to its end.
            Ok(_) | Err(Error::Meta(MetaFault::Exists)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The directory of a volume's snapshots; `None` where it has none.
    pub(super) async fn snapshots(
        &self,
        directories: &Directories,
        tenant: Ino,
        volume: u64,
    ) -> Result<Option<Ino>, Error> {
        match directories.below(tenant, SNAPSHOTS).await? {
            Some(all) => directories.below(all, &format!("{volume:x}")).await,
            None => Ok(None),
        }
    }

    /// As [`Self::snapshots`]; made where it is not there.
    pub(super) async fn made_snapshots(
        &self,
        directories: &Directories,
        tenant: Ino,
        volume: u64,
    ) -> Result<Ino, Error> {
        let all = directories.made_below(tenant, SNAPSHOTS).await?;
        directories.made_below(all, &format!("{volume:x}")).await
    }

    /// Takes away the directory of a volume's snapshots if there are none.
    pub(super) async fn forget_snapshots(
        &self,
        directories: &Directories,
        tenant: Ino,
        volume: u64,
    ) -> Result<(), Error> {
        let Some(all) = directories.below(tenant, SNAPSHOTS).await? else { return Ok(()) };
        directories.remove_empty(all, &format!("{volume:x}")).await
    }

    /// What there is of a tenant.
    pub(super) async fn survey(
        &self,
        directories: &Directories,
        tenant: Ino,
    ) -> Result<Survey, OrderError> {
        let layers = directories.below(tenant, LAYERS).await?;
        let mut survey = Survey {
            layers,
            entries: Vec::new(),
            tops: BTreeMap::new(),
            frozen: BTreeMap::new(),
            snapshots: BTreeSet::new(),
        };
        let Some(layers) = layers else { return Ok(survey) };
        for entry in directories.entries(tenant).await? {
            if entry.kind == Kind::File {
                let note = self.note(entry.ino, || format!("volume {}", entry.name)).await?;
                survey.tops.insert(entry.ino, note);
            }
        }
        survey.entries = directories.entries(layers).await?;
        for entry in &survey.entries {
            if entry.name == named(entry.ino, "") && !survey.tops.contains_key(&entry.ino) {
                let note = self.note(entry.ino, || format!("layer {}", entry.name)).await?;
                survey.frozen.insert(entry.ino, note);
            }
        }
        if let Some(all) = directories.below(tenant, SNAPSHOTS).await? {
            for volume in directories.entries(all).await? {
                let snapshots = directories.entries(volume.ino).await?;
                survey.snapshots.extend(snapshots.iter().map(|snapshot| snapshot.ino));
            }
        }
        Ok(survey)
    }

    /// Takes away what nobody needs any more, and what an order left that was not carried to its end.
    pub(super) async fn tidy(
        &self,
        directories: &Directories,
        tenant: Ino,
    ) -> Result<Survey, OrderError> {
        loop {
            let survey = self.survey(directories, tenant).await?;
            let Some(layers) = survey.layers else { return Ok(survey) };
            let mut has_gone = false;
            for entry in &survey.entries {
                let (is_frozen, is_needed) = match &entry.name {
                    name if *name == named(entry.ino, "") => {
                        let is_frozen = !survey.tops.contains_key(&entry.ino);
                        (is_frozen, is_frozen && survey.has_use(entry.ino))
                    }
                    name => match name.strip_suffix(HIDDEN) {
                        Some(of) => (false, survey.hides(of)),
                        // One that was being made, or nothing of ours.
                        None => (false, !name.ends_with(NEW)),
                    },
                };
                if !is_needed {
                    tracing::debug!(entry.name, "a layer goes");
                    self.client.unlink(ROOT, layers, entry.name.as_bytes()).await?;
                }
                if is_frozen && !is_needed {
                    has_gone = true;
                    let layer = self.frozen.borrow_mut().remove(&entry.ino);
                    if let Some(layer) = layer {
                        close_unused(layer);
                    }
                }
            }
            // What it lay on may be needed no more.
            if !has_gone {
                return Ok(survey);
            }
        }
    }

    /// Closes all of them.
    pub(super) async fn close(&self) {
        let frozen = self.frozen.take();
        for layer in frozen.into_values() {
            close(&layer).await;
        }
    }
}

impl Survey {
    /// True when something is told to be hidden by the file of this number.
    fn hides(&self, ino: &str) -> bool {
        let is_it = |(at, note): (&Ino, &Note)| named(*at, "") == ino && note.below.is_some();
        self.tops.iter().chain(&self.frozen).any(is_it)
    }
}

/// Closes the files of a layer once no request is under way that reads them.
pub(super) fn close_unused(layer: Rc<FileLayer>) {
    reactor::spawn(async move {
        while Rc::strong_count(&layer) > 1 {
            reactor::sleep(UNUSED_AFTER).await;
        }
        close(&layer).await;
    });
}

/// Closes the files of a layer, not those below it.
pub(super) async fn close(layer: &FileLayer) {
    if let Some(below) = layer.below() {
        (*below.hidden).clone().close().await;
    }
    layer.file().clone().close().await;
}
