//! Where a server listens, as people write it.

use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::str::FromStr;

/// What the address of a socket in the file system begins with.
const UNIX: &str = "unix:";

/// `HOST:PORT`, `[V6]:PORT`, or `unix:PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// Why a text is no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    #[error(
        "{text:?} is no address: HOST:PORT, such as 127.0.0.1:10809 or [::1]:10809, or unix:PATH"
    )]
    Form { text: String },
    #[error("{text:?} cannot be looked up: {why}")]
    Unknown { text: String, why: String },
}

/// Looks names up, for which it may wait long.
impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let form = || AddressError::Form { text: text.to_owned() };
        let unknown = |why: String| AddressError::Unknown { text: text.to_owned(), why };
        match text.strip_prefix(UNIX) {
            Some("") => return Err(form()),
            Some(path) => return Ok(Self::Unix(path.into())),
            None => {}
        }
        let mut found = text.to_socket_addrs().map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput => form(),
            _ => unknown(error.to_string()),
        })?;
        found.next().map(Self::Tcp).ok_or_else(|| unknown("it has no address".into()))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "{UNIX}{}", path.display()),
        }
    }
}

impl Address {
    /// As an NBD URI (the NetworkBlockDevice project's doc/uri.md), for clients: of `export`, with TLS or without.
    #[must_use]
    pub fn uri(&self, export: &str, with_tls: bool) -> String {
        let scheme = if with_tls { "nbds" } else { "nbd" };
        match self {
            Self::Tcp(address) => format!("{scheme}://{address}/{export}"),
            Self::Unix(path) => format!("{scheme}+unix:///{export}?socket={}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_read_back_and_others_are_refused() {
        for text in ["127.0.0.1:10809", "[::1]:10809", "unix:/run/nbd.sock", "unix:a"] {
            assert_eq!(text.parse::<Address>().expect("an address").to_string(), text);
        }
        for text in ["", "unix:", "10809", "127.0.0.1", "127.0.0.1:99999", ":"] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }

    #[test]
    fn uris_are_those_of_clients() {
        let tcp: Address = "127.0.0.1:10809".parse().expect("an address");
        assert_eq!(tcp.uri("vm", false), "nbd://127.0.0.1:10809/vm");
        let unix: Address = "unix:/run/a".parse().expect("an address");
        assert_eq!(unix.uri("", true), "nbds+unix:///?socket=/run/a");
    }
}
