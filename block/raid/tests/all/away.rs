//! Members that were away for a while catch up with what changed meanwhile, and with nothing else.

use crate::common::{ARRAY, Rig, TestDrive, pattern, read, write_stripe};
use futures_util::future::select;
use levada_base::reactor::{self, Group, Reactor};
use levada_base::{Buf, Epoch};
use levada_device::{Device, Durability};
use levada_raid::{
    Admitted, Array, Finding, Level, Limits, MemberSpec, MemberState, MemberStatus, RaidArray,
    RaidError,
};
use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

const STRIPES: u64 = 300;
const LEVELS: [(Level, usize); 5] = [
    (Level::Raid1 { copies: 3 }, 5),
    (Level::Raid5, 4),
    (Level::Raid6, 5),
    (Level::Raid60 { groups: 2 }, 8),
    (Level::NPlusM { parity: 3 }, 6),
];

/// An array with something in every stripe.
struct Filled {
    rig: Rc<Rig>,
    array: RaidArray,
    /// By offset.
    expected: BTreeMap<u64, Buf>,
    stripe_bytes: u64,
    node: Group,
}

impl Filled {
    async fn new(level: Level, members: usize) -> Self {
        Self::with_spares(level, members, 0).await
    }

    async fn with_spares(level: Level, members: usize, spares: usize) -> Self {
        let rig = Rc::new(Rig::new(level, members, spares, 8 << 10, STRIPES));
        let (node, maker) = (Group::new(), Rc::clone(&rig));
        let made = reactor::spawn_in(&node, async move { maker.create().await });
        let array = made.await.expect("nobody killed it");
        let stripe_bytes = array.geometry().stripe_bytes;
        let mut filled = Self { rig, array, expected: BTreeMap::new(), stripe_bytes, node };
        for stripe in 0..STRIPES.min(filled.array.geometry().stripes) {
            let data = write_stripe(&filled.array, stripe, 1).await.expect("written");
            filled.expected.insert(stripe * stripe_bytes, data);
        }
        filled.array.flush().await.expect("flushed");
        filled
    }

    /// Overwrites the first block of a stripe.
    async fn overwrite(&mut self, stripe: u64, version: u64) {
        let at = stripe * self.stripe_bytes;
        let data = pattern(at, 4096, version);
        let written = self.array.write(at, data.clone().into_vec(), Durability::Volatile).await;
        written.expect("written");
        let mut whole = self.expected[&at].to_vec();
        whole[..4096].copy_from_slice(&data);
        self.expected.insert(at, Buf::copy_of(&whole));
    }

    async fn open_without(&mut self, lost: &[usize]) {
        self.node = Group::new();
        let (rig, lost) = (Rc::clone(&self.rig), lost.to_vec());
        let opened = reactor::spawn_in(&self.node, async move { rig.open_without(&lost).await });
        self.array = opened.await.expect("nobody killed it").expect("opened");
    }

    /// The process dies, and the power with it.
    fn die(&self) {
        self.node.kill();
        self.rig.drives.iter().for_each(|drive| drive.lose_in_flight());
        self.rig.cut_power();
    }

    async fn check(&self) {
        for (at, data) in &self.expected {
            let found = read(&self.array, *at, data.len()).await.expect("readable");
            assert!(found[..] == data[..], "at {at}");
        }
    }

    /// Rebuilds and says how many bytes that wrote to a member.
    async fn rebuild(&self, member: usize) -> u64 {
        let written = || self.array.status().members[member].bytes_written;
        let before = written();
        self.array.rebuild(Limits::NONE).await.expect("rebuilt");
        assert_eq!(self.array.status().members[member].state, MemberState::InSync);
        written() - before
    }

    /// All data is there without as many of the others as the level bears.
    async fn check_without_others(&self, returned: usize) {
        let scrubbed = self.array.scrub(Limits::NONE).await.expect("scrubbed");
        assert_eq!((scrubbed.mismatched, scrubbed.wrong_repaired, scrubbed.lost), (0, 0, 0));
        let tolerates = self.array.geometry().tolerates;
        let others = (0..self.rig.drives.len()).filter(|drive| *drive != returned);
        let pulled: Vec<usize> = others.take(tolerates).collect();
        pulled.iter().for_each(|drive| self.rig.drives[*drive].pull());
        self.check().await;
    }
}

