//! Commands of an NVMe host with their data.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_nvme::fuzz::commands(bytes));
