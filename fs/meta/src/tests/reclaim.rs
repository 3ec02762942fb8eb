//! After a restart: what clients say that they hold open, and what is counted of it.

use super::*;
use levada_wire::meta::RECLAIM_MAX;
use levada_wire::rpc::ConnectionId;
use std::collections::BTreeMap;
use std::mem::discriminant;

const OPENED: NewInode = NewInode::File { open: Some(OpenMode { write: false, truncate: false }) };

/// A file that is open and has no name any more.
async fn orphan(t: &Tester, name: &str) -> Ino {
    let ino = t.make(Ino::ROOT, name, OPENED).await.expect("made").ino;
    assert_eq!(t.unlink(name).await, MetaReply::Removed { ino: Some(ino), nlink: 0 });
    ino
}

impl World {
    fn open_files(&self) -> u64 {
        self.service().clients().iter().map(|client| client.open_files).sum()
    }

    async fn ask(&self, t: &Tester, connection: u64, request: MetaRequest) -> MetaReply {
        let connection = ConnectionId(connection);
        let call = CallHeader { connection, ..CallHeader::reading(t.client.get()) };
        self.service().handle(call, request).await
    }
}

#[test]
fn all_parts_together_say_what_is_open() {
    simulated(1, async {
        let world = World::small().await;
        let t = Tester::new(&world, 1).await;
        let (first, last, closed) =
            (orphan(&t, "first").await, orphan(&t, "last").await, orphan(&t, "closed").await);
        world.power_cut().await;
        let many: Vec<_> = (0..300_000).map(|n| (Ino(1_000_000 + n), 1)).collect();
        let opens = [&[(first, 1)][..], &many, &[(last, 1)]].concat();
        let parts: Vec<_> = opens.chunks(RECLAIM_MAX).collect();
        assert!(parts.len() > 4);
        let part = |n: usize| {
            let (opens, last) = (parts[n].to_vec(), n == parts.len() - 1);
            MetaRequest::Reclaim { opens, locks: Vec::new(), last }
        };
        let register = || MetaRequest::Register { uuid: t.uuid };
        // The connection ends half-way.
        world.ask(&t, 1, register()).await;
        for n in 0..2 {
            assert_eq!(world.ask(&t, 1, part(n)).await, MetaReply::Done);
        }
        world.ask(&t, 2, register()).await;
        // Neither a part that comes late counts, nor one that says it is the last.
        let unavailable = MetaReply::Failed(MetaFault::Unavailable);
        assert_eq!(world.ask(&t, 1, part(2)).await, unavailable);
        assert_eq!(world.ask(&t, 1, reclaim(Vec::new())).await, unavailable);
        // It takes its time, beyond what is waited for those who do not come.
        for n in 0..parts.len() {
            reactor::sleep(LEASE / 4).await;
            world.service().tick().await.expect("ticks");
            for ino in [first, last, closed] {
                assert_eq!(t.attr(ino).await.expect("held").nlink, 0);
            }
            assert_eq!(world.open_files(), 0);
            assert_eq!(world.ask(&t, 2, part(n)).await, MetaReply::Done);
        }
        assert_eq!(world.open_files(), 300_002);
        // Of its parts, none is left that could come again.
        assert_eq!(world.ask(&t, 2, part(parts.len() - 1)).await, unavailable);
        world.service().tick().await.expect("ticks");
        for ino in [first, last] {
            assert_eq!(t.attr(ino).await.expect("held").nlink, 0);
        }
        assert_eq!(t.attr(closed).await, Err(MetaFault::Stale));
        world.stop();
    });
}

#[test]
fn a_client_that_does_not_say_all_is_not_waited_for_for_ever() {
    simulated(1, async {
        let world = World::small().await;
        let t = Tester::new(&world, 1).await;
        let ino = orphan(&t, "file").await;
        world.power_cut().await;
        t.register().await;
        for n in 0..10 {
            let part = MetaRequest::Reclaim {
                opens: vec![(Ino(1000 + n), 1)],
                locks: Vec::new(),
                last: false,
            };
            assert_eq!(t.read(part).await, MetaReply::Done);
            reactor::sleep(LEASE / 4).await;
            world.service().tick().await.expect("ticks");
        }
        assert_eq!(t.attr(ino).await, Err(MetaFault::Stale));
        world.stop();
    });
}

