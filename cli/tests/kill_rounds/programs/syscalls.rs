//! System calls that std does not have.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
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

/// A file of a fixed length, mapped shared, to read and to write.
///
/// Its bytes are copied in and out, never borrowed: others change them at any time.
pub struct Mapping {
    start: *mut u8,
    len: usize,
}

impl Mapping {
    pub fn new(file: &File, len: usize) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let (fd, anywhere) = (file.as_raw_fd(), std::ptr::null_mut());
        // SAFETY: an open file, mapped where nothing else is.
        let start = unsafe { libc::mmap(anywhere, len, protection, libc::MAP_SHARED, fd, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { start: start.cast(), len })
    }

    pub fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len, "behind the mapping");
        // SAFETY: within the mapping, which nothing borrows.
        unsafe { self.start.add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    pub fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        // SAFETY: the mapping is as long as the vector, and apart from it.
        unsafe { self.start.copy_to_nonoverlapping(bytes.as_mut_ptr(), self.len) };
        bytes
    }

    /// msync(MS_SYNC) of `len` bytes from `at`, which begins a page.
    pub fn sync(&self, at: usize, len: usize) -> io::Result<()> {
        assert!(at + len <= self.len, "behind the mapping");
        // SAFETY: within the mapping.
        done(unsafe { libc::msync(self.start.add(at).cast(), len, libc::MS_SYNC) })
    }

    /// Gives the pages back; what was changed in them stays with the kernel.
    pub fn forget(&self) -> io::Result<()> {
        // SAFETY: our own mapping; shared pages lose nothing by this.
        done(unsafe { libc::madvise(self.start.cast(), self.len, libc::MADV_DONTNEED) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping, used by nobody after this.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}
