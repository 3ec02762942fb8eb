//! Where messages come from and answers go.
//!
//! A transport receives a message into a buffer, gives it to
//! [`crate::Session::serve`] and sends the answer's slices; that is the whole
//! seam. [`dev_fuse`] mounts and speaks to `/dev/fuse`; [`reactor`] serves it
//! beside everything else on a core, [`blocking`] by a thread of its own, one
//! request at a time.

pub mod blocking;
mod control;
pub mod dev_fuse;
mod mount_table;
mod notifier;
pub mod reactor;

pub use control::abort_file;
pub use notifier::Notifier;

use levada_base::BufMut;
use levada_base::units::BLOCK_BYTES;

use crate::codec::{Limits, WRITE_DATA_OFFSET};

/// A buffer to receive one message in. It has room for the largest WRITE under
/// `limits` (the kernel hands no request to less, nor to less than its
/// `FUSE_MIN_READ_BUFFER` of 8 KiB), and begins so that the data of a WRITE is
/// page-aligned.
#[must_use]
pub fn message_buffer(limits: &Limits) -> BufMut {
    const FUSE_MIN_READ_BUFFER: usize = 8192;
    let page_bytes = BLOCK_BYTES as usize;
    let data_bytes = (limits.max_write_bytes as usize).max(FUSE_MIN_READ_BUFFER);
    let mut buffer = BufMut::for_overwrite(page_bytes + data_bytes);
    let _before = buffer.split_to(page_bytes - WRITE_DATA_OFFSET);
    buffer
}
