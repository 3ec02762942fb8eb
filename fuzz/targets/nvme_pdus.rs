//! Units of NVMe/TCP, as either side receives them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_nvme::fuzz::pdus(bytes));
