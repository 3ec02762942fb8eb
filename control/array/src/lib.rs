//! Stand-alone arrays: made over files, block devices or remote namespaces, without a cluster, and looked after by the
//! process that has them open.
//!
//! - `level`: levels as people name them.
//! - `drives`: what is on a drive, and who has it; nothing is opened twice or overwritten unasked.
//! - `store`: what a drive is opened as.
//! - `create`: a new array.
//! - `keeper`: an open array: carries out what is asked of it, and rebuilds what waits for it.
//! - `run`: the process around a keeper: its desk, its signals, the file that it shows.
//! - `volumes`: the linear volumes of an array that is a pool of them.
//! - `status`, `request`: what may be asked, and what is answered: the JSON of docs/array.md.
//!
//! What always holds:
//! - Every drive of an open array is locked, or reserved, by the process that has it open, and that process answers
//!   at the array's desk. So a command either asks it there, or opens the array itself.
//! - An array is not opened without a live member that the caller has not given up by name or by flag: whoever is
//!   missing then is out.
//!
//! After a crash the locks are gone with the process; the next one opens the array anew.

mod create;
mod drives;
mod enclosures;
mod error;
mod keeper;
mod level;
mod look;
mod place;
mod request;
mod run;
mod shown;
mod status;
mod store;
mod volumes;

pub use create::{Created, Creation, create};
pub use error::ArrayError;
pub use keeper::Opening;
pub use level::{LevelError, LevelWords, describe};
pub use look::show;
pub use request::{Pace, Reply, Request, absolute, ask};
pub use run::{Keeping, ask_or_open, serve};
pub use shown::{Shown, Shows};
pub use status::{Io, LatencyUs, MemberStatus, OpenBy, PoolStatus, Progress, ScrubResult, Status};
