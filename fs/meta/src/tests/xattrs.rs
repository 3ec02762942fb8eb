//! Extended attributes and access control lists, one by one.

use super::*;
use crate::check::Problem;
use crate::key;
use levada_kv::{Batch, Config};
use levada_wire::attr::Time;
use levada_wire::meta::{AttrChange, NewMode};
use levada_wire::xattr::{ACCESS_ACL, CAPABILITY, DEFAULT_ACL, NAMES_BYTES_MAX, VALUE_BYTES_MAX};

const FILE: NewInode = NewInode::File { open: None };
const FULL: &[u8] = &[6, 7, 4, 6, 0];

fn with_client<F: Future<Output = ()>>(test: impl FnOnce(Rc<World>, Rc<Tester>) -> F) {
    simulated(1, async {
        let world = World::small().await;
        let tester = Rc::new(Tester::new(&world, 1).await);
        test(Rc::clone(&world), tester).await;
        world.assert_sound().await;
        world.stop();
    });
}

impl Tester {
    async fn set(&self, ino: Ino, name: &[u8], value: &[u8]) -> MetaReply {
        self.change(set_xattr(ino, name, value)).await
    }

    async fn get(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>, MetaFault> {
        match self.read(MetaRequest::GetXattr { ino, name: name.to_vec() }).await {
            MetaReply::Xattr(value) => Ok(value),
            MetaReply::Failed(fault) => Err(fault),
            reply => panic!("{reply:?}"),
        }
    }

    async fn list(&self, ino: Ino) -> Vec<u8> {
        match self.read(MetaRequest::ListXattrs { ino }).await {
            MetaReply::Xattr(names) => names,
            reply => panic!("{reply:?}"),
        }
    }

    async fn remove(&self, ino: Ino, name: &[u8]) -> MetaReply {
        let (caller, name) = (ROOT, name.to_vec());
        self.change(MetaRequest::RemoveXattr { caller, ino, name }).await
    }

    async fn chmod(&self, ino: Ino, mode: u32) -> Attr {
        let change = AttrChange { mode: Some(mode), ..AttrChange::default() };
        self.set_attr(ino, change).await
    }

    async fn set_attr(&self, ino: Ino, change: AttrChange) -> Attr {
        attr_of(self.change(MetaRequest::SetAttr { caller: ROOT, ino, change }).await).expect("set")
    }

    async fn permissions(&self, ino: Ino) -> u32 {
        self.attr(ino).await.expect("there").mode & 0o7777
    }

    async fn make_with(&self, parent: Ino, name: &str, mode: NewMode, new: NewInode) -> Attr {
        let name = name.as_bytes().to_vec();
        let request =
            MetaRequest::Create { caller: ROOT, parent, name, mode, new, exclusive: true };
        attr_of(self.change(request).await).expect("made")
    }
}

fn failed(fault: MetaFault) -> MetaReply {
    MetaReply::Failed(fault)
}

#[test]
fn attributes_are_set_read_listed_and_removed() {
    with_client(|world, t| async move {
        let made = t.file("f").await;
        let ino = made.ino;
        assert!(!made.extended);
        assert_eq!(t.list(ino).await, b"");
        assert_eq!(t.get(ino, b"user.a").await, Err(MetaFault::NoAttribute));
        assert_eq!(t.remove(ino, b"user.a").await, failed(MetaFault::NoAttribute));
        for name in [&b"user.b"[..], b"trusted.t", b"user.a"] {
            assert_eq!(t.set(ino, name, name).await, MetaReply::Done);
        }
        assert_eq!(t.list(ino).await, b"trusted.t\0user.a\0user.b\0");
        assert_eq!(t.set(ino, b"user.a", b"").await, MetaReply::Done);
        let now = t.attr(ino).await.expect("there");
        assert!(now.extended && now.change == made.change + 4 && now.ctime > made.ctime);
        assert_eq!((now.mtime, now.size, now.nlink), (made.mtime, 0, 1));
        world.power_cut().await;
        t.register().await;
        assert_eq!(t.get(ino, b"user.a").await, Ok(vec![]));
        assert_eq!(t.get(ino, b"user.b").await, Ok(b"user.b".to_vec()));
        assert_eq!(t.remove(ino, b"user.b").await, MetaReply::Done);
        assert_eq!(t.get(ino, b"user.b").await, Err(MetaFault::NoAttribute));
        assert_eq!(t.list(ino).await, b"trusted.t\0user.a\0");
        // setxattr(2).
        let with = |name: &[u8], flags| MetaRequest::SetXattr {
            caller: ROOT,
            ino,
            name: name.to_vec(),
            value: b"x".to_vec(),
            how: SetXattr { flags, clear_set_gid: false },
        };
        assert_eq!(t.change(with(b"user.a", 1)).await, failed(MetaFault::Exists));
        assert_eq!(t.change(with(b"user.c", 2)).await, failed(MetaFault::NoAttribute));
        assert_eq!(t.change(with(b"user.a", 2)).await, MetaReply::Done);
        assert_eq!(t.change(with(b"user.c", 1)).await, MetaReply::Done);
        for name in [&b"system.x"[..], b"other"] {
            assert_eq!(t.set(ino, name, b"x").await, failed(MetaFault::NotSupported));
            assert_eq!(t.get(ino, name).await, Err(MetaFault::NotSupported));
            assert_eq!(t.remove(ino, name).await, failed(MetaFault::NotSupported));
        }
    });
}

#[test]
fn attributes_go_with_their_inode() {
    with_client(|world, t| async move {
        let rows = || async {
            let store = world.service().store().clone();
            let (from, to) =
                (std::ops::Bound::Included(&b"A"[..]), std::ops::Bound::Excluded(&b"B"[..]));
            store.scan(from, to, 100).await.expect("reads").len()
        };
        let opened = NewInode::File { open: Some(OpenMode { write: false, truncate: false }) };
        let closed = t.file("closed").await.ino;
        let open = t.make(Ino::ROOT, "open", opened).await.expect("made").ino;
        let written = t.file("written").await.ino;
        let directory = t.dir(Ino::ROOT, "directory").await;
        let link = NewInode::Symlink { target: b"x".to_vec() };
        let link = t.make(Ino::ROOT, "link", link).await.expect("made").ino;
        attr_of(t.change(MetaRequest::BeginWrite { ino: written }).await).expect("begun");
        let (size, mtime, end) = (10, Some(Time(5)), true);
        let commit = MetaRequest::CommitWrite {
            ino: written,
            size,
            mtime,
            components: 1,
            end,
            stored: vec![],
        };
        attr_of(t.change(commit).await).expect("committed");
        for ino in [closed, open, written, directory, link] {
            assert_eq!(t.set(ino, b"trusted.a", b"1").await, MetaReply::Done);
            assert_eq!(t.set(ino, b"trusted.b", b"2").await, MetaReply::Done);
        }
        assert_eq!(rows().await, 10);
        for name in ["closed", "open", "written", "link"] {
            t.unlink(name).await;
        }
        let (caller, parent) = (ROOT, Ino::ROOT);
        t.change(MetaRequest::RemoveDir { caller, parent, name: b"directory".to_vec() }).await;
        // Of the orphan they are there as long as it is.
        assert_eq!(rows().await, 2);
        assert_eq!(t.get(open, b"trusted.b").await, Ok(b"2".to_vec()));
        assert_eq!(t.set(open, b"trusted.c", b"3").await, MetaReply::Done);
        world.assert_sound().await;
        assert_eq!(t.change(MetaRequest::Close { ino: open }).await, MetaReply::Done);
        assert_eq!(rows().await, 0);
        assert_eq!(t.get(written, b"trusted.a").await, Err(MetaFault::Stale));
        assert_eq!(t.chores().await.0, [written]);
        world.assert_sound().await;
        assert_eq!(t.change(MetaRequest::Destroyed { ino: written }).await, MetaReply::Done);
        // One that nobody has come back for.
        let left = t.make(Ino::ROOT, "left", FILE).await.expect("made").ino;
        t.open(left, false, false).await.expect("opened");
        assert_eq!(t.set(left, b"user.a", b"1").await, MetaReply::Done);
        t.unlink("left").await;
        world.power_cut().await;
        world.assert_sound().await;
        assert_eq!(rows().await, 1);
        for _ in 0..3 {
            world.service().tick().await.expect("ticks");
            reactor::sleep(LEASE).await;
        }
        world.service().tick().await.expect("ticks");
        assert_eq!(rows().await, 0);
    });
}

#[test]
fn limits_are_those_of_the_manual_or_said() {
    simulated(1, async {
        let store = Config { log_bytes: levada_base::units::MIB, cache_bytes: 16 << 10 };
        let world =
            World::with_store(fs_config(), serve_config(), 16 * levada_base::units::MIB, store)
                .await;
        let t = Tester::new(&world, 1).await;
        let ino = t.file("f").await.ino;
        let value: Vec<u8> = (0..VALUE_BYTES_MAX).map(|n| n as u8).collect();
        assert_eq!(t.set(ino, b"user.large", &value).await, MetaReply::Done);
        let over = [&value[..], &[0]].concat();
        assert_eq!(t.set(ino, b"user.large", &over).await, failed(MetaFault::TooLarge));
        world.power_cut().await;
        t.register().await;
        assert_eq!(t.get(ino, b"user.large").await, Ok(value));
        let mut names = 0;
        let full = loop {
            let name = format!("user.{names:0>250}");
            match t.set(ino, name.as_bytes(), b"x").await {
                MetaReply::Done => names += 1,
                reply => break reply,
            }
        };
        assert_eq!(full, failed(MetaFault::Full));
        assert_eq!(names, (NAMES_BYTES_MAX - b"user.large\0".len()) / 256);
        // What is there can be replaced, and there is room again where one goes.
        assert_eq!(t.set(ino, b"user.large", b"small").await, MetaReply::Done);
        let name = format!("user.{:0>250}", 3);
        assert_eq!(t.remove(ino, name.as_bytes()).await, MetaReply::Done);
        assert_eq!(t.set(ino, name.as_bytes(), b"x").await, MetaReply::Done);
        // As many as there can be go in one change.
        let many = t.file("many").await.ino;
        for n in 0..NAMES_BYTES_MAX / 8 {
            let name = format!("user.{}", char::from_u32(0x400 + n as u32).expect("two bytes"));
            assert_eq!(t.set(many, name.as_bytes(), b"x").await, MetaReply::Done);
        }
        assert_eq!(t.set(many, b"user.a", b"x").await, failed(MetaFault::Full));
        t.unlink("many").await;
        t.unlink("f").await;
        world.assert_sound().await;
        world.stop();
    });
}

#[test]
fn permission_bits_and_the_access_list_are_in_step() {
    with_client(|_, t| async move {
        let ino = t.file("f").await.ino;
        t.chmod(ino, 0o2644).await;
        assert_eq!(t.set(ino, ACCESS_ACL, &acl(FULL)).await, MetaReply::Done);
        assert_eq!(t.permissions(ino).await, 0o2660);
        assert_eq!(t.get(ino, ACCESS_ACL).await, Ok(acl(FULL)));
        assert_eq!(t.list(ino).await, b"system.posix_acl_access\0");
        // The group's bits are the mask.
        let attr = t.chmod(ino, 0o741).await;
        assert_eq!((attr.mode & 0o7777, attr.extended), (0o741, true));
        assert_eq!(t.get(ino, ACCESS_ACL).await, Ok(acl(&[7, 7, 4, 4, 1])));
        // A list that says no more than the bits is none.
        assert_eq!(t.set(ino, ACCESS_ACL, &acl(&[6, 4, 0])).await, MetaReply::Done);
        assert_eq!(t.permissions(ino).await, 0o640);
        assert_eq!(t.get(ino, ACCESS_ACL).await, Err(MetaFault::NoAttribute));
        assert_eq!(t.remove(ino, ACCESS_ACL).await, failed(MetaFault::NoAttribute));
        // Without the list the bits stay.
        assert_eq!(t.set(ino, ACCESS_ACL, &acl(FULL)).await, MetaReply::Done);
        assert_eq!(t.remove(ino, ACCESS_ACL).await, MetaReply::Done);
        assert_eq!(t.permissions(ino).await, 0o660);
        assert_eq!(t.set(ino, ACCESS_ACL, &acl(FULL)).await, MetaReply::Done);
        assert_eq!(t.set(ino, ACCESS_ACL, &acl(&[])).await, MetaReply::Done);
        assert!(!t.attr(ino).await.expect("there").extended);

        assert_eq!(t.set(ino, ACCESS_ACL, b"no list").await, failed(MetaFault::Invalid));
        assert_eq!(t.set(ino, DEFAULT_ACL, &acl(FULL)).await, failed(MetaFault::Invalid));
        let link = NewInode::Symlink { target: b"f".to_vec() };
        let link = t.make(Ino::ROOT, "link", link).await.expect("made").ino;
        assert_eq!(t.set(link, ACCESS_ACL, &acl(FULL)).await, failed(MetaFault::NotSupported));

        let set = |uid, clear_set_gid| MetaRequest::SetXattr {
            caller: Caller { uid, gid: 0 },
            ino,
            name: ACCESS_ACL.to_vec(),
            value: acl(FULL),
            how: SetXattr { flags: 0, clear_set_gid },
        };
        assert_eq!(t.change(set(5, false)).await, failed(MetaFault::NotPermitted));
        t.chmod(ino, 0o2775).await;
        assert_eq!(t.change(set(0, false)).await, MetaReply::Done);
        assert_eq!(t.permissions(ino).await, 0o2660);
        assert_eq!(t.change(set(0, true)).await, MetaReply::Done);
        assert_eq!(t.permissions(ino).await, 0o660);
    });
}

#[test]
fn what_is_new_takes_the_default_list_or_minds_the_umask() {
    with_client(|world, t| async move {
        let directory = t.dir(Ino::ROOT, "d").await;
        let mode = |bits| NewMode { bits, umask: 0o027 };
        let plain = t.make_with(directory, "plain", mode(0o666), FILE).await;
        assert_eq!(plain.mode & 0o7777, 0o640);
        let default = acl(&[7, 7, 5, 7, 4]);
        assert_eq!(t.set(directory, DEFAULT_ACL, &default).await, MetaReply::Done);
        assert_eq!(t.permissions(directory).await, 0o644);
        let file = t.make_with(directory, "file", mode(0o666), FILE).await;
        assert_eq!((file.mode & 0o7777, file.extended), (0o664, true));
        assert_eq!(t.get(file.ino, ACCESS_ACL).await, Ok(acl(&[6, 7, 5, 6, 4])));
        assert_eq!(t.get(file.ino, DEFAULT_ACL).await, Err(MetaFault::NoAttribute));
        let below = t.make_with(directory, "below", mode(0o700), NewInode::Directory).await;
        assert_eq!(below.mode & 0o7777, 0o700);
        assert_eq!(t.get(below.ino, ACCESS_ACL).await, Ok(acl(&[7, 7, 5, 0, 0])));
        assert_eq!(t.get(below.ino, DEFAULT_ACL).await, Ok(default.clone()));
        let fifo = NewInode::Special { rdev: 0 };
        let fifo = t.make_with(below.ino, "fifo", mode(0o010_666), fifo).await;
        assert_eq!(fifo.mode, 0o010_664);
        let link = NewInode::Symlink { target: b"x".to_vec() };
        let link = t.make_with(below.ino, "link", mode(0o777), link).await;
        assert_eq!((link.mode & 0o7777, link.extended), (0o777, false));
        // With a list that says no more than bits, what is new has bits only.
        assert_eq!(t.set(directory, DEFAULT_ACL, &acl(&[6, 4, 4])).await, MetaReply::Done);
        let bits = t.make_with(directory, "bits", mode(0o777), FILE).await;
        assert_eq!((bits.mode & 0o7777, bits.extended), (0o644, false));
        let bits = t.make_with(directory, "dir", mode(0o777), NewInode::Directory).await;
        assert_eq!((bits.mode & 0o7777, bits.extended), (0o644, true));
        assert_eq!(t.remove(directory, DEFAULT_ACL).await, MetaReply::Done);
        world.power_cut().await;
        t.register().await;
        assert_eq!(t.get(below.ino, DEFAULT_ACL).await, Ok(default));
        assert!(!t.attr(directory).await.expect("there").extended);
    });
}

#[test]
fn a_capability_does_not_survive_a_change_of_the_file() {
    with_client(|_, t| async move {
        let ino = t.file("f").await.ino;
        let give = || async {
            assert_eq!(t.set(ino, CAPABILITY, b"all").await, MetaReply::Done);
            assert_eq!(t.set(ino, b"user.a", b"kept").await, MetaReply::Done);
        };
        let taken = || async {
            assert_eq!(t.get(ino, CAPABILITY).await, Err(MetaFault::NoAttribute));
            assert_eq!(t.list(ino).await, b"user.a\0");
        };
        give().await;
        t.chmod(ino, 0o755).await;
        assert_eq!(t.get(ino, CAPABILITY).await, Ok(b"all".to_vec()));
        t.set_attr(ino, AttrChange { uid: Some(5), ..AttrChange::default() }).await;
        taken().await;
        give().await;
        t.set_attr(ino, AttrChange { size: Some(5), ..AttrChange::default() }).await;
        taken().await;
        give().await;
        t.open(ino, true, true).await.expect("opened");
        taken().await;
        give().await;
        attr_of(t.change(MetaRequest::BeginWrite { ino }).await).expect("begun");
        taken().await;
    });
}

#[test]
fn what_does_not_fit_together_is_found() {
    simulated(1, async {
        let world = World::small().await;
        let t = Tester::new(&world, 1).await;
        let ino = t.file("f").await.ino;
        assert_eq!(t.set(ino, b"user.a", b"1").await, MetaReply::Done);
        let store = world.service().store().clone();
        let mut batch = Batch::default();
        batch.delete(&key::xattr(ino, b"user.a"));
        batch.put(&key::xattr(Ino(99), b"user.b"), &[1, 2]);
        batch.put(&key::xattr(ino, b"user.c"), &[9, 2]);
        let seq = store.apply(batch).expect("applied");
        store.durable(seq).await.expect("durable");
        let problems = check(&store).await.expect("reads");
        let stray = |ino, name: &[u8]| Problem::Xattr { ino, name: name.to_vec() };
        assert!(problems.contains(&stray(ino, b"user.a")), "{problems:?}");
        assert!(problems.contains(&stray(Ino(99), b"user.b")), "{problems:?}");
        assert!(problems.iter().any(|problem| matches!(problem, Problem::Damaged(_))));
        world.stop();
    });
}
