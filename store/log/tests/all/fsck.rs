//! The check of an index: a log's rows fit together at any moment at which the power goes, the objects that they amount
//! to are those of the log that opens over them, and what is planted is found as what it is.

use crate::support::damage::{get, log_of_eight, set, sorts};
use crate::support::model::{Model, TASKS, below, check_all, object, work};
use crate::support::{KV, World, key, seeds};
use levada_base::ids::ObjectId;
use levada_base::reactor::{self, Group, Reactor};
use levada_kv::Store;
use levada_log::{
    IndexFinding, IndexReport, IndexedObject, IndexedObjects, LogError, ObjectLog, Stability,
    check_index,
};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::rc::Rc;
use std::time::Duration;

async fn store(world: &mut World) -> Store {
    let epoch = world.next_life().epoch;
    Store::open(world.store.clone(), epoch, KV).await.expect("a store")
}

async fn checked(store: &Store) -> IndexReport {
    check_index(store, &|_| {}).await.expect("reads")
}

async fn objects(store: &Store) -> BTreeMap<ObjectId, Option<u64>> {
    let mut found = BTreeMap::new();
    let mut objects = IndexedObjects::new(store).await.expect("reads");
    while let Some(IndexedObject { id, size }) = objects.next().await.expect("reads") {
        assert!(found.insert(id, size).is_none(), "met twice");
    }
    found
}

/// What staged changes the store holds.
async fn staged(store: &Store) -> usize {
    store.scan(Bound::Included(b"S"), Bound::Excluded(b"T"), 9999).await.expect("reads").len()
}

/// What the index amounts to is what the log says that opens over it.
async fn compare(
    log: &ObjectLog,
    found: &BTreeMap<ObjectId, Option<u64>>,
    model: &RefCell<Model>,
    seed: u64,
) {
    let known: Vec<_> = model.borrow().objects.keys().copied().collect();
    for id in known {
        let size = match log.stat(id).await {
            Ok(stat) => Some(stat.size),
            Err(LogError::NoSuchObject) => None,
            Err(error) => panic!("seed {seed}: {id:?}: {error}"),
        };
        assert_eq!(found.get(&id).copied().flatten(), size, "seed {seed}: {id:?}");
    }
}

fn lives(seed: u64) -> usize {
    Reactor::simulated(seed).block_on(async {
        let mut world = World::new(96).await;
        let model = Rc::new(RefCell::new(Model::default()));
        let mut staged_rows = 0;
        for life in 0..4 {
            let node = Group::new();
            let parts = world.next_life();
            let task_model = Rc::clone(&model);
            reactor::spawn_in(&node, async move {
                let log = parts.open(life == 0).await;
                check_all(&log, &task_model, seed).await;
                for task in 0..TASKS {
                    reactor::spawn(work(log.clone(), Rc::clone(&task_model), task, 10_000));
                }
                reactor::sleep(Duration::MAX / 4).await;
            });
            let least = if life == 0 { 30_000 } else { 1_000 };
            reactor::sleep(Duration::from_micros(least + below(60_000))).await;
            node.kill();
            world.cut_power().await;

            let store = store(&mut world).await;
            let report = checked(&store).await;
            assert_eq!(report.findings, [], "seed {seed}, life {life}");
            assert!(report.is_safe_to_open());
            let deep = world.check_segments(&store).await.expect("readable");
            assert_eq!(deep.findings, [], "seed {seed}, life {life}");
            assert!(deep.is_replayed && deep.stripes > 0);
            let found = objects(&store).await;
            staged_rows += staged(&store).await;
            store.close().await.expect("closes");
            drop(store);
            let (node, parts) = (Group::new(), world.next_life());
            let task_model = Rc::clone(&model);
            let compared = reactor::spawn_in(&node, async move {
                let log = parts.open(false).await;
                compare(&log, &found, &task_model, seed).await;
                check_all(&log, &task_model, seed).await;
            });
            compared.await.expect("it lives");
            node.kill();
            world.cut_power().await;
        }
        staged_rows
    })
}

