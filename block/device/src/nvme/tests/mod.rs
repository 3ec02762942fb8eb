//! The initiator against a target in memory, on virtual time.

mod absences;
mod discovery;
mod hostile;
mod limits;
mod namespace;
mod owners;
mod paths;
mod proof;
mod strays;

use super::{Host, Options};
use levada_nvme::Nqn;
use std::net::SocketAddr;

fn address(last: u8) -> SocketAddr {
    ([192, 0, 2, last], 4420).into()
}

fn options() -> Options {
    let nqn = Nqn::new("nqn.2014-08.org.example:host").expect("a name");
    Options::new(Host::new(nqn))
}
