//! The reactor: one thread, its tasks, its timers and its source of events.
//!
//! The same interface has two sources of events. On a machine it is an io_uring and the
//! monotonic clock; in the simulator it is a virtual clock and a seed, which picks the next of
//! the tasks that are ready and jumps over time in which nothing happens. Code above this
//! module cannot tell them apart, so production code is what the simulator runs.
//!
//! What always holds:
//! - A task runs on the thread that spawned it, and memory stays on its thread. Other threads may carry sockets ([`carry_sockets`]): they hand
//!   addresses to the kernel.
//! - Killing a [`Group`] drops its tasks wherever they wait, as a power cut would.
//! - In the simulator one seed fixes the whole run, including the order of worker threads
//!   ([`worker`]): a worker runs only while its reactor waits for it.

mod aside;
mod bell;
mod beside;
mod carrier;
mod fd;
pub mod fs;
pub mod mailbox;
pub mod net;
mod operations;
pub mod pipe;
mod registered;
mod ring;
pub mod signal;
mod task;
mod time;
pub mod worker;

pub use aside::aside;
pub use beside::beside;
pub use fd::Fd;
pub use registered::Registered;
pub use ring::Watched;
pub use task::{Group, JoinHandle};
pub use time::{Elapsed, Instant, Sleep};

use carrier::Carrier;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use ring::Ring;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;
use task::Task;
use time::Timers;

thread_local! {
    static CURRENT: RefCell<Option<Rc<Core>>> = const { RefCell::new(None) };
}

/// On a machine, completions and timers are looked at after at most this many polls of tasks.
const POLLS_PER_TURN: u32 = 64;

/// On virtual time, so many polls at one instant mean that tasks wake each other for ever.
const POLLS_AT_AN_INSTANT_MAX: u32 = 2_000_000;

/// What a reactor's tasks share; reached through the thread-local current reactor.
struct Core {
    ready: RefCell<VecDeque<Rc<Task>>>,
    timers: RefCell<Timers>,
    /// Where `spawn` puts new tasks: the group of the task that runs now.
    group: RefCell<Group>,
    /// Numbers the tasks from 1 on; 0 is the task of `block_on`.
    tasks_spawned: Cell<u64>,
    rng: RefCell<Xoshiro256PlusPlus>,
    /// Folded over every scheduling decision; equal seeds must give equal hashes.
    trace: Cell<u64>,
    /// Polls of tasks since the ring was looked at, or since virtual time went on.
    polls: Cell<u32>,
    /// Threads that carry sockets, and how many sockets they were given.
    carriers: RefCell<Vec<Rc<Carrier>>>,
    carried: Cell<usize>,
    events: Events,
}

/// Where time and completions come from.
enum Events {
    /// Nanoseconds of virtual time since the start of the world.
    Virtual { now_ns: Cell<u64> },
    /// The machine's io_uring and its monotonic clock.
    Uring(Rc<Ring>),
}

/// A reactor, owned by the thread that made it.
pub struct Reactor {
    core: Rc<Core>,
}

impl Reactor {
    /// A reactor on virtual time, every choice of which is fixed by `seed`.
    #[must_use]
    pub fn simulated(seed: u64) -> Self {
        Self::with(Events::Virtual { now_ns: Cell::new(0) }, seed)
    }

    /// A reactor on this machine, for this thread. Its timers are accurate to some microseconds.
    ///
    /// # Errors
    ///
    /// When the kernel gives no io_uring: too old, or forbidden by
    /// `/proc/sys/kernel/io_uring_disabled` or a container's rules.
    pub fn new() -> io::Result<Self> {
        let seed = uuid::Uuid::new_v4().as_u64_pair().0;
        Ok(Self::with(Events::Uring(Rc::new(Ring::new()?)), seed))
    }

    /// How long to poll for completions before sleeping while operations are in flight; 20 us at
    /// first. It stops by itself for a while when completions take longer, so idle costs nothing.
    /// Zero switches it off. Without effect in the simulator.
    pub fn set_spin(&self, spin: Duration) {
        if let Events::Uring(ring) = &self.core.events {
            ring.set_spin(spin);
        }
    }

