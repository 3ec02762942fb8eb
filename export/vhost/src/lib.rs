//! A volume as a disk of a virtual machine, or a file system that it mounts: back ends of vhost-user-blk and vhost-user-fs.
//!
//! Read it downwards, as a guest's request goes: `directory` (a socket for each of several volumes), `server` (a volume at a
//! `socket`), `session` (one client: its messages, its queues), `queue` (one ring served; `placed` by this reactor, or on one of the `cores` for that), `ring` (split and packed), `request` (a chain -> the volume). What of it is a disk's goes
//! through `served`, and a file system is the other that does: `fs_server`, `fs` (a chain -> a session of FUSE). Beside them
//! without I/O: `message` (the protocol's bytes), `device` (what a client has set up), `disk` (features and configuration),
//! `inflight` (requests that a later process must know of), `cursor` (through the bytes of a chain). At the bottom what touches a
//! client's memory and descriptors: `memory`, `fault`, `signal`, `stranger`.
//!
//! What always holds:
//! - Nothing that a client sends or puts in its memory ends the process, reads what is not its own, or keeps others waiting.
//! - An answered write is in the volume, an answered flush made what was answered before it durable.
//!
//! Knows nothing of arrays, nor of what a file system holds. What is promised to guests, and why it is built so:
//! docs/design/0018-vhost-user-blk.md, docs/design/0021-virtio-fs.md.

mod cores;
mod cursor;
mod device;
mod directory;
mod disk;
mod fault;
mod fs;
mod fs_server;
mod inflight;
mod memory;
mod message;
mod placed;
mod queue;
mod request;
mod ring;
mod served;
mod server;
mod session;
mod signal;
mod socket;
mod stranger;

#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;

pub use cores::RingCores;
pub use directory::{Directory, Disks};
pub use fs::FileSystem;
pub use fs_server::{FsOptions, FsServer, Tag, TagError};
pub use server::{Opening, Options, Server};
pub use socket::ListenError;
