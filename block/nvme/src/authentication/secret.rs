//! What host and controller both know, as people write it (8.13.5.8): `DHHC-1:00:BASE64:`.

use super::{Hash, Random};
use crate::{Nqn, interchange};
use std::fmt;
use std::str::FromStr;

pub(crate) const PREFIX: &str = "DHHC-1";
/// What a key is transformed with, behind the name of who has it.
const PURPOSE: &str = "NVMe-over-Fabrics";

/// A secret. Its owner, a host or a subsystem, proves by it who it is.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    key: Vec<u8>,
    /// It is bound to its owner's name with this hash; `None`: it is used as it is.
    transform: Option<Hash>,
}

/// Secrets of a host and, where the host wants to know as well, of the subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Secrets {
    pub host: Secret,
    pub controller: Option<Secret>,
}

/// Why text is no secret. Says nothing of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    #[error("a secret is written as {PREFIX}:00:BASE64: (as `nvme gen-dhchap-key` prints it)")]
    Form,
    #[error("the secret names an unknown hash: 00, 01, 02 and 03 are known")]
    Hash,
    #[error("the secret has {bytes} bytes, and not 32, 48 or 64")]
    Length { bytes: usize },
    #[error("the checksum of the secret is wrong: a letter may be missing, or be another")]
    Checksum,
}

impl Secret {
    /// A new one: as long as the hash's values, or 32 bytes.
    #[must_use]
    pub fn random(transform: Option<Hash>, random: Random<'_>) -> Self {
        let mut key = vec![0; transform.unwrap_or(Hash::Sha256).bytes()];
        random(&mut key);
        Self { key, transform }
    }

    /// What responses are made with (8.13.5.7).
    pub(super) fn of(&self, owner: &Nqn) -> Vec<u8> {
        match self.transform {
            None => self.key.clone(),
            Some(hash) => hash.hmac(&self.key, &[owner.as_str(), PURPOSE].concat().into_bytes()),
        }
    }

    /// As it is written into a file of secrets.
    #[must_use]
    pub fn reveal(&self) -> String {
        interchange::encode(PREFIX, self.transform.map_or(0, |hash| hash as u8), &self.key)
    }
}

impl FromStr for Secret {
    type Err = SecretError;

    fn from_str(text: &str) -> Result<Self, SecretError> {
        let (hash, key) = interchange::split(text, PREFIX).ok_or(SecretError::Form)?;
        let transform = match hash {
            "00" => None,
            "01" => Some(Hash::Sha256),
            "02" => Some(Hash::Sha384),
            "03" => Some(Hash::Sha512),
            _ => return Err(SecretError::Hash),
        };
        let (key, is_sound) = interchange::decode(key).ok_or(SecretError::Form)?;
        if ![32, 48, 64].contains(&key.len()) {
            return Err(SecretError::Length { bytes: key.len() });
        }
        if !is_sound {
            return Err(SecretError::Checksum);
        }
        Ok(Self { key, transform })
    }
}

/// Logs must not have it.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_read_as_it_is_written_and_mistakes_are_found() {
        for transform in [None, Some(Hash::Sha256), Some(Hash::Sha384), Some(Hash::Sha512)] {
            let secret = Secret::random(transform, &mut |bytes| bytes.fill(0x5a));
            let text = secret.reveal();
            assert_eq!(text.parse(), Ok(secret));
            let wrong = text.replacen('W', "X", 1);
            assert_eq!(wrong.parse::<Secret>(), Err(SecretError::Checksum));
            assert!(!format!("{:?}", text.parse::<Secret>()).contains("Wlpa"));
        }
        let refused = |text: &str| text.parse::<Secret>().expect_err("no secret");
        assert_eq!(refused(""), SecretError::Form);
        assert_eq!(refused("DHHC-1:00:AAAA"), SecretError::Form);
        assert_eq!(refused("DHHC-1:00:!!:"), SecretError::Form);
        assert_eq!(refused("DHHC-1:07:AAAA:"), SecretError::Hash);
        assert_eq!(refused("DHHC-1:00:AAAAAAAA:"), SecretError::Length { bytes: 2 });
    }

    /// Of `nvme gen-dhchap-key` of nvme-cli.
    #[test]
    fn a_secret_of_another_program_is_one() {
        let text = "DHHC-1:00:DxwGY8UbmsTaAN1OZlf5QUF9hLwXXN59EasSI7gLF70+3Jp0:";
        assert_eq!(text.parse::<Secret>().map(|secret| secret.reveal()), Ok(text.into()));
    }
}
