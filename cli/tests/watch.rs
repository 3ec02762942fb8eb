//! `fsck` and `top` on a cluster of real processes.
//!
//! Needs root, io_uring and /dev/fuse; without them the tests of a running cluster are skipped
//! and say so.

mod support;

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use support::{Cluster, LEVADA, TINY, can_run, said, signal, wait_until};

/// What it said; it must end with this code.
fn ends(cluster: &Cluster, code: i32, arguments: &[&str], parts: &[&str]) -> String {
    let output = cluster.run(arguments);
    let said = said(&output);
    assert_eq!(output.status.code(), Some(code), "levada {arguments:?}: {said}");
    for part in parts {
        assert!(said.contains(part), "levada {arguments:?} does not say {part:?}: {said}");
    }
    said
}

#[test]
fn what_cannot_be_checked_or_watched_is_told() {
    let cluster = Cluster::new("never", TINY);
    ends(&cluster, 8, &["fsck"], &["never was never up", "nothing to check"]);
    ends(&cluster, 8, &["fsck", "--stop"], &["no node is running", "levada up"]);
    ends(&cluster, 2, &["fsck", "--memory", "lots"], &["lots"]);
    ends(&cluster, 2, &["fsck", "--stop", "--json"], &["--json"]);
    ends(&cluster, 8, &["-f", "missing.toml", "fsck"], &["missing.toml"]);
    ends(&cluster, 1, &["top"], &["no node is running", "levada up"]);
    for interval in ["0", "1h", "50ms"] {
        ends(&cluster, 2, &["top", "--interval", interval], &["--interval"]);
    }
    for (command, part) in [("fsck", "Exit code: 0"), ("top", "Keys: q")] {
        ends(&cluster, 0, &[command, "--help"], &[part]);
    }
    assert!(
        !cluster.path("state").exists() && !cluster.path("d0.img").exists(),
        "nothing was made"
    );
}

/// A `top` that goes on, as a program reads it; ended when dropped.
struct Top(Child);

impl Drop for Top {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_cluster_is_checked_and_watched() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("watched", TINY);
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    let mnt = cluster.mnt();
    fs::create_dir_all(mnt.join("home/ann/deep")).expect("made");
    for n in 0..50 {
        fs::write(mnt.join(format!("home/ann/f{n}")), vec![7; 10_000]).expect("written");
    }
    fs::hard_link(mnt.join("home/ann/f1"), mnt.join("home/f1")).expect("linked");

    let text = ends(&cluster, 0, &["fsck"], &["mdt0: ", "everything fits together"]);
    let counted =
        |text: &str| text.lines().find(|line| line.starts_with("mdt0: ")).map(str::to_owned);
    assert!(counted(&text).is_some_and(|line| line.contains("54 inodes, 54 names")), "{text}");
    let json = ends(&cluster, 0, &["fsck", "--json", "--fast"], &[]);
    let sum: serde_json::Value = serde_json::from_str(json.trim()).expect("one line of JSON");
    assert!(sum["sum"]["names"] == 54 && sum["sum"]["found"] == 0, "{json}");
    ends(&cluster, 8, &["fsck", "--offline"], &["watched is up", "levada down"]);

    let once = cluster.ok(&["top", "--once", "--interval", "200ms"]);
    let parts = [
        "watched: healthy",
        "TARGET",
        "mdt0",
        "ost1",
        "KIND",
        "MOUNT",
        "/mnt",
        "CALL",
        "DRIVE",
        "d0",
    ];
    for part in parts {
        assert!(once.contains(part), "{part}: {once}");
    }
    let mut follows = Command::new(LEVADA)
        .args(["top", "--json", "--interval", "100ms"])
        .current_dir(cluster.dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the program starts");
    let lines = BufReader::new(follows.stdout.take().expect("piped")).lines();
    let _follows = Top(follows);
    let mut looks = lines.map(|line| -> serde_json::Value {
        serde_json::from_str(&line.expect("text")).expect("a line of JSON")
    });
    let rate = |look: &serde_json::Value, kind: &str| {
        let kinds = look["kinds"].as_array().expect("a list").iter();
        kinds
            .filter(|one| one["kind"] == kind)
            .filter_map(|one| one["now"]["per_s"].as_f64())
            .sum::<f64>()
    };
    assert!(looks.next().is_some(), "it has begun to look");
    fs::write(mnt.join("home/more"), vec![1; 100_000]).expect("written");
    fs::File::open(mnt.join("home/more")).and_then(|file| file.sync_all()).expect("durable");
    assert!(looks.by_ref().take(50).any(|look| rate(&look, "Write") > 0.0), "writes are seen");
    // The mount tells of itself, and once more when it was made anew.
    let calls = |look: &serde_json::Value| {
        let mount = &look["mounts"][0];
        let is_named = mount["dir"].as_str().is_some_and(|dir| dir.ends_with("/mnt"));
        mount["now"]["per_s"].as_f64().filter(|_| is_named).unwrap_or(0.0)
    };
    for is_again in [false, true] {
        if is_again {
            signal("-KILL", cluster.mount_process().expect("it runs"));
            wait_until("the mount is dead", || fs::read_dir(&mnt).is_err());
            cluster.ok(&["mount", "mnt"]);
        }
        let looked = || fs::metadata(mnt.join("home/no such file")).expect_err("not there");
        let seen =
            looks.by_ref().inspect(|_| drop(looked())).take(50).any(|look| calls(&look) > 0.0);
        assert!(seen, "calls are seen");
        let status = cluster.ok(&["status"]);
        assert!(
            status.contains("/mnt: ") && status.contains(" in flight, latency p50 "),
            "{status}"
        );
    }
    assert_eq!(fs::read_dir(cluster.path("state/top")).expect("made").count(), 1);
    // Killed and started again under it: it begins anew, and no rate is of two lives.
    signal("-KILL", cluster.node().expect("a node"));
    wait_until("the node is gone", || !cluster.ok_or_not(&["status"]));
    cluster.ok(&["up"]);
    // What was made before it looked for the first time is in no rate.
    let made_again = || {
        let _ = fs::remove_file(mnt.join("home/after"));
        fs::write(mnt.join("home/after"), vec![1; 100_000]).expect("written");
    };
    let after: Vec<_> = looks.by_ref().inspect(|_| made_again()).take(20).collect();
    assert!(
        after.iter().all(|look| look["seconds"].as_f64().is_some_and(|s| s < 60.0)),
        "{after:?}"
    );
    assert!(after.iter().any(|look| rate(look, "Create") > 0.0), "{after:?}");

    // Checked without a node, with one drive away, and the same is found.
    cluster.ok(&["down"]);
    let text = ends(&cluster, 0, &["fsck"], &["everything fits together"]);
    assert!(counted(&text).is_some_and(|line| line.contains("56 inodes, 56 names")), "{text}");
    fs::rename(cluster.path("d2.img"), cluster.path("away")).expect("renamed");
    ends(&cluster, 0, &["fsck", "--offline"], &["56 names", "everything fits together"]);
    fs::rename(cluster.path("away"), cluster.path("d2.img")).expect("back");
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    assert_eq!(fs::read(mnt.join("home/after")).expect("read"), vec![1; 100_000]);
    cluster.ok(&["down"]);
}
