//! Rows of the index that make no sense: the objects they belong to are refused, precisely and at once,
//! and every other object works on, also where the cleaner and the scrub meet the bad ones.

use crate::support::model::{flat, object};
use crate::support::{KV, World, key};
use levada_base::IoVec;
use levada_base::reactor::{self, Group, Reactor};
use levada_kv::{Batch, Store};
use levada_log::{LogError, Stability};

fn bytes(n: u64) -> IoVec {
    crate::support::bytes(n as u8, 30_000)
}

/// Also where the object has changes that were staged and reached no stripe.
#[test]
fn a_bad_row_with_staged_changes_stops_no_start() {
    Reactor::simulated(2).block_on(async {
        let mut world = World::new(96).await;
        let log = world.next_life().open(true).await;
        for n in 0..4 {
            log.write(object(n), 0, bytes(n), Stability::Unstable).await.expect("room");
        }
        log.settle().await.expect("settled");
        let staged = |n: u64| crate::support::bytes(n as u8 + 100, 500);
        for n in 0..4 {
            log.write(object(n), 0, staged(n), Stability::Durable).await.expect("room");
        }
        assert!(log.counters().staged_bytes > 0);
        drop(log);
        world.cut_power().await;
        let store = Store::open(world.store.clone(), world.next_life().epoch, KV).await;
        let store = store.expect("a store");
        let mut batch = Batch::default();
        batch.put(&key(b'O', object(2)), b"nonsense");
        store.apply(batch).expect("room");
        store.close().await.expect("closes");
        for _ in 0..3 {
            let log = world.next_life().open(false).await;
            for n in [0, 1, 3] {
                let read = flat(&log.read(object(n), 0, 600).await.expect("it is another object"));
                assert_eq!(read[..500], [n as u8 + 100; 500]);
                assert_eq!(read[500..], [n as u8; 100]);
            }
            let refused = LogError::Index { row: "object" };
            assert_eq!(log.read(object(2), 0, 10).await.err(), Some(refused));
            log.settle().await.expect("settled");
            drop(log);
        }
    });
}

#[test]
fn a_bad_row_costs_its_object_and_no_other() {
    Reactor::simulated(1).block_on(async {
        let mut world = World::new(96).await;
        let log = world.next_life().open(true).await;
        for n in 0..20 {
            log.write(object(n), 0, bytes(n), Stability::Unstable).await.expect("room");
            // What carries its size lies in the log too.
            log.truncate(object(n), 29_000, Stability::Unstable).await.expect("room");
        }
        log.settle().await.expect("settled");
        drop(log);

        let (no_object, no_extent) = (object(3), object(5));
        let store = Store::open(world.store.clone(), world.next_life().epoch, KV).await;
        let store = store.expect("a store");
        let mut batch = Batch::default();
        for (tag, id) in [(b'O', no_object), (b'E', no_extent)] {
            let key = key(tag, id);
            assert!(store.get(&key).await.expect("reads").is_some(), "that is the key of a row");
            batch.put(&key, b"nonsense");
        }
        store.apply(batch).expect("room");
        store.close().await.expect("closes");

        let (node, parts) = (Group::new(), world.next_life());
        let opened = reactor::spawn_in(&node, async move { parts.open(false).await });
        let log = opened.await.expect("the node lives");
        // Several times what the log holds: not without the cleaner.
        let total = log.space().total_bytes;
        let (mut written, mut round) = (0, 0);
        while written < 3 * total {
            round += 1;
            // Some stay as they are for a while, so that segments do not die by themselves.
            let is_due = |n: &u64| *n < 15 || *n % 16 == round % 16;
            for n in (0..20).filter(|n| ![3, 5].contains(n) && is_due(n)) {
                log.write(object(n), 0, bytes(n), Stability::Unstable).await.expect("room");
                written += 30_000;
            }
            for (id, row) in [(no_object, "object"), (no_extent, "extent")] {
                let refused = LogError::Index { row };
                let unstable = Stability::Unstable;
                assert_eq!(log.read(id, 0, 10).await.err().as_ref(), Some(&refused));
                // Its own row says how large it is.
                let stat = log.stat(id).await;
                assert!(if id == no_object { stat == Err(refused.clone()) } else { stat.is_ok() });
                let written = log.write(id, 0, bytes(1), unstable).await;
                assert_eq!(written.err().as_ref(), Some(&refused));
                let truncated = log.truncate(id, 1, unstable).await;
                assert_eq!(truncated.err().as_ref(), Some(&refused));
                assert_eq!(log.delete(id).await.err().as_ref(), Some(&refused));
            }
        }
        log.settle().await.expect("settled");
        assert!(log.counters().cleaned_segments > 0, "the cleaner ran");
        let report = log.scrub().await.expect("scrubbed");
        let all = i64::MAX as u64;
        assert_eq!(report.damaged, [(no_object, 0, all), (no_extent, 0, all)]);
        assert_eq!(report.objects, 20);
        for n in (0..20).filter(|n| ![3, 5].contains(n)) {
            let read = log.read(object(n), 0, 30_000).await.expect("it is another object");
            assert_eq!(flat(&read), vec![n as u8; 30_000]);
        }
        // And so it is in the next life; what was made anew from the segments is whole. The cleaner may be at work.
        node.kill();
        drop(log);
        let log = world.next_life().open(false).await;
        assert_eq!(log.stat(object(4)).await.expect("there").size, 30_000);
        assert_eq!(log.stat(no_object).await, Err(LogError::Index { row: "object" }));
        drop(log);
        let log = world.rebuild().await;
        for id in [no_object, no_extent] {
            assert_eq!(log.stat(id).await.expect("there").size, 29_000);
            let read = flat(&log.read(id, 0, 29_000).await.expect("whole"));
            assert_eq!(read, vec![id.ino.0 as u8; 29_000]);
        }
    });
}

