//! Eight bytes at a time in a general register: runs everywhere, and is what
//! every other kernel is compared with.

use super::{
    Kernel,
    lanes::{self, Lanes},
};
use crate::{
    code::Coefficients,
    gf::{BIT_PRODUCTS, FOLD},
};

pub(super) static PORTABLE: Kernel = Kernel { name: "portable", pq, sum, dot, supported: || true };

/// Bit 0 of each byte.
const ONES: u64 = 0x0101_0101_0101_0101;

/// `byte` in every byte of a word.
fn splat(byte: u8) -> u64 {
    ONES * u64::from(byte)
}

/// 0xff for every byte that is 1, 0 for every byte that is 0. It is `bits`
/// times 255, written so that compilers find vector instructions for it.
fn mask(bits: u64) -> u64 {
    (bits << 8).wrapping_sub(bits)
}

struct Word;

impl Lanes for Word {
    type Lane = u64;
    /// What each bit of a byte contributes, in every byte of a word.
    type Multiplier = [u64; 8];
    const BYTES: usize = 8;

    #[inline(always)]
    unsafe fn load(from: *const u8) -> u64 {
        // SAFETY: the caller vouches for 8 readable bytes.
        unsafe { from.cast::<u64>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(to: *mut u8, lane: u64) {
        // SAFETY: the caller vouches for 8 writable bytes.
        unsafe { to.cast::<u64>().write_unaligned(lane) }
    }

    #[inline(always)]
    unsafe fn zero() -> u64 {
        0
    }

    #[inline(always)]
    unsafe fn add(a: u64, b: u64) -> u64 {
        a ^ b
    }

    #[inline(always)]
    unsafe fn double(a: u64) -> u64 {
        ((a & !(ONES << 7)) << 1) ^ (mask((a >> 7) & ONES) & splat(FOLD))
    }

    #[inline(always)]
    unsafe fn multiplier(coefficient: u8) -> [u64; 8] {
        BIT_PRODUCTS[coefficient as usize].map(splat)
    }

    #[inline(always)]
    unsafe fn mul(a: u64, by: [u64; 8]) -> u64 {
        let mut product = 0;
        for (bit, part) in by.into_iter().enumerate() {
            product ^= mask((a >> bit) & ONES) & part;
        }
        product
    }
}

unsafe fn pq(sources: &[&[u8]], at: usize, p: &mut [u8], q: &mut [u8]) {
    // SAFETY: the caller keeps the contract of `Pq`, which is that of `lanes::pq`.
    unsafe { lanes::pq::<Word, 4, 0>(sources, at, p, q) }
}

unsafe fn sum(sources: &[&[u8]], at: usize, out: &mut [u8]) {
    // SAFETY: as in `pq`.
    unsafe { lanes::sum::<Word, 8>(sources, at, out) }
}

unsafe fn dot(
    coefficients: &Coefficients,
    sources: &[&[u8]],
    at: usize,
    outs: &mut [&mut [u8]],
    accumulate: bool,
) {
    // SAFETY: as in `pq`.
    unsafe { lanes::dot::<Word, 4>(coefficients, sources, at, outs, accumulate) }
}
