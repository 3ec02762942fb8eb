//! `/dev/fuse`: mounting, receiving requests, sending replies, unmounting.
//!
//! Mounting calls mount(2) itself and so needs root (CAP_SYS_ADMIN); there is
//! no fusermount. One open device is one connection: each read(2) takes one
//! whole request, each writev(2) gives one whole reply.
//!
//! What always holds:
//! - The [`Channel`] (with the transport it is given to) alone keeps the connection alive: when it is dropped, also
//!   by a crash, every waiting and later call on the mount fails with
//!   `ENOTCONN` instead of hanging.
//! - [`FuseMount`] unmounts what it mounted and nothing else.
//!
//! After a crash the dead mount stays in the tree; mounting there again
//! detaches it first.
#![allow(unsafe_code)] // mount, umount2, ioctl and poll have no safe interface in std

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::mount_table::{Mounted, top_mount_at};

const DEVICE: &str = "/dev/fuse";
/// The type that the mount table shows.
pub const FS_TYPE: &str = "fuse.levada";

/// What is mounted, and so what it is mounted on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Root {
    /// A tree, on a directory.
    #[default]
    Directory,
    /// One regular file, on a regular file.
    File,
}

/// How a mount is made.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// What its root is.
    pub root: Root,
    /// What `mount` and `df` show as the source.
    pub source: String,
    /// Other users than root may enter.
    pub allow_other: bool,
    /// The kernel checks modes and owners.
    pub default_permissions: bool,
    /// The largest READ in bytes; as `Limits::max_write_bytes`.
    pub max_read_bytes: u32,
    /// Nothing can be changed.
    pub read_only: bool,
    /// Set-id bits have no effect.
    pub no_set_id: bool,
    /// Device files cannot be opened.
    pub no_devices: bool,
}

impl Default for MountOptions {
    fn default() -> Self {
        MountOptions {
            root: Root::Directory,
            source: "levada".into(),
            allow_other: true,
            default_permissions: true,
            max_read_bytes: 1 << 20,
            read_only: false,
            no_set_id: false,
            no_devices: false,
        }
    }
}

/// Why a file system could not be mounted or unmounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// `/dev/fuse` cannot be opened: no `fuse` module, or not root.
    #[error("{DEVICE} cannot be opened")]
    Device(#[source] io::Error),
    /// The mount point does not exist or cannot be looked at.
    #[error("{target:?} cannot be used as a mount point")]
    Target {
        /// The mount point.
        target: PathBuf,
        /// What is wrong with it.
        #[source]
        source: io::Error,
    },
    /// The mount point is not a directory.
    #[error("{target:?} is not a directory")]
    NotADirectory {
        /// The mount point.
        target: PathBuf,
    },
    /// The mount point of a file is none.
    #[error("{target:?} is not a regular file")]
    NotAFile {
        /// The mount point.
        target: PathBuf,
    },
    /// The source contains a comma or NUL, or the path a NUL.
    #[error("{text:?} cannot be passed to mount(2)")]
    Text {
        /// The offending text.
        text: String,
    },
    /// mount(2) refused.
    #[error("mounting on {target:?} failed")]
    Mount {
        /// The mount point.
        target: PathBuf,
        /// Its error.
        #[source]
        source: io::Error,
    },
    /// umount2(2) refused.
    #[error("unmounting {target:?} failed")]
    Unmount {
        /// The mount point.
        target: PathBuf,
        /// Its error.
        #[source]
        source: io::Error,
    },
    /// Programs use it.
    #[error("{target:?} is in use")]
    Busy {
        /// The mount point.
        target: PathBuf,
    },
    /// No mount of ours is there.
    #[error("{target:?} is not a mount of Levada")]
    NotMounted {
        /// The directory.
        target: PathBuf,
    },
    /// The mount table cannot be read.
    #[error("the mount table cannot be read")]
    Table(#[source] io::Error),
}

/// How an unmount ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmounted {
    /// Nothing used it; it is gone.
    Clean,
    /// It was in use: gone from the tree, alive until the last user closes.
    Detached,
    /// Somebody else had unmounted it.
    Already,
}

/// A mount in the tree; unmounts when dropped.
#[derive(Debug)]
pub struct FuseMount {
    target: PathBuf,
    /// `None` once unmounted.
    identity: Option<Identity>,
}

