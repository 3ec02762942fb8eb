//! One queue of a controller, which is one connection: commands out, data and completions in.
//!
//! What always holds:
//! - Every command is answered: by the controller, or because its time or the connection is over. Its buffers come back either way, the
//!   same memory, and what the controller did not fill is never called data.
//! - A command that is not answered in its time ends the connection: only then is it certain that nothing lands in its buffers.
//! - What the other side sends costs no memory but what was made for it when the command was sent.
//! - Whoever gives up waiting for a command gives up the answer; command and buffers stay with the queue until it is over.

use super::exchange::{Broken, COMMANDS_MAX, Exchange, Step, index_of};
use super::host::HostId;
use super::landing::{Landing, window};
use super::unsettled::{Change, Sent};
use futures_util::future::{Either, select};
use levada_base::buf::bytes_in;
use levada_base::checksum::crc32c_parts;
use levada_base::reactor::{self, Instant};
use levada_base::stream::{ByteStream, Inbox, Outbox, Outgoing};
use levada_base::sync::{Notify, Permit, Semaphore, oneshot};
use levada_base::{Buf, IoVec, IoVecMut};
use levada_nvme::pdu::{
    COMMON_BYTES, Common, DIGEST_BYTES, Digests, Fatal, Framing, HEADER_BYTES_MAX, Initialize,
    Kind, Pdu, Terminated, Transfer,
};
use levada_nvme::{AdminOpcode, Command, Completion, DataPointer};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// Data of a command for which the controller may ask at once.
const TRANSFERS_MAX: u32 = 4;
/// Those that may wait for the socket: the controller asks for more as soon as it has some, which may be heard of before the socket
/// says that it has taken them.
const TRANSFERS_WAITING_MAX: u64 = 2 * TRANSFERS_MAX as u64;
/// Data within commands of Fabrics and of the admin queue (TCP, 3.3.2).
const ADMIN_IN_CAPSULE_BYTES: usize = 8192;
/// A controller takes so much data in one unit, at least (TCP, 3.6.2.3: MAXH2CDATA).
const HOST_DATA_BYTES_MIN: u32 = 4096;
/// A timer that comes so late says that this process stood still, or had no processor.
const STOOD_STILL: Duration = Duration::from_millis(250);
/// How long the other side is told why the connection ends, if it does not listen.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Why a connection is over.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QueueError {
    #[error(transparent)]
    Io(#[from] io::Error),
    /// What the other side sent is wrong.
    #[error(transparent)]
    Broken(#[from] Broken),
    #[error("the target does not grant the digests that were asked for")]
    Digests,
    #[error("no answer within {} ms", limit.as_millis())]
    Silent { limit: Duration },
    /// Because another one of the controller is over, or it is no longer needed.
    #[error("closed")]
    Closed,
}

impl From<Fatal> for QueueError {
    fn from(fatal: Fatal) -> Self {
        Self::Broken(fatal.into())
    }
}

impl From<Terminated> for QueueError {
    fn from(terminated: Terminated) -> Self {
        Self::Broken(terminated.into())
    }
}

/// Why there is no completion to go by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unanswered {
    #[error("the connection was lost")]
    Lost,
    /// The command went well, but its data do not match their digest.
    #[error("data were damaged on their way")]
    Damaged,
}

/// A command and its data.
pub(crate) struct Request {
    pub command: Command,
    /// Data for the controller.
    pub from: IoVec,
    /// Where its data go.
    pub into: IoVecMut,
    /// What it changes.
    pub change: Option<Change>,
    /// How long it may take; `None`: for ever.
    pub limit: Option<Duration>,
}

impl Request {
    pub fn new(command: Command, limit: Duration) -> Self {
        let (from, into) = (IoVec::new(), IoVecMut::new());
        Self { command, from, into, change: None, limit: Some(limit) }
    }
}

/// What became of a command.
pub(crate) struct Answered {
    /// As they were given.
    pub into: IoVecMut,
    pub outcome: Result<Completion, Unanswered>,
}

struct Slot {
    id: u16,
    /// Which the command is about.
    namespace: u32,
    answer: oneshot::Sender<Answered>,
    landing: Landing,
    from: IoVec,
    /// Data that the controller asked for and the socket has not taken; `None`: it may ask for none.
    transfers: Option<Rc<Semaphore>>,
    change: Option<Sent>,
    deadline: Option<(Instant, Duration)>,
    is_damaged: bool,
    _place: Permit,
}

