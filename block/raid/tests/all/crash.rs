//! Power cuts and lost members at any moment, checked against a model of what was promised.

use crate::common::{BLOCK, Rig, TestDrive, pattern, read, write_stripe};
use levada_base::planted;
use levada_base::reactor::{self, Group, Reactor};
use levada_device::{Device, Durability};
use levada_raid::{Array, IoClass, Level, Limits, MemberState, RaidArray};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

const MIRROR: Level = Level::Raid1 { copies: 3 };

fn random(below: u64) -> u64 {
    reactor::random_u64() % below
}

/// Two different numbers below `below`.
fn random_pair(below: u64) -> [usize; 2] {
    let first = random(below);
    let second = (first + 1 + random(below - 1)) % below;
    [first as usize, second as usize]
}

/// What a block may hold: the version promised, or one issued since.
#[derive(Default)]
struct Promise {
    durable: u64,
    /// Issued since, with whether they were acknowledged.
    later: Vec<(u64, bool)>,
}

impl Promise {
    fn acknowledged(&mut self, version: u64) {
        for later in &mut self.later {
            later.1 |= later.0 == version;
        }
    }

    fn made_durable(&mut self, version: u64) {
        self.durable = version;
        self.later.retain(|later| later.0 > version);
    }
}

type Promises = Rc<RefCell<BTreeMap<u64, Promise>>>;

/// Overwrites and flushes of one task, which owns every `tasks`-th block.
async fn overwrite_for_ever(
    array: RaidArray,
    promises: Promises,
    task: u64,
    tasks: u64,
    blocks: u64,
    mut version: u64,
) {
    loop {
        version += 1;
        let block = random(blocks / tasks) * tasks + task;
        let at = block * BLOCK as u64;
        let durability = [Durability::Volatile, Durability::Fua][random(2) as usize];
        promises.borrow_mut().entry(block).or_default().later.push((version, false));
        let data = pattern(at, BLOCK, version).into_vec();
        array.write(at, data, durability).await.expect("within what the level bears");
        {
            let mut mine = promises.borrow_mut();
            let promise = mine.get_mut(&block).expect("issued");
            match durability {
                Durability::Volatile => promise.acknowledged(version),
                Durability::Fua => promise.made_durable(version),
            }
        }
        if random(6) == 0 {
            let covered: Vec<(u64, u64)> = promises
                .borrow()
                .iter()
                .filter(|(block, _)| *block % tasks == task)
                .filter_map(|(block, promise)| {
                    let newest = promise.later.iter().rev().find(|later| later.1)?;
                    Some((*block, newest.0))
                })
                .collect();
            array.flush().await.expect("within what the level bears");
            for (block, version) in covered {
                let mut mine = promises.borrow_mut();
                let promise = mine.get_mut(&block).expect("issued");
                if version > promise.durable {
                    promise.made_durable(version);
                }
            }
        }
    }
}

/// Reads every block and checks it; what was read is the promise from now on.
async fn check_blocks(array: &RaidArray, promises: &Promises, blocks: u64, seed: u64) {
    let all = read(array, 0, (blocks as usize) * BLOCK).await.expect("read");
    for block in 0..blocks {
        let held = &all[block as usize * BLOCK..][..BLOCK];
        let mut promises = promises.borrow_mut();
        let promise = promises.entry(block).or_default();
        let allowed = std::iter::once(promise.durable).chain(promise.later.iter().map(|l| l.0));
        let found = allowed.into_iter().find(|version| match version {
            0 => held.iter().all(|byte| *byte == 0),
            version => held == &pattern(block * BLOCK as u64, BLOCK, *version)[..],
        });
        let Some(found) = found else {
            panic!("seed {seed}: block {block}: not {} or {:?}", promise.durable, promise.later)
        };
        *promise = Promise { durable: found, later: Vec::new() };
    }
}

