//! Descriptors that the reactor looks at itself while it polls, and leaves to the ring when it goes to sleep.
//!
//! To wait through the ring means to submit a poll, to be told of work, to enter the kernel for it and to reap: two more
//! calls than to ask poll(2) between two yields. It is worth it where answers take microseconds, and only one or two
//! descriptors are watched at a time: each look asks for all of them.
//!
//! What always holds: who watches is woken when its descriptor is ready, and before the reactor sleeps.
#![allow(unsafe_code)] // poll(2) has no safe interface in std

use super::Core;
use super::fd::poll_fd;
use super::ring::Ring;
use slab::Slab;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;
use std::task::{Poll, Waker};

enum State {
    Watching(Waker),
    Ready,
    /// The reactor is about to sleep.
    GivenUp,
}

/// See the module.
#[derive(Default)]
pub(super) struct Watched(RefCell<Slab<(Rc<OwnedFd>, State)>>);

impl Watched {
    pub(super) fn is_empty(&self) -> bool {
        self.0.borrow().is_empty()
    }

    /// Wakes whoever can read; false when nobody can.
    pub(super) fn look(&self) -> bool {
        let mut watched = self.0.borrow_mut();
        if watched.is_empty() {
            return false;
        }
        let mut polled: SmallVec<[libc::pollfd; 2]> = watched
            .iter()
            .map(|(_, (fd, _))| libc::pollfd {
                fd: fd.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            })
            .collect();
        // SAFETY: so many structures, of open descriptors.
        let ready = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, 0) };
        if ready <= 0 {
            return false;
        }
        let ready = polled.iter().map(|polled| polled.revents != 0);
        let mut wakers: SmallVec<[Waker; 2]> = SmallVec::new();
        for ((_, (_, state)), _) in watched.iter_mut().zip(ready).filter(|(_, ready)| *ready) {
            if let State::Watching(waker) = std::mem::replace(state, State::Ready) {
                wakers.push(waker);
            }
        }
        drop(watched);
        let any = !wakers.is_empty();
        wakers.into_iter().for_each(Waker::wake);
        any
    }

    /// Wakes whoever still watches, so that it asks the ring; false when nobody does.
    pub(super) fn give_up(&self) -> bool {
        let mut wakers: SmallVec<[Waker; 2]> = SmallVec::new();
        for (_, (_, state)) in self.0.borrow_mut().iter_mut() {
            if let State::Watching(_) = state
                && let State::Watching(waker) = std::mem::replace(state, State::GivenUp)
            {
                wakers.push(waker);
            }
        }
        let any = !wakers.is_empty();
        wakers.into_iter().for_each(Waker::wake);
        any
    }
}

/// Stops watching also when the future is dropped.
struct Watch {
    ring: Rc<Ring>,
    key: usize,
}

impl Drop for Watch {
    fn drop(&mut self) {
        let gone = self.ring.watched.0.borrow_mut().remove(self.key);
        drop(gone);
    }
}

/// Completes when `fd` can be read; looked at while the reactor polls, and left to the ring before it sleeps.
pub(super) async fn readable(fd: &Rc<OwnedFd>) -> io::Result<()> {
    let ring = Core::current_ring();
    let mut watch: Option<Watch> = None;
    let ready = poll_fn(|cx| {
        let mut watched = ring.watched.0.borrow_mut();
        let key = match &watch {
            Some(watch) => watch.key,
            None => {
                let key = watched.insert((Rc::clone(fd), State::Watching(cx.waker().clone())));
                watch = Some(Watch { ring: Rc::clone(&ring), key });
                return Poll::Pending;
            }
        };
        match &mut watched[key].1 {
            State::Ready => Poll::Ready(true),
            State::GivenUp => Poll::Ready(false),
            State::Watching(waker) => {
                waker.clone_from(cx.waker());
                Poll::Pending
            }
        }
    })
    .await;
    drop(watch);
    if ready { Ok(()) } else { poll_fd(fd, libc::POLLIN).await.0.map(drop) }
}
