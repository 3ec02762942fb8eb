//! A service at an address: reconnects, and repeats requests until they are answered.
//!
//! A repeated request carries the same (client, slot, sequence), so the service does it once.
//! What always holds: at most one attempt to connect runs at a time per peer, and
//! [`OnConnect`] has ended before a fresh connection carries anything else.

use super::RpcError;
use super::caller::{Call, Caller, OnOneWay};
use super::hello::Hello;
use crate::channel::Transport;
use crate::frame::{Frame, VERSION, flags};
use futures_util::future::LocalBoxFuture;
use levada_base::ids::{BootVerifier, TargetId};
use levada_base::reactor::{self, Instant};
use levada_base::sync::Semaphore;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// How a peer is reached.
#[derive(Clone, Copy, Debug)]
pub struct PeerConfig {
    /// The cluster expected there; all zero: any.
    pub cluster: [u8; 16],
    /// The own node.
    pub node: u32,
    /// Connections that requests are dealt over; made when first used.
    pub connections: usize,
    /// The wait after the first failure; doubles up to `backoff_max`.
    pub backoff_min: Duration,
    pub backoff_max: Duration,
}

impl Default for PeerConfig {
    fn default() -> Self {
        Self {
            cluster: [0; 16],
            node: 0,
            connections: 1,
            backoff_min: Duration::from_millis(10),
            backoff_max: Duration::from_secs(1),
        }
    }
}

/// What must happen on every fresh connection before anything else is sent over it.
pub trait OnConnect {
    /// Uses the fresh connection; an error gives it up, and another is tried.
    fn connected<'a>(&'a self, caller: &'a Caller) -> LocalBoxFuture<'a, Result<(), RpcError>>;
}

/// A service at an address.
pub struct Peer {
    transport: Rc<dyn Transport>,
    address: String,
    config: PeerConfig,
    lanes: RefCell<Vec<Option<Rc<Caller>>>>,
    next_lane: Cell<usize>,
    connecting: Rc<Semaphore>,
    failures: Cell<u32>,
    connects: Cell<u64>,
    on_connect: RefCell<Option<Rc<dyn OnConnect>>>,
    on_one_way: RefCell<Option<OnOneWay>>,
}

impl Peer {
    /// A peer to which nothing is connected yet.
    ///
    /// # Panics
    ///
    /// When `config.connections` is 0.
    #[must_use]
    pub fn new(transport: Rc<dyn Transport>, address: &str, config: PeerConfig) -> Rc<Self> {
        assert!(config.connections > 0, "a peer needs a connection");
        Rc::new(Self {
            transport,
            address: address.to_owned(),
            config,
            lanes: RefCell::new(vec![None; config.connections]),
            next_lane: Cell::new(0),
            connecting: Semaphore::new(1),
            failures: Cell::new(0),
            connects: Cell::new(0),
            on_connect: RefCell::default(),
            on_one_way: RefCell::default(),
        })
    }

    /// Sets what happens first on every fresh connection.
    pub fn set_on_connect(&self, on_connect: Rc<dyn OnConnect>) {
        *self.on_connect.borrow_mut() = Some(on_connect);
    }

    /// Sets who takes in the one-way frames of every connection made from now on.
    pub fn set_on_one_way(&self, on_one_way: OnOneWay) {
        *self.on_one_way.borrow_mut() = Some(on_one_way);
    }

    /// Where it is.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Connections made so far.
    #[must_use]
    pub fn connects(&self) -> u64 {
        self.connects.get()
    }

    /// Drops every connection; the next request makes a fresh one.
    pub fn disconnect(&self) {
        let lanes =
            std::mem::replace(&mut *self.lanes.borrow_mut(), vec![None; self.config.connections]);
        for caller in lanes.into_iter().flatten() {
            caller.close();
        }
    }

    /// Sends a request until it is answered, over as many connections as it takes.
    ///
    /// # Errors
    ///
    /// [`RpcError::Deadline`] once `deadline` has passed (the request may still be carried
    /// out), and what repeating cannot help: `Refused`, `TooLong`, `Malformed`.
    pub async fn call(&self, call: &Call, deadline: Option<Instant>) -> Result<Frame, RpcError> {
        let answer = self.call_noting_repeats(call);
        let answer = match deadline {
            None => answer.await,
            Some(deadline) => {
                let limit = deadline.since(reactor::now());
                reactor::timeout(limit, answer).await.unwrap_or(Err(RpcError::Deadline))
            }
        };
        answer.map(|(frame, _)| frame)
    }

    /// Waits until a connection stands.
    ///
    /// # Errors
    ///
    /// [`RpcError::Refused`], [`RpcError::TooLong`].
    pub async fn reach(&self) -> Result<(), RpcError> {
        self.lane().await.map(drop)
    }

