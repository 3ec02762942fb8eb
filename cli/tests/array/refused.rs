//! What must not be done is not done, and each case has its own words.

use crate::fixture::{Box, sh};
use std::fs::{self, File, TryLockError};
use std::os::unix::fs::FileExt;

const DRIVES: [&str; 6] = ["d0", "d1", "d2", "d3", "d4", "d5"];

fn made(name: &str) -> Box {
    let arrays = Box::new();
    arrays.ok(&[&["create", name, "--size", "24MiB", "--level", "6"], &DRIVES[..]].concat());
    arrays
}

#[test]
fn a_power_fence_comes_before_anything_else() {
    let mut arrays = made("fenced");
    let before = fs::read(arrays.path("d0")).expect("it is there");
    let fails = ["serve", "--power-fence", "echo he is not off; exit 3", "--nbd", "unix:nbd"];
    let said = arrays.refused(
        &[&fails[..], &DRIVES[..]].concat(),
        &[
            "the power fence `echo he is not off; exit 3` has failed",
            "another server may still write to fenced",
            "exit status: 3",
        ],
    );
    assert!(said.contains("he is not off"), "what the command said is not shown: {said}");
    assert!(fs::read(arrays.path("d0")).expect("it is there") == before, "nothing was changed");
    let notes = "env | grep ^LEVADA_ | sort > told; echo \"$LEVADA_DRIVES\" | wc -l >> told";
    let shows = ["--power-fence", notes, "--nbd", "unix:nbd"];
    arrays.serve_as(&shows, "nbd", &DRIVES);
    let told = fs::read_to_string(arrays.path("told")).expect("the command ran");
    for part in
        ["LEVADA_NAME=fenced\n", "LEVADA_LAST_EPOCH=1\n", "LEVADA_DRIVES=/", "/d0\n", "\n6\n"]
    {
        assert!(told.contains(part), "{part:?} is missing: {told}");
    }
    arrays.stop();
}

#[test]
fn impossible_geometries_are_refused_before_anything_is_made() {
    let arrays = Box::new();
    let create = ["create", "x", "--size", "24MiB"];
    for (arguments, parts) in [
        (&["--level", "6", "a", "b"][..], &["impossible geometry"][..]),
        (&["--level", "7", "a", "b", "c"], &["\"7\" is no level", "8+3"]),
        (&["--level", "8+3", "a", "b", "c"], &["11 drives", "3 are given"]),
        (
            &[
                &["--level", "30+3"][..],
                &[
                    "a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7", "a8", "a9", "b0", "b1", "b2",
                    "b3", "b4", "b5", "b6", "b7", "b8", "b9", "c0", "c1", "c2", "c3", "c4", "c5",
                    "c6", "c7", "c8", "c9", "d0", "d1", "d2",
                ],
            ]
            .concat(),
            &["impossible geometry", "at most 32"],
        ),
        (&["--level", "1+5", "a", "b", "c", "d", "e", "f"], &["impossible geometry"]),
        (&["--level", "1", "a", "b", "c"], &["--copies 3", "--level 10"]),
        (
            &["--level", "50", "--groups", "2", "a", "b", "c", "d", "e"],
            &["impossible geometry", "groups"],
        ),
        (&["--level", "5", "--copies", "2", "a", "b", "c"], &["--copies says nothing"]),
        (
            &["--level", "5", "--chunk", "5000", "a", "b", "c"],
            &["5000 bytes are no size for a chunk"],
        ),
        (
            &["--level", "6", "--journal", "4KiB", "a", "b", "c", "d"],
            &["journal", "--journal says 4096"],
        ),
        (&["--level", "5", "--chunk", "64MiB", "a", "b", "c"], &["are needed"]),
        (&["--level", "5", "--spares", "3", "a", "b", "c"], &["impossible geometry"]),
        (&["--level", "5", "a", "b", "./a"], &["a and ./a are the same drive"]),
    ] {
        arrays.refused(&[&create[..], arguments].concat(), parts);
        let left: Vec<_> = fs::read_dir(arrays.dir.path()).expect("listed").flatten().collect();
        assert!(left.is_empty(), "{arguments:?} leaves {left:?}");
    }
    arrays
        .refused(&["create", "x", "--level", "5", "a", "b", "c"], &["a does not exist", "--size"]);
}

