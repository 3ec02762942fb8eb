//! Attributes, directory entries and limits, as replies carry them.

use std::time::Duration;

use super::reply::Head;

/// A moment: seconds since 1970 and nanoseconds after them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time {
    /// Seconds; negative before 1970.
    pub secs: i64,
    /// 0 to 999,999,999.
    pub nanos: u32,
}

impl Time {
    /// The wire has unsigned seconds that the kernel takes as signed.
    pub(super) fn from_wire(secs: u64, nanos: u32) -> Self {
        Time { secs: secs.cast_signed(), nanos: nanos.min(999_999_999) }
    }
}

/// `fuse_attr`: what stat reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attr {
    /// Inode number.
    pub inode: u64,
    /// Bytes.
    pub size_bytes: u64,
    /// Space in units of 512 bytes.
    pub blocks_512: u64,
    /// Last access.
    pub atime: Time,
    /// Last change of the data.
    pub mtime: Time,
    /// Last change of the inode.
    pub ctime: Time,
    /// Type and permissions.
    pub mode: u32,
    /// Names.
    pub links: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number, as the kernel encodes it in 32 bits.
    pub rdev: u32,
    /// Preferred I/O size (`st_blksize`).
    pub io_bytes: u32,
}

impl Attr {
    pub(super) fn put(&self, to: &mut Head) {
        to.u64(self.inode);
        to.u64(self.size_bytes);
        to.u64(self.blocks_512);
        for time in [self.atime, self.mtime, self.ctime] {
            to.u64(time.secs.cast_unsigned());
        }
        for time in [self.atime, self.mtime, self.ctime] {
            to.u32(time.nanos);
        }
        for field in [self.mode, self.links, self.uid, self.gid, self.rdev, self.io_bytes] {
            to.u32(field);
        }
        to.u32(0); // flags: no submount, no DAX
    }
}

/// `fuse_entry_out`: what a name means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// The inode; 0 says that the name does not exist, and that the kernel
    /// may remember so.
    pub inode: u64,
    /// With the inode number unique for ever; constant, as inode numbers are
    /// never reused.
    pub generation: u64,
    /// How long the kernel may trust the name.
    pub entry_valid: Duration,
    /// How long the kernel may trust the attributes.
    pub attr_valid: Duration,
    /// The inode's attributes.
    pub attr: Attr,
}

impl Entry {
    /// The name does not exist and will not for that long.
    #[must_use]
    pub fn absent(valid: Duration) -> Self {
        Entry { entry_valid: valid, ..Entry::default() }
    }

    pub(super) fn put(&self, to: &mut Head) {
        to.u64(self.inode);
        to.u64(self.generation);
        to.u64(self.entry_valid.as_secs());
        to.u64(self.attr_valid.as_secs());
        to.u32(self.entry_valid.subsec_nanos());
        to.u32(self.attr_valid.subsec_nanos());
        self.attr.put(to);
    }
}

/// `fuse_statx`: attributes with birth time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statx {
    /// The attributes stat has.
    pub attr: Attr,
    /// Which fields are good (`STATX_...`).
    pub mask: u32,
    /// Creation.
    pub btime: Time,
    /// `STATX_ATTR_...` that are set.
    pub attributes: u64,
    /// `STATX_ATTR_...` that are supported.
    pub attributes_mask: u64,
}

impl Statx {
    pub(super) fn put(&self, to: &mut Head) {
        let attr = &self.attr;
        to.u32(self.mask);
        to.u32(attr.io_bytes);
        to.u64(self.attributes);
        to.u32(attr.links);
        to.u32(attr.uid);
        to.u32(attr.gid);
        to.u16((attr.mode & 0xffff) as u16);
        to.u16(0);
        to.u64(attr.inode);
        to.u64(attr.size_bytes);
        to.u64(attr.blocks_512);
        to.u64(self.attributes_mask);
        for time in [attr.atime, self.btime, attr.ctime, attr.mtime] {
            to.u64(time.secs.cast_unsigned());
            to.u32(time.nanos);
            to.u32(0);
        }
        let (rdev_major, rdev_minor) = split_device(attr.rdev);
        to.u32(rdev_major);
        to.u32(rdev_minor);
        to.zeroes(8 + 14 * 8); // the mount's device number is the kernel's
    }
}

/// The 32-bit encoding of a device number: 12 bits of major, and 20 bits of
/// minor, of which the low 8 are at the bottom.
fn split_device(rdev: u32) -> (u32, u32) {
    ((rdev >> 8) & 0xfff, (rdev & 0xff) | ((rdev >> 12) & 0xf_ff00))
}

/// `fuse_kstatfs`: space and limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatFs {
    /// Size, in units of `fragment_bytes`.
    pub blocks: u64,
    /// Free.
    pub blocks_free: u64,
    /// Free for those who are not root.
    pub blocks_available: u64,
    /// Inodes.
    pub files: u64,
    /// Inodes that can still be made.
    pub files_free: u64,
    /// Preferred I/O size.
    pub io_bytes: u32,
    /// Longest name, in bytes.
    pub name_bytes_max: u32,
    /// The unit of the block counts.
    pub fragment_bytes: u32,
}

impl StatFs {
    pub(super) fn put(&self, to: &mut Head) {
        to.u64(self.blocks);
        to.u64(self.blocks_free);
        to.u64(self.blocks_available);
        to.u64(self.files);
        to.u64(self.files_free);
        to.u32(self.io_bytes);
        to.u32(self.name_bytes_max);
        to.u32(self.fragment_bytes);
        to.zeroes(7 * 4);
    }
}

/// `fuse_file_lock`: a range and its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileLock {
    /// First byte.
    pub start: u64,
    /// Last byte, inclusive; `i64::MAX` is the end of the file.
    pub end: u64,
    /// `F_RDLCK`, `F_WRLCK`, `F_UNLCK`.
    pub kind: u32,
    /// The holder's process.
    pub pid: u32,
}

impl FileLock {
    pub(super) fn put(&self, to: &mut Head) {
        to.u64(self.start);
        to.u64(self.end);
        to.u32(self.kind);
        to.u32(self.pid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_split_as_the_kernel_joins_them() {
        // new_encode_dev: (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
        for (major, minor) in [(8, 1), (259, 0), (10, 229), (4095, 0xf_ffff), (1, 256)] {
            let rdev = (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12);
            assert_eq!(split_device(rdev), (major, minor));
        }
    }
}
