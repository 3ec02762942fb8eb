//! Messages by which an NVMe host and a controller prove who they are, and files of their secrets.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_nvme::fuzz::authentication(bytes));
