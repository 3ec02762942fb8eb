//! The metadata service, as the client sees it.
//!
//! What always holds:
//! - `Register` comes first on every connection; when the service restarted (another verifier)
//!   or forgot this client (another number), the open files are reclaimed next.
//! - A change is sent with the same slot and sequence until it is answered, also when the
//!   caller has given up waiting: a slot is never used again while its change is in doubt.
//! - The slots end with the client's number. What may have been carried out under one number is not sent under
//!   the next, unless doing it twice does no harm ([`is_repeatable`]).
//! - What it was told before that was durable is in the tail, in the service's order, and is handed back
//!   to a service that restarted before anything else is asked (note 0010).
//! - A service of another cluster, or of another file system, is told nothing: whoever asks gets an error
//!   until the right one is back.
//! - `Reclaim` names the opens that the client was told of, less the closes. A change whose answer is still
//!   to come is in neither: it is sent again, and the service counts it then. So the counts agree in the
//!   end. There is one connection at a time, so no answer of an earlier life comes after the reclaim.

use crate::error::Error;
use crate::leases::Leases;
use crate::locks::Locks;
use crate::moment::Moment;
use crate::slots::Slots;
use futures_util::future::{LocalBoxFuture, select};
use levada_base::ids::{BootVerifier, Ino, Seq, TargetId};
use levada_base::{planted, probe, reactor};
use levada_wire::frame::{Class, Frame, decode_body, encode_body, flags};
use levada_wire::meta::{
    Ack, FsInfo, LEASE_TERM, MetaFault, MetaReply, MetaRequest, NOTICES_MAX, NewInode, Notice,
    RECLAIM_LOCKS_MAX, RECLAIM_MAX, Tail, ToClient, ToService,
};
use levada_wire::rpc::{Call, Caller, OnConnect, Peer, Refusal, RpcError};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::time::Duration;

/// A service that cannot serve now is asked again after this.
pub(crate) const UNAVAILABLE_WAIT: Duration = Duration::from_millis(100);
/// What was told early is durable after this, whatever the client does.
const DRAIN_AFTER: Duration = Duration::from_secs(1);
/// By how much the service may be late to note that a client has no locks.
const UNUSED_MARGIN: Duration = Duration::from_secs(5);
/// How often a client that had locks lately looks after its connection.
const UNUSED_LOOK: Duration = Duration::from_secs(1);
/// How long a client that goes waits for the service to take note. There is nothing left to lose by then.
const LEAVE_LIMIT: Duration = Duration::from_secs(2);

pub(crate) struct Meta {
    target: TargetId,
    peer: Rc<Peer>,
    class: Class,
    uuid: [u8; 16],
    registration: RefCell<Option<Registration>>,
    /// The life of the service, and the client's number there, that has been told everything that a
    /// restart forgets.
    greeted: Cell<Option<(BootVerifier, u64)>>,
    /// Made at the first registration.
    slots: RefCell<Option<Rc<Slots>>>,
    opens: RefCell<BTreeMap<Ino, u32>>,
    /// Requests sent, so that only a silent client renews its lease.
    sent: Cell<u64>,
    /// When the last request was sent that was answered to the client's number: the lease has run since then,
    /// or a later time.
    renewed: Cell<Moment>,
    tail: RefCell<HeldTail>,
    /// A task is about to make the tail durable.
    draining: Cell<bool>,
    /// The service went on without the tail; the next sync says so.
    lost: Cell<bool>,
    /// Counts how often it did so.
    tail_losses: Cell<u64>,
    /// Another cluster is where this one was.
    elsewhere: Cell<bool>,
    /// The service said with the last session that began: bytes are limited for somebody.
    limited: Cell<bool>,
    /// The client has gone, and has changed nothing since.
    left: Cell<bool>,
    pub(crate) leases: Rc<Leases>,
    pub(crate) locks: Rc<Locks>,
    /// A task keeps the connection up, as somebody waits for a notice.
    watching: Cell<bool>,
    /// Notices that were taken in, to be acknowledged over the next connection.
    acks: RefCell<Vec<Ack>>,
}

/// What this client was told although it was not durable.
#[derive(Default)]
struct HeldTail {
    /// The service's life that it comes from.
    life: BootVerifier,
    batches: BTreeMap<Seq, Vec<u8>>,
}

/// A request on its way, perhaps not for the first time.
struct Asked {
    call: Call,
    /// The leases that came with the answer.
    granted: u32,
    /// The service may have carried it out, under the number in `call`.
    in_doubt: bool,
    is_repeatable: bool,
}

impl Asked {
    fn new(request: &MetaRequest, call: Call) -> Self {
        Self { call, granted: 0, in_doubt: false, is_repeatable: is_repeatable(request) }
    }
}

