//! Reads straight into memory that is lent: which go that way, and what one that fails does to an array.

use crate::common::{BLOCK, Rig, pattern, read, read_lent, write_stripe};
use levada_base::Epoch;
use levada_base::reactor::Reactor;
use levada_device::{BlockError, Device};
use levada_raid::{Array, Level, RaidArray};

const CHUNK: u64 = 4 * BLOCK as u64;

/// Every stripe but the last is written.
async fn full(rig: &Rig) -> RaidArray {
    let array = rig.create().await;
    for stripe in 0..array.geometry().stripes - 1 {
        write_stripe(&array, stripe, 1).await.expect("written");
    }
    array.flush().await.expect("flushed");
    array
}

fn levels() -> [(Level, usize); 5] {
    [
        (Level::Raid0, 4),
        (Level::Raid5, 4),
        (Level::Raid6, 6),
        (Level::Raid60 { groups: 2 }, 8),
        (Level::NPlusM { parity: 3 }, 7),
    ]
}

#[test]
fn whole_blocks_of_an_array_that_has_all_go_straight() {
    for (level, members) in levels() {
        Reactor::simulated(1).block_on(async {
            let array = full(&Rig::new(level, members, 0, CHUNK, 8)).await;
            let stripe_bytes = array.geometry().stripe_bytes as usize;
            let before: u64 = array.status().members.iter().map(|member| member.bytes_read).sum();
            for (at, parts) in [
                (0, vec![BLOCK]),
                (BLOCK, vec![3 * BLOCK]),
                (3 * BLOCK, vec![BLOCK, 2 * BLOCK, BLOCK]),
                (stripe_bytes - BLOCK, vec![stripe_bytes + 2 * BLOCK]),
            ] {
                let held = read_lent(&array, at as u64, &parts).await.expect("straight");
                assert!(held == pattern(at as u64, held.len(), 1)[..], "{level:?}: {parts:?}");
            }
            let read: u64 = array.status().members.iter().map(|member| member.bytes_read).sum();
            let asked = 1 + 3 + 4 + stripe_bytes / BLOCK + 2;
            assert_eq!(read - before, (asked * BLOCK) as u64, "{level:?}: nothing else is read");
            // Never written, so zeroes; and it is filled.
            let last = array.info().capacity_bytes - stripe_bytes as u64;
            let held =
                read_lent(&array, last - BLOCK as u64, &[2 * BLOCK]).await.expect("straight");
            assert!(held[BLOCK..].iter().all(|byte| *byte == 0));
        });
    }
}

#[test]
fn what_cannot_go_straight_says_so() {
    Reactor::simulated(1).block_on(async {
        let mirror = full(&Rig::new(Level::Raid1 { copies: 2 }, 2, 0, CHUNK, 8)).await;
        assert_eq!(read_lent(&mirror, 0, &[BLOCK]).await, None, "a copy may hold marks");
        let rig = Rig::new(Level::Raid6, 6, 0, CHUNK, 8);
        let array = full(&rig).await;
        let past = array.info().capacity_bytes;
        assert_eq!(read_lent(&array, past, &[BLOCK]).await, None);
        assert_eq!(read_lent(&array, past - BLOCK as u64, &[2 * BLOCK]).await, None);
        assert_eq!(read_lent(&array, 512, &[BLOCK]).await, None);
        assert_eq!(read_lent(&array, 0, &[BLOCK - 512]).await, None);
        array.fail(2).await.expect("borne");
        for block in 0..array.info().capacity_bytes / BLOCK as u64 {
            assert_eq!(read_lent(&array, block * BLOCK as u64, &[BLOCK]).await, None);
        }
    });
}

/// Remote drives beside local ones, say: who reads again reads all of it.
#[test]
fn where_one_cannot_nobody_begins() {
    Reactor::simulated(1).block_on(async {
        let rig = Rig::new(Level::Raid6, 6, 0, CHUNK, 8);
        let array = full(&rig).await;
        let reads = || rig.drives.iter().map(|drive| drive.reads.get()).sum::<u64>();
        let stripe_bytes = array.geometry().stripe_bytes as usize;
        for remote in 0..6 {
            rig.drives[remote].lends_not.set(true);
            let before = reads();
            for stripe in 0..6 {
                let at = stripe * stripe_bytes as u64;
                let holds = array.members_of(at, stripe_bytes as u64);
                let held = read_lent(&array, at, &[stripe_bytes]).await;
                assert_eq!(held.is_some(), !holds.contains(remote));
                assert_eq!(held.is_some(), reads() > before, "{remote}, {stripe}");
                if held.is_some() {
                    break;
                }
            }
            rig.drives[remote].lends_not.set(false);
        }
    });
}

/// That memory may have failed, and its owner could have every drive taken out else.
#[test]
fn a_member_that_fails_is_thought_no_worse_of() {
    Reactor::simulated(1).block_on(async {
        let rig = Rig::new(Level::Raid6, 6, 0, CHUNK, 8);
        let array = full(&rig).await;
        let holds = array.members_of(0, BLOCK as u64);
        let member = (0..6).find(|member| holds.contains(*member)).expect("somebody");
        let drive = &rig.drives[member];
        drive.make_unreadable(drive.data_at(), BLOCK as u64);
        for _ in 0..1000 {
            assert_eq!(read_lent(&array, 0, &[2 * BLOCK]).await, None);
        }
        let of_member = || array.status().members[member].clone();
        let errors = (of_member().medium_errors, of_member().io_errors, of_member().repairs);
        assert_eq!((errors, array.status().degraded), ((0, 0, 0), 0));
        // Who asks next finds out, and puts it right.
        let held = read(&array, 0, 2 * BLOCK).await.expect("readable");
        assert!(held == pattern(0, 2 * BLOCK, 1)[..]);
        assert_eq!(of_member().repairs, 1);
        assert!(read_lent(&array, 0, &[2 * BLOCK]).await.is_some());
        // One that is gone.
        drive.pull();
        assert_eq!(read_lent(&array, 0, &[BLOCK]).await, None);
        assert_eq!(array.status().degraded, 0, "nobody has found out");
    });
}

/// Fenced, it has all its members, and nothing that they hold is its own any more.
#[test]
fn an_array_that_somebody_else_has_reads_nothing() {
    Reactor::simulated(1).block_on(async {
        let array = full(&Rig::new(Level::Raid6, 6, 0, CHUNK, 8)).await;
        assert!(read_lent(&array, 0, &[BLOCK]).await.is_some());
        array.lose_to(Epoch(9));
        let held = read(&array, 0, BLOCK).await;
        assert!(matches!(held, Err(BlockError::Fenced { .. })), "{held:?}");
        assert_eq!(read_lent(&array, 0, &[BLOCK]).await, None);
    });
}

#[test]
fn an_array_that_has_stopped_reads_nothing() {
    Reactor::simulated(1).block_on(async {
        let rig = Rig::new(Level::Raid5, 4, 0, CHUNK, 8);
        let array = full(&rig).await;
        for drive in &rig.drives[..2] {
            drive.pull();
        }
        let _ = read(&array, 0, 2 * CHUNK as usize).await;
        let stopped = read(&array, 3 * CHUNK, BLOCK).await;
        assert!(matches!(stopped, Err(BlockError::TooManyLost { .. })), "{stopped:?}");
        for chunk in 0..6 {
            assert_eq!(read_lent(&array, chunk * CHUNK, &[BLOCK]).await, None);
        }
    });
}
