//! Quality of service: caps and guarantees of I/O per second and bytes per second, by volume and by tenant.
//!
//! - `limits`: what an operator may ask for, and why some of it is refused.
//! - `bucket`: tokens on one core. `common`: one cap over several cores, leased to each in pieces.
//! - `steering`: how much of others may be in flight beside whoever has a guarantee.
//! - `governor`: who goes next. `governed`: a volume that asks it.
//!
//! What always holds:
//! - In any span T what is let through costs at most rate * T + burst, or one request where that is larger, and half a
//!   millisecond of the rate (where a cap is common to several cores, a lease of each instead).
//! - Whoever waits is held by his own cap, his tenant's, or by requests of others that are in flight; never by a cap of others.
//! - A request given up wherever it stands gives back its tokens and its place.
//! - One I/O touches nothing that another thread touches, except once per lease.
//!
//! Nothing here survives a crash, and nothing needs to. Why it is built so: docs/design/0017-qos.md.

mod bucket;
mod common;
mod governed;
mod governor;
mod limits;
mod steering;

pub use common::Common;
pub use governed::Governed;
pub use governor::{Admission, Admitted, Governor, Share, ShareMeters, TIMED_EVERY, Tenant};
pub use limits::{Cost, Kind, Limits, LimitsChange, QosError, Rates, Setting, Terms};

#[cfg(test)]
mod tests;
