//! What the other side is told.

use super::ByteStream;
use crate::buf::bytes_in;
use crate::sync::{Notify, Permit};
use crate::{Buf, IoVec};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;

/// Buffers that are sent at once; the system takes 1,024.
const BUFFERS_AT_ONCE: usize = 512;
/// Bytes that are sent at once, unless a message alone has more. Each call may have to wake the other side, which takes some 10 us over
/// loopback: with half of this, large reads are a third slower, and small ones a sixth (note 0022). More keeps the thread longer.
const BYTES_AT_ONCE: usize = 512 << 10;

/// What stands before a message's data, or all of it.
pub type Head = SmallVec<[u8; 152]>;

/// A message on its way.
#[derive(Default)]
pub struct Outgoing<'a> {
    pub head: &'a [u8],
    pub data: IoVec,
    /// What stands behind the data.
    pub tail: &'a [u8],
    /// What it has of the connection's bounds, until the system has taken it.
    pub held: [Option<Permit>; 2],
}

/// Messages that go together.
#[derive(Default)]
struct Batch {
    /// Heads and tails.
    copied: Vec<u8>,
    /// Data, and how much of `copied` stands before them.
    data: Vec<(usize, Buf)>,
    data_bytes: usize,
    held: Vec<Permit>,
}

impl Batch {
    fn has_room_for(&self, message: &Outgoing<'_>, data_bytes: usize) -> bool {
        // Between two data there may be copied bytes.
        let buffers = 2 * (self.data.len() + message.data.len()) + 1;
        let copied = self.copied.len() + message.head.len() + message.tail.len();
        let bytes = self.data_bytes + data_bytes + copied;
        buffers <= BUFFERS_AT_ONCE && bytes <= BYTES_AT_ONCE
    }

    fn add(&mut self, mut message: Outgoing<'_>, data_bytes: usize) {
        self.copied.extend_from_slice(message.head);
        let at = self.copied.len();
        for part in message.data.drain(..) {
            self.data.push((at, part));
        }
        self.data_bytes += data_bytes;
        self.copied.extend_from_slice(message.tail);
        for permit in message.held.into_iter().flatten() {
            self.held.push(permit);
        }
    }

    /// What is sent, after which the batch holds nothing but permits.
    fn take_parts(&mut self) -> IoVec {
        let copied = Buf::copy_of(&self.copied);
        let mut parts = IoVec::with_capacity(2 * self.data.len() + 1);
        let mut from = 0;
        for (to, part) in self.data.drain(..) {
            if from < to {
                parts.push(copied.slice(from, to - from));
                from = to;
            }
            parts.push(part);
        }
        if from < copied.len() {
            parts.push(copied.slice(from, copied.len() - from));
        }
        self.copied.clear();
        self.data_bytes = 0;
        parts
    }
}

/// Messages that wait for the socket.
#[derive(Default)]
pub struct Outbox {
    /// Each is sent at once, and the last one takes more until its turn comes.
    waiting: RefCell<VecDeque<Batch>>,
    /// One that was sent, for its memory.
    spare: RefCell<Batch>,
    changed: Notify,
    is_closed: Cell<bool>,
    /// The other side is gone: nobody waits for what is sent.
    is_broken: Cell<bool>,
}

impl Outbox {
    /// Sends a message in its turn.
    pub fn push(&self, message: Outgoing<'_>) {
        if self.is_broken.get() {
            return;
        }
        let data_bytes = bytes_in(&message.data) as usize;
        let mut waiting = self.waiting.borrow_mut();
        match waiting.back_mut() {
            Some(last) if last.has_room_for(&message, data_bytes) => {
                last.add(message, data_bytes);
            }
            last => {
                let is_first = last.is_none();
                // One whose data lie in very many pieces goes alone; the stream sends those in turns.
                let mut batch = self.spare.take();
                batch.add(message, data_bytes);
                waiting.push_back(batch);
                if is_first {
                    self.changed.notify_all();
                }
            }
        }
    }

    /// Nothing is pushed any more.
    pub fn close(&self) {
        self.is_closed.set(true);
        self.changed.notify_all();
    }

    /// Sends what is pushed, until all of it is sent after [`Outbox::close`].
    ///
    /// # Errors
    ///
    /// What the stream says. What waits then and what is pushed later is dropped.
    pub async fn run(&self, stream: &impl ByteStream) -> io::Result<()> {
        loop {
            let is_ready =
                || (self.is_closed.get() || !self.waiting.borrow().is_empty()).then_some(());
            self.changed.until(is_ready).await;
            let Some(mut batch) = self.waiting.borrow_mut().pop_front() else { return Ok(()) };
            if let Err(error) = stream.write_all(batch.take_parts()).await {
                self.is_broken.set(true);
                self.waiting.borrow_mut().clear();
                return Err(error);
            }
            batch.held.clear();
            self.spare.replace(batch);
        }
    }
}
