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

mod contact;
mod greeting;

use crate::error::Error;
use crate::leases::Leases;
use crate::locks::Locks;
use crate::moment::Moment;
use crate::slots::Slots;
use greeting::Registrar;
use levada_base::ids::{BootVerifier, Ino, Seq, TargetId};
use levada_base::{planted, reactor};
use levada_wire::frame::{Class, Frame, decode_body, encode_body, flags};
use levada_wire::meta::{Ack, FsInfo, MetaFault, MetaReply, MetaRequest, NewInode, Tail, ToClient};
use levada_wire::rpc::{Call, Peer, Refusal, RpcError};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

/// A service that cannot serve now is asked again after this.
pub(crate) const UNAVAILABLE_WAIT: Duration = Duration::from_millis(100);
/// What was told early is durable after this, whatever the client does.
const DRAIN_AFTER: Duration = Duration::from_secs(1);
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
            _ if early && self.leases.is_wanted() && request.changes_names_of().is_some() => {
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

    fn life(&self) -> Option<(BootVerifier, u64)> {
        self.registration.borrow().as_ref().map(|known| (known.verifier, known.client))
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
        let reply = reply.map(|reply| reply.without_directory(&request));
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
        | R::Allowance { .. }
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
