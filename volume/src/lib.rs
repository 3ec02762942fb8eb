//! Volumes: what exports hand to clients. Bytes of a fixed number, any offset and length of them at a time.
//!
//! - `volume`: the interface, which is all that an export knows.
//! - `array`: a volume that is an array, or a run of stripes of one.
//! - `thin`: a volume that is a file of the file system, or several that lie on each other; `catalogue`: all of them, by `name`, and
//!   their snapshots.
//! - `linear`: a volume that is stripes of an array; the pool of all of them, and its table.
//! - `model`: what tests compare every kind of volume with.
//! - `written_through`: a volume whose changes are durable when they are answered.
//! - `far`: a volume of another reactor of this process.
//! - `qos`: caps and guarantees; a volume whose requests wait for their turn.
//!
//! What always holds:
//! - A write that is answered is read by every read that begins later, through whichever export.
//! - Bytes that a request does not name keep their values, however small it is and whatever is written beside it.
//!
//! Knows nothing of protocols. After a crash what was flushed is there; durability is that of what it lies on.

mod array;
mod catalogue;
mod error;
mod far;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod gate;
mod linear;
#[cfg(any(test, feature = "model"))]
pub mod model;
mod name;
mod order;
pub mod qos;
mod thin;
mod volume;
mod written_through;

pub use array::ArrayVolume;
pub use catalogue::{Catalogue, Settled};
pub use error::VolumeError;
pub use far::{FarVolume, KnownSize, Way};
pub use linear::{LinearVolume, Pool, PoolError, TableFault};
pub use name::{NameError, SnapshotName, SnapshotNameError, Tenant, VolumeName};
pub use order::{
    Anyway, NewSize, OrderError, SnapshotRow, TenantRow, VolumeOrder, VolumeRow, VolumeStatus,
};
pub use thin::ThinVolume;
pub use volume::{Extent, Shape, Volume, VolumeFuture, Zeroing};
pub use written_through::WrittenThrough;