/// Every block stays what it was read as, whichever two members are away.
async fn rotate_losses(rig: &Rig, mut array: RaidArray, check: impl AsyncFn(&RaidArray)) {
    for _ in 0..3 {
        check(&array).await;
        for member in array.status().members {
            if member.state == MemberState::Faulty {
                rig.drives[member.index].plug_in();
                // As what it was, or as a drive of which nobody knows that.
                let with = match random(2) {
                    0 => rig.member(member.index),
                    _ => rig.newcomer(member.index),
                };
                array.replace(member.index, with).await.expect("replaced");
            }
        }
        array.rebuild(Limits::NONE).await.expect("rebuilt");
        check(&array).await;
        let scrubbed = array.scrub(Limits::NONE).await.expect("scrubbed");
        assert_eq!(scrubbed.mismatched + scrubbed.wrong_repaired + scrubbed.lost, 0);
        array.flush().await.expect("flushed");
        drop(array);
        rig.cut_power();
        let away = random_pair(rig.drives.len() as u64);
        array = rig.open_without(&away).await.expect("opened");
    }
    check(&array).await;
}

/// Two lives of a mirror under load, each ended by a power cut, then losses in rotation.
fn mirror_life(seed: u64) {
    Reactor::simulated(seed).block_on(async {
        let rig = Rig::new(MIRROR, 12, 0, 16 << 10, 9);
        let promises = Promises::default();
        let mut array = rig.create().await;
        let blocks = (array.info().capacity_bytes / BLOCK as u64).min(64);
        let [first, second] = random_pair(12);
        for life in 1..=2u64 {
            let node = Group::new();
            for task in 0..4 {
                let (array, promises) = (array.clone(), Rc::clone(&promises));
                let work = overwrite_for_ever(array, promises, task, 4, blocks, life * 1_000_000);
                reactor::spawn_in(&node, work);
            }
            drop(array);
            if random(3) == 0 {
                rig.drives[first].pull_after_writes(random(200));
            }
            reactor::sleep(Duration::from_micros(500 + random(8000))).await;
            node.kill();
            rig.cut_power();
            let lost: &[usize] = if life == 2 { &[first, second] } else { &[] };
            array = rig.open_without(lost).await.expect("opened");
            check_blocks(&array, &promises, blocks, seed).await;
        }
        rotate_losses(&rig, array, async |array| {
            check_blocks(array, &promises, blocks, seed).await;
        })
        .await;
    });
}

#[test]
fn mirrored_blocks_survive_power_cuts_and_two_lost_members() {
    (0..20).for_each(mirror_life);
}

/// What a stripe of a parity array is promised to hold.
#[derive(Clone, Debug, PartialEq)]
enum Stripe {
    Unwritten,
    /// Flushed with this version.
    Holds(u64),
    /// Anything, but always the same once seen.
    Anything(Option<Vec<u8>>),
}

type Stripes = Rc<RefCell<Vec<Stripe>>>;

/// Fills, flushes and discards segments of a few stripes; every task has its own.
async fn fill_for_ever(array: RaidArray, stripes: Stripes, segment: u64, mut version: u64) {
    const SEGMENT: u64 = 5;
    let stripe_bytes = array.geometry().stripe_bytes;
    let first = segment * SEGMENT;
    loop {
        version += 1;
        for stripe in first..first + SEGMENT {
            stripes.borrow_mut()[stripe as usize] = Stripe::Anything(None);
        }
        array.declare_fresh(first, SEGMENT).await.expect("declared");
        let filled = random(SEGMENT) + 1;
        let writes = (first..first + filled).map(|stripe| {
            let data = pattern(stripe * stripe_bytes, stripe_bytes as usize, version).into_vec();
            array.write_fresh(stripe, data, IoClass::Foreground)
        });
        for result in futures_util::future::join_all(writes).await {
            result.expect("written");
        }
        if random(4) == 0 {
            continue;
        }
        array.flush().await.expect("flushed");
        for stripe in first..first + filled {
            stripes.borrow_mut()[stripe as usize] = Stripe::Holds(version);
        }
        reactor::sleep(Duration::from_micros(random(400))).await;
        if random(4) == 0 {
            for stripe in first..first + SEGMENT {
                stripes.borrow_mut()[stripe as usize] = Stripe::Anything(None);
            }
            array.discard_stripes(first, SEGMENT).await.expect("discarded");
            for stripe in first..first + SEGMENT {
                stripes.borrow_mut()[stripe as usize] = Stripe::Unwritten;
            }
        }
    }
}

