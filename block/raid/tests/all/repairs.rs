//! What cannot be read, or is wrong: read repair, scrub, and what a rebuild makes of it.

use crate::common::{BLOCK, Rig, pattern, read, write_stripe};
use levada_base::BufMut;
use levada_base::reactor::{self, Reactor};
use levada_device::{BlockError, Device, Durability};
use levada_raid::{Array, IoClass, Level, Limits, MemberSet, MemberState, RaidArray};
use std::time::Duration;

const MIRROR: Level = Level::Raid1 { copies: 3 };

#[test]
fn medium_errors_are_reconstructed_repaired_and_counted() {
    Reactor::simulated(7).block_on(async {
        for (level, members) in [(MIRROR, 3), (Level::Raid6, 6)] {
            let rig = Rig::new(level, members, 0, 8 << 10, 12);
            let array = rig.create().await;
            let mut expected = Vec::new();
            for stripe in 0..4 {
                expected
                    .extend_from_slice(&write_stripe(&array, stripe, 1).await.expect("written"));
            }
            array.flush().await.expect("flushed");
            for drive in &rig.drives[..2] {
                drive.make_unreadable(drive.data_at(), 16 << 10);
            }
            for _ in 0..8 {
                let all = read(&array, 0, expected.len()).await.expect("read");
                assert!(all == expected, "{level:?}");
            }
            array.scrub(Limits::NONE).await.expect("scrubbed");
            let repairs: u64 = array.status().members.iter().map(|m| m.repairs).sum();
            assert!(repairs > 0, "{level:?}");
            let scrubbed = array.scrub(Limits::NONE).await.expect("scrubbed");
            assert_eq!(scrubbed.unreadable_repaired + scrubbed.mismatched + scrubbed.lost, 0);
        }
    });
}

/// One member is out, and of another the first chunk cannot be read, until it can and a third
/// goes: two are not whole at any time, but whoever reads meanwhile meets three failures.
#[test]
fn failures_that_follow_each_other_are_borne() {
    #[derive(Clone, Copy, Debug)]
    enum Reader {
        Client,
        Rebuild,
    }
    let met_while = async |reader: Reader, unreadable: usize, goes: usize, after_us: u64| {
        let case = format!("{reader:?}, {unreadable} unreadable, {goes} goes after {after_us} us");
        let spares = matches!(reader, Reader::Rebuild).into();
        let rig = Rig::new(Level::Raid6, 6 + spares, spares, 8 << 10, 8);
        let array = rig.create().await;
        let data = write_stripe(&array, 0, 1).await.expect("written");
        array.flush().await.expect("flushed");
        array.fail(0).await.expect("failed");
        let (unreadable, goes) = (&rig.drives[unreadable], &rig.drives[goes]);
        unreadable.make_unreadable(unreadable.data_at(), 8 << 10);
        goes.least_us.set(1000);
        let reading = array.clone();
        let bytes = data.len();
        let task = reactor::spawn(async move {
            match reader {
                Reader::Client => read(&reading, 0, bytes).await.map(drop),
                Reader::Rebuild => reading.rebuild(Limits::NONE).await,
            }
        });
        reactor::sleep(Duration::from_micros(after_us)).await;
        unreadable.make_readable();
        goes.pull();
        assert_eq!(task.await.expect("not killed"), Ok(()), "{case}");
        assert_eq!(read(&array, 0, bytes).await.as_deref(), Ok(&data[..]), "{case}");
    };
    Reactor::simulated(16).block_on(async {
        for reader in [Reader::Rebuild, Reader::Client] {
            for (unreadable, goes) in (1..6).flat_map(|a| (1..6).map(move |b| (a, b))) {
                for after_us in (0..4000).step_by(500).filter(|_| unreadable != goes) {
                    met_while(reader, unreadable, goes, after_us).await;
                }
            }
        }
    });
}

