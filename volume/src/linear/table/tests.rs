#![allow(clippy::single_range_in_vec_init, reason = "runs are ranges of stripes")]

use super::*;
use proptest::prelude::*;

const BOUNDS: Bounds = Bounds { stripe_bytes: 64 << 10, stripes: 1000 };

fn entry(uuid: u128, size_bytes: u64, runs: &[Run]) -> Entry {
    let (uuid, runs) = (Uuid::from_u128(uuid), runs.to_vec());
    Entry { uuid, size_bytes, runs, limits: Vec::new(), reservations: Vec::new() }
}

fn table(volumes: &[(&str, Entry)]) -> Table {
    let volumes =
        volumes.iter().map(|(name, entry)| (name.parse().expect("a name"), entry.clone()));
    Table { sequence: 9, volumes: volumes.collect() }
}

/// `table` after `change` of its bytes, which are sealed again.
fn changed(table: &Table, change: impl FnOnce(&mut Vec<u8>)) -> Result<Table, TableFault> {
    let mut bytes = table.encode(&BOUNDS);
    change(&mut bytes);
    let len = bytes.len() as u32;
    Table::seal(&mut bytes, len);
    Table::decode(&bytes, &BOUNDS)
}

/// Whoever changes the format meets this: arrays have it.
#[test]
fn the_form_on_the_array_is_fixed() {
    let mut volume = entry(0x0102_0304, 100 << 10, &[100..101, 8..9]);
    volume.limits = b"{}".to_vec();
    let bytes = table(&[("blue/vm", volume)]).encode(&BOUNDS);
    let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let header = "4c5644504f4f4c00\
                  01000000541aea72\
                  0900000000000000\
                  8800000001000000\
                  0000010000000000\
                  000000000000000000000000000000000000000000000000";
    let volume = "00000000000000000000000001020304\
                  0090010000000000020000000200040\
                  2626c7565766d7b7d\
                  64000000000000000100000000000000\
                  08000000000000000100000000000000";
    assert_eq!(text, format!("{header}{volume}"));
}

/// The same of a table with reservations; without any it is as it always was.
#[test]
fn reservations_stand_behind_the_runs() {
    let mut volume = entry(1, 64 << 10, &[8..9]);
    let plain = table(&[("blue/vm", volume.clone())]).encode(&BOUNDS);
    volume.reservations = b"who".to_vec();
    let reserved = table(&[("blue/vm", volume)]).encode(&BOUNDS);
    assert_eq!((plain[8], reserved[8]), (1, 2));
    assert_eq!(reserved[plain.len()..], *b"\x03\0\0\0who");
    let none = changed(&table(&[]), |bytes| bytes[8] = 2);
    assert_eq!(none, Err(TableFault::NoReservations), "there is one form of every table");
}

fn tables() -> impl Strategy<Value = Table> {
    let texts = any::<(Option<[u8; 3]>, Option<[u8; 5]>)>();
    let volume = ("(a|blue)/[a-c]{1,3}", 1..5u64, 0..16u64, texts);
    prop::collection::vec(volume, 0..8).prop_map(|volumes| {
        let mut table = Table { sequence: 5, ..Table::default() };
        let mut free = BOUNDS.room().start;
        for (number, (name, stripes, blocks, (limits, reserved))) in (1..).zip(volumes) {
            let runs = vec![free + 1..free + 1 + stripes, free..free + 1];
            free += stripes + 2;
            let size_bytes = (stripes + 1) * BOUNDS.stripe_bytes - blocks * BLOCK_BYTES;
            let limits = limits.map_or(Vec::new(), |limits| limits.to_vec());
            let reservations = reserved.map_or(Vec::new(), |reserved| reserved.to_vec());
            let entry = Entry { limits, reservations, ..entry(number, size_bytes, &runs) };
            table.volumes.insert(name.parse().expect("a name"), entry);
        }
        table
    })
}

proptest! {
    #[test]
    fn what_was_written_is_read_and_what_was_damaged_is_not(
        table in tables(), at in any::<prop::sample::Index>(), bit in 0..8u32, behind in 0..100usize,
    ) {
        let mut bytes = table.encode(&BOUNDS);
        let len = bytes.len();
        bytes.resize(len + behind, 0xee);
        prop_assert_eq!(Table::length(&bytes), Ok(len));
        prop_assert_eq!(Table::decode(&bytes, &BOUNDS), Ok(table));
        bytes[at.index(len)] ^= 1 << bit;
        prop_assert!(Table::decode(&bytes, &BOUNDS).is_err());
        prop_assert!(Table::decode(&bytes[..at.index(len)], &BOUNDS).is_err());
    }
}

