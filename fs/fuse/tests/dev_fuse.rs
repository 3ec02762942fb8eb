//! A toy file system on a real mount, used through the kernel by `std::fs` and
//! plain system calls. Needs root and `/dev/fuse`.
#![allow(unsafe_code)] // system calls that std does not have

#[path = "../../mount/tests/all/syscalls.rs"]
mod syscalls;
mod toy;

use std::cell::{Cell, RefCell};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;
use std::rc::{Rc, Weak};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use levada_base::reactor::{self as base_reactor, Reactor};
use levada_base::sync::Notify;
use levada_base::{Buf, BufMut};
use levada_fuse::codec::{
    Attr, Entry, Errno, Limits, OpenReply, Operation, ROOT_INODE, Reply, Request,
};
use levada_fuse::handler::Handler;
use levada_fuse::session::Session;
use levada_fuse::transport::dev_fuse::{FuseMount, MountOptions, Unmounted};
use levada_fuse::transport::{Notifier, blocking, reactor};
use syscalls::{c_path, handle_of, open_handle, write_by_mapping};
use toy::Toy;
use toy::harness::{Transport, in_time, serve, with_mount};

/// Bytes that differ from block to block and inside each.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695);
        (state >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}

#[test]
fn files_behave() {
    for transport in [Transport::Blocking, Transport::Reactor] {
        let unmounted = with_mount(&Toy::new(), transport, 1, |dir| {
            let file = dir.join("a file");
            fs::write(&file, b"hello").unwrap();
            assert_eq!(fs::read(&file).unwrap(), b"hello");
            OpenOptions::new().append(true).open(&file).unwrap().write_all(b" world").unwrap();
            assert_eq!(fs::read(&file).unwrap(), b"hello world");
            fs::write(&file, b"bye").unwrap(); // O_TRUNC
            assert_eq!(fs::read(&file).unwrap(), b"bye");

            let opened = OpenOptions::new().read(true).write(true).open(&file).unwrap();
            opened.set_len(10_000).unwrap();
            assert_eq!(opened.metadata().unwrap().len(), 10_000);
            opened.sync_all().unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
            assert_eq!(fs::metadata(&file).unwrap().mode(), libc::S_IFREG | 0o640);
            let old =
                std::time::SystemTime::UNIX_EPOCH - std::time::Duration::from_nanos(1_500_000_001);
            opened.set_modified(old).unwrap();
            assert_eq!(opened.metadata().unwrap().modified().unwrap(), old);

            let moved = dir.join("moved");
            fs::rename(&file, &moved).unwrap();
            assert_eq!(fs::metadata(&file).unwrap_err().kind(), io::ErrorKind::NotFound);
            fs::hard_link(&moved, dir.join("second")).unwrap();
            assert_eq!(fs::metadata(&moved).unwrap().nlink(), 2);
            symlink("moved", dir.join("link")).unwrap();
            assert_eq!(fs::read_link(dir.join("link")).unwrap(), Path::new("moved"));
            assert_eq!(fs::metadata(dir.join("link")).unwrap().len(), 10_000);

            // Unlinked while open, it is still there.
            fs::remove_file(&moved).unwrap();
            fs::remove_file(dir.join("second")).unwrap();
            let mut start = [0; 3];
            opened.read_exact_at(&mut start, 0).unwrap();
            assert_eq!(&start, b"bye");
            drop(opened);

            fs::create_dir(dir.join("sub")).unwrap();
            fs::write(dir.join("sub/x"), b"x").unwrap();
            let error = fs::remove_dir(dir.join("sub")).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ENOTEMPTY));
            fs::rename(dir.join("sub/x"), dir.join("x")).unwrap();
            fs::remove_dir(dir.join("sub")).unwrap();
            let long = fs::write(dir.join("n".repeat(300)), b"").unwrap_err();
            assert_eq!(long.raw_os_error(), Some(libc::ENAMETOOLONG));
        });
        assert_eq!(unmounted, Unmounted::Clean);
    }
}

#[test]
fn large_requests_arrive_whole_and_aligned() {
    for transport in [Transport::Blocking, Transport::Reactor] {
        let toy = Toy::new();
        with_mount(&toy, transport, 1, |dir| {
            let bytes = pattern(1, 9 << 20);
            fs::write(dir.join("large"), &bytes).unwrap();
            assert!(fs::read(dir.join("large")).unwrap() == bytes, "cached");
            // Out of the cache: the kernel must ask again.
            let file = File::open(dir.join("large")).unwrap();
            // SAFETY: a valid descriptor.
            let status =
                unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
            assert_eq!(status, 0);
            let mut again = Vec::new();
            (&file).read_to_end(&mut again).unwrap();
            assert!(again == bytes, "read again");
        });
        let toy = toy.lock().unwrap();
        assert_eq!((toy.largest_write, toy.largest_read), (1 << 20, 1 << 20));
        assert_eq!(toy.unaligned_writes, 0);
    }
}

