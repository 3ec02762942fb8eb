//! Volumes of a cluster: orders at the command line, and clients that use them meanwhile.

use crate::fixture::{run, sh};
use crate::support::{Cluster, LIMIT, TINY, can_run, kill, wait_until};
use crate::uri;
use serde_json::Value;
use std::process::Command;

/// Two exports: one of nobody's volumes in particular, one of the tenant blue.
const EXPORTS: &str = r#"
[testing]
wrapper = "volatile"
[[export]]
nbd = "unix:nbd.sock"
[[export]]
tenant = "blue"
nbd = "unix:blue.sock"
"#;

pub fn cluster(name: &str) -> Cluster {
    let text = format!("{TINY}{EXPORTS}").replace("72MiB", "200MiB");
    let cluster = Cluster::new(name, &text);
    cluster.ok(&["up"]);
    cluster
}

fn list(cluster: &Cluster) -> Vec<(String, u64, u64)> {
    let said = cluster.ok(&["volume", "list", "--json"]);
    let lines = said.lines().filter(|line| line.starts_with('{'));
    let rows = lines.map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    rows.map(|row| {
        let number = |key: &str| row[key].as_u64().expect("a number");
        (row["name"].as_str().expect("a text").to_owned(), number("size_bytes"), number("users"))
    })
    .collect()
}

pub fn qemu_io(uri: &str, commands: &[&str]) -> bool {
    let mut io = Command::new("qemu-io");
    io.args(["-f", "raw", uri]);
    for command in commands {
        io.args(["-c", command]);
    }
    run(&mut io, LIMIT).status.success()
}

/// As [`qemu_io`], of what is read-only.
fn reads(uri: &str, commands: &[&str]) -> bool {
    let mut io = Command::new("qemu-io");
    io.args(["-r", "-f", "raw", uri]);
    for command in commands {
        io.args(["-c", command]);
    }
    run(&mut io, LIMIT).status.success()
}

fn exports(cluster: &Cluster, socket: &str) -> Vec<String> {
    let said = sh(&["nbdinfo", "--json", "--list", &uri(&cluster.path(socket), "")]);
    let found: Value = serde_json::from_str(&said).expect("JSON");
    let found = found["exports"].as_array().expect("a list").iter();
    found.map(|export| export["export-name"].as_str().expect("a name").to_owned()).collect()
}

#[test]
fn volumes_are_made_used_resized_and_deleted() {
    if !can_run() {
        return;
    }
    let cluster = cluster("vol-a");
    assert!(cluster.ok(&["volume", "list"]).contains("levada volume create"));
    cluster.ok(&["volume", "create", "vm", "--size", "64MiB"]);
    let vm = uri(&cluster.path("nbd.sock"), "vm");
    let words = ["write -P 0x21 1000001 300000", "flush", "read -P 0x21 1000001 300000"];
    assert!(qemu_io(&vm, &words));
    cluster.ok(&["volume", "grow", "vm", "+64MiB"]);
    assert!(qemu_io(
        &vm,
        &["write -f -P 0x22 100M 1M", "read -P 0x22 100M 1M", "read -P 0 40M 1M"]
    ));
    cluster.refused(&["volume", "grow", "vm", "100MiB"], &["has 128MiB already"]);
    cluster.refused(&["volume", "shrink", "vm", "200MiB"], &["has only 128MiB"]);
    cluster.refused(&["volume", "shrink", "vm", "64MiB"], &["--discard-data"]);
    assert!(qemu_io(&vm, &["discard 100M 1M"]));
    cluster.ok(&["volume", "shrink", "vm", "64MiB"]);
    cluster.ok(&["volume", "rename", "vm", "web"]);
    assert_eq!(list(&cluster), [("web".into(), 64 << 20, 0)]);
    assert!(!qemu_io(&vm, &["read 0 4k"]), "the old name is gone");
    cluster.ok(&["volume", "delete", "web"]);
    assert_eq!(list(&cluster), []);
    cluster.refused(&["volume", "delete", "web"], &["there is no volume web"]);
    cluster.refused(&["volume", "create", "x", "--size", "1TiB"], &["--overcommit"]);
    cluster.refused(&["volume", "create", "x", "--size", "1000"], &["multiple of 4096"]);
    cluster.ok(&["volume", "create", "x", "--size", "1TiB", "--overcommit"]);
    cluster.ok(&["down"]);
}

