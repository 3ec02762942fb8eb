//! Arrays with blocks of 512 bytes, on drives that write no more than that atomically.

use crate::common::{Rig, TestDrive, pattern, read, write_stripe};
use levada_base::reactor::{self, Group, Reactor, random_u64};
use levada_device::{BlockError, Device, Durability};
use levada_raid::{Array, ArraySpec, Level, Limits, MemberState, Misfit, RaidArray, RaidError};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

const SECTOR: usize = 512;
const STRIPES: u64 = 6;
/// Writers take turns over the sectors in runs of so many, so that rows of 4 KiB belong to several.
const LANE: u64 = 3;
const WRITERS: u64 = 4;

fn random(below: u64) -> u64 {
    random_u64() % below
}

/// The versions that each sector may have.
type Versions = Rc<RefCell<Vec<Vec<u64>>>>;

struct Life {
    rig: Rc<Rig>,
    array: RaidArray,
    versions: Versions,
    node: Group,
}

/// Writes runs of sectors of its own, and flushes now and then.
async fn write_on(array: RaidArray, versions: Versions, writer: u64) {
    let sectors = versions.borrow().len() as u64;
    for version in 1.. {
        let lane = random(sectors / LANE / WRITERS) * WRITERS + writer;
        let first = lane * LANE + random(LANE);
        let count = 1 + random(LANE - first % LANE);
        let version = version << 8 | writer << 4 | random(16);
        let all = first as usize..(first + count) as usize;
        versions.borrow_mut()[all.clone()].iter_mut().for_each(|held| held.push(version));
        let at = first * SECTOR as u64;
        let data = pattern(at, count as usize * SECTOR, version);
        let durability = if random(4) == 0 { Durability::Fua } else { Durability::Volatile };
        array.write(at, data.into_vec(), durability).await.expect("as many are there as must be");
        if durability == Durability::Fua {
            versions.borrow_mut()[all].iter_mut().for_each(|held| *held = vec![version]);
        }
        if random(8) == 0 {
            let before = versions.borrow().clone();
            array.flush().await.expect("as many are there as must be");
            let own = |sector: &usize| *sector as u64 / LANE % WRITERS == writer;
            let mut versions = versions.borrow_mut();
            for sector in (0..versions.len()).filter(own) {
                versions[sector] = before[sector].last().copied().into_iter().collect();
            }
        }
    }
}

impl Life {
    async fn open(&mut self, lost: &[usize]) {
        self.node = Group::new();
        let (rig, lost) = (Rc::clone(&self.rig), lost.to_vec());
        let opened = reactor::spawn_in(&self.node, async move { rig.open_without(&lost).await });
        self.array = opened.await.expect("nobody killed it").expect("opened");
    }

    /// Every sector is one of what it may be; from now on it is that.
    async fn check(&self, seed: u64) {
        let bytes = self.versions.borrow().len() * SECTOR;
        let held = read(&self.array, 0, bytes).await.expect("readable");
        for (sector, held) in held.chunks(SECTOR).enumerate() {
            let at = (sector * SECTOR) as u64;
            let of = |version: &u64| match version {
                0 => held.iter().all(|byte| *byte == 0),
                version => held == &pattern(at, SECTOR, *version)[..],
            };
            let versions = &mut self.versions.borrow_mut()[sector];
            let found = versions.iter().rev().copied().find(of);
            *versions = vec![found.unwrap_or_else(|| panic!("seed {seed}: sector {sector}"))];
        }
    }
}

fn live(seed: u64) {
    Reactor::simulated(seed).block_on(async {
        let (level, members) = [
            (Level::Raid1 { copies: 2 }, 4),
            (Level::Raid1 { copies: 3 }, 5),
            (Level::Raid5, 4),
            (Level::Raid6, 5),
            (Level::Raid50 { groups: 2 }, 6),
            (Level::NPlusM { parity: 3 }, 8),
        ][seed as usize % 6];
        let rig = Rc::new(Rig::with_blocks(level, members, 0, 8 << 10, STRIPES, SECTOR));
        let (node, maker) = (Group::new(), Rc::clone(&rig));
        let made = reactor::spawn_in(&node, async move { maker.create().await });
        let array = made.await.expect("nobody killed it");
        assert_eq!(array.info().block_bytes, SECTOR as u64);
        let sectors = array.info().capacity_bytes.min(256 << 10) / SECTOR as u64;
        let sectors = sectors / LANE / WRITERS * LANE * WRITERS;
        let versions = Rc::new(RefCell::new(vec![vec![0]; sectors as usize]));
        let mut life = Life { rig, array, versions, node };
        for _ in 0..4 {
            for writer in 0..WRITERS {
                let (array, versions) = (life.array.clone(), Rc::clone(&life.versions));
                reactor::spawn_in(&life.node, write_on(array, versions, writer));
            }
            reactor::sleep(Duration::from_micros(500 + random(20_000))).await;
            life.node.kill();
            if random(2) == 0 {
                life.rig.drives.iter().for_each(|drive| drive.lose_in_flight());
            }
            life.rig.cut_power();
            let tolerates = life.array.geometry().tolerates as u64;
            let absent: BTreeSet<usize> =
                (0..random(tolerates + 1)).map(|_| random(members as u64) as usize).collect();
            life.open(&absent.iter().copied().collect::<Vec<_>>()).await;
            life.check(seed).await;
            life.array.close().await.expect("closed");
            life.open(&[]).await;
            life.check(seed).await;
            life.array.rebuild(Limits::NONE).await.expect("rebuilt");
            let report = life.array.scrub(Limits::NONE).await.expect("scrubbed");
            assert_eq!(
                (report.mismatched, report.wrong_repaired, report.lost),
                (0, 0, 0),
                "seed {seed}"
            );
        }
    });
}

