//! Histories that once cost data, hung, or were slow: overwrites on levels with parity under callers that give up, rot,
//! drives that find their sectors again, and members that go.

use crate::common::{BLOCK, Rig, TestDrive, pattern, read, write_stripe};
use levada_base::reactor::{self, Group, Reactor};
use levada_base::{Epoch, IoVec, IoVecMut};
use levada_device::{BlockError, Device, DeviceInfo, Durability, Health, IoFuture};
use levada_raid::{Array, IoClass, Level, Limits, MemberSpec, RaidArray};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::mpsc;
use std::time::Duration;

fn random(below: u64) -> u64 {
    reactor::random_u64() % below
}

/// Writes `blocks` blocks of `version` at block `at`.
async fn overwrite(
    array: &RaidArray,
    at: u64,
    blocks: u64,
    version: u64,
) -> Result<(), BlockError> {
    let (at, bytes) = (at * BLOCK as u64, blocks as usize * BLOCK);
    array.write(at, pattern(at, bytes, version).into_vec(), Durability::Volatile).await
}

/// Runs a test that may never give the processor back.
fn ends(test: impl FnOnce() + Send + 'static) -> bool {
    let (done, ended) = mpsc::channel();
    std::thread::spawn(move || {
        test();
        let _ = done.send(());
    });
    ended.recv_timeout(Duration::from_secs(20)).is_ok()
}

/// A caller gives up in the middle of `write_fresh`: the stripe stays dirty, nothing will ever call it clean, and whoever
/// overwrites it flushes and looks again without end. Nothing else runs on that reactor any more.
#[test]
fn a_stripe_whose_fresh_write_was_given_up_can_be_overwritten() {
    let ended = ends(|| {
        Reactor::simulated(1).block_on(async {
            let rig = Rig::new(Level::Raid5, 4, 0, 8 << 10, 8);
            let array = rig.create().await;
            array.declare_fresh(0, 1).await.expect("declared");
            rig.drives.iter().for_each(|drive| drive.least_us.set(100));
            let data = pattern(0, 24 << 10, 1).into_vec();
            let written = array.write_fresh(0, data, IoClass::Foreground);
            assert!(reactor::timeout(Duration::from_micros(20), written).await.is_err());
            overwrite(&array, 0, 1, 2).await.expect("written");
            let held = read(&array, 0, BLOCK).await.expect("read");
            assert!(held == pattern(0, BLOCK, 2)[..]);
        });
    });
    assert!(ended, "still busy after 20 s");
}

/// Dropping a rebuild pauses it, says its documentation. Dropped while it makes room in the journal, nobody makes room ever
/// after.
#[test]
fn a_rebuild_that_is_given_up_leaves_the_journal_usable() {
    let mut hung = Vec::new();
    for us in (0..2000).step_by(10) {
        Reactor::simulated(us).block_on(async {
            let rig = Rig::new(Level::Raid5, 5, 1, 8 << 10, 16);
            let array = rig.create().await;
            for stripe in 0..4 {
                overwrite(&array, stripe * 6, 1, 1).await.expect("written");
            }
            array.fail(0).await.expect("borne");
            let _ = reactor::timeout(Duration::from_micros(us), array.rebuild(Limits::NONE)).await;
            for version in 2..100 {
                let written = overwrite(&array, version % 24, 1, version);
                match reactor::timeout(Duration::from_secs(10), written).await {
                    Ok(written) => written.expect("borne"),
                    Err(_) => return hung.push(us),
                }
            }
        });
    }
    assert_eq!(hung, [], "writers wait for ever after a rebuild dropped after so many us");
}

/// When the array stops while somebody waits for room in the journal, or for records to lose their meaning, he is never told.
#[test]
fn everybody_is_told_that_the_array_stopped() {
    let mut hung = 0;
    for seed in 0..60 {
        hung += Reactor::simulated(seed).block_on(async {
            let rig = Rig::new(Level::Raid5, 4, 0, 8 << 10, 16);
            let array = rig.create().await;
            let mut tasks = Vec::new();
            for stripe in 0..8u64 {
                let array = array.clone();
                tasks.push(reactor::spawn(async move {
                    for version in 1.. {
                        if overwrite(&array, stripe * 6, 4, version).await.is_err() {
                            return;
                        }
                        if stripe >= 6 && array.discard_stripes(stripe, 1).await.is_err() {
                            return;
                        }
                    }
                }));
            }
            reactor::sleep(Duration::from_micros(2000 + random(3000))).await;
            rig.drives[0].pull_after_writes(random(5));
            rig.drives[1].pull_after_writes(random(5));
            reactor::sleep(Duration::from_secs(10)).await;
            tasks.iter().filter(|task| !task.is_finished()).count()
        });
    }
    assert_eq!(hung, 0, "callers wait for ever");
}

