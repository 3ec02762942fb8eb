//! `fsck --repair` on a cluster of real processes, whose rows are damaged while it is down.
//!
//! Needs root, io_uring and /dev/fuse; without them the tests of a running cluster are skipped and say so.

mod support;

use levada_base::reactor::Reactor;
use levada_kv::{Batch, Store};
use levada_node::FileDrives;
use levada_node::assembly::{self, StartOptions, Tuning};
use levada_node::drives::MayOverwrite;
use levada_node::state::StateDir;
use levada_spec::ClusterFile;
use std::cell::Cell;
use std::fs;
use std::ops::Bound;
use std::os::unix::fs::FileExt;
use support::{Cluster, TINY, can_run, said};

/// What it said on standard output; it must end with this code.
fn ends(cluster: &Cluster, code: i32, arguments: &[&str], parts: &[&str]) -> String {
    let output = cluster.run(arguments);
    let said = said(&output);
    assert_eq!(output.status.code(), Some(code), "levada {arguments:?}: {said}");
    for part in parts {
        assert!(said.contains(part), "levada {arguments:?} does not say {part:?}: {said}");
    }
    String::from_utf8(output.stdout).expect("text")
}

/// Opens the cluster as a node does, in this process, and changes rows of a target's store; `change` gets a key and a
/// value, and may change that or take it away.
fn damage(cluster: &Cluster, target: &str, change: impl Fn(&[u8], Vec<u8>) -> Option<Vec<u8>>) {
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
        let found = cluster.targets.iter().find(|found| found.entry.name() == target);
        let store = found.and_then(|found| found.store.clone()).expect("it serves");
        rewrite(&store, change).await;
        cluster.stop().await;
    });
}

async fn rewrite(store: &Store, change: impl Fn(&[u8], Vec<u8>) -> Option<Vec<u8>>) {
    let rows = store.scan(Bound::Unbounded, Bound::Unbounded, 99_999).await.expect("reads");
    let mut batch = Batch::default();
    for (key, value) in rows {
        match change(&key, value.to_vec()) {
            Some(changed) if changed[..] != value[..] => batch.put(&key, &changed),
            Some(_) => {}
            None => batch.delete(&key),
        }
    }
    assert!(!batch.changes.is_empty(), "that changes nothing");
    store.durable(store.apply(batch).expect("room")).await.expect("durable");
}

#[test]
fn a_damaged_cluster_is_repaired() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("repaired", TINY);
    ends(&cluster, 2, &["fsck", "--reattach"], &["--repair"]);
    ends(&cluster, 2, &["fsck", "--repair", "--stop"], &["--stop"]);
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    let mnt = cluster.mnt();
    fs::create_dir(mnt.join("home")).expect("made");
    for name in ["kept", "named", "nameless"] {
        fs::write(mnt.join("home").join(name), name.repeat(5000)).expect("written");
    }
    ends(&cluster, 8, &["fsck", "--repair"], &["repaired is up", "levada down"]);
    cluster.ok(&["down"]);
    ends(&cluster, 0, &["fsck", "--repair"], &["mdt0: ", "ost1: ", "everything fits together"]);

    // One row of a name, both of another, what files say of their objects, and a sum of the index.
    damage(&cluster, "mdt0", |key, mut row| {
        let is_lost = match key[0] {
            b'N' => key[9..] == *b"named" || key[9..] == *b"nameless",
            b'D' => row.ends_with(b"nameless"),
            _ => false,
        };
        // `components` of a file, at 96 of its inode (docs/design/0007-metadata.md).
        if key[0] == b'I' && row[1] == 1 {
            row[96..104].fill(0);
        }
        (!is_lost).then_some(row)
    });
    // `index bytes`, at 72 of the log's row (docs/design/0005-object-log.md).
    damage(&cluster, "ost1", |key, mut row| {
        if key == b"M" {
            row[72] ^= 0x10;
        }
        Some(row)
    });

    // Up or down, what is wrong is found.
    cluster.ok(&["up"]);
    let told = ends(&cluster, 4, &["fsck", "--json"], &[]);
    for part in [r#""find":"unlisted-object""#, r#""path":"/home/kept""#, r#""find":"index-sum""#] {
        assert!(told.contains(part), "{part}: {told}");
    }
    cluster.ok(&["down"]);
    let told = ends(&cluster, 4, &["fsck", "--json"], &[]);
    let lines: Vec<serde_json::Value> =
        told.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect();
    let (sum, items) = lines.split_last().expect("a sum at least");
    for (find, path) in
        [("entry", Some("/home/named")), ("links", None), ("unlisted-object", Some("/home/kept"))]
    {
        let is_it =
            |item: &&serde_json::Value| item["find"] == find && item["path"].as_str() == path;
        assert!(items.iter().any(|item| is_it(&item)), "{find} {path:?}: {told}");
    }
    assert!(items.iter().any(|item| item["find"] == "index-sum" && item["target"] == "ost1"));
    assert!(items.iter().all(|item| item["did"] == "left"), "{told}");
    assert_eq!((&sum["sum"]["left"], &sum["sum"]["repaired"]), (&items.len().into(), &0.into()));

    // The last name of one is lost: that is left, unless it is to be given another.
    ends(&cluster, 5, &["fsck", "--repair"], &["repaired, 1 left"]);
    ends(&cluster, 4, &["fsck", "--repair"], &["1 left"]);
    let told = ends(&cluster, 1, &["fsck", "--repair", "--reattach", "--json"], &[]);
    let last: serde_json::Value =
        serde_json::from_str(told.lines().last().expect("a sum")).expect("JSON");
    // It, and what lost+found adds to the accounts of user 0 and group 0.
    assert_eq!((&last["sum"]["left"], &last["sum"]["repaired"]), (&0.into(), &3.into()), "{told}");
    ends(&cluster, 0, &["fsck", "--repair"], &["everything fits together"]);

    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    for name in ["kept", "named"] {
        let read = fs::read_to_string(mnt.join("home").join(name)).expect("there");
        assert!(read == name.repeat(5000), "{name}");
    }
    // Paths alone: an entry keeps its directory open, and with it the mount in use.
    let found = fs::read_dir(mnt.join("lost+found")).expect("made").flatten();
    let found: Vec<_> = found.map(|entry| entry.path()).collect();
    let [found] = &found[..] else { panic!("{found:?}") };
    assert!(fs::read_to_string(found).expect("there") == "nameless".repeat(5000));
    assert!(found.to_string_lossy().contains("lost+found/ino-"), "{found:?}");
    fs::write(mnt.join("home/more"), "more").expect("written");
    ends(&cluster, 0, &["fsck"], &["everything fits together"]);
    cluster.ok(&["down"]);
    ends(&cluster, 0, &["fsck"], &["everything fits together"]);
}

