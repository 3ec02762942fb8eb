//! Secrets of hosts, as a file has them: for each host a line `HOST_NQN SECRET [SECRET_OF_SUBSYSTEM]`; `#` begins a comment.

use super::{Secret, SecretError, Secrets};
use crate::{Nqn, NqnError};
use std::collections::BTreeMap;

/// By the names of hosts.
pub type Keyring = BTreeMap<Nqn, Secrets>;

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
    #[error("a host has a name and a secret, and the subsystem may have one: NQN SECRET [SECRET]")]
    Fields,
    #[error(transparent)]
    Name(#[from] NqnError),
    #[error(transparent)]
    Secret(#[from] SecretError),
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
    let (name, host, controller) = match fields {
        [name, host] => (name, host, None),
        [name, host, controller] => (name, host, Some(controller)),
        _ => return Err(LineError::Fields),
    };
    let controller = controller.map(|text| text.parse::<Secret>()).transpose()?;
    let secrets = Secrets { host: host.parse()?, controller };
    match keyring.insert(Nqn::new(*name)?, secrets) {
        None => Ok(()),
        Some(_) => Err(LineError::Twice),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_secrets_is_read_and_mistakes_are_found_without_telling_them() {
        let secret = Secret::random(None, &mut |bytes| bytes.fill(7));
        let (text, name) = (secret.reveal(), "nqn.2014-08.org.example:a");
        let other = "nqn.2014-08.org.example:b";
        let file = format!("# hosts\n\n{name} {text}   # the first\n  {other}\t{text} {text}\n");
        let read = parse_keyring(&file).expect("two hosts");
        let (plain, mutual) =
            (&read[&Nqn::new(name).expect("one")], &read[&Nqn::new(other).expect("one")]);
        assert_eq!(plain, &Secrets { host: secret.clone(), controller: None });
        assert_eq!(mutual, &Secrets { host: secret.clone(), controller: Some(secret) });
        let wrong = |file: &str| parse_keyring(file).expect_err("wrong");
        assert_eq!(
            wrong(&format!("\n{name}\n")),
            KeyringError { line: 2, what: LineError::Fields }
        );
        assert_eq!(wrong(&format!("{name} {text}\n{name} {text}")).what, LineError::Twice);
        let mistyped = wrong(&format!("{name} {}", text.replacen('c', "d", 1)));
        assert_eq!(mistyped.what, LineError::Secret(SecretError::Checksum));
        assert!(!mistyped.to_string().contains("DHHC"), "{mistyped}");
    }
}
