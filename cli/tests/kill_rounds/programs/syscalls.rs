//! System calls that std does not have.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

fn done(status: i32) -> io::Result<()> {
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// truncate(2): by its name, without opening it.
pub fn truncate(path: &Path, len: usize) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: a string that ends with a zero and lives over the call.
    done(unsafe { libc::truncate(path.as_ptr(), len as libc::off_t) })
}
