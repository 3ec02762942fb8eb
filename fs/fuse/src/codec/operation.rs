//! What a request asks, with its arguments (`fuse_..._in`).

use super::abi::{self, Opcode, SetAttrValid};
use super::attr::{FileLock, Time};
use super::fields::{BadField, Fields};
use super::init::InitRequest;

/// One operation. Names are single path components, without NUL and `/`; their
/// length is not limited here (`ENAMETOOLONG` is the handler's).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation<'a> {
    /// Find `name` in the directory. `.` and `..` come from file handles:
    /// `.` asks for the inode itself, which may not be a directory then.
    Lookup {
        /// What to find.
        name: &'a [u8],
    },
    /// The kernel drops `lookups` references; no reply.
    Forget {
        /// How many.
        lookups: u64,
    },
    /// FORGET for many inodes; no reply.
    BatchForget(ForgetList<'a>),
    /// Attributes.
    GetAttr {
        /// The open file they are asked through.
        fh: Option<u64>,
    },
    /// Changes attributes; replies with them.
    SetAttr(SetAttr),
    /// The target of a symbolic link.
    ReadLink,
    /// Makes a symbolic link.
    Symlink {
        /// Its name.
        name: &'a [u8],
        /// What it points to.
        target: &'a [u8],
    },
    /// Makes a file, FIFO, socket or device.
    MkNod {
        /// Its name.
        name: &'a [u8],
        /// Type and permissions, umask applied (not after `DONT_MASK`).
        mode: u32,
        /// Device number, as the kernel encodes it in 32 bits.
        rdev: u32,
        /// The caller's umask.
        umask: u32,
    },
    /// Makes a directory.
    MkDir {
        /// Its name.
        name: &'a [u8],
        /// Permissions, umask applied (not after `DONT_MASK`).
        mode: u32,
        /// The caller's umask.
        umask: u32,
    },
    /// Removes a name that is not a directory.
    Unlink {
        /// The name.
        name: &'a [u8],
    },
    /// Removes an empty directory.
    RmDir {
        /// Its name.
        name: &'a [u8],
    },
    /// Renames (RENAME and RENAME2).
    Rename {
        /// The old name, in the request's directory.
        name: &'a [u8],
        /// The directory it moves to.
        new_parent: u64,
        /// The new name.
        new_name: &'a [u8],
        /// `RENAME_NOREPLACE`, `RENAME_EXCHANGE`, `RENAME_WHITEOUT`.
        flags: u32,
    },
    /// Adds a name to `inode`, in the request's directory.
    Link {
        /// What the name will mean.
        inode: u64,
        /// The name.
        new_name: &'a [u8],
    },
    /// Opens a file.
    Open(OpenArgs),
    /// Reads data.
    Read(ReadArgs),
    /// Writes data.
    Write(WriteArgs<'a>),
    /// Space and limits.
    StatFs,
    /// The last descriptor of an open file is gone; errors are not seen.
    Release(ReleaseArgs),
    /// Makes a file durable.
    Fsync {
        /// The open file.
        fh: u64,
        /// Only data and what is needed to read it.
        data_only: bool,
    },
    /// Sets an extended attribute.
    SetXattr {
        /// Its name.
        name: &'a [u8],
        /// Its value.
        value: &'a [u8],
        /// `XATTR_CREATE`, `XATTR_REPLACE`.
        flags: u32,
        /// `FUSE_SETXATTR_ACL_KILL_SGID`.
        extra_flags: u32,
    },
    /// Reads an extended attribute.
    GetXattr {
        /// Its name.
        name: &'a [u8],
        /// Room for the value; 0 asks for its size.
        size: u32,
    },
    /// Names of the extended attributes, each with its NUL.
    ListXattr {
        /// Room for the list; 0 asks for its size.
        size: u32,
    },
    /// Removes an extended attribute.
    RemoveXattr {
        /// Its name.
        name: &'a [u8],
    },
    /// A descriptor was closed; its error is what `close` returns.
    Flush {
        /// The open file.
        fh: u64,
        /// Whose POSIX locks go.
        lock_owner: u64,
    },
    /// The first message: versions and features.
    Init(InitRequest),
    /// Opens a directory.
    OpenDir(OpenArgs),
    /// Entries after a cookie.
    ReadDir(ReadArgs),
    /// Entries with attributes after a cookie.
    ReadDirPlus(ReadArgs),
    /// The last descriptor of an open directory is gone.
    ReleaseDir(ReleaseArgs),
    /// Makes a directory durable.
    FsyncDir {
        /// The open directory.
        fh: u64,
        /// As for a file.
        data_only: bool,
    },
    /// Which lock would be in the way.
    GetLk(LockArgs),
    /// Takes or drops a lock, at once or not at all.
    SetLk(LockArgs),
    /// Takes a lock, waits for it.
    SetLkW(LockArgs),
    /// May the caller? (Not sent with `default_permissions`.)
    Access {
        /// `R_OK`, `W_OK`, `X_OK`.
        mask: u32,
    },
    /// Creates and opens a file.
    Create {
        /// Its name.
        name: &'a [u8],
        /// Type and permissions, umask applied (not after `DONT_MASK`).
        mode: u32,
        /// The caller's umask.
        umask: u32,
        /// How it is opened.
        open: OpenArgs,
    },
    /// Stop working on an earlier request; no reply to this one.
    Interrupt {
        /// The earlier request.
        unique: u64,
    },
    /// The file system is unmounted.
    Destroy,
    /// Allocates, zeroes or punches a range.
    Fallocate {
        /// The open file.
        fh: u64,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
        /// `FALLOC_FL_...`.
        mode: u32,
    },
    /// The next data or hole.
    LSeek {
        /// The open file.
        fh: u64,
        /// From where.
        offset: u64,
        /// `SEEK_DATA` or `SEEK_HOLE`.
        whence: u32,
    },
    /// Copies inside the file system; replies with 32-bit bytes copied.
    CopyFileRange(CopyArgs),
    /// The same; replies with 64-bit bytes copied.
    CopyFileRange64(CopyArgs),
    /// Makes everything durable.
    SyncFs,
    /// Attributes with birth time.
    Statx {
        /// The open file they are asked through.
        fh: Option<u64>,
        /// `AT_STATX_...`.
        flags: u32,
        /// `STATX_...`: what is wanted.
        mask: u32,
    },
    /// Creates and opens a file without a name, in the request's directory.
    TmpFile {
        /// Type and permissions, umask applied (not after `DONT_MASK`).
        mode: u32,
        /// The caller's umask.
        umask: u32,
        /// How it is opened.
        open: OpenArgs,
    },
    /// An operation this codec does not know: answer `ENOSYS`.
    Unknown {
        /// Its number.
        opcode: u32,
    },
}

/// Arguments of OPEN and OPENDIR.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenArgs {
    /// `O_...`, without those the kernel handles (`O_CREAT`, `O_EXCL`).
    pub flags: u32,
    /// Clear set-id bits: `O_TRUNC` by a caller without CAP_FSETID.
    pub kill_set_id: bool,
}