/// The power goes while a record is on its way; the one member that has it cannot read it at the next start, and can at the
/// one after. Its sequence has been given to another record meanwhile, or its stripe has been written otherwise.
fn a_record_that_was_overlooked(seed: u64) -> Result<(), String> {
    Reactor::simulated(seed).block_on(async {
        let (rig, node) = (Rc::new(Rig::new(Level::Raid5, 4, 0, 8 << 10, 8)), Group::new());
        let made = Rc::clone(&rig);
        let created = reactor::spawn_in(&node, async move { made.create().await });
        let array = created.await.expect("not killed");
        let before = random(5);
        for version in 1..=before + 1 {
            overwrite(&array, 0, 6, version).await.expect("written");
        }
        array.flush().await.expect("flushed");
        let writes: Vec<u64> = rig.drives.iter().map(|drive| drive.writes.get()).collect();
        let theirs = array.clone();
        reactor::spawn_in(&node, async move { drop(overwrite(&theirs, 0, 1, 100).await) });
        drop(array);
        let has_it = loop {
            reactor::sleep(Duration::from_nanos(200)).await;
            let all = || rig.drives.iter().zip(&writes).enumerate();
            let mut new = all().filter(|(_, (drive, before))| drive.writes.get() > **before);
            if let Some((first, _)) = new.next() {
                if new.next().is_some() {
                    return Ok(());
                }
                break first;
            }
        };
        node.kill();
        rig.drives.iter().for_each(|drive| drive.lose_in_flight());
        rig.cut_power();
        rig.drives[has_it].make_unreadable(8 << 10, 128 << 10);
        let array = rig.open().await.expect("opened");
        let held = read(&array, 0, BLOCK).await.expect("read");
        if held == pattern(0, BLOCK, 100)[..] {
            return Ok(());
        }
        let how = random(3);
        match how {
            0 => {}
            1 => {
                overwrite(&array, 0, 6, 200).await.expect("written");
                array.flush().await.expect("flushed");
            }
            _ => {
                array.discard_stripes(0, 1).await.expect("discarded");
                write_stripe(&array, 0, 200).await.expect("written");
                array.flush().await.expect("flushed");
            }
        }
        let expected = read(&array, 0, 6 * BLOCK).await.expect("read");
        drop(array);
        rig.cut_power();
        rig.drives[has_it].make_readable();
        let array = rig.open().await.expect("opened");
        let held = read(&array, 0, 6 * BLOCK).await.expect("read");
        match held == expected {
            true => Ok(()),
            false => Err(format!("seed {seed}: {before} before, then {how}")),
        }
    })
}

#[test]
fn a_record_that_was_overlooked_does_not_come_back() {
    let wrong: Vec<_> = (0..100).filter_map(|s| a_record_that_was_overlooked(s).err()).collect();
    assert_eq!(wrong, [""; 0], "flushed contents are gone");
}

/// A block rots and is overwritten, so what rotted is gone. But the parity was made from the rotten bytes, and a scrub takes
/// that for a rotten block, and puts back a mixture of old and new.
#[test]
fn scrub_leaves_an_overwritten_block_alone() {
    Reactor::simulated(3).block_on(async {
        let rig = Rig::new(Level::Raid6, 8, 0, 8 << 10, 8);
        let array = rig.create().await;
        write_stripe(&array, 0, 1).await.expect("written");
        array.flush().await.expect("flushed");
        let holder = (0..8).find(|member| array.members_of(0, 4096).contains(*member));
        let drive = &rig.drives[holder.expect("somebody")];
        drive.corrupt(drive.data_at() + 77);
        overwrite(&array, 0, 1, 2).await.expect("written");
        array.flush().await.expect("flushed");
        let held = read(&array, 0, BLOCK).await.expect("read");
        assert!(held == pattern(0, BLOCK, 2)[..], "before the scrub");
        let report = array.scrub(Limits::NONE).await.expect("scrubbed");
        let held = read(&array, 0, BLOCK).await.expect("read");
        assert!(held == pattern(0, BLOCK, 2)[..], "acknowledged and flushed: {report:?}");
    });
}

