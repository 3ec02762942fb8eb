//! What is refused, and who hears of what.

use super::*;
use crate::linear::table::{Bounds, MAGIC};
use crate::qos::{Limits, Rates};
use crate::{OrderError, PoolError, TableFault, VolumeError};
use futures_util::future::{join, join_all};
use levada_base::BufMut;
use levada_base::reactor::{self, Reactor};
use levada_base::units::{BLOCK_BYTES, MIB};
use std::time::Duration;

async fn small(drive_bytes: u64) -> (Vec<Rc<Drive>>, RaidArray) {
    let drives = drives(3, drive_bytes);
    let array = array(Level::Raid5, &drives).await;
    (drives, array)
}

async fn write(array: &RaidArray, at: u64, bytes: &[u8]) {
    let mut block = BufMut::zeroed(BLOCK_BYTES as usize);
    block[..bytes.len()].copy_from_slice(bytes);
    array.write(at, block.freeze().into_vec(), Durability::Fua).await.expect("written");
}

async fn make(array: &RaidArray, anyway: Anyway) -> Result<(), PoolError> {
    Pool::make(shared(array), "data", anyway).await.map(drop)
}

async fn open(array: &RaidArray) -> Result<bool, PoolError> {
    Ok(Pool::open(shared(array), "data").await?.is_some())
}

#[test]
fn what_an_array_holds_is_not_overwritten_unasked() {
    Reactor::simulated(1).block_on(async {
        let holds = || Err(PoolError::Holds { array: "data".into() });
        for at in [0, 1 << 10, 300 << 10, MIB] {
            let (_, array) = small(MIB).await;
            write(&array, at / BLOCK_BYTES * BLOCK_BYTES, b"a file system").await;
            assert_eq!(open(&array).await, Ok(false));
            assert_eq!(make(&array, UNMEANT).await, holds(), "at {at}");
            let read = array.read(at / BLOCK_BYTES * BLOCK_BYTES, BufMut::zeroed(4096).into_vec());
            assert_eq!(&read.await.expect("read")[0][..6], b"a file", "unchanged");
            assert_eq!(make(&array, MEANT).await, Ok(()));
            let pool = opened(&array).await;
            pool.create(&name("all"), pool.free_bytes()).await.expect("created");
            assert!(super::holds(&*volume(&pool, "all").await, 0).await);
            let already = || Err(PoolError::Already { array: "data".into() });
            assert_eq!(make(&array, UNMEANT).await, already());
            assert_eq!(make(&array, MEANT).await, already(), "volumes are deleted one by one");
        }
        // Zeroes are nothing.
        let (_, array) = small(MIB).await;
        write(&array, 0, b"").await;
        assert_eq!(make(&array, UNMEANT).await, Ok(()));
        let (_, array) = small(500 << 10).await;
        assert!(matches!(make(&array, MEANT).await, Err(PoolError::TooSmall { .. })));
        assert_eq!(open(&array).await, Ok(false));
    });
}

/// Damages copies of the table, once each of them is the newer one.
#[test]
fn a_damaged_copy_is_put_right_and_two_are_told() {
    Reactor::simulated(1).block_on(async {
        let (_, array) = small(MIB).await;
        let bounds = Bounds::of(array.geometry());
        pool(&array).await.create(&name("v"), 100 << 10).await.expect("created");
        for copy in [0, 1, 0] {
            write(&array, bounds.copy_at(copy), b"whatever").await;
            assert_eq!(opened(&array).await.list(None).len(), 1);
        }
        let damaged =
            [MAGIC as &[u8], &[1, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 64]].concat();
        write(&array, bounds.copy_at(0), &damaged).await;
        write(&array, bounds.copy_at(1), b"").await;
        let copies = Box::new([TableFault::Checksum, TableFault::None]);
        let fault = PoolError::Damaged { array: "data".into(), copies };
        assert_eq!(open(&array).await, Err(fault.clone()));
        assert_eq!(make(&array, UNMEANT).await, Err(fault));
        assert_eq!(make(&array, MEANT).await, Ok(()));
        assert_eq!(opened(&array).await.list(None), []);
        write(&array, bounds.copy_at(1), &[MAGIC as &[u8], &[3, 0]].concat()).await;
        let newer =
            PoolError::Newer { array: "data".into(), fault: TableFault::Version { version: 3 } };
        assert_eq!(open(&array).await, Err(newer.clone()));
        assert_eq!(make(&array, MEANT).await, Err(newer), "also when it is meant");
    });
}