/// When a request is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    /// As soon as it is done, if this client may hold the tail.
    Early,
    Durable,
}

/// What is done when the service cannot carry a request out yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Patience {
    /// It is asked again until it can.
    Endless,
    /// The caller is told.
    None,
}

/// What the service said when the client registered.
#[derive(Clone)]
pub(crate) struct Registration {
    pub(crate) client: u64,
    pub(crate) verifier: BootVerifier,
    pub(crate) fs: FsInfo,
    /// The cluster that the service belongs to.
    pub(crate) cluster: [u8; 16],
}

impl Meta {
    pub(crate) fn new(
        target: TargetId,
        peer: Rc<Peer>,
        class: Class,
        uuid: [u8; 16],
        leases: bool,
    ) -> Rc<Self> {
        let meta = Rc::new(Self {
            target,
            peer: Rc::clone(&peer),
            class,
            uuid,
            registration: RefCell::default(),
            greeted: Cell::default(),
            slots: RefCell::default(),
            opens: RefCell::default(),
            sent: Cell::default(),
            renewed: Cell::new(Moment::now()),
            tail: RefCell::default(),
            draining: Cell::default(),
            lost: Cell::default(),
            tail_losses: Cell::default(),
            elsewhere: Cell::default(),
            limited: Cell::default(),
            left: Cell::default(),
            leases: Leases::new(leases),
            locks: Rc::default(),
            watching: Cell::default(),
            acks: RefCell::default(),
        });
        peer.set_on_connect(Rc::new(Registrar(Rc::downgrade(&meta))));
        let holder = Rc::downgrade(&meta);
        peer.set_on_one_way(Rc::new(move |frame| {
            if let Some(meta) = holder.upgrade() {
                meta.take_in(frame);
            }
        }));
        meta
    }

    /// Registers, unless that happened before.
    pub(crate) async fn connect(&self) -> Result<FsInfo, Error> {
        self.heard(self.peer.reach().await)?;
        Ok(self.registration().expect("registers on every connection").fs)
    }

    pub(crate) fn registration(&self) -> Option<Registration> {
        self.registration.borrow().clone()
    }

    /// The client's number; changes only when the service forgot this client.
    pub(crate) fn client(&self) -> u64 {
        self.registration.borrow().as_ref().map_or(0, |registration| registration.client)
    }

    /// True when whoever adds bytes to a file asks first whether he may.
    pub(crate) fn is_limited(&self) -> bool {
        self.limited.get()
    }

    /// Sends a request that changes nothing.
    pub(crate) async fn read(&self, request: &MetaRequest) -> Result<MetaReply, Error> {
        let asking = self.leases.ask();
        let mut asked = self.asked(request, Told::Early);
        let reply = self.ask(&mut asked).await?;
        self.leases.told(request, &reply, asked.granted, asking);
        Ok(reply)
    }

    /// Sends a request that changes something: it is carried out once, also when the caller
    /// stops waiting. It is durable after [`Meta::sync`].
    pub(crate) async fn change(self: &Rc<Self>, request: MetaRequest) -> Result<MetaReply, Error> {
        self.change_told(request, Told::Early, Patience::Endless).await
    }

    /// As [`Meta::change`], but returns the reply `Unavailable` instead of waiting: for those whom the one
    /// that they would wait for may need.
    pub(crate) async fn try_change(
        self: &Rc<Self>,
        request: MetaRequest,
    ) -> Result<MetaReply, Error> {
        self.change_told(request, Told::Early, Patience::None).await
    }

    /// As [`Meta::change`]; durable when this returns.
    pub(crate) async fn change_durably(
        self: &Rc<Self>,
        request: MetaRequest,
    ) -> Result<MetaReply, Error> {
        self.change_told(request, Told::Durable, Patience::Endless).await
    }

    /// As [`Meta::change_durably`], but returns the reply `Unavailable`.
    pub(crate) async fn try_change_durably(
        self: &Rc<Self>,
        request: MetaRequest,
    ) -> Result<MetaReply, Error> {
        self.change_told(request, Told::Durable, Patience::None).await
    }

    /// Counts how often the service went on without what this client held.
    pub(crate) fn tail_losses(&self) -> u64 {
        self.tail_losses.get()
    }

    /// Makes durable whatever the client was told so far.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`], once, when the service went on without what this client held.
    pub(crate) async fn sync(&self) -> Result<(), Error> {
        if self.lost.replace(false) {
            return Err(Error::Lost);
        }
        let durable = self.make_durable().await;
        if durable == Err(Error::Lost) {
            self.lost.set(false);
        }
        durable
    }

