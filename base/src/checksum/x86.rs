//! CRC32C of a block with AVX-512 and GFNI.
//!
//! Data is a polynomial whose first bit is the highest power, and the checksum is its remainder.
//! What lies 256 bytes before other data may be multiplied by x^2048 and added to that instead: it
//! is *folded* over them. Elsewhere that is done with carry-less multiplication; but Zen 5 has one
//! multiplier for them (16 bytes a cycle) and two units that apply 8 x 8 bit matrices.
//!
//! So four registers hold 64 columns of 32 bits: byte c of each of them. These bits stand for 32
//! powers that are independent modulo the generator, times a power that the whole column has in
//! common. Each power times x^2048 is therefore a sum of some of the 32, the same for all columns,
//! and a fold is 16 matrices, one from each register to each. The last four registers are
//! multiplied into one lane, and the CRC32 instruction takes the remainder.
//!
//! ns for 4 KiB (Zen 5, 4.1 GHz, least of nine), in the first-level cache, the second, the third:
//!
//! | | 1st | 2nd | 3rd |
//! |---|---|---|---|
//! | `crc-fast` | 63 | 63 | 66 |
//! | this | 39 | 39 | 42 |
//! | copy alone | 28 | 45 | 66 |
//! | copy, then `crc-fast` | 101 | 106 | 118 |
//! | this, copying | 41 | 60 | 70 |
//!
//! What was tried and left: the multiplier together with the CRC32 instruction, another unit, in
//! streams of its own (44, 44, 55; with five places in a page to read from, slow out of memory);
//! with matrices, these gain nothing.

use super::{BLOCK_BYTES, Block, Kernel};
use std::arch::x86_64::*;

pub(super) static GFNI: Kernel = Kernel {
    name: "gfni",
    block,
    copy,
    supported: || {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("gfni")
            && is_x86_feature_detected!("vpclmulqdq")
            && is_x86_feature_detected!("pclmulqdq")
            && is_x86_feature_detected!("sse4.2")
    },
};

/// Bytes of a register.
const WIDE: usize = 64;
/// Registers in step.
const REGISTERS: usize = 4;
const ROUND_BYTES: usize = WIDE * REGISTERS;
const _: () = assert!(BLOCK_BYTES.is_multiple_of(ROUND_BYTES));

/// The generator, its highest power left out, the lowest in the highest bit.
const GENERATOR: u32 = 0x82f6_3b78;

const fn times_x(a: u32) -> u32 {
    (a >> 1) ^ ((a & 1) * GENERATOR)
}

/// The product modulo the generator.
const fn product(a: u32, mut b: u32) -> u32 {
    let (mut sum, mut power) = (0, 0);
    while power < 32 {
        sum ^= (a >> (31 - power) & 1) * b;
        b = times_x(b);
        power += 1;
    }
    sum
}

/// x^n modulo the generator.
const fn x_to(n: usize) -> u32 {
    let (mut power, mut square, mut n) = (1 << 31, 1 << 30, n);
    while n > 0 {
        if n & 1 != 0 {
            power = product(power, square);
        }
        square = product(square, square);
        n >>= 1;
    }
    power
}

/// What bit `n` of a column stands for: registers lie in order, the first bit of a byte is its lowest.
const fn stands_for(n: usize) -> u32 {
    let (register, bit) = (n / 8, n % 8);
    x_to(8 * WIDE * (REGISTERS - 1 - register) + 7 - bit)
}

/// Which bits of a column make each power, from the lowest bit that holds one to the highest: Gauss
/// and Jordan's elimination.
const BITS_OF_POWER: [u32; 32] = {
    // Sums of what bits stand for, and which bits.
    let (mut sums, mut bits) = ([0; 32], [0_u32; 32]);
    let mut n = 0;
    while n < 32 {
        (sums[n], bits[n]) = (stands_for(n), 1 << n);
        n += 1;
    }
    let mut power = 0;
    while power < 32 {
        let mut from = power;
        while sums[from] >> power & 1 == 0 {
            // Out of bounds, and so no program, if they were not independent.
            from += 1;
        }
        (sums[power], sums[from]) = (sums[from], sums[power]);
        (bits[power], bits[from]) = (bits[from], bits[power]);
        let mut other = 0;
        while other < 32 {
            if other != power && sums[other] >> power & 1 == 1 {
                sums[other] ^= sums[power];
                bits[other] ^= bits[power];
            }
            other += 1;
        }
        power += 1;
    }
    bits
};

/// To fold columns over a round: the matrix to each register from each.
const FOLD: [[u64; REGISTERS]; REGISTERS] = {
    let mut fold = [[0; REGISTERS]; REGISTERS];
    let mut from = 0;
    while from < 32 {
        let folded = product(stands_for(from), x_to(8 * ROUND_BYTES));
        let (mut to, mut power) = (0, 0);
        while power < 32 {
            to ^= (folded >> power & 1) * BITS_OF_POWER[power];
            power += 1;
        }
        let mut bit = 0;
        while bit < 32 {
            // The instruction has the row of the lowest bit in the highest byte.
            let row = 8 * (7 - bit % 8);
            fold[bit / 8][from / 8] |= ((to >> bit & 1) as u64) << (row + from % 8);
            bit += 1;
        }
        from += 1;
    }
    fold
};