/// What both sides are to each other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// Of all data and headers, or none: what the other side does not grant ends the connection.
    pub digests: Digests,
    /// Commands at once, one of which is kept for a probe where there are more.
    pub commands: usize,
    /// Data within a command, at most.
    pub in_capsule_bytes: usize,
    /// After the connection is over, a command may be carried out for so long.
    pub settle: Duration,
    /// Whose the queue is; see `unsettled`.
    pub host_id: HostId,
}

/// See the module.
pub(crate) struct Queue<S> {
    stream: S,
    terms: Terms,
    framing: Framing,
    /// Data of one unit, at most.
    unit_bytes_max: u32,
    outbox: Outbox,
    exchange: RefCell<Exchange>,
    slots: RefCell<Vec<Option<Slot>>>,
    places: Rc<Semaphore>,
    probes: Rc<Semaphore>,
    /// It was asked for a sign of life, and has given none.
    is_silent: Cell<bool>,
    /// Counts what the other side sends.
    heard: Cell<u64>,
    /// A command with a deadline was sent.
    sent: Notify,
    ended: Notify,
    end: RefCell<Option<Rc<QueueError>>>,
    /// Its commands were given back.
    is_over: Cell<bool>,
}

fn cut_off() -> io::Error {
    io::ErrorKind::UnexpectedEof.into()
}

/// Greets the other side: what it grants (TCP, 3.6.2.2 and 3.6.2.3).
async fn initialize<S: ByteStream>(
    stream: &S,
    inbox: &mut Inbox<S>,
    digests: Digests,
) -> Result<Initialize, QueueError> {
    let ours = Initialize { alignment_bytes: 4, digests, limit: TRANSFERS_MAX - 1 };
    let head = Framing::FIRST.head(&Pdu::InitializeRequest(ours), 0);
    stream.write_all(Buf::copy_of(&head).into_vec()).await?;
    let none = Digests::default();
    let common = match common_of(inbox).await {
        Err(QueueError::Io(error))
            if matches!(
                error.kind(),
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset
            ) =>
        {
            let why = "the target hangs up before it says anything: it may speak no NVMe/TCP, or want TLS (host=NQN, keys=FILE)";
            return Err(io::Error::new(error.kind(), why).into());
        }
        common => common?,
    };
    if !matches!(common.kind, Kind::InitializeResponse | Kind::ControllerTerminates) {
        return Err(Fatal::Sequence.into());
    }
    // A header has its length, as `Common::parse` has seen.
    common.data_bytes(none)?;
    let rest = inbox.head(common.rest_bytes(none)).await?.ok_or_else(cut_off)?;
    match common.pdu(rest, none)? {
        Pdu::InitializeResponse(theirs) if theirs.limit < HOST_DATA_BYTES_MIN => {
            Err(Fatal::Field { at: 12 }.into())
        }
        Pdu::InitializeResponse(theirs) if theirs.digests != digests => Err(QueueError::Digests),
        Pdu::InitializeResponse(theirs) => Ok(theirs),
        Pdu::Terminates(terminated) => Err(terminated.into()),
        _ => Err(Fatal::Sequence.into()),
    }
}

async fn common_of<S: ByteStream>(inbox: &mut Inbox<S>) -> Result<Common, QueueError> {
    let bytes = inbox.head(COMMON_BYTES).await?.ok_or_else(cut_off)?;
    Ok(Common::parse(bytes.try_into().expect("as many"))?)
}

