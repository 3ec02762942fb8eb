//! What cleaning may never do: lose or bring back anything, also where the power fails meanwhile and the
//! index is made anew later; or leave so much behind that a log with little in it is full.

use crate::support::model::{Model, below, check_all, config, contents, object, payload, put};
use crate::support::{World, bytes, churn_deletions, seeds};
use levada_base::ids::Seq;
use levada_base::reactor::{self, Group, Reactor};
use levada_base::units::KIB;
use levada_log::{Config, LogError, ObjectLog, Stability, StagedRows};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

/// Short-lived objects without end, beside objects that live on and whose size a truncation or a
/// hole carries.
#[test]
fn an_old_truncation_keeps_no_deletions_alive() {
    Reactor::simulated(1).block_on(async {
        let mut world = World::new(96).await;
        let (node, parts) = (Group::new(), world.next_life());
        let made = reactor::spawn_in(&node, async move { parts.open(true).await });
        let log = made.await.expect("the node lives");
        log.truncate(object(0), 12_345, Stability::Durable).await.expect("room");
        log.write(object(1 << 40), 0, bytes(3, 9000), Stability::Unstable).await.expect("room");
        log.punch(object(1 << 40), 5000, 4000, false, Stability::Durable).await.expect("punched");
        churn_deletions(&log).await;
        let space = log.space();
        assert!(space.free_bytes > space.total_bytes / 4, "{space:?}");
        // The cleaner may be under way.
        node.kill();
        drop(log);
        let log = world.rebuild().await;
        assert_eq!(log.stat(object(0)).await.expect("it is there").size, 12_345);
        assert_eq!(log.stat(object(1 << 40)).await.expect("it is there").size, 9000);
        assert_eq!(log.stat(object(33)).await, Err(LogError::NoSuchObject));
    });
}

/// Lives that end before the index knows any stripe of theirs, but has staged changes: none of
/// them costs a segment, nor space.
#[test]
fn crashes_between_staged_changes_cost_nothing() {
    for seed in seeds(4) {
        Reactor::simulated(seed).block_on(async {
            let mut world = World::new(96).await;
            let mut free_bytes = Vec::new();
            for life in 0..60 {
                let node = Group::new();
                let parts = world.next_life();
                let worked = reactor::spawn_in(&node, async move {
                    let log = parts.open(life == 0).await;
                    if life == 0 {
                        for n in 0..20 {
                            let id = object(n);
                            log.truncate(id, 10, Stability::Durable).await.expect("room");
                        }
                    }
                    // Long enough to make a segment ready.
                    reactor::sleep(Duration::from_micros(1 + below(3000))).await;
                    log.space().free_bytes
                });
                free_bytes.push(worked.await.expect("the node lives"));
                node.kill();
                world.cut_power().await;
                let segments = world.array.written().div_ceil(4);
                assert!(segments <= 2, "seed {seed}: {segments} after {life}");
            }
            let first = free_bytes[0];
            assert!(free_bytes.iter().all(|free| free + 4096 > first), "{free_bytes:?}");
        });
    }
}

/// Writes that must and that need not lie on whole blocks, in turns, until the log is full.
#[test]
fn small_and_aligned_writes_in_turns_fill_the_log() {
    Reactor::simulated(1).block_on(async {
        let mut world = World::new(128).await;
        let log = world.next_life().open(true).await;
        let total = log.space().total_bytes;
        let mut written = 0;
        for n in 0.. {
            let page = log.write(object(1), n * 4096, bytes(n as u8, 4096), Stability::Unstable);
            match page.await {
                Ok(_) => written += 4096,
                Err(LogError::Full) => break,
                Err(error) => panic!("{error}"),
            }
            let small = log.write(object(2), n * 100, bytes(n as u8, 100), Stability::Unstable);
            match small.await {
                Ok(_) => written += 100,
                Err(LogError::Full) => break,
                Err(error) => panic!("{error}"),
            }
        }
        assert!(written > total * 8 / 10, "{written} of {total}, {:?}", log.counters());
    });
}