    /// Uses files and memory without registering them with the kernel, for who compares. To be
    /// called before anything is read or written. Without effect in the simulator.
    pub fn register_nothing(&self) {
        if let Events::Uring(ring) = &self.core.events {
            ring.tables.disable();
        }
    }

    fn with(events: Events, seed: u64) -> Self {
        Self {
            core: Rc::new(Core {
                ready: RefCell::default(),
                timers: RefCell::default(),
                group: RefCell::new(Group::new()),
                tasks_spawned: Cell::new(0),
                rng: RefCell::new(Xoshiro256PlusPlus::seed_from_u64(seed)),
                trace: Cell::new(seed),
                polls: Cell::new(0),
                carriers: RefCell::default(),
                carried: Cell::new(0),
                events,
            }),
        }
    }

    /// Runs `future` and every task spawned meanwhile, until `future` is done.
    ///
    /// # Panics
    ///
    /// When called inside another reactor, or, on virtual time, when every task waits for
    /// something that cannot happen any more, or tasks wake each other and time stands still.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        let _entered = Entered::enter(&self.core);
        let mut future = pin!(future);
        let main = Task::main(&self.core);
        let waker = main.waker();
        main.wake();
        loop {
            let Some(task) = self.core.next_ready() else {
                self.core.wait();
                continue;
            };
            if Rc::ptr_eq(&task, &main) {
                task.begin();
                if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker))
                {
                    return output;
                }
            } else {
                task.run(&self.core);
            }
        }
    }

    /// The hash of every scheduling decision so far.
    #[must_use]
    pub fn trace_hash(&self) -> u64 {
        self.core.trace.get()
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        // Tasks refer to the core, and the core to tasks: break the circle. Futures may use
        // the reactor while they are dropped.
        let _entered = Entered::enter(&self.core);
        let root = self.core.group.borrow().clone();
        root.kill();
        self.core.drop_ready();
        for carrier in self.core.carriers.take() {
            carrier.shut_down();
        }
        if let Events::Uring(ring) = &self.core.events {
            // The kernel must be done with every buffer before any is freed.
            ring.shut_down();
            self.core.drop_ready();
        }
    }
}

/// Makes a core the current one of this thread until dropped.
struct Entered;

impl Entered {
    fn enter(core: &Rc<Core>) -> Self {
        CURRENT.with_borrow_mut(|current| {
            assert!(current.is_none(), "a reactor runs on this thread already");
            *current = Some(Rc::clone(core));
        });
        Self
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.with_borrow_mut(|current| *current = None);
    }
}

impl Core {
    fn current() -> Rc<Self> {
        CURRENT.with_borrow(|current| Rc::clone(current.as_ref().expect("inside a reactor")))
    }

    /// Drops the tasks that wait to run, and those that they wake by being dropped.
    fn drop_ready(&self) {
        loop {
            let ready = self.ready.take();
            if ready.is_empty() {
                break;
            }
            drop(ready);
        }
    }

    fn now_ns(&self) -> u64 {
        match &self.events {
            Events::Virtual { now_ns } => now_ns.get(),
            Events::Uring(ring) => ring.now_ns(),
        }
    }

    /// The ring of this thread's reactor.
    ///
    /// # Panics
    ///
    /// In the simulator, which has no machine below it.
    fn current_ring() -> Rc<Ring> {
        match &Self::current().events {
            Events::Uring(ring) => Rc::clone(ring),
            Events::Virtual { .. } => panic!("the simulator has no files, sockets or threads"),
        }
    }

    /// Who carries the next socket: each in turn.
    fn next_carrier(&self) -> Option<Rc<Carrier>> {
        let carriers = self.carriers.borrow();
        let number = self.carried.get();
        let carrier = carriers.get(number.checked_rem(carriers.len())?)?;
        self.carried.set(number.wrapping_add(1));
        Some(Rc::clone(carrier))
    }

