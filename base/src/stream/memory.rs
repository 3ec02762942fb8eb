//! A network in memory, on the reactor's time: connections that take a while, stall, and break, as somebody orders.
//!
//! - [`MemoryNetwork`]: who listens at which address; how long things take there.
//! - [`MemoryStream`]: one end of a connection. One that is dropped is closed, as the system does for a process that dies.
//! - [`Connection`]: both ends, for who makes it fail.
//!
//! What always holds, as with TCP:
//! - Within a connection and a direction bytes arrive in their order, and without gaps: if some are lost, so is all that follows.
//! - Between connections there is no order.
//! - Whoever sends without being read waits, once [`WINDOW_BYTES`] are under way.
//! - What was sent before an end was closed may arrive afterwards, but no later than after [`LINGER`].
//!
//! In the simulator one seed fixes all of it: chance is the reactor's.

use super::ByteStream;
use crate::reactor::{self, Instant};
use crate::sync::Notify;
use crate::{Buf, BufMut, IoVec};
use futures_util::future::select;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::{Future, pending};
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// Bytes of one direction that were sent and are not read; then the sender waits.
const WINDOW_BYTES: usize = 256 << 10;
/// How long the system goes on sending for a connection that its owner has closed (what the initiator asks for: TCP_USER_TIMEOUT).
const LINGER: Duration = Duration::from_secs(3);
/// To connect takes a round trip.
const CONNECT: Duration = Duration::from_micros(50);

/// How long bytes are under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delay {
    /// Mostly up to so long.
    pub usual_max: Duration,
    /// One time in 64 up to so long.
    pub rare_max: Duration,
    /// Bytes that arrive together, at most; 0: what is sent at once.
    pub part_bytes_max: usize,
}

impl Delay {
    fn draw(self) -> Duration {
        if self.usual_max.is_zero() && self.rare_max.is_zero() {
            return Duration::ZERO;
        }
        let draw = reactor::random_u64();
        let max = if draw.is_multiple_of(64) { self.rare_max } else { self.usual_max };
        let max_ns = max.as_nanos() as u64;
        Duration::from_nanos((draw >> 8).checked_rem(max_ns).unwrap_or(0))
    }
}

/// One of the two ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Who has connected.
    Caller,
    /// Who has listened.
    Called,
}

/// What happens to what is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Passage {
    #[default]
    Flows,
    /// What had not arrived then waits.
    Held(Instant),
    /// It arrives nowhere.
    Lost,
}

/// From one end to the other.
#[derive(Default)]
struct Direction {
    /// What is under way, or has arrived and was not read, and when it arrives.
    parts: RefCell<VecDeque<(Instant, Buf)>>,
    /// Bytes of that, and of what was lost.
    bytes: Cell<usize>,
    /// Nothing arrives before.
    arrives: Cell<Instant>,
    passage: Cell<Passage>,
    /// What comes behind all that arrives: nothing more, or an error.
    end: Cell<Option<(Instant, Option<io::ErrorKind>)>>,
    /// The sender has closed its end then.
    closed: Cell<Option<Instant>>,
    /// The reader has closed its end.
    is_unread: Cell<bool>,
    /// What the sender is told.
    broken: Cell<Option<io::ErrorKind>>,
    changed: Notify,
    /// Something was read, or nothing will be.
    room: Notify,
}

/// What a reader finds.
enum Found {
    Bytes(usize),
    End(Option<io::ErrorKind>),
    Nothing { until: Option<Instant> },
}

impl Direction {
    /// What arrives later than now does so, unless it has to wait or is lost.
    fn arrives_by(&self, at: Instant) -> bool {
        let now = reactor::now();
        match self.passage.get() {
            Passage::Flows | Passage::Lost => at <= now,
            Passage::Held(since) => at <= since,
        }
    }

    fn read(&self, into: &mut [u8]) -> Found {
        let mut parts = self.parts.borrow_mut();
        let mut filled = 0;
        while let Some((at, part)) = parts.front_mut() {
            if filled == into.len() || !self.arrives_by(*at) {
                break;
            }
            let count = part.len().min(into.len() - filled);
            into[filled..filled + count].copy_from_slice(&part[..count]);
            filled += count;
            if count == part.len() {
                parts.pop_front();
            } else {
                *part = part.slice(count, part.len() - count);
            }
        }
        if filled > 0 {
            self.bytes.set(self.bytes.get() - filled);
            self.room.notify_all();
            return Found::Bytes(filled);
        }
        if self.is_unread.get() {
            return Found::End(None);
        }
        let next = match (parts.front(), self.end.get()) {
            (Some((at, _)), _) => *at,
            (None, Some((at, end))) if self.arrives_by(at) => return Found::End(end),
            (None, Some((at, _))) => at,
            (None, None) => return Found::Nothing { until: None },
        };
        let is_held = matches!(self.passage.get(), Passage::Held(_));
        Found::Nothing { until: (!is_held).then_some(next) }
    }