fn catches_up(level: Level, members: usize, dies: bool) {
    Reactor::simulated(members as u64).block_on(async {
        let mut life = Filled::new(level, members).await;
        life.array.close().await.expect("closed");
        life.open_without(&[1]).await;
        for stripe in [3, 200, 201] {
            life.overwrite(stripe, 2).await;
        }
        let data = write_stripe(&life.array, 7, 3).await.expect("written");
        life.expected.insert(7 * life.stripe_bytes, data);
        life.array.flush().await.expect("flushed");
        match dies {
            true => life.die(),
            false => life.array.close().await.expect("closed"),
        }
        life.open_without(&[]).await;
        assert!(matches!(
            life.array.status().members[1].state,
            MemberState::Rebuilding { next_slot: 0 }
        ));
        life.check().await;
        let chunks = life.rebuild(1).await / (8 << 10);
        assert!((1..=2 * 64 + 10).contains(&chunks), "{level:?} wrote {chunks} chunks");
        life.check_without_others(1).await;
    });
}

#[test]
fn a_member_that_was_absent_at_a_start_gets_what_it_missed() {
    for (level, members) in LEVELS {
        catches_up(level, members, false);
        catches_up(level, members, true);
    }
}

#[test]
fn a_member_that_vanishes_and_is_given_back_gets_what_it_missed() {
    for (level, members) in LEVELS {
        Reactor::simulated(7).block_on(async {
            let mut life = Filled::new(level, members).await;
            // The next write meets that it is gone, and what was not flushed before is missed as well.
            life.overwrite(100, 2).await;
            life.rig.drives[2].pull();
            for stripe in 100..130 {
                life.overwrite(stripe, 3).await;
            }
            while life.array.status().members[2].state != MemberState::Faulty {
                life.overwrite(100, 4).await;
            }
            life.overwrite(0, 5).await;
            life.array.flush().await.expect("flushed");
            reactor::sleep(Duration::from_secs(1)).await;
            life.rig.drives[2].plug_in();
            let admitted = life.array.replace(2, life.rig.member(2)).await;
            assert_eq!(admitted, Ok(Admitted::CatchesUp), "{level:?}");
            let chunks = life.rebuild(2).await / (8 << 10);
            assert!((1..=4 * 64).contains(&chunks), "{level:?} wrote {chunks} chunks");
            life.check_without_others(2).await;
        });
    }
}

/// It goes again half-way, with the power.
#[test]
fn catching_up_goes_on_after_a_power_cut() {
    for seed in 0..10 {
        Reactor::simulated(seed).block_on(async {
            let mut life = Filled::new(Level::Raid6, 6).await;
            life.array.close().await.expect("closed");
            life.open_without(&[1, 4]).await;
            for stripe in 0..40 {
                life.overwrite(stripe * 7, 2).await;
            }
            life.array.flush().await.expect("flushed");
            life.die();
            life.open_without(&[4]).await;
            let (array, limits) = (life.array.clone(), Limits::NONE);
            let rebuilding =
                reactor::spawn_in(&life.node, async move { array.rebuild(limits).await });
            reactor::sleep(Duration::from_micros(500 * seed)).await;
            life.overwrite(seed * 7, 3).await;
            life.array.flush().await.expect("flushed");
            life.die();
            drop(rebuilding);
            life.open_without(&[]).await;
            life.check().await;
            life.rebuild(1).await;
            life.rebuild(4).await;
            life.check_without_others(4).await;
        });
    }
}

#[test]
fn one_that_somebody_took_out_does_not_come_back_by_itself() {
    Reactor::simulated(3).block_on(async {
        let mut life = Filled::new(Level::Raid6, 5).await;
        life.array.fail(1).await.expect("out");
        life.overwrite(5, 2).await;
        life.array.close().await.expect("closed");
        life.open_without(&[]).await;
        assert_eq!(life.array.status().members[1].state, MemberState::Faulty);
        let admitted = life.array.replace(1, life.rig.member(1)).await;
        assert_eq!(admitted, Ok(Admitted::CatchesUp));
        let chunks = life.rebuild(1).await / (8 << 10);
        assert!((1..=80).contains(&chunks), "wrote {chunks} chunks");
        life.check_without_others(1).await;
    });
}

