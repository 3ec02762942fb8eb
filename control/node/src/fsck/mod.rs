//! Fsck: what a check of the cluster's targets found, as it is told; the check of a cluster that is
//! down ([`offline()`]), and that of one that is up ([`Checks`]); and an index made anew ([`rebuild()`]). What is checked is the business of the floors below.

mod deep;
mod join;
mod objects;
mod offline;
mod online;
mod rebuild;
mod report;
mod suspects;

pub use levada_meta::FsckProgress;
pub use offline::{FsckOptions, offline};
pub use online::{CheckConfig, Checks, FsckState, Running};
pub use rebuild::{Rebuild, RebuildOptions, RebuildReport, rebuild};
pub use report::{FoundItem, Sum, TargetReport};
