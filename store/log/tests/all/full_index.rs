//! An index that is nearly full before the log is.

use crate::support::model::{config, object};
use crate::support::{World, bytes};
use levada_base::reactor::{self, Reactor};
use levada_base::units::MIB;
use levada_base::{Epoch, ids::Seq};
use levada_kv::{Batch, Store};
use levada_log::{Config, LogError, ObjectLog, Stability, Stat};
use std::rc::Rc;

const INDEX_BYTES: u64 = 320 * MIB;
const KV: levada_kv::Config = levada_kv::Config { log_bytes: 40 * MIB, cache_bytes: 256 << 10 };
/// What may still be put into the index when the log begins to fill it: less than what is on its way at
/// once.
const LEFT_BYTES: u64 = MIB / 2;
const TASKS: u64 = 64;

/// Puts rows that are none of the log's into the index until little is left.
async fn use_up(store: &Store) {
    for n in 0u64.. {
        let usage = store.usage();
        if usage.bytes_used + usage.bytes_kept + LEFT_BYTES > usage.bytes_max {
            break;
        }
        store.room().await.expect("there is room");
        let mut batch = Batch::default();
        batch.put(&[&[0xff], &n.to_be_bytes()[..]].concat(), &vec![7; 256 << 10]);
        store.apply(batch).expect("it fits");
    }
}

/// Small writes into holes by many at once, each of which is a row, until the log is full.
async fn fill(log: &ObjectLog) {
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let log = log.clone();
            reactor::spawn(async move {
                for n in 0u64.. {
                    let written =
                        log.write(object(task), n * 100, bytes(1, 4), Stability::Unstable);
                    match written.await {
                        Ok(_) => {}
                        Err(LogError::Full) => return n,
                        Err(error) => panic!("{error}"),
                    }
                }
                unreachable!()
            })
        })
        .collect();
    let mut written = 0;
    for task in tasks {
        written += task.await.expect("not killed");
    }
    assert!(written > 1000, "only {written} writes found room");
}

/// The rows of what has been accepted find room: a log with a full index answers `Full` and goes on, also after a
/// restart; what is deleted gives its room back.
#[test]
fn a_log_with_a_full_index_goes_on() {
    Reactor::simulated(1).block_on(async {
        let world = World::with_index(400, INDEX_BYTES).await;
        let device = || Rc::clone(&world.store) as Rc<dyn levada_device::Device>;
        world.array.delay_us_max.set(5000);
        let config = Config { segment_stripes: 32, stripes_in_flight: 64, ..config() };
        let store = Store::create(device(), Epoch(1), KV).await.expect("a store");
        let array = || Rc::clone(&world.array) as Rc<dyn levada_raid::Array>;
        let log = ObjectLog::create(array(), store.clone(), config, Epoch(1)).await;
        let log = log.expect("a log");
        use_up(&store).await;
        for _ in 0..2 {
            fill(&log).await;
            log.commit(Seq(u64::MAX)).await.expect("what was accepted finds room");
            for task in 0..TASKS {
                log.delete(object(task)).await.expect("a full index lets go");
            }
            log.settle().await.expect("the log goes on");
        }
        fill(&log).await;
        log.settle().await.expect("the log goes on");
        store.close().await.expect("closed");

        let store = Store::open(device(), Epoch(2), KV).await.expect("a store");
        let log = ObjectLog::open(array(), store.clone(), config, Epoch(2)).await.expect("a log");
        for task in 0..TASKS {
            // Some found no room for their first one.
            let Ok(Stat { size, .. }) = log.stat(object(task)).await else { continue };
            let read = log.read(object(task), size - 4, 4).await.expect("it reads");
            assert_eq!(crate::support::model::flat(&read), [1; 4]);
            log.delete(object(task)).await.expect("a full index lets go");
        }
        fill(&log).await;
        log.settle().await.expect("the log goes on");
    });
}
