//! Labelled drives: formatting, repair, fencing, and the fate that slices share.

use levada_base::ids::Uuid;
use levada_base::reactor::{self, Reactor};
use levada_base::units::MIB;
use levada_base::{Buf, BufMut, Epoch};
use levada_device::{
    BlockError, Device, Drive, DriveError, DriveIdentity, DriveModel, Durability, FaultDevice,
    Faults, Foreign, LabelError, ModelDevice, Overwrite, RamDevice, SliceEntry, SliceKind,
    VolatileDevice, read_label,
};
use std::rc::Rc;
use std::time::Duration;

const CAPACITY: u64 = 32 * MIB;

fn identity(n: u128) -> DriveIdentity {
    DriveIdentity {
        cluster_uuid: Uuid::from_u128(1),
        cluster_name: "box".into(),
        drive_uuid: Uuid::from_u128(100 + n),
        drive_name: format!("d{n}"),
        drive_index: n as u32,
        enclosure_name: "e0".into(),
    }
}

fn slices() -> Vec<SliceEntry> {
    let slice = |array: u128, kind, start, bytes| SliceEntry {
        array_uuid: Uuid::from_u128(array),
        array_name: format!("array{array}"),
        kind,
        start,
        bytes,
        owner_epoch: Epoch::default(),
    };
    vec![slice(1, SliceKind::Metadata, MIB, 4 * MIB), slice(2, SliceKind::Data, 5 * MIB, 20 * MIB)]
}

fn ram() -> Rc<dyn Device> {
    Rc::new(RamDevice::new("ram", CAPACITY))
}

async fn format(device: &Rc<dyn Device>, overwrite: Overwrite) -> Result<Rc<Drive>, DriveError> {
    Drive::format(Rc::clone(device), identity(0), slices(), overwrite).await
}

async fn scribble(device: &Rc<dyn Device>, at: u64) {
    let junk = Buf::copy_of(&[0xa5; 4096]).into_vec();
    device.write(at, junk, Durability::Fua).await.unwrap();
}

fn block(byte: u8) -> levada_base::IoVec {
    Buf::copy_of(&[byte; 4096]).into_vec()
}

async fn first_byte(device: &dyn Device, at: u64) -> Result<u8, BlockError> {
    Ok(device.read(at, BufMut::zeroed(4096).into_vec()).await?[0][0])
}

#[test]
fn a_drive_opens_as_it_was_formatted() {
    Reactor::simulated(1).block_on(async {
        let device = ram();
        let unlabelled = Drive::open(Rc::clone(&device)).await.err();
        assert_eq!(unlabelled, Some(DriveError::Unlabelled(LabelError::NoMagic)));
        let label = format(&device, Overwrite::Nothing).await.unwrap().label().clone();
        assert_eq!(label.drive_name, "d0");
        assert_eq!(label.slices, slices());
        assert_eq!(*Drive::open(Rc::clone(&device)).await.unwrap().label(), label);

        let again = format(&device, Overwrite::Nothing).await.err();
        assert!(matches!(again, Some(DriveError::Labelled { .. })), "{again:?}");
        let forced = Drive::format(device, identity(5), slices(), Overwrite::Anything).await;
        assert_eq!(forced.unwrap().label().drive_index, 5);
    });
}

#[test]
fn either_end_is_enough_and_the_other_is_repaired() {
    Reactor::simulated(1).block_on(async {
        for lost in [0, CAPACITY - 4096] {
            let device = ram();
            let label = format(&device, Overwrite::Nothing).await.unwrap().label().clone();
            scribble(&device, lost).await;
            assert_eq!(read_label(&*device).await.unwrap(), label);
            assert_eq!(*Drive::open(Rc::clone(&device)).await.unwrap().label(), label);
            // Repaired: now the other end may be lost.
            scribble(&device, CAPACITY - 4096 - lost).await;
            assert_eq!(*Drive::open(Rc::clone(&device)).await.unwrap().label(), label);
            scribble(&device, 0).await;
            scribble(&device, CAPACITY - 4096).await;
            let lost = Drive::open(device).await.err();
            assert_eq!(lost, Some(DriveError::Unlabelled(LabelError::NoMagic)));
        }
    });
}

