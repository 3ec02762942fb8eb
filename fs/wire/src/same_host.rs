//! Connections that keep to the machine where both sides run on it, and are TCP otherwise.
//!
//! Who listens at `host:port` also listens on a Unix socket whose abstract name says so; who connects
//! tries that first. Frames are the same, but larger payloads are not copied ([`crate::sharing`]).
//!
//! What always holds:
//! - The short way is only taken between processes of one user, who may read each other's memory
//!   anyway; so nobody else can pose as a service by taking its name.
//! - Nothing that goes wrong on the short way keeps a client from its service: when nothing comes
//!   back on it for [`NEAR_FAILURES_MAX`], TCP is tried.
//!
//! After a crash of the service the system may hold its name for a moment; the next one takes
//! connections by TCP and tries for the name until it is free.

use crate::channel::{ChannelError, Connection, FrameSource, Listener, Transport};
use crate::frame::Frame;
use crate::sharing::Sharing;
use crate::tcp::{self, TcpTransport};
use futures_util::future::LocalBoxFuture;
use levada_base::reactor::{self, Instant, JoinHandle, net};
use levada_base::shared::share_buffers;
use levada_base::sync::Notify;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

/// A socket of this machine that takes longer belongs to somebody who takes no connections.
const NEAR_CONNECT_MAX: Duration = Duration::from_secs(1);
/// When nothing has come back on the short way for this long, TCP is tried once.
const NEAR_FAILURES_MAX: Duration = Duration::from_secs(3);
/// The name of a service that was killed is free again within milliseconds, as a rule.
const NAME_AGAIN_AFTER: Duration = Duration::from_millis(10);
const NAME_AGAIN_AFTER_MAX: Duration = Duration::from_secs(1);

/// Connects by the short way, or by TCP.
#[derive(Clone, Debug)]
pub struct HostTransport {
    /// Since when the short way to an address leads nowhere.
    failing: Rc<RefCell<BTreeMap<SocketAddr, Instant>>>,
}

impl HostTransport {
    /// From now on this thread's buffers can be seen by its neighbours.
    #[must_use]
    pub fn new() -> Self {
        // Fails again, and is logged, when a connection is made.
        let _ = share_buffers();
        Self { failing: Rc::default() }
    }

    /// `None`: TCP is to be taken.
    async fn connect_near(&self, address: &str) -> Option<Connection> {
        let there = address.parse().ok()?;
        let since = self.failing.borrow().get(&there).copied();
        if since.is_some_and(|since| since.elapsed() >= NEAR_FAILURES_MAX) {
            tracing::warn!(address, "nothing comes back from the neighbour; going by TCP");
            self.failing.borrow_mut().remove(&there);
            return None;
        }
        let name = name_of(there);
        let connecting = reactor::timeout(NEAR_CONNECT_MAX, net::Stream::connect_abstract(&name));
        let stream = connecting.await.ok()?.ok().filter(net::Stream::is_between_own)?;
        let near = sharing(stream).inspect_err(|error| {
            tracing::warn!(%error, "memory cannot be shared with processes of this machine");
        });
        let Connection { sink, source } = near.ok()?;
        let doubt = Doubt { there, failing: Rc::clone(&self.failing) };
        Some(Connection { sink, source: Box::new(NearSource { source, doubt: Some(doubt) }) })
    }
}

/// A connection on which nothing has arrived yet; dropped as such, the short way is failing.
struct Doubt {
    there: SocketAddr,
    failing: Rc<RefCell<BTreeMap<SocketAddr, Instant>>>,
}

impl Drop for Doubt {
    fn drop(&mut self) {
        self.failing.borrow_mut().entry(self.there).or_insert_with(reactor::now);
    }
}

/// Notes the first frame.
struct NearSource {
    source: Box<dyn FrameSource>,
    doubt: Option<Doubt>,
}

impl FrameSource for NearSource {
    fn recv(&mut self) -> LocalBoxFuture<'_, Result<Frame, ChannelError>> {
        if self.doubt.is_none() {
            return self.source.recv();
        }
        Box::pin(async move {
            let first = self.source.recv().await?;
            if let Some(doubt) = self.doubt.take() {
                let (there, failing) = (doubt.there, Rc::clone(&doubt.failing));
                drop(doubt);
                failing.borrow_mut().remove(&there);
            }
            Ok(first)
        })
    }
}

