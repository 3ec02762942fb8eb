//! Scrubs that are interrupted: where they go on, what they report, and what they may not say of what they have not seen.

use crate::common::{BLOCK, Rig, pattern, read, write_stripe};
use levada_base::BufMut;
use levada_base::reactor::{self, Group, Reactor};
use levada_base::units::KIB;
use levada_device::{Device, Durability};
use levada_raid::{Level, Limits, RaidArray, ScrubReport};
use std::rc::Rc;
use std::time::Duration;

const CHUNK: u64 = 64 * KIB;
const STRIPES: u64 = 200;
/// So slow that all stripes take 100 s.
const PACE: u64 = STRIPES * 6 * CHUNK / 100;
const SLOWLY: Limits = Limits { floor_bytes_per_second: PACE, ceiling_bytes_per_second: PACE };

async fn full() -> (Rc<Rig>, RaidArray) {
    let rig = Rc::new(Rig::new(Level::Raid6, 6, 0, CHUNK, STRIPES + 40));
    let array = rig.create().await;
    for stripe in 0..STRIPES {
        write_stripe(&array, stripe, 1).await.expect("written");
    }
    array.flush().await.expect("flushed");
    (rig, array)
}

/// Scrubs for so long and no longer.
async fn scrub_for(array: &RaidArray, seconds: u64) {
    let scrub = array.scrub(SLOWLY);
    let ended = reactor::timeout(Duration::from_secs(seconds), scrub).await;
    assert!(ended.is_err(), "it takes longer");
}

/// What every stripe's being right comes to.
fn all_right(stripes: u64) -> ScrubReport {
    ScrubReport { stripes, ..ScrubReport::default() }
}

fn reads(rig: &Rig) -> u64 {
    rig.drives.iter().map(|drive| drive.reads.get()).sum()
}

/// The flags in the newest superblock of a drive (docs/design/0003-array-format.md).
async fn is_patched(rig: &Rig) -> bool {
    let mut newest = (0, 0);
    for at in [0, BLOCK as u64] {
        let into = BufMut::zeroed(BLOCK).into_vec();
        let bytes = &rig.drives[0].read(at, into).await.expect("read")[0];
        let generation = u64::from_le_bytes(bytes[32..40].try_into().expect("8 bytes"));
        newest = newest.max((generation, bytes[15]));
    }
    newest.1 & 1 == 1
}

#[test]
fn a_scrub_goes_on_after_an_orderly_restart() {
    Reactor::simulated(1).block_on(async {
        let (rig, array) = full().await;
        scrub_for(&array, 50).await;
        array.close().await.expect("closed");
        let array = rig.open().await.expect("opened");
        let below = array.status().scrubbed_below;
        assert!((90..=110).contains(&below), "half of {STRIPES}: {below}");
        let before = reads(&rig);
        let report = array.scrub(Limits::NONE).await.expect("scrubbed");
        assert_eq!(report, all_right(STRIPES), "of both parts");
        assert_eq!(reads(&rig) - before, (STRIPES - below) * 6, "of the second part");
        assert_eq!(array.status().scrubbed_below, 0);
        // The next one begins anew, in the next life, too.
        let before = reads(&rig);
        array.scrub(Limits::NONE).await.expect("scrubbed");
        assert_eq!(reads(&rig) - before, STRIPES * 6);
        array.close().await.expect("closed");
        let array = rig.open().await.expect("opened");
        assert_eq!(array.status().scrubbed_below, 0);
    });
}

#[test]
fn a_scrub_goes_on_after_a_power_cut() {
    Reactor::simulated(2).block_on(async {
        let (rig, array) = full().await;
        drop(array);
        rig.cut_power();
        let node = Group::new();
        let made = Rc::clone(&rig);
        let opened = reactor::spawn_in(&node, async move { made.open().await });
        let array = opened.await.expect("not killed").expect("opened");
        // One that is put right while it is looked at.
        let drive = &rig.drives[3];
        drive.make_unreadable(drive.data_at() + 5 * CHUNK, BLOCK as u64);
        let scrubbing = array.clone();
        reactor::spawn_in(&node, async move { scrubbing.scrub(SLOWLY).await });
        reactor::sleep(Duration::from_secs(55)).await;
        node.kill();
        drop(array);
        rig.cut_power();
        let array = rig.open().await.expect("opened");
        let below = array.status().scrubbed_below;
        assert!((80..=110).contains(&below), "not more than 10 s were lost: {below}");
        let expected = ScrubReport { unreadable_repaired: 1, ..all_right(STRIPES) };
        assert_eq!(array.scrub(Limits::NONE).await.expect("scrubbed"), expected);
        let anew = array.scrub(Limits::NONE).await.expect("scrubbed");
        assert_eq!(anew, all_right(STRIPES), "what it repaired stayed so");
    });
}

#[test]
fn one_may_begin_anew() {
    Reactor::simulated(3).block_on(async {
        let (rig, array) = full().await;
        scrub_for(&array, 50).await;
        assert!(array.status().scrubbed_below > 0);
        let begun = reactor::timeout(Duration::from_millis(600), array.scrub_anew(SLOWLY)).await;
        assert!(begun.is_err());
        drop(array);
        rig.cut_power();
        let array = rig.open().await.expect("opened");
        assert!(array.status().scrubbed_below < 20, "what was interrupted is forgotten");
        let before = reads(&rig);
        let report = array.scrub_anew(Limits::NONE).await.expect("scrubbed");
        assert_eq!(report, all_right(STRIPES));
        assert_eq!(reads(&rig) - before, STRIPES * 6);
    });
}

/// In a stripe that was overwritten in place nothing tells rot in its data from rot in its parity, until a scrub has found it
/// right. One that was there in another life does not count.
#[test]
fn what_was_checked_before_a_restart_may_be_patched_again() {
    Reactor::simulated(4).block_on(async {
        let (rig, array) = full().await;
        let block = pattern(0, BLOCK, 2);
        array.write(0, block.clone().into_vec(), Durability::Fua).await.expect("written");
        scrub_for(&array, 50).await;
        // After the scrub was there.
        array.write(0, block.into_vec(), Durability::Fua).await.expect("written");
        array.close().await.expect("closed");
        assert!(is_patched(&rig).await);
        let array = rig.open().await.expect("opened");
        array.scrub(Limits::NONE).await.expect("scrubbed");
        assert!(is_patched(&rig).await, "half of it was not checked in this life");
        array.scrub(Limits::NONE).await.expect("scrubbed");
        assert!(!is_patched(&rig).await, "all of it was");
        assert!(read(&array, 0, BLOCK).await.expect("read") == pattern(0, BLOCK, 2)[..]);
    });
}
