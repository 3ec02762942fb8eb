//! System calls that std does not have.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// `struct file_handle` with room for the largest handle (name_to_handle_at(2)).
#[repr(C)]
pub struct Handle {
    bytes: u32,
    kind: i32,
    pub handle: [u8; 128],
}

pub fn handle_of(path: &Path) -> Handle {
    let path = c_path(path);
    let mut handle = Handle { bytes: 128, kind: 0, handle: [0; 128] };
    let mut mount_id = 0i32;
    // SAFETY: a handle with the room it states, and a place for the mount id.
    let status = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            libc::AT_FDCWD,
            path.as_ptr(),
            &raw mut handle,
            &raw mut mount_id,
            0,
        )
    };
    assert_eq!(status, 0, "{}", io::Error::last_os_error());
    handle
}

pub fn open_handle(mount: &Path, handle: &mut Handle) -> io::Result<File> {
    let mount = File::open(mount)?;
    let flags = libc::O_RDONLY;
    // SAFETY: an open descriptor and a handle as the kernel filled it.
    let fd = unsafe {
        libc::syscall(libc::SYS_open_by_handle_at, mount.as_raw_fd(), &raw mut *handle, flags)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor that the call above opened for us.
    Ok(unsafe { File::from_raw_fd(fd as i32) })
}

pub fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

/// Maps the 64 KiB file at `path`, checks that byte 5000 is 1 and makes it 42; in a process of
/// its own: a page fault here would hold this process's memory map while the server, which may
/// need it, is asked for the page.
pub fn write_by_mapping(path: &Path) {
    let path = c_path(path);
    // SAFETY: the child makes system calls only, on memory set up before.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        // SAFETY: as above; the mapping is used within its length.
        let code = unsafe { write_by_mapping_here(&path) };
        // SAFETY: ends the child without running the parent's destructors.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: waits for our own child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
}

/// # Safety
///
/// Safe after fork: no allocation, no locks.
unsafe fn write_by_mapping_here(path: &CString) -> i32 {
    const LEN: usize = 64 << 10;
    // SAFETY: the caller's; every result is checked before it is used.
    unsafe {
        libc::alarm(20);
        let fd = libc::open(path.as_ptr(), libc::O_RDWR);
        if fd < 0 {
            return 1;
        }
        let (protection, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        let map = libc::mmap(std::ptr::null_mut(), LEN, protection, shared, fd, 0);
        if map == libc::MAP_FAILED {
            return 2;
        }
        let bytes = map.cast::<u8>();
        if *bytes.add(5000) != 1 {
            return 3;
        }
        *bytes.add(5000) = 42;
        if libc::msync(map, LEN, libc::MS_SYNC) != 0 {
            return 4;
        }
        if libc::munmap(map, LEN) != 0 || libc::close(fd) != 0 {
            return 5;
        }
        0
    }
}