    /// As [`Meta::sync`], for the client's own purposes: it leaves the news of an earlier loss to a program.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when the service went on without it while this was under way.
    pub(crate) async fn make_durable(&self) -> Result<(), Error> {
        let Some(upto) = self.last_held() else { return Ok(()) };
        let losses = self.tail_losses.get();
        match self.ask(&mut self.asked(&MetaRequest::Sync, Told::Durable)).await? {
            MetaReply::Done if self.tail_losses.get() != losses => Err(Error::Lost),
            MetaReply::Done => {
                self.forget_tail(upto);
                Ok(())
            }
            MetaReply::Failed(fault) => Err(fault.into()),
            _ => Err(Error::Dialect),
        }
    }

    /// The client goes, everything being durable: the service need not keep anything for it, and a later
    /// start waits for nothing of it. A service that is away finds out by the lease.
    pub(crate) async fn leave(&self) {
        // Never registered: nothing to take back.
        if self.client() == 0 || self.left.replace(true) {
            return;
        }
        self.leases.forget_all();
        let mut leave = self.asked(&MetaRequest::Leave, Told::Durable);
        match reactor::timeout(LEAVE_LIMIT, self.ask(&mut leave)).await {
            Ok(Ok(MetaReply::Done)) => {}
            Ok(answer) => {
                tracing::warn!(?answer, "the metadata service does not let this client go")
            }
            Err(_) => {
                tracing::info!("the metadata service is away; it will miss this client by itself")
            }
        }
    }

    fn plain_call(&self, request: &MetaRequest) -> Call {
        let kind = request.kind();
        Call { kind, class: self.class, ..Call::new(self.target, encode_body(request)) }
    }

    fn call(&self, request: &MetaRequest, told: Told) -> Call {
        // The housekeeper acts on what it is told at once.
        let early = told == Told::Early && self.class == Class::Foreground;
        let flags = match request {
            MetaRequest::Create { .. } if early && self.leases.is_wanted() => {
                flags::UNSTABLE | flags::WITH_DIRECTORY
            }
            _ if early => flags::UNSTABLE,
            _ => 0,
        };
        Call { flags: flags | self.leases.flags(), ..self.plain_call(request) }
    }

    fn asked(&self, request: &MetaRequest, told: Told) -> Asked {
        Asked::new(request, self.call(request, told))
    }

    /// The life of the service that the tail comes from, and its last batch.
    fn last_held(&self) -> Option<(BootVerifier, Seq)> {
        let tail = self.tail.borrow();
        tail.batches.keys().next_back().map(|seq| (tail.life, *seq))
    }

    /// Everything up to here is durable. Numbers of another life mean something else.
    fn forget_tail(&self, (life, upto): (BootVerifier, Seq)) {
        let mut tail = self.tail.borrow_mut();
        if tail.life != life {
            return;
        }
        tail.batches = tail.batches.split_off(&Seq(upto.0 + 1));
    }

    /// The service says something by itself.
    fn take_in(self: &Rc<Self>, frame: &Frame) {
        let life = frame.header.verifier;
        let known = self.registration().is_some_and(|known| known.verifier == life);
        match decode_body(&frame.body) {
            Ok(ToClient::Tail(tail)) if known => self.take_in_tail(life, tail),
            Ok(ToClient::Notices(notices)) if known && frame.header.client == self.client() => {
                for (number, notice) in notices {
                    self.heard_notice(number, notice);
                }
                self.acknowledge(None);
            }
            Ok(ToClient::Tail(_) | ToClient::Notices(_)) => {}
            Err(_) => tracing::error!("what the metadata service says by itself makes no sense"),
        }
    }

    fn heard_notice(self: &Rc<Self>, number: u64, notice: Notice) {
        let keeps = match notice {
            Notice::Granted { .. } | Notice::Refused { .. } => {
                self.locks.heard(notice);
                false
            }
            Notice::Shared { ino } => {
                self.leases.heard(&notice);
                let on_shared = self.leases.on_shared.borrow().clone();
                if let Some(ended) = on_shared.and_then(|on_shared| on_shared(ino)) {
                    self.acknowledge_after(ended, Ack { number, keeps: false });
                    return;
                }
                false
            }
            Notice::Names { .. } | Notice::Node { .. } => {
                let keeps = self.leases.heard(&notice);
                let on_notice = self.leases.on_notice.borrow().clone();
                if let Some(ended) = on_notice.and_then(|on_notice| on_notice(&notice)) {
                    self.acknowledge_after(ended, Ack { number, keeps });
                    return;
                }
                keeps
            }
        };
        self.acks.borrow_mut().push(Ack { number, keeps });
    }

