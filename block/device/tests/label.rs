//! The label's bytes: a fixture of version 1, and bytes that are not labels.

use levada_base::Epoch;
use levada_base::checksum::crc32c;
use levada_base::ids::Uuid;
use levada_base::units::MIB;
use levada_device::{
    LABEL_BYTES, Label, LabelError, NAME_BYTES_MAX, SLICES_MAX, SliceEntry, SliceKind,
};
use proptest::prelude::*;

fn example() -> Label {
    Label {
        generation: 7,
        owner_epoch: Epoch(3),
        cluster_uuid: Uuid::from_u128(0x0011_2233_4455_6677_8899_aabb_ccdd_eeff),
        cluster_name: "funchal".into(),
        drive_uuid: Uuid::from_u128(0x1111_1111_2222_2222_3333_3333_4444_4444),
        drive_name: "drive07".into(),
        drive_index: 7,
        enclosure_name: "enclosure3".into(),
        capacity_bytes: 1024 * MIB,
        slices: vec![
            SliceEntry {
                array_uuid: Uuid::from_u128(0xa),
                array_name: "meta".into(),
                kind: SliceKind::Metadata,
                start: MIB,
                bytes: 128 * MIB,
                owner_epoch: Epoch(4),
            },
            SliceEntry {
                array_uuid: Uuid::from_u128(0xb),
                array_name: "data".into(),
                kind: SliceKind::Data,
                start: 129 * MIB,
                bytes: 894 * MIB,
                owner_epoch: Epoch(5),
            },
        ],
    }
}

/// The note's drawing, filled in by hand: this file must not change with the codec.
fn fixture() -> Vec<u8> {
    let mut bytes = vec![0; LABEL_BYTES];
    let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
    put(0, b"LEVDRIVE\x01\0\0\0");
    put(16, b"\x07\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0");
    put(32, b"\x00\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\xff");
    put(48, b"\x11\x11\x11\x11\x22\x22\x22\x22\x33\x33\x33\x33\x44\x44\x44\x44");
    put(64, b"\0\0\0\x40\0\0\0\0\x07\0\0\0\x02\0\0\0");
    put(80, b"\x07funchal");
    put(144, b"\x07drive07");
    put(208, b"\x0aenclosure3");
    put(512 + 15, b"\x0a\0\0\x10\0\0\0\0\0\0\0\0\x08\0\0\0\0\x04\0\0\0\0\0\0\0\x01");
    put(512 + 64, b"\x04meta");
    put(640 + 15, b"\x0b\0\0\x10\x08\0\0\0\0\0\0\xe0\x37\0\0\0\0\x05\0\0\0\0\0\0\0\x02");
    put(640 + 64, b"\x04data");
    put(12, b"\x83\x88\xdd\x55");
    bytes
}

#[test]
fn version_1_stays_as_it_is() {
    let bytes = fixture();
    assert_eq!(Label::decode(&bytes), Ok(example()));
    assert_eq!(example().encode().unwrap()[..], bytes[..]);
}

#[test]
fn the_rules_are_kept() {
    let broken = |change: fn(&mut Label)| {
        let mut label = example();
        change(&mut label);
        label.encode().expect_err("a broken rule")
    };
    assert_eq!(
        broken(|l| l.slices[1].start = MIB),
        LabelError::SlicesOverlap { first: 0, second: 1 }
    );
    assert_eq!(broken(|l| l.slices[0].start = 0), LabelError::SliceOutside { slice: 0 });
    assert_eq!(broken(|l| l.slices[1].bytes += MIB), LabelError::SliceOutside { slice: 1 });
    assert_eq!(broken(|l| l.slices[1].bytes -= 4096), LabelError::SliceOutside { slice: 1 });
    assert_eq!(
        broken(|l| l.slices[1].bytes = u64::MAX - MIB + 1),
        LabelError::SliceOutside { slice: 1 }
    );
    assert_eq!(broken(|l| l.capacity_bytes = MIB), LabelError::Capacity { bytes: MIB });
    assert_eq!(broken(|l| l.drive_name = "x".repeat(64)), LabelError::NameTooLong);
    assert_eq!(
        broken(|l| l.slices = vec![l.slices[0].clone(); 17]),
        LabelError::TooManySlices { count: 17 }
    );
}