/// Bytes of one stripe are lost, on every level in its way. Whoever asks for them again and again gets the
/// same answer, and costs no member its place.
#[test]
fn asking_for_what_is_lost_takes_no_member_out() {
    Reactor::simulated(17).block_on(async {
        // Of a mirror the copies of the first stripe lie in as many slots.
        let lost = [(Level::Raid0, 4, 1, 1), (MIRROR, 3, 3, 3), (Level::Raid6, 6, 3, 1)];
        for (level, members, bad, slots) in lost {
            let rig = Rig::new(level, members, 0, 8 << 10, 12);
            let array = rig.create().await;
            for stripe in 0..4 {
                write_stripe(&array, stripe, 1).await.expect("written");
            }
            array.flush().await.expect("flushed");
            for drive in &rig.drives[..bad] {
                drive.make_unreadable(drive.data_at(), slots * (8 << 10));
            }
            let stripe_bytes = array.geometry().stripe_bytes as usize;
            for _ in 0..300 {
                let lost = read(&array, 0, stripe_bytes).await.map(|data| data.len());
                assert!(matches!(lost, Err(BlockError::Medium { .. })), "{level:?}: {lost:?}");
            }
            let status = array.status();
            assert_eq!((status.degraded, status.stopped), (0, None), "{level:?}");
            let at = 3 * stripe_bytes as u64;
            let rest = read(&array, at, stripe_bytes).await;
            assert!(rest.as_deref() == Ok(&pattern(at, stripe_bytes, 1)[..]), "{level:?}");
        }
    });
}

/// A member on which this and that cannot be read stays, however often it is asked for; and goes when it is too much.
#[test]
fn a_member_is_out_past_a_threshold() {
    Reactor::simulated(19).block_on(async {
        let rig = Rig::new(Level::Raid6, 6, 0, 8 << 10, 400);
        let array = rig.create().await;
        let stripe_bytes = array.geometry().stripe_bytes as usize;
        for stripe in 0..320 {
            write_stripe(&array, stripe, 1).await.expect("written");
        }
        array.flush().await.expect("flushed");
        let drive = &rig.drives[1];
        let most = levada_raid::UNREADABLE_CHUNKS_MAX as u64;
        let spoil = |chunks: std::ops::Range<u64>| {
            chunks.for_each(|chunk| {
                drive.make_unreadable(drive.data_at() + chunk * (8 << 10), BLOCK as u64);
            });
        };
        // Repaired each time, and again unreadable.
        for _ in 0..3 {
            spoil(0..most - 1);
            for stripe in 0..most - 1 {
                let at = stripe * stripe_bytes as u64;
                let held = read(&array, at, stripe_bytes).await.expect("made from the others");
                assert!(held == pattern(at, stripe_bytes, 1)[..], "{stripe}");
            }
            array.scrub_anew(Limits::NONE).await.expect("scrubbed");
        }
        let member = &array.status().members[1];
        assert_eq!((member.state, member.unreadable_chunks), (MemberState::InSync, most - 1));
        assert!(member.medium_errors >= 3 * (most - 1));
        spoil(most - 1..most);
        array.scrub_anew(Limits::NONE).await.expect("scrubbed");
        assert_eq!(array.status().members[1].state, MemberState::Faulty);
    });
}

/// Members on which more and more cannot be read are taken out, but no more of them than the array bears.
#[test]
fn unreadable_places_do_not_stop_the_array() {
    Reactor::simulated(18).block_on(async {
        let rig = Rig::new(Level::Raid6, 6, 0, 4 << 10, 400);
        let array = rig.create().await;
        let stripe_bytes = array.geometry().stripe_bytes as usize;
        for stripe in 0..320 {
            write_stripe(&array, stripe, 1).await.expect("written");
        }
        array.flush().await.expect("flushed");
        for drive in &rig.drives[..3] {
            drive.make_unreadable(drive.data_at(), 300 * (4 << 10));
        }
        for stripe in 0..300 {
            let at = stripe * stripe_bytes as u64;
            let lost = read(&array, at, stripe_bytes).await.map(|data| data.len());
            assert!(matches!(lost, Err(BlockError::Medium { .. })), "{stripe}: {lost:?}");
        }
        let status = array.status();
        assert_eq!((status.degraded, status.stopped), (2, None));
        let at_most = levada_raid::UNREADABLE_CHUNKS_MAX as u64;
        assert!(status.members[..3].iter().all(|member| member.unreadable_chunks == at_most));
        for stripe in 300..320 {
            let at = stripe * stripe_bytes as u64;
            let whole = read(&array, at, stripe_bytes).await;
            assert!(whole.as_deref() == Ok(&pattern(at, stripe_bytes, 1)[..]), "{stripe}");
        }
    });
}

