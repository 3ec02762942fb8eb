//! Payloads that stay where they lie, between two processes of one machine.
//!
//! Both ends of a Unix socket map each other's memory to read (`levada_base::shared`). A frame then
//! says where its payload lies instead of carrying it, and the receiver sees the sender's buffer. What is left of
//! frames goes through a pipe in memory each way (`levada_base::reactor::pipe`); the socket tells of the other
//! side's end. `docs/design/0006-wire.md` draws what this adds.
//!
//! What always holds:
//! - A payload that was handed over is neither changed nor used again before the receiver has given
//!   it back, or has no view of this memory any more (its lifeline ended: it let go or died).
//! - Nothing is handed over before the other side said that it has mapped this memory, nor after its
//!   lifeline ended: nobody would ever give it back.
//! - At most [`HELD_BYTES_MAX`] are handed over at a time; what is beyond travels by copy.
//!
//! After a crash of one side the other sees the end of the socket, as ever; the memory of the dead
//! lives on until the last view of it is dropped.

use crate::channel::ChannelError;
use crate::frame::{Frame, FrameError, Header, Kind};
use levada_base::reactor::pipe::{Bell, Reader, Writer};
use levada_base::reactor::{self, Fd, net};
use levada_base::shared::{OwnMemory, PeerMemory, share_buffers};
use levada_base::sync::queue;
use levada_base::{BufMut, IoVec};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::{Rc, Weak};

/// All that goes over the socket in each direction. With it come the memory's file, the lifeline's end, the pipe that
/// this side writes to, and the bell that wakes it.
const GREETING: [u8; 8] = *b"LVDSHM\x02\x00";
/// Before each frame: flags, returns, parts, 0.
pub(crate) const PREFIX_BYTES: usize = 8;
/// A flag: the sender has mapped the receiver's memory.
const MAPPED: u16 = 1;
/// Bytes of one returned number, and of one part.
const RETURN_BYTES: usize = 8;
const PART_BYTES: usize = 16;
/// One frame carries at most this many of each.
const RETURNS_MAX: usize = 512;
const PARTS_MAX: usize = 256;
/// Smaller payloads are copied.
const SHARED_BYTES_MIN: usize = 32 << 10;
/// What one side may have handed over and not got back.
const HELD_BYTES_MAX: u64 = 64 << 20;
/// Returns wait for a frame that goes anyway, up to this many bytes.
const UNRETURNED_BYTES_MAX: u64 = 8 << 20;

/// The queue of a connection's writer, while it is open.
pub(crate) type Outgoing = RefCell<Option<queue::Sender<Queued>>>;

/// A frame that waits for its turn, and what is dropped when that comes.
pub(crate) struct Queued {
    pub frame: Frame,
    pub kept: Option<Box<dyn Any>>,
}

impl From<Frame> for Queued {
    fn from(frame: Frame) -> Self {
        Self { frame, kept: None }
    }
}

/// What both directions of one connection know of shared memory.
pub(crate) struct Sharing {
    /// The other side has mapped the own memory.
    is_mapped_there: Cell<bool>,
    theirs: RefCell<Option<Rc<PeerMemory>>>,
    held: Rc<Held>,
    /// Payloads that the other side has handed over so far.
    received: Cell<u64>,
    returns: Rc<Returns>,
}

/// Payloads that the other side may be reading.
#[derive(Default)]
struct Held {
    payloads: RefCell<BTreeMap<u64, IoVec>>,
    bytes: Cell<u64>,
    /// Numbers payloads from 1 on.
    sent: Cell<u64>,
    /// The memory was offered, and the lifeline that went with it has not ended.
    is_offered: Cell<bool>,
}

/// Payloads of the other side that nobody reads here any more.
struct Returns {
    numbers: RefCell<Vec<u64>>,
    bytes: Cell<u64>,
    outgoing: Weak<Outgoing>,
}

