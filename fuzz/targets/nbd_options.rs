//! What a client asks for before it uses an NBD export.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_export_nbd::fuzz::options(bytes));
