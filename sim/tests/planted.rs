//! The simulation proves something: bugs planted in every floor are found by it. A few here,
//! all of them in `scripts/soak`. None is planted that nobody hunts.

use levada_sim::planted::{BUGS, hunt};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

#[test]
fn planted_bugs_are_found() {
    let quick = [
        "raid-copy-left-out",
        "raid-resync-skipped",
        "raid-flush-dropped",
        "raid-standing-not-recorded",
        "kv-log-not-durable",
        "kv-replay-skipped",
        "kv-checkpoint-not-flushed",
        "kv-acknowledged-out-of-order",
        "kv-epoch-ignored",
        "log-commit-not-durable",
        "log-tombstone-dropped",
        "log-flush-dropped",
        "log-staged-not-replayed",
        "log-staged-row-left-out",
        "client-written-not-kept",
        "client-objects-not-cut",
        "client-size-before-commit",
        "meta-reply-not-stored",
        "meta-answered-before-durable",
        "meta-cookie-given-twice",
        "nvme-overwrites-an-open-change",
        "nvme-unflushed-not-written-again",
        "nvme-owner-not-looked-for",
        "nvmet-reservation-not-checked",
        "nvmet-flush-dropped",
        "nvmet-fua-ignored",
        "drive-label-not-heard",
        "node-drives-not-claimed",
    ];
    for name in quick {
        let bug = BUGS.iter().find(|bug| bug.name == name).expect("listed");
        let (seed, message) =
            hunt(bug).unwrap_or_else(|| panic!("{name} was not found in {} seeds", bug.seeds));
        println!("{name}: seed {seed}: {}", message.lines().next().unwrap_or_default());
    }
}

/// Every source file of the workspace below `folder`.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder of the workspace") {
        let path = entry.expect("it can be listed").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// What stands in `text` in quotes right behind each `before`.
fn quoted_after<'a>(text: &'a str, before: &str) -> impl Iterator<Item = String> + use<'a> {
    let before = format!("{before}\"");
    let parts: Vec<&str> = text.split(&before).skip(1).collect();
    parts.into_iter().filter_map(|part| Some(part.split_once('"')?.0.to_owned()))
}

#[test]
fn every_planted_bug_is_hunted() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    for part in ["base", "block", "store", "fs", "volume", "export", "control", "cli"] {
        sources(&root.join(part), &mut files);
    }
    let (mut planted, mut hunted) = (BTreeSet::new(), BTreeSet::new());
    for file in files.iter().filter(|file| !file.ends_with("base/src/planted.rs")) {
        let text = fs::read_to_string(file).expect("a source file");
        planted.extend(quoted_after(&text, "planted!("));
        hunted.extend(quoted_after(&text, "planted::choose(Some("));
    }
    hunted.extend(BUGS.iter().map(|bug| bug.name.to_owned()));
    // Those that the tests of who has them hunt.
    for file in [
        "fs/meta/src/tests/random.rs",
        "fs/client/tests/all/planted.rs",
        "volume/src/qos/tests.rs",
        "volume/src/thin/tests.rs",
    ] {
        let text = fs::read_to_string(root.join(file)).expect("it exists");
        let list = text.split("let bugs = [").nth(1).and_then(|rest| rest.split("];").next());
        let list = list.expect("its list of bugs");
        let bugs: Vec<String> = list.split('"').skip(1).step_by(2).map(str::to_owned).collect();
        assert!(bugs.len() >= 4, "{bugs:?}");
        hunted.extend(bugs);
    }
    assert!(planted.len() > 30, "{planted:?}");
    let nobody: Vec<_> = planted.difference(&hunted).collect();
    assert!(nobody.is_empty(), "planted, and nobody hunts them: {nobody:?}");
    let gone: Vec<_> = hunted.difference(&planted).collect();
    assert!(gone.is_empty(), "hunted, and planted nowhere: {gone:?}");
}
