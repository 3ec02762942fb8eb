//! Numbers of the FUSE ABI (`include/uapi/linux/fuse.h`): opcodes and flags.

use bitflags::bitflags;

/// The protocol's major version (`FUSE_KERNEL_VERSION`).
pub const MAJOR: u32 = 7;

/// The newest minor version whose layouts this codec knows (Linux 6.18).
pub const MINOR: u32 = 45;

/// The oldest minor version accepted: the first with the extended INIT
/// (Linux 5.17).
pub const MINOR_MIN: u32 = 36;

macro_rules! opcodes {
    ($($name:ident = $value:literal,)*) => {
        /// The operations this codec parses (`enum fuse_opcode`).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        #[allow(missing_docs)] // each is named as in the ABI, without FUSE_
        pub enum Opcode {
            $($name = $value,)*
        }

        impl Opcode {
            /// Every known opcode, in ascending order.
            pub const ALL: &[Opcode] = &[$(Opcode::$name,)*];

            /// The opcode with that number, if known.
            #[must_use]
            pub fn from_raw(raw: u32) -> Option<Opcode> {
                match raw {
                    $($value => Some(Opcode::$name),)*
                    _ => None,
                }
            }
        }
    };
}

opcodes! {
    Lookup = 1,
    Forget = 2,
    GetAttr = 3,
    SetAttr = 4,
    ReadLink = 5,
    Symlink = 6,
    MkNod = 8,
    MkDir = 9,
    Unlink = 10,
    RmDir = 11,
    Rename = 12,
    Link = 13,
    Open = 14,
    Read = 15,
    Write = 16,
    StatFs = 17,
    Release = 18,
    Fsync = 20,
    SetXattr = 21,
    GetXattr = 22,
    ListXattr = 23,
    RemoveXattr = 24,
    Flush = 25,
    Init = 26,
    OpenDir = 27,
    ReadDir = 28,
    ReleaseDir = 29,
    FsyncDir = 30,
    GetLk = 31,
    SetLk = 32,
    SetLkW = 33,
    Access = 34,
    Create = 35,
    Interrupt = 36,
    Destroy = 38,
    BatchForget = 42,
    Fallocate = 43,
    ReadDirPlus = 44,
    Rename2 = 45,
    LSeek = 46,
    CopyFileRange = 47,
    SyncFs = 50,
    TmpFile = 51,
    Statx = 52,
    CopyFileRange64 = 53,
}

