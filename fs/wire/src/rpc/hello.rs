//! The handshake: who is there, which version is spoken, what may be in flight.

use serde::{Deserialize, Serialize};

/// The first frame of whoever connects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Versions of the protocol that the caller speaks, both included.
    pub version_min: u16,
    pub version_max: u16,
    /// The cluster that the caller expects; all zero: any.
    pub cluster: [u8; 16],
    pub node: u32,
}

/// The answer. The credits to begin with stand in the frame's header.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    Welcome(Welcome),
    Refused(Refusal),
}

/// Who answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// What both speak from now on.
    pub version: u16,
    pub cluster: [u8; 16],
    pub node: u32,
}

/// Why a service does not want a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    #[error("the service speaks versions {min} to {max}")]
    Version { min: u16, max: u16 },
    #[error("the service belongs to another cluster")]
    Cluster,
}

impl Hello {
    /// Decides about a caller.
    ///
    /// # Errors
    ///
    /// Why it is refused.
    pub fn judge(&self, cluster: [u8; 16], node: u32) -> Result<Welcome, Refusal> {
        let ours = crate::frame::VERSION;
        if !(self.version_min..=self.version_max).contains(&ours) {
            return Err(Refusal::Version { min: ours, max: ours });
        }
        if self.cluster != [0; 16] && self.cluster != cluster {
            return Err(Refusal::Cluster);
        }
        Ok(Welcome { version: ours, cluster, node })
    }
}
