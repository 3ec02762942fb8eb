//! What a program sees of a mount: the whole stack over services in memory, through the kernel.
//! `docs/SEMANTICS.md` names the test of each promise. Needs root and `/dev/fuse`.

use crate::ranges::{copy_range, fallocate, seek};
use crate::syscalls::{c_path, handle_of, open_handle, write_by_mapping};
use crate::world::with_world;
use levada_base::BufMut;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{
    DirEntryExt, FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown, symlink,
};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Bytes that differ from block to block and inside each.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695);
        (state >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}

fn errno<T>(result: io::Result<T>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

/// Every path below `root`, with what is there.
fn tree(root: &Path) -> BTreeMap<PathBuf, (u32, Vec<u8>)> {
    let mut found = BTreeMap::new();
    let mut to_list = vec![root.to_owned()];
    while let Some(dir) = to_list.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let entry = entry.unwrap();
            let (path, kind) = (entry.path(), entry.file_type().unwrap());
            let meta = fs::symlink_metadata(&path).unwrap();
            let content = if kind.is_dir() {
                to_list.push(path.clone());
                Vec::new()
            } else if kind.is_symlink() {
                fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes()
            } else {
                fs::read(&path).unwrap()
            };
            found.insert(path.strip_prefix(root).unwrap().to_owned(), (meta.mode(), content));
        }
    }
    found
}

fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            copy_tree(&path, &target);
        } else if kind.is_symlink() {
            symlink(fs::read_link(&path).unwrap(), &target).unwrap();
        } else {
            fs::copy(&path, &target).unwrap();
        }
    }
}

/// A small source tree: 12 directories of 25 files of all sizes around the stripe unit, links.
fn make_tree(root: &Path) {
    fs::create_dir(root).unwrap();
    for d in 0..12u64 {
        let dir = root.join(format!("dir-{d}"));
        fs::create_dir(&dir).unwrap();
        for f in 0..25u64 {
            let bytes = match f {
                0 => 0,
                1 => 1,
                2 => 256 << 10,
                3 => (256 << 10) + 1,
                4 => 3_000_000,
                f => f * 997,
            };
            let path = dir.join(format!("file-{f}"));
            fs::write(&path, pattern(d * 100 + f, bytes as usize)).unwrap();
            let mode = if f % 2 == 0 { 0o644 } else { 0o755 };
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        }
        symlink("file-5", dir.join("link")).unwrap();
        symlink(format!("../dir-{}/file-6", (d + 1) % 12), dir.join("far link")).unwrap();
    }
}

#[test]
fn a_tree_is_copied_and_survives_a_remount() {
    let source = tempfile::tempdir().unwrap();
    let source = source.keep().join("tree");
    make_tree(&source);
    with_world(1, move |world| {
        copy_tree(&source, &world.dir().join("copy"));
        let expected = tree(&source);
        assert!(tree(&world.dir().join("copy")) == expected, "as it was written");
        world.remount();
        assert!(tree(&world.dir().join("copy")) == expected, "as it was found");
        fs::remove_dir_all(world.dir().join("copy")).unwrap();
        assert_eq!(fs::read_dir(world.dir()).unwrap().count(), 0);
        fs::remove_dir_all(source.parent().unwrap()).unwrap();
    });
}

