//! A target: addresses, and the subsystems that hosts find there.

use crate::connection::{serve, serve_socket};
use crate::controller::Controller;
use crate::gate::Proofs;
use crate::memory::SHARED_BYTES;
use crate::port::{Passage, Port};
use crate::reservations::HostId;
use crate::subsystem::{Loss, Subsystem};
use levada_base::reactor::net::Listener;
use levada_base::reactor::{self, Group, Instant};
use levada_base::stream::{ByteStream, Clients, Present};
use levada_base::sync::{Once, Semaphore};
use levada_nvme::log::{AnaState, DiscoveryEntry, Event};
use levada_nvme::tls::{PskIdentity, SharedKey};
use levada_nvme::{DISCOVERY_NQN, Nqn};
use levada_tls::{Acceptor, Session};
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::time::Duration;

/// Connections of a target at once.
const CONNECTIONS_MAX: usize = 4096;
/// Of them those that ask what there is: each has some memory for answers, and anybody may.
const DISCOVERING_MAX: usize = CONNECTIONS_MAX / 4;
/// How long hosts are waited for at the end.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Why a target cannot listen.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen for NVMe/TCP at {address}")]
pub struct ListenError {
    address: SocketAddr,
    source: io::Error,
}

/// What connections share.
pub(crate) struct Shared {
    subsystems: RefCell<BTreeMap<Nqn, Subsystem>>,
    ports: RefCell<Vec<Rc<Port>>>,
    discovering: RefCell<Vec<Weak<Controller>>>,
    next_discovery_id: Cell<u16>,
    /// Counts changes of what discovery tells.
    generation: Cell<u64>,
    pub started: Instant,
    is_tls_only: Cell<bool>,
    /// Nothing is served here any more.
    loss: Cell<Option<Loss>>,
    /// Made for the first host that comes with TLS.
    acceptor: OnceCell<Acceptor>,
    /// Hosts are let in.
    begun: Once,
    pub stopping: Once,
    clients: Clients,
    /// Bytes of memory that connections may borrow.
    pub memory: Rc<Semaphore>,
    pub proofs: Proofs,
}

impl Shared {
    pub fn subsystem(&self, nqn: &Nqn) -> Option<Subsystem> {
        self.subsystems.borrow().get(nqn).cloned()
    }

    /// Which subsystems there are is not known any more.
    pub fn is_lost(&self) -> bool {
        self.loss.get().is_some()
    }

    /// A controller of discovery.
    pub fn connect_discovery(
        &self,
        host: (Nqn, HostId),
        port: &Rc<Port>,
        keep_alive_ms: u32,
    ) -> Rc<Controller> {
        let id = self.next_discovery_id.get();
        self.next_discovery_id.set(id % 0xffef + 1);
        let controller = Rc::new(Controller::new(id, None, host, true, port, keep_alive_ms));
        let mut discovering = self.discovering.borrow_mut();
        discovering.retain(|controller| controller.strong_count() > 0);
        if discovering.len() >= DISCOVERING_MAX {
            let oldest = discovering.remove(0);
            oldest.upgrade().inspect(|oldest| oldest.evict("another one looks around"));
        }
        discovering.push(Rc::downgrade(&controller));
        controller
    }

    /// What a host finds here: the generation, and every subsystem that admits it at every port.
    pub fn discovery(
        &self,
        controller: &Controller,
        came_to: SocketAddr,
    ) -> (u64, Vec<DiscoveryEntry>) {
        let mut entries = Vec::new();
        for subsystem in self.subsystems.borrow().values() {
            let Some(keys) = subsystem.admission(controller.host()) else { continue };
            for port in self.ports.borrow().iter() {
                let mut address = port.address;
                if address.ip().is_unspecified() {
                    // Everywhere: where this host came to is one that it can reach.
                    address.set_ip(came_to.ip().to_canonical());
                }
                entries.push(DiscoveryEntry {
                    subsystem: subsystem.nqn().clone(),
                    is_discovery: false,
                    address,
                    port: port.id,
                    needs_tls: keys.tls.is_some() || self.is_tls_only(),
                });
            }
        }
        (self.generation.get(), entries)
    }