    /// Acknowledges when nobody here trusts any more what the notice was about.
    fn acknowledge_after(self: &Rc<Self>, ended: LocalBoxFuture<'static, ()>, ack: Ack) {
        let (meta, life) = (Rc::downgrade(self), self.life());
        reactor::spawn(async move {
            ended.await;
            // Numbers of another life mean something else.
            if let Some(meta) = meta.upgrade().filter(|meta| meta.life() == life) {
                meta.acks.borrow_mut().push(ack);
                meta.acknowledge(None);
            }
        });
    }

    fn life(&self) -> Option<(BootVerifier, u64)> {
        self.registration.borrow().as_ref().map(|known| (known.verifier, known.client))
    }

    /// Acknowledges over `caller`, or over the connection that stands.
    fn acknowledge(&self, caller: Option<&Caller>) {
        let Some(known) = self.registration() else { return };
        let mut acks = self.acks.borrow_mut();
        while !acks.is_empty() {
            let part = acks.len().min(NOTICES_MAX);
            let body = encode_body(&ToService::Acks(acks[..part].to_vec()));
            match caller {
                Some(caller) => caller.push(self.target, known.client, known.verifier, body),
                None if self.peer.push(self.target, known.client, known.verifier, body) => {}
                // While a new connection registers, which acknowledges them then.
                None => return,
            }
            acks.drain(..part);
        }
    }

    /// Reaches the service again whenever the connection ends, for as long as somebody waits to be told
    /// something, and for as long as others wait for this client after a restart: else only the next request would.
    pub(crate) fn stay_connected(self: &Rc<Self>) {
        if self.watching.replace(true) {
            return;
        }
        let meta = Rc::downgrade(self);
        reactor::spawn(async move {
            let mut unused_since = None;
            while let Some(meta) = meta.upgrade().filter(|meta| !meta.left.get()) {
                if meta.leases.is_wanted() {
                    // After a restart others wait for it before they change anything.
                    if let Err(error) = meta.heard(meta.peer.reach().await) {
                        tracing::debug!(%error, "the metadata service does not take this client");
                        reactor::sleep(UNAVAILABLE_WAIT).await;
                    }
                    // Not for longer, so that a client that is dropped goes.
                    let _ = reactor::timeout(UNUSED_LOOK, meta.peer.ended()).await;
                    continue;
                }
                if meta.locks.is_used() {
                    unused_since = None;
                    select(pin!(meta.reconnect()), pin!(meta.locks.unused())).await;
                    continue;
                }
                // The service goes by a lease, and looks every few seconds.
                let since = *unused_since.get_or_insert_with(reactor::now);
                let lease_ms = meta.registration().map_or(0, |known| known.fs.lease_ms);
                if since.elapsed() > Duration::from_millis(lease_ms) + UNUSED_MARGIN {
                    break;
                }
                let _ = meta.peer.reach().await;
                drop(meta);
                reactor::sleep(UNUSED_LOOK).await;
            }
            if let Some(meta) = meta.upgrade() {
                meta.watching.set(false);
            }
        });
    }

    async fn reconnect(&self) {
        while !self.left.get() {
            if let Err(error) = self.heard(self.peer.reach().await) {
                tracing::debug!(%error, "the metadata service does not take this client");
                reactor::sleep(UNAVAILABLE_WAIT).await;
            }
            self.peer.ended().await;
        }
    }

    /// A part of the tail arrives, before the answers that rest on it.
    fn take_in_tail(self: &Rc<Self>, life: BootVerifier, Tail { durable, batches }: Tail) {
        if !planted!("client-tail-not-held") {
            self.forget_tail((life, durable));
            let mut tail = self.tail.borrow_mut();
            tail.life = life;
            tail.batches.extend(batches);
        }
        self.drain_soon();
    }

    /// A client that falls silent must not go on holding a tail: it would notice too late that the
    /// service restarted, and waits for it.
    fn drain_soon(self: &Rc<Self>) {
        if self.draining.replace(true) {
            return;
        }
        let meta = Rc::downgrade(self);
        reactor::spawn(async move {
            reactor::sleep(DRAIN_AFTER).await;
            let Some(meta) = meta.upgrade() else { return };
            meta.draining.set(false);
            if let Err(error) = meta.make_durable().await {
                tracing::warn!(%error, "cannot make names durable");
            }
        });
    }

    /// As [`Meta::change`]; `taken_in` sees the answer before anything else happens with this client, also when
    /// the caller has stopped waiting.
    pub(crate) async fn change_seen(
        self: &Rc<Self>,
        request: MetaRequest,
        taken_in: impl FnOnce(&MetaReply) + 'static,
    ) -> Result<MetaReply, Error> {
        self.change_seen_told(request, Told::Early, Patience::Endless, taken_in).await
    }

