//! The inner loops, over whatever a register holds.
//!
//! A loop takes `UNROLL` registers' worth of every source at a time, keeps all
//! its sums in registers, and stores each output byte once: no temporary
//! arrays, and memory is read exactly once. What is left over at the end goes
//! through one register padded with zeros.
//!
//! Tried and left out (Zen 5, 8+2 chunks of 64 KiB): prefetching by hand costs
//! a sixth to a half of the rate in cache and gains nothing out of it, since the
//! hardware follows the streams; non-temporal stores gain about 15 % when the
//! stripe is out of cache, but then parity has to come back from memory to be
//! written out.
//!
//! Everything is `inline(always)`: the caller carries the `target_feature`
//! attribute, and the code is compiled with it only if it ends up inside.

use crate::code::{Coefficients, PARITY_MAX};

/// One instruction set's register of bytes, each an element of GF(2^8).
///
/// # Safety
///
/// Every function may be called only where the instructions exist; pointers
/// need be valid for `BYTES` bytes, or for `bytes` where that is given, and
/// need not be aligned.
pub(super) trait Lanes {
    /// The register.
    type Lane: Copy;
    /// A coefficient made ready to multiply with.
    type Multiplier: Copy;
    /// Bytes in a register; at most 64.
    const BYTES: usize;

    unsafe fn load(from: *const u8) -> Self::Lane;
    unsafe fn store(to: *mut u8, lane: Self::Lane);
    unsafe fn zero() -> Self::Lane;
    unsafe fn add(a: Self::Lane, b: Self::Lane) -> Self::Lane;
    /// 2a.
    unsafe fn double(a: Self::Lane) -> Self::Lane;
    unsafe fn multiplier(coefficient: u8) -> Self::Multiplier;
    unsafe fn mul(a: Self::Lane, by: Self::Multiplier) -> Self::Lane;

    /// 4a + 2b + c: two steps of Horner's rule.
    #[inline(always)]
    unsafe fn horner2(a: Self::Lane, b: Self::Lane, c: Self::Lane) -> Self::Lane {
        // SAFETY: the caller's promise covers these too.
        unsafe { Self::add(Self::double(Self::add(Self::double(a), b)), c) }
    }

    /// The first `bytes` (fewer than `BYTES`) bytes, then zeros.
    #[inline(always)]
    unsafe fn load_part(from: *const u8, bytes: usize) -> Self::Lane {
        let mut padded = [0_u8; 64];
        padded[..bytes]
            // SAFETY: the caller vouches for `bytes` readable bytes.
            .copy_from_slice(unsafe { std::slice::from_raw_parts(from, bytes) });
        // SAFETY: `padded` is at least `BYTES` long.
        unsafe { Self::load(padded.as_ptr()) }
    }

    /// Stores the first `bytes` (fewer than `BYTES`) bytes.
    #[inline(always)]
    unsafe fn store_part(to: *mut u8, lane: Self::Lane, bytes: usize) {
        let mut padded = [0_u8; 64];
        // SAFETY: `padded` is at least `BYTES` long.
        unsafe { Self::store(padded.as_mut_ptr(), lane) };
        // SAFETY: the caller vouches for `bytes` writable bytes, which cannot
        // lie in a local array of ours.
        unsafe { std::ptr::copy_nonoverlapping(padded.as_ptr(), to, bytes) };
    }
}

/// How a block of `U` registers reaches memory: in full, or as a remainder of
/// so many bytes (then `U` is 1).
#[derive(Clone, Copy)]
enum Extent {
    Full,
    Part(usize),
}

#[inline(always)]
unsafe fn load<L: Lanes, const U: usize>(from: *const u8, extent: Extent) -> [L::Lane; U] {
    // SAFETY: the caller vouches for `U * BYTES` bytes, or for the part.
    unsafe {
        match extent {
            Extent::Full => {
                let mut lanes = [L::zero(); U];
                for (u, lane) in lanes.iter_mut().enumerate() {
                    *lane = L::load(from.add(u * L::BYTES));
                }
                lanes
            }
            Extent::Part(bytes) => [L::load_part(from, bytes); U],
        }
    }
}

#[inline(always)]
unsafe fn store<L: Lanes, const U: usize>(to: *mut u8, lanes: [L::Lane; U], extent: Extent) {
    // SAFETY: as in `load`.
    unsafe {
        match extent {
            Extent::Full => {
                for (u, lane) in lanes.into_iter().enumerate() {
                    L::store(to.add(u * L::BYTES), lane);
                }
            }
            Extent::Part(bytes) => L::store_part(to, lanes[0], bytes),
        }
    }
}

/// One kind of work on a range of bytes.
trait Block<L: Lanes> {
    /// Does the `U` registers' worth of bytes from `done` on, or the remainder.
    unsafe fn run<const U: usize>(&mut self, done: usize, extent: Extent);
}