#[test]
fn one_that_is_older_than_it_was_is_rebuilt_whole() {
    Reactor::simulated(4).block_on(async {
        let mut life = Filled::new(Level::Raid6, 5).await;
        let old = life.rig.drives[1].image();
        life.overwrite(5, 2).await;
        life.array.close().await.expect("closed");
        // In step, and then away.
        life.open_without(&[]).await;
        life.array.close().await.expect("closed");
        life.open_without(&[1]).await;
        life.overwrite(6, 2).await;
        life.array.close().await.expect("closed");
        life.rig.drives[1].put_back(&old);
        let (epoch, devices) = (life.rig.epoch.get() + 1, life.rig.devices());
        let (array, report) =
            RaidArray::open(ARRAY, devices, Epoch(epoch), false).await.expect("opened");
        assert!(matches!(report.devices[1].1, Finding::Stale { member: 1, .. }), "{report}");
        life.array = array;
        let admitted = life.array.replace(1, life.rig.member(1)).await;
        assert_eq!(admitted, Ok(Admitted::Anew));
        assert!(life.rebuild(1).await / (8 << 10) >= STRIPES);
        life.check_without_others(1).await;
    });
}

/// Each half of a mirror is opened without the other, by force: neither may take the other for something that only missed a
/// few stripes.
#[test]
fn halves_that_went_apart_do_not_catch_up() {
    Reactor::simulated(5).block_on(async {
        let mut life = Filled::new(Level::Raid1 { copies: 2 }, 2).await;
        life.overwrite(5, 2).await;
        life.array.close().await.expect("closed");
        for (half, other) in [(0, 1), (1, 0)] {
            let devices = vec![life.rig.devices().swap_remove(half)];
            let epoch = Epoch(life.rig.epoch.get() + 1);
            let opened = RaidArray::open(ARRAY, devices, epoch, true).await;
            let (array, _) = opened.expect("opened by force");
            let at = 10 + other as u64;
            let data = pattern(at * 4096, 4096, 9);
            array.write(at * 4096, data.into_vec(), Durability::Fua).await.expect("written");
            array.close().await.expect("closed");
        }
        let epoch = Epoch(life.rig.epoch.get() + 2);
        let opened = RaidArray::open(ARRAY, life.rig.devices(), epoch, true).await;
        let (_, report) = opened.expect("opened");
        let stale = |(_, finding): &(_, Finding)| matches!(finding, Finding::Stale { .. });
        assert_eq!(report.devices.iter().filter(|found| stale(found)).count(), 1, "{report}");
    });
}

/// As before, but one half has had its other half replaced by then: nobody calls anybody faulty.
#[test]
fn a_half_that_went_on_with_another_does_not_catch_up() {
    Reactor::simulated(6).block_on(async {
        let mut life = Filled::new(Level::Raid1 { copies: 2 }, 2).await;
        life.rig.drives[1].pull();
        while life.array.status().members[1].state != MemberState::Faulty {
            life.overwrite(0, 2).await;
        }
        let device = TestDrive::new("another", 16 << 20);
        let another = MemberSpec { device, ..life.rig.newcomer(1) };
        life.array.replace(1, another).await.expect("replaced");
        life.array.rebuild(Limits::NONE).await.expect("rebuilt");
        for stripe in 0..STRIPES / 2 {
            life.overwrite(stripe, 3).await;
        }
        life.array.close().await.expect("closed");
        life.rig.drives[1].plug_in();
        let old = vec![life.rig.devices().swap_remove(1)];
        let epoch = life.rig.epoch.get() + 1;
        let opened = RaidArray::open(ARRAY, old, Epoch(epoch), true).await;
        opened.expect("opened by force").0.close().await.expect("closed");
        let (devices, epoch) = (life.rig.devices(), Epoch(epoch + 1));
        let (_, report) = RaidArray::open(ARRAY, devices, epoch, true).await.expect("opened");
        assert!(matches!(report.devices[0].1, Finding::Stale { member: 0, .. }), "{report}");
    });
}

