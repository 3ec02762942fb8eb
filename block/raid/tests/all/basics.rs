//! Levels on healthy and on failing members, within one life of the array.

use crate::common::{BLOCK, Rig, pattern, read, write_stripe};
use levada_base::reactor::{self, Group, Reactor};
use levada_base::{BufMut, Epoch};
use levada_device::{BlockError, Device, Durability};
use levada_raid::{
    Array, ArrayEvent, Finding, IoClass, Level, Limits, MemberSet, MemberState, RaidArray,
    RaidError,
};
use std::rc::Rc;
use std::time::Duration;

const MIRROR: Level = Level::Raid1 { copies: 3 };

#[test]
fn fresh_stripes_read_back_on_every_level() {
    Reactor::simulated(1).block_on(async {
        let parities = (1..=4).map(|parity| (Level::NPlusM { parity }, 5 + parity));
        let others = [
            (Level::Raid0, 4),
            (Level::Raid1 { copies: 2 }, 2),
            (MIRROR, 12),
            (Level::Raid5, 5),
            (Level::Raid6, 10),
            (Level::Raid50 { groups: 3 }, 12),
            (Level::Raid60 { groups: 2 }, 12),
        ];
        for (level, members) in others.into_iter().chain(parities) {
            let rig = Rig::new(level, members, 0, 16 << 10, 12);
            let array = rig.create().await;
            let geometry = array.geometry();
            let stripe_bytes = geometry.stripe_bytes as usize;
            assert_eq!(array.info().capacity_bytes, geometry.stripes * geometry.stripe_bytes);
            let mut expected = vec![0; array.info().capacity_bytes as usize];
            for stripe in [0, 1, 5, geometry.stripes - 1] {
                let data = write_stripe(&array, stripe, 1).await.expect("written");
                let at = stripe as usize * stripe_bytes;
                expected[at..at + stripe_bytes].copy_from_slice(&data);
            }
            array.flush().await.expect("flushed");
            let all = read(&array, 0, expected.len()).await.expect("read");
            assert!(all == expected, "{level:?}");
            array.close().await.expect("closed");
            drop(array);
            let array = rig.open().await.expect("opened");
            let all = read(&array, 0, expected.len()).await.expect("read");
            assert!(all == expected, "{level:?} after open");
            assert_eq!(array.status().stripes_written, 4);
            array.discard_stripes(1, 5).await.expect("discarded");
            assert!(!array.is_written(5) && array.is_written(0));
            assert_eq!(read(&array, 5 * stripe_bytes as u64, BLOCK).await, Ok(vec![0; BLOCK]));
        }
    });
}

#[test]
fn without_a_journal_parity_takes_fresh_stripes_only() {
    Reactor::simulated(1).block_on(async {
        let rig = Rig::new(Level::Raid6, 6, 0, 8 << 10, 8);
        let spec = levada_raid::ArraySpec { journal_bytes: Some(64 << 10), ..rig.spec() };
        let array = RaidArray::create(spec, Epoch(1)).await.expect("created");
        let stripe_bytes = array.geometry().stripe_bytes as usize;
        let block = || pattern(0, BLOCK, 1).into_vec();
        let refused = Err(BlockError::NotFresh { stripe: 0 });
        assert_eq!(array.write(0, block(), Durability::Fua).await, refused);
        let stripe = || pattern(0, stripe_bytes, 1).into_vec();
        assert_eq!(array.write_fresh(0, stripe(), IoClass::Foreground).await, refused);
        array.declare_fresh(0, 2).await.expect("declared");
        let short = array.write_fresh(0, block(), IoClass::Foreground).await;
        assert!(matches!(short, Err(BlockError::Misaligned { .. })));
        array.write_fresh(0, stripe(), IoClass::Foreground).await.expect("fresh");
        assert_eq!(array.write_fresh(0, stripe(), IoClass::Foreground).await, refused);
        let beyond = array.declare_fresh(array.geometry().stripes - 1, 2).await;
        assert!(matches!(beyond, Err(BlockError::OutOfRange { .. })));
    });
}

