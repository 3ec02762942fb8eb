//! Attributes in the client's words and in the kernel's.

use crate::codec::{self, Errno, SetAttr};
use levada_wire::attr::{Attr, Kind, Time};
use levada_wire::meta::{self, AttrChange};

/// What programs should read and write at once (`st_blksize`). Buffered streams of C and
/// Python allocate this much per file; the kernel reads ahead anyway.
const IO_BYTES: u32 = 128 << 10;
const NANOS: i64 = 1_000_000_000;

pub(super) fn time_of(time: Time) -> codec::Time {
    codec::Time { secs: time.0.div_euclid(NANOS), nanos: time.0.rem_euclid(NANOS) as u32 }
}

/// Times beyond the years 1677 to 2262 become the nearest there is.
fn time_from(time: codec::Time) -> Time {
    let nanos = i128::from(time.secs) * i128::from(NANOS) + i128::from(time.nanos);
    Time(nanos.clamp(i64::MIN.into(), i64::MAX.into()) as i64)
}

/// `st_blocks` is the size rounded up: what the objects store (holes, compression) is not
/// cheap to know yet.
pub(super) fn attr_of(attr: &Attr) -> codec::Attr {
    codec::Attr {
        inode: attr.ino.0,
        size_bytes: attr.size,
        blocks_512: if attr.kind == Kind::File { attr.size.div_ceil(512) } else { 0 },
        atime: time_of(attr.atime),
        mtime: time_of(attr.mtime),
        ctime: time_of(attr.ctime),
        mode: attr.mode,
        links: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        io_bytes: IO_BYTES,
    }
}

/// # Errors
///
/// `EFBIG` for a size that no file can have.
pub(super) fn change_of(set: &SetAttr) -> Result<AttrChange, Errno> {
    if set.size.is_some_and(|size| i64::try_from(size).is_err()) {
        return Err(Errno::FBIG);
    }
    let time = |set: codec::SetTime| match set {
        codec::SetTime::Now => meta::SetTime::Now,
        codec::SetTime::At(time) => meta::SetTime::To(time_from(time)),
    };
    Ok(AttrChange {
        mode: set.mode.map(|mode| mode & !libc::S_IFMT),
        uid: set.uid,
        gid: set.gid,
        size: set.size,
        atime: set.atime.map(time),
        mtime: set.mtime.map(time),
        ctime: set.ctime.map(time_from),
    })
}

/// Whether a file runs as its owner or group (set-group-id without group execution means
/// mandatory locking).
pub(super) fn has_set_id(attr: &Attr) -> bool {
    attr.kind == Kind::File && mode_without_set_id(attr.mode) != attr.mode & !libc::S_IFMT
}

/// The permission bits of `mode` without those.
pub(super) fn mode_without_set_id(mode: u32) -> u32 {
    let group = if mode & libc::S_IXGRP != 0 { libc::S_ISGID } else { 0 };
    mode & !libc::S_IFMT & !libc::S_ISUID & !group
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use levada_base::ids::Ino;

    /// A file.
    pub(in crate::files) fn attr(ino: Ino) -> Attr {
        let time = Time(0);
        Attr {
            ino,
            generation: 1,
            kind: Kind::File,
            mode: libc::S_IFREG | 0o644,
            uid: 0,
            gid: 0,
            nlink: 1,
            size: 1,
            writers: false,
            others: false,
            cut: false,
            rdev: 0,
            atime: time,
            mtime: time,
            ctime: time,
            btime: time,
            change: 1,
            parent: Ino::ROOT,
            project: 0,
            tenant: 0,
            extended: false,
            layout: None,
            components: 0,
        }
    }

    #[test]
    fn times_before_1970_keep_their_nanoseconds() {
        for nanos in [0, 1, -1, 1_500_000_001, -1_500_000_001, i64::MAX, i64::MIN] {
            assert_eq!(time_from(time_of(Time(nanos))), Time(nanos));
        }
        assert_eq!(time_of(Time(-1)), codec::Time { secs: -1, nanos: 999_999_999 });
        let far = codec::Time { secs: i64::MAX, nanos: 5 };
        assert_eq!(time_from(far), Time(i64::MAX));
    }

    #[test]
    fn set_id_bits_go_but_mandatory_locking_stays() {
        assert_eq!(mode_without_set_id(0o106_755), 0o755);
        assert_eq!(mode_without_set_id(0o102_644), 0o2644);
        assert_eq!(mode_without_set_id(0o101_644), 0o1644);
    }
}
