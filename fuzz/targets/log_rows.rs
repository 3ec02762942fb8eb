//! The rows of the object log's index.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_log::fuzz::rows(bytes));
