//! One reply: `fuse_out_header` and a body.
//!
//! ```text
//!  0     4        8        16
//!  | len | -errno | unique | body
//! ```
//!
//! Fixed-size bodies are written into a small [`Head`] on the stack together
//! with the header. Data (of READ, directories, links, attributes) stays where
//! it is: the reply keeps a list of buffers and the transport gathers them.

use std::time::Duration;

use levada_base::{Buf, IoVec};

use super::OUT_HEADER_BYTES;
use super::abi::OpenReplyFlags;
use super::attr::{Attr, Entry, FileLock, StatFs, Statx};
use super::errno::Errno;
use super::init::Negotiated;

/// The longest [`Head`]: the header and `fuse_statx_out`.
pub const HEAD_BYTES_MAX: usize = OUT_HEADER_BYTES + 288;

/// `fuse_open_out`: an open file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenReply {
    /// Comes back with every request on the open file.
    pub fh: u64,
    /// How the kernel treats it.
    pub flags: OpenReplyFlags,
}

/// What a handler answers.
#[derive(Clone, Debug)]
pub enum Reply {
    /// No message at all: FORGET, BATCH_FORGET, INTERRUPT.
    Silent,
    /// It did not work.
    Error(Errno),
    /// It worked; no body.
    Done,
    /// LOOKUP, SYMLINK, MKNOD, MKDIR, LINK.
    Entry(Entry),
    /// GETATTR, SETATTR.
    Attr {
        /// The attributes.
        attr: Attr,
        /// How long the kernel may trust them.
        valid: Duration,
    },
    /// STATX.
    Statx {
        /// The attributes.
        statx: Statx,
        /// How long the kernel may trust them.
        valid: Duration,
    },
    /// OPEN, OPENDIR.
    Open(OpenReply),
    /// CREATE, TMPFILE.
    Create {
        /// The new file.
        entry: Entry,
        /// It, opened.
        open: OpenReply,
    },
    /// READ: the buffers in order; shorter than asked means end of file.
    Data(IoVec),
    /// READDIR, READDIRPLUS (see [`super::DirBuilder`]), READLINK, GETXATTR,
    /// LISTXATTR.
    Bytes(Vec<u8>),
    /// WRITE, COPY_FILE_RANGE: bytes taken.
    Written(u32),
    /// COPY_FILE_RANGE_64: bytes copied.
    Copied(u64),
    /// STATFS.
    StatFs(StatFs),
    /// GETXATTR, LISTXATTR with size 0: bytes needed.
    XattrSize(u32),
    /// GETLK: the lock in the way (`F_UNLCK` for none).
    Lock(FileLock),
    /// LSEEK: the offset found.
    Offset(u64),
    /// INIT. Made by the session, not by handlers.
    Init(Negotiated),
}

impl From<Errno> for Reply {
    fn from(errno: Errno) -> Self {
        Reply::Error(errno)
    }
}

impl Reply {
    /// The header and fixed-size body of this reply to `unique`; `None` for
    /// [`Reply::Silent`]. What [`Reply::payload`] yields follows it.
    ///
    /// # Panics
    ///
    /// When the payload passes 4 GiB, which no request allows.
    #[must_use]
    pub fn head(&self, unique: u64) -> Option<Head> {
        let mut head = Head::new(unique);
        match self {
            Reply::Silent => return None,
            Reply::Error(errno) => head.set_error(*errno),
            Reply::Done | Reply::Data(_) | Reply::Bytes(_) => {}
            Reply::Entry(entry) => entry.put(&mut head),
            Reply::Attr { attr, valid } => {
                head.u64(valid.as_secs());
                head.u32(valid.subsec_nanos());
                head.u32(0);
                attr.put(&mut head);
            }
            Reply::Statx { statx, valid } => {
                head.u64(valid.as_secs());
                head.u32(valid.subsec_nanos());
                head.u32(0);
                head.zeroes(16);
                statx.put(&mut head);
            }
            Reply::Open(open) => open.put(&mut head),
            Reply::Create { entry, open } => {
                entry.put(&mut head);
                open.put(&mut head);
            }
            Reply::Written(bytes) | Reply::XattrSize(bytes) => {
                head.u32(*bytes);
                head.u32(0);
            }
            Reply::Copied(value) | Reply::Offset(value) => head.u64(*value),
            Reply::StatFs(statfs) => statfs.put(&mut head),
            Reply::Lock(lock) => lock.put(&mut head),
            Reply::Init(init) => init.put(&mut head),
        }
        let payload_bytes = self.payload().map(<[u8]>::len).sum::<usize>();
        head.set_len(payload_bytes);
        Some(head)
    }

    /// The slices that follow the head, in order.
    pub fn payload(&self) -> impl Iterator<Item = &[u8]> {
        let (buffers, bytes): (&[Buf], Option<&[u8]>) = match self {
            Reply::Data(buffers) => (buffers, None),
            Reply::Bytes(bytes) => (&[], Some(bytes)),
            _ => (&[], None),
        };
        buffers.iter().map(|buffer| &**buffer).chain(bytes)
    }
}

impl OpenReply {
    fn put(&self, to: &mut Head) {
        to.u64(self.fh);
        to.u32(self.flags.bits());
        to.u32(0);
    }
}

/// The header and the fixed-size body of a reply.
#[derive(Clone, Debug)]
pub struct Head {
    bytes: [u8; HEAD_BYTES_MAX],
    len: usize,
}

impl Head {
    fn new(unique: u64) -> Self {
        let mut head = Head { bytes: [0; HEAD_BYTES_MAX], len: 0 };
        head.u32(0);
        head.u32(0);
        head.u64(unique);
        head
    }

    fn set_len(&mut self, payload_bytes: usize) {
        let len = u32::try_from(self.len + payload_bytes).expect("a reply is far below 4 GiB");
        self.bytes[..4].copy_from_slice(&len.to_ne_bytes());
    }

    /// Makes it the head of another request's answer.
    pub(crate) fn set_unique(&mut self, unique: u64) {
        self.bytes[8..OUT_HEADER_BYTES].copy_from_slice(&unique.to_ne_bytes());
    }

    fn set_error(&mut self, errno: Errno) {
        self.bytes[4..8].copy_from_slice(&(-errno.raw()).to_ne_bytes());
    }

    fn put(&mut self, field: &[u8]) {
        self.bytes[self.len..self.len + field.len()].copy_from_slice(field);
        self.len += field.len();
    }

    pub(super) fn u16(&mut self, field: u16) {
        self.put(&field.to_ne_bytes());
    }

    pub(super) fn u32(&mut self, field: u32) {
        self.put(&field.to_ne_bytes());
    }

    pub(super) fn u64(&mut self, field: u64) {
        self.put(&field.to_ne_bytes());
    }

    pub(super) fn zeroes(&mut self, count: usize) {
        // The buffer was zero from the start.
        self.len += count;
        assert!(self.len <= HEAD_BYTES_MAX);
    }

    /// A body on its own, for the records of READDIRPLUS.
    pub(super) fn bare() -> Self {
        Head { bytes: [0; HEAD_BYTES_MAX], len: 0 }
    }
}

impl AsRef<[u8]> for Head {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}
