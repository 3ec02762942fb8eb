//! The two directions of a connection, for protocols of many small messages with large data between them.
//!
//! - [`Inbox`]: many heads for one look at the socket, and data straight to where they stay.
//! - [`Outbox`]: messages in the order in which they are ready, as many at once as there are.
//! - [`Clients`]: who is connected to a server.
//! - [`ByteStream`]: where the bytes come from and go to: a socket, or what somebody puts around it.
//! - [`MemoryNetwork`]: connections within this process, which break on order.
//! - [`Channel`]: a socket, in the clear or within TLS, which is some library's [`Session`].
//!
//! Knows nothing of what the bytes say.

mod clients;
mod inbox;
mod memory;
mod outbox;
mod secure;

pub use clients::{Clients, Present};
pub use inbox::Inbox;
pub use memory::{Connection, Delay, MemoryNetwork, MemoryStream, Side};
pub use outbox::{Head, Outbox, Outgoing};
pub use secure::{Channel, Session, Wire};

use crate::reactor::net::Stream;
use crate::{BufMut, IoVec};
use std::future::Future;
use std::io;
use std::net::Shutdown;

/// Bytes in their order, both ways. Clones are the same connection: one task may read while another writes.
pub trait ByteStream: Clone {
    /// Fills `into` with at least one byte, and says with how many; 0: the other side has ended.
    fn read(&self, into: BufMut) -> impl Future<Output = io::Result<(BufMut, usize)>>;

    /// Fills all of `into`; [`io::ErrorKind::UnexpectedEof`] when the other side ends first.
    fn read_exact(&self, into: BufMut) -> impl Future<Output = io::Result<BufMut>>;

    /// Fills all of `into`, and hands it back also when that fails: for who must not lose the memory, which is part of
    /// something larger. A stream that cannot do that by itself pays with a copy.
    fn land(&self, mut into: BufMut) -> impl Future<Output = (BufMut, io::Result<()>)> {
        async move {
            match self.read_exact(BufMut::for_overwrite(into.len())).await {
                Ok(read) => {
                    into.copy_from_slice(&read);
                    (into, Ok(()))
                }
                Err(error) => (into, Err(error)),
            }
        }
    }

    /// Sends all of `from`.
    fn write_all(&self, from: IoVec) -> impl Future<Output = io::Result<()>>;

    /// Nothing is sent or received any more; who waits for either hears of it.
    fn close(&self) -> impl Future<Output = ()>;
}

impl ByteStream for Stream {
    async fn read(&self, into: BufMut) -> io::Result<(BufMut, usize)> {
        Self::read(self, into).await
    }

    async fn read_exact(&self, into: BufMut) -> io::Result<BufMut> {
        Self::read_exact(self, into).await
    }

    async fn land(&self, into: BufMut) -> (BufMut, io::Result<()>) {
        Self::land(self, into).await
    }

    async fn write_all(&self, from: IoVec) -> io::Result<()> {
        Self::write_all(self, from).await
    }

    async fn close(&self) {
        // It may be closed already.
        let _ = self.shutdown(Shutdown::Both);
    }
}
