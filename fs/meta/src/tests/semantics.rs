//! What each request does, one by one.

use super::*;
use crate::key;
use crate::ops::LINKS_MAX;
use crate::row::Inode;
use levada_kv::Batch;
use levada_wire::attr::{Kind, Time};
use levada_wire::frame::decode_body;
use levada_wire::meta::{AttrChange, SetTime, ToClient};
use levada_wire::rpc::ConnectionId;
use std::collections::BTreeMap;

const FILE: NewInode = NewInode::File { open: None };
const OPENED: NewInode = NewInode::File { open: Some(OpenMode { write: true, truncate: false }) };

/// Runs a test with one client.
fn with_client<F: Future<Output = ()>>(test: impl FnOnce(Rc<World>, Rc<Tester>) -> F) {
    simulated(1, async {
        let world = World::small().await;
        let tester = Rc::new(Tester::new(&world, 1).await);
        test(Rc::clone(&world), tester).await;
        world.assert_sound().await;
        world.stop();
    });
}

fn removed(ino: Ino, nlink: u32) -> MetaReply {
    MetaReply::Removed { ino: Some(ino), nlink }
}

fn nothing_removed() -> MetaReply {
    MetaReply::Removed { ino: None, nlink: 0 }
}

#[test]
fn names_come_and_go() {
    with_client(|_, t| async move {
        let file = t.file("f").await;
        assert_eq!((file.nlink, file.kind, file.size), (1, Kind::File, 0));
        assert_eq!(file.layout.as_ref().expect("a file").targets.len(), 2);
        assert_eq!(t.make(Ino::ROOT, "f", FILE).await, Err(MetaFault::Exists));
        assert_eq!(t.make(Ino::ROOT, "..", FILE).await, Err(MetaFault::Invalid));
        assert_eq!(t.make(Ino::ROOT, "a/b", FILE).await, Err(MetaFault::Invalid));
        assert_eq!(t.make(Ino::ROOT, &"x".repeat(256), FILE).await, Err(MetaFault::NameTooLong));
        t.make(Ino::ROOT, &"x".repeat(255), FILE).await.expect("made");
        let link = MetaRequest::Link {
            caller: ROOT,
            ino: file.ino,
            parent: Ino::ROOT,
            name: b"g".to_vec(),
        };
        assert_eq!(attr_of(t.change(link).await).expect("linked").nlink, 2);
        assert_eq!(t.unlink("f").await, removed(file.ino, 1));
        assert_eq!(t.lookup(Ino::ROOT, "g").await.expect("there").nlink, 1);
        assert_eq!(t.unlink("g").await, removed(file.ino, 0));
        assert_eq!(t.attr(file.ino).await, Err(MetaFault::Stale));
        let target = NewInode::Symlink { target: b"somewhere".to_vec() };
        let link = t.make(Ino::ROOT, "l", target).await.expect("made");
        assert_eq!((link.size, link.kind), (9, Kind::Symlink));
        let read = t.read(MetaRequest::ReadLink { ino: link.ino }).await;
        assert_eq!(read, MetaReply::Link(b"somewhere".to_vec()));
    });
}

#[test]
fn directories_count_their_links() {
    with_client(|_, t| async move {
        let a = t.dir(Ino::ROOT, "a").await;
        let b = t.dir(a, "b").await;
        assert_eq!(t.attr(a).await.expect("there").nlink, 3);
        assert_eq!(t.lookup(b, "..").await.expect("there").ino, a);
        assert_eq!(t.lookup(b, ".").await.expect("there").ino, b);
        assert_eq!(t.lookup(Ino::ROOT, "..").await.expect("there").ino, Ino::ROOT);
        let remove =
            |parent, name: &str| MetaRequest::RemoveDir { caller: ROOT, parent, name: name.into() };
        assert_eq!(t.change(remove(Ino::ROOT, "a")).await, MetaReply::Failed(MetaFault::NotEmpty));
        assert_eq!(t.change(remove(a, "b")).await, removed(b, 0));
        assert_eq!(t.attr(a).await.expect("there").nlink, 2);
        assert_eq!(t.make(b, "c", FILE).await, Err(MetaFault::Stale));
        let before = t.attr(Ino::ROOT).await.expect("there");
        assert_eq!(t.change(remove(Ino::ROOT, "a")).await, removed(a, 0));
        let after = t.attr(Ino::ROOT).await.expect("there");
        assert!(after.change > before.change && after.mtime > before.mtime);
    });
}