#[test]
fn a_tenant_neither_sees_nor_reaches_what_is_anothers() {
    if !can_run() {
        return;
    }
    let cluster = cluster("vol-b");
    cluster.ok(&["volume", "create", "vm", "--size", "8MiB"]);
    cluster.ok(&["volume", "create", "blue/db", "--size", "8MiB"]);
    assert_eq!(exports(&cluster, "nbd.sock"), ["vm"]);
    assert_eq!(exports(&cluster, "blue.sock"), ["db"]);
    for (socket, export, is_there) in [
        ("nbd.sock", "vm", true),
        ("blue.sock", "db", true),
        ("nbd.sock", "db", false),
        ("nbd.sock", "blue/db", false),
        ("nbd.sock", "../blue/db", false),
        ("blue.sock", "vm", false),
        ("blue.sock", "default/vm", false),
        ("blue.sock", "", false),
    ] {
        let uri = uri(&cluster.path(socket), export);
        let asked = run(Command::new("nbdinfo").arg(&uri), LIMIT);
        assert_eq!(asked.status.success(), is_there, "{export} at {socket}");
    }
    cluster.refused(&["volume", "rename", "blue/db", "db"], &["belongs to one tenant"]);
    cluster.ok(&["down"]);
}

/// With drives that lose what was not flushed when the node is killed.
#[test]
fn what_was_flushed_outlasts_a_killed_node_and_orders_do() {
    if !can_run() {
        return;
    }
    let cluster = cluster("vol-c");
    cluster.ok(&["volume", "create", "vm", "--size", "32MiB"]);
    let vm = uri(&cluster.path("nbd.sock"), "vm");
    assert!(qemu_io(&vm, &["write -P 0x31 0 4M", "flush", "write -f -P 0x32 8M 64k"]));
    cluster.ok(&["volume", "create", "blue/late", "--size", "4MiB"]);
    kill(cluster.node().expect("it runs"));
    cluster.ok(&["up"]);
    assert!(qemu_io(&vm, &["read -P 0x31 0 4M", "read -P 0x32 8M 64k"]));
    let names: Vec<_> = list(&cluster).into_iter().map(|row| row.0).collect();
    assert_eq!(names, ["blue/late", "vm"]);
    cluster.ok(&["down"]);
    cluster.ok(&["fsck"]);
}

/// The names of snapshots.
fn snapshots(cluster: &Cluster) -> Vec<String> {
    let said = cluster.ok(&["volume", "snapshot", "list", "--json"]);
    let lines = said.lines().filter(|line| line.starts_with('{'));
    let rows = lines.map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    rows.map(|row| row["name"].as_str().expect("a text").to_owned()).collect()
}

/// With drives that lose what was not flushed when the node is killed.
#[test]
fn a_volume_is_kept_cloned_and_rolled_back() {
    if !can_run() {
        return;
    }
    let cluster = cluster("vol-e");
    let at = |export: &str| uri(&cluster.path("nbd.sock"), export);
    assert!(cluster.ok(&["volume", "snapshot", "list"]).contains("no snapshots"));
    cluster.ok(&["volume", "create", "vm", "--size", "32MiB"]);
    assert!(qemu_io(&at("vm"), &["write -P 0x41 0 6M", "flush"]));
    cluster.ok(&["volume", "snapshot", "create", "vm@one"]);
    let small = ["write -P 0x42 1000 3000", "discard 1M 1M", "flush"];
    assert!(qemu_io(&at("vm"), &small));
    let one = ["read -P 0x41 0 6M", "read -P 0 6M 26M"];
    let now = ["read -P 0x41 0 1000", "read -P 0x42 1000 3000", "read -P 0x41 4000 1044576"];
    assert!(reads(&at("vm@one"), &one));
    for (export, words) in [("vm", &now[..]), ("vm", &["read -P 0 1M 1M", "read -P 0x41 2M 4M"])] {
        assert!(qemu_io(&at(export), words), "{export}: {words:?}");
    }
    let said = sh(&["nbdinfo", "--json", &at("vm@one")]);
    assert!(said.contains("\"is_read_only\": true"), "{said}");
    assert_eq!(exports(&cluster, "nbd.sock"), ["vm"], "snapshots are not listed as volumes");
    cluster.ok(&["volume", "clone", "vm@one", "twin"]);
    assert!(qemu_io(&at("twin"), &["write -f -P 0x43 3M 64k", "read -P 0x41 0 3M"]));

    // It goes on after a crash.
    kill(cluster.node().expect("it runs"));
    cluster.ok(&["up"]);
    assert!(qemu_io(&at("vm"), &now));
    assert!(qemu_io(&at("twin"), &["read -P 0x43 3M 64k", "read -P 0x41 4M 2M"]));
    assert_eq!(snapshots(&cluster), ["vm@one"]);

    for (words, why) in [
        (&["volume", "snapshot", "create", "vm@one"][..], "there is a snapshot vm@one already"),
        (&["volume", "snapshot", "create", "none@one"], "there is no volume none"),
        (&["volume", "snapshot", "delete", "vm@two"], "there is no snapshot vm@two"),
        (&["volume", "rollback", "vm@two"], "there is no snapshot vm@two"),
        (&["volume", "clone", "vm@one", "twin"], "there is a volume twin already"),
        (&["volume", "clone", "vm@one", "blue/twin"], "belongs to one tenant"),
        (&["volume", "delete", "vm"], "has 1 snapshots"),
    ] {
        cluster.refused(words, &[why]);
    }

    cluster.ok(&["volume", "rollback", "vm@one"]);
    assert!(qemu_io(&at("vm"), &["read -P 0x41 0 6M", "read -P 0 6M 26M"]));
    cluster.ok(&["volume", "snapshot", "delete", "vm@one"]);
    cluster.refused(&["volume", "rollback", "vm@one"], &["there is no snapshot vm@one"]);
    cluster.ok(&["volume", "delete", "vm"]);
    assert!(qemu_io(&at("twin"), &["read -P 0x41 0 3M", "read -P 0x43 3M 64k"]));
    // Nothing lies on anything any more, once that was copied which the clone had not changed.
    let layers = || {
        let said = cluster.ok(&["volume", "list", "--json"]);
        let row: Value = serde_json::from_str(said.lines().next().expect("one")).expect("JSON");
        row["layers"].as_u64().expect("a number")
    };
    wait_until("the clone lies on nothing", || layers() == 0);
    assert!(qemu_io(&at("twin"), &["read -P 0x41 0 3M", "read -P 0x43 3M 64k"]));
    cluster.ok(&["down"]);
    cluster.ok(&["fsck"]);
}

