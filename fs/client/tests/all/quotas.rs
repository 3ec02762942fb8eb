//! Limits on bytes, as those who write meet them: early, and never beyond.

use crate::world::{ROOT_DIR, World, below, data};
use futures_util::future::join_all;
use levada_base::reactor::{self, Reactor};
use levada_client::{Client, Error, File, housekeeper};
use levada_meta::{Limit, Limits, Subject, SubjectKind};
use levada_wire::meta::{Caller, MetaFault, OpenMode};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const ANN: Caller = Caller { uid: 7, gid: 70 };
const SUBJECT: Subject = Subject { kind: SubjectKind::User, id: 7 };
const QUOTA: Error = Error::Meta(MetaFault::Quota);

async fn limit(world: &World, hard: u64) {
    let limits = Limits { bytes: Limit { soft: 0, hard }, ..Default::default() };
    world.meta_service().set_limits(SUBJECT, limits).await.expect("set");
}

fn used(world: &World) -> u64 {
    world.meta_service().account(SUBJECT).usage.bytes
}

async fn create(client: &Client, name: &str) -> File {
    let mode = OpenMode { write: true, truncate: false };
    let made = client.create_file(ANN, ROOT_DIR, name.as_bytes(), 0o644, mode, true);
    made.await.expect("made").0
}

async fn write(file: &File, at: u64, bytes: u64) -> Result<(), Error> {
    file.write(at, data(&vec![7; bytes as usize])).await
}

#[test]
fn a_write_beyond_the_limit_is_refused_and_a_sync_is_not() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(2).await;
        let client = world.client("client").await;
        limit(&world, 8 * MIB).await;
        assert_eq!(QUOTA.errno(), libc::EDQUOT);
        let file = create(&client, "file").await;
        let mut at = 0;
        let refused = loop {
            match write(&file, at, 100_000).await {
                Ok(()) => at += 100_000,
                Err(error) => break error,
            }
        };
        assert_eq!((refused, at), (QUOTA, 8 * MIB / 100_000 * 100_000));
        file.fsync().await.expect("all of it was granted");
        assert_eq!(used(&world), at);
        // In the place of what is there it may write, behind it what is left, and into a hole nothing.
        write(&file, 50_000, MIB).await.expect("takes no more room");
        write(&file, at, 8 * MIB - at).await.expect("to the byte");
        assert_eq!(write(&file, 20 * MIB, 1).await, Err(QUOTA));
        file.fsync().await.expect("synced");
        assert_eq!(used(&world), 8 * MIB);
        file.punch(0, MIB).await.expect("gives room");
        write(&file, 20 * MIB, MIB / 2).await.expect("there is room");
        crate::world::cut(&client, &file, 0).await;
        write(&file, 0, 8 * MIB).await.expect("there is room");
        file.close().await;
        client.sync().await.expect("synced");
        assert_eq!(used(&world), 8 * MIB);
        // Others have no limit.
        let other = crate::world::create(&client, "root's").await;
        write(&other, 0, 20 * MIB).await.expect("root may");
    });
}

#[test]
fn eight_clients_race_to_one_limit() {
    for seed in 0..10 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(2).await;
            let hard = 4 * MIB + below(MIB);
            limit(&world, hard).await;
            let writers = (0..8).map(|n| {
                let world = &world;
                async move {
                    let client = world.client(&format!("client-{n}")).await;
                    let file = create(&client, &format!("{n}")).await;
                    let mut at = 0;
                    while at < 3 * MIB {
                        let bytes = 1 + below(200_000);
                        match write(&file, at, bytes).await {
                            Ok(()) => at += bytes,
                            Err(error) => {
                                assert_eq!(error, QUOTA);
                                break;
                            }
                        }
                        if below(10) == 0 {
                            file.fsync().await.expect("never beyond");
                        }
                    }
                    file.fsync().await.expect("never beyond");
                    file.close().await;
                    client.sync().await.expect("never beyond");
                    at
                }
            });
            let written: u64 = join_all(writers).await.into_iter().sum();
            reactor::sleep(Duration::from_secs(2)).await;
            housekeeper::do_chores(&world.client("housekeeper").await).await.expect("done");
            assert_eq!(used(&world), written, "seed {seed}");
            assert!(written <= hard && written + 8 * 200_000 > hard, "{written} of {hard}");
        });
    }
}

