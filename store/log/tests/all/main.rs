//! All tests of this crate's outside in one program: what they drive is compiled once.

mod bad_rows;
mod check;
mod cleaner;
mod deep;
mod fsck;
mod full_index;
mod large;
mod list;
mod memory;
mod model;
mod pages;
mod promise;
mod raid6;
mod rebuild;
mod rot;
mod scrub;
mod space;
mod support;
