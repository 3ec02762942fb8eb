//! Full logs, the cleaner under pressure, and very long objects.

use crate::support::model::{below, config, flat, object};
use crate::support::{World, bytes, churn_deletions, seeds};
use levada_base::ids::Seq;
use levada_base::reactor::{self, Group, Reactor};
use levada_base::units::{KIB, MIB};
use levada_log::{Config, LogError, ObjectLog, Stability};
use std::rc::Rc;

/// Writes objects of 64 KiB until the log is full; returns how many there are.
async fn fill(log: &ObjectLog) -> u64 {
    for n in 0.. {
        match log.write(object(n), 0, bytes(n as u8, 64 * KIB), Stability::Unstable).await {
            Ok(_) => {}
            Err(LogError::Full) => return n,
            Err(error) => panic!("{error}"),
        }
    }
    unreachable!()
}

/// Segments of the usual number of stripes.
fn usual() -> Config {
    Config { segment_stripes: 32, ..config() }
}

#[test]
fn a_full_log_keeps_what_it_has_and_deleting_frees_space() {
    for seed in seeds(10) {
        Reactor::simulated(seed).block_on(async {
            let mut world = World::new(96).await;
            let log = world.next_life().open(true).await;
            let total = log.space();
            assert_eq!(total.free_bytes, total.total_bytes);
            let mut count = fill(&log).await;
            assert!(count * 64 * KIB > total.total_bytes * 8 / 10, "{count} of {total:?}");
            assert!(log.space().free_bytes < 128 * KIB);
            log.commit(Seq(u64::MAX)).await.expect("a full log commits");
            // What is written again may be cut differently and take a few more headers.
            for _ in 0..3 {
                count -= 1;
                log.delete(object(count)).await.expect("a full log deletes");
            }
            // Deletion is acknowledged durably, and shows at once.
            for round in 0..6 {
                let before = log.space().free_bytes;
                let gone = 1 + below(count / 2);
                for n in 0..gone {
                    log.delete(object(n)).await.expect("a full log deletes");
                }
                let after = log.space().free_bytes;
                // Deletions that the cleaner is copying count twice for the moment.
                assert!(after + 16 * KIB > before + gone * 63 * KIB, "{gone} {before} {after}");
                for n in 0..gone {
                    let data = bytes(n as u8, 64 * KIB);
                    let written = log.write(object(n), 0, data, Stability::Unstable).await;
                    written.unwrap_or_else(|error| panic!("seed {seed} round {round}: {error}"));
                }
                log.commit(Seq(u64::MAX)).await.expect("committed");
            }
            for n in 0..count {
                let read = flat(&log.read(object(n), 0, 64 * KIB).await.expect("read"));
                assert!(read.iter().all(|byte| *byte == n as u8));
            }
            // Everything goes, and everything fits again.
            for n in 0..count {
                log.delete(object(n)).await.expect("deleted");
            }
            // All but what remembers the deletions.
            assert!(log.space().free_bytes > total.total_bytes / 20 * 19);
            count = fill(&log).await;
            assert!(count * 64 * KIB > total.total_bytes * 8 / 10);
        });
    }
}

/// One deletion, which alone closes no stripe; and nobody else writes anything, for there is no room. The
/// cleaner has found before that it can gain nothing.
#[test]
fn one_object_that_filled_the_log_can_be_replaced() {
    for seed in seeds(30) {
        Reactor::simulated(seed).block_on(async {
            let mut world = World::new(48).await;
            let config = Config { segment_stripes: 6, ..config() };
            let mut node = Group::new();
            let mut log: Option<ObjectLog> = None;
            for life in 0..4 {
                if log.is_none() || below(2) == 0 {
                    node.kill();
                    node = Group::new();
                    let (parts, config) = (world.next_life(), config);
                    let opening = async move { parts.open_with(config, life == 0).await };
                    log = reactor::spawn_in(&node, opening).await;
                }
                let log = log.as_ref().expect("not killed");
                if life > 0 {
                    log.delete(object(life - 1)).await.expect("deleted");
                }
                let mut end = 0;
                loop {
                    let at = if below(8) == 0 { below(end + 1) } else { end };
                    let len = 1 + below(100_000);
                    let data = bytes(1, len);
                    match log.write(object(life), at, data, Stability::Unstable).await {
                        Ok(_) => end = end.max(at + len),
                        Err(LogError::Full) => break,
                        Err(error) => panic!("{error}"),
                    }
                }
                let total = log.space().total_bytes;
                assert!(end > total * 7 / 10, "seed {seed}: life {life}: {end} of {total}");
                log.settle().await.expect("settled");
            }
        });
    }
}

