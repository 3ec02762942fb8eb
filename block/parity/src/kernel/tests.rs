//! Every kernel against arithmetic one byte at a time.

use proptest::prelude::*;

use super::*;
use crate::{code::CHUNKS_MAX, gf};

/// Buffers that start at a chosen distance from a 64-byte boundary, with
/// guards around them.
struct Placed {
    held: Vec<u8>,
    start: usize,
    bytes: usize,
}

const GUARD_BYTES: usize = 64;

impl Placed {
    fn new(misalignment: usize, bytes: usize, mut fill: impl FnMut() -> u8) -> Self {
        let held: Vec<u8> = (0..bytes + misalignment + 3 * GUARD_BYTES).map(|_| fill()).collect();
        let start = GUARD_BYTES + held.as_ptr().align_offset(64) + misalignment;
        Self { held, start, bytes }
    }

    fn get(&self) -> &[u8] {
        &self.held[self.start..][..self.bytes]
    }

    fn get_mut(&mut self) -> &mut [u8] {
        &mut self.held[self.start..][..self.bytes]
    }

    fn guards(&self) -> (&[u8], &[u8]) {
        (&self.held[..self.start], &self.held[self.start + self.bytes..])
    }
}

/// Numbers good enough to fill memory with (Marsaglia's xorshift).
fn noise(seed: u64) -> impl FnMut() -> u8 {
    let mut state = seed | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    }
}

struct Case {
    sources: Vec<Placed>,
    at: usize,
    bytes: usize,
    out_misalignments: [usize; PARITY_MAX],
    seed: u64,
}

impl Case {
    fn new(
        source_misalignments: &[usize],
        out_misalignments: [usize; PARITY_MAX],
        at: usize,
        bytes: usize,
        seed: u64,
    ) -> Self {
        let mut fill = noise(seed);
        let sources = source_misalignments
            .iter()
            .map(|&misalignment| Placed::new(misalignment, at + bytes, &mut fill))
            .collect();
        Self { sources, at, bytes, out_misalignments, seed }
    }

    /// Runs `work` on `count` fresh outputs, checks their guards, and compares
    /// them with `model(output, byte within it, byte before)`.
    fn check(
        &self,
        count: usize,
        work: impl FnOnce(&[&[u8]], &mut [&mut [u8]]),
        model: impl Fn(usize, usize, u8) -> u8,
    ) {
        let mut fill = noise(!self.seed);
        let mut outs: Vec<_> = self.out_misalignments[..count]
            .iter()
            .map(|&misalignment| Placed::new(misalignment, self.bytes, &mut fill))
            .collect();
        let before: Vec<_> = outs.iter().map(|out| out.held.clone()).collect();
        let sources: Vec<_> = self.sources.iter().map(Placed::get).collect();
        let mut slices: Vec<_> = outs.iter_mut().map(Placed::get_mut).collect();
        work(&sources, &mut slices);
        for (j, (out, held)) in outs.iter().zip(before).enumerate() {
            let before = Placed { held, ..*out };
            assert_eq!(out.guards(), before.guards(), "wrote outside output {j}");
            let want: Vec<_> =
                before.get().iter().enumerate().map(|(b, &byte)| model(j, b, byte)).collect();
            assert_eq!(out.get(), want, "output {j}, seed {}", self.seed);
        }
    }

    /// Source i's byte that belongs to output byte `b`.
    fn byte(&self, i: usize, b: usize) -> u8 {
        self.sources[i].get()[self.at + b]
    }

    fn check_all(&self, kernel: &Kernel) {
        let at = self.at;
        let n = self.sources.len();
        let add = |sum: u8, term: u8| sum ^ term;
        self.check(
            2,
            |sources, outs| {
                let [p, q] = outs else { unreachable!() };
                kernel.pq(sources, at, p, q);
            },
            |j, b, _| (0..n).map(|i| gf::mul(gf::exp(i * j), self.byte(i, b))).fold(0, add),
        );
        self.check(
            1,
            |sources, outs| kernel.sum(sources, at, outs[0]),
            |_, b, _| (0..n).map(|i| self.byte(i, b)).fold(0, add),
        );
        let mut fill = noise(self.seed.rotate_left(32));
        let mut coefficients = Coefficients::default();
        coefficients.iter_mut().flatten().for_each(|c| *c = fill());
        for count in 1..=PARITY_MAX {
            for accumulate in [false, true] {
                self.check(
                    count,
                    |sources, outs| {
                        kernel.dot(&coefficients, sources, at, outs, accumulate);
                    },
                    |j, b, before| {
                        (0..n)
                            .map(|i| gf::mul(coefficients[j][i], self.byte(i, b)))
                            .fold(if accumulate { before } else { 0 }, add)
                    },
                );
            }
        }
    }
}

/// Every length up to two of the longest blocks and a bit, so every
/// combination of blocks, single registers and remainder.
#[test]
fn every_length_agrees_with_bytes() {
    for bytes in 0..=2 * 512 + 66 {
        let case = Case::new(&[0, 1, 8], [0, 0, 3, 0], 0, bytes, bytes as u64 + 1);
        Kernel::all_supported().for_each(|kernel| case.check_all(kernel));
    }
}

/// Lengths about one row and two, of as many sources as leave every remainder.
#[test]
fn rows_agree_with_bytes() {
    for row in [2048, 2 * 2048] {
        for bytes in [row - 1, row, row + 1, row + 33, row + 1000] {
            for sources in 1..=9 {
                let case = Case::new(&[3; 9][..sources], [0, 7, 0, 0], 5, bytes, bytes as u64);
                Kernel::all_supported().for_each(|kernel| case.check_all(kernel));
            }
        }
    }
}

/// Every product, through every place in a register.
#[test]
fn every_product_agrees_with_bytes() {
    let source: Vec<u8> = (0..=255).collect();
    for kernel in Kernel::all_supported() {
        for c in 0..=255 {
            let mut coefficients = Coefficients::default();
            coefficients[0][0] = c;
            let mut out = [0; 256];
            kernel.dot(&coefficients, &[&source], 0, &mut [&mut out], false);
            for (a, &product) in out.iter().enumerate() {
                assert_eq!(product, gf::mul(c, a as u8), "{kernel:?}: {c} * {a}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn any_shape_agrees_with_bytes(
        source_misalignments in prop::collection::vec(0..64_usize, 1..=CHUNKS_MAX),
        out_misalignments in prop::array::uniform4(0..64_usize),
        at in 0..200_usize,
        bytes in 0..900_usize,
        seed: u64,
    ) {
        let case = Case::new(&source_misalignments, out_misalignments, at, bytes, seed);
        Kernel::all_supported().for_each(|kernel| case.check_all(kernel));
    }
}

#[test]
fn kernels_are_found_by_name() {
    for kernel in Kernel::all_supported() {
        assert!(std::ptr::eq(Kernel::by_name(kernel.name()).unwrap(), kernel));
    }
    assert!(Kernel::by_name("abacus").is_none());
    assert_eq!(Kernel::all_supported().last().unwrap().name(), Kernel::portable().name());
}

#[test]
#[should_panic(expected = "a source is too short")]
fn a_short_source_is_refused() {
    Kernel::portable().sum(&[&[0; 8], &[0; 7]], 0, &mut [0; 8]);
}
