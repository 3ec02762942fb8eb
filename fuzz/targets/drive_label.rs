//! The label of a drive. What is taken for one is written again as it was read.
#![no_main]

use levada_base::checksum::crc32c;
use levada_device::{LABEL_BYTES, Label};
use libfuzzer_sys::fuzz_target;

/// Byte of the checksum: docs/design/0002-drive-label.md.
const CRC_AT: usize = 12;

fuzz_target!(|bytes: &[u8]| {
    let _ = Label::decode(bytes);
    let mut sealed = vec![0; LABEL_BYTES];
    let len = bytes.len().min(LABEL_BYTES);
    sealed[..len].copy_from_slice(&bytes[..len]);
    sealed[CRC_AT..CRC_AT + 4].fill(0);
    let crc = crc32c(&sealed);
    sealed[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
    if let Ok(label) = Label::decode(&sealed) {
        let again = label.encode().expect("what was read can be written");
        assert_eq!(Label::decode(&again), Ok(label));
    }
});
