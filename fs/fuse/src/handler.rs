//! What answers requests: the file system behind a mount.

use std::future::Future;
use std::rc::Weak;

use levada_base::Buf;

use crate::codec::{Negotiated, Reply, Request, WRITE_DATA_OFFSET, WriteArgs};
use crate::transport::Notifier;

/// Answers one request at a time, many at once.
///
/// A transport starts one future per message and lets them all run on its
/// core's reactor; replies may leave in any order. Nothing here is `Send`.
///
pub trait Handler {
    /// Does what `request` asks. FORGET, BATCH_FORGET and INTERRUPT are
    /// answered with [`Reply::Silent`]; INIT and unknown operations do not
    /// come here. An operation a handler does not have is answered with
    /// [`crate::codec::Errno::NOSYS`], and the kernel does not ask again.
    ///
    /// `message` holds the bytes that `request` borrows from, so that the data
    /// of a WRITE can travel on without a copy ([`write_data`]).
    fn handle(&self, request: Request<'_>, message: &Buf) -> impl Future<Output = Reply>;

    /// The transport can tell the kernel something, for as long as it serves.
    fn reaches(&self, _notifier: Weak<Notifier>) {}

    /// INIT is done: the mount is about to be used under these terms.
    fn mounted(&self, _terms: &Negotiated) {}
}

/// The data of `write` as a buffer of its own; `message` is what it was parsed
/// from. Page-aligned where the transport received it so
/// ([`crate::transport::message_buffer`]).
#[must_use]
pub fn write_data(message: &Buf, write: &WriteArgs<'_>) -> Buf {
    message.slice(WRITE_DATA_OFFSET, write.data.len())
}
