//! Files as devices, faults, and power loss.

use levada_base::lent::Lender;
use levada_base::reactor::{self, Reactor};
use levada_base::units::{KIB, MIB};
use levada_base::{Buf, BufMut, Epoch, IoVec, LentVec};
use levada_device::{
    BlockError, Device, DriveModel, Durability, FaultDevice, Faults, FileDevice, FileDeviceError,
    ModelDevice, NullDevice, Prepare, RamDevice, VolatileDevice,
};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

fn blocks(byte: u8, count: usize) -> IoVec {
    Buf::copy_of(&vec![byte; count * 4096]).into_vec()
}

/// Opens a device again after it was dropped. A process that another test starts holds a copy of
/// every descriptor, and so of the lock, between fork and exec.
async fn reopened(path: &Path) -> FileDevice {
    for _ in 0..500 {
        match FileDevice::open(path) {
            Err(FileDeviceError::InUse { .. }) => {
                reactor::sleep(Duration::from_millis(10)).await;
            }
            opened => return opened.unwrap(),
        }
    }
    panic!("{} stays locked", path.display());
}

async fn first_byte(device: &dyn Device, block: u64) -> Result<u8, BlockError> {
    Ok(device.read(block * 4096, BufMut::zeroed(4096).into_vec()).await?[0][0])
}

/// Beside the build's output: a tmpfs in /tmp might not take direct I/O.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

#[test]
fn a_file_that_was_removed_or_replaced_is_not_in_its_place() {
    let dir = directory();
    let path = dir.path().join("drive");
    Reactor::new().unwrap().block_on(async {
        let device = FileDevice::create(&path, MIB, Prepare::Reserve).await.unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(device.is_at(&path) && device.is_at(&link));
        let away = dir.path().join("away");
        std::fs::rename(&path, &away).unwrap();
        assert!(!device.is_at(&path) && device.is_at(&away));
        std::fs::copy(&away, &path).unwrap();
        assert!(!device.is_at(&path), "a copy is another file");
        std::fs::remove_file(&away).unwrap();
        std::fs::remove_file(&path).unwrap();
        // The inode is not given to another file while it is open.
        let next = FileDevice::create(&path, MIB, Prepare::Reserve).await.unwrap();
        assert!(next.is_at(&path) && !device.is_at(&path));
    });
}

async fn a_file_device(prepare: Prepare) {
    let dir = directory();
    let path = dir.path().join("drive");
    let device = FileDevice::create(&path, 8 * MIB + 100, prepare).await.unwrap();
    assert_eq!(device.info().capacity_bytes, 8 * MIB);
    let parts: IoVec = (0..5).map(|n| Buf::copy_of(&[n; 1024])).collect();
    let misaligned = device.write(0, parts, Durability::Volatile).await;
    assert!(matches!(misaligned, Err(BlockError::Misaligned { .. })));
    device.write(4096, blocks(1, 3), Durability::Fua).await.unwrap();
    device.write(MIB, blocks(2, 512), Durability::Volatile).await.unwrap();
    device.flush().await.unwrap();
    device.write_zeroes(8192, 4096).await.unwrap();
    device.write_zeroes(MIB, 2 * MIB - 4096).await.unwrap();
    device.discard(4 * MIB, MIB).await.unwrap();
    let past = device.write(8 * MIB, blocks(1, 1), Durability::Fua).await;
    assert!(matches!(past, Err(BlockError::OutOfRange { .. })));

    let second = FileDevice::open(&path).unwrap_err();
    assert!(matches!(second, FileDeviceError::InUse { .. }), "{second}");
    drop(device);
    let device = reopened(&path).await;
    let found = [0u64, 1, 2, 3, 256, 767].map(|block| first_byte_of(&device, block));
    let found = futures_util::future::join_all(found).await;
    assert_eq!(found, [0, 1, 0, 1, 0, 2].map(Ok));
    assert_eq!(device.health().bytes_read, 6 * 4096);
    device.fence(Epoch(2)).await.unwrap();
    assert!(device.fence(Epoch(1)).await.is_err());
    // Somebody cuts the file: what is missing cannot be read, the rest can.
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(MIB).unwrap();
    assert!(matches!(first_byte(&device, 300).await, Err(BlockError::Medium { .. })));
    assert_eq!(first_byte(&device, 1).await, Ok(1));
}

async fn first_byte_of(device: &FileDevice, block: u64) -> Result<u8, BlockError> {
    first_byte(device, block).await
}

#[test]
fn a_file_is_a_device() {
    let reactor = Reactor::new().unwrap();
    reactor.block_on(a_file_device(Prepare::Reserve));
    reactor.block_on(a_file_device(Prepare::Zero));
}

