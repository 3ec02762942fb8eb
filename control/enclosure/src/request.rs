//! What may be asked of an enclosure's process, and what it answers.

use crate::enclosure::EnclosureStatus;
use crate::place;
use crate::wear::WearChange;
use levada_desk::AskError;
use levada_export_nvmet::AnaState;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How long an answer may take.
const LIMIT: Duration = Duration::from_secs(30);

/// What may be ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Nothing: the answer says how it is doing.
    Show,
    /// The drive of a bay goes, with whatever is under way.
    Pull { bay: u32 },
    /// It comes back, with what it held.
    Insert { bay: u32 },
    /// Every request to the drive takes so much longer; 0 ends that.
    SlowDrive { bay: u32, ms: u64 },
    /// What the drive tells of its health.
    Wear { bay: u32, change: WearChange },
    /// Paths are numbered from 1 on.
    Path { path: usize, order: PathOrder },
    /// How good a path says it is, until another order for it.
    PathState { path: usize, state: AnaState },
    /// Of the whole enclosure.
    Power { is_on: bool },
}

/// What becomes of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PathOrder {
    #[default]
    Up,
    /// Connections are closed.
    Down,
    /// Connections stay, and nothing is answered.
    Hung,
    /// Answers leave so much later.
    Slow { ms: u64 },
}

/// Why an order is not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("there is no bay {bay}: they are 1 to {count}")]
    NoBay { bay: u32, count: usize },
    #[error("there is no path {path}: they are 1 to {count}")]
    NoPath { path: usize, count: usize },
    #[error("bay {bay} is empty")]
    Empty { bay: u32 },
    #[error("bay {bay} has its drive")]
    Taken { bay: u32 },
    #[error("the power is on")]
    IsOn,
    #[error("the power is off")]
    IsOff,
    #[error("the power is just being cut")]
    Busy,
    #[error("what the drives lie on failed: {why}")]
    Media { why: String },
}

/// What is answered.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    Done(EnclosureStatus),
    Refused { why: String },
}

/// Why nothing was done, or shown.
#[derive(Debug, thiserror::Error)]
pub enum AskEnclosureError {
    #[error("no enclosure {name} is served on this machine: `levada enclosure serve {name} ...`")]
    NotServed { name: String },
    #[error("permission denied: enclosure {name} belongs to another user")]
    Denied { name: String },
    #[error("{why}")]
    Refused { why: String },
    #[error("the process of enclosure {name} does not answer")]
    Broken { name: String, source: std::io::Error },
    #[error("the process of enclosure {name} is of another version")]
    Version { name: String, source: serde_json::Error },
}

/// Gives the process of an enclosure an order; how it is doing afterwards.
///
/// # Errors
///
/// [`AskEnclosureError`].
pub fn ask(name: &str, order: Order) -> Result<EnclosureStatus, AskEnclosureError> {
    let whose = || name.to_owned();
    let reply: Reply = levada_desk::ask(&place::socket_of(name), &order, Some(LIMIT)).map_err(
        |error| match error {
            AskError::NobodyThere => AskEnclosureError::NotServed { name: whose() },
            AskError::Denied => AskEnclosureError::Denied { name: whose() },
            AskError::Broken(source) => AskEnclosureError::Broken { name: whose(), source },
            AskError::NotUnderstood(source) => AskEnclosureError::Version { name: whose(), source },
        },
    )?;
    match reply {
        Reply::Done(status) => Ok(status),
        Reply::Refused { why } => Err(AskEnclosureError::Refused { why }),
    }
}
