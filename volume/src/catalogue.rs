//! The catalogue of thin volumes: a directory of the file system, in it one for each tenant.
//!
//! ```text
//! /.levada/volumes/TENANT/NAME      root's alone; a file as long as the volume
//! ```
//!
//! What always holds:
//! - A volume that has a name is whole: it is made without one, and gets it once it has its size.
//! - What an order acknowledged is durable.
//! - A volume is open here once, however many exports show it.
//!
//! After a crash nothing is left to be done: a volume without a name goes with the client that made it.

use crate::name::{Tenant, VolumeName};
use crate::order::{self, Anyway, OrderError, VolumeRow};
use crate::qos::Limits;
use crate::thin::ThinVolume;
use crate::volume::Volume;
use levada_base::ids::Ino;
use levada_base::sync::Semaphore;
use levada_base::units::MIB;
use levada_client::{Client, Error, Seek};
use levada_wire::attr::Kind;
use levada_wire::meta::{AttrChange, Caller, MetaFault, NewInode, OpenMode, SetXattr};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

const ROOT: Caller = Caller { uid: 0, gid: 0 };
const WRITE: OpenMode = OpenMode { write: true, truncate: false };
const HOME: [&str; 2] = [".levada", "volumes"];
const DIRECTORY_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;
/// Names that are asked for at once.
const NAMES_PER_CALL: u32 = 1024;
const RENAME_NOREPLACE: u32 = 1;
/// The attribute of a volume's file that says what it may use, as JSON.
const LIMITS: &[u8] = b"trusted.levada.limits";
/// What a guest may do at once without a seam, where the layout says nothing.
const IO_BYTES_BEST: u64 = MIB;

/// The thin volumes of a file system. Lives on one core.
pub struct Catalogue {
    client: Client,
    /// The directory of all tenants, once it is known to be there.
    home: Cell<Option<Ino>>,
    open: RefCell<BTreeMap<VolumeName, Rc<ThinVolume>>>,
    /// Orders are carried out one after the other.
    turn: Rc<Semaphore>,
}

