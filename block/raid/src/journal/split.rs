//! Contents of a record cut into fragments, with parity beside them, so that M + 1 copies of them need not be written: of k
//! fragments and M of parity any k tell all. Arithmetic only.
//!
//! Fragment i holds the blocks from i * ceil(blocks / k) on, filled up with zeroes. Parity is that of the level, of k chunks.

use levada_base::units::BLOCK_BYTES;
use levada_base::{Buf, BufMut, IoVec};
use levada_parity::{Code, Slot};
use smallvec::SmallVec;

const BLOCK: usize = BLOCK_BYTES as usize;
/// What a request costs a member besides its bytes, in blocks of those: 16 KiB is between what fast and slow flash takes.
const REQUEST_BLOCKS: u64 = 4;

/// Into how many fragments contents of so many blocks are best cut, where so many members could hold one: what costs all
/// members together the least. 1: every holder gets all of them.
pub(crate) fn fragments_for(blocks: u64, parity: usize, holders: usize) -> usize {
    let cost = |data: usize| {
        let of_each = REQUEST_BLOCKS + 1 + blocks.div_ceil(data as u64);
        (data + parity) as u64 * of_each
    };
    (1..=holders.saturating_sub(parity).max(1)).min_by_key(|data| cost(*data)).unwrap_or(1)
}

/// The fragments of `contents`, whole blocks, by their numbers: data first, then parity.
pub(crate) fn split(contents: &[Buf], code: &Code) -> Vec<IoVec> {
    let blocks: Vec<(&Buf, usize)> = contents
        .iter()
        .flat_map(|part| (0..part.len()).step_by(BLOCK).map(move |at| (part, at)))
        .collect();
    let of_each = blocks.len().div_ceil(code.data_chunks());
    let nothing = BufMut::zeroed(BLOCK).freeze();
    let mut fragments: Vec<IoVec> =
        (0..code.data_chunks()).map(|_| IoVec::with_capacity(of_each)).collect();
    for (number, fragment) in fragments.iter_mut().enumerate() {
        let block = |at: usize| match blocks.get(at) {
            Some((part, start)) => part.slice(*start, BLOCK),
            None => nothing.clone(),
        };
        fragment.extend((number * of_each..(number + 1) * of_each).map(block));
    }
    let mut parity: Vec<BufMut> =
        (0..code.parity_chunks()).map(|_| BufMut::for_overwrite(of_each * BLOCK)).collect();
    for row in 0..of_each {
        let data: SmallVec<[&[u8]; 16]> =
            fragments.iter().map(|fragment| &fragment[row][..]).collect();
        let mut into: SmallVec<[&mut [u8]; 4]> =
            parity.iter_mut().map(|to| &mut to[row * BLOCK..(row + 1) * BLOCK]).collect();
        code.encode(&data, &mut into);
    }
    fragments.extend(parity.into_iter().map(|parity| parity.freeze().into_vec()));
    fragments
}

/// `bytes` of contents from fragments of one length, by their numbers. `None` when they are too few.
pub(crate) fn join(fragments: &[Option<&[u8]>], code: &Code, bytes: usize) -> Option<Vec<u8>> {
    let of_each = fragments.iter().flatten().next()?.len();
    let data = code.data_chunks();
    let mut contents = vec![0; of_each * data];
    let mut slots: SmallVec<[Slot<'_>; 16]> = SmallVec::new();
    for (held, into) in fragments.iter().zip(contents.chunks_mut(of_each)) {
        slots.push(match held {
            Some(held) => {
                into.copy_from_slice(held);
                Slot::Present(held)
            }
            None => Slot::Wanted(into),
        });
    }
    let of_parity = fragments[data..].iter();
    slots.extend(of_parity.map(|held| held.map_or(Slot::Absent, Slot::Present)));
    let recovered = code.recover_slots(&mut slots);
    drop(slots);
    recovered.ok()?;
    contents.truncate(bytes);
    Some(contents)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_lone_small_update_is_not_split_and_many_are() {
        assert_eq!(fragments_for(0, 2, 10), 1, "numbers of stripes only");
        assert_eq!(fragments_for(3, 2, 10), 1);
        assert!(fragments_for(96, 2, 10) >= 4);
        assert_eq!(fragments_for(96, 2, 3), 1, "too few members for more");
        assert_eq!(fragments_for(96, 2, 4), 2);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Whatever is missing, up to the parity, the contents come back; with one more missing nothing does.
        #[test]
        fn fragments_tell_the_contents(
            parts in prop::collection::vec(1..5usize, 1..8),
            data in 2..9usize,
            parity in 1..5usize,
            missing in prop::collection::btree_set(0..12usize, 0..6),
            seed in any::<u8>(),
        ) {
            let code = match parity {
                1 => Code::p(data),
                2 => Code::pq(data),
                _ => Code::cauchy(data, parity),
            };
            let code = code.expect("a code");
            let mut at = 0;
            let mut next = |blocks: usize| {
                let bytes = (at..at + blocks * BLOCK).map(|at| (at * at / 251) as u8 ^ seed);
                let part = Buf::copy_of(&bytes.collect::<Vec<u8>>());
                at += blocks * BLOCK;
                part
            };
            let contents: Vec<Buf> = parts.iter().map(|blocks| next(*blocks)).collect();
            let whole = levada_base::buf::joined(&contents);
            let fragments: Vec<Vec<u8>> = split(&contents, &code)
                .iter()
                .map(|parts| levada_base::buf::joined(parts))
                .collect();
            prop_assert_eq!(fragments.len(), data + parity);
            let held: Vec<Option<&[u8]>> = fragments
                .iter()
                .enumerate()
                .map(|(number, fragment)| (!missing.contains(&number)).then_some(&fragment[..]))
                .collect();
            let lost = held.iter().filter(|held| held.is_none()).count();
            let joined = join(&held, &code, whole.len());
            prop_assert_eq!(joined, (lost <= parity).then_some(whole));
        }
    }
}