/// The right to read one payload; dropping it gives the payload back.
struct Lease {
    number: u64,
    bytes: u64,
    returns: Rc<Returns>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        let returns = &self.returns;
        returns.numbers.borrow_mut().push(self.number);
        returns.bytes.set(returns.bytes.get() + self.bytes);
        if returns.bytes.get() >= UNRETURNED_BYTES_MAX
            && let Some(outgoing) = returns.outgoing.upgrade()
            && let Some(queue) = &*outgoing.borrow()
        {
            returns.bytes.set(0);
            // When the writer is gone, so is the other side's interest.
            let _ = queue.send(Frame::new(Header::new(Kind::OneWay), Vec::new()).into());
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Perhaps still being read: then the memory must not be used again.
        std::mem::forget(self.payloads.take());
    }
}

impl Held {
    fn remove(&self, number: u64) {
        // Unknown numbers do no harm: that side only gives up what it was promised.
        let payload = self.payloads.borrow_mut().remove(&number);
        if let Some(payload) = payload {
            self.bytes.set(self.bytes.get() - levada_base::buf::bytes_in(&payload));
        }
    }
}

impl Sharing {
    /// Offers the own memory on a fresh connection, and a pipe to which frames are written from now on; `outgoing`
    /// is its writer's queue.
    ///
    /// # Errors
    ///
    /// When memory cannot be shared, or the connection is gone.
    pub(crate) fn offer(
        stream: &net::Stream,
        outgoing: &Rc<Outgoing>,
    ) -> io::Result<(Rc<Self>, Writer)> {
        let OwnMemory { file } = share_buffers()?;
        let lifeline = Lifeline::new()?;
        let (writer, pipe) = Writer::new()?;
        let bell = Bell::of_this_reactor()?;
        let offered = [file.as_fd(), lifeline.theirs.as_fd(), pipe.as_fd(), bell.as_fd()];
        stream.send_descriptors(&GREETING, &offered)?;
        drop(lifeline.theirs);
        let held = Rc::new(Held::default());
        held.is_offered.set(true);
        reactor::spawn(let_go(lifeline.ours, Rc::clone(&held)));
        Ok((Rc::new(Self::new(held, Rc::downgrade(outgoing))), writer))
    }

    fn new(held: Rc<Held>, outgoing: Weak<Outgoing>) -> Self {
        let returns = Returns { numbers: RefCell::default(), bytes: Cell::default(), outgoing };
        Self {
            is_mapped_there: Cell::new(false),
            theirs: RefCell::default(),
            held,
            received: Cell::default(),
            returns: Rc::new(returns),
        }
    }

    /// Takes the other side's offer, which `writer` needs to wake it; what it sends comes out of the pipe.
    pub(crate) async fn accept_offer(
        &self,
        stream: &net::Stream,
        writer: &Writer,
    ) -> Result<Reader, ChannelError> {
        let mut greeting = [0; GREETING.len()];
        let fds = stream.receive_descriptors(&mut greeting).await?;
        if greeting != GREETING {
            return Err(FrameError::Sharing.into());
        }
        let [file, lifeline, pipe, bell] =
            <[OwnedFd; 4]>::try_from(fds).map_err(|_| FrameError::Sharing)?;
        let reader = Reader::new(&pipe, Bell::new(bell.try_clone()?))?;
        writer.set_bell(Bell::new(bell));
        match PeerMemory::map(&file, lifeline) {
            Ok(memory) => *self.theirs.borrow_mut() = Some(memory),
            Err(error) => tracing::warn!(%error, "cannot read a neighbour's memory"),
        }
        reactor::spawn(until_end(stream.clone(), reader.clone(), writer.clone()));
        Ok(reader)
    }