/// Each cuts an extent in two, which takes more room than it gives.
#[test]
fn small_holes_do_not_fill_a_full_log_and_large_ones_empty_it() {
    Reactor::simulated(1).block_on(async {
        let mut world = World::new(96).await;
        let log = world.next_life().open(true).await;
        let count = fill(&log).await;
        let mut refused = 0;
        for (n, at) in (0..count).flat_map(|n| (0..64).map(move |block| (n, block * KIB + 500))) {
            match log.punch(object(n), at, 10, false, Stability::Unstable).await {
                Ok(_) => {}
                Err(LogError::Full) => refused += 1,
                Err(error) => panic!("{error}"),
            }
        }
        assert!(refused > 0);
        log.commit(Seq(u64::MAX)).await.expect("a full log commits");
        let new = log.punch(object(count + 1), 0, 10, true, Stability::Unstable).await;
        assert_eq!(new.err(), Some(LogError::Full), "an object more");
        let none = log.punch(object(count + 1), 0, 10, false, Stability::Unstable).await;
        assert_eq!(none.err(), Some(LogError::NoSuchObject));
        for n in 0..count {
            let emptied = log.punch(object(n), 0, 64 * KIB, false, Stability::Unstable).await;
            emptied.expect("nothing is cut in two");
            assert_eq!(log.stat(object(n)).await.expect("there").stored_bytes, 0);
        }
        log.commit(Seq(u64::MAX)).await.expect("committed");
        assert!(fill(&log).await > count / 2);
    });
}

#[test]
fn what_replaces_bytes_fits_a_full_log() {
    for seed in seeds(1) {
        Reactor::simulated(seed).block_on(async {
            let mut world = World::new(24 * 32).await;
            let log = world.next_life().open_with(usual(), true).await;
            let count = fill(&log).await;
            for n in 0..count {
                let id = object(below(count));
                let written = log.write(id, 0, bytes(9, 64 * KIB), Stability::Unstable).await;
                written.unwrap_or_else(|error| panic!("seed {seed}: write {n}: {error}"));
            }
            let more = log.write(object(count), 0, bytes(1, 64 * KIB), Stability::Unstable).await;
            assert_eq!(more.err(), Some(LogError::Full));
        });
    }
}

/// A full log whose clients send again what it has, or has not: after each restart the last changes come
/// once more, small old ones before large new ones.
#[test]
fn a_full_log_takes_again_what_it_once_took() {
    for seed in seeds(4) {
        Reactor::simulated(seed).block_on(async {
            let mut world = World::new(24 * 32).await;
            let mut node = Group::new();
            let parts = world.next_life();
            let opened =
                reactor::spawn_in(&node, async move { parts.open_with(usual(), true).await });
            let mut log = opened.await.expect("not killed");
            // The last changes, in order: what a client may keep.
            let mut kept: Vec<(u64, u64, u8)> = Vec::new();
            let mut model = Vec::new();
            for at in (0..).step_by(64) {
                match log.write(object(0), at * KIB, bytes(1, 64 * KIB), Stability::Unstable).await
                {
                    Ok(_) => model.resize(model.len() + (64 * KIB) as usize, 1u8),
                    Err(error) => {
                        assert_eq!(error, LogError::Full);
                        break;
                    }
                }
            }
            log.commit(Seq(u64::MAX)).await.expect("durable");
            let blocks = model.len() as u64 / 4096;
            for round in 0..6 {
                for n in 0..below(300) {
                    let (at, len) = if n % 4 == 3 {
                        (below(blocks / 16) * 64 * KIB, 64 * KIB)
                    } else {
                        (below(blocks) * 4096, 4096)
                    };
                    let byte = 2 + below(200) as u8;
                    match log.write(object(0), at, bytes(byte, len), Stability::Unstable).await {
                        Ok(_) => {
                            kept.push((at, len, byte));
                            model[at as usize..(at + len) as usize].fill(byte);
                        }
                        Err(error) => assert_eq!(error, LogError::Full),
                    }
                }
                if below(2) == 0 {
                    log.commit(Seq(u64::MAX)).await.expect("durable");
                }
                node.kill();
                if below(2) == 0 {
                    world.cut_power().await;
                }
                node = Group::new();
                let parts = world.next_life();
                let opened =
                    reactor::spawn_in(&node, async move { parts.open_with(usual(), false).await });
                log = opened.await.expect("not killed");
                for (n, (at, len, byte)) in kept.iter().enumerate() {
                    let data = bytes(*byte, *len);
                    let taken = log.write(object(0), *at, data, Stability::Again).await;
                    taken.unwrap_or_else(|error| panic!("seed {seed} round {round} {n}: {error}"));
                }
                let read = flat(&log.read(object(0), 0, model.len() as u64).await.expect("read"));
                assert!(read == model, "seed {seed} round {round}: other bytes");
                if below(2) == 0 {
                    log.commit(Seq(u64::MAX)).await.expect("durable");
                    kept.clear();
                }
            }
        });
    }
}

