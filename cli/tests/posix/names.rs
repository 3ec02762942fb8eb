//! Names, paths and links at their limits; renames of every sort.

use crate::{errno, mounted, mounted_on, remount, support};
use rustix::fs::{
    AtFlags, Mode, OFlags, RenameFlags, mkdirat, open, openat, renameat_with, statat,
};
use rustix::fs::{CWD, unlinkat};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

/// The longest that Linux takes, without the NUL.
const NAME_BYTES: usize = 255;
const PATH_BYTES: usize = 4095;
/// What most other file systems bear.
const LINKS: u64 = 65_000;

#[test]
fn names_have_255_bytes_of_any_sort() {
    let Some(cluster) = mounted("names") else { return };
    let dir = cluster.mnt();
    let two_bytes = "\u{e9}".repeat(127) + "e";
    // All that a byte of a name can be, none of it text.
    let any: Vec<u8> = (1..=255).filter(|byte| *byte != b'/').collect();
    let names: [&[u8]; 5] =
        [&[b'n'; NAME_BYTES], two_bytes.as_bytes(), &any, &[0xff; NAME_BYTES], b" "];
    let path = |name: &[u8]| dir.join(OsStr::from_bytes(name));
    for (number, name) in names.iter().enumerate() {
        fs::write(path(name), [number as u8; 5]).expect("made");
        let target = path(&name[1..]);
        // A name that is left when the first byte is cut off may be empty.
        if target != dir {
            fs::hard_link(path(name), &target).expect("linked");
            fs::remove_file(&target).expect("removed");
            symlink(OsStr::from_bytes(name), &target).expect("linked");
            assert_eq!(fs::read(&target).expect("followed"), [number as u8; 5]);
            fs::remove_file(&target).expect("removed");
            fs::rename(path(name), &target).expect("renamed");
            fs::rename(&target, path(name)).expect("renamed back");
        }
    }
    let below = path(&[b'd'; NAME_BYTES]);
    fs::create_dir(&below).expect("made");
    fs::write(below.join(OsStr::from_bytes(&any)), "below").expect("made");
    let listed = || -> BTreeSet<Vec<u8>> {
        let names =
            fs::read_dir(&dir).expect("listed").map(|entry| entry.expect("one").file_name());
        names.map(|name| name.as_bytes().to_vec()).collect()
    };
    let expected: BTreeSet<Vec<u8>> =
        names.iter().map(|name| name.to_vec()).chain([vec![b'd'; NAME_BYTES]]).collect();
    assert_eq!(listed(), expected);
    remount(&cluster);
    assert_eq!(listed(), expected);
    for (number, name) in names.iter().enumerate() {
        assert_eq!(fs::read(path(name)).expect("read"), [number as u8; 5]);
    }
    assert_eq!(fs::read(below.join(OsStr::from_bytes(&any))).expect("read"), b"below");

    let (there, long) = (path(names[0]), path(&[b'n'; NAME_BYTES + 1]));
    for refused in [
        File::create(&long).map(drop),
        File::open(&long).map(drop),
        fs::create_dir(&long),
        fs::remove_dir(&long),
        fs::hard_link(&there, &long),
        symlink("nowhere", &long),
        fs::rename(&there, &long),
        fs::rename(&long, &there),
        fs::remove_file(&long),
        fs::metadata(&long).map(drop),
        fs::metadata(long.join("below")).map(drop),
    ] {
        assert_eq!(errno(refused), Errno::NAMETOOLONG);
    }
    assert_eq!(listed(), expected);

    // Where symbolic links lead is a path.
    let link = dir.join("link");
    let far = "t".repeat(PATH_BYTES);
    symlink(&far, &link).expect("linked");
    remount(&cluster);
    assert_eq!(fs::read_link(&link).expect("read"), Path::new(&far));
    fs::remove_file(&link).expect("removed");
    assert_eq!(errno(symlink(far + "t", &link)), Errno::NAMETOOLONG);
    assert_eq!(errno(symlink("", &link)), Errno::NOENT);
    // One that leads to itself, and more of them than the kernel follows.
    symlink("link", &link).expect("linked");
    assert_eq!(errno(File::open(&link)), Errno::LOOP);
    cluster.ok(&["down"]);
}

