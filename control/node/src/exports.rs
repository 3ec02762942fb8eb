//! The exports of a cluster: servers that show the volumes of a tenant. Directories are shown by processes of their own
//! ([`crate::mounting`]), of which the node only knows that there should be.
//!
//! What always holds: an export shows the volumes of its tenant, and of no other.
//!
//! One that cannot begin, because its address is taken or its certificates are wrong, is told in the status and tried again;
//! it keeps nothing else from serving.

use crate::control::ExportStatus;
use crate::volumes::{VolumeRefusal, Volumes};
use futures_util::future::{LocalBoxFuture, join_all};
use levada_base::ids::Uuid;
use levada_base::reactor::{self, JoinHandle};
use levada_export_nbd::{Address, AddressError, Exports, ListenError, Server, Tls, TlsError};
use levada_export_nvmet::{
    self as nvmet, AnaState, Follower, Hosts, KeepError, Loss, Nqn, Opened, VolumeShown,
};
use levada_export_vhost::{Directory, Disks, RingCores};
use levada_spec::{ExportWay, Loaded};
use levada_volume::{
    NameError, OrderError, SnapshotName, Tenant, Volume, VolumeName, VolumeRow, WrittenThrough,
};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::rc::Rc;
use std::str::FromStr;
use std::time::Duration;

/// What the address of a socket in the file system begins with.
const UNIX: &str = "unix:";
/// Between attempts to begin.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(5);