/// A tenant's snapshots are as much his own as his volumes.
#[test]
fn a_tenant_reaches_no_snapshot_of_anothers() {
    if !can_run() {
        return;
    }
    let cluster = cluster("vol-f");
    cluster.ok(&["volume", "create", "blue/db", "--size", "8MiB"]);
    cluster.ok(&["volume", "snapshot", "create", "blue/db@one"]);
    cluster.ok(&["volume", "create", "vm", "--size", "8MiB"]);
    for (socket, export, is_there) in [
        ("blue.sock", "db@one", true),
        ("nbd.sock", "db@one", false),
        ("nbd.sock", "blue/db@one", false),
        ("nbd.sock", "vm@../db", false),
        ("nbd.sock", "vm@", false),
        ("nbd.sock", "@one", false),
        ("blue.sock", "db@one@one", false),
        ("blue.sock", ".snapshots", false),
    ] {
        let uri = uri(&cluster.path(socket), export);
        let asked = run(Command::new("nbdinfo").arg(&uri), LIMIT);
        assert_eq!(asked.status.success(), is_there, "{export} at {socket}");
    }
    cluster.refused(&["tenant", "delete", "blue"], &["has volumes"]);
    cluster.ok(&["volume", "snapshot", "delete", "blue/db@one"]);
    cluster.ok(&["volume", "delete", "blue/db"]);
    cluster.ok(&["tenant", "delete", "blue"]);
    cluster.ok(&["down"]);
    cluster.ok(&["fsck"]);
}

#[test]
fn a_volume_in_use_is_deleted_only_by_force_and_its_client_hears_of_it() {
    if !can_run() {
        return;
    }
    let cluster = cluster("vol-d");
    cluster.ok(&["volume", "create", "vm", "--size", "32MiB"]);
    let uri = uri(&cluster.path("nbd.sock"), "vm");
    let mut load = Command::new("fio")
        .args(["--ioengine=nbd", "--name=a", "--rw=randwrite", "--bs=4k", "--size=32m"])
        .args(["--time_based", "--runtime=50", &format!("--uri={uri}")])
        .current_dir(cluster.dir.path())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("fio starts");
    wait_until("the client is there", || list(&cluster)[0].2 > 0);
    cluster.refused(&["volume", "delete", "vm"], &["users", "--force"]);
    assert!(load.try_wait().expect("a child").is_none(), "it goes on");
    cluster.ok(&["volume", "delete", "vm", "--force"]);
    assert!(!load.wait().expect("a child").success());
    cluster.ok(&["volume", "create", "vm", "--size", "32MiB"]);
    assert!(qemu_io(&uri, &["read -P 0 0 32M"]), "another volume of that name is empty");
    cluster.ok(&["down"]);
}

#[test]
fn an_export_that_cannot_begin_keeps_nothing_else_from_serving() {
    if !can_run() {
        return;
    }
    let wrong = r#"
[[export]]
nbd = "unix:none/at/all"
[[export]]
tenant = "blue"
nbd = "unix:ok.sock"
"#;
    let cluster = Cluster::new("vol-e", &format!("{TINY}{wrong}"));
    cluster.ok(&["up"]);
    let status = cluster.ok(&["status"]);
    assert!(status.contains("needs attention") && status.contains("cannot listen at"), "{status}");
    assert_eq!(exports(&cluster, "ok.sock"), Vec::<String>::new());
    std::fs::create_dir_all(cluster.path("none/at")).expect("made");
    wait_until("it is tried again", || cluster.path("none/at/all").exists());
    wait_until("and told", || !cluster.ok(&["status"]).contains("cannot listen"));
    cluster.ok(&["down"]);
}
