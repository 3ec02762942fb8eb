//! Where thin volumes are in the file system: a directory for each tenant.

use super::Catalogue;
use crate::name::{Tenant, VolumeName};
use crate::order::OrderError;
use levada_base::ids::Ino;
use levada_client::{Client, Error};
use levada_wire::attr::Kind;
use levada_wire::meta::{Caller, MetaFault, NewInode};
use std::cell::Cell;

pub(super) const ROOT: Caller = Caller { uid: 0, gid: 0 };
/// Below a tenant's directory: files on which others lie, and what they hide of those on which they lie.
pub(super) const LAYERS: &str = ".layers";
/// Below a tenant's directory: a directory for each volume that has snapshots, in it their names.
pub(super) const SNAPSHOTS: &str = ".snapshots";
const DIRECTORY_MODE: u32 = 0o700;
/// Names that are asked for at once.
const NAMES_PER_CALL: u32 = 1024;

fn home_parts<'a>() -> impl Iterator<Item = &'a str> {
    Catalogue::HOME.split('/').filter(|part| !part.is_empty())
}

/// What stands in a directory.
pub(super) struct Entry {
    pub name: String,
    pub ino: Ino,
    pub kind: Kind,
    pub size_bytes: u64,
}

/// The directories of volumes. Nothing is made before there is something to keep.
pub(super) struct Directories {
    client: Client,
    /// The directory of all tenants, once it is known to be there.
    home: Cell<Option<Ino>>,
}

impl Directories {
    pub(super) fn new(client: Client) -> Self {
        Self { client, home: Cell::new(None) }
    }

    /// The directory of a tenant's volumes; `None` where it has none.
    pub(super) async fn of(&self, tenant: &Tenant) -> Result<Option<Ino>, Error> {
        let Some(home) = self.home().await? else { return Ok(None) };
        self.below(home, tenant.as_str()).await
    }

    /// As [`Self::of`]; made where it is not there.
    pub(super) async fn made_of(&self, tenant: &Tenant) -> Result<Ino, Error> {
        let mut directory = Ino::ROOT;
        let parts = home_parts().chain(std::iter::once(tenant.as_str()));
        for name in parts {
            directory = self.made_below(directory, name).await?;
        }
        Ok(directory)
    }

    async fn home(&self) -> Result<Option<Ino>, Error> {
        if self.home.get().is_none() {
            let mut home = Some(Ino::ROOT);
            for name in home_parts() {
                home = match home {
                    Some(parent) => self.below(parent, name).await?,
                    None => return Ok(None),
                };
            }
            self.home.set(home);
        }
        Ok(self.home.get())
    }

    pub(super) async fn below(&self, parent: Ino, name: &str) -> Result<Option<Ino>, Error> {
        match self.client.lookup(parent, name.as_bytes()).await {
            Ok(attr) => Ok(Some(attr.ino)),
            Err(Error::Meta(MetaFault::NotFound)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(super) async fn made_below(&self, parent: Ino, name: &str) -> Result<Ino, Error> {
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

    /// Who has a directory, by name.
    pub(super) async fn tenants(&self) -> Result<Vec<Tenant>, Error> {
        let Some(home) = self.home().await? else { return Ok(Vec::new()) };
        let entries = self.entries(home).await?;
        let mut tenants: Vec<Tenant> =
            entries.iter().filter_map(|entry| entry.name.parse().ok()).collect();
        tenants.sort();
        Ok(tenants)
    }

    /// The volumes of a tenant with their topmost files and their sizes, in no order.
    pub(super) async fn volumes_of(
        &self,
        tenant: &Tenant,
    ) -> Result<Vec<(VolumeName, Ino, u64)>, Error> {
        let Some(directory) = self.of(tenant).await? else { return Ok(Vec::new()) };
        let entries = self.entries(directory).await?;
        let volumes = entries.into_iter().filter_map(|entry| {
            // Whatever else root has put there is none.
            let name = VolumeName::new(tenant.clone(), &entry.name).ok()?;
            (entry.kind == Kind::File).then_some((name, entry.ino, entry.size_bytes))
        });
        Ok(volumes.collect())
    }

    pub(super) async fn entries(&self, directory: Ino) -> Result<Vec<Entry>, Error> {
        let mut found = Vec::new();
        let mut cookie = 0;
        loop {
            let (entries, is_end) =
                self.client.read_dir(directory, cookie, NAMES_PER_CALL, true).await?;
            for entry in &entries {
                cookie = entry.cookie;
                let size_bytes = entry.attr.as_ref().map_or(0, |attr| attr.size);
                let name = String::from_utf8_lossy(&entry.name).into_owned();
                found.push(Entry { name, ino: entry.ino, kind: entry.kind, size_bytes });
            }
            if is_end || entries.is_empty() {
                return Ok(found);
            }
        }
    }

    /// Takes away the directory of a tenant that has nothing in it.
    pub(super) async fn remove(&self, tenant: &Tenant) -> Result<(), OrderError> {
        let missing = || OrderError::NoTenant { tenant: tenant.clone() };
        let home = self.home().await?.ok_or_else(missing)?;
        let directory = self.below(home, tenant.as_str()).await?.ok_or_else(missing)?;
        // What is in them keeps the tenant.
        if let Some(all) = self.below(directory, SNAPSHOTS).await? {
            for volume in self.entries(all).await? {
                self.remove_empty(all, &volume.name).await?;
            }
        }
        for name in [LAYERS, SNAPSHOTS] {
            self.remove_empty(directory, name).await?;
        }
        match self.client.remove_dir(ROOT, home, tenant.as_str().as_bytes()).await {
            Ok(()) => Ok(()),
            Err(Error::Meta(MetaFault::NotFound)) => Err(missing()),
            Err(Error::Meta(MetaFault::NotEmpty)) => {
                Err(OrderError::TenantInUse { tenant: tenant.clone() })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Takes a directory away if it is there and nothing is in it.
    pub(super) async fn remove_empty(&self, parent: Ino, name: &str) -> Result<(), Error> {
        match self.client.remove_dir(ROOT, parent, name.as_bytes()).await {
            Ok(()) | Err(Error::Meta(MetaFault::NotFound | MetaFault::NotEmpty)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The directory and the file of a volume.
    pub(super) async fn find(&self, name: &VolumeName) -> Result<(Ino, Ino), OrderError> {
        let missing = || OrderError::Missing { name: name.clone() };
        let tenant = self.of(&name.tenant).await?.ok_or_else(missing)?;
        let attr = self.client.lookup(tenant, name.name().as_bytes()).await;
        let attr = attr.map_err(|error| of_name(error, name))?;
        match attr.kind {
            Kind::File => Ok((tenant, attr.ino)),
            _ => Err(OrderError::NotAVolume { name: name.clone() }),
        }
    }
}

/// What an error of the file system means for the volume that it was asked about.
pub(super) fn of_name(error: Error, name: &VolumeName) -> OrderError {
    match error {
        Error::Meta(MetaFault::NotFound) => OrderError::Missing { name: name.clone() },
        Error::Meta(MetaFault::Exists) => OrderError::Exists { name: name.clone() },
        error => error.into(),
    }
}
