//! Arrays in the simulator: the mirror and RAID 6 on drives that fail and lose power.

mod mirror;
mod parity;
mod rack;
pub mod rounds;

pub use mirror::{a_predecessors_cached_write_is_flushed, mirror, mirror_loses};
pub use parity::{parity, parity_loses};
pub use rack::{Kind, Rack};
