//! Clients that are said to be dead: they end as with their lease, if they are.

use super::*;
use levada_wire::lock::{Lock, LockOwner, LockRange, LockSort};
use levada_wire::meta::{AttrChange, Notice};

const REFUSED: MetaReply = MetaReply::Failed(MetaFault::NotPermitted);

fn lock(ino: Ino, ticket: Option<u64>) -> MetaRequest {
    let owner = LockOwner { sort: LockSort::Posix, id: 1 };
    let lock = Lock { owner, range: LockRange::WHOLE, exclusive: true, pid: 1 };
    MetaRequest::Lock { ino, lock, ticket }
}

/// A client that dies with a lock, a session and an open file without a name; and one that has the first file open.
async fn two(world: &Rc<World>) -> (Tester, Tester, Ino, Ino) {
    let (dead, heir) = (Tester::new(world, 1).await, Tester::new(world, 2).await);
    for t in [&dead, &heir] {
        assert_eq!(t.read(reclaim(Vec::new())).await, MetaReply::Done);
    }
    let ino = dead.file("file").await.ino;
    let new = NewInode::File { open: Some(OpenMode { write: true, truncate: false }) };
    let gone = dead.make(Ino::ROOT, "gone", new).await.expect("made").ino;
    attr_of(dead.change(MetaRequest::BeginWrite { ino: gone }).await).expect("begun");
    dead.unlink("gone").await;
    dead.open(ino, true, false).await.expect("opens");
    heir.open(ino, true, false).await.expect("opens");
    attr_of(dead.change(MetaRequest::BeginWrite { ino }).await).expect("begun");
    assert!(matches!(dead.change(lock(ino, None)).await, MetaReply::Locked(_)));
    (dead, heir, ino, gone)
}

fn bury(dead: &Tester) -> MetaRequest {
    MetaRequest::Bury { uuid: dead.uuid }
}

#[test]
fn a_buried_client_loses_what_its_lease_would_take() {
    simulated(1, async {
        let world = World::small().await;
        let (dead, heir, ino, gone) = two(&world).await;
        assert_eq!(heir.change(lock(ino, Some(7))).await, MetaReply::Waiting);
        let begun = reactor::now();
        assert_eq!(heir.read(bury(&dead)).await, MetaReply::Done);
        assert!(begun.elapsed() < LEASE / 10, "{:?}", begun.elapsed());
        let notices = world.service().table.borrow().locks.notices(heir.client.get());
        assert_eq!(notices, [(1, Notice::Granted { ticket: 7 })]);
        assert_eq!(heir.chores().await, (vec![gone], vec![ino]));
        assert_eq!(heir.attr(gone).await, Err(MetaFault::Stale));
        // Again, and of one that there never was.
        assert_eq!(heir.read(bury(&dead)).await, MetaReply::Done);
        assert_eq!(heir.read(MetaRequest::Bury { uuid: [9; 16] }).await, MetaReply::Done);
        // It lives after all: as after the end of its lease.
        let unknown = MetaReply::Failed(MetaFault::NotRegistered);
        assert_eq!(dead.change(MetaRequest::Close { ino }).await, unknown);
        let number = dead.client.get();
        world.power_cut().await;
        // It was durable with the answer: nobody is waited for.
        assert_eq!(world.service().clients().len(), 1);
        heir.register().await;
        assert_eq!(heir.read(reclaim(vec![(ino, 1)])).await, MetaReply::Done);
        assert!(matches!(heir.change(lock(ino, None)).await, MetaReply::Locked(_)));
        dead.register().await;
        assert_ne!(dead.client.get(), number);
        world.assert_sound().await;
        world.stop();
    });
}

#[test]
fn who_lives_is_not_buried() {
    simulated(1, async {
        let world = World::small().await;
        let (dead, heir, ino, _) = two(&world).await;
        assert_eq!(dead.read(bury(&dead)).await, MetaReply::Failed(MetaFault::Invalid));
        // It is heard of while what it may have sent is waited for, and then registers anew.
        for registers in [false, true] {
            let burying = {
                let (world, call) = (Rc::clone(&world), CallHeader::reading(heir.client.get()));
                let request = bury(&dead);
                reactor::spawn(async move { world.service().handle(call, request).await })
            };
            reactor::sleep(Duration::from_millis(500)).await;
            if registers {
                dead.register().await;
            } else {
                dead.attr(ino).await.expect("there");
            }
            assert_eq!(burying.await.expect("alive"), REFUSED);
        }
        assert_eq!(heir.change(lock(ino, None)).await, MetaReply::Failed(MetaFault::LockHeld));
        world.stop();
    });
}

