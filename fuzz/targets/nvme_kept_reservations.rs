//! What a target has kept of reservations.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_nvme::fuzz::kept_reservations(bytes));
