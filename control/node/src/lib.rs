//! The node: assembles the floors below from a cluster file, serves them, and answers the
//! `levada` program.
//!
//! - [`assembly`]: drives, arrays and targets, from a cluster file; also what the simulator runs.
//! - [`fit`], [`recorded`]: what a cluster file is held against before anything is written: the room
//!   on the drives, and the cluster that is on them.
//! - [`fsck`]: reads a file system and says what does not fit together.
//! - [`volumes`]: the volumes of a cluster, for orders and for [`exports`]. `turns`: what tenants may do with files beside them.
//! - [`mod@run`]: the process around it. [`mounting`]: the process of a mount.
//! - [`control`]: what may be asked of a node; [`meters`]: what it has counted; [`state`]: where it is found.

pub mod arrays;
pub mod assembly;
pub mod control;
pub mod counted;
pub mod damage;
pub mod drives;
pub mod exports;
mod file_drives;
pub mod fit;
pub mod fsck;
pub mod meters;
pub mod mounting;
pub mod operator;
pub mod outlook;
mod placed;
pub mod quota;
pub mod recorded;
mod remote_drives;
mod run;
pub mod state;
pub mod targets;
mod told;
mod turns;
pub mod volumes;

pub use file_drives::FileDrives;
pub use placed::Placed;
pub use remote_drives::{DeadPath, RemoteDrives, dead_paths};
pub use run::{Ended, NodeOptions, log_to_stderr, run};
pub use told::{Absent, absent, survives_now};