#[test]
fn an_index_is_sound_whenever_the_power_goes() {
    let staged: usize = seeds(6).map(lives).sum();
    assert!(staged > 0, "nothing was staged");
}

/// What a check finds after a damage, the sorts of it, and what is left once sums are mended.
fn found(damage: impl AsyncFnOnce(&Store)) -> (Vec<IndexFinding>, Vec<IndexFinding>) {
    Reactor::simulated(5).block_on(async {
        let mut world = World::new(96).await;
        let log = log_of_eight(&mut world).await;
        // These stay staged.
        log.write(object(9), 0, crate::support::bytes(9, 500), Stability::Durable)
            .await
            .expect("room");
        drop(log);
        let store = store(&mut world).await;
        let report = checked(&store).await;
        assert_eq!((&report.findings[..], report.objects, report.last_ino(1)), (&[][..], 8, 9));
        assert_eq!(report.last_ino(2), 0, "another file system has numbers of its own");
        assert!(report.extents >= 8 && report.rows > 17, "{report:?}");
        damage(&store).await;
        let before = all_rows(&store).await;
        let report = checked(&store).await;
        assert!(all_rows(&store).await == before, "nothing is written");
        report.mend(&store).await.expect("room");
        let after = checked(&store).await;
        assert!(after.findings.iter().all(|left| !left.is_sum()), "{after:?}");
        (report.findings, after.findings)
    })
}

async fn all_rows(store: &Store) -> Vec<(levada_kv::Bytes, levada_kv::Bytes)> {
    store.scan(Bound::Unbounded, Bound::Unbounded, 99_999).await.expect("reads")
}

#[test]
fn rows_that_make_no_sense_are_told_once() {
    for tag in *b"MLGOES" {
        let (found, left) = found(async |store| {
            let (from, to) = ([tag], [tag + 1]);
            let (from, to) = (Bound::Included(&from[..]), Bound::Excluded(&to[..]));
            let rows = store.scan(from, to, 1).await.expect("reads");
            set(store, &rows[0].0, Some(b"nonsense"));
        });
        assert_eq!(sorts(&found), ["index-row"], "{}: {found:?}", char::from(tag));
        assert_eq!(found, left);
    }
    let (found, _) = found(async |store| {
        for key in [&b"A"[..], b"Mx", b"\xff", b"Z9"] {
            set(store, key, Some(b"1"));
        }
    });
    assert_eq!(sorts(&found), ["index-row"; 4], "{found:?}");
}

#[test]
fn an_index_without_a_log_is_told() {
    let (found, _) = found(async |store| set(store, b"M", None));
    assert_eq!(found, [IndexFinding::NoLog]);
}

#[test]
fn sums_are_counted_and_mended() {
    let (found, left) = found(async |store| {
        let segment = [b'G', 0, 0, 0, 0];
        let mut row = get(store, &segment).await;
        // Live bytes and sizes.
        row[32] ^= 0x40;
        row[48] += 3;
        set(store, &segment, Some(&row));
        let mut row = get(store, b"M").await;
        row[72] ^= 0x40;
        set(store, b"M", Some(&row));
    });
    assert_eq!(sorts(&found), ["index-sum"; 3], "{found:?}");
    let says_has: Vec<_> = found.iter().filter_map(IndexFinding::says_has).collect();
    assert!(says_has.iter().all(|(says, has)| says != has), "{found:?}");
    assert_eq!(left, []);
}

