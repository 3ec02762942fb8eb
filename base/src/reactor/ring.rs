//! The machine's events: one io_uring per reactor.
//!
//! Submissions collect in the ring and go to the kernel once per turn of the reactor, together
//! with the wait for completions: one system call serves a whole batch. Task work is deferred to
//! that call, so completions never interrupt a running task.
//!
//! What always holds:
//! - What an operation refers to is kept from submission to completion ([`Operations`]).
//! - The ring outlives its operations: [`Ring::shut_down`] cancels and waits for all of them.
//! - Nothing in flight and no timer means blocked in the kernel: idle costs no CPU time.
#![allow(unsafe_code)] // io_uring: memory shared with the kernel.

use super::bell::{Bells, Sleep, eventfd};
use super::operations::{Op, Operations, Submitter};
use super::registered::Tables;
use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, opcode, squeue};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

/// Submissions that fit one turn; more are submitted early.
const SUBMISSIONS: u32 = 512;
/// Completions that fit without the kernel having to store them aside.
const COMPLETIONS: u32 = 8192;
/// Marks completions that nobody waits for: those of cancellations.
const NOBODY: u64 = u64::MAX;
/// Mark that other processes rang, and other threads of this one.
const BELL: u64 = u64::MAX - 1;
const THREADS_BELL: u64 = u64::MAX - 2;
/// How long a wait polls before it sleeps, unless told otherwise. Two threads that answer each
/// other over loopback do five times as many rounds with it, for half the CPU time each. Polling
/// yields the core to whoever else wants it.
pub(super) const SPIN: Duration = Duration::from_micros(20);
/// Spinning is tried again after at most this many waits without it.
const SPIN_PAUSE_MAX: u32 = 256;

/// Numbers the rings of the process from 1 on.
static RINGS: AtomicU32 = AtomicU32::new(1);

/// What is looked at beside the ring: memory that others change. Neither call may watch anything.
pub trait Watched {
    /// Wakes the task that waits for a change that has come; true when it did.
    fn look(&self) -> bool;
    /// Tells another process that this reactor is about to sleep, and must be woken by an event (its bell, say), or that
    /// it is awake. After the first it looks once more. Other threads know.
    fn sleeps(&self, _sleeps: bool) {}
}

/// One io_uring and the operations it holds.
pub(super) struct Ring {
    pub(super) uring: RefCell<IoUring>,
    pub(super) tables: Tables,
    operations: Operations,
    started: Instant,
    enter_flags: EnterFlags,
    /// The reactor is gone; nothing is submitted any more.
    closed: Cell<bool>,
    /// How long to poll for completions before sleeping.
    spin: Cell<Duration>,
    /// Waits to sit out before spinning is tried again, and how many the next failure costs.
    spin_pause: Cell<(u32, u32)>,
    watched: RefCell<Vec<Weak<dyn Watched>>>,
    /// Rung by other processes when they have changed what is watched and this reactor sleeps.
    bell: RefCell<Option<OwnedFd>>,
    /// Ended by other threads. Not by the bell, which whoever has it can fill, so that it does not ring any more.
    sleep: RefCell<Option<Arc<Sleep>>>,
    /// What these threads ring, if any do.
    bells: RefCell<Weak<Bells>>,
}

/// An io_uring for the thread that calls.
pub(super) fn uring(submissions: u32) -> io::Result<IoUring> {
    let uring = IoUring::builder()
        .setup_cqsize(COMPLETIONS)
        .setup_clamp()
        .setup_submit_all()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_coop_taskrun()
        .setup_taskrun_flag()
        .dontfork()
        .build(submissions)
        // Kernels before 6.1 know neither single issuer nor deferred task work.
        .or_else(|_| IoUring::builder().setup_cqsize(COMPLETIONS).build(submissions))?;
    if !uring.params().is_feature_ext_arg() || !uring.params().is_feature_nodrop() {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "io_uring needs Linux 5.11"));
    }
    Ok(uring)
}

