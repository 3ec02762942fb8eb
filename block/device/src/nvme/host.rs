//! Who asks: what targets know a host by. An identifier has three parts: the process, the opening of a namespace, and the connection.

use levada_base::ids::Uuid;
use levada_base::reactor;
use levada_nvme::authentication::Secrets;
use levada_nvme::{Nqn, NqnError};
use std::sync::OnceLock;

/// A host identifier, which is what reservations belong to (Base, 8.8).
pub(crate) type HostId = [u8; 16];

/// What the identifiers of one process begin with, and those of one opening.
const PROCESS_BYTES: usize = 8;
const OPENING_BYTES: usize = 12;

/// Who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// What targets know it by when they decide who may connect.
    pub nqn: Nqn,
    /// By which it proves that it has this name, and who the target is.
    pub secrets: Option<Secrets>,
    /// What its host identifiers begin with: random, of this process alone.
    pub process: [u8; PROCESS_BYTES],
}

/// A namespace that is opened. Each of its connections is a host of its own, so that what one has left under way can be shut out by another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Opening([u8; OPENING_BYTES]);

impl Host {
    /// This process of the host `nqn`.
    #[must_use]
    pub fn new(nqn: Nqn) -> Self {
        static PROCESS: OnceLock<Uuid> = OnceLock::new();
        let uuid = PROCESS.get_or_init(Uuid::new_v4);
        let process = *uuid.as_bytes().first_chunk().expect("it has as many");
        Self { nqn, secrets: None, process }
    }

    /// A host that nobody knows by name.
    ///
    /// # Errors
    ///
    /// None that happens: the name is one.
    pub fn anonymous() -> Result<Self, NqnError> {
        let uuid = Uuid::new_v4();
        let nqn = Nqn::new(format!("nqn.2014-08.org.nvmexpress:uuid:{uuid}"))?;
        Ok(Self::new(nqn))
    }
}

impl Opening {
    /// Another one than all others of the process.
    pub fn new(host: &Host) -> Self {
        let mut start = [0; OPENING_BYTES];
        start[..PROCESS_BYTES].copy_from_slice(&host.process);
        start[PROCESS_BYTES..].copy_from_slice(&(reactor::random_u64() as u32).to_le_bytes());
        Self(start)
    }

    /// The identifier of a connection.
    pub fn id(&self, connection: u32) -> HostId {
        let mut id = [0; 16];
        id[..OPENING_BYTES].copy_from_slice(&self.0);
        id[OPENING_BYTES..].copy_from_slice(&connection.to_le_bytes());
        id
    }

    #[cfg(test)]
    pub fn at(start: [u8; OPENING_BYTES]) -> Self {
        Self(start)
    }

    pub fn has(&self, id: &HostId) -> bool {
        id[..OPENING_BYTES] == self.0
    }
}

/// Both are of one process.
pub(crate) fn are_of_one_process(one: &HostId, other: &HostId) -> bool {
    one[..PROCESS_BYTES] == other[..PROCESS_BYTES]
}

/// A number that no other connection of the opening has before 65,536 later. Those of other openings rarely have it, though all count from 1.
pub(crate) fn number_of(id: &HostId) -> u16 {
    let of_opening = u16::from_le_bytes([id[PROCESS_BYTES], id[PROCESS_BYTES + 1]]);
    of_opening ^ connection_of(id) as u16
}

/// The connection that an identifier stands for.
pub(crate) fn connection_of(id: &HostId) -> u32 {
    let [.., a, b, c, d] = *id;
    u32::from_le_bytes([a, b, c, d])
}
