//! Kernels: the three inner loops, once per instruction set, chosen once.
//!
//! The loops are written once, in [`lanes`], over a [`lanes::Lanes`] trait;
//! an instruction set is one file that implements it. A [`Kernel`] is a static
//! table of the resulting functions, so a call costs one indirect jump.
//!
//! What always holds: a `&'static Kernel` can only be had for instructions
//! that this processor has. That is what makes its safe methods sound.

#![allow(unsafe_code, reason = "calls functions compiled for a checked instruction set")]

mod lanes;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::LazyLock;

use crate::code::{Coefficients, PARITY_MAX};

/// Sum and Horner sum: `(sources, at, p, q)`.
type Pq = unsafe fn(&[&[u8]], usize, &mut [u8], &mut [u8]);
/// Sum: `(sources, at, out)`.
type Sum = unsafe fn(&[&[u8]], usize, &mut [u8]);
/// Products summed: `(coefficients, sources, at, outs, accumulate)`.
type Dot = unsafe fn(&Coefficients, &[&[u8]], usize, &mut [&mut [u8]], bool);

/// One instruction set's inner loops.
///
/// [`Kernel::best`] is what everyone uses; the others are for tests and
/// measurement.
pub struct Kernel {
    name: &'static str,
    pq: Pq,
    sum: Sum,
    dot: Dot,
    supported: fn() -> bool,
}

/// All kernels of this architecture, fastest first.
static KERNELS: &[&Kernel] = &[
    #[cfg(target_arch = "x86_64")]
    &x86::GFNI_WIDE,
    #[cfg(target_arch = "x86_64")]
    &x86::GFNI,
    #[cfg(target_arch = "x86_64")]
    &x86::AVX512,
    #[cfg(target_arch = "x86_64")]
    &x86::AVX2,
    &portable::PORTABLE,
];

static BEST: LazyLock<&'static Kernel> = LazyLock::new(|| {
    let Ok(name) = std::env::var("LEVADA_PARITY_KERNEL") else {
        return Kernel::all_supported().next().expect("the portable kernel runs everywhere");
    };
    Kernel::by_name(&name).unwrap_or_else(|| {
        let names: Vec<_> = Kernel::all_supported().map(Kernel::name).collect();
        panic!("LEVADA_PARITY_KERNEL={name}: this machine runs {}", names.join(", "))
    })
});

impl Kernel {
    /// The fastest kernel that this processor runs, or the one that the
    /// environment variable `LEVADA_PARITY_KERNEL` names. Decided on first use.
    ///
    /// # Panics
    ///
    /// When that variable names no kernel that runs here.
    #[must_use]
    pub fn best() -> &'static Self {
        *BEST
    }

    /// Plain 64-bit arithmetic; runs everywhere.
    #[must_use]
    pub fn portable() -> &'static Self {
        &portable::PORTABLE
    }

    /// Every kernel that this processor runs, fastest first.
    pub fn all_supported() -> impl Iterator<Item = &'static Self> {
        KERNELS.iter().copied().filter(|kernel| (kernel.supported)())
    }

    /// The kernel called `name`, if this processor runs it.
    #[must_use]
    pub fn by_name(name: &str) -> Option<&'static Self> {
        Self::all_supported().find(|kernel| kernel.name == name)
    }

    /// What `LEVADA_PARITY_KERNEL` calls it: `gfni_wide`, `gfni`, `avx512`, `avx2`, `portable`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// `p` = the sum of the sources, `q` = the sum of 2^i * source i, over the
    /// bytes from `at` of each source.
    pub(crate) fn pq(&self, sources: &[&[u8]], at: usize, p: &mut [u8], q: &mut [u8]) {
        assert!(!sources.is_empty(), "a sum of nothing");
        assert_eq!(p.len(), q.len(), "P and Q differ in length");
        check_sources(sources, at, p.len());
        // SAFETY: a kernel is handed out only where its instructions exist
        // (`all_supported`), and the lengths were checked above.
        unsafe { (self.pq)(sources, at, p, q) }
    }

    /// `out` = the sum of the sources, over the bytes from `at` of each.
    pub(crate) fn sum(&self, sources: &[&[u8]], at: usize, out: &mut [u8]) {
        assert!(!sources.is_empty(), "a sum of nothing");
        check_sources(sources, at, out.len());
        // SAFETY: as in `pq`.
        unsafe { (self.sum)(sources, at, out) }
    }

    /// `outs[j]` = the sum of `coefficients[j][i]` * source i, over the bytes
    /// from `at` of each source; added to what is there if `accumulate`.
    pub(crate) fn dot(
        &self,
        coefficients: &Coefficients,
        sources: &[&[u8]],
        at: usize,
        outs: &mut [&mut [u8]],
        accumulate: bool,
    ) {
        assert!(sources.len() <= coefficients[0].len(), "more sources than coefficients");
        assert!((1..=PARITY_MAX).contains(&outs.len()), "1 to {PARITY_MAX} outputs");
        let bytes = outs[0].len();
        assert!(outs.iter().all(|out| out.len() == bytes), "outputs differ in length");
        check_sources(sources, at, bytes);
        // SAFETY: as in `pq`; also the number of outputs was checked.
        unsafe { (self.dot)(coefficients, sources, at, outs, accumulate) }
    }
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Kernel({})", self.name)
    }
}

fn check_sources(sources: &[&[u8]], at: usize, bytes: usize) {
    let end = at.checked_add(bytes).expect("a range in memory");
    assert!(sources.iter().all(|source| source.len() >= end), "a source is too short");
}

#[cfg(test)]
mod tests;
