//! Suites that nobody here wrote, on a mount: the Rust ports of `pjdfstest` (what POSIX says of names, modes, owners
//! and times) and of `fsx` (reads, writes, mappings, truncations of one file against a copy in memory).
//!
//! `make test` installs both (`scripts/suites`). Needs root, io_uring and /dev/fuse.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;
use support::{Cluster, TINY, can_run, said, signal};

/// Where `scripts/suites` puts them; told by `scripts/test`.
const TOOLS: &str = "LEVADA_TOOLS";
/// Cases that need a file system that can be mounted again read-only, or whose bound on links can be reached.
const PJD_SKIPPED: u32 = 14;
const PJD_CONFIG: &str = r#"
[features]
secondary_fs = "SECOND"
posix_fallocate = {}
rename_ctime = {}
utimensat = {}
utime_now = {}
stat_st_birthtime = {}
[settings]
naptime = 0.01
allow_remount = false
[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"], ["bin", "bin"]]
"#;
const FSX_CONFIG: &str = "
flen = 1048576
[weights]
invalidate = 1
truncate = 10
close_open = 1
fsync = 1
fdatasync = 1
mapread = 10
mapwrite = 10
read = 10
write = 10
sendfile = 1
";
const FSX_OPERATIONS: &str = "4000";

/// `None`, and says so, where the suite is not installed.
fn tool(name: &str) -> Option<PathBuf> {
    if !can_run() {
        return None;
    }
    let Some(tools) = std::env::var_os(TOOLS) else {
        eprintln!("skipped: {TOOLS} does not say where {name} is; see scripts/test");
        return None;
    };
    let tool = Path::new(&tools).join("bin").join(name);
    assert!(tool.exists(), "{} is missing: run scripts/suites", tool.display());
    Some(tool)
}

fn mounted(name: &str) -> Cluster {
    let cluster = Cluster::new(name, &TINY.replace("72MiB", "160MiB"));
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    cluster
}

#[test]
fn pjdfstest_passes() {
    let Some(pjdfstest) = tool("pjdfstest") else { return };
    let cluster = mounted("pjd");
    let second = cluster.path("second");
    fs::create_dir(&second).expect("made");
    let config = cluster.path("pjdfstest.toml");
    let text = PJD_CONFIG.replace("SECOND", second.to_str().expect("plain text"));
    fs::write(&config, text).expect("written");
    let output = Command::new(pjdfstest)
        .args(["-c".as_ref(), config.as_os_str(), "-p".as_ref(), cluster.mnt().as_os_str()])
        .output()
        .expect("it starts");
    let said = said(&output);
    assert!(output.status.success(), "{said}");
    let summary = said.lines().find(|line| line.starts_with("Summary")).expect("a summary");
    println!("{summary}");
    let count = |what: &str| -> u32 {
        let part = summary.split([':', ',']).find_map(|part| part.trim().strip_suffix(what));
        part.expect("a count").trim().parse().expect("a number")
    };
    assert_eq!(count("failed"), 0, "{said}");
    assert!(count("skipped") <= PJD_SKIPPED, "{said}");
    assert!(count("passed") >= 380, "{said}");
}

fn start_fsx(fsx: &Path, cluster: &Cluster, seed: u32) -> std::process::Child {
    let config = cluster.path(&format!("fsx-{seed}.toml"));
    fs::write(&config, FSX_CONFIG).expect("written");
    Command::new(fsx)
        .args(["-q".as_ref(), "-f".as_ref(), config.as_os_str()])
        .args(["-N", FSX_OPERATIONS, "-S", &seed.to_string()])
        .arg("-P")
        .arg(cluster.dir.path())
        .arg(cluster.mnt().join(format!("fsx-{seed}")))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts")
}

fn must_pass(seed: u32, output: &Output) {
    assert!(output.status.success(), "fsx, seed {seed}: {}", said(output));
}

#[test]
fn fsx_passes() {
    let Some(fsx) = tool("fsx") else { return };
    let cluster = mounted("fsx");
    // Each has a file of its own, and waits more than it works.
    let running: Vec<_> = (0..4).map(|seed| (seed, start_fsx(&fsx, &cluster, seed))).collect();
    for (seed, fsx) in running {
        must_pass(seed, &fsx.wait_with_output().expect("its output"));
    }
}

#[test]
fn fsx_does_not_notice_that_the_node_is_killed() {
    let Some(fsx) = tool("fsx") else { return };
    let cluster = mounted("fsx-killed");
    let running: Vec<_> = (10..12).map(|seed| (seed, start_fsx(&fsx, &cluster, seed))).collect();
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(500));
        signal("-KILL", cluster.node().expect("it runs"));
        cluster.ok(&["up"]);
    }
    for (seed, fsx) in running {
        must_pass(seed, &fsx.wait_with_output().expect("its output"));
    }
}
