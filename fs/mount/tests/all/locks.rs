//! Locks through the kernel, by processes on two mounts of one file system. Needs root and `/dev/fuse`.

use crate::program::{Program, errno, fcntl_lock, flock};
use crate::world::{World, there_is_fuse, with_world};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const AGAIN: &str = "EAGAIN";
/// What is said at once is said within this.
const SOON: Duration = Duration::from_secs(5);
/// What waits is still waiting after this.
const A_WHILE: Duration = Duration::from_millis(300);

/// The file of every test, on both mounts.
fn both(world: &World) -> [PathBuf; 2] {
    let paths = [0, 1].map(|n| world.dirs[n].join("file"));
    fs::write(&paths[0], b"0").unwrap();
    paths
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// Not a test: the program that tests run in processes of their own.
#[test]
fn program() {
    crate::program::run();
}

#[test]
fn flock_meets_on_two_mounts() {
    if !there_is_fuse() {
        return;
    }
    with_world(2, |world| {
        let [here, there] = both(world);
        let (mine, theirs) = (open(&here), open(&there));
        assert_eq!(flock(&mine, libc::LOCK_SH), Ok(()));
        assert_eq!(flock(&theirs, libc::LOCK_SH | libc::LOCK_NB), Ok(()));
        assert_eq!(flock(&mine, libc::LOCK_EX | libc::LOCK_NB), Err(libc::EWOULDBLOCK));
        // As in Linux, whoever fails to convert has lost it.
        assert_eq!(flock(&theirs, libc::LOCK_EX | libc::LOCK_NB), Ok(()));
        assert_eq!(flock(&mine, libc::LOCK_SH | libc::LOCK_NB), Err(libc::EWOULDBLOCK));
        let waiting = thread::spawn(move || {
            assert_eq!(flock(&mine, libc::LOCK_EX), Ok(()));
            mine
        });
        thread::sleep(A_WHILE);
        assert!(!waiting.is_finished());
        // A descriptor of the same open file keeps it; the last one releases it.
        let again = theirs.try_clone().unwrap();
        drop(theirs);
        thread::sleep(A_WHILE);
        assert!(!waiting.is_finished());
        drop(again);
        let mine = waiting.join().unwrap();
        let other = open(&here);
        assert_eq!(flock(&other, libc::LOCK_SH | libc::LOCK_NB), Err(libc::EWOULDBLOCK));
        assert_eq!(flock(&mine, libc::LOCK_UN), Ok(()));
        assert_eq!(flock(&other, libc::LOCK_EX | libc::LOCK_NB), Ok(()));
    });
}

#[test]
fn what_others_wrote_under_the_lock_is_read_under_it() {
    if !there_is_fuse() {
        return;
    }
    with_world(2, |world| {
        let [here, there] = both(world);
        let turns = 40;
        let counting = [here.clone(), there, here.clone()].map(|path| {
            thread::spawn(move || {
                let file = open(&path);
                for _ in 0..turns {
                    assert_eq!(flock(&file, libc::LOCK_EX), Ok(()));
                    // Through the page cache, which may be old.
                    let mut text = [0; 20];
                    let bytes = file.read_at(&mut text, 0).unwrap();
                    let count: u64 = std::str::from_utf8(&text[..bytes]).unwrap().parse().unwrap();
                    file.write_at((count + 1).to_string().as_bytes(), 0).unwrap();
                    assert_eq!(flock(&file, libc::LOCK_UN), Ok(()));
                }
            })
        });
        counting.into_iter().for_each(|thread| thread.join().unwrap());
        let file = open(&here);
        assert_eq!(flock(&file, libc::LOCK_SH), Ok(()));
        assert_eq!(fs::read(&here).unwrap(), (3 * turns).to_string().as_bytes());
    });
}

/// All of them have it open, cached, from before the first write. What is read without the lock is dropped again soon
/// after, and the kernel forgets meanwhile what it was told of the size.
#[test]
fn who_reads_without_the_lock_disturbs_nobody_who_has_it() {
    if !there_is_fuse() {
        return;
    }
    with_world(2, |world| {
        let [here, there] = both(world);
        File::open(&here).unwrap().sync_all().unwrap();
        // Its mount is done with writing it.
        thread::sleep(Duration::from_secs(1));
        let files = [&here, &there, &here].map(|path| open(path));
        let watched = [&here, &here, &there, &there].map(|path| File::open(path).unwrap());
        let turns = 150;
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let looking = watched.each_ref().map(|file| {
                let over = &over;
                scope.spawn(move || {
                    let mut looks = 0;
                    while !over.load(Ordering::Acquire) {
                        looks += file.read_at(&mut [0; 20], 0).unwrap().min(1);
                        thread::sleep(Duration::from_micros(300));
                    }
                    looks
                })
            });
            let growing = files.each_ref().map(|file| {
                scope.spawn(move || {
                    for _ in 0..turns {
                        assert_eq!(flock(file, libc::LOCK_EX), Ok(()));
                        let end = file.read_at(&mut [0; 1024], 0).unwrap();
                        file.write_at(b"1", end as u64).unwrap();
                        assert_eq!(flock(file, libc::LOCK_UN), Ok(()));
                    }
                })
            });
            let grown = growing.map(|thread| thread.join());
            over.store(true, Ordering::Release);
            grown.into_iter().for_each(|grown| grown.unwrap());
            assert!(looking.map(|thread| thread.join().unwrap()).iter().all(|looks| *looks > 0));
        });
        assert_eq!(flock(&files[0], libc::LOCK_SH), Ok(()));
        let content = fs::read(&here).unwrap();
        assert_eq!(content.len(), 1 + 3 * turns);
        assert!(content[1..].iter().all(|byte| *byte == b'1'));
    });
}