impl<S: ByteStream + 'static> Queue<S> {
    /// Agrees on the terms over a new connection. The caller limits how long that may take; what is to be said next is Connect.
    pub async fn open(stream: S, terms: Terms) -> Result<Rc<Self>, QueueError> {
        let mut inbox = Inbox::new(stream.clone());
        let theirs = match initialize(&stream, &mut inbox, terms.digests).await {
            Ok(theirs) => theirs,
            Err(error) => {
                stream.close().await;
                return Err(error);
            }
        };
        let commands = terms.commands.clamp(1, COMMANDS_MAX);
        let mut slots = Vec::new();
        slots.resize_with(commands, || None);
        let queue = Rc::new(Self {
            stream,
            terms,
            framing: Framing { digests: terms.digests, alignment_bytes: theirs.alignment_bytes },
            unit_bytes_max: theirs.limit,
            outbox: Outbox::default(),
            exchange: RefCell::new(Exchange::new(commands)),
            slots: RefCell::new(slots),
            places: Semaphore::new((commands - 1).max(1) as u64),
            probes: Semaphore::new(u64::from(commands > 1)),
            is_silent: Cell::default(),
            heard: Cell::default(),
            sent: Notify::default(),
            ended: Notify::default(),
            end: RefCell::default(),
            is_over: Cell::default(),
        });
        let sending = Rc::clone(&queue);
        let sender = reactor::spawn(async move {
            if let Err(error) = sending.outbox.run(&sending.stream).await {
                sending.close(error.into()).await;
            }
        });
        let waiting = Rc::clone(&queue);
        reactor::spawn(async move { waiting.watch_deadlines().await });
        let receiving = Rc::clone(&queue);
        reactor::spawn(async move {
            let (error, seen) = receiving.receive(&mut inbox).await;
            if let QueueError::Broken(Broken::Fatal(fatal)) = &error
                && receiving.end.borrow().is_none()
            {
                let head = Framing::terminate(true, *fatal, &seen);
                receiving.outbox.push(Outgoing { head: &head, ..Outgoing::default() });
                receiving.set_end(error);
                receiving.outbox.close();
                let _ = reactor::timeout(LAST_WORDS, sender).await;
            }
            receiving.close(QueueError::Closed).await;
            receiving.give_back();
        });
        Ok(queue)
    }

    /// A place for a command.
    pub async fn place(&self) -> Permit {
        self.places.acquire(1).await
    }

    /// Places that are taken.
    pub fn busy(&self) -> u64 {
        self.slots.borrow().len() as u64 - self.places.available() - self.probes.available()
    }

    /// Changes whenever the other side sends anything.
    pub fn heard(&self) -> u64 {
        self.heard.get()
    }

    /// True while a probe is not answered, nor anything else.
    pub fn is_silent(&self) -> bool {
        self.is_silent.get()
    }

    /// Sends a command that only looks whether the queue answers, unless there is such a one already.
    pub fn probe(&self, probe: Request) {
        if let Some(place) = self.probes.try_acquire(1) {
            // Nobody waits for what it says.
            drop(self.submit(place, probe));
        }
        self.is_silent.set(true);
    }

    /// The namespace of a command that is not answered; `None`: all are.
    pub fn waits_for(&self) -> Option<u32> {
        self.slots.borrow().iter().flatten().map(|slot| slot.namespace).next()
    }

    /// Sends a command, and says how to wait for its answer.
    pub fn submit(&self, place: Permit, request: Request) -> oneshot::Receiver<Answered> {
        let (answer, receiver) = oneshot::channel();
        let Request { command, from, into, change, limit } = request;
        if self.end.borrow().is_some() {
            answer.send(Answered { into, outcome: Err(Unanswered::Lost) });
            return receiver;
        }
        let (from_bytes, into_bytes) = (bytes_in(&from) as u32, bytes_in(&into) as u32);
        debug_assert!(from_bytes == 0 || into_bytes == 0, "data go one way");
        let room = match command.opcode() {
            code if code == AdminOpcode::Fabrics as u8 => ADMIN_IN_CAPSULE_BYTES,
            _ => self.terms.in_capsule_bytes,
        };
        let namespace = command.namespace();
        let is_within = from_bytes > 0 && from_bytes as usize <= room;
        let asked = if is_within { 0 } else { from_bytes };
        let id = self.exchange.borrow_mut().open(into_bytes, asked);
        let pointer = match is_within {
            true => DataPointer::InCapsule { offset: 0, bytes: from_bytes },
            false => DataPointer::Transport { bytes: from_bytes.max(into_bytes) },
        };
        let command = Pdu::Command(command.with_data(pointer).with_id(id));
        let head_bytes = if is_within { from_bytes as usize } else { 0 };
        let head = self.framing.head(&command, head_bytes);
        let data = if is_within { from.clone() } else { IoVec::new() };
        let slot = Slot {
            id,
            namespace,
            answer,
            landing: Landing::new(into),
            from,
            transfers: (asked > 0).then(|| Semaphore::new(TRANSFERS_WAITING_MAX)),
            change: change.as_ref().map(Change::send),
            deadline: limit.map(|limit| (reactor::now() + limit, limit)),
            is_damaged: false,
            _place: place,
        };
        let is_watched = slot.deadline.is_some();
        let before = self.slots.borrow_mut()[index_of(id)].replace(slot);
        assert!(before.is_none(), "a free place is free");
        self.push(&head, data, None);
        if is_watched {
            self.sent.notify_all();
        }
        receiver
    }

    /// Sends a command and waits for its answer.
    pub async fn run(&self, request: Request) -> Answered {
        let place = self.place().await;
        // The queue answers every command, or is dropped with its reactor, and so is this.
        self.submit(place, request).await.expect("every command is answered")
    }

    /// Why the queue is over; `None` while it is not.
    pub fn end(&self) -> Option<Rc<QueueError>> {
        self.end.borrow().clone()
    }

    /// Waits until the queue is over, and its commands were given back.
    pub async fn over(&self) -> Rc<QueueError> {
        self.ended.until(|| self.is_over.get().then_some(())).await;
        self.end().expect("over for a reason")
    }

    /// Ends the queue, for the first reason that is told.
    pub async fn close(&self, reason: QueueError) {
        self.set_end(reason);
        self.outbox.close();
        self.stream.close().await;
    }

    /// Sleeps, but no longer than the queue lasts: whoever waits holds its connection, and what the kernel still has to send.
    pub async fn sleep_until(&self, at: Instant) {
        let ended = self.ended.until(|| self.end.borrow().is_some().then_some(()));
        select(pin!(reactor::sleep_until(at)), pin!(ended)).await;
    }

    fn set_end(&self, reason: QueueError) {
        let mut end = self.end.borrow_mut();
        if end.is_none() {
            *end = Some(Rc::new(reason));
            drop(end);
            self.ended.notify_all();
            self.sent.notify_all();
        }
    }

    /// Gives all commands back. Nothing lands in their buffers any more, and nothing is sent.
    fn give_back(&self) {
        let slots: Vec<Slot> =
            self.slots.borrow_mut().iter_mut().filter_map(Option::take).collect();
        for slot in slots {
            if let Some(change) = &slot.change
                && self.exchange.borrow().may_have_begun(slot.id)
            {
                change.is_lost(self.terms.host_id, self.terms.settle);
            }
            let outcome = Err(Unanswered::Lost);
            slot.answer.send(Answered { into: slot.landing.into_whole(), outcome });
        }
        self.is_over.set(true);
        self.ended.notify_all();
    }

    /// Ends the queue when a command takes too long. Time in which this process stood still is none of the controller's: its answers
    /// may lie in the socket.
    async fn watch_deadlines(&self) {
        loop {
            let sent = self.sent.changed();
            if self.end.borrow().is_some() {
                return;
            }
            let first = {
                let slots = self.slots.borrow();
                slots.iter().flatten().filter_map(|slot| slot.deadline).min()
            };
            let Some((deadline, limit)) = first else {
                sent.await;
                continue;
            };
            if deadline <= reactor::now() {
                return self.close(QueueError::Silent { limit }).await;
            }
            // Others that are sent meanwhile rarely have less time; those are looked at a little late.
            let rest = deadline.since(reactor::now());
            let next = reactor::now() + rest.min(limit / 8).max(Duration::from_millis(1));
            self.sleep_until(next).await;
            let late = next.elapsed();
            if late >= STOOD_STILL {
                let mut slots = self.slots.borrow_mut();
                for (deadline, _) in slots.iter_mut().flatten().filter_map(|s| s.deadline.as_mut())
                {
                    *deadline = *deadline + late;
                }
            }
        }
    }

    /// Takes units until something is wrong: what, and the header at which it was.
    async fn receive(
        &self,
        inbox: &mut Inbox<S>,
    ) -> (QueueError, SmallVec<[u8; HEADER_BYTES_MAX]>) {
        let mut seen = SmallVec::new();
        loop {
            seen.clear();
            if let Err(error) = self.receive_unit(inbox, &mut seen).await {
                return (error, seen);
            }
        }
    }

    async fn receive_unit(
        &self,
        inbox: &mut Inbox<S>,
        seen: &mut SmallVec<[u8; HEADER_BYTES_MAX]>,
    ) -> Result<(), QueueError> {
        let digests = self.terms.digests;
        let bytes = inbox.head(COMMON_BYTES).await?.ok_or_else(cut_off)?;
        seen.extend_from_slice(bytes);
        self.hears();
        let common = Common::parse(bytes.try_into().expect("as many"))?;
        if common.kind.is_of_host() || common.kind == Kind::InitializeResponse {
            return Err(Fatal::Sequence.into());
        }
        let rest = inbox.head(common.rest_bytes(digests)).await?;
        let rest = rest.ok_or_else(cut_off)?;
        seen.extend_from_slice(rest);
        let pdu = common.pdu(rest, digests)?;
        let (padding, data_bytes) = common.data_bytes(digests)?;
        let step = self.exchange.borrow_mut().take(&pdu, data_bytes)?;
        let done = match step {
            Step::Land { id, bytes, .. } => {
                inbox.skip(padding as u64).await?;
                self.land(inbox, id, bytes as usize, common.has_data_digest(digests)).await?;
                self.exchange.borrow_mut().landed(id)?
            }
            Step::Send(transfer) => {
                self.send(transfer)?;
                None
            }
            Step::Done { .. } => Some(step),
        };
        if let Some(Step::Done { id, completion }) = done {
            self.done(id, completion);
        }
        Ok(())
    }

    fn hears(&self) {
        self.heard.set(self.heard.get().wrapping_add(1));
        self.is_silent.set(false);
    }

    /// Lets data land in the buffers of their command.
    async fn land(
        &self,
        inbox: &mut Inbox<S>,
        id: u16,
        bytes: usize,
        has_digest: bool,
    ) -> Result<(), QueueError> {
        const OPEN: &str = "an open command has its slot";
        let mut left = bytes;
        while left > 0 {
            let piece = {
                let mut slots = self.slots.borrow_mut();
                slots[index_of(id)].as_mut().expect(OPEN).landing.take(left)
            };
            left -= piece.len();
            let (piece, landed) = inbox.land(piece).await;
            self.hears();
            let mut slots = self.slots.borrow_mut();
            slots[index_of(id)].as_mut().expect(OPEN).landing.put(piece);
            drop(slots);
            landed?;
        }
        if has_digest {
            let told = inbox.head(DIGEST_BYTES).await?.ok_or_else(cut_off)?;
            let told = u32::from_le_bytes(told.try_into().expect("as many"));
            let mut slots = self.slots.borrow_mut();
            let slot = slots[index_of(id)].as_mut().expect(OPEN);
            slot.is_damaged |= told != crc32c_parts(slot.landing.last(bytes));
        }
        Ok(())
    }

    /// Sends data that the controller asked for.
    fn send(&self, transfer: Transfer) -> Result<(), QueueError> {
        let slots = self.slots.borrow();
        let slot = slots[index_of(transfer.command)].as_ref().expect("open commands have a slot");
        let transfers = slot.transfers.as_ref().expect("data that may be asked for");
        let mut turn = Some(transfers.try_acquire(1).ok_or(Fatal::LimitExceeded)?);
        let end = transfer.at + transfer.bytes;
        let mut at = transfer.at;
        while at < end {
            let bytes = (end - at).min(self.unit_bytes_max);
            let is_last = at + bytes == end;
            let part = Transfer { at, bytes, ..transfer };
            let head =
                self.framing.head(&Pdu::HostData { transfer: part, is_last }, bytes as usize);
            let data = window(&slot.from, at as usize, bytes as usize);
            self.push(&head, data, if is_last { turn.take() } else { None });
            at += bytes;
        }
        Ok(())
    }

    /// Sends a unit, with the digest of its data where that is agreed.
    fn push(&self, head: &[u8], data: IoVec, held: Option<Permit>) {
        let has_digest = self.terms.digests.data && !data.is_empty();
        let digest = has_digest.then(|| crc32c_parts(data.iter().map(|part| &part[..])));
        let digest = digest.map(u32::to_le_bytes);
        let tail = digest.as_ref().map_or(&[][..], |digest| digest);
        self.outbox.push(Outgoing { head, data, tail, held: [held, None] });
    }

    fn done(&self, id: u16, completion: Completion) {
        let slot = self.slots.borrow_mut()[index_of(id)].take();
        let slot = slot.expect("an open command has its slot");
        let is_damaged = slot.is_damaged && completion.status.is_success();
        let outcome = if is_damaged { Err(Unanswered::Damaged) } else { Ok(completion) };
        slot.answer.send(Answered { into: slot.landing.into_whole(), outcome });
    }
}

/// Waits for a future for as long as the queue is not over.
pub(crate) async fn while_open<S: ByteStream + 'static, T>(
    queue: &Queue<S>,
    future: impl Future<Output = T>,
) -> Option<T> {
    match select(pin!(future), pin!(queue.over())).await {
        Either::Left((output, _)) => Some(output),
        Either::Right(_) => None,
    }
}
