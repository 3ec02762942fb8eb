//! NVMe qualified names (Base, 7.9).

use std::fmt;
use std::str::FromStr;

/// Bytes of a name, without the zero that ends it.
pub const NQN_BYTES_MAX: usize = 223;
/// The field of a name in a structure.
pub(crate) const NQN_FIELD_BYTES: usize = 256;
/// Every discovery subsystem.
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";

/// The name of a host or a subsystem.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nqn(String);

/// Why something is no name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NqnError {
    #[error("{name:?} does not begin with `nqn.`, as in nqn.2014-08.org.example:name")]
    Prefix { name: String },
    #[error("a name has {bytes} bytes, and may have {NQN_BYTES_MAX}")]
    TooLong { bytes: usize },
    #[error("{name:?} has characters that are not printable ASCII")]
    Character { name: String },
    #[error("a name does not end within its field")]
    Endless,
}

impl Nqn {
    /// # Errors
    ///
    /// [`NqnError`].
    pub fn new(name: impl Into<String>) -> Result<Self, NqnError> {
        let name = name.into();
        if name.len() > NQN_BYTES_MAX {
            return Err(NqnError::TooLong { bytes: name.len() });
        }
        if !name.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(NqnError::Character { name });
        }
        // The name of a real one has a date and a domain; old hosts have made up others.
        if !name.starts_with("nqn.") {
            return Err(NqnError::Prefix { name });
        }
        Ok(Self(name))
    }

    /// What every discovery controller is called.
    #[must_use]
    pub fn discovery() -> Self {
        Self(DISCOVERY_NQN.to_owned())
    }

    /// Reads the field of a structure.
    pub(crate) fn parse(field: &[u8; NQN_FIELD_BYTES]) -> Result<Self, NqnError> {
        let end = field.iter().position(|&byte| byte == 0).ok_or(NqnError::Endless)?;
        Self::new(String::from_utf8_lossy(&field[..end]))
    }

    pub(crate) fn field(&self) -> [u8; NQN_FIELD_BYTES] {
        let mut field = [0; NQN_FIELD_BYTES];
        field[..self.0.len()].copy_from_slice(self.0.as_bytes());
        field
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Nqn {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl FromStr for Nqn {
    type Err = NqnError;

    fn from_str(name: &str) -> Result<Self, NqnError> {
        Self::new(name)
    }
}