#[test]
fn the_newer_end_counts() {
    Reactor::simulated(1).block_on(async {
        let device = ram();
        let drive = format(&device, Overwrite::Nothing).await.unwrap();
        let old = device.read(0, BufMut::zeroed(4096).into_vec()).await.unwrap();
        drive.fence(Epoch(9)).await.unwrap();
        for stale in [CAPACITY - 4096, 0] {
            let old = Buf::copy_of(&old[0]).into_vec();
            device.write(stale, old, Durability::Fua).await.unwrap();
            let drive = Drive::open(Rc::clone(&device)).await.unwrap();
            assert_eq!(drive.label().owner_epoch, Epoch(9));
        }
    });
}

#[test]
fn a_change_of_the_label_survives_power_cuts() {
    for seed in 0..200 {
        Reactor::simulated(seed).block_on(async {
            let below = ram();
            let cache = Rc::new(VolatileDevice::new(below));
            let device: Rc<dyn Device> = Rc::clone(&cache) as _;
            format(&device, Overwrite::Nothing).await.unwrap();
            let mut durable = Epoch(0);
            for round in 1..=5 {
                let drive = Drive::open(Rc::clone(&device)).await.unwrap();
                let found = drive.label().owner_epoch;
                assert!(found == durable || found == Epoch(durable.0 + 1), "seed {seed}");
                durable = found;
                if (seed + round) % 3 > 0 {
                    drive.fence(durable.next()).await.unwrap();
                    durable = durable.next();
                } else {
                    let mut fence = Box::pin(drive.fence(durable.next()));
                    let _ = futures_util::poll!(fence.as_mut());
                }
                cache.power_cut(seed * 10 + round).await.unwrap();
                cache.power_on();
            }
        });
    }
}

#[test]
fn two_drives_remains_are_not_a_drive() {
    Reactor::simulated(1).block_on(async {
        let (one, other) = (ram(), ram());
        format(&one, Overwrite::Nothing).await.unwrap();
        Drive::format(Rc::clone(&other), identity(1), slices(), Overwrite::Nothing).await.unwrap();
        let head = other.read(0, BufMut::zeroed(4096).into_vec()).await.unwrap();
        one.write(0, Buf::copy_of(&head[0]).into_vec(), Durability::Fua).await.unwrap();
        let mixed = Drive::open(Rc::clone(&one)).await.err();
        assert!(matches!(mixed, Some(DriveError::TwoDrives { .. })), "{mixed:?}");
    });
}

/// A copy of `bytes` of a drive on a device of another size.
async fn on_other_size(device: &Rc<dyn Device>, capacity: u64) -> Rc<dyn Device> {
    let other: Rc<dyn Device> = Rc::new(RamDevice::new("other", capacity));
    let bytes = capacity.min(CAPACITY);
    let mut all = device.read(0, BufMut::zeroed(bytes as usize).into_vec()).await.unwrap();
    let all = all.remove(0).freeze().into_vec();
    other.write(0, all, Durability::Fua).await.unwrap();
    other
}

#[test]
fn a_drive_may_grow_but_not_shrink() {
    Reactor::simulated(1).block_on(async {
        let device = ram();
        format(&device, Overwrite::Nothing).await.unwrap();
        let grown = on_other_size(&device, 2 * CAPACITY).await;
        assert_eq!(Drive::open(grown).await.unwrap().label().capacity_bytes, CAPACITY);
        let shrunk = on_other_size(&device, CAPACITY - 4 * MIB).await;
        let refused = Drive::open(Rc::clone(&shrunk)).await.err();
        assert!(matches!(refused, Some(DriveError::Shrunk { .. })), "{refused:?}");
        let refused = Drive::format(shrunk, identity(0), vec![], Overwrite::Nothing).await.err();
        assert!(matches!(refused, Some(DriveError::Labelled { .. })), "{refused:?}");
    });
}

#[test]
fn other_peoples_data_is_refused_unless_forced() {
    Reactor::simulated(1).block_on(async {
        let device = ram();
        let mut xfs = BufMut::zeroed(4096);
        xfs[..4].copy_from_slice(b"XFSB");
        device.write(0, xfs.freeze().into_vec(), Durability::Fua).await.unwrap();
        let refused = format(&device, Overwrite::Nothing).await.err().unwrap();
        let found = Foreign::Known("an XFS file system");
        assert_eq!(refused, DriveError::Foreign { found });
        assert!(refused.to_string().contains("XFS"), "{refused}");
        assert_eq!(first_byte(&*device, 0).await, Ok(b'X'));
        format(&device, Overwrite::Anything).await.unwrap();
        assert_eq!(read_label(&*device).await.unwrap().drive_name, "d0");
    });
}

