//! Reads that two copies vouch for, against copies that are wrong in silence.

use crate::common::{BLOCK, Rig, pattern, read, read_agreed, write_stripe};
use levada_base::BufMut;
use levada_base::reactor::{self, Reactor};
use levada_device::{BlockError, Device, Durability};
use levada_raid::{Array, IoClass, Level, Limits, MemberSet, MemberState, RaidArray};
use std::rc::Rc;
use std::time::Duration;

const MIRROR: Level = Level::Raid1 { copies: 3 };
const CHUNK: u64 = 16 << 10;
const STRIPES: usize = 4;

/// Three copies on three drives, and what they hold.
async fn mirror() -> (Rig, RaidArray, Vec<u8>) {
    let rig = Rig::new(MIRROR, 3, 0, CHUNK, 12);
    let array = rig.create().await;
    let mut held = Vec::new();
    for stripe in 0..STRIPES as u64 {
        held.extend_from_slice(&write_stripe(&array, stripe, 1).await.expect("written"));
    }
    array.flush().await.expect("flushed");
    (rig, array, held)
}

/// Makes a few bytes wrong in every block that `wrong` names by drive and number within the chunk.
fn corrupt(rig: &Rig, wrong: impl Fn(usize, u64) -> bool) {
    let in_chunk = CHUNK / BLOCK as u64;
    for (number, drive) in rig.drives.iter().enumerate() {
        // Room for whole rows of copies.
        for block in (0..6 * in_chunk).filter(|block| wrong(number, block % in_chunk)) {
            let at = drive.data_at() + block * BLOCK as u64;
            (0..3).for_each(|byte| drive.corrupt(at + 700 * byte));
        }
    }
}

/// Of every chunk the copies agree about all blocks but number `disputed`, and what they agree about is right.
async fn check_all_but(array: &RaidArray, held: &[u8], disputed: usize) {
    for (block, expected) in held.chunks(BLOCK).enumerate() {
        let agreed = read_agreed(array, (block * BLOCK) as u64, BLOCK).await;
        match block % (CHUNK as usize / BLOCK) == disputed {
            true => assert!(matches!(agreed, Err(BlockError::Medium { .. })), "block {block}"),
            false => assert!(agreed.expect("agreed") == expected, "block {block}"),
        }
    }
}

#[test]
fn a_wrong_copy_is_outvoted_and_put_right() {
    Reactor::simulated(1).block_on(async {
        let (rig, array, held) = mirror().await;
        // No drive is right about any chunk.
        corrupt(&rig, |drive, block| block == drive as u64);
        let believed = read(&array, 0, held.len()).await.expect("read");
        assert!(believed != held, "a plain read believes any copy");
        let agreed = read_agreed(&array, 0, held.len()).await.expect("read");
        assert!(agreed == held);
        let repairs: u64 = array.status().members.iter().map(|member| member.repairs).sum();
        assert!(repairs >= STRIPES as u64, "{repairs}");
        for left in 0..3 {
            let others = (0..3).filter(|other| *other != left);
            let avoid = others.fold(MemberSet::NONE, MemberSet::with);
            let into = BufMut::for_overwrite(held.len()).into_vec();
            let alone = array.read_avoiding(0, into, avoid, IoClass::Foreground).await;
            assert!(alone.expect("read")[0][..] == held, "drive {left}");
        }
        let scrubbed = array.scrub(Limits::NONE).await.expect("scrubbed");
        assert_eq!((scrubbed.wrong_repaired, scrubbed.mismatched), (0, 0));
    });
}

#[test]
fn a_scrub_lets_copies_vote_block_by_block() {
    Reactor::simulated(2).block_on(async {
        let (rig, array, held) = mirror().await;
        corrupt(&rig, |drive, block| block == drive as u64);
        let scrubbed = array.scrub(Limits::NONE).await.expect("scrubbed");
        assert_eq!((scrubbed.mismatched, scrubbed.lost), (0, 0));
        assert!(read(&array, 0, held.len()).await.expect("read") == held);
        let again = array.scrub(Limits::NONE).await.expect("scrubbed");
        assert_eq!((again.wrong_repaired, again.mismatched), (0, 0));
    });
}