#[test]
fn what_contradicts_itself_is_refused() {
    let stripe = BOUNDS.stripe_bytes;
    let decoded = |volumes: &[(&str, Entry)]| changed(&table(volumes), |_| {});
    let name = || "a".parse().expect("a name");
    let good = entry(1, stripe, &[8..9]);
    assert!(decoded(&[("a", good.clone()), ("b", entry(2, stripe, &[9..10]))]).is_ok());
    assert_eq!(
        decoded(&[("a", good.clone()), ("b", entry(1, stripe, &[9..10]))]),
        Err(TableFault::Uuid { uuid: Uuid::from_u128(1) })
    );
    assert_eq!(
        decoded(&[("a", entry(1, 5 * stripe, &[8..13])), ("b", entry(2, stripe, &[12..13]))]),
        Err(TableFault::Shared { stripe: 12 })
    );
    assert_eq!(
        decoded(&[("a", entry(1, 2 * stripe, &[9..10, 9..10]))]),
        Err(TableFault::Shared { stripe: 9 })
    );
    // Of the table, behind the end, or none.
    for (first, stripes) in [(7, 1), (0, 1), (999, 2), (1000, 1), (8, 0), (u64::MAX - 1, 1)] {
        let run = entry(1, stripes * stripe, &[first..first + stripes]);
        let outside = TableFault::Outside { name: name(), first, stripes };
        assert_eq!(decoded(&[("a", run)]), Err(outside));
    }
    for (size_bytes, stripes) in [(stripe, 2), (stripe + 4096, 1), (1, 1), (0, 0), (stripe - 1, 1)]
    {
        let runs: &[Run] = if stripes == 0 { &[] } else { &[8..8 + stripes] };
        let wrong = TableFault::Size { name: name(), size_bytes, stripes };
        assert_eq!(decoded(&[("a", entry(1, size_bytes, runs))]), Err(wrong));
    }
}

#[test]
fn fields_that_nobody_here_writes_are_refused() {
    let good = table(&[("a", entry(1, 4096, &[8..9])), ("b", entry(2, 4096, &[9..10]))]);
    let faults = |change: fn(&mut Vec<u8>)| changed(&good, change).expect_err("refused");
    let put = |bytes: &mut Vec<u8>, at: usize, value: u64, len: usize| {
        bytes[at..at + len].copy_from_slice(&value.to_le_bytes()[..len]);
    };
    assert_eq!(faults(|bytes| bytes[10] = 1), TableFault::Reserved);
    assert_eq!(faults(|bytes| bytes[63] = 1), TableFault::Reserved);
    assert_eq!(faults(|bytes| bytes[16..24].fill(255)), TableFault::Sequence);
    assert_eq!(faults(|bytes| bytes[32] = 1), TableFault::Stripes { stripe_bytes: 65_537 });
    // More volumes than there are, fewer, more runs, longer names and limits than the bytes have.
    for (at, value, len) in [(28, 3, 4), (28, 1, 4), (28, u64::MAX, 4), (64 + 24, u64::MAX, 4)] {
        let volumes = changed(&good, |bytes| put(bytes, at, value, len));
        assert_eq!(volumes, Err(TableFault::Volumes), "{at}");
    }
    assert_eq!(changed(&good, |bytes| put(bytes, 64 + 28, 60_000, 2)), Err(TableFault::Volumes));
    // Not in order, twice, no name.
    for name in [b'c', b'b', b'/', 0xff] {
        let at = HEADER_BYTES + VOLUME_BYTES + "default".len();
        let named = changed(&good, |bytes| bytes[at] = name);
        assert_eq!(named, Err(TableFault::Name), "{name}");
    }
    let mut later = good.encode(&BOUNDS);
    later[8] = 3;
    assert_eq!(Table::decode(&later, &BOUNDS), Err(TableFault::Version { version: 3 }));
    let mut long = good.encode(&BOUNDS);
    Table::seal(&mut long, u32::MAX);
    assert_eq!(Table::length(&long), Err(TableFault::Length { bytes: u32::MAX.into() }));
    assert_eq!(Table::decode(&[0; 4096], &BOUNDS), Err(TableFault::None));
    assert_eq!(Table::decode(&[], &BOUNDS), Err(TableFault::None));
}
