//! The rows of the metadata service.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_meta::fuzz::rows(bytes));
