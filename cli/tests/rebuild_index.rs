//! `fsck --rebuild-index` on a cluster of real processes: the index of objects is damaged, or lost with its store, and
//! made anew; every byte of every file is compared.
//!
//! Needs root, io_uring and /dev/fuse; without them the tests are skipped and say so.

#[path = "support/random.rs"]
mod random;
mod support;

use levada_base::Buf;
use levada_base::reactor::Reactor;
use levada_base::units::MIB;
use levada_device::{Device, Durability};
use levada_kv::Batch;
use levada_node::FileDrives;
use levada_node::assembly::{self, StartOptions, Tuning};
use levada_node::drives::MayOverwrite;
use levada_node::state::StateDir;
use levada_spec::ClusterFile;
use random::Random;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::ops::Bound;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use support::{Cluster, LEVADA, TINY, can_run, kill, said, wait_until};

const TARGET: &str = "ost1";
const COMMAND: &str = "levada fsck --rebuild-index ost1";

/// It must end with this code, saying all of `parts`.
fn ends(cluster: &Cluster, code: i32, arguments: &[&str], parts: &[&str]) -> String {
    let output = cluster.run(arguments);
    let said = said(&output);
    assert_eq!(output.status.code(), Some(code), "levada {arguments:?}: {said}");
    for part in parts {
        assert!(said.contains(part), "levada {arguments:?} does not say {part:?}: {said}");
    }
    said
}

/// Opens the cluster as a node does, in this process, and does something to the drives.
fn with_cluster(cluster: &Cluster, change: impl AsyncFnOnce(&assembly::Cluster)) {
    let loaded = ClusterFile::load(&cluster.path("levada.toml")).expect("a cluster file");
    let state = StateDir(cluster.path("state"));
    Reactor::new().expect("io_uring").block_on(async {
        let source = FileDrives::new(loaded.clone(), state);
        let options = StartOptions {
            may_overwrite: MayOverwrite::Nothing,
            without_majority: false,
            tuning: Tuning::default(),
            address: "nowhere".to_owned(),
            progress: &|_| {},
        };
        let cluster = assembly::start(loaded.cluster, &source, options).await.expect("starts");
        change(&cluster).await;
    });
}

/// The log's row, and the rows of every other object and extent, make no sense any more.
fn damage_rows(cluster: &Cluster) {
    with_cluster(cluster, async |cluster| {
        let found = cluster.targets.iter().find(|found| found.entry.name() == TARGET);
        let store = found.and_then(|found| found.store.clone()).expect("it serves");
        let rows = store.scan(Bound::Unbounded, Bound::Unbounded, 99_999).await.expect("reads");
        let mut batch = Batch::default();
        for (n, (key, _)) in rows.iter().enumerate() {
            if key[..] == *b"M" || matches!(key[0], b'O' | b'E') && n % 2 == 0 {
                batch.put(key, b"nonsense");
            }
        }
        assert!(batch.changes.len() > 9, "there are objects");
        store.durable(store.apply(batch).expect("room")).await.expect("durable");
        cluster.stop().await;
    });
}

/// The store that holds the index is zeroes, on all drives.
fn zero_store(cluster: &Cluster) {
    with_cluster(cluster, async |cluster| {
        let found = cluster.targets.iter().find(|found| found.entry.name() == TARGET);
        let entry = found.expect("it is there").entry;
        let mirror = cluster.arrays.iter().find(|array| array.spec.name == "meta").expect("made");
        let mut at = entry.store_at;
        let end = at + entry.store_bytes;
        while at < end {
            let bytes = MIB.min(end - at);
            let zeroes = Buf::copy_of(&vec![0; bytes as usize]).into_vec();
            mirror.array.write(at, zeroes, Durability::Fua).await.expect("written");
            at += bytes;
        }
    });
}

type Contents = BTreeMap<String, Vec<u8>>;

/// Files of many sizes, some cut, holed, written over or removed.
fn fill(dir: &Path, random: &mut Random, contents: &mut Contents) {
    fs::create_dir_all(dir).expect("made");
    for n in 0..40 {
        let name = format!("f{n}");
        let bytes = [0, 1, 700, 5000, 70_000, 400_000][n % 6] + random.below(3000) as usize;
        let mut data = Vec::with_capacity(bytes);
        while data.len() < bytes {
            data.extend_from_slice(&random.next().to_le_bytes());
        }
        data.truncate(bytes);
        let mut file = File::create(dir.join(&name)).expect("made");
        file.write_all(&data).expect("written");
        match n % 5 {
            1 => {
                file.write_all_at(b"written over", 300).expect("written");
                data.resize(data.len().max(312), 0);
                data[300..312].copy_from_slice(b"written over");
            }
            2 => {
                data.resize(data.len() / 2, 0);
                file.set_len(data.len() as u64).expect("cut");
            }
            3 => {
                data.resize(data.len() + 9000, 0);
                file.set_len(data.len() as u64).expect("grown");
            }
            _ => {}
        }
        drop(file);
        if n % 7 == 6 {
            fs::remove_file(dir.join(&name)).expect("removed");
            contents.remove(&name);
        } else {
            contents.insert(name, data);
        }
    }
}