    /// Puts something under way: when it arrives.
    fn send(&self, delay: Delay) -> Instant {
        let at = (reactor::now() + delay.draw()).max(self.arrives.get());
        self.arrives.set(at);
        at
    }

    /// What has not arrived does not, from somewhere on.
    fn lose_some(&self) {
        let now = reactor::now();
        let mut parts = self.parts.borrow_mut();
        let arrived = parts.iter().take_while(|(at, _)| *at <= now && self.arrives_by(*at)).count();
        let mut rest = parts.split_off(arrived);
        let total: usize = rest.iter().map(|(_, part)| part.len()).sum();
        let mut left = if total == 0 { 0 } else { reactor::random_u64() as usize % (total + 1) };
        while let Some((at, part)) = rest.pop_front().filter(|_| left > 0) {
            let kept = part.slice(0, part.len().min(left));
            left -= kept.len();
            parts.push_back((at, kept));
        }
    }

    fn end(&self, end: Option<io::ErrorKind>, at: Instant) {
        self.end.set(Some((at, end)));
        self.changed.notify_all();
    }

    /// All that was sent has arrived, and that it is all.
    fn has_ended(&self) -> bool {
        let has_arrived = |(at, _): &(Instant, Buf)| self.arrives_by(*at);
        self.end.get().is_some_and(|(at, _)| self.arrives_by(at))
            && self.parts.borrow().iter().all(has_arrived)
    }

    fn breaks(&self, error: io::ErrorKind) {
        self.broken.set(Some(error));
        self.room.notify_all();
    }

    fn set_passage(&self, passage: Passage) {
        self.passage.set(passage);
        self.changed.notify_all();
        self.room.notify_all();
    }

    fn release(&self) {
        let Passage::Held(since) = self.passage.get() else { return };
        if self.closed.get().is_some_and(|closed| closed.elapsed() > LINGER) {
            // The system has given it up, and nobody says so.
            self.parts.borrow_mut().retain(|(at, _)| *at <= since);
            self.end.set(None);
            return self.set_passage(Passage::Lost);
        }
        self.set_passage(Passage::Flows);
    }
}

/// Both ends of a connection.
#[derive(Clone)]
pub struct Connection(Rc<Both>);

struct Both {
    /// What the caller sends, and what the called one does.
    sent: [Direction; 2],
    delay: Rc<Cell<Delay>>,
    /// Ends that are not closed.
    open: Cell<u8>,
    /// Since when something does not arrive; the system of the other end would not answer.
    silent_since: Cell<Option<Instant>>,
}

impl Side {
    fn other(self) -> Self {
        match self {
            Self::Caller => Self::Called,
            Self::Called => Self::Caller,
        }
    }
}

impl Connection {
    fn sent_by(&self, side: Side) -> &Direction {
        match side {
            Side::Caller => &self.0.sent[0],
            Side::Called => &self.0.sent[1],
        }
    }

