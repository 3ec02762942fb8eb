//! Where a target listens, as it is written.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::str::FromStr;

/// The port of NVMe/TCP (TCP, 3.1).
pub const PORT: u16 = 4420;

/// `HOST:PORT` or `IP`, with [`PORT`]; an IPv6 address with a port in brackets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address(pub SocketAddr);

/// Why something is no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    #[error("{text:?} is no address: HOST:PORT or an IP address is, such as 0.0.0.0:{PORT}")]
    Form { text: String },
    #[error("{text:?} cannot be looked up: {why}")]
    Unknown { text: String, why: String },
}

/// Looks names up, for which it may wait long.
impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if let Ok(ip) = text.parse::<IpAddr>() {
            return Ok(Self(SocketAddr::new(ip, PORT)));
        }
        let unknown = |why: String| AddressError::Unknown { text: text.to_owned(), why };
        let mut found = text.to_socket_addrs().map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput => AddressError::Form { text: text.to_owned() },
            _ => unknown(error.to_string()),
        })?;
        found.next().map(Self).ok_or_else(|| unknown("it has no address".into()))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_with_and_without_port() {
        for (text, address) in [
            ("10.0.0.1", "10.0.0.1:4420"),
            ("10.0.0.1:1", "10.0.0.1:1"),
            ("::1", "[::1]:4420"),
            ("[::1]:9", "[::1]:9"),
        ] {
            assert_eq!(
                text.parse::<Address>().map(|address| address.to_string()),
                Ok(address.into())
            );
        }
        for text in ["", "10.0.0.1:", ":4420", "10.0.0.1:70000"] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }
}
