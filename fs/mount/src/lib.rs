//! The file system as a local mount: FUSE requests become client calls.
//!
//! [`files`] is the handler over the client library, [`subtree`] shows one of its directories to a kernel that is not trusted with the
//! rest; the protocol, the session and `/dev/fuse` are those of `levada_fuse`, named here as well for who mounts.
//!
//! What always holds: a FUSE node id is the 64-bit inode number (root is 1,
//! numbers are never given out twice), so there is no table of node ids to
//! grow with the number of files or to lose in a restart, and a file handle
//! (`name_to_handle_at`) stays good across remounts. FORGET needs no work.

pub mod files;
pub mod subtree;

pub use levada_fuse::{Answer, Errno, Handler, Operation, Reply, Request, Session};
pub use levada_fuse::{codec, handler, meters, session, transport};
