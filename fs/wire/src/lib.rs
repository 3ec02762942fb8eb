//! Messages between clients and services, and how they travel.
//!
//! From the outside in: messages ([`meta`], [`object`], [`attr`], [`lock`], [`xattr`]), requests and replies
//! ([`rpc`]), frames ([`frame`]), connections ([`channel`]) and what they are made of
//! ([`tcp`], [`same_host`], [`local`]).

pub mod attr;
pub mod channel;
pub mod frame;
pub mod fuzz;
pub mod local;
pub mod lock;
pub mod meta;
pub mod object;
pub mod rpc;
pub mod same_host;
mod sharing;
pub mod tcp;
pub mod xattr;
