//! Extended attributes and access control lists, as programs see them through the kernel.
//! Needs root and `/dev/fuse`.

use crate::syscalls::c_path;
use crate::unnamed::{name_by_proc, unnamed};
use crate::world::{World, with_world};
use std::ffi::CString;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::Command;
use std::thread;

const ACCESS: &str = "system.posix_acl_access";
const DEFAULT: &str = "system.posix_acl_default";
const CAPABILITY: &str = "security.capability";

fn told(status: isize) -> Result<usize, i32> {
    let error = || io::Error::last_os_error().raw_os_error().expect("a system call failed");
    usize::try_from(status).map_err(|_| error())
}

fn set_with(path: &Path, name: &str, value: &[u8], flags: i32) -> Result<(), i32> {
    let (path, name) = (c_path(path), CString::new(name).unwrap());
    let bytes = value.as_ptr().cast();
    // SAFETY: two NUL-terminated strings, and a value of that length.
    let status =
        unsafe { libc::lsetxattr(path.as_ptr(), name.as_ptr(), bytes, value.len(), flags) };
    told(status as isize).map(drop)
}

fn set(path: &Path, name: &str, value: &[u8]) -> Result<(), i32> {
    set_with(path, name, value, 0)
}

fn get_into(path: &Path, name: &str, room: &mut [u8]) -> Result<usize, i32> {
    let (path, name) = (c_path(path), CString::new(name).unwrap());
    let (start, len) = (room.as_mut_ptr().cast(), room.len());
    // SAFETY: two NUL-terminated strings, and room of that length.
    told(unsafe { libc::lgetxattr(path.as_ptr(), name.as_ptr(), start, len) })
}

fn get(path: &Path, name: &str) -> Result<Vec<u8>, i32> {
    let mut value = vec![0; get_into(path, name, &mut [])?];
    let len = get_into(path, name, &mut value)?;
    value.truncate(len);
    Ok(value)
}

fn list_into(path: &Path, room: &mut [u8]) -> Result<usize, i32> {
    let path = c_path(path);
    let (start, len) = (room.as_mut_ptr().cast(), room.len());
    // SAFETY: a NUL-terminated string, and room of that length.
    told(unsafe { libc::llistxattr(path.as_ptr(), start, len) })
}

fn list(path: &Path) -> Vec<String> {
    let mut names = vec![0; list_into(path, &mut []).unwrap()];
    let len = list_into(path, &mut names).unwrap();
    let names = String::from_utf8(names[..len].to_vec()).unwrap();
    names.split_terminator('\0').map(str::to_owned).collect()
}

fn remove(path: &Path, name: &str) -> Result<(), i32> {
    let (path, name) = (c_path(path), CString::new(name).unwrap());
    // SAFETY: two NUL-terminated strings.
    told(unsafe { libc::lremovexattr(path.as_ptr(), name.as_ptr()) } as isize).map(drop)
}

