//! What keeps two servers apart where drives cannot: a command that takes the power of the other one.

use crate::order::order;
use levada_base::Epoch;
use levada_base::reactor;
use std::time::Duration;

/// How long it may take. Power switches that are slow, and are asked twice, take half a minute.
const LIMIT: Duration = Duration::from_secs(120);

/// The power fence did not do its work, so the drives may still have another owner.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the power fence `{command}` has failed, so another server may still write to {name}; nothing was changed: {why}"
)]
pub struct PowerFenceError {
    pub command: String,
    pub name: String,
    pub why: String,
}

/// What is about to be taken.
#[derive(Clone, Debug)]
pub struct Taking {
    /// Of an array or a cluster.
    pub name: String,
    pub uuid: String,
    /// The latest owner that is known of it.
    pub last: Epoch,
    /// Paths and URLs of its drives.
    pub drives: Vec<String>,
    /// How long a change may still be on its way to its drives when whoever has sent it is gone.
    pub settle: Duration,
}

/// Has `command` shut out whoever else has the drives, and returns when nothing of him can reach them any more. The command is told
/// what it is about by its environment: `LEVADA_NAME`, `LEVADA_UUID`, `LEVADA_LAST_EPOCH`, and `LEVADA_DRIVES`, one to a line.
///
/// # Errors
///
/// [`PowerFenceError`].
pub async fn power_fence(command: &str, taking: &Taking) -> Result<(), PowerFenceError> {
    let Taking { name, uuid, last, drives, settle } = taking;
    tracing::info!(name, last = last.0, "runs the power fence, and waits for it");
    let environment = [
        ("LEVADA_NAME", name.clone()),
        ("LEVADA_UUID", uuid.clone()),
        ("LEVADA_LAST_EPOCH", last.0.to_string()),
        ("LEVADA_DRIVES", drives.join("\n")),
    ];
    let ordered = order(command, &environment, LIMIT).await;
    ordered.map_err(|error| {
        let (command, name) = (command.to_owned(), name.clone());
        PowerFenceError { command, name, why: error.to_string() }
    })?;
    if !settle.is_zero() {
        let seconds = settle.as_secs();
        tracing::info!(
            name,
            seconds,
            "waits until nothing of an earlier owner can be on its way to drives without reservations"
        );
        reactor::sleep(*settle).await;
    }
    Ok(())
}