/// Sets what the row says of links, past the service, which begins anew.
async fn plant_links(world: &World, t: &Tester, ino: Ino, links: u32) {
    let service = world.service();
    let row = service.store().get(&key::inode(ino)).await.expect("reads").expect("there");
    let mut inode = Inode::decode(&row).expect("sound");
    inode.nlink = links;
    let mut batch = Batch::default();
    batch.put(&key::inode(ino), &inode.encode());
    let seq = service.store().apply(batch).expect("room");
    service.durable(seq).await.expect("durable");
    drop(service);
    world.power_cut().await;
    t.register().await;
}

#[test]
fn a_file_has_a_million_names_and_a_directory_as_many_directories_at_most() {
    with_client(|world, t| async move {
        let root = Ino::ROOT;
        let file = t.file("f").await.ino;
        let dir = t.dir(root, "d").await;
        let elsewhere = t.dir(root, "elsewhere").await;
        t.dir(elsewhere, "moves").await;
        let link = |name: &str| MetaRequest::Link {
            caller: ROOT,
            ino: file,
            parent: root,
            name: name.into(),
        };
        let full = MetaReply::Failed(MetaFault::TooManyLinks);
        for ino in [file, dir] {
            plant_links(&world, &t, ino, LINKS_MAX - 1).await;
        }
        assert_eq!(attr_of(t.change(link("last")).await).expect("linked").nlink, LINKS_MAX);
        assert_eq!(t.change(link("more")).await, full);
        // It moves, though, and over another of its names it goes nowhere.
        assert_eq!(t.rename((root, "last"), (root, "moved"), 0).await, nothing_removed());
        assert_eq!(t.rename((root, "moved"), (root, "f"), 0).await, nothing_removed());
        assert_eq!(t.unlink("moved").await, removed(file, LINKS_MAX - 1));
        attr_of(t.change(link("again")).await).expect("there is room for one");

        t.dir(dir, "last").await;
        assert_eq!(t.make(dir, "more", NewInode::Directory).await, Err(MetaFault::TooManyLinks));
        assert_eq!(t.rename((elsewhere, "moves"), (dir, "more"), 0).await, full);
        t.make(dir, "file", FILE).await.expect("what is no directory has room");
        // One for one.
        let over = t.rename((elsewhere, "moves"), (dir, "last"), 0).await;
        assert!(matches!(over, MetaReply::Removed { nlink: 0, .. }), "{over:?}");
        assert_eq!(t.attr(dir).await.expect("there").nlink, LINKS_MAX);
        for (ino, links) in [(file, 2), (dir, 3)] {
            plant_links(&world, &t, ino, links).await;
        }
    });
}

#[test]
fn rename_follows_its_manual() {
    with_client(|world, t| async move {
        let root = Ino::ROOT;
        let (a, b) = (t.dir(root, "a").await, t.dir(root, "b").await);
        let f = t.make(a, "f", FILE).await.expect("made").ino;
        let g = t.make(b, "g", FILE).await.expect("made").ino;
        let failed = MetaReply::Failed;
        assert_eq!(t.rename((root, "a"), (a, "x"), 0).await, failed(MetaFault::Invalid));
        let deep = t.dir(a, "deep").await;
        assert_eq!(t.rename((root, "a"), (deep, "x"), 0).await, failed(MetaFault::Invalid));
        assert_eq!(t.rename((a, "f"), (b, "g"), 1).await, failed(MetaFault::Exists));
        assert_eq!(t.rename((a, "f"), (root, "b"), 0).await, failed(MetaFault::IsDirectory));
        assert_eq!(t.rename((root, "b"), (a, "f"), 0).await, failed(MetaFault::NotDirectory));
        assert_eq!(t.rename((root, "b"), (root, "a"), 0).await, failed(MetaFault::NotEmpty));
        assert_eq!(t.rename((a, "f"), (b, "none"), 2).await, failed(MetaFault::NotFound));
        assert_eq!(t.rename((a, "f"), (b, "g"), 0).await, removed(g, 0));
        assert_eq!(t.lookup(b, "g").await.expect("there").ino, f);
        assert_eq!(t.rename((b, "g"), (b, "g"), 0).await, nothing_removed());
        // A directory replaces an empty one, and takes its links along.
        assert_eq!(t.rename((a, "deep"), (root, "c"), 0).await, nothing_removed());
        assert_eq!(t.rename((root, "a"), (root, "c"), 0).await, removed(deep, 0));
        assert_eq!(t.attr(root).await.expect("there").nlink, 4);
        assert_eq!(t.rename((root, "c"), (b, "g"), 2).await, nothing_removed());
        assert_eq!(t.lookup(b, "g").await.expect("there").parent, b);
        assert_eq!(t.attr(root).await.expect("there").nlink, 3);
        world.assert_sound().await;
        assert_eq!(t.rename((root, "b"), (a, "x"), 2).await, failed(MetaFault::NotFound));
        assert_eq!(t.rename((b, "g"), (root, "b"), 2).await, failed(MetaFault::Invalid));
    });
}