/// Covers `bytes` bytes: blocks of `UNROLL` registers while they fit, then of
/// one, then the remainder.
#[inline(always)]
unsafe fn cover<L: Lanes, const UNROLL: usize>(bytes: usize, block: &mut impl Block<L>) {
    let mut done = 0;
    // SAFETY: the caller's promise for `bytes` bytes covers every part of them.
    unsafe {
        while bytes - done >= UNROLL * L::BYTES {
            block.run::<UNROLL>(done, Extent::Full);
            done += UNROLL * L::BYTES;
        }
        while bytes - done >= L::BYTES {
            block.run::<1>(done, Extent::Full);
            done += L::BYTES;
        }
        if done < bytes {
            block.run::<1>(done, Extent::Part(bytes - done));
        }
    }
}

/// Sources that a row takes together; even.
const ROW_SOURCES: usize = 4;

/// `p` = the sum of the sources, `q` = the sum of 2^i * source i.
///
/// With `ROW_BYTES` so many bytes of a few sources are taken before the same of
/// the next few, and the sums so far wait in `p` and `q`: for registers that are
/// too few for wide blocks.
///
/// # Safety
///
/// The instructions exist; there is a source; every source reaches from `at`
/// as far as `p` and `q`, which are of one length.
#[inline(always)]
pub(super) unsafe fn pq<L: Lanes, const UNROLL: usize, const ROW_BYTES: usize>(
    sources: &[&[u8]],
    at: usize,
    p: &mut [u8],
    q: &mut [u8],
) {
    let bytes = p.len();
    let (row_bytes, together) =
        if ROW_BYTES == 0 { (bytes, sources.len()) } else { (ROW_BYTES, ROW_SOURCES) };
    let mut done = 0;
    while done < bytes {
        let row = row_bytes.min(bytes - done);
        // From the highest source down; what is left over goes first.
        let mut rest = sources;
        while !rest.is_empty() {
            let count = (rest.len() - 1) % together + 1;
            let (lower, these) = rest.split_at(rest.len() - count);
            let goes_on = rest.len() < sources.len();
            let at = at + done;
            // SAFETY: the caller's promise is what the block needs for all `bytes` bytes, and this row is
            // a part of them.
            unsafe {
                let (p_to, q_to) = (p.as_mut_ptr().add(done), q.as_mut_ptr().add(done));
                let mut block = PqBlock { sources: these, goes_on, at, p_to, q_to };
                cover::<L, UNROLL>(row, &mut block);
            }
            rest = lower;
        }
        done += row;
    }
}

struct PqBlock<'a> {
    sources: &'a [&'a [u8]],
    /// The sums of higher sources are there already; then the sources are an even number.
    goes_on: bool,
    at: usize,
    p_to: *mut u8,
    q_to: *mut u8,
}

impl<L: Lanes> Block<L> for PqBlock<'_> {
    /// Horner's rule from the highest source down, two sources per step: the
    /// sums of three are one instruction where there is one for that.
    #[inline(always)]
    unsafe fn run<const U: usize>(&mut self, done: usize, extent: Extent) {
        let from = self.at + done;
        // SAFETY: the promise made to `pq`.
        unsafe {
            let (pairs, last) = self.sources.as_chunks::<2>();
            let (mut p, mut q);
            let pairs = match (last, pairs.split_last()) {
                _ if self.goes_on => {
                    p = load::<L, U>(self.p_to.add(done), extent);
                    q = load::<L, U>(self.q_to.add(done), extent);
                    pairs
                }
                ([last], _) => {
                    p = load::<L, U>(last.as_ptr().add(from), extent);
                    q = p;
                    pairs
                }
                (_, Some(([even, odd], pairs))) => {
                    p = load::<L, U>(even.as_ptr().add(from), extent);
                    q = p;
                    let odd = load::<L, U>(odd.as_ptr().add(from), extent);
                    for u in 0..U {
                        p[u] = L::add(p[u], odd[u]);
                        q[u] = L::add(q[u], L::double(odd[u]));
                    }
                    pairs
                }
                (_, None) => unreachable!("a sum of nothing"),
            };
            for [even, odd] in pairs.iter().rev() {
                let odd = load::<L, U>(odd.as_ptr().add(from), extent);
                let even = load::<L, U>(even.as_ptr().add(from), extent);
                for u in 0..U {
                    p[u] = L::add(L::add(p[u], odd[u]), even[u]);
                    q[u] = L::horner2(q[u], odd[u], even[u]);
                }
            }
            store::<L, U>(self.p_to.add(done), p, extent);
            store::<L, U>(self.q_to.add(done), q, extent);
        }
    }
}

/// `out` = the sum of the sources.
///
/// # Safety
///
/// As for [`pq`].
#[inline(always)]
pub(super) unsafe fn sum<L: Lanes, const UNROLL: usize>(
    sources: &[&[u8]],
    at: usize,
    out: &mut [u8],
) {
    let to = out.as_mut_ptr();
    // SAFETY: the caller's promise is what the block needs for `out.len()` bytes.
    unsafe { cover::<L, UNROLL>(out.len(), &mut SumBlock { sources, at, to }) }
}

