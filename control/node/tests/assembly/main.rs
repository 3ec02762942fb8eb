//! A cluster in a box on memory drives, from format to files and back, on virtual time.

mod checks;
mod drives;
mod fsck;
mod identity;
mod levels;
mod placed;
mod returns;
mod shelf;
mod snapshots;
mod spares;
mod starts;
mod volumes;
