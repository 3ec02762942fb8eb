//! Ordered transactional keys: an intent log, what it changed, and a checkpoint.

mod store;

pub use store::{Batch, Bytes, Config, KvError, Store};
