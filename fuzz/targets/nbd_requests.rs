//! What a client asks of an NBD export.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_export_nbd::fuzz::requests(bytes));
