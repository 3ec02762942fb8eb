//! Small clusters on other levels than the box has, with drives that fail and come in by themselves.
//!
//! Needs root, io_uring and /dev/fuse; without them the tests are skipped and say so.

mod support;

use std::fs;
use support::{Cluster, TINY, can_run, wait_until};

const RAID6: &str = "level = \"raid6\"\ndata = 4\nspares = 2";

fn contents() -> Vec<u8> {
    (0..6_000_000u32).flat_map(|at| (at / 3).to_le_bytes()).take(6_000_000).collect()
}

/// Writes a file and drops it from every cache on the way.
fn fill(cluster: &Cluster) {
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    fs::write(cluster.mnt().join("kept"), contents()).expect("written");
    fs::File::open(cluster.mnt().join("kept")).and_then(|file| file.sync_all()).expect("synced");
    restart(cluster);
}

fn restart(cluster: &Cluster) {
    cluster.ok(&["down"]);
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
}

fn kept(cluster: &Cluster) -> bool {
    fs::read(cluster.mnt().join("kept")).expect("read") == contents()
}

#[test]
fn three_parities_bear_three_drives() {
    if !can_run() {
        return;
    }
    let text = TINY
        .replace(RAID6, "level = \"n+m\"\nparity = 3")
        .replace("copies = 3\nslice = \"25MiB\"", "copies = 4\nslice = \"32MiB\"")
        .replace("72MiB", "96MiB");
    let cluster = Cluster::new("three", &text);
    assert!(cluster.ok(&["check"]).contains("any 3 drives"));
    fill(&cluster);
    assert!(cluster.ok(&["status"]).contains("5+3, 128 KiB chunks"));
    for drive in ["d0", "d3", "d6"] {
        cluster.ok(&["drive", "fail", drive]);
    }
    cluster
        .refused(&["drive", "fail", "d7"], &["bears the loss of 3 drives", "d7 too would stop it"]);
    assert!(kept(&cluster));
    fs::write(cluster.mnt().join("new"), contents()).expect("written");
    restart(&cluster);
    assert!(kept(&cluster));
    for drive in ["d0", "d3", "d6"] {
        cluster.ok(&["drive", "replace", drive]);
    }
    wait_until("it is rebuilt", || cluster.ok(&["status"]).contains("healthy; node"));
    for drive in ["d1", "d2", "d4"] {
        cluster.ok(&["drive", "fail", drive]);
    }
    restart(&cluster);
    assert!(kept(&cluster));
    assert!(fs::read(cluster.mnt().join("new")).expect("read") == contents());
}

#[test]
fn a_spare_of_the_cluster_comes_in_by_itself() {
    if !can_run() {
        return;
    }
    let text = TINY.replace(RAID6, "level = \"raid5\"").replace(
        "[[array]]\nname = \"meta\"",
        "[spares]\ndrives = [\"d7\"]\n[[array]]\nname = \"meta\"",
    );
    let cluster = Cluster::new("spare", &text);
    assert!(cluster.ok(&["check"]).contains("any 1 drive"));
    fill(&cluster);
    let spare = |state: &str| {
        let shown = cluster.ok(&["status"]);
        let of_spare = shown.split("spares of the cluster").nth(1).expect("a part of its own");
        of_spare.lines().nth(1).is_some_and(|line| line.contains("d7") && line.contains(state))
    };
    assert!(spare(" spare "));
    cluster.ok(&["drive", "fail", "d2"]);
    wait_until("the spare has its place", || spare(" in use "));
    wait_until("both arrays are rebuilt", || {
        cluster.ok(&["status"]).matches(" healthy ").count() == 2
    });
    // It bears another loss, over a restart too.
    cluster.ok(&["drive", "fail", "d4"]);
    assert!(kept(&cluster));
    restart(&cluster);
    assert!(kept(&cluster) && spare(" in use "));
    // What was lost is back, and the spare is one again, which nobody misses.
    for drive in ["d2", "d4"] {
        cluster.ok(&["drive", "replace", drive]);
    }
    let is_whole = || cluster.ok(&["status"]).matches(" healthy ").count() == 2;
    wait_until("it is rebuilt", is_whole);
    cluster.ok(&["drive", "fail", "d7"]);
    wait_until("it is rebuilt without the spare", is_whole);
    cluster.ok(&["drive", "replace", "d7"]);
    assert!(!cluster.ok(&["status"]).contains("d7 is out of"));
    assert!(kept(&cluster) && spare(" spare "));
}
