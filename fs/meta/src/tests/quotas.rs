//! Who uses what, and how much he may.

use super::{LEASE, ROOT, Tester, World, attr_of, fs_config, simulated};
use crate::accounts::{DEFAULT_ID, Limits};
use crate::row::{Limit, Subject, SubjectKind, Usage};
use levada_base::ids::Ino;
use levada_base::reactor;
use levada_wire::attr::Attr;
use levada_wire::meta::{
    Allowance, AttrChange, Caller, MetaFault, MetaReply, MetaRequest, NewInode,
};
use std::rc::Rc;
use std::time::Duration;

const ANN: Caller = Caller { uid: 7, gid: 70 };
const BOB: Caller = Caller { uid: 8, gid: 70 };
const FILE: NewInode = NewInode::File { open: None };

fn subject(kind: SubjectKind, id: u32) -> Subject {
    Subject { kind, id }
}

fn user(id: u32) -> Subject {
    subject(SubjectKind::User, id)
}

fn used(world: &World, subject: Subject) -> (u64, u64) {
    let Usage { inodes, bytes } = world.service().account(subject).usage;
    (inodes, bytes)
}

async fn make(
    t: &Tester,
    caller: Caller,
    parent: Ino,
    name: &str,
    new: NewInode,
) -> Result<Attr, MetaFault> {
    let (name, mode) = (name.into(), 0o644.into());
    let request = MetaRequest::Create { caller, parent, name, mode, new, exclusive: true };
    attr_of(t.change(request).await)
}

async fn write(t: &Tester, ino: Ino, stored: Vec<(u32, u64)>) -> Result<Attr, MetaFault> {
    attr_of(t.change(MetaRequest::BeginWrite { ino }).await)?;
    let (size, mtime, components, end) = (9, None, 3, true);
    let commit = MetaRequest::CommitWrite { ino, size, mtime, components, end, stored };
    attr_of(t.change(commit).await)
}

async fn chown(t: &Tester, caller: Caller, ino: Ino, to: Caller) -> Result<Attr, MetaFault> {
    let change = AttrChange { uid: Some(to.uid), gid: Some(to.gid), ..Default::default() };
    attr_of(t.change(MetaRequest::SetAttr { caller, ino, change }).await)
}

async fn link(t: &Tester, ino: Ino, parent: Ino, name: &str) -> Result<Attr, MetaFault> {
    let name = name.into();
    attr_of(t.change(MetaRequest::Link { caller: ROOT, ino, parent, name }).await)
}

async fn limit_inodes(world: &World, subject: Subject, soft: u64, hard: u64) {
    let limits = Limits { inodes: Limit { soft, hard }, inodes_grace_s: 100, ..Default::default() };
    world.service().set_limits(subject, limits).await.expect("set");
}

/// After a restart, until what nobody holds is known to be held by nobody.
async fn come_back(world: &World, t: &Tester) {
    t.register().await;
    t.read(super::reclaim(vec![])).await;
    for _ in 0..3 {
        reactor::sleep(LEASE / 2).await;
        t.attr(Ino::ROOT).await.expect("there");
        world.service().tick().await.expect("done");
    }
}

async fn end(world: Rc<World>) {
    world.assert_sound().await;
    world.stop();
}

