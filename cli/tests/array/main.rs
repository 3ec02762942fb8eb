//! `levada array` as its users have it: the program, its JSON, the file it serves, and the kernel's file systems on that.
//!
//! Needs io_uring; what mounts, or attaches loop devices, also needs root and /dev/fuse, and is skipped without.

mod fixture;
mod kernel;
mod operator;
mod refused;
mod served;
#[path = "../support/mod.rs"]
mod support;
