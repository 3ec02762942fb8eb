//! Programs that people run, on a mount: they find what they would find on a local file system, also when the node
//! or the mount is killed under them.
//!
//! `make test` installs them (`scripts/suites`). Needs root, io_uring and /dev/fuse.

mod builds;
mod postgresql;
mod saves;
mod sqlite;
#[path = "../support/mod.rs"]
mod support;
mod trees;

use std::path::Path;
use std::process::{Command, Stdio};
use support::{Cluster, TINY, can_run, said};

/// `None`, and says so, where the programs are not known to be installed.
fn mounted(name: &str) -> Option<Cluster> {
    mounted_on(name, &TINY.replace("72MiB", "256MiB"))
}

/// The same on what `cluster` describes.
fn mounted_on(name: &str, cluster: &str) -> Option<Cluster> {
    if !can_run() || std::env::var_os("LEVADA_TOOLS").is_none() {
        eprintln!("skipped: not run by scripts/test, which installs the programs");
        return None;
    }
    let cluster = Cluster::new(name, cluster);
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    Some(cluster)
}

/// Runs a line in a shell, in `dir`; it must succeed. What it printed.
fn shell(dir: &Path, line: &str) -> String {
    let output = Command::new("bash")
        .args(["-euo", "pipefail", "-c", line])
        .current_dir(dir)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_AUTHOR_NAME", "a")
        .env("GIT_AUTHOR_EMAIL", "a@example.org")
        .env("GIT_COMMITTER_NAME", "a")
        .env("GIT_COMMITTER_EMAIL", "a@example.org")
        .stdin(Stdio::null())
        .output()
        .expect("a shell");
    let said = said(&output);
    assert!(output.status.success(), "{line}: {said}");
    said
}
