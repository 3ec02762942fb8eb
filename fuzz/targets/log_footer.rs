//! The footer of a stripe of the object log, and what it describes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_log::fuzz::footer(bytes));