/// They read as rows, and would have the log read elsewhere, or past the end of its tables.
#[test]
fn a_row_that_points_outside_the_log_is_bad() {
    Reactor::simulated(3).block_on(async {
        // Row, byte in it, number there: 24 segments of 4 stripes, 64 KiB each.
        let wrong = [
            (b'E', 4, 24, "segment"),
            (b'E', 4, u32::MAX, "segment"),
            (b'E', 8, 4, "stripe"),
            (b'E', 12, (64 << 10) - 30_000, "place"),
            (b'E', 12, u32::MAX, "place"),
            (b'O', 4, 25, "segment of the mark, and one"),
        ];
        let mut world = World::new(96).await;
        let log = world.next_life().open(true).await;
        for n in 0..=wrong.len() as u64 {
            log.write(object(n), 0, bytes(n), Stability::Unstable).await.expect("room");
            log.truncate(object(n), 29_000, Stability::Unstable).await.expect("room");
        }
        log.settle().await.expect("settled");
        drop(log);

        let store = Store::open(world.store.clone(), world.next_life().epoch, KV).await;
        let store = store.expect("a store");
        let mut batch = Batch::default();
        for (n, (tag, at, number, _)) in (0..).zip(wrong) {
            let key = key(tag, object(n));
            let mut row = store.get(&key).await.expect("reads").expect("there").to_vec();
            row[at..at + 4].copy_from_slice(&u32::to_le_bytes(number));
            batch.put(&key, &row);
        }
        store.apply(batch).expect("room");
        store.close().await.expect("closes");

        let log = world.next_life().open(false).await;
        for (n, (tag, .., what)) in (0..).zip(wrong) {
            let row = if tag == b'E' { "extent" } else { "object" };
            let refused = Some(LogError::Index { row });
            assert_eq!(log.read(object(n), 0, 10).await.err(), refused, "{what}");
            assert_eq!(log.delete(object(n)).await.err(), refused, "{what}");
        }
        let report = log.scrub().await.expect("scrubbed");
        assert_eq!(report.damaged.len(), wrong.len());
        let whole = object(wrong.len() as u64);
        assert_eq!(flat(&log.read(whole, 0, 9).await.expect("another")), [wrong.len() as u8; 9]);
    });
}
