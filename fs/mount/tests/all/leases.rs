//! Two mounts of one file system under the real kernel: what one has changed the other sees at once, and neither waits long.

use crate::world::with_world;
use std::ffi::CString;
use std::fs::{self, File, Permissions};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

/// A cycle of two mounts that wait for each other ends after a second.
const STALL_MAX: Duration = Duration::from_secs(2);

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn what_another_mount_changed_shows_at_once() {
    with_world(2, |world| {
        let mut slowest = Duration::ZERO;
        for round in 0..40 {
            let (here, there) = (&world.dirs[round % 2], &world.dirs[(round + 1) % 2]);
            let (dir, seen) = (here.join("dir"), there.join("dir"));
            let mut timed = |change: &dyn Fn()| {
                let begun = Instant::now();
                change();
                slowest = slowest.max(begun.elapsed());
            };
            timed(&|| fs::create_dir(&dir).unwrap());
            assert!(seen.is_dir() && names(&seen).is_empty());
            timed(&|| fs::write(dir.join("a"), b"some").unwrap());
            assert_eq!(fs::read(seen.join("a")).unwrap(), b"some");
            assert_eq!(names(&seen), ["a"]);
            timed(&|| fs::set_permissions(dir.join("a"), Permissions::from_mode(0o640)).unwrap());
            assert_eq!(fs::metadata(seen.join("a")).unwrap().mode() & 0o777, 0o640);
            timed(&|| fs::hard_link(dir.join("a"), dir.join("link")).unwrap());
            assert_eq!(fs::metadata(seen.join("a")).unwrap().nlink(), 2);
            timed(&|| fs::rename(dir.join("a"), dir.join("b")).unwrap());
            assert!(!seen.join("a").exists() && seen.join("b").exists());
            assert_eq!(File::open(seen.join("a")).unwrap_err().kind(), io::ErrorKind::NotFound);
            // Now this one, in turn, over what the other has just looked at.
            timed(&|| fs::rename(seen.join("link"), seen.join("c")).unwrap());
            assert_eq!(names(&dir), ["b", "c"]);
            timed(&|| fs::write(dir.join("b.new"), b"new").unwrap());
            timed(&|| fs::rename(dir.join("b.new"), dir.join("b")).unwrap());
            assert_eq!(fs::read(seen.join("b")).unwrap(), b"new");
            assert_eq!(fs::metadata(seen.join("c")).unwrap().nlink(), 1);
            timed(&|| fs::remove_file(dir.join("b")).unwrap());
            assert!(!seen.join("b").exists());
            timed(&|| fs::remove_file(seen.join("c")).unwrap());
            timed(&|| fs::remove_dir(&dir).unwrap());
            assert!(!seen.exists());
        }
        assert!(slowest < STALL_MAX, "{slowest:?}");
        println!("the slowest change took {slowest:?}");
    });
}

fn gone(done: io::Result<()>) {
    if let Err(error) = done {
        // Stale: directories of the path went while the kernel walked it, and again while it tried once more.
        let is_gone = [
            io::ErrorKind::NotFound,
            io::ErrorKind::DirectoryNotEmpty,
            io::ErrorKind::StaleNetworkFileHandle,
        ];
        assert!(is_gone.contains(&error.kind()), "{error}");
    }
}

/// As `rm -rf`, whoever else removes; the longest that one call took.
fn remove_tree(dir: &Path) -> Duration {
    let mut slowest = Duration::ZERO;
    let mut timed = |begun: Instant| slowest = slowest.max(begun.elapsed());
    let begun = Instant::now();
    let listed = fs::read_dir(dir);
    timed(begun);
    let mut below = Vec::new();
    for entry in listed.into_iter().flatten() {
        let Ok(entry) = entry else { break };
        let begun = Instant::now();
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => below.push(entry.path()),
            _ => gone(fs::remove_file(entry.path())),
        }
        timed(begun);
    }
    for dir in below {
        slowest = slowest.max(remove_tree(&dir));
    }
    let begun = Instant::now();
    gone(fs::remove_dir(dir));
    slowest.max(begun.elapsed())
}

#[test]
fn two_mounts_remove_one_tree() {
    with_world(2, |world| {
        let tree = world.dirs[0].join("tree");
        for dir in 0..6 {
            let dir = tree.join(dir.to_string());
            fs::create_dir_all(dir.join("below")).unwrap();
            for file in 0..30 {
                fs::write(dir.join(file.to_string()), b"x").unwrap();
                fs::write(dir.join("below").join(file.to_string()), b"x").unwrap();
            }
        }
        assert_eq!(names(&world.dirs[1].join("tree")).len(), 6);
        let begun = Instant::now();
        let slowest = thread::scope(|scope| {
            let removing = world.dirs.iter().map(|dir| {
                let tree = dir.join("tree");
                scope.spawn(move || {
                    let mut slowest = Duration::ZERO;
                    while tree.exists() {
                        slowest = slowest.max(remove_tree(&tree));
                    }
                    slowest
                })
            });
            let removing: Vec<_> = removing.collect();
            removing.into_iter().map(|one| one.join().unwrap()).max()
        });
        let (slowest, all) = (slowest.unwrap(), begun.elapsed());
        assert!(slowest < STALL_MAX, "one call took {slowest:?}");
        println!("one call took {slowest:?}, all {all:?}");
        for dir in &world.dirs {
            assert!(names(dir).is_empty());
        }
    });
}