    /// Puts a frame into `parts` as it goes through the pipe; returns the bytes that are copied.
    pub(crate) fn encode(&self, frame: Frame, parts: &mut IoVec) -> usize {
        let places = self.hand_over(&frame.payload);
        let returned: Vec<u64> = {
            let mut numbers = self.returns.numbers.borrow_mut();
            let some = numbers.len().min(RETURNS_MAX);
            self.returns.bytes.set(0);
            numbers.drain(..some).collect()
        };
        let bytes = PREFIX_BYTES + returned.len() * RETURN_BYTES;
        let mut prefix = BufMut::for_overwrite(bytes);
        let flags = if self.theirs.borrow().is_some() { MAPPED } else { 0 };
        let count = places.as_ref().map_or(0, Vec::len);
        for (at, field) in [flags, returned.len() as u16, count as u16, 0].into_iter().enumerate() {
            prefix[2 * at..2 * at + 2].copy_from_slice(&field.to_le_bytes());
        }
        for (place, number) in prefix[PREFIX_BYTES..].chunks_mut(RETURN_BYTES).zip(&returned) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        parts.push(prefix.freeze());
        let Some(places) = places else {
            let copied = frame.body.len() + frame.payload_bytes();
            parts.push(frame.encode_head());
            parts.extend(frame.payload);
            return bytes + copied;
        };
        parts.push(frame.encode_head_without_payload_sum());
        let mut table = BufMut::for_overwrite(places.len() * PART_BYTES);
        for (entry, (offset, len)) in table.chunks_mut(PART_BYTES).zip(&places) {
            entry[..8].copy_from_slice(&offset.to_le_bytes());
            entry[8..].copy_from_slice(&len.to_le_bytes());
        }
        parts.push(table.freeze());
        bytes + frame.body.len() + places.len() * PART_BYTES
    }

    /// Where the parts of a payload lie, which is kept from now on; `None` when it must be copied.
    fn hand_over(&self, payload: &IoVec) -> Option<Vec<(u64, u64)>> {
        let bytes = levada_base::buf::bytes_in(payload);
        let held = &self.held;
        if !self.is_mapped_there.get()
            || !held.is_offered.get()
            || bytes < SHARED_BYTES_MIN as u64
            || held.bytes.get() + bytes > HELD_BYTES_MAX
            || payload.len() > PARTS_MAX
        {
            return None;
        }
        let place = |part: &levada_base::Buf| Some((part.shared_offset()?, part.len() as u64));
        let filled = payload.iter().filter(|part| !part.is_empty());
        let places: Vec<_> = filled.map(place).collect::<Option<_>>()?;
        let number = held.sent.get() + 1;
        held.sent.set(number);
        held.bytes.set(held.bytes.get() + bytes);
        held.payloads.borrow_mut().insert(number, payload.clone());
        Some(places)
    }

    /// What a prefix says of the message that follows.
    ///
    /// # Errors
    ///
    /// [`FrameError::Sharing`] when it says what no prefix says.
    pub(crate) fn decode_prefix(
        &self,
        prefix: &[u8; PREFIX_BYTES],
    ) -> Result<Following, FrameError> {
        let field = |at: usize| u16::from_le_bytes([prefix[2 * at], prefix[2 * at + 1]]);
        let following = Following {
            return_bytes: usize::from(field(1)) * RETURN_BYTES,
            table_bytes: usize::from(field(2)) * PART_BYTES,
        };
        let sound = field(0) & !MAPPED == 0
            && usize::from(field(1)) <= RETURNS_MAX
            && usize::from(field(2)) <= PARTS_MAX
            && field(3) == 0;
        if !sound {
            return Err(FrameError::Sharing);
        }
        if field(0) & MAPPED != 0 {
            self.is_mapped_there.set(true);
        }
        Ok(following)
    }

    /// The other side gives payloads back.
    pub(crate) fn returned(&self, numbers: &[u8]) {
        for number in numbers.chunks_exact(RETURN_BYTES) {
            self.held.remove(u64_of(number));
        }
    }

    /// The payload of `bytes` bytes that a table describes.
    ///
    /// # Errors
    ///
    /// [`FrameError::Sharing`] when it is not in the memory that the other side offered.
    pub(crate) fn payload(&self, table: &[u8], bytes: usize) -> Result<IoVec, FrameError> {
        let theirs = self.theirs.borrow();
        let memory = theirs.as_ref().ok_or(FrameError::Sharing)?;
        let number = self.received.get() + 1;
        self.received.set(number);
        let returns = Rc::clone(&self.returns);
        let lease = Rc::new(Lease { number, bytes: bytes as u64, returns });
        let mut payload = IoVec::new();
        let mut rest = bytes as u64;
        for part in table.chunks_exact(PART_BYTES) {
            let (offset, len) = (u64_of(&part[..8]), u64_of(&part[8..]));
            // Whoever takes a payload apart counts on parts that hold something.
            rest = rest.checked_sub(len).filter(|_| len > 0).ok_or(FrameError::Sharing)?;
            let view = memory.view(offset, len, Rc::clone(&lease)).ok_or(FrameError::Sharing)?;
            payload.push(view);
        }
        if rest == 0 { Ok(payload) } else { Err(FrameError::Sharing) }
    }