/// Objects that come and go, are cut, grow and get holes, beside data that stays; the log is so
/// small that all of it is cleaned again and again.
async fn churn(log: ObjectLog, model: Rc<RefCell<Model>>, task: u64) {
    loop {
        let id = object(task * 1000 + below(12));
        let now = model.borrow_mut().of(id).now.clone();
        let stability = if below(20) == 0 { Stability::Durable } else { Stability::Unstable };
        let ack = match below(10) {
            0..=3 => {
                let (offset, (data, flat)) = (below(20_000), payload(1 + below(9000)));
                let next = put(&now, offset, &flat);
                model.borrow_mut().of(id).next = Some(next);
                log.write(id, offset, data, stability).await
            }
            4 | 5 => {
                let size = below(30_000);
                let mut next = now.unwrap_or_default();
                next.resize(size as usize, 0);
                model.borrow_mut().of(id).next = Some(Some(next));
                log.truncate(id, size, stability).await
            }
            6 if now.is_some() => {
                let mut next = now.expect("it exists");
                let (offset, len) = (below(20_000), below(20_000));
                let to = (offset + len).min(next.len() as u64) as usize;
                let from = (offset as usize).min(to);
                next[from..to].fill(0);
                model.borrow_mut().of(id).next = Some(Some(next));
                log.punch(id, offset, len, false, stability).await
            }
            7 | 8 => {
                model.borrow_mut().of(id).next = Some(None);
                log.delete(id).await
            }
            _ => {
                if below(4) == 0 {
                    let durable = log.commit(log.seq()).await.expect("committed");
                    model.borrow_mut().durable(durable.0);
                }
                continue;
            }
        };
        let mut model = model.borrow_mut();
        match ack {
            Err(LogError::Full) => {
                model.of(id).next = None;
                model.refused += 1;
            }
            ack => {
                let ack = ack.unwrap_or_else(|error| panic!("{id:?}: {error}"));
                model.changes += 1;
                model.done(id, ack.seq.0);
                model.durable(ack.durable.0);
            }
        }
    }
}

/// Some lives of a node, with power cuts in between. Then the log is opened and is at rest: an index
/// that is made anew from its segments says the same as the one that it has.
fn cleaned_and_cut(seed: u64) -> (u64, u64, u64) {
    let mut sum = (0, 0, 0);
    Reactor::simulated(seed).block_on(async {
        let mut world = World::new(36 + 4 * (seed % 4)).await;
        let model = Rc::new(RefCell::new(Model::default()));
        for life in 0..6 {
            let node = Group::new();
            let parts = world.next_life();
            let (of_node, seen) = (Rc::clone(&model), Rc::new(RefCell::new(None)));
            let to_see = Rc::clone(&seen);
            reactor::spawn_in(&node, async move {
                let log = parts.open(life == 0).await;
                check_all(&log, &of_node, seed).await;
                for task in 0..3 {
                    reactor::spawn(churn(log.clone(), Rc::clone(&of_node), task));
                }
                *to_see.borrow_mut() = Some(log);
            });
            let least = if life == 0 { 10_000 } else { 500 };
            reactor::sleep(Duration::from_micros(least + below(80_000))).await;
            if let Some(log) = seen.take() {
                sum.0 += log.counters().cleaned_segments;
            }
            node.kill();
            world.cut_power().await;
        }
        let node = Group::new();
        let parts = world.next_life();
        let of_node = Rc::clone(&model);
        let opened = reactor::spawn_in(&node, async move {
            let log = parts.open(false).await;
            check_all(&log, &of_node, seed).await;
            log.settle().await.expect("settled");
            let durable = log.commit(Seq(u64::MAX)).await.expect("committed");
            of_node.borrow_mut().durable(durable.0);
            log.space()
        });
        let space = opened.await.expect("the node lives");
        node.kill();
        let log = world.rebuild().await;
        let ids: Vec<_> = model.borrow().objects.keys().copied().collect();
        for id in ids {
            let found = contents(&log, id).await.expect("readable");
            let expected = model.borrow_mut().of(id).now.clone();
            assert!(
                found == expected,
                "seed {seed}: after a rebuild {id:?} is {:?}, not {:?} bytes",
                found.map(|found| found.len()),
                expected.map(|expected| expected.len())
            );
        }
        let rebuilt = log.space();
        assert_eq!(rebuilt.total_bytes, space.total_bytes);
        let model = model.borrow();
        (sum.1, sum.2) = (model.changes, model.refused);
    });
    sum
}

