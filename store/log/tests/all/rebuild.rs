//! The index is lost together with the power: what a COMMIT indexed stays, and of what came after
//! it every object is as it once was.

use crate::support::model::{Model, TASKS, below, check_all, flat, object, payload, put, work};
use crate::support::{World, seeds};
use levada_base::ids::Seq;
use levada_base::reactor::{self, Group, Reactor};
use levada_base::units::BLOCK_BYTES;
use levada_device::BlockError;
use levada_log::{LogError, ObjectLog, Stability};
use levada_raid::Array;
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

const OBJECTS: u64 = 6;

/// Changes that nobody commits, until the power goes.
async fn overwrite(log: ObjectLog, model: Rc<RefCell<Model>>) {
    loop {
        let id = object(below(OBJECTS));
        let (offset, (data, flat)) = (below(30_000), payload(1 + below(30_000)));
        let now = model.borrow_mut().of(id).now.clone();
        model.borrow_mut().of(id).next = Some(put(&now, offset, &flat));
        let ack = log.write(id, offset, data, Stability::Unstable).await.expect("room");
        model.borrow_mut().done(id, ack.seq.0);
    }
}

/// `lives` times: everything is indexed, then stripes are torn by a power cut. The last time the
/// index goes too. Few enough changes that no segment is used twice.
fn torn(seed: u64, lives: u64) {
    Reactor::simulated(seed).block_on(async {
        let mut world = World::new(160).await;
        let model = Rc::new(RefCell::new(Model::default()));
        for life in 0..lives {
            let node = Group::new();
            let (parts, model) = (world.next_life(), Rc::clone(&model));
            let settled = reactor::spawn_in(&node, {
                let model = Rc::clone(&model);
                async move {
                    let log = parts.open(life == 0).await;
                    check_all(&log, &model, seed).await;
                    for task in 0..2 {
                        work(log.clone(), Rc::clone(&model), task, 15).await;
                    }
                    log.settle().await.expect("settled");
                    let durable = log.commit(Seq(u64::MAX)).await.expect("committed");
                    model.borrow_mut().durable(durable.0);
                    log
                }
            });
            let log = settled.await.expect("the node lives");
            reactor::spawn_in(&node, overwrite(log, model));
            reactor::sleep(Duration::from_micros(below(1_500))).await;
            node.kill();
            world.array.cut_power();
        }
        let log = world.rebuild().await;
        check_all(&log, &model, seed).await;
        let report = log.scrub().await.expect("scrubbed");
        assert!(report.damaged.is_empty(), "seed {seed}: {report:?}");
        // It goes on from there.
        for task in 0..TASKS {
            work(log.clone(), Rc::clone(&model), task, 20).await;
        }
        check_all(&log, &model, seed).await;
    });
}

/// The cleaner takes a segment with a deletion first, then one with an older hole of the same
/// object and even older data of another: copies lie as deletion, data, hole. Once it came to
/// clean these, it dropped the deletion, as nothing older lay elsewhere, and then kept the hole,
/// as its own copy of the data was older: a rebuild brought the object back. (Simulator, log seed
/// 1387.)
#[test]
fn a_deletion_is_kept_as_long_as_older_records_behind_it_in_its_segment() {
    Reactor::simulated(1).block_on(async {
        let mut world = World::new(40).await;
        let (node, parts) = (Group::new(), world.next_life());
        let made = reactor::spawn_in(&node, async move { parts.open(true).await });
        let log = made.await.expect("the node lives");
        let [old, gone, filler] = [1, 2, 3].map(object);
        let write = async |id, at, bytes| {
            log.write(id, at, payload(bytes).0, Stability::Unstable).await.expect("room");
        };
        // Two segments of four stripes: old data and a hole, and a deletion. The rest dies.
        write(old, 0, 3000).await;
        write(gone, 0, 5000).await;
        log.punch(gone, 1000, 2000, false, Stability::Unstable).await.expect("punched");
        for stripe in 0..8 {
            write(filler, 0, 50_000).await;
            log.settle().await.expect("settled");
            if stripe == 3 {
                log.delete(gone).await.expect("deleted");
            }
        }
        // Both are cleaned in one pass, and what they give is cleaned again and again.
        for round in 0..40 {
            for at in 0..10 {
                write(filler, at * 50_000, 50_000).await;
            }
            log.settle().await.expect("settled");
            assert_eq!(log.stat(gone).await, Err(LogError::NoSuchObject), "round {round}");
        }
        assert!(log.counters().cleaned_segments > 20, "{:?}", log.counters());
        // Segments may be on their way back.
        node.kill();
        drop(log);
        let log = world.rebuild().await;
        assert_eq!(log.stat(gone).await, Err(LogError::NoSuchObject));
        assert_eq!(log.stat(old).await.expect("it is there").size, 3000);
    });
}

