//! The file, as programs use it.

use crate::fixture::{Box, FILE, sh};
use crate::support::{can_run, wait_until};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};

fn made(level: &[&str], width: usize) -> (Box, Vec<String>) {
    let arrays = Box::new();
    let drives: Vec<String> = (0..width).map(|number| format!("d{number}")).collect();
    let names: Vec<&str> = drives.iter().map(String::as_str).collect();
    arrays.ok(&[&["create", "data", "--size", "24MiB", "--level"], level, &names].concat());
    (arrays, drives)
}

fn names(drives: &[String]) -> Vec<&str> {
    drives.iter().map(String::as_str).collect()
}

fn open(arrays: &Box) -> File {
    File::options().read(true).write(true).open(arrays.file()).expect("it is there")
}

/// The kernel tells calls that come later otherwise than those that waited.
fn is_cut_off(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOTCONN | libc::ECONNABORTED))
}

#[test]
fn every_level_holds_what_it_is_given_and_bears_what_it_says() {
    if !can_run() {
        return;
    }
    for (level, width, losses) in [
        (&["0"][..], 3, &[][..]),
        (&["1"], 2, &["d0"]),
        (&["1", "--copies", "3"], 3, &["d0", "d2"]),
        (&["10"], 5, &["d1"]),
        (&["5"], 4, &["d3"]),
        (&["6"], 5, &["d0", "d1"]),
        (&["50"], 6, &["d0", "d4"]),
        (&["60", "--groups", "2"], 8, &["d0", "d1", "d6", "d7"]),
        (&["3+3"], 6, &["d0", "d2", "d5"]),
    ] {
        let (mut arrays, drives) = made(level, width);
        arrays.serve(&names(&drives));
        let file = open(&arrays);
        let bytes: Vec<u8> = (0..6_000_001u32).map(|at| (at / 5) as u8).collect();
        file.write_all_at(&bytes, 12_345).expect("written");
        file.sync_all().expect("durable");
        for member in losses {
            arrays.ok(&["fail", member, "d0"]);
        }
        file.write_all_at(&bytes[..1000], 12_345 + 2_000_000).expect("written degraded");
        let mut expected = bytes.clone();
        expected[2_000_000..2_001_000].copy_from_slice(&bytes[..1000]);
        drop(file);
        arrays.stop();
        let live: Vec<&str> =
            names(&drives).into_iter().filter(|name| !losses.contains(name)).collect();
        arrays.serve(&live);
        let mut there = vec![0; bytes.len()];
        let file = open(&arrays);
        file.read_exact_at(&mut there, 12_345).expect("read");
        assert!(there == expected, "level {level:?}");
        drop(file);
        arrays.stop();
    }
}

#[test]
fn any_offset_and_length_is_right() {
    if !can_run() {
        return;
    }
    let (mut arrays, drives) = made(&["6"], 5);
    arrays.serve(&names(&drives));
    let size = fs::metadata(arrays.file()).expect("stat").len();
    let (file, mut model) = (open(&arrays), vec![0u8; 3 << 20]);
    for n in 0..300usize {
        let (at, bytes) = (n * 7919 % 3_000_000, 1 + n * 613 % 9_000);
        let data = vec![(n % 255) as u8 + 1; bytes];
        file.write_all_at(&data, at as u64).expect("written");
        model[at..at + bytes].copy_from_slice(&data);
    }
    let mut there = vec![0; model.len()];
    file.read_exact_at(&mut there, 0).expect("read");
    assert!(there == model);
    file.read_exact_at(&mut there[..777], 12_321).expect("read");
    assert!(there[..777] == model[12_321..][..777]);

    // The end is where the array ends.
    assert_eq!(
        file.write_at(&[1; 100], size).expect_err("past the end").raw_os_error(),
        Some(libc::ENOSPC)
    );
    assert_eq!(file.write_at(&[1; 100], size - 60).expect("what fits"), 60);
    assert_eq!(file.read_at(&mut [0; 100], size).expect("nothing"), 0);
    assert_eq!(file.read_at(&mut [0; 100], size - 60).expect("what there is"), 60);
    assert_eq!(file.set_len(size + 1).expect_err("fixed").raw_os_error(), Some(libc::EPERM));
    assert_eq!(file.set_len(100).expect_err("fixed").raw_os_error(), Some(libc::EPERM));
    drop(File::create(arrays.file()).expect("O_TRUNC is ignored"));
    assert_eq!(fs::metadata(arrays.file()).expect("stat").len(), size);
    file.read_exact_at(&mut there, 0).expect("read");
    assert!(there == model, "nothing was cut");

    // By direct I/O, and what one descriptor wrote another reads.
    let direct = File::options().read(true).custom_flags(libc::O_DIRECT).open(arrays.file());
    let direct = direct.expect("direct I/O");
    file.write_all_at(&[42; 10], 100).expect("written");
    let mut block = levada_base::BufMut::zeroed(4096);
    direct.read_exact_at(&mut block, 0).expect("read");
    assert_eq!(block[100..110], [42; 10]);

    // Holes.
    let path = arrays.file();
    let path = path.to_str().expect("plain text");
    sh(&["fallocate", "--punch-hole", "--offset", "5000", "--length", "1500000", path]);
    sh(&[
        "fallocate",
        "--zero-range",
        "--keep-size",
        "--offset",
        "2000001",
        "--length",
        "77",
        path,
    ]);
    model[100..110].fill(42);
    model[5000..1_505_000].fill(0);
    model[2_000_001..2_000_078].fill(0);
    file.read_exact_at(&mut there, 0).expect("read");
    assert!(there == model);
    let before = arrays.json(&["show", "d0"])["stripes_written"].as_u64();
    sh(&["fallocate", "--punch-hole", "--offset", "0", "--length", &size.to_string(), path]);
    assert!(before > Some(0));
    assert_eq!(arrays.json(&["show", "d0"])["stripes_written"], 0, "given back");
    drop((file, direct));
    arrays.stop();
}

