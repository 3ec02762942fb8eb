//! Devices: one interface for everything that stores blocks.
//!
//! Knows nothing of arrays, objects or files.

mod device;
mod error;
mod ram;

pub use device::{Device, DeviceInfo, Durability, Health, IoFuture, check_range};
pub use error::BlockError;
pub use ram::RamDevice;
