//! libnbd's tools, QEMU's and fio.

use crate::fixture::{Box, members, sh};
use crate::support::{LIMIT, wait_until};
use crate::{DRIVES, SOCKET, served, uri};
use serde_json::Value;
use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

const MIB: u64 = 1 << 20;

/// Bytes that do not repeat.
fn noise(bytes: u64) -> Vec<u8> {
    let mut state = 1u64;
    let words = (0..bytes / 8).flat_map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state ^ state >> 29).to_le_bytes()
    });
    words.collect()
}

fn info(array: &Box) -> Value {
    let said = sh(&["nbdinfo", "--json", &uri(&array.path(SOCKET), "")]);
    serde_json::from_str::<Value>(&said).expect("JSON")["exports"][0].clone()
}

/// What is stored, as runs of bytes and whether they are data.
fn map(array: &Box) -> Vec<(u64, bool)> {
    let said = sh(&["nbdinfo", "--json", "--map", &uri(&array.path(SOCKET), "vol")]);
    let runs: Value = serde_json::from_str(&said).expect("JSON");
    let runs = runs.as_array().expect("a list").iter();
    runs.map(|run| (run["length"].as_u64().expect("bytes"), run["type"] == 0)).collect()
}

#[test]
fn what_libnbd_copies_is_what_qemu_compares() {
    let array = served(32 * MIB);
    let export = info(&array);
    for can in ["flush", "fua", "trim", "zero", "fast_zero", "multi_conn", "df", "cache"] {
        assert_eq!(export[format!("can_{can}")], true, "{export}");
    }
    assert_eq!(export["block_size_minimum"], 1);
    let size = export["export-size"].as_u64().expect("bytes");
    assert_eq!(map(&array), [(size, false)], "nothing is stored");

    let (image, copy) = (array.path("image"), array.path("copy"));
    fs::write(&image, noise(size / 2)).expect("written");
    fs::File::options().write(true).open(&image).and_then(|file| file.set_len(size)).expect("long");
    let (image, copy) = (image.to_str().expect("plain"), copy.to_str().expect("plain"));
    let vol = uri(&array.path(SOCKET), "vol");
    sh(&["nbdcopy", "--connections=4", "--flush", image, &vol]);
    sh(&["qemu-img", "compare", "-f", "raw", "-F", "raw", image, &vol]);
    sh(&["nbdcopy", &vol, copy]);
    assert!(fs::read(image).expect("read") == fs::read(copy).expect("read"));
    let data: u64 = map(&array).iter().filter(|run| run.1).map(|run| run.0).sum();
    assert!((size / 2..size / 2 + 4 * MIB).contains(&data), "{data} of {size} hold something");
    drop(array);
}

/// Requests of any offset and length, which the block layers of others send as they are.
#[test]
fn qemu_writes_pieces_zeroes_and_discards() {
    let array = served(32 * MIB);
    let vol = uri(&array.path(SOCKET), "");
    sh(&[
        "qemu-io",
        "-f",
        "raw",
        &vol,
        "-c",
        "write -P 0xab 1000001 65001",
        "-c",
        "write -f -P 0xcd 1000000 1",
        "-c",
        "read -P 0xab 1000001 65001",
        "-c",
        "read -P 0 1065002 5000",
        "-c",
        "write -P 0x11 8M 8M",
        "-c",
        "write -z 9M 100001",
        "-c",
        "write -z -u 10M 1M",
        "-c",
        "read -P 0 9M 100001",
        "-c",
        "read -P 0x11 9537185 948575",
        "-c",
        "read -P 0 10M 1M",
        "-c",
        "discard 12M 2M",
        "-c",
        "flush",
        "-c",
        "read -P 0x11 14M 2M",
    ]);
    let refused = Command::new("qemu-io")
        .args(["-f", "raw", &vol, "-c", "read 1G 4k"])
        .output()
        .expect("it starts");
    assert!(!refused.status.success(), "past the end");
}

fn fio(array: &Box, name: &str, more: &[&str]) -> Child {
    Command::new("fio")
        .args(["--ioengine=nbd", "--verify=crc32c", "--verify_fatal=1", "--bs=4k-128k"])
        .args(["--rw=randrw", "--iodepth=16", "--size=40m", "--io_size=80m"])
        .args([format!("--name={name}"), format!("--uri={}", uri(&array.path(SOCKET), "vol"))])
        .args(more)
        .current_dir(array.dir.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("fio starts")
}

fn ended_well(mut child: Child) {
    let begun = Instant::now();
    while child.try_wait().expect("a child").is_none() {
        if begun.elapsed() > LIMIT {
            let _ = child.kill();
            panic!("fio does not end");
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let output = child.wait_with_output().expect("its output");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && said.contains("err= 0"), "{said}");
}

#[test]
fn fio_verifies_over_several_connections_while_members_fail() {
    let mut array = served(48 * MIB);
    let one = fio(&array, "one", &["--offset=0"]);
    let other = fio(&array, "other", &["--offset=48m"]);
    array.ok(&["fail", "1", DRIVES[0]]);
    array.ok(&["fail", "4", DRIVES[0]]);
    ended_well(one);
    ended_well(other);
    let state = array.json(&["show", DRIVES[0]]);
    assert_eq!(state["open_by"]["nbd"][0], uri(&array.path(SOCKET), "vol"), "{state}");
    let shown = array.ok(&["show", DRIVES[0]]);
    assert!(shown.contains(&format!("shown as {}", uri(&array.path(SOCKET), "vol"))), "{shown}");
    let out = members(&state, "state").iter().filter(|state| **state != "in-sync").count();
    assert_eq!(out, 2, "{state}");
    array.stop();
    assert!(!array.path(SOCKET).exists(), "the socket goes with its server");
}

/// A server that is told to stop carries out what has come, and its client hears of the rest.
#[test]
fn a_server_ends_under_load_and_what_it_answered_is_there() {
    let mut array = served(48 * MIB);
    let vol = uri(&array.path(SOCKET), "");
    sh(&["qemu-io", "-f", "raw", &vol, "-c", "write -P 0x5a 60M 1M", "-c", "flush"]);
    let mut load = fio(&array, "load", &["--time_based", "--runtime=30"]);
    wait_until("fio has begun", || {
        array.path("local-load-0-verify.state").exists() || {
            std::thread::sleep(std::time::Duration::from_millis(300));
            true
        }
    });
    array.stop();
    assert!(!load.wait().expect("a child").success(), "its connection has ended");
    let address = format!("unix:{}", array.path(SOCKET).display());
    array.serve_as(&["--nbd", &address], SOCKET, &DRIVES);
    sh(&["qemu-io", "-f", "raw", &vol, "-c", "read -P 0x5a 60M 1M"]);
}