#[test]
fn names_behave() {
    with_world(1, |world| {
        let dir = world.dir();
        let (a, b, sub) = (dir.join("a"), dir.join("b"), dir.join("sub"));
        fs::write(&a, b"A").unwrap();
        fs::write(&b, b"B").unwrap();
        fs::create_dir(&sub).unwrap();
        assert_eq!(
            (fs::metadata(&sub).unwrap().nlink(), fs::metadata(dir).unwrap().nlink()),
            (2, 3)
        );

        // A name that is replaced is never missing, and keeps its inode's data for those who
        // have it open.
        let opened = File::open(&b).unwrap();
        fs::rename(&a, &b).unwrap();
        assert_eq!(fs::read(&b).unwrap(), b"A");
        let mut text = String::new();
        (&opened).read_to_string(&mut text).unwrap();
        assert_eq!((text.as_str(), opened.metadata().unwrap().nlink()), ("B", 0));
        drop(opened);

        fs::rename(&b, sub.join("moved")).unwrap();
        assert_eq!(errno(fs::remove_dir(&sub)), Some(libc::ENOTEMPTY));
        assert_eq!(errno(fs::rename(&sub, sub.join("inside"))), Some(libc::EINVAL));
        fs::create_dir(dir.join("empty")).unwrap();
        fs::rename(&sub, dir.join("empty")).unwrap();
        assert_eq!(fs::read(dir.join("empty/moved")).unwrap(), b"A");
        assert_eq!(fs::canonicalize(dir.join("empty/..")).unwrap(), dir.canonicalize().unwrap());

        // RENAME_NOREPLACE and RENAME_EXCHANGE.
        fs::write(&a, b"a").unwrap();
        fs::write(&b, b"b").unwrap();
        let rename2 = |flags: u32| {
            let (a, b) = (c_path(&a), c_path(&b));
            let (here, flags) = (libc::AT_FDCWD, flags);
            // SAFETY: two NUL-terminated paths.
            let status = unsafe { libc::renameat2(here, a.as_ptr(), here, b.as_ptr(), flags) };
            if status < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
        };
        assert_eq!(errno(rename2(libc::RENAME_NOREPLACE)), Some(libc::EEXIST));
        assert_eq!(errno(rename2(libc::RENAME_WHITEOUT)), Some(libc::EINVAL));
        rename2(libc::RENAME_EXCHANGE).unwrap();
        assert_eq!((fs::read(&a).unwrap(), fs::read(&b).unwrap()), (b"b".to_vec(), b"a".to_vec()));

        fs::hard_link(&a, dir.join("second")).unwrap();
        let (first, second) =
            (fs::metadata(&a).unwrap(), fs::metadata(dir.join("second")).unwrap());
        assert_eq!((first.nlink(), first.ino()), (2, second.ino()));
        OpenOptions::new().append(true).open(dir.join("second")).unwrap().write_all(b"+").unwrap();
        assert_eq!(fs::read(&a).unwrap(), b"b+");
        fs::remove_file(&a).unwrap();
        assert_eq!(fs::metadata(dir.join("second")).unwrap().nlink(), 1);

        let long = "t".repeat(4000);
        symlink(&long, dir.join("link")).unwrap();
        assert_eq!(fs::read_link(dir.join("link")).unwrap(), Path::new(&long));
        assert_eq!(fs::symlink_metadata(dir.join("link")).unwrap().len(), 4000);

        fs::write(dir.join("n".repeat(255)), b"").unwrap();
        assert_eq!(errno(fs::write(dir.join("n".repeat(256)), b"")), Some(libc::ENAMETOOLONG));
        assert_eq!(errno(fs::create_dir(&b)), Some(libc::EEXIST));
        assert_eq!(errno(fs::remove_file(dir.join("empty"))), Some(libc::EISDIR));
        assert_eq!(errno(File::create_new(&b)), Some(libc::EEXIST));

        let (fifo, device) = (c_path(&dir.join("fifo")), c_path(&dir.join("null")));
        // SAFETY: NUL-terminated paths.
        unsafe {
            assert_eq!(libc::mkfifo(fifo.as_ptr(), 0o600), 0);
            let null = libc::makedev(1, 3);
            assert_eq!(libc::mknod(device.as_ptr(), libc::S_IFCHR | 0o666, null), 0);
        }
        assert!(fs::metadata(dir.join("fifo")).unwrap().file_type().is_fifo());
        assert_eq!(fs::metadata(dir.join("null")).unwrap().rdev(), libc::makedev(1, 3));
        fs::write(dir.join("null"), b"goes nowhere").unwrap();
    });
}

#[test]
fn a_file_unlinked_while_open_lives_until_it_is_closed() {
    with_world(1, |world| {
        let path = world.dir().join("file");
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
        file.write_all_at(b"before", 0).unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(fs::read_dir(world.dir()).unwrap().count(), 0);
        file.write_all_at(b" and after", 6).unwrap();
        file.sync_all().unwrap();
        let mut bytes = [0; 16];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"before and after");
        let meta = file.metadata().unwrap();
        assert_eq!((meta.nlink(), meta.len()), (0, 16));
    });
}

#[test]
fn a_hundred_thousand_names_are_listed_once_each() {
    const NAMES: usize = 100_000;
    with_world(1, |world| {
        let many = world.dir().join("many");
        fs::create_dir(&many).unwrap();
        thread::scope(|scope| {
            for worker in 0..8 {
                let many = &many;
                scope.spawn(move || {
                    for number in (worker..NAMES).step_by(8) {
                        File::create_new(many.join(format!("name-{number:05}"))).unwrap();
                    }
                });
            }
        });
        let list = || -> Vec<String> {
            let names = fs::read_dir(&many).unwrap().map(|entry| {
                let entry = entry.unwrap();
                assert!(entry.file_type().unwrap().is_file());
                entry.file_name().into_string().unwrap()
            });
            let mut names: Vec<_> = names.collect();
            names.sort();
            names
        };
        let expected: Vec<_> = (0..NAMES).map(|number| format!("name-{number:05}")).collect();
        assert!(list() == expected);
        for entry in fs::read_dir(&many).unwrap().take(300) {
            let entry = entry.unwrap();
            assert_eq!(entry.ino(), entry.metadata().unwrap().ino());
        }
        world.remount();
        assert!(list() == expected);

        // What is removed or added while it is listed makes no other name come twice or not at all.
        let mut seen = BTreeSet::new();
        for (at, entry) in fs::read_dir(&many).unwrap().enumerate() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            if at % 4 == 0 {
                fs::remove_file(entry.path()).unwrap();
            } else if at % 1000 == 1 {
                File::create_new(many.join(format!("added-{at}"))).unwrap();
            }
            assert!(seen.insert(name), "listed twice");
        }
        assert!(expected.iter().all(|name| seen.contains(name)));
    });
}

