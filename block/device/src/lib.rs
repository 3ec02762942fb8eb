//! Devices: one interface for everything that stores blocks.
//!
//! Stores: [`FileDevice`] (file or block device), [`nvme`] (a namespace of a remote subsystem), [`RamDevice`], [`NullDevice`]. Wrappers:
//! [`ModelDevice`] (rate and latency), [`FaultDevice`], [`VolatileDevice`] (power loss). A
//! [`Drive`] is a device with a label; its [`Slice`]s are the members of arrays.
//!
//! Knows nothing of arrays, objects or files.

mod device;
mod drive;
mod error;
mod fault;
mod file;
mod foreign;
mod label;
mod local_nvme;
mod model;
mod null;
pub mod nvme;
mod ram;
mod slice;
mod volatile;

pub use device::{
    Device, DeviceInfo, Durability, Health, IoFuture, LentFuture, Witness, check_range,
};
pub use drive::{Drive, DriveError, DriveIdentity, Overwrite, read_label};
pub use error::BlockError;
pub use fault::{FaultDevice, Faults};
pub use file::{FileDevice, FileDeviceError, Prepare};
pub use foreign::{Foreign, find_foreign};
pub use label::{
    LABEL_BYTES, Label, LabelError, NAME_BYTES_MAX, RESERVED_BYTES, SLICE_ALIGN_BYTES, SLICES_MAX,
    SliceEntry, SliceKind,
};
pub use levada_nvme::log::{Health as HealthPage, Warnings};
pub use model::{DriveModel, ModelDevice};
pub use null::NullDevice;
pub use ram::RamDevice;
pub use slice::Slice;
pub use volatile::VolatileDevice;
