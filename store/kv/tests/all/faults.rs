//! Damage, errors, full stores, later owners: each is told precisely, and nothing hangs.

use crate::common::Volatile;
use levada_base::ids::Seq;
use levada_base::reactor::{self, Group, Reactor};
use levada_base::units::MIB;
use levada_base::{Epoch, sync::oneshot};
use levada_device::{BlockError, Device};
use levada_kv::{Batch, Config, KvError, Store};
use std::ops::Bound;
use std::rc::Rc;
use std::time::Duration;

const CONFIG: Config = Config { log_bytes: 256 << 10, cache_bytes: 64 << 10 };

fn put(key: &str, bytes: usize) -> Batch {
    let mut batch = Batch::default();
    batch.put(key.as_bytes(), &vec![key.len() as u8; bytes]);
    batch
}

async fn applied(store: &Store, batch: Batch) -> Seq {
    store.room().await.expect("room");
    let seq = store.apply(batch).expect("runs");
    store.durable(seq).await.expect("durable");
    seq
}

fn area(bytes: u64) -> (Rc<Volatile>, Rc<dyn Device>) {
    let device = Rc::new(Volatile::new(bytes));
    (Rc::clone(&device), device)
}

#[test]
fn values_of_every_size_come_back_from_log_and_checkpoint() {
    Reactor::simulated(1).block_on(async {
        let (_, device) = area(16 * MIB);
        let sizes = [0, 1, 2047, 2048, 2049, 4000, 4001, 6048, 6049, 8000, 50_000, 65_000];
        let store = Store::create(Rc::clone(&device), Epoch(1), CONFIG).await.expect("made");
        for n in sizes {
            applied(&store, put(&format!("{n:06}"), n)).await;
        }
        for round in 0..3 {
            let store = Store::open(Rc::clone(&device), Epoch(1), CONFIG).await.expect("opens");
            for n in sizes {
                let value = store.get(format!("{n:06}").as_bytes()).await.expect("reads");
                assert_eq!(value.as_deref(), Some(&vec![6; n][..]), "round {round}");
            }
            let mut short = Batch::default();
            short.put(b"050000", &[6; 50_000][..]);
            short.delete(b"nothing");
            applied(&store, short).await;
            store.close().await.expect("closes");
            assert_eq!(store.get(b"x").await, Err(KvError::Stopped));
            assert_eq!(store.close().await, Err(KvError::Stopped));
        }
        let store = Store::open(device, Epoch(1), CONFIG).await.expect("opens");
        assert_eq!(store.usage().rows, sizes.len() as u64);
        assert_eq!(store.usage().log_bytes_used, 0, "a clean close leaves nothing to replay");
    });
}

#[test]
fn a_store_that_is_full_says_so_before_it_accepts_and_can_be_emptied() {
    Reactor::simulated(2).block_on(async {
        let (_, device) = area(8 * MIB);
        let store = Store::create(Rc::clone(&device), Epoch(1), CONFIG).await.expect("made");
        // Short values stay in leaves, long ones fill pages to the brim.
        for (round, value_bytes) in [300, 4096, 40_000, 2048, 4096].into_iter().enumerate() {
            let mut rows = 0;
            while store.room().await.is_ok() {
                let seq =
                    store.apply(put(&format!("{rows:08}"), value_bytes)).expect("there was room");
                rows += 1;
                if rows % 50 == 0 {
                    store.durable(seq).await.expect("durable");
                }
            }
            assert!(rows * value_bytes > MIB as usize, "round {round}: only {rows} rows fit");
            assert_eq!(store.room().await, Err(KvError::Full));
            let usage = store.usage();
            assert!(usage.bytes_used <= usage.bytes_max && usage.bytes_used > usage.bytes_max / 2);
            for row in 0..rows {
                store.room_to_free().await.expect("deleting works");
                let mut batch = Batch::default();
                batch.delete(format!("{row:08}").as_bytes());
                store.apply(batch).expect("deleting works");
            }
            store.durable(store.last_seq()).await.expect("durable");
            let left = store.scan(Bound::Unbounded, Bound::Unbounded, 9).await.expect("reads");
            assert_eq!(left, []);
        }
        store.close().await.expect("closes");
        let store = Store::open(device, Epoch(1), CONFIG).await.expect("opens");
        assert_eq!(store.usage().rows, 0);
    });
}

#[test]
fn a_full_store_goes_on_when_its_rows_are_written_again_and_again() {
    Reactor::simulated(3).block_on(async {
        let (device, area) = area(4 * MIB);
        let mut store = Store::create(Rc::clone(&area), Epoch(1), CONFIG).await.expect("made");
        let mut keys = 0u64;
        while store.room().await.is_ok() {
            store.apply(put(&format!("{keys:08}"), 200)).expect("room");
            keys += 1;
        }
        for round in 0..4000 {
            let key = reactor::random_u64() % keys;
            match store.room_to_free().await {
                Ok(()) => {}
                error => panic!("round {round}: {error:?}: {:?}", store.usage()),
            }
            store.apply(put(&format!("{key:08}"), 200)).expect("only replaces");
            if round % 1000 == 999 {
                store.durable(store.last_seq()).await.expect("durable");
                drop(store);
                device.cut();
                store = Store::open(Rc::clone(&area), Epoch(1), CONFIG).await.expect("opens");
                let rows = store.scan(Bound::Unbounded, Bound::Unbounded, usize::MAX).await;
                assert_eq!(rows.expect("reads").len() as u64, keys);
            }
        }
    });
}

