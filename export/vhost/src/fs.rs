//! A file system as a virtual machine has it (virtio 1.2, 5.11): FUSE requests in the guest's memory -> a session of `levada_fuse`.
//!
//! A request is a chain: `fuse_in_header` and arguments in what the device may read, room for `fuse_out_header` and the reply in what
//! it is to write; how either is cut into descriptors means nothing. Queue 0 is for FORGET and INTERRUPT, so that they overtake others;
//! any request is served from any queue.
//!
//! What always holds:
//! - A message is copied out of the guest's memory before anybody looks at it.
//! - Requests get numbers of our own, so that a guest that numbers two alike confuses nobody; and none names a process, as the guest's
//!   are not ours.
//! - Data of one guest that is on its way at once is bounded. Requests without are not counted: the one that frees a lock is
//!   received, however many others wait.
//! - A session begins with INIT and ends with DESTROY, with the next INIT, or with the guest: then what was written is durable, and its
//!   locks are free, before anything else begins.
//! - What waits for a lock keeps no queue from ending: it is answered ENOLCK.

use crate::cursor::{Cursor, long, total, word};
use crate::memory::Memory;
use crate::ring::{Broken, Chain, Span, Used};
use crate::served::{Features, Served, Source, protocol};
use levada_base::reactor;
use levada_base::sync::Semaphore;
use levada_base::units::BLOCK_BYTES;
use levada_base::{Buf, BufMut};
use levada_fuse::codec::{Caller, IN_HEADER_BYTES, OUT_HEADER_BYTES, Opcode, WRITE_DATA_OFFSET};
use levada_fuse::{Answer, Errno, Handler, Operation, Request, Session};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Of a tag, padded with zeroes (`struct virtio_fs_config`).
pub(crate) const TAG_BYTES: usize = 36;
/// The largest message: a WRITE of 1 MiB, as INIT allows ([`levada_fuse::codec::Limits`]). No reply is larger either.
const MESSAGE_BYTES_MAX: u64 = BLOCK_BYTES + (1 << 20);
/// Messages and replies up to this size are not counted as data.
const SMALL_BYTES: u64 = BLOCK_BYTES;
/// Data of one guest that is on its way at once, at least: one request's.
pub(crate) const BYTES_IN_FLIGHT_MIN: u64 = 2 * MESSAGE_BYTES_MAX;
/// How often those that wait are told, when a session is to end.
const WAITING_AGAIN: Duration = Duration::from_millis(50);

/// Where the sessions of a guest come from.
pub trait FileSystem: 'static {
    /// What answers its requests.
    type Handler: Handler + 'static;

    /// The guest is about to mount it: a session before INIT. `None`: it cannot be had.
    fn begin(&self) -> impl Future<Output = Option<Rc<Session<Self::Handler>>>>;

    /// A queue of the guest is to end: what came from it, and waits for its turn, is to go on soon; where the guest `is_gone` nobody hears any
    /// more what became of it. Called again and again until the queue has ended.
    fn hurry(&self, _is_gone: bool) {}

    /// The guest has unmounted it, or is gone: nothing of the session is under way any more. Returns when what was written is
    /// durable and what was locked is free.
    fn end(&self, session: Rc<Session<Self::Handler>>) -> impl Future<Output = ()>;
}

/// A request that is being answered.
struct Out<H> {
    session: Rc<Session<H>>,
    queue: usize,
    /// The guest's number of it.
    unique: u64,
    /// It may wait for what another client does.
    waits: bool,
    /// It is not to wait any longer, which the guest did not ask for.
    is_given_up: bool,
}

/// The file system as one guest has it.
pub(crate) struct Guest<F: FileSystem> {
    system: Rc<F>,
    tag: [u8; TAG_BYTES],
    session: RefCell<Option<Rc<Session<F::Handler>>>>,
    /// Taken by who begins or ends a session.
    turn: Rc<Semaphore>,
    /// By our numbers.
    out: RefCell<BTreeMap<u64, Out<F::Handler>>>,
    last_number: Cell<u64>,
    /// Bytes that may still be taken for data in flight.
    room: Rc<Semaphore>,
    is_gone: Cell<bool>,
}