async fn check_stripes(array: &RaidArray, stripes: &Stripes, seed: u64) {
    let stripe_bytes = array.geometry().stripe_bytes;
    let count = stripes.borrow().len();
    for stripe in 0..count {
        let at = stripe as u64 * stripe_bytes;
        let held = read(array, at, stripe_bytes as usize).await.expect("read");
        let promise = &mut stripes.borrow_mut()[stripe];
        match promise {
            Stripe::Unwritten => assert!(held.iter().all(|b| *b == 0), "seed {seed} {stripe}"),
            Stripe::Holds(version) => {
                let expected = pattern(at, stripe_bytes as usize, *version);
                assert!(held == expected[..], "seed {seed}: stripe {stripe} lost {version}");
            }
            Stripe::Anything(Some(seen)) => assert!(held == *seen, "seed {seed}: {stripe} changed"),
            Stripe::Anything(seen) => *seen = Some(held),
        }
    }
}

/// The same on parity, with segments filled, flushed and discarded.
fn parity_life(seed: u64) {
    Reactor::simulated(seed).block_on(async {
        let rig = Rig::new(Level::Raid6, 8, 2, 8 << 10, 20);
        let stripes: Stripes = Rc::new(RefCell::new(vec![Stripe::Unwritten; 20]));
        let mut array = rig.create().await;
        let [first, second] = random_pair(8);
        for life in 1..=2u64 {
            let node = Group::new();
            for segment in 0..4 {
                let (array, stripes) = (array.clone(), Rc::clone(&stripes));
                let work = fill_for_ever(array, stripes, segment, life * 1_000_000);
                reactor::spawn_in(&node, work);
            }
            let pulled = random(3) == 0;
            if pulled {
                rig.drives[first].pull_after_writes(random(200));
                let array = array.clone();
                reactor::spawn_in(&node, async move {
                    loop {
                        reactor::sleep(Duration::from_micros(200)).await;
                        array.rebuild(Limits::NONE).await.expect("rebuilt");
                    }
                });
            }
            drop(array);
            reactor::sleep(Duration::from_micros(500 + random(8000))).await;
            node.kill();
            rig.cut_power();
            // Two at a time: a member that is behind counts while its role is not rebuilt.
            let lost: &[usize] = if life == 2 { &[first, second] } else { &[] };
            array = rig.open_without(lost).await.expect("opened");
            check_stripes(&array, &stripes, seed).await;
            if life == 1 {
                array.rebuild(Limits::NONE).await.expect("rebuilt");
            }
        }
        rotate_losses(&rig, array, async |array| check_stripes(array, &stripes, seed).await).await;
    });
}

#[test]
fn flushed_stripes_survive_power_cuts_and_two_lost_members() {
    (0..20).for_each(parity_life);
}

/// Two members drop out somewhere in a run of writes and come back with old data.
fn losses_during_writes(seed: u64) {
    Reactor::simulated(seed).block_on(async {
        let rig = Rig::new(Level::Raid6, 6, 0, 8 << 10, 40);
        let array = rig.create().await;
        let [first, second] = random_pair(6);
        rig.drives[first].pull_after_writes(4 + random(40));
        rig.drives[second].pull_after_writes(4 + random(40));
        let mut expected = BTreeMap::new();
        for stripe in 0..30 {
            let data = write_stripe(&array, stripe, 7).await.expect("two may be lost");
            expected.insert(stripe, data);
        }
        array.flush().await.expect("flushed");
        drop(array);
        // Everybody is back after the power cut, the two with old data.
        rig.cut_power();
        for drive in &rig.drives {
            drive.plug_in();
        }
        let array = rig.open().await.expect("opened");
        for (stripe, data) in &expected {
            let at = stripe * array.geometry().stripe_bytes;
            assert_eq!(read(&array, at, data.len()).await.as_deref(), Ok(&data[..]));
        }
        let whole =
            array.status().members.iter().filter(|m| m.state == MemberState::InSync).count();
        assert_eq!(whole, 4, "seed {seed}");
    });
}