#[test]
fn data_is_read_as_it_was_written() {
    with_world(1, |world| {
        let path = world.dir().join("file");
        let bytes = pattern(1, (9 << 20) + 4321);
        fs::write(&path, &bytes).unwrap();
        assert!(fs::read(&path).unwrap() == bytes, "after a close");
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let mut part = vec![0; 300_000];
        file.read_exact_at(&mut part, 1_234_567).unwrap();
        assert!(part == bytes[1_234_567..1_534_567]);
        assert_eq!(file.read_at(&mut part, bytes.len() as u64).unwrap(), 0);
        assert_eq!(file.read_at(&mut part, bytes.len() as u64 - 5).unwrap(), 5);

        // Holes read as zeroes; what was cut does not come back.
        file.write_all_at(b"end", 12 << 20).unwrap();
        let mut gap = vec![1; 64 << 10];
        file.read_exact_at(&mut gap, 11 << 20).unwrap();
        assert!(gap.iter().all(|byte| *byte == 0));
        file.set_len(1000).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 1000);
        file.set_len(2000).unwrap();
        assert!(fs::read(&path).unwrap() == [&bytes[..1000], &[0; 1000]].concat());
        let meta = fs::metadata(&path).unwrap();
        assert_eq!((meta.blocks(), meta.blksize()), (4, 128 << 10));

        let mut appended = OpenOptions::new().append(true).open(&path).unwrap();
        for _ in 0..3 {
            appended.write_all(b"more").unwrap();
        }
        assert_eq!(&fs::read(&path).unwrap()[2000..], b"moremoremore");
        File::create(&path).unwrap(); // O_TRUNC
        assert_eq!(file.metadata().unwrap().len(), 0);
        assert_eq!(fs::read(&path).unwrap(), b"");

        // A program that runs stays whole, however it is opened.
        let program = world.dir().join("sleep");
        fs::copy("/bin/sleep", &program).unwrap();
        let mut running = loop {
            match Command::new(&program).arg("60").spawn() {
                // What another test starts holds the copy open until it is its own program.
                Err(error) if error.raw_os_error() == Some(libc::ETXTBSY) => {}
                started => break started.unwrap(),
            }
        };
        for (write, flags) in [(true, 0), (true, libc::O_TRUNC), (false, libc::O_TRUNC)] {
            let opened =
                OpenOptions::new().read(true).write(write).custom_flags(flags).open(&program);
            assert_eq!(errno(opened), Some(libc::ETXTBSY), "{write} {flags:o}");
        }
        running.kill().unwrap();
        running.wait().unwrap();
        assert!(fs::read(&program).unwrap() == fs::read("/bin/sleep").unwrap());

        // Writers of one process at once.
        thread::scope(|scope| {
            for worker in 0..8usize {
                let (file, bytes) = (&file, &bytes);
                scope.spawn(move || {
                    for at in (worker * 47_008..bytes.len() - 47_008).step_by(8 * 47_008) {
                        file.write_all_at(&bytes[at..at + 47_008], at as u64).unwrap();
                    }
                });
            }
        });
        let whole = bytes.len() / 47_008 * 47_008 - 47_008;
        drop((file, appended));
        world.remount();
        assert!(fs::read(&path).unwrap()[..whole] == bytes[..whole]);
    });
}