/// Writes for ever where the variable says, in a process that the next test kills.
const WRITE_FOR_EVER: &str = "LEVADA_TEST_WRITE_FOR_EVER";

#[test]
fn a_killed_process_lets_go_of_its_device() {
    const NAME: &str = "a_killed_process_lets_go_of_its_device";
    if let Some(path) = std::env::var_os(WRITE_FOR_EVER) {
        return Reactor::new().unwrap().block_on(async {
            let device = FileDevice::open(path.as_ref()).unwrap();
            let data = Buf::copy_of(&vec![1; MIB as usize]);
            let mut at = 0;
            loop {
                device.write(at, data.clone().into_vec(), Durability::Volatile).await.unwrap();
                at = (at + MIB) % (8 * MIB);
                if at == 0 {
                    // That the parent need not guess when it has begun.
                    std::fs::write(Path::new(&path).with_extension("begun"), b"").unwrap();
                }
            }
        });
    }
    let dir = directory();
    let path = dir.path().join("drive");
    Reactor::new().unwrap().block_on(async {
        drop(FileDevice::create(&path, 8 * MIB, Prepare::Reserve).await.unwrap());
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", NAME]).env(WRITE_FOR_EVER, &path);
        let mut child = command.spawn().unwrap();
        while !path.with_extension("begun").exists() {
            assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
            reactor::sleep(Duration::from_millis(10)).await;
        }
        assert!(matches!(FileDevice::open(&path), Err(FileDeviceError::InUse { .. })));
        child.kill().unwrap();
        child.wait().unwrap();
        // The kernel takes the ring, and the file in its table, down somewhat later.
        let device = reopened(&path).await;
        // Nothing of the dead process is on its way any more.
        device.write(0, blocks(2, 2048), Durability::Fua).await.unwrap();
        reactor::sleep(Duration::from_millis(100)).await;
        for block in (0..2048).step_by(61) {
            assert_eq!(first_byte(&device, block).await, Ok(2));
        }
    });
}

#[test]
fn files_that_cannot_be_devices_are_named() {
    let dir = directory();
    let path = dir.path().join("missing");
    Reactor::new().unwrap().block_on(async {
        let missing = FileDevice::open(&path).unwrap_err().to_string();
        assert!(missing.contains("missing"), "{missing}");
        let no_file = FileDevice::open(dir.path());
        assert!(matches!(no_file, Err(FileDeviceError::NotAStore { .. })));
        std::fs::write(&path, b"short").unwrap();
        let short = FileDevice::open(&path);
        assert!(matches!(short, Err(FileDeviceError::TooSmall { bytes: 5, .. })));
        let there = FileDevice::create(&path, MIB, Prepare::Reserve).await;
        assert!(matches!(there, Err(FileDeviceError::Exists { .. })));
        assert_eq!(std::fs::read(&path).unwrap(), b"short");
        let huge = dir.path().join("huge");
        let too_large = FileDevice::create(&huge, 1 << 60, Prepare::Reserve).await;
        assert!(matches!(too_large, Err(FileDeviceError::Io { .. })));
        assert!(!huge.exists());
    });
}

/// `LEVADA_TEST_BLOCK_DEVICE` names a block device of at least 8 MiB that may be overwritten.
#[test]
fn a_block_device_is_a_device() {
    let Some(path) = std::env::var_os("LEVADA_TEST_BLOCK_DEVICE") else { return };
    Reactor::new().unwrap().block_on(async {
        let device = FileDevice::open(path.as_ref()).unwrap();
        assert!(device.info().capacity_bytes >= 8 * MIB);
        let second = FileDevice::open(path.as_ref()).unwrap_err();
        assert!(matches!(second, FileDeviceError::InUse { .. }), "{second}");
        device.write(0, blocks(7, 1024), Durability::Fua).await.unwrap();
        device.discard(MIB, MIB).await.unwrap();
        device.write_zeroes(2 * MIB, 4096).await.unwrap();
        device.write_zeroes(3 * MIB, 2 * MIB).await.unwrap();
        device.flush().await.unwrap();
        assert_eq!(first_byte(&device, 0).await, Ok(7));
        assert_eq!(first_byte(&device, 512).await, Ok(0));
        assert_eq!(first_byte(&device, 513).await, Ok(7));
        assert_eq!(first_byte(&device, 768).await, Ok(0));
    });
}

