//! Leases: what a client trusts without asking is what the service would say, and others wait no longer than that takes.

use crate::world::leases::{is_there, mtime, set_mtime};
use crate::world::{ROOT, ROOT_DIR, World, below, create, data, leases};
use futures_util::future::join_all;
use levada_base::reactor::{self, Reactor};
use levada_client::Client;
use levada_wire::meta::{AttrChange, NewInode};
use std::time::Duration;

#[test]
fn what_is_read_after_an_answered_change_shows_it() {
    for seed in 0..12 {
        leases::what_is_read_is_not_old(seed, 15);
    }
}

#[test]
fn a_term_counts_from_the_question() {
    leases::a_term_counts_from_the_question();
}

#[test]
fn nothing_is_granted_while_a_change_waits() {
    leases::nothing_is_granted_while_it_closes();
}

/// Alone, with breaks and restarts: what it trusts is what another client is told.
#[test]
fn what_is_trusted_is_what_the_service_would_say() {
    for seed in 0..8 {
        Reactor::simulated(seed).block_on(async {
            let world = World::new(1).await;
            world.network.break_one_in(200);
            let (client, other) = (world.leasing("client").await, world.client("other").await);
            let new = NewInode::Directory;
            let dir = client.create(ROOT, ROOT_DIR, b"dir", 0o755, new).await.expect("made").ino;
            let mut known = 0;
            for round in 0..300 {
                if below(100) == 0 {
                    world.restart_meta().await;
                }
                // Mostly one at a time, as a program makes files.
                let count = if below(4) == 0 { 1 + below(3) } else { 1 };
                let changes = (0..count).map(|number| {
                    let (client, name) = (client.clone(), format!("{round}.{number}"));
                    let old = format!("{}.0", round - below(round.min(9) + 1));
                    let from = if below(3) == 0 { dir } else { ROOT_DIR };
                    async move {
                        let (name, old) = (name.as_bytes(), old.as_bytes());
                        match below(9) {
                            0 => drop(client.unlink(ROOT, from, old).await),
                            1 => drop(client.rename(ROOT, (ROOT_DIR, old), (dir, name), 0).await),
                            2 => {
                                let mode = Some(0o700 + below(8) as u32);
                                let change = AttrChange { mode, ..AttrChange::default() };
                                client.set_attr(ROOT, from, change).await.expect("there");
                            }
                            3 => drop(client.lookup(from, old).await),
                            4 => drop(client.read_dir(from, 0, 100, true).await),
                            5 => {
                                if let Ok(found) = client.lookup(ROOT_DIR, old).await {
                                    drop(client.link(ROOT, found.ino, dir, name).await);
                                }
                            }
                            _ => {
                                create(&client, &String::from_utf8_lossy(name)).await.close().await
                            }
                        }
                    }
                });
                join_all(changes).await;
                for ino in [ROOT_DIR, dir] {
                    known += u32::from(client.knows(ino));
                    let trusted = client.attr(ino).await.expect("there");
                    assert_eq!(trusted, other.attr(ino).await.expect("there"), "seed {seed}");
                }
                let name = format!("{}.0", round - below(round.min(9) + 1));
                for ino in [ROOT_DIR, dir] {
                    let find = async |client: &Client| {
                        let found = client.lookup(ino, name.as_bytes()).await;
                        found.map(|attr| (attr.ino, attr.mode, attr.nlink, attr.change))
                    };
                    let trusted = find(&client).await;
                    // What it wrote and closed may be told meanwhile, which counts as a change.
                    let asked = find(&other).await;
                    let less =
                        |found: Result<(_, _, _, u64), _>| found.map(|(a, b, c, _)| (a, b, c));
                    assert_eq!(less(trusted), less(asked), "seed {seed}: {name}");
                }
            }
            assert!(known > 200, "seed {seed}: known {known} times");
        });
    }
}

/// Who is alone asks once in a while, and nobody is told anything.
#[test]
fn a_lone_client_answers_itself() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let client = world.leasing("client").await;
        let file = create(&client, "file").await;
        let ino = file.ino();
        file.close().await;
        // What the close told is over.
        reactor::sleep(Duration::from_secs(12)).await;
        client.on_notice(std::rc::Rc::new(|notice| panic!("{notice:?}")));
        assert!(!is_there(&client, "absent").await);
        mtime(&client, ino).await;
        // It is cut off, so that what it is asked it answers itself.
        world.network.partition("client", "meta");
        let looks = async {
            for _ in 0..80 {
                assert!(!is_there(&client, "absent").await);
                mtime(&client, ino).await;
                reactor::sleep(Duration::from_millis(100)).await;
            }
        };
        reactor::timeout(Duration::from_millis(8500), looks).await.expect("without asking");
        reactor::sleep(Duration::from_secs(3)).await;
        let asked = reactor::timeout(Duration::from_secs(1), mtime(&client, ino)).await;
        assert!(asked.is_err(), "the term is over");
        world.network.heal("client", "meta");
        for n in 0..50 {
            create(&client, &format!("n{n}")).await.close().await;
            set_mtime(&client, ino, n).await;
            client.unlink(ROOT, ROOT_DIR, format!("n{n}").as_bytes()).await.expect("there");
        }
        client.shutdown().await.expect("settled");
    });
}

