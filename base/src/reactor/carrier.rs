//! Sockets that other threads carry for a reactor.
//!
//! Most of what a storage server does for the network is done within the kernel: bytes are copied to sockets and from them, and made into
//! segments. A reactor whose core has something better to do gives its sockets to carriers, threads with an io_uring of their own. A read
//! or a write of such a socket is submitted there instead of here; all else stays as it is: who waits, what is kept, how it ends.
//!
//! What always holds:
//! - Memory stays the reactor's. A carrier hands addresses to the kernel and never looks at them.
//! - Operations of one socket in one direction are carried out in their order, since each socket has one carrier for all of its life.
//! - [`Carrier::shut_down`] returns when neither carrier nor kernel has anything under way. It blocks, but for no longer than it takes to
//!   cancel operations of sockets.
//! - Who waits for nothing sleeps: either side polls for a moment, and then has itself woken by an eventfd.
#![allow(unsafe_code)] // io_uring on another thread.

use super::bell::Sleep;
use super::beside::without_signals;
use super::operations::{Op, Operations, Submitter};
use super::ring::{SPIN, Watched, enter_flags, uring};
use io_uring::{IoUring, opcode, squeue, types};
use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Instant;

/// Submissions that fit one turn of a carrier.
const SUBMISSIONS: u32 = 256;
/// Marks completions that nobody waits for: those of cancellations, and of the bell.
const NOBODY: u64 = u64::MAX;
const BELL: u64 = u64::MAX - 1;

/// What a reactor wants of a carrier.
enum Order {
    /// To be submitted. What it points to stays where it is until its completion has been told.
    Submit(Box<squeue::Entry>),
    Cancel(u64),
    /// Nothing more comes.
    End,
}

// SAFETY: an entry is plain numbers. Its addresses are used by the kernel alone, and what they point to is kept by who sends it.
unsafe impl Send for Order {}

/// Wakes a reactor when this goes, and so does its carrier.
struct Woken(Arc<Sleep>);

impl Drop for Woken {
    fn drop(&mut self) {
        self.0.wake();
    }
}

/// A carrier, as its reactor has it.
pub(super) struct Carrier {
    operations: Operations,
    orders: mpsc::Sender<Order>,
    results: mpsc::Receiver<(usize, i32)>,
    /// That of its thread.
    theirs: Arc<Sleep>,
    thread: RefCell<Option<JoinHandle<()>>>,
    is_closed: Cell<bool>,
}

impl Carrier {
    /// Starts a carrier for a reactor that `reactor` wakes.
    pub fn start(number: usize, reactor: Arc<Sleep>) -> io::Result<Rc<Self>> {
        let (orders, received) = mpsc::channel();
        let (told, results) = mpsc::channel();
        let theirs = Arc::new(Sleep::new()?);
        let (started, is_started) = mpsc::channel();
        let thread = {
            let mine = Arc::clone(&theirs);
            let carry = move || {
                // A ring belongs to the thread that submits to it.
                let uring = match uring(SUBMISSIONS) {
                    Ok(uring) => uring,
                    Err(error) => return drop(started.send(Err(error))),
                };
                drop(started.send(Ok(())));
                let _told_at_the_end = Woken(Arc::clone(&reactor));
                let carrying =
                    Carrying { uring, orders: received, told, mine, reactor, in_flight: 0 };
                carrying.run();
            };
            let named = std::thread::Builder::new().name(format!("carrier-{number}"));
            without_signals(|| named.spawn(carry))?
        };
        is_started.recv().map_err(|_| io::Error::other("a carrier has not started"))??;
        Ok(Rc::new(Self {
            operations: Operations::default(),
            orders,
            results,
            theirs,
            thread: RefCell::new(Some(thread)),
            is_closed: Cell::new(false),
        }))
    }

    /// As [`super::ring::Ring::submit`].
    ///
    /// # Safety
    ///
    /// As there.
    pub unsafe fn submit<T: 'static>(
        self: &Rc<Self>,
        kept: T,
        entry: impl FnOnce(&mut T) -> squeue::Entry,
    ) -> Op<T> {
        if self.is_closed.get() {
            return Op::of(Rc::clone(self) as _, self.operations.refuse(kept));
        }
        let (key, entry) = self.operations.begin(kept, entry);
        self.order(Order::Submit(Box::new(entry)));
        Op::of(Rc::clone(self) as _, key)
    }

    fn order(&self, order: Order) {
        // It ends only when it is told to.
        assert!(self.orders.send(order).is_ok(), "a carrier has died");
        self.theirs.wake();
    }

    /// Takes what has been completed. True: something was.
    fn take_results(&self) -> bool {
        let mut has_come = false;
        loop {
            match self.results.try_recv() {
                Ok((key, result)) => self.operations.complete(key, result),
                Err(mpsc::TryRecvError::Empty) => return has_come,
                Err(mpsc::TryRecvError::Disconnected) => {
                    assert!(self.is_closed.get() || std::thread::panicking(), "a carrier has died");
                    return has_come;
                }
            }
            has_come = true;
        }
    }

    /// Cancels every operation, and returns when the kernel is done with all of them.
    pub fn shut_down(&self) {
        if self.is_closed.replace(true) {
            return;
        }
        for key in self.operations.waiting() {
            self.order(Order::Cancel(key as u64));
        }
        self.order(Order::End);
        let thread = self.thread.borrow_mut().take();
        if let Some(thread) = thread {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking(), "a carrier has died");
        }
        self.take_results();
        assert!(self.operations.in_flight() == 0 || std::thread::panicking(), "all are done");
    }
}