#[test]
fn what_is_there_counts_for_its_owners_and_goes_with_it() {
    simulated(1, async {
        let world = World::small().await;
        let t = Tester::new(&world, 1).await;
        assert_eq!(used(&world, user(0)), (1, 0), "the root");
        let file = make(&t, ANN, Ino::ROOT, "file", FILE).await.expect("made").ino;
        write(&t, file, vec![(0, 100), (1, 20)]).await.expect("written");
        let group = subject(SubjectKind::Group, 70);
        assert_eq!((used(&world, user(7)), used(&world, group)), ((1, 120), (1, 120)));
        // A second name is none more; less in one object is less.
        link(&t, file, Ino::ROOT, "other").await.expect("linked");
        write(&t, file, vec![(0, 60)]).await.expect("written");
        assert_eq!(used(&world, user(7)), (1, 80));
        chown(&t, ROOT, file, BOB).await.expect("changed");
        assert_eq!((used(&world, user(7)), used(&world, user(8))), ((0, 0), (1, 80)));
        assert_eq!(used(&world, group), (1, 80));
        world.power_cut().await;
        assert_eq!((used(&world, user(8)), used(&world, user(0))), ((1, 80), (1, 0)));
        come_back(&world, &t).await;
        // While it is open it stays.
        t.open(file, false, false).await.expect("opened");
        t.unlink("file").await;
        t.unlink("other").await;
        assert_eq!(used(&world, user(8)), (1, 80));
        t.change(MetaRequest::Close { ino: file }).await;
        assert_eq!((used(&world, user(8)), used(&world, group)), ((0, 0), (0, 0)));
        assert_eq!(world.service().accounts().len(), 2, "root and his group");
        end(world).await;
    });
}

#[test]
fn nobody_gets_more_inodes_than_he_may() {
    simulated(1, async {
        let world = World::small().await;
        let t = Tester::new(&world, 1).await;
        limit_inodes(&world, user(7), 0, 2).await;
        let made = |n: u32| make(&t, ANN, Ino::ROOT, ["a", "b", "c", "d"][n as usize], FILE);
        made(0).await.expect("one");
        made(1).await.expect("two");
        assert_eq!(made(2).await, Err(MetaFault::Quota));
        world.power_cut().await;
        come_back(&world, &t).await;
        assert_eq!(made(2).await, Err(MetaFault::Quota));
        // Nor by gift, but root's.
        let gift = make(&t, BOB, Ino::ROOT, "gift", FILE).await.expect("another's").ino;
        let share = limit_inodes(&world, subject(SubjectKind::Group, 99), 0, 1);
        share.await;
        let shared = |ino| chown(&t, BOB, ino, Caller { uid: 8, gid: 99 });
        shared(gift).await.expect("the first");
        let more = make(&t, BOB, Ino::ROOT, "more", FILE).await.expect("another's").ino;
        assert_eq!(shared(more).await, Err(MetaFault::Quota));
        chown(&t, ROOT, more, ANN).await.expect("root may");
        assert_eq!(used(&world, user(7)), (3, 0));
        // Root has no limit, and who has made room makes more.
        limit_inodes(&world, user(0), 1, 1).await;
        make(&t, ROOT, Ino::ROOT, "root's", FILE).await.expect("root may");
        t.unlink("a").await;
        t.unlink("b").await;
        made(3).await.expect("there is room");
        end(world).await;
    });
}

#[test]
fn beyond_the_soft_limit_one_is_for_a_while_and_a_default_holds_for_who_has_none() {
    simulated(1, async {
        let world = World::small().await;
        let t = Tester::new(&world, 1).await;
        limit_inodes(&world, user(DEFAULT_ID), 1, 4).await;
        let made = |n: u32| make(&t, ANN, Ino::ROOT, ["a", "b", "c", "d"][n as usize], FILE);
        made(0).await.expect("below");
        assert_eq!(world.service().account(user(7)).inodes_grace_ends, None);
        made(1).await.expect("beyond it");
        assert!(world.service().account(user(7)).inodes_grace_ends.is_some());
        reactor::sleep(Duration::from_secs(60)).await;
        t.attr(Ino::ROOT).await.expect("the lease goes on");
        made(2).await.expect("still");
        reactor::sleep(Duration::from_secs(50)).await;
        assert_eq!(made(3).await, Err(MetaFault::Quota));
        t.unlink("a").await;
        t.unlink("b").await;
        made(3).await.expect("a new grace begins");
        // Limits of one's own come first; none at all is the default again.
        limit_inodes(&world, user(7), 0, 2).await;
        assert_eq!(world.service().account(user(7)).limits.inodes, Limit { soft: 0, hard: 2 });
        assert_eq!(made(0).await, Err(MetaFault::Quota));
        limit_inodes(&world, user(7), 0, 0).await;
        made(0).await.expect("below the default");
        end(world).await;
    });
}