#[test]
fn a_model_holds_a_real_reactor_to_its_rate() {
    Reactor::new().unwrap().block_on(async {
        let null = Rc::new(NullDevice::new("null", 64 * MIB));
        let device = Rc::new(ModelDevice::new(null, DriveModel::nvme()));
        let start = reactor::now();
        let workers = (0..16).map(|_| {
            let device = Rc::clone(&device);
            async move {
                for _ in 0..100 {
                    let into = BufMut::for_overwrite(4096).into_vec();
                    device.read(0, into).await.unwrap();
                }
            }
        });
        futures_util::future::join_all(workers).await;
        // 1600 reads at 20,000 per second. The upper bound only catches a broken clock.
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(80), "{took:?}");
        assert!(took < Duration::from_millis(800), "{took:?}");
    });
}

fn faulty() -> (FaultDevice, Faults) {
    let faults = Faults::none();
    (FaultDevice::new(Rc::new(RamDevice::new("ram", 4 * MIB)), faults.clone()), faults)
}

#[test]
fn medium_errors_and_rot_heal_when_written() {
    Reactor::simulated(1).block_on(async {
        let (device, faults) = faulty();
        device.write(0, blocks(5, 8), Durability::Volatile).await.unwrap();
        faults.medium_error(2 * 4096 + 1, 4096);
        let read = device.read(0, BufMut::zeroed(8 * 4096).into_vec()).await;
        assert_eq!(read.unwrap_err(), BlockError::Medium { at: 8192, bytes: 8192 });
        assert_eq!(first_byte(&device, 4).await, Ok(5));
        device.write(8192, blocks(6, 1), Durability::Volatile).await.unwrap();
        assert_eq!(first_byte(&device, 2).await, Ok(6));
        assert!(first_byte(&device, 3).await.is_err());
        device.write_zeroes(3 * 4096, 4096).await.unwrap();
        assert_eq!(first_byte(&device, 3).await, Ok(0));
        assert_eq!(device.health().read_errors, 2);

        faults.rot(4 * 4096, 1, 0x80);
        assert!(faults.has_damage(4 * 4096, 4096));
        assert_eq!(first_byte(&device, 4).await, Ok(0x85));
        device.write(4 * 4096, blocks(5, 1), Durability::Volatile).await.unwrap();
        assert_eq!(first_byte(&device, 4).await, Ok(5));
        assert!(!faults.has_damage(0, 4 * MIB));
    });
}

#[test]
fn writes_get_lost_and_go_astray_unnoticed() {
    Reactor::simulated(1).block_on(async {
        let (device, faults) = faulty();
        faults.lose_write(2);
        faults.misdirect_write(3, 10 * 4096);
        for block in 0..4 {
            device.write(block * 4096, blocks(block as u8 + 1, 1), Durability::Fua).await.unwrap();
        }
        for (block, byte) in [(0, 1), (1, 0), (2, 0), (3, 4), (10, 3)] {
            assert_eq!(first_byte(&device, block).await, Ok(byte), "block {block}");
        }
        assert_eq!(faults.writes(), 4);
    });
}

#[test]
fn a_device_goes_slows_and_comes_back() {
    Reactor::simulated(1).block_on(async {
        let (device, faults) = faulty();
        let device = Rc::new(device);
        faults.slow(Duration::from_millis(5));
        let start = reactor::now();
        device.write(0, blocks(1, 1), Durability::Volatile).await.unwrap();
        assert_eq!(start.elapsed(), Duration::from_millis(5));
        // It goes while a request is in flight.
        let in_flight = Rc::clone(&device);
        let read = reactor::spawn(async move { first_byte(&*in_flight, 0).await });
        reactor::sleep(Duration::from_millis(1)).await;
        faults.fail();
        assert_eq!(read.await, Some(Err(BlockError::Gone)));
        assert_eq!(device.flush().await, Err(BlockError::Gone));
        faults.heal();
        assert_eq!(first_byte(&*device, 0).await, Ok(1));
        faults.fail_after(2);
        assert_eq!(device.flush().await, Ok(()));
        assert_eq!(device.flush().await, Ok(()));
        assert_eq!(device.flush().await, Err(BlockError::Gone));
        faults.restore();
        assert_eq!(device.flush().await, Ok(()));
    });
}

const BLOCKS: u64 = 64;

