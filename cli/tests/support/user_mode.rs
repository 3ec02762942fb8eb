//! Linux as a process (user-mode Linux), whose driver of a disk nobody here wrote.
//!
//! The guest's root is that of this machine, so it touches nothing but its device and what it mounts on /mnt. Everything
//! runs in a process and a network namespace that die with the test. A namespace of mounts it has none: that would keep
//! the mounts of tests beside it from ending.

use crate::fixture::{Box, members, run};
use crate::support::{LEVADA, can_run};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// A boot takes two seconds, the rest some ten.
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
busybox insmod "$(find "/usr/lib/uml/modules/$(uname -r)" -name MODULE.ko)"
ATTACH
fio --name=check --filename=DEVICE --direct=1 --ioengine=libaio --iodepth=16 --rw=randrw --bsrange=4k-64k --size=32M \
    --verify=crc32c --verify_fatal=1 > /mnt/fio 2>&1 || { cat /mnt/fio; false; }
mkfs.xfs -q -f DEVICE
mount DEVICE /mnt/fs
cp -r SOURCES /mnt/fs/tree
sync
touch HERE/half
umount /mnt/fs
mount DEVICE /mnt/fs
diff -r SOURCES /mnt/fs/tree
rm -r /mnt/fs/tree
fstrim -v /mnt/fs
umount /mnt/fs
xfs_repair -n DEVICE
DETACH
finish "all well"
"#;

/// Around it: the server and the guest. A member fails when the guest is half done.
const HOST: &str = r#"set -e
ip link set lo up
NETWORK
"$1" array serve SERVE "${@:3}" > served 2>&1 &
server=$!
for ((i = 0; i < 500; i++)); do grep -q ' bytes, array' served && break; sleep 0.02; done
(
    for ((i = 0; i < 5000; i++)); do [[ -e half ]] && break; sleep 0.02; done
    "$1" array fail 2 d0
) > failed 2>&1 &
timeout 100 linux mem=256M rootfstype=hostfs rootflags=/ rw "init=$2" con=null con0=null,fd:1 con1=null \
    uml_dir="$PWD/" HARDWARE < /dev/null > guest.log 2>&1 || true
kill -TERM $server
wait $server
"#;

/// How a guest comes to an array as a disk.
pub struct Disk {
    /// Programs that this needs beside those that all do.
    pub programs: &'static [&'static str],
    /// Around the guest: what there must be before the server.
    pub network: &'static str,
    /// What `levada array serve` is told.
    pub serve: &'static str,
    /// What the guest's kernel is told.
    pub hardware: &'static str,
    /// The kernel's module.
    pub module: &'static str,
    /// In the guest, with the module: until there is a device, and when it is not needed any more.
    pub attach: &'static str,
    pub detach: &'static str,
    pub device: &'static str,
}

impl Disk {
    fn can_run(&self) -> bool {
        let is_there = |name: &str| {
            let folders = ["/usr/bin", "/usr/sbin", "/sbin", "/bin"];
            folders.iter().any(|folder| Path::new(folder).join(name).exists())
        };
        let all = ["linux", "busybox", "unshare", "ip", "mkfs.xfs", "fio"];
        let lacks: Vec<_> =
            all.iter().chain(self.programs).filter(|name| !is_there(name)).collect();
        if !lacks.is_empty() {
            eprintln!("skipped: needs {lacks:?}");
            return false;
        }
        if !self.network.is_empty() && !Path::new("/dev/net/tun").exists() {
            eprintln!("skipped: needs /dev/net/tun");
            return false;
        }
        can_run()
    }

    /// fio writes and reads back; XFS is made, filled, checked and trimmed; a member fails meanwhile.
    pub fn check(&self) {
        const DRIVES: [&str; 6] = ["d0", "d1", "d2", "d3", "d4", "d5"];
        if !self.can_run() {
            return;
        }
        let array = Box::new();
        for drive in DRIVES {
            array.drive(drive, 128 << 20);
        }
        array.ok(&[&["create", "vol", "--level", "6"][..], &DRIVES].concat());
        let here = array.dir.path().to_str().expect("plain text");
        let sources =
            Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the repository").join("fs");
        let guest = GUEST
            .replace("MODULE", self.module)
            .replace("ATTACH", self.attach)
            .replace("DETACH", self.detach)
            .replace("DEVICE", self.device)
            .replace("SOURCES", sources.to_str().expect("plain text"))
            .replace("HERE", here);
        let host = HOST
            .replace("NETWORK", self.network)
            .replace("SERVE", self.serve)
            .replace("HARDWARE", self.hardware);
        let init = array.path("init");
        fs::write(&init, guest).expect("written");
        fs::set_permissions(&init, fs::Permissions::from_mode(0o755)).expect("executable");
        let mut unshare = Command::new("unshare");
        unshare
            .args(["--net", "--pid", "--fork", "--kill-child", "bash", "-c", &host, "host", LEVADA])
            .arg(&init)
            .args(DRIVES)
            .env("LEVADA_ARRAYS_DIR", array.path("run"))
            // User-mode Linux keeps its memory here.
            .env("TMPDIR", "/dev/shm")
            .current_dir(array.dir.path());
        let output = run(&mut unshare, LIMIT);
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
}
