//! RAID: array blocks to member blocks.

mod array;

pub use array::{Array, ArrayGeometry, IoClass, MemberSet};