#[derive(Clone, Debug)]
enum Step {
    Write { at: u64, parts: Vec<u16>, fua: bool },
    Zero { at: u64, blocks: u64 },
    Flush,
    Read { at: u64, blocks: u64 },
    PowerCut { seed: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..BLOCKS - 8, prop::collection::vec(1..6000u16, 1..4), any::<bool>())
            .prop_map(|(at, parts, fua)| Step::Write { at, parts, fua }),
        1 => (0..BLOCKS - 8, 0..8u64).prop_map(|(at, blocks)| Step::Zero { at, blocks }),
        1 => Just(Step::Flush),
        3 => (0..BLOCKS - 8, 0..8u64).prop_map(|(at, blocks)| Step::Read { at, blocks }),
        1 => any::<u64>().prop_map(|seed| Step::PowerCut { seed }),
    ]
}

/// What each block may hold: the last entry is what a read sees; after a power cut any may be
/// left. Blocks are filled with the number of their write.
#[derive(Default)]
struct Model(BTreeMap<u64, Vec<u32>>);

impl Model {
    fn versions(&mut self, block: u64) -> &mut Vec<u32> {
        self.0.entry(block).or_insert_with(|| vec![0])
    }
}

fn word_at(bytes: &[u8], block: usize) -> u32 {
    let block = &bytes[block * 4096..(block + 1) * 4096];
    let word = u32::from_le_bytes(block[..4].try_into().unwrap());
    let all = block.chunks(4).all(|w| w == word.to_le_bytes());
    assert!(all, "a block is torn inside");
    word
}

/// `count` blocks filled with `word`, cut into parts of the given lengths.
fn filled(word: u32, count: u64, parts: &[u16]) -> IoVec {
    let whole = Buf::copy_of(&word.to_le_bytes().repeat(count as usize * 1024));
    let mut list = IoVec::new();
    let mut at = 0;
    for len in parts {
        let len = (*len as usize).min(whole.len() - at);
        list.push(whole.slice(at, len));
        at += len;
    }
    list.push(whole.slice(at, whole.len() - at));
    list
}

