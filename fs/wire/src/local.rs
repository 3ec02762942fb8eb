//! A network in this process, for tests and the simulator: delays, lost connections, partitions.
//!
//! Time and chance are the reactor's, so a seed fixes them. Frames of one connection are never
//! reordered. A connection that breaks loses any tail of what is under way in each direction,
//! so a request may have been carried out although its reply never comes.

use crate::channel::{ChannelError, Connection, FrameSink, FrameSource, Listener, Transport};
use crate::frame::Frame;
use futures_util::future::LocalBoxFuture;
use levada_base::reactor::{self, Instant};
use levada_base::sync::{Notify, queue};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::{Rc, Weak};
use std::time::Duration;

/// How long a connection attempt into a partition takes to fail.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// What the network does to frames.
#[derive(Clone, Copy, Debug)]
pub struct LinkConfig {
    /// Each frame takes a random time between the two.
    pub delay_min: Duration,
    pub delay_max: Duration,
    /// Frames pass through the codec, as on a socket.
    pub codec: bool,
}

impl Default for LinkConfig {
    fn default() -> Self {
        Self {
            delay_min: Duration::from_micros(10),
            delay_max: Duration::from_micros(100),
            codec: true,
        }
    }
}

/// A network; cheap to clone, all clones are the same.
#[derive(Clone)]
pub struct Network(Rc<Shared>);

struct Shared {
    config: Cell<LinkConfig>,
    /// One frame in this many breaks its connection; 0: none does.
    break_one_in: Cell<u64>,
    listeners: RefCell<BTreeMap<String, (u64, queue::Sender<Connection>)>>,
    listeners_made: Cell<u64>,
    links: RefCell<Vec<Weak<Link>>>,
    partitions: RefCell<BTreeSet<(String, String)>>,
}

/// One connection: a pipe in each direction.
struct Link {
    network: Weak<Shared>,
    ends: (String, String),
    pipes: [Pipe; 2],
}

#[derive(Default)]
struct Pipe {
    queue: RefCell<VecDeque<(Instant, Frame)>>,
    last_due: Cell<Instant>,
    /// Nothing is added any more.
    closed: Cell<bool>,
    changed: Notify,
}

impl Pipe {
    fn close(&self) {
        self.closed.set(true);
        self.changed.notify_all();
    }
}

impl Network {
    /// A network without faults.
    #[must_use]
    pub fn new(config: LinkConfig) -> Self {
        Self(Rc::new(Shared {
            config: Cell::new(config),
            break_one_in: Cell::new(0),
            listeners: RefCell::default(),
            listeners_made: Cell::new(0),
            links: RefCell::default(),
            partitions: RefCell::default(),
        }))
    }

    /// What the node `from` connects with.
    #[must_use]
    pub fn transport(&self, from: &str) -> Rc<dyn Transport> {
        Rc::new(LocalTransport { network: self.0.clone(), from: from.to_owned() })
    }

    /// Listens at `address`, which is also the node's name; replaces who listened there before.
    #[must_use]
    pub fn listen(&self, address: &str) -> LocalListener {
        let id = self.0.listeners_made.get() + 1;
        self.0.listeners_made.set(id);
        let (sender, receiver) = queue::channel();
        self.0.listeners.borrow_mut().insert(address.to_owned(), (id, sender));
        LocalListener {
            network: self.0.clone(),
            address: address.to_owned(),
            id,
            incoming: RefCell::new(Some(receiver)),
        }
    }

    /// Changes delays from now on.
    pub fn set_config(&self, config: LinkConfig) {
        self.0.config.set(config);
    }

    /// From now on one frame in `n` breaks its connection (0: none).
    pub fn break_one_in(&self, n: u64) {
        self.0.break_one_in.set(n);
    }

    /// Breaks every connection between `a` and `b` now.
    pub fn disconnect(&self, a: &str, b: &str) {
        for link in self.0.links() {
            if link.joins(a, b) {
                link.break_now();
            }
        }
    }

    /// Lets nothing pass between `a` and `b` until [`Network::heal`]; frames wait.
    pub fn partition(&self, a: &str, b: &str) {
        self.0.partitions.borrow_mut().insert(pair(a, b));
    }

    /// Ends a partition.
    pub fn heal(&self, a: &str, b: &str) {
        self.0.partitions.borrow_mut().remove(&pair(a, b));
        for link in self.0.links() {
            link.pipes.iter().for_each(|pipe| pipe.changed.notify_all());
        }
    }
}

fn pair(a: &str, b: &str) -> (String, String) {
    let (a, b) = if a <= b { (a, b) } else { (b, a) };
    (a.to_owned(), b.to_owned())
}

impl Shared {
    fn links(&self) -> Vec<Rc<Link>> {
        let mut links = self.links.borrow_mut();
        links.retain(|link| link.strong_count() > 0);
        links.iter().filter_map(Weak::upgrade).collect()
    }

    fn delay(&self) -> Duration {
        let LinkConfig { delay_min, delay_max, .. } = self.config.get();
        let spread = delay_max.saturating_sub(delay_min).as_nanos() as u64;
        delay_min + Duration::from_nanos(reactor::random_u64() % (spread + 1))
    }

    fn is_cut(&self, ends: &(String, String)) -> bool {
        self.partitions.borrow().contains(ends)
    }
}

impl Link {
    fn joins(&self, a: &str, b: &str) -> bool {
        self.ends == pair(a, b)
    }

    /// What is under way arrives up to a random point.
    fn break_now(&self) {
        for pipe in &self.pipes {
            let under_way = pipe.queue.borrow().len() as u64;
            let arriving = reactor::random_u64() % (under_way + 1);
            pipe.queue.borrow_mut().truncate(arriving as usize);
            pipe.close();
        }
    }
}

