//! The x86-64 kernels: AVX2, AVX-512, and AVX-512 with GFNI.
//!
//! Doubling is a shift and a conditional fold. A general product is two table
//! look-ups by nibble with the byte shuffle, or, with GFNI, one 8x8 bit matrix
//! (`GF2P8AFFINEQB`), which also makes doubling a single instruction.

use std::arch::x86_64::*;

use super::{
    Kernel,
    lanes::{self, Lanes},
};
use crate::{
    code::Coefficients,
    gf::{BIT_MATRICES, FOLD, NIBBLE_PRODUCTS},
};

/// A table of functions: the loops of [`lanes`] compiled for `$features`, with
/// so many registers of each source per block; `pq` in rows of so many bytes,
/// or of all.
macro_rules! kernel {
    ($kernel:ident, $name:literal, $lanes:ty, $module:ident, $features:literal,
     unroll $pq:literal $sum:literal $dot:literal, rows $rows:literal, supported $supported:expr) => {
        pub(super) static $kernel: Kernel = Kernel {
            name: $name,
            pq: $module::pq,
            sum: $module::sum,
            dot: $module::dot,
            supported: $supported,
        };

        mod $module {
            use super::*;

            #[target_feature(enable = $features)]
            pub(super) unsafe fn pq(sources: &[&[u8]], at: usize, p: &mut [u8], q: &mut [u8]) {
                // SAFETY: the caller keeps the contract of `Pq`, which is that
                // of `lanes::pq`, and the instructions are enabled here.
                unsafe { lanes::pq::<$lanes, $pq, $rows>(sources, at, p, q) }
            }

            #[target_feature(enable = $features)]
            pub(super) unsafe fn sum(sources: &[&[u8]], at: usize, out: &mut [u8]) {
                // SAFETY: as in `pq`.
                unsafe { lanes::sum::<$lanes, $sum>(sources, at, out) }
            }

            #[target_feature(enable = $features)]
            pub(super) unsafe fn dot(
                coefficients: &Coefficients,
                sources: &[&[u8]],
                at: usize,
                outs: &mut [&mut [u8]],
                accumulate: bool,
            ) {
                // SAFETY: as in `pq`.
                unsafe { lanes::dot::<$lanes, $dot>(coefficients, sources, at, outs, accumulate) }
            }
        }
    };
}

// Registers per block for `pq`, `sum` and `dot`, by measurement (64 KiB chunks;
// GFNI: Zen 5, the others: Zen 4). Narrow blocks suit the second-level cache of
// Zen 5 when there is little to compute; a product costs more, so `dot` gains
// from reusing each multiplier. AVX2 has no registers for wide blocks of P and
// Q, so that it takes rows: 40 -> 61 GB/s.
kernel!(AVX2, "avx2", Avx2, avx2, "avx2", unroll 4 8 2, rows 2048,
    supported || is_x86_feature_detected!("avx2"));
