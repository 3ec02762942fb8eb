//! Histories that once cost data or an array: stripes that are overwritten whole, and blocks that are lost by that.

use crate::common::{BLOCK, Rig, pattern, read, write_stripe};
use futures_util::future::join_all;
use levada_base::reactor::{self, Group, Reactor};
use levada_device::{BlockError, Device, Durability};
use levada_raid::{Array, Level, Limits, RaidArray, RaidError};
use std::rc::Rc;
use std::time::Duration;

const CHUNK: u64 = 8 << 10;

/// An array whose owner can be killed.
struct Owned {
    rig: Rc<Rig>,
    node: Group,
    array: RaidArray,
}

impl Owned {
    async fn create(rig: Rig) -> Self {
        let (rig, node) = (Rc::new(rig), Group::new());
        let made = Rc::clone(&rig);
        let created = reactor::spawn_in(&node, async move { made.create().await });
        Self { rig, node, array: created.await.expect("not killed") }
    }

    /// The power fails, and these are away when it is back.
    async fn restart_without(&mut self, away: &[usize]) {
        self.cut_power();
        self.open_without(away).await;
    }

    fn cut_power(&mut self) {
        self.node.kill();
        self.node = Group::new();
        self.rig.cut_power();
    }

    async fn open_without(&mut self, away: &[usize]) {
        let (rig, away) = (Rc::clone(&self.rig), away.to_vec());
        let opened = reactor::spawn_in(&self.node, async move { rig.open_without(&away).await });
        self.array = opened.await.expect("not killed").expect("opened");
    }

    fn stripe_bytes(&self) -> u64 {
        self.array.geometry().stripe_bytes
    }

    /// Overwrites whole stripes; volatile.
    async fn overwrite(&self, first: u64, count: u64, version: u64) -> Result<(), BlockError> {
        let at = first * self.stripe_bytes();
        let data = pattern(at, (count * self.stripe_bytes()) as usize, version).into_vec();
        self.array.write(at, data, Durability::Volatile).await
    }

    /// Who has the first data chunk of a stripe.
    fn holder(&self, stripe: u64) -> usize {
        let of_stripe = self.array.members_of(stripe * self.stripe_bytes(), BLOCK as u64);
        (0..self.rig.drives.len()).find(|at| of_stripe.contains(*at)).expect("somebody")
    }

    /// The power fails behind an overwrite of this stripe, which was written and flushed before, and who has its first
    /// chunk is away: that is lost.
    async fn lose_first_chunk(&mut self, stripe: u64) -> usize {
        write_stripe(&self.array, stripe, 1).await.expect("written");
        self.array.flush().await.expect("flushed");
        self.overwrite(stripe, 1, 2).await.expect("written");
        let away = self.holder(stripe);
        self.restart_without(&[away]).await;
        assert_eq!(self.array.status().lost_blocks, CHUNK / BLOCK as u64);
        assert!(is_lost(&self.array, stripe * self.stripe_bytes()).await);
        away
    }

    async fn holds(&self, stripe: u64, version: u64) -> Result<bool, BlockError> {
        let (at, bytes) = (stripe * self.stripe_bytes(), self.stripe_bytes() as usize);
        Ok(read(&self.array, at, bytes).await? == pattern(at, bytes, version)[..])
    }
}

async fn is_lost(array: &RaidArray, at: u64) -> bool {
    matches!(read(array, at, BLOCK).await, Err(BlockError::Medium { .. }))
}

/// Whoever overwrites very many stripes at once has more numbers to record than one record takes.
#[test]
fn very_many_stripes_can_be_overwritten_at_once() {
    Reactor::simulated(1).block_on(async {
        let of = Owned::create(Rig::new(Level::Raid5, 4, 0, CHUNK, 9000)).await;
        let count = 400;
        of.overwrite(0, count, 1).await.expect("written");
        of.overwrite(0, count, 2).await.expect("written");
        of.array.flush().await.expect("flushed");
        for stripe in 0..count {
            assert_eq!(of.holds(stripe, 2).await, Ok(true), "stripe {stripe}");
        }
    });
}

/// A stripe with lost blocks is discarded, and the power goes just before the list of lost blocks is shorter. It is written
/// anew and flushed: the list must not tell of it any more.
fn discarded_when_the_power_went(seed: u64) -> Result<(), String> {
    Reactor::simulated(seed).block_on(async {
        let mut of = Owned::create(Rig::new(Level::Raid5, 4, 0, CHUNK, 16)).await;
        let away = of.lose_first_chunk(0).await;
        let array = of.array.clone();
        reactor::spawn_in(&of.node, async move { drop(array.discard_stripes(0, 1).await) });
        reactor::sleep(Duration::from_micros(reactor::random_u64() % 400)).await;
        of.restart_without(&[away]).await;
        if of.array.is_written(0) {
            return Ok(());
        }
        match reactor::random_u64() % 2 {
            0 => drop(write_stripe(&of.array, 0, 3).await.expect("written")),
            _ => of.overwrite(0, 1, 3).await.expect("written"),
        }
        of.array.flush().await.expect("flushed");
        assert_eq!(of.holds(0, 3).await, Ok(true));
        of.restart_without(&[away]).await;
        match of.holds(0, 3).await {
            Ok(true) => Ok(()),
            other => Err(format!("seed {seed}: {other:?}")),
        }
    })
}

