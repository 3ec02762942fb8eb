//! A drive over NVMe/TCP, both ends: the real target before a simulated drive, and real initiators that own it one after the other.
//!
//! - `scenario`: a seed, from the first owner to the last.
//! - `shelf`: the target's process, its drives, and the ports that hosts come by; `uplink`: the network as a host has it.
//! - `owner`: a process that takes the drive, checks all of it, and works on it until it dies or is preempted.
//! - `oracle`: what may be read, whoever the owner is.
//! - `mischief`: what befalls network, target and drive meanwhile.

pub(crate) mod mischief;
pub(crate) mod oracle;
mod owner;
mod scenario;
pub(crate) mod shelf;
pub(crate) mod uplink;

pub use scenario::nvme;