impl Submitter for Carrier {
    fn operations(&self) -> &Operations {
        &self.operations
    }

    fn cancel(&self, key: usize) {
        if !self.is_closed.get() {
            self.order(Order::Cancel(key as u64));
        }
    }
}

impl Watched for Carrier {
    fn look(&self) -> bool {
        self.take_results()
    }
}

impl Drop for Carrier {
    fn drop(&mut self) {
        self.shut_down();
    }
}

/// The carrier's own side.
struct Carrying {
    uring: IoUring,
    orders: mpsc::Receiver<Order>,
    told: mpsc::Sender<(usize, i32)>,
    mine: Arc<Sleep>,
    reactor: Arc<Sleep>,
    in_flight: usize,
}

impl Carrying {
    /// Carries until it is told to end, and nothing is under way.
    fn run(mut self) {
        self.listen();
        let mut is_ending = false;
        let mut idle_since = None;
        while !is_ending || self.in_flight > 0 {
            let has_orders = self.take_orders(&mut is_ending);
            if self.exchange(0) || has_orders {
                idle_since = None;
                continue;
            }
            let since = *idle_since.get_or_insert_with(Instant::now);
            if since.elapsed() < SPIN {
                std::thread::yield_now();
                continue;
            }
            self.mine.falls_asleep();
            if !self.take_orders(&mut is_ending) {
                self.exchange(1);
            }
            self.mine.is_awake();
            idle_since = None;
        }
    }

    /// Every ring of the bell is a completion of its own, so nothing need be read from it.
    fn listen(&mut self) {
        let bell = types::Fd(self.mine.eventfd().as_raw_fd());
        let poll = opcode::PollAdd::new(bell, libc::POLLIN as u32).multi(true).build();
        self.push(&poll.user_data(BELL));
    }

    /// True: there were some.
    fn take_orders(&mut self, is_ending: &mut bool) -> bool {
        let mut has_some = false;
        while let Ok(order) = self.orders.try_recv() {
            has_some = true;
            match order {
                Order::Submit(entry) => {
                    self.in_flight += 1;
                    self.push(&entry);
                }
                Order::Cancel(key) => {
                    self.push(&opcode::AsyncCancel::new(key).build().user_data(NOBODY));
                }
                Order::End => *is_ending = true,
            }
        }
        has_some
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: who sent the entry keeps what it points to until its completion is told, or it points nowhere.
        while unsafe { self.uring.submission().push(entry) }.is_err() {
            self.exchange(0);
        }
    }

    /// Submits, waits for `want` completions, and tells the reactor of what there are. True: something was completed.
    fn exchange(&mut self, want: u32) -> bool {
        let is_needed = {
            let submission = self.uring.submission();
            want > 0 || !submission.is_empty() || submission.taskrun() || submission.cq_overflow()
        };
        if is_needed {
            let queued = self.uring.submission().len() as u32;
            let flags = enter_flags(&self.uring).bits();
            // SAFETY: there is no argument, and so many entries are in the ring.
            let entered = unsafe {
                self.uring.submitter().enter::<libc::sigset_t>(queued, want, flags, None)
            };
            match entered {
                Ok(_) => {}
                Err(error)
                    if matches!(
                        error.raw_os_error(),
                        Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)
                    ) => {}
                Err(error) => panic!("io_uring_enter failed: {error}"),
            }
        }
        let (mut is_told, mut bell_is_over) = (false, false);
        for completion in self.uring.completion() {
            match completion.user_data() {
                NOBODY => {}
                BELL => bell_is_over |= !io_uring::cqueue::more(completion.flags()),
                key => {
                    self.in_flight -= 1;
                    // Nobody listens only once its reactor has gone, which waits for this thread.
                    let _ = self.told.send((key as usize, completion.result()));
                    is_told = true;
                }
            }
        }
        if is_told {
            self.reactor.wake();
        }
        if bell_is_over {
            self.listen();
        }
        is_told
    }
}