/// Programs that write parts of the same blocks at once, through the kernel.
#[test]
fn writers_of_one_block_do_not_undo_each_other() {
    if !can_run() {
        return;
    }
    let (mut arrays, drives) = made(&["5"], 3);
    arrays.serve(&names(&drives));
    std::thread::scope(|scope| {
        for writer in 0..4u64 {
            let file = open(&arrays);
            scope.spawn(move || {
                for n in 0..150u64 {
                    let at = (n * 4 + writer) * 300;
                    file.write_all_at(&[writer as u8 + 1; 300], at).expect("written");
                }
            });
        }
    });
    let mut there = vec![0; 150 * 4 * 300];
    open(&arrays).read_exact_at(&mut there, 0).expect("read");
    for (n, part) in there.chunks(300).enumerate() {
        assert!(part.iter().all(|byte| *byte == (n % 4) as u8 + 1), "part {n}");
    }
    arrays.stop();
}

#[test]
fn it_ends_in_order_and_comes_back() {
    if !can_run() {
        return;
    }
    let (mut arrays, drives) = made(&["10"], 4);
    // What would be hidden is not mounted over.
    fs::write(arrays.path(FILE), "a letter").expect("written");
    arrays.refused(
        &[&["serve", "--at", FILE], &names(&drives)[..]].concat(),
        &["holds 8 bytes, which would be hidden"],
    );
    assert_eq!(fs::read_to_string(arrays.path(FILE)).expect("kept"), "a letter");
    fs::remove_file(arrays.path(FILE)).expect("removed");
    arrays
        .refused(&[&["serve", "--at", "."], &names(&drives)[..]].concat(), &["not a regular file"]);

    // Unmounted by somebody: it closes the array and ends.
    arrays.serve(&names(&drives));
    fs::write(arrays.file(), "kept").expect("written");
    sh(&["umount", arrays.file().to_str().expect("plain text")]);
    assert!(arrays.ended(), "{}", arrays.log());
    assert!(!arrays.file().exists());

    arrays.serve(&names(&drives));
    arrays.stop();
    assert!(!arrays.file().exists(), "what it made it takes away");

    // In use when it is told to stop: it leaves the tree, and goes with its last user.
    arrays.serve(&names(&drives));
    let file = open(&arrays);
    arrays.signal("-INT");
    wait_until("it left the tree", || {
        fs::metadata(arrays.file()).is_ok_and(|there| there.size() == 0)
    });
    let mut there = [0; 4];
    file.read_exact_at(&mut there, 0).expect("served still");
    assert_eq!(&there, b"kept");
    file.write_all_at(b"last", 0).expect("served still");
    drop(file);
    assert!(arrays.ended(), "{}", arrays.log());

    // Told twice it ends at once, in order.
    arrays.serve(&names(&drives));
    let file = open(&arrays);
    file.read_exact_at(&mut there, 0).expect("read");
    assert_eq!(&there, b"last");
    arrays.signal("-TERM");
    wait_until("it left the tree", || {
        fs::metadata(arrays.file()).is_ok_and(|there| there.size() == 0)
    });
    arrays.signal("-TERM");
    assert!(arrays.ended(), "{}", arrays.log());
    assert!(is_cut_off(&file.read_at(&mut there, 0).expect_err("gone")));
    drop(file);

    // Killed: calls fail, and the next one takes the dead mount away.
    arrays.serve(&names(&drives));
    arrays.kill();
    assert!(is_cut_off(&fs::read(arrays.file()).expect_err("gone")));
    arrays.serve(&names(&drives));
    open(&arrays).read_exact_at(&mut there, 0).expect("read");
    assert_eq!(&there, b"last");
    arrays.stop();
}

/// What nothing can bring back is an error where it was asked for, and nowhere else.
#[test]
fn what_is_lost_reads_as_an_error() {
    if !can_run() {
        return;
    }
    let (mut arrays, drives) = made(&["0"], 2);
    arrays.serve(&names(&drives));
    let file = open(&arrays);
    file.write_all_at(&[6; 8 << 20], 0).expect("written");
    let cut = File::options().write(true).open(arrays.path("d1")).expect("there");
    cut.set_len(2 << 20).expect("cut");
    let mut there = vec![0; 64 << 10];
    let lost = file.read_at(&mut there, (6 << 20) + (64 << 10)).expect_err("it was on d1");
    assert_eq!(lost.raw_os_error(), Some(libc::EIO));
    file.read_exact_at(&mut there, 6 << 20).expect("it is on d0");
    assert!(there.iter().all(|byte| *byte == 6));
    let shown = arrays.json(&["show", "d0"]);
    assert!(shown["members"][1]["io"]["medium_errors"].as_u64() > Some(0), "{shown}");
    assert_eq!(shown["members"][0]["io"]["medium_errors"], 0);
    let io = &shown["members"][1]["io"];
    assert_eq!((&io["unreadable_chunks"], &io["unreadable_chunks_max"]), (&1.into(), &256.into()));
    let text = arrays.ok(&["show", "d0"]);
    assert!(text.contains("unreadable chunks 1 (out at 256)"), "{text}");
    arrays.refused(&["fail", "d1", "d0"], &["cannot be taken out", "nowhere else"]);
    drop(file);
    arrays.stop();
}