    /// True while one of the ends is not closed.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.0.open.get() > 0
    }

    /// The connection is reset, perhaps within something that is under way: both ends hear of it.
    pub fn reset(&self) {
        for side in [Side::Caller, Side::Called] {
            self.hears(side, io::ErrorKind::ConnectionReset);
        }
    }

    /// The system of one end gives the connection up, and tells its owner. The other one hears nothing from now on, and what it sends goes nowhere.
    pub fn reset_for(&self, side: Side) {
        self.lose();
        self.hears(side, io::ErrorKind::TimedOut);
    }

    fn hears(&self, side: Side, error: io::ErrorKind) {
        let (sent, received) = (self.sent_by(side), self.sent_by(side.other()));
        // Unless it has heard before that the other one is done.
        if !received.has_ended() {
            received.lose_some();
            received.set_passage(Passage::Flows);
            received.end(Some(error), reactor::now().max(received.arrives.get()));
        }
        sent.breaks(error);
    }

    /// What is sent from now on, and a part of what is under way, arrives nowhere, and nobody is told.
    pub fn lose(&self) {
        self.falls_silent();
        for direction in &self.0.sent {
            // What the reader was told by its own system stays.
            if matches!(direction.end.get(), None | Some((_, None))) && !direction.has_ended() {
                direction.lose_some();
                direction.end.set(None);
            }
            direction.set_passage(Passage::Lost);
        }
    }

    /// What one end sends waits, until it is [released](Self::release).
    pub fn hold(&self, side: Side) {
        let direction = self.sent_by(side);
        if direction.passage.get() == Passage::Flows {
            direction.set_passage(Passage::Held(reactor::now()));
        }
        self.falls_silent();
    }

    fn falls_silent(&self) {
        let since = self.0.silent_since.get().unwrap_or_else(reactor::now);
        self.0.silent_since.set(Some(since));
        self.0.sent.iter().for_each(|direction| direction.changed.notify_all());
    }

    /// What was held goes on.
    pub fn release(&self, side: Side) {
        self.sent_by(side).release();
        if self.0.sent.iter().all(|direction| direction.passage.get() == Passage::Flows) {
            self.0.silent_since.set(None);
        }
    }
}

/// One end of a connection; clones are the same. See the module.
#[derive(Clone)]
pub struct MemoryStream(Rc<End>);

struct End {
    connection: Connection,
    side: Side,
    is_closed: Cell<bool>,
    /// After so long without a sign of the other end's system its own gives the connection up.
    dead_after: Cell<Option<Duration>>,
}

impl End {
    fn sent(&self) -> &Direction {
        self.connection.sent_by(self.side)
    }

    fn received(&self) -> &Direction {
        self.connection.sent_by(self.side.other())
    }

    fn close(&self) {
        if self.is_closed.replace(true) {
            return;
        }
        let open = &self.connection.0.open;
        open.set(open.get() - 1);
        let (sent, received) = (self.sent(), self.received());
        received.is_unread.set(true);
        received.changed.notify_all();
        received.room.notify_all();
        sent.closed.set(Some(reactor::now()));
        if sent.passage.get() != Passage::Lost && sent.end.get().is_none() {
            sent.end(None, sent.send(self.connection.0.delay.get()));
        }
        sent.room.notify_all();
    }

    /// When its system gives the connection up.
    fn dead_at(&self) -> Option<Instant> {
        Some(self.connection.0.silent_since.get()? + self.dead_after.get()?)
    }

    fn is_dead(&self) -> bool {
        self.dead_at().is_some_and(|at| at <= reactor::now())
    }

    /// Waits for more to read.
    async fn more(&self, changed: impl Future<Output = ()>, until: Option<Instant>) {
        let until = [until, self.dead_at()].into_iter().flatten().min();
        match until {
            None => changed.await,
            Some(until) => _ = select(pin!(changed), reactor::sleep_until(until)).await,
        }
    }

    /// What keeps this end from sending.
    fn cannot_send(&self) -> Option<io::ErrorKind> {
        if self.is_dead() {
            return Some(io::ErrorKind::TimedOut);
        }
        let sent = self.sent();
        // Whoever does not read any more says so, if it can be heard.
        let is_told = sent.is_unread.get()
            && sent.passage.get() == Passage::Flows
            && self.received().passage.get() == Passage::Flows;
        let gone = self.is_closed.get() || is_told;
        sent.broken.get().or(gone.then_some(io::ErrorKind::BrokenPipe))
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.close();
    }
}

impl MemoryStream {
    /// Two ends, without a network that somebody could look at.
    #[must_use]
    pub fn pair() -> (Self, Self) {
        Self::with(Rc::default())
    }

    fn with(delay: Rc<Cell<Delay>>) -> (Self, Self) {
        let connection = Connection(Rc::new(Both {
            sent: Default::default(),
            delay,
            open: Cell::new(2),
            silent_since: Cell::default(),
        }));
        let end = |side| {
            let connection = connection.clone();
            Self(Rc::new(End {
                connection,
                side,
                is_closed: Cell::new(false),
                dead_after: Cell::default(),
            }))
        };
        (end(Side::Caller), end(Side::Called))
    }

    /// The connection is given up at this end when nothing of the other's system is heard for so long (TCP_USER_TIMEOUT and keep alive).
    pub fn set_dead_after(&self, dead_after: Duration) {
        self.0.dead_after.set(Some(dead_after));
    }