#[test]
fn members_lost_during_writes_are_on_record_before_the_acknowledgement() {
    (0..20).for_each(losses_during_writes);
}

/// A rebuild cut short four times, then finished and relied on.
fn interrupted_rebuild(seed: u64) {
    Reactor::simulated(seed).block_on(async {
        let rig = Rig::new(Level::Raid6, 7, 1, 8 << 10, 60);
        let mut array = rig.create().await;
        let mut expected = Vec::new();
        for stripe in 0..50 {
            expected.extend_from_slice(&write_stripe(&array, stripe, 1).await.expect("written"));
        }
        array.flush().await.expect("flushed");
        rig.drives[2].pull();
        array.fail(2).await.expect("failed");
        for _ in 0..4 {
            let node = Group::new();
            let rebuilt = array.clone();
            reactor::spawn_in(&node, async move {
                rebuilt.rebuild(Limits::NONE).await.expect("rebuilt");
            });
            drop(array);
            // All of it takes some 500 us.
            reactor::sleep(Duration::from_micros(random(500))).await;
            node.kill();
            rig.cut_power();
            array = rig.open_without(&[2]).await.expect("opened");
            let all = read(&array, 0, expected.len()).await.expect("read");
            assert!(all == expected, "seed {seed}");
        }
        array.rebuild(Limits::NONE).await.expect("rebuilt");
        drop(array);
        rig.cut_power();
        let away = random_pair(7);
        let lost: BTreeSet<usize> = away.into_iter().filter(|i| *i != 2).collect();
        let lost: Vec<usize> = lost.into_iter().chain([2]).collect();
        let array = rig.open_without(&lost).await.expect("opened");
        let all = read(&array, 0, expected.len()).await.expect("read");
        assert!(all == expected, "seed {seed} without {lost:?}");
    });
}

#[test]
fn an_interrupted_rebuild_goes_on_where_it_was() {
    (0..20).for_each(interrupted_rebuild);
}

/// Another member goes in the middle of a rebuild, and the power with the record of that. The
/// record once told how far the rebuild was in memory, ahead of what was flushed.
fn standing_recorded_during_rebuild(seed: u64) {
    Reactor::simulated(seed).block_on(async {
        // Large enough that the cursor is stored once for several steps of the rebuild.
        let rig = Rig::new(Level::Raid6, 8, 2, 4 << 10, 2000);
        let array = rig.create().await;
        let mut expected = Vec::new();
        for stripe in 0..200 {
            expected.extend_from_slice(&write_stripe(&array, stripe, 1).await.expect("written"));
        }
        array.flush().await.expect("flushed");
        rig.drives[2].pull();
        array.fail(2).await.expect("failed");
        let node = Group::new();
        let rebuilt = array.clone();
        reactor::spawn_in(&node, async move {
            rebuilt.rebuild(Limits::NONE).await.expect("rebuilt");
        });
        reactor::sleep(Duration::from_micros(random(3000))).await;
        // The spare that is left.
        let spare = (6..8).find(|i| array.status().members[*i].state == MemberState::Spare);
        let spare = spare.expect("two, and one took the role");
        array.fail(spare).await.expect("failed");
        reactor::sleep(Duration::from_micros(random(100))).await;
        node.kill();
        drop(array);
        rig.cut_power();
        // With one more gone, what is missing on the spare is not put right on the way.
        let lost = [2, spare, 0];
        let count = 2 + random(2) as usize;
        let array = rig.open_without(&lost[..count]).await.expect("opened");
        let all = read(&array, 0, expected.len()).await.expect("read");
        assert!(all == expected, "seed {seed}");
        array.rebuild(Limits::NONE).await.expect("rebuilt");
        let all = read(&array, 0, expected.len()).await.expect("read");
        assert!(all == expected, "seed {seed} after the rebuild");
    });
}

#[test]
fn a_standing_recorded_during_a_rebuild_tells_flushed_cursors_only() {
    (0..40).for_each(standing_recorded_during_rebuild);
}

