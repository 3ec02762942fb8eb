//! The kernel's own file systems on the array: made, filled, checked and repaired through a loop device over the served
//! file, while members fail and the process that serves it is killed.
//!
//! `LEVADA_ARRAY_ROUNDS=n` says how many rounds of kills the long test takes; `make soak` runs it.

use crate::fixture::{Box, members, run, sh};
use crate::support::{LIMIT, can_run, wait_until};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

#[path = "../support/random.rs"]
mod random;

use random::{Random, contents};

const DRIVES: [&str; 6] = ["d0", "d1", "d2", "d3", "d4", "d5"];
const DRIVE_BYTES: u64 = 256 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileSystem {
    Xfs,
    Ext4,
}

impl FileSystem {
    fn make(self, device: &str) {
        match self {
            Self::Xfs => sh(&["mkfs.xfs", "-q", "-f", device]),
            Self::Ext4 => sh(&["mkfs.ext4", "-q", "-F", device]),
        };
    }

    /// The file system's own program finds nothing wrong.
    fn check(self, device: &str) {
        match self {
            Self::Xfs => sh(&["xfs_repair", "-n", device]),
            Self::Ext4 => sh(&["e2fsck", "-f", "-n", device]),
        };
    }
}

fn can_mount() -> bool {
    let tool = |name: &str| {
        ["/sbin", "/usr/sbin", "/bin", "/usr/bin"]
            .iter()
            .any(|dir| Path::new(dir).join(name).exists())
    };
    let tools = ["mkfs.xfs", "xfs_repair", "mkfs.ext4", "e2fsck", "losetup"];
    let lacks: Vec<_> = tools.into_iter().filter(|name| !tool(name)).collect();
    let loops = Path::new("/dev/loop-control").exists();
    if !lacks.is_empty() || !loops {
        eprintln!("skipped: needs loop devices and {lacks:?}");
    }
    can_run() && lacks.is_empty() && loops
}

/// The sources of this repository: thousands of small files and a few larger ones.
fn sources() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the repository");
    let all = ["base", "block", "cli", "control", "docs", "fs", "store", "sim"];
    all.iter().map(|name| root.join(name)).collect()
}

fn copy_tree(to: &Path) {
    fs::create_dir(to).expect("made");
    let mut words = vec!["cp".to_owned(), "-r".into()];
    words.extend(sources().iter().map(|dir| dir.display().to_string()));
    words.push(to.display().to_string());
    sh(&words.iter().map(String::as_str).collect::<Vec<_>>());
}

/// Byte for byte what was copied.
fn compare_tree(with: &Path) {
    for dir in sources() {
        let there = with.join(dir.file_name().expect("a name"));
        let (dir, there) = (dir.display().to_string(), there.display().to_string());
        sh(&["diff", "-r", &dir, &there]);
    }
}

/// Large files that only their numbers give.
fn fill(dir: &Path, numbers: std::ops::Range<u64>) {
    for number in numbers {
        let mut file = File::create(dir.join(format!("large-{number}"))).expect("made");
        file.write_all(&contents(number, 6 << 20)).expect("written");
        file.sync_all().expect("durable");
    }
}

fn compare_large(dir: &Path, numbers: std::ops::Range<u64>) {
    for number in numbers {
        let there = fs::read(dir.join(format!("large-{number}"))).expect("read");
        assert!(there == contents(number, 6 << 20), "large-{number}");
    }
}

fn array(level: &str, drives: &[&str], bytes: u64) -> Box {
    let arrays = Box::new();
    drives.iter().for_each(|name| arrays.drive(name, bytes));
    arrays.ok(&[&["create", "data", "--level", level], drives].concat());
    arrays
}

/// Nothing in the array disagrees with itself.
fn scrub_is_clean(arrays: &Box, drives: &[&str]) {
    let scrubbed = arrays.json(&[&["scrub"], drives].concat());
    for what in ["unreadable_repaired", "wrong_repaired", "mismatched", "lost"] {
        assert_eq!(scrubbed[what], 0, "{scrubbed}");
    }
    assert!(scrubbed["stripes"].as_u64().is_some_and(|stripes| stripes > 20), "{scrubbed}");
}

