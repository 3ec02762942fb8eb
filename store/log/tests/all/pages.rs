//! Maps that are in memory by pages, with a cache that holds few of them.

use crate::support::model::{below, config, flat, object, payload};
use crate::support::{KV, World, bytes, key, seeds};
use levada_base::ids::{ObjectId, Seq};
use levada_base::reactor::{self, Group, Reactor};
use levada_base::units::KIB;
use levada_kv::{Batch, Store};
use levada_log::{Config, LogError, ObjectLog, Stability, Stat, check_index};
use std::collections::BTreeMap;

/// An extent is taken for at least so many bytes.
const EXTENT_BYTES: u64 = 192;

/// A few dozen extents.
fn tiny() -> Config {
    Config { cached_bytes_max: 40 * EXTENT_BYTES, page_bytes: 4 * KIB, ..config() }
}

/// What one object holds: its size, and each byte that was written.
#[derive(Clone, Default)]
struct Contents {
    size: u64,
    stored: BTreeMap<u64, u8>,
}

impl Contents {
    fn remove(&mut self, from: u64, to: u64) {
        let gone: Vec<u64> = self.stored.range(from..to).map(|(at, _)| *at).collect();
        for at in gone {
            self.stored.remove(&at);
        }
    }

    fn read(&self, from: u64, bytes: u64) -> Vec<u8> {
        let mut read = vec![0; bytes as usize];
        for (at, byte) in self.stored.range(from..from + bytes) {
            read[(at - from) as usize] = *byte;
        }
        read
    }
}

const OBJECTS: u64 = 4;
/// Objects have something at their beginning, far out, and at the largest offsets.
const ISLANDS: [u64; 5] = [0, 0, 0, 1 << 40, i64::MAX as u64 - 150_000];
const ISLAND_BYTES: u64 = 100_000;

fn somewhere() -> u64 {
    ISLANDS[below(ISLANDS.len() as u64) as usize] + below(ISLAND_BYTES)
}

async fn check(log: &ObjectLog, id: ObjectId, model: Option<&Contents>, seed: u64) {
    let stat = log.stat(id).await;
    let Some(model) = model else {
        assert_eq!(stat.err(), Some(LogError::NoSuchObject), "seed {seed}");
        return;
    };
    let stored_bytes = model.stored.len() as u64;
    assert_eq!(stat, Ok(Stat { size: model.size, stored_bytes }), "seed {seed}: {id:?}");
    for island in ISLANDS {
        let read = log.read(id, island, ISLAND_BYTES + 30_000).await.expect("readable");
        let expected = model.read(island, ISLAND_BYTES + 30_000);
        assert!(flat(&read) == expected, "seed {seed}: {id:?} from {island} on");
    }
    // All bytes are in its ranges, and nothing else is.
    let (mut at, mut counted) = (0, 0u64);
    while at != u64::MAX {
        let found = log.data_ranges(id, at, 3).await.expect("there");
        for range in found.ranges {
            let stored = model.stored.range(range.clone()).count() as u64;
            assert_eq!(stored, range.end - range.start, "seed {seed}: {range:?}");
            counted += stored;
        }
        at = found.upto;
    }
    assert_eq!(counted, stored_bytes, "seed {seed}");
}

async fn open(world: &mut World, create: bool) -> (Group, ObjectLog) {
    let (node, parts) = (Group::new(), world.next_life());
    let opening = reactor::spawn_in(&node, async move { parts.open_with(tiny(), create).await });
    let log = opening.await.expect("not killed");
    (node, log)
}