#[test]
fn direct_io_and_cached_io_see_the_same() {
    with_world(1, |world| {
        let path = world.dir().join("file");
        let direct = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .custom_flags(libc::O_DIRECT)
            .open(&path)
            .unwrap();
        let cached = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let bytes = pattern(2, 3 << 20);
        let mut buffer = BufMut::copy_of(&bytes);
        direct.write_all_at(&buffer, 4096).unwrap();
        assert_eq!(direct.metadata().unwrap().len(), (3 << 20) + 4096);
        let mut read = vec![0; 3 << 20];
        cached.read_exact_at(&mut read, 4096).unwrap();
        assert!(read == bytes, "cached after direct");
        let other = pattern(3, 64 << 10);
        cached.write_all_at(&other, 1 << 20).unwrap();
        direct.read_exact_at(&mut buffer, 4096).unwrap();
        assert!(buffer[(1 << 20) - 4096..][..64 << 10] == other, "direct after cached");
        let mut block = buffer.split_to(4096);
        block.fill(9);
        direct.write_all_at(&block, 1 << 20).unwrap();
        cached.read_exact_at(&mut read[..4096], 1 << 20).unwrap();
        assert!(read[..4096] == *block, "cached after direct again");
        // Behind the end there is nothing.
        assert_eq!(direct.read_at(&mut block, 4 << 20).unwrap(), 0);
    });
}

#[test]
fn direct_writes_of_one_file_may_overlap_in_time() {
    with_world(1, |world| {
        let path = world.dir().join("file");
        let direct = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .custom_flags(libc::O_DIRECT)
            .open(&path)
            .unwrap();
        direct.set_len(16 << 20).unwrap();
        let bytes = pattern(5, 1 << 20);
        thread::scope(|scope| {
            for worker in 0..16u64 {
                let (direct, bytes) = (&direct, &bytes);
                scope.spawn(move || {
                    let buffer = BufMut::copy_of(bytes);
                    direct.write_all_at(&buffer, worker << 20).unwrap();
                });
            }
        });
        let read = fs::read(&path).unwrap();
        assert_eq!(read.len(), 16 << 20);
        assert!(read.chunks(1 << 20).all(|part| part == bytes));
    });
}

#[test]
fn shared_mappings_reach_the_file() {
    with_world(1, |world| {
        let path = world.dir().join("mapped");
        fs::write(&path, vec![1; 64 << 10]).unwrap();
        write_by_mapping(&path);
        let bytes = fs::read(&path).unwrap();
        assert_eq!((bytes[4095], bytes[5000], bytes[6000], bytes.len()), (1, 42, 1, 64 << 10));
        world.remount();
        assert_eq!(fs::read(&path).unwrap()[5000], 42);
    });
}

const KEEP_SIZE: i32 = libc::FALLOC_FL_KEEP_SIZE;
const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE;
const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | KEEP_SIZE;

#[test]
fn allocated_space_is_zeroes_and_must_be_there() {
    with_world(1, |world| {
        let path = world.dir().join("file");
        let file = File::create_new(&path).unwrap();
        file.write_all_at(b"some bytes", 0).unwrap();
        let len = || file.metadata().unwrap().len();
        fallocate(&file, KEEP_SIZE, 0, 1 << 20).unwrap();
        assert_eq!(len(), 10);
        // The targets have 16 GiB.
        for mode in [0, KEEP_SIZE] {
            assert_eq!(errno(fallocate(&file, mode, 0, 17 << 30)), Some(libc::ENOSPC));
        }
        assert_eq!(len(), 10);
        fallocate(&file, 0, 5, 1_000_000).unwrap();
        fallocate(&file, 0, 0, 1000).unwrap();
        assert_eq!(len(), 1_000_005);
        // SAFETY: an open descriptor.
        assert_eq!(unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, 2_000_000) }, 0);
        // What is there already needs no room, and none is reserved.
        file.set_len(17 << 30).unwrap();
        fallocate(&file, 0, 0, 17 << 30).unwrap();
        file.set_len(2_000_000).unwrap();
        let expected = [b"some bytes".to_vec(), vec![0; 1_999_990]].concat();
        assert!(fs::read(&path).unwrap() == expected);
        drop(file);
        world.remount();
        assert!(fs::read(&path).unwrap() == expected);
    });
}