/// Without a signature that is known the drive was formatted.
#[test]
fn data_of_an_unknown_kind_is_refused_wherever_formatting_would_meet_it() {
    Reactor::simulated(1).block_on(async {
        for at in [0, 512 * 1024, MIB - 4096, CAPACITY - MIB, CAPACITY - 4096] {
            let device = ram();
            scribble(&device, at).await;
            let refused = format(&device, Overwrite::Nothing).await.err().unwrap();
            assert_eq!(refused, DriveError::Foreign { found: Foreign::Unknown { at } });
            assert!(refused.to_string().contains(&format!("from byte {at}")), "{refused}");
            assert_eq!(first_byte(&*device, at).await, Ok(0xa5));
            format(&device, Overwrite::Anything).await.unwrap();
        }
        // A discarded drive may read as ones.
        let device = ram();
        for at in [0, CAPACITY - MIB] {
            let ones = Buf::copy_of(&vec![0xff; MIB as usize]).into_vec();
            device.write(at, ones, Durability::Fua).await.unwrap();
        }
        format(&device, Overwrite::Nothing).await.unwrap();
    });
}

#[test]
fn a_label_that_cannot_be_read_is_not_taken_for_a_blank_drive() {
    Reactor::simulated(1).block_on(async {
        let device = ram();
        format(&device, Overwrite::Nothing).await.unwrap();
        for at in [0, CAPACITY - 4096] {
            let mut label = device.read(at, BufMut::zeroed(4096).into_vec()).await.unwrap();
            label[0][8] = 9; // its version
            let newer = Buf::copy_of(&label[0]).into_vec();
            device.write(at, newer, Durability::Fua).await.unwrap();
        }
        let refused = format(&device, Overwrite::Nothing).await.err().unwrap();
        assert!(matches!(refused, DriveError::Foreign { .. }), "{refused:?}");
        assert!(refused.to_string().contains("label of Levada"), "{refused}");
    });
}

/// However far it came: the drive is ours or blank, and in nobody's way.
#[test]
fn formatting_that_was_cut_short_can_be_done_again() {
    let ms = Duration::from_millis(1);
    for (seed, old) in (0..60).flat_map(|seed| [(seed, false), (seed, true)]) {
        Reactor::simulated(seed).block_on(async {
            let cache = Rc::new(VolatileDevice::new(ram()));
            let model = DriveModel { bytes_per_s: 1 << 30, iops: 1000, latency: ms, flush: ms };
            let device: Rc<dyn Device> = Rc::new(ModelDevice::new(Rc::clone(&cache) as _, model));
            if old {
                format(&device, Overwrite::Nothing).await.unwrap();
            }
            let cut = std::pin::pin!(format(&device, Overwrite::Anything));
            let power = std::pin::pin!(reactor::sleep(ms * seed as u32 / 5));
            futures_util::future::select(cut, power).await;
            cache.power_cut(seed).await.unwrap();
            cache.power_on();
            let again = Drive::refuse_used(&*device).await;
            let is_ours = matches!(again, Err(DriveError::Labelled { .. }));
            assert!(again.is_ok() || is_ours, "seed {seed}: {again:?}");
        });
    }
}

/// Force does not make it larger, so that nobody is told to try.
#[test]
fn a_drive_too_small_for_its_labels_is_not_called_used() {
    Reactor::simulated(1).block_on(async {
        for bytes in [4096, 2 * MIB - 4096] {
            let device: Rc<dyn Device> = Rc::new(RamDevice::new("small", bytes));
            scribble(&device, 0).await;
            Drive::refuse_used(&*device).await.unwrap();
            for overwrite in [Overwrite::Nothing, Overwrite::Anything] {
                let refused = format(&device, overwrite).await.err().unwrap();
                assert_eq!(refused, DriveError::Invalid(LabelError::Capacity { bytes }));
                assert!(refused.to_string().contains("2097152 bytes at least"), "{refused}");
            }
            assert_eq!(first_byte(&*device, 0).await, Ok(0xa5));
        }
    });
}

