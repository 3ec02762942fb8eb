//! A bell that other threads ring to make a task look again.
//!
//! The reactor looks which of its bells were rung wherever it looks at its own ring, however many there are; one that sleeps has itself woken by
//! an eventfd. So ringing costs a system call only when the whole reactor sleeps.
#![allow(unsafe_code)] // eventfd(2), and 8 bytes written to it.

use super::Core;
use super::ring::Watched;
use slab::Slab;
use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::mem::replace;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, mpsc};
use std::task::{Poll, Waker};

/// A thread's sleep, and how others end it.
pub(super) struct Sleep {
    is_asleep: AtomicBool,
    eventfd: OwnedFd,
}

/// An eventfd to which one can write without waiting, by another thread or another process.
pub(super) fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: no memory is involved.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

impl Sleep {
    /// Of somebody who is awake.
    ///
    /// # Errors
    ///
    /// When the system gives no eventfd.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { is_asleep: AtomicBool::new(false), eventfd: eventfd()? })
    }

    /// Says that it is about to sleep. It looks once more after that: either this sees what others did, or they see this.
    pub(super) fn falls_asleep(&self) {
        self.is_asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    pub(super) fn is_awake(&self) {
        self.is_asleep.store(false, Ordering::Relaxed);
    }

    /// Wakes it, if it sleeps. What it shall see has been done.
    pub(super) fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.is_asleep.load(Ordering::Relaxed) && self.is_asleep.swap(false, Ordering::Relaxed) {
            let one = 1u64;
            // SAFETY: writes 8 bytes from a live value. It would fail if the counter were full, which takes more wake-ups than there will be.
            unsafe { libc::write(self.eventfd.as_raw_fd(), (&raw const one).cast(), 8) };
        }
    }

    /// Where it hears that it is woken. Nobody else has it.
    pub(super) fn eventfd(&self) -> &OwnedFd {
        &self.eventfd
    }
}

/// All bells of a reactor.
pub(super) struct Bells {
    /// By number, who waits for it, if anybody does.
    waiting: RefCell<Slab<Option<Waker>>>,
    /// The numbers of those that were rung.
    rung: mpsc::Receiver<usize>,
    /// For new ones.
    rings: Arc<Rings>,
}

/// What they have in common for those who ring them.
struct Rings {
    numbers: mpsc::Sender<usize>,
    sleep: Arc<Sleep>,
}

impl Bells {
    /// Those of a reactor that `sleep` wakes.
    pub(super) fn new(sleep: Arc<Sleep>) -> Self {
        let (numbers, rung) = mpsc::channel();
        Self { waiting: RefCell::default(), rung, rings: Arc::new(Rings { numbers, sleep }) }
    }
}

impl Watched for Bells {
    fn look(&self) -> bool {
        let mut woke = false;
        for number in self.rung.try_iter() {
            // Whose number it was may be gone, and another one have it: who is woken for nothing waits again.
            let waiting = self.waiting.borrow_mut().get_mut(number).and_then(Option::take);
            woke |= waiting.is_some();
            waiting.into_iter().for_each(Waker::wake);
        }
        woke
    }
}

struct Shared {
    /// Since the listener looked the last time.
    is_rung: AtomicBool,
    number: usize,
    rings: Arc<Rings>,
}

/// The side of other threads.
#[derive(Clone)]
pub(super) struct Bell(Arc<Shared>);

/// The reactor's side.
pub(super) struct Listener {
    shared: Arc<Shared>,
    bells: Rc<Bells>,
}

/// A bell for this thread's reactor.
pub(super) fn new() -> io::Result<(Bell, Listener)> {
    let bells = Core::current_ring().bells()?;
    let number = bells.waiting.borrow_mut().insert(None);
    let (is_rung, rings) = (AtomicBool::new(false), Arc::clone(&bells.rings));
    let shared = Arc::new(Shared { is_rung, number, rings });
    Ok((Bell(Arc::clone(&shared)), Listener { shared, bells }))
}

impl Bell {
    /// Makes the listener look again. What it shall see must have happened before.
    pub(super) fn ring(&self) {
        let Shared { is_rung, number, rings } = &*self.0;
        // A swap, also where it was rung already: the listener's then sees what happened before this, too.
        if !is_rung.swap(true, Ordering::AcqRel) {
            // Nobody listens once the reactor is gone.
            let _ = rings.numbers.send(*number);
            rings.sleep.wake();
        }
    }
}

impl Listener {
    /// Waits until `ready` gives a value; asks again whenever the bell rings.
    pub(super) async fn until<T>(&self, mut ready: impl FnMut() -> Option<T>) -> T {
        let Self { shared, bells } = self;
        loop {
            // First, so that what happens from here on makes it look again. A look that finds a ring heard before costs nothing else.
            shared.is_rung.swap(false, Ordering::AcqRel);
            if let Some(value) = ready() {
                return value;
            }
            poll_fn(|cx| {
                if shared.is_rung.load(Ordering::Acquire) {
                    return Poll::Ready(());
                }
                let waker = Some(cx.waker().clone());
                let before = replace(&mut bells.waiting.borrow_mut()[shared.number], waker);
                drop(before);
                Poll::Pending
            })
            .await;
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let waited = self.bells.waiting.borrow_mut().remove(self.shared.number);
        drop(waited);
    }
}