#[test]
fn holes_are_zeroes_and_are_found() {
    with_world(1, |world| {
        let path = world.dir().join("file");
        let mut bytes = pattern(4, 3 << 20);
        fs::write(&path, &bytes).unwrap();
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let mut read = vec![0; 3 << 20];
        file.read_exact_at(&mut read, 0).unwrap(); // now it is cached
        let before = file.metadata().unwrap().modified().unwrap();
        thread::sleep(Duration::from_millis(5));
        fallocate(&file, PUNCH, 300_000, 1_000_000).unwrap();
        fallocate(&file, ZERO, 2_000_000, 1).unwrap();
        bytes[300_000..1_300_000].fill(0);
        bytes[2_000_000] = 0;
        file.read_exact_at(&mut read, 0).unwrap();
        assert!(read == bytes, "nothing of it is left in the cache");
        assert!(file.metadata().unwrap().modified().unwrap() > before);
        // Behind the end: a hole stays nothing, zeroes make the file longer.
        fallocate(&file, PUNCH, 3 << 20, 1 << 20).unwrap();
        fallocate(&file, ZERO | KEEP_SIZE, (3 << 20) - 10, 1 << 20).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 3 << 20);
        fallocate(&file, ZERO, (3 << 20) + 100, 100).unwrap();
        bytes[(3 << 20) - 10..].fill(0);
        bytes.resize((3 << 20) + 200, 0);
        file.write_all_at(b"end", (4 << 20) - 3).unwrap();
        bytes.resize((4 << 20) - 3, 0);
        bytes.extend(b"end");
        assert!(fs::read(&path).unwrap() == bytes);

        let check = |file: &File| {
            let data = |offset| seek(file, offset, libc::SEEK_DATA);
            let hole = |offset| seek(file, offset, libc::SEEK_HOLE).unwrap();
            let last = (3 << 20) - 10;
            assert_eq!((data(0).unwrap(), hole(0)), (0, 300_000));
            assert_eq!((data(300_000).unwrap(), hole(700_000)), (1_300_000, 700_000));
            assert_eq!((data(2_000_000).unwrap(), hole(1_300_000)), (2_000_001, 2_000_000));
            assert_eq!((data(last).unwrap(), hole(2_000_001)), ((4 << 20) - 3, last));
            assert_eq!(hole((4 << 20) - 3), 4 << 20);
            for whence in [libc::SEEK_DATA, libc::SEEK_HOLE] {
                assert_eq!(errno(seek(file, 4 << 20, whence)), Some(libc::ENXIO));
            }
            assert_eq!(seek(file, 0, libc::SEEK_END).unwrap(), 4 << 20);
        };
        check(&file);
        drop(file);
        world.remount();
        check(&File::open(&path).unwrap());
        assert!(fs::read(&path).unwrap() == bytes);

        let copy = world.dir().join("copy");
        let mut cp = std::process::Command::new("cp");
        let status = cp.arg("--reflink=auto").args([&path, &copy]).status();
        assert!(status.unwrap().success());
        assert!(fs::read(&copy).unwrap() == bytes);
        check(&File::open(&copy).unwrap());
    });
}

#[test]
fn ranges_are_copied_within_the_file_system() {
    with_world(1, |world| {
        let (path, other) = (world.dir().join("from"), world.dir().join("to"));
        let bytes = pattern(5, (20 << 20) + 77);
        fs::write(&path, &bytes).unwrap();
        fs::write(&other, vec![1; 1 << 20]).unwrap();
        let open = |path, flags| {
            OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).unwrap()
        };
        let (from, to) = (open(&path, 0), open(&other, libc::O_DSYNC));
        let mut read = vec![0; 1 << 20];
        to.read_exact_at(&mut read, 0).unwrap(); // now it is cached
        let mut copied = 0;
        while copied < bytes.len() as u64 - 5 {
            let more = copy_range((&from, copied + 5), (&to, copied + 10), u64::from(u32::MAX));
            let more = more.unwrap();
            assert!(more > 0);
            copied += more;
        }
        assert_eq!(world.unstable_bytes(), 0, "synchronous");
        let expected = [&[1; 10], &bytes[5..]].concat();
        assert!(fs::read(&other).unwrap() == expected);
        assert_eq!(copy_range((&from, 30 << 20), (&to, 0), 10).unwrap(), 0, "behind the end");
        assert_eq!(copy_range((&to, 0), (&to, 21 << 20), 10).unwrap(), 10, "within one file");
        assert_eq!(to.metadata().unwrap().len(), (21 << 20) + 10);
        assert_eq!(errno(copy_range((&to, 0), (&to, 5), 10)), Some(libc::EINVAL), "overlaps");
        let appends = OpenOptions::new().append(true).open(&other).unwrap();
        assert_eq!(errno(copy_range((&from, 0), (&appends, 0), 10)), Some(libc::EBADF));
        fs::copy(&path, &other).unwrap();
        assert!(fs::read(&other).unwrap() == bytes);
    });
}

