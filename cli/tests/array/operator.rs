//! The commands, with nobody serving and while somebody does.

use crate::fixture::{Box, members};
use crate::support::can_run;
use std::fs;

const DRIVES: [&str; 6] = ["d0", "d1", "d2", "d3", "d4", "d5"];

fn made(level: &[&str], drives: &[&str]) -> Box {
    let arrays = Box::new();
    arrays.ok(&[&["create", "data", "--size", "24MiB", "--level"], level, drives].concat());
    arrays
}

#[test]
fn a_stranger_is_told_what_each_command_does() {
    let arrays = Box::new();
    for command in ["create", "show", "serve", "scrub", "rebuild", "fail", "replace", "add-spare"] {
        let help = arrays.ok(&[command, "--help"]);
        assert!(help.contains("DRIVE") && help.lines().count() > 8, "{command}: {help}");
    }
    assert!(arrays.ok(&["create", "--help"]).contains("spread mirror"));
}

#[test]
fn what_is_made_is_shown() {
    let arrays = Box::new();
    let status = arrays.json(
        &[
            &[
                "create", "lab", "--level", "6", "--chunk", "128KiB", "--size", "24MiB",
                "--spares", "1",
            ],
            &DRIVES[..],
        ]
        .concat(),
    );
    let shown = arrays.json(&[&["show"], &DRIVES[..]].concat());
    for status in [&status, &shown] {
        assert_eq!(status["name"], "lab");
        assert_eq!(status["level"], "6");
        assert_eq!(status["state"], "healthy");
        assert_eq!(
            (&status["width"], &status["tolerates"], &status["lost"]),
            (&5.into(), &2.into(), &0.into())
        );
        assert_eq!(status["chunk_bytes"], 128 << 10);
        assert_eq!(status["stripe_bytes"], 3 * (128 << 10));
        assert!(status["open_by"].is_null() && status["stripes_written"].is_null());
        assert_eq!(members(status, "name"), DRIVES);
        assert_eq!(members(status, "state")[4..], ["in-sync", "spare"]);
        assert_eq!(members(status, "path"), DRIVES);
    }
    assert_eq!(status["uuid"], shown["uuid"]);
    // What is not given is missing, and what would help is named.
    let shown = arrays.json(&[&["show"], &DRIVES[..4]].concat());
    assert_eq!(shown["state"], "degraded", "four of six would do");
    assert_eq!(shown["lost"], 1);
    assert_eq!(members(&shown, "state")[3..], ["in-sync", "missing", "missing"]);
    let shown = arrays.json(&["show", "d0"]);
    assert_eq!(shown["state"], "incomplete");
    assert!(shown["problem"].as_str().is_some_and(|why| why.contains("missing: d1, d2, d3")));
    let text = arrays.ok(&[&["show"], &DRIVES[..]].concat());
    assert!(
        text.contains("lab: healthy, RAID 6 3+2, 128 KiB chunks") && text.contains("not open"),
        "{text}"
    );
}

#[test]
fn members_of_unequal_size_lose_what_the_smallest_has_not() {
    let arrays = Box::new();
    for (name, mib) in [("a", 24), ("b", 32), ("c", 24)] {
        arrays.drive(name, mib << 20);
    }
    let said = arrays.ok(&["create", "data", "--level", "5", "a", "b", "c"]);
    assert!(
        said.contains("smallest drive rules: a has")
            && said.contains("8388608 bytes of the others"),
        "{said}"
    );
}