/// As `setfacl` writes it: permissions of the owner, user 1000, the group, the mask and others.
fn acl([owner, user, group, mask, others]: [u8; 5]) -> Vec<u8> {
    let nobody = u32::MAX;
    let entries = [
        (1u8, owner, nobody),
        (2, user, 1000),
        (4, group, nobody),
        (16, mask, nobody),
        (32, others, nobody),
    ];
    let mut value = vec![2, 0, 0, 0];
    for (tag, permissions, id) in entries {
        value.extend([tag, 0, permissions, 0]);
        value.extend(id.to_le_bytes());
    }
    value
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

fn chmod(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// The mount's directory, which everybody may reach.
fn open_to_all(world: &World) -> &Path {
    chmod(world.dir().parent().unwrap(), 0o755);
    world.dir()
}

/// Runs `work` as a user without rights of its own, in a group of the same number.
fn as_user<T: Send>(id: libc::uid_t, work: impl FnOnce() -> T + Send) -> T {
    let work = || {
        // SAFETY: plain numbers. The system call itself, unlike libc's function, changes this thread alone.
        unsafe {
            assert_eq!(libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()), 0);
            assert_eq!(libc::syscall(libc::SYS_setresgid, id, id, id), 0);
            assert_eq!(libc::syscall(libc::SYS_setresuid, id, id, id), 0);
        }
        work()
    };
    thread::scope(|scope| scope.spawn(work).join().unwrap())
}

fn opens(path: &Path, write: bool) -> bool {
    OpenOptions::new().read(true).write(write).open(path).is_ok()
}

#[test]
fn extended_attributes_are_kept() {
    with_world(1, |world| {
        let path = open_to_all(world).join("file");
        fs::write(&path, b"content").unwrap();
        assert_eq!(list(&path), [""; 0]);
        assert_eq!(get(&path, "user.colour"), Err(libc::ENODATA));
        let before = fs::metadata(&path).unwrap();
        set(&path, "user.colour", b"green").unwrap();
        let after = fs::metadata(&path).unwrap();
        let ctime = |meta: &fs::Metadata| (meta.ctime(), meta.ctime_nsec());
        assert!(ctime(&after) > ctime(&before));
        assert_eq!(after.modified().unwrap(), before.modified().unwrap());
        assert_eq!(get(&path, "user.colour").unwrap(), b"green");
        assert_eq!(get_into(&path, "user.colour", &mut [0; 4]), Err(libc::ERANGE));
        assert_eq!(get_into(&path, "user.colour", &mut []), Ok(5));
        assert_eq!(set_with(&path, "user.colour", b"", libc::XATTR_CREATE), Err(libc::EEXIST));
        assert_eq!(set_with(&path, "user.shape", b"", libc::XATTR_REPLACE), Err(libc::ENODATA));
        set_with(&path, "user.shape", b"", libc::XATTR_CREATE).unwrap();
        assert_eq!(get(&path, "user.shape").unwrap(), b"");
        set(&path, "trusted.secret", b"x").unwrap();
        set(&path, "security.label", b"y").unwrap();
        let all = ["security.label", "trusted.secret", "user.colour", "user.shape"];
        assert_eq!(list(&path), all);
        assert_eq!(list_into(&path, &mut [0; 10]), Err(libc::ERANGE));
        assert_eq!(as_user(1000, || list(&path)), ["security.label", "user.colour", "user.shape"]);
        assert_eq!(set(&path, "system.other", b"x"), Err(libc::EOPNOTSUPP));
        assert_eq!(get(&path, "system.other"), Err(libc::EOPNOTSUPP));
        assert_eq!(set(&path, "other", b"x"), Err(libc::EOPNOTSUPP));

        let large = vec![7; 64 << 10];
        set(&path, "user.large", &large).unwrap();
        assert!(get(&path, "user.large").unwrap() == large);
        assert_eq!(set(&path, "user.large", &[&large[..], b"x"].concat()), Err(libc::E2BIG));
        let name = |number: usize| format!("user.{number:0>250}");
        let full = (0..).find_map(|number| set(&path, &name(number), b"x").err());
        assert_eq!(full, Some(libc::ENOSPC));
        assert_eq!(set(&path, "user.colour", b"blue"), Ok(()));

        // Of directories, and of symbolic links what the kernel lets through.
        let (dir, link) = (world.dir().join("dir"), world.dir().join("link"));
        fs::create_dir(&dir).unwrap();
        symlink("file", &link).unwrap();
        set(&dir, "user.a", b"1").unwrap();
        assert_eq!(set(&link, "user.a", b"1"), Err(libc::EPERM));
        set(&link, "trusted.a", b"1").unwrap();

        world.node_down();
        world.node_up();
        remove(&path, "user.shape").unwrap();
        assert_eq!(remove(&path, "user.shape"), Err(libc::ENODATA));
        world.remount();
        assert_eq!(get(&path, "user.colour").unwrap(), b"blue");
        assert_eq!(get(&path, "user.shape"), Err(libc::ENODATA));
        assert!(get(&path, "user.large").unwrap() == large);
        assert_eq!((list(&dir), list(&link)), (vec!["user.a".into()], vec!["trusted.a".into()]));
        fs::remove_dir(&dir).unwrap();
        fs::remove_file(&path).unwrap();
    });
}

#[test]
fn access_control_lists_decide() {
    with_world(1, |world| {
        let path = open_to_all(world).join("file");
        fs::write(&path, b"content").unwrap();
        chmod(&path, 0o600);
        assert!(!as_user(1000, || opens(&path, false)));
        set(&path, ACCESS, &acl([6, 6, 4, 6, 0])).unwrap();
        assert_eq!((mode(&path), list(&path)), (0o660, vec![ACCESS.to_owned()]));
        assert!(as_user(1000, || opens(&path, true)));
        assert!(!as_user(1001, || opens(&path, false)));
        // Only its owner changes it.
        assert_eq!(as_user(1000, || set(&path, ACCESS, &acl([7; 5]))), Err(libc::EPERM));
        assert_eq!(as_user(1000, || remove(&path, ACCESS)), Err(libc::EPERM));
        // chmod changes the mask.
        chmod(&path, 0o640);
        assert_eq!(get(&path, ACCESS).unwrap(), acl([6, 6, 4, 4, 0]));
        assert!(as_user(1000, || opens(&path, false) && !opens(&path, true)));
        world.remount();
        assert_eq!((mode(&path), get(&path, ACCESS).unwrap()), (0o640, acl([6, 6, 4, 4, 0])));
        assert!(as_user(1000, || opens(&path, false) && !opens(&path, true)));

        // One that says no more than the bits is none; without it the bits stay.
        let minimal = [
            &acl([7, 0, 5, 0, 1])[..12],
            &acl([7, 0, 5, 0, 1])[20..28],
            &acl([7, 0, 5, 0, 1])[36..],
        ];
        set(&path, ACCESS, &minimal.concat()).unwrap();
        assert_eq!((mode(&path), get(&path, ACCESS)), (0o751, Err(libc::ENODATA)));
        set(&path, ACCESS, &acl([6, 6, 4, 6, 0])).unwrap();
        remove(&path, ACCESS).unwrap();
        assert_eq!((mode(&path), list(&path)), (0o660, vec![]));
        assert!(!as_user(1000, || opens(&path, false)));
        assert_eq!(set(&path, DEFAULT, &acl([7; 5])), Err(libc::EACCES));
        assert_eq!(set(&path, ACCESS, &acl([6, 6, 4, 6, 0])[..20]), Err(libc::EINVAL));

        // Set-group-id stays only with who is in the group.
        chown(&path, Some(1000), Some(5000)).unwrap();
        chmod(&path, 0o2770);
        set(&path, ACCESS, &acl([7; 5])).unwrap();
        assert_eq!(mode(&path), 0o2777);
        as_user(1000, || set(&path, ACCESS, &acl([7, 7, 7, 7, 0]))).unwrap();
        assert_eq!(mode(&path), 0o770);
    });
}

#[test]
fn what_is_made_takes_the_directorys_default_list() {
    with_world(1, |world| {
        let dir = world.dir().join("dir");
        fs::create_dir(&dir).unwrap();
        // SAFETY: sets and sets back a number. Who makes something meanwhile is this test alone: the others of this
        // file make nothing whose bits they look at, without setting them.
        let umask = unsafe { libc::umask(0o022) };
        // SAFETY: as above.
        unsafe { libc::umask(umask) };
        let plain = dir.join("plain");
        File::create_new(&plain).unwrap();
        assert_eq!(mode(&plain), 0o666 & !umask);
        let named = dir.join("plain, later");
        name_by_proc(&unnamed(&dir, 0o666, 0), &named).unwrap();
        assert_eq!((mode(&named), list(&named)), (0o666 & !umask, vec![]));
        set(&dir, DEFAULT, &acl([7, 7, 5, 7, 4])).unwrap();
        assert_eq!(list(&dir), [DEFAULT]);
        // The umask does not count.
        let (file, below, fifo) = (dir.join("file"), dir.join("below"), dir.join("fifo"));
        File::create_new(&file).unwrap();
        assert_eq!((mode(&file), get(&file, ACCESS).unwrap()), (0o664, acl([6, 7, 5, 6, 4])));
        assert_eq!(get(&file, DEFAULT), Err(libc::ENODATA));
        let named = dir.join("file, later");
        name_by_proc(&unnamed(&dir, 0o666, 0), &named).unwrap();
        assert_eq!((mode(&named), get(&named, ACCESS).unwrap()), (0o664, acl([6, 7, 5, 6, 4])));
        fs::create_dir(&below).unwrap();
        assert_eq!((mode(&below), get(&below, ACCESS).unwrap()), (0o774, acl([7, 7, 5, 7, 4])));
        assert_eq!(get(&below, DEFAULT).unwrap(), acl([7, 7, 5, 7, 4]));
        let c_fifo = c_path(&fifo);
        // SAFETY: a NUL-terminated path.
        assert_eq!(unsafe { libc::mkfifo(c_fifo.as_ptr(), 0o600) }, 0);
        assert_eq!((mode(&fifo), get(&fifo, ACCESS).unwrap()), (0o600, acl([6, 7, 5, 0, 0])));
        symlink("file", dir.join("link")).unwrap();
        assert_eq!((mode(&dir.join("link")), list(&dir.join("link"))), (0o777, vec![]));
        File::create_new(below.join("file")).unwrap();
        world.remount();
        assert_eq!(get(&below.join("file"), ACCESS).unwrap(), acl([6, 7, 5, 6, 4]));
        remove(&dir, DEFAULT).unwrap();
        File::create_new(dir.join("last")).unwrap();
        assert_eq!(list(&dir.join("last")), [""; 0]);
    });
}

#[test]
fn cp_takes_attributes_along() {
    with_world(1, |world| {
        let (from, to) = (world.dir().join("from"), world.dir().join("to"));
        fs::create_dir(&from).unwrap();
        fs::write(from.join("file"), b"content").unwrap();
        set(&from.join("file"), "user.colour", b"green").unwrap();
        set(&from.join("file"), ACCESS, &acl([6, 7, 4, 4, 0])).unwrap();
        set(&from, DEFAULT, &acl([7, 7, 5, 5, 0])).unwrap();
        let done = Command::new("cp").arg("-a").args([&from, &to]).status().unwrap();
        assert!(done.success());
        assert_eq!(get(&to, DEFAULT).unwrap(), acl([7, 7, 5, 5, 0]));
        let copy = to.join("file");
        assert_eq!((mode(&copy), get(&copy, ACCESS).unwrap()), (0o640, acl([6, 7, 4, 4, 0])));
        assert_eq!(get(&copy, "user.colour").unwrap(), b"green");
        assert_eq!(fs::read(copy).unwrap(), b"content");
    });
}

/// `cap_net_raw=ep`, as setcap(8) writes it.
const NET_RAW: [u8; 20] = [1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

#[test]
fn special_rights_do_not_survive_a_change_of_the_file() {
    with_world(1, |world| {
        let path = open_to_all(world).join("program");
        fs::write(&path, b"code").unwrap();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        let gone = || assert_eq!(get(&path, CAPABILITY), Err(libc::ENODATA));
        let give = || {
            set(&path, CAPABILITY, &NET_RAW).unwrap();
            assert_eq!(get(&path, CAPABILITY).unwrap(), NET_RAW);
        };
        give();
        file.write_all_at(b"more", 4).unwrap();
        gone();
        // The write session goes on: this time it is the kernel that takes it away.
        give();
        file.write_all_at(b"more", 8).unwrap();
        gone();
        give();
        file.set_len(5).unwrap();
        gone();
        give();
        File::create(&path).unwrap();
        gone();
        give();
        chown(&path, Some(1000), Some(1000)).unwrap();
        gone();

        // Whoever has CAP_FSETID keeps set-id bits over a truncation, everybody else loses them.
        let bits = |mode_given: u32, work: &(dyn Fn() + Sync)| {
            chmod(&path, mode_given);
            as_user(1000, work);
            mode(&path)
        };
        let write =
            || OpenOptions::new().write(true).open(&path).unwrap().write_all_at(b"x", 0).unwrap();
        let truncate = || OpenOptions::new().write(true).open(&path).unwrap().set_len(1).unwrap();
        let create = || drop(File::create(&path).unwrap());
        let works: [&(dyn Fn() + Sync); 3] = [&write, &truncate, &create];
        for work in works {
            assert_eq!(bits(0o6755, work), 0o755);
            // Without the group's right to execute it means mandatory locking.
            assert_eq!(bits(0o6745, work) & 0o4000, 0);
        }
        chmod(&path, 0o6755);
        truncate();
        assert_eq!(mode(&path), 0o6755);
    });
}

#[test]
fn another_mounts_attributes_show_at_once() {
    with_world(2, |world| {
        let (here, there) = (world.dirs[0].join("file"), world.dirs[1].join("file"));
        fs::write(&here, b"content").unwrap();
        assert_eq!((list(&here), list(&there)), (vec![], vec![]));
        assert_eq!(get(&there, "user.a"), Err(libc::ENODATA));
        set(&here, "user.a", b"1").unwrap();
        set(&here, ACCESS, &acl([6, 6, 4, 6, 0])).unwrap();
        // On this mount at once.
        assert_eq!((get(&here, "user.a").unwrap(), mode(&here)), (b"1".to_vec(), 0o660));
        assert_eq!(get(&there, "user.a").unwrap(), b"1".to_vec());
        assert!(get(&there, ACCESS).is_ok());
        assert_eq!(mode(&there), 0o660);
    });
}
