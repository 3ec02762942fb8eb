use super::*;
use futures_util::future::join_all;
use levada_base::Epoch;
use levada_base::ids::Uuid;
use levada_base::reactor::{Reactor, random_u64};
use levada_base::units::MIB;
use levada_device::{Device, RamDevice};
use levada_raid::{ArraySpec, Level, MemberSpec, RaidArray};
use std::rc::Rc;

async fn volume(level: Level, width: usize) -> ArrayVolume<RaidArray> {
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
    read.iter().flat_map(|part| part.to_vec()).collect()
}

/// `data` in up to three buffers that lie anywhere.
fn in_pieces(data: &[u8]) -> IoVec {
    let mut pieces = IoVec::new();
    let mut rest = data;
    for _ in 0..random_u64() % 3 {
        let (head, tail) = rest.split_at(random_u64() as usize % (rest.len() + 1));
        pieces.push(Buf::copy_of(head));
        rest = tail;
    }
    pieces.push(Buf::copy_of(rest));
    pieces
}

/// A vector of bytes is the model: requests of any offset and length, one after another.
#[test]
fn any_request_does_what_it_would_to_bytes_in_memory() {
    for (seed, (level, width)) in
        [(Level::Raid6, 5), (Level::Raid1 { copies: 2 }, 3), (Level::Raid0, 3), (Level::Raid5, 3)]
            .into_iter()
            .enumerate()
    {
        Reactor::simulated(seed as u64).block_on(async {
            let volume = volume(level, width).await;
            let size = volume.size_bytes();
            let mut model = vec![0; size as usize];
            for round in 0..400u64 {
                let bytes = 1 + match random_u64() % 3 {
                    0 => random_u64() % 600,
                    1 => random_u64() % 20_000,
                    _ => random_u64() % 300_000,
                };
                let mut at = random_u64() % size;
                if random_u64().is_multiple_of(3) {
                    at = round_down(at, BLOCK_BYTES);
                }
                let bytes = bytes.min(size - at);
                let part = at as usize..(at + bytes) as usize;
                match random_u64() % 6 {
                    0 | 1 => {
                        let data = vec![round as u8 | 1; bytes as usize];
                        let from = in_pieces(&data);
                        volume.write(at, from, Durability::Volatile).await.expect("written");
                        model[part].copy_from_slice(&data);
                    }
                    2 => {
                        let zeroing = if round % 2 == 0 { Zeroing::Free } else { Zeroing::Keep };
                        volume.write_zeroes(at, bytes, zeroing).await.expect("zeroed");
                        model[part].fill(0);
                    }
                    3 => {
                        volume.discard(at, bytes).await.expect("discarded");
                        let now = read(&volume, at, bytes).await;
                        for (old, new) in model[part].iter_mut().zip(now) {
                            assert!(new == *old || new == 0, "old bytes or zeroes");
                            *old = new;
                        }
                    }
                    4 => {
                        let mut at = at;
                        for extent in volume.extents(at, bytes).await.expect("told") {
                            let part = &model[at as usize..(at + extent.bytes) as usize];
                            assert!(extent.is_allocated || part.iter().all(|byte| *byte == 0));
                            at += extent.bytes;
                        }
                        assert_eq!(at, part.end as u64, "all of it, as the volume is small");
                    }
                    _ => {
                        assert!(
                            read(&volume, at, bytes).await == model[part],
                            "{level}: {bytes} bytes at {at}"
                        );
                    }
                }
            }
            assert!(read(&volume, 0, size).await == model, "{level}");
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