/// The power fails while a member is being taken back, so that only the others know.
#[test]
fn a_power_cut_while_a_member_is_taken_back_costs_nothing() {
    for seed in 0..30 {
        Reactor::simulated(seed).block_on(async {
            let mut life = Filled::new(Level::Raid1 { copies: 2 }, 2).await;
            life.array.close().await.expect("closed");
            for version in [2, 3] {
                // So that the other is older than all that are live are known to be.
                let alone = vec![life.rig.devices().swap_remove(0)];
                let epoch = life.rig.epoch.get() + 1;
                life.rig.epoch.set(epoch);
                let opened = RaidArray::open(ARRAY, alone, Epoch(epoch), true).await;
                life.array = opened.expect("opened by force").0;
                life.overwrite(5, version).await;
                life.array.close().await.expect("closed");
            }
            life.node = Group::new();
            let rig = Rc::clone(&life.rig);
            let opening = reactor::spawn_in(&life.node, async move { drop(rig.open().await) });
            reactor::sleep(Duration::from_micros(20 * seed)).await;
            life.die();
            drop(opening);
            life.open_without(&[]).await;
            life.rebuild(1).await;
            life.check_without_others(1).await;
        });
    }
}

/// One vanishes, and the others a moment later: it may not have been able to tell what the first one missed. All come back by
/// themselves when they are there, the first one with everything made anew.
#[test]
fn whoever_vanished_just_before_the_end_comes_back() {
    for (level, members) in LEVELS {
        let mut untold = 0;
        for writes in 0..30 {
            Reactor::simulated(writes).block_on(async {
                let mut life = Filled::new(level, members).await;
                life.rig.drives[0].pull();
                for drive in &life.rig.drives[1..] {
                    drive.pull_after_writes(writes);
                }
                // Those that fail may be there or not, or half.
                for stripe in 0..20 {
                    let at = stripe * life.stripe_bytes;
                    life.expected.remove(&at);
                    let data = pattern(at, 4096, 2).into_vec();
                    let _ = life.array.write(at, data, Durability::Fua).await;
                }
                life.die();
                life.rig.drives.iter().for_each(|drive| drive.plug_in());
                let devices = life.rig.devices();
                let report = RaidArray::examine(ARRAY, &devices, false).await.expect("opens");
                let gets_all = report.devices.iter().filter_map(|(_, finding)| match finding {
                    Finding::GetsAll { member } => Some(*member),
                    _ => None,
                });
                let gets_all: Vec<usize> = gets_all.collect();
                life.open_without(&[]).await;
                let status = life.array.status();
                let is_out = |member: &MemberStatus| member.state == MemberState::Faulty;
                assert!(!status.members.iter().any(is_out), "{level:?}, {writes}: {report}");
                assert!(gets_all.iter().all(|member| !status.members[*member].catches_up));
                untold += gets_all.len();
                life.rebuild(0).await;
                life.check().await;
                life.check_without_others(0).await;
            });
        }
        assert!(untold > 0, "{level:?}: none of them vanished at such a moment");
    }
}

/// Spares that were away are spares again, and one that was being rebuilt begins anew: at a start, or when it is given back.
#[test]
fn who_has_nothing_to_lose_comes_back_too() {
    for (is_rebuilt, at_a_start) in [(false, false), (false, true), (true, false), (true, true)] {
        Reactor::simulated(11).block_on(async {
            let rig = Rig::new(Level::Raid6, 6, 1, 8 << 10, 40);
            let mut array = rig.create().await;
            for stripe in 0..40 {
                write_stripe(&array, stripe, 1).await.expect("written");
            }
            let spare = {
                let mut members = array.status().members.into_iter();
                members.find(|member| member.state == MemberState::Spare).expect("one").index
            };
            if is_rebuilt {
                array.fail((spare + 1) % 6).await.expect("out");
            }
            rig.drives[spare].pull();
            // Spares get superblocks and the map.
            for stripe in 0..40 {
                write_stripe(&array, stripe, 2).await.expect("written");
            }
            array.flush().await.expect("flushed");
            let member = |array: &RaidArray| array.status().members[spare].clone();
            assert_eq!(
                (member(&array).state, member(&array).vanished),
                (MemberState::Faulty, true)
            );
            if at_a_start {
                array.close().await.expect("closed");
                array = rig.open_without(&[spare]).await.expect("opened");
                assert!(member(&array).vanished);
                array.close().await.expect("closed");
                rig.drives[spare].plug_in();
                array = rig.open().await.expect("opened");
            } else {
                rig.drives[spare].plug_in();
                let back = array.replace(spare, rig.member(spare)).await;
                assert_eq!(back, Ok(Admitted::Anew));
            }
            let state = member(&array).state;
            match is_rebuilt {
                true => assert!(matches!(state, MemberState::Rebuilding { next_slot: 0 })),
                false => assert_eq!(state, MemberState::Spare),
            }
            array.rebuild(Limits::NONE).await.expect("rebuilt");
            if !is_rebuilt {
                array.fail((spare + 1) % 6).await.expect("out");
                array.rebuild(Limits::NONE).await.expect("rebuilt");
            }
            assert_eq!((member(&array).state, array.status().degraded), (MemberState::InSync, 0));
            // Of the others as many may go as the level bears.
            for other in (0..6).filter(|it| ![spare, (spare + 1) % 6].contains(it)).take(2) {
                rig.drives[other].pull();
            }
            let bytes = array.geometry().stripe_bytes as usize;
            for stripe in 0..40 {
                let at = stripe * bytes as u64;
                let found = read(&array, at, bytes).await.expect("readable");
                assert!(found[..] == pattern(at, bytes, 2)[..], "stripe {stripe}");
            }
        });
    }
}

