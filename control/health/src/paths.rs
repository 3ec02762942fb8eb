//! How the paths to a drive on the network are, as the process that has it open tells.

use levada_device::nvme::{self, Standing};
use serde::{Deserialize, Serialize};

/// A path to a drive on the network.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PathStatus {
    /// As in `10.0.0.1:4420`.
    pub address: String,
    /// `optimized`, `non-optimized`, `reserve` (not used beside another), `unusable`, `down`.
    pub state: String,
    /// Why it is not used; of one that is used what is the matter with it.
    pub why: Option<String>,
}

impl PathStatus {
    /// Whether requests may take it.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        matches!(&*self.state, "optimized" | "non-optimized")
    }

    /// What is the matter with it; `None`: nothing.
    #[must_use]
    pub fn problem(&self) -> Option<&str> {
        match &self.why {
            _ if self.state == "reserve" => None,
            Some(why) => Some(why),
            None if self.is_usable() => None,
            None => Some("not connected"),
        }
    }
}

impl From<nvme::PathStatus> for PathStatus {
    fn from(path: nvme::PathStatus) -> Self {
        let state = match path.standing {
            Standing::Optimized => "optimized",
            Standing::NonOptimized => "non-optimized",
            Standing::Reserve => "reserve",
            Standing::Unusable => "unusable",
            Standing::Down => "down",
        };
        Self { address: path.address, state: state.into(), why: path.why }
    }
}
