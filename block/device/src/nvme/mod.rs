//! The NVMe/TCP initiator: namespaces of remote subsystems as devices, in user space, on the reactor.
//!
//! From the top, as a request meets them:
//! - [`NvmeUrl`]: where a namespace is, and how it is reached; `resolve`: its hosts' addresses. `host`: who asks; `options`: how long things may take.
//! - [`NvmeNamespace`]: a request, cut into commands; `verdict`: what a status means. `fence`: its owners; `claim`: how they are told
//!   apart, without I/O.
//! - `paths`: which controller a command goes to, and what happens when one is lost. `sight`: what a controller leads to; `likeness`: whether two lead to one drive; `whole`: what a path needs before it is used. `unsettled`:
//!   changes that may still happen; `unflushed`: changes that may have to be made again.
//! - `controller`: an admin queue and I/O queues that live and die together. `notices`: what it tells of by itself. `proof`: who host and target are; `keys`: files of their
//!   secrets. TLS, if any, is below all of this: it is how connections come from the network (`options`). `discovery`: which subsystems there are at an address; `find`: and what is in them.
//! - `queue`: one connection; `pulse`: whether it still carries anything; `exchange`: what is open on it, without I/O; `landing`: buffers while data land in them.
//!
//! The rules for time and loss: docs/design/0023-nvme-initiator.md.

mod claim;
mod controller;
mod discovery;
mod exchange;
mod fence;
mod find;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod host;
mod keys;
mod landing;
mod likeness;
mod namespace;
mod notices;
mod options;
mod order;
mod paths;
mod proof;
mod pulse;
mod queue;
mod resolve;
mod sight;
#[cfg(any(test, feature = "fuzz"))]
mod target;
#[cfg(test)]
mod tests;
mod unflushed;
mod unsettled;
mod verdict;
mod whole;

pub use controller::{ConnectError, Stage};
pub use discovery::discover;
pub use find::{FoundNamespace, FoundSubsystem, find, look_into};
pub use host::Host;
pub use keys::{KeysError, read_keys};
pub use levada_nvme::{NvmeUrl, UrlError};
pub use namespace::{NamespaceError, NvmeNamespace};
pub use options::{Network, Options, Tcp, Timing};
pub use paths::{PathStatus, Standing};
pub use resolve::Resolver;
pub use unsettled::Changes;
