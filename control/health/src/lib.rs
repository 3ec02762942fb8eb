//! The health of drives: what is the matter with one by its own account (`record`), asked for once a minute and whenever somebody wants
//! to know (`watch`), and with the paths to it (`paths`), for whoever has drives: a node, or the process of an array on its own.

mod paths;
mod record;
mod watch;

pub use paths::PathStatus;
pub use record::{DriveHealth, Record};
pub use watch::Watch;
