//! The calling side of one connection.
//!
//! What always holds:
//! - No more is in flight than the service granted.
//! - When the connection ends, every request in flight fails with `Disconnected`; none hangs.
//! - A service that is silent for [`SILENCE_MAX`] while requests wait counts as gone.

use super::credits::Credits;
use super::hello::{Answer, Hello, Welcome};
use super::{Pongs, Refusal, RpcError};
use crate::channel::{Connection, FrameSink, FrameSource};
use crate::frame::{
    Class, Frame, Header, Kind, NO_SLOT, PAYLOAD_BYTES_MAX, VERSION, decode_body, encode_body,
    flags,
};
use levada_base::IoVec;
use levada_base::ids::{BootVerifier, TargetId};
use levada_base::reactor::{self, Instant, JoinHandle};
use levada_base::sync::{Notify, oneshot};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

/// Nothing heard for this long while requests wait: ask whether anybody is there.
const PING_AFTER: Duration = Duration::from_secs(2);
/// A request that waits this long for its answer is worth a line in the log, and again after twice
/// the time.
const LATE_AFTER: Duration = Duration::from_secs(10);
/// Nothing heard for this long while requests wait: the service is gone.
pub const SILENCE_MAX: Duration = Duration::from_secs(10);
const HANDSHAKE_MAX: Duration = Duration::from_secs(5);

/// A request as its maker sees it; cheap to send again.
#[derive(Clone, Debug)]
pub struct Call {
    /// The request's kind, for logs.
    pub kind: &'static str,
    pub target: TargetId,
    pub class: Class,
    pub tenant: u32,
    /// See [`flags`].
    pub flags: u32,
    pub client: u64,
    /// [`NO_SLOT`] for requests that change nothing.
    pub slot: u32,
    pub sequence: u64,
    pub verifier: BootVerifier,
    pub body: Vec<u8>,
    pub payload: IoVec,
    pub reply_bytes_max: u32,
}

impl Call {
    /// A request that changes nothing and carries no payload.
    #[must_use]
    pub fn new(target: TargetId, body: Vec<u8>) -> Self {
        Self {
            kind: "request",
            target,
            class: Class::Foreground,
            tenant: 0,
            flags: 0,
            client: 0,
            slot: NO_SLOT,
            sequence: 0,
            verifier: BootVerifier(0),
            body,
            payload: IoVec::new(),
            reply_bytes_max: 0,
        }
    }

    fn frame(&self, node: u32, peer_node: u32) -> Frame {
        let header = Header {
            class: self.class,
            flags: self.flags,
            tenant: self.tenant,
            source: node,
            destination: peer_node,
            target: self.target,
            client: self.client,
            slot: self.slot,
            sequence: self.sequence,
            verifier: self.verifier,
            reply_bytes_max: self.reply_bytes_max,
            ..Header::new(Kind::Request)
        };
        Frame { header, body: self.body.clone(), payload: self.payload.clone() }
    }
}

/// One connection to a service, after the handshake. Dropping it ends the connection.
pub struct Caller {
    shared: Rc<Shared>,
    tasks: [JoinHandle<()>; 2],
    welcome: Welcome,
    node: u32,
}

/// Takes in one-way frames, in the order in which they and the replies were sent.
pub type OnOneWay = Rc<dyn Fn(&Frame)>;

/// A request that waits for its reply.
struct Pending {
    reply: oneshot::Sender<Frame>,
    header: Header,
    kind: &'static str,
    sent: Instant,
}

struct Shared {
    /// Where the service is, for logs.
    address: String,
    on_one_way: Option<OnOneWay>,
    sink: Rc<dyn FrameSink>,
    pending: RefCell<BTreeMap<u64, Pending>>,
    next_request: Cell<u64>,
    credits: Rc<Credits>,
    closed: Cell<bool>,
    heard: Cell<Instant>,
    /// `pending` is no longer empty, or the connection has ended.
    busy: Notify,
}

