//! An enclosure of drives over NVMe/TCP, simulated: bays with files or memory in them, two paths or more, and everything that goes wrong
//! with real ones, on command.
//!
//! - `enclosure`: bays and paths, and what may be ordered of them; `bay`: a drive and what can happen to it; `wear`: how worn it is.
//! - `drive_volume`: a drive as a volume, which is what a target shows; `kept_file`: who it is, and who has reserved it, over restarts.
//! - `plan`: what it is made of.
//! - `request`: orders and answers; `place`: where the process is asked; `run`: the process.
//! - `http`: its status for programs that watch enclosures.
//!
//! What always holds:
//! - The namespace of a bay is its number, and its GUID goes with the drive: another drive in the bay is another one.
//! - Power that is cut loses what drives had not flushed, or a random part of it, and answers nothing that was under way.
//!
//! For tests and measurements, as the drives of a real one could not be asked to do this. After a crash files keep what was
//! flushed, and may have more.

mod bay;
mod drive_volume;
mod enclosure;
mod find;
mod http;
mod kept_file;
mod place;
mod plan;
mod request;
mod run;
mod wear;

pub use enclosure::{
    BayState, BayStatus, DriveHealth, DriveStatus, Enclosure, EnclosureStatus, PathStatus,
};
pub use find::{FindError, Found, FoundDrive, find, find_at};
pub use levada_device::DriveModel;
pub use plan::{EnclosureError, Media, Plan};
pub use request::{AskEnclosureError, Order, PathOrder, Refusal, ask};
pub use run::serve;
pub use wear::WearChange;
