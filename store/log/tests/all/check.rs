//! The check of the index of a log that goes on: what is planted is found as what it is, and changes are no finding.

use crate::support::damage::{get, log_of_eight, set, sorts};
use crate::support::model::{Model, TASKS, below, check_all, config, object, work};
use crate::support::{World, key, seeds};
use levada_base::ids::ObjectId;
use levada_base::planted;
use levada_base::reactor::{self, Group, Reactor};
use levada_kv::Store;
use levada_log::{IndexFinding, IndexReport, LogError, ObjectLog, Stability, check_index};
use std::cell::{Cell, RefCell};
use std::ops::Bound;
use std::rc::Rc;
use std::time::Duration;

async fn checked(log: &ObjectLog) -> IndexReport {
    let report = log.check_index(below(2) == 0, &|_| {}).await.expect("reads");
    report.expect("no other check runs")
}

/// Objects so many that their extents are several pages.
const OBJECTS: u64 = 300;

async fn change(log: ObjectLog, is_over: Rc<Cell<bool>>) {
    while !is_over.get() {
        let id = object(below(OBJECTS));
        let offset = below(60) * 1000;
        let done = match below(20) {
            0..14 => {
                let data = crate::support::bytes(1, 1 + below(1500));
                log.write(id, offset, data, Stability::Unstable).await.map(drop)
            }
            14 => log.truncate(id, offset, Stability::Unstable).await.map(drop),
            15 | 16 => {
                log.punch(id, offset, below(9000), true, Stability::Unstable).await.map(drop)
            }
            17 if below(8) == 0 => log.delete(id).await.map(drop),
            _ => log.commit(log.seq()).await.map(drop),
        };
        assert!(matches!(done, Ok(()) | Err(LogError::Full)), "{done:?}");
        if below(4) == 0 {
            reactor::sleep(Duration::from_micros(below(300))).await;
        }
    }
}

/// Checks of a log with many extents, among changes: how many rows were read.
fn checks(seed: u64) -> u64 {
    Reactor::simulated(seed).block_on(async {
        let mut world = World::new(192).await;
        let mut rows = 0;
        for life in 0..2 {
            let (node, parts) = (Group::new(), world.next_life());
            let ran = reactor::spawn_in(&node, async move {
                let log = parts.open(life == 0).await;
                let is_over = Rc::new(Cell::new(false));
                let tasks: Vec<_> = (0..3)
                    .map(|_| reactor::spawn(change(log.clone(), Rc::clone(&is_over))))
                    .collect();
                let mut rows = 0;
                for _ in 0..6 {
                    reactor::sleep(Duration::from_millis(below(60))).await;
                    let report = checked(&log).await;
                    assert_eq!(report.findings, [], "seed {seed}");
                    rows += report.rows;
                }
                is_over.set(true);
                for task in tasks {
                    task.await.expect("it lives");
                }
                rows
            });
            rows += ran.await.unwrap_or_else(|| panic!("seed {seed}"));
            node.kill();
            world.cut_power().await;
        }
        rows
    })
}

#[test]
fn changes_are_no_finding() {
    let rows: u64 = seeds(3).map(checks).sum();
    assert!(rows > 3 * 12 * 1024, "{rows} rows");
}

/// The same with few objects and in a log so small that it is cleaned all the time.
fn checks_of_a_small_log(seed: u64) -> u64 {
    Reactor::simulated(seed).block_on(async {
        let mut world = World::new(48).await;
        let model = Rc::new(RefCell::new(Model::default()));
        let mut cleaned = 0;
        for life in 0..3 {
            let (node, parts) = (Group::new(), world.next_life());
            let model = Rc::clone(&model);
            let ran = reactor::spawn_in(&node, async move {
                let log = parts.open(life == 0).await;
                check_all(&log, &model, seed).await;
                for task in 0..TASKS {
                    reactor::spawn(work(log.clone(), Rc::clone(&model), task, 100_000));
                }
                for _ in 0..30 {
                    reactor::sleep(Duration::from_millis(below(20))).await;
                    assert_eq!(checked(&log).await.findings, [], "seed {seed}");
                }
                log.counters().cleaned_segments
            });
            cleaned += ran.await.unwrap_or_else(|| panic!("seed {seed}"));
            node.kill();
            world.cut_power().await;
        }
        cleaned
    })
}

#[test]
fn what_a_cleaner_moves_is_no_finding() {
    let cleaned: u64 = seeds(3).map(checks_of_a_small_log).sum();
    assert!(cleaned > 10, "{cleaned} segments were cleaned");
}

#[test]
fn a_check_that_believes_too_much_is_found() {
    // The first seed that finds them, now, stands first: each takes some seconds.
    let is_noticed = || (1..60).any(|seed| std::panic::catch_unwind(|| checks(seed)).is_err());
    planted::choose(Some("log-removals-not-told"));
    assert!(is_noticed());
    planted::choose(Some("log-first-sight-believed"));
    assert!(is_noticed());
    planted::choose(Some("log-object-of-two-moments"));
    assert!(is_noticed());
    planted::choose(None);
}

