//! Arrays against a flat array of bytes: any range, any split into buffers, any members away.

use crate::common::{BLOCK, Rig, pattern};
use levada_base::reactor::Reactor;
use levada_base::{BufMut, IoVec, IoVecMut};
use levada_device::{Device, Durability};
use levada_raid::{
    Array, ArrayGeometry, ByteRange, IoClass, Level, MemberSet, RaidArray, StripeRange,
};
use proptest::prelude::*;
use std::rc::Rc;

/// Buffers of these many blocks each, cut to `blocks` in all; at least one.
fn shape(parts: &[usize], blocks: usize) -> Vec<usize> {
    let mut left = blocks;
    let mut shape = Vec::new();
    for part in parts {
        let part = (*part).min(left);
        if part > 0 {
            shape.push(part * BLOCK);
        }
        left -= part;
    }
    if left > 0 {
        shape.push(left * BLOCK);
    }
    shape
}

fn gather(data: &[u8], shape: &[usize]) -> IoVec {
    let mut at = 0;
    let buffers = shape.iter().map(|bytes| {
        at += bytes;
        BufMut::copy_of(&data[at - bytes..at]).freeze()
    });
    buffers.collect()
}

async fn check(
    array: &dyn Array,
    model: &[u8],
    at: usize,
    shape: &[usize],
    avoid: MemberSet,
) -> Result<(), TestCaseError> {
    let bytes: usize = shape.iter().sum();
    // One allocation, as a caller would split it, filled with rubbish.
    let mut whole = BufMut::for_overwrite(bytes);
    whole.fill(0xee);
    let into: IoVecMut = shape.iter().map(|bytes| whole.split_to(*bytes)).collect();
    let parts = array.read_avoiding(at as u64, into, avoid, IoClass::Foreground).await;
    let parts = parts.map_err(|error| TestCaseError::fail(error.to_string()))?;
    prop_assert_eq!(parts.iter().map(|part| part.len()).collect::<Vec<_>>(), shape);
    let read = levada_base::buf::joined(&parts);
    prop_assert!(read == model[at..at + bytes]);
    // Whether it goes this way or not, it must be right.
    if let Some(read) = crate::common::read_lent(array, at as u64, shape).await {
        prop_assert!(read == model[at..at + bytes]);
    }
    Ok(())
}

fn reads() -> impl Strategy<Value = Vec<(usize, usize, Vec<usize>)>> {
    prop::collection::vec((0..200usize, 1..60usize, prop::collection::vec(1..9usize, 0..5)), 1..10)
}

fn levels_with_parity() -> impl Strategy<Value = (Level, usize)> {
    prop_oneof![
        (2..9usize).prop_map(|width| (Level::Raid5, width)),
        (3..9usize).prop_map(|width| (Level::Raid6, width)),
        (2..5usize).prop_map(|each| (Level::Raid50 { groups: 3 }, 3 * each)),
        (3..6usize).prop_map(|each| (Level::Raid60 { groups: 2 }, 2 * each)),
        (1..5usize, 1..8usize).prop_map(|(parity, data)| (Level::NPlusM { parity }, data + parity)),
    ]
}

