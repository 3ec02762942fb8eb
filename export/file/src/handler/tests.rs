use super::*;
use futures_util::future::join_all;
use levada_base::Epoch;
use levada_base::ids::Uuid;
use levada_base::reactor::{Reactor, random_u64};
use levada_base::units::MIB;
use levada_device::{Device, RamDevice};
use levada_raid::{ArraySpec, Level, MemberSpec, RaidArray};
use std::rc::Rc;

const KEEP_SIZE: u32 = 1;
const PUNCH_HOLE: u32 = 2;
const ZERO_RANGE: u32 = 16;

async fn array(level: Level, width: usize) -> RaidArray {
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
    RaidArray::create(spec, Epoch(1)).await.expect("it can be")
}

async fn file(level: Level, width: usize) -> ArrayFile<RaidArray> {
    ArrayFile::new(array(level, width).await)
}

async fn whole(file: &ArrayFile<RaidArray>) -> Vec<u8> {
    file.read(0, file.capacity_bytes).await.expect("read").iter().flat_map(|b| b.to_vec()).collect()
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
            let file = file(level, width).await;
            let mut model = vec![0; file.capacity_bytes as usize];
            for round in 0..400u64 {
                let bytes = 1 + match random_u64() % 3 {
                    0 => random_u64() % 600,
                    1 => random_u64() % 20_000,
                    _ => random_u64() % 300_000,
                };
                let mut at = random_u64() % file.capacity_bytes;
                if random_u64().is_multiple_of(3) {
                    at = round_down(at, BLOCK_BYTES);
                }
                let end = (at + bytes).min(file.capacity_bytes);
                let part = at as usize..end as usize;
                match random_u64() % 5 {
                    0 | 1 => {
                        let data = vec![round as u8 | 1; bytes as usize];
                        let written = file.write(at, Buf::copy_of(&data)).await.expect("written");
                        assert_eq!(u64::from(written), end - at);
                        model[part].fill(round as u8 | 1);
                    }
                    2 => {
                        let mode = if round % 2 == 0 { PUNCH_HOLE } else { ZERO_RANGE };
                        file.allocate(at, bytes, mode | KEEP_SIZE).await.expect("zeroed");
                        model[part].fill(0);
                    }
                    _ => {
                        let read = file.read(at, bytes).await.expect("read");
                        assert!(read[0][..] == model[part], "{level}: {bytes} bytes at {at}");
                    }
                }
            }
            assert!(whole(&file).await == model, "{level}");
        });
    }
}

/// Each writer has its own bytes, many to a block: none may undo another's.
#[test]
fn small_writes_to_one_block_at_once_keep_each_other() {
    Reactor::simulated(7).block_on(async {
        let file = file(Level::Raid6, 5).await;
        const BYTES: u64 = 100;
        let write = async |n: u64| {
            let data = vec![n as u8 + 1; BYTES as usize];
            file.write(n * BYTES, Buf::copy_of(&data)).await.expect("written");
        };
        join_all((0..200).map(write)).await;
        let all = whole(&file).await;
        for n in 0..200u64 {
            let part = &all[(n * BYTES) as usize..][..BYTES as usize];
            assert!(part.iter().all(|byte| *byte == n as u8 + 1), "writer {n}");
        }
    });
}

#[test]
fn the_end_of_the_file_is_the_end_of_the_array() {
    Reactor::simulated(1).block_on(async {
        let file = file(Level::Raid6, 5).await;
        let end = file.capacity_bytes;
        let data = Buf::copy_of(&[5; 1000]);
        assert_eq!(file.write(end, data.clone()).await, Err(Errno::NOSPC));
        assert_eq!(file.write(u64::MAX - 10, data.clone()).await, Err(Errno::NOSPC));
        assert_eq!(file.write(end - 100, data).await, Ok(100), "what fits");
        assert!(file.read(end, 100).await.expect("nothing").is_empty());
        assert!(file.read(u64::MAX, 100).await.expect("nothing").is_empty());
        let tail = file.read(end - 100, 4096).await.expect("read");
        assert_eq!(&tail[0][..], [5; 100]);
        for mode in [0, KEEP_SIZE, ZERO_RANGE] {
            assert_eq!(file.allocate(end - 100, 200, mode).await, Err(Errno::NOSPC));
            assert_eq!(file.allocate(0, u64::MAX, mode).await, Err(Errno::NOSPC));
        }
        assert_eq!(file.allocate(0, end, 0).await, Ok(()), "it has its space");
        assert_eq!(file.allocate(0, 4096, 64).await, Err(Errno::OPNOTSUPP), "nothing unshares");
        assert_eq!(file.allocate(0, u64::MAX, PUNCH_HOLE | KEEP_SIZE).await, Ok(()));
        assert!(whole(&file).await.iter().all(|byte| *byte == 0));
    });
}

#[test]
fn its_size_is_fixed_and_o_trunc_ignored() {
    Reactor::simulated(1).block_on(async {
        let file = file(Level::Raid0, 2).await;
        let set = |size, fh| SetAttr { size: Some(size), fh, ..SetAttr::default() };
        assert!(file.set_attr(&set(0, None)).is_ok(), "open with O_TRUNC");
        assert!(file.set_attr(&set(file.capacity_bytes, Some(0))).is_ok());
        for (size, fh) in [(0, Some(0)), (1, None), (file.capacity_bytes + 1, Some(0))] {
            assert_eq!(file.set_attr(&set(size, fh)).err(), Some(Errno::PERM));
        }
        assert_eq!(file.attr.get().size_bytes, file.capacity_bytes);
        let mode = SetAttr { mode: Some(0o100_644), ..SetAttr::default() };
        assert!(file.set_attr(&mode).is_ok());
        assert_eq!(file.attr.get().mode, libc::S_IFREG | 0o644);
    });
}