/// What a check finds after a damage done to the rows of a log, before it is opened or while it goes on.
fn found(is_open: bool, damage: impl AsyncFnOnce(&Store)) -> Vec<IndexFinding> {
    Reactor::simulated(5).block_on(async {
        let mut world = World::new(96).await;
        let log = log_of_eight(&mut world).await;
        drop(log);
        let parts = world.next_life();
        let (array, epoch) = (parts.array.clone(), parts.epoch);
        let store = parts.open_store().await;
        let mut damage = Some(damage);
        if !is_open {
            damage.take().expect("not done yet")(&store).await;
        }
        let log = ObjectLog::open(array, store.clone(), config(), epoch).await.expect("opens");
        if let Some(damage) = damage {
            let report = checked(&log).await;
            assert_eq!((&report.findings[..], report.objects), (&[][..], 8));
            assert!(report.extents >= 8 && report.rows > 17, "{report:?}");
            damage(&store).await;
        }
        checked(&log).await.findings
    })
}

#[test]
fn rows_that_make_no_sense_are_told_once() {
    for tag in *b"MLGOE" {
        let found = found(true, async |store| {
            let (from, to) = ([tag], [tag + 1]);
            let (from, to) = (Bound::Included(&from[..]), Bound::Excluded(&to[..]));
            let rows = store.scan(from, to, 1).await.expect("reads");
            set(store, &rows[0].0, Some(b"nonsense"));
        });
        assert_eq!(sorts(&found), ["index-row"], "{}: {found:?}", char::from(tag));
    }
    let found = found(true, async |store| {
        for key in [&b"A"[..], b"Mx", b"\xff", b"S9"] {
            set(store, key, Some(b"1"));
        }
    });
    assert_eq!(sorts(&found), ["index-row"; 4], "{found:?}");
}

#[test]
fn sums_are_counted() {
    // Both before a log goes by them and after.
    for is_open in [false, true] {
        let found = found(is_open, async |store| {
            let segment = [b'G', 0, 0, 0, 0];
            let mut row = get(store, &segment).await;
            // Live bytes and sizes.
            row[34] += 1;
            row[48] += 3;
            set(store, &segment, Some(&row));
            let mut row = get(store, b"M").await;
            row[74] += 1;
            set(store, b"M", Some(&row));
        });
        assert_eq!(sorts(&found), ["index-sum"; 3], "{is_open}: {found:?}");
        for (says, has) in found.iter().filter_map(IndexFinding::says_has) {
            assert!(says == has + 3 || says == has + (1 << 16), "{is_open}: {found:?}");
        }
    }
    let found = found(true, async |store| set(store, &[b'G', 0, 0, 0, 0], None));
    assert_eq!(sorts(&found), ["index-sum"; 3], "{found:?}");
}

#[test]
fn objects_and_their_bytes_are_held_against_each_other() {
    for is_open in [false, true] {
        let lost = |id: ObjectId| async move |store: &Store| set(store, &key(b'O', id), None);
        let found = self::found(is_open, lost(object(3)));
        let no_object = IndexFinding::NoObject { object: object(3), offset: 0 };
        assert!(found.contains(&no_object), "{is_open}: {found:?}");

        let found = self::found(is_open, async |store| {
            let mut row = get(store, &key(b'O', object(4))).await;
            row[8..16].copy_from_slice(&100_u64.to_le_bytes());
            set(store, &key(b'O', object(4)), Some(&row));
        });
        let behind = IndexFinding::BehindEnd { object: object(4), offset: 0, size: 100 };
        assert!(found.contains(&behind), "{is_open}: {found:?}");
        assert!(found.iter().all(|found| found.object() == Some(object(4))), "{found:?}");

        // The same bytes again, a little further on; and elsewhere, where no stripe is.
        let found = self::found(is_open, async |store| {
            let mut row = get(store, &key(b'E', object(5))).await;
            let mut at = key(b'E', object(5));
            let last = at.len() - 2;
            at[last] = 0x10;
            row[4..8].copy_from_slice(&20_u32.to_le_bytes());
            row[24..32].copy_from_slice(&0x1000_u64.to_le_bytes());
            set(store, &at, Some(&row));
        });
        let overlap = IndexFinding::Overlap { object: object(5), offset: 0x1000 };
        let outside = IndexFinding::Outside { object: object(5), offset: 0x1000, segment: 20 };
        assert!(found.contains(&overlap) && found.contains(&outside), "{is_open}: {found:?}");
    }
}

#[test]
fn it_counts_what_the_check_of_a_store_counts() {
    Reactor::simulated(7).block_on(async {
        let mut world = World::new(96).await;
        let parts = world.next_life();
        let (array, epoch) = (parts.array.clone(), parts.epoch);
        drop(parts.open(true).await);
        let store = world.next_life().open_store().await;
        let log = ObjectLog::open(array, store.clone(), config(), epoch).await.expect("opens");
        for n in 0..2000 {
            let written =
                log.write(object(n), 0, crate::support::bytes(1, 10), Stability::Unstable);
            written.await.expect("room");
        }
        log.settle().await.expect("settled");
        let one = checked(&log).await;
        let still = check_index(&store, &|_| {}).await.expect("reads");
        assert_eq!(
            (one.rows, one.objects, one.extents),
            (still.rows, still.objects, still.extents)
        );
        assert_eq!((one.found, still.found), (0, 0));
    });
}
