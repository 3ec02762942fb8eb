//! Hashes, and codes of messages that are made with them.

use ring::{digest, hmac};

/// A hash function, by its identifier (8.13.5.3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Hash {
    Sha256 = 1,
    Sha384 = 2,
    Sha512 = 3,
}

impl Hash {
    /// All of them, from the one that is asked for first.
    pub const ALL: &[Self] = &[Self::Sha256, Self::Sha384, Self::Sha512];

    #[must_use]
    pub fn of_id(id: u8) -> Option<Self> {
        Self::ALL.iter().copied().find(|hash| *hash as u8 == id)
    }

    /// Bytes of what it gives.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Sha256 => 32,
            Self::Sha384 => 48,
            Self::Sha512 => 64,
        }
    }

    pub(super) fn of(self, bytes: &[u8]) -> Vec<u8> {
        let algorithm = match self {
            Self::Sha256 => &digest::SHA256,
            Self::Sha384 => &digest::SHA384,
            Self::Sha512 => &digest::SHA512,
        };
        digest::digest(algorithm, bytes).as_ref().to_vec()
    }

    fn key(self, key: &[u8]) -> hmac::Key {
        let algorithm = match self {
            Self::Sha256 => hmac::HMAC_SHA256,
            Self::Sha384 => hmac::HMAC_SHA384,
            Self::Sha512 => hmac::HMAC_SHA512,
        };
        hmac::Key::new(algorithm, key)
    }

    pub(crate) fn hmac(self, key: &[u8], text: &[u8]) -> Vec<u8> {
        hmac::sign(&self.key(key), text).as_ref().to_vec()
    }

    /// Whether `told` is the code of `text`; takes as long whatever is wrong with it.
    pub(super) fn is_hmac(self, key: &[u8], text: &[u8], told: &[u8]) -> bool {
        hmac::verify(&self.key(key), text, told).is_ok()
    }
}
