//! The simulator: the whole stack in one process, on virtual time, with faults, from one seed.
//!
//! What is simulated, how likely each fault is, what is checked and what is not:
//! `docs/design/0009-simulation.md`.

pub mod arrays;
mod block_model;
mod coverage;
mod drive;
pub mod enclosures;
pub mod planted;
pub mod remote;
mod rng;
pub mod seeds;
pub mod soak;
pub mod stack;
pub mod stores;
mod world;

pub use block_model::{BlockModel, fill, recognise, runs_of};
pub use coverage::Coverage;
pub use drive::SimDrive;
pub use rng::Rng;
pub use seeds::{Outcome, Scenario};
pub use world::{LOSSES_MAX, Shape, World};