/// The kernel appends where it takes the end to be.
#[test]
fn appends_under_the_lock_lie_behind_each_other() {
    if !there_is_fuse() {
        return;
    }
    with_world(2, |world| {
        let [here, there] = both(world);
        fs::write(&here, b"").unwrap();
        let turns = 30;
        let appending = [(b'a', here.clone()), (b'b', there)].map(|(byte, path)| {
            thread::spawn(move || {
                let mut file = OpenOptions::new().append(true).open(&path).unwrap();
                for _ in 0..turns {
                    assert_eq!(flock(&file, libc::LOCK_EX), Ok(()));
                    file.write_all(&[byte; 700]).unwrap();
                    assert_eq!(flock(&file, libc::LOCK_UN), Ok(()));
                }
            })
        });
        appending.into_iter().for_each(|thread| thread.join().unwrap());
        let file = open(&here);
        assert_eq!(flock(&file, libc::LOCK_SH), Ok(()));
        let content = fs::read(&here).unwrap();
        assert_eq!(content.len(), 2 * turns * 700);
        for byte in *b"ab" {
            assert_eq!(content.iter().filter(|found| **found == byte).count(), turns * 700);
        }
    });
}

#[test]
fn the_locks_of_a_killed_process_are_free() {
    if !there_is_fuse() {
        return;
    }
    with_world(2, |world| {
        let [here, there] = both(world);
        for kind in ["flock", "posix", "ofd"] {
            let (mut holder, mut waiter) = (Program::start(&here), Program::start(&there));
            let mut last = Program::start(&there);
            assert_eq!(holder.ask(&format!("{kind} w")), "ok");
            assert_eq!(last.ask(&format!("{kind} w")), AGAIN);
            waiter.tell(&format!("{kind} w wait"));
            last.tell(&format!("{kind} w wait"));
            assert_eq!(waiter.answer_within(A_WHILE), None);
            waiter.kill();
            assert_eq!(last.answer_within(A_WHILE), None);
            holder.kill();
            assert_eq!(last.answer_within(SOON).as_deref(), Some("ok"), "{kind}");
        }
    });
}

