//! Connections that carry frames, whatever they are made of: TCP, or a queue in this process.
//!
//! What always holds: within a connection frames arrive in the order of sending, whole, or
//! not at all; once one is missing nothing arrives after it.

use crate::frame::{Frame, FrameError};
use futures_util::future::LocalBoxFuture;
use std::any::Any;
use std::rc::Rc;

/// Why a connection gives no more frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChannelError {
    /// The other side went away, or there is nobody at the address.
    #[error("disconnected")]
    Disconnected,
    /// What arrived is no frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The operating system refused (an `errno` value).
    #[error("network error: {}", std::io::Error::from_raw_os_error(*.errno))]
    Io { errno: i32 },
}

impl From<std::io::Error> for ChannelError {
    fn from(error: std::io::Error) -> Self {
        error.raw_os_error().map_or(Self::Disconnected, |errno| Self::Io { errno })
    }
}

/// The sending side.
pub trait FrameSink {
    /// Queues a frame; the queue is bounded by the credits that both sides keep to.
    ///
    /// # Errors
    ///
    /// When the connection is known to be gone. Success does not mean that it arrives.
    fn send(&self, frame: Frame) -> Result<(), ChannelError>;

    /// As [`FrameSink::send`]; drops `kept` when the frame no longer waits for its turn, because it
    /// is on its way or the connection has ended.
    ///
    /// # Errors
    ///
    /// As [`FrameSink::send`].
    fn send_keeping(&self, frame: Frame, kept: Box<dyn Any>) -> Result<(), ChannelError> {
        let sent = self.send(frame);
        drop(kept);
        sent
    }

    /// Ends the connection in both directions, after what was queued.
    fn close(&self);
}

/// The receiving side.
pub trait FrameSource {
    /// The next frame. Not to be called again after an error.
    fn recv(&mut self) -> LocalBoxFuture<'_, Result<Frame, ChannelError>>;
}

/// Both sides of one connection. Dropping both ends it.
pub struct Connection {
    pub sink: Rc<dyn FrameSink>,
    pub source: Box<dyn FrameSource>,
}

/// Makes connections.
pub trait Transport {
    /// Connects to whoever listens at `address`.
    fn connect<'a>(
        &'a self,
        address: &'a str,
    ) -> LocalBoxFuture<'a, Result<Connection, ChannelError>>;
}

/// Takes connections.
pub trait Listener {
    /// The next connection that somebody makes.
    fn accept(&self) -> LocalBoxFuture<'_, Result<Connection, ChannelError>>;
}