#[test]
fn nobody_holds_more_files_than_there_can_be() {
    simulated(1, async {
        let fs = FsConfig { inodes_max: 100, ..fs_config() };
        let world = World::new(fs, serve_config(), 16 * MIB).await;
        let t = Tester::new(&world, 1).await;
        let part = |from, last| MetaRequest::Reclaim {
            opens: (from..from + 60).map(|n| (Ino(n), u32::MAX)).collect(),
            locks: Vec::new(),
            last,
        };
        assert_eq!(t.read(part(2, false)).await, MetaReply::Done);
        assert_eq!(t.read(part(62, true)).await, MetaReply::Failed(MetaFault::Invalid));
        assert_eq!(world.open_files(), 0);
        t.register().await;
        // However often it says that it has it open: it can open it again.
        let ino = t.file("file").await.ino;
        assert_eq!(t.read(reclaim(vec![(ino, u32::MAX); 3])).await, MetaReply::Done);
        t.open(ino, false, false).await.expect("opens");
        world.stop();
    });
}

/// The client had not heard that it opened or closed, so it reclaims as if it had not.
#[test]
fn what_was_not_answered_before_a_restart_is_counted_once() {
    let mode = |truncate| OpenMode { write: true, truncate };
    simulated(1, async {
        let world = World::small().await;
        let t = Tester::new(&world, 1).await;
        let ino = t.file("old").await.ino;
        t.open(ino, false, false).await.expect("opens");
        let commit = MetaRequest::CommitWrite {
            ino,
            size: 10,
            mtime: None,
            components: 1,
            end: true,
            stored: vec![],
        };
        let close = || MetaRequest::Close { ino };
        let new = NewInode::File { open: Some(mode(false)) };
        let unnamed = MetaRequest::CreateUnnamed {
            caller: ROOT,
            parent: Ino::ROOT,
            mode: 0o644.into(),
            open: mode(false),
            may_link: true,
        };
        // Of the first and the last nothing was written down, so they are done once more.
        let requests = [
            (MetaRequest::Open { ino, mode: mode(false) }, 1),
            (MetaRequest::Open { ino, mode: mode(true) }, 1),
            (create(Ino::ROOT, "new", new), 1),
            (unnamed, 1),
            (MetaRequest::Several { requests: vec![commit, close()] }, -1),
            (close(), -1),
        ];
        let (mut held, mut opened) = (BTreeMap::from([(ino, 2_u32)]), 1);
        t.open(ino, false, false).await.expect("opens");
        for (request, change) in requests {
            let reply = t.change(request.clone()).await;
            world.power_cut().await;
            t.register().await;
            let opens = held.iter().map(|(ino, count)| (*ino, *count)).collect();
            assert_eq!(t.read(reclaim(opens)).await, MetaReply::Done);
            for _ in 0..2 {
                // The second time as over a fresh connection.
                let again = world.service().handle(t.last_call(), request.clone()).await;
                assert!(discriminant(&again) == discriminant(&reply), "{request:?}: {again:?}");
            }
            let ino = match &reply {
                MetaReply::Entry(attr, _) => {
                    opened += 1;
                    attr.ino
                }
                _ => ino,
            };
            let count = held.entry(ino).or_default();
            *count = count.checked_add_signed(change).expect("open");
            assert_eq!(world.open_files(), opened);
            let service = world.service();
            let table = service.table.borrow();
            for (ino, count) in &held {
                assert_eq!(table.opens_of(t.client.get(), *ino), *count, "{request:?}");
                assert_eq!(table.opens(*ino), u64::from(*count), "{request:?}");
            }
        }
        world.stop();
    });
}
