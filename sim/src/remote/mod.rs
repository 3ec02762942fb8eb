//! A drive over NVMe/TCP, both ends: the real target before a simulated drive, and real initiators that own it one after the other.
//!
//! - `scenario`: a seed, from the first owner to the last.
//! - `shelf`: the target's process, its drive, and the ports that hosts come by.
//! - `owner`: a process that takes the drive, checks all of it, and works on it until it dies or is preempted.
//! - `oracle`: what may be read, whoever the owner is.
//! - `mischief`: what befalls network, target and drive meanwhile.

mod mischief;
mod oracle;
mod owner;
mod scenario;
mod shelf;

pub use scenario::nvme;
