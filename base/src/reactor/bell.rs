//! A bell that other threads ring to make a task look again.
//!
//! The reactor looks whether it was rung wherever it looks at its own ring; one that sleeps has itself woken by an eventfd. So ringing
//! costs a system call only when the whole reactor sleeps.
#![allow(unsafe_code)] // eventfd(2): 8 bytes written to it.

use super::Core;
use super::ring::Watched;
use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::task::{Poll, Waker};

/// One side's sleep, and how the other one ends it.
pub(super) struct Sleep {
    is_asleep: AtomicBool,
    eventfd: Arc<OwnedFd>,
}

impl Sleep {
    /// Of somebody who is awake, and who hears of `eventfd` when he sleeps.
    pub(super) fn new(eventfd: Arc<OwnedFd>) -> Self {
        Self { is_asleep: AtomicBool::new(false), eventfd }
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
            // SAFETY: writes 8 bytes from a live value. It fails only when the counter is full, and then it is awake.
            unsafe { libc::write(self.eventfd.as_raw_fd(), (&raw const one).cast(), 8) };
        }
    }

    /// Where it hears that it is woken.
    pub(super) fn eventfd(&self) -> &OwnedFd {
        &self.eventfd
    }
}

struct Shared {
    /// Since the listener looked the last time.
    is_rung: AtomicBool,
    sleep: Sleep,
}

/// The side of other threads.
#[derive(Clone)]
pub(super) struct Bell(Arc<Shared>);

/// The reactor's side.
pub(super) struct Listener(Rc<Listening>);

struct Listening {
    shared: Arc<Shared>,
    /// Who waits, if it does.
    waiting: RefCell<Option<Waker>>,
}

/// A bell for this thread's reactor.
pub(super) fn new() -> io::Result<(Bell, Listener)> {
    let ring = Core::current_ring();
    let sleep = Sleep::new(ring.bell()?);
    let shared = Arc::new(Shared { is_rung: AtomicBool::new(false), sleep });
    let listening = Rc::new(Listening { shared: Arc::clone(&shared), waiting: RefCell::default() });
    let watched: Weak<dyn Watched> = Rc::downgrade(&listening) as _;
    ring.watch(watched);
    Ok((Bell(shared), Listener(listening)))
}

impl Bell {
    /// Makes the listener look again. What it shall see must have happened before.
    pub(super) fn ring(&self) {
        self.0.is_rung.store(true, Ordering::Release);
        self.0.sleep.wake();
    }
}

impl Listener {
    /// Waits until `ready` gives a value; asks again whenever the bell rings.
    pub(super) async fn until<T>(&self, mut ready: impl FnMut() -> Option<T>) -> T {
        let Listening { shared, waiting } = &*self.0;
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
                *waiting.borrow_mut() = Some(cx.waker().clone());
                Poll::Pending
            })
            .await;
        }
    }
}

impl Watched for Listening {
    fn look(&self) -> bool {
        self.shared.is_rung.load(Ordering::Acquire)
            && self.waiting.take().is_some_and(|waker| {
                waker.wake();
                true
            })
    }

    fn sleeps(&self, sleeps: bool) {
        if sleeps { self.shared.sleep.falls_asleep() } else { self.shared.sleep.is_awake() }
    }
}