    /// Both ends, for who makes them fail.
    #[must_use]
    pub fn connection(&self) -> Connection {
        self.0.connection.clone()
    }
}

impl ByteStream for MemoryStream {
    async fn read(&self, mut into: BufMut) -> io::Result<(BufMut, usize)> {
        let received = self.0.received();
        loop {
            let changed = received.changed.changed();
            match received.read(&mut into) {
                Found::Bytes(count) => return Ok((into, count)),
                Found::End(None) => return Ok((into, 0)),
                Found::End(Some(error)) => return Err(error.into()),
                Found::Nothing { .. } if self.0.is_dead() => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Found::Nothing { until } => self.0.more(changed, until).await,
            }
        }
    }

    async fn read_exact(&self, into: BufMut) -> io::Result<BufMut> {
        let (into, landed) = self.land(into).await;
        landed.map(|()| into)
    }

    async fn land(&self, into: BufMut) -> (BufMut, io::Result<()>) {
        let mut rest = into;
        let mut whole = rest.split_to(0);
        while !rest.is_empty() {
            let received = self.0.received();
            let changed = received.changed.changed();
            match received.read(&mut rest) {
                Found::Bytes(count) => {
                    let done = rest.split_to(count);
                    whole.unsplit(done);
                }
                Found::End(error) => {
                    whole.unsplit(rest);
                    let error = error.unwrap_or(io::ErrorKind::UnexpectedEof);
                    return (whole, Err(error.into()));
                }
                Found::Nothing { .. } if self.0.is_dead() => {
                    whole.unsplit(rest);
                    return (whole, Err(io::ErrorKind::TimedOut.into()));
                }
                Found::Nothing { until } => self.0.more(changed, until).await,
            }
        }
        (whole, Ok(()))
    }

    async fn write_all(&self, from: IoVec) -> io::Result<()> {
        // The system takes it somewhat later.
        reactor::yield_now().await;
        let (sent, delay) = (self.0.sent(), self.0.connection.0.delay.get());
        for part in from {
            let mut at = 0;
            while at < part.len() {
                let room = sent.room.changed();
                if let Some(error) = self.0.cannot_send() {
                    return Err(error.into());
                }
                let free = WINDOW_BYTES.saturating_sub(sent.bytes.get());
                if free == 0 {
                    room.await;
                    continue;
                }
                let mut count = (part.len() - at).min(free);
                if delay.part_bytes_max > 0 {
                    count = count.min(1 + reactor::random_u64() as usize % delay.part_bytes_max);
                }
                sent.bytes.set(sent.bytes.get() + count);
                if sent.passage.get() != Passage::Lost && sent.end.get().is_none() {
                    let arrives = sent.send(delay);
                    sent.parts.borrow_mut().push_back((arrives, part.slice(at, count)));
                    sent.changed.notify_all();
                }
                at += count;
            }
        }
        match self.0.cannot_send() {
            Some(error) => Err(error.into()),
            None => Ok(()),
        }
    }

    async fn close(&self) {
        self.0.close();
    }
}

/// Takes a connection, at once; it is served by a task.
type Accept = dyn Fn(MemoryStream);

/// See the module. Clones are the same one.
#[derive(Clone, Default)]
pub struct MemoryNetwork(Rc<Net>);

#[derive(Default)]
struct Net {
    listening: RefCell<BTreeMap<SocketAddr, Rc<Accept>>>,
    connections: RefCell<Vec<(SocketAddr, Connection)>>,
    delays: RefCell<BTreeMap<SocketAddr, Rc<Cell<Delay>>>>,
    /// Who connects there hears nothing.
    silent: RefCell<BTreeSet<SocketAddr>>,
    tried: Cell<u64>,
}

impl MemoryNetwork {
    /// Who connects to `address` is handed to `accept`, rather than to whoever listened there before.
    pub fn listen(&self, address: SocketAddr, accept: impl Fn(MemoryStream) + 'static) {
        self.0.listening.borrow_mut().insert(address, Rc::new(accept));
    }

    /// Nobody listens at `address` any more; connections stay.
    pub fn stop_listening(&self, address: SocketAddr) {
        self.0.listening.borrow_mut().remove(&address);
    }

    /// All connections to `address` are reset.
    pub fn reset(&self, address: SocketAddr) {
        self.connections(address).iter().for_each(Connection::reset);
    }

    /// Nobody listens at `address` any more, and connections are reset.
    pub fn down(&self, address: SocketAddr) {
        self.stop_listening(address);
        self.reset(address);
    }