/// A spare has the role of one that vanished, at once or when it was waited for in vain: it comes back as a spare, at a start or by hand.
#[test]
fn whose_role_is_taken_comes_back_as_a_spare() {
    for (patience, at_a_start) in [(0, false), (0, true), (1, false), (1, true)] {
        Reactor::simulated(13).block_on(async {
            let mut life = Filled::with_spares(Level::Raid6, 6, 1).await;
            life.array.wait_for_vanished(Duration::from_secs(patience));
            life.rig.drives[0].pull();
            life.overwrite(5, 2).await;
            reactor::sleep(Duration::from_secs(2)).await;
            life.array.rebuild(Limits::NONE).await.expect("rebuilt");
            assert_eq!(life.array.status().degraded, 0);
            life.overwrite(6, 2).await;
            life.rig.drives[0].plug_in();
            if at_a_start {
                life.array.close().await.expect("closed");
                life.open_without(&[]).await;
            } else {
                let back = life.array.replace(0, life.rig.member(0)).await;
                assert_eq!(back, Ok(Admitted::Anew));
            }
            assert_eq!(life.array.status().members[0].state, MemberState::Spare);
            life.array.fail(1).await.expect("out");
            life.rebuild(0).await;
            life.check_without_others(0).await;
        });
    }
}

/// The power fails when nobody but a spare has the newest page of the map, and it is not there at the next start, after which what the page tells
/// of changes. It must not come to be the newest page when the spare is back, wherever the power fails then.
#[test]
fn a_page_that_only_one_who_was_away_has_is_forgotten() {
    const CHANGED: u64 = 5;
    for (at_a_start, seed) in (0..80).flat_map(|seed| [(true, seed), (false, seed)]) {
        Reactor::simulated(seed).block_on(async {
            let mut life = Filled::with_spares(Level::Raid6, 6, 1).await;
            let mut members = life.array.status().members.into_iter();
            let spare = members.position(|member| member.state == MemberState::Spare).expect("one");
            // So that no page tells of stripes whose redundancy is in doubt, and none is written when they change.
            life.array.close().await.expect("closed");
            life.open_without(&[]).await;
            let images: Vec<_> = life.rig.drives.iter().map(|drive| drive.image()).collect();
            life.array.discard_stripes(CHANGED, 1).await.expect("discarded");
            life.array.flush().await.expect("flushed");
            life.die();
            let others = life.rig.drives.iter().zip(&images).enumerate();
            for (_, (drive, image)) in others.filter(|(index, _)| *index != spare) {
                drive.put_back(image);
            }
            life.open_without(&[spare]).await;
            life.overwrite(CHANGED, 2).await;
            life.array.flush().await.expect("flushed");
            let meanwhile = reactor::sleep(Duration::from_micros(20 * seed));
            if at_a_start {
                life.die();
                life.node = Group::new();
                let rig = Rc::clone(&life.rig);
                let opening = reactor::spawn_in(&life.node, async move { drop(rig.open().await) });
                meanwhile.await;
                drop(opening);
            } else {
                let returned = life.array.replace(spare, life.rig.member(spare));
                select(pin!(returned), pin!(meanwhile)).await;
            }
            life.die();
            life.open_without(&[]).await;
            assert_eq!(life.array.status().members[spare].state, MemberState::Spare);
            life.check().await;
        });
    }
}

