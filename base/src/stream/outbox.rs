//! What the other side is told.

use super::ByteStream;
use crate::sync::{Notify, Permit};
use crate::{BufMut, IoVec};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;

/// Buffers that are sent at once; the system takes 1,024.
const BUFFERS_AT_ONCE: usize = 512;

/// What stands before a message's data, or all of it.
pub type Head = SmallVec<[u8; 48]>;

/// A message on its way.
pub struct Outgoing {
    pub head: Head,
    pub data: IoVec,
    /// What it has of the connection's bounds, until the system has taken it.
    pub held: [Option<Permit>; 2],
}

/// Messages that wait for the socket.
#[derive(Default)]
pub struct Outbox {
    waiting: RefCell<VecDeque<Outgoing>>,
    changed: Notify,
    is_closed: Cell<bool>,
    /// The other side is gone: nobody waits for what is sent.
    is_broken: Cell<bool>,
}

impl Outbox {
    /// Sends a message in its turn.
    pub fn push(&self, message: Outgoing) {
        if !self.is_broken.get() {
            self.waiting.borrow_mut().push_back(message);
            self.changed.notify_all();
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
            let Some((parts, sent)) = self.batch() else { return Ok(()) };
            if let Err(error) = stream.write_all(parts).await {
                self.is_broken.set(true);
                self.waiting.borrow_mut().clear();
                return Err(error);
            }
            drop(sent);
        }
    }

    /// Buffers of the next messages, and those. `None`: there are none.
    fn batch(&self) -> Option<(IoVec, Vec<Outgoing>)> {
        let mut waiting = self.waiting.borrow_mut();
        let mut buffers = 0;
        let count = waiting
            .iter()
            .take_while(|message| {
                buffers += 1 + message.data.len();
                buffers <= BUFFERS_AT_ONCE
            })
            .count();
        // One whose data lie in very many pieces goes alone; the stream sends those in turns.
        let count = count.max(1).min(waiting.len());
        let mut sent: Vec<Outgoing> = waiting.drain(..count).collect();
        if sent.is_empty() {
            return None;
        }
        let heads_bytes = sent.iter().map(|message| message.head.len()).sum();
        let mut heads = BufMut::for_overwrite(heads_bytes);
        let mut at = 0;
        for message in &sent {
            heads[at..at + message.head.len()].copy_from_slice(&message.head);
            at += message.head.len();
        }
        let heads = heads.freeze();
        // Heads without data between them are one buffer.
        let mut parts = IoVec::with_capacity(buffers.min(BUFFERS_AT_ONCE));
        let (mut from, mut to) = (0, 0);
        for message in &mut sent {
            to += message.head.len();
            if !message.data.is_empty() {
                parts.push(heads.slice(from, to - from));
                parts.append(&mut message.data);
                from = to;
            }
        }
        if from < to {
            parts.push(heads.slice(from, to - from));
        }
        Some((parts, sent))
    }
}