#[test]
fn attributes_are_kept() {
    with_world(1, |world| {
        let path = world.dir().join("file");
        fs::write(&path, b"x").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o6755)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode(), libc::S_IFREG | 0o6755);
        chown(&path, Some(1234), Some(5678)).unwrap();
        let meta = fs::metadata(&path).unwrap();
        assert_eq!((meta.uid(), meta.gid(), meta.mode()), (1234, 5678, libc::S_IFREG | 0o755));

        let file = OpenOptions::new().write(true).open(&path).unwrap();
        let old = UNIX_EPOCH - Duration::from_nanos(1_500_000_001);
        let times = fs::FileTimes::new().set_modified(old).set_accessed(UNIX_EPOCH);
        file.set_times(times).unwrap();
        let before = fs::metadata(&path).unwrap();
        assert_eq!(before.modified().unwrap(), old);
        assert_eq!(before.accessed().unwrap(), UNIX_EPOCH);
        let age = SystemTime::now().duration_since(before.created().unwrap()).unwrap();
        assert!(age < Duration::from_secs(60), "{age:?}");

        // A write moves mtime and ctime, a change of attributes ctime alone.
        file.write_all_at(b"y", 0).unwrap();
        drop(file);
        let after = fs::metadata(&path).unwrap();
        assert!(after.modified().unwrap() > UNIX_EPOCH + Duration::from_secs(1));
        let ctime = |meta: &fs::Metadata| (meta.ctime(), meta.ctime_nsec());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        let changed = fs::metadata(&path).unwrap();
        assert!(ctime(&changed) > ctime(&before));
        world.remount();
        let found = fs::metadata(&path).unwrap();
        assert_eq!((found.mode(), found.uid()), (libc::S_IFREG | 0o600, 1234));
        assert_eq!(found.modified().unwrap(), changed.modified().unwrap());
    });
}

#[test]
fn times_stand_still_once_a_file_is_closed() {
    with_world(1, |world| {
        let old = fs::FileTimes::new().set_modified(UNIX_EPOCH + Duration::from_secs(5));
        let restrict = |file: &File| file.set_permissions(fs::Permissions::from_mode(0o600));
        let date = |file: &File| file.set_times(old);
        // As cp, then as chmod, touch, cp -p and tar leave them.
        let changes: [&dyn Fn(&File); 4] =
            [&|_| {}, &|file| restrict(file).unwrap(), &|file| date(file).unwrap(), &|file| {
                date(file).and_then(|()| restrict(file)).unwrap()
            }];
        let paths: Vec<_> = (0..changes.len()).map(|n| world.dir().join(n.to_string())).collect();
        for (path, change) in paths.iter().zip(changes) {
            let mut file = File::create(path).unwrap();
            file.write_all(&[7; 300_000]).unwrap();
            change(&file);
        }
        let times = || -> Vec<_> {
            let meta = paths.iter().map(|path| fs::metadata(path).unwrap());
            meta.map(|meta| [(meta.ctime(), meta.ctime_nsec()), (meta.mtime(), meta.mtime_nsec())])
                .collect()
        };
        let closed = times();
        // What was written has been recorded by then, and the kernel's attributes have run out.
        std::thread::sleep(Duration::from_secs(4));
        assert_eq!(times(), closed);
        world.remount();
        assert_eq!(times(), closed);
    });
}

#[test]
fn df_counts() {
    with_world(1, |world| {
        let path = c_path(world.dir());
        let space = || {
            // SAFETY: a NUL-terminated path, and room for the answer.
            unsafe {
                let mut space: libc::statvfs = std::mem::zeroed();
                assert_eq!(libc::statvfs(path.as_ptr(), &raw mut space), 0);
                space
            }
        };
        let before = space();
        assert_eq!(before.f_files - before.f_ffree, 1, "the root is all there is");
        assert_eq!((before.f_frsize, before.f_blocks * before.f_frsize), (4096, 16 << 30));
        assert_eq!(before.f_namemax, 255);
        fs::write(world.dir().join("file"), vec![1; 8 << 20]).unwrap();
        let after = space();
        assert!(before.f_bfree - after.f_bfree >= (8 << 20) / 4096);
        assert_eq!(before.f_ffree - after.f_ffree, 1);
    });
}

/// Before anybody has deleted an object.
#[test]
fn df_rises_as_soon_as_a_file_is_deleted() {
    with_world(1, |world| {
        let path = c_path(world.dir());
        let free = || {
            // SAFETY: a NUL-terminated path, and room for the answer.
            unsafe {
                let mut space: libc::statvfs = std::mem::zeroed();
                assert_eq!(libc::statvfs(path.as_ptr(), &raw mut space), 0);
                (space.f_bavail * space.f_frsize, space.f_favail)
            }
        };
        let before = free();
        for round in 0..3 {
            let file = world.dir().join("file");
            fs::write(&file, vec![1; 8 << 20]).unwrap();
            let full = free();
            assert!(before.0 - full.0 >= 8 << 20, "round {round}: {before:?} {full:?}");
            fs::remove_file(&file).unwrap();
            let after = free();
            assert!(after.0 + (64 << 10) >= before.0, "round {round}: {before:?} {after:?}");
            assert_eq!(after.1, before.1);
        }
    });
}

