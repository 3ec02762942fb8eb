//! Signals as events.
#![allow(unsafe_code)] // signalfd(2) and the signal mask.

use super::fd::Fd;
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// A signal that a daemon obeys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Ctrl-C.
    Interrupt,
    /// The service manager asks to stop.
    Terminate,
    /// The terminal is gone, or: read the configuration again.
    Hangup,
}

/// Receives SIGINT, SIGTERM and SIGHUP instead of their default effect.
pub struct Signals {
    fd: Fd,
}

/// The signals by which a process is told to end, or to look anew.
fn fill(set: &mut MaybeUninit<libc::sigset_t>) {
    // SAFETY: `sigemptyset` initialises the set, which the other call then uses.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for number in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            libc::sigaddset(set.as_mut_ptr(), number);
        }
    }
}

impl Signals {
    /// Blocks these signals in this thread, and in threads it starts from now on, and receives
    /// them here. Make it before other threads start, else those may still take the signal.
    ///
    /// # Errors
    ///
    /// What `signalfd(2)` says.
    pub fn new() -> io::Result<Self> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `fill` initialises the set, which the other calls then use.
        let fd = unsafe {
            fill(&mut set);
            libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
            libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just made this descriptor for us.
        Ok(Self { fd: Fd::new(unsafe { OwnedFd::from_raw_fd(fd) })? })
    }

    /// Gives these signals their default effect in this thread again. One that was sent and not received has it now.
    pub fn release(self) {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `fill` initialises the set, which the other call then uses.
        unsafe {
            fill(&mut set);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), std::ptr::null_mut());
        }
    }

    /// The next signal. Dropping the future loses none: it is taken only when it is returned.
    ///
    /// # Errors
    ///
    /// What `read(2)` says.
    pub async fn recv(&self) -> io::Result<Signal> {
        loop {
            self.fd.readable().await?;
            let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
            let len = size_of::<libc::signalfd_siginfo>();
            // SAFETY: writes at most `len` bytes into a live value of that size; the descriptor does not block.
            let read =
                unsafe { libc::read(self.fd.as_fd().as_raw_fd(), info.as_mut_ptr().cast(), len) };
            if read != len as isize {
                let error = io::Error::last_os_error();
                match error.kind() {
                    // Another task has taken it.
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => continue,
                    _ => return Err(error),
                }
            }
            // SAFETY: the kernel has filled it.
            let number = unsafe { info.assume_init() }.ssi_signo;
            match number as i32 {
                libc::SIGINT => return Ok(Signal::Interrupt),
                libc::SIGTERM => return Ok(Signal::Terminate),
                libc::SIGHUP => return Ok(Signal::Hangup),
                _ => {}
            }
        }
    }
}