/// A caller gives up, so the array is closed; what he asked for goes on, and close takes the meaning from its record.
fn closed_beside_a_write_that_was_given_up(seed: u64) -> Result<(), String> {
    Reactor::simulated(seed).block_on(async {
        let (rig, node) = (Rc::new(Rig::new(Level::Raid5, 4, 0, 8 << 10, 8)), Group::new());
        let made = Rc::clone(&rig);
        let created = reactor::spawn_in(&node, async move { made.create().await });
        let array = created.await.expect("not killed");
        overwrite(&array, 0, 6, 1).await.expect("written");
        array.flush().await.expect("flushed");
        let us = Duration::from_micros(random(120));
        let _ = reactor::timeout(us, overwrite(&array, 0, 1, 2)).await;
        array.close().await.expect("closed");
        node.kill();
        drop(array);
        rig.cut_power();
        let away = random(4) as usize;
        let array = rig.open_without(&[away]).await.expect("opened");
        let held = read(&array, BLOCK as u64, 5 * BLOCK).await.expect("read");
        match held == pattern(BLOCK as u64, 5 * BLOCK, 1)[..] {
            true => Ok(()),
            false => Err(format!("seed {seed}: closed after {us:?}, without {away}")),
        }
    })
}

#[test]
fn close_waits_for_writes_that_were_given_up() {
    let wrong: Vec<_> =
        (0..300).filter_map(|s| closed_beside_a_write_that_was_given_up(s).err()).collect();
    assert_eq!(wrong, [""; 0], "blocks that nobody wrote are gone");
}

/// Somebody finds a block wrong by its checksum, computes the right contents, and repairs; meanwhile another overwrote it.
#[test]
fn a_repair_does_not_undo_an_overwrite() {
    Reactor::simulated(4).block_on(async {
        let rig = Rig::new(Level::Raid6, 6, 0, 8 << 10, 8);
        let array = rig.create().await;
        overwrite(&array, 0, 8, 1).await.expect("written");
        let good = {
            let (into, avoid) = (levada_base::BufMut::zeroed(BLOCK), array.members_of(0, 4096));
            let read = array.read_avoiding(0, into.into_vec(), avoid, IoClass::Foreground).await;
            read.expect("read").pop().expect("a part").freeze()
        };
        overwrite(&array, 0, 1, 2).await.expect("written");
        let _ = array.repair(0, good.into_vec()).await;
        let held = read(&array, 0, BLOCK).await.expect("read");
        assert!(held == pattern(0, BLOCK, 2)[..], "an acknowledged overwrite is gone");
        let report = array.scrub(Limits::NONE).await.expect("scrubbed");
        assert_eq!(report.wrong_repaired + report.mismatched, 0, "data and parity disagree");
    });
}

/// A drive whose requests go on when the asker has given up, as `Device` says; writes of data take long when told so.
struct Lasting {
    drive: Rc<TestDrive>,
    slow_us: Rc<Cell<u64>>,
}

impl Device for Lasting {
    fn info(&self) -> &DeviceInfo {
        self.drive.info()
    }
    fn read(&self, at: u64, into: IoVecMut) -> IoFuture<'_, IoVecMut> {
        self.drive.read(at, into)
    }
    fn write(&self, at: u64, from: IoVec, durability: Durability) -> IoFuture<'_, ()> {
        let drive = Rc::clone(&self.drive);
        let slow_us = if at >= drive.data_at() { self.slow_us.get() } else { 0 };
        let task = reactor::spawn(async move {
            reactor::sleep(Duration::from_micros(slow_us)).await;
            drive.write(at, from, durability).await
        });
        Box::pin(async move { task.await.unwrap_or(Err(BlockError::Gone)) })
    }
    fn flush(&self) -> IoFuture<'_, ()> {
        self.drive.flush()
    }
    fn discard(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        self.drive.discard(at, bytes)
    }
    fn write_zeroes(&self, at: u64, bytes: u64) -> IoFuture<'_, ()> {
        self.drive.write_zeroes(at, bytes)
    }
    fn fence(&self, epoch: Epoch) -> IoFuture<'_, ()> {
        self.drive.fence(epoch)
    }
    fn health(&self) -> Health {
        self.drive.health()
    }
}