    /// Hosts that come without TLS are refused, whoever they are.
    pub fn is_tls_only(&self) -> bool {
        self.is_tls_only.get()
    }

    /// TLS of a new connection, of which `received` has come already.
    pub fn tls_session(self: &Rc<Self>, received: &[u8]) -> io::Result<Session> {
        let acceptor = match self.acceptor.get() {
            Some(acceptor) => acceptor,
            None => {
                let acceptor = Acceptor::new().map_err(io::Error::other)?;
                self.acceptor.get_or_init(|| acceptor)
            }
        };
        let shared = Rc::clone(self);
        acceptor.session(received, Rc::new(move |identity| shared.tls_key(identity)))
    }

    /// The key of a host. For discovery it may be that of any subsystem.
    fn tls_key(&self, identity: &PskIdentity) -> Option<SharedKey> {
        let of = |subsystem: &Subsystem| subsystem.admission(&identity.host)?.tls;
        let retained = match identity.subsystem.as_str() {
            DISCOVERY_NQN => self.subsystems.borrow().values().find_map(of),
            _ => of(&self.subsystem(&identity.subsystem)?),
        };
        retained?.shared(identity)
    }

    fn discovery_changed(&self) {
        self.generation.set(self.generation.get() + 1);
        for controller in self.discovering.borrow().iter().filter_map(Weak::upgrade) {
            controller.happened(Event::DiscoveryChanged);
        }
    }
}

/// See the module. Lives on one core.
pub struct Target {
    shared: Rc<Shared>,
    /// Who accepts, and all connections.
    group: Group,
    accepting: Group,
}

/// An address at which a target listens.
#[derive(Clone)]
pub struct Path {
    shared: Rc<Shared>,
    port: Rc<Port>,
    /// All connections of the target.
    group: Group,
}

impl Path {
    /// The address, with the port that the system chose if 0 was asked for.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.port.address
    }

    /// Says what becomes of what comes over this path: to take it out of service, or to try what hosts make of that.
    pub fn set_passage(&self, passage: Passage) {
        self.port.set_passage(passage);
    }

    /// Serves a host that has come some other way than through the system's network. One that is too many, or comes while
    /// nobody may, is closed.
    pub fn serve(&self, stream: impl ByteStream + 'static) {
        let Some(present) = self.shared.clients.enter() else { return };
        let came_to = self.port.address;
        self.spawn(present, async move |shared, port, present| {
            shared.begun.happened().await;
            serve(shared, port, stream, came_to, ("a host in memory", present)).await;
        });
    }

    /// Has a connection served, unless nobody may come here now.
    fn spawn(
        &self,
        present: Present,
        serve: impl AsyncFnOnce(Rc<Shared>, Rc<Port>, &Present) + 'static,
    ) {
        if self.port.is_closed() {
            return;
        }
        let (shared, port) = (Rc::clone(&self.shared), Rc::clone(&self.port));
        reactor::spawn_in(&self.group, async move {
            serve(shared, port, &present).await;
        });
    }

    /// How good it is, as it was said last.
    #[must_use]
    pub fn state(&self) -> AnaState {
        self.port.state()
    }

    /// Says how good this path is; hosts are told, and commands over it refused where it is not to be used.
    pub fn set_state(&self, state: AnaState) {
        if self.port.set_state(state) {
            for subsystem in self.shared.subsystems.borrow().values() {
                subsystem.path_changed(&self.port);
            }
        }
    }
}

impl Default for Target {
    fn default() -> Self {
        Self::new()
    }
}

impl Target {
    /// One without addresses and subsystems. Its tasks end with the group of the caller.
    #[must_use]
    pub fn new() -> Self {
        let group = reactor::current_group().child();
        let shared = Shared {
            subsystems: RefCell::default(),
            ports: RefCell::default(),
            discovering: RefCell::default(),
            next_discovery_id: Cell::new(1),
            generation: Cell::new(1),
            started: reactor::now(),
            is_tls_only: Cell::default(),
            loss: Cell::default(),
            acceptor: OnceCell::new(),
            begun: Once::default(),
            stopping: Once::default(),
            clients: Clients::new(CONNECTIONS_MAX),
            memory: Semaphore::new(SHARED_BYTES),
            proofs: Proofs::default(),
        };
        Self { shared: Rc::new(shared), accepting: group.child(), group }
    }

