//! What POSIX and Linux promise programs, and its limits, on a mount of a cluster: the far ends of names, paths, links,
//! sizes, directories and room, and calls that few programs make. `docs/SEMANTICS.md` names the test of each promise.
//!
//! Needs root, io_uring and /dev/fuse.

mod attributes;
mod directory;
mod names;
mod room;
mod sizes;
#[path = "../support/mod.rs"]
mod support;

use rustix::io::Errno;
use std::io;
use support::{Cluster, TINY, can_run};

/// A mounted cluster; `None`, and says so, where none can be.
fn mounted(name: &str) -> Option<Cluster> {
    mounted_on(name, TINY)
}

/// The same on what `cluster` describes.
fn mounted_on(name: &str, cluster: &str) -> Option<Cluster> {
    if !can_run() {
        return None;
    }
    let cluster = Cluster::new(name, cluster);
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    Some(cluster)
}

fn remount(cluster: &Cluster) {
    cluster.ok(&["umount", "mnt"]);
    cluster.ok(&["mount", "mnt"]);
}

/// The error number of what must fail.
#[track_caller]
fn errno<T>(result: io::Result<T>) -> Errno {
    match result {
        Ok(_) => panic!("it succeeds"),
        Err(error) => Errno::from_io_error(&error).expect("of a system call"),
    }
}