#[test]
fn direct_io_works() {
    for transport in [Transport::Blocking, Transport::Reactor] {
        with_mount(&Toy::new(), transport, 1, |dir| {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .custom_flags(libc::O_DIRECT)
                .open(dir.join("direct"))
                .unwrap();
            let mut buffer = BufMut::copy_of(&pattern(2, 3 << 20));
            file.write_all_at(&buffer, 4096).unwrap();
            buffer.fill(0);
            file.read_exact_at(&mut buffer, 4096).unwrap();
            assert!(*buffer == *pattern(2, 3 << 20));
            assert_eq!(file.metadata().unwrap().len(), (3 << 20) + 4096);
        });
    }
}

#[test]
fn thousands_of_names_are_listed_once_each() {
    const NAMES: usize = 5000;
    with_mount(&Toy::new(), Transport::Reactor, 1, |dir| {
        let many = dir.join("many");
        fs::create_dir(&many).unwrap();
        for number in 0..NAMES {
            File::create(many.join(format!("name-{number:05}"))).unwrap();
        }
        let list = || -> Vec<_> {
            let mut names: Vec<_> = fs::read_dir(&many)
                .unwrap()
                .map(|entry| {
                    let entry = entry.unwrap();
                    assert!(entry.file_type().unwrap().is_file());
                    assert_eq!(entry.ino(), entry.metadata().unwrap().ino());
                    entry.file_name().into_string().unwrap()
                })
                .collect();
            names.sort();
            names
        };
        use std::os::unix::fs::DirEntryExt;
        let expected: Vec<_> = (0..NAMES).map(|number| format!("name-{number:05}")).collect();
        assert_eq!(list(), expected);

        // Removing what was listed must not make later names disappear.
        for (at, entry) in fs::read_dir(&many).unwrap().enumerate() {
            if at % 2 == 0 {
                fs::remove_file(entry.unwrap().path()).unwrap();
            }
        }
        assert_eq!(list().len(), NAMES / 2);
    });
}

#[test]
fn shared_mappings_reach_the_file() {
    with_mount(&Toy::new(), Transport::Reactor, 1, |dir| {
        let path = dir.join("mapped");
        fs::write(&path, vec![1; 64 << 10]).unwrap();
        write_by_mapping(&path);
        let bytes = fs::read(&path).unwrap();
        assert_eq!((bytes[4095], bytes[5000], bytes[6000]), (1, 42, 1));
        assert_eq!(bytes.len(), 64 << 10);
    });
}

#[test]
fn extended_attributes_and_space() {
    with_mount(&Toy::new(), Transport::Reactor, 1, |dir| {
        let path = c_path(dir);
        let (name, value) = (c"user.colour", b"green");
        // SAFETY: NUL-terminated names, and buffers of the stated lengths.
        unsafe {
            let set = libc::setxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), 5, 0);
            assert_eq!(set, 0, "{}", io::Error::last_os_error());
            let mut room = [0u8; 64];
            let needed = libc::getxattr(path.as_ptr(), name.as_ptr(), room.as_mut_ptr().cast(), 0);
            assert_eq!(needed, 5);
            let got = libc::getxattr(path.as_ptr(), name.as_ptr(), room.as_mut_ptr().cast(), 64);
            assert_eq!((got, &room[..5]), (5, &value[..]));
            let listed = libc::listxattr(path.as_ptr(), room.as_mut_ptr().cast(), 64);
            assert_eq!((listed, &room[..12]), (12, &b"user.colour\0"[..]));
            assert_eq!(libc::removexattr(path.as_ptr(), name.as_ptr()), 0);
            let got = libc::getxattr(path.as_ptr(), name.as_ptr(), room.as_mut_ptr().cast(), 64);
            assert_eq!((got, io::Error::last_os_error().raw_os_error()), (-1, Some(libc::ENODATA)));

            let mut space: libc::statvfs = std::mem::zeroed();
            assert_eq!(libc::statvfs(path.as_ptr(), &raw mut space), 0);
            let free = (space.f_blocks, space.f_bfree, space.f_bavail, space.f_namemax);
            assert_eq!(free, (1 << 30, 1 << 29, 1 << 28, 255));
        }
    });
}

/// Whoever takes set-id bits and capabilities away by himself (HANDLE_KILLPRIV_V2) is not asked before each write
/// whether there are any.
#[test]
fn the_kernel_asks_for_capabilities_once() {
    let toy = Toy::new();
    with_mount(&toy, Transport::Reactor, 1, |dir| {
        let file = File::create_new(dir.join("file")).unwrap();
        for n in 0..100 {
            file.write_all_at(b"some bytes", n * 10).unwrap();
        }
    });
    assert_eq!(toy.lock().unwrap().xattr_reads, 1);
}

