//! Volumes over NBD (network block device), for the Linux kernel, QEMU, libnbd and whoever else speaks it.
//!
//! The protocol is that of doc/proto.md of the NetworkBlockDevice project: fixed newstyle negotiation, structured and
//! extended replies, several connections to one export.
//!
//! - `option`: what a client asks for before it uses an export; `negotiation`: the talk about it.
//! - `request`: what it asks of an export; `reply`: what it is told. Both without I/O, as `option`.
//! - `connection`: one client.
//! - `tls`: where they come from and go to: a socket, in the clear or within TLS.
//! - `server`: who listens; `address`: where.
//!
//! What always holds:
//! - A write is answered once the volume has it, a flush once all writes answered before it, over any connection, are durable.
//! - What a client may have under way is bounded in requests and bytes. One that does not read its answers is not read from, and
//!   holds up nobody else.
//! - Whatever a client sends, it is answered or its connection ends.
//!
//! After a crash of this process clients lose their connections, and with them what they had not flushed.

mod address;
mod connection;
mod negotiation;
mod option;
mod reply;
mod request;
mod server;
mod tls;

pub use address::{Address, AddressError};
pub use server::{Exports, ListenError, Server};
pub use tls::{Tls, TlsError};

#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