bitflags! {
    /// What kernel and server can do, exchanged in INIT (`FUSE_...`); bits 32
    /// and up travel in `flags2`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct InitFlags: u64 {
        /// Several reads of one file may be in flight.
        const ASYNC_READ = 1 << 0;
        /// POSIX locks are asked of the server.
        const POSIX_LOCKS = 1 << 1;
        /// O_TRUNC is done by OPEN itself.
        const ATOMIC_O_TRUNC = 1 << 3;
        /// LOOKUP of "." and ".." works, so file handles do.
        const EXPORT_SUPPORT = 1 << 4;
        /// WRITE larger than a page.
        const BIG_WRITES = 1 << 5;
        /// The server applies the umask.
        const DONT_MASK = 1 << 6;
        /// BSD locks are asked of the server.
        const FLOCK_LOCKS = 1 << 10;
        /// Cached pages are dropped when size or mtime is seen to change.
        const AUTO_INVAL_DATA = 1 << 12;
        /// READDIRPLUS exists.
        const DO_READDIRPLUS = 1 << 13;
        /// The kernel chooses between READDIR and READDIRPLUS.
        const READDIRPLUS_AUTO = 1 << 14;
        /// Direct I/O is submitted asynchronously.
        const ASYNC_DIO = 1 << 15;
        /// The kernel keeps dirty pages of buffered writes.
        const WRITEBACK_CACHE = 1 << 16;
        /// `ENOSYS` to OPEN means: never send OPEN.
        const NO_OPEN_SUPPORT = 1 << 17;
        /// LOOKUP and READDIR of one directory may overlap.
        const PARALLEL_DIROPS = 1 << 18;
        /// The server clears set-id bits on write, chown and truncate.
        const HANDLE_KILLPRIV = 1 << 19;
        /// POSIX ACLs are in use.
        const POSIX_ACL = 1 << 20;
        /// Reading the device after an abort gives `ECONNABORTED`.
        const ABORT_ERROR = 1 << 21;
        /// `max_pages` of the INIT reply counts.
        const MAX_PAGES = 1 << 22;
        /// READLINK results are cached.
        const CACHE_SYMLINKS = 1 << 23;
        /// `ENOSYS` to OPENDIR means: never send OPENDIR.
        const NO_OPENDIR_SUPPORT = 1 << 24;
        /// Cached pages are dropped only when told so.
        const EXPLICIT_INVAL_DATA = 1 << 25;
        /// As HANDLE_KILLPRIV, with the rules of the VFS; tells by a flag.
        const HANDLE_KILLPRIV_V2 = 1 << 28;
        /// SETXATTR carries `setxattr_flags` (16 bytes rather than 8).
        const SETXATTR_EXT = 1 << 29;
        /// `flags2` counts.
        const INIT_EXT = 1 << 30;
        /// Security contexts follow CREATE and its like.
        const SECURITY_CTX = 1 << 32;
        /// Supplementary groups follow CREATE and its like.
        const CREATE_SUPP_GROUP = 1 << 34;
        /// Entries can be expired rather than invalidated.
        const HAS_EXPIRE_ONLY = 1 << 35;
        /// Shared mmap works on files opened for direct I/O.
        const DIRECT_IO_ALLOW_MMAP = 1 << 36;
        /// Handles are refused without asking.
        const NO_EXPORT_SUPPORT = 1 << 38;
        /// The kernel can send pending requests again (to a new server).
        const HAS_RESEND = 1 << 39;
        /// The kernel can exchange messages over io_uring.
        const OVER_IO_URING = 1 << 41;
        /// The kernel can time requests out.
        const REQUEST_TIMEOUT = 1 << 42;
        /// Bits this codec has no name for are kept.
        const _ = !0;
    }

    /// How the kernel treats an open file (`FOPEN_...`).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct OpenReplyFlags: u32 {
        /// No page cache for this open file.
        const DIRECT_IO = 1 << 0;
        /// Keep cached pages of earlier opens.
        const KEEP_CACHE = 1 << 1;
        /// No lseek.
        const NONSEEKABLE = 1 << 2;
        /// Cache this directory's entries.
        const CACHE_DIR = 1 << 3;
        /// No file position.
        const STREAM = 1 << 4;
        /// No FLUSH on close.
        const NOFLUSH = 1 << 5;
        /// Direct writes to one inode may overlap.
        const PARALLEL_DIRECT_WRITES = 1 << 6;
    }

    /// Which fields of `fuse_setattr_in` count (`FATTR_...`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) struct SetAttrValid: u32 {
        const MODE = 1 << 0;
        const UID = 1 << 1;
        const GID = 1 << 2;
        const SIZE = 1 << 3;
        const ATIME = 1 << 4;
        const MTIME = 1 << 5;
        const FH = 1 << 6;
        const ATIME_NOW = 1 << 7;
        const MTIME_NOW = 1 << 8;
        const LOCKOWNER = 1 << 9;
        const CTIME = 1 << 10;
        const KILL_SUIDGID = 1 << 11;
    }
}

/// `FUSE_GETATTR_FH`: `fuse_getattr_in.fh` counts.
pub const GETATTR_FH: u32 = 1 << 0;
/// `FUSE_FSYNC_FDATASYNC`: data only.
pub const FSYNC_FDATASYNC: u32 = 1 << 0;
/// `FUSE_WRITE_CACHE`: from the page cache; the file handle is a guess.
pub const WRITE_CACHE: u32 = 1 << 0;
/// `FUSE_WRITE_LOCKOWNER`: `lock_owner` counts.
pub const WRITE_LOCKOWNER: u32 = 1 << 1;
/// `FUSE_WRITE_KILL_SUIDGID`: clear set-id bits.
pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;
/// `FUSE_READ_LOCKOWNER`: `lock_owner` counts.
pub const READ_LOCKOWNER: u32 = 1 << 1;
/// `FUSE_OPEN_KILL_SUIDGID`: clear set-id bits (open with O_TRUNC).
pub const OPEN_KILL_SUIDGID: u32 = 1 << 0;
/// `FUSE_RELEASE_FLUSH`: release flushes too.
pub const RELEASE_FLUSH: u32 = 1 << 0;
/// `FUSE_RELEASE_FLOCK_UNLOCK`: release drops the BSD lock.
pub const RELEASE_FLOCK_UNLOCK: u32 = 1 << 1;
/// `FUSE_SETXATTR_ACL_KILL_SGID`: clear set-group-id with the access control list.
pub const SETXATTR_ACL_KILL_SGID: u32 = 1 << 0;
/// `FUSE_LK_FLOCK`: a BSD lock, not a POSIX one.
pub const LK_FLOCK: u32 = 1 << 0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opcodes_are_their_numbers() {
        for &opcode in Opcode::ALL {
            assert_eq!(Opcode::from_raw(opcode as u32), Some(opcode));
        }
        for unknown in [0, 7, 19, 37, 39, 40, 41, 48, 54, 4096, u32::MAX] {
            assert_eq!(Opcode::from_raw(unknown), None);
        }
    }
}