impl Catalogue {
    /// The catalogue of the file system that `client` is of. Nothing is made in it before there is a volume.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self { client, home: Cell::new(None), open: RefCell::default(), turn: Semaphore::new(1) }
    }

    /// The directory of a tenant's volumes; `None` where it has none.
    async fn directory_of(&self, tenant: &Tenant) -> Result<Option<Ino>, Error> {
        let Some(home) = self.home().await? else { return Ok(None) };
        self.below(home, tenant.as_str()).await
    }

    async fn home(&self) -> Result<Option<Ino>, Error> {
        if self.home.get().is_none() {
            let mut home = Some(Ino::ROOT);
            for name in HOME {
                home = match home {
                    Some(parent) => self.below(parent, name).await?,
                    None => return Ok(None),
                };
            }
            self.home.set(home);
        }
        Ok(self.home.get())
    }

    async fn below(&self, parent: Ino, name: &str) -> Result<Option<Ino>, Error> {
        match self.client.lookup(parent, name.as_bytes()).await {
            Ok(attr) => Ok(Some(attr.ino)),
            Err(Error::Meta(MetaFault::NotFound)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// As [`Self::below`]; made where it is not there.
    async fn made_below(&self, parent: Ino, name: &str) -> Result<Ino, Error> {
        let made =
            self.client.create(ROOT, parent, name.as_bytes(), DIRECTORY_MODE, NewInode::Directory);
        match made.await {
            Ok(attr) => Ok(attr.ino),
            Err(Error::Meta(MetaFault::Exists)) => {
                Ok(self.client.lookup(parent, name.as_bytes()).await?.ino)
            }
            Err(error) => Err(error),
        }
    }

    async fn make_directory_of(&self, tenant: &Tenant) -> Result<Ino, Error> {
        let mut directory = Ino::ROOT;
        for name in HOME.into_iter().chain([tenant.as_str()]) {
            directory = self.made_below(directory, name).await?;
        }
        Ok(directory)
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
        self.check_size(size_bytes, anyway).await?;
        let tenant = self.make_directory_of(&name.tenant).await?;
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

    async fn check_size(&self, bytes: u64, anyway: Anyway) -> Result<(), OrderError> {
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
        let mut tenants = Vec::new();
        match tenant {
            Some(tenant) => tenants.push(tenant.clone()),
            None => {
                if let Some(home) = self.home().await? {
                    let names = self.names_in(home).await?;
                    tenants.extend(names.iter().filter_map(|(name, _, _)| name.parse().ok()));
                }
            }
        }
        let mut rows = Vec::new();
        for tenant in tenants {
            let Some(directory) = self.directory_of(&tenant).await? else { continue };
            for (name, kind, size_bytes) in self.names_in(directory).await? {
                // Whatever else root has put there is none.
                if let (Kind::File, Ok(name)) = (kind, VolumeName::new(tenant.clone(), &name)) {
                    let open = self.open.borrow();
                    let size_bytes = open.get(&name).map_or(size_bytes, |open| open.size_bytes());
                    drop(open);
                    let users = self.users(&name);
                    rows.push(VolumeRow { name, size_bytes, users });
                }
            }
        }
        rows.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(rows)
    }

    /// The names of a directory with what they are and how long.
    async fn names_in(&self, directory: Ino) -> Result<Vec<(String, Kind, u64)>, Error> {
        let mut names = Vec::new();
        let mut cookie = 0;
        loop {
            let (entries, is_end) =
                self.client.read_dir(directory, cookie, NAMES_PER_CALL, true).await?;
            for entry in &entries {
                cookie = entry.cookie;
                let size_bytes = entry.attr.as_ref().map_or(0, |attr| attr.size);
                let name = String::from_utf8_lossy(&entry.name).into_owned();
                names.push((name, entry.kind, size_bytes));
            }
            if is_end || entries.is_empty() {
                return Ok(names);
            }
        }
    }

    /// The volume, for an export.
    ///
    /// # Errors
    ///
    /// [`OrderError::Missing`], and what the file system says.
    pub async fn volume(&self, name: &VolumeName) -> Result<Rc<ThinVolume>, OrderError> {
        let _turn = self.turn.acquire(1).await;
        self.opened(name).await
    }

    async fn find(&self, name: &VolumeName) -> Result<(Ino, Ino), OrderError> {
        let missing = || OrderError::Missing { name: name.clone() };
        let tenant = self.directory_of(&name.tenant).await?.ok_or_else(missing)?;
        let attr = self.client.lookup(tenant, name.name().as_bytes()).await;
        let attr = attr.map_err(|error| of_name(error, name))?;
        match attr.kind {
            Kind::File => Ok((tenant, attr.ino)),
            _ => Err(OrderError::NotAVolume { name: name.clone() }),
        }
    }

    async fn opened(&self, name: &VolumeName) -> Result<Rc<ThinVolume>, OrderError> {
        if let Some(open) = self.open.borrow().get(name) {
            return Ok(Rc::clone(open));
        }
        let (_, ino) = self.find(name).await?;
        let (file, attr) = self.client.open(ino, WRITE).await?;
        let io_bytes_best = attr.layout.as_ref().map_or(IO_BYTES_BEST, |layout| {
            layout.stripe_unit * layout.targets.len().max(1) as u64
        });
        let volume = Rc::new(ThinVolume::new(file, attr.size, io_bytes_best));
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
            self.check_size(size_bytes, anyway).await?;
        } else {
            order::check_size(size_bytes)?;
        }
        let _quiet = volume.gate().closed().await;
        if size_bytes < old_bytes && !anyway.is_meant {
            let data_at = volume.file().seek(size_bytes, Seek::Data).await?;
            if let Some(data_at) = data_at {
                return Err(OrderError::WouldCut {
                    name: name.clone(),
                    bytes: size_bytes,
                    data_at,
                });
            }
        }
        let change = AttrChange { size: Some(size_bytes), ..AttrChange::default() };
        self.client.set_attr(ROOT, volume.file().ino(), change).await?;
        volume.gate().set_size_bytes(size_bytes);
        Ok(self.client.sync_meta().await?)
    }

    /// What a volume may use; [`Limits::NONE`] where nothing was ever set.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn limits(&self, name: &VolumeName) -> Result<Limits, OrderError> {
        let (_, ino) = self.find(name).await?;
        match self.client.xattr(ino, LIMITS).await {
            Ok(text) => serde_json::from_slice(&text)
                .map_err(|_| OrderError::LimitsUnknown { name: name.clone() }),
            Err(Error::Meta(MetaFault::NoAttribute)) => Ok(Limits::NONE),
            Err(error) => Err(error.into()),
        }
    }

    /// Keeps what a volume may use; whoever governs it is told by who asks for this.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn set_limits(&self, name: &VolumeName, limits: &Limits) -> Result<(), OrderError> {
        let _turn = self.turn.acquire(1).await;
        let (_, ino) = self.find(name).await?;
        // Plain numbers.
        let text = serde_json::to_vec(limits).unwrap_or_default();
        self.client.set_xattr(ROOT, ino, LIMITS, &text, SetXattr::default()).await?;
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
        let (tenant, _) = self.find(from).await?;
        let (old, new) = (from.name().as_bytes(), to.name().as_bytes());
        let renamed = self.client.rename(ROOT, (tenant, old), (tenant, new), RENAME_NOREPLACE);
        renamed.await.map_err(|error| of_name(error, to))?;
        let open = self.open.borrow_mut().remove(from);
        if let Some(open) = open {
            self.open.borrow_mut().insert(to.clone(), open);
        }
        Ok(self.client.sync_meta().await?)
    }

    /// Deletes a volume; its room is free at once.
    ///
    /// # Errors
    ///
    /// [`OrderError`].
    pub async fn delete(&self, name: &VolumeName, anyway: Anyway) -> Result<(), OrderError> {
        let _turn = self.turn.acquire(1).await;
        let (tenant, _) = self.find(name).await?;
        let users = self.users(name);
        if users > 0 && !anyway.is_meant {
            return Err(OrderError::InUse { name: name.clone(), users });
        }
        self.client.unlink(ROOT, tenant, name.name().as_bytes()).await?;
        let open = self.open.borrow_mut().remove(name);
        if let Some(open) = open {
            open.gate().set_gone();
            open.file().clone().close().await;
        }
        Ok(self.client.sync_meta().await?)
    }

    /// Those who hold it besides the catalogue.
    fn users(&self, name: &VolumeName) -> usize {
        self.open.borrow().get(name).map_or(0, |open| Rc::strong_count(open) - 1)
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
            volume.file().clone().close().await;
        }
        self.client.shutdown().await
    }
}

fn of_name(error: Error, name: &VolumeName) -> OrderError {
    match error {
        Error::Meta(MetaFault::NotFound) => OrderError::Missing { name: name.clone() },
        Error::Meta(MetaFault::Exists) => OrderError::Exists { name: name.clone() },
        error => error.into(),
    }
}