#[test]
fn what_a_drive_holds_is_kept() {
    let arrays = made("first");
    let before = fs::read(arrays.path("d1")).expect("read");
    let create = ["create", "second", "--level", "5"];
    arrays.refused(
        &[&create[..], &DRIVES[..3]].concat(),
        &["d0 holds member d0 of array first", "--force"],
    );
    arrays.drive("ext4", 24 << 20);
    sh(&["mkfs.ext4", "-q", "-F", arrays.path("ext4").to_str().expect("plain text")]);
    arrays.drive("text", 24 << 20);
    File::options()
        .write(true)
        .open(arrays.path("text"))
        .and_then(|file| file.write_all_at(b"a letter", 500_000))
        .expect("written");
    arrays.drive("blank", 24 << 20);
    let drives = ["blank", "ext4", "text"];
    let said = arrays.refused(
        &[&create[..], &drives].concat(),
        &["ext4 holds an ext2, ext3 or ext4", "text holds data"],
    );
    assert!(!said.contains("blank holds"), "{said}");
    let other = ["d0", "d2", "d3", "d4", "d5"];
    arrays.ok(&[&["fail", "d1"], &DRIVES[..]].concat());
    arrays.refused(
        &[&["replace", "d1", "ext4"], &other[..]].concat(),
        &["ext4 holds", "nothing was changed"],
    );
    let now = fs::read(arrays.path("d1")).expect("read");
    assert!(before[1 << 20..] == now[1 << 20..], "nothing was written over its data");
    // Told so, it is overwritten.
    arrays.ok(&[&["replace", "--overwrite", "d1", "ext4"], &other[..]].concat());
    arrays.ok(&[&create[..], &["--force", "blank", "text", "d1"]].concat());
    let shown = arrays.json(&["show", "blank", "text", "d1"]);
    assert_eq!((&shown["name"], &shown["state"]), (&"second".into(), &"healthy".into()));
}

#[test]
fn drives_of_several_arrays_are_told_apart() {
    let arrays = made("first");
    arrays.ok(&["create", "second", "--level", "5", "--size", "24MiB", "e0", "e1", "e2"]);
    for command in ["show", "scrub", "rebuild"] {
        arrays.refused(
            &[command, "d0", "d1", "e0", "d2"],
            &["several arrays", "e0 to second", "d0 to first"],
        );
    }
    arrays.drive("blank", 24 << 20);
    arrays.refused(&["scrub", "d0", "blank", "d1"], &["blank is no member of an array"]);
    arrays.refused(&["show", "nowhere"], &["nowhere", "No such file"]);
    arrays.refused(&["show", "."], &["."]);
    // A drive of another array comes as a new member only by force.
    arrays.ok(&[&["fail", "d5"], &DRIVES[..]].concat());
    arrays.refused(
        &["replace", "d5", "e0", "d0", "d1", "d2", "d3", "d4"],
        &["e0 holds member e0 of array second"],
    );
}

#[test]
fn a_place_is_claimed_once() {
    let arrays = made("claimed");
    fs::copy(arrays.path("d1"), arrays.path("copy")).expect("copied");
    let drives = ["d0", "d1", "copy", "d2", "d3", "d4", "d5"];
    arrays.refused(&[&["scrub"], &drives[..]].concat(), &["/copy both claim to be d1"]);
    arrays.refused(&["scrub", "d0", "d1", "./d1"], &["d1 and ./d1 are the same drive"]);
}