    /// As [`Meta::change_seen`], but returns the reply `Unavailable`.
    pub(crate) async fn try_change_seen(
        self: &Rc<Self>,
        request: MetaRequest,
        taken_in: impl FnOnce(&MetaReply) + 'static,
    ) -> Result<MetaReply, Error> {
        self.change_seen_told(request, Told::Early, Patience::None, taken_in).await
    }

    async fn change_seen_told(
        self: &Rc<Self>,
        request: MetaRequest,
        told: Told,
        patience: Patience,
        taken_in: impl FnOnce(&MetaReply) + 'static,
    ) -> Result<MetaReply, Error> {
        let meta = Rc::clone(self);
        let task = reactor::spawn(async move {
            let reply = meta.change_here(request, told, patience).await;
            if let Ok(reply) = &reply {
                taken_in(reply);
            }
            reply
        });
        task.await.unwrap_or(Err(Error::Closed))
    }

    async fn change_told(
        self: &Rc<Self>,
        request: MetaRequest,
        told: Told,
        patience: Patience,
    ) -> Result<MetaReply, Error> {
        self.change_seen_told(request, told, patience, |_| {}).await
    }

    async fn change_here(
        &self,
        request: MetaRequest,
        told: Told,
        patience: Patience,
    ) -> Result<MetaReply, Error> {
        self.left.set(false);
        if self.client() == 0 {
            self.connect().await?;
        }
        let slots = self.slots.borrow().clone().expect("registered");
        let slot = slots.take().await;
        let changing = self.leases.begin(&request);
        let held = self.last_held();
        let call = Call { slot: slot.number, sequence: slot.sequence, ..self.call(&request, told) };
        let mut asked = Asked::new(&request, call);
        let reply = match patience {
            Patience::Endless => self.ask(&mut asked).await,
            Patience::None => self.try_ask(&mut asked).await,
        };
        if let (Some(changing), Ok(reply)) = (changing, &reply) {
            changing.done(&request, reply, asked.granted);
        }
        let reply = reply.map(|reply| match reply {
            MetaReply::Made { attr, .. } => MetaReply::Entry(attr, true),
            reply => reply,
        });
        drop(slot);
        // It came after everything held by then, and is durable.
        if let (
            MetaRequest::CommitWrite { .. },
            Ok(MetaReply::Attr(_)),
            Told::Durable,
            Some(upto),
        ) = (&request, &reply, told, held)
        {
            self.forget_tail(upto);
        }
        let closes = match &request {
            MetaRequest::Several { requests } => requests.as_slice(),
            one => std::slice::from_ref(one),
        };
        let closed = closes.iter().filter_map(|request| match request {
            MetaRequest::Close { ino } => Some(*ino),
            _ => None,
        });
        closed.for_each(|ino| self.discount_open(ino));
        match (&request, &reply) {
            (MetaRequest::Open { ino, .. }, Ok(MetaReply::Attr(_))) => self.count_open(*ino),
            (
                MetaRequest::Create { new: NewInode::File { open: Some(_) }, .. }
                | MetaRequest::CreateUnnamed { .. },
                Ok(MetaReply::Entry(attr, _)),
            ) => self.count_open(attr.ino),
            _ => {}
        }
        reply
    }

    fn count_open(&self, ino: Ino) {
        *self.opens.borrow_mut().entry(ino).or_default() += 1;
    }

    fn discount_open(&self, ino: Ino) {
        let mut opens = self.opens.borrow_mut();
        if let Some(count) = opens.get_mut(&ino) {
            *count -= 1;
            if *count == 0 {
                opens.remove(&ino);
            }
        }
    }

    /// Tells what this client holds open and has locked, in as many parts as it takes.
    async fn reclaim(&self, caller: &Caller, client: u64) -> Result<(), RpcError> {
        let opens: Vec<_> = self.opens.borrow().iter().map(|(ino, count)| (*ino, *count)).collect();
        let locks = self.locks.all_held();
        let opens = opens.chunks(RECLAIM_MAX).map(|opens| (opens.to_vec(), Vec::new()));
        let locks = locks.chunks(RECLAIM_LOCKS_MAX).map(|locks| (Vec::new(), locks.to_vec()));
        let mut parts = opens.chain(locks).peekable();
        loop {
            let (opens, locks) = parts.next().unwrap_or_default();
            let part = MetaRequest::Reclaim { opens, locks, last: parts.peek().is_none() };
            let call = Call { client, ..self.plain_call(&part) };
            match self.ask_once(caller, &call).await? {
                MetaReply::Done if parts.peek().is_none() => return Ok(()),
                MetaReply::Done => {}
                MetaReply::Failed(MetaFault::Stale) => {
                    self.locks.lose_all();
                    return Ok(());
                }
                reply => {
                    tracing::warn!(?reply, "open files were not reclaimed");
                    return Ok(());
                }
            }
        }
    }