#[test]
fn an_open_file_outlives_its_name_and_a_crash() {
    with_client(|world, t| async move {
        let kept = t.make(Ino::ROOT, "kept", OPENED).await.expect("made").ino;
        let lost = t.make(Ino::ROOT, "lost", OPENED).await.expect("made").ino;
        let commit = |ino| MetaRequest::CommitWrite {
            ino,
            size: 10,
            mtime: Some(Time(5)),
            components: 1,
            end: true,
            stored: vec![],
        };
        for ino in [kept, lost] {
            attr_of(t.change(MetaRequest::BeginWrite { ino }).await).expect("begun");
            attr_of(t.change(commit(ino)).await).expect("committed");
        }
        assert_eq!(t.unlink("kept").await, removed(kept, 0));
        assert_eq!(t.unlink("lost").await, removed(lost, 0));
        assert_eq!(t.attr(kept).await.expect("open").nlink, 0);
        world.power_cut().await;
        t.register().await;
        // Both still count as open: the client has not said yet.
        assert_eq!(t.attr(lost).await.expect("open").nlink, 0);
        let opens = vec![(kept, 1)];
        assert_eq!(t.read(reclaim(opens)).await, MetaReply::Done);
        reactor::sleep(LEASE / 2).await;
        t.read(MetaRequest::Space).await;
        reactor::sleep(LEASE / 2 + Duration::from_secs(1)).await;
        world.service().tick().await.expect("ticks");
        assert_eq!(t.attr(kept).await.expect("open").size, 10);
        assert_eq!(t.attr(lost).await, Err(MetaFault::Stale));
        assert_eq!(t.chores().await.0, [lost]);
        t.change(MetaRequest::Close { ino: kept }).await;
        assert_eq!(t.chores().await.0, [kept, lost]);
        for ino in [kept, lost] {
            t.change(MetaRequest::Destroyed { ino }).await;
            t.change(MetaRequest::Destroyed { ino }).await;
        }
        assert_eq!(t.chores().await.0, []);
    });
}

#[test]
fn writes_are_dated_by_who_made_them_unless_their_clock_is_wrong() {
    with_client(|world, t| async move {
        let commit = |ino, size, mtime, end| MetaRequest::CommitWrite {
            ino,
            size,
            mtime,
            components: 1,
            end,
            stored: vec![],
        };
        for since in [-100, -2, 3, 100] {
            let name = format!("{since}");
            let ino = t.make(Ino::ROOT, &name, OPENED).await.expect("made").ino;
            let begun = attr_of(t.change(MetaRequest::BeginWrite { ino }).await).expect("begun");
            let mtime = Time(begun.ctime.0 + since * 1_000_000_000);
            let request = commit(ino, 10, Some(mtime), false);
            let written = attr_of(t.change(request).await).expect("committed");
            assert_eq!(written.mtime, mtime);
            assert!(written.change > begun.change);
            match since {
                -2 => assert_eq!(written.ctime, begun.ctime),
                3 => assert_eq!(written.ctime, mtime),
                // By the service's own clock.
                _ => assert!(
                    begun.ctime < written.ctime && written.ctime.0 - begun.ctime.0 < 60_000_000_000
                ),
            }
            // What has no time of its own was dated by a change of the attributes.
            let request = commit(ino, 20, None, true);
            let ended = attr_of(t.change(request).await).expect("committed");
            assert_eq!((ended.mtime, ended.ctime), (written.mtime, written.ctime));
            assert!(ended.change > written.change);
        }
        world.assert_sound().await;
    });
}

#[test]
fn a_repeat_gets_the_stored_answer_also_after_a_crash() {
    with_client(|world, t| async move {
        let request = create(Ino::ROOT, "once", FILE);
        let first = t.change(request.clone()).await;
        let call = t.last_call();
        assert_eq!(world.service().handle(call, request.clone()).await, first);
        let older = CallHeader { sequence: call.sequence - 1, ..call };
        let refused = MetaReply::Failed(MetaFault::Invalid);
        assert_eq!(world.service().handle(older, request.clone()).await, refused);
        let far = CallHeader { slot: 99, ..call };
        assert_eq!(world.service().handle(far, request.clone()).await, refused);
        assert_eq!(t.read(request.clone()).await, refused);
        world.power_cut().await;
        assert_eq!(world.service().handle(call, request.clone()).await, first);
        let stranger = CallHeader { client: 77, ..call };
        let unknown = MetaReply::Failed(MetaFault::NotRegistered);
        assert_eq!(world.service().handle(stranger, request).await, unknown);
        t.register().await;
        t.read(reclaim(Vec::new())).await;
    });
}