#[test]
fn without_a_majority_nothing_is_believed() {
    Reactor::simulated(3).block_on(async {
        let (rig, array, held) = mirror().await;
        array.fail(2).await.expect("two are left");
        corrupt(&rig, |drive, block| drive == 0 && block == 1);
        let at = 5 * BLOCK as u64;
        let refused = read_agreed(&array, at, BLOCK).await.map(|_| "read");
        assert_eq!(refused, Err(BlockError::Medium { at, bytes: BLOCK as u64 }));
        let beside = read_agreed(&array, at - BLOCK as u64, BLOCK).await.expect("two agree");
        assert!(beside == held[4 * BLOCK..5 * BLOCK]);
        // Nobody was written: the copies still differ.
        let scrubbed = array.scrub(Limits::NONE).await.expect("scrubbed");
        assert_eq!((scrubbed.mismatched, scrubbed.wrong_repaired), (STRIPES as u64, 0));
        array.fail(1).await.expect("one is left");
        assert!(read_agreed(&array, at, BLOCK).await.is_ok(), "nothing to compare with");
    });
}

#[test]
fn unreadable_copies_do_not_vote() {
    Reactor::simulated(4).block_on(async {
        let (rig, array, held) = mirror().await;
        let drive = &rig.drives[1];
        drive.make_unreadable(drive.data_at(), STRIPES as u64 * CHUNK);
        assert!(read_agreed(&array, 0, held.len()).await.expect("read") == held);
        // A plain read may not have met it; this one has, where it asked, and wrote it anew.
        let repairs: u64 = array.status().members.iter().map(|member| member.repairs).sum();
        assert!(repairs > 0);
        assert!(array.status().members.iter().all(|member| member.state == MemberState::InSync));
    });
}

#[test]
fn rot_gets_no_second_voice_from_an_unreadable_copy() {
    Reactor::simulated(6).block_on(async {
        let (rig, array, held) = mirror().await;
        corrupt(&rig, |drive, block| drive == 0 && block == 1);
        let drive = &rig.drives[1];
        drive.make_unreadable(drive.data_at(), 6 * CHUNK);
        // Plain reads meet the unreadable copy and repair what they can, and so does a scrub.
        for _ in 0..4 {
            for block in 0..held.len() / BLOCK {
                let plain = read(&array, (block * BLOCK) as u64, BLOCK).await.expect("read");
                assert!(block % 4 == 1 || plain == held[block * BLOCK..][..BLOCK]);
            }
            let scrubbed = array.scrub(Limits::NONE).await.expect("scrubbed");
            assert_eq!(scrubbed.mismatched, STRIPES as u64);
            check_all_but(&array, &held, 1).await;
        }
        // It was left as it was, so it decides once it can be read.
        drive.make_readable();
        assert!(read_agreed(&array, 0, held.len()).await.expect("agreed") == held);
    });
}

#[test]
fn one_bad_sector_does_not_silence_a_copy() {
    Reactor::simulated(7).block_on(async {
        for whole in [false, true] {
            let (rig, array, held) = mirror().await;
            // Two copies are left; each has a bad sector somewhere, and one of them rot elsewhere.
            array.fail(2).await.expect("two are left");
            let chunks = (0..6).map(|chunk| chunk * CHUNK);
            for chunk in chunks {
                rig.drives[0].make_unreadable(rig.drives[0].data_at() + chunk, 1);
                rig.drives[1].make_unreadable(rig.drives[1].data_at() + chunk + BLOCK as u64, 1);
            }
            corrupt(&rig, |drive, block| drive == 0 && block == 3);
            if whole {
                let stripe = read_agreed(&array, 0, CHUNK as usize).await;
                assert!(
                    matches!(stripe, Err(BlockError::Medium { .. })),
                    "the last block is disputed"
                );
            }
            check_all_but(&array, &held, 3).await;
            let scrubbed = array.scrub(Limits::NONE).await.expect("scrubbed");
            assert_eq!((scrubbed.unreadable_repaired, scrubbed.lost), (0, 0), "reads repaired it");
            assert_eq!(scrubbed.mismatched, STRIPES as u64);
        }
    });
}

#[test]
fn a_spare_that_comes_while_a_stripe_is_zeroed_is_zeroed_too() {
    for seed in 0..200 {
        Reactor::simulated(seed).block_on(async {
            let rig = Rig::new(MIRROR, 4, 1, CHUNK, 12);
            // What the spare held before.
            let spare = &rig.drives[3];
            for block in 16..spare.info().capacity_bytes / BLOCK as u64 {
                spare.corrupt(block * BLOCK as u64);
            }
            let array = rig.create().await;
            let (writer, failing) = (array.clone(), array.clone());
            let writing = reactor::spawn(async move {
                let data = pattern(0, BLOCK, 1).into_vec();
                writer.write(0, data, Durability::Fua).await.expect("written");
            });
            let pause = reactor::random_u64() % 300;
            let rebuilding = reactor::spawn(async move {
                reactor::sleep(Duration::from_micros(pause)).await;
                failing.fail(1).await.expect("a spare is there");
                failing.rebuild(Limits::NONE).await.expect("rebuilt");
            });
            writing.await.expect("alive");
            rebuilding.await.expect("alive");
            let scrubbed = array.scrub(Limits::NONE).await.expect("scrubbed");
            assert_eq!((scrubbed.wrong_repaired, scrubbed.mismatched), (0, 0), "seed {seed}");
        });
    }
}

