//! Files that several clients write: what each takes for granted of them, and appends of all.

use crate::world::{ROOT_DIR, WRITE, World, below, create, data, flat};
use futures_util::future::join_all;
use levada_base::reactor::{self, Reactor};
use levada_client::{Client, File, housekeeper};
use levada_wire::meta::OpenMode;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

const READ: OpenMode = OpenMode { write: false, truncate: false };
/// Who takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(200);

async fn open(client: &Client, name: &str, mode: OpenMode) -> File {
    let found = client.lookup(ROOT_DIR, name.as_bytes()).await.expect("there");
    client.open(found.ino, mode).await.expect("there").0
}

/// A line that nobody else writes, of this length or a little more.
fn line(client: usize, number: u64, length: u64) -> Vec<u8> {
    let text = format!("{client} {number} ");
    let filling = "x".repeat(length as usize);
    format!("{text}{filling} {client} {number}\n").into_bytes()
}

/// Every line is whole, and each client's are there in its order.
fn check(content: &[u8], clients: usize, each: u64) {
    let mut next: BTreeMap<usize, u64> = BTreeMap::new();
    let text = std::str::from_utf8(content).expect("text");
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        assert_eq!(words.len(), 5, "a line is torn: {line:?}");
        assert_eq!((words[0], words[1]), (words[3], words[4]), "a line is torn");
        let client: usize = words[0].parse().expect("a number");
        let number = next.entry(client).or_default();
        assert_eq!(words[1], number.to_string(), "of {client}");
        *number += 1;
    }
    assert!((0..clients).all(|client| next[&client] == each), "lines are lost: {next:?}");
}

/// With breaks, and restarts of every service, which lose what is not durable there.
#[test]
fn appends_of_all_clients_lie_behind_each_other() {
    for seed in 0..12 {
        Reactor::simulated(seed).block_on(async {
            const EACH: u64 = 40;
            let world = World::new(3).await;
            let clients =
                [world.leasing("a").await, world.leasing("b").await, world.leasing("c").await];
            create(&clients[0], "log").await.close().await;
            world.network.break_one_in(300);
            let mischief = {
                let world = Rc::clone(&world);
                reactor::spawn(async move {
                    loop {
                        reactor::sleep(Duration::from_millis(200 + below(1500))).await;
                        if below(2) == 0 {
                            world.restart_meta().await;
                        } else {
                            world.restart_server(below(3) as u32);
                        }
                    }
                })
            };
            let appending = clients.iter().cloned().enumerate().map(|(number, client)| {
                reactor::spawn(async move {
                    let mut file = open(&client, "log", WRITE).await;
                    for count in 0..EACH {
                        let line = line(number, count, below(300));
                        file.append(data(&line)).await.expect("appended");
                        if below(10) == 0 {
                            // Alone for a while, perhaps, and taking it for granted.
                            reactor::sleep(Duration::from_millis(below(3000))).await;
                        }
                        if below(15) == 0 {
                            file.close().await;
                            file = open(&client, "log", WRITE).await;
                        }
                        if below(20) == 0 {
                            file.fsync().await.expect("durable");
                        }
                    }
                    file.close().await;
                })
            });
            let appended = reactor::timeout(PATIENCE, join_all(appending)).await;
            appended.expect("it ends").into_iter().for_each(|one| one.expect("not killed"));
            mischief.abort();
            for client in &clients {
                let file = open(client, "log", READ).await;
                let content = flat(&file.read(0, 1 << 20).await.expect("read"));
                check(&content, clients.len(), EACH);
                file.close().await;
            }
        });
    }
}

#[test]
fn whoever_has_a_file_open_is_told_before_another_writes() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let [a, b] = [world.leasing("a").await, world.leasing("b").await];
        // Sees to the ends of sessions that were beside each other.
        reactor::spawn(housekeeper::keep_house(world.client("house").await));
        create(&a, "file").await.close().await;
        a.shutdown().await.expect("durable");
        let a = world.leasing("a again").await;
        let (mine, reader) = (open(&a, "file", WRITE).await, open(&b, "file", READ).await);
        mine.write(0, data(b"one")).await.expect("written");
        assert!(reader.is_shared() && !mine.is_shared());
        // Once is enough; and who opens it now knows from the start.
        mine.write(0, data(b"two")).await.expect("written");
        let second = open(&b, "file", WRITE).await;
        assert!(second.is_shared());
        second.write(0, data(b"three")).await.expect("written");
        assert!(mine.is_shared());
        second.close().await;
        reader.close().await;
        b.sync().await.expect("durable");
        mine.close().await;
        reactor::sleep(Duration::from_secs(5)).await;
        // Nobody writes any more: all is forgotten.
        let (mine, reader) = (open(&a, "file", WRITE).await, open(&b, "file", READ).await);
        assert!(!mine.is_shared() && !reader.is_shared());
        // Another size is a change, too, and so is what comes after a restart of the service.
        let change = levada_wire::meta::AttrChange { size: Some(2), ..Default::default() };
        a.set_attr(crate::world::ROOT, mine.ino(), change).await.expect("cut");
        assert!(reader.is_shared());
        world.restart_meta().await;
        let fresh = open(&b, "file", READ).await;
        mine.write(0, data(b"four")).await.expect("written");
        assert!(fresh.is_shared());
    });
}