    /// Nobody listens at `address` any more, and what is sent over connections is lost, of which nobody hears.
    pub fn swallow(&self, address: SocketAddr) {
        self.stop_listening(address);
        self.connections(address).iter().for_each(Connection::lose);
    }

    /// Says whether those who connect to `address` wait for an answer in vain.
    pub fn set_silent(&self, address: SocketAddr, is_silent: bool) {
        let mut silent = self.0.silent.borrow_mut();
        if is_silent {
            silent.insert(address)
        } else {
            silent.remove(&address)
        };
    }

    /// How long things take from now on over all connections to `address`.
    pub fn set_delay(&self, address: SocketAddr, delay: Delay) {
        self.delay(address).set(delay);
    }

    fn delay(&self, address: SocketAddr) -> Rc<Cell<Delay>> {
        Rc::clone(self.0.delays.borrow_mut().entry(address).or_default())
    }

    /// Connections to `address` of which an end is open, the oldest first.
    #[must_use]
    pub fn connections(&self, address: SocketAddr) -> Vec<Connection> {
        let mut connections = self.0.connections.borrow_mut();
        connections.retain(|(_, connection)| connection.is_open());
        let there = connections.iter().filter(|(at, _)| *at == address);
        there.map(|(_, connection)| connection.clone()).collect()
    }

    /// Connections that were tried.
    #[must_use]
    pub fn tried(&self) -> u64 {
        self.0.tried.get()
    }