/// What superblocks say of those that get everything anew is said of members that are out alone: whoever does not know of it would take one
/// that is rebuilt for one that needs little.
#[test]
fn who_gets_everything_anew_is_rebuilt_like_anybody() {
    Reactor::simulated(12).block_on(async {
        let mut life = Filled::new(Level::Raid6, 5).await;
        life.rig.drives[0].pull();
        life.rig.drives[1..].iter().for_each(|drive| drive.pull_after_writes(2));
        for stripe in 0..20 {
            let _ = write_stripe(&life.array, stripe, 1).await;
        }
        life.die();
        life.rig.drives.iter().for_each(|drive| drive.plug_in());
        // It is away once more after its rebuild began, and through a start.
        for _ in 0..3 {
            life.open_without(&[]).await;
            let member = &life.array.status().members[0];
            assert_eq!(member.state, MemberState::Rebuilding { next_slot: 0 });
            assert!(!member.catches_up);
            life.array.close().await.expect("closed");
            let out = life.rig.drives[1].newest_held_bits(0);
            assert_eq!(out, 0, "{out:#x}");
            life.open_without(&[0]).await;
            life.array.close().await.expect("closed");
            assert_eq!(life.rig.drives[1].newest_held_bits(0) >> 62, 0b11);
        }
        life.open_without(&[]).await;
        life.rebuild(0).await;
        life.check_without_others(0).await;
    });
}

/// Nobody asks anything of the array, which would not notice otherwise.
#[test]
fn one_that_vanishes_while_nothing_is_asked_is_noticed() {
    Reactor::simulated(14).block_on(async {
        let mut life = Filled::with_spares(Level::Raid60 { groups: 2 }, 11, 1).await;
        let out = |life: &Filled| {
            let members = life.array.status().members.into_iter();
            let out = members.filter(|member| member.state == MemberState::Faulty);
            out.map(|member| member.index).collect::<Vec<_>>()
        };
        life.array.wait_for_vanished(Duration::from_secs(60));
        life.array.look_at_members().await;
        assert_eq!((out(&life), life.array.bears_without(&[])), (vec![], 2));
        assert_eq!(life.array.bears_without(&[0]), 1);
        life.rig.drives[0].pull();
        reactor::sleep(Duration::from_secs(600)).await;
        assert_eq!(out(&life), []);
        life.array.look_at_members().await;
        assert_eq!((out(&life), life.array.bears_without(&[])), (vec![0], 1));
        // Until that is on record, and nothing is written any more.
        reactor::sleep(Duration::from_secs(1)).await;
        // More than it bears: they may all be there again before anybody asks for anything.
        life.rig.drives[1..4].iter().for_each(|drive| drive.pull());
        life.array.look_at_members().await;
        assert_eq!((out(&life), life.array.status().stopped), (vec![0], None));
        life.rig.drives[1..4].iter().for_each(|drive| drive.plug_in());
        life.check().await;
        // On record, too.
        life.die();
        life.rig.drives[0].plug_in();
        life.open_without(&[0]).await;
        assert!(life.array.status().members[0].vanished);
    });
}

/// Two members and a spare of one enclosure vanish from an array of which nobody asks anything: the spare takes the role of neither, and both
/// catch up when they are back.
#[test]
fn a_spare_that_has_vanished_as_well_takes_no_role() {
    Reactor::simulated(15).block_on(async {
        let life = Filled::with_spares(Level::Raid6, 8, 1).await;
        let spare = 7;
        assert_eq!(life.array.status().members[spare].state, MemberState::Spare);
        life.array.wait_for_vanished(Duration::from_secs(60));
        let roles: Vec<_> = life.array.status().members.iter().map(|it| it.role).collect();
        for drive in [0, 1, spare] {
            life.rig.drives[drive].pull();
        }
        life.array.look_at_members().await;
        reactor::sleep(Duration::from_secs(1)).await;
        let members = life.array.status().members;
        let after: Vec<_> = members.iter().map(|it| it.role).collect();
        assert_eq!(after, roles);
        assert!([0, 1, spare].iter().all(|index| members[*index].vanished));
        for drive in [0, 1, spare] {
            life.rig.drives[drive].plug_in();
            let back = life.array.replace(drive, life.rig.member(drive)).await.expect("back");
            assert_eq!(back == Admitted::CatchesUp, drive != spare);
        }
        life.rebuild(0).await;
        life.check_without_others(0).await;
    });
}

