//! Requests and replies over connections.
//!
//! - [`Caller`]: one connection; many requests in flight within the credits that the service
//!   granted.
//! - [`Peer`]: a service at an address; reconnects and repeats for as long as it takes.
//! - [`serve()`]: the service's side; every request is a task of its own, replies in any order.

mod caller;
mod credits;
mod hello;
mod peer;
mod serve;

pub use caller::{Call, Caller, OnOneWay, SILENCE_MAX};
pub(crate) use hello::Answer;
pub use hello::{Hello, Refusal, Welcome};
pub use peer::{OnConnect, Peer, PeerConfig};
pub use serve::{ConnectionId, Handler, Pusher, Reply, Router, ServiceConfig, accept_all, serve};

use crate::channel::ChannelError;
use crate::frame::FrameError;
use levada_base::reactor::{self, Instant};
use std::cell::Cell;
use std::time::Duration;

/// Who waits asks every two seconds; what comes faster than this is not answered.
const PONG_EVERY: Duration = Duration::from_millis(100);

/// Answers to pings cost no credits, so something else must bound how many may wait to be sent to
/// one that asks and does not read.
#[derive(Default)]
struct Pongs(Cell<Option<Instant>>);

impl Pongs {
    fn is_due(&self) -> bool {
        let is_due = self.0.get().is_none_or(|last| last.elapsed() >= PONG_EVERY);
        if is_due {
            self.0.set(Some(reactor::now()));
        }
        is_due
    }
}

/// Why a request got no reply. The variants differ by what the caller does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RpcError {
    /// The connection ended; whether the request was carried out is unknown. A [`Peer`]
    /// repeats it.
    #[error("disconnected")]
    Disconnected,
    /// The service does not want this caller; repeating it cannot help.
    #[error("refused: {0}")]
    Refused(Refusal),
    /// The request does not fit a frame; a bug.
    #[error(transparent)]
    TooLong(FrameError),
    /// The service could not decode the request, or its reply makes no sense.
    #[error("the other side speaks another dialect")]
    Malformed,
    /// The caller's deadline passed; the request may still be carried out.
    #[error("the deadline passed")]
    Deadline,
}

impl From<ChannelError> for RpcError {
    fn from(error: ChannelError) -> Self {
        match error {
            ChannelError::Disconnected | ChannelError::Io { .. } | ChannelError::Frame(_) => {
                Self::Disconnected
            }
        }
    }
}