/// Arguments of READ, READDIR and READDIRPLUS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadArgs {
    /// The open file or directory.
    pub fh: u64,
    /// First byte, or the cookie after which entries are wanted.
    pub offset: u64,
    /// Most bytes in the reply.
    pub size: u32,
    /// Who reads, for mandatory locks.
    pub lock_owner: Option<u64>,
    /// `O_...` of the open file, as they are now.
    pub flags: u32,
}

/// Arguments of WRITE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteArgs<'a> {
    /// The open file.
    pub fh: u64,
    /// First byte.
    pub offset: u64,
    /// The bytes; they start at [`super::WRITE_DATA_OFFSET`] of the message.
    pub data: &'a [u8],
    /// From the page cache (shared mmap): `fh` may be another open file of
    /// this inode, and the caller is the kernel.
    pub from_cache: bool,
    /// Clear set-id bits.
    pub kill_set_id: bool,
    /// Who writes, for mandatory locks.
    pub lock_owner: Option<u64>,
    /// `O_...` of the open file, as they are now.
    pub flags: u32,
}

/// Arguments of RELEASE and RELEASEDIR.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReleaseArgs {
    /// The open file; it is not used again.
    pub fh: u64,
    /// `O_...` of the open file.
    pub flags: u32,
    /// Do what FLUSH does first.
    pub flush: bool,
    /// Drop the BSD lock of `lock_owner`.
    pub unlock_flock: bool,
    /// Whose locks go.
    pub lock_owner: u64,
}

/// Arguments of GETLK, SETLK and SETLKW.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockArgs {
    /// The open file.
    pub fh: u64,
    /// Whose lock.
    pub owner: u64,
    /// Range and type.
    pub lock: FileLock,
    /// A BSD lock rather than a POSIX one.
    pub flock: bool,
}

