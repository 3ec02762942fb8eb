//! A network in memory, whose connections can be cut, or swallow what they are given.

use super::target::Target;
use crate::nvme::Network;
use levada_base::reactor;
use levada_base::stream::ByteStream;
use levada_base::sync::Notify;
use levada_base::{BufMut, IoVec};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;

#[derive(Default)]
struct Direction {
    bytes: RefCell<VecDeque<u8>>,
    is_closed: Cell<bool>,
    swallows: Cell<bool>,
    changed: Notify,
}

/// One end of a connection.
#[derive(Clone)]
pub struct Wire {
    incoming: Rc<Direction>,
    outgoing: Rc<Direction>,
}

impl Wire {
    pub fn pair() -> (Self, Self) {
        let (one, other) = (Rc::<Direction>::default(), Rc::<Direction>::default());
        let end = Self { incoming: Rc::clone(&one), outgoing: Rc::clone(&other) };
        (end, Self { incoming: other, outgoing: one })
    }

    /// What is sent from now on, in either direction, arrives nowhere, and nobody hears of it.
    pub fn swallow(&self) {
        self.incoming.swallows.set(true);
        self.outgoing.swallows.set(true);
    }

    pub fn cut(&self) {
        for direction in [&self.incoming, &self.outgoing] {
            direction.is_closed.set(true);
            direction.changed.notify_all();
        }
    }
}

impl ByteStream for Wire {
    async fn read(&self, mut into: BufMut) -> io::Result<(BufMut, usize)> {
        let there = || {
            let has_some = !self.incoming.bytes.borrow().is_empty();
            (has_some || self.incoming.is_closed.get()).then_some(())
        };
        self.incoming.changed.until(there).await;
        let mut bytes = self.incoming.bytes.borrow_mut();
        let count = bytes.len().min(into.len());
        for (to, from) in into.iter_mut().zip(bytes.drain(..count)) {
            *to = from;
        }
        Ok((into, count))
    }

    async fn read_exact(&self, into: BufMut) -> io::Result<BufMut> {
        let (into, landed) = self.land(into).await;
        landed.map(|()| into)
    }

    async fn land(&self, into: BufMut) -> (BufMut, io::Result<()>) {
        let mut rest = into;
        let mut whole = rest.split_to(0);
        while !rest.is_empty() {
            let (mut read, count) = self.read(rest).await.expect("memory");
            let done = read.split_to(count);
            whole.unsplit(done);
            rest = read;
            if count == 0 {
                whole.unsplit(rest);
                return (whole, Err(io::ErrorKind::UnexpectedEof.into()));
            }
        }
        (whole, Ok(()))
    }

    async fn write_all(&self, from: IoVec) -> io::Result<()> {
        // As the network, somewhat later.
        reactor::yield_now().await;
        if self.outgoing.is_closed.get() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if !self.outgoing.swallows.get() {
            self.outgoing.bytes.borrow_mut().extend(from.iter().flat_map(|part| part.to_vec()));
            self.outgoing.changed.notify_all();
        }
        Ok(())
    }

    async fn close(&self) {
        if self.outgoing.swallows.get() {
            // The other side does not hear of this either.
            self.incoming.is_closed.set(true);
            self.incoming.changed.notify_all();
            let gone = Rc::clone(&self.outgoing);
            reactor::spawn(async move { gone.changed.notify_all() });
        } else {
            self.cut();
        }
    }
}

/// Targets at addresses.
#[derive(Clone, Default)]
pub struct Net(Rc<NetState>);

#[derive(Default)]
struct NetState {
    targets: RefCell<BTreeMap<SocketAddr, Rc<Target>>>,
    wires: RefCell<Vec<(SocketAddr, Wire)>>,
    /// Connections that were tried.
    tried: Cell<u32>,
}

impl Net {
    pub fn listen(&self, address: SocketAddr, target: &Rc<Target>) {
        self.0.targets.borrow_mut().insert(address, Rc::clone(target));
    }

    /// Nobody is there any more, and connections are reset.
    pub fn down(&self, address: SocketAddr) {
        self.0.targets.borrow_mut().remove(&address);
        self.reset(address);
    }

    pub fn reset(&self, address: SocketAddr) {
        self.each(address, Wire::cut);
    }

    /// Packets to and from the address are lost from now on; nobody answers there.
    pub fn swallow(&self, address: SocketAddr) {
        self.0.targets.borrow_mut().remove(&address);
        self.each(address, Wire::swallow);
    }

    fn each(&self, address: SocketAddr, what: impl Fn(&Wire)) {
        for (at, wire) in &*self.0.wires.borrow() {
            if *at == address {
                what(wire);
            }
        }
    }

    pub fn tried(&self) -> u32 {
        self.0.tried.get()
    }
}

impl Network for Net {
    type Stream = Wire;

    async fn connect(&self, address: SocketAddr) -> io::Result<Wire> {
        self.0.tried.set(self.0.tried.get() + 1);
        reactor::sleep(std::time::Duration::from_micros(50)).await;
        let target = self.0.targets.borrow().get(&address).cloned();
        let target = target.ok_or(io::ErrorKind::ConnectionRefused)?;
        let (host, other) = Wire::pair();
        self.0.wires.borrow_mut().push((address, host.clone()));
        reactor::spawn(async move { target.serve(other, address).await });
        Ok(host)
    }
}