/// On a level without redundancy, so that what a drive cannot read the array cannot.
#[test]
fn a_copy_that_cannot_be_read_is_put_right_and_two_are_told() {
    Reactor::simulated(1).block_on(async {
        let drives = drives(2, 2 * MIB);
        let array = array(Level::Raid0, &drives).await;
        pool(&array).await.create(&name("v"), 100 << 10).await.expect("created");
        let copies = drives[0].blocks_with(MAGIC);
        assert_eq!(copies.len(), 2, "the first chunk of a stripe is the first drive's");
        for copy in [0, 1, 0] {
            drives[0].make_unreadable(copies[copy]);
            assert_eq!(opened(&array).await.list(None).len(), 1);
            opened(&array).await.rename(&name("v"), &name("w")).await.expect("renamed");
            opened(&array).await.rename(&name("w"), &name("v")).await.expect("and back");
        }
        copies.iter().for_each(|copy| drives[0].make_unreadable(*copy));
        let copies = Box::new([TableFault::Unreadable, TableFault::Unreadable]);
        assert_eq!(open(&array).await, Err(PoolError::Damaged { array: "data".into(), copies }));
    });
}

#[test]
fn orders_that_cannot_be_are_refused_and_change_nothing() {
    Reactor::simulated(1).block_on(async {
        let (_, array) = small(2 * MIB).await;
        let (pool, stripe) = (pool(&array).await, array.geometry().stripe_bytes);
        let (v, w, none) = (name("v"), name("w"), name("none"));
        let missing = || Err(OrderError::Missing { name: none.clone() });
        for bytes in [0, 1, 4095, u64::MAX, u64::MAX - 4095] {
            assert_eq!(pool.create(&v, bytes).await, Err(OrderError::Size { bytes }));
        }
        pool.create(&v, 4 * stripe).await.expect("created");
        assert_eq!(pool.create(&v, stripe).await, Err(OrderError::Exists { name: v.clone() }));
        let free_bytes = pool.free_bytes();
        let bytes = free_bytes + stripe;
        let full = || Err(OrderError::NoRoom { array: "data".into(), bytes, free_bytes });
        assert_eq!(pool.create(&w, free_bytes + BLOCK_BYTES).await, full());
        assert_eq!(pool.resize(&v, 5 * stripe + free_bytes, UNMEANT).await, full());
        assert!(matches!(
            pool.create(&w, i64::MAX as u64 / 4096 * 4096).await,
            Err(OrderError::NoRoom { .. })
        ));
        assert_eq!(pool.resize(&none, stripe, UNMEANT).await, missing());
        assert_eq!(pool.delete(&none, MEANT).await, missing());
        assert_eq!(pool.rename(&none, &w).await, missing());
        assert_eq!(pool.set_limits(&none, &Limits::NONE).await, missing());
        assert_eq!(pool.limits(&none).map(drop), missing());
        assert_eq!(pool.rename(&v, &v).await, Err(OrderError::Exists { name: v.clone() }));
        let other = name("blue/v");
        assert!(matches!(pool.rename(&v, &other).await, Err(OrderError::OtherTenant { .. })));

        // Behind the new end is data, as far as stripes tell.
        let open = volume(&pool, "v").await;
        let data = || Buf::copy_of(&[7; 100]).into_vec();
        open.write(3 * stripe + 5, data(), Durability::Volatile).await.expect("written");
        let cut = |bytes, data_at| Err(OrderError::WouldCut { name: v.clone(), bytes, data_at });
        assert_eq!(pool.resize(&v, 2 * stripe, UNMEANT).await, cut(2 * stripe, 3 * stripe));
        let inside = 3 * stripe + BLOCK_BYTES;
        assert_eq!(pool.resize(&v, inside, UNMEANT).await, cut(inside, inside));
        open.discard(3 * stripe, stripe).await.expect("discarded");
        pool.resize(&v, 2 * stripe, UNMEANT).await.expect("nothing is there");
        let size_bytes = 2 * stripe;
        let outside = VolumeError::OutOfRange { at: 3 * stripe, bytes: 100, size_bytes };
        assert_eq!(open.write(3 * stripe, data(), Durability::Volatile).await, Err(outside));
        assert_eq!(
            pool.delete(&v, UNMEANT).await,
            Err(OrderError::InUse { name: v.clone(), users: 1 })
        );
        drop(open);
        pool.delete(&v, UNMEANT).await.expect("nobody uses it");
        assert_eq!((pool.list(None), pool.free_bytes()), (vec![], free_bytes + 4 * stripe));
    });
}

