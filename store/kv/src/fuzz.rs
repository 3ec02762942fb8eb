//! The parsers of this crate for `fuzz/`: bytes from a drive, with a checksum that is right.

use crate::checkpoint;
use crate::format::{self, RECORD_HEADER_BYTES, RecordHeader, Superblock, decode_batches};
use levada_base::units::{BLOCK_BYTES, MIB};

/// A superblock: what is taken for one is written again as it was read.
pub fn superblock(input: &[u8]) {
    let _ = Superblock::decode(input, 8 * MIB);
    let mut block = vec![0; BLOCK_BYTES as usize];
    let len = input.len().min(block.len());
    block[..len].copy_from_slice(&input[..len]);
    format::seal(&mut block, false);
    for area_bytes in [8 * MIB, u64::MAX] {
        let Ok(superblock) = Superblock::decode(&block, area_bytes) else { continue };
        let mut again = vec![0; BLOCK_BYTES as usize];
        superblock.encode(&mut again);
        assert_eq!(Superblock::decode(&again, area_bytes), Ok(superblock));
    }
}

/// A record of the intent log: its header, and the batches behind it.
pub fn intent_record(input: &[u8]) {
    let _ = RecordHeader::decode(input);
    let Some((header, payload)) = input.split_at_checked(RECORD_HEADER_BYTES) else { return };
    let mut header = header.to_vec();
    format::seal(&mut header, true);
    let Some((decoded, _)) = RecordHeader::decode(&header) else { return };
    let mut again = [0; RECORD_HEADER_BYTES];
    decoded.encode(&mut again);
    assert_eq!(RecordHeader::decode(&again).map(|(header, _)| header), Some(decoded));
    if let Ok(batches) = decode_batches(payload, decoded.batches) {
        let mut again = vec![0; payload.len()];
        let mut at = 0;
        for batch in &batches {
            at = format::encode_batch(batch, &mut again, at);
        }
        assert_eq!(again, payload);
    }
}

/// A row of the checkpoint, and its state.
pub fn checkpoint_row(input: &[u8]) {
    checkpoint::read_any(input);
}

#[cfg(test)]
mod tests {
    #[test]
    fn odd_bytes_do_no_harm() {
        for input in [&[][..], &[0; 5000], &[255; 4096]] {
            super::superblock(input);
            super::intent_record(input);
            super::checkpoint_row(input);
        }
    }
}
