//! Two mounts that write one file under the real kernel: nothing that is appended is lost, nothing that is read is old.

use crate::world::with_world;
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const EACH: u64 = 2500;

fn line(writer: usize, number: u64) -> String {
    let filling = "x".repeat((number % 300) as usize);
    format!("{writer} {number} {filling} {writer} {number}\n")
}

/// Four programs on two mounts, and two of them with a file that they open anew each time.
#[test]
fn appends_of_two_mounts_lie_behind_each_other() {
    with_world(2, |world| {
        fs::write(world.dirs[0].join("log"), b"").unwrap();
        let begun = std::time::Instant::now();
        let appending: Vec<_> = (0..4)
            .map(|writer| {
                let path = world.dirs[writer % 2].join("log");
                thread::spawn(move || {
                    let open = || OpenOptions::new().append(true).open(&path).unwrap();
                    let mut file = open();
                    for number in 0..EACH {
                        if writer >= 2 && number % 50 == 0 {
                            file = open();
                        }
                        let line = line(writer, number);
                        assert_eq!(file.write(line.as_bytes()).unwrap(), line.len());
                    }
                })
            })
            .collect();
        appending.into_iter().for_each(|thread| thread.join().unwrap());
        println!("{} appends took {:?}", 4 * EACH, begun.elapsed());
        for dir in &world.dirs {
            let text = fs::read_to_string(dir.join("log")).unwrap();
            let mut next: BTreeMap<usize, u64> = BTreeMap::new();
            for found in text.lines() {
                let writer: usize = found.split(' ').next().unwrap().parse().unwrap();
                let number = next.entry(writer).or_default();
                assert_eq!(format!("{found}\n"), line(writer, *number), "lost, or torn");
                *number += 1;
            }
            assert!((0..4).all(|writer| next[&writer] == EACH), "{next:?}");
        }
    });
}

fn number_in(file: &File, page: u64) -> u64 {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, page * 4096).unwrap();
    u64::from_le_bytes(bytes)
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// What was read a moment ago may be old; this is longer than that takes on any machine.
const SOON: Duration = Duration::from_secs(2);