/// Tells this mount from one that replaced it: the kernel gives the numbers of
/// the mount table to the next mount, the unique one never again.
#[derive(Debug, PartialEq, Eq)]
struct Identity {
    mounted: Mounted,
    /// `None` before Linux 6.8.
    unique_id: Option<u64>,
}

impl Identity {
    fn of_top_mount_at(target: &Path) -> io::Result<Option<Identity>> {
        let mounted = top_mount_at(target)?;
        mounted
            .map(|mounted| Ok(Identity { mounted, unique_id: unique_mount_id(target)? }))
            .transpose()
    }
}

impl FuseMount {
    /// Mounts on `target`, and detaches a dead mount of ours there first.
    ///
    /// The kernel queues INIT at once; until a transport serves the channel,
    /// every access to the mount waits.
    ///
    /// # Errors
    ///
    /// Any [`MountError`] but `Unmount`, unless a dead mount cannot be removed.
    pub fn new(target: &Path, options: &MountOptions) -> Result<(FuseMount, Channel), MountError> {
        let target = std::path::absolute(target)
            .map_err(|source| MountError::Target { target: target.into(), source })?;
        detach_dead(&target)?;
        let at = |source| MountError::Target { target: target.clone(), source };
        let target = target.canonicalize().map_err(at)?;
        match options.root {
            Root::Directory if !target.is_dir() => {
                return Err(MountError::NotADirectory { target });
            }
            Root::File if !target.is_file() => return Err(MountError::NotAFile { target }),
            Root::Directory | Root::File => {}
        }

        let device = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open(DEVICE)
            .map_err(MountError::Device)?;
        options.mount(&target, &device)?;
        // From here on, a failure must not leave the mount behind.
        let identity = match Identity::of_top_mount_at(&target) {
            Ok(Some(identity)) => identity,
            found => {
                let _ = umount2(&target, libc::MNT_DETACH);
                let gone = || io::Error::from(io::ErrorKind::NotFound);
                return Err(MountError::Table(found.err().unwrap_or_else(gone)));
            }
        };
        Ok((FuseMount { target, identity: Some(identity) }, Channel { device }))
    }

    /// Where it is mounted.
    #[must_use]
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// The device number of its files, by which its users are known also when it has left the
    /// tree. `None` once unmounted.
    #[must_use]
    pub fn device(&self) -> Option<(u32, u32)> {
        let mounted = &self.identity.as_ref()?.mounted;
        Some((mounted.device_major, mounted.device_minor))
    }

    /// Lets the kernel read `bytes` ahead of a sequential reader. Its default
    /// of 128 KiB would keep requests small whatever INIT agreed on.
    ///
    /// # Errors
    ///
    /// When sysfs is not there or not writable; the mount works, slower.
    pub fn set_read_ahead(&self, bytes: u32) -> io::Result<()> {
        let Some(Identity { mounted, .. }) = &self.identity else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        let (device_major, device_minor) = (mounted.device_major, mounted.device_minor);
        let setting = format!("/sys/class/bdi/{device_major}:{device_minor}/read_ahead_kb");
        std::fs::write(setting, (bytes / 1024).to_string())
    }

    /// Unmounts. The transport must still be serving: the kernel writes back
    /// what shared mappings changed.
    ///
    /// # Errors
    ///
    /// [`MountError::Unmount`] when the mount could not even be detached.
    pub fn unmount(mut self) -> Result<Unmounted, MountError> {
        self.unmount_once()
    }

    fn unmount_once(&mut self) -> Result<Unmounted, MountError> {
        let Some(identity) = self.identity.take() else {
            return Ok(Unmounted::Already);
        };
        let there = Identity::of_top_mount_at(&self.target).map_err(MountError::Table)?;
        if there != Some(identity) {
            return Ok(Unmounted::Already);
        }
        unmount_or_detach(&self.target)
    }

    /// Cuts the connection and detaches the mount: every waiting call fails
    /// with `ECONNABORTED` or `ENOTCONN`. For a server that no longer answers.
    ///
    /// # Errors
    ///
    /// As [`FuseMount::unmount`].
    pub fn abort(mut self) -> Result<(), MountError> {
        let there = Identity::of_top_mount_at(&self.target).map_err(MountError::Table)?;
        if self.identity.take() != there {
            return Ok(());
        }
        umount2(&self.target, libc::MNT_FORCE | libc::MNT_DETACH)
            .map_err(|source| MountError::Unmount { target: self.target.clone(), source })
    }
}