/// Random changes of few objects, one after the other, and reopenings: the model is always right.
fn run(seed: u64, ops: u64) {
    Reactor::simulated(seed).block_on(async {
        let mut world = World::new(160).await;
        let (mut node, mut log) = open(&mut world, true).await;
        let mut objects: BTreeMap<u64, Contents> = BTreeMap::new();
        for _ in 0..ops {
            let n = below(OBJECTS);
            let id = object(n);
            let unstable = Stability::Unstable;
            let mut next = objects.get(&n).cloned().unwrap_or_default();
            let exists = objects.contains_key(&n);
            match below(20) {
                0..=9 => {
                    let at = somewhere();
                    let len = 1 + if below(3) == 0 { below(20_000) } else { below(300) };
                    let (data, flat) = payload(len);
                    next.size = next.size.max(at + len);
                    next.stored.extend((at..).zip(flat));
                    match log.write(id, at, data, unstable).await {
                        Ok(_) => drop(objects.insert(n, next)),
                        Err(error) => {
                            assert_eq!(error, LogError::Full);
                            log.delete(id).await.expect("a full log deletes");
                            objects.remove(&n);
                        }
                    }
                }
                10 => {
                    let size = somewhere();
                    next.remove(size, u64::MAX);
                    next.size = size;
                    log.truncate(id, size, unstable).await.expect("room");
                    objects.insert(n, next);
                }
                11..=13 => {
                    let at = somewhere();
                    let len = if below(2) == 0 { below(30_000) } else { 1 << below(62) };
                    let len = len.min(i64::MAX as u64 - at);
                    let grows = below(2) == 0;
                    next.remove(at, at + len);
                    next.size = if grows { next.size.max(at + len) } else { next.size };
                    match log.punch(id, at, len, grows, unstable).await {
                        Ok(_) => drop(objects.insert(n, next)),
                        Err(LogError::NoSuchObject) => assert!(!exists && !grows),
                        Err(error) => {
                            assert_eq!(error, LogError::Full);
                            log.delete(id).await.expect("a full log deletes");
                            objects.remove(&n);
                        }
                    }
                }
                14 if below(3) == 0 => {
                    log.delete(id).await.expect("deleted");
                    objects.remove(&n);
                }
                15 | 16 => {
                    log.settle().await.expect("settled");
                    let bytes = log.cached_bytes();
                    assert!(bytes <= tiny().cached_bytes_max, "seed {seed}: {bytes} in memory");
                }
                17 if below(2) == 0 => {
                    log.commit(Seq(u64::MAX)).await.expect("durable");
                    drop(log);
                    node.kill();
                    world.cut_power().await;
                    (node, log) = open(&mut world, false).await;
                }
                _ => check(&log, id, objects.get(&n), seed).await,
            }
        }
        for n in 0..OBJECTS {
            check(&log, object(n), objects.get(&n), seed).await;
        }
        log.settle().await.expect("settled");
        let report = log.scrub().await.expect("scrubbed");
        assert_eq!((report.damaged.len(), report.objects), (0, objects.len() as u64));
        let stored: u64 = objects.values().map(|object| object.stored.len() as u64).sum();
        assert_eq!(report.bytes, stored, "seed {seed}");
        assert!(log.cached_bytes() <= tiny().cached_bytes_max, "seed {seed}");
        drop(log);
        node.kill();
        world.cut_power().await;
        let store = world.next_life().open_store().await;
        let found = check_index(&store, &|_| {}).await.expect("readable");
        assert_eq!((found.findings, found.objects), (vec![], objects.len() as u64));
    });
}

#[test]
fn a_tiny_cache_changes_nothing_but_how_long_it_takes() {
    for seed in seeds(30) {
        run(seed, 250);
    }
}

/// Each of 512 bytes, with gaps between them.
const EXTENTS: u64 = 50_000;
const RECORD_BYTES: u64 = 512;

/// One object whose map is fifty times the cache.
#[test]
fn one_large_map_stays_inside_the_bound() {
    Reactor::simulated(1).block_on(async {
        let config = Config {
            cached_bytes_max: 1000 * (EXTENT_BYTES + 4),
            page_bytes: 16 * KIB,
            segment_stripes: 16,
            unstable_bytes_max: 0,
            ..config()
        };
        // The changes of a few stripes hold their pages on top: no more than as many as are in them.
        let held_max = 6 * (64 * KIB / RECORD_BYTES) * 16 * (EXTENT_BYTES + 4 + 8);
        let mut world = World::with_index(1600, 96 << 20).await;
        let log = world.next_life().open_with(config, true).await;
        let at = |n: u64| n * 2 * RECORD_BYTES;
        let mut written = vec![0u8; EXTENTS as usize];
        let bounded = |log: &ObjectLog| {
            let most = config.cached_bytes_max + held_max;
            assert!(log.cached_bytes() <= most, "{} of {most}", log.cached_bytes());
        };
        for n in 0..EXTENTS {
            let data = bytes(1, RECORD_BYTES);
            log.write(object(1), at(n), data, Stability::Unstable).await.expect("room");
            written[n as usize] = 1;
            bounded(&log);
        }
        log.settle().await.expect("settled");
        assert!(log.cached_bytes() <= config.cached_bytes_max);
        for round in 0..5_000 {
            let n = below(EXTENTS);
            if round % 2 == 0 {
                let byte = 2 + below(200) as u8;
                let data = bytes(byte, RECORD_BYTES);
                log.write(object(1), at(n), data, Stability::Unstable).await.expect("room");
                written[n as usize] = byte;
            }
            let n = below(EXTENTS);
            let read = flat(&log.read(object(1), at(n), 2 * RECORD_BYTES).await.expect("read"));
            let (data, gap) = read.split_at(RECORD_BYTES as usize);
            assert!(data.iter().all(|byte| *byte == written[n as usize]));
            assert!(gap.iter().all(|byte| *byte == 0));
            bounded(&log);
        }
        log.settle().await.expect("settled");
        assert!(log.cached_bytes() <= config.cached_bytes_max);
        let stat = log.stat(object(1)).await.expect("there");
        assert_eq!(stat.stored_bytes, EXTENTS * RECORD_BYTES);
        // In steps, none of which has all of it in memory.
        log.punch(object(1), 0, at(EXTENTS / 4), false, Stability::Unstable).await.expect("room");
        log.truncate(object(1), at(EXTENTS / 2), Stability::Unstable).await.expect("room");
        let stat = log.stat(object(1)).await.expect("there");
        assert_eq!(stat.stored_bytes, EXTENTS / 4 * RECORD_BYTES);
        log.delete(object(1)).await.expect("deleted");
        log.settle().await.expect("settled");
        assert!(log.cached_bytes() <= config.cached_bytes_max);
        drop(log);
        let store = world.next_life().open_store().await;
        let found = check_index(&store, &|_| {}).await.expect("readable");
        assert_eq!((found.findings, found.extents), (vec![], 0));
    });
}

