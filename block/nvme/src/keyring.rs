//! Secrets and keys of hosts, as a file has them: for each host a line `HOST_NQN SECRET [SECRET_OF_SUBSYSTEM] [KEY_OF_TLS]`, or without
//! secrets; `#` begins a comment.

use crate::authentication::{SecretError, Secrets};
use crate::tls::{self, RetainedKey, TlsKey, TlsKeyError};
use crate::{Nqn, NqnError};
use std::collections::BTreeMap;

/// By the names of hosts.
pub type Keyring = BTreeMap<Nqn, HostKeys>;

/// What a host knows, and shows that it does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostKeys {
    /// By which it proves who it is; `None`: it need not.
    pub secrets: Option<Secrets>,
    /// By which its connections are TLS; `None`: they are in the clear.
    pub tls: Option<RetainedKey>,
}

impl From<Secrets> for HostKeys {
    fn from(secrets: Secrets) -> Self {
        Self { secrets: Some(secrets), tls: None }
    }
}

/// What is wrong with a line. Says nothing of its secrets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct KeyringError {
    /// From 1 on.
    pub line: usize,
    pub what: LineError,
}

/// See [`KeyringError`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    #[error(
        "a host has a name, then a secret, which the subsystem may have as well, or a key of TLS, or both: \
         NQN [SECRET [SECRET]] [KEY]"
    )]
    Fields,
    #[error(transparent)]
    Name(#[from] NqnError),
    #[error(transparent)]
    Secret(#[from] SecretError),
    #[error(transparent)]
    TlsKey(#[from] TlsKeyError),
    #[error("the host has a line already")]
    Twice,
}

/// Reads the text of such a file.
///
/// # Errors
///
/// The first line that is wrong.
pub fn parse_keyring(text: &str) -> Result<Keyring, KeyringError> {
    let mut keyring = Keyring::new();
    for (number, line) in (1..).zip(text.lines()) {
        let fields: Vec<&str> =
            line.split_whitespace().take_while(|field| !field.starts_with('#')).collect();
        if !fields.is_empty() {
            let read = entry(&fields, &mut keyring);
            read.map_err(|what| KeyringError { line: number, what })?;
        }
    }
    Ok(keyring)
}

fn entry(fields: &[&str], keyring: &mut Keyring) -> Result<(), LineError> {
    let (name, keys) = fields.split_first().ok_or(LineError::Fields)?;
    let name = Nqn::new(*name)?;
    let (secrets, key) = match keys.split_last() {
        Some((last, secrets)) if last.starts_with(tls::PREFIX) => (secrets, Some(last)),
        _ => (keys, None),
    };
    let tls = key.map(|key| Ok::<_, TlsKeyError>(key.parse::<TlsKey>()?.retained(&name)));
    let secrets = match secrets {
        [] if key.is_some() => None,
        [host] => Some(Secrets { host: host.parse()?, controller: None }),
        [host, controller] => {
            Some(Secrets { host: host.parse()?, controller: Some(controller.parse()?) })
        }
        _ => return Err(LineError::Fields),
    };
    match keyring.insert(name, HostKeys { secrets, tls: tls.transpose()? }) {
        None => Ok(()),
        Some(_) => Err(LineError::Twice),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authentication::Secret;
    use crate::tls::Suite;

    #[test]
    fn a_file_of_secrets_is_read_and_mistakes_are_found_without_telling_them() {
        let secret = Secret::random(None, &mut |bytes| bytes.fill(7));
        let tls = TlsKey::random(Suite::Aes128GcmSha256, &mut |bytes| bytes.fill(9));
        let (text, key) = (secret.reveal(), tls.reveal());
        let names = ["a", "b", "c", "d"].map(|name| format!("nqn.2014-08.org.example:{name}"));
        let [one, two, three, four] = &names;
        let file = format!(
            "# hosts\n\n{one} {text}   # the first\n  {two}\t{text} {text}\n{three} {key}\n{four} {text} {text} {key}\n"
        );
        let read = parse_keyring(&file).expect("four hosts");
        let of = |name: &str| &read[&Nqn::new(name).expect("a name")];
        let alone = Secrets { host: secret.clone(), controller: None };
        let mutual = Secrets { host: secret.clone(), controller: Some(secret) };
        let retained = |name: &str| Some(tls.retained(&Nqn::new(name).expect("a name")));
        assert_eq!(of(one), &alone.into());
        assert_eq!(of(two), &mutual.clone().into());
        assert_eq!(of(three), &HostKeys { secrets: None, tls: retained(three) });
        assert_eq!(of(four), &HostKeys { secrets: Some(mutual), tls: retained(four) });
        let wrong = |file: &str| parse_keyring(file).expect_err("wrong");
        let fields = |line| KeyringError { line, what: LineError::Fields };
        assert_eq!(wrong(&format!("\n{one}\n")), fields(2));
        assert_eq!(wrong(&format!("{one} {text} {text} {text}")), fields(1));
        assert_eq!(wrong(&format!("{one} {text}\n{one} {text}")).what, LineError::Twice);
        let early = wrong(&format!("{one} {key} {text}")).what;
        assert_eq!(early, LineError::Secret(SecretError::Form), "a key of TLS is the last");
        let mistyped = wrong(&format!("{one} {}", text.replacen('c', "d", 1)));
        assert_eq!(mistyped.what, LineError::Secret(SecretError::Checksum));
        assert!(!mistyped.to_string().contains("DHHC"), "{mistyped}");
        let mistyped = wrong(&format!("{one} {}", key.replacen('J', "K", 1)));
        assert_eq!(mistyped.what, LineError::TlsKey(TlsKeyError::Checksum));
    }
}