/// How to enter the kernel for completions.
pub(super) fn enter_flags(uring: &IoUring) -> EnterFlags {
    match uring.params().is_feature_no_iowait() {
        // An idle daemon must not look like one that waits for its disks.
        true => EnterFlags::GETEVENTS | EnterFlags::NO_IOWAIT,
        false => EnterFlags::GETEVENTS,
    }
}

impl Ring {
    pub(super) fn new() -> io::Result<Self> {
        let uring = uring(SUBMISSIONS)?;
        let enter_flags = enter_flags(&uring) | EnterFlags::EXT_ARG;
        // Kernels before 6.13 let go of what was registered up to a second late, and the lock of
        // a closed file with it. This feature came soon after.
        let registers = uring.params().is_feature_no_iowait();
        let tables = Tables::new(RINGS.fetch_add(1, Ordering::Relaxed), registers);
        // The default slack of 50 us would let every timer come late by as much.
        // SAFETY: sets a number of this thread; no memory is involved.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000u64, 0u64, 0u64, 0u64) };
        Ok(Self {
            uring: RefCell::new(uring),
            tables,
            operations: Operations::default(),
            started: Instant::now(),
            enter_flags,
            closed: Cell::new(false),
            // On a single core whatever we wait for needs the core.
            spin: Cell::new(match std::thread::available_parallelism() {
                Ok(cores) if cores.get() > 1 => SPIN,
                _ => Duration::ZERO,
            }),
            spin_pause: Cell::new((0, 1)),
            watched: RefCell::default(),
            bell: RefCell::default(),
            sleep: RefCell::default(),
            bells: RefCell::default(),
        })
    }

    /// From now on it is looked at, as long as somebody else holds it.
    pub(super) fn watch(&self, watched: Weak<dyn Watched>) {
        self.watched.borrow_mut().push(watched);
    }

    /// For other processes: rung, it wakes this reactor.
    pub(super) fn bell(&self) -> io::Result<OwnedFd> {
        if self.bell.borrow().is_none() {
            *self.bell.borrow_mut() = Some(eventfd()?);
            self.listen(BELL);
        }
        self.bell.borrow().as_ref().expect("just made").try_clone()
    }

    /// For other threads of this process. It can fail the first time only.
    pub(super) fn sleep(&self) -> io::Result<Arc<Sleep>> {
        if let Some(sleep) = &*self.sleep.borrow() {
            return Ok(Arc::clone(sleep));
        }
        let sleep = Arc::new(Sleep::new()?);
        *self.sleep.borrow_mut() = Some(Arc::clone(&sleep));
        self.listen(THREADS_BELL);
        Ok(sleep)
    }

    /// Those for other threads. It can fail the first time only.
    pub(super) fn bells(&self) -> io::Result<Rc<Bells>> {
        if let Some(bells) = self.bells.borrow().upgrade() {
            return Ok(bells);
        }
        let bells = Rc::new(Bells::new(self.sleep()?));
        let watched: Weak<Bells> = Rc::downgrade(&bells);
        *self.bells.borrow_mut() = Weak::clone(&watched);
        self.watch(watched);
        Ok(bells)
    }

    /// Polls the eventfd of `mark` for as long as the kernel does. Every ring is an event of its own, so nothing need be read from it.
    fn listen(&self, mark: u64) {
        let fd = match mark {
            BELL => self.bell.borrow().as_ref().map(AsRawFd::as_raw_fd),
            _ => self.sleep.borrow().as_ref().map(|sleep| sleep.eventfd().as_raw_fd()),
        };
        // It may look at what has completed meanwhile, and so come here again: nothing is borrowed.
        let fd = io_uring::types::Fd(fd.expect("it is kept from then on"));
        let poll = opcode::PollAdd::new(fd, libc::POLLIN as u32).multi(true).build();
        // SAFETY: the entry points nowhere; the poll itself holds the eventfd.
        unsafe { self.push(&poll.user_data(mark)) };
    }

