//! A record of the journal of levels with parity.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_raid::fuzz::journal_record(bytes));