/// Others took the room of what a crash lost: what is sent again goes into the reserve, which is enough
/// for the cleaner still.
#[test]
fn what_is_sent_again_goes_into_the_reserve() {
    for seed in seeds(4) {
        Reactor::simulated(seed).block_on(async {
            let mut world = World::new(24 * 32).await;
            let log = world.next_life().open_with(usual(), true).await;
            let count = fill(&log).await;
            // A segment and a half.
            for n in 0..48 {
                let data = bytes(7, 56 * KIB);
                let again = log.write(object(1000 + n), 0, data, Stability::Again).await;
                again.unwrap_or_else(|error| panic!("seed {seed}: {n}: {error}"));
            }
            let new = log.write(object(2000), 0, bytes(7, KIB), Stability::Unstable).await;
            assert_eq!(new.err(), Some(LogError::Full));
            log.commit(Seq(u64::MAX)).await.expect("durable");
            for n in 0..60 {
                log.delete(object(n * count / 61)).await.expect("deleted");
            }
            let mut again = 0;
            while log.write(object(2000), again, bytes(7, KIB), Stability::Unstable).await.is_ok() {
                again += KIB;
            }
            assert!(again > 64 * KIB, "seed {seed}: only {again} bytes came back");
            for n in 0..48 {
                let read = flat(&log.read(object(1000 + n), 0, 56 * KIB).await.expect("read"));
                assert!(read.iter().all(|byte| *byte == 7));
            }
        });
    }
}

/// Random small overwrites of a log that is four fifths full: every segment becomes a mixture.
#[test]
fn the_cleaner_keeps_a_nearly_full_log_writable() {
    for seed in seeds(4) {
        Reactor::simulated(seed).block_on(async {
            let mut world = World::new(128).await;
            let log = world.next_life().open(true).await;
            let live = log.space().total_bytes * 8 / 10 / (4 * KIB) * (4 * KIB);
            let id = object(1);
            let mut model = vec![0u8; (live / 4096) as usize];
            let mut at = 0;
            while at < live {
                let run = (256 * KIB).min(live - at);
                log.write(id, at, bytes(0, run), Stability::Unstable).await.expect("room");
                at += run;
            }
            for n in 0..4 * live / 4096 {
                let block = below(live / 4096);
                let byte = n as u8;
                model[block as usize] = byte;
                log.write(id, block * 4096, bytes(byte, 4096), Stability::Unstable)
                    .await
                    .unwrap_or_else(|error| panic!("seed {seed}: write {n}: {error}"));
                if below(500) == 0 {
                    log.commit(Seq(u64::MAX)).await.expect("committed");
                }
            }
            let read = flat(&log.read(id, 0, live).await.expect("read"));
            for (block, expected) in model.iter().enumerate() {
                assert!(read[block * 4096..][..4096].iter().all(|byte| byte == expected));
            }
            let counters = log.counters();
            println!("{counters:?}");
            assert!(counters.cleaned_segments > 10);
        });
    }
}

/// More extents than one batch may remove.
#[test]
fn very_long_objects_are_cut_in_steps() {
    Reactor::simulated(1).block_on(async {
        let mut world = World::new(256).await;
        let log = world.next_life().open(true).await;
        let id = object(1);
        let count = 6000;
        for n in 0..count {
            log.write(id, n * 512, bytes(n as u8, 32), Stability::Unstable).await.expect("room");
        }
        log.commit(Seq(u64::MAX)).await.expect("committed");
        // One write covers them all but the ends.
        let middle = (count - 2000) * 512;
        log.write(id, 512_000, bytes(9, middle), Stability::Durable).await.expect("room");
        log.punch(id, 0, 256_000, false, Stability::Durable).await.expect("punched");
        log.truncate(id, 300_000, Stability::Durable).await.expect("cut");
        let read = flat(&log.read(id, 0, 300_000).await.expect("read"));
        for (at, byte) in read.iter().enumerate() {
            let inside = at % 512 < 32 && at >= 256_000;
            assert_eq!(*byte, if inside { (at / 512) as u8 } else { 0 }, "{at}");
        }
        log.delete(id).await.expect("deleted");
        assert_eq!(log.stat(id).await, Err(LogError::NoSuchObject));
        log.settle().await.expect("settled");
        let space = log.space();
        assert!(space.free_bytes > space.total_bytes - 4 * KIB);
    });
}

