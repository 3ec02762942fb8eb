//! What is planted is found, as what it is and as nothing else.

mod online;
mod planted;
mod random;
mod repair;

use super::{Finding, Fsck, FsckConfig, FsckReport};
use crate::key;
use crate::row::{EntryRow, Inode, NameRow};
use crate::tests::{ROOT, Tester, World, acl, attr_of, set_xattr, simulated};
use levada_base::ids::Ino;
use levada_kv::{Batch, Bytes, Store};
use levada_wire::meta::{MetaReply, MetaRequest, NewInode, OpenMode};
use levada_wire::xattr::ACCESS_ACL;
use std::rc::Rc;

pub async fn checked(store: &Store) -> FsckReport {
    Fsck::of_store(store.clone(), FsckConfig::default()).run().await.expect("reads")
}

/// A small tree with something of every sort in it.
///
/// ```text
/// /home/ann/x   and, as another name of it, /home/y; a write session is open on it
/// /home/ann/deep/er
/// /home/link    symbolic
/// /home/note    with attributes and an access control list
/// ```
pub struct Planter {
    world: Rc<World>,
    pub client: u64,
    pub home: Ino,
    pub ann: Ino,
    pub deep: Ino,
    pub x: Ino,
    pub note: Ino,
    /// Open, without a name.
    pub orphan: Ino,
    /// Open too; it never had one, and may be given one.
    pub unnamed: Ino,
    /// Its objects are to be destroyed.
    pub doomed: Ino,
}

impl Planter {
    pub async fn new() -> Self {
        let world = World::small().await;
        let tester = Tester::new(&world, 1).await;
        let home = tester.dir(Ino::ROOT, "home").await;
        let ann = tester.dir(home, "ann").await;
        let deep = tester.dir(ann, "deep").await;
        tester.dir(deep, "er").await;
        let file = NewInode::File { open: None };
        let x = tester.make(ann, "x", file.clone()).await.expect("made").ino;
        let link = MetaRequest::Link { caller: ROOT, ino: x, parent: home, name: b"y".to_vec() };
        assert!(!matches!(tester.change(link).await, MetaReply::Failed(_)));
        tester.open(x, true, false).await.expect("opens");
        let begin = MetaRequest::BeginWrite { ino: x };
        assert!(!matches!(tester.change(begin).await, MetaReply::Failed(_)));
        let symlink = NewInode::Symlink { target: b"ann/x".to_vec() };
        tester.make(home, "link", symlink).await.expect("made");
        let note = tester.make(home, "note", file).await.expect("made").ino;
        for (name, value) in [
            (&b"user.a"[..], b"1".to_vec()),
            (b"user.b", b"2".to_vec()),
            (ACCESS_ACL, acl(&[6, 6, 4, 4, 4])),
        ] {
            let reply = tester.change(set_xattr(note, name, &value)).await;
            assert!(!matches!(reply, MetaReply::Failed(_)), "{reply:?}");
        }
        let open = NewInode::File { open: Some(OpenMode { write: true, truncate: false }) };
        let orphan = tester.make(Ino::ROOT, "orphan", open.clone()).await.expect("made").ino;
        tester.unlink("orphan").await;
        let unnamed = attr_of(tester.change(create_unnamed(home)).await).expect("made").ino;
        // Its maker goes, and may have left objects.
        let other = Tester::new(&world, 2).await;
        let doomed = other.make(Ino::ROOT, "doomed", open).await.expect("made").ino;
        other.unlink("doomed").await;
        assert_eq!(other.read(MetaRequest::Leave).await, MetaReply::Done);
        let client = tester.client.get();
        let planter = Self { client, world, home, ann, deep, x, note, orphan, unnamed, doomed };
        planter.world.assert_sound().await;
        planter
    }

    pub fn store(&self) -> Store {
        self.world.service().store().clone()
    }

    pub async fn get(&self, key: &[u8]) -> Option<Bytes> {
        self.store().get(key).await.expect("reads")
    }

    pub fn set(&self, key: &[u8], value: Option<&[u8]>) {
        let mut batch = Batch::default();
        match value {
            Some(value) => batch.put(key, value),
            None => batch.delete(key),
        }
        self.store().apply(batch).expect("room");
    }

    /// Changes one inode's row.
    pub async fn inode(&self, ino: Ino, change: impl FnOnce(&mut Inode)) {
        let row = self.get(&key::inode(ino)).await.expect("there");
        let mut inode = Inode::decode(&row).expect("sound");
        change(&mut inode);
        self.set(&key::inode(ino), Some(&inode.encode()));
    }

    pub async fn name(&self, parent: Ino, name: &str) -> NameRow {
        let row = self.get(&key::name(parent, name.as_bytes())).await.expect("there");
        NameRow::decode(&row).expect("sound")
    }

    /// Both rows of an entry.
    pub fn set_entry(&self, parent: Ino, name: &str, row: NameRow) {
        let name = name.as_bytes();
        self.set(&key::name(parent, name), Some(&row.encode()));
        let entry = EntryRow::encode(row.ino, row.kind, name);
        self.set(&key::entry(parent, row.cookie), Some(&entry));
    }

    pub async fn remove_entry(&self, parent: Ino, name: &str) {
        let row = self.name(parent, name).await;
        self.set(&key::name(parent, name.as_bytes()), None);
        self.set(&key::entry(parent, row.cookie), None);
    }

    /// What a check finds now.
    pub async fn findings(&self) -> Vec<Finding> {
        checked(&self.store()).await.findings
    }

    pub fn stop(&self) {
        self.world.stop();
    }
}

/// A file without a name that may be given one.
pub fn create_unnamed(parent: Ino) -> MetaRequest {
    let open = OpenMode { write: true, truncate: false };
    let mode = 0o600.into();
    MetaRequest::CreateUnnamed { caller: ROOT, parent, mode, open, may_link: true }
}

/// What a check finds after a damage.
pub fn found(damage: impl AsyncFnOnce(&Planter)) -> (Planter, Vec<Finding>) {
    simulated(1, async {
        let planter = Planter::new().await;
        assert_eq!(planter.findings().await, []);
        damage(&planter).await;
        let findings = planter.findings().await;
        planter.stop();
        (planter, findings)
    })
}
