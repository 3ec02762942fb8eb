use super::*;
use crate::model;
use futures_util::future::join_all;
use levada_base::Epoch;
use levada_base::ids::Uuid;
use levada_base::reactor::Reactor;
use levada_base::units::MIB;
use levada_device::{Device, RamDevice};
use levada_raid::{ArraySpec, Level, MemberSpec, RaidArray};
use std::rc::Rc;

pub(crate) async fn volume(level: Level, width: usize) -> ArrayVolume<RaidArray> {
    let member = |number: usize| MemberSpec {
        device: Rc::new(RamDevice::new(&format!("m{number}"), 2 * MIB)) as Rc<dyn Device>,
        uuid: Uuid::from_u128(number as u128 + 1),
        name: format!("m{number}"),
        enclosure: 0,
    };
    let spec = ArraySpec {
        uuid: Uuid::from_u128(99),
        name: "served".into(),
        level,
        chunk_bytes: 16 << 10,
        block_bytes: None,
        journal_bytes: None,
        members: (0..width).map(member).collect(),
        spares: 0,
    };
    ArrayVolume::new(RaidArray::create(spec, Epoch(1)).await.expect("it can be"))
}

async fn read<A: Array>(volume: &ArrayVolume<A>, at: u64, bytes: u64) -> Vec<u8> {
    let read = volume.read(at, bytes).await.expect("read");
    levada_base::buf::joined(&read)
}

#[test]
fn any_request_does_what_it_would_to_bytes_in_memory() {
    let levels =
        [(Level::Raid6, 5), (Level::Raid1 { copies: 2 }, 3), (Level::Raid0, 3), (Level::Raid5, 3)];
    for (seed, (level, width)) in levels.into_iter().enumerate() {
        Reactor::simulated(seed as u64).block_on(async {
            model::compare(&volume(level, width).await, 400).await;
        });
    }
}

/// Each writer has its own bytes, many to a block: none may undo another's.
#[test]
fn small_writes_to_one_block_at_once_keep_each_other() {
    Reactor::simulated(7).block_on(async {
        let volume = volume(Level::Raid6, 5).await;
        const BYTES: u64 = 100;
        let write = async |n: u64| {
            let data = Buf::copy_of(&[n as u8 + 1; BYTES as usize]).into_vec();
            volume.write(n * BYTES, data, Durability::Volatile).await.expect("written");
        };
        join_all((0..200).map(write)).await;
        for n in 0..200u64 {
            let part = read(&volume, n * BYTES, BYTES).await;
            assert!(part.iter().all(|byte| *byte == n as u8 + 1), "writer {n}");
        }
    });
}

#[test]
fn a_discard_frees_whole_stripes_only() {
    Reactor::simulated(1).block_on(async {
        let volume = volume(Level::Raid6, 5).await;
        let stripe = volume.shape().discard_bytes;
        let data = BufMut::zeroed(3 * stripe as usize).freeze().into_vec();
        volume.write(0, data, Durability::Volatile).await.expect("written");
        volume.discard(1, 2 * stripe - 1).await.expect("discarded");
        let told = volume.extents(0, 3 * stripe).await.expect("told");
        let extent = |bytes, is_allocated| Extent { bytes, is_allocated };
        let stripes = [true, false, true].map(|written| extent(stripe, written));
        assert_eq!(told, stripes);
    });
}

#[test]
fn what_is_outside_is_refused_and_changes_nothing() {
    Reactor::simulated(1).block_on(async {
        let volume = volume(Level::Raid6, 5).await;
        let size = volume.size_bytes();
        let data = || Buf::copy_of(&[5; 1000]).into_vec();
        for at in [size, size - 999, u64::MAX - 10, u64::MAX] {
            let refused = Err(VolumeError::OutOfRange { at, bytes: 1000, size_bytes: size });
            assert_eq!(volume.write(at, data(), Durability::Fua).await, refused);
            assert_eq!(volume.discard(at, 1000).await, refused);
            assert_eq!(volume.write_zeroes(at, 1000, Zeroing::Free).await, refused);
            assert!(
                volume.read(at, 1000).await.is_err() && volume.extents(at, 1000).await.is_err()
            );
        }
        assert!(read(&volume, size - 5000, 5000).await.iter().all(|byte| *byte == 0));
        assert!(read(&volume, size, 0).await.is_empty());
        assert_eq!(volume.write(size, IoVec::new(), Durability::Volatile).await, Ok(()));
    });
}