#[test]
fn handles_outlive_the_mount() {
    let toy = Toy::new();
    let (send, handles) = mpsc::channel();
    with_mount(&toy, Transport::Reactor, 1, move |dir| {
        fs::create_dir_all(dir.join("deep/deeper")).unwrap();
        fs::write(dir.join("deep/deeper/file"), b"found again").unwrap();
        send.send(handle_of(&dir.join("deep/deeper/file"))).unwrap();
        send.send(handle_of(&dir.join("deep/deeper"))).unwrap();
    });
    with_mount(&toy, Transport::Reactor, 1, move |dir| {
        let (mut file, mut deeper) = (handles.recv().unwrap(), handles.recv().unwrap());
        let mut text = String::new();
        open_handle(dir, &mut file).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "found again");
        // A directory is connected to the tree by its "..".
        let opened = open_handle(dir, &mut deeper).unwrap();
        let link = format!("/proc/self/fd/{}", opened.as_raw_fd());
        assert_eq!(fs::read_link(link).unwrap(), dir.join("deep/deeper"));

        // An inode that never was.
        file.handle[..8].copy_from_slice(&u64::from(u32::MAX).to_ne_bytes());
        let error = open_handle(dir, &mut file).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ESTALE));
    });
}

#[test]
fn two_cores_share_a_connection() {
    for transport in [Transport::Blocking, Transport::Reactor] {
        with_mount(&Toy::new(), transport, 2, |dir| {
            thread::scope(|scope| {
                for worker in 0..4u64 {
                    scope.spawn(move || {
                        for round in 0..50 {
                            let path = dir.join(format!("{worker}-{round}"));
                            let bytes = pattern(worker * 100 + round, 20_000);
                            fs::write(&path, &bytes).unwrap();
                            let mut file = File::open(&path).unwrap();
                            file.seek(SeekFrom::Start(10_000)).unwrap();
                            let mut tail = Vec::new();
                            file.read_to_end(&mut tail).unwrap();
                            assert!(tail == bytes[10_000..]);
                        }
                    });
                }
            });
        });
    }
}

#[test]
fn a_mount_in_use_is_detached() {
    let (send, kept) = mpsc::channel();
    let toy = Toy::new();
    let dir = tempfile::tempdir().unwrap();
    let (mount, channel) = FuseMount::new(dir.path(), &MountOptions::default()).unwrap();
    let servers = serve(&toy, channel, Transport::Reactor, 1);
    let path = dir.path().join("kept");
    in_time(move || {
        fs::write(&path, b"still here").unwrap();
        send.send(File::open(&path).unwrap()).unwrap();
    })
    .expect("the test hangs");
    let kept = kept.recv().unwrap();
    let unmounted = in_time(move || mount.unmount()).expect("unmounting hangs").unwrap();
    assert_eq!(unmounted, Unmounted::Detached);
    assert!(fs::read_dir(dir.path()).unwrap().next().is_none(), "gone from the tree");
    let mut start = [0; 5];
    kept.read_exact_at(&mut start, 0).unwrap();
    assert_eq!(&start, b"still");
    drop(kept);
    for server in servers {
        in_time(move || server.join()).expect("the server hangs").unwrap();
    }
}

#[test]
fn a_dead_mount_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let toy = Toy::new();
    let (dead, channel) = FuseMount::new(dir.path(), &MountOptions::default()).unwrap();
    drop(channel); // as when the process is killed
    let error = fs::metadata(dir.path()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOTCONN));

    let (mount, channel) = FuseMount::new(dir.path(), &MountOptions::default()).unwrap();
    let servers = serve(&toy, channel, Transport::Reactor, 1);
    drop(dead); // must leave the new mount alone
    let path = dir.path().join("file");
    in_time(move || fs::write(path, b"alive").unwrap()).expect("the test hangs");
    assert_eq!(in_time(move || mount.unmount()).unwrap().unwrap(), Unmounted::Clean);
    for server in servers {
        in_time(move || server.join()).expect("the server hangs").unwrap();
    }
}

/// Answers nothing until told to stop.
struct Stuck(mpsc::Receiver<()>);

impl Handler for Stuck {
    async fn handle(&self, request: Request<'_>, _message: &Buf) -> Reply {
        match request.operation {
            Operation::Interrupt { .. } | Operation::Forget { .. } => {}
            _ => drop(self.0.recv()),
        }
        Reply::Silent
    }
}

