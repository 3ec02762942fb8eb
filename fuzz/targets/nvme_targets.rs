//! What an NVMe/TCP target says to our initiator, over whole connections.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_device::nvme::fuzz::targets(bytes));