#[test]
fn what_is_written_behind_a_discard_is_not_lost() {
    let wrong: Vec<_> = (0..100).filter_map(|s| discarded_when_the_power_went(s).err()).collect();
    assert_eq!(wrong, [""; 0], "flushed contents cannot be read");
}

/// Stripes of one group are being overwritten whole, as many as the list of lost blocks has room for, when a rebuild of the
/// other group leaves out blocks, which that list tells of as well.
#[test]
fn what_a_rebuild_leaves_out_takes_no_room_from_what_may_be_lost() {
    Reactor::simulated(3).block_on(async {
        let mut of = Owned::create(Rig::new(Level::Raid50 { groups: 2 }, 6, 0, CHUNK, 120)).await;
        for stripe in 0..200 {
            write_stripe(&of.array, stripe, 1).await.expect("written");
        }
        of.array.flush().await.expect("flushed");
        of.array.fail(3).await.expect("borne");
        of.array.replace(3, of.rig.newcomer(3)).await.expect("replaced");
        let drive = &of.rig.drives[4];
        for slot in 0..100 {
            drive.make_unreadable(drive.data_at() + slot * CHUNK, BLOCK as u64);
        }
        // Even stripes are those of the first group.
        let all = (0..42).map(|i| of.overwrite(2 * i, 1, 2));
        join_all(all).await.into_iter().collect::<Result<(), _>>().expect("written");
        // What stops it often enough is left out.
        for _ in 0..350 {
            let rebuilt = of.array.rebuild(Limits::NONE).await;
            assert!(matches!(rebuilt, Err(BlockError::Medium { .. })), "{rebuilt:?}");
        }
        assert!(of.array.status().members[3].lacks_blocks >= 60);
        drive.make_readable();
        of.restart_without(&[0]).await;
    });
}

/// More chunks are beyond repair than can be listed. The rebuild ends, each time it is asked for, and says where; what there is of
/// the rest can be read, and once there is room it comes to its end.
#[test]
fn a_rebuild_that_cannot_list_what_is_lost_ends() {
    Reactor::simulated(4).block_on(async {
        let of = Owned::create(Rig::new(Level::Raid5, 4, 0, CHUNK, 160)).await;
        let stripes = 120;
        for stripe in 0..stripes {
            write_stripe(&of.array, stripe, 1).await.expect("written");
        }
        of.array.flush().await.expect("flushed");
        of.array.fail(3).await.expect("borne");
        of.array.replace(3, of.rig.newcomer(3)).await.expect("replaced");
        let drive = &of.rig.drives[1];
        for slot in 0..stripes {
            drive.make_unreadable(drive.data_at() + slot * CHUNK, BLOCK as u64);
        }
        let mut tries = 0;
        while of.array.status().rebuild_blocked.is_none() {
            let rebuilt = of.array.rebuild(Limits::NONE).await;
            assert!(matches!(rebuilt, Err(BlockError::Medium { .. })), "{rebuilt:?}");
            tries += 1;
            assert!(tries < 1000, "the rebuild never ends");
        }
        let status = of.array.status();
        assert_eq!((status.members[3].lacks_blocks >= 84, status.lost_blocks), (true, 0));
        let blocked = status.rebuild_blocked.expect("just so");
        for _ in 0..3 {
            assert!(of.array.rebuild(Limits::NONE).await.is_err());
            assert_eq!(of.array.status().rebuild_blocked, Some(blocked));
        }
        // The second block of a chunk is there, whatever became of the first.
        for stripe in 0..stripes {
            let at = stripe * of.stripe_bytes() + BLOCK as u64;
            assert!(read(&of.array, at, BLOCK).await.expect("read") == pattern(at, BLOCK, 1)[..]);
        }
        of.array.discard_stripes(0, 60).await.expect("discarded");
        let mut tries = 0;
        while of.array.needs_rebuild() {
            let _ = of.array.rebuild(Limits::NONE).await;
            tries += 1;
            assert!(tries < 1000, "there is room, and it does not end");
        }
        assert_eq!(of.array.status().rebuild_blocked, None);
    });
}