/// Arguments of COPY_FILE_RANGE; the source is the request's inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyArgs {
    /// The open source.
    pub fh_in: u64,
    /// First byte there.
    pub offset_in: u64,
    /// The destination.
    pub inode_out: u64,
    /// The open destination.
    pub fh_out: u64,
    /// First byte there.
    pub offset_out: u64,
    /// Bytes.
    pub length: u64,
    /// None defined.
    pub flags: u64,
}

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The server's clock.
    Now,
    /// That one.
    At(Time),
}

/// Arguments of SETATTR: `None` leaves an attribute as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Permissions (the type bits are to be ignored).
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Truncate or extend to that many bytes.
    pub size: Option<u64>,
    /// Last access.
    pub atime: Option<SetTime>,
    /// Last change of the data.
    pub mtime: Option<SetTime>,
    /// Last change of the inode (only with the writeback cache).
    pub ctime: Option<Time>,
    /// The open file it is done through (ftruncate).
    pub fh: Option<u64>,
    /// Who truncates, for mandatory locks.
    pub lock_owner: Option<u64>,
    /// Clear set-id bits: chown or truncate without CAP_FSETID.
    pub kill_set_id: bool,
}

/// The inodes of a BATCH_FORGET.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForgetList<'a> {
    /// Whole `fuse_forget_one`, 16 bytes each.
    bytes: &'a [u8],
}

const FORGET_ONE_BYTES: usize = 16;

impl<'a> ForgetList<'a> {
    /// (inode, dropped references), in the kernel's order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + 'a {
        self.bytes.chunks_exact(FORGET_ONE_BYTES).filter_map(|one| {
            let mut fields = Fields::new(one);
            Some((fields.u64().ok()?, fields.u64().ok()?))
        })
    }
}

