//! Ordered transactional keys: an intent log, what it changed, and a checkpoint.
//!
//! A change goes into memory ([`Store::apply`]), then into the intent log on the area, where it is
//! durable ([`Store::durable`]), and later, with many others, into the checkpoint below. Knows
//! nothing of what the keys mean. The bytes: docs/design/0004-key-value-store.md.

mod cache;
mod checkpoint;
mod format;
#[doc(hidden)]
pub mod fuzz;
mod intent;
mod open;
mod overlay;
mod service;
mod store;
mod walk;

pub use overlay::row_cost;
pub use store::{BATCH_KEY_BYTES_MAX, Batch, Bytes, Config, KvError, Page, Store, Usage};
pub use walk::Walk;