/// A rebuild passes stripes whose discard is on its way to the disks, and the power goes when the
/// rebuild is done and the discard is not. It once skipped them for good, though they held data
/// again after the cut.
fn discards_during_rebuild(seed: u64) {
    const STRIPES: u64 = 24;
    const DISCARDED: u64 = 4;
    Reactor::simulated(seed).block_on(async {
        let rig = Rig::new(Level::Raid6, 5, 1, 4 << 10, 100);
        let array = rig.create().await;
        let mut expected = Vec::new();
        for stripe in 0..STRIPES {
            expected.push(write_stripe(&array, stripe, 1).await.expect("written"));
        }
        array.flush().await.expect("flushed");
        rig.drives[2].pull();
        array.fail(2).await.expect("failed");
        let node = Group::new();
        let slow_us = |us| rig.drives.iter().for_each(|drive| drive.delay_us.set(us));
        slow_us(100_000);
        let discarded = array.clone();
        reactor::spawn_in(&node, async move {
            let _ = discarded.discard_stripes(STRIPES - DISCARDED, DISCARDED).await;
        });
        reactor::sleep(Duration::from_micros(1)).await;
        slow_us(30);
        let rebuilt = array.clone();
        reactor::spawn_in(&node, async move {
            rebuilt.rebuild(Limits::NONE).await.expect("rebuilt");
        });
        drop(array);
        reactor::sleep(Duration::from_micros(2000 + random(2000))).await;
        node.kill();
        rig.drives.iter().for_each(|drive| drive.lose_in_flight());
        rig.cut_power();
        let array = rig.open_without(&[2]).await.expect("opened");
        array.rebuild(Limits::NONE).await.expect("rebuilt");
        let report = array.scrub(Limits::NONE).await.expect("scrubbed");
        assert_eq!(report.wrong_repaired + report.mismatched + report.lost, 0, "seed {seed}");
        drop(array);
        // Another is lost: what the rebuild wrote is needed.
        let array = rig.open_without(&[0, 2]).await.expect("opened");
        for (stripe, data) in expected.iter().enumerate() {
            let at = stripe as u64 * array.geometry().stripe_bytes;
            let held = read(&array, at, data.len()).await.expect("read");
            let may_be_empty = stripe as u64 >= STRIPES - DISCARDED;
            let empty = held.iter().all(|byte| *byte == 0);
            assert!(held[..] == data[..] || may_be_empty && empty, "seed {seed}: stripe {stripe}");
        }
    });
}

#[test]
fn a_rebuild_skips_only_what_is_durably_discarded() {
    (0..10).for_each(discards_during_rebuild);
}

/// A copy misses a durable overwrite, and so many extents are dirty that some are called clean, when
/// another writer puts the page of the map on disk and the power goes: whoever missed it is on
/// record, or the extent is dirty.
fn a_copy_missed(seed: u64) {
    const DIRTY_MAX: u64 = 512;
    const EXTENT: usize = BLOCK;
    let write = async |array: &RaidArray, extents: Range<u64>, version: u64| {
        let (at, bytes) = (extents.start * EXTENT as u64, extents.count() * EXTENT);
        array.write(at, pattern(at, bytes, version).into_vec(), Durability::Fua).await
    };
    Reactor::simulated(seed).block_on(async {
        let rig = Rc::new(Rig::new(MIRROR, 3, 0, EXTENT as u64, DIRTY_MAX + 2));
        let array = rig.create().await;
        array.write_zeroes(0, (DIRTY_MAX + 2) * EXTENT as u64).await.expect("written");
        array.close().await.expect("closed");
        let (node, opener) = (Group::new(), Rc::clone(&rig));
        let opened = reactor::spawn_in(&node, async move { opener.open().await }).await;
        let array = opened.expect("nobody killed it").expect("opened");
        write(&array, 1..DIRTY_MAX + 1, 1).await.expect("written");
        // It marks the extent as dirty, and then misses what is written there.
        rig.drives[2].pull_after_writes(1);
        let writer = array.clone();
        reactor::spawn_in(&node, async move { drop(write(&writer, 0..1, 2).await) });
        while array.status().members[2].state != MemberState::Faulty {
            reactor::sleep(Duration::from_micros(1)).await;
        }
        reactor::sleep(Duration::from_micros(random(30))).await;
        let another = array.clone();
        let next = DIRTY_MAX + 1;
        reactor::spawn_in(&node, async move { drop(write(&another, next..next + 1, 1).await) });
        reactor::sleep(Duration::from_micros(random(30))).await;
        node.kill();
        drop(array);
        rig.drives.iter().for_each(|drive| drive.lose_in_flight());
        rig.cut_power();
        rig.drives[2].plug_in();
        let array = rig.open().await.expect("opened");
        let report = array.scrub(Limits::NONE).await.expect("scrubbed");
        let wrong = report.mismatched + report.wrong_repaired + report.lost;
        assert_eq!(wrong, 0, "seed {seed}: copies differ");
    });
}

