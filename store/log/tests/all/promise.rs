//! What `space` shows is there: who writes new data gets it, is refused only what is above it in that very step, and
//! what is deleted is shown at once and can be written again.

use crate::support::model::{below, config, footprint, object};
use crate::support::{World, bytes, seeds};
use levada_base::ids::Seq;
use levada_base::reactor::{self, Reactor};
use levada_base::units::{BLOCK_BYTES, KIB, MIB};
use levada_log::{Config, LogError, ObjectLog, Stability};

const STRIPE: u64 = 64 * KIB;
/// A write is cut into pieces of at most so much.
const PIECE: u64 = STRIPE - BLOCK_BYTES;
/// Segments of the usual number of stripes.
const STRIPES: u64 = 24 * 32;
/// An index that is never full.
const AMPLE: u64 = 128 * MIB;

async fn new_log(index_bytes: u64) -> (World, ObjectLog) {
    let mut world = World::with_index(STRIPES, index_bytes).await;
    let config = Config { segment_stripes: 32, stage_bytes_max: 16 * KIB, ..config() };
    let log = world.next_life().open_with(config, true).await;
    (world, log)
}

fn free(log: &ObjectLog) -> u64 {
    log.space().free_bytes
}

/// Writes at the end `at` of an object; false when that was refused, which it is only for more than is shown.
async fn append(log: &ObjectLog, id: u64, at: &mut u64, size: u64, when: Stability) -> bool {
    match log.write(object(id), *at, bytes(id as u8, size), when).await {
        Ok(_) => {
            *at += size;
            true
        }
        Err(LogError::Full) => {
            let shown = free(log);
            // Of a large write the first part may have been written.
            let end = log.stat(object(id)).await.map_or(0, |stat| stat.size).max(*at);
            let refused = footprint((*at + size - end).min(PIECE));
            assert!(shown < refused, "{refused} bytes were refused while {shown} were shown");
            *at = end;
            false
        }
        Err(error) => panic!("{error}"),
    }
}

/// So many write at once, each until it is refused; the bytes of all.
async fn fill(log: &ObjectLog, writers: u64, size: u64, when: Stability) -> u64 {
    let tasks: Vec<_> = (0..writers)
        .map(|writer| {
            let log = log.clone();
            reactor::spawn(async move {
                let mut end = 0;
                while append(&log, writer, &mut end, size, when).await {}
                end
            })
        })
        .collect();
    let mut written = 0;
    for task in tasks {
        written += task.await.expect("not killed");
    }
    written
}

async fn delete(log: &ObjectLog, ids: impl IntoIterator<Item = u64>) {
    for id in ids {
        log.delete(object(id)).await.expect("a full log deletes");
    }
}

/// With their headers.
fn footprints(written: u64, size: u64) -> u64 {
    written / size.min(PIECE) * footprint(size.min(PIECE))
}

const LOADS: [(u64, u64); 4] = [(1, 4 * KIB), (4, 4 * KIB), (1, MIB), (4, MIB)];

async fn what_is_shown_is_written(when: Stability) {
    for (writers, size) in LOADS {
        let (_world, log) = new_log(AMPLE).await;
        for round in 0..3 {
            let space = log.space();
            assert_eq!(space.free_bytes, space.total_bytes);
            let written = fill(&log, writers, size, when).await;
            let what = format!("{writers} of {size}, round {round}: {written} of {space:?}");
            println!("{what}");
            assert!(written <= space.free_bytes, "{what}");
            // Pieces are cut where stripes end, and each has its header; and of the last only a part may fit.
            assert!(footprints(written, size) >= space.free_bytes / 1000 * 996, "{what}");
            if round == 1 {
                log.settle().await.expect("settled");
            }
            delete(&log, 0..writers).await;
        }
    }
}

#[test]
fn stripes_are_filled_as_shown() {
    Reactor::simulated(1).block_on(what_is_shown_is_written(Stability::Unstable));
}

#[test]
fn stripes_are_filled_as_shown_by_durable_writes() {
    Reactor::simulated(1).block_on(what_is_shown_is_written(Stability::Durable));
}

/// Small writes need more index than was to be expected: how much is seen as they come. What is deleted makes room for
/// as many again.
#[test]
fn an_index_is_filled_as_often_as_one_likes() {
    Reactor::simulated(1).block_on(async {
        for (writers, size) in LOADS {
            let (_world, log) = new_log(5 * MIB / 2).await;
            let shown = free(&log);
            let mut first = 0;
            for round in 0..3 {
                assert_eq!(free(&log), shown, "{writers} of {size}, round {round}");
                let written = fill(&log, writers, size, Stability::Unstable).await;
                println!("{writers} of {size}, round {round}: {written} of {shown}");
                first = first.max(written);
                assert!(
                    written >= first / 100 * 99,
                    "{writers} of {size}: {first}, then {written}"
                );
                log.commit(Seq(u64::MAX)).await.expect("a full index commits");
                delete(&log, 0..writers).await;
            }
        }
    });
}

