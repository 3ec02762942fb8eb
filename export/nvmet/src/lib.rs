//! Volumes over NVMe/TCP, for the Linux kernel and whoever else is an NVMe host.
//!
//! A target has addresses and subsystems; a subsystem has namespaces, each of which is a volume. Formats are `levada-nvme`'s.
//!
//! - `target`: who listens, and what is found by discovery; `port`: an address, which is a path.
//! - `subsystem`, `namespace`: what is shown, and to whom.
//! - `reservations`: which host may do what; `claims`: what hosts do, and where reservations are kept.
//! - `volumes`: many, each as a subsystem; `address`: where hosts come, as it is written.
//! - `connection`: one queue; `units`: what its host sends; `connect`: its first command; `gate`: until its host has proved who it is (TLS comes before all of it); `transfers`: data that were asked for.
//! - `controller`: what a host has, over all its queues; `notices`, `reservation_log`: what it is told unasked; `recall`: commands that it aborts; `errors`: those that failed.
//! - `admin`, `io`: its commands.
//!
//! What always holds:
//! - A write is answered once the volume has it, a flush once all writes answered before it, over any queue, are durable.
//! - What a host may have under way is bounded in commands and bytes. One that does not read its answers is not read from, and holds
//!   up nobody else.
//! - Whatever a host sends, it is answered or its connection ends.
//! - Once a preemption is answered, nothing that the preempted host has asked for changes the namespace.
//!
//! After a crash of this process hosts lose their connections, and with them what they had not flushed; reservations too, unless they asked for them
//! to be kept, where that is offered.

mod address;
mod admin;
mod claims;
mod connect;
mod connection;
mod controller;
mod errors;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod gate;
mod io;
mod memory;
mod namespace;
mod notices;
mod port;
mod recall;
mod reservation_log;
mod reservations;
mod subsystem;
mod target;
mod transfers;
mod units;
mod volumes;

/// What the names of subsystems begin with, unless somebody chooses another.
pub const NQN_PREFIX: &str = "nqn.2026-11.io.levada";

pub use address::{Address, AddressError, PORT};
pub use admin::FIRMWARE;
pub use claims::{Claims, Keep, KeepError};
pub use levada_device::nvme::KeysError;
pub use levada_nvme::identify::{OWN_MODEL as MODEL, WARNING_KELVIN};
pub use levada_nvme::keyring::Keyring;
pub use levada_nvme::log::{AnaState, AnaStateError, Health, Warnings};
pub use levada_nvme::{Nqn, NqnError};
pub use namespace::{Open, Opened, TellHealth};
pub use port::Passage;
pub use subsystem::{Hosts, Loss, NAMESPACES_MAX, Subsystem};
pub use target::{ListenError, Path, Target};
pub use volumes::{Follower, VolumeShown, Volumes, serial_of};