/// The power fails behind overwrites of whole stripes; a member is away, and so much of another cannot be read that what is lost
/// cannot be listed. The array does not open, as often as that is tried, until it can be.
#[test]
fn a_start_that_cannot_list_what_is_lost_is_refused() {
    Reactor::simulated(5).block_on(async {
        let mut of = Owned::create(Rig::new(Level::Raid5, 4, 0, CHUNK, 160)).await;
        let stripes = 70;
        for stripe in 0..stripes {
            write_stripe(&of.array, stripe, 1).await.expect("written");
        }
        of.array.flush().await.expect("flushed");
        let all = (0..stripes).map(|stripe| of.overwrite(stripe, 1, 2));
        join_all(all).await.into_iter().collect::<Result<(), _>>().expect("written");
        of.cut_power();
        let rig = Rc::clone(&of.rig);
        for drive in &rig.drives[1..3] {
            for slot in 0..stripes {
                drive.make_unreadable(drive.data_at() + slot * CHUNK, BLOCK as u64);
            }
        }
        for _ in 0..3 {
            let refused = rig.open_without(&[0]).await.err();
            assert!(matches!(refused, Some(RaidError::LostUnlisted { .. })), "{refused:?}");
        }
        rig.drives.iter().for_each(|drive| drive.make_readable());
        of.open_without(&[0]).await;
        let mut lost = 0;
        for at in (0..stripes * of.stripe_bytes()).step_by(BLOCK) {
            match read(&of.array, at, BLOCK).await {
                Ok(held) => assert!([1, 2].iter().any(|v| held == pattern(at, BLOCK, *v)[..])),
                Err(BlockError::Medium { .. }) => lost += 1,
                Err(error) => panic!("{error}"),
            }
        }
        assert!(lost > 0 && lost == of.array.status().lost_blocks);
    });
}

/// A member lacks a block that a rebuild could not make. It is put right when the others can be read again, and flushed:
/// from then on it must do without those others, also after a start.
async fn put_right(how: Mender) {
    let mut of = Owned::create(Rig::new(Level::Raid5, 4, 0, CHUNK, 16)).await;
    for stripe in 0..4 {
        write_stripe(&of.array, stripe, 1).await.expect("written");
    }
    of.array.flush().await.expect("flushed");
    let lacks = of.holder(0);
    let other = (lacks + 1) % 4;
    of.array.fail(lacks).await.expect("borne");
    of.array.replace(lacks, of.rig.newcomer(lacks)).await.expect("replaced");
    let drive = Rc::clone(&of.rig.drives[other]);
    drive.make_unreadable(drive.data_at(), BLOCK as u64);
    while of.array.needs_rebuild() {
        let _ = of.array.rebuild(Limits::NONE).await;
    }
    assert_eq!(of.array.status().members[lacks].lacks_blocks, 1);
    drive.make_readable();
    // What lies there is nobody's.
    assert_eq!(crate::common::read_lent(&of.array, 0, &[BLOCK]).await, None);
    match how {
        Mender::Read => assert_eq!(of.holds(0, 1).await, Ok(true)),
        Mender::Scrub => drop(of.array.scrub(Limits::NONE).await.expect("scrubbed")),
        Mender::Rebuild => {
            of.array.fail(lacks).await.expect("borne");
            of.array.replace(lacks, of.rig.newcomer(lacks)).await.expect("replaced");
            of.array.rebuild(Limits::NONE).await.expect("rebuilt");
        }
    }
    assert_eq!(of.array.status().members[lacks].lacks_blocks, 0, "{how:?}");
    of.array.close().await.expect("closed");
    of.restart_without(&[other]).await;
    assert_eq!(of.holds(0, 1).await, Ok(true), "{how:?}");
}

#[derive(Clone, Copy, Debug)]
enum Mender {
    Read,
    Scrub,
    Rebuild,
}

#[test]
fn a_block_that_was_put_right_is_not_absent_any_more() {
    for how in [Mender::Read, Mender::Scrub, Mender::Rebuild] {
        Reactor::simulated(4).block_on(put_right(how));
    }
}

/// Good contents of a lost block turn up. Parity does not agree with them, so to write them in place is no repair.
#[test]
fn a_repair_of_a_lost_block_leaves_the_parity_alone() {
    Reactor::simulated(5).block_on(async {
        let mut of = Owned::create(Rig::new(Level::Raid5, 4, 0, CHUNK, 16)).await;
        let lost = of.lose_first_chunk(0).await;
        of.array.replace(lost, of.rig.newcomer(lost)).await.expect("replaced");
        of.array.rebuild(Limits::NONE).await.expect("rebuilt");
        // From now on nothing tells that the stripe was overwritten in place.
        of.array.scrub(Limits::NONE).await.expect("scrubbed");
        let repaired = of.array.repair(0, pattern(0, BLOCK, 1).into_vec()).await;
        assert_eq!(repaired, Err(BlockError::NotFresh { stripe: 0 }));
        let report = of.array.scrub(Limits::NONE).await.expect("scrubbed");
        assert_eq!(report.mismatched + report.wrong_repaired, 0, "{report:?}");
        of.overwrite(0, 1, 3).await.expect("written");
        assert_eq!(of.holds(0, 3).await, Ok(true));
    });
}

