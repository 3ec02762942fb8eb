//! All tests of this crate's outside in one program: what they drive is compiled once.

mod common;
mod crash;
mod faults;
mod machine;
mod planted;
mod rot;
mod walk;
