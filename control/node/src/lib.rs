//! The node: assembles the floors below from a cluster file, serves them, and answers the
//! `levada` program.

pub mod control;
pub mod state;
