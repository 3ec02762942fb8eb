//! Degraded reads that follow each other share what they read of a stripe. On modelled drives and virtual time.

use crate::common::{ARRAY, BLOCK, Rig, pattern, read};
use levada_base::ids::Uuid;
use levada_base::reactor::{self, Group, Reactor};
use levada_base::units::{KIB, MIB};
use levada_base::{BufMut, Epoch};
use levada_device::{Device, DriveModel, Durability, ModelDevice, RamDevice};
use levada_raid::{Array, ArraySpec, Level, MemberSpec, RaidArray};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

const CHUNK: u64 = 64 * KIB;
const STRIPES: u64 = 64;

/// RAID 6 of 8 + 2 on `nvme` members, full.
async fn full() -> RaidArray {
    let member = |index: u16| {
        let name = format!("drive-{index}");
        let ram = Rc::new(RamDevice::new(&name, 16 * MIB));
        MemberSpec {
            device: Rc::new(ModelDevice::new(ram, DriveModel::nvme())),
            uuid: Uuid::from_u128(1000 + u128::from(index)),
            name,
            enclosure: index,
        }
    };
    let spec = ArraySpec {
        uuid: ARRAY,
        name: "test".to_owned(),
        level: Level::Raid6,
        chunk_bytes: CHUNK,
        block_bytes: None,
        journal_bytes: None,
        members: (0..10).map(member).collect(),
        spares: 0,
    };
    let array = RaidArray::create(spec, Epoch(1)).await.expect("created");
    for stripe in 0..STRIPES {
        crate::common::write_stripe(&array, stripe, 1).await.expect("written");
    }
    array.flush().await.expect("flushed");
    array
}

fn bytes_of_members(array: &RaidArray) -> u64 {
    array.status().members.iter().map(|member| member.bytes_read).sum()
}

/// Reads of this size at these places, so many at once: bytes per second, and what members read for each.
async fn rate(array: &RaidArray, bytes: u64, depth: usize, places: Vec<u64>) -> (f64, f64) {
    let (total, before) = (places.len() as u64 * bytes, bytes_of_members(array));
    let (places, begun) = (Rc::new(places), reactor::now());
    let next = Rc::new(Cell::new(0));
    let workers: Vec<_> = (0..depth)
        .map(|_| {
            let (array, next, places) = (array.clone(), Rc::clone(&next), Rc::clone(&places));
            reactor::spawn(async move {
                while let Some(at) = places.get(next.get()).copied() {
                    next.set(next.get() + 1);
                    let held = read(&array, at, bytes as usize).await.expect("read");
                    assert!(held == pattern(at, bytes as usize, 1)[..], "{bytes} bytes at {at}");
                }
            })
        })
        .collect();
    for worker in workers {
        worker.await;
    }
    let members = (bytes_of_members(array) - before) as f64;
    (total as f64 / begun.elapsed().as_secs_f64(), members / total as f64)
}

fn in_order(array: &RaidArray, bytes: u64) -> Vec<u64> {
    (0..STRIPES * array.geometry().stripe_bytes / bytes).map(|n| n * bytes).collect()
}

/// Size, depth, and how much of the healthy rate is left at least.
const IN_ORDER: [(u64, usize, f64); 7] = [
    (4 * KIB, 1, 0.95),
    (4 * KIB, 16, 0.85),
    (4 * KIB, 64, 0.75),
    (64 * KIB, 1, 0.8),
    (64 * KIB, 16, 0.75),
    (192 * KIB, 4, 0.75),
    (512 * KIB, 4, 0.75),
];

#[test]
fn reads_in_order_read_members_once() {
    for (bytes, depth, least) in IN_ORDER {
        Reactor::simulated(1).block_on(async {
            let array = full().await;
            let (healthy, _) = rate(&array, bytes, depth, in_order(&array, bytes)).await;
            array.fail(3).await.expect("it bears two");
            let (one_out, members) = rate(&array, bytes, depth, in_order(&array, bytes)).await;
            println!(
                "{} KiB in order, depth {depth}: {:.2} of {:.2} GB/s, members read {members:.2} bytes for each",
                bytes / KIB, one_out / healthy, healthy / 1e9
            );
            assert!(members < 1.15 && one_out > least * healthy, "{bytes} bytes at depth {depth}");
            array.fail(7).await.expect("it bears two");
            let (_, members) = rate(&array, bytes, depth, in_order(&array, bytes)).await;
            assert!(members < 1.15, "{bytes} bytes at depth {depth}: {members} of two");
        });
    }
}