    /// The connection has ended: the other side's memory is only held by what is still read.
    pub(crate) fn end(&self) {
        let memory = self.theirs.borrow_mut().take();
        drop(memory);
    }
}

fn u64_of(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("8 bytes"))
}

/// What a neighbour may put around frames, for `fuzz/`: prefix, bytes of the payload (4), returned
/// numbers, table; again and again on one connection. What is taken for a payload can be read.
pub(crate) fn fuzz(mut input: &[u8]) {
    thread_local! {
        static MEMORY: Rc<PeerMemory> = {
            let own = share_buffers().expect("memory");
            let lifeline = io::pipe().expect("a pipe").1;
            PeerMemory::map(&own.file, lifeline.into()).expect("maps")
        };
    }
    let sharing = Sharing::new(Rc::default(), Weak::new());
    sharing.held.is_offered.set(true);
    let own = BufMut::for_overwrite(SHARED_BYTES_MIN).freeze().into_vec();
    MEMORY.with(|memory| *sharing.theirs.borrow_mut() = Some(Rc::clone(memory)));
    while let Some((prefix, rest)) = input.split_first_chunk() {
        let Ok(following) = sharing.decode_prefix(prefix) else { return };
        let handed = sharing.hand_over(&own).is_some();
        assert!(!handed || sharing.is_mapped_there.get());
        let Some((bytes, rest)) = rest.split_first_chunk() else { return };
        let bytes = u32::from_le_bytes(*bytes) as usize;
        let Some((returned, rest)) = rest.split_at_checked(following.return_bytes) else { return };
        sharing.returned(returned);
        let Some((table, rest)) = rest.split_at_checked(following.table_bytes) else { return };
        if let Ok(payload) = sharing.payload(table, bytes) {
            assert_eq!(levada_base::buf::bytes_in(&payload), bytes as u64);
            for (part, place) in payload.iter().zip(table.chunks_exact(PART_BYTES)) {
                // Reading a page takes memory for it, in the end for all of an arena.
                if u64_of(&place[..8]) + u64_of(&place[8..]) <= HELD_BYTES_MAX {
                    std::hint::black_box(part[0] ^ part[part.len() - 1]);
                }
            }
        }
        input = rest;
    }
    let held: u64 =
        sharing.held.payloads.borrow().values().map(|held| levada_base::buf::bytes_in(held)).sum();
    assert!(sharing.held.bytes.get() == held && held <= HELD_BYTES_MAX);
    // Nobody reads them.
    sharing.held.payloads.take();
}

/// Bytes that follow a prefix: before the frame's header, and in place of its payload.
pub(crate) struct Following {
    pub return_bytes: usize,
    pub table_bytes: usize,
}

/// A pipe: the other side holds its writing end as long as it has the own memory mapped.
struct Lifeline {
    ours: Fd,
    theirs: OwnedFd,
}

impl Lifeline {
    fn new() -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        Ok(Self { ours: Fd::new(reader.into())?, theirs: writer.into() })
    }
}

/// Waits until the socket ends, and with it the pipes.
async fn until_end(stream: net::Stream, reader: Reader, writer: Writer) {
    // Nothing more goes over it, so whatever this is, it is the end.
    let _ = stream.read(BufMut::for_overwrite(1)).await;
    reader.close();
    writer.close();
}

/// Waits until the other side cannot read the own memory any more.
async fn let_go(lifeline: Fd, held: Rc<Held>) {
    // Nothing is ever written to it, so this is its end.
    if lifeline.readable().await.is_ok() {
        // The connection may live a little longer, and have frames to send.
        held.is_offered.set(false);
        let payloads = held.payloads.take();
        held.bytes.set(0);
        drop(payloads);
    }
}
