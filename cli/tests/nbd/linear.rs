//! Linear volumes of an array on its own: orders at the command line, and clients that use them meanwhile.

use crate::fixture::{Box, run, sh};
use crate::support::{LIMIT, can_run, said, wait_until};
use crate::{DRIVES, SOCKET, served, uri};
use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const DRIVE: &str = DRIVES[0];

/// What `levada volume` says; it must succeed.
fn ok(array: &Box, arguments: &[&str]) -> String {
    let output = array.run_other(&[&["volume"], arguments].concat());
    let said = said(&output);
    assert!(output.status.success(), "levada volume {arguments:?}: {said}");
    said
}

/// It must fail, saying `part`.
fn refused(array: &Box, arguments: &[&str], part: &str) {
    let output = array.run_other(&[&["volume"], arguments].concat());
    let said = said(&output);
    assert_eq!(output.status.code(), Some(1), "levada volume {arguments:?}: {said}");
    assert!(said.contains(part), "levada volume {arguments:?} does not say {part:?}: {said}");
}

/// With all drives of an array that nobody serves.
fn on_all(arguments: &[&'static str]) -> Vec<&'static str> {
    [arguments, &["--on"], &DRIVES].concat()
}

/// An array of level 6 that is not open.
fn array() -> Box {
    let array = Box::new();
    for drive in DRIVES {
        array.drive(drive, 32 * MIB);
    }
    array.ok(&[&["create", "data", "--level", "6"][..], &DRIVES].concat());
    array
}

fn serve(array: &mut Box) {
    let address = format!("unix:{}", array.path(SOCKET).display());
    array.serve_as(&["--nbd", &address], SOCKET, &DRIVES);
}

/// A pool that is served.
fn pool() -> Box {
    let mut array = array();
    let said = ok(&array, &[&["pool"][..], &DRIVES].concat());
    assert!(said.contains("data is a pool of volumes with room for"), "{said}");
    serve(&mut array);
    array
}

fn volumes(array: &Box) -> Vec<(String, u64, u64)> {
    let status = array.json(&["show", DRIVE]);
    let volumes = status["pool"]["volumes"].as_array().expect("a pool").iter();
    volumes
        .map(|volume| {
            let number = |key: &str| volume[key].as_u64().expect("a number");
            assert_eq!(volume["kind"], "linear");
            (volume["name"].as_str().expect("a name").into(), number("size_bytes"), number("users"))
        })
        .collect()
}

fn qemu_io(array: &Box, export: &str, commands: &[&str]) -> bool {
    let mut io = Command::new("qemu-io");
    io.args(["-f", "raw", &uri(&array.path(SOCKET), export)]);
    for command in commands {
        io.args(["-c", command]);
    }
    run(&mut io, LIMIT).status.success()
}

fn exports(array: &Box) -> Vec<String> {
    let said = sh(&["nbdinfo", "--json", "--list", &uri(&array.path(SOCKET), "")]);
    let found: Value = serde_json::from_str(&said).expect("JSON");
    let found = found["exports"].as_array().expect("a list").iter();
    found.map(|export| export["export-name"].as_str().expect("a name").to_owned()).collect()
}

#[test]
fn volumes_on_an_array_are_made_used_resized_and_deleted() {
    if !can_run() {
        return;
    }
    let array = pool();
    ok(&array, &["create", "vm1", "--size", "16MiB", "--on", DRIVE]);
    ok(&array, &["create", "blue/db", "--size", "10MiB", "--on", DRIVE]);
    assert_eq!(exports(&array), ["blue/db", "vm1"]);
    assert!(qemu_io(&array, "vm1", &["write -P 0x21 1000001 300000", "flush"]));
    assert!(qemu_io(&array, "vm1", &["read -P 0x21 1000001 300000", "read -P 0 2M 14M"]));
    assert!(qemu_io(&array, "blue/db", &["read -P 0 0 10M", "write -P 0x22 0 10M"]));
    assert!(!qemu_io(&array, "", &["read 0 4k"]), "a pool has no default");

    ok(&array, &["grow", "vm1", "+16MiB", "--on", DRIVE]);
    assert!(qemu_io(&array, "vm1", &["write -f -P 0x23 20M 12M", "read -P 0x23 20M 12M"]));
    assert!(!qemu_io(&array, "vm1", &["write 32M 4k"]), "past the end");
    refused(&array, &["grow", "vm1", "8MiB", "--on", DRIVE], "has 32MiB now");
    refused(&array, &["grow", "vm1", "1GiB", "--on", DRIVE], "has no room for");
    refused(&array, &["shrink", "vm1", "16MiB", "--on", DRIVE], "--discard-data");
    ok(&array, &["shrink", "vm1", "16MiB", "--discard-data", "--on", DRIVE]);
    ok(&array, &["grow", "vm1", "32MiB", "--on", DRIVE]);
    assert!(qemu_io(&array, "vm1", &["read -P 0x21 1000001 300000", "read -P 0 16M 16M"]));

    refused(&array, &["rename", "vm1", "blue/vm1", "--on", DRIVE], "belongs to one tenant");
    ok(&array, &["rename", "vm1", "web", "--on", DRIVE]);
    refused(&array, &["create", "web", "--size", "4MiB", "--on", DRIVE], "there is a volume web");
    assert_eq!(volumes(&array), [("blue/db".into(), 10 * MIB, 0), ("web".into(), 32 * MIB, 0)]);
    let of_blue = ok(&array, &["list", "--tenant", "blue", "--json", "--on", DRIVE]);
    assert!(of_blue.contains("blue/db") && !of_blue.contains("web"), "{of_blue}");
    ok(&array, &["delete", "blue/db", "--on", DRIVE]);
    ok(&array, &["create", "db", "--size", "60MiB", "--on", DRIVE]);
    assert!(qemu_io(&array, "db", &["read -P 0 0 60M"]), "nobody reads what was another's");
    assert!(ok(&array, &["list", "--on", DRIVE]).contains("linear"));
    assert!(array.ok(&["show", DRIVE]).contains("a pool of 2 volumes"));
}

#[test]
fn an_array_that_holds_something_becomes_no_pool_unasked() {
    if !can_run() {
        return;
    }
    let mut array = served(32 * MIB);
    let pool = [&["pool"][..], &DRIVES].concat();
    refused(&array, &pool, "shown as a whole");
    refused(&array, &["create", "v", "--size", "4MiB", "--on", DRIVE], "is no pool of volumes");
    assert!(qemu_io(&array, "vol", &["write -P 0x31 60M 4k", "flush"]));
    array.stop();
    refused(&array, &pool, "holds something");
    refused(&array, &["list", "--on", DRIVE], "missing: d1");
    ok(&array, &[&["pool", "--force"][..], &DRIVES].concat());
    refused(&array, &[&["pool", "--force"][..], &DRIVES].concat(), "a pool of volumes already");
    array.refused(&[&["serve", "--at", "whole.raw"][..], &DRIVES].concat(), &["overwrite them"]);
    serve(&mut array);
    ok(&array, &["create", "all", "--size", "80MiB", "--on", DRIVE]);
    assert!(qemu_io(&array, "all", &["read -P 0 0 80M"]), "what it held is gone");
}

/// Copied in with libnbd, through the loss of drives, a kill, a stop, and orders while nobody serves it.
#[test]
fn volumes_are_there_again_after_a_kill_and_after_a_stop() {
    if !can_run() {
        return;
    }
    let mut array = pool();
    for name in ["a", "b"] {
        ok(&array, &["create", name, "--size", "24MiB", "--on", DRIVE]);
    }
    let image = array.path("image");
    let mut noise = vec![0; 24 * MIB as usize];
    File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut noise)).expect("read");
    std::fs::write(&image, &noise).expect("written");
    let image = image.to_str().expect("plain").to_owned();
    let of = |array: &Box, name: &str| uri(&array.path(SOCKET), name);
    sh(&["nbdcopy", "--connections=4", "--flush", &image, &of(&array, "a")]);
    array.ok(&["fail", "d1", DRIVE]);
    sh(&["nbdcopy", "--flush", &image, &of(&array, "b")]);
    assert!(qemu_io(&array, "b", &["write -f -P 0x41 8M 1M"]));
    array.kill();

    serve(&mut array);
    sh(&["qemu-img", "compare", "-f", "raw", "-F", "raw", &image, &of(&array, "a")]);
    assert!(qemu_io(&array, "b", &["read -P 0x41 8M 1M"]));
    ok(&array, &["create", "c", "--size", "4MiB", "--on", DRIVE]);
    array.kill();

    ok(&array, &on_all(&["rename", "c", "d"]));
    ok(&array, &on_all(&["delete", "b"]));
    ok(&array, &on_all(&["create", "e", "--size", "30MiB"]));
    assert!(ok(&array, &on_all(&["list"])).contains("30MiB"));
    serve(&mut array);
    assert_eq!(exports(&array), ["a", "d", "e"]);
    assert!(qemu_io(&array, "e", &["read -P 0 0 30M", "write -P 0x42 0 30M"]));
    array.stop();
    serve(&mut array);
    let copy = array.path("copy");
    sh(&["nbdcopy", &of(&array, "a"), copy.to_str().expect("plain")]);
    assert!(std::fs::read(copy).expect("read") == noise);
    assert!(qemu_io(&array, "e", &["read -P 0x42 0 30M"]));
    array.stop();

    // Without d1, which is out, and d5, of which nobody said so.
    let on_some = ["--on", "d0", "d2", "d3", "d4"];
    refused(&array, &[&["delete", "d"], &on_some[..]].concat(), "--degraded");
    ok(&array, &[&["delete", "d", "--degraded"], &on_some[..]].concat());
    serve(&mut array);
    assert_eq!(exports(&array), ["a", "e"]);
    assert!(qemu_io(&array, "e", &["read -P 0x42 0 30M"]));
}

