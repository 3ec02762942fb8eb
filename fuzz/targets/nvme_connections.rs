//! What hosts say to an NVMe/TCP target, over whole connections.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_export_nvmet::fuzz::connections(bytes));