impl Caller {
    /// Shakes hands over a fresh connection to `address`. One-way frames go to `on_one_way`.
    ///
    /// # Errors
    ///
    /// [`RpcError::Refused`], or [`RpcError::Disconnected`] also when nobody answers in time.
    pub async fn new(
        connection: Connection,
        address: &str,
        hello: &Hello,
        on_one_way: Option<OnOneWay>,
    ) -> Result<Self, RpcError> {
        let Connection { sink, mut source } = connection;
        let header = Header { source: hello.node, ..Header::new(Kind::Hello) };
        sink.send(Frame::new(header, encode_body(hello)))?;
        let answer = reactor::timeout(HANDSHAKE_MAX, source.recv()).await;
        let frame = answer.map_err(|_| RpcError::Disconnected)??;
        if frame.header.kind != Kind::Hello {
            return Err(RpcError::Malformed);
        }
        let answer = decode_body(&frame.body).map_err(|_| RpcError::Malformed)?;
        let welcome = match answer {
            Answer::Welcome(welcome) => welcome,
            Answer::Refused(refusal) => return Err(RpcError::Refused(refusal)),
        };
        if welcome.version != VERSION {
            return Err(RpcError::Refused(Refusal::Version { min: VERSION, max: VERSION }));
        }
        if hello.cluster != [0; 16] && welcome.cluster != hello.cluster {
            return Err(RpcError::Refused(Refusal::Cluster));
        }
        // A smaller window could never carry the largest request.
        if frame.header.credits == 0
            || u64::from(frame.header.credit_bytes) < PAYLOAD_BYTES_MAX as u64
        {
            return Err(RpcError::Malformed);
        }
        let shared = Rc::new(Shared {
            address: address.to_owned(),
            on_one_way,
            sink,
            pending: RefCell::default(),
            next_request: Cell::new(1),
            credits: Rc::default(),
            closed: Cell::new(false),
            heard: Cell::new(reactor::now()),
            busy: Notify::default(),
        });
        let granted = &frame.header;
        shared.credits.grant(u64::from(granted.credits), u64::from(granted.credit_bytes));
        let tasks = [
            reactor::spawn(Rc::clone(&shared).receive(source)),
            reactor::spawn(Rc::clone(&shared).watch()),
        ];
        Ok(Self { shared, tasks, welcome, node: hello.node })
    }

    /// Who answers here.
    #[must_use]
    pub fn welcome(&self) -> Welcome {
        self.welcome
    }

    /// True once the connection has ended.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.closed.get()
    }

    /// Requests that wait for their reply.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.shared.pending.borrow().len()
    }

    /// Sends a request and waits for its reply. Giving up the wait does not take the request
    /// back.
    ///
    /// # Errors
    ///
    /// [`RpcError::Disconnected`], [`RpcError::TooLong`] or [`RpcError::Malformed`].
    pub async fn call(&self, call: &Call) -> Result<Frame, RpcError> {
        self.send(call).await?.reply().await
    }

    /// Sends a request. With an error it was not sent, and is not carried out.
    pub(super) async fn send(&self, call: &Call) -> Result<Sent, RpcError> {
        let shared = &self.shared;
        let mut frame = call.frame(self.node, self.welcome.node);
        frame.check().map_err(RpcError::TooLong)?;
        let charge = frame.header.charge(frame.payload_bytes());
        if charge > PAYLOAD_BYTES_MAX as u64 {
            let bytes = charge as usize;
            return Err(RpcError::TooLong(crate::frame::FrameError::PayloadTooLong { bytes }));
        }
        if shared.closed.get() {
            return Err(RpcError::Disconnected);
        }
        let permit = shared.credits.acquire(charge).await.ok_or(RpcError::Disconnected)?;
        if shared.closed.get() {
            return Err(RpcError::Disconnected);
        }
        let request = shared.next_request.get();
        shared.next_request.set(request + 1);
        frame.header.request = request;
        let (reply, receiver) = oneshot::channel();
        {
            let mut pending = shared.pending.borrow_mut();
            let sent = reactor::now();
            if pending.is_empty() {
                shared.heard.set(sent);
                shared.busy.notify_all();
            }
            pending.insert(request, Pending { reply, header: frame.header, kind: call.kind, sent });
        }
        if let Err(error) = shared.sink.send(frame) {
            shared.close();
            return Err(error.into());
        }
        permit.spend();
        Ok(Sent { receiver, reply_bytes_max: call.reply_bytes_max })
    }
}

/// A request that is on its way.
pub(super) struct Sent {
    receiver: oneshot::Receiver<Frame>,
    reply_bytes_max: u32,
}

impl Sent {
    pub(super) async fn reply(self) -> Result<Frame, RpcError> {
        let reply = self.receiver.await.map_err(|_| RpcError::Disconnected)?;
        if reply.header.flags & flags::MALFORMED != 0 {
            return Err(RpcError::Malformed);
        }
        if reply.payload_bytes() as u64 > u64::from(self.reply_bytes_max) {
            return Err(RpcError::Malformed);
        }
        Ok(reply)
    }
}

