//! Levels on healthy and on failing members, within one life of the array.

mod common;

use common::{ARRAY, BLOCK, Rig, pattern, read, write_stripe};
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
                        array.replace(index, rig.member(index)).await.expect("replaced");
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

#[test]
fn a_stale_member_is_not_served() {
    Reactor::simulated(5).block_on(async {
        for (level, members) in [(MIRROR, 3), (Level::Raid6, 5)] {
            let rig = Rig::new(level, members, 0, 8 << 10, 8);
            let array = rig.create().await;
            write_stripe(&array, 0, 1).await.expect("written");
            array.flush().await.expect("flushed");
            rig.drives[1].pull();
            array.discard_stripes(0, 1).await.expect("discarded");
            let data = write_stripe(&array, 0, 2).await.expect("written");
            array.flush().await.expect("flushed");
            drop(array);
            rig.drives[1].plug_in();
            rig.epoch.set(9);
            let opened = RaidArray::open(ARRAY, rig.devices(), Epoch(9), false).await;
            let (array, report) = opened.expect("opened");
            assert!(matches!(report.devices[1].1, Finding::Stale { member: 1, .. }), "{report}");
            for _ in 0..20 {
                assert_eq!(read(&array, 0, data.len()).await.as_deref(), Ok(&data[..]));
            }
            array.replace(1, rig.member(1)).await.expect("replaced");
            array.rebuild(Limits::NONE).await.expect("rebuilt");
            rig.drives[0].pull();
            rig.drives[2].pull();
            assert_eq!(read(&array, 0, data.len()).await.as_deref(), Ok(&data[..]));
        }
    });
}

/// Two of five drives are put back as they were at an earlier time, when nothing had failed: they
/// must not outvote the others. `orderly`: the copies are of just before the array was closed, else
/// of before it was opened.
fn old_copies_are_known(level: Level, orderly: bool) {
    Reactor::simulated(7).block_on(async {
        let rig = Rig::new(level, 5, 0, 8 << 10, 9);
        let array = rig.create().await;
        write_stripe(&array, 0, 1).await.expect("written");
        array.flush().await.expect("flushed");
        let images = || rig.drives[..2].iter().map(|drive| drive.image()).collect::<Vec<_>>();
        let before = images();
        drop(array);
        let array = rig.open().await.expect("opened");
        array.discard_stripes(0, 1).await.expect("discarded");
        let data = write_stripe(&array, 0, 2).await.expect("written");
        array.flush().await.expect("flushed");
        let old = if orderly { images() } else { before };
        if orderly {
            array.close().await.expect("closed");
        }
        drop(array);
        for (drive, image) in rig.drives.iter().zip(&old) {
            drive.put_back(image);
        }
        rig.epoch.set(9);
        let opened = RaidArray::open(ARRAY, rig.devices(), Epoch(9), false).await;
        let (array, report) = opened.expect("opened");
        for member in [0, 1] {
            let found = &report.devices[member].1;
            assert!(matches!(found, Finding::Stale { .. }), "{level:?}, {orderly}: {report}");
        }
        assert_eq!(report.faulty, ["drive-0", "drive-1"]);
        for _ in 0..20 {
            assert_eq!(read(&array, 0, data.len()).await.as_deref(), Ok(&data[..]));
        }
        for member in [0, 1] {
            array.replace(member, rig.member(member)).await.expect("replaced");
        }
        array.rebuild(Limits::NONE).await.expect("rebuilt");
        let scrubbed = array.scrub(Limits::NONE).await.expect("scrubbed");
        assert_eq!((scrubbed.wrong_repaired, scrubbed.mismatched, scrubbed.lost), (0, 0, 0));
    });
}

#[test]
fn a_member_put_back_as_it_was_is_not_served() {
    for level in [MIRROR, Level::Raid6] {
        old_copies_are_known(level, false);
        old_copies_are_known(level, true);
    }
}

#[test]
fn most_members_put_back_as_they_were_need_a_decision() {
    Reactor::simulated(8).block_on(async {
        let rig = Rig::new(MIRROR, 3, 0, 8 << 10, 9);
        let array = rig.create().await;
        let old: Vec<_> = rig.drives[..2].iter().map(|drive| drive.image()).collect();
        drop(array);
        let array = rig.open().await.expect("opened");
        let data = write_stripe(&array, 0, 2).await.expect("written");
        array.close().await.expect("closed");
        drop(array);
        for (drive, image) in rig.drives.iter().zip(&old) {
            drive.put_back(image);
        }
        let refused = RaidArray::open(ARRAY, rig.devices(), Epoch(8), false).await.err();
        assert!(matches!(refused, Some(RaidError::NoMajority { found: 1, .. })), "{refused:?}");
        let (array, _) =
            RaidArray::open(ARRAY, rig.devices(), Epoch(9), true).await.expect("forced");
        assert_eq!(read(&array, 0, data.len()).await.as_deref(), Ok(&data[..]));
    });
}