#[test]
fn wrong_bytes_get_a_precise_error() {
    let with = |at: usize, byte: u8, crc: bool| {
        let mut bytes = fixture();
        bytes[at] = byte;
        if crc {
            bytes[12..16].fill(0);
            let crc = crc32c(&bytes);
            bytes[12..16].copy_from_slice(&crc.to_le_bytes());
        }
        Label::decode(&bytes)
    };
    assert_eq!(with(0, 0, true), Err(LabelError::NoMagic));
    assert_eq!(with(8, 2, true), Err(LabelError::Version { found: 2 }));
    assert_eq!(with(81, b'F', false), Err(LabelError::Checksum));
    assert_eq!(with(80, 64, true), Err(LabelError::NameTooLong));
    assert_eq!(with(82, 0xff, true), Err(LabelError::NameNotUtf8));
    assert_eq!(with(552, 9, true), Err(LabelError::UnknownKind { slice: 0, kind: 9 }));
    // What version 1 does not use is not looked at.
    assert_eq!(with(4000, 1, true), Ok(example()));
    assert_eq!(Label::decode(&[]), Err(LabelError::NoMagic));
}

prop_compose! {
    fn any_label()(
        generation: u64,
        epoch: u64,
        uuids: (u128, u128),
        names in proptest::array::uniform4("[a-zäöü0-9-]{0,31}"),
        sizes_mib in proptest::collection::vec((0..3u64, 1..50u64, any::<bool>()), 0..=SLICES_MAX),
        index: u32,
        rest_blocks in 0..600u64,
    ) -> Label {
        let mut start = MIB;
        let slices = sizes_mib.into_iter().map(|(gap, mib, metadata)| {
            let slice = SliceEntry {
                array_uuid: Uuid::from_u128(uuids.0 ^ u128::from(mib)),
                array_name: names[0].clone(),
                kind: if metadata { SliceKind::Metadata } else { SliceKind::Data },
                start: start + gap * MIB,
                bytes: mib * MIB,
                owner_epoch: Epoch(epoch ^ gap),
            };
            start = slice.end();
            slice
        }).collect();
        Label {
            generation,
            owner_epoch: Epoch(epoch),
            cluster_uuid: Uuid::from_u128(uuids.0),
            cluster_name: names[1].clone(),
            drive_uuid: Uuid::from_u128(uuids.1),
            drive_name: names[2].clone(),
            drive_index: index,
            enclosure_name: names[3].clone(),
            capacity_bytes: start + MIB + rest_blocks * 4096,
            slices,
        }
    }
}

proptest! {
    #[test]
    fn a_label_reads_back(label in any_label()) {
        prop_assume!(label.array_names_fit());
        let bytes = label.encode().unwrap();
        prop_assert_eq!(Label::decode(&bytes), Ok(label));
    }

    #[test]
    fn a_changed_byte_is_noticed(label in any_label(), at in 0..LABEL_BYTES, by in 1..=255u8) {
        prop_assume!(label.array_names_fit());
        let mut bytes = label.encode().unwrap().to_vec();
        bytes[at] ^= by;
        prop_assert!(Label::decode(&bytes).is_err());
    }

    /// The checksum is right, so that decoding gets to see every field.
    #[test]
    fn no_bytes_make_decoding_panic(
        mut bytes in proptest::collection::vec(any::<u8>(), LABEL_BYTES),
        slices in 0..20u32,
    ) {
        let _ = Label::decode(&bytes);
        bytes[..12].copy_from_slice(b"LEVDRIVE\x01\0\0\0");
        bytes[76..80].copy_from_slice(&slices.to_le_bytes());
        bytes[12..16].fill(0);
        let crc = crc32c(&bytes);
        bytes[12..16].copy_from_slice(&crc.to_le_bytes());
        if let Ok(label) = Label::decode(&bytes) {
            prop_assert!(label.check().is_ok());
        }
    }
}

trait NamesFit {
    fn array_names_fit(&self) -> bool;
}

impl NamesFit for Label {
    fn array_names_fit(&self) -> bool {
        let names = [&self.cluster_name, &self.drive_name, &self.enclosure_name];
        names.iter().all(|name| name.len() <= NAME_BYTES_MAX)
            && self.slices.iter().all(|slice| slice.array_name.len() <= NAME_BYTES_MAX)
    }
}
