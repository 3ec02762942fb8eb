use proptest::prelude::*;

use super::*;

fn stripe(code: &Code, bytes: usize) -> Vec<Vec<u8>> {
    let mut chunks: Vec<Vec<u8>> = (0..code.chunks())
        .map(|i| (0..bytes).map(|b| (b * 29 + i * 57) as u8 ^ (b >> 4) as u8).collect())
        .collect();
    let (data, parity) = chunks.split_at_mut(code.data_chunks());
    let data: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
    let mut parity: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
    code.encode(&data, &mut parity);
    chunks
}

fn verdicts(code: &Code, chunks: &[Vec<u8>]) -> (bool, Verdict) {
    let chunks: Vec<&[u8]> = chunks.iter().map(Vec::as_slice).collect();
    (code.verify(&chunks), code.locate(&chunks))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// One wrong chunk is found, whatever is wrong with it and wherever.
    #[test]
    fn one_wrong_chunk_is_located(
        k in 1..=20_usize,
        m in 1..=PARITY_MAX,
        pq: bool,
        bytes in 1..3 * BLOCK_BYTES,
        which: prop::sample::Index,
        errors in prop::collection::vec((any::<prop::sample::Index>(), 1..=255_u8), 1..5),
    ) {
        let code = if pq { Code::pq(k) } else { Code::cauchy(k, m) }.unwrap();
        let good = stripe(&code, bytes);
        prop_assert_eq!(verdicts(&code, &good), (true, Verdict::Consistent));

        let index = which.index(code.chunks());
        let mut bad = good.clone();
        for (at, error) in errors {
            bad[index][at.index(bytes)] ^= error;
        }
        let want = if bad == good {
            (true, Verdict::Consistent)
        } else if code.parity_chunks() == 1 {
            (false, Verdict::Unexplained)
        } else {
            (false, Verdict::Wrong { index })
        };
        prop_assert_eq!(verdicts(&code, &bad), want);
    }
}

/// Different chunks wrong at different places: no single one explains it.
#[test]
fn two_wrong_chunks_are_not_mistaken_for_one() {
    let code = Code::pq(8).unwrap();
    for a in 0..10 {
        for b in 0..10 {
            let mut chunks = stripe(&code, 2 * BLOCK_BYTES);
            chunks[a][7] ^= 1;
            chunks[b][BLOCK_BYTES + 3] ^= 0x40;
            let want = if a == b { Verdict::Wrong { index: a } } else { Verdict::Unexplained };
            assert_eq!(verdicts(&code, &chunks), (false, want), "{a} and {b}");
        }
    }
}

#[test]
fn nothing_is_consistent() {
    let code = Code::pq(3).unwrap();
    assert_eq!(verdicts(&code, &stripe(&code, 0)), (true, Verdict::Consistent));
}