/// Why an export does not begin.
#[derive(Debug, thiserror::Error)]
enum ExportError {
    #[error(transparent)]
    Tenant(#[from] NameError),
    #[error(transparent)]
    Address(#[from] AddressError),
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(transparent)]
    NvmeAddress(#[from] nvmet::AddressError),
    #[error(transparent)]
    NvmeListen(#[from] nvmet::ListenError),
    #[error(transparent)]
    NvmeKeys(#[from] nvmet::KeysError),
    #[error(transparent)]
    Nqn(#[from] nvmet::NqnError),
    #[error("cannot look {address} up")]
    LookUp { address: String, source: std::io::Error },
    #[error("cannot make {}", directory.display())]
    Directory { directory: PathBuf, source: std::io::Error },
}

/// One export of the cluster file.
struct Export {
    tenant: String,
    /// As written, but with absolute paths.
    way: ExportWay,
    now: RefCell<Now>,
}

/// Why a path cannot be better or worse.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoPath {
    /// There are only so many.
    Number { count: usize },
    /// Nobody listens there.
    Silent { why: String },
}

/// How an export is doing.
enum Now {
    Waits(String),
    Nbd(Server),
    /// With the task that keeps the sockets in step.
    Vhost(Rc<Directory>, JoinHandle<()>),
    Nvme(Rc<NvmeExport>),
    /// `levada up` starts who serves it.
    Elsewhere,
    Ended,
}

/// A target that has begun, and listens where it could.
struct NvmeExport {
    target: Rc<nvmet::Target>,
    paths: RefCell<Vec<NvmePath>>,
    /// Keeps the subsystems in step.
    running: JoinHandle<()>,
}

struct NvmePath {
    /// As in the cluster file.
    address: String,
    /// Or why hosts do not come there.
    listening: Result<nvmet::Path, String>,
}

impl NvmeExport {
    /// Listens where it could not before; false: there is such an address still.
    async fn listen(&self) -> bool {
        let silent = |path: &NvmePath| path.listening.is_err().then(|| path.address.clone());
        let addresses: Vec<_> = self.paths.borrow().iter().map(silent).collect();
        let silent = addresses.into_iter().enumerate().filter_map(|(at, it)| Some((at, it?)));
        let listened = silent.map(async |(number, address)| {
            let found = looked_up::<nvmet::Address>(&address).await;
            let listening = found.and_then(|address| Ok(self.target.listen(address.0)?));
            let listening = listening.map_err(|error| {
                let why = told(error);
                let known = &self.paths.borrow()[number].listening;
                if known.as_ref().err() != Some(&why) {
                    tracing::warn!(address, why, "an export is not shown at one of its addresses");
                }
                why
            });
            self.paths.borrow_mut()[number].listening = listening;
        });
        join_all(listened).await;
        self.paths.borrow().iter().all(|path| path.listening.is_ok())
    }

    /// Why it is not shown at some of its addresses.
    fn problem(&self) -> Option<String> {
        let paths = self.paths.borrow();
        let why = paths.iter().filter_map(|path| path.listening.as_ref().err());
        let why: Vec<&str> = why.map(String::as_str).collect();
        (!why.is_empty()).then(|| why.join("; "))
    }
}

/// Whether an address has to be looked up.
fn has_name(text: &str) -> bool {
    !text.starts_with(UNIX)
        && text.parse::<SocketAddr>().is_err()
        && text.parse::<IpAddr>().is_err()
}

/// An address, the name in which is looked up beside the reactor: that may take long.
async fn looked_up<A>(text: &str) -> Result<A, ExportError>
where
    A: FromStr<Err: Send> + Send + 'static,
    ExportError: From<A::Err>,
{
    if !has_name(text) {
        return Ok(text.parse()?);
    }
    let address = text.to_owned();
    let parsed = reactor::aside("resolver", move || address.parse::<A>()).await;
    let failed = |source| ExportError::LookUp { address: text.to_owned(), source };
    Ok(parsed.map_err(failed)??)
}

fn told(error: ExportError) -> String {
    format!("{:#}", anyhow::Error::from(error))
}

/// The volumes of a tenant, for clients.
#[derive(Clone)]
pub(crate) struct TenantExports {
    tenant: Tenant,
    volumes: Rc<Volumes>,
}

impl TenantExports {
    /// What there is, by name.
    pub(crate) async fn rows(&self) -> Result<Vec<VolumeRow>, VolumeRefusal> {
        self.volumes.rows(&self.tenant).await
    }

    /// The volume or the snapshot of this name, for an export.
    async fn named(&self, name: &str) -> Option<Rc<dyn Volume>> {
        let (of, snapshot) = match name.split_once('@') {
            Some((of, snapshot)) => (of, Some(snapshot)),
            None => (name, None),
        };
        let of = VolumeName::new(self.tenant.clone(), of).ok()?;
        let opened = match snapshot {
            Some(snapshot) => self.volumes.snapshot(&SnapshotName::new(of, snapshot).ok()?).await,
            None => self.volumes.volume(&of).await,
        };
        match opened {
            Ok(volume) => Some(volume),
            Err(VolumeRefusal::Order(
                OrderError::Missing { .. } | OrderError::NoSnapshot { .. },
            )) => None,
            Err(error) => {
                tracing::warn!(%name, %error, "a volume cannot be opened");
                None
            }
        }
    }

    async fn id_of(&self, name: &str) -> Option<Uuid> {
        let rows = self.rows().await.ok()?;
        rows.into_iter().find(|row| row.name.name() == name).map(|row| row.id)
    }

    async fn names(&self) -> Result<Vec<String>, VolumeRefusal> {
        Ok(self.rows().await?.into_iter().map(|row| row.name.name().to_owned()).collect())
    }

    /// For those who go on at the next life of the node, or at another server, without a word.
    async fn written_through(&self, name: &str) -> Option<Rc<dyn Volume>> {
        Some(Rc::new(WrittenThrough::new(self.named(name).await?)))
    }
}

impl Exports for TenantExports {
    fn list(&self) -> LocalBoxFuture<'_, Vec<String>> {
        Box::pin(async {
            self.names().await.unwrap_or_else(|error| {
                tracing::warn!(%error, "volumes cannot be listed");
                Vec::new()
            })
        })
    }

    fn open<'a>(&'a self, name: &'a str) -> LocalBoxFuture<'a, Option<Rc<dyn Volume>>> {
        Box::pin(self.named(name))
    }
}

impl Disks for TenantExports {
    fn list(&self) -> LocalBoxFuture<'_, Option<BTreeMap<String, u64>>> {
        Box::pin(async {
            let rows = self.rows().await.inspect_err(|error| {
                tracing::warn!(%error, "volumes cannot be listed");
            });
            let disk = |row: VolumeRow| (row.name.name().to_owned(), row.size_bytes);
            Some(rows.ok()?.into_iter().map(disk).collect())
        })
    }

    fn open<'a>(&'a self, name: &'a str) -> LocalBoxFuture<'a, Option<Rc<dyn Volume>>> {
        Box::pin(self.written_through(name))
    }
}

impl nvmet::Volumes for TenantExports {
    fn list(&self) -> LocalBoxFuture<'_, Option<Vec<VolumeShown>>> {
        Box::pin(async {
            let rows = self.rows().await.inspect_err(|error| {
                tracing::warn!(%error, "volumes cannot be listed");
            });
            let shown = |row: VolumeRow| VolumeShown {
                name: row.name.name().to_owned(),
                size_bytes: row.size_bytes,
                guid: row.id.into_bytes(),
            };
            Some(rows.ok()?.into_iter().map(shown).collect())
        })
    }

    fn open<'a>(&'a self, name: &'a str) -> LocalBoxFuture<'a, Option<Opened>> {
        Box::pin(async move {
            // One that is deleted and made anew in between would have the name of the old one: looked at again once it is open.
            let id = self.id_of(name).await?;
            let volume = self.written_through(name).await?;
            (self.id_of(name).await? == id).then(|| Opened { volume, guid: id.into_bytes() })
        })
    }

    fn are_written_through(&self) -> bool {
        true
    }

    fn reservations(&self, guid: [u8; 16]) -> LocalBoxFuture<'_, Result<Vec<u8>, KeepError>> {
        Box::pin(async move {
            let id = Uuid::from_bytes(guid);
            self.volumes.reservations(&self.tenant, id).await.map_err(KeepError::store)
        })
    }

