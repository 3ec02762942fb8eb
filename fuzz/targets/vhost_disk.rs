//! What a guest of a disk asks, and how it cuts that into chains.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_export_vhost::fuzz::disk_requests(bytes));