#[test]
fn creates_in_one_directory_share_flushes() {
    with_client(|world, t| async move {
        let start = reactor::now();
        let client = t.client.get();
        let tasks: Vec<_> = (0..8)
            .map(|slot| {
                let service = world.service();
                reactor::spawn(async move {
                    for sequence in 1..=10 {
                        let request = create(Ino::ROOT, &format!("{slot}.{sequence}"), FILE);
                        let call = CallHeader::changing(client, slot, sequence);
                        attr_of(service.handle(call, request).await).expect("made");
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await;
        }
        let together = start.elapsed();
        let start = reactor::now();
        t.sequence.set(10);
        for n in 0..10 {
            t.file(&format!("alone{n}")).await;
        }
        let alone = start.elapsed();
        // One after the other they would take eight times as long.
        assert!(together < alone * 4, "{together:?} for 80, {alone:?} for 10");
        assert_eq!(t.attr(Ino::ROOT).await.expect("there").size, 90);
    });
}

#[test]
fn a_listing_meets_every_lasting_entry_once() {
    simulated(5, async {
        let world = World::new(fs_config(), serve_config(), 64 * levada_base::units::MIB).await;
        let t = Rc::new(Tester::new(&world, 1).await);
        let client = t.client.get();
        // Even ones last, odd ones come and go while the listing runs.
        let tasks: Vec<_> = (0..8)
            .map(|slot| {
                let service = world.service();
                reactor::spawn(async move {
                    for n in 0..250 {
                        let request = create(Ino::ROOT, &format!("{}", n * 8 + slot), FILE);
                        let sequence = u64::from(n + 1);
                        let call = CallHeader::changing(client, slot, sequence);
                        attr_of(service.handle(call, request).await).expect("made");
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await;
        }
        let churn = {
            let t = Tester {
                world: Rc::clone(&world),
                client: Cell::new(client),
                uuid: t.uuid,
                sequence: Cell::new(1000),
            };
            reactor::spawn(async move {
                for n in 0..1000 {
                    let name = format!("{}", n * 2 + 1);
                    match n % 3 {
                        0 => {
                            t.unlink(&name).await;
                        }
                        1 => {
                            t.rename((Ino::ROOT, &name), (Ino::ROOT, &format!("new{n}")), 0).await;
                        }
                        // The new one takes the place of one that lasts.
                        _ => {
                            let other = format!("{}", n * 2);
                            t.rename((Ino::ROOT, &name), (Ino::ROOT, &other), 0).await;
                        }
                    }
                }
            })
        };
        let (mut seen, mut cookie) = (BTreeMap::new(), 0);
        loop {
            let (ino, entries_max, attrs) = (Ino::ROOT, 17, false);
            let reply = t.read(MetaRequest::ReadDir { ino, cookie, entries_max, attrs }).await;
            let MetaReply::Entries { entries, end } = reply else { panic!("{reply:?}") };
            for entry in entries {
                assert!(entry.cookie > cookie);
                cookie = entry.cookie;
                *seen.entry(String::from_utf8(entry.name).expect("text")).or_insert(0) += 1;
            }
            if end {
                break;
            }
            reactor::sleep(Duration::from_micros(500)).await;
        }
        for n in (0..2000).step_by(2) {
            assert_eq!(seen.get(&n.to_string()), Some(&1), "{n}");
        }
        churn.await;
        world.assert_sound().await;
        world.stop();
    });
}

#[test]
fn a_file_made_for_writing_has_its_session_at_once() {
    with_client(|world, t| async move {
        let made = t.make(Ino::ROOT, "f", OPENED).await.expect("made");
        // The maker knows that nothing is written yet.
        assert!(!made.writers && !made.others);
        let seen = t.attr(made.ino).await.expect("there");
        assert!(seen.writers && !seen.others);
        let other = Tester::new(&world, 2).await;
        let seen = other.attr(made.ino).await.expect("there");
        assert!(seen.writers && seen.others);
    });
}

#[test]
fn a_cut_counts_until_the_objects_follow() {
    with_client(|_, t| async move {
        let ino = t.file("f").await.ino;
        t.open(ino, true, false).await.expect("opened");
        let size = |size| MetaRequest::SetAttr {
            caller: ROOT,
            ino,
            change: AttrChange { size: Some(size), ..AttrChange::default() },
        };
        // Nothing was written: no object to cut.
        assert_eq!(attr_of(t.change(size(100)).await).expect("set").size, 100);
        assert!(attr_of(t.change(MetaRequest::BeginWrite { ino }).await).expect("begun").writers);
        let commit = |size, end| MetaRequest::CommitWrite {
            ino,
            size,
            mtime: Some(Time(9)),
            components: 3,
            end,
            stored: vec![],
        };
        let attr = attr_of(t.change(commit(5000, false)).await).expect("committed");
        assert_eq!((attr.size, attr.writers, attr.components), (5000, true, 3));
        let attr = attr_of(t.change(size(10)).await).expect("cut");
        assert_eq!((attr.size, attr.writers), (10, false));
        // A late commit of what was before does not bring the bytes back.
        let attr = attr_of(t.change(commit(5000, false)).await).expect("committed");
        assert_eq!((attr.size, attr.writers), (10, false));
        let unavailable = MetaReply::Failed(MetaFault::Unavailable);
        assert_eq!(t.change(size(20)).await, unavailable);
        assert_eq!(
            t.change(MetaRequest::Truncated { ino, size: 10, stored: vec![] }).await,
            MetaReply::Done
        );
        assert!(t.attr(ino).await.expect("there").writers);
        let attr = attr_of(t.change(commit(10, true)).await).expect("committed");
        assert_eq!((attr.size, attr.writers), (10, false));
    });
}

#[test]
fn chores_are_listed_in_parts_that_leave_none_out() {
    with_client(|world, t| async move {
        let other = Tester::new(&world, 2).await;
        let mut wanted = (Vec::new(), Vec::new());
        for n in 0..30 {
            let name = format!("{n}");
            let ino = t.make(Ino::ROOT, &name, OPENED).await.expect("made").ino;
            for writer in [&t, &other] {
                attr_of(writer.change(MetaRequest::BeginWrite { ino }).await).expect("begun");
            }
            // Three in a row to be destroyed, then three to be settled.
            if n / 3 % 2 == 0 {
                t.unlink(&name).await;
                wanted.0.push(ino);
            } else {
                wanted.1.push(ino);
            }
        }
        for client in [&t, &other] {
            assert_eq!(client.read(MetaRequest::Leave).await, MetaReply::Done);
        }
        world.service().tick().await.expect("ticks");
        for limit in 1..40 {
            let (mut found, mut after) = ((vec![], vec![]), Some(Ino(0)));
            while let Some(from) = after {
                let (destroy, settle, upto) = t.some_chores(limit, from).await;
                assert!(destroy.len().max(settle.len()) <= limit as usize);
                assert!(upto.is_none_or(|upto| upto > from), "goes on");
                found.0.extend(destroy);
                found.1.extend(settle);
                after = upto;
            }
            assert_eq!(found, wanted, "limit {limit}");
        }
    });
}

#[test]
fn a_silent_client_leaves_chores() {
    with_client(|world, t| async move {
        let other = Tester::new(&world, 2).await;
        let old = other.client.get();
        let ino = t.file("f").await.ino;
        other.open(ino, true, false).await.expect("opened");
        attr_of(other.change(MetaRequest::BeginWrite { ino }).await).expect("begun");
        let gone = other.make(Ino::ROOT, "gone", OPENED).await.expect("made").ino;
        attr_of(other.change(MetaRequest::BeginWrite { ino: gone }).await).expect("begun");
        other.unlink("gone").await;
        for _ in 0..2 {
            assert_eq!(t.chores().await, (vec![], vec![]));
            reactor::sleep(LEASE / 2).await;
            t.read(MetaRequest::Space).await;
            world.service().tick().await.expect("ticks");
        }
        let unknown = MetaReply::Failed(MetaFault::NotRegistered);
        assert_eq!(other.change(MetaRequest::BeginWrite { ino }).await, unknown);
        assert_eq!(t.chores().await, (vec![gone], vec![ino]));
        let attr = t.attr(ino).await.expect("there");
        assert!(attr.writers);
        // What was found out before the file changed does not count.
        let unavailable = MetaReply::Failed(MetaFault::Unavailable);
        for (change, size, answer) in
            [(attr.change - 1, 999, unavailable), (attr.change, 777, MetaReply::Done)]
        {
            let settled = MetaRequest::Settled { ino, size, components: 2, change, stored: vec![] };
            assert_eq!(t.change(settled).await, answer);
        }
        assert_eq!(t.change(MetaRequest::Destroyed { ino: gone }).await, MetaReply::Done);
        let attr = t.attr(ino).await.expect("there");
        assert_eq!((attr.size, attr.writers, attr.components), (777, false, 2));
        assert_eq!(t.chores().await, (vec![], vec![]));
        other.register().await;
        assert_ne!(other.client.get(), old);
    });
}

/// The objects show what all have written.
#[test]
fn a_time_that_a_writer_has_set_outlives_the_end_of_another() {
    with_client(|world, t| async move {
        for is_alone in [false, true] {
            let other = Tester::new(&world, 2).await;
            let ino = t.file(if is_alone { "alone" } else { "shared" }).await.ino;
            let writers = if is_alone { &[&other][..] } else { &[&t, &other] };
            for writer in writers {
                attr_of(writer.change(MetaRequest::BeginWrite { ino }).await).expect("begun");
            }
            let set = Time(1_000_000_007);
            let change = AttrChange { mtime: Some(SetTime::To(set)), ..AttrChange::default() };
            let set_attr = MetaRequest::SetAttr { caller: ROOT, ino, change };
            let attr = attr_of(t.change(set_attr).await).expect("set");
            assert_eq!(other.read(MetaRequest::Leave).await, MetaReply::Done);
            let (size, components, change) = (777, 1, attr.change);
            let settled = MetaRequest::Settled { ino, size, components, change, stored: vec![] };
            assert_eq!(t.change(settled).await, MetaReply::Done);
            let attr = t.attr(ino).await.expect("there");
            assert_eq!((attr.size, attr.mtime == set, attr.writers), (777, !is_alone, !is_alone));
        }
    });
}

#[test]
fn a_client_that_leaves_is_not_waited_for() {
    simulated(1, async {
        let world = World::small().await;
        let t = Tester::new(&world, 1).await;
        // The holder of the tail, from its first change on, with an open file that has no name.
        let call = |sequence| CallHeader {
            unstable: true,
            ..CallHeader::changing(t.client.get(), 0, sequence)
        };
        let new = NewInode::File { open: Some(OpenMode { write: true, truncate: false }) };
        let service = world.service();
        for (sequence, name) in (1..).zip(["a", "b", "c"]) {
            let reply = service.handle(call(sequence), create(Ino::ROOT, name, new.clone())).await;
            assert!(matches!(reply, MetaReply::Entry(..)), "{reply:?}");
        }
        let (caller, parent, name) = (ROOT, Ino::ROOT, b"c".to_vec());
        service.handle(call(4), MetaRequest::Unlink { caller, parent, name }).await;
        let told = service.store().last_seq();
        assert!(service.store().durable_seq() < told, "told early");
        assert_eq!(t.read(MetaRequest::Leave).await, MetaReply::Done);
        assert!(service.store().durable_seq() > told);
        assert_eq!(service.clients(), []);
        let gone = MetaReply::Failed(MetaFault::NotRegistered);
        assert_eq!(t.read(MetaRequest::Leave).await, gone);
        drop(service);
        world.power_cut().await;
        assert!(!world.service().is_recovering());
        t.register().await;
        t.lookup(Ino::ROOT, "b").await.expect("durable");
        world.assert_sound().await;
        world.stop();
    });
}

/// What is still noted in the store is still known, so that another attempt removes it: else the next start
/// would wait for a client that is gone.
#[test]
fn a_tail_is_known_until_its_row_is_gone() {
    simulated(1, async {
        let world = World::small().await;
        let t = Tester::new(&world, 1).await;
        let call = CallHeader { unstable: true, ..CallHeader::changing(t.client.get(), 0, 1) };
        let service = world.service();
        let new = NewInode::File { open: None };
        let reply = service.handle(call, create(Ino::ROOT, "a", new)).await;
        assert!(matches!(reply, MetaReply::Entry(..)), "{reply:?}");
        // Full to the last row, beyond what is kept for those who make room.
        let filler = |number: u32| [b"zz".as_slice(), &number.to_be_bytes()].concat();
        let mut fillers = 0;
        for bytes in [3000, 100, 0] {
            loop {
                let mut batch = Batch::default();
                batch.put(&filler(fillers), &vec![0; bytes]);
                match service.store().apply(batch) {
                    Ok(seq) => service.durable(seq).await.expect("durable"),
                    Err(_) => break,
                }
                fillers += 1;
            }
        }
        assert_eq!(service.settle_tail(), Err(MetaFault::Full));
        assert!(service.tail.borrow().row().is_some());
        for number in 0..fillers {
            let mut batch = Batch::default();
            batch.delete(&filler(number));
            service.store().apply(batch).expect("always has room");
        }
        service.close_tail().await.expect("there is room");
        assert!(service.tail.borrow().row().is_none());
        drop(service);
        world.power_cut().await;
        assert!(!world.service().is_recovering());
        world.stop();
    });
}

/// An answer that rests on older batches overtakes the one to the holder's first change, whose batch, with
/// the tail's row, is not durable yet. A life that does not find the row takes nothing back, so nothing may
/// come with it.
#[test]
fn nothing_is_carried_before_the_row_is_durable() {
    simulated(1, async {
        let world = World::small().await;
        let t = Tester::new(&world, 1).await;
        let old = t.file("old").await;
        let service = world.service();
        let (client, life) = (t.client.get(), service.verifier());
        let early = |call| CallHeader { unstable: true, ..call };
        let carried = |service: &MetaService| {
            let durable = service.store().durable_seq();
            let frame = service.tail.borrow_mut().frame_for(client, ConnectionId(1), durable);
            let frame = frame.unwrap_or_else(|_| panic!("there is one connection"));
            let Some(frame) = frame else { return vec![] };
            let Ok(ToClient::Tail(tail)) = decode_body(&frame) else { panic!("no tail") };
            tail.batches
        };
        let made = |reply| assert!(matches!(reply, MetaReply::Entry(..)), "{reply:?}");
        let (first, serving) = (early(CallHeader::changing(client, 0, 2)), Rc::clone(&service));
        let request = create(Ino::ROOT, "first", FILE);
        let answer = reactor::spawn(async move { serving.handle(first, request).await });
        while service.store().last_seq() == service.store().durable_seq() {
            reactor::yield_now().await;
        }
        let read = early(CallHeader::reading(client));
        let reply = service.handle(read, MetaRequest::GetAttr { ino: old.ino }).await;
        assert_eq!(attr_of(reply).expect("there").ino, old.ino);
        assert!(service.store().durable_seq() < service.store().last_seq(), "not overtaken");
        assert_eq!(carried(&service), []);
        made(answer.await.expect("alive"));

        // From then on it is told early, and given all that is not durable.
        let second = early(CallHeader::changing(client, 0, 3));
        made(service.handle(second, create(Ino::ROOT, "second", FILE)).await);
        let batches = carried(&service);
        assert_eq!(batches.first().map(|(seq, _)| *seq), Some(service.store().last_seq()));
        drop(service);
        world.power_cut().await;
        assert!(world.service().is_recovering());
        let replay = MetaRequest::Replay { life, batches };
        assert_eq!(t.read(replay).await, MetaReply::Done);
        for name in ["old", "first", "second"] {
            t.lookup(Ino::ROOT, name).await.expect("told, so there");
        }
        world.assert_sound().await;
        world.stop();
    });
}

#[test]
fn a_full_file_system_still_deletes() {
    simulated(1, async {
        let fs = FsConfig { inodes_max: 4, ..fs_config() };
        let world = World::new(fs, serve_config(), 16 * levada_base::units::MIB).await;
        let t = Tester::new(&world, 1).await;
        for n in 0..3 {
            t.file(&format!("{n}")).await;
        }
        assert_eq!(t.make(Ino::ROOT, "more", FILE).await, Err(MetaFault::Full));
        let space = MetaReply::Space { inodes: 4, inodes_free: 0 };
        assert_eq!(t.read(MetaRequest::Space).await, space);
        t.unlink("0").await;
        t.make(Ino::ROOT, "more", FILE).await.expect("room again");
        world.assert_sound().await;
        world.stop();
    });
}

#[test]
fn ownership_decides_and_set_id_bits_go() {
    with_client(|_, t| async move {
        let ino = t.file("f").await.ino;
        let set =
            |uid, change| MetaRequest::SetAttr { caller: Caller { uid, gid: 0 }, ino, change };
        let mode = |mode| AttrChange { mode: Some(mode), ..AttrChange::default() };
        let owner = |uid| AttrChange { uid: Some(uid), ..AttrChange::default() };
        let denied = MetaReply::Failed(MetaFault::NotPermitted);
        assert_eq!(t.change(set(5, mode(0o777))).await, denied);
        assert_eq!(t.change(set(5, owner(5))).await, denied);
        attr_of(t.change(set(0, mode(0o6755))).await).expect("set");
        let attr = attr_of(t.change(set(0, owner(5))).await).expect("given away");
        assert_eq!((attr.mode & 0o7777, attr.uid), (0o755, 5));
        attr_of(t.change(set(5, mode(0o4755))).await).expect("its owner");
        let attr = attr_of(t.change(MetaRequest::BeginWrite { ino }).await).expect("begun");
        assert_eq!(attr.mode & 0o7777, 0o755);
    });
}

/// Makes `files` files in the root, eight at a time; how many there was room for.
async fn fill(world: &Rc<World>, client: u64, files: u64) -> Vec<String> {
    let tasks: Vec<_> = (0..8)
        .map(|slot| {
            let service = world.service();
            reactor::spawn(async move {
                let mut made = Vec::new();
                for sequence in 1..=files / 8 {
                    let name = format!("{slot}.{sequence}");
                    let call = CallHeader::changing(client, slot, sequence);
                    match service.handle(call, create(Ino::ROOT, &name, FILE)).await {
                        MetaReply::Entry(..) => made.push(name),
                        MetaReply::Failed(MetaFault::Full) => break,
                        reply => panic!("{reply:?}"),
                    }
                }
                made
            })
        })
        .collect();
    let mut made = Vec::new();
    for task in tasks {
        made.extend(task.await.expect("alive"));
    }
    made
}

#[test]
fn a_hundred_thousand_entries_are_listed_once() {
    simulated(1, async {
        let config = ServeConfig { cache_bytes: 1 << 20, ..serve_config() };
        let world = World::new(fs_config(), config, 512 * levada_base::units::MIB).await;
        let t = Tester::new(&world, 1).await;
        let mut made = fill(&world, t.client.get(), 100_000).await;
        let (mut found, mut cookie) = (Vec::new(), 0);
        loop {
            let (ino, entries_max, attrs) = (Ino::ROOT, 1024, false);
            let reply = t.read(MetaRequest::ReadDir { ino, cookie, entries_max, attrs }).await;
            let MetaReply::Entries { entries, end } = reply else { panic!("{reply:?}") };
            cookie = entries.last().map_or(cookie, |entry| entry.cookie);
            let names = entries.into_iter().map(|entry| entry.name);
            found.extend(names.map(|name| String::from_utf8(name).expect("text")));
            if end {
                break;
            }
        }
        made.sort();
        found.sort();
        assert_eq!((made.len(), made == found), (100_000, true));
        world.stop();
    });
}

#[test]
fn a_full_store_still_deletes() {
    simulated(1, async {
        let bytes = 4 * levada_base::units::MIB;
        let world = World::new(fs_config(), serve_config(), bytes).await;
        let t = Tester::new(&world, 1).await;
        let made = fill(&world, t.client.get(), 100_000).await;
        assert!((100..100_000).contains(&made.len()), "{} files", made.len());
        world.assert_sound().await;
        t.sequence.set(1_000_000);
        for name in &made {
            match t.unlink(name).await {
                MetaReply::Removed { .. } => {}
                reply => panic!("{name}: {reply:?}"),
            }
        }
        assert_eq!(t.attr(Ino::ROOT).await.expect("there").size, 0);
        t.file("room again").await;
        world.assert_sound().await;
        world.stop();
    });
}

#[test]
fn a_full_store_lets_known_clients_come_back() {
    simulated(1, async {
        let bytes = 4 * levada_base::units::MIB;
        let world = World::new(fs_config(), serve_config(), bytes).await;
        let t = Tester::new(&world, 1).await;
        fill(&world, t.client.get(), 100_000).await;
        world.power_cut().await;
        t.register().await;
        world.stop();
    });
}

/// What is still to be destroyed counts as free, and who needs it waits; but not for a target that is away.
#[test]
fn inodes_of_deleted_files_are_free_at_once_and_waited_for() {
    simulated(1, async {
        let fs = FsConfig { inodes_max: 3, ..fs_config() };
        let world = World::new(fs, serve_config(), 16 * levada_base::units::MIB).await;
        let t = Tester::new(&world, 1).await;
        for name in ["0", "1"] {
            let ino = t.file(name).await.ino;
            t.change(MetaRequest::BeginWrite { ino }).await;
            let (size, mtime, components, end) = (9, None, 1, true);
            let stored = vec![(0, 70), (1, 7)];
            let commit = MetaRequest::CommitWrite { ino, size, mtime, components, end, stored };
            attr_of(t.change(commit).await).expect("there");
        }
        assert_eq!(t.make(Ino::ROOT, "more", FILE).await, Err(MetaFault::Full));
        t.unlink("0").await;
        let space = |reply| match reply {
            MetaReply::SpaceNow { inodes_free, doomed_bytes, deleting_bytes, .. } => {
                (inodes_free, doomed_bytes, deleting_bytes)
            }
            reply => panic!("{reply:?}"),
        };
        assert_eq!(space(t.read(MetaRequest::SpaceNow).await), (1, 77, 0));
        assert_eq!(t.make(Ino::ROOT, "more", FILE).await, Err(MetaFault::Unavailable));
        let (destroy, _) = t.chores().await;
        assert_eq!(space(t.read(MetaRequest::SpaceNow).await), (1, 0, 77));
        levada_base::reactor::sleep(std::time::Duration::from_secs(6)).await;
        assert_eq!(t.make(Ino::ROOT, "more", FILE).await, Err(MetaFault::Full));
        t.change(MetaRequest::Destroyed { ino: destroy[0] }).await;
        assert_eq!(space(t.read(MetaRequest::SpaceNow).await), (1, 0, 0));
        t.make(Ino::ROOT, "more", FILE).await.expect("room again");
        world.assert_sound().await;
        world.stop();
    });
}
