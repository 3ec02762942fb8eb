//! Files without a name, special files, and when an inode was made, through the kernel. Needs root and `/dev/fuse`.

use crate::syscalls::c_path;
use crate::unnamed::{in_proc, name_by_proc, unnamed};
use crate::world::{there_is_fuse, with_world};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// More than one object's part of a file.
const BYTES: usize = 700_000;

fn bytes(seed: usize) -> Vec<u8> {
    (0..BYTES).map(|at| ((at / 251) ^ at ^ seed) as u8).collect()
}

fn errno<T>(result: io::Result<T>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

fn status(status: i32) -> io::Result<()> {
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn name_by_descriptor(file: &File, path: &Path) -> io::Result<()> {
    let (fd, to, empty) = (file.as_raw_fd(), c_path(path), libc::AT_EMPTY_PATH);
    // SAFETY: an open descriptor and two NUL-terminated paths.
    status(unsafe { libc::linkat(fd, c"".as_ptr(), libc::AT_FDCWD, to.as_ptr(), empty) })
}

/// Inodes of the file system beside the root.
fn inodes(dir: &Path) -> u64 {
    let path = c_path(dir);
    // SAFETY: a NUL-terminated path, and room for the answer.
    unsafe {
        let mut space: libc::statvfs = std::mem::zeroed();
        assert_eq!(libc::statvfs(path.as_ptr(), &raw mut space), 0);
        space.f_files - space.f_ffree - 1
    }
}

/// The kernel tells of a close some time after it, and objects are destroyed in the background.
fn wait_for_inodes(dir: &Path, expected: u64) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while inodes(dir) != expected {
        assert!(Instant::now() < deadline, "{} inodes instead of {expected}", inodes(dir));
        thread::sleep(Duration::from_millis(20));
    }
}

fn read(file: &File) -> Vec<u8> {
    let mut found = vec![0; BYTES + 1];
    let mut len = 0;
    loop {
        match file.read_at(&mut found[len..], len as u64).unwrap() {
            0 => break,
            some => len += some,
        }
    }
    found.truncate(len);
    found
}

#[test]
fn a_file_without_a_name_gets_one() {
    if !there_is_fuse() {
        return;
    }
    with_world(2, |world| {
        let (dir, there) = (world.dir(), &world.dirs[1]);
        let sub = dir.join("sub");
        fs::create_dir(&sub).unwrap();
        fs::set_permissions(&sub, fs::Permissions::from_mode(0o2755)).unwrap();
        chown(&sub, None, Some(1234)).unwrap();
        let before = fs::metadata(&sub).unwrap();
        let file = unnamed(&sub, 0o640, 0);
        file.write_all_at(&bytes(1), 0).unwrap();
        assert!(read(&file) == bytes(1));
        let meta = file.metadata().unwrap();
        assert_eq!((meta.nlink(), meta.len(), meta.gid()), (0, BYTES as u64, 1234));
        assert_eq!(meta.mode(), libc::S_IFREG | 0o640);
        assert_eq!(fs::read_dir(&sub).unwrap().count(), 0);
        let after = fs::metadata(&sub).unwrap();
        assert_eq!(after.modified().unwrap(), before.modified().unwrap(), "nothing was made in it");
        assert_eq!(inodes(dir), 2);

        // What has a name is whole: this is what programs want it for.
        let (first, second) = (sub.join("first"), dir.join("second"));
        file.sync_all().unwrap();
        assert_eq!(errno(name_by_proc(&file, &sub)), Some(libc::EEXIST));
        name_by_proc(&file, &first).unwrap();
        assert_eq!(file.metadata().unwrap().nlink(), 1);
        assert!(fs::read(&first).unwrap() == bytes(1));
        assert!(fs::read(there.join("sub/first")).unwrap() == bytes(1), "on another mount");
        // From here on it is a file like any other.
        name_by_descriptor(&file, &second).unwrap();
        let (named, by_second) = (fs::metadata(&first).unwrap(), fs::metadata(&second).unwrap());
        assert_eq!((named.ino(), named.nlink()), (by_second.ino(), 2));
        assert_eq!(named.created().unwrap(), meta.created().unwrap());
        fs::remove_file(&first).unwrap();
        fs::remove_file(&second).unwrap();
        assert_eq!(file.metadata().unwrap().nlink(), 0);
        assert_eq!(errno(name_by_proc(&file, &first)), Some(libc::ENOENT));
        assert!(read(&file) == bytes(1));
        drop(file);
        wait_for_inodes(dir, 1);

        let file = unnamed(dir, 0o640, 0);
        file.write_all_at(&bytes(2), 0).unwrap();
        name_by_descriptor(&file, &second).unwrap();
        drop(file);
        world.remount();
        assert!(fs::read(&second).unwrap() == bytes(2));
        assert_eq!(inodes(dir), 2);
    });
}

#[test]
fn a_file_without_a_name_outlives_the_node() {
    if !there_is_fuse() {
        return;
    }
    with_world(1, |world| {
        let dir = world.dir();
        let (file, never) = (unnamed(dir, 0o640, 0), unnamed(dir, 0o640, libc::O_EXCL));
        for (seed, file) in [(1, &file), (2, &never)] {
            // Not durable when the power goes.
            file.write_all_at(&bytes(seed), 0).unwrap();
        }
        world.node_down();
        world.node_up();
        assert_eq!((file.metadata().unwrap().nlink(), never.metadata().unwrap().nlink()), (0, 0));
        assert!(read(&file) == bytes(1) && read(&never) == bytes(2));
        name_by_proc(&file, &dir.join("name")).unwrap();
        assert_eq!(errno(name_by_proc(&never, &dir.join("never"))), Some(libc::ENOENT));
        world.node_down();
        world.node_up();
        assert!(fs::read(dir.join("name")).unwrap() == bytes(1));
        assert_eq!(file.metadata().unwrap().nlink(), 1);
        drop((file, never));
        world.remount();
        assert!(fs::read(dir.join("name")).unwrap() == bytes(1));
        // The other one goes when the node waits for no client of its earlier lives any more: after a lease.
        assert_eq!(fs::read_dir(dir).unwrap().count(), 1);
    });
}

#[test]
fn a_file_without_a_name_goes_with_its_last_close() {
    if !there_is_fuse() {
        return;
    }
    with_world(1, |world| {
        let dir = world.dir();
        let files = [(false, 0), (true, 0), (false, libc::O_EXCL), (true, libc::O_EXCL)];
        let files = files.map(|(is_written, flags)| {
            let file = unnamed(dir, 0o640, flags);
            if is_written {
                file.write_all_at(&bytes(3), 0).unwrap();
            }
            file
        });
        for file in &files[2..] {
            for name in [name_by_proc, name_by_descriptor] {
                assert_eq!(errno(name(file, &dir.join("name"))), Some(libc::ENOENT));
            }
        }
        // Opened once more, without a name.
        let again = File::open(in_proc(&files[1])).unwrap();
        assert_eq!(inodes(dir), 4);
        drop(files);
        wait_for_inodes(dir, 1);
        assert!(read(&again) == bytes(3));
        assert_eq!(again.metadata().unwrap().nlink(), 0);
        drop(again);
        wait_for_inodes(dir, 0);
        assert_eq!(fs::read_dir(dir).unwrap().count(), 0);
    });
}

/// mknod(2).
fn make(path: &Path, mode: u32, rdev: u64) {
    let path = c_path(path);
    // SAFETY: a NUL-terminated path.
    status(unsafe { libc::mknod(path.as_ptr(), mode, rdev) }).unwrap();
}

#[test]
fn special_files_are_what_they_were_made_as() {
    if !there_is_fuse() {
        return;
    }
    with_world(1, |world| {
        let dir = world.dir();
        // The last is as large as the kernel's 32 bits have room for.
        let devices = [
            ("char", libc::S_IFCHR, libc::makedev(1, 3)),
            ("block", libc::S_IFBLK, libc::makedev(7, 200)),
            ("far char", libc::S_IFCHR, libc::makedev(0xfff, 0xf_ffff)),
            ("far block", libc::S_IFBLK, libc::makedev(259, 0x1_2345)),
        ];
        for (name, kind, rdev) in devices {
            make(&dir.join(name), kind | 0o600, rdev);
        }
        make(&dir.join("file"), libc::S_IFREG | 0o600, 0);
        fs::write(dir.join("file"), b"is a file").unwrap();

        let fifo = dir.join("fifo");
        make(&fifo, libc::S_IFIFO | 0o600, 0);
        let writing = thread::spawn({
            let fifo = fifo.clone();
            move || OpenOptions::new().write(true).open(fifo).unwrap().write_all(&bytes(4))
        });
        let mut received = Vec::new();
        File::open(&fifo).unwrap().read_to_end(&mut received).unwrap();
        writing.join().unwrap().unwrap();
        assert!(received == bytes(4), "through the FIFO");

        let (socket, other) = (dir.join("socket"), dir.join("other"));
        let listener = UnixListener::bind(&socket).unwrap();
        assert_eq!(errno(UnixListener::bind(&socket)), Some(libc::EADDRINUSE));
        fs::hard_link(&socket, &other).unwrap();
        for path in [&socket, &other] {
            let mut caller = UnixStream::connect(path).unwrap();
            caller.write_all(b"hello").unwrap();
            drop(caller);
            let mut heard = String::new();
            listener.accept().unwrap().0.read_to_string(&mut heard).unwrap();
            assert_eq!(heard, "hello");
        }
        drop(listener);
        let check = || {
            for (name, kind, rdev) in devices {
                let meta = fs::metadata(dir.join(name)).unwrap();
                assert_eq!((meta.mode(), meta.rdev()), (kind | 0o600, rdev), "{name}");
            }
            assert_eq!(fs::read(dir.join("file")).unwrap(), b"is a file");
            assert!(fs::metadata(&fifo).unwrap().file_type().is_fifo());
            let meta = fs::metadata(&socket).unwrap();
            assert!(meta.file_type().is_socket() && meta.nlink() == 2);
            assert_eq!(errno(UnixStream::connect(&other)), Some(libc::ECONNREFUSED));
        };
        check();
        world.remount();
        check();
    });
}

#[test]
fn when_an_inode_was_made_stays() {
    if !there_is_fuse() {
        return;
    }
    with_world(1, |world| {
        let dir = world.dir();
        let (file, sub) = (dir.join("file"), dir.join("sub"));
        fs::write(&file, b"some bytes").unwrap();
        thread::sleep(Duration::from_millis(20));
        fs::create_dir(&sub).unwrap();
        symlink("file", dir.join("symlink")).unwrap();
        make(&dir.join("fifo"), libc::S_IFIFO | 0o600, 0);
        let born = |path: &Path| fs::symlink_metadata(path).unwrap().created().unwrap();
        let all = ["file", "sub", "symlink", "fifo"].map(|name| (name, born(&dir.join(name))));
        assert!(all[0].1 < all[1].1, "each has its own");
        let age = SystemTime::now().duration_since(all[0].1).unwrap();
        assert!(age < Duration::from_secs(60), "{age:?}");

        let past = UNIX_EPOCH + Duration::from_secs(5);
        let past = fs::FileTimes::new().set_accessed(past).set_modified(past);
        for (name, expected) in all {
            let (path, moved) = (dir.join(name), dir.join("moved"));
            fs::rename(&path, &moved).unwrap();
            assert_eq!(born(&moved), expected, "{name}: rename");
            fs::rename(&moved, &path).unwrap();
            if name != "sub" {
                fs::hard_link(&path, &moved).unwrap();
                assert_eq!(born(&moved), expected, "{name}: link");
                fs::remove_file(&moved).unwrap();
            }
            // The other two cannot be opened for this.
            if ["file", "sub"].contains(&name) {
                fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
                assert_eq!(born(&path), expected, "{name}: chmod");
                chown(&path, Some(1), Some(2)).unwrap();
                assert_eq!(born(&path), expected, "{name}: chown");
                File::open(&path).unwrap().set_times(past).unwrap();
                let meta = fs::metadata(&path).unwrap();
                assert_eq!(meta.mtime(), 5);
                assert_eq!(meta.created().unwrap(), expected, "{name}: utimensat");
            }
        }
        let opened = OpenOptions::new().write(true).open(&file).unwrap();
        opened.write_all_at(b"more", 3).unwrap();
        opened.set_len(2).unwrap();
        opened.sync_all().unwrap();
        drop(opened);
        let check = |what| {
            for (name, expected) in all {
                assert_eq!(born(&dir.join(name)), expected, "{name}: {what}");
            }
        };
        check("everything");
        world.node_down();
        world.node_up();
        check("a restart of the node");
        world.remount();
        check("another mount");
    });
}
