//! What a client says to an NBD server, over a whole connection.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_export_nbd::fuzz::connections(bytes));