#[test]
fn scrub_locates_and_repairs_silent_corruption() {
    Reactor::simulated(8).block_on(async {
        for (level, members) in [(MIRROR, 3), (Level::Raid6, 6)] {
            let rig = Rig::new(level, members, 0, 8 << 10, 12);
            let array = rig.create().await;
            let mut expected = Vec::new();
            for stripe in 0..4 {
                expected
                    .extend_from_slice(&write_stripe(&array, stripe, 1).await.expect("written"));
            }
            array.flush().await.expect("flushed");
            for byte in 0..64 {
                rig.drives[1].corrupt(rig.drives[1].data_at() + byte);
                rig.drives[2].corrupt(rig.drives[2].data_at() + (8 << 10) + byte);
            }
            let scrubbed = array.scrub(Limits::NONE).await.expect("scrubbed");
            assert_eq!((scrubbed.mismatched, scrubbed.wrong_repaired), (0, 2), "{level:?}");
            let all = read(&array, 0, expected.len()).await.expect("read");
            assert!(all == expected, "{level:?}");
            let again = array.scrub(Limits::NONE).await.expect("scrubbed");
            assert_eq!(again.wrong_repaired, 0);
        }
    });
}

/// One bad block in each of two chunks, at different places: a block that cannot be read, and one that is wrong
/// and says nothing of it.
#[test]
fn scrub_does_not_make_two_bad_blocks_out_of_one_each() {
    const CHUNK: usize = 16 << 10;
    Reactor::simulated(11).block_on(async {
        let rig = Rig::new(Level::Raid6, 6, 0, CHUNK as u64, 12);
        let array = rig.create().await;
        let data = write_stripe(&array, 0, 1).await.expect("written");
        array.flush().await.expect("flushed");
        let of_chunk = |chunk: usize| {
            let holders = array.members_of((chunk * CHUNK) as u64, 4096);
            (0..6).find(|member| holders.contains(*member)).expect("somebody holds it")
        };
        let (unreadable, rotten) = (&rig.drives[of_chunk(0)], &rig.drives[of_chunk(1)]);
        unreadable.make_unreadable(unreadable.data_at() + 2 * BLOCK as u64, BLOCK as u64);
        rotten.corrupt(rotten.data_at());
        let scrubbed = array.scrub(Limits::NONE).await.expect("scrubbed");
        assert_eq!((scrubbed.unreadable_repaired, scrubbed.wrong_repaired), (1, 1));
        assert_eq!((scrubbed.mismatched, scrubbed.lost), (0, 0));
        assert!(read(&array, 0, data.len()).await.as_deref() == Ok(&data[..]));
        // At one place the equation that is left says that something is wrong, not what.
        unreadable.make_unreadable(unreadable.data_at(), BLOCK as u64);
        rotten.corrupt(rotten.data_at());
        let scrubbed = array.scrub(Limits::NONE).await.expect("scrubbed");
        assert_eq!((scrubbed.unreadable_repaired, scrubbed.mismatched), (0, 1));
        let avoid = MemberSet::only(of_chunk(1)).with(of_chunk(0));
        for at in [0, CHUNK as u64] {
            let into = BufMut::for_overwrite(4096).into_vec();
            let parts = array.read_avoiding(at, into, avoid, IoClass::Foreground).await;
            assert_eq!(&parts.expect("read")[0][..], &data[at as usize..][..4096]);
        }
    });
}

/// A chunk that rots in a stripe that is still marked dirty when the node dies: it was complete, so the rot is
/// put right and not made the truth.
#[test]
fn rot_in_a_dirty_stripe_is_not_taken_for_the_truth() {
    Reactor::simulated(12).block_on(async {
        for member in 0..6 {
            let rig = Rig::new(Level::Raid6, 6, 0, 16 << 10, 12);
            let array = rig.create().await;
            let data = write_stripe(&array, 0, 1).await.expect("written");
            array.flush().await.expect("flushed");
            drop(array);
            rig.cut_power();
            rig.drives[member].corrupt(rig.drives[member].data_at() + 5);
            let array = rig.open().await.expect("opened");
            assert!(read(&array, 0, data.len()).await.as_deref() == Ok(&data[..]), "{member}");
        }
    });
}

