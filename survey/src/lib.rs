//! Survey: measures every layer under the same loads, and says what each costs.
//!
//! How figures are taken: the member models and their `raw` (`members`), loads that are the same
//! on every layer (`load`), two sides of a ratio in interleaved pairs (`harness`). Then one file
//! per layer, from the bottom up; `suite` names all figures, `bench` takes them, `table` shows them.

pub mod bench;
pub mod disk;
pub mod figure;
pub mod harness;
pub mod ladder;
pub mod load;
pub mod members;
pub mod mount;
pub mod qos;
pub mod remote;
pub mod suite;
pub mod table;

mod array;
mod chart;
mod client;
mod cluster;
mod cores;
mod degraded;
mod engine;
mod guest;
mod isal;
mod log;
mod meta;
mod nbd;
mod node;
mod null_fuse;
mod null_volume;
mod nvmet;
mod nvmet_cores;
mod nvmet_tls;
mod object;
mod overwrites;
mod parity;
mod running_box;
mod served;
mod service;
mod vhost;
mod wire;