kernel!(AVX512, "avx512", Avx512, avx512, "avx512f,avx512bw", unroll 8 2 3, rows 0,
    supported || is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw"));
kernel!(GFNI, "gfni", Gfni, gfni, "avx512f,avx512bw,gfni", unroll 2 2 3, rows 0,
    supported || (AVX512.supported)() && is_x86_feature_detected!("gfni"));

// Chunks begin on pages, so the lines of one block have the same place in the
// first-level cache, a line of each chunk in every set. Where a set has fewer
// lines than a stripe has chunks, they drive out what is fetched ahead, and a
// wide block meets that less often: P and Q of 8 on Zen 4 (8 ways) 72 -> 86
// GB/s, which with P and Q is nearly the 112 GB/s that plain sums move there.
kernel!(GFNI_WIDE, "gfni_wide", Gfni, gfni_wide, "avx512f,avx512bw,gfni", unroll 8 8 3, rows 0,
    supported || (GFNI.supported)() && first_level_ways() < 10);

/// Lines in a set of the first-level data cache.
fn first_level_ways() -> u32 {
    #[allow(unused_unsafe, reason = "unsafe before Rust 1.94")]
    // SAFETY: every x86-64 processor has the instruction.
    unsafe {
        // AMD tells of its caches in a leaf of its own (APM volume 3, E.4.15),
        // of the same form as Intel's (SDM volume 2, CPUID).
        let leaf = if __cpuid(0x8000_0000).eax >= 0x8000_001d { 0x8000_001d } else { 4 };
        (__cpuid_count(leaf, 0).ebx >> 22) + 1
    }
}

struct Avx2;

impl Lanes for Avx2 {
    type Lane = __m256i;
    type Multiplier = (__m256i, __m256i);
    const BYTES: usize = 32;

    #[inline(always)]
    unsafe fn load(from: *const u8) -> __m256i {
        // SAFETY: the caller vouches for the bytes and the instructions.
        unsafe { _mm256_loadu_si256(from.cast()) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut u8, lane: __m256i) {
        // SAFETY: as in `load`.
        unsafe { _mm256_storeu_si256(to.cast(), lane) }
    }

    #[inline(always)]
    unsafe fn zero() -> __m256i {
        // SAFETY: the caller has the instructions, here and below.
        unsafe { _mm256_setzero_si256() }
    }

    #[inline(always)]
    unsafe fn add(a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: as in `zero`.
        unsafe { _mm256_xor_si256(a, b) }
    }

    #[inline(always)]
    unsafe fn double(a: __m256i) -> __m256i {
        // SAFETY: as in `zero`.
        unsafe {
            // As signed numbers, the bytes that carry are those below zero.
            let carry = _mm256_cmpgt_epi8(_mm256_setzero_si256(), a);
            let fold = _mm256_and_si256(carry, _mm256_set1_epi8(FOLD as i8));
            _mm256_xor_si256(_mm256_add_epi8(a, a), fold)
        }
    }

    #[inline(always)]
    unsafe fn multiplier(coefficient: u8) -> (__m256i, __m256i) {
        let products = &NIBBLE_PRODUCTS[coefficient as usize];
        // SAFETY: as in `zero`; both tables are 16 bytes long.
        unsafe {
            (
                _mm256_broadcastsi128_si256(_mm_loadu_si128(products.low.as_ptr().cast())),
                _mm256_broadcastsi128_si256(_mm_loadu_si128(products.high.as_ptr().cast())),
            )
        }
    }

    #[inline(always)]
    unsafe fn mul(a: __m256i, (low, high): (__m256i, __m256i)) -> __m256i {
        // SAFETY: as in `zero`.
        unsafe {
            let nibble = _mm256_set1_epi8(0x0f);
            let by_low = _mm256_shuffle_epi8(low, _mm256_and_si256(a, nibble));
            let a_high = _mm256_and_si256(_mm256_srli_epi64::<4>(a), nibble);
            _mm256_xor_si256(by_low, _mm256_shuffle_epi8(high, a_high))
        }
    }
}

struct Avx512;

impl Lanes for Avx512 {
    type Lane = __m512i;
    type Multiplier = (__m512i, __m512i);
    const BYTES: usize = 64;

    #[inline(always)]
    unsafe fn load(from: *const u8) -> __m512i {
        // SAFETY: the caller vouches for the bytes and the instructions.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut u8, lane: __m512i) {
        // SAFETY: as in `load`.
        unsafe { _mm512_storeu_si512(to.cast(), lane) }
    }

    #[inline(always)]
    unsafe fn zero() -> __m512i {
        // SAFETY: the caller has the instructions, here and below.
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    unsafe fn add(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as in `zero`. Two of these in a row become one VPTERNLOG.
        unsafe { _mm512_xor_si512(a, b) }
    }

    #[inline(always)]
    unsafe fn double(a: __m512i) -> __m512i {
        // SAFETY: as in `zero`.
        unsafe {
            let fold = _mm512_maskz_set1_epi8(_mm512_movepi8_mask(a), FOLD as i8);
            _mm512_xor_si512(_mm512_add_epi8(a, a), fold)
        }
    }

    #[inline(always)]
    unsafe fn multiplier(coefficient: u8) -> (__m512i, __m512i) {
        let products = &NIBBLE_PRODUCTS[coefficient as usize];
        // SAFETY: as in `zero`; both tables are 16 bytes long.
        unsafe {
            (
                _mm512_broadcast_i32x4(_mm_loadu_si128(products.low.as_ptr().cast())),
                _mm512_broadcast_i32x4(_mm_loadu_si128(products.high.as_ptr().cast())),
            )
        }
    }

    #[inline(always)]
    unsafe fn mul(a: __m512i, (low, high): (__m512i, __m512i)) -> __m512i {
        // SAFETY: as in `zero`.
        unsafe {
            let nibble = _mm512_set1_epi8(0x0f);
            let by_low = _mm512_shuffle_epi8(low, _mm512_and_si512(a, nibble));
            let a_high = _mm512_and_si512(_mm512_srli_epi64::<4>(a), nibble);
            _mm512_xor_si512(by_low, _mm512_shuffle_epi8(high, a_high))
        }
    }

    #[inline(always)]
    unsafe fn load_part(from: *const u8, bytes: usize) -> __m512i {
        // SAFETY: the caller vouches for `bytes` bytes; the mask reads no more.
        unsafe { _mm512_maskz_loadu_epi8(first(bytes), from.cast()) }
    }

    #[inline(always)]
    unsafe fn store_part(to: *mut u8, lane: __m512i, bytes: usize) {
        // SAFETY: as in `load_part`.
        unsafe { _mm512_mask_storeu_epi8(to.cast(), first(bytes), lane) }
    }
}

/// A mask of the first `bytes` (fewer than 64) bytes.
fn first(bytes: usize) -> u64 {
    (1 << bytes) - 1
}

struct Gfni;

impl Lanes for Gfni {
    type Lane = __m512i;
    type Multiplier = __m512i;
    const BYTES: usize = 64;

    #[inline(always)]
    unsafe fn load(from: *const u8) -> __m512i {
        // SAFETY: the caller's promise, here and below, is the one needed.
        unsafe { Avx512::load(from) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut u8, lane: __m512i) {
        // SAFETY: as in `load`.
        unsafe { Avx512::store(to, lane) }
    }

    #[inline(always)]
    unsafe fn zero() -> __m512i {
        // SAFETY: as in `load`.
        unsafe { Avx512::zero() }
    }

    #[inline(always)]
    unsafe fn add(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as in `load`.
        unsafe { Avx512::add(a, b) }
    }

    #[inline(always)]
    unsafe fn double(a: __m512i) -> __m512i {
        // SAFETY: as in `load`.
        unsafe { Self::mul(a, Self::multiplier(2)) }
    }

    #[inline(always)]
    unsafe fn multiplier(coefficient: u8) -> __m512i {
        // SAFETY: as in `load`.
        unsafe { _mm512_set1_epi64(BIT_MATRICES[coefficient as usize] as i64) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m512i, by: __m512i) -> __m512i {
        // SAFETY: as in `load`.
        unsafe { _mm512_gf2p8affine_epi64_epi8::<0>(a, by) }
    }

    /// Both products at once, neither waiting for the other.
    #[inline(always)]
    unsafe fn horner2(a: __m512i, b: __m512i, c: __m512i) -> __m512i {
        // SAFETY: as in `load`.
        unsafe {
            let a = Self::mul(a, Self::multiplier(4));
            let b = Self::mul(b, Self::multiplier(2));
            Self::add(Self::add(a, b), c)
        }
    }

    #[inline(always)]
    unsafe fn load_part(from: *const u8, bytes: usize) -> __m512i {
        // SAFETY: as in `load`.
        unsafe { Avx512::load_part(from, bytes) }
    }

    #[inline(always)]
    unsafe fn store_part(to: *mut u8, lane: __m512i, bytes: usize) {
        // SAFETY: as in `load`.
        unsafe { Avx512::store_part(to, lane, bytes) }
    }
}