/// Two bad blocks in one stripe, at different places, beside a lost drive: every block has a second one to be
/// computed from.
#[test]
fn a_rebuild_takes_what_it_can_block_by_block() {
    const CHUNK: usize = 16 << 10;
    Reactor::simulated(13).block_on(async {
        let rig = Rig::new(Level::Raid6, 6, 1, CHUNK as u64, 40);
        let array = rig.create().await;
        let mut expected = Vec::new();
        for stripe in 0..4 {
            expected.extend_from_slice(&write_stripe(&array, stripe, 1).await.expect("written"));
        }
        array.flush().await.expect("flushed");
        let used: Vec<usize> =
            (0..6).filter(|i| array.status().members[*i].state != MemberState::Spare).collect();
        rig.drives[used[0]].pull();
        array.fail(used[0]).await.expect("failed");
        for (n, member) in used[1..4].iter().enumerate() {
            let drive = &rig.drives[*member];
            drive.make_unreadable(drive.data_at() + (n * BLOCK) as u64, BLOCK as u64);
        }
        array.rebuild(Limits::NONE).await.expect("rebuilt");
        assert!(read(&array, 0, expected.len()).await.as_deref() == Ok(&expected[..]));
    });
}

/// Blocks beyond repair in several stripes at once stop a rebuild a few times, and the rest is rebuilt then.
#[test]
fn a_rebuild_leaves_out_what_is_beyond_repair() {
    const CHUNK: usize = 16 << 10;
    Reactor::simulated(14).block_on(async {
        let rig = Rig::new(Level::Raid6, 6, 1, CHUNK as u64, 40);
        let array = rig.create().await;
        for stripe in 0..4 {
            write_stripe(&array, stripe, 1).await.expect("written");
        }
        array.flush().await.expect("flushed");
        let used: Vec<usize> =
            (0..6).filter(|i| array.status().members[*i].state != MemberState::Spare).collect();
        rig.drives[used[0]].pull();
        array.fail(used[0]).await.expect("failed");
        for member in &used[1..3] {
            let drive = &rig.drives[*member];
            // The first block of each of the first two stripes.
            drive.make_unreadable(drive.data_at(), BLOCK as u64);
            drive.make_unreadable(drive.data_at() + CHUNK as u64, BLOCK as u64);
        }
        let mut tries = 1;
        while array.rebuild(Limits::NONE).await.is_err() {
            tries += 1;
            assert!(tries < 10, "the rebuild never ends");
        }
        assert!(tries > 1, "nothing stopped it");
        assert!(!array.needs_rebuild());
    });
}

/// What a rebuild left out of a stripe is not read, and nothing is made from it: the drives that could not be read then
/// may still have the truth when they can.
#[test]
fn nothing_is_made_from_what_a_rebuild_left_out() {
    const CHUNK: usize = 16 << 10;
    Reactor::simulated(15).block_on(async {
        let rig = Rig::new(Level::Raid6, 6, 1, CHUNK as u64, 40);
        let array = rig.create().await;
        let data = write_stripe(&array, 0, 1).await.expect("written");
        array.flush().await.expect("flushed");
        let used: Vec<usize> =
            (0..6).filter(|i| array.status().members[*i].state != MemberState::Spare).collect();
        let at: Vec<u64> = (0..3).map(|chunk| chunk * CHUNK as u64).collect();
        let holders: Vec<usize> = at
            .iter()
            .map(|at| used.iter().copied().find(|i| array.members_of(*at, 4096).contains(*i)))
            .map(|holder| holder.expect("somebody has it"))
            .collect();
        rig.drives[holders[0]].pull();
        array.fail(holders[0]).await.expect("failed");
        for member in &holders[1..] {
            let drive = &rig.drives[*member];
            drive.make_unreadable(drive.data_at(), BLOCK as u64);
        }
        while array.rebuild(Limits::NONE).await.is_err() {}
        for at in &at {
            let unreadable = read(&array, *at, BLOCK).await;
            assert!(matches!(unreadable, Err(BlockError::Medium { .. })), "{unreadable:?}");
        }
        assert!(read(&array, BLOCK as u64, BLOCK).await.as_deref() == Ok(&data[BLOCK..2 * BLOCK]));
        // Also after the next start: what the new member holds there was never this block.
        drop(array);
        let array = rig.open().await.expect("opened");
        for at in &at {
            let unreadable = read(&array, *at, BLOCK).await;
            assert!(matches!(unreadable, Err(BlockError::Medium { .. })), "{unreadable:?}");
        }
        for member in &holders[1..] {
            rig.drives[*member].make_readable();
        }
        assert!(
            read(&array, 0, data.len()).await.as_deref() == Ok(&data[..]),
            "they have the truth"
        );
    });
}