/// Bound into the file system on one mount, while the other changes what is around it.
#[test]
fn a_bind_mount_inside_survives() {
    with_world(2, |world| {
        let (here, there) = (world.dirs[0].join("dir"), world.dirs[1].join("dir"));
        let elsewhere = tempfile::tempdir().unwrap();
        fs::write(elsewhere.path().join("kept"), b"kept").unwrap();
        fs::create_dir_all(here.join("inside")).unwrap();
        let inside = there.join("inside");
        let run = |words: &[&Path]| {
            let status = Command::new(words[0]).args(&words[1..]).status().unwrap();
            assert!(status.success(), "{words:?}");
        };
        run(&[Path::new("mount"), Path::new("--bind"), elsewhere.path(), &inside]);
        let survived = (0..20).all(|round| {
            let name = format!("n{round}");
            fs::write(here.join(&name), b"x").unwrap();
            let is_seen = there.join(&name).exists() && names(&there).contains(&name);
            fs::set_permissions(&here, Permissions::from_mode(0o700 + round % 8)).unwrap();
            fs::set_permissions(here.join("inside"), Permissions::from_mode(0o710 + round % 8))
                .unwrap();
            fs::rename(here.join(&name), here.join("other")).unwrap();
            fs::remove_file(here.join("other")).unwrap();
            is_seen && !there.join(&name).exists() && inside.join("kept").exists()
        });
        run(&[Path::new("umount"), &inside]);
        assert!(survived);
    });
}

/// A directory that the other mount has moved, and that this one moves on without having looked where it is now: the
/// kernel still has it where it was, and cannot move it while it renames.
#[test]
fn a_directory_that_another_mount_moved_is_moved_on() {
    with_world(2, |world| {
        let [here, there] = [0, 1].map(|n| world.dirs[n].clone());
        for (to, trusted, in_use) in [
            ("r/d", true, false),
            ("r/d", true, true),
            ("p/d", false, false),
            ("p/d", false, true),
            ("p/other", false, true),
            ("r/exchanged", true, true),
            ("r/exchanged", false, false),
        ] {
            for dir in ["p", "q", "r", "p/d", "p/d/below", "r/exchanged"] {
                fs::create_dir(here.join(dir)).unwrap();
            }
            fs::write(here.join("p/d/file"), b"x").unwrap();
            for path in ["p", "p/d", "p/d/file", "p/d/below", "q", "r", "r/exchanged"] {
                assert!(there.join(path).exists());
            }
            let open = in_use.then(|| File::open(there.join("p/d/file")).unwrap());
            if !trusted {
                thread::sleep(Duration::from_millis(1200));
            }
            fs::rename(here.join("p/d"), here.join("q/d")).unwrap();
            let how =
                if to == "r/exchanged" { libc::RENAME_EXCHANGE } else { libc::RENAME_NOREPLACE };
            let moved = rename(&there.join("q/d"), &there.join(to), how);
            assert!(moved.is_ok(), "to {to}, trusted {trusted}, in use {in_use}: {moved:?}");
            for mount in [&there, &here] {
                assert_eq!(fs::read(mount.join(to).join("file")).unwrap(), b"x");
                assert!(mount.join(to).join("below").is_dir() && !mount.join("q/d/below").exists());
            }
            drop(open);
            for dir in ["p", "q", "r"] {
                fs::remove_dir_all(there.join(dir)).unwrap();
            }
        }
    });
}

/// renameat2(2).
fn rename(from: &Path, to: &Path, how: u32) -> io::Result<()> {
    let [from, to] =
        [from, to].map(|path| CString::new(path.as_os_str().as_encoded_bytes()).unwrap());
    // SAFETY: two NUL-terminated paths.
    let done =
        unsafe { libc::renameat2(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), how) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// As a database does: whoever has the lock asks where the file ends, and writes there. Meanwhile others open it and close
/// it, so that writing begins again and again.
#[test]
fn a_file_ends_where_the_last_write_ended() {
    const BLOCK: usize = 8192;
    with_world(1, |world| {
        for round in 0..20 {
            let path = &world.dirs[0].join(format!("file{round}"));
            File::create_new(path).unwrap();
            let end = &Mutex::new(0);
            thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(move || {
                        for _ in 0..20 {
                            let mut file = File::options().write(true).open(path).unwrap();
                            let mut end = end.lock().unwrap();
                            assert_eq!(file.seek(SeekFrom::End(0)).unwrap(), *end, "round {round}");
                            file.write_all(&[1; BLOCK]).unwrap();
                            *end += BLOCK as u64;
                        }
                    });
                }
            });
            assert_eq!(fs::metadata(path).unwrap().len(), 80 * BLOCK as u64);
        }
    });
}
