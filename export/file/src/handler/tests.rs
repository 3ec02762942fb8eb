use super::*;
use levada_base::Epoch;
use levada_base::ids::Uuid;
use levada_base::reactor::Reactor;
use levada_base::units::MIB;
use levada_device::{Device, RamDevice};
use levada_raid::{ArraySpec, Level, MemberSpec, RaidArray};
use levada_volume::ArrayVolume;
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

async fn file(level: Level, width: usize) -> VolumeFile<ArrayVolume<RaidArray>> {
    VolumeFile::new(ArrayVolume::new(array(level, width).await))
}

async fn whole(file: &VolumeFile<ArrayVolume<RaidArray>>) -> Vec<u8> {
    levada_base::buf::joined(&file.read(0, file.size_bytes).await.expect("read"))
}

#[test]
fn the_end_of_the_file_is_the_end_of_the_array() {
    Reactor::simulated(1).block_on(async {
        let file = file(Level::Raid6, 5).await;
        let end = file.size_bytes;
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
        assert!(file.set_attr(&set(file.size_bytes, Some(0))).is_ok());
        for (size, fh) in [(0, Some(0)), (1, None), (file.size_bytes + 1, Some(0))] {
            assert_eq!(file.set_attr(&set(size, fh)).err(), Some(Errno::PERM));
        }
        assert_eq!(file.attr.get().size_bytes, file.size_bytes);
        let mode = SetAttr { mode: Some(0o100_644), ..SetAttr::default() };
        assert!(file.set_attr(&mode).is_ok());
        assert_eq!(file.attr.get().mode, libc::S_IFREG | 0o644);
    });
}