/// Multipliers for the two halves of a lane, to fold it over so many bytes. A product with the
/// lowest power in the highest bit comes out one bit off, and these are 32 bits short: 33 less.
const fn over(bytes: usize) -> [u64; 2] {
    [x_to(8 * bytes + 64 - 33) as u64, x_to(8 * bytes - 33) as u64]
}

/// To fold all lanes of the last round into the last one, which stays as it is.
const LAST: [[[u64; 2]; 4]; REGISTERS] = {
    let mut last = [[[0; 2]; 4]; REGISTERS];
    let mut lane = 0;
    while lane < 4 * REGISTERS - 1 {
        last[lane / 4][lane % 4] = over(16 * (4 * REGISTERS - 1 - lane));
        lane += 1;
    }
    last
};
const LAST_LANE: __mmask8 = 0b1100_0000;

/// To fold the checksum's register that a block begins with over the block.
const WHOLE: u32 = x_to(8 * BLOCK_BYTES - 33);

/// Of three: the truth table of their sum.
const SUM: i32 = 0x96;

/// See [`Kernel::block`].
///
/// # Safety
///
/// The processor has these instructions.
#[target_feature(enable = "avx512f,gfni,vpclmulqdq,pclmulqdq,sse4.2")]
unsafe fn block(register: u32, block: &Block) -> u32 {
    // SAFETY: the block may be read, and nothing is written.
    unsafe { walk::<false>(register, block.as_ptr(), std::ptr::null_mut()) }
}

/// See [`Kernel::copy`].
///
/// # Safety
///
/// The processor has these instructions.
#[target_feature(enable = "avx512f,gfni,vpclmulqdq,pclmulqdq,sse4.2")]
unsafe fn copy(register: u32, from: &Block, to: &mut Block) -> u32 {
    // SAFETY: one may be read, the other written.
    unsafe { walk::<true>(register, from.as_ptr(), to.as_mut_ptr()) }
}

/// The checksum's register after the block at `from`, which is also copied to `to` if so wanted.
///
/// # Safety
///
/// A block at `from` may be read, and with `COPY` one at `to` written.
#[inline]
#[target_feature(enable = "avx512f,gfni,vpclmulqdq,pclmulqdq,sse4.2")]
unsafe fn walk<const COPY: bool>(register: u32, from: *const u8, to: *mut u8) -> u32 {
    let none = _mm512_setzero_si512();
    let mut matrices = [[none; REGISTERS]; REGISTERS];
    for (matrices, constants) in matrices.iter_mut().zip(&FOLD) {
        for (matrix, constant) in matrices.iter_mut().zip(constants) {
            *matrix = _mm512_set1_epi64(constant.cast_signed());
        }
    }

    let mut folded = [none; REGISTERS];
    for round in 0..BLOCK_BYTES / ROUND_BYTES {
        let before = folded;
        for (n, folded) in folded.iter_mut().enumerate() {
            let at = round * ROUND_BYTES + n * WIDE;
            // SAFETY: inside the block, which may be read. Loaded once: what is copied is what is
            // computed with, whoever else writes to it.
            let data = unsafe { _mm512_loadu_si512(from.add(at).cast()) };
            if COPY {
                // SAFETY: inside the other block, which may be written.
                unsafe { _mm512_storeu_si512(to.add(at).cast(), data) };
            }
            if round == 0 {
                *folded = data;
                continue;
            }
            let [a, b, c, d] = before;
            let [by_a, by_b, by_c, by_d] = matrices[n];
            let a = _mm512_gf2p8affine_epi64_epi8::<0>(a, by_a);
            let b = _mm512_gf2p8affine_epi64_epi8::<0>(b, by_b);
            let c = _mm512_gf2p8affine_epi64_epi8::<0>(c, by_c);
            let d = _mm512_gf2p8affine_epi64_epi8::<0>(d, by_d);
            let sum = _mm512_ternarylogic_epi64::<SUM>(data, a, b);
            *folded = _mm512_ternarylogic_epi64::<SUM>(sum, c, d);
        }
    }

    let mut all = _mm512_maskz_mov_epi64(LAST_LANE, folded[REGISTERS - 1]);
    for (lanes, multipliers) in folded.into_iter().zip(&LAST) {
        // SAFETY: as large as a register.
        let multipliers = unsafe { _mm512_loadu_si512(multipliers.as_ptr().cast()) };
        let low = _mm512_clmulepi64_epi128::<0x00>(lanes, multipliers);
        let high = _mm512_clmulepi64_epi128::<0x11>(lanes, multipliers);
        all = _mm512_ternarylogic_epi64::<SUM>(all, low, high);
    }
    let half = _mm256_xor_si256(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64::<1>(all));
    let lane = _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half));
    let (register, whole) = (i64::from(register), i64::from(WHOLE));
    let before = _mm_clmulepi64_si128::<0>(_mm_cvtsi64_si128(register), _mm_cvtsi64_si128(whole));
    let high = _mm_extract_epi64::<1>(lane) ^ _mm_cvtsi128_si64(before);
    let remainder = _mm_crc32_u64(0, _mm_cvtsi128_si64(lane).cast_unsigned());
    _mm_crc32_u64(remainder, high.cast_unsigned()) as u32
}