impl Drop for FuseMount {
    fn drop(&mut self) {
        if let Err(error) = self.unmount_once() {
            tracing::error!(%error, "a mount stays behind");
        }
    }
}

impl MountOptions {
    fn mount(&self, target: &Path, device: &File) -> Result<(), MountError> {
        let bad_text = |text: &str| MountError::Text { text: text.into() };
        let source = CString::new(self.source.as_str()).map_err(|_| bad_text(&self.source))?;
        let path = CString::new(target.as_os_str().as_bytes())
            .map_err(|_| bad_text(&target.to_string_lossy()))?;
        let fs_type = CString::new(FS_TYPE).expect("no NUL in a literal");
        let data = CString::new(self.data(device)).expect("no NUL in what we wrote");

        let mut flags = 0;
        for (wanted, flag) in [
            (self.read_only, libc::MS_RDONLY),
            (self.no_set_id, libc::MS_NOSUID),
            (self.no_devices, libc::MS_NODEV),
        ] {
            if wanted {
                flags |= flag;
            }
        }
        // SAFETY: four NUL-terminated strings that outlive the call.
        let status = unsafe {
            libc::mount(
                source.as_ptr(),
                path.as_ptr(),
                fs_type.as_ptr(),
                flags,
                data.as_ptr().cast(),
            )
        };
        check(status).map_err(|source| MountError::Mount { target: target.into(), source })
    }

    /// The options of the fuse file system (Documentation/filesystems/fuse).
    fn data(&self, device: &File) -> String {
        let fd = device.as_raw_fd();
        // The type counts; permissions are those that GETATTR tells.
        let root_mode = match self.root {
            Root::Directory => "40755",
            Root::File => "100600",
        };
        let mut data = format!("fd={fd},rootmode={root_mode},user_id=0,group_id=0");
        data += &format!(",max_read={}", self.max_read_bytes);
        if self.allow_other {
            data += ",allow_other";
        }
        if self.default_permissions {
            data += ",default_permissions";
        }
        data
    }
}

/// Removes a mount of ours whose server is gone, so that what it was mounted on can be
/// looked at again.
///
/// # Errors
///
/// [`MountError::Table`], [`MountError::Unmount`], [`MountError::Target`].
pub fn clear_dead(target: &Path) -> Result<(), MountError> {
    let target = std::path::absolute(target)
        .map_err(|source| MountError::Target { target: target.into(), source })?;
    detach_dead(&target)
}

fn detach_dead(target: &Path) -> Result<(), MountError> {
    while let Some(mounted) = top_mount_at(target).map_err(MountError::Table)? {
        let dead = matches!(
            std::fs::metadata(target), // asks the file system, so only for ours
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTCONN | libc::ECONNABORTED))
        );
        if mounted.fs_type != FS_TYPE || !dead {
            break;
        }
        tracing::info!(?target, "detaching a mount whose server is gone");
        umount2(target, libc::MNT_DETACH)
            .map_err(|source| MountError::Unmount { target: target.into(), source })?;
    }
    Ok(())
}

/// Unmounts what some process of ours mounted on `dir`. When it is in use: with `lazy`, takes it
/// out of the tree, and it goes with its last user; without, refuses. Asks the mount's server
/// nothing before the unmount itself.
///
/// # Errors
///
/// [`MountError::NotMounted`], [`MountError::Unmount`], [`MountError::Target`] for a path that
/// leads nowhere.
pub fn unmount(dir: &Path, lazy: bool) -> Result<(), MountError> {
    let target = place(dir)?;
    let mounted = top_mount_at(&target).map_err(MountError::Table)?;
    if mounted.is_none_or(|mounted| mounted.fs_type != FS_TYPE) {
        return Err(MountError::NotMounted { target });
    }
    if lazy {
        return unmount_or_detach(&target).map(drop);
    }
    umount2(&target, 0).map_err(|source| match source.raw_os_error() {
        Some(libc::EBUSY) => MountError::Busy { target },
        _ => MountError::Unmount { target, source },
    })
}

