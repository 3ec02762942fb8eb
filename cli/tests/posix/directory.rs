//! A directory of very many names.

use crate::{mounted_on, remount, support};
use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

/// So many parts are measured against each other.
const PARTS: usize = 10;
const MAKERS: usize = 4;

fn name(number: usize) -> String {
    format!("name-{number:07}")
}

/// Makes `from..to`, several at a time.
fn make(dir: &Path, from: usize, to: usize) -> Duration {
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for maker in 0..MAKERS {
            scope.spawn(move || {
                for number in (from + maker..to).step_by(MAKERS) {
                    File::create_new(dir.join(name(number))).expect("made");
                }
            });
        }
    });
    begun.elapsed()
}

/// Every name once, and no other.
fn check_listing(dir: &Path, names: usize, is_there: impl Fn(usize) -> bool) {
    let mut seen = vec![false; names];
    for entry in fs::read_dir(dir).expect("listed") {
        let entry = entry.expect("one").file_name().into_string().expect("text");
        let number: usize = entry.strip_prefix("name-").expect("ours").parse().expect("a number");
        assert!(!std::mem::replace(&mut seen[number], true), "{entry} is listed twice");
    }
    for (number, seen) in seen.iter().enumerate() {
        assert_eq!(*seen, is_there(number), "{}", name(number));
    }
}

/// `LEVADA_DIRECTORY_NAMES=n` of them, 40,000 unless told; `make soak` makes a million.
#[test]
fn a_directory_of_very_many_names_is_as_quick_as_a_small_one() {
    let names = std::env::var("LEVADA_DIRECTORY_NAMES")
        .map_or(40_000, |text| text.parse::<usize>().expect("a whole number of names"));
    // A KiB of metadata for each inode, and as much again.
    let slice = 64 + names / 512;
    let drive = format!("{}MiB", 3 * slice);
    let roomy = support::TINY.replace("72MiB", &drive).replace("25MiB", &format!("{slice}MiB"));
    let Some(cluster) = mounted_on("very-many", &roomy) else { return };
    let dir = cluster.mnt().join("many");
    fs::create_dir(&dir).expect("made");
    let part = names / PARTS;
    let took: Vec<Duration> = (0..PARTS).map(|n| make(&dir, n * part, (n + 1) * part)).collect();
    let names = part * PARTS;
    println!("{names} names, each tenth in {took:.1?}");
    // The quickest part of the first third against the quickest of the last: other work of the machine slows some of them, and now and
    // then by four times and more.
    let quickest = |parts: &[Duration]| *parts.iter().min().expect("some");
    let (first, last) = (quickest(&took[..PARTS / 3]), quickest(&took[PARTS - PARTS / 3..]));
    assert!(last < 3 * first, "making a name takes longer as there are more: {took:.1?}");

    let look = |step: usize| {
        let begun = Instant::now();
        for number in (0..names).step_by(step) {
            assert!(fs::symlink_metadata(dir.join(name(number))).is_ok(), "{}", name(number));
        }
        assert!(fs::symlink_metadata(dir.join("name-none")).is_err());
        begun.elapsed()
    };
    check_listing(&dir, names, |_| true);
    look(97);
    cluster.ok(&["down"]);
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    let begun = Instant::now();
    check_listing(&dir, names, |_| true);
    println!("listed in {:.1?}, {} looked up in {:.1?}", begun.elapsed(), names / 97, look(97));

    // Every third goes, while another list of them is under way.
    let mut listing = fs::read_dir(&dir).expect("listed");
    let mut told = listing.by_ref().take(names / 2).count();
    std::thread::scope(|scope| {
        for maker in 0..MAKERS {
            let dir = &dir;
            scope.spawn(move || {
                for number in (3 * maker..names).step_by(3 * MAKERS) {
                    fs::remove_file(dir.join(name(number))).expect("removed");
                }
            });
        }
    });
    told += listing.inspect(|entry| assert!(entry.is_ok())).count();
    // What stays is told once, of what goes some.
    assert!(told <= names && told >= names - names.div_ceil(3), "{told} of {names}");
    check_listing(&dir, names, |number| number % 3 != 0);
    remount(&cluster);
    check_listing(&dir, names, |number| number % 3 != 0);
    // A million take a minute where the machine has other work.
    let limit = support::LIMIT + Duration::from_micros(200 * names as u64);
    let checked = cluster.run_within(limit, &["fsck"]);
    assert!(checked.status.success(), "{}", support::said(&checked));
    cluster.ok(&["down"]);
}
