//! An address of a target: one of the paths to its subsystems.

use levada_nvme::log::AnaState;
use std::cell::Cell;
use std::net::SocketAddr;

/// A port. How good it is holds for all namespaces of all subsystems: they are one ANA group each.
#[derive(Debug)]
pub(crate) struct Port {
    pub id: u16,
    pub address: SocketAddr,
    state: Cell<AnaState>,
    /// Counts changes of `state`.
    changes: Cell<u64>,
}

impl Port {
    pub fn new(id: u16, address: SocketAddr) -> Self {
        let (state, changes) = (Cell::default(), Cell::default());
        Self { id, address, state, changes }
    }

    pub fn state(&self) -> AnaState {
        self.state.get()
    }

    pub fn changes(&self) -> u64 {
        self.changes.get()
    }

    /// True: it was another.
    pub fn set_state(&self, state: AnaState) -> bool {
        let is_new = self.state.replace(state) != state;
        if is_new {
            self.changes.set(self.changes.get() + 1);
        }
        is_new
    }
}
