//! The table of a pool of volumes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_volume::fuzz::pool_table(bytes));