/// A drive is not given once, and comes back.
#[test]
fn a_drive_that_was_absent_catches_up() {
    let arrays = made(&["5"], &DRIVES);
    let all = |words: &[&'static str]| [words, &DRIVES[..]].concat();
    arrays.ok(&["scrub", "--degraded", "d0", "d1", "d2", "d3", "d4"]);
    let shown = arrays.json(&all(&["show"]));
    assert_eq!((&shown["members"][5]["state"], &shown["lost"]), (&"faulty".into(), &1.into()));
    assert_eq!(members(&shown, "catches_up")[4..], [false, true]);
    assert!(arrays.ok(&all(&["show"])).contains("faulty, may catch up"));
    let rebuilt = arrays.json(&all(&["rebuild"]));
    assert_eq!((rebuilt["state"].as_str(), &rebuilt["lost"]), (Some("healthy"), &0.into()));
    assert_eq!(arrays.json(&all(&["show"]))["members"][5]["catches_up"], false);
}

/// With nobody serving each command opens the array, does its work and closes it.
#[test]
fn commands_work_with_nobody_serving() {
    let arrays = made(&["6"], &DRIVES);
    let all = |words: &[&'static str]| [words, &DRIVES[..]].concat();
    let failed = arrays.json(&all(&["fail", "d2"]));
    assert_eq!((failed["state"].as_str(), &failed["lost"]), (Some("degraded"), &1.into()));
    arrays.refused(&all(&["fail", "d2"]), &["d2 is out already", "replace"]);
    assert_eq!(arrays.json(&all(&["show"]))["members"][2]["state"], "faulty");
    arrays.ok(&all(&["fail", "4"]));
    arrays.refused(&all(&["fail", "d0"]), &["d0 cannot be taken out", "nowhere else"]);
    arrays.refused(&all(&["replace", "d1", "n1"]), &["d1 is not out"]);
    arrays.refused(&all(&["fail", "nobody"]), &["no member \"nobody\"", "d0 (0)"]);

    // One new, and one come back.
    arrays.drive("n4", 24 << 20);
    let said = arrays.ok(&all(&["replace", "d4", "n4"]));
    assert!(said.contains("`levada array rebuild` is next"), "{said}");
    let drives = ["d0", "d1", "d2", "d3", "n4", "d5"];
    let all = |words: &[&'static str]| [words, &drives[..]].concat();
    assert_eq!(arrays.json(&all(&["show"]))["state"], "rebuilding");
    let said = arrays.ok(&all(&["replace", "d2", "d2"]));
    assert!(said.contains("needs only what changed meanwhile"), "{said}");
    let rebuilt = arrays.json(&all(&["rebuild", "--ceiling", "500"]));
    assert_eq!((rebuilt["state"].as_str(), &rebuilt["lost"]), (Some("healthy"), &0.into()));
    let scrubbed = arrays.json(&all(&["scrub"]));
    assert_eq!((&scrubbed["mismatched"], &scrubbed["lost"]), (&0.into(), &0.into()));
    let said = arrays.ok(&all(&["rebuild"]));
    assert!(said.contains("every member is in sync"), "{said}");
    // The one that was replaced knows nothing any more.
    arrays.refused(&all(&["replace", "n4", "d4"]), &["n4 is not out"]);
}

#[test]
fn a_hot_spare_takes_over() {
    let arrays = made(&["5", "--spares", "1"], &DRIVES[..4]);
    let failed = arrays.json(&["fail", "d1", "d0", "d1", "d2", "d3"]);
    assert_eq!(members(&failed, "state"), ["in-sync", "faulty", "in-sync", "rebuilding"]);
    let drives = ["d0", "d2", "d3"];
    arrays.drive("n", 24 << 20);
    let added = arrays.json(&[&["add-spare", "n"], &drives[..]].concat());
    assert_eq!(members(&added, "state")[4], "spare");
    let rebuilt = arrays.json(&[&["rebuild"], &drives[..], &["n"]].concat());
    assert_eq!(rebuilt["state"], "healthy");
    arrays.drive("small", 4 << 20);
    arrays.refused(
        &["add-spare", "small", "d0", "d2", "d3", "n"],
        &["small has 4194304 bytes", "are needed"],
    );
}

/// One drive says which array is meant; the process that serves it carries out what is asked.
#[test]
fn commands_work_while_it_is_served() {
    if !can_run() {
        return;
    }
    let mut arrays = made(&["6"], &DRIVES);
    arrays.serve(&DRIVES);
    let file = arrays.file();
    let bytes: Vec<u8> = (0..20_000_000u32).map(|at| (at / 7) as u8).collect();
    let mut there = vec![0; bytes.len()];
    use std::os::unix::fs::FileExt;
    let open = fs::File::options().read(true).write(true).open(&file).expect("it is there");
    open.write_all_at(&bytes, 0).expect("written");
    open.sync_all().expect("durable");

    let shown = arrays.json(&["show", "d3"]);
    assert_eq!(shown["open_by"]["pid"], arrays.server());
    assert_eq!(shown["open_by"]["at"], file.to_str().expect("plain text"));
    assert!(shown["stripes_written"].as_u64().is_some_and(|written| written > 0));
    for io in members(&shown, "io") {
        assert!(io["bytes_written"].as_u64().is_some_and(|bytes| bytes > 0), "{io}");
        let latency = &io["latency_us"];
        let at = |name: &str| latency[name].as_f64().expect("a number");
        assert!(at("p50") > 0.0 && at("p50") <= at("p99") && at("p99") <= at("max"), "{latency}");
    }
    arrays.refused(
        &[&["serve", "--at", "other"], &DRIVES[..]].concat(),
        &["open already, by process"],
    );

    // Rebuilt unasked.
    arrays.ok(&["fail", "d2", "d0"]);
    open.read_exact_at(&mut there, 0).expect("read");
    assert!(there == bytes, "degraded");
    arrays.drive("n2", 24 << 20);
    let said = arrays.ok(&["replace", "d2", "n2", "d0"]);
    assert!(said.contains("its rebuild has begun"), "{said}");
    crate::support::wait_until("it is rebuilt", || {
        arrays.json(&["show", "d0"])["state"] == "healthy"
    });
    // Taken out and come back: it is locked by the process that serves, and still may.
    arrays.ok(&["fail", "d4", "d0"]);
    arrays.ok(&["replace", "d4", "d4", "d0"]);
    arrays.refused(&["add-spare", "d1", "d0"], &["d1 is d1 of this array, and live"]);
    let said = arrays.ok(&["rebuild", "d0"]);
    assert!(said.contains("every member is in sync"), "{said}");
    let scrubbed = arrays.json(&["scrub", "d0"]);
    assert!(scrubbed["stripes"].as_u64().is_some_and(|stripes| stripes > 50), "{scrubbed}");
    assert_eq!((&scrubbed["mismatched"], &scrubbed["wrong_repaired"]), (&0.into(), &0.into()));
    assert_eq!(arrays.json(&["show", "d0"])["last_scrub"], scrubbed);
    open.read_exact_at(&mut there, 0).expect("read");
    assert!(there == bytes, "rebuilt");
    drop(open);
    arrays.stop();
    let drives = ["d0", "d1", "n2", "d3", "d4", "d5"];
    let shown = arrays.json(&[&["show"], &drives[..]].concat());
    assert_eq!((shown["state"].as_str(), shown["open_by"].is_null()), (Some("healthy"), true));
}

/// A slow scrub shows how far it is, beside the one who asked for it.
#[test]
fn work_shows_its_progress() {
    if !can_run() {
        return;
    }
    let mut arrays = made(&["6"], &DRIVES);
    arrays.serve(&DRIVES);
    fs::write(arrays.file(), vec![3; 24_000_000]).expect("written");
    let scrub = arrays.run(&["scrub", "--json", "--ceiling", "20", "d0"]);
    assert!(scrub.status.success());
    let said = String::from_utf8_lossy(&scrub.stderr).into_owned();
    let told = said.lines().map(|line| serde_json::from_str(line).expect("JSON"));
    let told: Vec<serde_json::Value> = told.collect();
    assert!(told.iter().all(|told| told["work"] == "scrub"), "{said}");
    let is_under_way = |told: &serde_json::Value| {
        let progress = &told["progress"];
        let seconds = progress["seconds_left"].as_f64();
        progress["stripes_done"].as_u64() < progress["stripes_total"].as_u64()
            && seconds.is_some_and(|seconds| seconds < 10.0)
    };
    assert!(told.iter().any(is_under_way), "{said}");
    arrays.stop();
}

/// Ctrl-C while a command has the array open itself: it closes it, and says that it did not finish.
#[test]
fn interrupted_work_closes_the_array() {
    if !can_run() {
        return;
    }
    let mut arrays = made(&["6"], &DRIVES);
    arrays.serve(&DRIVES);
    fs::write(arrays.file(), vec![3; 24_000_000]).expect("written");
    arrays.stop();
    let mut scrub = arrays.start(&[&["scrub", "--ceiling", "5"], &DRIVES[..]].concat());
    // Others are not in its way, nor it in theirs.
    crate::support::wait_until("it scrubs", || {
        let shown = arrays.json(&["show", "d0"]);
        shown["open_by"]["pid"] == scrub.id() && shown["scrubbed_below"].as_u64() > Some(0)
    });
    crate::support::signal("-INT", scrub.id());
    assert_eq!(scrub.wait().expect("a child").code(), Some(1));
    let shown = arrays.json(&[&["show"], &DRIVES[..]].concat());
    assert_eq!((shown["state"].as_str(), shown["open_by"].is_null()), (Some("healthy"), true));
    // It goes on where it was, by itself once the array is served.
    let below = shown["scrubbed_below"].as_u64().expect("a number");
    assert!(below > 0 && below < shown["stripes"].as_u64().expect("a number"), "{shown}");
    let text = arrays.ok(&[&["show"], &DRIVES[..]].concat());
    assert!(text.contains(&format!("scrub: was cut short at stripe {below}")), "{text}");
    arrays.serve(&[&["--ceiling", "5"], &DRIVES[..]].concat());
    let shown = arrays.json(&["show", "d0"]);
    let scrub = &shown["scrub"];
    assert_eq!(scrub["stripes_total"], shown["stripes_written"], "{shown}");
    // Who asks for one gets this one, and its pace is his.
    let ended = arrays.json(&["scrub", "--ceiling", "10000", "d0"]);
    assert_eq!(ended["stripes"], shown["stripes_written"], "{ended}");
    let anew = arrays.json(&["scrub", "--restart", "--ceiling", "10000", "d0"]);
    assert_eq!(anew, ended);
    assert_eq!(arrays.json(&["show", "d0"])["scrubbed_below"], 0);
    arrays.stop();
}