/// Made, filled while a member fails, checked, compared; the same with a second member lost, and with both rebuilt.
fn bears_two_losses(of: FileSystem) {
    let mut arrays = array("6", &DRIVES, DRIVE_BYTES);
    arrays.serve(&DRIVES);
    let device = arrays.attach();
    of.make(&device);
    let mnt = arrays.mount(&device);
    let is_out = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            copy_tree(&mnt.join("tree"));
            fill(&mnt, 0..8);
            // However fast that was: it goes on until the member is out, or the test has failed.
            let begun = Instant::now();
            while !is_out.load(Ordering::Relaxed) && begun.elapsed() < LIMIT {
                fill(&mnt, 7..8);
            }
        });
        wait_until("it copies", || mnt.join("tree/block").exists());
        arrays.ok(&["fail", "d1", "d0"]);
        is_out.store(true, Ordering::Relaxed);
    });
    fill(&mnt, 8..14);
    arrays.umount();
    of.check(&device);
    let mnt = arrays.mount(&device);
    compare_tree(&mnt.join("tree"));
    compare_large(&mnt, 0..14);

    arrays.ok(&["fail", "d4", "d0"]);
    arrays.umount();
    let mnt = arrays.mount(&device);
    compare_tree(&mnt.join("tree"));
    compare_large(&mnt, 0..14);

    // Rebuilt while it is written to.
    for (old, new) in [("d1", "n1"), ("d4", "n4")] {
        arrays.drive(new, DRIVE_BYTES);
        arrays.ok(&["replace", old, new, "d0"]);
    }
    fill(&mnt, 14..18);
    fs::remove_file(mnt.join("large-3")).expect("removed");
    sh(&["fstrim", mnt.to_str().expect("plain text")]);
    let rebuilt = arrays.json(&["rebuild", "d0"]);
    assert_eq!(rebuilt["state"], "healthy", "{rebuilt}");
    assert_eq!(members(&rebuilt, "state"), ["in-sync"; 6]);
    scrub_is_clean(&arrays, &["d0"]);
    arrays.umount();
    of.check(&device);

    // The rebuilt ones alone have what the others may lose.
    for member in ["d0", "d2"] {
        arrays.ok(&["fail", member, "d3"]);
    }
    let mnt = arrays.mount(&device);
    compare_tree(&mnt.join("tree"));
    compare_large(&mnt, 4..18);
    arrays.umount();
    arrays.detach(&device);
    arrays.stop();
    scrub_is_clean(&arrays, &["n1", "d3", "n4", "d5"]);
}

#[test]
fn xfs_bears_two_losses_on_raid_6() {
    if can_mount() {
        bears_two_losses(FileSystem::Xfs);
    }
}

#[test]
fn ext4_bears_two_losses_on_raid_6() {
    if can_mount() {
        bears_two_losses(FileSystem::Ext4);
    }
}

/// What a writer knows to be durable: files by name, each with the key of its contents and its length.
type Durable = Arc<Mutex<BTreeMap<String, (u64, usize)>>>;

/// Writes files and makes each durable until that fails; `written` counts them.
fn write_durably(dir: &Path, seed: u64, durable: &Durable, written: &AtomicU64, stop: &AtomicBool) {
    let mut random = Random::new(seed);
    let begun = Instant::now();
    for number in 0u64.. {
        // Nobody tells it to stop when the test has failed.
        if stop.load(Ordering::Relaxed) || begun.elapsed() > 2 * LIMIT {
            return;
        }
        let (key, len) = (random.next(), random.between(1, 300_000) as usize);
        // Some are written over: they are not durable until they are again.
        let name = format!("{seed}-{}", if random.once_in(3) { number / 2 } else { number });
        durable.lock().expect("no panic").remove(&name);
        let wrote = (|| {
            let mut file = File::create(dir.join(&name))?;
            file.write_all(&contents(key, len))?;
            file.sync_all()?;
            File::open(dir)?.sync_all()
        })();
        if wrote.is_err() {
            return;
        }
        durable.lock().expect("no panic").insert(name, (key, len));
        written.fetch_add(1, Ordering::Relaxed);
    }
}

