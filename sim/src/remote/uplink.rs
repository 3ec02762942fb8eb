//! The network as one process has it.

use levada_base::stream::{Connection, MemoryNetwork, MemoryStream, Side};
use levada_device::nvme::Network;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

/// See the module. Clones are the same.
#[derive(Clone)]
pub struct Uplink {
    net: MemoryNetwork,
    made: Rc<RefCell<Vec<(SocketAddr, Connection)>>>,
    is_cut: Rc<Cell<bool>>,
    was_cut: Rc<Cell<bool>>,
    /// Where nothing gets to, though it does elsewhere.
    unreached: Rc<RefCell<BTreeSet<SocketAddr>>>,
}

impl Uplink {
    pub fn new(net: MemoryNetwork) -> Self {
        let (made, is_cut, was_cut, unreached) = Default::default();
        Self { net, made, is_cut, was_cut, unreached }
    }

    /// Nothing goes out or comes in, and nobody is told.
    pub fn cut(&self) {
        self.is_cut.set(true);
        self.was_cut.set(true);
        self.each(Connection::lose);
    }

    /// The same of what leads to these addresses.
    pub fn cut_from(&self, addresses: &[SocketAddr]) {
        self.unreached.borrow_mut().extend(addresses);
        for (at, connection) in &*self.made.borrow() {
            if addresses.contains(at) {
                connection.lose();
            }
        }
    }

    /// It was cut off, for however long.
    pub fn was_cut(&self) -> bool {
        self.was_cut.get()
    }

    /// The process is no more: others are told by its system, and it connects nowhere.
    pub fn die(&self) {
        self.is_cut.set(true);
        self.each(Connection::reset);
    }

    pub fn mend(&self) {
        self.is_cut.set(false);
        self.join();
    }

    /// What is not cut off altogether gets everywhere.
    pub fn join(&self) {
        self.unreached.borrow_mut().clear();
    }

    /// What it sends waits; `release` lets it go on.
    pub fn hold(&self) {
        self.each(|connection| connection.hold(Side::Caller));
    }

    pub fn release(&self) {
        self.each(|connection| connection.release(Side::Caller));
    }

    fn reaches(&self, address: SocketAddr) -> bool {
        !self.is_cut.get() && !self.unreached.borrow().contains(&address)
    }

    fn each(&self, what: impl Fn(&Connection)) {
        self.made.borrow().iter().for_each(|(_, connection)| what(connection));
    }
}

impl Network for Uplink {
    type Stream = MemoryStream;

    async fn connect(&self, address: SocketAddr) -> io::Result<MemoryStream> {
        if !self.reaches(address) {
            return pending().await;
        }
        let stream = self.net.connect(address).await?;
        if !self.reaches(address) {
            return pending().await;
        }
        // As over the network of a machine.
        stream.set_dead_after(Duration::from_secs(3));
        let mut made = self.made.borrow_mut();
        made.retain(|(_, connection)| connection.is_open());
        made.push((address, stream.connection()));
        Ok(stream)
    }
}
