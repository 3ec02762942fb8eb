//! Quotas, as people ask for them and set them.
//!
//! Limits are rows of the metadata target, not keys of the cluster file: they change daily, and go with the drives.

use crate::assembly::{Cluster, Service};
use levada_base::ids::Ino;
use levada_client::{Client, Error};
use levada_meta::{Account, DEFAULT_ID, Limit, Limits, MetaService, Subject, SubjectKind};
use levada_spec::SubtreePath;
use levada_wire::attr::{Attr, Kind, Time};
use levada_wire::meta::{Caller, DirEntry, MetaFault, MetaReply, MetaRequest, NewInode};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::rc::Rc;

/// Entries of a directory that are looked at at a time.
const ENTRIES: u32 = 1024;
/// Who makes directories of tenants, and how.
const ROOT: Caller = Caller { uid: 0, gid: 0 };
const DIRECTORY_MODE: u32 = 0o755;

/// For what is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WhoKind {
    User,
    Group,
    Project,
    Tenant,
}

/// For whom is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Who {
    pub kind: WhoKind,
    /// None: whoever has no limits of his own.
    pub id: Option<u32>,
}

/// 0: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SoftHard {
    pub soft: u64,
    pub hard: u64,
}

/// What is to be set; what is absent stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaChange {
    pub bytes: Option<SoftHard>,
    pub inodes: Option<SoftHard>,
    /// Seconds.
    pub grace_s: Option<u32>,
}

/// What somebody uses, and may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quota {
    pub who: Who,
    pub bytes: Used,
    pub inodes: Used,
}

/// Of one of the two that are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Used {
    pub used: u64,
    pub soft: u64,
    pub hard: u64,
    /// Seconds since 1970, until which there may be more than the soft limit; none where there is not more.
    pub grace_ends: Option<i64>,
}

/// Why it could not be done.
#[derive(Debug, thiserror::Error)]
pub enum QuotaError {
    #[error("there is no metadata target that serves")]
    NoTarget,
    #[error("{path}: {fault}")]
    Path { path: String, fault: MetaFault },
    #[error("{path} cannot be made: {error}")]
    Made { path: String, error: Error },
    #[error("the soft limit of {what} is above the hard one")]
    SoftAboveHard { what: &'static str },
    #[error("{0}")]
    Refused(MetaFault),
    #[error("{path} is no directory")]
    NoDirectory { path: String },
    #[error("{path} belongs to another tenant")]
    Foreign { path: String },
    #[error("{path} is there, is not empty, and belongs to no tenant")]
    NotEmpty { path: String },
}

impl QuotaChange {
    /// No limit of his own.
    pub(crate) const NONE: Self = Self {
        bytes: Some(SoftHard { soft: 0, hard: 0 }),
        inodes: Some(SoftHard { soft: 0, hard: 0 }),
        grace_s: None,
    };
}

impl Who {
    fn subject(self) -> Subject {
        let kind = match self.kind {
            WhoKind::User => SubjectKind::User,
            WhoKind::Group => SubjectKind::Group,
            WhoKind::Project => SubjectKind::Project,
            WhoKind::Tenant => SubjectKind::Tenant,
        };
        Subject { kind, id: self.id.unwrap_or(DEFAULT_ID) }
    }

    fn of(subject: Subject) -> Self {
        let kind = match subject.kind {
            SubjectKind::User => WhoKind::User,
            SubjectKind::Group => WhoKind::Group,
            SubjectKind::Project => WhoKind::Project,
            SubjectKind::Tenant => WhoKind::Tenant,
        };
        Self { kind, id: Some(subject.id).filter(|id| *id != DEFAULT_ID) }
    }
}

impl Quota {
    fn of(account: Account) -> Self {
        let Account { subject, usage, limits, bytes_grace_ends, inodes_grace_ends } = account;
        let used = |used, limit: Limit, ends: Option<Time>| Used {
            used,
            soft: limit.soft,
            hard: limit.hard,
            grace_ends: ends.map(|ends| ends.0 / 1_000_000_000),
        };
        Self {
            who: Who::of(subject),
            bytes: used(usage.bytes, limits.bytes, bytes_grace_ends),
            inodes: used(usage.inodes, limits.inodes, inodes_grace_ends),
        }
    }

    /// True when there is more than the soft limit.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.bytes.grace_ends.is_some() || self.inodes.grace_ends.is_some()
    }
}

fn metadata(cluster: &Cluster) -> Result<Rc<MetaService>, QuotaError> {
    let service = cluster.targets.iter().find_map(|target| match &target.service {
        Service::Metadata { service, .. } => Some(Rc::clone(service)),
        Service::Objects { .. } | Service::Stopped { .. } => None,
    });
    service.ok_or(QuotaError::NoTarget)
}