#[test]
fn what_was_cleaned_and_cut_off_is_rebuilt_exactly() {
    let mut sum = (0, 0, 0);
    for seed in seeds(12) {
        let of_seed = cleaned_and_cut(seed);
        sum = (sum.0 + of_seed.0, sum.1 + of_seed.1, sum.2 + of_seed.2);
    }
    println!("{} segments cleaned, {} changes, {} refused", sum.0, sum.1, sum.2);
    assert!(sum.0 > 0 || std::env::var("SIM_SEED").is_ok());
}

/// A segment that holds nothing but records of deletions is cleaned, and the power fails at any
/// moment of that: the deletions stay true.
#[test]
fn deletions_survive_a_cut_while_they_are_cleaned() {
    for seed in seeds(40) {
        Reactor::simulated(seed).block_on(async {
            let mut world = World::new(40).await;
            let node = Group::new();
            let parts = world.next_life();
            let made = reactor::spawn_in(&node, async move { parts.open(true).await });
            let log = made.await.expect("the node lives");
            let (kept, filler) = (object(1), object(2));
            // A segment of data that stays, and in which a little is dead.
            for stripe in 0..4 {
                log.write(kept, stripe * 52_000, bytes(1, 52_000), Stability::Unstable)
                    .await
                    .expect("room");
                for n in 0..30 {
                    let id = object(100 + stripe * 30 + n);
                    log.write(id, 0, bytes(2, 100), Stability::Unstable).await.expect("room");
                }
                log.settle().await.expect("settled");
            }
            // One of deletions only.
            for stripe in 0..4 {
                let all: Vec<_> = (0..30)
                    .map(|n| {
                        let log = log.clone();
                        reactor::spawn(async move {
                            log.delete(object(100 + stripe * 30 + n)).await.expect("deleted");
                        })
                    })
                    .collect();
                for one in all {
                    one.await.expect("deleted");
                }
                log.settle().await.expect("settled");
            }
            let of_node = log.clone();
            reactor::spawn_in(&node, async move {
                loop {
                    for at in 0..12 {
                        of_node
                            .write(filler, at * 50_000, bytes(3, 50_000), Stability::Durable)
                            .await
                            .expect("room");
                        // Then the cleaner works alone.
                        reactor::sleep(Duration::from_millis(5)).await;
                    }
                }
            });
            // Reads wake everybody who waits.
            let of_node = log.clone();
            reactor::spawn_in(&node, async move {
                loop {
                    of_node.read(kept, 0, 9000).await.expect("read");
                    reactor::sleep(Duration::from_micros(10)).await;
                }
            });
            let cleaned = 1 + below(2);
            let mut waited = 0;
            while log.counters().cleaned_segments < cleaned && waited < 20_000 {
                reactor::sleep(Duration::from_micros(5)).await;
                waited += 1;
            }
            reactor::sleep(Duration::from_micros(below(150))).await;
            drop(log);
            node.kill();
            world.cut_power().await;
            let log = world.next_life().open(false).await;
            log.settle().await.expect("settled");
            drop(log);
            let log = world.rebuild().await;
            for n in 100..220 {
                let stat = log.stat(object(n)).await;
                assert_eq!(stat, Err(LogError::NoSuchObject), "seed {seed}: {n}");
            }
            assert_eq!(log.stat(kept).await.expect("it is there").size, 208_000);
        });
    }
}