/// Until it is so, within the time that is promised.
fn soon(is_so: impl Fn() -> bool) -> bool {
    let begun = Instant::now();
    while !is_so() {
        if begun.elapsed() > SOON {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Makes it durable, and waits until its mount is done with writing it.
fn settled(path: &Path) {
    File::open(path).unwrap().sync_all().unwrap();
    thread::sleep(Duration::from_secs(1));
}

/// Both have it open from before the first write, with everything cached.
#[test]
fn a_reader_that_stays_open_sees_every_write() {
    with_world(2, |world| {
        let paths = [0, 1].map(|n| world.dirs[n].join("file"));
        fs::write(&paths[0], vec![0; 8 * 4096]).unwrap();
        settled(&paths[0]);
        let files = [0, 1].map(|n| open(&paths[n]));
        for file in &files {
            assert!((0..8).all(|page| number_in(file, page) == 0));
        }
        // The first write of all: nothing from before it shows.
        files[0].write_all_at(&7_u64.to_le_bytes(), 0).unwrap();
        assert_eq!(number_in(&files[1], 0), 7);
        files[1].write_all_at(&7_u64.to_le_bytes(), 0).unwrap();
        assert_eq!(number_in(&files[0], 0), 7);
        let opened = [0, 1].map(|n| open(&paths[n]));
        for count in 8..400_u64 {
            let writes = count as usize / 3 % 2;
            let (writer, page) = (&files[writes], count % 8);
            writer.write_all_at(&count.to_le_bytes(), page * 4096).unwrap();
            // What was opened when the other wrote already sees it at once, also what was opened before, but for
            // what it has just looked at.
            assert_eq!(number_in(&opened[1 - writes], page), count);
            assert!(soon(|| number_in(&files[1 - writes], page) == count), "{count}");
            assert_eq!(number_in(writer, page), count);
        }
        // Sizes, too, both ways.
        files[0].set_len(5000).unwrap();
        assert_eq!(files[1].metadata().unwrap().len(), 5000);
        assert_eq!(files[1].read_at(&mut [0; 100], 6000).unwrap(), 0);
        files[0].write_all_at(b"end", 20_000).unwrap();
        let mut bytes = [1; 100];
        assert_eq!(opened[1].read_at(&mut bytes, 19_990).unwrap(), 13);
        assert_eq!(&bytes[..13], b"\0\0\0\0\0\0\0\0\0\0end");
        assert_eq!(fs::metadata(&paths[1]).unwrap().size(), 20_003);
    });
}

/// Readers that look all the time, so that the page is there whenever it is written: those that opened it before the
/// first write, and those that did after it.
#[test]
fn readers_in_a_loop_see_what_is_written() {
    with_world(2, |world| {
        let paths = [0, 1].map(|n| world.dirs[n].join("file"));
        fs::write(&paths[0], vec![0; 4096]).unwrap();
        settled(&paths[0]);
        let before = File::open(&paths[1]).unwrap();
        assert_eq!(number_in(&before, 0), 0);
        let file = open(&paths[0]);
        file.write_all_at(&[0; 8], 0).unwrap();
        let after = File::open(&paths[1]).unwrap();
        let (written, over) = (AtomicU64::new(0), AtomicBool::new(false));
        thread::scope(|scope| {
            let readers = [(&before, SOON), (&after, Duration::ZERO)].map(|(file, late)| {
                let (written, over) = (&written, &over);
                scope.spawn(move || {
                    let (mut looks, mut old) = (0_u64, None);
                    while !over.load(Ordering::Acquire) {
                        let least = written.load(Ordering::Acquire);
                        let found = number_in(file, 0);
                        looks += 1;
                        if found >= least {
                            old = None;
                            continue;
                        }
                        let since = *old.get_or_insert_with(Instant::now);
                        assert!(since.elapsed() < late, "{found} instead of {least}, look {looks}");
                    }
                    looks
                })
            });
            for count in 1..=2000 {
                file.write_all_at(&u64::to_le_bytes(count), 0).unwrap();
                written.store(count, Ordering::Release);
            }
            // The last one shows to all.
            assert!(soon(|| number_in(&before, 0) == 2000));
            over.store(true, Ordering::Release);
            let looks = readers.map(|reader| reader.join().unwrap());
            println!("looks through what was opened before and after the first write: {looks:?}");
            assert!(looks.iter().all(|looks| *looks > 0));
        });
    });
}

/// What is mapped is dropped like what is read.
#[test]
fn a_mapping_shows_what_another_mount_writes() {
    with_world(2, |world| {
        let paths = [0, 1].map(|n| world.dirs[n].join("file"));
        fs::write(&paths[0], vec![0; 4096]).unwrap();
        settled(&paths[0]);
        let reader = File::open(&paths[1]).unwrap();
        // SAFETY: a new mapping of a page.
        let mapped = unsafe {
            use std::os::fd::AsRawFd;
            let (prot, flags) = (libc::PROT_READ, libc::MAP_SHARED);
            libc::mmap(std::ptr::null_mut(), 4096, prot, flags, reader.as_raw_fd(), 0)
        };
        assert_ne!(mapped, libc::MAP_FAILED);
        let number = mapped.cast::<u64>();
        // SAFETY: mapped until the end, and aligned.
        let look = || unsafe { number.read_volatile() };
        assert_eq!(look(), 0);
        let writer = open(&paths[0]);
        writer.write_all_at(&1_u64.to_le_bytes(), 0).unwrap();
        assert_eq!(look(), 1);
        for count in 2..200_u64 {
            writer.write_all_at(&count.to_le_bytes(), 0).unwrap();
            assert!(soon(|| look() == count), "{count}");
        }
        // SAFETY: the mapping from above.
        unsafe { libc::munmap(mapped, 4096) };
    });
}

/// As make(1) does with its output: the kernel holds the page of each such write until it is answered.
#[test]
fn appends_through_a_file_that_was_opened_without_end() {
    with_world(2, |world| {
        let begun = Instant::now();
        let open = |dir: &Path| {
            let file = open(&dir.join("log"));
            // SAFETY: a flag of a file that is open.
            assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, libc::O_APPEND) }, 0);
            file
        };
        fs::write(world.dirs[0].join("log"), b"first\n").unwrap();
        let mut expected = "first\n".to_owned();
        let mut files = vec![open(&world.dirs[0])];
        for number in 0..200 {
            if number == 100 {
                files.push(open(&world.dirs[1]));
            }
            let writer = number % files.len();
            let line = line(writer, number as u64);
            files[writer].write_all(line.as_bytes()).unwrap();
            expected += &line;
        }
        for dir in &world.dirs {
            assert_eq!(fs::read_to_string(dir.join("log")).unwrap(), expected);
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    });
}

/// Each holds a page that the other's first write wants dropped.
#[test]
fn two_that_begin_to_write_at_once_do_not_wait_for_each_other() {
    with_world(2, |world| {
        for round in 0..20 {
            let name = format!("file{round}");
            fs::write(world.dirs[0].join(&name), vec![b'.'; 10_000]).unwrap();
            let files: Vec<_> = world.dirs.iter().map(|dir| open(&dir.join(&name))).collect();
            let begun = Instant::now();
            thread::scope(|scope| {
                for (writer, file) in files.iter().enumerate() {
                    // In different blocks, each not whole.
                    let at = 100 + 4096 * writer as u64;
                    scope.spawn(move || file.write_all_at(b"here", at).unwrap());
                }
            });
            assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
            drop(files);
            let mut expected = vec![b'.'; 10_000];
            expected[100..104].copy_from_slice(b"here");
            expected[4196..4200].copy_from_slice(b"here");
            for dir in &world.dirs {
                assert!(fs::read(dir.join(&name)).unwrap() == expected);
            }
        }
    });
}
