//! A bell that other threads ring to wake a reactor: an eventfd that the ring polls.
//!
//! Ringing costs a system call only when somebody listens.
#![allow(unsafe_code)] // eventfd(2), and 8 bytes read from and written to it.

use super::fd::poll_fd;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

struct Shared {
    eventfd: OwnedFd,
    /// A listener checks once more after it set this, so no ring between check and sleep is lost.
    listening: AtomicBool,
}

/// The side of other threads.
#[derive(Clone)]
pub(super) struct Bell(Arc<Shared>);

/// The reactor's side.
pub(super) struct Listener {
    shared: Arc<Shared>,
    /// The same eventfd under a second descriptor, which the ring's operations may hold on to.
    eventfd: Rc<OwnedFd>,
}

pub(super) fn new() -> io::Result<(Bell, Listener)> {
    // SAFETY: no memory is involved.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made this descriptor for us.
    let eventfd = unsafe { OwnedFd::from_raw_fd(fd) };
    let ours = Rc::new(eventfd.try_clone()?);
    let shared = Arc::new(Shared { eventfd, listening: AtomicBool::new(false) });
    Ok((Bell(Arc::clone(&shared)), Listener { shared, eventfd: ours }))
}

impl Bell {
    /// Makes the listener look again. What it shall see must have happened before.
    pub(super) fn ring(&self) {
        // Sequentially consistent here and in `until`: either this sees the flag, or the
        // listener's second look sees what happened before this.
        if self.0.listening.swap(false, Ordering::SeqCst) {
            let one = 1u64;
            // SAFETY: writes 8 bytes from a live value. It fails only when the counter is full,
            // and then the listener is awake.
            unsafe { libc::write(self.0.eventfd.as_raw_fd(), (&raw const one).cast(), 8) };
        }
    }
}

impl Listener {
    /// Waits until `ready` gives a value; asks again whenever the bell rings.
    pub(super) async fn until<T>(&self, mut ready: impl FnMut() -> Option<T>) -> T {
        loop {
            if let Some(value) = ready() {
                return value;
            }
            self.shared.listening.store(true, Ordering::SeqCst);
            std::sync::atomic::fence(Ordering::SeqCst);
            if let Some(value) = ready() {
                self.shared.listening.store(false, Ordering::SeqCst);
                return value;
            }
            // A poll takes nothing from the counter, so one that was cancelled steals no ring.
            // It fails only when it is cancelled with its reactor.
            let _ = poll_fd(&self.eventfd, libc::POLLIN).await;
            let mut count = 0u64;
            // SAFETY: reads 8 bytes into a live value; never blocks.
            unsafe { libc::read(self.eventfd.as_raw_fd(), (&raw mut count).cast(), 8) };
        }
    }
}