    /// Waits until a connection that stands has ended; returns at once when there is none.
    pub async fn ended(&self) {
        if let Some(caller) = self.standing() {
            caller.ended().await;
        }
    }

    /// Sends a one-way frame over a connection that stands; false: there is none.
    ///
    /// # Panics
    ///
    /// When no frame holds it.
    #[must_use]
    pub fn push(
        &self,
        target: TargetId,
        client: u64,
        verifier: BootVerifier,
        body: Vec<u8>,
    ) -> bool {
        let standing = self.standing();
        if let Some(caller) = &standing {
            caller.push(target, client, verifier, body);
        }
        standing.is_some()
    }

    /// As [`Peer::call`] without a deadline. The second says whether the request was sent before without
    /// an answer to it: then it may have been carried out already, whatever this answer is.
    ///
    /// # Errors
    ///
    /// What repeating cannot help: `Refused`, `TooLong`, `Malformed`.
    pub async fn call_noting_repeats(&self, call: &Call) -> Result<(Frame, bool), RpcError> {
        let mut repeated = false;
        loop {
            let caller = self.lane().await?;
            let sent = match caller.send(call).await {
                Ok(sent) => sent,
                Err(RpcError::Disconnected) => continue,
                Err(error) => return Err(error),
            };
            match sent.reply().await {
                // Also of what was carried out, when the answer would not go over this connection.
                Ok(reply) if reply.header.flags & flags::NOT_HERE != 0 => self.back_off().await,
                Ok(reply) => {
                    self.failures.set(0);
                    return Ok((reply, repeated));
                }
                Err(RpcError::Disconnected) => {}
                Err(
                    error @ (RpcError::Refused(_)
                    | RpcError::TooLong(_)
                    | RpcError::Malformed
                    | RpcError::Deadline),
                ) => return Err(error),
            }
            repeated = true;
        }
    }

    /// Sends a request once, over a connection that is made if need be. That the target is not there ([`flags::NOT_HERE`]) is an answer,
    /// too.
    ///
    /// # Errors
    ///
    /// Every variant of [`RpcError`] but `Deadline`.
    pub async fn call_once(&self, call: &Call) -> Result<Frame, RpcError> {
        let reply = self.lane().await?.send(call).await?.reply().await?;
        self.failures.set(0);
        Ok(reply)
    }

    /// A live connection, made if need be.
    async fn lane(&self) -> Result<Rc<Caller>, RpcError> {
        let at = self.next_lane.get() % self.config.connections;
        self.next_lane.set(at + 1);
        loop {
            if let Some(caller) = self.live(at) {
                return Ok(caller);
            }
            let _turn = self.connecting.acquire(1).await;
            if let Some(caller) = self.live(at) {
                return Ok(caller);
            }
            match self.connect().await {
                Ok(caller) => {
                    let caller = Rc::new(caller);
                    self.lanes.borrow_mut()[at] = Some(Rc::clone(&caller));
                    return Ok(caller);
                }
                // Nor will what comes first be shorter over another connection.
                Err(error @ (RpcError::Refused(_) | RpcError::TooLong(_))) => return Err(error),
                Err(error) => {
                    tracing::debug!(address = self.address, %error, "cannot connect");
                    self.back_off().await;
                }
            }
        }
    }

    fn standing(&self) -> Option<Rc<Caller>> {
        self.lanes.borrow().iter().flatten().find(|caller| !caller.is_closed()).cloned()
    }

    fn live(&self, at: usize) -> Option<Rc<Caller>> {
        self.lanes.borrow()[at].as_ref().filter(|caller| !caller.is_closed()).cloned()
    }

    async fn connect(&self) -> Result<Caller, RpcError> {
        let hello = Hello {
            version_min: VERSION,
            version_max: VERSION,
            cluster: self.config.cluster,
            node: self.config.node,
        };
        let connection = self.transport.connect(&self.address).await?;
        let on_one_way = self.on_one_way.borrow().clone();
        let caller = Caller::new(connection, &self.address, &hello, on_one_way).await?;
        let on_connect = self.on_connect.borrow().clone();
        if let Some(on_connect) = on_connect {
            on_connect.connected(&caller).await?;
        }
        self.connects.set(self.connects.get() + 1);
        Ok(caller)
    }

    /// Half of the wait is random, so that many clients do not come back at once.
    async fn back_off(&self) {
        let failures = self.failures.get();
        self.failures.set(failures.saturating_add(1));
        let doubled = self.config.backoff_min.saturating_mul(1 << failures.min(16));
        let wait = doubled.min(self.config.backoff_max).as_nanos() as u64;
        let wait = wait / 2 + reactor::random_u64() % (wait / 2 + 1);
        reactor::sleep(Duration::from_nanos(wait)).await;
    }
}