#[test]
fn slices_are_windows_that_fail_together() {
    Reactor::simulated(1).block_on(async {
        let faults = Faults::none();
        let device: Rc<dyn Device> = Rc::new(FaultDevice::new(ram(), faults.clone()));
        let drive = format(&device, Overwrite::Nothing).await.unwrap();
        let meta = drive.slice(0).unwrap();
        let data = drive.slice_of(Uuid::from_u128(2)).unwrap();
        assert!(drive.slice(2).is_none());
        assert_eq!(meta.info().capacity_bytes, 4 * MIB);
        assert_eq!(meta.info().name, "d0/array1");
        meta.write(4096, block(1), Durability::Volatile).await.unwrap();
        data.write(0, block(2), Durability::Fua).await.unwrap();
        assert_eq!(first_byte(&*device, MIB + 4096).await, Ok(1));
        assert_eq!(first_byte(&*device, 5 * MIB).await, Ok(2));
        let outside = meta.write(4 * MIB, block(3), Durability::Volatile).await;
        assert!(matches!(outside, Err(BlockError::OutOfRange { .. })));
        // Offsets of errors are the slice's.
        faults.medium_error(5 * MIB + 8192, 4096);
        let bad = first_byte(&data, 8192).await;
        assert_eq!(bad, Err(BlockError::Medium { at: 8192, bytes: 4096 }));
        // One slice sees that the drive is gone, and from then on all do, even if it comes back.
        faults.fail();
        assert_eq!(first_byte(&data, 0).await, Err(BlockError::Gone));
        faults.restore();
        assert_eq!(first_byte(&meta, 0).await, Err(BlockError::Gone));
        assert!(meta.health().failing);
        let drive = Drive::open(device).await.unwrap();
        let meta = drive.slice(0).unwrap();
        assert_eq!(first_byte(&meta, 4096).await, Ok(1));
        drive.fail();
        assert_eq!(meta.flush().await, Err(BlockError::Gone));
    });
}

#[test]
fn older_owners_are_refused() {
    Reactor::simulated(1).block_on(async {
        let device = ram();
        let drive = format(&device, Overwrite::Nothing).await.unwrap();
        let old = drive.slice(1).unwrap();
        let neighbour = drive.slice(0).unwrap();
        old.fence(Epoch(1)).await.unwrap();
        old.fence(Epoch(1)).await.unwrap();
        let new = drive.slice(1).unwrap();
        new.fence(Epoch(2)).await.unwrap();
        let fenced = BlockError::Fenced { ours: Epoch(1), seen: Epoch(2) };
        assert_eq!(old.write(0, block(1), Durability::Fua).await, Err(fenced.clone()));
        assert_eq!(old.fence(Epoch(1)).await, Err(fenced));
        new.write(0, block(2), Durability::Fua).await.unwrap();
        // The other slice's owner goes on.
        neighbour.write(0, block(3), Durability::Fua).await.unwrap();
        // Another server opens the drive, and takes all of it.
        let elsewhere = Drive::open(Rc::clone(&device)).await.unwrap();
        assert_eq!(elsewhere.label().slices[1].owner_epoch, Epoch(2));
        let too_old = elsewhere.fence(Epoch(1)).await;
        assert!(matches!(too_old, Err(DriveError::Block(BlockError::Fenced { .. }))));
        elsewhere.fence(Epoch(7)).await.unwrap();
        // We find out when we next fence.
        let late = new.fence(Epoch(3)).await;
        assert_eq!(late, Err(BlockError::Fenced { ours: Epoch(3), seen: Epoch(7) }));
        let late = neighbour.write(0, block(3), Durability::Fua).await;
        assert_eq!(late, Err(BlockError::Fenced { ours: Epoch(0), seen: Epoch(7) }));
        new.fence(Epoch(8)).await.unwrap();
        new.write(0, block(2), Durability::Fua).await.unwrap();
    });
}

#[test]
fn slices_fence_side_by_side() {
    Reactor::simulated(3).block_on(async {
        let device = ram();
        let drive = format(&device, Overwrite::Nothing).await.unwrap();
        let (meta, data) = (drive.slice(0).unwrap(), drive.slice(1).unwrap());
        let both = futures_util::future::join(meta.fence(Epoch(4)), data.fence(Epoch(6))).await;
        assert_eq!(both, (Ok(()), Ok(())));
        let drive = Drive::open(device).await.unwrap();
        let epochs: Vec<_> = drive.label().slices.iter().map(|s| s.owner_epoch).collect();
        assert_eq!(epochs, [Epoch(4), Epoch(6)]);
    });
}
