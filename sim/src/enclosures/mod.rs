//! A cluster's arrays over drives on the network: several shelves, and several servers that take the drives from each other.
//!
//! The parts are real from the drives' targets to the arrays: target, initiator, the node's search for its drives, its claims, and what takes
//! drives back that were away. Only files are not served, and what is written is written to the arrays.
//!
//! - `scenario`: a seed, from the first server to the last, and how each leaves.
//! - `server`: a process that takes the drives, checks all that was written, and works until it dies, or learns that it has lost them.
//! - `around`: what befalls a shelf here, beyond what `remote` deals: outages that cost the arrays its drives.

mod around;
mod scenario;
mod server;

pub use scenario::enclosures;