struct SumBlock<'a> {
    sources: &'a [&'a [u8]],
    at: usize,
    to: *mut u8,
}

impl<L: Lanes> Block<L> for SumBlock<'_> {
    #[inline(always)]
    unsafe fn run<const U: usize>(&mut self, done: usize, extent: Extent) {
        let from = self.at + done;
        // SAFETY: the promise made to `sum`.
        unsafe {
            let (pairs, last) = self.sources.as_chunks::<2>();
            let mut sum = match last {
                [last] => load::<L, U>(last.as_ptr().add(from), extent),
                _ => [L::zero(); U],
            };
            for [even, odd] in pairs {
                let even = load::<L, U>(even.as_ptr().add(from), extent);
                let odd = load::<L, U>(odd.as_ptr().add(from), extent);
                for u in 0..U {
                    sum[u] = L::add(L::add(sum[u], even[u]), odd[u]);
                }
            }
            store::<L, U>(self.to.add(done), sum, extent);
        }
    }
}

/// `outs[j]` = the sum of `coefficients[j][i]` * source i; added to what is
/// there if `accumulate`.
///
/// # Safety
///
/// As for [`pq`], without need of a source; 1 to `PARITY_MAX` outputs of one
/// length; a coefficient for every source.
#[inline(always)]
pub(super) unsafe fn dot<L: Lanes, const UNROLL: usize>(
    coefficients: &Coefficients,
    sources: &[&[u8]],
    at: usize,
    outs: &mut [&mut [u8]],
    accumulate: bool,
) {
    // SAFETY: the caller's promise, passed on with the number of outputs known.
    unsafe {
        match outs {
            [a] => dot_to::<L, UNROLL, 1>(coefficients, sources, at, [a], accumulate),
            [a, b] => dot_to::<L, UNROLL, 2>(coefficients, sources, at, [a, b], accumulate),
            [a, b, c] => {
                dot_to::<L, UNROLL, 3>(coefficients, sources, at, [a, b, c], accumulate);
            }
            [a, b, c, d] => {
                dot_to::<L, UNROLL, 4>(coefficients, sources, at, [a, b, c, d], accumulate);
            }
            _ => unreachable!("1 to {PARITY_MAX} outputs"),
        }
    }
}

#[inline(always)]
unsafe fn dot_to<L: Lanes, const UNROLL: usize, const M: usize>(
    coefficients: &Coefficients,
    sources: &[&[u8]],
    at: usize,
    outs: [&mut [u8]; M],
    accumulate: bool,
) {
    let bytes = outs[0].len();
    let to = outs.map(<[u8]>::as_mut_ptr);
    let mut block = DotBlock { coefficients, sources, at, to, accumulate };
    // SAFETY: the promise made to `dot` is what the block needs for `bytes` bytes.
    unsafe { cover::<L, UNROLL>(bytes, &mut block) }
}

struct DotBlock<'a, const M: usize> {
    coefficients: &'a Coefficients,
    sources: &'a [&'a [u8]],
    at: usize,
    to: [*mut u8; M],
    accumulate: bool,
}

impl<L: Lanes, const M: usize> Block<L> for DotBlock<'_, M> {
    #[inline(always)]
    unsafe fn run<const U: usize>(&mut self, done: usize, extent: Extent) {
        let from = self.at + done;
        // SAFETY: the promise made to `dot`.
        unsafe {
            let mut sums = [[L::zero(); U]; M];
            if self.accumulate {
                for (sum, to) in sums.iter_mut().zip(self.to) {
                    *sum = load::<L, U>(to.add(done), extent);
                }
            }
            let (pairs, last) = self.sources.as_chunks::<2>();
            for (i, [even, odd]) in pairs.iter().enumerate() {
                let even = load::<L, U>(even.as_ptr().add(from), extent);
                let odd = load::<L, U>(odd.as_ptr().add(from), extent);
                for (sum, row) in sums.iter_mut().zip(self.coefficients) {
                    let by_even = L::multiplier(row[2 * i]);
                    let by_odd = L::multiplier(row[2 * i + 1]);
                    for u in 0..U {
                        let sum_even = L::add(sum[u], L::mul(even[u], by_even));
                        sum[u] = L::add(sum_even, L::mul(odd[u], by_odd));
                    }
                }
            }
            if let [last] = last {
                let lane = load::<L, U>(last.as_ptr().add(from), extent);
                for (sum, row) in sums.iter_mut().zip(self.coefficients) {
                    let by = L::multiplier(row[2 * pairs.len()]);
                    for u in 0..U {
                        sum[u] = L::add(sum[u], L::mul(lane[u], by));
                    }
                }
            }
            for (sum, to) in sums.into_iter().zip(self.to) {
                store::<L, U>(to.add(done), sum, extent);
            }
        }
    }
}
