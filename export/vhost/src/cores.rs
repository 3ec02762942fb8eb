//! Cores that serve rings: reactors on threads of their own, each with the queues that were given to it.
//!
//! A disk's volume belongs to the reactor that has it. What a queue costs beside that is done where the queue is: looking at the ring, reading
//! chains, copying what is written, telling the guest. With cores for that, each queue of a disk is on one of them, and asks for its volume
//! from afar ([`levada_volume::FarVolume`]); without, all is done by the one reactor.
//!
//! What always holds:
//! - A queue is served by one thread at a time. Who leaves a client where it stands ([`FarQueue`] is dropped) goes on only once that thread has let
//!   go of the ring: whoever serves it next would else meet another who still does.
//! - A thread waits for nobody. Only who leaves a client where it stands waits for one, for as long as it takes to copy what it is at.

use crate::memory::Memory;
use crate::queue::{Queue, Running, Signals};
use crate::request::{Client, FarClient, Rooms};
use crate::ring::{Ring, Shape};
use crate::served::Source;
use crate::signal::Kick;
use levada_base::reactor::{self, Group, mailbox};
use levada_volume::FarVolume;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long such a core polls before it sleeps. It has nothing else to do.
const SPIN: Duration = Duration::from_micros(100);

/// What a queue begins with.
pub(crate) struct Begin {
    pub client: FarClient,
    pub source: Source,
    pub ring: Ring,
    pub memory: Arc<Memory>,
}

enum Change {
    Memory(Arc<Memory>, Shape),
    Signals(Signals),
    Kick(Option<OwnedFd>),
    Enabled(bool),
}

enum Order {
    Begin(u64, Box<Begin>),
    Change(u64, Change),
    /// Says, by dropping this, that all orders before it have been followed.
    Settle(mailbox::Sender<()>),
    /// Ends a queue, and says where its ring stands.
    End(u64, mailbox::Sender<u32>),
    /// Drops a queue where it stands, if it still does anything, and says so by dropping this.
    Leave(u64, mpsc::Sender<()>),
}

/// Threads that serve queues for a reactor. They end when this and all queues are gone.
pub struct RingCores {
    cores: Vec<Rc<Core>>,
}

impl fmt::Debug for RingCores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} cores for rings", self.cores.len())
    }
}

impl RingCores {
    /// Starts so many threads; none when none are wanted.
    ///
    /// # Errors
    ///
    /// When the system gives no thread, no io_uring or no eventfd.
    pub fn start(count: usize) -> io::Result<Option<Rc<Self>>> {
        let cores = (0..count).map(|number| Core::start(number).map(Rc::new));
        let cores: Vec<_> = cores.collect::<io::Result<_>>()?;
        Ok((!cores.is_empty()).then(|| Rc::new(Self { cores })))
    }

    pub(crate) fn count(&self) -> usize {
        self.cores.len()
    }

    /// The one with the fewest queues.
    pub(crate) fn idlest(&self) -> Rc<Core> {
        let idlest = self.cores.iter().min_by_key(|core| core.queues.get());
        Rc::clone(idlest.expect("there is at least one"))
    }
}

/// One of them.
pub(crate) struct Core {
    /// `None` only while it is dropped.
    orders: Option<mailbox::Sender<Order>>,
    thread: Option<JoinHandle<()>>,
    queues: Cell<usize>,
    next: Cell<u64>,
}

impl Core {
    fn start(number: usize) -> io::Result<Self> {
        // A mailbox belongs to the reactor that reads it.
        let (tell, told) = mpsc::channel();
        let thread = reactor::beside(&format!("rings-{number}"), SPIN, move || async move {
            let orders = match mailbox::channel() {
                Ok((orders, ordered)) => {
                    drop(tell.send(Ok(orders)));
                    ordered
                }
                Err(error) => return drop(tell.send(Err(error))),
            };
            follow(orders).await;
        })?;
        let orders = told.recv().map_err(|_| io::Error::other("a thread for rings has died"))??;
        let (queues, next) = (Cell::new(0), Cell::new(0));
        Ok(Self { orders: Some(orders), thread: Some(thread), queues, next })
    }

    fn order(&self, order: Order) {
        let orders = self.orders.as_ref().expect("not dropped yet");
        // It ends only when nobody can order any more.
        assert!(
            orders.send(order).is_ok() || std::thread::panicking(),
            "a thread for rings has died"
        );
    }

    /// Serves a ring there.
    pub(crate) fn begin(self: Rc<Self>, begin: Begin) -> FarQueue {
        let number = self.next.get();
        self.next.set(number + 1);
        self.queues.set(self.queues.get() + 1);
        self.order(Order::Begin(number, Box::new(begin)));
        FarQueue { core: self, number, kick: RefCell::default(), has_ended: false, leaving: None }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking(), "a thread for rings has died");
        }
    }
}

/// A queue on another core. Dropped, it leaves its client where it stands.
pub(crate) struct FarQueue {
    core: Rc<Core>,
    number: u64,
    /// What it was told to listen to.
    kick: RefCell<Option<Rc<Kick>>>,
    /// Nothing is taken from its ring any more, and all that was is answered.
    has_ended: bool,
    /// It is told to drop the queue, and says here when it has.
    leaving: Option<mpsc::Receiver<()>>,
}