impl Default for HostTransport {
    fn default() -> Self {
        Self::new()
    }
}

fn name_of(address: SocketAddr) -> Vec<u8> {
    format!("levada/{address}").into_bytes()
}

fn sharing(stream: net::Stream) -> io::Result<Connection> {
    let (outgoing, queued) = tcp::outgoing();
    let near = Sharing::offer(&stream, &outgoing)?;
    Ok(tcp::connection(stream, outgoing, queued, Some(near)))
}

impl Transport for HostTransport {
    fn connect<'a>(
        &'a self,
        address: &'a str,
    ) -> LocalBoxFuture<'a, Result<Connection, ChannelError>> {
        Box::pin(async move {
            match self.connect_near(address).await {
                Some(connection) => Ok(connection),
                None => TcpTransport.connect(address).await,
            }
        })
    }
}

/// Takes connections by the short way and by TCP.
pub struct HostListener {
    address: SocketAddr,
    taken: Rc<Taken>,
    tasks: Vec<JoinHandle<()>>,
}

/// Connections that wait to be accepted.
#[derive(Default)]
struct Taken {
    streams: RefCell<VecDeque<(net::Stream, Way)>>,
    has_ended: Cell<bool>,
    changed: Notify,
}

#[derive(Clone, Copy)]
enum Way {
    Near,
    Far,
}

impl HostListener {
    /// Listens at a TCP address (port 0: any).
    ///
    /// # Errors
    ///
    /// What the system says.
    pub fn bind(address: &str) -> Result<Self, ChannelError> {
        let _ = share_buffers();
        let far = tcp::listen(address)?;
        let address = far.local_addr()?;
        let taken = Rc::new(Taken::default());
        let mut tasks = vec![reactor::spawn(take(far, Way::Far, Rc::clone(&taken)))];
        match net::Listener::bind_abstract(&name_of(address)) {
            Ok(near) => tasks.push(reactor::spawn(take(near, Way::Near, Rc::clone(&taken)))),
            Err(error) => {
                tracing::warn!(%error, %address, "processes of this machine connect by TCP for now");
                tasks.push(reactor::spawn(take_near_later(address, Rc::clone(&taken))));
            }
        }
        Ok(Self { address, taken, tasks })
    }

    /// The address that clients connect to.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for HostListener {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// Takes the name when it is free.
async fn take_near_later(address: SocketAddr, taken: Rc<Taken>) {
    let mut wait = NAME_AGAIN_AFTER;
    let near = loop {
        reactor::sleep(wait).await;
        wait = (wait * 2).min(NAME_AGAIN_AFTER_MAX);
        match net::Listener::bind_abstract(&name_of(address)) {
            Ok(near) => break near,
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => {
                tracing::warn!(%error, %address, "processes of this machine connect by TCP");
                return;
            }
        }
    };
    take(near, Way::Near, taken).await;
}

async fn take(listener: net::Listener, way: Way, taken: Rc<Taken>) {
    loop {
        match tcp::accept(&listener).await {
            Ok(stream) => taken.streams.borrow_mut().push_back((stream, way)),
            Err(error) => {
                tracing::debug!(%error, "a listener ended");
                taken.has_ended.set(true);
            }
        }
        taken.changed.notify_all();
        if taken.has_ended.get() {
            return;
        }
    }
}

impl Listener for HostListener {
    fn accept(&self) -> LocalBoxFuture<'_, Result<Connection, ChannelError>> {
        Box::pin(async move {
            loop {
                let next = || {
                    let next = self.taken.streams.borrow_mut().pop_front();
                    next.map(Some).or_else(|| self.taken.has_ended.get().then_some(None))
                };
                match self.taken.changed.until(next).await {
                    Some((stream, Way::Far)) => return Ok(tcp::plain(stream.carried())),
                    // Others come by TCP; one that is gone again is no reason to end.
                    Some((stream, Way::Near)) if stream.is_between_own() => {
                        if let Ok(connection) = sharing(stream) {
                            return Ok(connection);
                        }
                    }
                    Some((_, Way::Near)) => {}
                    None => return Err(ChannelError::Disconnected),
                }
            }
        })
    }
}