impl<'a> Operation<'a> {
    /// Reads the arguments of `opcode`. Bytes after them are ignored.
    pub(super) fn take(opcode: Opcode, arguments: &'a [u8]) -> Result<Self, BadField> {
        let f = &mut Fields::new(arguments);
        Ok(match opcode {
            Opcode::Lookup => Operation::Lookup { name: f.name()? },
            Opcode::Forget => Operation::Forget { lookups: f.u64()? },
            Opcode::BatchForget => {
                let count = f.u32()? as usize;
                f.u32()?;
                let bytes = count.checked_mul(FORGET_ONE_BYTES).ok_or(BadField::Truncated)?;
                Operation::BatchForget(ForgetList { bytes: f.bytes(bytes)? })
            }
            Opcode::GetAttr => {
                let flags = f.u32()?;
                f.u32()?;
                let fh = f.u64()?;
                Operation::GetAttr { fh: (flags & abi::GETATTR_FH != 0).then_some(fh) }
            }
            Opcode::SetAttr => Operation::SetAttr(SetAttr::take(f)?),
            Opcode::ReadLink => Operation::ReadLink,
            Opcode::Symlink => Operation::Symlink { name: f.name()?, target: f.text()? },
            Opcode::MkNod => {
                let (mode, rdev, umask, _) = (f.u32()?, f.u32()?, f.u32()?, f.u32()?);
                Operation::MkNod { name: f.name()?, mode, rdev, umask }
            }
            Opcode::MkDir => {
                let (mode, umask) = (f.u32()?, f.u32()?);
                Operation::MkDir { name: f.name()?, mode, umask }
            }
            Opcode::Unlink => Operation::Unlink { name: f.name()? },
            Opcode::RmDir => Operation::RmDir { name: f.name()? },
            Opcode::Rename => {
                let new_parent = f.u64()?;
                Operation::Rename { name: f.name()?, new_parent, new_name: f.name()?, flags: 0 }
            }
            Opcode::Rename2 => {
                let (new_parent, flags, _) = (f.u64()?, f.u32()?, f.u32()?);
                Operation::Rename { name: f.name()?, new_parent, new_name: f.name()?, flags }
            }
            Opcode::Link => {
                let inode = f.u64()?;
                Operation::Link { inode, new_name: f.name()? }
            }
            Opcode::Open => Operation::Open(OpenArgs::take(f)?),
            Opcode::OpenDir => Operation::OpenDir(OpenArgs::take(f)?),
            Opcode::Read => Operation::Read(ReadArgs::take(f)?),
            Opcode::ReadDir => Operation::ReadDir(ReadArgs::take(f)?),
            Opcode::ReadDirPlus => Operation::ReadDirPlus(ReadArgs::take(f)?),
            Opcode::Write => Operation::Write(WriteArgs::take(f)?),
            Opcode::StatFs => Operation::StatFs,
            Opcode::Release => Operation::Release(ReleaseArgs::take(f)?),
            Opcode::ReleaseDir => Operation::ReleaseDir(ReleaseArgs::take(f)?),
            Opcode::Fsync => {
                let (fh, data_only) = take_fsync(f)?;
                Operation::Fsync { fh, data_only }
            }
            Opcode::FsyncDir => {
                let (fh, data_only) = take_fsync(f)?;
                Operation::FsyncDir { fh, data_only }
            }
            Opcode::SetXattr => {
                // The layout that INIT fixed by SETXATTR_EXT.
                let (size, flags, extra_flags, _) = (f.u32()?, f.u32()?, f.u32()?, f.u32()?);
                let name = f.text()?;
                Operation::SetXattr { name, value: f.bytes(size as usize)?, flags, extra_flags }
            }
            Opcode::GetXattr => {
                let (size, _) = (f.u32()?, f.u32()?);
                Operation::GetXattr { name: f.text()?, size }
            }
            Opcode::ListXattr => {
                let (size, _) = (f.u32()?, f.u32()?);
                Operation::ListXattr { size }
            }
            Opcode::RemoveXattr => Operation::RemoveXattr { name: f.text()? },
            Opcode::Flush => {
                let (fh, _, _, lock_owner) = (f.u64()?, f.u32()?, f.u32()?, f.u64()?);
                Operation::Flush { fh, lock_owner }
            }
            Opcode::Init => Operation::Init(InitRequest::take(f)?),
            Opcode::GetLk => Operation::GetLk(LockArgs::take(f)?),
            Opcode::SetLk => Operation::SetLk(LockArgs::take(f)?),
            Opcode::SetLkW => Operation::SetLkW(LockArgs::take(f)?),
            Opcode::Access => Operation::Access { mask: f.u32()? },
            Opcode::Create => {
                let (mode, umask, open) = take_create(f)?;
                Operation::Create { name: f.name()?, mode, umask, open }
            }
            Opcode::TmpFile => {
                // A name follows, but it is "/": the kernel has none yet.
                let (mode, umask, open) = take_create(f)?;
                Operation::TmpFile { mode, umask, open }
            }
            Opcode::Interrupt => Operation::Interrupt { unique: f.u64()? },
            Opcode::Destroy => Operation::Destroy,
            Opcode::Fallocate => Operation::Fallocate {
                fh: f.u64()?,
                offset: f.u64()?,
                length: f.u64()?,
                mode: f.u32()?,
            },
            Opcode::LSeek => Operation::LSeek { fh: f.u64()?, offset: f.u64()?, whence: f.u32()? },
            Opcode::CopyFileRange => Operation::CopyFileRange(CopyArgs::take(f)?),
            Opcode::CopyFileRange64 => Operation::CopyFileRange64(CopyArgs::take(f)?),
            Opcode::SyncFs => Operation::SyncFs,
            Opcode::Statx => {
                let (getattr_flags, _, fh) = (f.u32()?, f.u32()?, f.u64()?);
                let fh = (getattr_flags & abi::GETATTR_FH != 0).then_some(fh);
                Operation::Statx { fh, flags: f.u32()?, mask: f.u32()? }
            }
        })
    }
}

fn take_fsync(f: &mut Fields<'_>) -> Result<(u64, bool), BadField> {
    Ok((f.u64()?, f.u32()? & abi::FSYNC_FDATASYNC != 0))
}

fn take_create(f: &mut Fields<'_>) -> Result<(u32, u32, OpenArgs), BadField> {
    let (flags, mode, umask, open_flags) = (f.u32()?, f.u32()?, f.u32()?, f.u32()?);
    let kill_set_id = open_flags & abi::OPEN_KILL_SUIDGID != 0;
    Ok((mode, umask, OpenArgs { flags, kill_set_id }))
}

impl OpenArgs {
    fn take(f: &mut Fields<'_>) -> Result<Self, BadField> {
        let (flags, open_flags) = (f.u32()?, f.u32()?);
        Ok(OpenArgs { flags, kill_set_id: open_flags & abi::OPEN_KILL_SUIDGID != 0 })
    }
}

