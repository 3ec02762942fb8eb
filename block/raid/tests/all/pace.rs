//! What the array makes of its members' rate, on modelled drives and virtual time: how requests
//! are spread and overlapped, without the cost of computing. `make bench` measures both.

use crate::common::pattern;
use levada_base::reactor::{self, Group, Reactor};
use levada_base::sync::Semaphore;
use levada_base::units::{KIB, MIB};
use levada_base::{BufMut, Epoch};
use levada_device::{Device, RamDevice};
use levada_device::{DriveModel, ModelDevice};
use levada_raid::{Array, ArraySpec, IoClass, Level, Limits, MemberSpec, RaidArray};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

const CHUNK: u64 = 128 * KIB;
const STRIPES: u64 = 400;
const MEMBERS: usize = 10;

fn members() -> Vec<MemberSpec> {
    let member = |i: usize| {
        let ram = Rc::new(RamDevice::new("ram", STRIPES * CHUNK + 8 * MIB));
        MemberSpec {
            device: Rc::new(ModelDevice::new(ram, DriveModel::nvme())),
            uuid: levada_base::ids::Uuid::from_u128(i as u128),
            name: format!("drive-{i}"),
            enclosure: i as u16,
        }
    };
    (0..MEMBERS).map(member).collect()
}

async fn array(level: Level) -> RaidArray {
    let spec = ArraySpec {
        uuid: crate::common::ARRAY,
        name: "pace".to_owned(),
        level,
        chunk_bytes: CHUNK,
        block_bytes: None,
        journal_bytes: None,
        members: members(),
        spares: 0,
    };
    RaidArray::create(spec, Epoch(1)).await.expect("created")
}

/// Runs `count` operations, `depth` at once; bytes per second of virtual time.
async fn rate<F: Future<Output = ()> + 'static>(
    depth: u64,
    count: u64,
    bytes: u64,
    mut start: impl FnMut(u64) -> F,
) -> f64 {
    let begun = reactor::now();
    let credits = Semaphore::new(depth);
    let mut tasks = Vec::new();
    for n in 0..count {
        let permit = credits.acquire(1).await;
        let operation = start(n);
        tasks.push(reactor::spawn(async move {
            operation.await;
            drop(permit);
        }));
    }
    for task in tasks {
        task.await;
    }
    (count * bytes) as f64 / begun.elapsed().as_secs_f64()
}

async fn fresh_write(array: &Rc<RaidArray>, stripes: u64) -> f64 {
    array.declare_fresh(0, stripes).await.expect("declared");
    let bytes = array.geometry().stripe_bytes;
    let data = pattern(0, bytes as usize, 1);
    let of = |stripe| {
        let (array, data) = (Rc::clone(array), data.clone().into_vec());
        async move {
            array.write_fresh(stripe, data, IoClass::Foreground).await.expect("written");
        }
    };
    rate(16, stripes, bytes, of).await
}

async fn read(device: Rc<dyn Device>, depth: u64, count: u64, bytes: u64, random: bool) -> f64 {
    let span = count;
    let of = |n| {
        let device = Rc::clone(&device);
        async move {
            let at = if random { reactor::random_u64() % span } else { n } * bytes;
            let into = BufMut::for_overwrite(bytes as usize).into_vec();
            device.read(at, into).await.expect("read");
        }
    };
    rate(depth, count, bytes, of).await
}

#[test]
fn members_are_kept_busy() {
    Reactor::simulated(1).block_on(async {
        let parity = Rc::new(array(Level::Raid6).await);
        let striped = Rc::new(array(Level::Raid0).await);
        let written = fresh_write(&parity, STRIPES).await;
        let ceiling = fresh_write(&striped, STRIPES).await * 0.8;
        let write_of_ceiling = written / ceiling;
        let raw = |per_member: f64| per_member * MEMBERS as f64;
        let drive = || Rc::clone(&members()[0].device);
        let raw_read = raw(read(drive(), 16, STRIPES, CHUNK, false).await);
        let seqread_of_raw = read(parity.clone(), 16, STRIPES, MIB, false).await / raw_read;
        let raw_4k = raw(read(drive(), 32, 8192, 4 * KIB, true).await);
        let randread_of_raw = read(parity, 320, 81920, 4 * KIB, true).await / raw_4k;
        println!("fresh write {write_of_ceiling:.3} of ceiling, sequential read {seqread_of_raw:.3}, random read {randread_of_raw:.3} of raw");
        assert!(write_of_ceiling >= 0.95 && seqread_of_raw >= 0.95 && randread_of_raw >= 0.9);
    });
}

/// A full RAID 6 of which a member waits for its rebuild.
async fn with_a_new_member() -> Rc<RaidArray> {
    let array = Rc::new(array(Level::Raid6).await);
    fresh_write(&array, STRIPES).await;
    array.flush().await.expect("flushed");
    array.fail(3).await.expect("it bears two");
    let new = MemberSpec { uuid: levada_base::ids::Uuid::from_u128(99), ..members().remove(3) };
    array.replace(3, new).await.expect("replaced");
    array
}

#[test]
fn a_rebuild_keeps_the_new_member_busy() {
    Reactor::simulated(1).block_on(async {
        let array = with_a_new_member().await;
        let begun = reactor::now();
        array.rebuild(Limits::NONE).await.expect("rebuilt");
        let bytes_per_s = (STRIPES * CHUNK) as f64 / begun.elapsed().as_secs_f64();
        let of_member = bytes_per_s / DriveModel::nvme().bytes_per_s as f64;
        println!("rebuild {of_member:.3} of the member's rate");
        assert!(of_member >= 0.9);
    });
}

