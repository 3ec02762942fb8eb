//! All tests of this crate's outside in one program: what they drive is compiled once.

mod background;
mod burial;
mod crashes;
mod files;
mod full;
mod half_way;
mod holes;
mod lease;
mod leases;
mod locks;
mod placement;
mod planted;
mod quotas;
mod reclaims;
mod sharing;
mod silent;
mod space;
mod unnamed;
mod world;
