//! Lives of pools, by chance, against what is too simple to be wrong.

use super::*;
use crate::OrderError;
use levada_base::reactor::{Reactor, random_u64};
use levada_base::units::BLOCK_BYTES;
use std::collections::BTreeMap;

const LEVELS: [(Level, usize); 5] = [
    (Level::Raid6, 5),
    (Level::Raid1 { copies: 2 }, 3),
    (Level::Raid0, 3),
    (Level::Raid5, 3),
    (Level::Raid50 { groups: 2 }, 6),
];

fn random(below: u64) -> u64 {
    random_u64() % below
}

/// A pool in which `v` has its stripes in several places, all of which held another's bytes before.
async fn in_pieces(array: &RaidArray) -> Pool {
    let pool = pool(array).await;
    let stripe = array.geometry().stripe_bytes;
    for text in ["a", "b", "c", "d", "e"] {
        pool.create(&name(text), 2 * stripe).await.expect("created");
        fill(&*volume(&pool, text).await, 0xaa).await;
    }
    pool.create(&name("rest"), pool.free_bytes()).await.expect("created");
    for text in ["b", "d"] {
        pool.delete(&name(text), UNMEANT).await.expect("deleted");
    }
    pool.create(&name("v"), 3 * stripe + 3 * BLOCK_BYTES).await.expect("created");
    let runs = pool.runs();
    assert_eq!(runs.last().map(Vec::len), Some(2), "{runs:?}");
    pool
}

#[test]
fn a_volume_in_pieces_is_a_vector_of_bytes() {
    for (seed, (level, width)) in (0..).zip(LEVELS) {
        Reactor::simulated(seed).block_on(async {
            let array = array(level, &drives(width, 2 << 20)).await;
            let pool = in_pieces(&array).await;
            model::compare(&*volume(&pool, "v").await, 400).await;
            for text in ["a", "c", "e"] {
                assert!(holds(&*volume(&pool, text).await, 0xaa).await, "{level:?}: {text}");
            }
        });
    }
}

#[test]
fn so_it_is_while_members_fail() {
    for (seed, (level, width, fail)) in
        (10..).zip([(Level::Raid6, 5, 2), (Level::Raid5, 3, 1), (Level::Raid1 { copies: 2 }, 3, 1)])
    {
        Reactor::simulated(seed).block_on(async {
            let drives = drives(width, 2 << 20);
            let array = array(level, &drives).await;
            let pool = in_pieces(&array).await;
            for (drive, writes) in drives.iter().zip([80, 160]).take(fail) {
                drive.writes_left.set(Some(writes));
            }
            model::compare(&*volume(&pool, "v").await, 400).await;
            assert_eq!(array.status().degraded, fail, "they failed meanwhile");
            pool.resize(&name("v"), 4 * array.geometry().stripe_bytes, UNMEANT)
                .await
                .expect("grown");
            assert!(holds(&*volume(&pool, "a").await, 0xaa).await);
        });
    }
}

/// What a pool is: volumes, each a vector of bytes.
type Model = BTreeMap<VolumeName, Vec<u8>>;

/// One order by chance, done to both.
async fn order(pool: &Pool, model: &mut Model, stripe: u64, stripes: u64) {
    let which = name(["a", "b", "c", "d", "t/a", "t/b"][random(6) as usize]);
    let size = (1 + random(12 * stripe / BLOCK_BYTES)) * BLOCK_BYTES;
    let taken =
        |model: &Model| model.values().map(|v| (v.len() as u64).div_ceil(stripe)).sum::<u64>();
    let has = model.get(&which).map_or(0, |bytes| bytes.len() as u64);
    let needed = size.div_ceil(stripe).saturating_sub(has.div_ceil(stripe));
    let is_room = taken(model) + needed <= stripes;
    match random(8) {
        0 | 1 => {
            let made = pool.create(&which, size).await;
            match (has > 0, is_room) {
                (true, _) => assert_eq!(made, Err(OrderError::Exists { name: which })),
                (false, false) => {
                    assert!(matches!(made, Err(OrderError::NoRoom { .. })), "{made:?}")
                }
                (false, true) => {
                    assert_eq!(made, Ok(()));
                    model.insert(which, vec![0; size as usize]);
                }
            }
        }
        2 | 3 => {
            let resized = pool.resize(&which, size, MEANT).await;
            match (has > 0, is_room) {
                (false, _) => assert_eq!(resized, Err(OrderError::Missing { name: which })),
                (true, false) => {
                    assert!(matches!(resized, Err(OrderError::NoRoom { .. })), "{resized:?}");
                }
                (true, true) => {
                    assert_eq!(resized, Ok(()));
                    model.get_mut(&which).expect("there").resize(size as usize, 0);
                }
            }
        }
        4 => {
            let deleted = pool.delete(&which, UNMEANT).await;
            let there = model.remove(&which).is_some();
            assert_eq!(deleted.is_ok(), there, "{deleted:?}");
        }
        5 => {
            let to = VolumeName::new(which.tenant.clone(), "renamed").expect("a name");
            let renamed = pool.rename(&which, &to).await;
            let can_be = has > 0 && !model.contains_key(&to);
            assert_eq!(renamed.is_ok(), can_be, "{renamed:?}");
            if can_be {
                let bytes = model.remove(&which).expect("there");
                model.insert(to, bytes);
            }
        }
        _ if has > 0 => {
            let volume = pool.volume(&which).await.expect("there");
            let at = random(has);
            let bytes = (1 + random(has - at)).min(100_000);
            let data = Buf::copy_of(&vec![random(255) as u8 + 1; bytes as usize]);
            let into = &mut model.get_mut(&which).expect("there")[at as usize..][..data.len()];
            into.copy_from_slice(&data);
            volume.write(at, data.into_vec(), Durability::Volatile).await.expect("written");
        }
        _ => assert!(pool.volume(&which).await.is_err()),
    }
}

#[test]
fn orders_by_chance_do_what_they_would_to_vectors_of_bytes() {
    for (seed, (level, width)) in (0..).zip(LEVELS.into_iter().chain(LEVELS)) {
        Reactor::simulated(100 + seed).block_on(async {
            let drives = drives(width, 1 << 20);
            let mut array = array(level, &drives).await;
            let mut pool = pool(&array).await;
            let stripe = array.geometry().stripe_bytes;
            let stripes = pool.free_bytes() / stripe;
            let mut model = Model::new();
            for round in 0..150 {
                order(&pool, &mut model, stripe, stripes).await;
                if round % 10 == 9 {
                    check_stripes(&pool);
                    if random(2) == 0 {
                        drop(pool);
                        array.close().await.expect("closed");
                        array = reopened(&drives, 2 + round).await;
                        pool = opened(&array).await;
                    }
                    let told = pool.list(None);
                    let names: Vec<_> =
                        told.into_iter().map(|row| (row.name, row.size_bytes)).collect();
                    let sizes = model.iter().map(|(name, v)| (name.clone(), v.len() as u64));
                    assert_eq!(names, sizes.collect::<Vec<_>>());
                    for (name, bytes) in &model {
                        let volume = pool.volume(name).await.expect("there");
                        let read = model::read(&*volume, 0, bytes.len() as u64).await;
                        assert!(read == *bytes, "{level:?}, round {round}: {name}");
                    }
                }
            }
        });
    }
}
