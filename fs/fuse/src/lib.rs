//! FUSE: the kernel's requests for a file system in user space, whatever that holds.
//!
//! - [`codec`]: the FUSE protocol as bytes in, bytes out; no I/O, no state.
//! - [`handler`]: what answers one request, asynchronously.
//! - [`meters`]: how many requests of which kind, and how long they took.
//! - [`session`]: INIT, errors and framing around a handler; still no I/O.
//! - [`transport`]: where messages come from: `/dev/fuse` (why not FUSE over
//!   io_uring: docs/design/0014-fuse-transports.md). Those of virtual machines
//!   come over virtio-fs, a transport over the same session in `export/vhost`.
//!
//! Knows nothing of what is served: the mount's handler is over the client library, that of an
//! array shown as a file over the array.
//!
//! After a crash of the process the kernel fails requests with `ENOTCONN`
//! until the dead mount is replaced ([`transport::dev_fuse::FuseMount::new`]
//! does that); nothing here is persistent.

pub mod codec;
pub mod handler;
pub mod meters;
pub mod session;
pub mod transport;

pub use codec::{Errno, Operation, Reply, Request};
pub use handler::Handler;
pub use session::{Answer, Session};