    async fn ask(&self, asked: &mut Asked) -> Result<MetaReply, Error> {
        loop {
            match self.try_ask(asked).await? {
                MetaReply::Failed(MetaFault::Unavailable) => {
                    reactor::sleep(UNAVAILABLE_WAIT).await;
                }
                reply => return Ok(reply),
            }
        }
    }

    /// Says once in the log that another cluster answers, and once that the right one does again.
    fn heard<T>(&self, answer: Result<T, RpcError>) -> Result<T, Error> {
        let is_elsewhere = matches!(answer, Err(RpcError::Refused(Refusal::Cluster)));
        if is_elsewhere != self.elsewhere.replace(is_elsewhere) {
            let address = self.peer.address();
            if is_elsewhere {
                tracing::error!(address, "another cluster is here now; calls fail with ESTALE");
            } else {
                tracing::info!(address, "the cluster is back");
            }
        }
        Ok(answer?)
    }

    /// Asks until a service that knows this client answers.
    ///
    /// # Errors
    ///
    /// [`Error::InDoubt`] when the lease ended, and what was asked may have been done before.
    async fn try_ask(&self, asked: &mut Asked) -> Result<MetaReply, Error> {
        let call = &mut asked.call;
        loop {
            self.sent.set(self.sent.get() + 1);
            if self.client() == 0 {
                self.connect().await?;
            }
            let client = self.client();
            if asked.in_doubt && !asked.is_repeatable && call.client != client {
                return Err(Error::InDoubt);
            }
            call.client = client;
            let sent = Moment::now();
            let (frame, repeated) = self.heard(self.peer.call_noting_repeats(call).await)?;
            asked.in_doubt |= repeated;
            asked.granted = frame.header.flags & flags::LEASES;
            let reply = decode_body(&frame.body).map_err(|_| Error::Dialect)?;
            if matches!(call.kind, "Create" | "BeginWrite") {
                self.limited.set(frame.header.flags & flags::LIMITED != 0);
            }
            match reply {
                // Registered anew meanwhile, under another number.
                MetaReply::Failed(MetaFault::NotRegistered) if client != self.client() => {}
                MetaReply::Failed(MetaFault::NotRegistered) => {
                    tracing::warn!("the metadata service forgot this client");
                    self.peer.disconnect();
                    reactor::sleep(UNAVAILABLE_WAIT).await;
                }
                reply => {
                    if client == self.client() && sent.age() < self.renewed.get().age() {
                        self.renewed.set(sent);
                    }
                    // Also said of what was done but cannot be made durable now.
                    asked.in_doubt |= reply == MetaReply::Failed(MetaFault::Unavailable);
                    return Ok(reply);
                }
            }
        }
    }

    /// The service has answered lately: what it could not tell this client since, it still waits to tell.
    pub(crate) fn is_in_touch(&self) -> bool {
        self.renewed.get().age() < LEASE_TERM
    }

    /// How long from now on the service knows this client under the number `client` for certain; it is asked
    /// if that is not long any more. `None`: it has forgotten it, and others may have done meanwhile what was
    /// this client's to do.
    pub(crate) async fn certain_as(&self, client: u64) -> Result<Option<Duration>, Error> {
        loop {
            let known = self.registration().filter(|known| known.client == client);
            let Some(known) = known else { return Ok(None) };
            let lease = Duration::from_millis(known.fs.lease_ms);
            let age = self.renewed.get().age();
            if age <= lease / 2 {
                // The last quarter is for what is under way when the time is up.
                return Ok(Some(lease * 3 / 4 - age));
            }
            self.read(&MetaRequest::Space).await?;
        }
    }

    /// Says something before the lease runs out, for as long as the client lives.
    pub(crate) async fn keep_lease(meta: Weak<Self>) {
        let mut sent = 0;
        let lease_ms = |meta: Rc<Self>| meta.registration().map_or(1000, |known| known.fs.lease_ms);
        while let Some(lease_ms) = meta.upgrade().map(lease_ms) {
            reactor::sleep(Duration::from_millis((lease_ms / 3).max(1))).await;
            let Some(meta) = meta.upgrade() else { break };
            if sent == meta.sent.get()
                && !meta.left.get()
                && let Err(error) = meta.read(&MetaRequest::Space).await
            {
                tracing::warn!(%error, "cannot renew the lease");
            }
            sent = meta.sent.get();
        }
    }

