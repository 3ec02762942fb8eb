//! A server: a socket, and the clients that came to it.

use crate::address::Address;
use crate::connection;
use crate::negotiation::{NoDeal, negotiate};
use crate::tls::Channel;
use crate::tls::Tls;
use futures_util::future::{Either, LocalBoxFuture, select};
use levada_base::reactor::net::{Listener, Stream};
use levada_base::reactor::{self, Elapsed, Group};
use levada_base::stream::{Clients, Present};
use levada_base::sync::Once;
use levada_volume::Volume;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// Clients of a server at once.
const CONNECTIONS_MAX: usize = 1024;
/// How long a client may take to choose an export.
const NEGOTIATION_LIMIT: Duration = Duration::from_secs(30);
/// How long clients are waited for at the end: one that does not take its answers is left.
const END_LIMIT: Duration = Duration::from_secs(5);

/// The volumes that a server shows.
pub trait Exports {
    /// Their names, as a client may ask for.
    fn list(&self) -> LocalBoxFuture<'_, Vec<String>>;

    /// The volume of this name; that of the empty name is the default.
    fn open<'a>(&'a self, name: &'a str) -> LocalBoxFuture<'a, Option<Rc<dyn Volume>>>;
}

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("cannot listen at {address}")]
    Bind { address: Address, source: io::Error },
    #[error("{address} is no socket, and is not removed for one")]
    NotASocket { address: Address },
    #[error("another server listens at {address}")]
    InUse { address: Address },
}

/// What the clients share.
pub(crate) struct Shared {
    pub(crate) exports: Rc<dyn Exports>,
    pub(crate) tls: Option<Tls>,
    pub(crate) stopping: Once,
    pub(crate) clients: Clients,
}

/// A server that listens.
pub struct Server {
    address: Address,
    shared: Rc<Shared>,
    /// Who accepts, and all clients.
    group: Group,
    accepting: Group,
}

impl Server {
    /// Listens at `address`, and shows `exports` to whoever comes; with `tls` only within that. Its tasks end with
    /// the group of the caller.
    ///
    /// # Errors
    ///
    /// [`ListenError`].
    pub fn listen(
        address: &Address,
        exports: Rc<dyn Exports>,
        tls: Option<Tls>,
    ) -> Result<Self, ListenError> {
        let failed = |source| ListenError::Bind { address: address.clone(), source };
        let (listener, address) = match address {
            Address::Tcp(at) => {
                let listener = Listener::bind(*at).map_err(failed)?;
                let bound = listener.local_addr().map_err(failed)?;
                (listener, Address::Tcp(bound))
            }
            Address::Unix(path) => {
                make_way(path, address)?;
                (Listener::bind_unix(path).map_err(failed)?, address.clone())
            }
        };
        let shared = Rc::new(Shared {
            exports,
            tls,
            stopping: Once::default(),
            clients: Clients::new(CONNECTIONS_MAX),
        });
        let group = reactor::current_group().child();
        let accepting = group.child();
        let (sharing, serving) = (Rc::clone(&shared), group.clone());
        reactor::spawn_in(&accepting, async move {
            let serve = |present, stream| {
                reactor::spawn_in(&serving, serve(present, stream, Rc::clone(&sharing)));
            };
            sharing.clients.accept_all(listener, "an NBD client", serve).await;
        });
        Ok(Self { address, shared, group, accepting })
    }

    /// Where it listens, with the port that the system chose if 0 was asked for.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Clients that are connected.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.shared.clients.count()
    }

    /// Ends it: requests that came before are carried out and answered, and connections closed. Returns when nothing is under way
    /// any more.
    pub async fn end(self) {
        self.accepting.kill();
        if let Address::Unix(path) = &self.address {
            // Somebody else may have removed it.
            let _ = std::fs::remove_file(path);
        }
        self.shared.stopping.happen();
        if reactor::timeout(END_LIMIT, self.shared.clients.all_left()).await.is_err() {
            tracing::warn!(left = self.connections(), "NBD clients that do not take their answers");
        }
        self.group.kill();
    }
}

/// Removes the socket of a server that is gone, and nothing else.
fn make_way(path: &Path, address: &Address) -> Result<(), ListenError> {
    let Ok(there) = std::fs::symlink_metadata(path) else { return Ok(()) };
    if !there.file_type().is_socket() {
        return Err(ListenError::NotASocket { address: address.clone() });
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(ListenError::InUse { address: address.clone() }),
        // Removed by who binds.
        Err(_) => Ok(()),
    }
}

/// Talks with a client, and serves it until it is done.
pub(crate) async fn serve(present: Present, stream: Stream, shared: Rc<Shared>) {
    let talk = negotiate(Channel::from(stream), &*shared.exports, shared.tls.as_ref());
    let talk = reactor::timeout(NEGOTIATION_LIMIT, talk);
    let agreed: Result<Result<_, NoDeal>, Elapsed> = {
        let stopping = pin!(shared.stopping.happened());
        let displaced = pin!(present.displaced());
        match select(Box::pin(talk), select(stopping, displaced)).await {
            Either::Left((agreed, _)) => agreed,
            Either::Right(_) => return,
        }
    };
    match agreed {
        Ok(Ok(Some(agreed))) => {
            present.settle();
            if let Err(error) = connection::serve(agreed, &shared.stopping).await {
                tracing::info!(%error, "the connection of an NBD client broke");
            }
        }
        Ok(Ok(None)) => {}
        Ok(Err(error)) => tracing::info!(%error, "an NBD client was turned away"),
        Err(_) => tracing::info!("an NBD client did not choose an export in time"),
    }
}
