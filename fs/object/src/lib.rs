//! The object service: requests from the wire, answered from an object log.
//!
//! One [`ObjectService`] per target; a `levada_wire::rpc::Router` puts several behind one
//! listener. Knows nothing of files, layouts or other targets.

mod log;
mod memory;
mod meters;
mod objects;
mod repeats;
mod service;

pub use memory::MemoryObjects;
pub use meters::Meters;
pub use objects::{Ack, ObjectFuture, Objects, Space};
pub use service::ObjectService;