/// A block that no copy is left of does not keep the rest of a mirror from its redundancy.
#[test]
fn a_mirror_rebuilds_around_a_block_that_nobody_has() {
    const CHUNK: usize = 16 << 10;
    Reactor::simulated(16).block_on(async {
        let rig = Rig::new(Level::Raid1 { copies: 2 }, 3, 1, CHUNK as u64, 12);
        let array = rig.create().await;
        let data = write_stripe(&array, 0, 1).await.expect("written");
        array.flush().await.expect("flushed");
        let lost = (0..3).find(|i| array.status().members[*i].state != MemberState::Spare);
        let lost = lost.expect("some play a role");
        let left = (0..3).find(|i| *i != lost && array.members_of(0, 4096).contains(*i));
        rig.drives[lost].pull();
        let drive = &rig.drives[left.expect("there are two copies")];
        // Whichever copy it holds.
        for slot in 0..2 {
            drive.make_unreadable(drive.data_at() + (slot * CHUNK + BLOCK) as u64, BLOCK as u64);
        }
        array.fail(lost).await.expect("failed");
        let mut tries = 1;
        while array.rebuild(Limits::NONE).await.is_err() {
            tries += 1;
            assert!(tries < 10, "the rebuild never ends");
        }
        assert!(tries > 1, "nothing stopped it");
        assert!(!array.needs_rebuild());
        for agreed in [false, true] {
            let into = || BufMut::for_overwrite(BLOCK).into_vec();
            let gone = match agreed {
                true => array.read_agreed(BLOCK as u64, into()).await,
                false => array.read(BLOCK as u64, into()).await,
            };
            assert!(matches!(gone, Err(BlockError::Medium { .. })), "agreed {agreed}: {gone:?}");
        }
        assert!(read(&array, 0, BLOCK).await.as_deref() == Ok(&data[..BLOCK]));
        // The place is usable again once it is written.
        let fresh = pattern(7, BLOCK, 2);
        array
            .write(BLOCK as u64, fresh.clone().into_vec(), Durability::Fua)
            .await
            .expect("written");
        assert!(read(&array, BLOCK as u64, BLOCK).await.as_deref() == Ok(&fresh[..]));
    });
}

/// Two drives come back with what they held before, and the third cannot read what was written meanwhile: the two
/// agree, now and after the next open, and must not be believed.
#[test]
fn old_copies_that_agree_are_not_believed_after_the_next_open() {
    const CHUNK: usize = 16 << 10;
    Reactor::simulated(18).block_on(async {
        let rig = Rig::new(MIRROR, 3, 0, CHUNK as u64, 12);
        let array = rig.create().await;
        let write = async |array: &RaidArray, version| {
            let data = pattern(0, CHUNK, version);
            array.write(0, data.clone().into_vec(), Durability::Fua).await.expect("written");
            data
        };
        write(&array, 1).await;
        for away in [0, 1] {
            array.fail(away).await.expect("failed");
        }
        let data = write(&array, 2).await;
        let left = &rig.drives[2];
        for slot in 0..3 {
            let at = left.data_at() + (slot * CHUNK + BLOCK) as u64;
            left.make_unreadable(at, BLOCK as u64);
        }
        for back in [0, 1] {
            array.replace(back, rig.newcomer(back)).await.expect("replaced");
        }
        while array.rebuild(Limits::NONE).await.is_err() {}
        assert!(!array.needs_rebuild());
        let lacks: Vec<u64> = array.status().members.iter().map(|m| m.lacks_blocks).collect();
        assert!(lacks[0] > 0 && lacks[1] == lacks[0] && lacks[2] == 0, "{lacks:?}");
        array.close().await.expect("closed");
        drop(array);
        let array = rig.open().await.expect("opened");
        let into = |bytes| BufMut::for_overwrite(bytes).into_vec();
        for agreed in [false, true] {
            let gone = match agreed {
                true => array.read_agreed(BLOCK as u64, into(BLOCK)).await,
                false => array.read(BLOCK as u64, into(BLOCK)).await,
            };
            assert!(matches!(gone, Err(BlockError::Medium { .. })), "agreed {agreed}: {gone:?}");
        }
        left.make_readable();
        let there = array.read_agreed(0, into(CHUNK)).await.expect("one drive has the truth");
        assert!(there[0][..] == data[..]);
        array.fail(2).await.expect("the others have it from that drive now");
        assert!(read(&array, 0, CHUNK).await.as_deref() == Ok(&data[..]));
    });
}
