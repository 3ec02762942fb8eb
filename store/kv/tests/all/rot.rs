//! A store on a mirror one of whose drives is wrong wherever it is read: nobody notices.

use levada_base::ids::Uuid;
use levada_base::reactor::{self, Reactor};
use levada_base::units::{BLOCK_BYTES, KIB, MIB};
use levada_base::{BufMut, Epoch};
use levada_device::{Device, FaultDevice, Faults, RamDevice};
use levada_kv::{Batch, Config, Store};
use levada_raid::{ArraySpec, Level, Limits, MemberSpec, RaidArray, Recorded};
use std::ops::Bound;
use std::rc::Rc;

const CONFIG: Config = Config { log_bytes: 256 << 10, cache_bytes: 64 << 10 };
const DRIVE_BYTES: u64 = 6 * MIB;
const ARRAY: Uuid = Uuid::from_u128(9);
const ROWS: u64 = 4000;

fn key(number: u64) -> [u8; 8] {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()
}

fn value(number: u64) -> Vec<u8> {
    vec![number as u8; 40 + number as usize % 300]
}

/// Every block of the drive's data reads with one wrong byte.
async fn rot(drive: &dyn Device, faults: &Faults) {
    let into = BufMut::for_overwrite(Recorded::BYTES as usize).into_vec();
    let superblock = drive.read(0, into).await.expect("reads");
    let data_at = Recorded::decode(&superblock[0], ARRAY).expect("a member").data_at;
    for block in data_at / BLOCK_BYTES..DRIVE_BYTES / BLOCK_BYTES {
        faults.rot(block * BLOCK_BYTES + reactor::random_u64() % BLOCK_BYTES, 1, 0x10);
    }
}

async fn check(store: &Store) {
    for number in 0..ROWS {
        let found = store.get(&key(number)).await.expect("reads");
        assert_eq!(found.as_deref(), Some(&value(number)[..]), "row {number}");
    }
    let rows = store.scan(Bound::Unbounded, Bound::Unbounded, 2 * ROWS as usize).await;
    assert_eq!(rows.expect("scans").len() as u64, ROWS);
}

#[test]
fn a_drive_that_is_wrong_everywhere_is_outvoted() {
    for bad in 0..3 {
        Reactor::simulated(bad as u64).block_on(async {
            let faults = Faults::none();
            let drives: Vec<Rc<dyn Device>> = (0..3)
                .map(|number| {
                    let drive = Rc::new(RamDevice::new(&format!("drive-{number}"), DRIVE_BYTES));
                    match number == bad {
                        true => Rc::new(FaultDevice::new(drive, faults.clone())) as Rc<dyn Device>,
                        false => drive,
                    }
                })
                .collect();
            let member = |(number, device)| MemberSpec {
                device,
                uuid: Uuid::from_u128(100 + number as u128),
                name: format!("drive-{number}"),
                enclosure: number as u16,
            };
            let spec = ArraySpec {
                uuid: ARRAY,
                name: "meta".to_owned(),
                level: Level::Raid1 { copies: 3 },
                chunk_bytes: 64 * KIB,
                block_bytes: None,
                journal_bytes: None,
                members: drives.iter().cloned().enumerate().map(member).collect(),
                spares: 0,
            };
            let array = RaidArray::create(spec, Epoch(1)).await.expect("made");
            let store = Store::create(Rc::new(array), Epoch(1), CONFIG).await.expect("made");
            for number in 0..ROWS {
                let mut batch = Batch::default();
                batch.put(&key(number), &value(number));
                store.room().await.expect("room");
                let seq = store.apply(batch).expect("runs");
                if number % 64 == 0 || number + 1 == ROWS {
                    store.durable(seq).await.expect("durable");
                }
            }
            // Left as a crash leaves it: the newest rows are in the log alone.
            drop(store);
            for epoch in 2..4 {
                let found = drives.clone();
                let opened = RaidArray::open(ARRAY, found, Epoch(epoch), false).await;
                let (array, _) = opened.expect("opens");
                rot(&*drives[bad], &faults).await;
                let store = Store::open(Rc::new(array.clone()), Epoch(epoch), CONFIG).await;
                let store = store.expect("opens");
                check(&store).await;
                store.close().await.expect("closes");
                let members = array.status().members;
                assert!(members[bad].repairs > 0, "nothing was read from the bad drive");
                let scrubbed = array.scrub(Limits::NONE).await.expect("scrubbed");
                assert_eq!(scrubbed.mismatched, 0);
                array.close().await.expect("closes");
            }
        });
    }
}
