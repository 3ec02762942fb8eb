//! A page of an array's written map.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_raid::fuzz::map_page(bytes));