/// Whoever waits for room on the list, for a record or for a flush is told when the array stops.
#[test]
fn everybody_who_overwrites_whole_stripes_is_told_that_the_array_stopped() {
    let mut hung = 0;
    for seed in 0..10 {
        hung += Reactor::simulated(seed).block_on(async {
            let of = Rc::new(Owned::create(Rig::new(Level::Raid5, 4, 0, CHUNK, 200)).await);
            let mut tasks = Vec::new();
            for task in 0..12u64 {
                let of = Rc::clone(&of);
                tasks.push(reactor::spawn(async move {
                    for version in 1.. {
                        let first = task * 16 + version % 4;
                        let done = match task % 4 {
                            0 if version % 8 == 0 => of.array.flush().await,
                            1 if version % 8 == 0 => of.array.discard_stripes(first, 1).await,
                            _ => of.overwrite(first, 1 + version % 12, version).await,
                        };
                        if done.is_err() {
                            return;
                        }
                    }
                }));
            }
            reactor::sleep(Duration::from_micros(2000 + reactor::random_u64() % 6000)).await;
            of.rig.drives[0].pull_after_writes(reactor::random_u64() % 5);
            of.rig.drives[1].pull_after_writes(reactor::random_u64() % 5);
            reactor::sleep(Duration::from_secs(10)).await;
            tasks.iter().filter(|task| !task.is_finished()).count()
        });
    }
    assert_eq!(hung, 0, "callers wait for ever");
}

/// Members come and go, rebuilds are given up, and the list is short: whoever overwrites whole stripes goes on.
#[test]
fn whole_overwrites_go_on_beside_losses_and_rebuilds() {
    for seed in 0..4 {
        Reactor::simulated(seed).block_on(async {
            let of = Rc::new(Owned::create(Rig::new(Level::Raid6, 6, 0, CHUNK, 200)).await);
            let mut tasks = Vec::new();
            for task in 0..6u64 {
                let of = Rc::clone(&of);
                tasks.push(reactor::spawn(async move {
                    for version in 1..60 {
                        let first = task * 32 + version % 7;
                        of.overwrite(first, 1 + version % 20, version).await.expect("borne");
                        if version % 16 == task {
                            of.array.flush().await.expect("borne");
                        }
                    }
                }));
            }
            let faults = reactor::spawn({
                let of = Rc::clone(&of);
                async move {
                    for round in 0..6 {
                        let member = round % 6;
                        let wait = Duration::from_micros(reactor::random_u64() % 3000);
                        reactor::sleep(wait).await;
                        of.array.fail(member).await.expect("borne");
                        let spec = of.rig.member(member);
                        of.array.replace(member, spec).await.expect("replaced");
                        let rebuilt = of.array.rebuild(Limits::NONE);
                        let _ = reactor::timeout(wait, rebuilt).await;
                        of.array.rebuild(Limits::NONE).await.expect("rebuilt");
                    }
                }
            });
            for task in tasks.into_iter().chain([faults]) {
                let ended = reactor::timeout(Duration::from_secs(60), task).await;
                assert!(ended.is_ok_and(|ended| ended.is_some()), "seed {seed}: somebody waits");
            }
        });
    }
}

/// A rebuild meets a block beyond repair, far behind the beginning of a chunk so large that there is no list of lost blocks.
#[test]
fn a_rebuild_leaves_blocks_of_the_largest_chunks_out() {
    Reactor::simulated(6).block_on(async {
        let chunk = 2 << 20;
        let of = Owned::create(Rig::new(Level::Raid5, 3, 0, chunk, 12)).await;
        write_stripe(&of.array, 0, 1).await.expect("written");
        of.array.flush().await.expect("flushed");
        of.array.fail(0).await.expect("borne");
        of.array.replace(0, of.rig.newcomer(0)).await.expect("replaced");
        let drive = &of.rig.drives[1];
        drive.make_unreadable(drive.data_at() + chunk - BLOCK as u64, BLOCK as u64);
        for _ in 0..5 {
            let _ = of.array.rebuild(Limits::NONE).await;
        }
        assert!(!of.array.needs_rebuild());
        assert_eq!(of.array.status().members[0].lacks_blocks, 1);
    });
}