/// What one file was granted and does not need is there for another.
#[test]
fn what_is_not_used_comes_back() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let client = world.client("client").await;
        limit(&world, 8 * MIB).await;
        let idle = create(&client, "idle").await;
        write(&idle, 0, MIB).await.expect("there is room");
        write(&idle, MIB, 10).await.expect("there is room");
        let busy = create(&client, "busy").await;
        write(&busy, 0, 7 * MIB - 10).await.expect("after a while");
        assert_eq!(write(&idle, MIB + 10, 1).await, Err(QUOTA));
    });
}

/// A limit holds for those who have a file open already from their next session on.
#[test]
fn a_limit_that_is_set_later_holds_soon() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let client = world.client("client").await;
        let file = create(&client, "file").await;
        write(&file, 0, 2 * MIB).await.expect("no limit");
        file.fsync().await.expect("synced");
        limit(&world, MIB).await;
        let next = create(&client, "next").await;
        assert_eq!(write(&next, 0, 1).await, Err(QUOTA));
        write(&file, 0, MIB).await.expect("takes no more room");
        assert_eq!(write(&file, 2 * MIB, 1).await, Err(QUOTA));
    });
}

/// What was granted before a restart of the service is not granted again.
#[test]
fn a_restart_forgets_no_grant() {
    for seed in 0..10 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(1).await;
            let hard = 16 * MIB;
            limit(&world, hard).await;
            let (one, other) = (world.client("one").await, world.client("other").await);
            let mine = create(&one, "mine").await;
            write(&mine, 0, 100_000).await.expect("there is room");
            mine.fsync().await.expect("synced");
            // Of what it was granted with that it goes on to write, while the other one takes all it can get.
            let mut at = 100_000;
            world.kill_meta();
            reactor::sleep(Duration::from_millis(below(500))).await;
            world.start_meta().await;
            let theirs = create(&other, "theirs").await;
            let mut taken = 0;
            while write(&theirs, taken, 200_000).await.is_ok() {
                taken += 200_000;
                if below(4) == 0 && write(&mine, at, 50_000).await.is_ok() {
                    at += 50_000;
                }
            }
            while write(&mine, at, 50_000).await.is_ok() {
                at += 50_000;
            }
            mine.fsync().await.expect("it was granted");
            theirs.fsync().await.expect("it was granted");
            assert_eq!(used(&world), taken + at, "seed {seed}");
            assert!(taken + at <= hard, "seed {seed}: {} of {hard}", taken + at);
            assert!(taken + at > hard - 500_000, "seed {seed}: {} of {hard}", taken + at);
        });
    }
}

#[test]
fn a_directory_has_what_its_tenant_has() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(2).await;
        let client = world.client("client").await;
        let all = client.space().await.expect("answers");
        let file = crate::world::create(&client, "file").await;
        let ino = client.lookup(ROOT_DIR, b"file").await.expect("there").ino;
        assert_eq!(client.space_of(ino).await.expect("answers"), all_but_an_inode(all));
        let tenant = Subject { kind: SubjectKind::Tenant, id: 5 };
        let meta = world.meta_service();
        let set = async |bytes, inodes| {
            let (bytes, inodes) = (Limit { soft: 0, hard: bytes }, Limit { soft: 0, hard: inodes });
            let limits = Limits { bytes, inodes, ..Default::default() };
            meta.set_limits(tenant, limits).await.expect("set");
        };
        meta.set_owner(ino, None, Some(5)).await.expect("given");
        set(4 * MIB, 3).await;
        write(&file, 0, MIB).await.expect("fits");
        file.close().await;
        let space = client.space_of(ino).await.expect("answers");
        assert_eq!((space.total_bytes, space.free_bytes), (4 * MIB, 3 * MIB));
        assert_eq!((space.inodes, space.inodes_free), (3, 2));
        // More than there is.
        set(all.total_bytes * 2, all.inodes * 2).await;
        let whole = client.space().await.expect("answers");
        assert_eq!(client.space_of(ino).await.expect("answers"), whole);
        assert!(whole.free_bytes <= all.free_bytes - MIB);
        // Whoever has a file open may ask through it when it has no name any more.
        let mode = OpenMode { write: false, truncate: false };
        let (open, _) = client.open(ino, mode).await.expect("open");
        client.unlink(Caller { uid: 0, gid: 0 }, ROOT_DIR, b"file").await.expect("unlinked");
        client.space_of(ino).await.expect("answers");
        open.close().await;
        client.sync().await.expect("synced");
        client.space_of(ino).await.expect("of the whole");
    });
}

fn all_but_an_inode(space: levada_client::Space) -> levada_client::Space {
    levada_client::Space { inodes_free: space.inodes_free - 1, ..space }
}
