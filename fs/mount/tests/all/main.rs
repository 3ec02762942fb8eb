//! The mount from outside, in one program, as each would hold the whole stack once more: through the kernel (`world`; needs
//! root and `/dev/fuse`), and without one (`names`, `hostile`,
//! `subtree`).
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
mod subtree;
mod syscalls;
mod unnamed;
mod world;
mod xattrs;

use levada_meta::FsConfig;

/// The file system of every test.
fn file_system(stripe_count: u32, stripe_unit: u64) -> FsConfig {
    FsConfig {
        uuid: [7; 16],
        name: "test".to_owned(),
        target: 0,
        stripe_count,
        stripe_unit,
        inodes_max: 1_000_000,
        root_mode: 0o755,
        root_uid: 0,
        root_gid: 0,
    }
}
