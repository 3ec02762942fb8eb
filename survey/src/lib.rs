//! Survey: measures every layer under the same loads, and says what each costs.
//!
//! How figures are taken: the member models, ceilings and floors of `docs/BENCHMARKS.md`; two
//! sides of a ratio in interleaved pairs. One file per layer, from the bottom up.

pub mod figure;
pub mod harness;
pub mod load;
pub mod suite;

mod parity;
