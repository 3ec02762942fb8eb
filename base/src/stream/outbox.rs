//! What the other side is told.

use super::ByteStream;
use crate::buf::bytes_in;
use crate::sync::{Notify, Permit};
use crate::{BufMut, IoVec};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;

/// Buffers that are sent at once; the system takes 1,024.
const BUFFERS_AT_ONCE: usize = 512;
/// Bytes that are sent at once, unless a message alone has more. Each call may have to wake the other side, which takes some 10 us over
/// loopback: with half of this, large reads are a third slower, and small ones a sixth (note 0022). More keeps the thread longer.
const BYTES_AT_ONCE: usize = 512 << 10;
/// Memory for heads and tails, in one piece: what goes at once has mostly less.
const COPY_BYTES: usize = 8 << 10;

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
    /// What is sent, in its order, but for what is in `copy`.
    parts: IoVec,
    bytes: usize,
    /// Heads and tails, of which `filled` bytes are no part yet.
    copy: Option<BufMut>,
    filled: usize,
    /// What messages have of bounds.
    held: SmallVec<[Permit; 2]>,
}

impl Batch {
    fn has_room_for(&self, message: &Outgoing<'_>, data_bytes: usize) -> bool {
        let bytes = message.head.len() + data_bytes + message.tail.len();
        // A copy before the data and one behind them, each of which may lie in two.
        let buffers = self.parts.len() + message.data.len() + 4;
        buffers <= BUFFERS_AT_ONCE && self.bytes + bytes <= BYTES_AT_ONCE
    }

    #[inline]
    fn add(&mut self, mut message: Outgoing<'_>, data_bytes: usize) {
        self.bytes += message.head.len() + data_bytes + message.tail.len();
        self.copy(message.head);
        if data_bytes > 0 {
            self.end_copy();
            self.parts.append(&mut message.data);
        }
        self.copy(message.tail);
        message.held.into_iter().flatten().for_each(|permit| self.hold(permit));
    }

    /// Holds a permit, together with those that are held of its semaphore: each by itself would cost a small message a good part of all that it costs.
    #[inline]
    fn hold(&mut self, mut permit: Permit) {
        // Most are of two semaphores. Where each message has one of its own, there is nothing to be found.
        for held in self.held.iter_mut().rev().take(2) {
            match held.absorb(permit) {
                Ok(()) => return,
                Err(other) => permit = other,
            }
        }
        self.held.push(permit);
    }

    #[inline]
    fn copy(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let copy = self.copy.get_or_insert_with(|| BufMut::for_overwrite(COPY_BYTES));
            let room = &mut copy[self.filled..];
            let (now, rest) = bytes.split_at(bytes.len().min(room.len()));
            room[..now.len()].copy_from_slice(now);
            self.filled += now.len();
            bytes = rest;
            if self.filled == copy.len() {
                self.end_copy();
                self.copy = None;
            }
        }
    }

    /// What was copied is a part now.
    fn end_copy(&mut self) {
        if self.filled > 0
            && let Some(copy) = &mut self.copy
        {
            self.parts.push(copy.split_to(self.filled).freeze());
            self.filled = 0;
        }
    }

    /// What is sent, and what is held until then.
    fn into_parts(mut self) -> (IoVec, SmallVec<[Permit; 2]>) {
        self.end_copy();
        (self.parts, self.held)
    }
}

/// Messages that wait for the socket.
#[derive(Default)]
pub struct Outbox {
    /// Each is sent at once, and the last one takes more until its turn comes.
    waiting: RefCell<VecDeque<Batch>>,
    changed: Notify,
    is_closed: Cell<bool>,
    /// The other side is gone: nobody waits for what is sent.
    is_broken: Cell<bool>,
}

impl Outbox {
    /// Sends a message in its turn.
    #[inline]
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
                let mut batch = Batch::default();
                batch.add(message, data_bytes);
                waiting.push_back(batch);
                if is_first {
                    self.changed.notify_all();
                }
            }
        }
    }

    /// How many times the system has to be called for what waits.
    #[must_use]
    #[inline]
    pub fn batches(&self) -> usize {
        self.waiting.borrow().len()
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
            let Some(batch) = self.waiting.borrow_mut().pop_front() else { return Ok(()) };
            let (parts, _held) = batch.into_parts();
            if let Err(error) = stream.write_all(parts).await {
                self.is_broken.set(true);
                self.waiting.borrow_mut().clear();
                return Err(error);
            }
        }
    }
}