/// Settling waits for the index also when every sequence is durable and something wakes it early: a
/// power cut right after it leaves nothing to be done again.
#[test]
fn what_is_settled_is_durable() {
    for seed in seeds(20) {
        Reactor::simulated(seed).block_on(async {
            let mut world = World::new(40).await;
            let node = Group::new();
            let parts = world.next_life();
            let settled = reactor::spawn_in(&node, async move {
                let log = parts.open(true).await;
                log.write(object(1), 0, bytes(1, 50_000), Stability::Unstable).await.expect("room");
                log.settle().await.expect("settled");
                log.write(object(2), 0, bytes(2, 100), Stability::Durable).await.expect("room");
                let readers = log.clone();
                reactor::spawn(async move {
                    loop {
                        readers.read(object(1), 0, 9000).await.expect("read");
                    }
                });
                let rounds = log.counters().commits;
                log.settle().await.expect("settled");
                assert!(log.counters().commits > rounds, "seed {seed}: before its round ended");
            });
            settled.await.expect("the node lives");
            node.kill();
            world.cut_power().await;
            let store = world.next_life().open_store().await;
            let staged = StagedRows::of(&store).await.expect("readable");
            assert_eq!(staged.count(), 0, "seed {seed}: to be put into a stripe again");
        });
    }
}

#[test]
fn a_log_of_many_small_files_stays_usable() {
    // Kept small: the many sizes are what matters.
    for seed in seeds(2) {
        Reactor::simulated(seed).block_on(async {
            let mut world = World::new(64).await;
            let log = world.next_life().open(true).await;
            let total = log.space().total_bytes;
            let mut live: Vec<(u64, u64)> = Vec::new();
            let (mut used, mut next) = (0, 0);
            for _ in 0..6000 {
                if used > total * 7 / 10 || (!live.is_empty() && below(3) == 0) {
                    let (id, size) = live.swap_remove(below(live.len() as u64) as usize);
                    log.delete(object(id)).await.expect("deleted");
                    used -= size;
                    continue;
                }
                let size = 1 + below(if below(4) == 0 { 60 * KIB } else { 3000 });
                let data = bytes(next as u8, size);
                let written = log.write(object(next), 0, data, Stability::Unstable).await;
                written.unwrap_or_else(|error| panic!("seed {seed}: {used} of {total}: {error}"));
                // Some are cut and grown again, as programs do.
                if below(3) == 0 {
                    log.truncate(object(next), 0, Stability::Unstable).await.expect("room");
                    let data = bytes(next as u8, size);
                    log.write(object(next), 0, data, Stability::Unstable).await.expect("room");
                }
                live.push((next, size));
                used += size + 200;
                next += 1;
            }
            for (id, size) in &live {
                assert_eq!(log.stat(object(*id)).await.expect("it is there").size, *size);
            }
        });
    }
}

/// Objects whose size a truncation carries lie in the oldest segments, beside much that is written over and
/// over: nothing is dead where they lie, and moving them must not cost more than they take.
#[test]
fn old_sizes_do_not_fill_the_log() {
    for (part, chunk) in [(2, 4000), (3, 4000), (4, 20_000)] {
        Reactor::simulated(1).block_on(async {
            let mut world = World::with_index(256, 48 << 20).await;
            let config = Config { segment_stripes: 8, ..config() };
            let log = world.next_life().open_with(config, true).await;
            let total = log.space().total_bytes;
            let sized = total / 10 * part / 96;
            for n in 0..sized {
                log.truncate(object(n), 10, Stability::Unstable).await.expect("room");
            }
            let places = (total * 8 / 10 - sized * 96) / (chunk + 200);
            for n in 0..places * 3 {
                let at = if n < places { n } else { below(places) };
                let id = object((1 << 40) + at);
                let written = log.write(id, 0, bytes(1, chunk), Stability::Unstable).await;
                written.unwrap_or_else(|error| {
                    panic!(
                        "{part}, {n} of {places}: {error}, {:?}, {:?}",
                        log.space(),
                        log.counters()
                    )
                });
            }
            assert_eq!(log.stat(object(5)).await.expect("it is there").size, 10);
        });
    }
}
