//! The FUSE protocol, version 7.36 to 7.45, without I/O.
//!
//! Layouts and numbers are those of the kernel's public ABI,
//! `include/uapi/linux/fuse.h`; structure names in the comments refer to it.
//! All integers are in the byte order of the machine (kernel and server share
//! one host, or the virtio-fs guest is little-endian as its host is).
//!
//! What always holds: [`Request::parse`] never panics whatever the bytes are;
//! an opcode this codec does not know is a value ([`Operation::Unknown`]), not
//! an error, because the kernel expects `ENOSYS` and goes on without it.
//! Nothing is kept between calls: what INIT agreed on is required to fix every
//! layout (see [`init`]), so parsing needs no session.

pub mod abi;
pub mod attr;
pub mod dir;
pub mod errno;
mod fields;
pub mod init;
mod notify;
pub mod operation;
pub mod reply;
pub mod request;

pub use abi::{InitFlags, Opcode, OpenReplyFlags};
pub use attr::{Attr, Entry, FileLock, StatFs, Statx, Time};
pub use dir::{DirBuilder, Record, Records};
pub use errno::Errno;
pub use init::{InitRequest, Limits, NegotiateError, Negotiated};
pub use notify::{
    invalidate_attributes, invalidate_entry, invalidate_inode, invalidate_range, store_last_byte,
};
pub use operation::{Operation, ReadArgs, SetAttr, SetTime, WriteArgs};
pub use reply::{Head, OpenReply, Reply};
pub use request::{Caller, ParseError, Request};

/// The node id, and so the inode number, of the root directory
/// (`FUSE_ROOT_ID`).
pub const ROOT_INODE: u64 = 1;

/// Bytes of `fuse_in_header`, before the arguments of every request.
pub const IN_HEADER_BYTES: usize = 40;

/// Bytes of `fuse_out_header`, before the body of every reply.
pub const OUT_HEADER_BYTES: usize = 16;

/// Where the data of a WRITE request starts in its message: after
/// `fuse_in_header` and `fuse_write_in`. A transport that receives messages at
/// `page boundary - WRITE_DATA_OFFSET` gets page-aligned data with no copy.
pub const WRITE_DATA_OFFSET: usize = 80;
