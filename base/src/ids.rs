//! Identities that several floors share.

use serde::{Deserialize, Serialize};
use std::fmt;

pub use uuid::Uuid;

/// A term of ownership. Every durable record carries the epoch of the owner that wrote it;
/// a record or request of an older epoch than the one seen last is refused. Epochs only grow.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Epoch(pub u64);

impl Epoch {
    /// The epoch that the next owner takes.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "e{}", self.0)
    }
}
