//! Connections that keep to the machine where both sides run on it, and are TCP otherwise.
//!
//! Who listens at `host:port` also listens on a Unix socket whose abstract name says so; who connects
//! tries that first. Frames are the same, but larger payloads are not copied ([`crate::sharing`]).
//!
//! What always holds: the short way is only taken between processes of one user, who may read each
//! other's memory anyway; so nobody else can pose as a service by taking its name.

use crate::channel::{ChannelError, Connection, Listener, Transport};
use crate::sharing::Sharing;
use crate::tcp::{self, TcpTransport};
use futures_util::future::LocalBoxFuture;
use levada_base::reactor::{self, JoinHandle, net};
use levada_base::shared::share_buffers;
use levada_base::sync::Notify;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;

/// So that a frame's head finds room at once.
const SOCKET_BYTES: u32 = 1 << 20;

/// Connects by the short way, or by TCP.
#[derive(Clone, Copy, Debug)]
pub struct HostTransport(());

impl HostTransport {
    /// From now on this thread's buffers can be seen by its neighbours.
    #[must_use]
    pub fn new() -> Self {
        // Fails again, and is logged, when a connection is made.
        let _ = share_buffers();
        Self(())
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
    stream.set_buffers(SOCKET_BYTES);
    let (outgoing, queued) = tcp::outgoing();
    let sharing = Sharing::offer(&stream, &outgoing)?;
    Ok(tcp::connection(stream, outgoing, queued, Some(sharing)))
}

impl Transport for HostTransport {
    fn connect<'a>(
        &'a self,
        address: &'a str,
    ) -> LocalBoxFuture<'a, Result<Connection, ChannelError>> {
        Box::pin(async move {
            if let Ok(there) = address.parse()
                && let Ok(stream) = net::Stream::connect_abstract(&name_of(there)).await
                && stream.is_between_own()
            {
                return Ok(sharing(stream)?);
            }
            TcpTransport.connect(address).await
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
                tracing::warn!(%error, %address, "processes of this machine connect by TCP");
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

async fn take(listener: net::Listener, way: Way, taken: Rc<Taken>) {
    loop {
        match listener.accept().await {
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
                    Some((stream, Way::Far)) => return Ok(tcp::plain(stream)),
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