/// Superblocks of two arrays on one drive, which no command writes: it holds some of both.
#[test]
fn a_drive_that_two_arrays_claim_is_told() {
    let arrays = made("first");
    arrays.ok(&["create", "second", "--level", "5", "--size", "24MiB", "e0", "e1", "e2"]);
    let mut block = vec![0; 4096];
    let e1 = File::open(arrays.path("e1")).expect("there");
    e1.read_exact_at(&mut block, 4096).expect("read");
    let d1 = File::options().write(true).open(arrays.path("d1")).expect("there");
    d1.write_all_at(&block, 4096).expect("written");
    for command in ["show", "scrub", "rebuild"] {
        arrays.refused(
            &[&[command], &DRIVES[..]].concat(),
            &["d1 was written over by another array", "first (", "second (", "leave it out"],
        );
    }
    arrays.ok(&["scrub", "--degraded", "d0", "d2", "d3", "d4", "d5"]);
    // Nor is it taken unasked.
    let others = ["d0", "d2", "d3", "d4", "d5"];
    arrays.refused(&[&["replace", "d1", "d1"], &others[..]].concat(), &["d1 holds", "--overwrite"]);
}

/// A drive put back as it was: an image restored, a snapshot rolled back.
#[test]
fn an_older_copy_of_a_member_is_told() {
    let arrays = made("older");
    fs::copy(arrays.path("d1"), arrays.path("before")).expect("copied");
    for _ in 0..2 {
        arrays.ok(&[&["scrub"], &DRIVES[..]].concat());
    }
    fs::rename(arrays.path("before"), arrays.path("d1")).expect("put back");
    let shown = arrays.json(&[&["show"], &DRIVES[..]].concat());
    assert_eq!(shown["state"], "incomplete");
    assert!(shown["problem"].as_str().is_some_and(|why| why.contains("an older copy")), "{shown}");
    for command in ["scrub", "rebuild"] {
        arrays.refused(
            &[&[command], &DRIVES[..]].concat(),
            &["d1 is d1 as it was at generation", "an older copy, put back", "--degraded"],
        );
    }
    arrays.ok(&[&["scrub", "--degraded"], &DRIVES[..]].concat());
    // It is on record as out, so that nobody asks any more.
    let shown = arrays.json(&[&["show"], &DRIVES[..]].concat());
    assert_eq!(
        (&shown["state"], &shown["members"][1]["state"]),
        (&"degraded".into(), &"faulty".into())
    );
    arrays.ok(&[&["replace", "d1", "d1"], &["d0", "d2", "d3", "d4", "d5"][..]].concat());
    arrays.ok(&[&["rebuild"], &DRIVES[..]].concat());
}

#[test]
fn missing_members_are_named_and_not_given_up_unasked() {
    let arrays = made("missing");
    arrays.refused(&["scrub", "d0", "d1", "d2"], &["missing: d3, d4, d5", "2 tolerated"]);
    arrays.refused(
        &["scrub", "d0", "d1", "d2", "d3", "d4"],
        &["not among the drives given: d5", "--degraded"],
    );
    let shown = arrays.json(&[&["show"], &DRIVES[..]].concat());
    assert_eq!(shown["state"], "healthy", "nothing was given up");
    arrays.ok(&["scrub", "--degraded", "d0", "d1", "d2", "d3", "d4"]);
    let shown = arrays.json(&[&["show"], &DRIVES[..]].concat());
    assert_eq!(
        (&shown["state"], &shown["members"][5]["state"]),
        (&"degraded".into(), &"faulty".into())
    );

    // Half of a pair may be the half that knows less.
    arrays.ok(&["create", "pair", "--level", "1", "--size", "24MiB", "p0", "p1"]);
    arrays.refused(&["scrub", "--degraded", "p0"], &["more than half are needed", "missing: p1"]);
    arrays.ok(&["scrub", "--force", "p0"]);
}

