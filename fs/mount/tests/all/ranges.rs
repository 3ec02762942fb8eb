//! System calls on ranges of files.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

fn check(status: i64) -> io::Result<u64> {
    u64::try_from(status).map_err(|_| io::Error::last_os_error())
}

/// fallocate(2).
pub fn fallocate(file: &File, mode: i32, offset: u64, bytes: u64) -> io::Result<()> {
    // SAFETY: an open descriptor.
    let status = unsafe { libc::fallocate(file.as_raw_fd(), mode, offset as i64, bytes as i64) };
    check(status.into()).map(drop)
}

/// lseek(2).
pub fn seek(file: &File, offset: u64, whence: i32) -> io::Result<u64> {
    // SAFETY: an open descriptor.
    check(unsafe { libc::lseek(file.as_raw_fd(), offset as i64, whence) })
}

/// copy_file_range(2).
pub fn copy_range(
    (from, offset): (&File, u64),
    (to, to_offset): (&File, u64),
    bytes: u64,
) -> io::Result<u64> {
    let (mut offset, mut to_offset) = (offset as i64, to_offset as i64);
    let (from, to, bytes) = (from.as_raw_fd(), to.as_raw_fd(), bytes as usize);
    // SAFETY: open descriptors, and offsets that live through the call.
    let copied =
        unsafe { libc::copy_file_range(from, &raw mut offset, to, &raw mut to_offset, bytes, 0) };
    check(copied as i64)
}
