//! Extended attributes: a row each.

use super::{Damaged, Fields, VERSION};

/// The value of `A|ino|name`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XattrRow {
    pub value: Vec<u8>,
}

impl XattrRow {
    /// The row's bytes; the value is not copied into an [`XattrRow`] first.
    pub fn encode(value: &[u8]) -> Vec<u8> {
        [&[VERSION], value].concat()
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, Damaged> {
        let fields = Fields::new("extended attribute", bytes)?;
        Ok(Self { value: fields.rest.to_vec() })
    }
}
