//! Files without a name: made, given one, or gone with their last holder.

use super::*;
use crate::fsck::{Fsck, FsckConfig};
use levada_wire::attr::{Kind, Time};
use levada_wire::meta::{AttrChange, NewMode};
use levada_wire::xattr::{ACCESS_ACL, DEFAULT_ACL};

fn unnamed(parent: Ino, write: bool, may_link: bool) -> MetaRequest {
    // A truncation means nothing: there is nothing in it.
    let open = OpenMode { write, truncate: write };
    let mode = NewMode { bits: 0o666, umask: 0o022 };
    MetaRequest::CreateUnnamed { caller: ROOT, parent, mode, open, may_link }
}

impl Tester {
    async fn unnamed(&self, write: bool, may_link: bool) -> Ino {
        let made = attr_of(self.change(unnamed(Ino::ROOT, write, may_link)).await).expect("made");
        assert_eq!((made.kind, made.nlink, made.size), (Kind::File, 0, 0));
        made.ino
    }

    async fn link(&self, ino: Ino, parent: Ino, name: &str) -> Result<Attr, MetaFault> {
        let name = name.into();
        attr_of(self.change(MetaRequest::Link { caller: ROOT, ino, parent, name }).await)
    }

    async fn close(&self, ino: Ino) {
        assert_eq!(self.change(MetaRequest::Close { ino }).await, MetaReply::Done);
    }

    /// Inodes beside the root.
    async fn inodes(&self) -> u64 {
        match self.read(MetaRequest::Space).await {
            MetaReply::Space { inodes, inodes_free } => inodes - inodes_free - 1,
            reply => panic!("{reply:?}"),
        }
    }
}

impl World {
    /// As the rows are, and as the service knows them.
    async fn assert_clean(&self) {
        self.assert_sound().await;
        let report = Fsck::of_service(self.service(), FsckConfig::default()).run().await;
        assert_eq!(report.expect("reads").findings, []);
    }
}

#[test]
fn a_file_without_a_name_gets_one_once() {
    simulated(1, async {
        let world = World::small().await;
        let t = Tester::new(&world, 1).await;
        let sub = t.dir(Ino::ROOT, "sub").await;
        let before = t.attr(Ino::ROOT).await.expect("there");
        let (ino, never) = (t.unnamed(true, true).await, t.unnamed(true, false).await);
        assert_eq!(t.attr(Ino::ROOT).await.expect("there"), before, "nothing was made in it");
        assert_eq!(t.inodes().await, 3);
        let seen = t.attr(ino).await.expect("open");
        assert_eq!((seen.nlink, seen.writers), (0, true));
        world.assert_clean().await;
        assert_eq!(t.link(never, Ino::ROOT, "never").await, Err(MetaFault::NotFound));
        assert_eq!(t.link(ino, Ino::ROOT, "sub").await, Err(MetaFault::Exists));
        let named = t.link(ino, sub, "name").await.expect("its first name");
        assert_eq!((named.nlink, named.parent, named.ino), (1, sub, ino));
        assert!(named.change > seen.change && named.ctime > seen.ctime);
        assert_eq!(t.lookup(sub, "name").await.expect("there").ino, ino);
        world.assert_clean().await;
        // From here on it is a file like any other.
        assert_eq!(t.link(ino, Ino::ROOT, "second").await.expect("linked").nlink, 2);
        assert_eq!(t.unlink("second").await, MetaReply::Removed { ino: Some(ino), nlink: 1 });
        let (caller, parent) = (ROOT, sub);
        t.change(MetaRequest::Unlink { caller, parent, name: b"name".to_vec() }).await;
        assert_eq!(t.attr(ino).await.expect("open").nlink, 0);
        assert_eq!(t.link(ino, Ino::ROOT, "again").await, Err(MetaFault::NotFound));
        world.assert_clean().await;
        world.stop();
    });
}

#[test]
fn a_file_without_a_name_goes_with_its_last_close() {
    simulated(1, async {
        let world = World::small().await;
        let t = Tester::new(&world, 1).await;
        let (read, written) = (t.unnamed(false, true).await, t.unnamed(true, true).await);
        t.open(read, false, false).await.expect("by its number");
        t.close(read).await;
        assert_eq!(t.attr(read).await.expect("still open").nlink, 0);
        t.close(read).await;
        assert_eq!((t.attr(read).await, t.inodes().await), (Err(MetaFault::Stale), 1));
        let commit = MetaRequest::CommitWrite {
            ino: written,
            size: 10,
            mtime: Some(Time(7)),
            components: 1,
            end: true,
            stored: Vec::new(),
        };
        assert_eq!(attr_of(t.change(commit).await).expect("committed").size, 10);
        t.close(written).await;
        assert_eq!(t.link(written, Ino::ROOT, "late").await, Err(MetaFault::Stale));
        assert_eq!(t.chores().await, (vec![written], vec![]));
        world.assert_clean().await;
        t.change(MetaRequest::Destroyed { ino: written }).await;
        assert_eq!(t.inodes().await, 0);
        world.assert_clean().await;
        world.stop();
    });
}