async fn check_reads(
    array: &dyn Array,
    model: &[u8],
    reads: &[(usize, usize, Vec<usize>)],
    avoid: MemberSet,
) -> Result<(), TestCaseError> {
    let all_blocks = model.len() / BLOCK;
    for (block, blocks, parts) in reads {
        let block = block % all_blocks;
        let blocks = (*blocks).min(all_blocks - block);
        check(array, model, block * BLOCK, &shape(parts, blocks), avoid).await?;
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Parity, some stripes written, as many members lost while the array runs as the level bears.
    #[test]
    fn parity_reads_what_was_written(
        (level, width) in levels_with_parity(),
        chunk_blocks in 1..5u64,
        written in prop::collection::vec(any::<bool>(), 12),
        parts in prop::collection::vec(1..9usize, 0..12),
        lost in prop::collection::hash_set(0..12usize, 0..5),
        reads in reads(),
    ) {
        Reactor::simulated(1).block_on(async {
            let rig = Rig::new(level, width, 0, chunk_blocks * BLOCK as u64, 12);
            let array = rig.create().await;
            let stripe_bytes = array.geometry().stripe_bytes as usize;
            let mut model = vec![0; 12 * stripe_bytes];
            let shape = shape(&parts, stripe_bytes / BLOCK);
            for stripe in (0..12).filter(|stripe| written[*stripe]) {
                let at = stripe * stripe_bytes;
                model[at..at + stripe_bytes].copy_from_slice(&pattern(at as u64, stripe_bytes, 1));
                array.declare_fresh(stripe as u64, 1).await.expect("declared");
                let data = gather(&model[at..at + stripe_bytes], &shape);
                let done = array.write_fresh(stripe as u64, data, IoClass::Foreground).await;
                done.expect("written");
            }
            check_reads(&array, &model, &reads, MemberSet::NONE).await?;
            let lost: Vec<usize> = lost
                .into_iter()
                .filter(|member| *member < width)
                .take(level.tolerates())
                .collect();
            let avoid = lost.iter().fold(MemberSet::NONE, |set, member| set.with(*member));
            check_reads(&array, &model, &reads, avoid).await?;
            for member in &lost {
                rig.drives[*member].pull();
            }
            // Once with the failures still to be noticed, once with them known.
            check_reads(&array, &model, &reads, MemberSet::NONE).await?;
            check_reads(&array, &model, &reads, MemberSet::NONE).await
        })?;
    }

    /// Writes, zeroes and discards of any range, on every level.
    #[test]
    fn overwrites_agree_with_a_flat_array(
        (level, width) in prop_oneof![
            (3..8usize).prop_map(|width| (Level::Raid0, width)),
            (3..8usize).prop_map(|width| (Level::Raid1 { copies: 3 }, width)),
            levels_with_parity(),
            levels_with_parity(),
        ],
        chunk_blocks in 1..5u64,
        changes in prop::collection::vec(
            (0..200usize, 1..30usize, prop::collection::vec(1..9usize, 0..4), 0..10u8), 1..16),
        (lost, lost_after) in (prop::collection::vec(0..12usize, 0..4), 0..16usize),
        reads in reads(),
    ) {
        Reactor::simulated(1).block_on(async {
            let rig = Rig::new(level, width, 0, chunk_blocks * BLOCK as u64, 9);
            let array = rig.create().await;
            let stripe_bytes = array.geometry().stripe_bytes as usize;
            let all_blocks = 6 * stripe_bytes / BLOCK;
            let mut model = vec![0; all_blocks * BLOCK];
            let mut lost: Vec<usize> = lost.into_iter().filter(|lost| *lost < width).collect();
            lost.sort_unstable();
            lost.dedup();
            lost.truncate(level.tolerates());
            for (version, (block, blocks, parts, kind)) in changes.into_iter().enumerate() {
                if version == lost_after {
                    lost.iter().for_each(|lost| rig.drives[*lost].pull());
                }
                let block = block % all_blocks;
                let blocks = blocks.min(all_blocks - block);
                let (at, bytes) = (block * BLOCK, blocks * BLOCK);
                match kind {
                    0 => {
                        array.write_zeroes(at as u64, bytes as u64).await.expect("zeroed");
                        model[at..at + bytes].fill(0);
                    }
                    1 => {
                        array.discard(at as u64, bytes as u64).await.expect("discarded");
                        let whole = at.next_multiple_of(stripe_bytes)..(at + bytes) / stripe_bytes * stripe_bytes;
                        if !whole.is_empty() {
                            model[whole].fill(0);
                        }
                    }
                    _ => {
                        model[at..at + bytes].copy_from_slice(&pattern(at as u64, bytes, version as u64 + 1));
                        let data = gather(&model[at..at + bytes], &shape(&parts, blocks));
                        array.write(at as u64, data, Durability::Volatile).await.expect("written");
                    }
                }
            }
            check_reads(&array, &model, &reads, MemberSet::NONE).await?;
            lost.iter().for_each(|lost| rig.drives[*lost].pull());
            check_reads(&array, &model, &reads, MemberSet::NONE).await?;
            // Of the others, so that parity is looked at.
            for first in 0..width - level.tolerates().min(width) {
                let avoid = (first..first + level.tolerates() - lost.len())
                    .filter(|member| !lost.contains(member))
                    .fold(MemberSet::NONE, |set, member| set.with(member));
                check_reads(&array, &model, &reads, avoid).await?;
            }
            Ok::<(), TestCaseError>(())
        })?;
    }
}

#[test]
fn views_stay_in_their_range() {
    Reactor::simulated(1).block_on(async {
        let rig = Rig::new(Level::Raid6, 6, 0, 8 << 10, 20);
        let array: Rc<RaidArray> = Rc::new(rig.create().await);
        let stripe_bytes = array.geometry().stripe_bytes;
        let view =
            StripeRange::new("ost0", Rc::clone(&array) as Rc<dyn Array>, 5, 4).expect("inside");
        assert_eq!(view.geometry(), ArrayGeometry { stripes: 4, ..array.geometry() });
        view.declare_fresh(0, 4).await.expect("declared");
        assert!(view.declare_fresh(2, 3).await.is_err());
        let data = pattern(0, stripe_bytes as usize, 1);
        let write = view.write_fresh(3, data.clone().into_vec(), IoClass::Foreground);
        write.await.expect("written");
        let at = 3 * stripe_bytes;
        assert_eq!(crate::common::read(&view, at, data.len()).await.as_deref(), Ok(&data[..]));
        let whole = crate::common::read(&*array, 8 * stripe_bytes, data.len()).await;
        assert_eq!(whole.as_deref(), Ok(&data[..]));
        assert!(crate::common::read(&view, at + BLOCK as u64, data.len()).await.is_err());
        assert!(view.is_written(3) && !view.is_written(4) && array.is_written(8));
        assert_eq!(view.members_of(at, 1 << 12), array.members_of(8 * stripe_bytes, 1 << 12));
        assert!(StripeRange::new("x", Rc::clone(&array) as Rc<dyn Array>, 5, u64::MAX).is_err());

        let mirror = Rig::new(Level::Raid1 { copies: 3 }, 6, 0, 16 << 10, 9).create().await;
        let mirror: Rc<dyn Device> = Rc::new(mirror);
        let window = ByteRange::new("mdt0", Rc::clone(&mirror), 1 << 14, 1 << 15).expect("inside");
        let block = pattern(0, BLOCK, 2);
        window.write(4096, block.clone().into_vec(), Durability::Fua).await.expect("written");
        let there = crate::common::read(&*mirror, (1 << 14) + 4096, BLOCK).await;
        assert_eq!(there.as_deref(), Ok(&block[..]));
        assert!(window.write(1 << 15, block.into_vec(), Durability::Fua).await.is_err());
    });
}
