//! The serving side of a connection.
//!
//! What always holds:
//! - A caller never has more in flight than it was granted, replies that wait to be sent included; one
//!   that tries is disconnected, so it cannot make the service hold more memory.
//! - A request that has begun runs to its end, also when its connection ends meanwhile.

use super::hello::{Answer, Hello};
use super::{Pongs, RpcError};
use crate::channel::{Connection, FrameSink, Listener};
use crate::frame::{Frame, Header, Kind, PAYLOAD_BYTES_MAX, decode_body, encode_body, flags};
use futures_util::future::LocalBoxFuture;
use levada_base::IoVec;
use levada_base::ids::{BootVerifier, TargetId};
use levada_base::reactor;
use levada_base::units::MIB;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::time::Duration;

const HANDSHAKE_MAX: Duration = Duration::from_secs(5);

/// What a handler answers.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// See [`flags`].
    pub flags: u32,
    pub verifier: BootVerifier,
    pub body: Vec<u8>,
    /// At most the request's `reply_bytes_max`.
    pub payload: IoVec,
}

impl Reply {
    /// A reply without payload.
    #[must_use]
    pub fn new(body: Vec<u8>) -> Self {
        Self { body, ..Self::default() }
    }

    /// A reply that says nothing but these [`flags`].
    #[must_use]
    pub fn flagged(flags: u32) -> Self {
        Self { flags, ..Self::default() }
    }
}

/// Names a connection for as long as the process lives; a later one has a larger number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnectionId(pub u64);

impl ConnectionId {
    fn next() -> Self {
        thread_local!(static LAST: Cell<u64> = const { Cell::new(0) });
        LAST.set(LAST.get() + 1);
        Self(LAST.get())
    }
}

/// The way back to whoever sent a request, for what is no reply: one-way frames at any time, in order with
/// the replies. They take no credits, so whoever pushes bounds what it pushes.
#[derive(Clone)]
pub struct Pusher {
    id: ConnectionId,
    /// Gone with the connection.
    sink: Weak<dyn FrameSink>,
    tenant: u32,
    source: u32,
    destination: u32,
    target: TargetId,
}

impl Pusher {
    fn new(line: &Line, request: &Header) -> Self {
        Self {
            id: line.id,
            sink: Rc::downgrade(&line.sink),
            tenant: request.tenant,
            source: request.destination,
            destination: request.source,
            target: request.target,
        }
    }

    /// The connection.
    #[must_use]
    pub fn connection(&self) -> ConnectionId {
        self.id
    }

    /// False once the connection has ended, and everything that came over it has been carried out.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.sink.strong_count() > 0
    }

    /// Sends a body to `client`, from the life `verifier` of the target. Whether it arrives is not known.
    ///
    /// # Panics
    ///
    /// When no frame holds it.
    pub fn push(&self, client: u64, verifier: BootVerifier, body: Vec<u8>) {
        let Some(sink) = self.sink.upgrade() else { return };
        let header = Header {
            tenant: self.tenant,
            verifier,
            source: self.source,
            destination: self.destination,
            target: self.target,
            client,
            ..Header::new(Kind::OneWay)
        };
        let _ = sink.send(Frame::new(header, body));
    }
}

/// Carries requests out.
pub trait Handler {
    /// Carries out one request; many run side by side. Replies to one connection are sent in the
    /// order in which their futures end.
    fn handle(&self, request: Frame, from: Pusher) -> LocalBoxFuture<'_, Reply>;

    /// Takes in a one-way frame, in order with the requests of that connection.
    fn one_way(&self, _frame: Frame, _from: ConnectionId) {}
}

/// Hands requests to the target that they name; targets come and go while it serves.
#[derive(Default)]
pub struct Router {
    targets: RefCell<BTreeMap<TargetId, Rc<dyn Handler>>>,
}

impl Router {
    /// Serves `target` here from now on.
    pub fn insert(&self, target: TargetId, handler: Rc<dyn Handler>) {
        self.targets.borrow_mut().insert(target, handler);
    }

    /// No longer serves `target` here; requests that have begun run to their end.
    pub fn remove(&self, target: TargetId) {
        let removed = self.targets.borrow_mut().remove(&target);
        drop(removed);
    }
}

impl Handler for Router {
    fn handle(&self, request: Frame, from: Pusher) -> LocalBoxFuture<'_, Reply> {
        let handler = self.targets.borrow().get(&request.header.target).cloned();
        Box::pin(async move {
            match handler {
                Some(handler) => handler.handle(request, from).await,
                None => Reply::flagged(flags::NOT_HERE),
            }
        })
    }

    fn one_way(&self, frame: Frame, from: ConnectionId) {
        let handler = self.targets.borrow().get(&frame.header.target).cloned();
        if let Some(handler) = handler {
            handler.one_way(frame, from);
        }
    }
}

/// Who serves, and how much one connection may have in flight.
#[derive(Clone, Copy, Debug)]
pub struct ServiceConfig {
    pub cluster: [u8; 16],
    pub node: u32,
    /// Requests in flight per connection.
    pub requests_max: u32,
    /// Payload bytes (of requests and their replies) in flight per connection; at least
    /// [`PAYLOAD_BYTES_MAX`].
    pub bytes_max: u32,
}

