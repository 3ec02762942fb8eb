//! A row of the key-value store's checkpoint.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_kv::fuzz::checkpoint_row(bytes));
