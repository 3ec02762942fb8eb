//! The superblock of an array's member.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| levada_raid::fuzz::superblock(bytes));