impl Caller {
    /// Sends a one-way frame to `target`, in order with the requests. Whether it arrives is not known.
    ///
    /// # Panics
    ///
    /// When no frame holds it.
    pub fn push(&self, target: TargetId, client: u64, verifier: BootVerifier, body: Vec<u8>) {
        let header = Header {
            source: self.node,
            destination: self.welcome.node,
            target,
            client,
            verifier,
            ..Header::new(Kind::OneWay)
        };
        if self.shared.sink.send(Frame::new(header, body)).is_err() {
            self.shared.close();
        }
    }

    /// Waits for the end of the connection.
    pub async fn ended(&self) {
        self.shared.busy.until(|| self.shared.closed.get().then_some(())).await;
    }

    /// Ends the connection; requests in flight fail.
    pub fn close(&self) {
        self.shared.close();
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.shared.close();
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Shared {
    async fn receive(self: Rc<Self>, mut source: Box<dyn FrameSource>) {
        let pongs = Pongs::default();
        loop {
            let frame = match source.recv().await {
                Ok(frame) => frame,
                Err(error) => {
                    if !self.closed.get() {
                        tracing::debug!(%error, "connection ended");
                    }
                    break;
                }
            };
            self.heard.set(reactor::now());
            let header = &frame.header;
            self.credits.grant(u64::from(header.credits), u64::from(header.credit_bytes));
            match header.kind {
                Kind::Reply => {
                    let waiting = self.pending.borrow_mut().remove(&header.request);
                    // A reply that nobody waits for any more is dropped.
                    if let Some(waiting) = waiting {
                        waiting.reply.send(frame);
                    }
                }
                // Only carries what a connection says to itself: credits, returned memory.
                Kind::OneWay if frame.body.is_empty() => {}
                Kind::OneWay => {
                    if let Some(take) = &self.on_one_way {
                        take(&frame);
                    }
                }
                Kind::Pong => {}
                Kind::Ping if !pongs.is_due() => {}
                Kind::Ping => {
                    let _ = self.sink.send(Frame::new(Header::new(Kind::Pong), Vec::new()));
                }
                Kind::Request | Kind::Hello => {
                    tracing::warn!(kind = ?header.kind, "a service sent what only callers send");
                    break;
                }
            }
        }
        self.close();
    }

    /// Runs timers only while requests wait, so that an idle connection costs nothing.
    async fn watch(self: Rc<Self>) {
        let mut late = Late::default();
        while !self.closed.get() {
            self.busy
                .until(|| (self.closed.get() || !self.pending.borrow().is_empty()).then_some(()))
                .await;
            while !self.closed.get() && !self.pending.borrow().is_empty() {
                reactor::sleep(PING_AFTER).await;
                late.look(&self.address, &self.pending.borrow());
                let silent = self.heard.get().elapsed();
                if self.pending.borrow().is_empty() || silent < PING_AFTER {
                    continue;
                }
                if silent >= SILENCE_MAX {
                    tracing::warn!(address = self.address, ?silent, "the service does not answer");
                    self.close();
                } else {
                    let _ = self.sink.send(Frame::new(Header::new(Kind::Ping), Vec::new()));
                }
            }
        }
    }

    fn close(&self) {
        if self.closed.replace(true) {
            return;
        }
        self.sink.close();
        let pending = std::mem::take(&mut *self.pending.borrow_mut());
        drop(pending);
        self.credits.close();
        self.busy.notify_all();
    }
}

/// The request that has waited longest, for the log.
#[derive(Default)]
struct Late {
    request: u64,
    /// How long it had waited when it was last told of.
    told: Duration,
}

impl Late {
    fn look(&mut self, address: &str, pending: &BTreeMap<u64, Pending>) {
        let Some((request, waiting)) = pending.first_key_value() else { return };
        if self.request != *request {
            *self = Self { request: *request, told: Duration::ZERO };
        }
        let waited = waiting.sent.elapsed();
        if waited < LATE_AFTER.max(2 * self.told) {
            return;
        }
        self.told = waited;
        let Pending { header: Header { target, client, slot, sequence, .. }, kind, .. } = waiting;
        tracing::warn!(
            kind,
            address,
            target = target.0,
            client,
            slot,
            sequence,
            waited_s = waited.as_secs(),
            "a request has no answer yet"
        );
    }
}
