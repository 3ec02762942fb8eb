//! All tests of this crate's outside in one program: what they drive is compiled once.

mod agreed;
mod assembly;
mod attack;
mod attack_whole;
mod away;
mod basics;
mod common;
mod crash;
mod lent;
mod lives;
mod model;
mod neighbours;
mod pace;
mod repairs;
mod scrub;
mod sectors;
mod slow;