    /// Takes the next task to run: the oldest on a machine, any one in the simulator.
    fn next_ready(&self) -> Option<Rc<Task>> {
        match &self.events {
            Events::Virtual { .. } => {
                let mut ready = self.ready.borrow_mut();
                if ready.is_empty() {
                    return None;
                }
                let at = self.rng.borrow_mut().random_range(0..ready.len());
                let task = ready.swap_remove_back(at)?;
                self.note(task.id());
                self.polls.set(self.polls.get() + 1);
                assert!(
                    self.polls.get() < POLLS_AT_AN_INSTANT_MAX,
                    "livelock: {POLLS_AT_AN_INSTANT_MAX} polls and no time has passed"
                );
                Some(task)
            }
            Events::Uring(ring) => {
                let polls = self.polls.get();
                if polls >= POLLS_PER_TURN {
                    self.polls.set(0);
                    ring.turn();
                    self.fire_timers();
                } else {
                    self.polls.set(polls + 1);
                }
                self.ready.borrow_mut().pop_front()
            }
        }
    }

    /// Folds a decision into the trace.
    fn note(&self, decision: u64) {
        let mixed = (self.trace.get() ^ decision).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.trace.set(mixed ^ (mixed >> 29));
    }

    /// Nothing is ready: waits for the next event.
    fn wait(&self) {
        match &self.events {
            Events::Virtual { now_ns } => {
                let next = self.timers.borrow().next_deadline();
                let next = next.expect("deadlock: no task is ready and no timer is set");
                if next > now_ns.get() {
                    self.polls.set(0);
                }
                now_ns.set(now_ns.get().max(next));
                self.note(next);
                self.fire_timers();
            }
            Events::Uring(ring) => {
                self.polls.set(0);
                let next = self.timers.borrow().next_deadline();
                let now_ns = ring.now_ns();
                ring.wait(next.map(|next| Duration::from_nanos(next.saturating_sub(now_ns))));
                self.fire_timers();
            }
        }
    }

    fn fire_timers(&self) {
        let now_ns = self.now_ns();
        loop {
            let due = self.timers.borrow_mut().take_due(now_ns);
            let Some(waker) = due else { break };
            waker.wake();
        }
    }
}

/// Starts so many threads more that carry sockets for this thread's reactor, those which ask for it ([`net::Stream::carried`]). They end
/// with the reactor. Without effect in the simulator.
///
/// # Errors
///
/// When the system gives no thread, or no io_uring.
pub fn carry_sockets(threads: usize) -> io::Result<()> {
    let core = Core::current();
    let Events::Uring(ring) = &core.events else { return Ok(()) };
    for _ in 0..threads {
        let number = core.carriers.borrow().len();
        let carrier = Carrier::start(number, ring.sleep()?)?;
        let watched: Rc<dyn Watched> = Rc::clone(&carrier) as _;
        ring.watch(Rc::downgrade(&watched));
        core.carriers.borrow_mut().push(carrier);
    }
    Ok(())
}

/// How many threads carry sockets for this thread's reactor.
#[must_use]
pub fn carriers() -> usize {
    Core::current().carriers.borrow().len()
}

/// Starts a task on this thread's reactor, in the group of the task that calls.
pub fn spawn<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future + 'static,
    F::Output: 'static,
{
    let group = Core::current().group.borrow().clone();
    spawn_in(&group, future)
}

/// Starts a task in `group`; tasks that it spawns are of that group too.
pub fn spawn_in<F>(group: &Group, future: F) -> JoinHandle<F::Output>
where
    F: Future + 'static,
    F::Output: 'static,
{
    task::spawn(&Core::current(), group, future)
}

/// Carries out `future` within the task that calls until it first waits; the rest is for a task of its own. What does not wait costs
/// no task. Nobody is told of its end.
pub fn run_or_spawn(future: impl Future<Output = ()> + 'static) {
    task::run_or_spawn(&Core::current(), future);
}

