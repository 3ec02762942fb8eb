//! A file system that is full: early and clean refusals, and room as soon as something goes.

use crate::{errno, mounted, remount, support};
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat, open, statvfs};
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

fn inodes_free(dir: &Path) -> u64 {
    statvfs(dir).expect("told").f_favail
}

fn bytes_free(dir: &Path) -> u64 {
    let space = statvfs(dir).expect("told");
    space.f_bavail * space.f_frsize
}

#[test]
fn the_last_inode_is_given_and_none_beyond() {
    let Some(cluster) = mounted("inodes") else { return };
    let dir = cluster.mnt();
    let at = |name: &str| dir.join(name);
    fs::create_dir(at("many")).expect("made");
    fs::write(at("data"), "written before").expect("made");
    let free = inodes_free(&dir);
    println!("{free} inodes");
    std::thread::scope(|scope| {
        for maker in 0..4 {
            let dir = &dir;
            scope.spawn(move || {
                for number in (maker..free).step_by(4) {
                    let made = File::create_new(dir.join(format!("many/{number}")));
                    made.unwrap_or_else(|error| panic!("{number} of {free}: {error}"));
                }
            });
        }
    });
    // `df` says so, and so does everything that makes an inode; nothing of it is left behind.
    let is_full = || {
        assert_eq!(inodes_free(&dir), 0);
        let unnamed = open(&dir, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR);
        let fifo = mknodat(CWD, at("new"), FileType::Fifo, Mode::RUSR, 0);
        for refused in [
            File::create_new(at("new")).map(drop),
            fs::create_dir(at("new")),
            symlink("nowhere", at("new")),
            fifo.map_err(Into::into),
            unnamed.map(drop).map_err(Into::into),
        ] {
            assert_eq!(errno(refused), Errno::NOSPC);
        }
        assert!(fs::symlink_metadata(at("new")).is_err());
    };
    let begun = Instant::now();
    is_full();
    assert!(begun.elapsed() < Duration::from_secs(5), "told early: {:?}", begun.elapsed());
    // What makes none goes on.
    let file = OpenOptions::new().append(true).open(at("data")).expect("opened");
    (&file).write_all(b", and meanwhile").expect("written");
    file.sync_all().expect("durable");
    drop(file);
    fs::rename(at("data"), at("moved")).expect("renamed");
    fs::hard_link(at("moved"), at("data")).expect("linked");
    fs::set_permissions(at("data"), fs::Permissions::from_mode(0o600)).expect("set");
    cluster.ok(&["down"]);
    cluster.ok(&["up"]);
    cluster.ok(&["mount", "mnt"]);
    is_full();
    assert_eq!(fs::read(at("moved")).expect("read"), b"written before, and meanwhile");

    // As many as go may come, at once; over a name, too.
    for number in 0..3 {
        fs::remove_file(at(&format!("many/{number}"))).expect("removed");
    }
    fs::rename(at("many/3"), at("many/4")).expect("replaced");
    for number in 0..4 {
        fs::create_dir(at(&format!("many/again-{number}"))).expect("made");
    }
    is_full();
    // The last name of one that is open gives nothing until its close.
    let opened = File::open(at("many/5")).expect("opened");
    fs::remove_file(at("many/5")).expect("removed");
    is_full();
    drop(opened);
    let begun = Instant::now();
    while let Err(error) = File::create_new(at("many/5")) {
        // The kernel tells of a close some time after it.
        assert!(begun.elapsed() < Duration::from_secs(10), "{error}");
    }
    is_full();
    let listed = fs::read_dir(at("many")).expect("listed").count() as u64;
    assert_eq!(listed, free, "all of them but the one that was replaced, and four new ones");
    fs::remove_dir_all(at("many")).expect("removed");
    assert_eq!(inodes_free(&dir), free + 1);
    cluster.ok(&["down"]);
    cluster.ok(&["fsck"]);
}

/// Writes until it is refused; how many bytes were written.
fn fill(path: &Path, bytes: &[u8]) -> u64 {
    let mut file = File::create(path).expect("made");
    let mut written = 0;
    let (refused, took) = loop {
        let begun = Instant::now();
        match file.write(bytes) {
            Ok(count) => written += count as u64,
            Err(error) => break (error, begun.elapsed()),
        }
    };
    assert!(took < Duration::from_secs(5), "refused after {took:?}");
    println!("refused after {took:.1?}");
    assert_eq!(Errno::from_io_error(&refused), Some(Errno::NOSPC));
    file.sync_all().expect("what was accepted becomes durable");
    // Of the one that was refused a part may have been written.
    let len = file.metadata().expect("there").len();
    assert!((written..written + bytes.len() as u64).contains(&len), "{len}, {written} of it told");
    len
}

/// Several at a time, to the end of the room.
fn fill_by(dir: &Path, writers: usize, bytes: &[u8]) -> u64 {
    std::thread::scope(|scope| {
        let writers = (0..writers)
            .map(|writer| scope.spawn(move || fill(&dir.join(format!("full-{writer}")), bytes)));
        let writers: Vec<_> = writers.collect();
        writers.into_iter().map(|writer| writer.join().expect("no panic")).sum()
    })
}

#[test]
fn what_df_shows_can_be_written_again_and_again() {
    let Some(cluster) = mounted("bytes") else { return };
    let dir = cluster.mnt();
    fs::write(dir.join("kept"), vec![7; 3_000_000]).expect("made");
    for (round, (writers, size)) in
        [(1, MIB), (4, MIB), (1, 4096), (1, MIB)].into_iter().enumerate()
    {
        let bytes: Vec<u8> = (0..size).map(|at| (at * (round + 1) % 251) as u8).collect();
        let free = bytes_free(&dir);
        let begun = Instant::now();
        let written = fill_by(&dir, writers, &bytes);
        println!(
            "{writers} writers of {size}: {written} of {free} bytes in {:.1?}",
            begun.elapsed()
        );
        assert!(written <= free, "more than was shown: {written} of {free}");
        // Headers of what was written, and of each writer's last write a part.
        let short = free / 32 + (writers * size) as u64;
        assert!(written + short >= free, "{written} of {free} bytes that df showed");
        // All that was accepted is there.
        let mut found = vec![0; size];
        for writer in 0..writers {
            let file = File::open(dir.join(format!("full-{writer}"))).expect("there");
            let len = file.metadata().expect("there").len();
            for at in (0..len).step_by(size) {
                let part = size.min((len - at) as usize);
                file.read_exact_at(&mut found[..part], at).expect("read");
                assert!(found[..part] == bytes[..part], "at {at} of writer {writer}");
            }
        }
        if round == 1 {
            remount(&cluster);
        }
        for writer in 0..writers {
            fs::remove_file(dir.join(format!("full-{writer}"))).expect("removed");
        }
        // What is just being taken apart counts when that is done.
        let after = bytes_free(&dir);
        assert!(after >= free / 2, "{after} instead of {free}, at once");
        support::wait_until("all of it is free", || bytes_free(&dir) >= free - free / 100);
        assert!(fs::read(dir.join("kept")).expect("read") == vec![7; 3_000_000]);
    }
    cluster.ok(&["down"]);
    cluster.ok(&["fsck"]);
}
