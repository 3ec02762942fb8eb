//! Large writes are several changes, and what may be lost is bounded.

use crate::support::World;
use crate::support::model::{below, config, flat, object};
use levada_base::reactor::{self, Group, Reactor};
use levada_base::units::KIB;
use levada_log::{Config, ObjectLog, Stability};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

const WRITE_BYTES: u64 = 40_000;
const STRIPE_BYTES: u64 = 64 * KIB;

fn small() -> Config {
    Config { whole_bytes_max: 8 * KIB, unstable_bytes_max: 0, segment_stripes: 8, ..config() }
}

fn data(number: u64) -> levada_base::IoVec {
    levada_base::Buf::copy_of(&vec![number as u8 + 1; WRITE_BYTES as usize]).into_vec()
}

/// Appends until it is killed; every so often it commits.
async fn append(log: ObjectLog, committed: Rc<Cell<u64>>) {
    for number in 0..24 {
        let at = number * WRITE_BYTES;
        let ack = log.write(object(1), at, data(number), Stability::Unstable).await.expect("room");
        if below(4) == 0 {
            log.commit(ack.seq).await.expect("commits");
            committed.set(at + WRITE_BYTES);
        }
    }
}

/// A file that only grows is cut off somewhere past its last COMMIT, and whole up to there.
#[test]
fn a_crash_leaves_the_beginning_of_a_large_write() {
    let torn = Cell::new(0);
    for seed in 0..120 {
        Reactor::simulated(seed).block_on(async {
            let mut world = World::new(80).await;
            let (node, parts) = (Group::new(), world.next_life());
            let committed = Rc::new(Cell::new(0));
            let told = Rc::clone(&committed);
            reactor::spawn_in(&node, async move {
                let log = parts.open_with(small(), true).await;
                append(log, told).await;
            });
            reactor::sleep(Duration::from_micros(30_000 + below(20_000))).await;
            node.kill();
            world.cut_power().await;
            let log = world.next_life().open(false).await;
            let Ok(stat) = log.stat(object(1)).await else {
                assert_eq!(committed.get(), 0, "seed {seed}");
                return;
            };
            assert!(stat.size >= committed.get(), "seed {seed}");
            let found = flat(&log.read(object(1), 0, stat.size).await.expect("reads"));
            let number = |at: usize| (at as u64 / WRITE_BYTES) as u8 + 1;
            let fits = found.iter().enumerate().all(|(at, byte)| *byte == number(at));
            assert!(fits, "seed {seed}: {} bytes", stat.size);
            if !stat.size.is_multiple_of(WRITE_BYTES) {
                torn.set(torn.get() + 1);
            }
        });
    }
    assert!(torn.get() > 0, "some crash came between two changes of a write");
}

/// A client that sends a write again, as it was not durable, must not go over what came after a part of it.
#[test]
fn others_see_all_of_a_large_write_or_nothing() {
    Reactor::simulated(5).block_on(async {
        let mut world = World::new(160).await;
        world.array.delay_us_max.set(20_000);
        let log = world.next_life().open_with(small(), true).await;
        let writer = reactor::spawn(append(log.clone(), Rc::default()));
        let mut sizes = 0;
        while !writer.is_finished() {
            if let Ok(stat) = log.stat(object(1)).await {
                assert!(stat.size.is_multiple_of(WRITE_BYTES), "{} bytes", stat.size);
                sizes += 1;
            }
            reactor::sleep(Duration::from_micros(50)).await;
        }
        assert!(sizes > 100, "it waited for room now and then");
    });
}

/// However long a flush takes, no more than the bound is written and not durable.
#[test]
fn unstable_data_is_bounded() {
    Reactor::simulated(3).block_on(async {
        let mut world = World::new(160).await;
        world.array.delay_us_max.set(20_000);
        let log = world.next_life().open_with(small(), true).await;
        let most = Rc::new(Cell::new(0));
        let (watched, seen) = (log.clone(), Rc::clone(&most));
        for number in 0..100 {
            let offset = number % 8 * WRITE_BYTES;
            log.write(object(1), offset, data(number), Stability::Unstable).await.expect("room");
            let unstable = watched.unstable_bytes();
            seen.set(unstable.max(seen.get()));
        }
        // Four stripes at the least, and what one change may take beyond.
        assert!(most.get() > STRIPE_BYTES, "something is unstable");
        assert!(most.get() <= 7 * STRIPE_BYTES, "{} bytes", most.get());
    });
}
