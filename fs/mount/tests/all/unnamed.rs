//! Files without a name (O_TMPFILE).

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// open(2) with O_TMPFILE and `flags`.
pub fn unnamed(dir: &Path, mode: u32, flags: i32) -> File {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(mode).custom_flags(libc::O_TMPFILE | flags);
    options.open(dir).unwrap()
}

/// The way to an open file that open(2) advises.
pub fn in_proc(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// linkat(2) by that way.
pub fn name_by_proc(file: &File, path: &Path) -> io::Result<()> {
    let from = CString::new(in_proc(file)).unwrap();
    let to = CString::new(path.as_os_str().as_bytes()).unwrap();
    let (here, follow) = (libc::AT_FDCWD, libc::AT_SYMLINK_FOLLOW);
    // SAFETY: two NUL-terminated paths.
    let status = unsafe { libc::linkat(here, from.as_ptr(), here, to.as_ptr(), follow) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