impl FarQueue {
    fn change(&self, change: Change) {
        self.core.order(Order::Change(self.number, change));
    }

    pub(crate) fn set_memory(&self, memory: &Arc<Memory>, shape: &Shape) {
        self.change(Change::Memory(Arc::clone(memory), *shape));
    }

    pub(crate) fn set_signals(&self, signals: Signals) {
        self.change(Change::Signals(signals));
    }

    pub(crate) fn set_kick(&self, kick: Option<Rc<Kick>>) {
        let mut now = self.kick.borrow_mut();
        if Kick::is_same(now.as_ref(), kick.as_ref()) {
            return;
        }
        // A descriptor more. Where there is none the ring is looked at by the clock, as for clients that do not kick.
        let theirs = kick.as_ref().and_then(|kick| kick.another().ok());
        *now = kick;
        self.change(Change::Kick(theirs));
    }

    pub(crate) fn set_enabled(&self, is_enabled: bool) {
        self.change(Change::Enabled(is_enabled));
    }

    /// Completes when all that was set holds: a client that was told so may rely on it.
    pub(crate) fn settled(&self) -> impl Future<Output = ()> + 'static {
        let (tell, mut told) = channel();
        self.core.order(Order::Settle(tell));
        async move {
            told.recv().await;
        }
    }

    /// Begins to leave the client where it stands; who drops several of these has all cores do so at once.
    pub(crate) fn leave(&mut self) {
        if self.leaving.is_none() {
            let (tell, told) = mpsc::channel();
            self.core.order(Order::Leave(self.number, tell));
            self.leaving = Some(told);
        }
    }

    /// Stops taking requests, and returns when those that were taken are answered: where the ring stands.
    pub(crate) async fn end(mut self) -> u32 {
        let (tell, mut told) = channel();
        self.core.order(Order::End(self.number, tell));
        let base = told.recv().await.expect("a queue ends unless it is left");
        self.has_ended = true;
        base
    }
}

/// To hear from a core. The reactor has mailboxes already, those of its volumes.
fn channel<T: Send>() -> (mailbox::Sender<T>, mailbox::Mailbox<T>) {
    mailbox::channel().expect("a reactor with a mailbox has more")
}

impl Drop for FarQueue {
    fn drop(&mut self) {
        self.leave();
        if let Some(left) = self.leaving.take().filter(|_| !self.has_ended) {
            // Not for what is asked of volumes, whose reactor this is, but for a task to be dropped: behind what that core is at just now.
            let _ = left.recv();
        }
        self.core.queues.set(self.core.queues.get() - 1);
    }
}

/// A queue, until it is left.
struct Held {
    queue: Rc<Queue<Client<FarVolume>>>,
    /// Until it is to end.
    running: Option<Running<Client<FarVolume>>>,
    /// All that it does.
    group: Group,
}

/// The thread's own side.
async fn follow(mut ordered: mailbox::Mailbox<Order>) {
    let mut held: HashMap<u64, Held> = HashMap::new();
    let mut rooms = Rooms::default();
    while let Some(order) = ordered.recv().await {
        match order {
            Order::Begin(number, begin) => {
                held.insert(number, Held::begin(*begin, &mut rooms).await);
            }
            Order::Change(number, change) => {
                if let Some(held) = held.get(&number) {
                    held.follow(change);
                }
            }
            Order::Settle(settled) => drop(settled),
            Order::End(number, tell) => match held.get_mut(&number) {
                Some(held) => held.end(tell),
                None => unreachable!("what has begun is held until it is left"),
            },
            Order::Leave(number, left) => {
                if let Some(held) = held.remove(&number) {
                    held.group.kill();
                }
                drop(left);
            }
        }
    }
}

impl Held {
    async fn begin(begin: Begin, rooms: &mut Rooms) -> Self {
        let Begin { client, source, ring, memory } = begin;
        let (group, room) = (reactor::current_group().child(), client.room(rooms));
        let begun = reactor::spawn_in(&group, async move {
            Queue::run(Rc::new(client.here(room)), source, ring, memory)
        });
        let running = begun.await.expect("nobody kills it, and it waits for nothing");
        Self { queue: Rc::clone(&running.queue), running: Some(running), group }
    }

    fn end(&mut self, tell: mailbox::Sender<u32>) {
        if let Some(running) = self.running.take() {
            reactor::spawn_in(&self.group, async move {
                // Who has left meanwhile hears nothing.
                let _ = tell.send(running.end().await);
            });
        }
    }

    fn follow(&self, change: Change) {
        let queue = &self.queue;
        match change {
            Change::Memory(memory, shape) => queue.set_memory(&memory, &shape),
            Change::Signals(signals) => queue.set_signals(signals),
            Change::Kick(kick) => queue.set_kick(kick.map(|kick| Rc::new(Kick::of(kick)))),
            Change::Enabled(is_enabled) => queue.set_enabled(is_enabled),
        }
    }
}
