//! An index against its segments: what is planted in one of them is found as what it is, and nothing else is.

use crate::support::model::object;
use crate::support::{World, key};
use levada_base::reactor::Reactor;
use levada_kv::{Batch, Store};
use levada_log::{SegmentFinding, SegmentReport, Stability};
use levada_raid::Array;

const BYTES: u64 = 30_000;

/// What is found of eight objects of one extent each, written over, cut and deleted before, after a damage.
fn found(damage: impl AsyncFnOnce(&World, &Store)) -> SegmentReport {
    Reactor::simulated(7).block_on(async {
        let mut world = World::new(96).await;
        let log = world.next_life().open(true).await;
        for n in 1..12 {
            for byte in [0, n as u8] {
                let data = crate::support::bytes(byte, BYTES);
                log.write(object(n), 0, data, Stability::Unstable).await.expect("room");
            }
        }
        log.truncate(object(9), 10, Stability::Unstable).await.expect("room");
        for n in 9..12 {
            log.delete(object(n)).await.expect("room");
        }
        log.settle().await.expect("settled");
        drop(log);
        let store = world.next_life().open_store().await;
        let before = world.check_segments(&store).await.expect("readable");
        assert_eq!(before.findings, []);
        assert!(before.is_replayed && before.records > 20 && before.stripes > 1, "{before:?}");
        damage(&world, &store).await;
        world.check_segments(&store).await.expect("readable")
    })
}

async fn set(store: &Store, key: &[u8], value: Option<&[u8]>) {
    let mut batch = Batch::default();
    match value {
        Some(value) => batch.put(key, value),
        None => batch.delete(key),
    }
    let applied = store.apply(batch).expect("room");
    store.durable(applied).await.expect("durable");
}

async fn row(store: &Store, key: &[u8]) -> Vec<u8> {
    store.get(key).await.expect("reads").expect("there").to_vec()
}

fn sorts(report: &SegmentReport) -> Vec<&'static str> {
    report.findings.iter().map(SegmentFinding::sort).collect()
}

/// At each of these bytes of an extent's row: its place (segment, stripe, byte), version, and checksums.
#[test]
fn an_extent_that_is_elsewhere_or_another_is_found() {
    for (at, also_replay) in [(4, false), (8, false), (12, false), (16, true), (56, false)] {
        let report = found(async |_, store| {
            let key = key(b'E', object(3));
            let mut value = row(store, &key).await;
            value[at] ^= 1;
            set(store, &key, Some(&value)).await;
        });
        let SegmentFinding::NoRecord { object: of, offset: 0, .. } = report.findings[0] else {
            panic!("byte {at}: {report:?}")
        };
        assert_eq!(of, object(3));
        let expected = if also_replay { &["record", "replay"][..] } else { &["record"] };
        assert_eq!(sorts(&report), expected, "byte {at}: {report:?}");
    }
}

#[test]
fn what_only_one_of_both_has_is_found() {
    let lost = found(async |_, store| {
        set(store, &key(b'O', object(4)), None).await;
        set(store, &key(b'E', object(4)), None).await;
    });
    assert_eq!(lost.findings, [SegmentFinding::NotInIndex { object: object(4), size: BYTES }]);
    let lost = found(async |_, store| set(store, &key(b'E', object(4)), None).await);
    assert_eq!(lost.findings, [SegmentFinding::Bytes { object: object(4), offset: 0 }]);
    // One that was deleted is there again, and another is longer than it was made.
    let back = found(async |_, store| {
        let row = row(store, &key(b'O', object(5))).await;
        set(store, &key(b'O', object(9)), Some(&row)).await;
    });
    assert_eq!(back.findings, [SegmentFinding::NotInSegments { object: object(9) }]);
    let longer = found(async |_, store| {
        let key = key(b'O', object(5));
        let mut value = row(store, &key).await;
        value[8..16].copy_from_slice(&(BYTES + 1).to_le_bytes());
        set(store, &key, Some(&value)).await;
    });
    let size = SegmentFinding::Size { object: object(5), says: BYTES + 1, has: BYTES };
    assert_eq!(longer.findings, [size]);
}

/// What was in it shows as extents without their record, and not as differences of everything else.
#[test]
fn a_stripe_that_is_gone_is_found() {
    let report =
        found(async |world, _| world.array.discard_stripes(0, 1).await.expect("given back"));
    assert_eq!(report.findings[0], SegmentFinding::NoStripe { segment: 0, stripe: 0 });
    assert!(!report.is_replayed);
    let rest = &sorts(&report)[1..];
    assert!(rest.iter().all(|sort| *sort == "record"), "{report:?}");
}
