//! Which members make an array, and which are refused.

use crate::common::{ARRAY, BLOCK, Rig, read, write_stripe};
use levada_base::Epoch;
use levada_base::reactor::Reactor;
use levada_device::{BlockError, Device};
use levada_raid::{Array, Finding, Level, Limits, RaidArray, RaidError};

const MIRROR: Level = Level::Raid1 { copies: 3 };

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
            assert_eq!(report.devices[1].1, Finding::CatchesUp { member: 1 }, "{report}");
            for _ in 0..20 {
                assert_eq!(read(&array, 0, data.len()).await.as_deref(), Ok(&data[..]));
            }
            array.rebuild(Limits::NONE).await.expect("rebuilt");
            rig.drives[0].pull();
            rig.drives[2].pull();
            assert_eq!(read(&array, 0, data.len()).await.as_deref(), Ok(&data[..]));
        }
    });
}

/// Most copies are cut off at once: another server may open the array by these, and this one acknowledges nothing any more. One after the
/// other they are on record, and where nobody else reaches those that went nobody opens them.
#[test]
fn who_is_left_with_fewer_than_half_at_once_stops() {
    for (shared, at_once) in [(0..3, true), (0..3, false), (0..0, true), (1..3, true)] {
        Reactor::simulated(6).block_on(async {
            let rig = Rig::new(MIRROR, 3, 0, 8 << 10, 8);
            rig.drives[shared.clone()].iter().for_each(|drive| drive.is_shared.set(true));
            let array = rig.create().await;
            let before = write_stripe(&array, 0, 1).await.expect("written");
            array.flush().await.expect("flushed");
            rig.drives[0].pull();
            if !at_once {
                array.discard_stripes(0, 1).await.expect("discarded");
                write_stripe(&array, 0, 2).await.expect("written");
            }
            rig.drives[1].pull();
            let written = match array.discard_stripes(0, 1).await {
                Ok(()) => write_stripe(&array, 0, 3).await.map(drop),
                Err(error) => Err(error),
            };
            if shared != (0..3) || !at_once {
                written.expect("it goes on");
                return;
            }
            assert!(matches!(written, Err(BlockError::TooManyLost { .. })), "{written:?}");
            // It may hear later who has them.
            array.lose_to(Epoch(9));
            let fenced = BlockError::Fenced { ours: array.epoch(), seen: Epoch(9) };
            assert_eq!(array.status().stopped, Some(fenced));
            // The other server.
            let seen: Vec<_> = rig.devices().into_iter().take(2).collect();
            rig.drives[..2].iter().for_each(|drive| drive.plug_in());
            let opened = RaidArray::open(ARRAY, seen, Epoch(9), false).await;
            let (theirs, _) = opened.expect("by its majority");
            assert_eq!(read(&theirs, 0, before.len()).await.as_deref(), Ok(&before[..]));
        });
    }
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

/// A drive with less room than the superblock on it says: not believed, as far as the level bears it.
#[test]
fn a_member_that_was_cut_short_counts_as_missing() {
    Reactor::simulated(14).block_on(async {
        for (level, members) in [(MIRROR, 4), (Level::Raid5, 4), (Level::Raid0, 2)] {
            let mut rig = Rig::new(level, members, 0, 8 << 10, 9);
            let array = rig.create().await;
            let data = write_stripe(&array, 0, 1).await.expect("written");
            array.close().await.expect("closed");
            drop(array);
            let (whole, short) = (rig.drives[1].info().capacity_bytes, rig.drives[1].data_at());
            let cut = crate::common::TestDrive::new("drive-1", short + BLOCK as u64);
            cut.put_blocks(rig.drives[1].stable_blocks());
            rig.drives[1] = cut;
            let opened = RaidArray::open(ARRAY, rig.devices(), Epoch(2), false).await;
            if level == Level::Raid0 {
                let Some(RaidError::TooManyLost { report, .. }) = opened.err() else {
                    panic!("opened")
                };
                assert_eq!(report.missing, ["drive-1"]);
                assert!(report.to_string().contains("drive-1 has"), "{report}");
                assert!(report.to_string().contains("was cut short"), "{report}");
                continue;
            }
            let (array, report) = opened.expect("opened");
            let Finding::CutShort { member: 1, bytes, needed_bytes } = report.devices[1].1 else {
                panic!("{report}")
            };
            assert_eq!(bytes, short + BLOCK as u64);
            assert!(needed_bytes > bytes && needed_bytes <= whole);
            assert_eq!(report.missing, ["drive-1"]);
            assert_eq!(read(&array, 0, data.len()).await.as_deref(), Ok(&data[..]));
            // Nor is it taken back.
            let again = array.replace(1, rig.member(1)).await;
            assert!(matches!(again, Err(RaidError::TooSmall { .. })), "{again:?}");
        }
    });
}

/// A drive on which another array's superblock lies beside that of this one: it holds some of both.
#[test]
fn a_member_that_two_arrays_claim_is_used_by_neither() {
    Reactor::simulated(15).block_on(async {
        let rig = Rig::new(Level::Raid6, 5, 0, 8 << 10, 8);
        let array = rig.create().await;
        let data = write_stripe(&array, 0, 1).await.expect("written");
        array.close().await.expect("closed");
        drop(array);
        let other = Rig::new(Level::Raid6, 5, 0, 8 << 10, 8);
        let uuid = levada_base::ids::Uuid::from_u128(5);
        let spec = levada_raid::ArraySpec { uuid, ..other.spec() };
        drop(RaidArray::create(spec, Epoch(7)).await.expect("created"));
        let mut blocks = rig.drives[2].stable_blocks();
        blocks.extend(other.drives[2].stable_blocks().remove_entry(&1));
        rig.drives[2].put_blocks(blocks.clone());
        other.drives[2].put_blocks(blocks);
        for (rig, uuid, by) in [(&rig, ARRAY, uuid), (&other, uuid, ARRAY)] {
            let opened = RaidArray::open(uuid, rig.devices(), Epoch(8), false).await;
            let (array, report) = opened.expect("opened");
            assert_eq!(report.devices[2].1, Finding::Claimed { by });
            assert_eq!(report.missing, ["drive-2"]);
            assert!(report.to_string().contains("is claimed by array"), "{report}");
            if uuid == ARRAY {
                assert_eq!(read(&array, 0, data.len()).await.as_deref(), Ok(&data[..]));
            }
        }
    });
}

#[test]
fn geometries_are_refused_each_with_its_reason() {
    Reactor::simulated(16).block_on(async {
        let cases = [
            (Level::Raid0, 0, 4096, "RAID 0 needs a member"),
            (Level::Raid1 { copies: 3 }, 2, 4096, "as many members, spares apart, as copies"),
            (Level::Raid5, 33, 4096, "RAID 5 needs 2 to 32 members"),
            (Level::Raid6, 2, 4096, "RAID 6 needs 3 to 32 members"),
            (Level::Raid50 { groups: 2 }, 5, 4096, "two or more groups of as many members"),
            (Level::Raid60 { groups: 2 }, 4, 4096, "RAID 6 needs 3 to 32 members"),
            (Level::NPlusM { parity: 5 }, 12, 4096, "N+M has 1 to 4 parities"),
            (Level::NPlusM { parity: 3 }, 33, 4096, "and at most 32"),
            (Level::Raid5, 4, 6000, "a chunk is a multiple of 4 KiB"),
            (Level::Raid0, 56, 4096, "at most 55 members"),
        ];
        for (level, members, chunk_bytes, says) in cases {
            let rig = Rig::new(level, members, 0, chunk_bytes, 8);
            let error = RaidArray::create(rig.spec(), Epoch(1)).await.err().expect("refused");
            assert!(error.to_string().contains(says), "{level} of {members}: {error}");
            assert!(rig.drives.iter().all(|drive| drive.stable_blocks().is_empty()));
        }
    });
}

#[test]
fn requests_that_cannot_be_are_refused_on_every_level() {
    use levada_device::{BlockError, Durability};
    Reactor::simulated(17).block_on(async {
        for level in [Level::Raid0, MIRROR, Level::Raid5, Level::NPlusM { parity: 3 }] {
            let rig = Rig::new(level, 5, 0, 8 << 10, 9);
            let array = rig.create().await;
            let capacity = array.info().capacity_bytes;
            let block = BLOCK as u64;
            for (at, bytes) in
                [(capacity, BLOCK), (capacity - block, 2 * BLOCK), (u64::MAX - block + 1, BLOCK)]
            {
                let write = array.write(
                    at,
                    crate::common::pattern(0, bytes, 1).into_vec(),
                    Durability::Fua,
                );
                assert!(matches!(write.await, Err(BlockError::OutOfRange { .. })), "{level} {at}");
                let read = read(&array, at, bytes).await;
                assert!(matches!(read, Err(BlockError::OutOfRange { .. })), "{level} {at}");
                let zeroed = array.write_zeroes(at, bytes as u64).await;
                assert!(matches!(zeroed, Err(BlockError::OutOfRange { .. })), "{level} {at}");
                let discarded = array.discard(at, bytes as u64).await;
                assert!(matches!(discarded, Err(BlockError::OutOfRange { .. })), "{level} {at}");
            }
            for (at, bytes) in [(1, BLOCK), (512, BLOCK), (0, 512), (0, BLOCK + 1)] {
                let write = array.write(
                    at,
                    crate::common::pattern(0, bytes, 1).into_vec(),
                    Durability::Fua,
                );
                assert!(matches!(write.await, Err(BlockError::Misaligned { .. })), "{level} {at}");
                let read = read(&array, at, bytes).await;
                assert!(matches!(read, Err(BlockError::Misaligned { .. })), "{level} {at}");
                let zeroed = array.write_zeroes(at, bytes as u64).await;
                assert!(matches!(zeroed, Err(BlockError::Misaligned { .. })), "{level} {at}");
            }
        }
    });
}

#[test]
fn too_many_missing_are_named() {
    Reactor::simulated(18).block_on(async {
        for (level, members, bears) in [
            (Level::Raid0, 4, 0),
            (Level::Raid5, 5, 1),
            (Level::Raid6, 6, 2),
            (Level::NPlusM { parity: 3 }, 8, 3),
        ] {
            let rig = Rig::new(level, members, 0, 8 << 10, 8);
            rig.create().await.close().await.expect("closed");
            let absent: Vec<usize> = (0..=bears).collect();
            let error = rig.open_without(&absent).await.err().expect("too many");
            let names: Vec<String> = absent.iter().map(|at| format!("drive-{at}")).collect();
            let RaidError::TooManyLost { lost, tolerated, report } = &error else {
                panic!("{error}")
            };
            assert_eq!((*lost, *tolerated, &report.missing), (bears + 1, bears, &names));
            assert!(error.to_string().contains(&names.join(", ")), "{error}");
            // Nothing was given up.
            rig.open().await.expect("opened");
        }
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
