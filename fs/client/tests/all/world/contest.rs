//! Clients that contend for one file's locks while connections break and the service restarts: nobody but the
//! holder is inside, and every wait ends.

use super::{ROOT_DIR, WRITE, World, below, create};
use levada_base::reactor::{self, Reactor};
use levada_client::{Cancel, Client, Error};
use levada_wire::lock::{Lock, LockOwner, LockRange, LockSort};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

const ROUNDS: u64 = 10;
/// A lease, and what follows it: who waits longer waits for ever.
const PATIENCE: Duration = Duration::from_secs(200);

pub fn locks_exclude(seed: u64) {
    Reactor::simulated(seed).block_on(async {
        let world = World::new(1).await;
        let [a, b, c] = [world.client("a").await, world.client("b").await, world.client("c").await];
        create(&a, "contested").await.close().await;
        world.network.break_one_in(40);
        let inside = Rc::new(Cell::new(false));
        let tasks: Vec<_> = [&a, &b, &c]
            .into_iter()
            .map(|client| {
                let (client, inside) = (client.clone(), Rc::clone(&inside));
                reactor::spawn(async move { contend(&client, &inside).await })
            })
            .collect();
        let mischief = {
            let world = Rc::clone(&world);
            reactor::spawn(async move {
                for _ in 0..8 {
                    // Both must come back in one life for the locks to go on.
                    reactor::sleep(Duration::from_millis(below(400))).await;
                    world.restart_meta().await;
                }
            })
        };
        for task in tasks {
            let ended = reactor::timeout(PATIENCE, task).await.expect("no wait lasts for ever");
            ended.expect("not killed");
        }
        mischief.abort();
    });
}

/// The last close releases, so there is one of them on each client.
async fn contend(client: &Client, inside: &Cell<bool>) {
    let ino = client.lookup(ROOT_DIR, b"contested").await.expect("there").ino;
    let open = async || client.open(ino, WRITE).await.expect("there").0;
    let mut file = open().await;
    for _ in 0..ROUNDS {
        let range = LockRange { start: 20 - below(20), end: 20 + below(20) };
        let owner = LockOwner { sort: LockSort::Posix, id: 1 };
        let lock = Lock { owner, range, exclusive: true, pid: 1 };
        let cancel = Cancel::default();
        if below(4) == 0 {
            let (cancel, after) = (cancel.clone(), below(30_000));
            reactor::spawn(async move {
                reactor::sleep(Duration::from_micros(after)).await;
                cancel.cancel();
            });
        }
        match file.lock(lock, Some(cancel)).await {
            Ok(_) => {}
            Err(Error::Interrupted) => continue,
            Err(error) => panic!("{error}"),
        }
        assert!(!inside.replace(true), "two hold it");
        // Sometimes over a restart and everybody's return.
        let longest = if below(4) == 0 { 800_000 } else { 60_000 };
        reactor::sleep(Duration::from_micros(below(longest))).await;
        inside.set(false);
        if below(4) == 0 {
            file.close().await;
            file = open().await;
        } else {
            file.unlock(owner, LockRange::WHOLE).await.expect("held");
        }
    }
    file.close().await;
}
