//! The exports of a cluster: servers that show the volumes of a tenant.
//!
//! What always holds: an export shows the volumes of its tenant, and of no other.
//!
//! One that cannot begin, because its address is taken or its certificates are wrong, is told in the status and tried again;
//! it keeps nothing else from serving.

use crate::control::ExportStatus;
use crate::volumes::{VolumeRefusal, Volumes};
use futures_util::future::{LocalBoxFuture, join_all};
use levada_base::reactor;
use levada_export_nbd::{Address, AddressError, Exports, ListenError, Server, Tls, TlsError};
use levada_spec::{ExportSpec, Loaded};
use levada_volume::{NameError, OrderError, Tenant, Volume, VolumeName};
use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

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
}

/// One export of the cluster file.
struct Export {
    spec: ExportSpec,
    /// Absolute.
    tls: Option<PathBuf>,
    /// As written, but with an absolute path.
    nbd: String,
    now: RefCell<Now>,
}

/// How an export is doing.
enum Now {
    Waits(String),
    Serves(Server),
    Ended,
}

/// The volumes of a tenant, for clients.
struct TenantExports {
    tenant: Tenant,
    volumes: Rc<Volumes>,
}

impl Exports for TenantExports {
    fn list(&self) -> LocalBoxFuture<'_, Vec<String>> {
        Box::pin(async {
            self.volumes.names(&self.tenant).await.unwrap_or_else(|error| {
                tracing::warn!(%error, "volumes cannot be listed");
                Vec::new()
            })
        })
    }

    fn open<'a>(&'a self, name: &'a str) -> LocalBoxFuture<'a, Option<Rc<dyn Volume>>> {
        Box::pin(async move {
            let name = VolumeName::new(self.tenant.clone(), name).ok()?;
            match self.volumes.volume(&name).await {
                Ok(volume) => Some(volume),
                Err(VolumeRefusal::Order(OrderError::Missing { .. })) => None,
                Err(error) => {
                    tracing::warn!(%name, %error, "a volume cannot be opened");
                    None
                }
            }
        })
    }
}

/// All exports of a cluster.
pub struct Exporter {
    exports: Vec<Export>,
    volumes: Rc<Volumes>,
}

impl Exporter {
    /// Those of a cluster file; none has begun.
    #[must_use]
    pub fn new(loaded: &Loaded, volumes: Rc<Volumes>) -> Rc<Self> {
        const UNIX: &str = "unix:";
        let absolute = |nbd: &String| match nbd.strip_prefix(UNIX) {
            Some(path) => format!("{UNIX}{}", loaded.path(path.as_ref()).display()),
            None => nbd.clone(),
        };
        let exports = loaded.cluster.exports.iter().map(|spec| Export {
            spec: spec.clone(),
            tls: spec.tls.as_deref().map(|tls| loaded.path(tls)),
            nbd: absolute(&spec.nbd),
            now: RefCell::new(Now::Waits("it has not begun yet".into())),
        });
        Rc::new(Self { exports: exports.collect(), volumes })
    }

    /// Begins all of them, and tries again those that could not.
    pub async fn run(self: Rc<Self>) {
        loop {
            let mut waits = false;
            for export in &self.exports {
                waits |= !self.begin(export);
            }
            if !waits {
                return std::future::pending().await;
            }
            reactor::sleep(TRY_AGAIN_AFTER).await;
        }
    }

    /// Begins one, unless it has; false: it could not.
    fn begin(&self, export: &Export) -> bool {
        if !matches!(&*export.now.borrow(), Now::Waits(_)) {
            return true;
        }
        let begun = self.begun(export);
        let has_begun = begun.is_ok();
        *export.now.borrow_mut() = match begun {
            Ok(server) => {
                tracing::info!(tenant = export.spec.tenant, address = %server.address(), "NBD");
                Now::Serves(server)
            }
            Err(error) => {
                let why = format!("{:#}", anyhow::Error::from(error));
                tracing::warn!(tenant = export.spec.tenant, why, "an export cannot begin");
                Now::Waits(why)
            }
        };
        has_begun
    }

    fn begun(&self, export: &Export) -> Result<Server, ExportError> {
        let tenant: Tenant = export.spec.tenant.parse()?;
        let address: Address = export.nbd.parse()?;
        let tls = export.tls.as_deref();
        let tls = tls.map(|tls| Tls::open(tls, export.spec.verify_clients)).transpose()?;
        let exports = TenantExports { tenant, volumes: Rc::clone(&self.volumes) };
        Ok(Server::listen(&address, Rc::new(exports), tls)?)
    }

    /// How they are doing.
    #[must_use]
    pub fn status(&self) -> Vec<ExportStatus> {
        let status = |export: &Export| {
            let (clients, problem) = match &*export.now.borrow() {
                Now::Waits(why) => (0, Some(why.clone())),
                Now::Serves(server) => (server.connections(), None),
                Now::Ended => (0, None),
            };
            let tenant = export.spec.tenant.clone();
            ExportStatus {
                tenant,
                nbd: export.nbd.clone(),
                tls: export.tls.is_some(),
                clients,
                problem,
            }
        };
        self.exports.iter().map(status).collect()
    }

    /// Ends them: what clients have asked for is carried out and answered.
    pub async fn end(&self) {
        let ended = self.exports.iter().filter_map(|export| {
            match std::mem::replace(&mut *export.now.borrow_mut(), Now::Ended) {
                Now::Serves(server) => Some(server.end()),
                Now::Waits(_) | Now::Ended => None,
            }
        });
        join_all(ended).await;
    }
}