async fn run_steps(steps: Vec<Step>, background: bool) {
    let below: Rc<dyn Device> = Rc::new(RamDevice::new("ram", BLOCKS * 4096));
    let slow = Rc::new(ModelDevice::new(below, DriveModel::nvme_flush_100us()));
    let device = Rc::new(VolatileDevice::with_cache(slow, 40 * 4096));
    if background {
        device.spawn_write_back(Duration::from_micros(200));
    }
    let mut model = Model::default();
    let mut word = 0;
    for step in steps {
        match step {
            Step::Write { at, parts, fua } => {
                word += 1;
                let count = parts.iter().map(|len| u64::from(*len)).sum::<u64>().div_ceil(4096);
                let count = count.clamp(1, 8);
                let from = filled(word, count, &parts);
                let durability = if fua { Durability::Fua } else { Durability::Volatile };
                device.write(at * 4096, from, durability).await.unwrap();
                for block in at..at + count {
                    let versions = model.versions(block);
                    if fua {
                        versions.clear();
                    }
                    versions.push(word);
                }
            }
            Step::Zero { at, blocks } => {
                device.write_zeroes(at * 4096, blocks * 4096).await.unwrap();
                (at..at + blocks).for_each(|block| model.versions(block).push(0));
            }
            Step::Flush => {
                device.flush().await.unwrap();
                for versions in model.0.values_mut() {
                    versions.drain(..versions.len() - 1);
                }
            }
            Step::Read { at, blocks } => {
                let into = BufMut::for_overwrite(blocks as usize * 4096);
                let read = device.read(at * 4096, into.into_vec()).await.unwrap();
                for block in 0..blocks {
                    let expected = *model.versions(at + block).last().unwrap();
                    assert_eq!(word_at(&read[0], block as usize), expected);
                }
            }
            Step::PowerCut { seed } => {
                device.power_cut(seed).await.unwrap();
                let off = device.flush().await;
                assert_eq!(off, Err(BlockError::Gone));
                device.power_on();
                let into = BufMut::for_overwrite(BLOCKS as usize * 4096);
                let read = device.read(0, into.into_vec()).await.unwrap();
                for block in 0..BLOCKS {
                    let left = word_at(&read[0], block as usize);
                    let versions = model.versions(block);
                    assert!(versions.contains(&left), "{left} is none of {versions:?}");
                    *versions = vec![left];
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_cache_that_loses_power_keeps_what_was_flushed(
        steps in prop::collection::vec(step(), 1..60),
        seed: u64,
        background: bool,
    ) {
        Reactor::simulated(seed).block_on(run_steps(steps, background));
    }
}

#[test]
fn power_cuts_lose_tear_and_reorder() {
    let (mut lost, mut torn, mut reordered, mut whole) = (0, 0, 0, 0);
    for seed in 0..200 {
        Reactor::simulated(seed).block_on(async {
            let device = VolatileDevice::new(Rc::new(RamDevice::new("ram", 64 * KIB)));
            device.write(0, blocks(1, 4), Durability::Volatile).await.unwrap();
            device.write(4 * 4096, blocks(2, 4), Durability::Volatile).await.unwrap();
            device.power_cut(seed).await.unwrap();
            device.power_on();
            let mut landed = [0; 2];
            for block in 0..8 {
                landed[block as usize / 4] +=
                    usize::from(first_byte(&device, block).await.unwrap() != 0);
            }
            match landed {
                [0, 0] => lost += 1,
                [4, 4] => whole += 1,
                [0, _] => reordered += 1,
                _ => torn += 1,
            }
        });
    }
    assert!([lost, torn, reordered, whole].iter().all(|count| *count > 0));
}

#[test]
fn requests_in_flight_at_a_power_cut_are_not_acknowledged() {
    Reactor::simulated(1).block_on(async {
        let ram: Rc<dyn Device> = Rc::new(RamDevice::new("ram", MIB));
        let slow = Rc::new(ModelDevice::new(ram, DriveModel::nvme_flush_100us()));
        let device = Rc::new(VolatileDevice::new(slow));
        device.write(0, blocks(1, 1), Durability::Volatile).await.unwrap();
        let (flusher, writer) = (Rc::clone(&device), Rc::clone(&device));
        let flush = reactor::spawn(async move { flusher.flush().await });
        let write =
            reactor::spawn(async move { writer.write(4096, blocks(2, 1), Durability::Fua).await });
        reactor::sleep(Duration::from_micros(20)).await;
        device.power_cut(7).await.unwrap();
        device.power_on();
        assert_eq!(flush.await, Some(Err(BlockError::Gone)));
        assert_eq!(write.await, Some(Err(BlockError::Gone)));
        device.write(8192, blocks(3, 1), Durability::Fua).await.unwrap();
    });
}

/// What a device fills lent memory with is what it reads, or it says that it does not.
#[test]
fn lent_memory_is_filled_by_whoever_can() {
    let dir = directory();
    Reactor::new().unwrap().block_on(async {
        let path = dir.path().join("drive");
        let file = FileDevice::create(&path, MIB, Prepare::Zero).await.unwrap();
        let ram = Rc::new(RamDevice::new("ram", MIB));
        let faults = Faults::none();
        let faulty = FaultDevice::new(Rc::clone(&ram) as _, faults.clone());
        let modelled = ModelDevice::new(Rc::clone(&ram) as _, DriveModel::nvme());
        for device in [&file as &dyn Device, &*ram] {
            for block in 0..8 {
                device
                    .write(block * 4096, blocks(block as u8, 1), Durability::Volatile)
                    .await
                    .unwrap();
            }
        }
        for device in [&file as &dyn Device, &*ram, &faulty, &modelled] {
            let lender = Lender::new(8 * 4096 + 4096);
            // Pages begin somewhere within.
            let first = (0..4096).find(|start| lender.lend(*start, 1).is_aligned(4096)).unwrap();
            let page = |page: usize, count: usize| lender.lend(first + page * 4096, count * 4096);
            let read_before = device.health().bytes_read;
            let into = LentVec::from_iter([page(4, 1), page(0, 3)]);
            let reading = device.read_lent(2 * 4096, into).expect("it can");
            assert_eq!(device.health().bytes_read, read_before, "it has not begun");
            assert!(lender.bytes().iter().all(|byte| *byte == 0xee));
            assert!(reading.await);
            assert_eq!(device.health().bytes_read - read_before, 4 * 4096);
            let there = lender.bytes();
            let first_of = |page: usize| there[first + page * 4096];
            assert_eq!([first_of(4), first_of(0), first_of(1), first_of(2)], [2, 3, 4, 5]);
            assert_eq!(first_of(3), 0xee, "nothing else is touched");
            if let Some(reading) = device.read_lent(MIB, LentVec::from_iter([page(0, 1)])) {
                assert!(!reading.await, "past the end");
            }
        }
        let lender = Lender::new(3 * 4096);
        let odd = (0..4096).find(|start| lender.lend(*start, 1).is_aligned(4096)).unwrap() + 8;
        assert!(file.read_lent(0, LentVec::from_iter([lender.lend(odd, 4096)])).is_none());
        faults.medium_error(2 * 4096, 4096);
        let two = |at| faulty.read_lent(at, LentVec::from_iter([lender.lend(0, 8192)]));
        assert!(two(0).expect("it can").await);
        assert!(!two(4096).expect("it can").await);
        assert_eq!(file.health().read_errors, 0);
    });
}