/// The power fails when a spare that was away has been taken back, before it knows. Whoever has the other copy may have gone on alone, so one copy and
/// the spare are no majority: the spare can have gone on with nobody.
#[test]
fn who_does_not_know_that_it_was_taken_back_counts_for_nothing() {
    let mut unknowing = 0;
    for seed in 0..150 {
        Reactor::simulated(seed).block_on(async {
            let mut life = Filled::with_spares(Level::Raid1 { copies: 2 }, 3, 1).await;
            let spare = 2;
            life.array.close().await.expect("closed");
            for _ in 0..2 {
                // So that it is older than all that are live are known to be.
                life.open_without(&[spare]).await;
                life.array.close().await.expect("closed");
            }
            let newest = |drive: usize| life.rig.drives[drive].newest_generation();
            let before = [newest(0), newest(spare)];
            let node = Group::new();
            let rig = Rc::clone(&life.rig);
            let opening = reactor::spawn_in(&node, async move { drop(rig.open().await) });
            // When superblocks are written.
            reactor::sleep(Duration::from_micros(100 + seed)).await;
            node.kill();
            life.die();
            drop(opening);
            if newest(spare) > before[1] {
                return;
            }
            unknowing += u32::from(newest(0) > before[0]);
            let opened = life.rig.open_without(&[1]).await;
            assert!(matches!(opened, Err(RaidError::NoMajority { .. })), "{seed}");
        });
    }
    assert!(unknowing > 0, "the power failed at no such moment");
}

/// It vanished, and then somebody says that he does not want it.
#[test]
fn one_that_vanished_and_was_taken_out_stays_out() {
    Reactor::simulated(8).block_on(async {
        let mut life = Filled::new(Level::Raid6, 5).await;
        life.array.close().await.expect("closed");
        life.open_without(&[1]).await;
        life.array.fail(1).await.expect("out already");
        life.array.close().await.expect("closed");
        life.open_without(&[]).await;
        assert_eq!(life.array.status().members[1].state, MemberState::Faulty);
    });
}

/// A member vanishes with a spare there: it is waited for, comes back and catches up. When it does not, the spare has its role.
#[test]
fn one_that_vanished_is_waited_for() {
    Reactor::simulated(9).block_on(async {
        let patience = Duration::from_secs(60);
        for comes_back in [true, false] {
            let rig = Rig::new(Level::Raid6, 7, 1, 8 << 10, 40);
            let array = rig.create().await;
            array.wait_for_vanished(patience);
            for stripe in 0..40 {
                write_stripe(&array, stripe, 1).await.expect("written");
            }
            array.flush().await.expect("flushed");
            let state = |index: usize| array.status().members[index].state;
            let write = async |version| {
                let data = pattern(0, 4096, version).into_vec();
                array.write(0, data, Durability::Fua).await.expect("borne");
            };
            let gone = (0..7).find(|i| array.members_of(0, 4096).contains(*i)).expect("somebody");
            let spare = (0..7).find(|i| state(*i) == MemberState::Spare).expect("one");
            rig.drives[gone].pull();
            write(2).await;
            assert_eq!((state(gone), state(spare)), (MemberState::Faulty, MemberState::Spare));
            assert!(array.status().members[gone].awaited.is_some_and(|left| left <= patience));
            reactor::sleep(patience / 2).await;
            write(3).await;
            if comes_back {
                rig.drives[gone].plug_in();
                let back = array.replace(gone, rig.member(gone)).await;
                assert_eq!(back, Ok(Admitted::CatchesUp));
            }
            reactor::sleep(patience).await;
            assert_eq!(state(spare) == MemberState::Spare, comes_back);
            array.rebuild(Limits::NONE).await.expect("rebuilt");
            assert_eq!(array.status().degraded, 0);
            assert!(read(&array, 0, 4096).await.expect("read") == pattern(0, 4096, 3)[..]);
        }
    });
}