/// All of whom something is known, or one.
pub(crate) fn show(cluster: &Cluster, who: Option<Who>) -> Result<Vec<Quota>, QuotaError> {
    let service = metadata(cluster)?;
    let accounts = match who {
        Some(who) => vec![service.account(who.subject())],
        None => service.accounts(),
    };
    Ok(accounts.into_iter().map(Quota::of).collect())
}

/// Sets limits; durable when it returns.
pub(crate) async fn set(
    cluster: &Cluster,
    who: Who,
    change: QuotaChange,
) -> Result<(), QuotaError> {
    let service = metadata(cluster)?;
    let known = service.own_limits(who.subject());
    let limit = |to: Option<SoftHard>, known: Limit, what| match to {
        Some(SoftHard { soft, hard }) if hard > 0 && soft > hard => {
            Err(QuotaError::SoftAboveHard { what })
        }
        Some(SoftHard { soft, hard }) => Ok(Limit { soft, hard }),
        None => Ok(known),
    };
    let limits = Limits {
        bytes: limit(change.bytes, known.bytes, "bytes")?,
        inodes: limit(change.inodes, known.inodes, "inodes")?,
        bytes_grace_s: change.grace_s.unwrap_or(known.bytes_grace_s),
        inodes_grace_s: change.grace_s.unwrap_or(known.inodes_grace_s),
    };
    service.set_limits(who.subject(), limits).await.map_err(QuotaError::Refused)
}

/// Gives a directory to a project, so that what is made below it belongs to that; with `recursive` what is there
/// already, too.
pub(crate) async fn set_project(
    cluster: &Cluster,
    path: &str,
    project: u32,
    recursive: bool,
) -> Result<(), QuotaError> {
    let service = metadata(cluster)?;
    let failed = |fault| QuotaError::Path { path: path.to_owned(), fault };
    let ino = directory(&service, path).await?;
    belongs(&service, ino, Owner::Project(project), recursive).await.map_err(failed)
}

/// For whom what is in a directory counts.
#[derive(Clone, Copy)]
enum Owner {
    Project(u32),
    Tenant(u32),
}

/// Gives a directory to `owner`; with `recursive` what is there already, too.
async fn belongs(
    service: &MetaService,
    ino: Ino,
    owner: Owner,
    recursive: bool,
) -> Result<(), MetaFault> {
    let give = |ino| {
        let (project, tenant) = match owner {
            Owner::Project(project) => (Some(project), None),
            Owner::Tenant(tenant) => (None, Some(tenant)),
        };
        service.set_owner(ino, project, tenant)
    };
    let mut left = vec![ino];
    // A directory before what is in it: what is made meanwhile belongs to the owner already.
    while let Some(directory) = left.pop() {
        match give(directory).await {
            // Removed since it was listed, with nothing in it.
            Err(MetaFault::Stale) if directory != ino => continue,
            given => given?,
        }
        let (mut cookie, mut is_end) = (0, !recursive);
        while !is_end {
            let (entries, end) = entries(service, directory, cookie, false).await?;
            is_end = end || entries.is_empty();
            for entry in entries {
                cookie = entry.cookie;
                match entry.kind {
                    Kind::Directory => left.push(entry.ino),
                    Kind::File | Kind::Symlink | Kind::Special => match give(entry.ino).await {
                        // Deleted since it was listed.
                        Err(MetaFault::Stale) => {}
                        given => given?,
                    },
                }
            }
        }
    }
    Ok(())
}

/// The directory at `path`, from the root on.
async fn directory(service: &MetaService, path: &str) -> Result<Ino, QuotaError> {
    let failed = |fault| QuotaError::Path { path: path.to_owned(), fault };
    let mut ino = Ino::ROOT;
    let mut kind = Kind::Directory;
    for name in path.split('/').filter(|name| !name.is_empty()) {
        let request = MetaRequest::Lookup { parent: ino, name: name.into() };
        let Attr { ino: found, kind: is, .. } = match ask(service, request).await.map_err(failed)? {
            MetaReply::Attr(attr) => *attr,
            _ => return Err(failed(MetaFault::Invalid)),
        };
        (ino, kind) = (found, is);
    }
    match kind {
        Kind::Directory => Ok(ino),
        _ => Err(QuotaError::NoDirectory { path: path.to_owned() }),
    }
}

