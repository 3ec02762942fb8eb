//! TLS 1.3 with a key that both sides know beforehand, for NVMe/TCP (TCP, 3.6.1; RFC 8446), by OpenSSL: rustls, which NBD uses, takes no
//! such keys.
//!
//! - `session`: one side of one connection, without I/O: the reactor moves its bytes ([`levada_base::stream::Channel`]).
//! - `sides`: what the sessions of an [`Acceptor`] (a target) and of a [`Connector`] (a host) have in common.
//! - `hello`: which keys a host names, in its first message.
//! - `ffi`: OpenSSL's functions for keys of SHA-384 too, which the `openssl` crate does not have.
//!
//! What always holds:
//! - There is no other way to shake hands: no certificates, no tickets, no earlier versions, and no data before the handshake is over.
//! - Every handshake agrees on keys of its own besides ((EC)DHE): who learns the key later reads nothing of what was sent before.
//! - Bytes from outside are `Err` when they are wrong, never a panic.

mod error;
mod ffi;
mod hello;
mod session;
mod sides;

pub use error::{TlsError, Unusable};
pub use session::Session;
pub use sides::{Acceptor, Connector, FindKey};

/// A connection's bytes, in the clear or within such TLS.
pub type Channel = levada_base::stream::Channel<Session>;

/// The first byte of TLS on a connection: a record of a handshake (RFC 8446, 5.1). A unit of NVMe/TCP never begins so.
pub const FIRST_BYTE: u8 = 22;

/// Entry points for the fuzzer, and for tests with random bytes.
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz {
    /// The extension by which a host names its keys.
    pub fn identities(bytes: &[u8]) {
        let named: usize = crate::hello::identities(bytes).map(<[u8]>::len).sum();
        assert!(named <= bytes.len());
    }
}
