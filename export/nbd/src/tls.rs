//! TLS for connections (doc/proto.md, "NBD_OPT_STARTTLS"): where it is on, nothing is told without it.
//!
//! Certificates lie in a directory under the names that QEMU and nbdkit use, so that one directory serves them all:
//! `server-cert.pem`, `server-key.pem`, and `ca-cert.pem` where clients are verified.

use levada_base::stream::{self, Wire};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How a server proves who it is, and whether clients must.
#[derive(Clone)]
pub struct Tls {
    pub(crate) config: Arc<ServerConfig>,
}

/// Why the certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{} cannot be read as PEM", path.display())]
    Read { path: PathBuf, source: rustls::pki_types::pem::Error },
    #[error("{} holds no certificate", path.display())]
    Empty { path: PathBuf },
    #[error("the certificates in {} cannot be used", directory.display())]
    Unfit { directory: PathBuf, source: rustls::Error },
    #[error("{} names no authority that could be trusted", path.display())]
    Authority { path: PathBuf, source: rustls::server::VerifierBuilderError },
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let failed = |source| TlsError::Read { path: path.into(), source };
    let found: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).map_err(failed)?.collect();
    match found {
        Ok(found) if found.is_empty() => Err(TlsError::Empty { path: path.into() }),
        found => found.map_err(failed),
    }
}

impl Tls {
    /// Reads the certificates in `directory`; with `verify_clients` only clients get in that show one of its authority.
    ///
    /// # Errors
    ///
    /// [`TlsError`].
    pub fn open(directory: &Path, verify_clients: bool) -> Result<Self, TlsError> {
        let unfit = |source| TlsError::Unfit { directory: directory.into(), source };
        let chain = certificates(&directory.join("server-cert.pem"))?;
        let path = directory.join("server-key.pem");
        let key = PrivateKeyDer::from_pem_file(&path)
            .map_err(|source| TlsError::Read { path: path.clone(), source })?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(unfit)?;
        let config = if verify_clients {
            let path = directory.join("ca-cert.pem");
            let mut authorities = RootCertStore::empty();
            for certificate in certificates(&path)? {
                authorities.add(certificate).map_err(unfit)?;
            }
            let verifier =
                WebPkiClientVerifier::builder_with_provider(Arc::new(authorities), provider)
                    .build()
                    .map_err(|source| TlsError::Authority { path, source })?;
            config.with_client_cert_verifier(verifier)
        } else {
            config.with_no_client_auth()
        };
        let config = config.with_single_cert(chain, key).map_err(unfit)?;
        Ok(Self { config: Arc::new(config) })
    }
}

impl Tls {
    /// The server's side of a new connection.
    pub(crate) fn session(&self) -> io::Result<Session> {
        let mut tls = ServerConnection::new(self.config.clone()).map_err(io::Error::other)?;
        // The channel decides how much is sealed at once.
        tls.set_buffer_limit(None);
        Ok(Session { tls, wire: Wire::default() })
    }
}

/// TLS of one connection.
pub(crate) struct Session {
    tls: ServerConnection,
    wire: Wire,
}

/// A connection's bytes, in the clear or within TLS.
pub(crate) type Channel = stream::Channel<Session>;

impl Session {
    /// Takes some of what was received.
    fn take(&mut self) -> io::Result<()> {
        self.tls.read_tls(&mut self.wire)?;
        let taken = self.tls.process_new_packets();
        self.give()?;
        taken.map(drop).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// Gives what is to be sent.
    fn give(&mut self) -> io::Result<()> {
        while self.tls.wants_write() {
            self.tls.write_tls(&mut self.wire)?;
        }
        Ok(())
    }
}

impl stream::Session for Session {
    fn wire(&mut self) -> &mut Wire {
        &mut self.wire
    }

    fn shake_hands(&mut self) -> io::Result<()> {
        while self.tls.is_handshaking() {
            self.take()?;
        }
        Ok(())
    }

    fn open(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.tls.reader().read(into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.take()?,
                opened => return opened,
            }
        }
    }

    fn seal(&mut self, plain: &[u8]) -> io::Result<()> {
        self.tls.writer().write_all(plain)?;
        self.give()
    }

    fn end(&mut self) {
        self.tls.send_close_notify();
        // The wire has room for everything.
        let _ = self.give();
    }
}
