//! The table of targets. What is taken for one is written again as it was read.
#![no_main]

use levada_base::checksum::crc32c;
use levada_base::units::BLOCK_BYTES;
use levada_node::targets::TargetTable;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = TargetTable::decode(bytes);
    let mut sealed = vec![0; BLOCK_BYTES as usize];
    let len = bytes.len().min(sealed.len());
    sealed[..len].copy_from_slice(&bytes[..len]);
    sealed[12..16].fill(0);
    let crc = crc32c(&sealed);
    sealed[12..16].copy_from_slice(&crc.to_le_bytes());
    if let Ok(table) = TargetTable::decode(&sealed) {
        let again = TargetTable::decode(&table.encode()).expect("what was read can be written");
        assert_eq!(again.targets, table.targets);
        for target in &table.targets {
            let _ = target.name();
        }
    }
});