/// The group of the task that calls.
#[must_use]
pub fn current_group() -> Group {
    Core::current().group.borrow().clone()
}

/// True inside the simulator.
#[must_use]
pub fn is_simulated() -> bool {
    matches!(Core::current().events, Events::Virtual { .. })
}

/// From now on this thread's reactor looks at `watched` wherever it looks at its ring, until it is dropped.
///
/// # Panics
///
/// In the simulator, which has no machine below it.
pub fn watch<W: Watched + 'static>(watched: &Rc<W>) {
    Core::current_ring().watch(Rc::downgrade(watched) as _);
}

/// Closes a descriptor that a stranger sent, beside this thread: what it stands for may keep its closer waiting for as long as
/// its owner likes (a file of a FUSE file system is flushed, a socket lingers).
///
/// # Panics
///
/// In the simulator, which has no machine below it.
pub fn close_aside(fd: OwnedFd) {
    Core::current_ring().close_aside(fd);
}

/// What is registered with the kernel: nothing in the simulator.
#[must_use]
pub fn registered() -> Registered {
    match &Core::current().events {
        Events::Virtual { .. } => Registered::default(),
        Events::Uring(ring) => ring.tables.now(),
    }
}

/// Now, on the reactor's clock.
#[must_use]
pub fn now() -> Instant {
    Instant(Core::current().now_ns())
}

/// Completes after `duration`.
#[must_use]
pub fn sleep(duration: Duration) -> Sleep {
    sleep_until(now() + duration)
}

/// Completes at `deadline`.
#[must_use]
pub fn sleep_until(deadline: Instant) -> Sleep {
    Sleep::new(deadline)
}

/// Runs `future` for at most `limit`, then drops it.
///
/// # Errors
///
/// [`Elapsed`] when the time is up first.
pub async fn timeout<F: Future>(limit: Duration, future: F) -> Result<F::Output, Elapsed> {
    let mut future = pin!(future);
    let mut limit = pin!(sleep(limit));
    std::future::poll_fn(|cx| {
        if let Poll::Ready(output) = future.as_mut().poll(cx) {
            return Poll::Ready(Ok(output));
        }
        limit.as_mut().poll(cx).map(|()| Err(Elapsed))
    })
    .await
}

/// Lets every other ready task run first.
pub async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|cx| {
        if yielded {
            return Poll::Ready(());
        }
        yielded = true;
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// After a long call of the system: whoever else waits for this thread has it first, completions and timers among them.
pub(crate) async fn give_way() {
    Core::current().polls.set(POLLS_PER_TURN);
    yield_now().await;
}

/// A random number: seeded in the simulator, so that it belongs to the run.
#[must_use]
pub fn random_u64() -> u64 {
    Core::current().rng.borrow_mut().random()
}

/// Fills bytes that nobody can foresee, as keys are made of; in the simulator they belong to the run.
///
/// # Panics
///
/// When the system has none, which Linux says of calls that are wrong alone.
pub fn fill_random(bytes: &mut [u8]) {
    if !is_simulated() {
        return fill_random_of_system(bytes);
    }
    for chunk in bytes.chunks_mut(8) {
        chunk.copy_from_slice(&random_u64().to_le_bytes()[..chunk.len()]);
    }
}

/// The same on any thread, whatever runs there.
///
/// # Panics
///
/// As [`fill_random`].
#[allow(unsafe_code)] // getrandom(2).
pub fn fill_random_of_system(bytes: &mut [u8]) {
    let mut filled = 0;
    while filled < bytes.len() {
        let rest = &mut bytes[filled..];
        // SAFETY: `rest` is writable memory of that length.
        let read = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        match usize::try_from(read) {
            Ok(read) => filled += read,
            Err(_) => {
                let error = io::Error::last_os_error();
                assert_eq!(error.kind(), io::ErrorKind::Interrupted, "{error}");
            }
        }
    }
}

/// The hash of every scheduling decision so far on this thread's reactor.
#[must_use]
pub fn trace_hash() -> u64 {
    Core::current().trace.get()
}