/// A path of that many bytes into `dir`, and the directories on it.
fn path_of(dir: &Path, bytes: usize) -> PathBuf {
    let mut path = dir.to_owned();
    loop {
        let left = bytes - path.as_os_str().len() - 1;
        if left <= NAME_BYTES {
            return path.join("f".repeat(left));
        }
        // So that the last name is not empty.
        path.push("d".repeat(NAME_BYTES.min(left - 2)));
    }
}

#[test]
fn paths_go_to_path_max_and_directories_further() {
    let Some(cluster) = mounted("paths") else { return };
    let dir = cluster.mnt();
    let longest = path_of(&dir, PATH_BYTES);
    assert_eq!(longest.as_os_str().len(), PATH_BYTES);
    fs::create_dir_all(longest.parent().expect("a directory")).expect("made");
    fs::write(&longest, "at the end").expect("made");
    let too_long = path_of(&dir, PATH_BYTES + 1);
    assert_eq!(errno(File::create(&too_long)), Errno::NAMETOOLONG);
    assert_eq!(errno(fs::rename(&longest, &too_long)), Errno::NAMETOOLONG);
    remount(&cluster);
    assert_eq!(fs::read(&longest).expect("read"), b"at the end");
    let other = longest.with_file_name("g");
    fs::rename(&longest, &other).expect("renamed");
    fs::rename(&other, &longest).expect("renamed back");

    // No path leads there, but steps do: five times as deep as the longest path.
    const DEEP: usize = 5 * PATH_BYTES / 20;
    // Other tests start programs meanwhile, which must not have them open.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let name = |step: usize| format!("deep-{step:014}");
    let deeper = |from: &Path, makes: bool| {
        let mut at = open(from, flags, Mode::empty()).expect("opened");
        for step in 0..DEEP {
            if makes {
                mkdirat(&at, name(step), Mode::RWXU).expect("made");
            }
            at = openat(&at, name(step), flags, Mode::empty()).expect("opened");
        }
        at
    };
    let end = deeper(&dir, true);
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
    drop(openat(&end, "file", flags, Mode::RUSR).expect("made"));
    // What would be inside of itself is found out from any depth.
    let refused = renameat_with(CWD, dir.join(name(0)), &end, "inside", RenameFlags::empty());
    assert_eq!(refused, Err(Errno::INVAL));
    drop(end);
    remount(&cluster);
    let end = deeper(&dir, false);
    assert_eq!(statat(&end, "file", AtFlags::empty()).expect("there").st_nlink, 1);
    unlinkat(&end, "file", AtFlags::empty()).expect("removed");
    drop(end);
    cluster.ok(&["fsck"]);
    fs::remove_dir_all(dir.join(name(0))).expect("removed");
    assert_eq!(fs::read_dir(&dir).expect("listed").count(), 1);
    cluster.ok(&["down"]);
}

#[test]
fn a_file_has_65_000_names() {
    // Each is a row of its own in metadata.
    let roomy = support::TINY.replace("72MiB", "256MiB").replace("25MiB", "120MiB");
    let Some(cluster) = mounted_on("links", &roomy) else { return };
    let dir = cluster.mnt();
    let first = dir.join("first");
    fs::write(&first, "one file").expect("made");
    let folders: Vec<_> = (0..4).map(|folder| dir.join(folder.to_string())).collect();
    folders.iter().for_each(|folder| fs::create_dir(folder).expect("made"));
    let each = (LINKS - 1) / 4;
    std::thread::scope(|scope| {
        for folder in &folders {
            let first = &first;
            scope.spawn(move || {
                for name in 0..each {
                    fs::hard_link(first, folder.join(name.to_string())).expect("linked");
                }
            });
        }
    });
    for name in 4 * each..LINKS - 1 {
        fs::hard_link(&first, dir.join(format!("more-{name}"))).expect("linked");
    }
    let links = |path: &Path| fs::metadata(path).expect("there").nlink();
    assert_eq!(links(&first), LINKS);
    remount(&cluster);
    let last = folders[3].join((each - 1).to_string());
    assert_eq!((links(&last), fs::read(&last).expect("read")), (LINKS, b"one file".to_vec()));
    cluster.ok(&["fsck"]);
    fs::remove_file(&first).expect("removed");
    fs::remove_dir_all(&folders[0]).expect("removed");
    assert_eq!(links(&last), LINKS - 1 - each);
    cluster.ok(&["down"]);
}