fn compare(dir: &Path, contents: &Contents, when: &str) {
    let there = fs::read_dir(dir).expect("there").count();
    assert_eq!(there, contents.len(), "{when}");
    for (name, data) in contents {
        let read = fs::read(dir.join(name)).expect("readable");
        assert!(read == *data, "{when}: {name}: {} bytes, {} expected", read.len(), data.len());
    }
}

/// Up, and the target does not serve: whoever looks is told what to do.
fn is_named(cluster: &Cluster) {
    cluster.run(&["up"]);
    let told = said(&cluster.run(&["status"]));
    assert!(told.contains(COMMAND), "{told}");
    ends(cluster, 8, &["fsck", "--rebuild-index", TARGET, "--yes"], &["is up", "levada down"]);
    cluster.run(&["down"]);
    assert!(!StateDir(cluster.path("state")).is_held());
}

#[test]
fn a_damaged_or_lost_index_is_made_anew() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("anew", TINY);
    let (mut random, mut contents) = (Random::new(1), Contents::new());
    ends(&cluster, 2, &["fsck", "--yes"], &["--rebuild-index"]);
    let dir = cluster.mnt().join("home");
    for (damage, when) in [(damage_rows as fn(&Cluster), "damaged"), (zero_store, "lost")] {
        cluster.ok(&["up"]);
        cluster.ok(&["mount", "mnt"]);
        fill(&dir, &mut random, &mut contents);
        cluster.ok(&["down"]);
        ends(&cluster, 0, &["fsck"], &["everything fits together"]);
        ends(&cluster, 8, &["fsck", "--rebuild-index", "ost9"], &["ost9", TARGET]);
        damage(&cluster);
        is_named(&cluster);

        let trial = ["fsck", "--rebuild-index", TARGET];
        ends(&cluster, 0, &trial, &["its segments hold", "nothing was changed"]);
        assert_ne!(cluster.run(&["fsck"]).status.code(), Some(0), "nothing was changed");
        ends(&cluster, 1, &["fsck", "--rebuild-index", TARGET, "--yes"], &["was made anew"]);
        assert!(!cluster.path("state/ost1.staged").exists(), "it is not needed any more");
        ends(&cluster, 0, &["fsck"], &["everything fits together"]);
        cluster.ok(&["up"]);
        cluster.ok(&["mount", "mnt"]);
        compare(&dir, &contents, when);
        cluster.ok(&["down"]);
    }
}

/// The node is killed with changes that are staged, and the command is killed again and again.
#[test]
fn a_rebuild_that_is_cut_off_is_begun_again() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("cut", TINY);
    let (mut random, mut contents) = (Random::new(2), Contents::new());
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    let dir = cluster.mnt().join("home");
    fill(&dir, &mut random, &mut contents);
    for n in 0..10 {
        let name = format!("small{n}");
        let mut file = File::create(dir.join(&name)).expect("made");
        file.write_all(name.as_bytes()).expect("written");
        file.sync_all().expect("durable");
        contents.insert(name.clone(), name.into_bytes());
    }
    let node = cluster.node().expect("it runs");
    // With nobody left who could send anything again.
    cluster.mount_process().into_iter().for_each(kill);
    kill(node);
    wait_until("the node is gone", || !StateDir(cluster.path("state")).is_held());
    let _ = rustix::mount::unmount(cluster.mnt(), rustix::mount::UnmountFlags::DETACH);
    let told = said(&cluster.run(&["fsck", "--rebuild-index", TARGET]));
    assert!(told.contains("changes that are in no segment are kept"), "{told}");

    let kept = cluster.path("state/ost1.staged");
    let mut cut = 0;
    for delay_us in [0, 200, 500, 1_000, 2_000, 5_000, 10_000] {
        let mut command = Command::new(LEVADA)
            .args(["fsck", "--rebuild-index", TARGET, "--yes"])
            .current_dir(cluster.dir.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("starts");
        let before = fs::metadata(&kept).and_then(|meta| meta.modified()).ok();
        wait_until("it is at it, or done", || {
            let now = fs::metadata(&kept).and_then(|meta| meta.modified()).ok();
            now.is_some() && now != before || command.try_wait().expect("a child").is_some()
        });
        std::thread::sleep(Duration::from_micros(delay_us));
        let _ = command.kill();
        command.wait().expect("it ends");
        cut += u32::from(kept.exists());
    }
    assert!(cut > 0, "it was always done");
    let output = cluster.run(&["fsck", "--rebuild-index", TARGET, "--yes"]);
    assert_eq!(output.status.code().map(|code| code & 1), Some(1), "{}", said(&output));
    assert!(!kept.exists());
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    compare(&dir, &contents, "cut");
    cluster.ok(&["down"]);
    ends(&cluster, 0, &["fsck"], &["everything fits together"]);
}