#[test]
fn all_66_pairs_of_12_drives_can_be_lost() {
    Reactor::simulated(2).block_on(async {
        let groups = Level::Raid60 { groups: 2 };
        let parity = Level::NPlusM { parity: 3 };
        for (level, spares) in [(Level::Raid6, 2), (MIRROR, 0), (groups, 0), (parity, 1)] {
            let rig = Rig::new(level, 12, spares, 8 << 10, 12);
            let array = rig.create().await;
            let stripes = array.geometry().stripes.min(24);
            let mut expected = Vec::new();
            for stripe in 0..stripes {
                expected
                    .extend_from_slice(&write_stripe(&array, stripe, 3).await.expect("written"));
            }
            array.close().await.expect("closed");
            drop(array);
            for first in 0..12 {
                for second in first + 1..12 {
                    // Twelve fresh copies of the drives would be equal: nothing is written here
                    // but superblocks, and the pair comes back by replacement.
                    let array = rig.open_without(&[first, second]).await.expect("opened");
                    let all = read(&array, 0, expected.len()).await.expect("read");
                    assert!(all == expected, "{level:?} without {first} and {second}");
                    for index in [first, second] {
                        array.replace(index, rig.newcomer(index)).await.expect("replaced");
                    }
                    array.rebuild(Limits::NONE).await.expect("rebuilt");
                    assert_eq!(array.status().degraded, 0);
                    let all = read(&array, 0, expected.len()).await.expect("read");
                    assert!(all == expected, "{level:?} rebuilt {first} and {second}");
                    array.close().await.expect("closed");
                }
            }
        }
    });
}

#[test]
fn a_hot_spare_takes_the_role_and_is_rebuilt() {
    Reactor::simulated(3).block_on(async {
        let rig = Rig::new(Level::Raid6, 8, 2, 8 << 10, 40);
        let array = rig.create().await;
        let mut events = array.events();
        let stripe_bytes = array.geometry().stripe_bytes as usize;
        let mut expected = Vec::new();
        for stripe in 0..20 {
            expected.extend_from_slice(&write_stripe(&array, stripe, 1).await.expect("written"));
        }
        rig.drives[2].pull();
        rig.drives[4].pull();
        expected.truncate(20 * stripe_bytes);
        for stripe in 20..24 {
            expected.extend_from_slice(&write_stripe(&array, stripe, 1).await.expect("written"));
        }
        assert!(array.needs_rebuild());
        assert_eq!(array.status().degraded, 2);
        array.rebuild(Limits::NONE).await.expect("rebuilt");
        assert_eq!(array.status().degraded, 0);
        array.flush().await.expect("flushed");
        let scrubbed = array.scrub(Limits::NONE).await.expect("scrubbed");
        assert_eq!((scrubbed.stripes, scrubbed.mismatched, scrubbed.lost), (24, 0, 0));
        let mut out = Vec::new();
        while let Some(event) = events.try_recv() {
            if let ArrayEvent::MemberOut { member, .. } = event {
                out.push(member);
            }
        }
        out.sort_unstable();
        assert_eq!(out, [2, 4]);
        // Two more may go now.
        rig.drives[0].pull();
        rig.drives[6].pull();
        let all = read(&array, 0, expected.len()).await.expect("read");
        assert!(all == expected);
    });
}

#[test]
fn one_loss_too_many_stops_the_array_until_the_drives_are_back() {
    Reactor::simulated(4).block_on(async {
        let rig = Rig::new(Level::Raid6, 6, 0, 8 << 10, 8);
        let array = rig.create().await;
        let data = write_stripe(&array, 0, 1).await.expect("written");
        array.flush().await.expect("flushed");
        for drive in &rig.drives[..3] {
            drive.pull();
        }
        let lost = read(&array, 0, data.len()).await;
        assert_eq!(lost, Err(BlockError::TooManyLost { lost: 3, tolerated: 2 }));
        assert_eq!(array.flush().await, Err(BlockError::TooManyLost { lost: 3, tolerated: 2 }));
        drop(array);
        match rig.open().await.err() {
            Some(RaidError::TooManyLost { report, .. }) => {
                assert!(!report.missing.is_empty(), "{report}");
                assert!(
                    report.devices.iter().any(|(_, f)| matches!(f, Finding::Unreadable { .. }))
                );
            }
            other => panic!("{other:?}"),
        }
        for drive in &rig.drives[..3] {
            drive.plug_in();
        }
        let array = rig.open().await.expect("opened");
        assert_eq!(read(&array, 0, data.len()).await.as_deref(), Ok(&data[..]));
    });
}