    async fn register(&self, caller: &Caller) -> Result<(), RpcError> {
        let sent = Moment::now();
        let register = MetaRequest::Register { uuid: self.uuid };
        let call = Call { flags: self.leases.flags(), ..self.plain_call(&register) };
        let (client, slots, verifier, used, fs) = match self.ask_once(caller, &call).await? {
            MetaReply::Registered { client, slots, verifier, used, fs } => {
                (client, slots, verifier, used, fs)
            }
            _ => return Err(RpcError::Disconnected),
        };
        let cluster = caller.welcome().cluster;
        if self.registration().is_some_and(|known| (known.cluster, known.fs.id) != (cluster, fs.id))
        {
            return Err(RpcError::Refused(Refusal::Cluster));
        }
        let known = self.slots.borrow().clone();
        let pool = known.unwrap_or_else(|| Slots::new(0, slots.max(1)));
        pool.skip(&used);
        *self.slots.borrow_mut() = Some(pool);
        *self.registration.borrow_mut() = Some(Registration { client, verifier, fs, cluster });
        self.renewed.set(sent);
        let known = self.greeted.get();
        if known != Some((verifier, client)) {
            self.leases.forget_all();
            if known.is_some() {
                tracing::info!("the metadata service restarted; reclaiming open files");
                if known.is_some_and(|(_, number)| number != client) {
                    self.locks.lose_all();
                }
                self.acks.borrow_mut().clear();
            }
            if known.is_none_or(|(known, _)| known != verifier) {
                self.hand_back(caller, client).await?;
            }
            // At the start as well: the service may know this client from a former life, and
            // releases nothing until it has heard what of that is still open.
            self.reclaim(caller, client).await?;
            self.greeted.set(Some((verifier, client)));
            self.locks.forgotten();
        }
        self.acknowledge(Some(caller));
        Ok(())
    }

    /// Gives the tail back to a service that restarted. It waits for that, also when there is nothing to
    /// give.
    async fn hand_back(&self, caller: &Caller, client: u64) -> Result<(), RpcError> {
        if self.class != Class::Foreground {
            return Ok(());
        }
        let (life, batches): (_, Vec<_>) = {
            let tail = self.tail.borrow();
            (tail.life, tail.batches.clone().into_iter().collect())
        };
        let _busy = (!batches.is_empty()).then(|| probe::busy("client sends again"));
        let replay = MetaRequest::Replay { life, batches };
        let call = Call { client, ..self.call(&replay, Told::Durable) };
        if planted!("client-tail-not-handed-back") {
            return Ok(());
        }
        match self.ask_once(caller, &call).await? {
            MetaReply::Done => {}
            // It waited in vain for this client, and went on without.
            MetaReply::Failed(MetaFault::Stale) => {
                tracing::error!("changes of names that were not synced are lost");
                self.lost.set(true);
                self.tail_losses.set(self.tail_losses.get() + 1);
            }
            reply => {
                tracing::warn!(?reply, "the service does not take back what is not durable");
                return Err(RpcError::Disconnected);
            }
        }
        self.tail.borrow_mut().batches.clear();
        Ok(())
    }

    /// Any fault gives the connection up; the next one tries again.
    async fn ask_once(&self, caller: &Caller, call: &Call) -> Result<MetaReply, RpcError> {
        let frame = caller.call(call).await?;
        if frame.header.flags != 0 {
            return Err(RpcError::Disconnected);
        }
        match decode_body(&frame.body).map_err(|_| RpcError::Malformed)? {
            MetaReply::Failed(MetaFault::Unavailable) => Err(RpcError::Disconnected),
            reply => Ok(reply),
        }
    }
}