    /// Looks at what is watched; true when that woke a task.
    fn look(&self) -> bool {
        let mut woke = false;
        self.watched.borrow_mut().retain(|watched| {
            let watched = watched.upgrade();
            woke |= watched.as_ref().is_some_and(|watched| watched.look());
            watched.is_some()
        });
        woke
    }

    fn tell_sleep(&self, sleeps: bool) {
        for watched in self.watched.borrow().iter().filter_map(Weak::upgrade) {
            watched.sleeps(sleeps);
        }
        if let Some(sleep) = &*self.sleep.borrow() {
            if sleeps { sleep.falls_asleep() } else { sleep.is_awake() }
        }
    }

    pub(super) fn now_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    pub(super) fn set_spin(&self, spin: Duration) {
        self.spin.set(spin);
    }

    /// Nothing is submitted any more.
    pub(super) fn is_closed(&self) -> bool {
        self.closed.get()
    }

    /// Queues an operation for the next turn and keeps `kept` until the kernel is done with it.
    ///
    /// # Safety
    ///
    /// Every pointer and descriptor in the entry must point into `kept` (which no longer moves
    /// when `entry` is called), or to memory or a file that `kept` owns.
    pub(super) unsafe fn submit<T: 'static>(
        self: &Rc<Self>,
        kept: T,
        entry: impl FnOnce(&mut T) -> squeue::Entry,
    ) -> Op<T> {
        if self.closed.get() {
            return Op::of(Rc::clone(self) as _, self.operations.refuse(kept));
        }
        let (key, entry) = self.operations.begin(kept, entry);
        // SAFETY: the caller's promise; `kept` is kept until the completion is reaped.
        unsafe { self.push(&entry) };
        Op::of(Rc::clone(self) as _, key)
    }

    /// # Safety
    ///
    /// What the entry points to must live until its completion.
    unsafe fn push(&self, entry: &squeue::Entry) {
        loop {
            // SAFETY: the caller's promise.
            if unsafe { self.uring.borrow_mut().submission().push(entry) }.is_ok() {
                return;
            }
            self.enter(0, None);
            self.reap();
        }
    }

    /// Has a thread of the kernel's close `fd`.
    pub(super) fn close_aside(&self, fd: OwnedFd) {
        if self.closed.get() {
            return;
        }
        let fd = io_uring::types::Fd(fd.into_raw_fd());
        let entry = opcode::Close::new(fd).build().flags(squeue::Flags::ASYNC).user_data(NOBODY);
        // SAFETY: the entry points nowhere, and the descriptor has no other owner any more.
        unsafe { self.push(&entry) };
    }

    /// Submits what has collected and waits for `want` completions, at most for `limit`.
    fn enter(&self, want: u32, limit: Option<Duration>) {
        let queued = self.uring.borrow_mut().submission().len();
        let timespec;
        let mut args = SubmitArgs::new();
        if let Some(limit) = limit {
            timespec = Timespec::from(limit);
            args = args.timespec(&timespec);
        }
        let uring = self.uring.borrow();
        // SAFETY: the flags announce an extended argument, and `args` is one; `queued` entries
        // are in the ring.
        let entered = unsafe {
            uring.submitter().enter(queued as u32, want, self.enter_flags.bits(), Some(&args))
        };
        match entered.map_err(|error| error.raw_os_error()) {
            // A signal, the end of `limit`, or completions that must be reaped first: the
            // reactor's loop comes back in each case.
            Ok(_) | Err(Some(libc::EINTR | libc::ETIME | libc::EBUSY | libc::EAGAIN)) => {}
            Err(errno) => panic!("io_uring_enter failed: errno {errno:?}"),
        }
    }

    /// True when entering the kernel without waiting would bring completions or has work to do.
    fn has_completions(&self) -> bool {
        let mut uring = self.uring.borrow_mut();
        let waiting = !uring.completion().is_empty();
        waiting || {
            let submission = uring.submission();
            submission.taskrun() || submission.cq_overflow()
        }
    }

    /// Submits, and hands out what has completed, without waiting.
    pub(super) fn turn(&self) {
        self.look();
        self.exchange();
    }

    /// Submits what is queued, and hands out what has completed, if there is either.
    fn exchange(&self) {
        let queued = !self.uring.borrow_mut().submission().is_empty();
        if queued || self.has_completions() {
            self.enter(0, None);
            self.reap();
        }
    }

    /// Submits and waits until something completes, at most for `limit`.
    pub(super) fn wait(&self, limit: Option<Duration>) {
        if limit == Some(Duration::ZERO) {
            return self.turn();
        }
        // Others' work must not keep what is queued here, or has completed, waiting.
        if self.look() {
            return self.exchange();
        }
        let spin = self.spin.get();
        let entered = Instant::now();
        let is_watching = !self.watched.borrow().is_empty();
        if !spin.is_zero() && (is_watching || self.operations.in_flight() > 0) {
            let (pause, next_pause) = self.spin_pause.get();
            if pause > 0 {
                self.spin_pause.set((pause - 1, next_pause));
            } else {
                let spin = limit.map_or(spin, |limit| limit.min(spin));
                self.enter(0, None);
                while !self.has_completions() {
                    if self.look() {
                        self.spin_pause.set((0, 1));
                        return;
                    }
                    if entered.elapsed() >= spin {
                        self.spin_pause.set((next_pause, (next_pause * 2).min(SPIN_PAUSE_MAX)));
                        break;
                    }
                    // Lets run whoever waits for this core.
                    std::thread::yield_now();
                }
                if self.has_completions() {
                    self.spin_pause.set((0, 1));
                    return self.turn();
                }
            }
        }
        let limit = limit.map(|limit| limit.saturating_sub(entered.elapsed()));
        if is_watching {
            self.tell_sleep(true);
            // Either the others see that, or this sees what they did.
            fence(Ordering::SeqCst);
        }
        if !self.look() {
            self.enter(1, limit);
        }
        if is_watching {
            self.tell_sleep(false);
        }
        self.reap();
    }

    /// Hands every completion to its task.
    fn reap(&self) {
        loop {
            let batch: SmallVec<[(u64, i32, u32); 64]> = {
                let mut uring = self.uring.borrow_mut();
                let completions = uring.completion().take(64);
                completions.map(|c| (c.user_data(), c.result(), c.flags())).collect()
            };
            if batch.is_empty() {
                return;
            }
            for (user_data, result, flags) in batch {
                if matches!(user_data, BELL | THREADS_BELL) {
                    // The kernel ends a poll when it has no room to tell of more.
                    if !io_uring::cqueue::more(flags) && !self.closed.get() {
                        self.listen(user_data);
                    }
                } else if user_data != NOBODY {
                    self.operations.complete(user_data as usize, result);
                }
            }
        }
    }

    /// Cancels every operation and waits until the kernel is done with all of them.
    pub(super) fn shut_down(&self) {
        for key in self.operations.waiting() {
            self.cancel(key);
        }
        self.turn();
        while self.operations.in_flight() > 0 {
            self.enter(1, None);
            self.reap();
        }
        self.drop_tables();
        self.closed.set(true);
    }
}

impl Submitter for Ring {
    fn operations(&self) -> &Operations {
        &self.operations
    }

    /// The operation's own completion frees its place, so another one with the same key can only be submitted behind this request, which
    /// therefore cannot hit it.
    fn cancel(&self, key: usize) {
        let entry = opcode::AsyncCancel::new(key as u64).build().user_data(NOBODY);
        // SAFETY: the entry points nowhere.
        unsafe { self.push(&entry) };
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        assert!(self.operations.in_flight() == 0 || std::thread::panicking(), "shut down first");
    }
}
