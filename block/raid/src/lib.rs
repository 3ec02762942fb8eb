//! raid
