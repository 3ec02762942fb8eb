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

fn cluster(name: &str) -> Cluster {
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

fn qemu_io(uri: &str, commands: &[&str]) -> bool {
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

/// Requests a second that fio gets of reads of 4 KiB.
fn iops(cluster: &Cluster, uri: &str) -> f64 {
    let mut fio = Command::new("fio");
    fio.args(["--ioengine=nbd", "--name=a", "--rw=randread", "--bs=4k", "--iodepth=16"]);
    fio.args(["--size=16m", "--time_based", "--runtime=3", "--output-format=json"]);
    fio.arg(format!("--uri={uri}")).current_dir(cluster.dir.path());
    let output = run(&mut fio, LIMIT);
    let from = output.stdout.iter().position(|byte| *byte == b'{').expect("JSON");
    let said: Value = serde_json::from_slice(&output.stdout[from..]).expect("JSON");
    said["jobs"][0]["read"]["iops"].as_f64().expect("a number")
}

#[test]
fn caps_hold_while_a_volume_is_used_and_outlast_a_restart() {
    if !can_run() {
        return;
    }
    let cluster = cluster("vol-f");
    cluster.ok(&["volume", "create", "vm", "--size", "32MiB"]);
    cluster.refused(&["volume", "set", "vm", "--bandwidth", "4KiB"], &["one request needs"]);
    cluster.refused(&["volume", "set", "no", "--iops", "1"], &["there is no volume no"]);
    cluster.refused(&["volume", "set", "vm"], &["nothing to set"]);
    cluster.ok(&["volume", "set", "vm", "--iops", "500"]);
    cluster.refused(&["volume", "set", "vm", "--guarantee-iops", "501"], &["above the cap"]);
    let uri = uri(&cluster.path("nbd.sock"), "vm");
    let capped = iops(&cluster, &uri);
    assert!((400.0..=515.0).contains(&capped), "{capped} of 500");
    cluster.ok(&["down"]);
    cluster.ok(&["up"]);
    assert!(cluster.ok(&["volume", "list"]).contains("500 IOPS"));
    cluster.ok(&["volume", "rename", "vm", "web"]);
    let uri = crate::uri(&cluster.path("nbd.sock"), "web");
    let capped = iops(&cluster, &uri);
    assert!((400.0..=515.0).contains(&capped), "{capped} of 500");
    cluster.ok(&["volume", "set", "web", "--iops", "0"]);
    let free = iops(&cluster, &uri);
    assert!(free > 1500.0, "{free} without a cap");
    cluster.ok(&["down"]);
}

fn write(uri: &str, at: &str, bytes: &str) -> bool {
    qemu_io(uri, &[&format!("write -P 7 {at} {bytes}"), "flush"])
}

#[test]
fn a_tenant_has_limits_over_all_its_volumes_and_no_others() {
    if !can_run() {
        return;
    }
    let cluster = cluster("vol-g");
    assert!(cluster.ok(&["tenant", "list"]).contains("no tenants"));
    cluster.refused(&["tenant", "set", "blue"], &["nothing to set"]);
    cluster.refused(&["tenant", "delete", "blue"], &["there is no tenant blue"]);
    cluster.ok(&["tenant", "set", "blue", "--capacity", "8MiB", "--iops", "500"]);
    for name in ["blue/one", "blue/two", "other"] {
        cluster.ok(&["volume", "create", name, "--size", "64MiB"]);
    }
    cluster.refused(&["tenant", "delete", "blue"], &["tenant blue has volumes"]);
    let blue = |name| uri(&cluster.path("blue.sock"), name);
    assert!(write(&blue("one"), "0", "5M"));
    assert!(!write(&blue("two"), "0", "5M"), "one has taken most of what there is");
    assert!(write(&blue("one"), "0", "5M"), "what only takes the place of other bytes is written");
    assert!(write(&uri(&cluster.path("nbd.sock"), "other"), "0", "16M"), "another tenant's");
    let capped = iops(&cluster, &blue("one"));
    assert!((400.0..=515.0).contains(&capped), "{capped} of 500");

    cluster.ok(&["down"]);
    cluster.ok(&["up"]);
    let said = cluster.ok(&["tenant", "list", "--json"]);
    let rows: Vec<Value> =
        said.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let row = rows.iter().find(|row| row["tenant"] == "blue").expect("listed");
    assert_eq!((row["volumes"].as_u64(), row["size_bytes"].as_u64()), (Some(2), Some(128 << 20)));
    assert_eq!(row["capacity_bytes"].as_u64(), Some(8 << 20));
    let stored = row["stored_bytes"].as_u64().expect("a number");
    assert!((5 << 20..=8 << 20).contains(&stored), "{stored} bytes stored");
    assert!(cluster.ok(&["tenant", "list"]).contains("500 IOPS"));

    cluster.ok(&["tenant", "set", "blue", "--capacity", "0", "--iops", "0"]);
    assert!(write(&blue("two"), "0", "16M"), "no limit any more");
    cluster.ok(&["tenant", "set", "blue", "--capacity", "22MiB"]);
    assert!(!write(&blue("two"), "16M", "5M"), "also of a volume that was used without one");
    for name in ["blue/one", "blue/two"] {
        cluster.ok(&["volume", "delete", name]);
    }
    cluster.ok(&["tenant", "delete", "blue"]);
    assert!(!cluster.ok(&["tenant", "list"]).contains("blue"));
    cluster.ok(&["down"]);
}