/// An object lies in a segment that is given back, and the deletion is dropped, as nothing older
/// lies in any segment. Then the segment is declared anew, and before its first stripe is written
/// the node dies and the index is lost: what the segment shows is what it held before.
#[test]
fn a_segment_declared_anew_does_not_show_what_it_held() {
    Reactor::simulated(1).block_on(async {
        let mut world = World::new(48).await;
        let node = Group::new();
        let parts = world.next_life();
        let made = reactor::spawn_in(&node, async move { parts.open(true).await });
        let log = made.await.expect("the node lives");
        let [gone, filler, kept] = [1, 2, 3].map(object);
        // A stripe each.
        let write = async |log: &ObjectLog, id, at| {
            log.write(id, at, payload(50_000).0, Stability::Unstable).await.expect("room");
            log.settle().await.expect("settled");
        };
        log.write(gone, 0, payload(5000).0, Stability::Unstable).await.expect("room");
        for _ in 0..4 {
            write(&log, filler, 0).await;
        }
        assert!(world.array.is_written(0));
        log.delete(gone).await.expect("deleted");
        write(&log, filler, 0).await;
        for n in 0..25 {
            write(&log, kept, n * 50_000).await;
        }
        assert!(!world.array.is_written(0), "it is free");
        // Beside others the cleaner takes its time.
        reactor::sleep(Duration::from_secs(1)).await;
        assert!(log.counters().cleaned_segments > 0);
        // Declared sooner than the store knows of it: no stripe is written yet.
        world.array.delay_us_max.set(5);
        reactor::spawn_in(&node, async move {
            loop {
                write(&log, filler, 0).await;
            }
        });
        while !world.array.is_written(0) {
            reactor::sleep(Duration::from_micros(1)).await;
        }
        node.kill();
        let log = world.rebuild().await;
        assert_eq!(log.stat(gone).await, Err(LogError::NoSuchObject));
        assert_eq!(log.stat(kept).await.expect("it is there").size, 25 * 50_000);
        assert_eq!(log.stat(filler).await.expect("it is there").size, 50_000);
    });
}

/// Three stripes of one object, of which the last was not flushed when the others were closed.
async fn three_stripes(world: &mut World) -> Vec<u8> {
    let log = world.next_life().open(true).await;
    let mut all = Vec::new();
    for n in 0..3 {
        let (data, flat) = payload(50_000);
        log.write(object(1), n * 50_000, data, Stability::Unstable).await.expect("room");
        log.settle().await.expect("settled");
        all.extend(flat);
    }
    all
}

/// What is only out of reach is not passed over: an index without it would lack what was
/// committed, and opening it would give that back for good.
#[test]
fn what_cannot_be_read_is_not_passed_over() {
    Reactor::simulated(1).block_on(async {
        let mut world = World::new(40).await;
        let all = three_stripes(&mut world).await;
        let stripe_bytes = world.array.geometry().stripe_bytes;
        // The footer of each stripe, and data of the newest, which alone is checked.
        for stripe in 0..3 {
            let at = (stripe + 1) * stripe_bytes - BLOCK_BYTES;
            world.array.unreadable.borrow_mut().insert(at);
            let lost = BlockError::Medium { at, bytes: BLOCK_BYTES };
            assert_eq!(world.try_rebuild().await.err(), Some(LogError::Block(lost)));
            world.array.unreadable.borrow_mut().clear();
        }
        let at = 2 * stripe_bytes;
        world.array.unreadable.borrow_mut().insert(at);
        let lost = BlockError::Medium { at, bytes: BLOCK_BYTES };
        assert_eq!(world.try_rebuild().await.err(), Some(LogError::Block(lost)));
        // When it is back, all of it is.
        world.array.unreadable.borrow_mut().clear();
        let log = world.rebuild().await;
        assert!(flat(&log.read(object(1), 0, 150_000).await.expect("read")) == all);
    });
}

