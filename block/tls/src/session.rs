//! TLS of one connection.

use crate::error::TlsError;
use crate::ffi::Attached;
use crate::sides::{Accepting, Connecting, Named};
use levada_base::stream::{self, Wire};
use levada_nvme::tls::PskIdentity;
use openssl::ssl::{self, ErrorCode, SslStream};
use std::io;

pub(crate) enum Side {
    Target(Attached<Accepting>),
    Host(Attached<Connecting>),
}

/// See the module.
pub struct Session {
    side: Side,
}

impl Session {
    pub(crate) fn new(side: Side) -> Self {
        Self { side }
    }

    fn stream(&mut self) -> &mut SslStream<Wire> {
        match &mut self.side {
            Side::Target(target) => &mut target.stream,
            Side::Host(host) => &mut host.stream,
        }
    }

    /// On a target's side, once both have shaken hands: who the host is, and where it wants to go.
    #[must_use]
    pub fn host(&self) -> Option<PskIdentity> {
        match &self.side {
            Side::Target(target) => match target.keys().named.get()? {
                Named::Key { parsed, .. } => Some(parsed.clone()),
                Named::Unknown { .. } | Named::Nothing => None,
            },
            Side::Host(_) => None,
        }
    }

    /// By what the key was named.
    fn identity(&self) -> Option<String> {
        match &self.side {
            Side::Target(_) => self.host().map(|host| host.to_string()),
            Side::Host(host) => Some(host.keys().identity().to_owned()),
        }
    }

    fn failed(&self, error: &ssl::Error) -> io::Error {
        match error.code() {
            ErrorCode::WANT_READ => io::ErrorKind::WouldBlock.into(),
            _ => TlsError::of(error, self.identity()).into(),
        }
    }

    fn failed_handshake(&self, error: &ssl::Error) -> io::Error {
        let wrong = match &self.side {
            Side::Target(target) if error.code() == ErrorCode::SSL => target.keys().wrong(),
            Side::Target(_) | Side::Host(_) => None,
        };
        wrong.map_or_else(|| self.failed(error), io::Error::from)
    }
}

impl stream::Session for Session {
    fn wire(&mut self) -> &mut Wire {
        self.stream().get_mut()
    }

    fn shake_hands(&mut self) -> io::Result<()> {
        let shaken = self.stream().do_handshake();
        shaken.map_err(|error| self.failed_handshake(&error))?;
        // OpenSSL says so of every key that was there before. A handshake without one cannot succeed for want of certificates: so it is an
        // error of ours if it does.
        match self.stream().ssl().session_reused() {
            true => Ok(()),
            false => Err(TlsError::KeyUnused.into()),
        }
    }

    fn open(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.stream().ssl_read(into) {
            Ok(bytes) => Ok(bytes),
            Err(error) if error.code() == ErrorCode::ZERO_RETURN => Ok(0),
            Err(error) => Err(self.failed(&error)),
        }
    }

    fn seal(&mut self, plain: &[u8]) -> io::Result<()> {
        let mut rest = plain;
        while !rest.is_empty() {
            let sealed = self.stream().ssl_write(rest).map_err(|error| self.failed(&error))?;
            rest = &rest[sealed..];
        }
        Ok(())
    }

    fn end(&mut self) {
        // The wire has room for the farewell; that of the other side is not waited for.
        let _ = self.stream().shutdown();
    }
}
