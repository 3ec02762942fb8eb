//! Limits of volumes and tenants, as clients meet them.

use crate::fixture::run;
use crate::support::{Cluster, LIMIT, can_run};
use crate::uri;
use crate::volumes::{cluster, qemu_io};
use serde_json::Value;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Held by who measures rates or latencies.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A client that is in the way; ended when dropped.
struct Aggressor(Child);

impl Drop for Aggressor {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// fio for `seconds`, with 4 KiB anywhere; its job's side `"read"` tells how it went.
fn fio(cluster: &Cluster, uri: &str, seconds: u32, more: &[&str]) -> Command {
    let mut fio = Command::new("fio");
    fio.args(["--ioengine=nbd", "--name=a", "--rw=randread", "--bs=4k", "--iodepth=16"]);
    fio.args(["--size=16m", "--time_based", "--output-format=json"]).args(more);
    fio.arg(format!("--runtime={seconds}")).arg(format!("--uri={uri}"));
    fio.current_dir(cluster.dir.path());
    fio
}

fn told(output: &[u8]) -> Value {
    let from = output.iter().position(|byte| *byte == b'{').expect("JSON");
    let said: Value = serde_json::from_slice(&output[from..]).expect("JSON");
    said["jobs"][0]["read"].clone()
}

/// Requests a second that a client gets.
fn iops(cluster: &Cluster, uri: &str) -> f64 {
    let read = told(&run(&mut fio(cluster, uri, 3, &[]), LIMIT).stdout);
    read["iops"].as_f64().expect("a number")
}

#[test]
fn caps_hold_while_a_volume_is_used_and_outlast_a_restart() {
    if !can_run() {
        return;
    }
    let _alone = alone();
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
    let _alone = alone();
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

#[test]
fn limits_change_all_the_time_and_no_request_stalls() {
    if !can_run() {
        return;
    }
    let _alone = alone();
    let cluster = cluster("vol-h");
    cluster.ok(&["volume", "create", "vm", "--size", "32MiB"]);
    cluster.ok(&["volume", "set", "vm", "--iops", "500"]);
    let uri = uri(&cluster.path("nbd.sock"), "vm");
    let mut client =
        fio(&cluster, &uri, 5, &[]).stdout(Stdio::piped()).spawn().expect("fio starts");
    let mut changes = 0;
    while client.try_wait().expect("a child").is_none() {
        let cap = ["500", "501"][changes % 2];
        cluster.ok(&["volume", "set", "vm", "--iops", cap]);
        cluster.ok(&["volume", "set", "vm", "--guarantee-iops", ["100", "0"][changes % 2]]);
        changes += 1;
    }
    let read = told(&client.wait_with_output().expect("it ended").stdout);
    let iops = read["iops"].as_f64().expect("a number");
    let longest = read["clat_ns"]["max"].as_f64().expect("a number") / 1e9;
    eprintln!("{changes} changes, {iops} IOPS, the longest request took {longest} s");
    assert!((400.0..=520.0).contains(&iops), "{iops} of 500, with {changes} changes");
    assert!(changes >= 20, "{changes} changes");
    // 16 at a time of 500 a second take 32 ms each.
    assert!(longest < 0.5, "{longest} s");
    cluster.ok(&["down"]);
}

#[test]
fn a_guarantee_keeps_a_volumes_latency_beside_an_aggressor() {
    if !can_run() {
        return;
    }
    let _alone = alone();
    let cluster = cluster("vol-i");
    let uri = |name| uri(&cluster.path("nbd.sock"), name);
    for name in ["victim", "aggressor"] {
        cluster.ok(&["volume", "create", name, "--size", "32MiB"]);
        assert!(qemu_io(&uri(name), &["write -P 1 0 16M", "flush"]));
    }
    let aggressor = fio(&cluster, &uri("aggressor"), 60, &["--iodepth=256"])
        .stdout(Stdio::null())
        // It says of each request that it is not answered once this is over.
        .stderr(Stdio::null())
        .spawn()
        .expect("fio starts");
    let aggressor = Aggressor(aggressor);
    // What 95 of 100 requests took at most, in nanoseconds, each way by turns.
    let latency = |guarantee: &str| {
        cluster.ok(&["volume", "set", "victim", "--guarantee-iops", guarantee]);
        let paced = ["--iodepth=4", "--rate_iops=200"];
        let read = told(&run(&mut fio(&cluster, &uri("victim"), 3, &paced), LIMIT).stdout);
        read["clat_ns"]["percentile"]["95.000000"].as_u64().expect("a number")
    };
    let taken = [(); 3].map(|()| (latency("0"), latency("400")));
    let without = taken.iter().map(|pair| pair.0).min().expect("three");
    let with = taken.iter().map(|pair| pair.1).min().expect("three");
    eprintln!("{taken:?}");
    assert!(with * 10 < without * 7, "with a guarantee {with} ns, without {without} ns");
    drop(aggressor);
    cluster.ok(&["down"]);
}