#[test]
fn an_abort_frees_those_who_wait() {
    let dir = tempfile::tempdir().unwrap();
    let (mount, channel) = FuseMount::new(dir.path(), &MountOptions::default()).unwrap();
    let (release, stuck) = mpsc::channel();
    let server = thread::spawn(move || {
        blocking::serve(&channel, &Session::new(Stuck(stuck), Limits::default())).unwrap();
    });
    let path = dir.path().join("file");
    let (send, waited) = mpsc::channel();
    thread::spawn(move || send.send(fs::metadata(path).map(drop)));
    thread::sleep(std::time::Duration::from_millis(100));
    assert!(waited.try_recv().is_err(), "it waits");
    mount.abort().unwrap();
    let error = waited.recv_timeout(toy::harness::LIMIT).unwrap().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ECONNABORTED));
    drop(release);
    in_time(move || server.join()).expect("the server hangs").unwrap();
    assert!(fs::metadata(dir.path()).is_ok(), "the directory is usable again");
}

const SLOW: u64 = 2;
const QUICK: u64 = 3;
const VALID: Duration = Duration::from_secs(60);

/// Two files; reads of one wait until the name `release` is looked at. Looking at `drop` drops the pages of that one, and
/// then of the other.
#[derive(Default)]
struct Gated {
    notifier: RefCell<Weak<Notifier>>,
    is_released: Cell<bool>,
    released: Notify,
}

impl Gated {
    fn attr(inode: u64) -> Attr {
        let kind = if inode == ROOT_INODE { libc::S_IFDIR } else { libc::S_IFREG };
        Attr { inode, mode: kind | 0o755, links: 1, size_bytes: 4, ..Attr::default() }
    }

    fn entry(inode: u64) -> Reply {
        let (entry_valid, attr_valid, attr) = (VALID, VALID, Self::attr(inode));
        Reply::Entry(Entry { inode, generation: 1, entry_valid, attr_valid, attr })
    }

    async fn look_up(&self, name: &[u8]) -> Reply {
        match name {
            b"slow" => return Self::entry(SLOW),
            b"quick" => return Self::entry(QUICK),
            b"release" => {
                self.is_released.set(true);
                self.released.notify_all();
            }
            b"drop" => {
                let notifier = self.notifier.borrow().upgrade().unwrap();
                let waits = Rc::clone(&notifier);
                base_reactor::spawn(async move { waits.invalidate(SLOW).await });
                base_reactor::yield_now().await;
                notifier.invalidate(QUICK).await;
            }
            _ => {}
        }
        Errno::NOENT.into()
    }
}

impl Handler for Gated {
    async fn handle(&self, request: Request<'_>, _message: &Buf) -> Reply {
        match request.operation {
            Operation::Lookup { name } => self.look_up(name).await,
            Operation::GetAttr { .. } => {
                Reply::Attr { attr: Self::attr(request.inode), valid: VALID }
            }
            Operation::Open(_) => Reply::Open(OpenReply::default()),
            Operation::Read(_) => {
                if request.inode == SLOW {
                    self.released.until(|| self.is_released.get().then_some(())).await;
                }
                Reply::Bytes(b"text".to_vec())
            }
            Operation::Forget { .. } | Operation::BatchForget(_) => Reply::Silent,
            Operation::Flush { .. } | Operation::Release(_) => Reply::Done,
            _ => Errno::NOSYS.into(),
        }
    }

    fn reaches(&self, notifier: Weak<Notifier>) {
        self.notifier.replace(notifier);
    }
}

#[test]
fn a_notification_that_waits_holds_up_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let (mount, channel) = FuseMount::new(dir.path(), &MountOptions::default()).unwrap();
    let server = thread::spawn(move || {
        let session = Session::new(Gated::default(), Limits::default());
        Reactor::new().unwrap().block_on(reactor::serve(channel, Rc::new(session))).unwrap();
    });
    let paths = ["slow", "quick", "drop", "release"].map(|name| dir.path().join(name));
    let done = in_time(move || {
        let [slow, quick, drop, release] = paths;
        assert_eq!(fs::read(quick).unwrap(), b"text");
        let reading = thread::spawn(move || fs::read(slow).unwrap());
        thread::sleep(Duration::from_millis(100));
        assert!(!reading.is_finished(), "it waits");
        // Answered when the second notification is written.
        fs::metadata(drop).unwrap_err();
        assert!(!reading.is_finished(), "and waits on");
        fs::metadata(release).unwrap_err();
        assert_eq!(reading.join().unwrap(), b"text");
    });
    let Some(()) = done else {
        mount.abort().unwrap();
        panic!("the test hangs");
    };
    in_time(move || mount.unmount()).expect("unmounting hangs").unwrap();
    in_time(move || server.join()).expect("the server hangs").unwrap();
}