#[test]
fn a_volume_in_use_is_deleted_only_by_force_and_limits_are_kept() {
    if !can_run() {
        return;
    }
    let mut array = pool();
    ok(&array, &["create", "vm", "--size", "16MiB", "--on", DRIVE]);
    ok(&array, &["set", "vm", "--iops", "50", "--on", DRIVE]);
    refused(&array, &["set", "vm", "--bandwidth", "4KiB", "--on", DRIVE], "one request needs");
    array.stop();
    serve(&mut array);
    assert!(ok(&array, &["list", "--on", DRIVE]).contains("50 IOPS"));
    let mut load = Command::new("fio")
        .args(["--ioengine=nbd", "--name=a", "--rw=randwrite", "--bs=4k", "--size=16m"])
        .args(["--time_based", "--runtime=50", "--output-format=json"])
        .arg(format!("--uri={}", uri(&array.path(SOCKET), "vm")))
        .current_dir(array.dir.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("fio starts");
    // fio connects to see how large it is, goes, and connects again: that it is there shows when it stays.
    let mut since = None;
    wait_until("the client is there", || {
        let is_there = volumes(&array)[0].2 > 0;
        since = is_there.then(|| since.unwrap_or_else(Instant::now));
        since.is_some_and(|since| since.elapsed() > Duration::from_secs(1))
    });
    refused(&array, &["delete", "vm", "--on", DRIVE], "--force");
    assert!(load.try_wait().expect("a child").is_none(), "it goes on");
    ok(&array, &["delete", "vm", "--force", "--on", DRIVE]);
    assert!(!load.wait().expect("a child").success());
    ok(&array, &["create", "vm", "--size", "16MiB", "--on", DRIVE]);
    assert!(qemu_io(&array, "vm", &["read -P 0 0 16M"]), "another volume of that name is empty");
    assert!(!ok(&array, &["list", "--on", DRIVE]).contains("IOPS"));
}
