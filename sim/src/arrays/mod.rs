//! Arrays in the simulator, on drives that fail and lose power: overwrites on every redundant level, fresh stripes on RAID 6.

mod overwrites;
mod parity;
mod rack;
pub mod rounds;

pub(crate) use overwrites::contents;
pub use overwrites::{a_predecessors_cached_write_is_flushed, journaled, mirror, mirror_loses};
pub use parity::{parity, parity_loses};
pub use rack::{Kind, Rack};