    /// A new connection to `address`; how long that may take is the caller's business.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::ConnectionRefused`] when nobody listens there.
    pub async fn connect(&self, address: SocketAddr) -> io::Result<MemoryStream> {
        self.0.tried.set(self.0.tried.get() + 1);
        let delay = self.delay(address);
        reactor::sleep(CONNECT + delay.get().draw()).await;
        if self.0.silent.borrow().contains(&address) {
            return pending().await;
        }
        let accept = self.0.listening.borrow().get(&address).cloned();
        let accept = accept.ok_or(io::ErrorKind::ConnectionRefused)?;
        let (caller, called) = MemoryStream::with(delay);
        let mut connections = self.0.connections.borrow_mut();
        connections.retain(|(_, connection)| connection.is_open());
        connections.push((address, caller.connection()));
        drop(connections);
        accept(called);
        Ok(caller)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reactor::Reactor;

    const ADDRESS: SocketAddr =
        SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1)), 4420);

    fn bytes(count: usize) -> IoVec {
        let all: Vec<u8> = (0..count).map(|at| (at / 251 + at) as u8).collect();
        Buf::copy_of(&all).into_vec()
    }

    /// All that arrives until the end, and what the end is.
    async fn read_all(stream: &MemoryStream) -> (Vec<u8>, io::Result<()>) {
        let mut all = Vec::new();
        loop {
            match stream.read(BufMut::zeroed(1000)).await {
                Ok((_, 0)) => return (all, Ok(())),
                Ok((read, count)) => all.extend_from_slice(&read[..count]),
                Err(error) => return (all, Err(error)),
            }
        }
    }

    fn slow() -> Delay {
        let ms = Duration::from_millis;
        Delay { usual_max: ms(1), rare_max: ms(50), part_bytes_max: 900 }
    }

    fn connected(net: &MemoryNetwork) -> Rc<RefCell<Option<MemoryStream>>> {
        let called = Rc::<RefCell<Option<MemoryStream>>>::default();
        let place = Rc::clone(&called);
        net.listen(ADDRESS, move |stream| *place.borrow_mut() = Some(stream));
        called
    }

    /// However they are delayed, held, cut off: what arrives is the beginning of what was sent.
    #[test]
    fn bytes_arrive_in_their_order_and_without_gaps() {
        for seed in 0..200 {
            Reactor::simulated(seed).block_on(async {
                let count = reactor::random_u64() as usize % 600_000;
                let fate = seed % 5;
                let net = MemoryNetwork::default();
                net.set_delay(ADDRESS, slow());
                let place = connected(&net);
                let caller = net.connect(ADDRESS).await.expect("somebody listens");
                let called = place.take().expect("accepted");
                let connection = caller.connection();
                let sending = reactor::spawn(async move {
                    let sent = caller.write_all(bytes(count)).await;
                    caller.close().await;
                    (caller, sent)
                });
                let fault = reactor::spawn(async move {
                    reactor::sleep(Duration::from_micros(reactor::random_u64() % 20_000)).await;
                    match fate {
                        0 => {}
                        1 => connection.reset(),
                        2 => connection.reset_for(Side::Called),
                        3 => {
                            connection.hold(Side::Caller);
                            reactor::sleep(Duration::from_secs(1)).await;
                            connection.release(Side::Caller);
                        }
                        _ => {
                            connection.lose();
                            reactor::sleep(Duration::from_secs(1)).await;
                            connection.reset_for(Side::Called);
                            connection.reset_for(Side::Caller);
                        }
                    }
                });
                let (arrived, end) = read_all(&called).await;
                let whole = crate::buf::joined(&bytes(count));
                assert!(whole.starts_with(&arrived), "{} of {count}", arrived.len());
                assert!(end.is_err() || arrived.len() == count, "seed {seed}");
                assert!(end.is_ok() || fate % 3 != 0, "seed {seed}");
                called.close().await;
                fault.await;
                drop(sending);
            });
        }
    }

    #[test]
    fn who_is_not_read_waits_and_who_is_closed_hears_of_it() {
        Reactor::simulated(1).block_on(async {
            let (caller, called) = MemoryStream::pair();
            let writer = caller.clone();
            let sending = reactor::spawn(async move { writer.write_all(bytes(1 << 20)).await });
            reactor::sleep(Duration::from_secs(1)).await;
            assert!(!sending.is_finished());
            called.close().await;
            let sent = sending.await.expect("not killed");
            assert_eq!(sent.expect_err("nobody reads").kind(), io::ErrorKind::BrokenPipe);
            assert_eq!(read_all(&caller).await.1.ok(), Some(()));
            assert!(caller.connection().is_open());
            drop(caller);
            assert!(!called.connection().is_open());
        });
    }

    #[test]
    fn what_is_held_for_long_after_its_sender_has_gone_never_arrives() {
        for (seconds, arrives) in [(2, true), (4, false)] {
            Reactor::simulated(1).block_on(async {
                let (caller, called) = MemoryStream::pair();
                let connection = caller.connection();
                connection.hold(Side::Caller);
                caller.write_all(bytes(10)).await.expect("taken");
                drop(caller);
                reactor::sleep(Duration::from_secs(seconds)).await;
                connection.release(Side::Caller);
                let read = reactor::timeout(Duration::from_secs(60), read_all(&called)).await;
                assert_eq!(read.is_ok_and(|(all, _)| all.len() == 10), arrives);
            });
        }
    }

    #[test]
    fn only_one_end_hears_of_a_half_open_connection() {
        Reactor::simulated(1).block_on(async {
            let (caller, called) = MemoryStream::pair();
            caller.connection().reset_for(Side::Called);
            assert!(read_all(&called).await.1.is_err());
            assert!(called.write_all(bytes(1)).await.is_err());
            caller.write_all(bytes(1)).await.expect("it seems to be sent");
            let read = reactor::timeout(Duration::from_secs(60), read_all(&caller)).await;
            assert!(read.is_err(), "nothing, for ever");
            caller.set_dead_after(Duration::from_secs(70));
            let begun = reactor::now();
            let (_, end) = read_all(&caller).await;
            assert_eq!(end.expect_err("nobody is there").kind(), io::ErrorKind::TimedOut);
            assert!(begun.elapsed() < Duration::from_secs(11), "{:?}", begun.elapsed());
            assert!(caller.write_all(bytes(1)).await.is_err());
        });
    }

    #[test]
    fn an_address_answers_refuses_or_is_silent() {
        Reactor::simulated(1).block_on(async {
            let net = MemoryNetwork::default();
            let refused = net.connect(ADDRESS).await.err().expect("nobody listens");
            assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
            let place = connected(&net);
            let caller = net.connect(ADDRESS).await.expect("somebody listens");
            assert_eq!(net.connections(ADDRESS).len(), 1);
            drop((caller, place.take()));
            assert_eq!(net.connections(ADDRESS).len(), 0);
            net.set_silent(ADDRESS, true);
            let connecting = reactor::timeout(Duration::from_secs(60), net.connect(ADDRESS));
            assert!(connecting.await.is_err());
            net.set_silent(ADDRESS, false);
            net.stop_listening(ADDRESS);
            assert!(net.connect(ADDRESS).await.is_err());
            assert_eq!(net.tried(), 4);
        });
    }
}
