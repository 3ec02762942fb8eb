//! Times, what statx(2) tells, and who may do what in a sticky directory.

use crate::{errno, mounted, remount};
use rustix::fs::{
    AtFlags, CWD, StatxFlags, StatxTimestamp, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, statx,
    utimensat,
};
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const ANN: u32 = 54_321;
const BOB: u32 = 54_322;

/// Runs a program of the system as somebody; what it complained of, if it failed.
fn run_as(user: u32, program: &str, arguments: &[&Path]) -> Result<(), String> {
    let output = Command::new(program)
        .args(arguments)
        .uid(user)
        .gid(user)
        .env("LC_ALL", "C")
        .output()
        .expect("it starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(said) }
}

fn time(tv_sec: i64, tv_nsec: i64) -> Timespec {
    Timespec { tv_sec, tv_nsec }
}

const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
const OMIT: Timespec = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };

#[test]
fn times_are_set_to_now_or_left_as_they_are() {
    let Some(cluster) = mounted("times") else { return };
    let (file, link) = (cluster.mnt().join("file"), cluster.mnt().join("link"));
    fs::write(&file, "x").expect("made");
    symlink("file", &link).expect("made");
    let set_of = |path: &Path, last_access, last_modification, flags| {
        let times = Timestamps { last_access, last_modification };
        utimensat(CWD, path, &times, flags).expect("set");
    };
    let set = |atime, mtime| set_of(&file, atime, mtime, AtFlags::empty());
    let of = |path: &Path| {
        let meta = fs::symlink_metadata(path).expect("there");
        ((meta.atime(), meta.atime_nsec()), (meta.mtime(), meta.mtime_nsec()))
    };
    let ctime = || {
        let meta = fs::metadata(&file).expect("there");
        (meta.ctime(), meta.ctime_nsec())
    };
    // Of the second, whatever it is: between then and when this is called, with a bit of room for two clocks.
    let is_now = |time: (i64, i64), since: SystemTime| {
        let time = UNIX_EPOCH + Duration::new(time.0 as u64, time.1 as u32);
        let room = Duration::from_millis(100);
        assert!(since - room <= time && time <= SystemTime::now() + room, "{since:?} {time:?}");
    };
    set(time(11, 111_111_111), time(-22, 222_222_222));
    let set_then = ((11, 111_111_111), (-22, 222_222_222));
    assert_eq!(of(&file), set_then);

    // Nothing at all happens.
    let before = ctime();
    set(OMIT, OMIT);
    assert_eq!((of(&file), ctime()), (set_then, before));
    thread::sleep(Duration::from_millis(20));
    set(OMIT, time(33, 3));
    assert_eq!(of(&file), ((11, 111_111_111), (33, 3)));
    assert!(ctime() > before);
    set(time(44, 4), OMIT);
    assert_eq!(of(&file), ((44, 4), (33, 3)));
    let begun = SystemTime::now();
    set(NOW, OMIT);
    is_now(of(&file).0, begun);
    assert_eq!(of(&file).1, (33, 3));
    set(time(44, 4), NOW);
    is_now(of(&file).1, begun);
    assert_eq!(of(&file).0, (44, 4));
    set(NOW, NOW);
    assert_eq!(of(&file).0, of(&file).1, "one moment");
    set(NOW, time(55, 999_999_999));

    // Of a link itself, and not of what it leads to.
    let kept = of(&file);
    set_of(&link, time(66, 6), time(77, 7), AtFlags::SYMLINK_NOFOLLOW);
    assert_eq!((of(&link), of(&file)), (((66, 6), (77, 7)), kept));
    remount(&cluster);
    assert_eq!((of(&link), of(&file)), (((66, 6), (77, 7)), kept));

    // Who may write may say "now", and the owner alone what he likes.
    chown(&file, Some(ANN), Some(ANN)).expect("given");
    fs::set_permissions(&file, Permissions::from_mode(0o666)).expect("set");
    fs::set_permissions(cluster.mnt(), Permissions::from_mode(0o755)).expect("set");
    open_the_way(&cluster);
    let begun = SystemTime::now();
    run_as(BOB, "touch", &[&file]).expect("to now");
    is_now(of(&file).1, begun);
    let past = ["-d".as_ref(), "2001-02-03".as_ref(), file.as_path()];
    assert!(run_as(BOB, "touch", &past).expect_err("not his").contains("not permitted"));
    run_as(ANN, "touch", &past).expect("hers");
    fs::set_permissions(&file, Permissions::from_mode(0o444)).expect("set");
    assert!(run_as(BOB, "touch", &[&file]).expect_err("no writer").contains("denied"));
    run_as(ANN, "touch", &[&file]).expect("hers");
    cluster.ok(&["down"]);
}

/// A directory that was made for a test is its maker's alone.
fn open_the_way(cluster: &crate::support::Cluster) {
    fs::set_permissions(cluster.dir.path(), Permissions::from_mode(0o755)).expect("set");
}

