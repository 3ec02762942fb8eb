//! The list of lost blocks of an array with parity.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_raid::fuzz::lost_blocks(bytes));
