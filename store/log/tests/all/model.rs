//! Random changes from several tasks, against a model that keeps every object as bytes, with
//! power cuts in between.

use crate::support::model::{Model, TASKS, below, check_all, flat, object, payload, work};
use crate::support::{World, seeds};
use levada_base::ids::Seq;
use levada_base::planted;
use levada_base::reactor::{self, Group, Reactor};
use levada_log::{Counters, ObjectLog, Stability};
use std::cell::RefCell;
use std::panic::catch_unwind;
use std::rc::Rc;
use std::time::Duration;

/// Adds up what the logs of all lives did, so that a test can say that it tested something.
fn add(sum: &mut Counters, of: &Counters) {
    sum.commits += of.commits;
    sum.staged_bytes += of.staged_bytes;
    sum.stripes += of.stripes;
    sum.cleaned_segments += of.cleaned_segments;
    sum.freed_segments += of.freed_segments;
    sum.damaged_blocks += of.damaged_blocks;
}

/// Four lives of a node with power cuts in between; what its logs did.
fn lives(seed: u64) -> Counters {
    let mut sum = Counters::default();
    Reactor::simulated(seed).block_on(async {
        let mut world = World::new(96).await;
        let model = Rc::new(RefCell::new(Model::default()));
        for life in 0..4 {
            let node = Group::new();
            let parts = world.next_life();
            let model = Rc::clone(&model);
            let lives: Rc<RefCell<Option<ObjectLog>>> = Rc::default();
            let alive = Rc::clone(&lives);
            reactor::spawn_in(&node, async move {
                let log = parts.open(life == 0).await;
                check_all(&log, &model, seed).await;
                for task in 0..TASKS {
                    reactor::spawn(work(log.clone(), Rc::clone(&model), task, 10_000));
                }
                *alive.borrow_mut() = Some(log);
            });
            // The first life must get as far as being a log.
            let least = if life == 0 { 30_000 } else { 1_000 };
            reactor::sleep(Duration::from_micros(least + below(60_000))).await;
            if let Some(log) = lives.take() {
                add(&mut sum, &log.counters());
            }
            node.kill();
            world.cut_power().await;
        }
        let log = world.next_life().open(false).await;
        check_all(&log, &model, seed).await;
        add(&mut sum, &log.counters());
    });
    sum
}

#[test]
fn power_cuts_lose_nothing_that_was_committed() {
    let mut sum = Counters::default();
    for seed in seeds(20) {
        add(&mut sum, &lives(seed));
    }
    println!("{sum:?}");
    assert!(sum.cleaned_segments > 0 && sum.staged_bytes > 0 && sum.freed_segments > 0);
    assert_eq!(sum.damaged_blocks, 0);
}

/// One life without faults; then the index is rebuilt from the segments and says the same.
fn rebuilds(seed: u64) {
    Reactor::simulated(seed).block_on(async {
        let mut world = World::new(96).await;
        let model = Rc::new(RefCell::new(Model::default()));
        let node = Group::new();
        let parts = world.next_life();
        let model_of_node = Rc::clone(&model);
        let run = reactor::spawn_in(&node, async move {
            let log = parts.open(true).await;
            let tasks: Vec<_> = (0..TASKS)
                .map(|task| reactor::spawn(work(log.clone(), Rc::clone(&model_of_node), task, 300)))
                .collect();
            for task in tasks {
                assert!(task.await.is_some());
            }
            log.commit(Seq(u64::MAX)).await.expect("commit");
            check_all(&log, &model_of_node, seed).await;
            log.settle().await.expect("settled");
            log.space()
        });
        let space = run.await.expect("the node lives");
        node.kill();
        let log = world.rebuild().await;
        check_all(&log, &model, seed).await;
        let now = log.space();
        assert_eq!(now.total_bytes, space.total_bytes);
        let report = log.scrub().await.expect("scrubbed");
        assert_eq!((report.repaired_blocks, report.damaged.len()), (0, 0));
        // It goes on from there.
        for task in 0..TASKS {
            work(log.clone(), Rc::clone(&model), task, 50).await;
        }
        check_all(&log, &model, seed).await;
    });
}

#[test]
fn the_index_is_rebuilt_from_segments_alone() {
    seeds(12).for_each(rebuilds);
}

#[test]
fn neighbours_are_one_range_of_data() {
    Reactor::simulated(1).block_on(async {
        let mut world = World::new(96).await;
        let (log, id) = (world.next_life().open(true).await, object(1));
        for (offset, bytes) in [(1000, 5000), (6000, 100), (6100, 30_000), (100_000, 1)] {
            log.write(id, offset, payload(bytes).0, Stability::Unstable).await.expect("room");
        }
        log.punch(id, 2000, 1, false, Stability::Unstable).await.expect("punched");
        let asked = [
            (0, 1, vec![(1000, 2000)], 2001),
            (1999, 9, vec![(1999, 2000), (2001, 36_100), (100_000, 100_001)], u64::MAX),
            (2000, 2, vec![(2001, 36_100), (100_000, 100_001)], u64::MAX),
            (100_001, 1, vec![], u64::MAX),
        ];
        for (offset, ranges_max, ranges, upto) in asked {
            let found = log.data_ranges(id, offset, ranges_max).await.expect("there");
            let found_ranges: Vec<_> =
                found.ranges.iter().map(|range| (range.start, range.end)).collect();
            assert_eq!((found_ranges, found.upto), (ranges, upto), "from {offset} on");
        }
        // Zeroes that nobody stored: the size grows, also of nothing, and nothing is lost.
        let grown = [(id, 100_000, 0, 100_001), (id, 200_000, 0, 200_000), (object(2), 50, 10, 60)];
        for (id, offset, bytes, size) in grown {
            log.punch(id, offset, bytes, true, Stability::Unstable).await.expect("room");
            assert_eq!(log.stat(id).await.expect("there").size, size);
        }
        assert_eq!(log.stat(id).await.expect("there").stored_bytes, 35_100);
    });
}

/// Rot that is read before anything else can notice it.
fn rots(seed: u64) {
    Reactor::simulated(seed).block_on(async {
        let mut world = World::new(96).await;
        let log = world.next_life().open(true).await;
        let (data, bytes) = payload(30_000);
        log.write(object(1), 0, data, Stability::Durable).await.expect("room");
        log.settle().await.expect("settled");
        for block in world.array.filled_blocks().into_iter().step_by(2) {
            world.array.rot_within(block, 1);
        }
        assert!(flat(&log.read(object(1), 0, 30_000).await.expect("read")) == bytes);
    });
}

/// The tests above are worth something: each of these bugs makes one of them fail.
#[test]
fn planted_bugs_are_found() {
    type Scenario = fn(u64);
    let of_lives: Scenario = |seed| {
        lives(seed);
    };
    // With the seed that was the first to find it, where the hunt begins; nothing depends on it but how long that takes.
    let bugs: [(&str, Scenario, u64); 6] = [
        ("log-flush-dropped", of_lives, 0),
        ("log-commit-not-durable", of_lives, 83),
        ("log-staged-row-left-out", of_lives, 1),
        ("log-staged-not-replayed", of_lives, 0),
        ("log-tombstone-dropped", rebuilds, 49),
        ("log-checksum-ignored", rots, 0),
    ];
    for (bug, scenario, first) in bugs {
        planted::choose(Some(bug));
        let mut seeds = (first..600).chain(0..first);
        let found = seeds.find(|seed| catch_unwind(|| scenario(*seed)).is_err());
        planted::choose(None);
        println!("{bug}: seed {found:?}");
        assert!(found.is_some(), "nothing notices {bug}");
    }
    rots(0);
}