/// A kernel asks for a directory after each change of its names, and programs for a file that they have just written and
/// closed: both came with the answer to the change.
#[test]
fn a_change_tells_what_is_asked_next() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let client = world.leasing("client").await;
        let made = |name: &'static [u8]| {
            let client = client.clone();
            async move {
                client.create(ROOT, ROOT_DIR, name, 0o755, NewInode::Directory).await.expect("made")
            }
        };
        let (dir, other) = (made(b"dir").await.ino, made(b"other").await.ino);
        let file = create(&client, "file").await;
        let ino = file.ino();
        file.write(0, data(b"written")).await.expect("written");
        file.close().await;
        reactor::sleep(Duration::from_secs(1)).await;
        assert!(client.knows(ino), "after the close");
        assert_eq!(client.lookup(ROOT_DIR, b"file").await.expect("there").size, 7);

        client.link(ROOT, ino, dir, b"link").await.expect("made");
        assert!(client.knows(dir) && client.knows(ino), "after the link");
        assert!(client.lookup(other, b"moved").await.is_err(), "as a kernel looks before a rename");
        client.rename(ROOT, (dir, b"link"), (other, b"moved"), 0).await.expect("there");
        assert!(client.knows(other), "after the rename");
        client.unlink(ROOT, other, b"moved").await.expect("there");
        assert!(client.knows(other), "after the unlink");
        client.remove_dir(ROOT, ROOT_DIR, b"dir").await.expect("empty");
        assert!(client.knows(ROOT_DIR), "after the end of a directory");
        let trusted = client.attr(ROOT_DIR).await.expect("there");
        assert_eq!(trusted, world.client("asks").await.attr(ROOT_DIR).await.expect("there"));
    });
}

/// Who holds a lease and goes with its machine costs the others its term; who leaves costs nothing.
#[test]
fn a_change_waits_no_longer_than_a_term() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let (a, b) = (world.leasing("a").await, world.leasing("b").await);
        let file = create(&a, "file").await;
        let ino = file.ino();
        file.close().await;
        reactor::sleep(Duration::from_secs(2)).await;
        let timed = async |mtime| {
            let began = reactor::now();
            set_mtime(&a, ino, mtime).await;
            began.elapsed()
        };
        mtime(&b, ino).await;
        assert!(timed(1).await < Duration::from_millis(50), "it answers");
        mtime(&b, ino).await;
        world.network.partition("b", "meta");
        let waited = timed(2).await;
        assert!(waited > Duration::from_secs(9) && waited < Duration::from_secs(12), "{waited:?}");
        assert!(timed(3).await < Duration::from_millis(50), "its term is over");
        world.network.heal("b", "meta");
        assert_eq!(mtime(&b, ino).await, 3);
        b.shutdown().await.expect("settled");
        drop(b);
        assert!(timed(4).await < Duration::from_millis(50), "it has left");
        world.restart_meta().await;
        assert!(timed(5).await < Duration::from_millis(900), "it is alone, and waits for nobody");
    });
}

/// After a restart who may still trust something is waited for.
#[test]
fn after_a_restart_a_change_waits_for_those_who_may_not_know() {
    Reactor::simulated(1).block_on(async {
        let world = World::new(1).await;
        let (a, b) = (world.leasing("a").await, world.leasing("b").await);
        let file = create(&a, "file").await;
        let ino = file.ino();
        set_mtime(&a, ino, 1).await;
        file.close().await;
        reactor::sleep(Duration::from_secs(2)).await;
        assert_eq!(mtime(&b, ino).await, 1);
        world.network.partition("b", "meta");
        world.restart_meta().await;
        let began = reactor::now();
        let setting = reactor::spawn({
            let a = a.clone();
            async move { set_mtime(&a, ino, 2).await }
        });
        reactor::sleep(Duration::from_secs(8)).await;
        assert_eq!(mtime(&b, ino).await, 1, "what it trusts is so");
        setting.await.expect("not killed");
        let waited = began.elapsed();
        assert!(waited > Duration::from_secs(9) && waited < Duration::from_secs(13), "{waited:?}");
        world.network.heal("b", "meta");
        assert_eq!(mtime(&b, ino).await, 2);
    });
}
