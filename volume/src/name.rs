//! Names of volumes.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The longest part of a name, in bytes.
const PART_BYTES_MAX: usize = 63;
/// Whose volumes those are that belong to no tenant in particular.
const DEFAULT_TENANT: &str = "default";

/// Who a volume belongs to: one tenant neither sees nor reaches what is another's.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Tenant(String);

/// What a volume is called: `TENANT/NAME`, or `NAME` for those of the tenant `default`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VolumeName {
    pub tenant: Tenant,
    name: String,
}

/// What a snapshot is called: `VOLUME@NAME`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SnapshotName {
    /// The volume that it is of.
    pub volume: VolumeName,
    name: String,
}

/// Why a text names no snapshot.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotNameError {
    #[error("{text:?} is no name of a snapshot: VOLUME@NAME, as in vm1@monday")]
    NoAt { text: String },
    #[error(transparent)]
    Part(#[from] NameError),
}

/// Why a text names nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is no name: 1 to {PART_BYTES_MAX} letters, digits, `-`, `_`, `.`, starting with a letter or digit; of another \
     tenant's volume `TENANT/NAME`"
)]
pub struct NameError {
    text: String,
}

fn is_name(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    text.len() <= PART_BYTES_MAX
        && text.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric())
        && text.bytes().all(is_inner)
}

impl Tenant {
    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for Tenant {
    fn default() -> Self {
        Self(DEFAULT_TENANT.to_owned())
    }
}

impl VolumeName {
    /// The volume of `tenant` called `name`.
    ///
    /// # Errors
    ///
    /// [`NameError`].
    pub fn new(tenant: Tenant, name: &str) -> Result<Self, NameError> {
        match is_name(name) {
            true => Ok(Self { tenant, name: name.to_owned() }),
            false => Err(NameError { text: name.to_owned() }),
        }
    }

    /// What its tenant calls it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl FromStr for Tenant {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        match is_name(text) {
            true => Ok(Self(text.to_owned())),
            false => Err(NameError { text: text.to_owned() }),
        }
    }
}

impl FromStr for VolumeName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        match text.split_once('/') {
            Some((tenant, name)) => Self::new(tenant.parse()?, name),
            None => Self::new(Tenant::default(), text),
        }
    }
}

impl SnapshotName {
    /// The snapshot of `volume` called `name`.
    ///
    /// # Errors
    ///
    /// [`NameError`].
    pub fn new(volume: VolumeName, name: &str) -> Result<Self, NameError> {
        match is_name(name) {
            true => Ok(Self { volume, name: name.to_owned() }),
            false => Err(NameError { text: name.to_owned() }),
        }
    }

    /// What it is called among those of its volume.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl FromStr for SnapshotName {
    type Err = SnapshotNameError;

    fn from_str(text: &str) -> Result<Self, SnapshotNameError> {
        match text.split_once('@') {
            Some((volume, name)) => Ok(Self::new(volume.parse()?, name)?),
            None => Err(SnapshotNameError::NoAt { text: text.to_owned() }),
        }
    }
}

impl TryFrom<String> for SnapshotName {
    type Error = SnapshotNameError;

    fn try_from(text: String) -> Result<Self, SnapshotNameError> {
        text.parse()
    }
}

impl From<SnapshotName> for String {
    fn from(name: SnapshotName) -> Self {
        name.to_string()
    }
}

impl fmt::Display for SnapshotName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.volume, self.name)
    }
}

impl TryFrom<String> for Tenant {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        text.parse()
    }
}

impl TryFrom<String> for VolumeName {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        text.parse()
    }
}

impl From<Tenant> for String {
    fn from(tenant: Tenant) -> Self {
        tenant.0
    }
}

impl From<VolumeName> for String {
    fn from(name: VolumeName) -> Self {
        name.to_string()
    }
}

impl fmt::Display for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for VolumeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.tenant == Tenant::default() {
            true => f.write_str(&self.name),
            false => write!(f, "{}/{}", self.tenant, self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_reads_back_and_others_are_refused() {
        for text in ["vm1", "blue/vm1", "0", "a.b-c_d"] {
            let name: VolumeName = text.parse().expect("a name");
            assert_eq!(name.to_string(), text);
        }
        let name: VolumeName = "default/vm1".parse().expect("a name");
        assert_eq!(name, "vm1".parse().expect("a name"), "the tenant that is not written");
        let long = "a".repeat(PART_BYTES_MAX + 1);
        for text in ["", "/", "a/", "/a", "a/b/c", ".", "..", "-a", "a b", "ä", "a\0", "a@b", &long]
        {
            assert!(text.parse::<VolumeName>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_snapshot_is_named_with_its_volume() {
        for text in ["vm1@monday", "blue/vm1@2026-11-26"] {
            let name: SnapshotName = text.parse().expect("a name");
            assert_eq!(name.to_string(), text);
        }
        for text in ["vm1", "@", "vm1@", "@monday", "vm1@a@b", "vm1@a/b", "vm1@.."] {
            assert!(text.parse::<SnapshotName>().is_err(), "{text:?}");
        }
    }
}
