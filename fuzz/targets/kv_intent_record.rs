//! A record of the intent log, and its batches.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_kv::fuzz::intent_record(bytes));
