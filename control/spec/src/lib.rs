//! The cluster file `levada.toml`: what should exist.
//!
//! One text file names the hosts, enclosures, drives, arrays, file systems and mounts.
//! This crate reads it, says what is wrong with it (all of it, each with its line), and
//! says what the layout survives. It does no I/O beyond reading that file and looking at
//! which file a drive's path names; of the project it knows `levada-nvme`, whose URLs it reads.
//!
//! What always holds:
//! - A [`ClusterFile`] that came out of [`ClusterFile::parse`] or [`ClusterFile::load`] passed
//!   every check in `check`: each name it mentions exists, and each geometry is possible.
//! - Any text is answered by a value or by a list of problems; none panics.
//! - [`ClusterFile::to_toml`] writes a text that parses back to the same value.
//!
//! Every key, with its type, default and allowed values: `docs/cluster-file.md`.

mod check;
mod defaults;
mod error;
mod file;
mod parse;
mod pattern;
mod reader;
mod remote;
mod size;
mod sought;
mod subtree;
mod survive;
mod write;

pub use defaults::{BOX_DRIVES, BOX_ENCLOSURES, BoxError};
pub use error::{Place, Problem, ProblemKind, Report, Severity, SpecError};
pub use file::{
    ARRAY_DRIVES_MAX, ArraySpec, ClusterFile, DRIVE_RESERVED_BYTES, DriveSpec, EnclosureSpec,
    ExportSpec, ExportWay, FileSystemSpec, GuestCacheSpec, HealthSpec, HostSpec, Level, Loaded,
    ModelSpec, MountSpec, NETWORK_CORES_MAX, ParityKind, RebuildSpec, SLICE_ALIGN_BYTES,
    STRIPE_CHUNKS_MAX, ScrubSpec, SliceSize, Spread, TAG_BYTES_MOST, TestingSpec, UnknownWord,
    Wrapper,
};
/// Where drives on the network are.
pub use levada_nvme::NvmeUrl;
pub use pattern::{PatternError, of_numbers};
pub use remote::{EnclosureUrl, UrlError};
pub use size::{Bytes, SizeError};
pub use sought::{FoundEnclosure, SoughtEnclosure, sought, with_found};
pub use subtree::{SubtreeError, SubtreePath};
pub use survive::{Placement, Required, Survival};