    /// Refuses hosts that come without TLS, whoever they are, and whatever they ask for.
    pub fn require_tls(&self) {
        self.shared.is_tls_only.set(true);
    }

    /// Lets hosts in. Those who came before have waited.
    pub fn begin(&self) {
        self.shared.begun.happen();
    }

    /// Listens at one more address; hosts are let in once it has [begun](Self::begin).
    ///
    /// # Errors
    ///
    /// [`ListenError`].
    pub fn listen(&self, address: SocketAddr) -> Result<Path, ListenError> {
        let failed = |source| ListenError { address, source };
        let listener = Listener::bind(address).map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        let path = self.port(bound);
        let (shared, at) = (Rc::clone(&self.shared), path.clone());
        reactor::spawn_in(&self.accepting, async move {
            let serve = |present, stream| {
                at.spawn(present, async move |shared, port, present| {
                    serve_socket(shared, port, stream, present).await
                })
            };
            shared.begun.happened().await;
            shared.clients.accept_all(listener, "an NVMe host", serve).await;
        });
        Ok(path)
    }

    /// One more address, whose hosts are handed to [`Path::serve`].
    #[must_use]
    pub fn port(&self, address: SocketAddr) -> Path {
        let id = self.shared.ports.borrow().len() as u16 + 1;
        let port = Rc::new(Port::new(id, address));
        self.shared.ports.borrow_mut().push(Rc::clone(&port));
        self.shared.discovery_changed();
        Path { shared: Rc::clone(&self.shared), port, group: self.group.clone() }
    }

    /// Shows a subsystem to the hosts that it admits; one of the same name ends.
    pub fn add(&self, subsystem: Subsystem) {
        let nqn = subsystem.nqn().clone();
        if let Some(loss) = self.shared.loss.get() {
            subsystem.lose_at_once(loss);
        }
        let old = self.shared.subsystems.borrow_mut().insert(nqn, subsystem);
        if let Some(old) = old {
            old.end();
        }
        self.shared.discovery_changed();
    }

    /// Shows it no more. What hosts have asked of it is carried out, and their connections end.
    pub fn remove(&self, nqn: &Nqn) {
        let removed = self.shared.subsystems.borrow_mut().remove(nqn);
        if let Some(removed) = removed {
            removed.end();
            self.shared.discovery_changed();
        }
    }

    /// What is shown here answers no more. What hosts have asked for may not end, so their connections do; those who come back are told why (ANA),
    /// and what they ask of blocks is refused. Who waited for the target to [begin](Self::begin) is let in, to be told as well.
    pub fn lose(&self, loss: Loss) {
        self.shared.loss.set(self.shared.loss.get().max(Some(loss)));
        self.shared.subsystems.borrow().values().for_each(|it| it.lose_at_once(loss));
        self.begin();
    }

    /// Connections, and bytes that they have borrowed.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn held(&self) -> (usize, u64) {
        (self.shared.clients.count(), SHARED_BYTES - self.shared.memory.available())
    }

    /// Controllers that hosts have of all subsystems.
    #[must_use]
    pub fn controllers(&self) -> usize {
        self.shared.subsystems.borrow().values().map(Subsystem::controllers).sum()
    }

    /// Ends it: what hosts asked for before is carried out and answered, and connections are closed. Returns when nothing is under way
    /// any more.
    pub async fn end(&self) {
        self.accepting.kill();
        self.shared.stopping.happen();
        for port in self.shared.ports.borrow().iter().filter(|port| !port.is_closed()) {
            // Answers that were held up leave.
            port.set_passage(Passage::Open);
        }
        let clients = &self.shared.clients;
        if reactor::timeout(END_LIMIT, clients.all_left()).await.is_err() {
            tracing::warn!(left = clients.count(), "NVMe hosts whose commands do not end");
        }
        self.group.kill();
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.accepting.kill();
        self.group.kill();
    }
}