/// The numbers of tenants whose directories are in the one at `home`, by name; 0: none yet.
pub(crate) async fn tenant_numbers(
    cluster: &Cluster,
    home: &str,
) -> Result<BTreeMap<String, u32>, QuotaError> {
    let service = metadata(cluster)?;
    let failed = |fault| QuotaError::Path { path: home.to_owned(), fault };
    let home = directory(&service, home).await?;
    let mut numbers = BTreeMap::new();
    let (mut cookie, mut is_end) = (0, false);
    while !is_end {
        let (entries, end) = entries(&service, home, cookie, true).await.map_err(failed)?;
        is_end = end || entries.is_empty();
        for entry in entries {
            cookie = entry.cookie;
            let number = entry.attr.map_or(0, |attr| attr.tenant);
            numbers.insert(String::from_utf8_lossy(&entry.name).into_owned(), number);
        }
    }
    Ok(numbers)
}

/// Gives a directory and the files in it to the tenant of a number.
pub(crate) async fn number_tenant(
    cluster: &Cluster,
    path: &str,
    number: u32,
) -> Result<(), QuotaError> {
    let service = metadata(cluster)?;
    let failed = |fault| QuotaError::Path { path: path.to_owned(), fault };
    let ino = directory(&service, path).await?;
    belongs(&service, ino, Owner::Tenant(number), true).await.map_err(failed)
}

/// The numbers of tenants of whom something is counted, whether they are known or not.
pub(crate) fn counted_tenants(cluster: &Cluster) -> Result<Vec<u32>, QuotaError> {
    let quotas = show(cluster, None)?.into_iter();
    let counted = quotas.filter(|quota| quota.who.kind == WhoKind::Tenant);
    let counted = counted.filter(|quota| quota.bytes.used > 0 || quota.inodes.used > 0);
    Ok(counted.filter_map(|quota| quota.who.id).collect())
}

/// Makes a directory unless it is there, and gives it to the tenant of a number. One that is there must be empty, or that tenant's
/// already, or of one that is forgotten; nothing on the way may belong to another one of the `known`.
pub(crate) async fn give_subtree(
    cluster: &Cluster,
    client: &Client,
    path: &SubtreePath,
    number: u32,
    known: &[u32],
) -> Result<(), QuotaError> {
    let service = metadata(cluster)?;
    let mut at = String::new();
    let mut ino = Ino::ROOT;
    let mut owner = 0;
    for name in path.names() {
        at = format!("{at}/{name}");
        let failed = |error| QuotaError::Made { path: at.clone(), error };
        let attr = found_or_made(client, ino, name).await.map_err(failed)?;
        if attr.kind != Kind::Directory {
            return Err(QuotaError::NoDirectory { path: at });
        }
        if attr.tenant != number && known.contains(&attr.tenant) {
            return Err(QuotaError::Foreign { path: at });
        }
        (ino, owner) = (attr.ino, attr.tenant);
    }
    if owner == number {
        return Ok(());
    }
    let failed = |fault| QuotaError::Path { path: at.clone(), fault };
    // Whoever had it is forgotten.
    if owner != 0 {
        return belongs(&service, ino, Owner::Tenant(number), true).await.map_err(failed);
    }
    // What is there already may be anybody's.
    if !entries(&service, ino, 0, false).await.map_err(failed)?.0.is_empty() {
        return Err(QuotaError::NotEmpty { path: at });
    }
    service.set_owner(ino, None, Some(number)).await.map_err(failed)
}

/// What a name in a directory means: a directory that is made unless there is something.
async fn found_or_made(client: &Client, parent: Ino, name: &str) -> Result<Attr, Error> {
    let name = name.as_bytes();
    match client.lookup(parent, name).await {
        Err(Error::Meta(MetaFault::NotFound)) => {
            match client.create(ROOT, parent, name, DIRECTORY_MODE, NewInode::Directory).await {
                // Somebody else was faster.
                Err(Error::Meta(MetaFault::Exists)) => client.lookup(parent, name).await,
                made => made,
            }
        }
        found => found,
    }
}

async fn entries(
    service: &MetaService,
    ino: Ino,
    cookie: u64,
    attrs: bool,
) -> Result<(Vec<DirEntry>, bool), MetaFault> {
    let request = MetaRequest::ReadDir { ino, cookie, entries_max: ENTRIES, attrs };
    match ask(service, request).await {
        Ok(MetaReply::Entries { entries, end }) => Ok((entries, end)),
        // It went meanwhile, with all that was in it.
        Err(MetaFault::Stale | MetaFault::NotFound) => Ok((Vec::new(), true)),
        Err(fault) => Err(fault),
        Ok(_) => Err(MetaFault::Invalid),
    }
}

async fn ask(service: &MetaService, request: MetaRequest) -> Result<MetaReply, MetaFault> {
    match service.handle(MetaService::housekeeper(), request).await {
        MetaReply::Failed(fault) => Err(fault),
        reply => Ok(reply),
    }
}
