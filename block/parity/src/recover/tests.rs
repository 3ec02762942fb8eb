use proptest::prelude::*;

use super::*;

/// A stripe of `code` with its parity; the bytes depend on everything.
fn stripe(code: &Code, bytes: usize, seed: u8) -> Vec<Vec<u8>> {
    let mut chunks: Vec<Vec<u8>> = (0..code.chunks())
        .map(|i| (0..bytes).map(|b| (b * 13 + i * 101) as u8 ^ (b >> 3) as u8 ^ seed).collect())
        .collect();
    let (data, parity) = chunks.split_at_mut(code.data_chunks());
    let data: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
    let mut parity: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
    code.encode(&data, &mut parity);
    chunks
}

fn check_recovery(code: &Code, good: &[Vec<u8>], lost: &[usize]) {
    let mut chunks = good.to_vec();
    lost.iter().for_each(|&index| chunks[index].fill(0xdb));
    let mut slices: Vec<&mut [u8]> = chunks.iter_mut().map(Vec::as_mut_slice).collect();
    code.recover(lost, &mut slices).unwrap();
    assert!(chunks == good, "{code:?}: {lost:?}");
}

/// Every set of at most `parity_chunks` chunks, for the widest code of each
/// kind. A narrower one has a part of the same coefficients.
#[test]
fn every_tolerated_loss_is_recovered() {
    let widest = [
        Code::p(CHUNKS_MAX - 1).unwrap(),
        Code::pq(CHUNKS_MAX - 2).unwrap(),
        Code::cauchy(CHUNKS_MAX - PARITY_MAX, PARITY_MAX).unwrap(),
        Code::cauchy(CHUNKS_MAX - 3, 3).unwrap(),
        Code::cauchy(CHUNKS_MAX - 2, 2).unwrap(),
    ];
    for code in &widest {
        let good = stripe(code, 16, 5);
        let mut sets: Vec<Vec<usize>> = vec![vec![]];
        for _ in 0..code.parity_chunks() {
            let longer = sets.iter().flat_map(|set| {
                let from = set.last().map_or(0, |last| last + 1);
                (from..code.chunks()).map(move |next| [set.as_slice(), &[next]].concat())
            });
            sets = longer.collect();
            sets.iter().for_each(|lost| check_recovery(code, &good, lost));
        }
    }
}

/// RAID 6 as arrays use it, on every kernel.
#[test]
fn raid6_8_2_recovers_on_every_kernel() {
    for kernel in crate::Kernel::all_supported() {
        let code = Code::pq(8).unwrap().with_kernel(kernel);
        let good = stripe(&code, 1003, 77);
        for a in 0..10 {
            check_recovery(&code, &good, &[a]);
            for b in a + 1..10 {
                check_recovery(&code, &good, &[a, b]);
                check_recovery(&code, &good, &[b, a]);
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Standing {
    Present,
    Wanted,
    Absent,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Any mixture of present, wanted and absent is either computed rightly,
    /// or refused, untouched, because too many are lost.
    #[test]
    fn any_mixture_is_recovered_or_refused(
        k in 1..=12_usize,
        m in 1..=PARITY_MAX,
        pq: bool,
        bytes in 0..300_usize,
        lots in prop::collection::vec((0..16_usize, any::<bool>()), 6),
    ) {
        let code = if pq { Code::pq(k) } else { Code::cauchy(k, m) }.unwrap();
        let good = stripe(&code, bytes, k as u8);
        let mut standings = vec![Standing::Present; code.chunks()];
        for (at, wanted) in lots {
            if let Some(standing) = standings.get_mut(at) {
                *standing = if wanted { Standing::Wanted } else { Standing::Absent };
            }
        }
        let mut chunks = good.clone();
        for (chunk, standing) in chunks.iter_mut().zip(&standings) {
            if *standing != Standing::Present {
                chunk.fill(0xdb);
            }
        }
        let mut slots: Vec<Slot<'_>> = chunks
            .iter_mut()
            .zip(&standings)
            .map(|(chunk, standing)| match standing {
                Standing::Present => Slot::Present(chunk),
                Standing::Wanted => Slot::Wanted(chunk),
                Standing::Absent => Slot::Absent,
            })
            .collect();
        let result = code.recover_slots(&mut slots);

        let lost = standings.iter().filter(|s| **s != Standing::Present).count();
        let refused = ParityError::TooManyLost { lost, tolerated: code.parity_chunks() };
        let recovered = lost <= code.parity_chunks();
        prop_assert_eq!(result, if recovered { Ok(()) } else { Err(refused) });
        for ((chunk, good), standing) in chunks.iter().zip(&good).zip(&standings) {
            match standing {
                Standing::Present => prop_assert_eq!(chunk, good),
                Standing::Wanted if recovered => prop_assert_eq!(chunk, good),
                _ => prop_assert!(chunk.iter().all(|&byte| byte == 0xdb)),
            }
        }
    }
}