/// As one of many reads that a caller drives in turns: it stands still while the caller waits for something
/// else of the same stripe.
#[test]
fn a_read_that_nobody_drives_holds_no_stripe() {
    for us in (0..200).step_by(10) {
        Reactor::simulated(us).block_on(async {
            let rig = Rig::new(Level::Raid6, 6, 0, 8 << 10, 12);
            let array = rig.create().await;
            let expected = write_stripe(&array, 0, 1).await.expect("written");
            array.flush().await.expect("flushed");
            for drive in &rig.drives[..2] {
                drive.make_unreadable(drive.data_at(), 8 << 10);
            }
            let mut stands_still = Box::pin(read(&array, 0, expected.len()));
            let _ = reactor::timeout(Duration::from_micros(us), stands_still.as_mut()).await;
            let discard = array.discard_stripes(0, 1);
            let discarded = reactor::timeout(Duration::from_secs(60), discard).await;
            let waited = |_| panic!("it waits for a read that stands still since {us} us");
            discarded.unwrap_or_else(waited).expect("discarded");
        });
    }
}

/// Whoever asks for a change may be gone before it is on record; nobody else has to wait for ever then.
#[test]
fn a_caller_that_is_killed_leaves_nothing_half_way() {
    Reactor::simulated(17).block_on(async {
        let rig = Rig::new(Level::Raid6, 6, 0, 8 << 10, 40);
        for steps in 0..40 {
            let array = Rc::new(rig.create().await);
            let caller = Group::new();
            let theirs = Rc::clone(&array);
            let _change = reactor::spawn_in(&caller, async move {
                theirs.declare_fresh(0, 4).await.expect("declared");
            });
            for _ in 0..steps {
                reactor::sleep(Duration::from_micros(10)).await;
            }
            caller.kill();
            let closed = reactor::timeout(Duration::from_secs(60), array.close()).await;
            assert_eq!(closed, Ok(Ok(())), "killed after {steps} steps");
        }
    });
}

#[test]
fn reads_can_avoid_a_member() {
    Reactor::simulated(9).block_on(async {
        for (level, members) in [(MIRROR, 3), (Level::Raid6, 6)] {
            let rig = Rig::new(level, members, 0, 8 << 10, 12);
            let array = rig.create().await;
            let data = write_stripe(&array, 0, 1).await.expect("written");
            array.flush().await.expect("flushed");
            let holders = array.members_of(0, 4096);
            let before: Vec<u64> = rig.drives.iter().map(|drive| drive.reads.get()).collect();
            for member in (0..members).filter(|member| holders.contains(*member)) {
                let into = BufMut::for_overwrite(4096).into_vec();
                let avoid = MemberSet::only(member);
                let parts = array.read_avoiding(0, into, avoid, IoClass::Foreground).await;
                assert_eq!(&parts.expect("read")[0][..], &data[..4096]);
                if holders.len() == 1 {
                    assert_eq!(rig.drives[member].reads.get(), before[member]);
                }
            }
        }
    });
}

#[test]
fn a_mirror_takes_overwrites_from_many_tasks() {
    Reactor::simulated(10).block_on(async {
        let rig = Rig::new(MIRROR, 6, 0, 16 << 10, 12);
        let array = Rc::new(rig.create().await);
        let blocks = array.info().capacity_bytes / BLOCK as u64;
        let tasks: Vec<_> = (0..8u64)
            .map(|task| {
                let array = Rc::clone(&array);
                reactor::spawn(async move {
                    for round in 0..20 {
                        let block = reactor::random_u64() % (blocks / 8) * 8 + task;
                        let data = pattern(block, BLOCK, round);
                        let durability =
                            [Durability::Volatile, Durability::Fua][round as usize % 2];
                        let at = block * BLOCK as u64;
                        array
                            .write(at, data.clone().into_vec(), durability)
                            .await
                            .expect("written");
                        let back = read(&*array, at, BLOCK).await.expect("read");
                        assert!(back == data[..]);
                    }
                })
            })
            .collect();
        for (i, task) in tasks.into_iter().enumerate() {
            if i == 3 {
                rig.drives[i].pull();
            }
            task.await;
        }
        array.flush().await.expect("flushed");
        let states: Vec<_> = array.status().members.iter().map(|m| m.state).collect();
        assert_eq!(states[3], MemberState::Faulty);
        array
            .replace(3, {
                rig.drives[3].plug_in();
                rig.member(3)
            })
            .await
            .expect("replaced");
        array.rebuild(Limits::NONE).await.expect("rebuilt");
        let scrubbed = array.scrub(Limits::NONE).await.expect("scrubbed");
        assert_eq!((scrubbed.mismatched, scrubbed.wrong_repaired, scrubbed.lost), (0, 0, 0));
        assert!(scrubbed.stripes > 0);
    });
}