#[test]
fn a_signal_ends_a_wait_or_begins_it_anew() {
    if !there_is_fuse() {
        return;
    }
    with_world(2, |world| {
        let [here, there] = both(world);
        for kind in ["flock", "posix"] {
            let (mut holder, mut waiter) = (Program::start(&here), Program::start(&there));
            assert_eq!(holder.ask(&format!("{kind} w")), "ok");
            assert_eq!(waiter.ask("alarm once"), "ok");
            assert_eq!(waiter.ask(&format!("{kind} w wait")), "EINTR");
            assert_eq!(waiter.ask("alarm restart"), "ok");
            waiter.tell(&format!("{kind} w wait"));
            assert_eq!(waiter.answer_within(Duration::from_millis(1500)), None);
            assert_eq!(holder.ask(&format!("{kind} u")), "ok");
            assert_eq!(waiter.answer_within(SOON).as_deref(), Some("ok"));
            assert_eq!(holder.ask(&format!("{kind} w")), AGAIN);
            // Who gave up holds nothing.
            assert_eq!(waiter.ask(&format!("{kind} u")), "ok");
            assert_eq!(holder.ask(&format!("{kind} w")), "ok");
        }
    });
}

#[test]
fn locks_outlive_a_restart_of_the_node() {
    if !there_is_fuse() {
        return;
    }
    with_world(2, |world| {
        let [here, there] = both(world);
        for kind in ["flock", "posix", "ofd"] {
            let (mut holder, mut waiter) = (Program::start(&here), Program::start(&there));
            assert_eq!(holder.ask(&format!("{kind} w")), "ok");
            waiter.tell(&format!("{kind} w wait"));
            assert_eq!(waiter.answer_within(A_WHILE), None);
            let mut killed = Program::start(&there);
            world.node_down();
            killed.tell(&format!("{kind} w wait"));
            assert_eq!(killed.answer_within(A_WHILE), None);
            // Who dies while the node is away need not wait for it.
            let since = Instant::now();
            killed.kill();
            assert!(since.elapsed() < SOON);
            world.node_up();
            assert_eq!(waiter.answer_within(Duration::from_secs(1)), None);
            let mut other = Program::start(&there);
            assert_eq!(other.ask(&format!("{kind} w")), AGAIN);
            assert_eq!(holder.ask(&format!("{kind} u")), "ok");
            assert_eq!(waiter.answer_within(SOON).as_deref(), Some("ok"), "{kind}");
        }
    });
}

#[test]
fn fcntl_ranges_meet_on_two_mounts() {
    if !there_is_fuse() {
        return;
    }
    with_world(2, |world| {
        let [here, there] = both(world);
        let (mut a, mut b) = (Program::start(&here), Program::start(&there));
        assert_eq!(a.ask("posix w 0 10"), "ok");
        assert_eq!(b.ask("posix w 10 5"), "ok");
        assert_eq!(b.ask("posix r 9 1"), AGAIN);
        assert_eq!(a.ask("posix u 3 2"), "ok");
        assert_eq!(b.ask("posix r 3 2"), "ok");
        assert_eq!(a.ask("posix r 3 1"), "ok");
        assert_eq!(a.ask("posix w 3 1"), AGAIN);
        // To the end of the file, wherever that is.
        assert_eq!(a.ask("posix w 20 0"), "ok");
        assert_eq!(b.ask("posix w 1000000 1"), AGAIN);
        // Of the other mount's process no number is known, of this one's it is.
        assert_eq!(b.ask("test w 0 1"), "w 0 3 0");
        let mut c = Program::start(&here);
        assert_eq!(c.ask("test w 5 1"), format!("w 5 5 {}", a.id()));
        assert_eq!(c.ask("test r 100 1"), format!("w 20 0 {}", a.id()));
        assert_eq!(c.ask("test r 4 1"), "u");
        // Sorts do not meet.
        assert_eq!(b.ask("flock w"), "ok");
        assert_eq!(a.ask("posix u"), "ok");
        // Any close of the file by the process releases all that it has locked there.
        assert_eq!(b.ask("reopen"), "ok");
        assert_eq!(a.ask("posix w"), "ok");
        assert_eq!(b.ask("posix w 10 1"), AGAIN);
    });
}