/// Flips a byte of what a file holds on one of the drives.
fn rot(cluster: &Cluster, wanted: &[u8]) {
    for drive in 0..8 {
        let drive = cluster.path(&format!("d{drive}.img"));
        let bytes = fs::read(&drive).expect("a file");
        if let Some(at) = bytes.windows(wanted.len()).position(|window| window == wanted) {
            let file = fs::File::options().write(true).open(&drive).expect("a file");
            file.write_at(&[!wanted[0]], at as u64).expect("written");
            return;
        }
    }
    panic!("no drive holds it");
}

#[test]
fn segments_and_data_are_held_against_what_is_said_of_them() {
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("deep", TINY);
    ends(&cluster, 2, &["fsck", "--rebuild-index", "ost1", "--deep"], &["--deep"]);
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    let mnt = cluster.mnt();
    for n in 0..40u64 {
        let file = mnt.join(n.to_string());
        fs::write(&file, format!("the data of {n}|").repeat(1000 + 97 * n as usize))
            .expect("written");
        // Cut, written over, and some gone.
        let file = fs::File::options().write(true).open(&file).expect("there");
        file.set_len(5000 * (1 + n % 3)).expect("cut");
        file.write_at(format!("anew in {n}|").repeat(30).as_bytes(), 700).expect("written");
        file.sync_all().expect("synced");
        if n % 5 == 4 {
            fs::remove_file(mnt.join(n.to_string())).expect("removed");
        }
    }
    // So large that none of it is staged.
    let lines = (0..60_000).map(|n| format!("line {n} of it|")).collect::<String>();
    fs::write(mnt.join("large"), &lines).expect("written");
    for option in ["--deep", "--data"] {
        ends(&cluster, 8, &["fsck", option], &["deep is up", "levada down", "levada scrub"]);
    }
    cluster.ok(&["down"]);
    let whole = ends(&cluster, 0, &["fsck", "--deep", "--data"], &["everything fits together"]);
    assert!(
        whole.lines().any(|line| line.starts_with("ost1: ") && line.contains(" stripes checked")),
        "{whole}"
    );

    // One byte on one drive: whoever reads it repairs it.
    rot(&cluster, b"line 31415 of it|");
    ends(&cluster, 0, &["fsck", "--deep"], &["everything fits together"]);
    ends(
        &cluster,
        1,
        &["fsck", "--data"],
        &["blocks that did not fit their checksums: 1", "repaired"],
    );
    ends(&cluster, 0, &["fsck", "--data"], &["everything fits together"]);

    // An extent of one target that the index has elsewhere: the byte of its stripe, at 12 of its row.
    let at = |key: &[u8]| u64::from_be_bytes(*key[9..].first_chunk().expect("an inode's number"));
    let first = Cell::new(0);
    damage(&cluster, "ost1", |key, mut row| {
        if key[0] == b'E' && (first.get() == 0 || first.get() == at(key)) {
            first.set(at(key));
            row[12] ^= 8;
        }
        Some(row)
    });
    ends(&cluster, 0, &["fsck"], &["everything fits together"]);
    let told = ends(&cluster, 4, &["fsck", "--deep", "--json"], &[]);
    let items: Vec<serde_json::Value> =
        told.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect();
    let (sum, items) = items.split_last().expect("a sum at least");
    assert!(!items.is_empty() && sum["sum"]["left"] == items.len(), "{told}");
    for item in items {
        assert_eq!((&item["find"], &item["target"]), (&"record".into(), &"ost1".into()), "{told}");
        assert!(item["path"].as_str().is_some_and(|path| path.starts_with('/')), "{told}");
    }
    // Nothing that goes by such an index is changed, and no log is opened over it.
    let refused =
        ["nothing was repaired: its segments", "--rebuild-index ost1", "its data: its segments"];
    let code = 4 | 8;
    ends(&cluster, code, &["fsck", "--deep", "--data", "--repair"], &refused);
    // The segments say where it is.
    ends(&cluster, 1, &["fsck", "--rebuild-index", "ost1", "--yes"], &["the index was made anew"]);
    ends(&cluster, 0, &["fsck", "--deep", "--data"], &["everything fits together"]);
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    assert!(fs::read_to_string(mnt.join("large")).expect("there") == lines);
    cluster.ok(&["down"]);
}
