//! NVMe as bytes: what hosts and controllers tell each other, and how TCP carries it.
//!
//! NVM Express Base Specification 1.4 ("Base"), NVMe over Fabrics 1.1 ("Fabrics"), and the TCP Transport Specification 1.0 ("TCP"),
//! whose sections are cited. Both sides build and read with the same types: `export/nvmet` is the controller's side, `block/device`
//! the host's.
//!
//! - `command`, `completion`, `status`: an entry of a submission queue, one of a completion queue, and how it went.
//! - `authentication`: who a host and a controller are; `tls`: keys of the channel between them; `keyring`: a file of both; `interchange`: how
//!   people write them.
//! - `fabrics`: connecting, and the properties of a controller; `nqn`: names of hosts and subsystems; `url`: where a namespace is, as people write it.
//! - `identify`, `log`: what a controller and its namespaces are, and what they report; `error_entry`: of commands that failed.
//! - `reservation`: which host may do what to a namespace; `kept`: as a target keeps that over a loss of power;
//!   `notification`: what hosts are told of it.
//! - `pdu`: how TCP carries all of it.
//! - `field`: numbers at their place in a structure.
//!
//! What always holds: there is no I/O here, and bytes from outside are `Err` when they are wrong, never a panic.

pub mod authentication;
mod command;
mod completion;
mod error_entry;
pub mod fabrics;
mod field;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod identify;
mod interchange;
mod kept;
pub mod keyring;
pub mod log;
mod notification;
mod nqn;
pub mod pdu;
pub mod reservation;
mod status;
pub mod tls;
mod url;

pub use command::{
    AdminOpcode, COMMAND_BYTES, Command, DataPointer, Feature, IoOpcode, Range, ranges,
};
pub use completion::{COMPLETION_BYTES, Completion};
pub use error_entry::{ERROR_ENTRY_BYTES, ErrorEntry};
pub use kept::{KeptFault, KeptReservations, REGISTRANTS_MAX};
pub use notification::{
    NOTIFICATION_BYTES, NoticeMask, ReservationNotice, ReservationNotification,
};
pub use nqn::{DISCOVERY_NQN, NQN_BYTES_MAX, Nqn, NqnError};
pub use status::Status;
pub use url::{NvmeUrl, UrlError};
