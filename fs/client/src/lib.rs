//! The client library: file ranges become object ranges, all in flight at once.
//!
//! [`Client`] has names and attributes, [`File`] has data; [`housekeeper`] does what the
//! services leave to a client, [`placement`] finds out where new files should go. Knows nothing of kernels and protocols above it, nor of how a
//! service stores anything.
//!
//! What always holds:
//! - What a program wrote is sent again until it is durable: a restart of a service loses
//!   nothing and shows no error.
//! - A change of names or attributes happens once, over any number of repetitions.
//!
//! After a crash of the client its durable data stays; its sessions are settled by the
//! housekeeper when its lease has run out.

mod burial;
mod client;
mod clock;
mod copy;
mod ends;
mod error;
mod file;
pub mod housekeeper;
mod inode;
mod leases;
mod locks;
mod meta;
mod moment;
pub mod placement;
mod ranges;
mod room;
mod slots;
mod space;
mod target;
mod unstable;
mod xattrs;

pub use burial::bury;
pub use client::{Client, ClientConfig, Removed};
pub use error::Error;
pub use file::File;
pub use inode::{Cancel, Seek};
pub use leases::{OnNotice, OnShared};
pub use space::Space;