impl Default for ServiceConfig {
    fn default() -> Self {
        Self { cluster: [0; 16], node: 0, requests_max: 256, bytes_max: 64 * MIB as u32 }
    }
}

/// One connection.
struct Line {
    id: ConnectionId,
    sink: Rc<dyn FrameSink>,
    load: Rc<Load>,
}

/// What one connection has in flight: being carried out, or answered and not yet on its way.
#[derive(Default)]
struct Load {
    requests: Cell<u64>,
    bytes: Cell<u64>,
}

/// The share of one request, until its reply is on its way.
struct Share {
    of: Rc<Load>,
    bytes: u64,
}

impl Share {
    fn new(of: &Rc<Load>, bytes: u64) -> Self {
        of.requests.set(of.requests.get() + 1);
        of.bytes.set(of.bytes.get() + bytes);
        Self { of: Rc::clone(of), bytes }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.of.requests.set(self.of.requests.get() - 1);
        self.of.bytes.set(self.of.bytes.get() - self.bytes);
    }
}

/// Serves one connection until it ends. Requests run as tasks of the calling task's group.
///
/// # Errors
///
/// Why the connection ended, when it was not simply closed.
///
/// # Panics
///
/// When `config.bytes_max` is too small to carry the largest payload.
pub async fn serve(
    connection: Connection,
    handler: Rc<dyn Handler>,
    config: ServiceConfig,
) -> Result<(), RpcError> {
    assert!(config.bytes_max as usize >= PAYLOAD_BYTES_MAX, "the largest request must fit");
    let Connection { sink, mut source } = connection;
    let hello = reactor::timeout(HANDSHAKE_MAX, source.recv()).await;
    let hello = hello.map_err(|_| RpcError::Disconnected)??;
    if hello.header.kind != Kind::Hello {
        return Err(RpcError::Malformed);
    }
    let hello: Hello = decode_body(&hello.body).map_err(|_| RpcError::Malformed)?;
    let mut header = Header { source: config.node, ..Header::new(Kind::Hello) };
    match hello.judge(config.cluster, config.node) {
        Ok(welcome) => {
            header.credits = config.requests_max;
            header.credit_bytes = config.bytes_max;
            sink.send(Frame::new(header, encode_body(&Answer::Welcome(welcome))))?;
        }
        Err(refusal) => {
            sink.send(Frame::new(header, encode_body(&Answer::Refused(refusal))))?;
            sink.close();
            return Err(RpcError::Refused(refusal));
        }
    }
    let line = Rc::new(Line { id: ConnectionId::next(), sink, load: Rc::default() });
    let load = &line.load;
    let pongs = Pongs::default();
    loop {
        let Ok(frame) = source.recv().await else { break };
        match frame.header.kind {
            Kind::Request => {
                let charge = frame.header.charge(frame.payload_bytes());
                let share = Share::new(load, charge);
                if load.requests.get() > u64::from(config.requests_max)
                    || load.bytes.get() > u64::from(config.bytes_max)
                {
                    line.sink.close();
                    return Err(RpcError::Malformed);
                }
                reactor::spawn(carry_out(Rc::clone(&line), Rc::clone(&handler), frame, share));
            }
            Kind::Ping if !pongs.is_due() => {}
            Kind::Ping => line.sink.send(Frame::new(Header::new(Kind::Pong), Vec::new()))?,
            // Only carries what a connection says to itself: returned memory.
            Kind::OneWay if frame.body.is_empty() => {}
            Kind::OneWay => handler.one_way(frame, line.id),
            Kind::Pong => {}
            Kind::Reply | Kind::Hello => {
                line.sink.close();
                return Err(RpcError::Malformed);
            }
        }
    }
    line.sink.close();
    Ok(())
}

async fn carry_out(line: Rc<Line>, handler: Rc<dyn Handler>, request: Frame, share: Share) {
    let asked = request.header;
    let charge = share.bytes;
    let reply = handler.handle(request, Pusher::new(&line, &asked)).await;
    let header = Header {
        class: asked.class,
        flags: reply.flags,
        tenant: asked.tenant,
        verifier: reply.verifier,
        source: asked.destination,
        destination: asked.source,
        target: asked.target,
        client: asked.client,
        slot: asked.slot,
        sequence: asked.sequence,
        request: asked.request,
        credits: 1,
        credit_bytes: charge as u32,
        ..Header::new(Kind::Reply)
    };
    let frame = Frame { header, body: reply.body, payload: reply.payload };
    if let Err(error) = frame.check() {
        // Whoever asked waits for the end of its connection; others go on.
        tracing::error!(%error, "an answer that no frame holds is dropped");
        return;
    }
    // When the caller is gone it asks again over another connection.
    let _ = line.sink.send_keeping(frame, Box::new(share));
}

/// Serves every connection that `listener` takes, each as a task, until it takes no more.
pub async fn accept_all(
    listener: Rc<dyn Listener>,
    handler: Rc<dyn Handler>,
    config: ServiceConfig,
) {
    loop {
        match listener.accept().await {
            Ok(connection) => {
                let handler = Rc::clone(&handler);
                reactor::spawn(async move {
                    if let Err(error) = serve(connection, handler, config).await {
                        tracing::debug!(%error, "a connection ended");
                    }
                });
            }
            Err(error) => {
                tracing::debug!(%error, "the listener ended");
                break;
            }
        }
    }
}
