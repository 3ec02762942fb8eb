//! A server: a socket, and the clients that came to it.

use crate::address::Address;
use crate::channel::Channel;
use crate::connection;
use crate::negotiation::{NoDeal, negotiate};
use crate::tls::Tls;
use futures_util::future::LocalBoxFuture;
use levada_base::reactor::net::{Listener, Stream, accept_error_passes};
use levada_base::reactor::{self, Elapsed, Group};
use levada_base::sync::Notify;
use levada_volume::Volume;
use std::cell::Cell;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

/// Clients of a server at once.
const CONNECTIONS_MAX: usize = 1024;
/// How long a client may take to choose an export.
const NEGOTIATION_LIMIT: Duration = Duration::from_secs(30);
/// How long clients are waited for at the end: one that does not take its answers is left.
const END_LIMIT: Duration = Duration::from_secs(5);
/// After an error of the system that passes, as when there are no descriptors left.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(100);

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

/// The order to stop.
#[derive(Default)]
pub(crate) struct Stopping {
    is_told: Cell<bool>,
    changed: Notify,
}

impl Stopping {
    fn tell(&self) {
        self.is_told.set(true);
        self.changed.notify_all();
    }

    /// Returns when it is given.
    pub(crate) async fn told(&self) {
        self.changed.until(|| self.is_told.get().then_some(())).await;
    }
}

/// What the clients share.
struct Shared {
    exports: Rc<dyn Exports>,
    tls: Option<Tls>,
    stopping: Stopping,
    connections: Cell<usize>,
    left: Notify,
}

/// Counts a client for as long as it is there.
struct Counted(Rc<Shared>);

impl Counted {
    fn new(shared: &Rc<Shared>) -> Self {
        shared.connections.set(shared.connections.get() + 1);
        Self(Rc::clone(shared))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.connections.set(self.0.connections.get() - 1);
        self.0.left.notify_all();
    }
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
            stopping: Stopping::default(),
            connections: Cell::new(0),
            left: Notify::default(),
        });
        let group = reactor::current_group().child();
        let accepting = group.child();
        reactor::spawn_in(&accepting, accept_all(listener, Rc::clone(&shared), group.clone()));
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
        self.shared.connections.get()
    }

    /// Ends it: requests that came before are carried out and answered, and connections closed. Returns when nothing is under way
    /// any more.
    pub async fn end(self) {
        self.accepting.kill();
        if let Address::Unix(path) = &self.address {
            // Somebody else may have removed it.
            let _ = std::fs::remove_file(path);
        }
        self.shared.stopping.tell();
        let all_left = self.shared.left.until(|| (self.connections() == 0).then_some(()));
        if reactor::timeout(END_LIMIT, all_left).await.is_err() {
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

async fn accept_all(listener: Listener, shared: Rc<Shared>, group: Group) {
    loop {
        match listener.accept().await {
            Ok(_) if shared.connections.get() >= CONNECTIONS_MAX => {
                tracing::warn!("an NBD client is turned away: there are {CONNECTIONS_MAX}");
            }
            Ok(stream) => {
                let counted = Counted::new(&shared);
                reactor::spawn_in(&group, serve(counted, stream));
            }
            Err(error) if accept_error_passes(&error) => {
                tracing::warn!(%error, "cannot accept NBD clients");
                reactor::sleep(ACCEPT_AGAIN_AFTER).await;
            }
            Err(error) => {
                tracing::error!(%error, "no NBD client is accepted any more");
                return;
            }
        }
    }
}

async fn serve(counted: Counted, stream: Stream) {
    let shared = &counted.0;
    let talk = negotiate(Channel::new(stream), &*shared.exports, shared.tls.as_ref());
    let talk = reactor::timeout(NEGOTIATION_LIMIT, talk);
    let talk = futures_util::future::select(Box::pin(talk), Box::pin(shared.stopping.told()));
    let agreed: Result<Result<_, NoDeal>, Elapsed> = match talk.await {
        futures_util::future::Either::Left((agreed, _)) => agreed,
        futures_util::future::Either::Right(((), _)) => return,
    };
    match agreed {
        Ok(Ok(Some(agreed))) => {
            if let Err(error) = connection::serve(agreed, &shared.stopping).await {
                tracing::info!(%error, "the connection of an NBD client broke");
            }
        }
        Ok(Ok(None)) => {}
        Ok(Err(error)) => tracing::info!(%error, "an NBD client was turned away"),
        Err(_) => tracing::info!("an NBD client did not choose an export in time"),
    }
}