/// Objects of one size fill a log; then some go, and as many come.
async fn objects_are_replaced(size: u64, index_bytes: u64) {
    let (_world, log) = new_log(index_bytes).await;
    let total = log.space().total_bytes;
    let mut there = Vec::new();
    let mut next = 0;
    let mut come = async |there: &mut Vec<u64>, count: usize| {
        for n in 0..count {
            next += 1;
            if !append(&log, next, &mut 0, size, Stability::Unstable).await {
                delete(&log, [next]).await;
                return n;
            }
            there.push(next);
        }
        count
    };
    come(&mut there, usize::MAX).await;
    let count = there.len();
    for round in 0..60 {
        delete(&log, [there.swap_remove(below(there.len() as u64) as usize)]).await;
        assert_eq!(come(&mut there, 1).await, 1, "objects of {size}, round {round}");
    }
    for part in [100, 20, 4, 2] {
        let left = free(&log);
        let gone = there.len() / part;
        for _ in 0..gone {
            delete(&log, [there.swap_remove(below(there.len() as u64) as usize)]).await;
        }
        let shown = free(&log);
        let what =
            format!("{gone} of {count} objects of {size}, {left} left before, {shown} shown");
        let came = come(&mut there, usize::MAX).await;
        println!("{what}: {came} came");
        assert!(came + 1 >= gone, "{what}: {came} came");
        // Each of those that came, and less than one more; of an index it is an estimate.
        assert!(shown <= (came as u64 + 1) * footprint(size) / 8 * 9 + left, "{what}: {came} came");
        if index_bytes == AMPLE {
            assert!(shown >= left + gone as u64 * size, "{what}");
        }
    }
    delete(&log, there).await;
    // All but what remembers the deletions of very many.
    assert!(free(&log) >= total / 100 * 99, "{} of {total}", free(&log));
}

#[test]
fn who_deletes_an_object_can_write_another() {
    for seed in seeds(3) {
        Reactor::simulated(seed).block_on(async {
            for size in [4 * KIB, 10_000, 64 * KIB, MIB] {
                objects_are_replaced(size, AMPLE).await;
            }
        });
    }
}

#[test]
fn who_deletes_an_object_can_write_another_also_when_the_index_is_full() {
    for seed in seeds(3) {
        Reactor::simulated(seed).block_on(async {
            for size in [500, 4 * KIB] {
                objects_are_replaced(size, 5 * MIB).await;
            }
        });
    }
}

/// Data of a full log is written over and cut in pieces; what holes gave back is shown, and there.
#[test]
fn what_holes_give_back_is_there() {
    for seed in seeds(4) {
        Reactor::simulated(seed).block_on(async {
            let (_world, log) = new_log(AMPLE).await;
            let mut end = 0;
            while append(&log, 0, &mut end, MIB, Stability::Unstable).await {}
            for _ in 0..3 {
                for n in 0..2000 {
                    let at = below(end / BLOCK_BYTES) * BLOCK_BYTES;
                    let changed = if below(3) == 0 {
                        log.punch(object(0), at, BLOCK_BYTES, false, Stability::Unstable).await
                    } else {
                        log.write(object(0), at, bytes(3, BLOCK_BYTES), Stability::Unstable).await
                    };
                    assert!(changed.is_ok() || changed == Err(LogError::Full));
                    if n % 300 == 0 {
                        log.commit(Seq(u64::MAX)).await.expect("committed");
                    }
                }
                let (shown, mut more) = (free(&log), 0);
                while append(&log, 1, &mut more, 4 * KIB, Stability::Unstable).await {}
                assert!(footprints(more, 4 * KIB) + footprint(4 * KIB) > shown / 1000 * 995);
                delete(&log, [1]).await;
            }
        });
    }
}

/// The cleaner leaves segments alone that cannot be read: what is dead in them is room for nobody.
#[test]
fn what_cannot_be_cleaned_is_not_shown() {
    for seed in seeds(3) {
        Reactor::simulated(seed).block_on(async {
            let (world, log) = new_log(AMPLE).await;
            let mut there: Vec<u64> = Vec::new();
            while append(&log, there.len() as u64, &mut 0, STRIPE, Stability::Unstable).await {
                there.push(there.len() as u64);
            }
            log.settle().await.expect("settled");
            // The end of one stripe in every fourth segment.
            for segment in (0..24).step_by(4) {
                let end = (segment * 32 + below(32) + 1) * STRIPE;
                world.array.unreadable.borrow_mut().insert(end - BLOCK_BYTES);
            }
            for round in 0..4 {
                for _ in 0..there.len() / 3 {
                    delete(&log, [there.swap_remove(below(there.len() as u64) as usize)]).await;
                }
                let (shown, mut written) = (free(&log), 0);
                for n in 0.. {
                    let id = 10_000 * (round + 1) + n;
                    if !append(&log, id, &mut 0, STRIPE, Stability::Unstable).await {
                        delete(&log, [id]).await;
                        break;
                    }
                    there.push(id);
                    written += STRIPE;
                }
                println!("seed {seed}, round {round}: {written} of {shown}, {} left", free(&log));
            }
            log.commit(Seq(u64::MAX)).await.expect("goes on");
        });
    }
}
