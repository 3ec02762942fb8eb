//! The metadata service of one target: names and attributes as transactions on the key-value store.
//!
//! From the outside in: the service ([`MetaService`]) takes requests; `ops` is what they mean;
//! `tx` is what they see; `cache` and `table` hold it; `row` and `key` are how it is stored
//! (`docs/design/0007-metadata.md`). Knows nothing of arrays, objects' contents or sockets.

mod accounts;
mod acl;
mod cache;
mod census;
mod check;
mod clients;
mod config;
mod fsck;
#[doc(hidden)]
pub mod fuzz;
mod key;
mod leases;
mod listing;
mod locks;
mod notices;
mod observe;
mod ops;
mod recovery;
mod rounds;
mod row;
mod serve;
mod service;
mod slots;
mod table;
mod tail;
#[cfg(test)]
mod tests;
mod tx;

pub use accounts::{Account, DEFAULT_ID, Limits};
pub use census::{Census, FileNote, census};
pub use check::{Problem, check};
pub use config::{CallHeader, FsConfig, MetaError, ServeConfig};
pub use fsck::{
    EntryFault, FileNow, FileRow, FileUse, Files, Finding, Fsck, FsckConfig, FsckProgress,
    FsckReport, Known, List, Numbers, Paths, RepairOptions, note_components, repair,
};
pub use row::{Damaged, Limit, Subject, SubjectKind, Usage};
pub use service::{ClientNote, MetaService};
