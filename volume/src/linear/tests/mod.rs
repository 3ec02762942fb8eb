//! Pools on arrays of drives that remember everything that was written to them.

mod cuts;
mod drive;
mod lives;
mod orders;

use super::Pool;
use crate::order::Anyway;
use crate::volume::Volume;
use crate::{LinearVolume, VolumeName, model};
use drive::{Drive, Log};
use levada_base::ids::Uuid;
use levada_base::{Buf, Epoch};
use levada_device::{Device, Durability};
use levada_raid::{Array, ArraySpec, Level, MemberSpec, RaidArray};
use std::rc::Rc;

const ARRAY: Uuid = Uuid::from_u128(99);
const CHUNK_BYTES: u64 = 16 << 10;
const MEANT: Anyway = Anyway { is_meant: true };
const UNMEANT: Anyway = Anyway { is_meant: false };

fn name(text: &str) -> VolumeName {
    text.parse().expect("a name")
}

fn drives(count: usize, drive_bytes: u64) -> Vec<Rc<Drive>> {
    let log = Rc::new(Log::default());
    (0..count).map(|member| Rc::new(Drive::new(member, drive_bytes, Rc::clone(&log)))).collect()
}

fn devices(drives: &[Rc<Drive>]) -> Vec<Rc<dyn Device>> {
    drives.iter().map(|drive| Rc::clone(drive) as Rc<dyn Device>).collect()
}

async fn array(level: Level, drives: &[Rc<Drive>]) -> RaidArray {
    let member = |(number, device)| MemberSpec {
        device,
        uuid: Uuid::from_u128(number),
        name: format!("m{number}"),
        enclosure: 0,
    };
    let spec = ArraySpec {
        uuid: ARRAY,
        name: "data".into(),
        level,
        chunk_bytes: CHUNK_BYTES,
        block_bytes: None,
        journal_bytes: None,
        members: (1..).zip(devices(drives)).map(member).collect(),
        spares: 0,
    };
    RaidArray::create(spec, Epoch(1)).await.expect("it can be")
}

fn shared(array: &RaidArray) -> Rc<dyn Array> {
    Rc::new(array.clone())
}

async fn reopened(drives: &[Rc<Drive>], epoch: u64) -> RaidArray {
    let opened = RaidArray::open(ARRAY, devices(drives), Epoch(epoch), false).await;
    opened.expect("opened").0
}

async fn pool(array: &RaidArray) -> Pool {
    Pool::make(shared(array), "data", UNMEANT).await.expect("a blank array")
}

async fn opened(array: &RaidArray) -> Pool {
    Pool::open(shared(array), "data").await.expect("it can be read").expect("it is one")
}

async fn volume(pool: &Pool, text: &str) -> Rc<LinearVolume> {
    pool.volume(&name(text)).await.expect("it is there")
}

/// Makes the whole volume `byte`, durably.
async fn fill(volume: &LinearVolume, byte: u8) {
    let data = Buf::copy_of(&vec![byte; volume.size_bytes() as usize]).into_vec();
    volume.write(0, data, Durability::Fua).await.expect("written");
}

/// That the whole volume is `byte`.
async fn holds(volume: &LinearVolume, byte: u8) -> bool {
    let bytes = model::read(volume, 0, volume.size_bytes()).await;
    bytes.iter().all(|other| *other == byte)
}

/// No two volumes share a stripe.
fn check_stripes(pool: &Pool) {
    let mut all: Vec<u64> = pool.runs().into_iter().flatten().flatten().collect();
    let count = all.len();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), count, "{:?}", pool.runs());
}