/// Who reads anywhere gets no less than before: 1.7 bytes of members for each with one of ten missing (0.9 + 0.1 * 8).
#[test]
fn reads_anywhere_share_nothing() {
    Reactor::simulated(2).block_on(async {
        let array = full().await;
        let stripe_blocks = array.geometry().stripe_bytes / BLOCK as u64;
        // No stripe twice among so many.
        let anywhere: Vec<u64> = (0..20 * STRIPES)
            .map(|n| n * 7 % STRIPES * stripe_blocks + reactor::random_u64() % stripe_blocks)
            .map(|block| block * BLOCK as u64)
            .collect();
        let (healthy, _) = rate(&array, BLOCK as u64, 16, anywhere.clone()).await;
        array.fail(3).await.expect("it bears two");
        let (one_out, members) = rate(&array, BLOCK as u64, 16, anywhere).await;
        println!(
            "4 KiB anywhere: {:.2} of healthy, {members:.2} bytes for each",
            one_out / healthy
        );
        assert!((1.55..1.75).contains(&members) && one_out > 0.5 * healthy);
    });
}

/// Writers and readers of the same stripes beside each other, with members missing.
#[test]
fn nothing_that_was_replaced_is_read() {
    for seed in 0..12 {
        Reactor::simulated(seed).block_on(async {
            let rig = Rig::new(Level::Raid6, 6, 0, 16 * KIB, 32);
            let array = rig.create().await;
            for stripe in 0..8 {
                crate::common::write_stripe(&array, stripe, 1).await.expect("written");
            }
            array.flush().await.expect("flushed");
            for lost in 0..1 + seed as usize % 2 {
                array.fail(2 * lost).await.expect("it bears two");
            }
            let (node, reads) = (Group::new(), Rc::new(Cell::new(0)));
            let stripe_blocks = array.geometry().stripe_bytes / BLOCK as u64;
            for task in 0..4 {
                let (array, reads) = (array.clone(), Rc::clone(&reads));
                reactor::spawn_in(&node, async move {
                    let mut versions = vec![1; 4 * stripe_blocks as usize];
                    for version in 2.. {
                        // Neighbours share their stripes, and no blocks.
                        let block = reactor::random_u64() % stripe_blocks * 4 + task;
                        let at = block * BLOCK as u64;
                        if reactor::random_u64().is_multiple_of(3) {
                            let data = pattern(at, BLOCK, version).into_vec();
                            array.write(at, data, Durability::Volatile).await.expect("written");
                            versions[block as usize] = version;
                        }
                        let held = read(&array, at, BLOCK).await.expect("read");
                        let version = versions[block as usize];
                        assert!(held == pattern(at, BLOCK, version)[..], "seed {seed}: {block}");
                        reads.set(reads.get() + 1);
                    }
                });
            }
            reactor::sleep(Duration::from_millis(100)).await;
            node.kill();
            assert!(reads.get() > 500, "seed {seed}: {} reads", reads.get());
        });
    }
}

/// A stripe that is written anew is not what was kept of it.
#[test]
fn a_fresh_stripe_is_read_anew() {
    Reactor::simulated(3).block_on(async {
        let array = full().await;
        array.fail(3).await.expect("it bears two");
        let bytes = array.geometry().stripe_bytes;
        for version in 2..12 {
            for stripe in 0..4 {
                crate::common::write_stripe(&array, stripe, version).await.expect("written");
            }
            array.flush().await.expect("flushed");
            for at in (0..4 * bytes).step_by(16 * KIB as usize) {
                let held = read(&array, at, 16 * KIB as usize).await.expect("read");
                assert!(held == pattern(at, 16 * KIB as usize, version)[..], "{version} at {at}");
            }
        }
        array.discard_stripes(0, 4).await.expect("discarded");
        assert!(read(&array, 0, bytes as usize).await.expect("read").iter().all(|byte| *byte == 0));
    });
}

/// A reader that is not polled, or given up, keeps nobody waiting.
#[test]
fn a_reader_that_is_left_alone_holds_nobody_up() {
    Reactor::simulated(4).block_on(async {
        let array = full().await;
        array.fail(3).await.expect("it bears two");
        let bytes = array.geometry().stripe_bytes;
        let mut waited = 0;
        for at in (0..8 * bytes).step_by(16 * KIB as usize) {
            let into = || BufMut::for_overwrite(16 * KIB as usize).into_vec();
            let mut left_alone = array.read(at, into());
            let is_pending = futures_util::poll!(&mut left_alone).is_pending();
            let held = read(&array, at, 16 * KIB as usize).await.expect("read");
            assert!(held == pattern(at, 16 * KIB as usize, 1)[..]);
            waited += usize::from(is_pending);
            if is_pending && at % (32 * KIB) == 0 {
                left_alone.await.expect("read");
            }
        }
        assert!(waited > 0);
    });
}
