//! The object log of one target: objects, as versioned extents in segments of whole stripes.
//!
//! Nothing is overwritten in place and a write never reads. The formats, and why they are so:
//! docs/design/0005-object-log.md.

mod bytes;
mod check;
mod clean;
mod commit;
mod counted;
mod cuts;
mod deep;
mod error;
mod extents;
mod format;
mod fsck;
#[doc(hidden)]
pub mod fuzz;
mod heat;
mod list;
mod load;
mod log;
mod object;
mod observe;
mod open;
mod pages;
mod ranges;
mod read;
mod rebuild;
mod rows;
mod scrub;
mod segment;
mod space;
mod staged;
mod stripe;
mod summary;
mod write;

pub use deep::{SegmentFinding, SegmentReport, check_segments};
pub use error::LogError;
pub use fsck::{IndexFinding, IndexReport, IndexedObject, IndexedObjects, check_index};
pub use list::ListedObjects;
pub use log::{Ack, Config, Counters, ObjectLog, Stability, Stat};
pub use ranges::DataRanges;
pub use rebuild::{RebuildReport, Rebuilt};
pub use scrub::{ScrubOrder, ScrubProgress, ScrubRecord, ScrubReport};
pub use space::Space;
pub use staged::StagedRows;
