//! What goes wrong with TLS, in words for an operator.

use openssl::error::ErrorStack;
use openssl::ssl::{self, SslAlert};
use std::io;

/// OpenSSL cannot be set up as it has to be: the machine's own configuration may forbid what is needed.
#[derive(Debug, thiserror::Error)]
#[error("OpenSSL of this machine cannot be used for NVMe/TCP")]
pub struct Unusable(#[from] ErrorStack);

/// Why there is no TLS on a connection, or not any more.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("the host names no key")]
    NoKey,
    #[error("there is no key here for {identity:?}, which the host names")]
    Unknown { identity: String },
    /// It may be anybody.
    #[error("the other side has another key for {identity:?}")]
    OtherKey { identity: String },
    #[error("the other side does not use the key")]
    KeyUnused,
    /// An alert (RFC 8446, 6).
    #[error("the other side refuses: {}", alert_name(*alert))]
    Refused { alert: u8 },
    #[error("what the other side says is no TLS")]
    NoTls,
    #[error(transparent)]
    OpenSsl(ErrorStack),
}

impl TlsError {
    /// The other side speaks TLS, and the two do not come together.
    fn is_refusal(&self) -> bool {
        match self {
            Self::NoKey | Self::NoTls | Self::OpenSsl(_) => false,
            Self::Unknown { .. } | Self::OtherKey { .. } | Self::KeyUnused => true,
            Self::Refused { .. } => true,
        }
    }
}

/// `PermissionDenied`: it is a matter of keys.
impl From<TlsError> for io::Error {
    fn from(error: TlsError) -> Self {
        let kind = match error.is_refusal() {
            true => io::ErrorKind::PermissionDenied,
            false => io::ErrorKind::InvalidData,
        };
        Self::new(kind, error)
    }
}

/// Reasons of OpenSSL (`sslerr.h`): that of an alert is this and the alert's number.
const ALERTED: i32 = 1000;
const BINDER_DOES_NOT_VERIFY: i32 = 253;
const NOT_TLS: [i32; 4] = [
    156, // HTTP_REQUEST
    267, // WRONG_VERSION_NUMBER
    244, // UNEXPECTED_MESSAGE
    443, // RECORD_TOO_SMALL
];

impl TlsError {
    /// What OpenSSL says, in a handshake in which the key of `identity` was to be used.
    pub(crate) fn of(error: &ssl::Error, identity: Option<String>) -> Self {
        let Some(stack) = error.ssl_error() else { return Self::OpenSsl(ErrorStack::get()) };
        let reasons = || stack.errors().iter().map(openssl::error::Error::reason_code);
        if let Some(alert) = reasons().find_map(|reason| u8::try_from(reason - ALERTED).ok()) {
            return Self::Refused { alert };
        }
        if let Some(identity) = identity
            && reasons().any(|reason| reason == BINDER_DOES_NOT_VERIFY)
        {
            return Self::OtherKey { identity };
        }
        match reasons().any(|reason| NOT_TLS.contains(&reason)) {
            true => Self::NoTls,
            false => Self::OpenSsl(stack.clone()),
        }
    }
}

fn alert_name(alert: u8) -> String {
    let is = |known: SslAlert| known.reason_code() == ALERTED + i32::from(alert);
    match () {
        () if is(SslAlert::UNKNOWN_PSK_IDENTITY) => {
            "it has no key for this host and subsystem".into()
        }
        () if is(SslAlert::DECRYPT_ERROR) || is(SslAlert::ILLEGAL_PARAMETER) => {
            format!("it has another key (alert {alert})")
        }
        () if is(SslAlert::HANDSHAKE_FAILURE) => {
            "no key, or no suite, that both sides have (handshake failure)".into()
        }
        () => format!("alert {alert}"),
    }
}