impl<F: FileSystem> Guest<F> {
    pub(crate) fn new(system: Rc<F>, tag: [u8; TAG_BYTES], bytes_in_flight_max: u64) -> Self {
        Self {
            system,
            tag,
            session: RefCell::default(),
            turn: Semaphore::new(1),
            out: RefCell::default(),
            last_number: Cell::new(0),
            room: Semaphore::new(bytes_in_flight_max.max(BYTES_IN_FLIGHT_MIN)),
            is_gone: Cell::default(),
        }
    }

    /// The answer to a message, if it has one.
    async fn answer(&self, source: Source, mut message: BufMut) -> Option<Answer> {
        let (opcode, unique) = (word(&message, 4), long(&message, 8));
        let opcode = Opcode::from_raw(opcode);
        let number = self.last_number.get() + 1;
        self.last_number.set(number);
        put(&mut message, 8, &number.to_le_bytes());
        put(&mut message, 32, &0u32.to_le_bytes());
        let answer = match opcode {
            Some(Opcode::Init) => self.begin(message.freeze()).await,
            Some(Opcode::Destroy) => self.destroy(message.freeze()).await,
            Some(Opcode::Forget | Opcode::BatchForget | Opcode::Interrupt) => {
                let session = self.session.borrow().clone()?;
                if opcode == Some(Opcode::Interrupt) && !self.renumber(&mut message) {
                    return None;
                }
                return session.serve(&message.freeze()).await;
            }
            opcode => match self.note(source, opcode, number, unique) {
                Ok(noted) => noted.serve(&message.freeze()).await,
                Err(errno) => Some(Answer::error(unique, errno)),
            },
        };
        answer.map(|answer| answer.numbered(unique))
    }

    /// INTERRUPT names a request by the guest's number. False: it is answered already, or was never there.
    fn renumber(&self, message: &mut BufMut) -> bool {
        if message.len() < IN_HEADER_BYTES + 8 {
            return false;
        }
        let unique = long(message, IN_HEADER_BYTES);
        let out = self.out.borrow();
        let Some((number, _)) = out.iter().find(|(_, out)| out.unique == unique) else {
            return false;
        };
        put(message, IN_HEADER_BYTES, &number.to_le_bytes());
        true
    }

