//! The whole stack: production assembly on simulated drives, clients over a simulated network.

mod attrs;
mod calm;
mod cluster;
mod contests;
mod expected;
mod floors;
mod full;
mod heirs;
mod holes;
mod losses;
mod mischief;
mod model;
mod pairs;
mod scenario;
mod spans;
mod turns;
mod worker;

pub use cluster::Stack;
pub use expected::empty_cells;
pub use losses::{LOSSES, Loss, loss, losses};
pub use scenario::stack;
