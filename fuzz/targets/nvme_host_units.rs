//! What an NVMe/TCP target sends to our initiator.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_device::nvme::fuzz::units(bytes));