impl ReadArgs {
    fn take(f: &mut Fields<'_>) -> Result<Self, BadField> {
        let (fh, offset, size) = (f.u64()?, f.u64()?, f.u32()?);
        let (read_flags, lock_owner, flags, _) = (f.u32()?, f.u64()?, f.u32()?, f.u32()?);
        let lock_owner = (read_flags & abi::READ_LOCKOWNER != 0).then_some(lock_owner);
        Ok(ReadArgs { fh, offset, size, lock_owner, flags })
    }
}

impl<'a> WriteArgs<'a> {
    fn take(f: &mut Fields<'a>) -> Result<Self, BadField> {
        let (fh, offset, size) = (f.u64()?, f.u64()?, f.u32()?);
        let (write_flags, lock_owner, flags, _) = (f.u32()?, f.u64()?, f.u32()?, f.u32()?);
        Ok(WriteArgs {
            fh,
            offset,
            data: f.bytes(size as usize)?,
            from_cache: write_flags & abi::WRITE_CACHE != 0,
            kill_set_id: write_flags & abi::WRITE_KILL_SUIDGID != 0,
            lock_owner: (write_flags & abi::WRITE_LOCKOWNER != 0).then_some(lock_owner),
            flags,
        })
    }
}

impl ReleaseArgs {
    fn take(f: &mut Fields<'_>) -> Result<Self, BadField> {
        let (fh, flags, release_flags, lock_owner) = (f.u64()?, f.u32()?, f.u32()?, f.u64()?);
        Ok(ReleaseArgs {
            fh,
            flags,
            flush: release_flags & abi::RELEASE_FLUSH != 0,
            unlock_flock: release_flags & abi::RELEASE_FLOCK_UNLOCK != 0,
            lock_owner,
        })
    }
}

impl LockArgs {
    fn take(f: &mut Fields<'_>) -> Result<Self, BadField> {
        let (fh, owner) = (f.u64()?, f.u64()?);
        let lock = FileLock { start: f.u64()?, end: f.u64()?, kind: f.u32()?, pid: f.u32()? };
        Ok(LockArgs { fh, owner, lock, flock: f.u32()? & abi::LK_FLOCK != 0 })
    }
}

impl CopyArgs {
    fn take(f: &mut Fields<'_>) -> Result<Self, BadField> {
        Ok(CopyArgs {
            fh_in: f.u64()?,
            offset_in: f.u64()?,
            inode_out: f.u64()?,
            fh_out: f.u64()?,
            offset_out: f.u64()?,
            length: f.u64()?,
            flags: f.u64()?,
        })
    }
}

impl SetAttr {
    fn take(f: &mut Fields<'_>) -> Result<Self, BadField> {
        let valid = SetAttrValid::from_bits_retain(f.u32()?);
        let has = |flag| valid.contains(flag);
        f.u32()?;
        let (fh, size, lock_owner) = (f.u64()?, f.u64()?, f.u64()?);
        let (atime, mtime, ctime) = (f.u64()?, f.u64()?, f.u64()?);
        let (atime_nanos, mtime_nanos, ctime_nanos) = (f.u32()?, f.u32()?, f.u32()?);
        let (mode, _, uid, gid, _) = (f.u32()?, f.u32()?, f.u32()?, f.u32()?, f.u32()?);
        let set_time = |set, now, secs, nanos| {
            has(set).then(|| {
                if has(now) { SetTime::Now } else { SetTime::At(Time::from_wire(secs, nanos)) }
            })
        };
        Ok(SetAttr {
            mode: has(SetAttrValid::MODE).then_some(mode),
            uid: has(SetAttrValid::UID).then_some(uid),
            gid: has(SetAttrValid::GID).then_some(gid),
            size: has(SetAttrValid::SIZE).then_some(size),
            atime: set_time(SetAttrValid::ATIME, SetAttrValid::ATIME_NOW, atime, atime_nanos),
            mtime: set_time(SetAttrValid::MTIME, SetAttrValid::MTIME_NOW, mtime, mtime_nanos),
            ctime: has(SetAttrValid::CTIME).then(|| Time::from_wire(ctime, ctime_nanos)),
            fh: has(SetAttrValid::FH).then_some(fh),
            lock_owner: has(SetAttrValid::LOCKOWNER).then_some(lock_owner),
            kill_set_id: has(SetAttrValid::KILL_SUIDGID),
        })
    }
}