#[test]
fn tenants_names_and_limits_outlast_a_restart() {
    Reactor::simulated(1).block_on(async {
        let (drives, array) = small(2 * MIB).await;
        let pool = pool(&array).await;
        for text in ["v", "blue/v", "blue/w"] {
            pool.create(&name(text), MIB / 8).await.expect("created");
        }
        assert_eq!(pool.limits(&name("v")), Ok(Limits::NONE));
        let cap = Rates { iops: Some(500), bytes_per_s: None };
        let limits = Limits { cap, ..Limits::NONE };
        pool.set_limits(&name("blue/v"), &limits).await.expect("kept");
        let id =
            pool.list(None).into_iter().find(|row| row.name == name("blue/v")).expect("there").id;
        pool.keep_reservations(id, b"mine".to_vec()).await.expect("kept");
        pool.rename(&name("blue/v"), &name("blue/x")).await.expect("renamed");
        drop(pool);
        array.close().await.expect("closed");
        let array = reopened(&drives, 2).await;
        let pool = opened(&array).await;
        let names = |tenant: Option<&str>| {
            let tenant = tenant.map(|tenant| tenant.parse().expect("a name"));
            let rows = pool.list(tenant.as_ref()).into_iter();
            rows.map(|row| row.name.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(names(None), ["blue/w", "blue/x", "v"]);
        assert_eq!(names(Some("blue")), ["blue/w", "blue/x"]);
        assert_eq!(names(Some("red")), Vec::<String>::new());
        assert_eq!(pool.limits(&name("blue/x")), Ok(limits));
        let id =
            pool.list(None).into_iter().find(|row| row.name == name("blue/x")).expect("there").id;
        assert_eq!(pool.reservations(id), b"mine", "they go with the volume");
    });
}

#[test]
fn a_full_table_is_told_and_stays_as_it_is() {
    Reactor::simulated(1).block_on(async {
        let drives = drives(3, 128 * MIB);
        let array = array(Level::Raid5, &drives).await;
        let pool = pool(&array).await;
        let long = |number: u64| name(&format!("{}/{number:063}", "t".repeat(63)));
        let mut made = 0;
        let refused = loop {
            match pool.create(&long(made), BLOCK_BYTES).await {
                Ok(()) => made += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(refused, OrderError::TableFull { array: "data".into() });
        // 32 and 2 * 63 bytes each, and a run.
        assert_eq!(made, (256 * 1024 - 64) / (32 + 126 + 16));
        assert!(pool.free_bytes() > 0);
        assert_eq!(opened(&array).await.list(None).len() as u64, made);
        pool.delete(&long(3), UNMEANT).await.expect("deleted");
        pool.create(&long(3), BLOCK_BYTES).await.expect("there is room again");
    });
}

/// Requests to stripes that go to somebody else end before they do.
#[test]
fn who_uses_what_is_deleted_or_cut_off_hears_of_it_and_harms_nobody() {
    for seed in 0..20 {
        Reactor::simulated(seed).block_on(async {
            let (drives, array) = small(2 * MIB).await;
            let pool = pool(&array).await;
            let stripe = array.geometry().stripe_bytes;
            drives.iter().for_each(|drive| drive.delay_us.set(30));
            pool.create(&name("old"), pool.free_bytes()).await.expect("created");
            let old = volume(&pool, "old").await;
            let size = old.size_bytes();
            let writer = async |number: u64| {
                let mut refused = 0;
                for round in 0..10_000u64 {
                    if refused > 3 {
                        break;
                    }
                    let at = (number * 7919 + round * 104_729) % (size - 9000);
                    let data = Buf::copy_of(&[0xbb; 9000]).into_vec();
                    match old.write(at, data, Durability::Volatile).await {
                        Ok(()) => assert_eq!(refused, 0, "refused once, refused for good"),
                        Err(VolumeError::Deleted) => refused += 1,
                        Err(error) => assert!(matches!(error, VolumeError::OutOfRange { .. })),
                    }
                    reactor::sleep(Duration::from_micros(1 + number)).await;
                }
                refused
            };
            let orders = async {
                reactor::sleep(Duration::from_micros(200 + 10 * seed)).await;
                pool.resize(&name("old"), size / 2 / stripe * stripe, MEANT).await.expect("cut");
                pool.create(&name("new"), pool.free_bytes()).await.expect("created");
                let new = volume(&pool, "new").await;
                assert!(holds(&new, 0).await);
                reactor::sleep(Duration::from_micros(300)).await;
                pool.delete(&name("old"), MEANT).await.expect("deleted");
                pool.create(&name("newer"), pool.free_bytes()).await.expect("created");
                new
            };
            let (new, refused) = join(orders, join_all((0..8).map(writer))).await;
            assert!(refused.iter().all(|refused| *refused > 0), "{refused:?}");
            assert!(holds(&new, 0).await && holds(&*volume(&pool, "newer").await, 0).await);
            assert_eq!(old.flush().await, Err(VolumeError::Deleted));
            assert_eq!(old.read(0, 1).await.map(drop), Err(VolumeError::Deleted));
        });
    }
}

/// A write that has read the edges of its blocks, and is about to write them.
#[test]
fn a_write_under_way_ends_before_its_stripes_are_somebody_elses() {
    for seed in 0..10 {
        Reactor::simulated(seed).block_on(async {
            let (drives, array) = small(2 * MIB).await;
            let pool = pool(&array).await;
            let stripe = array.geometry().stripe_bytes;
            let (old, size) = (name("old"), pool.free_bytes());
            for left in [Some(size / 2 / stripe * stripe), None] {
                pool.create(&old, pool.free_bytes()).await.expect("created");
                let open = pool.volume(&old).await.expect("there");
                fill(&open, 1).await;
                drives.iter().for_each(|drive| drive.delay_us.set(10_000));
                let write = reactor::spawn(async move {
                    let data = Buf::copy_of(&[0xbb; 5000]).into_vec();
                    open.write(open.size_bytes() - 5001, data, Durability::Volatile).await
                });
                reactor::sleep(Duration::from_micros(1)).await;
                drives.iter().for_each(|drive| drive.delay_us.set(0));
                match left {
                    Some(bytes) => pool.resize(&old, bytes, MEANT).await.expect("cut"),
                    None => pool.delete(&old, MEANT).await.expect("deleted"),
                }
                pool.create(&name("new"), pool.free_bytes()).await.expect("created");
                assert_eq!(write.await.expect("not killed"), Ok(()), "it was there first");
                assert!(holds(&*volume(&pool, "new").await, 0).await, "{left:?}");
                for row in pool.list(None) {
                    pool.delete(&row.name, UNMEANT).await.expect("deleted");
                }
            }
        });
    }
}

/// Whether an order that was cut short was carried out is not known: so none is until the array is opened anew.
#[test]
fn after_a_table_that_could_not_be_written_stripes_stay_where_they_are() {
    Reactor::simulated(1).block_on(async {
        let (drives, array) = small(2 * MIB).await;
        let pool = pool(&array).await;
        pool.create(&name("v"), MIB).await.expect("created");
        let open = volume(&pool, "v").await;
        fill(&open, 1).await;
        drives[..2].iter().for_each(|drive| drive.writes_left.set(Some(0)));
        assert!(matches!(pool.delete(&name("v"), MEANT).await, Err(OrderError::Block(_))));
        let unsettled = || Err(OrderError::PoolUnsettled { array: "data".into() });
        assert_eq!(pool.create(&name("w"), BLOCK_BYTES).await, unsettled());
        assert_eq!(pool.delete(&name("v"), MEANT).await, unsettled());
        let data = Buf::copy_of(&[7; 100]).into_vec();
        assert_eq!(open.write(0, data, Durability::Fua).await, Err(VolumeError::Deleted));
    });
}