/// Rows of objects from before they told how much is stored: it is counted, and told by the next row.
#[test]
fn rows_from_before_they_told_how_much_is_stored_are_read() {
    Reactor::simulated(2).block_on(async {
        let mut world = World::new(96).await;
        let log = world.next_life().open(true).await;
        for n in 0..6 {
            for at in [0, 50_000, 100_000] {
                log.write(object(n), at, bytes(1, 9_000), Stability::Unstable).await.expect("room");
            }
            log.truncate(object(n), 101_000, Stability::Unstable).await.expect("room");
        }
        log.settle().await.expect("settled");
        drop(log);
        let store = world.next_life().open_store().await;
        let make_old = async |store: &Store, n: u64| {
            let key = key(b'O', object(n));
            let mut row = store.get(&key).await.expect("reads").expect("there").to_vec();
            assert_eq!(row[0], 2);
            row[0] = 1;
            row.drain(24..32);
            let mut batch = Batch::default();
            batch.put(&key, &row);
            store.apply(batch).expect("room");
        };
        for n in 0..6 {
            make_old(&store, n).await;
        }
        let found = check_index(&store, &|_| {}).await.expect("readable");
        assert_eq!(found.findings, []);
        store.close().await.expect("closes");
        drop(store);
        let log = world.next_life().open(false).await;
        let stat = Stat { size: 101_000, stored_bytes: 19_000 };
        for n in 0..6 {
            assert_eq!(log.stat(object(n)).await, Ok(stat));
        }
        log.write(object(0), 10_000, bytes(2, 1_000), Stability::Unstable).await.expect("room");
        log.truncate(object(1), 4_000, Stability::Unstable).await.expect("room");
        log.punch(object(2), 100, 50_000, false, Stability::Unstable).await.expect("room");
        log.delete(object(3)).await.expect("deleted");
        log.settle().await.expect("settled");
        let check = async |log: &ObjectLog| {
            let of = async |n: u64| log.stat(object(n)).await.map(|stat| stat.stored_bytes);
            assert_eq!(of(0).await, Ok(20_000));
            assert_eq!(of(1).await, Ok(4_000));
            assert_eq!(of(2).await, Ok(100 + 8_900 + 1_000));
            assert_eq!(of(3).await, Err(LogError::NoSuchObject));
            assert_eq!(of(4).await, Ok(19_000));
        };
        check(&log).await;
        drop(log);
        let epoch = world.next_life().epoch;
        let store = Store::open(world.store.clone(), epoch, KV).await.expect("a store");
        for (n, format) in [(0, 2), (1, 2), (2, 2), (4, 1), (5, 1)] {
            let row = store.get(&key(b'O', object(n))).await.expect("reads").expect("there");
            assert_eq!(row[0], format);
        }
        let found = check_index(&store, &|_| {}).await.expect("readable");
        assert_eq!(found.findings, []);
        store.close().await.expect("closes");
        drop(store);
        check(&world.next_life().open(false).await).await;
    });
}
