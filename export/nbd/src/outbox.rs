//! What a client is told: replies in the order in which requests are done, as many at once as are ready.

use crate::channel::Channel;
use crate::reply::Head;
use levada_base::sync::{Notify, Permit};
use levada_base::{BufMut, IoVec};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;

/// Buffers that are sent at once; the system takes 1,024.
const BUFFERS_AT_ONCE: usize = 512;

/// A reply on its way.
pub(crate) struct Reply {
    pub(crate) head: Head,
    pub(crate) data: IoVec,
    /// What the request has of the connection's bounds, until the client has its answer.
    pub(crate) _held: [Option<Permit>; 2],
}

/// Replies that wait for the socket.
#[derive(Default)]
pub(crate) struct Outbox {
    waiting: RefCell<VecDeque<Reply>>,
    changed: Notify,
    is_closed: Cell<bool>,
    /// The client is gone: nobody waits for replies.
    is_broken: Cell<bool>,
}

impl Outbox {
    /// Sends a reply in its turn.
    pub(crate) fn push(&self, reply: Reply) {
        if !self.is_broken.get() {
            self.waiting.borrow_mut().push_back(reply);
            self.changed.notify_all();
        }
    }

    /// Nothing is pushed any more.
    pub(crate) fn close(&self) {
        self.is_closed.set(true);
        self.changed.notify_all();
    }

    /// Sends what is pushed, until all of it is sent after [`Outbox::close`].
    pub(crate) async fn run(&self, channel: &Channel) -> io::Result<()> {
        loop {
            let is_ready =
                || (self.is_closed.get() || !self.waiting.borrow().is_empty()).then_some(());
            self.changed.until(is_ready).await;
            let Some((parts, sent)) = self.batch() else { return Ok(()) };
            if let Err(error) = channel.write_all(parts).await {
                self.is_broken.set(true);
                self.waiting.borrow_mut().clear();
                return Err(error);
            }
            drop(sent);
        }
    }

    /// Buffers of the next replies, and those. `None`: there are none.
    fn batch(&self) -> Option<(IoVec, Vec<Reply>)> {
        let mut waiting = self.waiting.borrow_mut();
        let mut buffers = 0;
        let count = waiting
            .iter()
            .take_while(|reply| {
                buffers += 1 + reply.data.len();
                buffers <= BUFFERS_AT_ONCE
            })
            .count();
        // One whose data lie in very many pieces goes alone; the channel sends those in turns.
        let count = count.max(1).min(waiting.len());
        let mut sent: Vec<Reply> = waiting.drain(..count).collect();
        if sent.is_empty() {
            return None;
        }
        let heads_bytes = sent.iter().map(|reply| reply.head.len()).sum();
        let mut heads = BufMut::for_overwrite(heads_bytes);
        let mut at = 0;
        for reply in &sent {
            heads[at..at + reply.head.len()].copy_from_slice(&reply.head);
            at += reply.head.len();
        }
        let heads = heads.freeze();
        // Heads without data between them are one buffer.
        let mut parts = IoVec::with_capacity(buffers.min(BUFFERS_AT_ONCE));
        let (mut from, mut to) = (0, 0);
        for reply in &mut sent {
            to += reply.head.len();
            if !reply.data.is_empty() {
                parts.push(heads.slice(from, to - from));
                parts.append(&mut reply.data);
                from = to;
            }
        }
        if from < to {
            parts.push(heads.slice(from, to - from));
        }
        Some((parts, sent))
    }
}
