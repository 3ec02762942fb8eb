//! The target as a host sees it, over TCP: what it promises, and what hostile hosts get.

mod aborts;
mod authentication;
mod controllers;
mod errors;
mod host;
mod hostile;
mod memory;
mod requests;
mod reservations;
mod temperature;
mod tls;

use host::{Host, nqn};
use levada_base::reactor::{self, Reactor};
use levada_export_nvmet::{Claims, Hosts, Open, Opened, Path, Subsystem, Target, serial_of};
use memory::Memory;
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

const BLOCK_BYTES: u64 = 4096;
/// How long anything may take.
const LIMIT: Duration = Duration::from_secs(30);

fn run<F: Future>(test: F) -> F::Output {
    Reactor::new()
        .expect("an io_uring")
        .block_on(async { reactor::timeout(LIMIT, test).await.expect("the test ends in time") })
}

/// A target with one subsystem, whose namespace 1 is a volume in memory.
struct Served {
    target: Target,
    subsystem: Subsystem,
    path: Path,
    memory: Rc<Memory>,
}

fn opens(memory: &Rc<Memory>, guid: u8) -> Open {
    let memory = Rc::clone(memory);
    Rc::new(move || {
        let volume = Rc::clone(&memory) as Rc<dyn levada_volume::Volume>;
        Box::pin(async move { Some(Opened { volume, guid: [guid; 16] }) })
    })
}

impl Served {
    fn new(blocks: u64) -> Self {
        Self::for_hosts(blocks, Hosts::Any)
    }

    fn with_claims(blocks: u64, claims: Claims) -> Self {
        let served = Self::new(blocks);
        served.subsystem.add_claimed(1, opens(&served.memory, 7), claims);
        served
    }

    fn for_hosts(blocks: u64, hosts: Hosts) -> Self {
        let target = Target::new();
        let path = target.listen(([127, 0, 0, 1], 0).into()).expect("a port");
        let memory = Rc::new(Memory::new(blocks * BLOCK_BYTES));
        let name = nqn("nqn.2026-11.io.levada:test");
        let subsystem = Subsystem::new(name.clone(), serial_of(&name), hosts);
        subsystem.add(1, opens(&memory, 7));
        target.add(subsystem.clone());
        target.begin();
        Self { target, subsystem, path, memory }
    }

    /// A host with an admin queue and one for I/O.
    async fn host(&self) -> Host {
        Host::connect(self.path.address(), self.subsystem.nqn(), 1).await.expect("admitted")
    }
}