#[test]
fn handles_outlive_the_node_and_the_mount() {
    with_world(1, |world| {
        let dir = world.dir();
        fs::create_dir_all(dir.join("deep/deeper")).unwrap();
        fs::write(dir.join("deep/deeper/file"), b"found again").unwrap();
        fs::write(dir.join("gone"), b"").unwrap();
        let mut file = handle_of(&dir.join("deep/deeper/file"));
        let mut deeper = handle_of(&dir.join("deep/deeper"));
        let mut gone = handle_of(&dir.join("gone"));
        fs::remove_file(dir.join("gone")).unwrap();
        // The kernel releases a closed file some time after close(2) has returned. Until then the inode is
        // held, and a node that restarts keeps it until it has heard from all its clients.
        let deadline = Instant::now() + Duration::from_secs(10);
        while errno(open_handle(dir, &mut gone)) != Some(libc::ESTALE) {
            assert!(Instant::now() < deadline, "a file that nobody holds stays");
            thread::sleep(Duration::from_millis(5));
        }
        let read_by_handle = |handle: &mut crate::syscalls::Handle| {
            let mut text = String::new();
            open_handle(dir, handle).unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, "found again");
        };
        world.node_down();
        world.node_up();
        read_by_handle(&mut file);
        world.remount();
        read_by_handle(&mut file);
        // A directory is connected to the tree by its "..".
        let opened = open_handle(dir, &mut deeper).unwrap();
        let link = format!("/proc/self/fd/{}", opened.as_raw_fd());
        assert_eq!(fs::read_link(link).unwrap(), dir.join("deep/deeper"));
        assert!(!dir.join("gone").exists());
        assert_eq!(errno(open_handle(dir, &mut gone)), Some(libc::ESTALE));
        // An inode that never was.
        file.handle[..8].copy_from_slice(&u64::from(u32::MAX).to_ne_bytes());
        assert_eq!(errno(open_handle(dir, &mut file)), Some(libc::ESTALE));
    });
}

#[test]
fn what_is_not_there_yet_says_so() {
    with_world(1, |world| {
        let path = world.dir().join("file");
        let file = File::create_new(&path).unwrap();
        file.write_all_at(b"some bytes", 0).unwrap();
        file.lock().unwrap(); // within this machine
        for mode in [
            libc::FALLOC_FL_COLLAPSE_RANGE,
            libc::FALLOC_FL_INSERT_RANGE,
            libc::FALLOC_FL_UNSHARE_RANGE,
        ] {
            assert_eq!(errno(fallocate(&file, mode, 0, 4096)), Some(libc::EOPNOTSUPP));
        }
    });
}

#[test]
fn another_mounts_names_show_in_a_directory_that_was_made_here() {
    with_world(2, |world| {
        let (here, there) = (&world.dirs[0], &world.dirs[1]);
        for round in 0..3 {
            // This mount's own names are always there, and are gone when it took them away.
            let own = here.join(format!("own{round}"));
            fs::create_dir(&own).unwrap();
            for number in 0..4 {
                File::create_new(own.join(format!("own{number}"))).unwrap();
            }
            fs::hard_link(own.join("own1"), own.join("linked")).unwrap();
            fs::remove_file(own.join("own2")).unwrap();
            fs::create_dir(own.join("below")).unwrap();
            symlink("nowhere", own.join("symlink")).unwrap();
            let check = |names: &[(&str, bool)]| {
                for (name, is_there) in names {
                    assert_eq!(own.join(name).symlink_metadata().is_ok(), *is_there, "{name}");
                }
            };
            check(&[("own0", true), ("own2", false), ("linked", true), ("below", true)]);
            check(&[("symlink", true), ("moved", false)]);
            fs::rename(own.join("own0"), own.join("moved")).unwrap();
            fs::rename(own.join("own1"), own.join("own3")).unwrap();
            check(&[("own0", false), ("own1", false), ("own3", true), ("moved", true)]);
            let made = here.join(format!("made{round}"));
            fs::create_dir(&made).unwrap();
            for number in 0..50 {
                File::create_new(made.join(format!("own{number}"))).unwrap();
            }
            let theirs = there.join(format!("made{round}"));
            for name in ["seen", "opened", "refused"] {
                fs::write(theirs.join(name), name).unwrap();
            }
            // Whether a name is there is decided by who makes it, at once ...
            let error = File::create_new(made.join("refused")).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
            let mut opened = OpenOptions::new();
            opened.read(true).write(true).create(true).truncate(false);
            let opened = opened.open(made.join("opened")).unwrap();
            assert_eq!(opened.metadata().unwrap().len(), 6);
            // ... and who only looks is told so.
            assert!(made.join("seen").exists());
        }
    });
}

