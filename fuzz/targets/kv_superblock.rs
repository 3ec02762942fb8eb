//! The superblock of a key-value store.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_kv::fuzz::superblock(bytes));