/// Nobody is waited for who was taken out, failed, or whose loss leaves nothing to lose.
#[test]
fn one_that_failed_or_was_the_last_to_lose_is_not_waited_for() {
    for (level, members, fails, takes) in [
        (Level::Raid6, 7, 0, 1),
        (Level::Raid6, 7, 1, 0),
        (Level::Raid5, 5, 0, 0),
        (Level::Raid6, 8, 0, 2),
    ] {
        Reactor::simulated(10).block_on(async {
            let spares = 2;
            let rig = Rig::new(level, members, spares, 8 << 10, 40);
            let array = rig.create().await;
            array.wait_for_vanished(Duration::from_secs(60));
            for stripe in 0..4 {
                write_stripe(&array, stripe, 1).await.expect("written");
            }
            array.flush().await.expect("flushed");
            let in_role: Vec<usize> =
                (0..members).filter(|i| array.status().members[*i].role.is_some()).collect();
            let left = || {
                let all = array.status().members.into_iter();
                all.filter(|member| member.state == MemberState::Spare).count()
            };
            let vanishes = async |index: usize, version| {
                rig.drives[index].pull();
                for stripe in 0..4 {
                    write_stripe(&array, stripe, version).await.expect("borne");
                }
            };
            match (fails, takes) {
                // Somebody says that it stays out.
                (0, 1) => {
                    vanishes(in_role[0], 2).await;
                    assert_eq!(left(), 2);
                    array.fail(in_role[0]).await.expect("borne");
                    assert_eq!(left(), 1);
                }
                (1, 0) => {
                    array.fail(in_role[0]).await.expect("borne");
                    assert_eq!(left(), 1);
                }
                // One parity, and it is used up.
                (0, 0) => {
                    vanishes(in_role[0], 2).await;
                    assert_eq!(left(), 1);
                }
                // The second makes it urgent for both.
                _ => {
                    vanishes(in_role[0], 2).await;
                    assert_eq!(left(), 2);
                    vanishes(in_role[1], 3).await;
                    assert_eq!(left(), 0);
                }
            }
        });
    }
}

/// Of a mirror dealt over four drives, the other drive of a pair is needed, and those of the other pair are not.
#[test]
fn what_an_array_can_do_without_depends_on_who_is_out() {
    Reactor::simulated(15).block_on(async {
        let life = Filled::new(Level::Raid1 { copies: 2 }, 4).await;
        let needed = |life: &Filled| -> Vec<_> {
            (0..4).filter(|member| !life.array.can_do_without(*member)).collect()
        };
        assert_eq!(needed(&life), []);
        life.array.fail(0).await.expect("it bears that");
        let needed = needed(&life);
        assert!(!needed.is_empty() && needed.len() < 3, "{needed:?}");
        for member in 1..4 {
            assert_eq!(life.array.fail(member).await.is_err(), needed.contains(&member));
            if life.array.status().degraded > 1 {
                break;
            }
        }
    });
}

/// Spares that come one after the other while members of several groups are out go where one more loss would cost most; where one is not
/// enough for that, to whichever group lacks most, those included that are being rebuilt.
#[test]
fn a_spare_goes_where_one_more_loss_would_cost_most() {
    for (groups, lost, order) in [
        (2, &[1, 5, 7][..], &[5, 7][..]),
        (3, &[1, 4, 5, 8, 9], &[4, 5, 8]),
        (2, &[0, 1, 4, 5], &[0, 1, 4]),
    ] {
        Reactor::simulated(16).block_on(async {
            let (width, spares) = (4 * groups, order.len());
            let level = Level::Raid60 { groups };
            let rig = Rig::new(level, width + spares, spares, 8 << 10, STRIPES);
            let array = rig.create().await;
            let members = || array.status().members.into_iter();
            let spares: Vec<_> =
                members().filter(|it| it.role.is_none()).map(|it| it.index).collect();
            for index in &spares {
                array.fail(*index).await.expect("a spare");
            }
            for role in lost {
                let player = members().find(|it| it.role == Some(*role)).expect("played");
                array.fail(player.index).await.expect("it bears that");
            }
            for (spare, role) in spares.iter().zip(order) {
                let neediest = array.neediest().expect("some are lost");
                assert_eq!(members().nth(neediest).and_then(|it| it.role), Some(*role));
                array.replace(*spare, rig.member(*spare)).await.expect("taken");
                assert_eq!(members().nth(*spare).and_then(|it| it.role), Some(*role));
            }
        });
    }
}