#[test]
fn a_copy_that_went_bad_loses_the_vote_after_a_crash() {
    for seed in 0..40 {
        Reactor::simulated(seed).block_on(async {
            let (rig, array, mut held) = mirror().await;
            // Leaves every stripe dirty.
            for stripe in 0..STRIPES {
                let at = stripe * CHUNK as usize;
                let fresh = pattern(at as u64, BLOCK, 2);
                held[at..at + BLOCK].copy_from_slice(&fresh);
                array.write(at as u64, fresh.into_vec(), Durability::Fua).await.expect("written");
            }
            drop(array);
            rig.cut_power();
            let bad = reactor::random_u64() as usize % 3;
            corrupt(&rig, |drive, block| drive == bad && block != 3);
            let array = rig.open().await.expect("opened");
            for _ in 0..3 {
                // Idle copies take turns.
                assert!(read(&array, 0, held.len()).await.expect("read") == held, "seed {seed}");
            }
            let scrubbed = array.scrub(Limits::NONE).await.expect("scrubbed");
            assert_eq!((scrubbed.wrong_repaired, scrubbed.mismatched), (0, 0), "seed {seed}");
        });
    }
}

#[test]
fn a_write_on_its_way_is_no_damage() {
    for seed in 0..20 {
        Reactor::simulated(100 + seed).block_on(async {
            let (rig, array, _) = mirror().await;
            let array = Rc::new(array);
            let writer = Rc::clone(&array);
            let writing = reactor::spawn(async move {
                for version in 2..60 {
                    let data = pattern(0, 2 * BLOCK, version).into_vec();
                    writer.write(0, data, Durability::Volatile).await.expect("written");
                }
            });
            let mut lasts = [1; 2];
            while !writing.is_finished() {
                let both = read_agreed(&*array, 0, 2 * BLOCK).await.expect("read");
                for (number, bytes) in both.chunks(BLOCK).enumerate() {
                    let at = (number * BLOCK) as u64;
                    let version = (lasts[number]..60)
                        .find(|version| pattern(at, BLOCK, *version)[..] == *bytes);
                    lasts[number] =
                        version.expect("written, and no older than what was read before");
                }
            }
            drop(rig);
            let repairs: u64 = array.status().members.iter().map(|member| member.repairs).sum();
            assert_eq!(repairs, 0, "seed {seed}");
        });
    }
}

#[test]
fn a_rebuild_does_not_decide_between_two_copies() {
    Reactor::simulated(5).block_on(async {
        let (rig, array, held) = mirror().await;
        array.fail(2).await.expect("two are left");
        corrupt(&rig, |drive, block| drive == 0 && block == 1);
        array.replace(2, rig.newcomer(2)).await.expect("replaced");
        // An empty drive: what it holds is no opinion.
        let drive = &rig.drives[2];
        drive.write_zeroes(drive.data_at(), 6 * CHUNK).await.expect("zeroed");
        array.rebuild(Limits::NONE).await.expect("rebuilt");
        check_all_but(&array, &held, 1).await;
        // A scrub finds the same each time, and repairs nothing that needs repair again.
        for _ in 0..2 {
            let scrubbed = array.scrub(Limits::NONE).await.expect("scrubbed");
            assert_eq!((scrubbed.mismatched, scrubbed.wrong_repaired), (STRIPES as u64, 0));
            assert_eq!((scrubbed.unreadable_repaired, scrubbed.lost), (0, 0));
        }
        // The drive that went away before the damage knows better.
        let (rig, array, held) = mirror().await;
        array.fail(2).await.expect("two are left");
        corrupt(&rig, |drive, block| drive == 0 && block == 1);
        array.replace(2, rig.newcomer(2)).await.expect("replaced");
        array.rebuild(Limits::NONE).await.expect("rebuilt");
        assert!(read_agreed(&array, 0, held.len()).await.expect("agreed") == held);
    });
}