#[test]
fn a_project_is_a_tree_and_nothing_moves_into_it_from_elsewhere() {
    simulated(1, async {
        let world = World::new(fs_config(), super::serve_config(), 16 << 20).await;
        let t = Tester::new(&world, 1).await;
        let (home, other) = (t.dir(Ino::ROOT, "home").await, t.dir(Ino::ROOT, "other").await);
        let project = subject(SubjectKind::Project, 12);
        world.service().set_owner(home, Some(12), None).await.expect("set");
        world.service().set_owner(other, Some(13), None).await.expect("set");
        let deep = make(&t, ANN, home, "deep", NewInode::Directory).await.expect("made").ino;
        let file = make(&t, ANN, deep, "file", FILE).await.expect("made").ino;
        write(&t, file, vec![(0, 50)]).await.expect("written");
        assert_eq!(used(&world, project), (3, 50));
        let foreign = MetaReply::Failed(MetaFault::OtherProject);
        assert_eq!(t.rename((deep, "file"), (other, "file"), 0).await, foreign);
        assert_eq!(t.rename((home, "deep"), (other, "deep"), 0).await, foreign);
        assert_eq!(link(&t, file, other, "file").await, Err(MetaFault::OtherProject));
        // Out of all projects it may, and stays in its own.
        t.rename((deep, "file"), (Ino::ROOT, "file"), 0).await;
        assert_eq!(
            (used(&world, project), t.lookup(Ino::ROOT, "file").await.expect("there").project),
            ((3, 50), 12)
        );
        let root = t.file("root's").await.ino;
        assert_eq!(link(&t, root, home, "x").await, Err(MetaFault::OtherProject));
        t.rename((Ino::ROOT, "file"), (home, "file"), 0).await;
        assert_eq!(t.lookup(home, "file").await.expect("there").ino, file);
        limit_inodes(&world, project, 0, 3).await;
        let refused = make(&t, ROOT, home, "root", FILE).await;
        assert_eq!(refused, Err(MetaFault::Quota), "whoever it is");
        world.service().set_owner(file, Some(0), None).await.expect("set");
        assert_eq!(used(&world, project), (2, 0));
        end(world).await;
    });
}

/// What a session may add is set aside until the service hears what was added.
#[test]
fn bytes_are_granted_before_they_are_written() {
    simulated(1, async {
        let world = World::small().await;
        let (one, other) = (Tester::new(&world, 1).await, Tester::new(&world, 2).await);
        let ask = async |t: &Tester, ino, need, want| match t
            .read(MetaRequest::Grant { ino, need, want })
            .await
        {
            MetaReply::Granted { bytes } => Ok(bytes),
            MetaReply::Failed(fault) => Err(fault),
            reply => panic!("{reply:?}"),
        };
        let (a, b) = (
            make(&one, ANN, Ino::ROOT, "a", FILE).await.expect("made").ino,
            make(&one, ANN, Ino::ROOT, "b", FILE).await.expect("made").ino,
        );
        assert_eq!(ask(&one, a, 1, 1).await, Err(MetaFault::Invalid), "no session");
        attr_of(one.change(MetaRequest::BeginWrite { ino: a }).await).expect("begun");
        attr_of(other.change(MetaRequest::BeginWrite { ino: b }).await).expect("begun");
        assert_eq!(ask(&one, a, 9, 9).await, Ok(u64::MAX));
        let bytes = Limit { soft: 0, hard: 800 };
        let limits = Limits { bytes, ..Default::default() };
        world.service().set_limits(user(7), limits).await.expect("set");
        assert_eq!(ask(&one, a, 9, 1000).await, Ok(100), "an eighth");
        assert_eq!(ask(&one, a, 700, 1000).await, Ok(700), "in the place of that");
        assert_eq!(ask(&other, b, 100, 100).await, Ok(100));
        // The rest is granted, and may come back.
        assert_eq!(ask(&other, b, 101, 101).await, Ok(0));
        assert_eq!(ask(&other, b, 801, 801).await, Err(MetaFault::Quota));
        let (ino, size, mtime, components) = (a, 9, None, 1);
        let stored = vec![(0, 300)];
        let commit =
            |end, stored| MetaRequest::CommitWrite { ino, size, mtime, components, end, stored };
        attr_of(one.change(commit(false, stored)).await).expect("there");
        assert_eq!(ask(&other, b, 200, 200).await, Ok(0), "400 of it are still granted");
        attr_of(one.change(commit(true, vec![])).await).expect("there");
        assert_eq!(ask(&other, b, 500, 500).await, Ok(500));
        assert_eq!(ask(&other, b, 501, 501).await, Err(MetaFault::Quota));
        assert_eq!(used(&world, user(7)), (2, 300));
        end(world).await;
    });
}