#[test]
fn a_drive_cut_short_is_told() {
    let arrays = made("cut");
    let cut = File::options().write(true).open(arrays.path("d3")).expect("there");
    cut.set_len(10 << 20).expect("cut");
    let said = arrays
        .refused(&[&["scrub"], &DRIVES[..]].concat(), &["d3 has 10485760 bytes", "cut short"]);
    assert!(!said.contains("d2"), "{said}");
    let shown = arrays.json(&[&["show"], &DRIVES[..]].concat());
    assert_eq!(shown["state"], "incomplete");
    arrays.ok(&["scrub", "--degraded", "d0", "d1", "d2", "d4", "d5"]);
}

#[test]
fn a_drive_in_use_is_left_alone() {
    let arrays = made("busy");
    let held = File::open(arrays.path("d2")).expect("there");
    match held.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock | TryLockError::Error(_)) => panic!("nobody has it"),
    }
    arrays.refused(&[&["scrub"], &DRIVES[..]].concat(), &["d2 is in use"]);
    arrays
        .refused(&["create", "x", "--force", "--level", "5", "d1", "d2", "d3"], &["d2 is in use"]);
    let shown = arrays.json(&[&["show"], &DRIVES[..]].concat());
    assert!(shown["problem"].as_str().is_some_and(|why| why.contains("d2 is in use")), "{shown}");
    drop(held);
    arrays.ok(&[&["scrub"], &DRIVES[..]].concat());
}

/// Rot on one member, in place: located, repaired, and reported as such.
#[test]
fn a_scrub_finds_rot_and_says_so() {
    if !crate::support::can_run() {
        return;
    }
    let mut arrays = made("rot");
    arrays.serve(&DRIVES);
    fs::write(arrays.file(), vec![9; 8_000_000]).expect("written");
    arrays.stop();
    // What was overwritten in part since the last scrub that found it right might have rotted before.
    arrays.ok(&[&["scrub"], &DRIVES[..]].concat());
    let member = File::options().read(true).write(true).open(arrays.path("d1")).expect("there");
    // Near the end of what was written, far behind superblock, journal and map.
    let spoilt = vec![77; 4096];
    let bytes = fs::read(arrays.path("d1")).expect("read");
    let at =
        bytes.chunks(4096).rposition(|block| block.iter().all(|byte| *byte == 9)).expect("data");
    member.write_all_at(&spoilt, at as u64 * 4096).expect("spoilt");
    let scrubbed = arrays.json(&[&["scrub"], &DRIVES[..]].concat());
    assert_eq!((&scrubbed["wrong_repaired"], &scrubbed["mismatched"]), (&1.into(), &0.into()));
    let said = arrays.ok(&[&["scrub"], &DRIVES[..]].concat());
    assert!(said.contains("nothing was wrong"), "{said}");
}

/// A drive of a cluster has a label at both ends, and either is enough to write the other anew: none may be left.
#[test]
fn a_cluster_and_an_array_do_not_take_each_others_drives() {
    use crate::support::{Cluster, LEVADA, TINY, can_run, said};
    if !can_run() {
        return;
    }
    let cluster = Cluster::new("owner", TINY);
    cluster.ok(&["up"]);
    let drives = ["d0.img", "d1.img", "d2.img"];
    let array = |words: &[&str]| {
        let mut command = std::process::Command::new(LEVADA);
        command.arg("array").args(words).args(drives).current_dir(cluster.dir.path());
        crate::fixture::run(
            command.env("LEVADA_ARRAYS_DIR", cluster.path("run")),
            crate::support::LIMIT,
        )
    };
    let create = ["create", "thief", "--level", "5"];
    let in_use = said(&array(&[&create[..], &["--force"]].concat()));
    assert!(in_use.contains("d0.img is in use"), "{in_use}");
    cluster.ok(&["down"]);
    let refused = said(&array(&create));
    assert!(refused.contains("d0.img holds drive d0 of cluster owner"), "{refused}");
    cluster.ok(&["up"]);
    cluster.ok(&["down"]);

    let made = array(&[&create[..], &["--force"]].concat());
    assert!(made.status.success(), "{}", said(&made));
    cluster.refused(&["up"], &["d0"]);
    let shown = said(&array(&["show"]));
    assert!(shown.contains("thief: healthy"), "{shown}");
}