/// The cuts may be on their way for long: the housekeeper must not settle the file, and others must not write to it.
#[test]
fn who_died_within_a_truncation_is_left_to_the_lease() {
    simulated(1, async {
        let world = World::small().await;
        let (dead, heir, ino, _) = two(&world).await;
        let change = AttrChange { size: Some(0), ..AttrChange::default() };
        let cut = attr_of(dead.change(MetaRequest::SetAttr { caller: ROOT, ino, change }).await);
        assert!(cut.expect("begun").cut);
        assert_eq!(heir.read(bury(&dead)).await, REFUSED);
        let truncated = MetaRequest::Truncated { ino, size: 0, stored: Vec::new() };
        assert_eq!(dead.change(truncated).await, MetaReply::Done);
        assert_eq!(heir.read(bury(&dead)).await, MetaReply::Done);
        world.stop();
    });
}

#[test]
fn a_burial_after_a_restart_ends_the_wait_for_the_dead() {
    simulated(1, async {
        let world = World::small().await;
        let (dead, heir, ino, gone) = two(&world).await;
        world.power_cut().await;
        heir.register().await;
        assert_eq!(heir.read(reclaim(vec![(ino, 1)])).await, MetaReply::Done);
        let unavailable = MetaReply::Failed(MetaFault::Unavailable);
        assert_eq!(heir.change(lock(ino, None)).await, unavailable);
        heir.attr(gone).await.expect("may be open");
        assert_eq!(heir.read(bury(&dead)).await, MetaReply::Done);
        assert!(matches!(heir.change(lock(ino, None)).await, MetaReply::Locked(_)));
        world.stop();
    });
}

/// Directories, of which the client is told before they are durable.
async fn make_early(world: &Rc<World>, t: &Tester, names: [&str; 3]) {
    for (sequence, name) in (1..).zip(names) {
        let call =
            CallHeader { unstable: true, ..CallHeader::changing(t.client.get(), 0, sequence) };
        let making = create(Ino::ROOT, name, NewInode::Directory);
        let made = world.service().handle(call, making).await;
        assert!(matches!(made, MetaReply::Entry(..)), "{made:?}");
    }
}

/// What the dead client was told before it was durable is lost where the target loses power before the burial is
/// answered, and else is durable.
#[test]
fn the_tail_of_a_buried_client_is_not_waited_for() {
    simulated(1, async {
        let world = World::small().await;
        let (dead, heir) = (Tester::new(&world, 1).await, Tester::new(&world, 2).await);
        let service = world.service();
        make_early(&world, &dead, ["a", "b", "c"]).await;
        assert!(service.store().durable_seq() < service.store().last_seq(), "told early");
        assert_eq!(heir.read(bury(&dead)).await, MetaReply::Done);
        drop(service);
        world.power_cut().await;
        assert!(!world.service().is_recovering());
        heir.register().await;
        heir.lookup(Ino::ROOT, "c").await.expect("durable");
        // While its holder is awaited nothing is answered, a burial of others neither.
        let bystander = Tester::new(&world, 3).await;
        let dead = Tester::new(&world, 4).await;
        make_early(&world, &dead, ["d", "e", "f"]).await;
        world.power_cut().await;
        assert!(world.service().is_recovering());
        let begun = reactor::now();
        assert_eq!(heir.read(bury(&bystander)).await, MetaReply::Done);
        assert!(begun.elapsed() >= RECOVERY, "{:?}", begun.elapsed());
        world.stop();
    });
}

/// By somebody who knows no number here: those who know one are not heard before.
#[test]
fn the_holder_of_a_tail_that_is_buried_is_awaited_for_a_moment() {
    simulated(1, async {
        let world = World::small().await;
        let dead = Tester::new(&world, 1).await;
        make_early(&world, &dead, ["a", "b", "c"]).await;
        world.power_cut().await;
        assert!(world.service().is_recovering());
        let begun = reactor::now();
        let asked = world.service().handle(CallHeader::reading(0), bury(&dead)).await;
        assert_eq!(asked, MetaReply::Done);
        let took = begun.elapsed();
        assert!((3..5).contains(&took.as_secs()), "{took:?}");
        assert!(world.service().clients().is_empty(), "and it is forgotten");
        world.assert_sound().await;
        let heir = Tester::new(&world, 2).await;
        heir.dir(Ino::ROOT, "next").await;
        world.stop();
    });
}
