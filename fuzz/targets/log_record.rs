//! A record header of the object log.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_log::fuzz::record(bytes));