/// The directory `dir` as the mount table writes it. Of the last part only a symbolic link is followed:
/// to look at more would ask a server that may be gone.
///
/// # Errors
///
/// [`MountError::Target`] when the way there does not exist.
pub fn place(dir: &Path) -> Result<PathBuf, MountError> {
    let at = |source| MountError::Target { target: dir.into(), source };
    let absolute = std::path::absolute(dir).map_err(at)?;
    match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) if std::fs::read_link(&absolute).is_err() => {
            Ok(parent.canonicalize().map_err(at)?.join(name))
        }
        _ => absolute.canonicalize().map_err(at),
    }
}

/// The type of the file system that is mounted on `place`, if one is. Asks no file system, so it
/// cannot hang on a dead one.
///
/// # Errors
///
/// When the mount table cannot be read.
pub fn mounted_at(place: &Path) -> io::Result<Option<String>> {
    Ok(top_mount_at(place)?.map(|mounted| mounted.fs_type))
}

fn unmount_or_detach(target: &Path) -> Result<Unmounted, MountError> {
    let result = match umount2(target, 0) {
        Ok(()) => Ok(Unmounted::Clean),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
            umount2(target, libc::MNT_DETACH).map(|()| Unmounted::Detached)
        }
        Err(error) => Err(error),
    };
    result.map_err(|source| MountError::Unmount { target: target.into(), source })
}

fn umount2(target: &Path, flags: libc::c_int) -> io::Result<()> {
    let path = CString::new(target.as_os_str().as_bytes())?;
    // SAFETY: a NUL-terminated string that outlives the call.
    check(unsafe { libc::umount2(path.as_ptr(), flags | libc::UMOUNT_NOFOLLOW) })
}

/// The number of the mount at `target`, unique until the machine restarts.
/// Asks the kernel only, so it does not wait for the mount's server.
fn unique_mount_id(target: &Path) -> io::Result<Option<u64>> {
    const STATX_MNT_ID_UNIQUE: u32 = 0x4000;
    let path = CString::new(target.as_os_str().as_bytes())?;
    let flags = libc::AT_STATX_DONT_SYNC | libc::AT_NO_AUTOMOUNT;
    let mut statx = std::mem::MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: a NUL-terminated path, and room for the answer.
    check(unsafe {
        libc::statx(libc::AT_FDCWD, path.as_ptr(), flags, STATX_MNT_ID_UNIQUE, statx.as_mut_ptr())
    })?;
    // SAFETY: plain integers, all zero before the call.
    let statx = unsafe { statx.assume_init() };
    Ok((statx.stx_mask & STATX_MNT_ID_UNIQUE != 0).then_some(statx.stx_mnt_id))
}

fn check(status: libc::c_int) -> io::Result<()> {
    if status < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// What a read of the device gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// One request, of that many bytes.
    Message {
        /// Its length.
        bytes: usize,
    },
    /// No request is waiting.
    Again,
    /// The request was withdrawn while it was read; read again.
    Retry,
    /// The mount is gone; nothing more will come.
    Unmounted,
}

impl Received {
    /// What the outcome of a read means, however it was issued.
    ///
    /// # Errors
    ///
    /// Errors that say nothing about a request or the mount are returned.
    pub fn from_read(outcome: io::Result<usize>) -> io::Result<Received> {
        let error = match outcome {
            // End of file does not occur on the device while it is mounted.
            Ok(0) => return Ok(Received::Unmounted),
            Ok(bytes) => return Ok(Received::Message { bytes }),
            Err(error) => error,
        };
        match error.raw_os_error() {
            Some(libc::EAGAIN) => Ok(Received::Again),
            Some(libc::ENOENT | libc::EINTR) => Ok(Received::Retry),
            Some(libc::ENODEV | libc::ECONNABORTED) => Ok(Received::Unmounted),
            _ => Err(error),
        }
    }
}

/// What became of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// The kernel has it.
    Delivered,
    /// The caller was killed or the mount is gone: nobody waits for it.
    Unwanted,
}

