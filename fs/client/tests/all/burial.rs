//! Clients that are said to be dead, over a network: those that are end at once, the others as with their lease.

use crate::world::{ROOT, ROOT_DIR, UNIT, WRITE, World, create, data, flat};
use levada_base::ids::Ino;
use levada_base::reactor::{self, Group, Reactor};
use levada_client::{Client, Error, File, housekeeper};
use levada_wire::lock::{Lock, LockOwner, LockRange, LockSort};
use levada_wire::meta::MetaFault;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(5);
const REFUSED: Error = Error::Meta(MetaFault::NotPermitted);
const HELD: Error = Error::Meta(MetaFault::LockHeld);

fn flock() -> Lock {
    let owner = LockOwner { sort: LockSort::Flock, id: 1 };
    Lock { owner, range: LockRange::WHOLE, exclusive: true, pid: 1 }
}

async fn bury(world: &World, uuid: [u8; 16]) -> Result<(), Error> {
    levada_client::bury(&world.config("undertaker"), uuid).await
}

async fn open(client: &Client, ino: Ino) -> File {
    client.open(ino, WRITE).await.expect("there").0
}

/// A client that has locked a file, has written to it and synced, and runs in the group: its uuid and the file.
async fn holder(world: &Rc<World>, group: &Group) -> ([u8; 16], Ino) {
    let config = world.config("dying");
    let uuid = config.uuid;
    let found = Rc::new(Cell::new(None));
    let told = Rc::clone(&found);
    reactor::spawn_in(group, async move {
        let client = Client::connect(config).await.expect("connects");
        let file = create(&client, "file").await;
        file.lock(flock(), None).await.expect("free");
        file.write(0, data(&vec![1; 2 * UNIT as usize])).await.expect("written");
        file.fsync().await.expect("durable");
        // Its session stays.
        file.write(0, data(b"late")).await.expect("written");
        told.set(Some(file.ino()));
        std::future::pending::<()>().await;
    });
    // By then its tail is durable: a start waits for nothing but its locks.
    reactor::sleep(SOON).await;
    (uuid, found.get().expect("locked by now"))
}

#[test]
fn locks_of_a_dead_client_are_free_with_its_burial() {
    for restarts in [false, true] {
        Reactor::simulated(1).block_on(async {
            let world = World::new(2).await;
            let (heir, group) = (world.client("heir").await, Group::new());
            let (uuid, ino) = holder(&world, &group).await;
            let file = open(&heir, ino).await;
            assert_eq!(file.lock(flock(), None).await.map(drop), Err(HELD));
            if restarts {
                world.kill_meta();
            }
            group.kill();
            // As the kernel does for a dead process.
            world.network.disconnect("dying", "meta");
            if restarts {
                world.start_meta().await;
            }
            let died = reactor::now();
            bury(&world, uuid).await.expect("dead");
            file.lock(flock(), None).await.expect("free");
            assert!(died.elapsed() < SOON, "{:?}", died.elapsed());
            // What it wrote is settled like that of any client that ended.
            housekeeper::do_chores(&world.client("housekeeper").await).await.expect("chores");
            let attr = file.attr().await.expect("there");
            assert_eq!((attr.size, attr.others), (2 * UNIT, false));
            assert_eq!(flat(&file.read(UNIT, 1).await.expect("read")), [1]);
            bury(&world, uuid).await.expect("done before");
        });
    }
}

#[test]
fn a_client_with_a_connection_is_not_buried() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(2).await;
        let (heir, group) = (world.client("heir").await, Group::new());
        let (uuid, ino) = holder(&world, &group).await;
        let file = open(&heir, ino).await;
        assert_eq!(bury(&world, uuid).await, Err(REFUSED));
        // Its connection breaks and it is back at once, as it holds a lock; or the service restarts.
        world.network.disconnect("dying", "meta");
        assert_eq!(bury(&world, uuid).await, Err(REFUSED));
        world.restart_meta().await;
        assert_eq!(bury(&world, uuid).await, Err(REFUSED));
        assert_eq!(file.lock(flock(), None).await.map(drop), Err(HELD));
    });
}

/// Whoever says so errs: it is only cut off.
#[test]
fn who_is_buried_alive_has_lost_its_lease() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(2).await;
        let config = world.config("alive");
        let (uuid, heir) = (config.uuid, world.client("heir").await);
        let alive = Client::connect(config).await.expect("connects");
        let file = create(&alive, "file").await;
        file.lock(flock(), None).await.expect("free");
        file.write(0, data(b"mine")).await.expect("written");
        file.fsync().await.expect("durable");
        let other = open(&alive, file.ino()).await;
        let orphan = create(&alive, "orphan").await;
        alive.unlink(ROOT, ROOT_DIR, b"orphan").await.expect("there");
        alive.sync().await.expect("durable");
        world.network.partition("alive", "meta");
        world.network.disconnect("alive", "meta");
        let theirs = open(&heir, file.ino()).await;
        bury(&world, uuid).await.expect("no connection");
        theirs.lock(flock(), None).await.expect("free");
        theirs.write(0, data(b"next")).await.expect("written");
        world.network.heal("alive", "meta");
        reactor::sleep(SOON).await;
        for outcome in [file.read(0, 4).await.map(drop), file.write(0, data(b"late")).await] {
            assert_eq!(outcome, Err(Error::LockLost));
        }
        assert_eq!(flat(&other.read(0, 4).await.expect("another open")), b"next");
        assert_eq!(orphan.attr().await.map(drop), Err(Error::Meta(MetaFault::Stale)));
        file.close().await;
        let file = open(&alive, theirs.ino()).await;
        assert_eq!(file.lock(flock(), None).await.map(drop), Err(HELD));
        // Under its new number it is another client.
        assert_eq!(bury(&world, uuid).await, Err(REFUSED));
    });
}
