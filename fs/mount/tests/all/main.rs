//! The mount from outside, in one program, as each would hold the whole stack once more: through the kernel (`world`; needs
//! root and `/dev/fuse`), and without one (`names`, `hostile`).
#![allow(unsafe_code)] // system calls that std does not have

mod files;
mod hostile;
mod inodes;
mod leases;
mod locks;
mod names;
mod program;
mod ranges;
mod sharing;
mod syscalls;
mod unnamed;
mod world;
mod xattrs;