#[test]
fn another_mount_sees_data_at_its_next_open_and_names_at_once() {
    with_world(2, |world| {
        let (here, there) = (world.dirs[0].join("file"), world.dirs[1].join("file"));
        assert!(!there.exists());
        fs::write(&here, b"first").unwrap();
        // A name that was absent is asked for every time, but in directories that the mount has made.
        assert_eq!(fs::read(&there).unwrap(), b"first");
        let kept = File::open(&there).unwrap();
        for round in 0..20u8 {
            let bytes = vec![round; 10_000 + usize::from(round)];
            let file = File::create(&here).unwrap();
            file.write_all_at(&bytes, 0).unwrap();
            if round % 2 == 0 {
                file.sync_all().unwrap();
            }
            drop(file);
            assert!(fs::read(&there).unwrap() == bytes, "round {round}");
        }
        drop(kept);
        fs::rename(&here, world.dirs[0].join("moved")).unwrap();
        assert_eq!(fs::read(world.dirs[1].join("moved")).unwrap().len(), 10_019);
        assert!(!there.exists());
    });
}

#[test]
fn a_restart_of_the_node_is_a_pause() {
    with_world(1, |world| {
        let dir = world.dir();
        fs::write(dir.join("old"), b"old").unwrap();
        let open = dir.join("open");
        let open = OpenOptions::new().read(true).write(true).create_new(true).open(open).unwrap();
        open.write_all_at(&pattern(1, 1 << 20), 0).unwrap(); // not durable when the power goes
        fs::remove_file(dir.join("old")).unwrap();
        thread::scope(|scope| {
            let workers: Vec<_> = (0..4u64)
                .map(|worker| {
                    let dir = &dir;
                    scope.spawn(move || {
                        for round in 0..40u64 {
                            let (new, name) =
                                (dir.join(format!("{worker}.new")), dir.join(worker.to_string()));
                            let mut file = File::create_new(&new).unwrap();
                            let bytes = pattern(worker * 100 + round, 30_000);
                            file.write_all(&bytes).unwrap();
                            if round % 4 == worker {
                                file.sync_all().unwrap();
                            }
                            drop(file);
                            fs::rename(&new, &name).unwrap();
                            assert!(fs::read(&name).unwrap() == bytes);
                            thread::sleep(Duration::from_millis(5));
                        }
                    })
                })
                .collect();
            for _ in 0..3 {
                thread::sleep(Duration::from_millis(50));
                world.node_down();
                thread::sleep(Duration::from_millis(50));
                world.node_up();
            }
            workers.into_iter().for_each(|worker| worker.join().unwrap());
        });
        open.sync_all().unwrap();
        let mut bytes = vec![0; 1 << 20];
        open.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == pattern(1, 1 << 20));
        drop(open);
        world.remount();
        assert!(fs::read(dir.join("open")).unwrap() == bytes);
        assert_eq!(fs::read(dir.join("3")).unwrap(), pattern(339, 30_000));
        assert_eq!(fs::read_dir(dir).unwrap().count(), 5);
    });
}

/// The machine that mounts is taken out of the story: what is found after the power cut is what
/// the second mount reads.
#[test]
fn synchronous_writes_are_durable() {
    with_world(2, |world| {
        let path = world.dirs[0].join("file");
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .custom_flags(libc::O_DSYNC)
            .open(&path)
            .unwrap();
        let bytes = pattern(7, 700_000);
        file.write_all_at(&bytes, 0).unwrap();
        assert_eq!(world.unstable_bytes(), 0);
        drop(file);
        let file = File::create(world.dirs[0].join("other")).unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        assert_eq!(world.unstable_bytes(), 700_000);
        file.sync_data().unwrap();
        assert_eq!(world.unstable_bytes(), 0);
        world.node_down();
        world.node_up();
        assert!(fs::read(world.dirs[1].join("file")).unwrap() == bytes);
    });
}

#[test]
fn a_killed_reader_need_not_wait_for_the_node() {
    with_world(1, |world| {
        let path = world.dir().join("file");
        fs::write(&path, vec![1; 100_000]).unwrap();
        world.remount(); // nothing is cached
        world.node_down();
        let mut child = std::process::Command::new("cat").arg(&path).spawn().unwrap();
        thread::sleep(Duration::from_millis(200));
        assert!(child.try_wait().unwrap().is_none(), "it waits");
        child.kill().unwrap();
        let start = Instant::now();
        while child.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < Duration::from_secs(5), "it hangs");
            thread::sleep(Duration::from_millis(10));
        }
        world.node_up();
        assert_eq!(fs::read(&path).unwrap().len(), 100_000);
    });
}