#[test]
fn sectors_are_old_or_new_and_nobody_elses() {
    (0..24).for_each(live);
}

/// Of one bad sector its neighbours in the row are not lost, and it is put right.
#[test]
fn one_bad_sector_is_recomputed_for_reads_and_writes_of_its_neighbours() {
    for (level, members) in [(Level::Raid5, 4), (Level::Raid1 { copies: 2 }, 2)] {
        Reactor::simulated(2).block_on(async {
            let rig = Rig::with_blocks(level, members, 0, 8 << 10, STRIPES, SECTOR);
            let array = rig.create().await;
            let data = write_stripe(&array, 0, 1).await.expect("written");
            array.flush().await.expect("flushed");
            rig.drives.iter().take(1).for_each(|drive| {
                drive.make_unreadable(drive.data_at() + 1024, SECTOR as u64);
            });
            let mut expected = data.to_vec();
            for sector in [1, 3, 2] {
                let at = sector * SECTOR;
                let new = pattern(at as u64, SECTOR, 7);
                expected[at..at + SECTOR].copy_from_slice(&new);
                let written = array.write(at as u64, new.into_vec(), Durability::Volatile).await;
                written.expect("written");
            }
            for sector in 0..expected.len() / SECTOR {
                let at = sector * SECTOR;
                let held = read(&array, at as u64, SECTOR).await.expect("readable");
                assert!(held[..] == expected[at..at + SECTOR], "{level:?} sector {sector}");
            }
            assert!(array.status().members.iter().all(|m| m.state == MemberState::InSync));
        });
    }
}

#[test]
fn blocks_that_members_cannot_write_at_once_are_refused() {
    Reactor::simulated(1).block_on(async {
        let rig = Rig::with_blocks(Level::Raid5, 3, 0, 8 << 10, STRIPES, SECTOR);
        let refused = async |block_bytes, spec: ArraySpec| {
            let spec = ArraySpec { block_bytes, ..spec };
            let made = RaidArray::create(spec, levada_base::Epoch(1)).await;
            made.map(drop).expect_err("refused").to_string()
        };
        assert_eq!(
            refused(Some(4096), rig.spec()).await,
            "member drive-0 writes no more than 512 bytes at once, and a block of the array has 4096 bytes"
        );
        assert!(refused(Some(1024), rig.spec()).await.contains("512 or 4096"));
        let of_4096 = Rig::new(Level::Raid5, 3, 0, 8 << 10, STRIPES);
        let larger = "has blocks of 4096 bytes, and a block of the array has 512 bytes";
        assert_eq!(refused(Some(512), of_4096.spec()).await, format!("member drive-0 {larger}"));
        let mut mixed = rig.spec();
        mixed.members[1].device = Rc::clone(&of_4096.drives[1]) as Rc<dyn Device>;
        assert_eq!(refused(None, mixed).await, format!("member drive-1 {larger}"));
        // Nor does such a drive come in later.
        let array = rig.create().await;
        let mut spare = rig.member(0);
        spare.uuid = levada_base::ids::Uuid::from_u128(77);
        spare.device = TestDrive::new("large", 1 << 20);
        let refused = array.add_spare(spare).await;
        let why = Misfit::Larger { bytes: 4096 };
        let member = "drive-0".to_owned();
        assert_eq!(refused, Err(RaidError::Misfit { member, block_bytes: 512, why }));
        let misaligned = array.read(100, levada_base::BufMut::zeroed(512).into_vec()).await;
        assert!(matches!(misaligned, Err(BlockError::Misaligned { block_bytes: 512, .. })));
    });
}