#[test]
fn a_later_owner_is_respected() {
    Reactor::simulated(4).block_on(async {
        let (_, area) = area(4 * MIB);
        let first = Store::create(Rc::clone(&area), Epoch(1), CONFIG).await.expect("made");
        applied(&first, put("a", 10)).await;
        let second = Store::open(Rc::clone(&area), Epoch(5), CONFIG).await.expect("opens");
        assert_eq!(second.get(b"a").await.expect("reads").as_deref(), Some(&[1; 10][..]));
        drop(first);
        let late = Store::open(area, Epoch(4), CONFIG).await.err();
        let (ours, seen) = (Epoch(4), Epoch(5));
        assert_eq!(late, Some(KvError::Block(BlockError::Fenced { ours, seen })));
    });
}

#[test]
fn an_area_without_a_store_or_too_small_is_refused() {
    Reactor::simulated(5).block_on(async {
        let (_, empty) = area(4 * MIB);
        let opened = Store::open(empty, Epoch(1), CONFIG).await.err();
        assert_eq!(opened, Some(KvError::Damaged { what: "superblock magic", at: 0 }));
        let (_, small) = area(MIB);
        let made = Store::create(small, Epoch(1), CONFIG).await.err();
        assert_eq!(made, Some(KvError::TooSmall { bytes: MIB, bytes_min: 2 * MIB }));
    });
}

#[test]
fn damage_is_told_from_a_torn_tail() {
    Reactor::simulated(6).block_on(async {
        let (device, area) = area(4 * MIB);
        let open = || Store::open(Rc::clone(&area), Epoch(1), CONFIG);
        let store = Store::create(Rc::clone(&area), Epoch(1), CONFIG).await.expect("made");
        for n in 0..5 {
            applied(&store, put(&format!("{n}"), 100)).await;
        }
        drop(store);
        let log_at = 2 * 4096;
        // One superblock: the other is enough, and makes it whole.
        device.damage(100);
        assert_eq!(open().await.expect("opens").last_seq(), Seq(5));
        device.damage(4096 + 100);
        assert_eq!(open().await.expect("opens").last_seq(), Seq(5));
        device.damage(100);
        device.damage(4096 + 100);
        let opened = open().await.err();
        assert_eq!(opened, Some(KvError::Damaged { what: "superblock checksum", at: 0 }));
        device.damage(100);
        device.damage(4096 + 100);
        // A record in the middle: those behind it prove that it was acknowledged.
        device.damage(log_at + 4096 + 200);
        let opened = open().await.err();
        assert_eq!(opened, Some(KvError::Damaged { what: "intent log record", at: 4096 }));
        device.damage(log_at + 4096 + 200);
        assert_eq!(open().await.expect("opens").last_seq(), Seq(5));
        // The last one could be torn as well.
        device.damage(log_at + 4 * 4096 + 200);
        let store = open().await.expect("opens");
        assert_eq!(store.last_seq(), Seq(4));
        store.close().await.expect("closes");
        // The checkpoint: some row, wherever it lies.
        let start = 4 * MIB as usize / 16;
        let row = device.peek(start as u64, 2 * MIB as usize);
        let value: Vec<usize> =
            row.windows(100).enumerate().filter(|(_, w)| *w == [1; 100]).map(|(n, _)| n).collect();
        assert!(!value.is_empty(), "rows lie in the space");
        for at in value {
            device.damage((start + at + 50) as u64);
        }
        let store = open().await.expect("opens");
        let read = store.get(b"1").await;
        assert!(matches!(read, Err(KvError::Damaged { .. })), "{read:?}");
        assert_eq!(store.apply(put("x", 1)), Err(KvError::Stopped));
    });
}

/// The device fails at every possible operation: every caller hears of it, nothing hangs, and what
/// was durable is there afterwards.
#[test]
fn an_error_at_any_moment_stops_the_store() {
    for seed in 0..60 {
        Reactor::simulated(seed).block_on(async {
            let (device, area) = area(4 * MIB);
            let store = Store::create(Rc::clone(&area), Epoch(1), CONFIG).await.expect("made");
            device.fails_after.set(Some(reactor::random_u64() % 120));
            let node = Group::new();
            let (report, durable) = oneshot::channel();
            let caller = store.clone();
            reactor::spawn_in(&node, async move {
                let mut last = Seq(0);
                let error = loop {
                    let step = async {
                        caller.room().await?;
                        let key = reactor::random_u64() % 500;
                        let seq = caller.apply(put(&format!("{key}"), 2000))?;
                        if seq.0.is_multiple_of(7) {
                            caller.durable(seq).await?;
                            last = seq;
                        }
                        caller.get(format!("{}", key + 1).as_bytes()).await.map(|_| ())
                    };
                    if let Err(error) = step.await {
                        break error;
                    }
                };
                report.send((last, error));
            });
            let (last, error) = reactor::timeout(Duration::from_secs(60), durable)
                .await
                .expect("no hang")
                .expect("an answer");
            let expected = [KvError::Block(BlockError::Gone), KvError::Stopped];
            assert!(expected.contains(&error), "seed {seed}: {error:?}");
            assert_eq!(store.apply(put("x", 1)), Err(KvError::Stopped));
            assert_eq!(store.room().await, Err(KvError::Stopped));
            assert_eq!(store.close().await, Err(KvError::Stopped));
            drop(store);
            // Opening fails as well, wherever the device goes, and succeeds once it is back.
            for _ in 0..5 {
                device.cut();
                device.fails_after.set(Some(reactor::random_u64() % 30));
                let store = Store::open(Rc::clone(&area), Epoch(2), CONFIG).await;
                assert!(store.is_ok() || store.err() == Some(KvError::Block(BlockError::Gone)));
            }
            device.fails_after.set(None);
            let store = Store::open(area, Epoch(3), CONFIG).await.expect("opens");
            assert!(store.last_seq() >= last);
            assert!(reactor::timeout(Duration::from_secs(60), store.close()).await.is_ok());
        });
    }
}
