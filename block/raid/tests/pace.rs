//! What the array makes of its members' rate, on modelled drives and virtual time: how requests
//! are spread and overlapped, without the cost of computing. `make bench` measures both.

mod common;

use common::pattern;
use levada_base::reactor::{self, Reactor};
use levada_base::sync::Semaphore;
use levada_base::units::{KIB, MIB};
use levada_base::{BufMut, Epoch};
use levada_device::{Device, RamDevice};
use levada_device::{DriveModel, ModelDevice};
use levada_raid::{Array, ArraySpec, IoClass, Level, Limits, MemberSpec, RaidArray};
use std::rc::Rc;

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
        uuid: common::ARRAY,
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

#[test]
fn a_rebuild_keeps_the_new_member_busy() {
    Reactor::simulated(1).block_on(async {
        let array = Rc::new(array(Level::Raid6).await);
        fresh_write(&array, STRIPES).await;
        array.flush().await.expect("flushed");
        array.fail(3).await.expect("it bears two");
        let new = MemberSpec { uuid: levada_base::ids::Uuid::from_u128(99), ..members().remove(3) };
        array.replace(3, new).await.expect("replaced");
        let begun = reactor::now();
        array.rebuild(Limits::NONE).await.expect("rebuilt");
        let bytes_per_s = (STRIPES * CHUNK) as f64 / begun.elapsed().as_secs_f64();
        let of_member = bytes_per_s / DriveModel::nvme().bytes_per_s as f64;
        println!("rebuild {of_member:.3} of the member's rate");
        assert!(of_member >= 0.9);
    });
}