#[test]
fn renames_of_every_sort() {
    let Some(cluster) = mounted("renames") else { return };
    let dir = cluster.mnt();
    let at = |name: &str| dir.join(name);
    let rename = |from: &str, to: &str, flags| renameat_with(CWD, at(from), CWD, at(to), flags);
    let (free, exchange) = (RenameFlags::NOREPLACE, RenameFlags::EXCHANGE);
    for folder in ["a", "a/inner", "b"] {
        fs::create_dir(at(folder)).expect("made");
    }
    fs::write(at("a/inner/file"), "file").expect("made");
    symlink("nowhere", at("b/link")).expect("made");
    let links = |name: &str| fs::metadata(at(name)).expect("there").nlink();

    // Only onto a name that is free, whatever has it, be it itself.
    for (from, to) in [("a/inner", "b"), ("a/inner/file", "b/link"), ("b/link", "b/link")] {
        assert_eq!(rename(from, to, free), Err(Errno::EXIST), "{from} {to}");
    }
    rename("a/inner/file", "b/file", free).expect("free");
    assert_eq!(rename("a/missing", "b/new", free), Err(Errno::NOENT));

    // Both or none; a directory for what is none, over directories, with their count of directories.
    assert_eq!((links("a"), links("b")), (3, 2));
    rename("a/inner", "b/link", exchange).expect("exchanged");
    assert_eq!((links("a"), links("b")), (2, 3));
    assert_eq!(fs::read_link(at("a/inner")).expect("a link"), Path::new("nowhere"));
    assert!(fs::metadata(at("b/link")).expect("there").is_dir());
    let up = fs::canonicalize(at("b/link/..")).expect("there");
    assert_eq!(up, fs::canonicalize(at("b")).expect("there"));
    rename("b/link", "b/file", exchange).expect("exchanged");
    assert_eq!(fs::read(at("b/link")).expect("a file"), b"file");
    rename("b/link", "b/link", exchange).expect("with itself");
    for (from, to) in [("b/link", "b/missing"), ("b/missing", "b/link")] {
        assert_eq!(rename(from, to, exchange), Err(Errno::NOENT), "{from} {to}");
    }
    // Neither may a directory come to lie in itself.
    for (from, to) in [("b", "b/file"), ("b/file", "b")] {
        assert_eq!(rename(from, to, exchange), Err(Errno::INVAL), "{from} {to}");
    }
    assert_eq!(rename("b/file", "a", free | exchange), Err(Errno::INVAL));
    assert_eq!(rename("b/file", "c", RenameFlags::WHITEOUT), Err(Errno::INVAL));

    // Without flags: a directory over an empty one alone, and nothing over another kind.
    fs::create_dir(at("full")).expect("made");
    fs::write(at("full/file"), "").expect("made");
    for (from, to, refused) in [
        ("a", "full", Errno::NOTEMPTY),
        ("a", "full/file", Errno::NOTDIR),
        ("b/link", "a", Errno::ISDIR),
        ("b/link", "full/file/below", Errno::NOTDIR),
    ] {
        assert_eq!(errno(fs::rename(at(from), at(to))), refused, "{from} {to}");
    }
    // Over another name of the same file nothing happens.
    fs::hard_link(at("b/link"), at("second")).expect("linked");
    fs::rename(at("second"), at("b/link")).expect("does nothing");
    assert_eq!(links("second"), 2);
    remount(&cluster);
    assert_eq!(links("b/link"), 2);
    assert_eq!(fs::read_dir(at("b")).expect("listed").count(), 2);
    cluster.ok(&["fsck"]);
    cluster.ok(&["down"]);
}