struct LocalTransport {
    network: Rc<Shared>,
    from: String,
}

impl Transport for LocalTransport {
    fn connect<'a>(
        &'a self,
        address: &'a str,
    ) -> LocalBoxFuture<'a, Result<Connection, ChannelError>> {
        Box::pin(async move {
            let ends = pair(&self.from, address);
            reactor::sleep(self.network.delay()).await;
            if self.network.is_cut(&ends) {
                reactor::sleep(CONNECT_TIMEOUT).await;
                return Err(ChannelError::Disconnected);
            }
            let listener =
                self.network.listeners.borrow().get(address).map(|(_, sender)| sender.clone());
            let listener = listener.ok_or(ChannelError::Disconnected)?;
            let link = Rc::new(Link {
                network: Rc::downgrade(&self.network),
                ends,
                pipes: Default::default(),
            });
            self.network.links.borrow_mut().push(Rc::downgrade(&link));
            let theirs = connection(&link, 1);
            listener.send(theirs).map_err(|_| ChannelError::Disconnected)?;
            Ok(connection(&link, 0))
        })
    }
}

/// The end that sends into pipe `out` and receives from the other.
fn connection(link: &Rc<Link>, out: usize) -> Connection {
    Connection {
        sink: Rc::new(LocalSink { link: Rc::clone(link), out }),
        source: Box::new(LocalSource { link: Rc::clone(link), into: 1 - out }),
    }
}

struct LocalSink {
    link: Rc<Link>,
    out: usize,
}

impl FrameSink for LocalSink {
    fn send(&self, frame: Frame) -> Result<(), ChannelError> {
        frame.check()?;
        let pipe = &self.link.pipes[self.out];
        let network = self.link.network.upgrade().ok_or(ChannelError::Disconnected)?;
        if pipe.closed.get() {
            return Err(ChannelError::Disconnected);
        }
        let frame = if network.config.get().codec { through_codec(&frame)? } else { frame };
        let due = (reactor::now() + network.delay()).max(pipe.last_due.get());
        pipe.last_due.set(due);
        pipe.queue.borrow_mut().push_back((due, frame));
        pipe.changed.notify_all();
        let odds = network.break_one_in.get();
        if odds > 0 && reactor::random_u64().is_multiple_of(odds) {
            self.link.break_now();
        }
        Ok(())
    }

    fn close(&self) {
        self.link.pipes.iter().for_each(Pipe::close);
    }
}

fn through_codec(frame: &Frame) -> Result<Frame, ChannelError> {
    let mut bytes = frame.encode_head().to_vec();
    for part in &frame.payload {
        bytes.extend_from_slice(part);
    }
    let (frame, _) = Frame::parse(&bytes)?.expect("a whole frame was encoded");
    Ok(frame)
}

impl Drop for LocalSink {
    fn drop(&mut self) {
        self.link.pipes[self.out].close();
    }
}

struct LocalSource {
    link: Rc<Link>,
    into: usize,
}

impl FrameSource for LocalSource {
    fn recv(&mut self) -> LocalBoxFuture<'_, Result<Frame, ChannelError>> {
        Box::pin(async move {
            let pipe = &self.link.pipes[self.into];
            loop {
                let changed = pipe.changed.changed();
                let network = self.link.network.upgrade().ok_or(ChannelError::Disconnected)?;
                if network.is_cut(&self.link.ends) {
                    // A broken connection is noticed even so: the own side knows.
                    if pipe.closed.get() && pipe.queue.borrow().is_empty() {
                        return Err(ChannelError::Disconnected);
                    }
                    drop(network);
                    changed.await;
                    continue;
                }
                let due = pipe.queue.borrow().front().map(|(due, _)| *due);
                match due {
                    Some(due) if due <= reactor::now() => {
                        let (_, frame) = pipe.queue.borrow_mut().pop_front().expect("seen");
                        return Ok(frame);
                    }
                    Some(due) => reactor::sleep_until(due).await,
                    None if pipe.closed.get() => return Err(ChannelError::Disconnected),
                    None => changed.await,
                }
            }
        })
    }
}

impl Drop for LocalSource {
    fn drop(&mut self) {
        let pipe = &self.link.pipes[self.into];
        pipe.queue.borrow_mut().clear();
        pipe.close();
    }
}

/// Takes connections made to one address of a [`Network`]. Dropping it refuses new ones.
pub struct LocalListener {
    network: Rc<Shared>,
    address: String,
    id: u64,
    /// Taken out while somebody waits in `accept`.
    incoming: RefCell<Option<queue::Receiver<Connection>>>,
}

/// Puts the queue back also when the wait is given up.
struct PutBack<'a> {
    listener: &'a LocalListener,
    incoming: Option<queue::Receiver<Connection>>,
}

impl Drop for PutBack<'_> {
    fn drop(&mut self) {
        *self.listener.incoming.borrow_mut() = self.incoming.take();
    }
}

impl Listener for LocalListener {
    fn accept(&self) -> LocalBoxFuture<'_, Result<Connection, ChannelError>> {
        Box::pin(async move {
            let incoming = self.incoming.borrow_mut().take();
            let mut held = PutBack { listener: self, incoming };
            let incoming = held.incoming.as_mut().expect("one task accepts");
            incoming.recv().await.ok_or(ChannelError::Disconnected)
        })
    }
}

impl Drop for LocalListener {
    fn drop(&mut self) {
        let mut listeners = self.network.listeners.borrow_mut();
        if listeners.get(&self.address).is_some_and(|(id, _)| *id == self.id) {
            listeners.remove(&self.address);
        }
    }
}
