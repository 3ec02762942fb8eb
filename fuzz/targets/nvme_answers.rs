//! What an NVMe controller answers: identities, log pages, reports.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_nvme::fuzz::answers(bytes));