    fn keep_reservations(
        &self,
        guid: [u8; 16],
        bytes: Vec<u8>,
    ) -> LocalBoxFuture<'_, Result<(), KeepError>> {
        Box::pin(async move {
            let id = Uuid::from_bytes(guid);
            let kept = self.volumes.keep_reservations(&self.tenant, id, &bytes).await;
            kept.map_err(KeepError::store)
        })
    }
}

/// All exports of a cluster.
pub struct Exporter {
    /// Its name.
    cluster: String,
    exports: Vec<Export>,
    volumes: Rc<Volumes>,
    /// For the rings of guests, if they are to be served elsewhere.
    rings: Option<Rc<RingCores>>,
    /// Nobody is answered any more.
    loss: Cell<Option<Loss>>,
}

impl Exporter {
    /// Those of a cluster file; none has begun.
    #[must_use]
    pub fn new(loaded: &Loaded, volumes: Rc<Volumes>, rings: Option<Rc<RingCores>>) -> Rc<Self> {
        let exports = loaded.cluster.exports.iter().map(|spec| Export {
            tenant: spec.tenant.clone(),
            way: absolute(&spec.way, loaded),
            now: RefCell::new(match &spec.way {
                ExportWay::Virtiofs { .. } => Now::Elsewhere,
                _ => Now::Waits("it has not begun yet".into()),
            }),
        });
        let cluster = loaded.cluster.name.clone();
        let (exports, loss) = (exports.collect(), Cell::default());
        Rc::new(Self { cluster, exports, volumes, rings, loss })
    }

    /// Begins all of them, and tries again those that could not.
    pub async fn run(self: Rc<Self>) {
        loop {
            // Each for itself: a name may take long to look up.
            let begun = join_all(self.exports.iter().map(|export| self.begin(export))).await;
            if begun.into_iter().all(|has_begun| has_begun) {
                return std::future::pending().await;
            }
            reactor::sleep(TRY_AGAIN_AFTER).await;
        }
    }

