//! RAID: array blocks to member blocks.
//!
//! [`RaidArray`] is an open array of any level; [`Array`] is what stores see of it. The format
//! on members and the promises after power loss: docs/design/0003-array-format.md.
//!
//! Read it downwards: `raid` (the interface), `read` and `write` (a request), `engine` (members
//! and their errors), `standing` (superblocks and map pages), and beside them `assemble`,
//! `resync`, `rebuild`, `scrub` and their `pace`, `away`, `slow`, `neighbours`. A level is one file of arithmetic: `raid0`, `raid1`, `raid5`,
//! `raid6`, `nplusm`; those with parity share `rotation`.
//!
//! Knows nothing of objects or files, and trusts no byte of a superblock or map page.

mod agreed;
mod array;
mod assemble;
mod away;
mod engine;
mod error;
#[doc(hidden)]
pub mod fuzz;
mod journal;
mod layout;
mod lent;
mod looks;
mod lost;
mod map;
mod mark;
mod member;
mod neighbours;
mod nplusm;
mod pace;
mod raid;
mod raid0;
mod raid1;
mod raid5;
mod raid6;
mod read;
mod rebuild;
mod recorded;
mod redundancy;
mod resync;
mod rotation;
mod rows;
mod scrub;
mod slow;
mod spread;
mod standing;
mod status;
mod superblock;
mod update;
mod views;
mod vote;
mod whole;
mod write;

pub use array::{Array, ArrayGeometry, IoClass, MemberSet};
pub use assemble::{ArraySpec, MemberSpec};
pub use engine::UNREADABLE_CHUNKS_MAX;
pub use error::{AssemblyReport, Finding, Misfit, RaidError};
pub use layout::Level;
pub use looks::look_until_steady;
pub use member::MemberState;
pub use pace::{Foreground, Limits, Pace};
pub use raid::RaidArray;
pub use recorded::{Recorded, RecordedMember};
pub use scrub::ScrubReport;
pub use standing::Admitted;
pub use status::{ArrayEvent, ArrayStatus, MemberStatus, Progress};
pub use superblock::{ARRAY_NAME_BYTES, MEMBER_NAME_BYTES, MEMBERS_MAX};
pub use views::{ByteRange, StripeRange};
