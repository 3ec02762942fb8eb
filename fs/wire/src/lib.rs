//! Messages between clients and services.

pub mod attr;
pub mod meta;
pub mod object;