#[test]
fn every_enclosure_can_fail_under_writes() {
    Reactor::simulated(13).block_on(async {
        for (level, spares) in [(Level::Raid6, 2), (MIRROR, 0)] {
            for enclosure in 0..6 {
                let rig = Rig::new(level, 12, spares, 8 << 10, 12);
                let array = rig.create().await;
                let mut expected = Vec::new();
                for stripe in 0..12 {
                    if stripe == 5 {
                        rig.drives[2 * enclosure].pull();
                        rig.drives[2 * enclosure + 1].pull();
                    }
                    let data = write_stripe(&array, stripe, 3).await.expect("written");
                    expected.extend_from_slice(&data);
                }
                array.flush().await.expect("flushed");
                let all = read(&array, 0, expected.len()).await.expect("read");
                assert!(all == expected, "{level:?} without enclosure {enclosure}");
                array.rebuild(Limits::NONE).await.expect("rebuilt");
                let all = read(&array, 0, expected.len()).await.expect("read");
                assert!(all == expected, "{level:?} rebuilt without enclosure {enclosure}");
            }
        }
    });
}

#[test]
fn a_spare_comes_from_where_no_copy_of_its_role_is() {
    Reactor::simulated(15).block_on(async {
        let rig = Rig::new(Level::Raid1 { copies: 2 }, 6, 2, 8 << 10, 12);
        let mut spec = rig.spec();
        for (member, enclosure) in spec.members.iter_mut().zip([0, 1, 2, 3, 1, 2]) {
            member.enclosure = enclosure;
        }
        let array = RaidArray::create(spec, Epoch(1)).await.expect("created");
        array.fail(0).await.expect("the other has it");
        // Both spares are of enclosures with one role each; the neighbours of role 0 are in enclosures 1 and 3.
        let members = array.status().members;
        assert_eq!((members[4].role, members[5].role), (None, Some(0)));
    });
}

#[test]
fn rebuild_keeps_to_its_limits_and_shows_progress() {
    Reactor::simulated(14).block_on(async {
        let rig = Rig::new(Level::Raid6, 7, 1, 16 << 10, 100);
        let array = rig.create().await;
        for stripe in 0..100 {
            write_stripe(&array, stripe, 1).await.expect("written");
        }
        array.flush().await.expect("flushed");
        array.fail(0).await.expect("failed");
        // 100 chunks written and 400 read of 16 KiB each: 8 MB, at 16 MiB/s half a second.
        let limits = Limits { floor_bytes_per_second: 1 << 20, ceiling_bytes_per_second: 16 << 20 };
        reactor::sleep(Duration::from_secs(1)).await;
        let begun = reactor::now();
        let rebuilding = array.clone();
        let task = reactor::spawn(async move { rebuilding.rebuild(limits).await });
        reactor::sleep(Duration::from_millis(250)).await;
        let progress = array.status().rebuild.expect("under way");
        assert!((30..70).contains(&progress.stripes_done), "{progress:?}");
        assert_eq!(progress.stripes_total, 100);
        // Beside foreground I/O it goes at its floor.
        for _ in 0..50 {
            read(&array, 0, BLOCK).await.expect("read");
            reactor::sleep(Duration::from_millis(5)).await;
        }
        let slowed = array.status().rebuild.expect("under way").stripes_done;
        assert!(slowed < progress.stripes_done + 20, "{slowed} after {progress:?}");
        task.await.expect("not killed").expect("rebuilt");
        assert!(begun.elapsed() > Duration::from_millis(600), "{:?}", begun.elapsed());
        assert_eq!(array.status().rebuild, None);
    });
}

#[test]
fn a_degraded_read_of_whole_stripes_reads_each_chunk_once() {
    Reactor::simulated(15).block_on(async {
        let rig = Rig::new(Level::Raid6, 8, 0, 8 << 10, 16);
        let array = rig.create().await;
        let mut expected = Vec::new();
        for stripe in 0..16 {
            expected.extend_from_slice(&write_stripe(&array, stripe, 1).await.expect("written"));
        }
        array.flush().await.expect("flushed");
        array.fail(3).await.expect("failed");
        array.fail(5).await.expect("failed");
        let before: u64 = array.status().members.iter().map(|m| m.bytes_read).sum();
        let all = read(&array, 0, expected.len()).await.expect("read");
        assert!(all == expected);
        let after: u64 = array.status().members.iter().map(|m| m.bytes_read).sum();
        assert_eq!(after - before, expected.len() as u64);
    });
}
