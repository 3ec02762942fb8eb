//! What all sessions of a target, or all of a host, have in common.

use crate::error::{TlsError, Unusable};
use crate::ffi::{Attached, Keys, extension, keys_in_callback};
use crate::hello::{PRE_SHARED_KEY, identities};
use crate::session::{Session, Side};
use levada_base::stream::Wire;
use levada_nvme::tls::{PskIdentity, SharedKey, Suite};
use openssl::error::ErrorStack;
use openssl::ssl::{
    ClientHelloResponse, Ssl, SslAlert, SslContext, SslContextBuilder, SslMethod, SslOptions,
    SslRef, SslSessionCacheMode, SslVerifyMode, SslVersion,
};
use std::cell::OnceCell;
use std::io;
use std::rc::Rc;

/// Groups in which both sides agree on keys; ffdhe3072 is the one that all have to have (TCP, 3.6.1.2).
const GROUPS: &str = "X25519:P-256:P-384:ffdhe3072";

/// Names of keys have no more (TCP, 3.6.1.3).
const IDENTITY_BYTES_MAX: usize = 255;

fn suite_name(suite: Suite) -> &'static str {
    match suite {
        Suite::Aes128GcmSha256 => "TLS_AES_128_GCM_SHA256",
        Suite::Aes256GcmSha384 => "TLS_AES_256_GCM_SHA384",
    }
}

fn builder(method: SslMethod) -> Result<SslContextBuilder, ErrorStack> {
    let mut context = SslContext::builder(method)?;
    context.set_min_proto_version(Some(SslVersion::TLS1_3))?;
    context.set_max_proto_version(Some(SslVersion::TLS1_3))?;
    context.set_groups_list(GROUPS)?;
    context.set_options(SslOptions::NO_TICKET);
    context.set_num_tickets(0)?;
    context.set_session_cache_mode(SslSessionCacheMode::OFF);
    Ok(context)
}

/// Finds the key that a host names.
pub type FindKey = Rc<dyn Fn(&PskIdentity) -> Option<SharedKey>>;

/// The side of a target.
pub struct Acceptor {
    context: SslContext,
}

/// What a host has named.
pub(crate) enum Named {
    Key {
        identity: Vec<u8>,
        parsed: PskIdentity,
        key: SharedKey,
    },
    /// None of these is known; the first of them, as far as names can be right.
    Unknown {
        identity: String,
    },
    Nothing,
}

/// The keys of a target, in one handshake.
pub(crate) struct Accepting {
    find: FindKey,
    /// Empty until the host's first message is there.
    pub named: OnceCell<Named>,
}

impl Accepting {
    /// Takes the first identity that is known, of those that the host's first message has.
    fn hear(&self, extension: Option<&[u8]>) -> &Named {
        let named = || identities(extension.unwrap_or_default());
        let known = || {
            named().find_map(|identity| {
                let parsed = PskIdentity::parse(identity)?;
                let key = (self.find)(&parsed)?;
                Some(Named::Key { identity: identity.to_vec(), parsed, key })
            })
        };
        let unknown = || {
            // It goes into the log, and comes from anybody.
            let identity = named().next()?;
            let identity = &identity[..identity.len().min(IDENTITY_BYTES_MAX)];
            Some(Named::Unknown { identity: String::from_utf8_lossy(identity).into_owned() })
        };
        self.named.get_or_init(|| known().or_else(unknown).unwrap_or(Named::Nothing))
    }

    /// Why a handshake has failed, if that is what the host named.
    pub fn wrong(&self) -> Option<TlsError> {
        match self.named.get()? {
            Named::Unknown { identity } => Some(TlsError::Unknown { identity: identity.clone() }),
            Named::Nothing => Some(TlsError::NoKey),
            Named::Key { .. } => None,
        }
    }
}

impl Keys for Accepting {
    fn offered(&self) -> Option<(&[u8], &SharedKey)> {
        None
    }

    fn find(&self, identity: &[u8]) -> Option<&SharedKey> {
        match self.named.get()? {
            Named::Key { identity: named, key, .. } if named == identity => Some(key),
            Named::Key { .. } | Named::Unknown { .. } | Named::Nothing => None,
        }
    }
}

