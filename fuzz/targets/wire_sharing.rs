//! What a neighbour says of shared memory: prefix, returned numbers, table of places.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_wire::fuzz::sharing(bytes));