    /// A request begins, in the session that there is.
    fn note(
        &self,
        source: Source,
        opcode: Option<Opcode>,
        number: u64,
        unique: u64,
    ) -> Result<Noted<'_, F>, Errno> {
        // As the kernel answers programs on a mount whose server is gone.
        let session = self.session.borrow().clone().ok_or(Errno::NOTCONN)?;
        let waits = opcode == Some(Opcode::SetLkW);
        let mut all = self.out.borrow_mut();
        // The unlock must find room in the ring, where a request takes three descriptors, unless they are indirect.
        let waiting = all.values().filter(|out| out.waits && out.queue == source.queue).count();
        if waits && waiting >= usize::from(source.size) / 4 {
            return Err(Errno::NOLCK);
        }
        let out = Out {
            session: Rc::clone(&session),
            queue: source.queue,
            unique,
            waits,
            is_given_up: false,
        };
        all.insert(number, out);
        Ok(Noted { guest: self, session, number })
    }

    /// INIT: a session that has agreed on terms is over, as the guest has started anew.
    async fn begin(&self, message: Buf) -> Option<Answer> {
        let Some(_turn) = self.turn.try_acquire(1) else {
            return Some(Answer::error(0, Errno::BUSY));
        };
        let is_over = |session: &mut Rc<Session<F::Handler>>| session.terms().is_some();
        let over = self.session.borrow_mut().take_if(is_over);
        if let Some(session) = over {
            self.finish(session).await;
        }
        let fresh = self.session.borrow().clone();
        let session = match fresh {
            Some(session) => session,
            None => match self.system.begin().await {
                Some(session) => {
                    *self.session.borrow_mut() = Some(Rc::clone(&session));
                    session
                }
                None => return Some(Answer::error(0, Errno::IO)),
            },
        };
        session.serve(&message).await
    }

    async fn destroy(&self, message: Buf) -> Option<Answer> {
        let Some(_turn) = self.turn.try_acquire(1) else {
            return Some(Answer::error(0, Errno::BUSY));
        };
        let Some(session) = self.session.take() else {
            return Some(Answer::error(0, Errno::NOTCONN));
        };
        let answer = session.serve(&message).await;
        self.finish(session).await;
        answer
    }

    /// Ends a session that is no longer the guest's.
    async fn finish(&self, session: Rc<Session<F::Handler>>) {
        while self.give_up(|out| Rc::ptr_eq(&out.session, &session)) {
            reactor::sleep(WAITING_AGAIN).await;
        }
        self.system.end(session).await;
    }

    /// Gives those of `which` up that wait; false when none does.
    fn give_up(&self, which: impl Fn(&Out<F::Handler>) -> bool) -> bool {
        let mut out = self.out.borrow_mut();
        let mut waiting = out.iter_mut().filter(|(_, out)| out.waits && which(out)).peekable();
        let is_any = waiting.peek().is_some();
        for (number, out) in waiting {
            out.is_given_up = true;
            let (session, unique) = (Rc::clone(&out.session), *number);
            // Not from within: it may be the one that is being answered.
            reactor::spawn(async move {
                let operation = Operation::Interrupt { unique };
                let (unique, inode, caller) = (0, 0, Caller::default());
                let request = Request { unique, inode, caller, operation };
                session.handler().handle(request, &Buf::copy_of(&[])).await;
            });
        }
        is_any
    }
}

/// A request that is noted until it is answered.
struct Noted<'a, F: FileSystem> {
    guest: &'a Guest<F>,
    session: Rc<Session<F::Handler>>,
    number: u64,
}

impl<F: FileSystem> Noted<'_, F> {
    async fn serve(&self, message: &Buf) -> Option<Answer> {
        let metered = self.session.meters().begin(message);
        let answer = self.session.serve(message).await;
        if let Some(metered) = metered {
            metered.end(answer.as_ref());
        }
        let out = self.guest.out.borrow();
        let is_given_up = out.get(&self.number).is_some_and(|out| out.is_given_up);
        // Linux starts a call anew for EINTR if there is a signal, and where there is none a program sees an error of the kernel's own.
        match answer {
            Some(answer) if is_given_up && answer.errno() == Some(Errno::INTR) => {
                Some(Answer::error(self.number, Errno::NOLCK))
            }
            answer => answer,
        }
    }
}

impl<F: FileSystem> Drop for Noted<'_, F> {
    fn drop(&mut self) {
        self.guest.out.borrow_mut().remove(&self.number);
    }
}

impl<F: FileSystem> Served for Guest<F> {
    /// None for requests in flight: the state of a session ends with the process, so who serves next could not carry them out. Over the
    /// back end's channel nothing is sent, but user-mode Linux makes its interrupt of it.
    const PROTOCOL: u64 = protocol::MQ
        | protocol::REPLY_ACK
        | protocol::BACKEND_REQ
        | protocol::CONFIG
        | protocol::CONFIGURE_MEM_SLOTS;

    /// No `VIRTIO_FS_F_NOTIFICATION`: neither Linux nor QEMU has it.
    fn offered(&self) -> Features {
        Features::RINGS
    }

    /// `struct virtio_fs_config` (virtio 1.2, 5.11.4). QEMU answers for itself, with a tag of its own.
    fn configuration(&self, queues: u16) -> Vec<u8> {
        let request_queues = u32::from(queues - 1);
        [&self.tag[..], &request_queues.to_le_bytes()].concat()
    }