#[test]
fn locks_of_open_files_end_with_them() {
    if !there_is_fuse() {
        return;
    }
    with_world(2, |world| {
        let [here, there] = both(world);
        let (mut a, mut b) = (Program::start(&here), Program::start(&there));
        assert_eq!(a.ask("ofd w 0 10"), "ok");
        assert_eq!(b.ask("ofd w 5 1"), AGAIN);
        assert_eq!(b.ask("posix w 5 1"), AGAIN);
        // Another close by the same process takes nothing from it.
        assert_eq!(a.ask("reopen"), "ok");
        assert_eq!(b.ask("ofd w 5 1"), AGAIN);
        assert_eq!(a.ask("close"), "ok");
        b.tell("ofd w 5 1 wait");
        assert_eq!(b.answer_within(SOON).as_deref(), Some("ok"));
    });
}

#[test]
fn a_child_has_its_fathers_flock_and_not_its_fcntl_locks() {
    if !there_is_fuse() {
        return;
    }
    with_world(2, |world| {
        let [here, there] = both(world);
        let (mut a, mut b) = (Program::start(&here), Program::start(&there));
        assert_eq!(a.ask("flock w"), "ok");
        assert_eq!(a.ask("posix w"), "ok");
        // It goes at once, and closes.
        assert_eq!(a.ask("fork"), "ok");
        assert_eq!(b.ask("flock w"), AGAIN);
        assert_eq!(b.ask("posix w"), AGAIN);
        assert_eq!(a.ask("fork wants posix"), AGAIN);
    });
}

#[test]
fn a_deadlock_over_two_files_and_two_mounts_is_refused() {
    if !there_is_fuse() {
        return;
    }
    with_world(2, |world| {
        let [here, there] = both(world);
        fs::write(world.dirs[0].join("second"), b"").unwrap();
        let (mut a, mut b) = (Program::start(&here), Program::start(&there));
        assert_eq!(a.ask("posix w"), "ok");
        assert_eq!(b.ask("second"), "ok");
        assert_eq!(b.ask("posix2 w"), "ok");
        assert_eq!(a.ask("second"), "ok");
        a.tell("posix2 w wait");
        assert_eq!(a.answer_within(A_WHILE), None);
        assert_eq!(b.ask("posix w wait"), "EDEADLK");
        assert_eq!(b.ask("posix2 u"), "ok");
        assert_eq!(a.answer_within(SOON).as_deref(), Some("ok"));
    });
}

/// Many threads of one process, as their open files, and the other mount beside them.
#[test]
fn a_counter_under_fcntl_locks_counts_every_turn() {
    if !there_is_fuse() {
        return;
    }
    with_world(2, |world| {
        let [here, there] = both(world);
        let turns = 25;
        let counting: Vec<_> = (0..6)
            .map(|n| {
                let path = if n % 2 == 0 { here.clone() } else { there.clone() };
                thread::spawn(move || {
                    let file = open(&path);
                    for _ in 0..turns {
                        let (start, len) = if n % 3 == 0 { (0, 0) } else { (0, 30) };
                        let locked =
                            fcntl_lock(&file, libc::F_OFD_SETLKW, libc::F_WRLCK, start, len);
                        assert_eq!(locked, Ok(()));
                        let mut text = [0; 20];
                        let bytes = file.read_at(&mut text, 0).unwrap();
                        let count = std::str::from_utf8(&text[..bytes]).unwrap();
                        let count: u64 = count.parse().unwrap();
                        file.write_at((count + 1).to_string().as_bytes(), 0).unwrap();
                        let unlocked = fcntl_lock(&file, libc::F_OFD_SETLK, libc::F_UNLCK, 0, 0);
                        assert_eq!(unlocked, Ok(()));
                    }
                })
            })
            .collect();
        counting.into_iter().for_each(|thread| thread.join().unwrap());
        let file = open(&there);
        assert_eq!(errno(flock(&file, libc::LOCK_SH)), None);
        let mut text = [0; 20];
        let bytes = file.read_at(&mut text, 0).unwrap();
        assert_eq!(&text[..bytes], (6 * turns).to_string().as_bytes());
    });
}
