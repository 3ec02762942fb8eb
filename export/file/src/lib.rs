//! A volume as one regular file, which any program can open: a FUSE mount on that file.
//!
//! - `handler`: one request -> I/O on the volume.
//! - `attr`: what stat tells of it.
//! - `export`: the mount around it, from its beginning to its end.
//!
//! What always holds:
//! - Nothing is cached here or in the kernel: an answered WRITE is in the volume, an answered FSYNC flushed.
//! - Requests are answered in parallel.
//!
//! Knows nothing of arrays. After a crash of the process calls fail with `ENOTCONN`; serving the file
//! again takes the dead mount away. What was acknowledged is the volume's to keep.

mod attr;
mod export;
mod handler;

pub use export::{Export, ExportError};
pub use handler::VolumeFile;
pub use levada_fuse::transport::dev_fuse::Unmounted;