#[test]
fn a_copy_that_missed_an_overwrite_is_on_record_before_the_extent_is_clean() {
    (0..100).for_each(a_copy_missed);
}

#[test]
fn a_torn_superblock_costs_one_generation_at_most() {
    Reactor::simulated(3).block_on(async {
        let rig = Rig::new(Level::Raid6, 5, 0, 8 << 10, 8);
        let array = rig.create().await;
        let data = write_stripe(&array, 0, 1).await.expect("written");
        array.flush().await.expect("flushed");
        drop(array);
        for slot in [0, 4096] {
            let newest = |drive: &Rc<TestDrive>| drive.generation_at(slot);
            let generation = rig.drives.iter().map(newest).max().expect("drives");
            if generation == rig.drives.iter().map(|d| d.newest_generation()).max().expect("drives")
            {
                // The newest copy of two members is damaged; the older one and the others remain.
                for drive in &rig.drives[..2] {
                    drive.corrupt(slot + 100);
                }
                break;
            }
        }
        let array = rig.open().await.expect("opened");
        assert_eq!(read(&array, 0, data.len()).await.as_deref(), Ok(&data[..]));
        assert_eq!(array.status().degraded, 0);
        array.scrub(Limits::NONE).await.expect("scrubbed");
    });
}

#[test]
fn nothing_is_promised_to_a_writer_that_the_array_could_not_serve() {
    Reactor::simulated(4).block_on(async {
        let rig = Rig::new(MIRROR, 3, 0, 16 << 10, 9);
        let array = rig.create().await;
        let block = || pattern(0, BLOCK, 1).into_vec();
        array.write(0, block(), Durability::Fua).await.expect("written");
        for drive in &rig.drives {
            drive.pull();
        }
        let failed = array.write(0, pattern(0, BLOCK, 2).into_vec(), Durability::Fua).await;
        assert!(failed.is_err());
        for drive in &rig.drives {
            drive.plug_in();
        }
        drop(array);
        // The two that were recorded as out could not be told so: all three are in step.
        let array = rig.open().await.expect("opened");
        assert_eq!(read(&array, 0, BLOCK).await.as_deref(), Ok(&pattern(0, BLOCK, 1)[..]));
    });
}

/// The tests above would find the bugs that they are there for.
#[test]
fn planted_bugs_are_caught() {
    /// A bug and the life that it is meant to spoil.
    type Planted = (&'static str, fn(u64));
    let bugs: [Planted; 8] = [
        ("raid-resync-skipped", mirror_life),
        ("raid-resync-skipped", parity_life),
        ("raid-flush-dropped", parity_life),
        ("raid-standing-not-recorded", losses_during_writes),
        ("raid-map-not-persisted", parity_life),
        ("raid-copy-left-out", mirror_life),
        ("raid-cursor-ahead-of-flush", interrupted_rebuild),
        ("raid-cursor-told-early", standing_recorded_during_rebuild),
    ];
    // The panics are expected: no backtraces.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let missed: Vec<_> = bugs
        .into_iter()
        .filter(|(bug, life)| {
            planted::choose(Some(bug));
            !(0..40).any(|seed| std::panic::catch_unwind(|| life(seed)).is_err())
        })
        .map(|(bug, _)| bug)
        .collect();
    planted::choose(None);
    std::panic::set_hook(hook);
    assert_eq!(missed, [""; 0]);
}