/// The serving process is killed while writers sync; served again, the file system recovers, its check is clean, and
/// what was synced is there.
fn survives_kills(of: FileSystem, level: &str, seed: u64, kills: u64, files: u64) {
    let mut random = Random::new(seed);
    let mut arrays = array(level, &DRIVES, DRIVE_BYTES);
    let mut drives: Vec<String> = DRIVES.iter().map(|name| (*name).to_owned()).collect();
    let durable = Durable::default();
    let mut is_made = false;
    for kill in 0..kills {
        let names: Vec<&str> = drives.iter().map(String::as_str).collect();
        arrays.serve(&names);
        let device = arrays.attach();
        if !is_made {
            of.make(&device);
            is_made = true;
        }
        let mnt = arrays.mount(&device);
        let (written, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for writer in 0..3 {
                let (mnt, durable, written, stop) = (&mnt, &durable, &written, &stop);
                let seed = seed * 1000 + kill * 10 + writer;
                scope.spawn(move || write_durably(mnt, seed, durable, written, stop));
            }
            // In some rounds with a member out, in some while its place is rebuilt.
            let wanted = random.between(files / 2, files);
            wait_until("they write", || written.load(Ordering::Relaxed) >= wanted / 2);
            if level != "0" && random.once_in(2) {
                let at = random.below(drives.len() as u64) as usize;
                let (old, new) = (drives[at].clone(), format!("n{kill}"));
                let other = drives[(at + 1) % drives.len()].clone();
                arrays.ok(&["fail", &old, &other]);
                arrays.drive(&new, DRIVE_BYTES);
                arrays.ok(&["replace", &old, &new, &other]);
                drives[at] = new;
            }
            wait_until("they write on", || written.load(Ordering::Relaxed) >= wanted);
            arrays.kill();
            stop.store(true, Ordering::Relaxed);
        });
        arrays.umount_lazily();
        arrays.detach(&device);
        wait_until("the loop device lets go", || !backs(&device, &arrays));
    }
    let names: Vec<&str> = drives.iter().map(String::as_str).collect();
    arrays.serve(&names);
    let device = arrays.attach();
    // The file system's journal is replayed by the mount.
    let mnt = arrays.mount(&device);
    let durable = durable.lock().expect("no panic").clone();
    assert!(durable.len() as u64 > kills * files / 4, "{} files", durable.len());
    for (name, (key, len)) in &durable {
        let there =
            fs::read(mnt.join(name)).unwrap_or_else(|error| panic!("seed {seed}: {name}: {error}"));
        assert!(there == contents(*key, *len), "seed {seed}: {name} is not what was synced");
    }
    arrays.umount();
    of.check(&device);
    arrays.ok(&["rebuild", names[0]]);
    scrub_is_clean(&arrays, &names[..1]);
    arrays.detach(&device);
    arrays.stop();
}

/// Whether a loop device is still over the file of this array.
fn backs(device: &str, arrays: &Box) -> bool {
    let told = run(Command::new("losetup").args(["-O", "BACK-FILE", "-n", device]), LIMIT);
    let dir = arrays.dir.path().to_str().expect("plain text");
    String::from_utf8_lossy(&told.stdout).contains(dir)
}

#[test]
fn xfs_survives_a_kill_of_the_serving_process() {
    if can_mount() {
        survives_kills(FileSystem::Xfs, "6", 1, 1, 60);
    }
}

#[test]
fn ext4_survives_a_kill_of_the_serving_process() {
    if can_mount() {
        survives_kills(FileSystem::Ext4, "6", 2, 1, 60);
    }
}

/// Several kills on one file system, on every kind of level; a seed that fails is named.
#[test]
#[ignore = "takes minutes: make soak"]
fn file_systems_survive_many_kills() {
    if !can_mount() {
        return;
    }
    let rounds: u64 =
        std::env::var("LEVADA_ARRAY_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(6);
    let levels = ["6", "5", "10", "4+2", "60", "50"];
    for round in 0..rounds {
        // Every level in six rounds, each under both file systems in twelve.
        let level = levels[round as usize % levels.len()];
        let of =
            if (round + round / 6).is_multiple_of(2) { FileSystem::Xfs } else { FileSystem::Ext4 };
        eprintln!("round {round}: {of:?} on level {level}");
        survives_kills(of, level, 100 + round, 4, 200);
    }
}