/// Wherever the array stops, also between the attempts to repair what is rotten.
#[test]
fn an_array_that_stops_stops_the_rebuild() {
    let rotten_world = || async {
        let mut world = World::new(40).await;
        let all = three_stripes(&mut world).await;
        let stripe_bytes = world.array.geometry().stripe_bytes;
        for at in [3 * stripe_bytes - BLOCK_BYTES, 2 * stripe_bytes] {
            world.array.rot(at);
        }
        world.array.count_reads();
        (world, all)
    };
    let mut stopped = 0;
    for reads in 0.. {
        let is_through = Reactor::simulated(1).block_on(async {
            let (mut world, all) = rotten_world().await;
            world.array.stops_after_reads.set(reads);
            match world.try_rebuild().await {
                Err(error) => {
                    let lost = BlockError::TooManyLost { lost: 3, tolerated: 2 };
                    assert_eq!(error, LogError::Block(lost), "after {reads} reads");
                    false
                }
                Ok(log) => {
                    world.array.stops_after_reads.set(u64::MAX);
                    let read = log.read(object(1), 0, 150_000).await.expect("read");
                    assert!(flat(&read) == all, "after {reads} reads");
                    true
                }
            }
        });
        if is_through {
            break;
        }
        stopped += 1;
    }
    assert!(stopped > 5, "it was repaired meanwhile");
}

#[test]
fn torn_stripes_do_not_hide_what_was_committed() {
    seeds(30).for_each(|seed| torn(seed, 1));
}

#[test]
fn what_an_owner_gave_back_stays_away() {
    seeds(30).for_each(|seed| torn(seed, 3));
}

/// Random changes until the power goes, at any moment; then the index is made anew with what is staged.
fn lives(seed: u64, with_staged: bool) -> u64 {
    Reactor::simulated(seed).block_on(async {
        let mut world = World::new(160).await;
        let model = Rc::new(RefCell::new(Model::default()));
        let mut staged = 0;
        for life in 0..2 {
            let (node, parts) = (Group::new(), world.next_life());
            let of_node = Rc::clone(&model);
            let log = reactor::spawn_in(&node, async move {
                let log = parts.open(life == 0).await;
                check_all(&log, &of_node, seed).await;
                log
            });
            let log = log.await.expect("the node lives");
            for task in 0..TASKS {
                reactor::spawn_in(&node, work(log.clone(), Rc::clone(&model), task, 40));
            }
            drop(log);
            reactor::sleep(Duration::from_micros(500 + below(8_000))).await;
            node.kill();
            world.cut_power().await;
            if with_staged {
                let (log, report) = world.rebuild_with_staged().await;
                assert_eq!(report.staged_left_out, 0, "seed {seed}");
                staged += report.staged;
                // What survived is not told: each object is as a change left it, and none that was durable is gone.
                check_all(&log, &model, seed).await;
                log.settle().await.expect("settled");
                let durable = log.commit(Seq(u64::MAX)).await.expect("committed");
                model.borrow_mut().durable(durable.0);
            } else {
                let log = world.rebuild().await;
                check_all(&log, &model, seed).await;
            }
        }
        staged
    })
}

#[test]
fn what_was_staged_is_kept() {
    let staged: u64 = seeds(60).map(|seed| lives(seed, true)).sum();
    assert!(staged > 20 || seeds(2).count() == 1, "{staged} changes were staged");
    // That they are kept is what makes the difference.
    let lost = (0..60).find(|seed| std::panic::catch_unwind(|| lives(*seed, false)).is_err());
    assert!(lost.is_some(), "nothing was lost without them");
}

/// A change begins in a stripe, and its rest is staged: neither is dropped.
#[test]
fn the_beginning_of_a_change_whose_rest_is_staged_counts() {
    Reactor::simulated(1).block_on(async {
        let mut world = World::new(40).await;
        let log = world.next_life().open(true).await;
        let stripe_bytes = world.array.geometry().stripe_bytes;
        let (data, before) = payload(stripe_bytes - 12_000);
        log.write(object(1), 0, data, Stability::Unstable).await.expect("room");
        // More than is left of the stripe, and the rest is little enough to be staged.
        let (data, split) = payload(14_000);
        log.write(object(2), 0, data, Stability::Durable).await.expect("room");
        let counters = log.counters();
        assert_eq!((counters.stripes, counters.staged_bytes > 0), (1, true), "{counters:?}");
        drop(log);
        world.cut_power().await;
        let (log, report) = world.rebuild_with_staged().await;
        assert_eq!((report.objects, report.staged), (2, 1), "{report:?}");
        for (id, bytes) in [(1, before), (2, split)] {
            let read = log.read(object(id), 0, bytes.len() as u64).await.expect("there");
            assert!(flat(&read) == bytes, "object {id}");
        }
    });
}