    /// Begins one, unless it has; false: it could not, at one of its places.
    async fn begin(&self, export: &Export) -> bool {
        let shown = match &*export.now.borrow() {
            Now::Waits(_) => None,
            Now::Nvme(shown) => Some(Rc::clone(shown)),
            Now::Nbd(_) | Now::Vhost(..) | Now::Elsewhere | Now::Ended => return true,
        };
        if let Some(shown) = shown {
            return shown.listen().await;
        }
        // Nobody would be answered.
        if self.is_lost() {
            return true;
        }
        let begun = self.begun(export).await;
        if matches!(*export.now.borrow(), Now::Ended) || self.is_lost() {
            return true;
        }
        let now = match begun {
            Ok(now) => now,
            Err(error) => {
                let why = told(error);
                tracing::warn!(tenant = export.tenant, why, "an export cannot begin");
                export.now.replace(Now::Waits(why));
                return false;
            }
        };
        let shown = match &now {
            Now::Nvme(shown) => Some(Rc::clone(shown)),
            _ => None,
        };
        // Before it listens, which may take long: whoever ends it meanwhile, or knows that it is lost, has to find it.
        export.now.replace(now);
        let has_begun = match shown {
            Some(shown) => shown.listen().await,
            None => true,
        };
        let (tenant, (way, place)) = (&export.tenant, export.way.place());
        tracing::info!(tenant, way, place, "an export has begun");
        has_begun
    }

    async fn begun(&self, export: &Export) -> Result<Now, ExportError> {
        let tenant: Tenant = export.tenant.parse()?;
        let volumes = TenantExports { tenant, volumes: Rc::clone(&self.volumes) };
        match &export.way {
            ExportWay::Nbd { address, tls, verify_clients } => {
                let address: Address = looked_up(address).await?;
                let tls = tls.as_deref().map(|tls| Tls::open(tls, *verify_clients)).transpose()?;
                Ok(Now::Nbd(Server::listen(&address, Rc::new(volumes), tls)?))
            }
            ExportWay::Vhost { directory } => {
                let failed =
                    |source| ExportError::Directory { directory: directory.clone(), source };
                let sockets =
                    Directory::new(directory.clone(), Rc::new(volumes), self.rings.clone());
                let sockets = Rc::new(sockets.map_err(failed)?);
                let running = Rc::clone(&sockets);
                let running = reactor::spawn(async move { running.run().await });
                Ok(Now::Vhost(sockets, running))
            }
            ExportWay::Nvme { addresses, hosts, keys, tls_only } => {
                let hosts: Result<Vec<Nqn>, _> = hosts.iter().map(|host| host.parse()).collect();
                let hosts = Hosts::chosen(hosts?, keys.as_deref(), *tls_only)?;
                let target = Rc::new(nvmet::Target::new());
                if *tls_only {
                    target.require_tls();
                }
                let prefix = format!("{}:{}:{}", nvmet::NQN_PREFIX, self.cluster, export.tenant);
                let (shown, epoch) = (Rc::clone(&target), self.volumes.epoch().0);
                let follower = Follower::new(shown, Rc::new(volumes), &prefix, hosts, epoch)?;
                let unheard = |address: &String| {
                    let listening = Err("it does not listen yet".into());
                    NvmePath { address: address.clone(), listening }
                };
                let paths = RefCell::new(addresses.iter().map(unheard).collect());
                let running = reactor::spawn(async move { follower.run().await });
                Ok(Now::Nvme(Rc::new(NvmeExport { target, paths, running })))
            }
            ExportWay::Virtiofs { .. } => Ok(Now::Elsewhere),
        }
    }

    /// Nothing here answers any more: NVMe hosts are told why. Other clients have no way to be told, and wait.
    pub fn lose(&self, loss: Loss) {
        self.loss.set(self.loss.get().max(Some(loss)));
        for export in &self.exports {
            if let Now::Nvme(shown) = &*export.now.borrow() {
                shown.running.abort();
                shown.target.lose(loss);
            }
        }
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.loss.get().is_some()
    }

    /// Says how good a path to the volumes of a tenant is, by its number in the cluster file; hosts are told.
    ///
    /// # Errors
    ///
    /// [`NoPath`].
    pub fn set_path(&self, tenant: &Tenant, path: usize, state: AnaState) -> Result<(), NoPath> {
        let mut count = 0;
        let of_tenant = self.exports.iter().filter(|export| export.tenant == tenant.as_str());
        for export in of_tenant {
            let Now::Nvme(nvme) = &*export.now.borrow() else { continue };
            let paths = nvme.paths.borrow();
            count += paths.len();
            let Some(found) = path.checked_sub(1).and_then(|index| paths.get(index)) else {
                continue;
            };
            return match &found.listening {
                Ok(listening) => {
                    listening.set_state(state);
                    Ok(())
                }
                Err(why) => Err(NoPath::Silent { why: why.clone() }),
            };
        }
        Err(NoPath::Number { count })
    }

