//! Entry points for the fuzzer: targets that say anything.

mod targets;
mod units;

pub use targets::targets;
pub use units::units;