#[test]
fn objects_and_their_bytes_are_held_against_each_other() {
    let (found, left) = found(async |store| set(store, &key(b'O', object(3)), None));
    let no_object = IndexFinding::NoObject { object: object(3), offset: 0 };
    assert!(found.contains(&no_object), "{found:?}");
    assert_eq!(left, [no_object], "the sums are those of what is there");

    let (found, left) = self::found(async |store| {
        let mut row = get(store, &key(b'O', object(4))).await;
        row[8..16].copy_from_slice(&100_u64.to_le_bytes());
        set(store, &key(b'O', object(4)), Some(&row));
    });
    let behind = IndexFinding::BehindEnd { object: object(4), offset: 0, size: 100 };
    assert_eq!((found.contains(&behind), found.len()), (true, left.len()), "{found:?}");

    // Where the segment's row says that no stripe is.
    let (found, _) = self::found(async |store| {
        let segment = [b'G', 0, 0, 0, 0];
        let mut row = get(store, &segment).await;
        row[4..8].copy_from_slice(&0_u32.to_le_bytes());
        set(store, &segment, Some(&row));
    });
    assert!(found.iter().any(|found| matches!(found, IndexFinding::Outside { segment: 0, .. })));

    let (found, _) = self::found(async |store| {
        // The same bytes again, a little further on.
        let row = get(store, &key(b'E', object(5))).await;
        let mut at = key(b'E', object(5));
        let last = at.len() - 2;
        at[last] = 0x10;
        let mut shifted = row.clone();
        shifted[28..36].copy_from_slice(&0x1000_u64.to_le_bytes());
        set(store, &at, Some(&shifted));
    });
    assert!(!found.is_empty(), "{found:?}");
}

/// Damages rows at random; whether a log could be opened afterwards.
fn random(seed: u64) -> bool {
    Reactor::simulated(seed).block_on(async {
        let mut world = World::new(96).await;
        let (node, parts) = (Group::new(), world.next_life());
        let filled = reactor::spawn_in(&node, async move {
            let log = parts.open(true).await;
            for n in 1..30 {
                let bytes = crate::support::bytes(n as u8, 1 + below(20_000));
                log.write(object(n), below(9000), bytes, Stability::Unstable).await.expect("room");
                if n % 3 == 0 {
                    log.truncate(object(n), below(20_000), Stability::Unstable)
                        .await
                        .expect("room");
                }
            }
            log.settle().await.expect("settled");
            log.write(object(40), 0, crate::support::bytes(9, 500), Stability::Durable)
                .await
                .expect("room");
        });
        filled.await.expect("it lives");
        node.kill();
        world.cut_power().await;

        let store = store(&mut world).await;
        for _ in 0..1 + below(3) {
            let rows = all_rows(&store).await;
            let (key, value) = &rows[below(rows.len() as u64) as usize];
            let (mut key, mut value) = (key.to_vec(), value.to_vec());
            match below(4) {
                0 => {
                    set(&store, &key, None);
                    continue;
                }
                1 => {
                    let at = below(key.len() as u64) as usize;
                    key[at] ^= 1 << below(8);
                }
                2 => value.truncate(below(value.len() as u64) as usize),
                _ => {
                    let at = below(value.len() as u64) as usize;
                    value[at] ^= 1 << below(8);
                }
            }
            set(&store, &key, Some(&value));
        }
        let report = checked(&store).await;
        report.mend(&store).await.expect("room");
        let after = checked(&store).await;
        assert!(after.findings.iter().all(|left| !left.is_sum()), "seed {seed}: {after:?}");
        let left = report.findings.iter().filter(|found| !found.is_sum()).count();
        assert_eq!(after.found, left as u64, "seed {seed}: {report:?} {after:?}");
        let found = objects(&store).await;
        store.close().await.expect("closes");
        drop(store);
        if !after.is_safe_to_open() {
            return false;
        }
        // What is left costs the objects that it is about, and no log stops or counts wrong because of it.
        let (node, parts) = (Group::new(), world.next_life());
        let opened = reactor::spawn_in(&node, async move {
            let log = parts.open(false).await;
            for id in found.keys() {
                let deleted = log.delete(*id).await;
                assert!(matches!(deleted, Ok(_) | Err(LogError::Index { .. })), "{deleted:?}");
            }
            log.settle().await.expect("settled");
        });
        assert!(opened.await.is_some(), "seed {seed}");
        node.kill();
        world.cut_power().await;
        let store = self::store(&mut world).await;
        let last = checked(&store).await;
        assert!(last.findings.iter().all(|left| !left.is_sum()), "seed {seed}: {last:?}");
        true
    })
}

#[test]
fn an_index_that_is_safe_to_open_opens_and_counts_right() {
    let opened = seeds(120).filter(|seed| random(*seed)).count();
    assert!((20..110).contains(&opened) || seeds(2).count() == 1, "{opened} were opened");
}
