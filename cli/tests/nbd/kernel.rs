//! Linux's own client, in user-mode Linux: XFS made, filled, checked and trimmed over two connections, a member failing
//! meanwhile.
//!
//! The guest's root is that of this machine, so the guest has a network of its own and touches nothing but its device.
//! Everything runs in a process namespace that dies with the test. A namespace of mounts it has none: that would keep the
//! mounts of tests beside it from ending.

use crate::DRIVES;
use crate::fixture::{Box, members, run};
use crate::support::can_run;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// A boot takes two seconds, the rest six.
const LIMIT: Duration = Duration::from_secs(120);

/// In the guest. What fails stops it; its last word says that nothing did.
const GUEST: &str = r#"#!/bin/bash
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
finish() { echo "guest: $1"; sync; busybox poweroff -f; }
trap 'finish "failed in line $LINENO"' ERR
set -E
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null || true
mount -t tmpfs tmp /mnt
mkdir /mnt/fs
module=$(find "/usr/lib/uml/modules/$(uname -r)" -name nbd.ko)
busybox insmod "$module"
ip link set lo up
ip address add 10.99.0.2/24 dev vec0
ip link set vec0 up
nbd-client 10.99.0.1 10809 /dev/nbd0 -N vol -b 4096 -C 2
mkfs.xfs -q -f /dev/nbd0
mount /dev/nbd0 /mnt/fs
cp -r SOURCES /mnt/fs/tree
sync
touch HERE/half
umount /mnt/fs
mount /dev/nbd0 /mnt/fs
diff -r SOURCES /mnt/fs/tree
rm -r /mnt/fs/tree
fstrim -v /mnt/fs
umount /mnt/fs
xfs_repair -n /dev/nbd0
nbd-client -d /dev/nbd0
finish "all well"
"#;

/// Around it: a network with the server and the guest.
const HOST: &str = r#"set -e
ip link set lo up
ip tuntap add tap0 mode tap
ip address add 10.99.0.1/24 dev tap0
ip link set tap0 up
"$1" array serve --nbd 10.99.0.1:10809 "${@:3}" > served 2>&1 &
server=$!
for ((i = 0; i < 500; i++)); do grep -q ' bytes, array' served && break; sleep 0.02; done
(
    for ((i = 0; i < 5000; i++)); do [[ -e half ]] && break; sleep 0.02; done
    "$1" array fail 2 d0
) > failed 2>&1 &
timeout 100 linux mem=256M rootfstype=hostfs rootflags=/ rw "init=$2" con=null con0=null,fd:1 con1=null \
    uml_dir="$PWD/" vec0:transport=tap,ifname=tap0,depth=128,gro=1 < /dev/null > guest.log 2>&1 || true
kill -TERM $server
wait $server
"#;

fn has_programs() -> bool {
    let lacks: Vec<_> = ["linux", "nbd-client", "busybox", "unshare", "ip", "mkfs.xfs"]
        .into_iter()
        .filter(|name| {
            !["/usr/bin", "/usr/sbin", "/sbin", "/bin"]
                .iter()
                .any(|dir| Path::new(dir).join(name).exists())
        })
        .collect();
    if !lacks.is_empty() || !Path::new("/dev/net/tun").exists() {
        eprintln!("skipped: needs /dev/net/tun and {lacks:?}");
        return false;
    }
    can_run()
}

#[test]
fn linux_keeps_a_file_system_on_it() {
    if !has_programs() {
        return;
    }
    let array = Box::new();
    for drive in DRIVES {
        array.drive(drive, 128 << 20);
    }
    array.ok(&[&["create", "vol", "--level", "6"][..], &DRIVES].concat());
    let sources =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the repository").join("fs");
    let guest = GUEST
        .replace("SOURCES", sources.to_str().expect("plain text"))
        .replace("HERE", array.dir.path().to_str().expect("plain text"));
    let init = array.path("init");
    fs::write(&init, guest).expect("written");
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755)).expect("executable");
    let mut host = Command::new("unshare");
    host.args(["--net", "--pid", "--fork", "--kill-child", "bash", "-c", HOST, "host"])
        .args([crate::support::LEVADA, init.to_str().expect("plain text")])
        .args(DRIVES)
        .env("LEVADA_ARRAYS_DIR", array.path("run"))
        // User-mode Linux keeps its memory here.
        .env("TMPDIR", "/dev/shm")
        .current_dir(array.dir.path());
    let output = run(&mut host, LIMIT);
    let read = |name: &str| fs::read_to_string(array.path(name)).unwrap_or_default();
    let said = [read("guest.log"), read("served"), read("failed")].join("\n--\n");
    // Linux 6.1 as a process saves less of the processor's state than processors with AMX have, and its first program dies.
    if said.contains("ptrace set fp regs failed") {
        eprintln!("skipped: user-mode Linux does not run on this processor");
        return;
    }
    assert!(said.contains("guest: all well"), "{said}");
    assert!(output.status.success(), "{output:?}: {said}");
    let state = array.json(&[&["show"][..], &DRIVES].concat());
    let out = members(&state, "state").iter().filter(|state| **state != "in-sync").count();
    assert_eq!(out, 1, "{state}");
}