#[test]
fn statx_tells_all_and_when_an_inode_was_made() {
    let Some(cluster) = mounted("statx") else { return };
    let dir = cluster.mnt();
    let begun = SystemTime::now() - Duration::from_millis(100);
    fs::write(dir.join("file"), [7; 10_000]).expect("made");
    symlink("file", dir.join("link")).expect("made");
    let all = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let of = |name: &str, flags| statx(CWD, dir.join(name), flags, all).expect("told");
    let at = |time: StatxTimestamp| {
        UNIX_EPOCH + Duration::new(u64::try_from(time.tv_sec).expect("now"), time.tv_nsec)
    };
    let ways = [AtFlags::empty(), AtFlags::STATX_FORCE_SYNC, AtFlags::STATX_DONT_SYNC];
    for flags in ways {
        let told = of("file", flags);
        assert_eq!(told.stx_mask & all.bits(), all.bits(), "all that was asked for");
        let meta = fs::metadata(dir.join("file")).expect("there");
        assert_eq!((told.stx_ino, told.stx_size, told.stx_nlink), (meta.ino(), 10_000, 1));
        assert_eq!(u32::from(told.stx_mode), meta.mode());
        assert_eq!((told.stx_uid, told.stx_gid), (meta.uid(), meta.gid()));
        assert_eq!((told.stx_blocks, u64::from(told.stx_blksize)), (20, meta.blksize()));
        assert_eq!(at(told.stx_mtime), meta.modified().expect("told"));
        assert_eq!(at(told.stx_btime), meta.created().expect("told"));
        assert!(begun <= at(told.stx_btime) && at(told.stx_btime) <= SystemTime::now());
        assert!(at(told.stx_btime) <= at(told.stx_mtime));
    }
    let born = at(of("file", ways[0]).stx_btime);
    let link = of("link", AtFlags::SYMLINK_NOFOLLOW);
    assert_eq!((u32::from(link.stx_mode) & libc::S_IFMT, link.stx_size), (libc::S_IFLNK, 4));
    let opened = fs::File::open(dir.join("file")).expect("opened");
    let told = statx(&opened, "", AtFlags::EMPTY_PATH, all).expect("told");
    assert_eq!(told.stx_ino, of("link", AtFlags::empty()).stx_ino);
    drop(opened);
    remount(&cluster);
    assert_eq!(at(of("file", ways[1]).stx_btime), born);
    cluster.ok(&["down"]);
}

#[test]
fn in_a_sticky_directory_names_are_their_owners() {
    let Some(cluster) = mounted("sticky") else { return };
    open_the_way(&cluster);
    let tmp = cluster.mnt().join("tmp");
    fs::create_dir(&tmp).expect("made");
    fs::set_permissions(&tmp, Permissions::from_mode(0o1777)).expect("set");
    let mode = fs::metadata(&tmp).expect("there").mode();
    assert_eq!(mode, libc::S_IFDIR | 0o1777);
    remount(&cluster);
    let (hers, his) = (tmp.join("hers"), tmp.join("his"));
    let (her_dir, free) = (tmp.join("her dir"), tmp.join("free"));
    run_as(ANN, "touch", &[&hers]).expect("anybody may");
    run_as(ANN, "mkdir", &[&her_dir]).expect("anybody may");
    run_as(BOB, "touch", &[&his]).expect("anybody may");
    // Also when all may write it.
    fs::set_permissions(&hers, Permissions::from_mode(0o666)).expect("set");
    let refused = |program: &str, arguments: &[&Path]| {
        let said = run_as(BOB, program, arguments).expect_err("hers");
        assert!(said.contains("not permitted"), "{program}: {said}");
    };
    let force = Path::new("-f");
    refused("rm", &[force, &hers]);
    refused("rmdir", &[&her_dir]);
    refused("mv", &[force, &hers, &free]);
    refused("mv", &[force, &his, &hers]);
    assert!(hers.exists() && his.exists() && her_dir.exists() && !free.exists());
    run_as(BOB, "mkdir", &[&free]).expect("free");
    refused("mv", &[Path::new("-fT"), &free, &her_dir]);
    run_as(ANN, "mv", &[force, &hers, &tmp.join("still hers")]).expect("hers");
    run_as(ANN, "rmdir", &[&her_dir]).expect("hers");
    // Without the bit whoever may write the directory may.
    fs::set_permissions(&tmp, Permissions::from_mode(0o777)).expect("set");
    run_as(BOB, "rm", &[force, &tmp.join("still hers")]).expect("it is not sticky");
    // Whose the directory is may do all of it.
    fs::set_permissions(&tmp, Permissions::from_mode(0o1777)).expect("set");
    chown(&tmp, Some(ANN), Some(ANN)).expect("given");
    run_as(ANN, "rm", &[force, &his]).expect("the directory is hers");
    cluster.ok(&["down"]);
}

#[test]
fn what_could_give_rights_is_kept_and_gives_none() {
    let Some(cluster) = mounted("rights") else { return };
    open_the_way(&cluster);
    let dir = cluster.mnt();
    // Whoever runs it is told who he is; here he stays that.
    let program = dir.join("id");
    fs::copy("/usr/bin/id", &program).expect("copied");
    fs::set_permissions(&program, Permissions::from_mode(0o6755)).expect("set");
    let null = dir.join("null");
    let device = rustix::fs::makedev(1, 3);
    let mode = rustix::fs::Mode::from(0o666);
    rustix::fs::mknodat(CWD, &null, rustix::fs::FileType::CharacterDevice, mode, device)
        .expect("made");
    remount(&cluster);
    assert_eq!(fs::metadata(&program).expect("there").mode() & 0o7777, 0o6755);
    assert_eq!(fs::metadata(&null).expect("there").rdev(), device);
    let output = Command::new(&program).arg("-u").uid(ANN).gid(ANN).output().expect("runs");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), ANN.to_string());
    let refused = errno(fs::File::open(&null));
    assert_eq!(refused, rustix::io::Errno::ACCESS);
    // Nor is anything shared between two files.
    let clone = ["--reflink=always".as_ref(), program.as_path(), &dir.join("clone")];
    let said = run_as(0, "cp", &clone).expect_err("not there yet");
    assert!(said.contains("not supported"), "{said}");
    cluster.ok(&["down"]);
}