/// Whether a request that was perhaps carried out under one number of the client may be sent again under
/// another, where nobody knows that it is a repetition, and others may have changed something in between.
fn is_repeatable(request: &MetaRequest) -> bool {
    use MetaRequest as R;
    match request {
        // Change nothing, or say what is so.
        R::Register { .. }
        | R::Replay { .. }
        | R::Reclaim { .. }
        | R::Lookup { .. }
        | R::GetAttr { .. }
        | R::ReadLink { .. }
        | R::ReadDir { .. }
        | R::GetXattr { .. }
        | R::ListXattrs { .. }
        | R::TestLock { .. }
        | R::Sync
        | R::Space
        | R::SpaceNow
        | R::Grant { .. }
        | R::Chores { .. } => true,
        // Opens end with the number that has them, and count under the next when they are done there.
        R::Open { mode, .. } => !mode.truncate,
        R::Close { .. } => true,
        // The session stays as it is when there is one.
        R::BeginWrite { .. } => true,
        // Raises the size, adds components and sets the time of the last write here, as one would that was
        // late. A size from before another's truncation is not believed: the new number has no session.
        R::CommitWrite { .. } => true,
        R::Several { requests } => requests.iter().all(is_repeatable),
        // Ends only a cut that was begun under the number that it comes from.
        R::Truncated { .. } => true,
        // Of an inode that is never used again; and of one that has not changed since the chore was given out.
        R::Destroyed { .. } | R::Settled { .. } => true,
        // Nothing is held under the new number but what it takes back.
        R::Leave => true,
        // Nobody was told of the file that was made first; it goes with the number that has it open.
        R::CreateUnnamed { .. } => true,
        // Nobody comes back to life, and no uuid is drawn twice.
        R::Bury { .. } => true,
        // Locks end with the number that has them.
        R::Lock { .. } | R::Unlock { .. } | R::CancelWait { .. } => true,
        // Done twice they undo what others did in between: a mode, a size, a name, an attribute; or are refused because they
        // have been done.
        R::SetAttr { .. }
        | R::Create { .. }
        | R::Link { .. }
        | R::Unlink { .. }
        | R::RemoveDir { .. }
        | R::Rename { .. }
        | R::SetXattr { .. }
        | R::RemoveXattr { .. } => false,
    }
}

/// Registers on every fresh connection.
struct Registrar(Weak<Meta>);

impl OnConnect for Registrar {
    fn connected<'a>(&'a self, caller: &'a Caller) -> LocalBoxFuture<'a, Result<(), RpcError>> {
        Box::pin(async move {
            match self.0.upgrade() {
                Some(meta) => meta.register(caller).await,
                None => Err(RpcError::Disconnected),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::Reactor;
    use levada_wire::channel::Listener;
    use levada_wire::frame::encode_body;
    use levada_wire::local::{LinkConfig, Network};
    use levada_wire::rpc::{
        ConnectionId, Handler, PeerConfig, Pusher, Reply, Router, ServiceConfig, accept_all,
    };

    /// A service that knows nobody, and loses its first connections after a part each.
    struct Forgetful {
        network: Network,
        losses: Cell<u32>,
        parts: RefCell<BTreeMap<ConnectionId, Vec<(Ino, u32)>>>,
        all: Cell<Option<ConnectionId>>,
    }

    impl Handler for Forgetful {
        fn handle(&self, request: Frame, from: Pusher) -> LocalBoxFuture<'_, Reply> {
            let reply = match decode_body(&request.body).expect("a request") {
                MetaRequest::Register { .. } => MetaReply::Registered {
                    client: 1,
                    slots: 8,
                    verifier: BootVerifier(1),
                    used: Vec::new(),
                    fs: FsInfo { id: 1, name: String::new(), objects: Vec::new(), lease_ms: 1000 },
                },
                MetaRequest::Reclaim { opens, last, .. } => {
                    self.parts.borrow_mut().entry(from.connection()).or_default().extend(opens);
                    if self.losses.get() > 0 {
                        self.losses.set(self.losses.get() - 1);
                        self.network.disconnect("client", "meta");
                    }
                    if last {
                        self.all.set(Some(from.connection()));
                    }
                    MetaReply::Done
                }
                _ => MetaReply::Done,
            };
            Box::pin(async move { Reply::new(encode_body(&reply)) })
        }
    }

    #[test]
    fn any_number_of_open_files_is_reclaimed() {
        Reactor::simulated(1).block_on(async {
            let network = Network::new(LinkConfig::default());
            let (losses, parts, all) = (Cell::new(2), RefCell::default(), Cell::default());
            let service = Rc::new(Forgetful { network: network.clone(), losses, parts, all });
            let router = Rc::new(Router::default());
            router.insert(TargetId(0), Rc::clone(&service) as _);
            let listener: Rc<dyn Listener> = Rc::new(network.listen("meta"));
            reactor::spawn(accept_all(listener, router, ServiceConfig::default()));
            let peer = Peer::new(network.transport("client"), "meta", PeerConfig::default());
            let meta = Meta::new(TargetId(0), peer, Class::Foreground, [1; 16], false);
            let opens: Vec<_> = (0..300_000).map(|n| (Ino(n << 40), 1 + n as u32 % 3)).collect();
            *meta.opens.borrow_mut() = opens.iter().copied().collect();
            let connected = reactor::timeout(Duration::from_secs(60), meta.connect()).await;
            connected.expect("in time").expect("reclaimed");
            let parts = service.parts.borrow();
            assert_eq!(parts.len(), 3);
            assert!(parts[&service.all.get().expect("came to its end")] == opens);
        });
    }
}