/// What `df` says of a directory.
#[test]
fn what_is_in_a_directory_is_left_what_its_project_and_its_tenant_have() {
    simulated(1, async {
        let world = World::small().await;
        let t = Tester::new(&world, 1).await;
        let service = world.service();
        let ask = async |ino| match t.read(MetaRequest::Allowance { ino }).await {
            MetaReply::Allowance { bytes, inodes } => {
                let pair =
                    |allowance: Option<_>| allowance.map(|Allowance { most, left }| (most, left));
                Ok((pair(bytes), pair(inodes)))
            }
            MetaReply::Failed(fault) => Err(fault),
            other => panic!("{other:?}"),
        };
        let set = async |kind, bytes, inodes| {
            let limits = Limits { bytes, inodes, bytes_grace_s: 100, ..Default::default() };
            service.set_limits(subject(kind, 5), limits).await.expect("set");
        };
        let none = Limit::default();
        let hard = |hard| Limit { soft: 0, hard };
        let dir = make(&t, ROOT, Ino::ROOT, "dir", NewInode::Directory).await.expect("made").ino;
        set(SubjectKind::Project, hard(1000), none).await;
        assert_eq!(ask(dir).await, Ok((None, None)), "nobody's");
        service.set_owner(dir, Some(5), None).await.expect("given");
        assert_eq!(ask(dir).await, Ok((Some((1000, 1000)), None)));
        let file = make(&t, ROOT, dir, "file", FILE).await.expect("made").ino;
        write(&t, file, vec![(0, 300)]).await.expect("written");
        for ino in [dir, file] {
            assert_eq!(ask(ino).await, Ok((Some((1000, 700)), None)));
        }
        // The tighter one of both, in each.
        service.set_owner(dir, None, Some(5)).await.expect("given");
        set(SubjectKind::Tenant, hard(900), hard(4)).await;
        assert_eq!(ask(dir).await, Ok((Some((900, 700)), Some((4, 3)))));
        set(SubjectKind::Tenant, hard(5000), hard(1)).await;
        assert_eq!(ask(dir).await, Ok((Some((1000, 700)), Some((1, 0)))));
        set(SubjectKind::Tenant, none, none).await;
        // A soft limit gives what the hard one says until its grace is over.
        set(SubjectKind::Project, Limit { soft: 200, hard: 1000 }, none).await;
        assert_eq!(ask(dir).await, Ok((Some((1000, 700)), None)));
        reactor::sleep(Duration::from_secs(101)).await;
        assert_eq!(ask(dir).await, Ok((Some((1000, 0)), None)));
        set(SubjectKind::Project, Limit { soft: 200, hard: 0 }, none).await;
        assert_eq!(ask(dir).await, Ok((Some((200, 0)), None)));
        assert_eq!(ask(Ino(4711)).await, Err(MetaFault::Stale));
        end(world).await;
    });
}