/// Who gives up while he changes a stripe.
#[derive(Clone, Copy, Debug)]
enum Quitter {
    Scrub,
    Repair,
    FreshWrite,
}

async fn a_write_that_was_given_up(who: Quitter) {
    let rig = Rig::new(Level::Raid6, 6, 0, 8 << 10, 8);
    let slow_us = Rc::new(Cell::new(0));
    let mut spec = rig.spec();
    for (member, drive) in spec.members.iter_mut().zip(&rig.drives) {
        drive.delay_us.set(10);
        let device = Lasting { drive: Rc::clone(drive), slow_us: Rc::clone(&slow_us) };
        *member = MemberSpec { device: Rc::new(device), ..member.clone() };
    }
    let array = RaidArray::create(spec, Epoch(1)).await.expect("created");
    write_stripe(&array, 0, 1).await.expect("written");
    array.flush().await.expect("flushed");
    slow_us.set(5000);
    let (ms, old) = (Duration::from_millis(1), pattern(0, BLOCK, 1));
    match who {
        Quitter::Scrub => {
            let holder = (0..6).find(|member| array.members_of(0, 4096).contains(*member));
            let drive = &rig.drives[holder.expect("somebody")];
            drive.make_unreadable(drive.data_at(), BLOCK as u64);
            assert!(reactor::timeout(ms, array.scrub(Limits::NONE)).await.is_err());
            drive.make_readable();
        }
        Quitter::Repair => {
            assert!(reactor::timeout(ms, array.repair(0, old.into_vec())).await.is_err());
        }
        Quitter::FreshWrite => {
            array.declare_fresh(0, 1).await.expect("declared");
            let data = pattern(0, 32 << 10, 1).into_vec();
            let written = array.write_fresh(0, data, IoClass::Foreground);
            assert!(reactor::timeout(ms, written).await.is_err());
            // Whoever got no answer begins anew.
            array.declare_fresh(0, 1).await.expect("declared");
        }
    }
    slow_us.set(0);
    match who {
        Quitter::Scrub | Quitter::Repair => overwrite(&array, 0, 1, 2).await.expect("written"),
        Quitter::FreshWrite => {
            let data = pattern(0, 32 << 10, 2).into_vec();
            array.write_fresh(0, data, IoClass::Foreground).await.expect("written");
        }
    }
    array.flush().await.expect("flushed");
    reactor::sleep(Duration::from_millis(20)).await;
    let held = read(&array, 0, BLOCK).await.expect("read");
    assert!(held == pattern(0, BLOCK, 2)[..], "{who:?}: an acknowledged write is gone");
}

#[test]
fn a_scrub_that_is_given_up_undoes_nothing() {
    Reactor::simulated(5).block_on(a_write_that_was_given_up(Quitter::Scrub));
}

#[test]
fn a_repair_that_is_given_up_undoes_nothing() {
    Reactor::simulated(6).block_on(a_write_that_was_given_up(Quitter::Repair));
}

#[test]
fn a_fresh_write_that_is_given_up_undoes_nothing() {
    Reactor::simulated(7).block_on(a_write_that_was_given_up(Quitter::FreshWrite));
}

/// Two members have a bad block each, at different rows: every block can be read, and must be writable.
#[test]
fn what_can_be_read_can_be_overwritten() {
    Reactor::simulated(8).block_on(async {
        let rig = Rig::new(Level::Raid5, 4, 0, 8 << 10, 8);
        let array = rig.create().await;
        let data = write_stripe(&array, 0, 1).await.expect("written");
        array.flush().await.expect("flushed");
        for (chunk, row) in [(0, 0), (1, 1)] {
            let members = array.members_of(chunk * (8 << 10), 4096);
            let holder = (0..4).find(|member| members.contains(*member)).expect("somebody");
            let drive = &rig.drives[holder];
            drive.make_unreadable(drive.data_at() + row * BLOCK as u64, BLOCK as u64);
        }
        overwrite(&array, 4, 2, 2).await.expect("both rows are within what the level bears");
        assert_eq!(read(&array, 0, data.len()).await.map(|held| held.len()), Ok(data.len()));
    });
}

