//! What a front end of vhost-user sends.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_export_vhost::fuzz::messages(bytes));
