//! What the kernel lets be done to a connection from outside: `fusectl`, the file system that is mostly mounted at
//! `/sys/fs/fuse/connections`. It is reached here also where it is not.

use rustix::fs::{Mode, OFlags, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use std::fs::File;
use std::io;

/// Whoever writes to this file ends the connection of the mount with that device number: what waits for it fails with
/// `ECONNABORTED`. The file is that connection's, also when the number is another mount's later.
///
/// For who looks after a server that may be killed while one of its threads waits, in a notification, for the kernel, which
/// waits for the server: such a process never ends by itself.
///
/// # Errors
///
/// Those of the system; before Linux 5.2 `ENOSYS`.
pub fn abort_file(device_minor: u32) -> io::Result<File> {
    let fusectl = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&fusectl)?;
    // In no tree, so that nobody meets it.
    let root = fsmount(&fusectl, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
    let file = format!("{device_minor}/abort");
    let opened = openat(&root, file, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    Ok(opened.into())
}
