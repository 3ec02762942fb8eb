//! One mount's conversation: a message in, an answer out; no I/O.
//!
//! The session answers INIT, turns bytes that are no request into errors, and
//! leaves the rest to the [`Handler`].
//!
//! What always holds:
//! - Exactly one answer per request that wants one, with its number, whatever
//!   the handler returns or the bytes are.
//! - Nothing reaches the handler before INIT has agreed on terms.

use std::cell::Cell;
use std::io::IoSlice;
use std::rc::Rc;

use levada_base::Buf;
use smallvec::SmallVec;

use crate::codec::{Errno, Head, InitRequest, Limits, Negotiated, Operation, Reply, Request};
use crate::handler::Handler;
use crate::meters::Meters;

/// A handler and what its mount agreed on. Lives on one core.
pub struct Session<H> {
    handler: H,
    limits: Limits,
    terms: Cell<Option<Negotiated>>,
    meters: Rc<Meters>,
}

/// A reply, ready to be sent: the head, then the payload's slices.
#[derive(Debug)]
pub struct Answer {
    head: Head,
    reply: Reply,
}

impl Answer {
    fn new(unique: u64, reply: Reply) -> Option<Self> {
        Some(Answer { head: reply.head(unique)?, reply })
    }

    /// `errno` as the answer to request `unique`, of a transport that does not hand it on.
    #[must_use]
    pub fn error(unique: u64, errno: Errno) -> Self {
        Self::new(unique, errno.into()).expect("an error is told")
    }

    /// The same answer to a request of another number, for a transport that gives requests numbers of its own.
    #[must_use]
    pub fn numbered(mut self, unique: u64) -> Self {
        self.head.set_unique(unique);
        self
    }

    /// Why it did not work.
    #[must_use]
    pub fn errno(&self) -> Option<Errno> {
        match self.reply {
            Reply::Error(errno) => Some(errno),
            _ => None,
        }
    }

    /// The target failed, not the program: what a name or a permission may say is an answer.
    pub(crate) fn is_failure(&self) -> bool {
        const FAILURES: [Errno; 4] = [Errno::IO, Errno::NOSPC, Errno::DQUOT, Errno::STALE];
        matches!(&self.reply, Reply::Error(errno) if FAILURES.contains(errno))
    }

    /// Bytes behind the head.
    pub(crate) fn data_bytes(&self) -> u64 {
        self.reply.payload().map(|slice| slice.len() as u64).sum()
    }

    /// The message as slices to gather; one `writev` must carry all of them.
    pub fn slices(&self) -> SmallVec<[IoSlice<'_>; 8]> {
        let payload = self.reply.payload().filter(|slice| !slice.is_empty());
        std::iter::once(self.head.as_ref()).chain(payload).map(IoSlice::new).collect()
    }
}

impl<H: Handler> Session<H> {
    /// A session before INIT.
    pub fn new(handler: H, limits: Limits) -> Self {
        Session { handler, limits, terms: Cell::new(None), meters: Rc::default() }
    }

    /// A session that goes on under `terms`: on another core of the same mount,
    /// or with a connection taken over from another process.
    pub fn resumed(handler: H, limits: Limits, terms: Negotiated) -> Self {
        Session { handler, limits, terms: Cell::new(Some(terms)), meters: Rc::default() }
    }

    /// The same, which goes on counting where sessions before it ended.
    #[must_use]
    pub fn counting_in(self, meters: Rc<Meters>) -> Self {
        Session { meters, ..self }
    }

    /// What INIT agreed on, once it has.
    pub fn terms(&self) -> Option<Negotiated> {
        self.terms.get()
    }

    /// The handler.
    pub fn handler(&self) -> &H {
        &self.handler
    }

    /// What a transport with a clock has counted.
    pub fn meters(&self) -> &Rc<Meters> {
        &self.meters
    }

    /// What it offers in INIT.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Answers one message. `None`: there is nothing to send.
    pub async fn serve(&self, message: &Buf) -> Option<Answer> {
        let request = match Request::parse(message) {
            Ok(request) => request,
            Err(error) => {
                if self.meters.could_not_read() {
                    tracing::warn!(%error, "a FUSE message could not be read");
                }
                return Answer::new(error.unique()?, Errno::IO.into());
            }
        };
        let unique = request.unique;
        let reply = match (&request.operation, self.terms.get()) {
            (Operation::Init(offer), _) => self.init(offer),
            (Operation::Unknown { .. }, _) => Errno::NOSYS.into(),
            // The kernel sends nothing else before INIT is answered.
            (_, None) => Errno::IO.into(),
            (_, Some(_)) => self.handler.handle(request, message).await,
        };
        Answer::new(unique, reply)
    }

    fn init(&self, offer: &InitRequest) -> Reply {
        match self.limits.negotiate(offer) {
            Ok(terms) => {
                if terms.is_final() {
                    tracing::debug!(minor = terms.minor, flags = ?terms.flags, "FUSE terms");
                    self.terms.set(Some(terms));
                    self.handler.mounted(&terms);
                }
                Reply::Init(terms)
            }
            Err(error) => {
                if self.meters.could_not_read() {
                    tracing::error!(%error, "the kernel's FUSE is refused");
                }
                Errno::PROTO.into()
            }
        }
    }
}