#[test]
fn small_durable_writes_are_staged_and_large_ones_are_not() {
    Reactor::simulated(1).block_on(async {
        let mut world = World::new(96).await;
        let log = world.next_life().open(true).await;
        for n in 0..20 {
            log.write(object(n), 0, bytes(1, 100), Stability::Durable).await.expect("room");
        }
        assert_eq!(log.counters().stripes, 0);
        assert_eq!(world.array.flushes.get(), 0);
        let staged = log.counters().staged_bytes;
        assert!(staged > 20 * 100);
        log.write(object(1), 0, bytes(1, MIB), Stability::Durable).await.expect("room");
        assert!(log.counters().stripes >= 16);
        assert!(log.counters().staged_bytes < staged + 64 * KIB);
        assert_eq!(log.durable(), log.seq());
    });
}

#[test]
fn commits_that_wait_together_share_one_round() {
    Reactor::simulated(1).block_on(async {
        let mut world = World::new(96).await;
        let log = world.next_life().open(true).await;
        let tasks: Vec<_> = (0..50)
            .map(|n| {
                let log = log.clone();
                reactor::spawn(async move {
                    log.write(object(n), 0, bytes(1, 100), Stability::Durable).await.expect("room")
                })
            })
            .collect();
        for task in tasks {
            assert!(task.await.is_some());
        }
        assert!(log.counters().commits <= 3, "{:?}", log.counters());
    });
}

#[test]
fn aligned_reads_are_one_slice() {
    Reactor::simulated(1).block_on(async {
        let mut world = World::new(96).await;
        let log = world.next_life().open(true).await;
        let array = Rc::clone(&world.array);
        log.write(object(1), 0, bytes(1, 16 * KIB), Stability::Unstable).await.expect("room");
        log.settle().await.expect("settled");
        array.delay_us_max.set(0);
        let read = log.read(object(1), 4 * KIB, 8 * KIB).await.expect("read");
        assert_eq!(read.len(), 1);
        assert_eq!(read[0].as_ptr() as usize % 4096, 0);
    });
}

/// A file that is cut again and again, beside old data that is never cleaned.
#[test]
fn truncations_of_one_object_leave_nothing_behind() {
    for seed in seeds(4) {
        Reactor::simulated(seed).block_on(async {
            let mut world = World::new(96).await;
            let log = world.next_life().open(true).await;
            log.write(object(0), 0, bytes(7, 64 * KIB), Stability::Durable).await.expect("room");
            let total = log.space().total_bytes;
            // Their records alone would fill the log four times.
            for n in 0..4 * total / 96 {
                let cut = log.truncate(object(1), below(1000), Stability::Unstable).await;
                cut.unwrap_or_else(|error| panic!("seed {seed}: truncation {n}: {error}"));
                if below(200) == 0 {
                    let data = bytes(1, 2000);
                    let written = log.write(object(1), 0, data, Stability::Unstable).await;
                    written.unwrap_or_else(|error| panic!("seed {seed}: write {n}: {error}"));
                }
            }
            log.settle().await.expect("settled");
            assert!(log.counters().cleaned_segments > 10, "{:?}", log.counters());
        });
    }
}

/// Short-lived objects without end, beside data that lives on and of which a part died long ago.
#[test]
fn deletions_leave_nothing_behind() {
    for seed in seeds(1) {
        Reactor::simulated(seed).block_on(async {
            let mut world = World::new(96).await;
            let log = world.next_life().open(true).await;
            log.write(object(0), 0, bytes(7, 256 * KIB), Stability::Durable).await.expect("room");
            log.write(object(0), KIB, bytes(8, KIB), Stability::Durable).await.expect("room");
            churn_deletions(&log).await;
            let space = log.space();
            assert!(space.free_bytes > space.total_bytes / 4, "{space:?}");
        });
    }
}

/// Crashes in a row while nothing but truncations is logged: each life fills on the segment in
/// which the last one stopped.
#[test]
fn crashes_between_truncations_cost_no_segments() {
    for seed in seeds(4) {
        Reactor::simulated(seed).block_on(async {
            let mut world = World::new(96).await;
            for life in 0..40 {
                let node = Group::new();
                let parts = world.next_life();
                let worked = reactor::spawn_in(&node, async move {
                    let log = parts.open(life == 0).await;
                    for n in 0..5 {
                        // Growing, so that no later one covers an earlier.
                        let size = life * 10 + n;
                        log.truncate(object(1), size, Stability::Unstable).await.expect("room");
                    }
                    // Closes a stripe.
                    log.settle().await.expect("settled");
                });
                assert!(worked.await.is_some());
                node.kill();
                world.cut_power().await;
                let segments = world.array.written() / 4;
                // A life that finds the last segment full begins one with a stripe of its own.
                assert!(segments <= life / 3 + 2, "seed {seed}: {segments} after {life}");
            }
        });
    }
}
