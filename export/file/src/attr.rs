//! What stat tells of the file. Changes of mode, owner and times are kept while it is served.

use levada_base::units::BLOCK_BYTES;
use levada_fuse::codec::{Attr, ROOT_INODE, SetAttr, SetTime, StatFs, Statx, Time};
use std::time::{SystemTime, UNIX_EPOCH};

/// Readable and writable for its owner: who reads a volume raw passes by the modes of the files in it.
const MODE: u32 = libc::S_IFREG | 0o600;

fn now() -> Time {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Time { secs: since.as_secs().cast_signed(), nanos: since.subsec_nanos() }
}

/// Of a volume of so many bytes that is served from now on.
pub(crate) fn fresh(size_bytes: u64) -> Attr {
    let time = now();
    Attr {
        inode: ROOT_INODE,
        size_bytes,
        blocks_512: size_bytes / 512,
        atime: time,
        mtime: time,
        ctime: time,
        mode: MODE,
        links: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        io_bytes: BLOCK_BYTES as u32,
    }
}

/// As `set` wants it, but for the size.
pub(crate) fn changed(attr: Attr, set: &SetAttr) -> Attr {
    let time = |wanted: Option<SetTime>, old: Time| match wanted {
        Some(SetTime::Now) => now(),
        Some(SetTime::At(time)) => time,
        None => old,
    };
    Attr {
        mode: set.mode.map_or(attr.mode, |mode| libc::S_IFREG | (mode & 0o777)),
        uid: set.uid.unwrap_or(attr.uid),
        gid: set.gid.unwrap_or(attr.gid),
        atime: time(set.atime, attr.atime),
        mtime: time(set.mtime, attr.mtime),
        ctime: now(),
        ..attr
    }
}

pub(crate) fn extended(attr: Attr) -> Statx {
    Statx { attr, mask: libc::STATX_BASIC_STATS, ..Statx::default() }
}

/// Of a file system that holds this file and has no room for another.
pub(crate) fn space(size_bytes: u64) -> StatFs {
    StatFs {
        blocks: size_bytes / BLOCK_BYTES,
        files: 1,
        io_bytes: BLOCK_BYTES as u32,
        name_bytes_max: 255,
        fragment_bytes: BLOCK_BYTES as u32,
        ..StatFs::default()
    }
}
