//! Error numbers as FUSE replies carry them.

use levada_base::HasErrno;

/// A positive `errno` value of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Errno(i32);

macro_rules! errnos {
    ($($(#[$doc:meta])* $name:ident = $value:ident;)*) => {
        impl Errno {
            $($(#[$doc])* pub const $name: Errno = Errno(libc::$value);)*
        }
    };
}

errnos! {
    /// Operation not permitted.
    PERM = EPERM;
    /// No such file or directory.
    NOENT = ENOENT;
    /// Interrupted.
    INTR = EINTR;
    /// Input/output error.
    IO = EIO;
    /// The file handle is not open.
    BADF = EBADF;
    /// Would block: a lock is held, or try again.
    AGAIN = EAGAIN;
    /// Out of memory.
    NOMEM = ENOMEM;
    /// Permission denied.
    ACCES = EACCES;
    /// Busy.
    BUSY = EBUSY;
    /// The name exists already.
    EXIST = EEXIST;
    /// Not on the same file system.
    XDEV = EXDEV;
    /// Too many open files in the system.
    NFILE = ENFILE;
    /// Not a directory.
    NOTDIR = ENOTDIR;
    /// A directory.
    ISDIR = EISDIR;
    /// Invalid argument.
    INVAL = EINVAL;
    /// The file would become too large.
    FBIG = EFBIG;
    /// No space left.
    NOSPC = ENOSPC;
    /// Read-only file system.
    ROFS = EROFS;
    /// Too many links.
    MLINK = EMLINK;
    /// The result does not fit the caller's buffer.
    RANGE = ERANGE;
    /// No locks available.
    NOLCK = ENOLCK;
    /// There is no such connection any more.
    NOTCONN = ENOTCONN;
    /// The name is too long.
    NAMETOOLONG = ENAMETOOLONG;
    /// Not implemented; the kernel does not ask again.
    NOSYS = ENOSYS;
    /// The directory is not empty.
    NOTEMPTY = ENOTEMPTY;
    /// No such attribute, or no data at that offset (`ENXIO` is past the end).
    NODATA = ENODATA;
    /// Past the end of the file (LSEEK).
    NXIO = ENXIO;
    /// The value is too large for its type.
    OVERFLOW = EOVERFLOW;
    /// Not supported on this file.
    OPNOTSUPP = EOPNOTSUPP;
    /// Over quota.
    DQUOT = EDQUOT;
    /// The inode is gone.
    STALE = ESTALE;
    /// Timed out.
    TIMEDOUT = ETIMEDOUT;
    /// Protocol error.
    PROTO = EPROTO;
}

/// The largest error number the kernel accepts in a reply (it refuses the
/// whole message beyond 511).
const ERRNO_MAX: i32 = 511;

impl Errno {
    /// Takes a raw `errno`; anything the kernel would refuse becomes `EIO`.
    #[must_use]
    pub fn from_raw(raw: i32) -> Self {
        if (1..=ERRNO_MAX).contains(&raw) { Errno(raw) } else { Errno::IO }
    }

    /// The positive number.
    #[must_use]
    pub fn raw(self) -> i32 {
        self.0
    }
}

impl<E: HasErrno> From<E> for Errno {
    fn from(error: E) -> Self {
        Errno::from_raw(error.errno())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_kernel_accepts_is_kept() {
        assert_eq!(Errno::from_raw(libc::ENOENT), Errno::NOENT);
        for raw in [i32::MIN, -2, 0, 512, i32::MAX] {
            assert_eq!(Errno::from_raw(raw), Errno::IO);
        }
    }
}