/// Degraded reads beside one writer of another stripe.
#[test]
fn degraded_reads_do_not_start_over_for_updates_elsewhere() {
    Reactor::simulated(9).block_on(async {
        let rig = Rig::new(Level::Raid6, 8, 0, 8 << 10, 16);
        let array = rig.create().await;
        for stripe in 0..16 {
            write_stripe(&array, stripe, 1).await.expect("written");
        }
        array.flush().await.expect("flushed");
        array.fail(3).await.expect("failed");
        array.fail(5).await.expect("failed");
        let reads = async || {
            let begun = reactor::now();
            for _ in 0..50 {
                read(&array, 0, 8 * 6 * (8 << 10)).await.expect("read");
            }
            begun.elapsed()
        };
        let alone = reads().await;
        let writer = array.clone();
        reactor::spawn(async move {
            for version in 2.. {
                overwrite(&writer, 15 * 12, 1, version).await.expect("written");
            }
        });
        let beside = reads().await;
        assert!(
            beside < 2 * alone,
            "{beside:?} beside one writer of another stripe, else {alone:?}"
        );
    });
}

/// A degraded reader beside somebody who gives a stripe back and begins it anew: each block is old or zero.
#[test]
fn degraded_reads_beside_a_new_beginning_are_old_or_new() {
    let mut wrong = 0;
    for seed in 0..40 {
        wrong += Reactor::simulated(seed).block_on(async {
            let rig = Rig::new(Level::Raid5, 4, 0, 8 << 10, 8);
            let array = rig.create().await;
            overwrite(&array, 0, 6, 1).await.expect("written");
            let holder = (0..4).find(|member| array.members_of(0, 4096).contains(*member));
            array.fail(holder.expect("somebody")).await.expect("borne");
            let writer = array.clone();
            reactor::spawn(async move {
                loop {
                    writer.discard_stripes(0, 1).await.expect("discarded");
                    overwrite(&writer, 1, 1, 1).await.expect("written");
                    overwrite(&writer, 0, 6, 1).await.expect("written");
                }
            });
            let mut wrong = 0;
            for _ in 0..300 {
                let held = read(&array, 0, BLOCK).await.expect("read");
                let is_zero = held.iter().all(|byte| *byte == 0);
                wrong += u64::from(!is_zero && held != pattern(0, BLOCK, 1)[..]);
            }
            wrong
        });
    }
    assert_eq!(wrong, 0, "reads of 12,000 are neither the old block nor zeroes");
}

/// Two blocks of a chunk that are not neighbours, at once or one after the other.
#[test]
fn updates_that_go_together_cost_no_more_than_apart() {
    Reactor::simulated(10).block_on(async {
        let rig = Rig::new(Level::Raid6, 10, 0, 256 << 10, 32);
        let array = rig.create().await;
        overwrite(&array, 0, 1, 1).await.expect("written");
        let bytes = || array.status().members.iter().map(|m| m.bytes_written).sum::<u64>();
        let before = bytes();
        for at in [0, 0, 40] {
            overwrite(&array, at, 1, 2).await.expect("written");
        }
        let apart = bytes() - before;
        // The first one holds the stripe; the others go together.
        let writes = [0, 0, 40].map(|at| overwrite(&array, at, 1, 3));
        futures_util::future::join_all(writes).await;
        let together = bytes() - before - apart;
        assert!(together <= apart, "{together} bytes written together, {apart} apart");
    });
}

/// An overwrite is durable when it returns, so a flush has nothing to wait for.
#[test]
fn a_flush_of_durable_overwrites_is_free() {
    Reactor::simulated(11).block_on(async {
        let rig = Rig::new(Level::Raid6, 10, 0, 64 << 10, 32);
        let array = rig.create().await;
        overwrite(&array, 0, 1, 1).await.expect("written");
        array.flush().await.expect("flushed");
        let flushes = || rig.drives.iter().map(|drive| drive.flushes.get()).sum::<u64>();
        let before = flushes();
        for version in 2..12 {
            overwrite(&array, 0, 1, version).await.expect("written");
            array.flush().await.expect("flushed");
        }
        assert_eq!(flushes() - before, 0, "for ten overwrites that were durable");
    });
}