/// Chooses the suite of the host's key, before OpenSSL chooses one by itself: with another hash the key could not be used.
fn choose_suite(ssl: &mut SslRef, alert: &mut SslAlert) -> Result<ClientHelloResponse, ErrorStack> {
    let keys = keys_in_callback::<Accepting>(ssl);
    let suite = match keys.map(|keys| keys.hear(extension(ssl, PRE_SHARED_KEY))) {
        Some(Named::Key { key, .. }) => Ok(key.suite),
        Some(Named::Unknown { .. }) => Err(SslAlert::UNKNOWN_PSK_IDENTITY),
        Some(Named::Nothing) | None => Err(SslAlert::HANDSHAKE_FAILURE),
    };
    match suite {
        Ok(suite) => {
            ssl.set_ciphersuites(suite_name(suite))?;
            return Ok(ClientHelloResponse::SUCCESS);
        }
        Err(refusal) => *alert = refusal,
    }
    Err(ErrorStack::get())
}

impl Acceptor {
    /// # Errors
    ///
    /// [`Unusable`].
    pub fn new() -> Result<Self, Unusable> {
        let mut context = builder(SslMethod::tls_server())?;
        context.set_client_hello_callback(choose_suite);
        Ok(Self { context: context.build() })
    }

    /// TLS of a new connection, of which `received` has come already; `find` is asked for the keys that the host names.
    ///
    /// # Errors
    ///
    /// There is no memory for it.
    pub fn session(&self, received: &[u8], find: FindKey) -> io::Result<Session> {
        let mut ssl = Ssl::new(&self.context)?;
        ssl.set_accept_state();
        let keys = Accepting { find, named: OnceCell::new() };
        Ok(Session::new(Side::Target(Attached::new(ssl, Wire::after(received), keys)?)))
    }
}

/// The side of a host, for the connections to one subsystem. Clones are the same one.
#[derive(Clone)]
pub struct Connector {
    context: SslContext,
    offer: Rc<Offer>,
}

struct Offer {
    identity: String,
    key: SharedKey,
}

/// The key of a host.
pub(crate) struct Connecting(Rc<Offer>);

impl Connecting {
    pub fn identity(&self) -> &str {
        &self.0.identity
    }
}

impl Keys for Connecting {
    fn offered(&self) -> Option<(&[u8], &SharedKey)> {
        Some((self.0.identity.as_bytes(), &self.0.key))
    }

    fn find(&self, _identity: &[u8]) -> Option<&SharedKey> {
        None
    }
}

impl Connector {
    /// Names `identity`, whose key is `key`.
    ///
    /// # Errors
    ///
    /// [`Unusable`].
    pub fn new(identity: &PskIdentity, key: SharedKey) -> Result<Self, Unusable> {
        let mut context = builder(SslMethod::tls_client())?;
        context.set_ciphersuites(suite_name(key.suite))?;
        // No certificate would do.
        context.set_verify(SslVerifyMode::PEER);
        let offer = Rc::new(Offer { identity: identity.to_string(), key });
        Ok(Self { context: context.build(), offer })
    }

    /// TLS of a new connection.
    ///
    /// # Errors
    ///
    /// There is no memory for it.
    pub fn session(&self) -> io::Result<Session> {
        let mut ssl = Ssl::new(&self.context)?;
        ssl.set_connect_state();
        let keys = Connecting(Rc::clone(&self.offer));
        Ok(Session::new(Side::Host(Attached::new(ssl, Wire::default(), keys)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strange_name_says_no_more_than_a_name_can() {
        let name = vec![b'x'; 60_000];
        let list = [&(name.len() as u16).to_be_bytes()[..], &name, &[0; 4]].concat();
        let extension = [&(list.len() as u16).to_be_bytes()[..], &list].concat();
        let accepting = Accepting { find: Rc::new(|_| None), named: OnceCell::new() };
        assert!(matches!(accepting.hear(Some(&extension)), Named::Unknown { .. }));
        let said = accepting.wrong().expect("it is not known").to_string();
        assert!(said.contains("xxx") && said.len() < 400, "{} bytes", said.len());
    }
}
