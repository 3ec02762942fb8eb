//! What a guest of a file system asks, and how it cuts that into chains.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_export_vhost::fuzz::fs_requests(bytes));
