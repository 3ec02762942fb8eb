use proptest::prelude::*;

use super::*;

fn codes() -> impl Strategy<Value = Code> {
    prop_oneof![
        (1..CHUNKS_MAX).prop_map(|k| Code::p(k).unwrap()),
        (1..CHUNKS_MAX - 1).prop_map(|k| Code::pq(k).unwrap()),
        (1..=CHUNKS_MAX - PARITY_MAX, 1..=PARITY_MAX)
            .prop_map(|(k, m)| Code::cauchy(k, m).unwrap()),
    ]
}

fn encoded(code: &Code, data: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let data: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
    let mut parity = vec![vec![0xee; data[0].len()]; code.parity_chunks()];
    let mut outs: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
    code.encode(&data, &mut outs);
    parity
}

/// One stripe written out by hand: what is on disk must never change meaning.
#[test]
fn p_and_q_are_those_of_raid_6() {
    let data: [&[u8]; 4] = [&[0x01, 0x80], &[0x80, 0xff], &[0x53, 0x00], &[0xca, 0x01]];
    let (mut p, mut q) = ([0; 2], [0; 2]);
    encode_pq(&data, &mut p, &mut q);
    // 0x01 + 0x80 + 0x53 + 0xca; 1 * 0x01 + 2 * 0x80 + 4 * 0x53 + 8 * 0xca.
    assert_eq!(p, [0x18, 0x7e]);
    assert_eq!(q, [0x01 ^ 0x1d ^ 0x51 ^ 0x1e, 0x80 ^ 0xe3 ^ 0x08]);
    let mut p_alone = [0; 2];
    encode_p(&data, &mut p_alone);
    assert_eq!(p_alone, p);
}

/// The coefficients on disk, from an independent calculation (schoolbook
/// products, inverses by search).
#[test]
fn cauchy_coefficients_never_change() {
    let product = |mut a: u16, b: u16| {
        let mut sum = 0;
        for bit in 0..8 {
            sum ^= if b >> bit & 1 != 0 { a } else { 0 };
            a = (a << 1) ^ if a & 0x80 != 0 { 0x11d } else { 0 };
        }
        sum
    };
    let code = Code::cauchy(28, 4).unwrap();
    for j in 0..4 {
        for i in 0..28 {
            let inverse = (1..256).find(|&c| product(c, (4 + i) ^ j) == 1).unwrap();
            let want = product(4 + i, inverse);
            assert_eq!(u16::from(code.coefficients[j as usize][i as usize]), want);
        }
    }
    assert_eq!(code.coefficients[0][..28], [1; 28]);
}

#[test]
fn impossible_codes_are_refused() {
    for (k, m) in [(0, 1), (1, 0), (8, 5), (29, 4), (usize::MAX, 2)] {
        let want = ParityError::NoSuchCode { data_chunks: k, parity_chunks: m };
        assert_eq!(Code::cauchy(k, m).unwrap_err(), want);
    }
    assert!(Code::pq(31).is_err());
    assert!(Code::p(31).is_ok());
}

#[test]
#[should_panic(expected = "differ in length")]
fn unequal_chunks_are_refused() {
    Code::p(2).unwrap().encode(&[&[0; 8], &[0; 9]], &mut [&mut [0; 8]]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn parity_is_the_sum_of_products(code in codes(), bytes in 0..300_usize, fill: u8) {
        let data: Vec<Vec<u8>> = (0..code.data_chunks())
            .map(|i| (0..bytes).map(|b| (b * 7 + i * 31) as u8 ^ fill).collect())
            .collect();
        for (j, parity) in encoded(&code, &data).iter().enumerate() {
            for b in 0..bytes {
                let terms = data.iter().zip(&code.coefficients[j]);
                let want = terms.fold(0, |sum, (chunk, &c)| sum ^ gf::mul(c, chunk[b]));
                prop_assert_eq!(parity[b], want);
            }
        }
    }

    /// Updating from a delta ends where encoding afresh does.
    #[test]
    fn an_update_agrees_with_encoding(
        code in codes(),
        which: prop::sample::Index,
        (old, new) in (0..400_usize).prop_flat_map(|bytes| {
            let chunk = || prop::collection::vec(any::<u8>(), bytes);
            (chunk(), chunk())
        }),
    ) {
        let index = which.index(code.data_chunks());
        let mut data: Vec<Vec<u8>> = (0..code.data_chunks())
            .map(|i| old.iter().map(|byte| byte.wrapping_mul(i as u8 | 1)).collect())
            .collect();
        let mut parity = encoded(&code, &data);
        let mut outs: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
        code.update_delta(index, &data[index], &new, &mut outs);
        data[index] = new;
        prop_assert_eq!(parity, encoded(&code, &data));
    }
}
