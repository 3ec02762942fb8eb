//! The file system as a local mount: FUSE requests become client calls.
//!
//! - [`codec`]: the FUSE protocol as bytes in, bytes out; no I/O, no state.
//! - [`handler`]: what answers one request, asynchronously.
//! - [`files`]: the handler over the client library.
//! - [`meters`]: how many requests of which kind, and how long they took.
//! - [`session`]: INIT, errors and framing around a handler; still no I/O.
//! - [`transport`]: where messages come from. `/dev/fuse` today (why not FUSE
//!   over io_uring: docs/design/0014-fuse-transports.md); virtio-fs would be a
//!   further transport over the same session.
//!
//! What always holds: a FUSE node id is the 64-bit inode number (root is 1,
//! numbers are never given out twice), so there is no table of node ids to
//! grow with the number of files or to lose in a restart, and a file handle
//! (`name_to_handle_at`) stays good across remounts. FORGET needs no work.
//!
//! After a crash of the process the kernel fails requests with `ENOTCONN`
//! until the dead mount is replaced ([`transport::dev_fuse::FuseMount::new`]
//! does that); nothing here is persistent.

pub mod codec;
pub mod files;
pub mod handler;
pub mod meters;
pub mod session;
pub mod transport;

pub use codec::{Errno, Operation, Reply, Request};
pub use handler::Handler;
pub use session::{Answer, Session};
