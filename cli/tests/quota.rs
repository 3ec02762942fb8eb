//! Quotas as people set them and programs meet them.

mod support;

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use support::{Cluster, TINY, can_run};

const ANN: u32 = 54_321;

/// Has somebody make a file.
fn touch(user: u32, path: &Path) -> Result<(), String> {
    let touched = Command::new("touch").arg(path).uid(user).gid(user).output().expect("runs");
    if touched.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&touched.stderr).into_owned())
}

fn quota(cluster: &Cluster, who: &str) -> serde_json::Value {
    serde_json::from_str(&cluster.ok(&["quota", "show", who, "--json"])).expect("JSON")
}

/// KiB in all, KiB free, inodes in all, and free, as df says.
fn df(dir: &Path) -> [u64; 4] {
    let said = Command::new("df").arg("--output=size,avail,itotal,iavail").arg(dir).output();
    let said = String::from_utf8(said.expect("runs").stdout).expect("text");
    let numbers = said.lines().last().expect("a line").split_whitespace();
    let numbers: Vec<u64> = numbers.map(|word| word.parse().expect("a number")).collect();
    numbers.try_into().expect("four")
}

#[test]
fn limits_are_set_shown_and_kept() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("quota", TINY);
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    let mnt = cluster.mnt();
    let who = format!("user:{ANN}");
    let home = mnt.join("home");
    fs::create_dir(&home).expect("made");
    fs::set_permissions(&home, fs::Permissions::from_mode(0o777)).expect("set");
    cluster.ok(&["quota", "set", &who, "--inodes", "1:2", "--bytes", "0:1GiB", "--grace", "7d"]);
    touch(ANN, &home.join("a")).expect("one");
    touch(ANN, &home.join("b")).expect("two");
    let refused = touch(ANN, &home.join("c")).expect_err("three");
    assert!(refused.contains("quota"), "{refused}");
    let shown = quota(&cluster, &who);
    assert_eq!((&shown["inodes"]["used"], &shown["inodes"]["hard"]), (&2.into(), &2.into()));
    assert!(shown["inodes"]["grace_ends"].is_i64(), "{shown}");
    assert_eq!(shown["bytes"]["hard"], 1_u64 << 30);
    let over = cluster.ok(&["quota", "report", "--over"]);
    assert!(over.lines().count() == 2 && over.contains(&who), "{over}");
    // Bytes follow the file, and the file its owner.
    fs::write(home.join("data"), vec![1; 3 << 20]).expect("written");
    fs::File::open(home.join("data")).and_then(|file| file.sync_all()).expect("synced");
    assert_eq!(quota(&cluster, &who)["bytes"]["used"], 0);
    chown(home.join("data"), Some(ANN), None).expect("root may");
    assert_eq!(quota(&cluster, &who)["bytes"]["used"], 3 << 20);
    // All of it outlives the node.
    cluster.ok(&["down"]);
    cluster.ok(&["fsck"]);
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    cluster.ok(&["fsck"]);
    let shown = quota(&cluster, &who);
    assert_eq!((&shown["inodes"]["used"], &shown["bytes"]["used"]), (&3.into(), &(3 << 20).into()));
    fs::remove_file(home.join("data")).expect("removed");
    assert_eq!(quota(&cluster, &who)["bytes"]["used"], 0);
    // Trees.
    for dir in ["home/deep", "other"] {
        fs::create_dir(mnt.join(dir)).expect("made");
    }
    cluster.ok(&["project", "set", "/home", "12", "--recursive"]);
    cluster.ok(&["project", "set", "other", "13"]);
    assert_eq!(quota(&cluster, "project:12")["inodes"]["used"], 4);
    let moved = fs::rename(home.join("a"), mnt.join("other/a")).expect_err("another project");
    assert_eq!(moved.raw_os_error(), Some(18), "EXDEV: {moved}");
    cluster.ok(&["quota", "set", "project:12", "--inodes", ":4"]);
    let refused = fs::write(home.join("deep/more"), "").expect_err("five");
    assert_eq!(refused.raw_os_error(), Some(122), "EDQUOT: {refused}");
    // What a project may have is what there is in its directories, and nowhere else.
    cluster.ok(&["quota", "set", "project:12", "--bytes", ":32MiB"]);
    assert_eq!(df(&home.join("deep")), [32 << 10, 32 << 10, 4, 0]);
    fs::write(home.join("b"), vec![1; 8 << 20]).expect("written");
    fs::File::open(home.join("b")).and_then(|file| file.sync_all()).expect("synced");
    assert_eq!(df(&home), [32 << 10, 24 << 10, 4, 0]);
    for elsewhere in [mnt.join("other"), mnt.clone()] {
        let [total, free, inodes, _] = df(&elsewhere);
        assert!(total > 32 << 10 && free > 32 << 10 && inodes > 1000, "all there is");
    }
    cluster.refused(&["quota", "set", "ann", "--inodes", "1:2"], &["user:NAME"]);
    cluster.refused(&["quota", "set", &who, "--inodes", "3:2"], &["soft limit"]);
    cluster.refused(&["project", "set", "/nowhere", "1"], &["/nowhere"]);
    cluster.ok(&["down"]);
}
