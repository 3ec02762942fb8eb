//! What a guest puts into its rings, and what a back end before left in the memory in flight.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_export_vhost::fuzz::chains(bytes));