/// A start that is cut short after any number of superblocks, here and there, and another one that is cut
/// short too: the first write of a start never goes over what was a member's newest superblock.
#[test]
fn a_start_leaves_the_newest_superblock_alone() {
    for cut in 0..9 {
        Reactor::simulated(9).block_on(async {
            let rig = Rig::new(MIRROR, 3, 0, 8 << 10, 9);
            drop(rig.create().await);
            for (number, drive) in rig.drives.iter().enumerate() {
                drive.pull_after_writes(if number == 0 { cut / 3 } else { cut % 3 });
            }
            drop(rig.open().await);
            let newest: Vec<u64> =
                rig.drives.iter().map(|drive| drive.newest_generation()).collect();
            for drive in &rig.drives {
                drive.plug_in();
                drive.pull_after_writes(1);
            }
            assert!(rig.open().await.is_err());
            let mut written = 0;
            for (drive, newest) in rig.drives.iter().zip(newest) {
                let held = [0, BLOCK as u64].map(|at| drive.generation_at(at));
                assert!(held.contains(&newest), "{cut}: {held:?} without {newest}");
                written += usize::from(held.iter().any(|held| *held > newest));
            }
            assert!(written >= 1, "{cut}: nothing was written");
        });
    }
}

#[test]
fn an_older_owner_is_fenced() {
    Reactor::simulated(6).block_on(async {
        let rig = Rig::new(MIRROR, 4, 0, 8 << 10, 9);
        drop(rig.create().await);
        drop(rig.open().await.expect("opened"));
        let late = RaidArray::open(ARRAY, rig.devices(), Epoch(1), false).await;
        let fenced = RaidError::Fenced { ours: Epoch(1), seen: Epoch(2) };
        assert_eq!(late.err(), Some(fenced));
    });
}

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
            array.replace(back, rig.member(back)).await.expect("replaced");
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
fn impossible_arrays_are_refused() {
    Reactor::simulated(11).block_on(async {
        let refused = async |change: &dyn Fn(&mut levada_raid::ArraySpec)| {
            let mut spec = Rig::new(Level::Raid6, 6, 0, 8 << 10, 8).spec();
            change(&mut spec);
            RaidArray::create(spec, Epoch(1)).await.err().expect("refused")
        };
        let geometry = |error| matches!(error, RaidError::Geometry { .. });
        assert!(geometry(refused(&|spec| spec.chunk_bytes = 1000).await));
        assert!(geometry(refused(&|spec| spec.spares = 4).await));
        assert!(geometry(refused(&|spec| spec.members.clear()).await));
        let levels = [
            Level::Raid1 { copies: 7 },
            Level::Raid50 { groups: 1 },
            Level::Raid50 { groups: 4 },
            Level::Raid50 { groups: 6 },
            Level::Raid60 { groups: 0 },
            Level::Raid60 { groups: 3 },
            Level::NPlusM { parity: 0 },
            Level::NPlusM { parity: 5 },
            Level::NPlusM { parity: 6 },
        ];
        for level in levels {
            assert!(geometry(refused(&|spec| spec.level = level).await), "{level}");
        }
        assert!(geometry(refused(&|spec| spec.members[1] = spec.members[0].clone()).await));
        let too_small = refused(&|spec| spec.chunk_bytes = 1 << 30).await;
        assert!(matches!(too_small, RaidError::TooSmall { .. }), "{too_small}");
    });
}

#[test]
fn foreign_and_blank_devices_are_named() {
    Reactor::simulated(12).block_on(async {
        let rig = Rig::new(Level::Raid6, 4, 0, 8 << 10, 8);
        drop(rig.create().await);
        let other = Rig::new(Level::Raid6, 4, 0, 8 << 10, 8);
        let mut spec = other.spec();
        spec.uuid = levada_base::ids::Uuid::from_u128(5);
        drop(RaidArray::create(spec, Epoch(1)).await.expect("created"));
        let blank = Rig::new(Level::Raid6, 4, 0, 8 << 10, 8);
        let mut devices = vec![other.devices().remove(0), blank.devices().remove(0)];
        let none = RaidArray::open(ARRAY, devices.clone(), Epoch(2), false).await;
        assert!(matches!(none.err(), Some(RaidError::NotFound { .. })));
        devices.extend(rig.devices());
        devices.push(rig.devices().remove(0));
        let (_, report) = RaidArray::open(ARRAY, devices, Epoch(2), false).await.expect("opened");
        let findings: Vec<_> = report.devices.iter().map(|(_, finding)| finding.clone()).collect();
        assert!(matches!(findings[0], Finding::Foreign { .. }));
        assert_eq!(findings[1], Finding::NoSuperblock);
        assert_eq!(findings[6], Finding::Duplicate { member: 0 });
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