#[test]
fn a_file_without_a_name_takes_what_its_directory_hands_on() {
    simulated(1, async {
        let world = World::new(FsConfig { inodes_max: 4, ..fs_config() }, serve_config(), 16 * MIB);
        let world = world.await;
        let t = Tester::new(&world, 1).await;
        let dir = t.dir(Ino::ROOT, "dir").await;
        let change = AttrChange { mode: Some(0o2755), gid: Some(77), ..AttrChange::default() };
        attr_of(t.change(MetaRequest::SetAttr { caller: ROOT, ino: dir, change }).await)
            .expect("set");
        let plain = attr_of(t.change(unnamed(dir, true, true)).await).expect("made");
        assert_eq!((plain.mode, plain.gid, plain.extended), (0o100_644, 77, false));
        t.change(set_xattr(dir, DEFAULT_ACL, &acl(&[7, 6, 5, 7, 0]))).await;
        let listed = attr_of(t.change(unnamed(dir, true, true)).await).expect("made");
        assert_eq!((listed.mode & 0o7777, listed.extended), (0o660, true));
        let list = MetaRequest::GetXattr { ino: listed.ino, name: ACCESS_ACL.to_vec() };
        assert_eq!(t.read(list).await, MetaReply::Xattr(acl(&[6, 6, 5, 6, 0])));
        // No room for more, not a directory, and one that is gone.
        let refused = |fault| MetaReply::Failed(fault);
        assert_eq!(t.change(unnamed(dir, true, true)).await, refused(MetaFault::Full));
        let file = plain.ino;
        assert_eq!(t.change(unnamed(file, true, true)).await, refused(MetaFault::NotDirectory));
        t.open(dir, false, false).await.expect("opens");
        let (caller, parent) = (ROOT, Ino::ROOT);
        t.change(MetaRequest::RemoveDir { caller, parent, name: b"dir".to_vec() }).await;
        assert_eq!(t.change(unnamed(dir, true, true)).await, refused(MetaFault::NotFound));
        assert_eq!(t.link(listed.ino, Ino::ROOT, "kept").await.expect("linked").gid, 77);
        world.assert_clean().await;
        world.stop();
    });
}

#[test]
fn files_without_a_name_outlive_a_restart_with_who_has_them_open() {
    simulated(1, async {
        let world = World::small().await;
        let (t, dead) = (Tester::new(&world, 1).await, Tester::new(&world, 2).await);
        let (kept, never) = (t.unnamed(true, true).await, t.unnamed(false, false).await);
        let closed = t.unnamed(false, true).await;
        let lost = dead.unnamed(true, true).await;
        world.power_cut().await;
        t.register().await;
        assert_eq!(t.read(reclaim(vec![(kept, 1), (never, 1)])).await, MetaReply::Done);
        world.assert_clean().await;
        // The dead client may come back, so nothing goes yet.
        for ino in [closed, lost] {
            assert_eq!(t.attr(ino).await.expect("awaited").nlink, 0);
        }
        reactor::sleep(LEASE / 2).await;
        t.read(MetaRequest::Space).await;
        reactor::sleep(LEASE / 2 + Duration::from_secs(1)).await;
        world.service().tick().await.expect("ticks");
        for ino in [closed, lost] {
            assert_eq!(t.attr(ino).await, Err(MetaFault::Stale));
        }
        // Its objects may be there.
        assert_eq!(t.chores().await, (vec![lost], vec![]));
        assert_eq!(t.link(never, Ino::ROOT, "never").await, Err(MetaFault::NotFound));
        assert_eq!(t.link(kept, Ino::ROOT, "kept").await.expect("linked").nlink, 1);
        world.assert_clean().await;
        world.power_cut().await;
        assert_eq!(t.lookup(Ino::ROOT, "kept").await.expect("there").ino, kept);
        world.assert_clean().await;
        world.stop();
    });
}

#[test]
fn what_is_repeated_makes_one_file_and_names_it_once() {
    simulated(1, async {
        let world = World::small().await;
        let t = Tester::new(&world, 1).await;
        let request = unnamed(Ino::ROOT, true, true);
        let made = t.change(request.clone()).await;
        assert_eq!(world.service().handle(t.last_call(), request.clone()).await, made);
        assert_eq!((t.inodes().await, world.service().clients()[0].open_files), (1, 1));
        // It is sent again over a restart, by a client that has not heard of it.
        world.power_cut().await;
        t.register().await;
        t.read(reclaim(Vec::new())).await;
        assert_eq!(world.service().handle(t.last_call(), request).await, made);
        assert_eq!((t.inodes().await, world.service().clients()[0].open_files), (1, 1));
        let ino = attr_of(made).expect("made").ino;
        let (caller, parent, name) = (ROOT, Ino::ROOT, b"name".to_vec());
        let link = MetaRequest::Link { caller, ino, parent, name };
        let linked = t.change(link.clone()).await;
        assert_eq!(attr_of(linked.clone()).expect("linked").nlink, 1);
        world.power_cut().await;
        assert_eq!(world.service().handle(t.last_call(), link).await, linked);
        world.assert_clean().await;
        world.stop();
    });
}