    async fn serve(
        self: Rc<Self>,
        source: Source,
        memory: Arc<Memory>,
        chain: Chain,
    ) -> Result<Used, Broken> {
        let (sent, room) = (total(&chain.readable), total(&chain.writable));
        let data_bytes = counted(sent) + counted(room);
        let _room_taken = match data_bytes {
            0 => None,
            _ => Some(self.room.acquire(data_bytes).await),
        };
        let used = |bytes| Used { token: chain.token, bytes };
        let Some(message) = receive(&memory, &chain.readable, sent) else { return Ok(used(0)) };
        // What was read may have been zeroes in the place of lost pages.
        if memory.is_lost() {
            return Err(Broken::Lost);
        }
        let unique = long(&message, 8);
        let answer = match sent {
            ..=MESSAGE_BYTES_MAX if fits(&message, room) => self.answer(source, message).await,
            _ => Some(Answer::error(unique, Errno::IO)),
        };
        let bytes =
            answer.map_or(0, |answer| send(&memory, &chain.writable, room, &answer, unique));
        if memory.is_lost() { Err(Broken::Lost) } else { Ok(used(bytes)) }
    }

    fn stop_waiting(&self, queue: usize) {
        self.give_up(|out| out.queue == queue);
        self.system.hurry(self.is_gone.get());
    }

    fn gone(&self) {
        self.is_gone.set(true);
    }

    async fn left(&self) {
        let session = self.session.take();
        if let Some(session) = session {
            self.finish(session).await;
        }
    }
}

/// Whether there is room for as much as a request wants to be told: what is read for it is counted by its room.
fn fits(message: &[u8], room: u64) -> bool {
    let size_at = match Opcode::from_raw(word(message, 4)) {
        Some(Opcode::Read | Opcode::ReadDir | Opcode::ReadDirPlus) => IN_HEADER_BYTES + 16,
        Some(Opcode::GetXattr | Opcode::ListXattr) => IN_HEADER_BYTES,
        _ => return true,
    };
    // One that is cut short is refused by who reads it.
    message.len() < size_at + 4
        || OUT_HEADER_BYTES as u64 + u64::from(word(message, size_at)) <= room
}

/// How much of that many bytes counts as data.
fn counted(bytes: u64) -> u64 {
    if bytes <= SMALL_BYTES { 0 } else { bytes.min(MESSAGE_BYTES_MAX) }
}

/// Copies a message of `sent` bytes out, or of one that is too long the beginning. `None`: it has no header, or is not where the
/// guest says.
fn receive(memory: &Memory, spans: &[Span], sent: u64) -> Option<BufMut> {
    if sent < IN_HEADER_BYTES as u64 {
        return None;
    }
    let bytes = sent.min(MESSAGE_BYTES_MAX) as usize;
    let mut message = if bytes as u64 <= SMALL_BYTES {
        BufMut::for_overwrite(bytes)
    } else {
        // So that the data of a WRITE begins with a page.
        let before = BLOCK_BYTES as usize - WRITE_DATA_OFFSET;
        let mut whole = BufMut::for_overwrite(before + bytes);
        let _before = whole.split_to(before);
        whole
    };
    Cursor::new(memory, spans).read(&mut message).ok()?;
    Some(message)
}

/// Copies an answer in, which is an error instead where there is no room for it: how many bytes.
fn send(memory: &Memory, spans: &[Span], room: u64, answer: &Answer, unique: u64) -> u32 {
    let instead = Answer::error(unique, Errno::IO);
    let bytes_of = |answer: &Answer| answer.slices().iter().map(|slice| slice.len() as u64).sum();
    let (mut answer, mut bytes): (_, u64) = (answer, bytes_of(answer));
    if bytes > room {
        (answer, bytes) = (&instead, OUT_HEADER_BYTES as u64);
    }
    let mut into = Cursor::new(memory, spans);
    let is_told = bytes <= room && answer.slices().iter().all(|slice| into.write(slice).is_ok());
    // No more than one reply, which is far below 4 GiB.
    if is_told { bytes as u32 } else { 0 }
}

fn put(message: &mut BufMut, at: usize, field: &[u8]) {
    message[at..at + field.len()].copy_from_slice(field);
}