impl Sent {
    /// What the outcome of a write means, however it was issued.
    ///
    /// # Errors
    ///
    /// Other errors; `EINVAL` says that the reply does not fit its request.
    pub fn from_write(outcome: io::Result<usize>) -> io::Result<Sent> {
        match outcome {
            Ok(_) => Ok(Sent::Delivered),
            Err(error) => match error.raw_os_error() {
                Some(libc::ENOENT | libc::ENODEV | libc::ECONNABORTED | libc::EPERM) => {
                    Ok(Sent::Unwanted)
                }
                _ => Err(error),
            },
        }
    }
}

/// A connection to the kernel; non-blocking.
#[derive(Debug)]
pub struct Channel {
    device: File,
}

impl Channel {
    /// Takes one request, if one waits. `room` is a
    /// [`super::message_buffer`].
    ///
    /// # Errors
    ///
    /// As [`Received::from_read`]; `EINVAL` when `room` is too small.
    pub fn receive(&self, room: &mut [u8]) -> io::Result<Received> {
        Received::from_read((&self.device).read(room))
    }

    /// Sends one reply, whole.
    ///
    /// # Errors
    ///
    /// As [`Sent::from_write`].
    pub fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<Sent> {
        Sent::from_write((&self.device).write_vectored(slices))
    }

    /// Waits until a request may be there; false when `timeout` passed first.
    ///
    /// # Errors
    ///
    /// Those of poll(2).
    pub fn wait_readable(&self, timeout: Option<Duration>) -> io::Result<bool> {
        let timeout_ms = timeout.map_or(-1, |timeout| {
            libc::c_int::try_from(timeout.as_millis()).unwrap_or(libc::c_int::MAX)
        });
        let mut poll =
            libc::pollfd { fd: self.device.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid pollfd, and the count says one.
        match check(unsafe { libc::poll(&raw mut poll, 1, timeout_ms) }) {
            Ok(()) => Ok(poll.revents != 0),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Another descriptor of the same device, to wait on.
    pub(super) fn duplicate(&self) -> io::Result<OwnedFd> {
        Ok(self.device.try_clone()?.into())
    }

    /// A further device on the same connection, for another core: requests go
    /// to whichever reads first, and a reply must leave by the device its
    /// request came from.
    ///
    /// # Errors
    ///
    /// Those of opening `/dev/fuse` and of `FUSE_DEV_IOC_CLONE`.
    pub fn for_another_core(&self) -> io::Result<Channel> {
        const FUSE_DEV_IOC_CLONE: libc::Ioctl = 0x8004_e500; // _IOR(229, 0, u32)
        let device = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open(DEVICE)?;
        let mut connection = self.device.as_raw_fd().cast_unsigned();
        // SAFETY: the ioctl reads one u32, the number of an open descriptor.
        let status =
            unsafe { libc::ioctl(device.as_raw_fd(), FUSE_DEV_IOC_CLONE, &raw mut connection) };
        check(status)?;
        Ok(Channel { device })
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

impl From<Channel> for OwnedFd {
    fn from(channel: Channel) -> OwnedFd {
        channel.device.into()
    }
}

impl From<OwnedFd> for Channel {
    /// Takes over a connection that another process kept.
    fn from(device: OwnedFd) -> Channel {
        Channel { device: device.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_are_told_apart() {
        let raw = io::Error::from_raw_os_error;
        let read = |error| Received::from_read(Err(raw(error))).ok();
        assert_eq!(read(libc::EAGAIN), Some(Received::Again));
        assert_eq!(read(libc::ENOENT), Some(Received::Retry));
        assert_eq!(read(libc::ENODEV), Some(Received::Unmounted));
        assert_eq!(read(libc::EINVAL), None);
        assert!(matches!(Sent::from_write(Err(raw(libc::ENOENT))), Ok(Sent::Unwanted)));
        assert!(Sent::from_write(Err(raw(libc::EINVAL))).is_err());
    }

    #[test]
    fn a_tree_is_not_mounted_on_a_file_nor_a_file_on_a_directory() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = FuseMount::new(file.path(), &MountOptions::default()).unwrap_err();
        assert!(matches!(error, MountError::NotADirectory { .. }), "{error}");
        let dir = tempfile::tempdir().unwrap();
        let options = MountOptions { root: Root::File, ..MountOptions::default() };
        let error = FuseMount::new(dir.path(), &options).unwrap_err();
        assert!(matches!(error, MountError::NotAFile { .. }), "{error}");
    }
}