    /// How they are doing.
    #[must_use]
    pub fn status(&self) -> Vec<ExportStatus> {
        let status = |export: &Export| {
            let (clients, problem) = match &*export.now.borrow() {
                Now::Waits(why) => (0, Some(why.clone())),
                Now::Nbd(server) => (server.connections(), None),
                Now::Vhost(sockets, _) => (sockets.clients(), sockets.problem()),
                Now::Nvme(nvme) => {
                    let problem = self.loss.get().map(|loss| why_lost(loss).to_owned());
                    (nvme.target.controllers(), problem.or_else(|| nvme.problem()))
                }
                Now::Elsewhere | Now::Ended => (0, None),
            };
            let mut status = ExportStatus {
                tenant: export.tenant.clone(),
                clients,
                problem,
                ..ExportStatus::default()
            };
            match &export.way {
                ExportWay::Nbd { address, tls, .. } => {
                    (status.nbd, status.tls) = (address.clone(), tls.is_some());
                }
                ExportWay::Vhost { directory } => status.vhost = Some(directory.clone()),
                ExportWay::Virtiofs { socket, subtree, .. } => {
                    status.virtiofs = Some(socket.clone());
                    status.subtree = subtree.to_string();
                }
                ExportWay::Nvme { addresses, .. } => {
                    status.nvme = addresses.clone();
                    if let Now::Nvme(nvme) = &*export.now.borrow() {
                        let state = |path: &NvmePath| Some(path.listening.as_ref().ok()?.state());
                        status.nvme_states = nvme.paths.borrow().iter().map(state).collect();
                    }
                }
            }
            status
        };
        self.exports.iter().map(status).collect()
    }

    /// Ends them: what clients have asked for is carried out and answered.
    pub async fn end(&self) {
        let ended = self.exports.iter().map(async |export| {
            let was = std::mem::replace(&mut *export.now.borrow_mut(), Now::Ended);
            match was {
                Now::Nbd(server) => server.end().await,
                Now::Vhost(sockets, running) => {
                    running.abort();
                    sockets.end().await;
                }
                Now::Nvme(nvme) => {
                    nvme.running.abort();
                    nvme.target.end().await;
                }
                Now::Waits(_) | Now::Elsewhere | Now::Ended => {}
            }
        });
        join_all(ended).await;
    }
}

fn why_lost(loss: Loss) -> &'static str {
    match loss {
        Loss::Elsewhere => "another server has its volumes; hosts are told to go there",
        Loss::Stopped => {
            "an array has stopped, so its volumes have; hosts wait: `levada down`, and `levada up` when the drives are there"
        }
    }
}

/// With paths that start at the cluster file.
fn absolute(way: &ExportWay, loaded: &Loaded) -> ExportWay {
    match way {
        ExportWay::Nbd { address, tls, verify_clients } => ExportWay::Nbd {
            address: match address.strip_prefix(UNIX) {
                Some(path) => format!("{UNIX}{}", loaded.path(path.as_ref()).display()),
                None => address.clone(),
            },
            tls: tls.as_deref().map(|tls| loaded.path(tls)),
            verify_clients: *verify_clients,
        },
        ExportWay::Vhost { directory } => ExportWay::Vhost { directory: loaded.path(directory) },
        ExportWay::Virtiofs { socket, subtree, tag, cache } => ExportWay::Virtiofs {
            socket: loaded.path(socket),
            subtree: subtree.clone(),
            tag: tag.clone(),
            cache: *cache,
        },
        ExportWay::Nvme { addresses, hosts, keys, tls_only } => ExportWay::Nvme {
            addresses: addresses.clone(),
            hosts: hosts.clone(),
            keys: keys.as_deref().map(|keys| loaded.path(keys)),
            tls_only: *tls_only,
        },
    }
}