/// What a rebuild moves beside other I/O at least, in bytes per second on all members: a hundredth of what they can.
const FLOOR: u64 = 40_000_000;
/// Bytes that a stripe costs a rebuild.
const MOVED: u64 = CHUNK * (MEMBERS as u64 - 1);

/// Reads of 4 KiB anywhere by so many workers, who rest in between, for as long as `beside` takes; reads per second, and what
/// one took on average.
async fn beside<T>(
    array: &Rc<RaidArray>,
    workers: u64,
    rest_us: u64,
    beside: impl Future<Output = T>,
) -> (f64, Duration, T) {
    let node = Group::new();
    let (count, took) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(Duration::ZERO)));
    let begun = reactor::now();
    for _ in 0..workers {
        let (array, count, took) = (Rc::clone(array), Rc::clone(&count), Rc::clone(&took));
        reactor::spawn_in(&node, async move {
            let blocks = STRIPES * array.geometry().stripe_bytes / 4096;
            loop {
                let at = reactor::random_u64() % blocks * 4096;
                let began = reactor::now();
                let into = BufMut::for_overwrite(4096).into_vec();
                array.read(at, into).await.expect("read");
                took.set(took.get() + began.elapsed());
                count.set(count.get() + 1);
                // Nobody has a rhythm.
                let rest_us = rest_us / 2 + reactor::random_u64() % (rest_us + 1);
                reactor::sleep(Duration::from_micros(rest_us)).await;
            }
        });
    }
    let result = beside.await;
    node.kill();
    let reads: u32 = count.get();
    (f64::from(reads) / begun.elapsed().as_secs_f64(), took.get() / reads.max(1), result)
}

/// A rebuild beside such reads: its bytes per second on all members, the reads' rate and their time, each beside it and alone.
async fn rebuild_beside(workers: u64, rest_us: u64, limits: Limits) -> [f64; 5] {
    let array = with_a_new_member().await;
    let alone = reactor::sleep(Duration::from_secs(1));
    let (rate_alone, took_alone, ()) = beside(&array, workers, rest_us, alone).await;
    let rebuild = async {
        let begun = reactor::now();
        array.rebuild(limits).await.expect("rebuilt");
        (STRIPES * MOVED) as f64 / begun.elapsed().as_secs_f64()
    };
    let (rate, took, moved) = beside(&array, workers, rest_us, rebuild).await;
    let [took, took_alone] = [took, took_alone].map(|took| took.as_secs_f64());
    println!(
        "{workers} workers, {rest_us} us rest: rebuild {:.1} of its floor, reads {:.2} of their rate, {:.2} of their time",
        moved / FLOOR as f64,
        rate / rate_alone,
        took / took_alone
    );
    [moved, rate, rate_alone, took, took_alone]
}

const FROM_FLOOR: Limits =
    Limits { floor_bytes_per_second: FLOOR, ceiling_bytes_per_second: u64::MAX };

/// A few reads leave the members idle most of the time, and a rebuild may have that.
#[test]
fn beside_little_a_rebuild_goes_far_above_its_floor() {
    Reactor::simulated(1).block_on(async {
        let [moved, rate, rate_alone, took, took_alone] = rebuild_beside(4, 2000, FROM_FLOOR).await;
        assert!(moved > 3.0 * FLOOR as f64);
        assert!(rate > 0.95 * rate_alone && took < 1.3 * took_alone);
    });
}

/// Members that are busy all the time leave a scrub its floor and what nobody notices.
#[test]
fn beside_much_a_scrub_is_hardly_noticed() {
    Reactor::simulated(1).block_on(async {
        let array = Rc::new(array(Level::Raid6).await);
        fresh_write(&array, STRIPES).await;
        array.flush().await.expect("flushed");
        let alone = reactor::sleep(Duration::from_secs(1));
        let (rate_alone, ..) = beside(&array, 128, 0, alone).await;
        let scrub = async {
            let begun = reactor::now();
            array.scrub(FROM_FLOOR).await.expect("scrubbed");
            (STRIPES * MEMBERS as u64 * CHUNK) as f64 / begun.elapsed().as_secs_f64()
        };
        let (rate, _, moved) = beside(&array, 128, 0, scrub).await;
        let (of_floor, of_alone) = (moved / FLOOR as f64, rate / rate_alone);
        println!(
            "128 workers: scrub {of_floor:.1} of its floor, reads {of_alone:.2} of their rate"
        );
        assert!((0.9..10.0).contains(&of_floor) && of_alone > 0.9);
    });
}

#[test]
fn a_rebuild_keeps_to_its_ceiling() {
    Reactor::simulated(1).block_on(async {
        let limits = Limits { ceiling_bytes_per_second: 2 * FLOOR, ..FROM_FLOOR };
        let [moved, ..] = rebuild_beside(1, 5000, limits).await;
        assert!((0.9..2.02).contains(&(moved / FLOOR as f64)));
        let [idle, ..] = rebuild_beside(0, 0, limits).await;
        assert!((1.9..2.02).contains(&(idle / FLOOR as f64)), "an idle array has its ceiling");
    });
}
