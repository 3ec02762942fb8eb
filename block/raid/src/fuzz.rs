//! The parsers of this crate for `fuzz/`: bytes from a drive, with a checksum that is right.

use crate::journal;
use crate::lost;
use crate::map::{MapFormat, PageImage, StripeMap};
use crate::superblock::{SUPERBLOCK_BYTES, Superblock};
use levada_base::ids::Uuid;
use levada_base::units::BLOCK_BYTES;

/// A superblock: what is taken for one is written again as it was read.
pub fn superblock(input: &[u8]) {
    let mut bytes = vec![0; SUPERBLOCK_BYTES as usize];
    let len = input.len().min(bytes.len());
    bytes[..len].copy_from_slice(&input[..len]);
    let _ = Superblock::decode(&bytes);
    Superblock::seal(&mut bytes);
    let Some((superblock, index)) = Superblock::decode(&bytes) else { return };
    let mut again = vec![0; SUPERBLOCK_BYTES as usize];
    superblock.encode(index, &mut again);
    assert!(Superblock::decode(&again).is_some(), "what was read cannot be written");
}

/// A record of the journal, and what follows it: what is taken for one is written again as it was read.
pub fn journal_record(input: &[u8]) {
    let uuid = Uuid::from_u128(1);
    let blocks = input.len().div_ceil(BLOCK_BYTES as usize).max(1);
    let mut bytes = vec![0; blocks * BLOCK_BYTES as usize];
    bytes[..input.len()].copy_from_slice(input);
    let _ = journal::decode(&bytes, uuid);
    journal::seal(&mut bytes, uuid);
    let Some(found) = journal::decode(&bytes, uuid) else { return };
    let contents = levada_base::Buf::copy_of(&found.contents);
    let again = found.header.encode(uuid, found.number, &[contents]);
    let again = levada_base::buf::joined(&again);
    assert!(journal::decode(&again, uuid).is_some(), "what was read cannot be written");
}

/// A list of lost blocks.
pub fn lost_blocks(input: &[u8]) {
    let uuid = Uuid::from_u128(1);
    let mut bytes = vec![0; input.len().max(BLOCK_BYTES as usize)];
    bytes[..input.len()].copy_from_slice(input);
    let _ = lost::Image::decode(&bytes, uuid);
    lost::Image::seal(&mut bytes, uuid);
    let _ = lost::Image::decode(&bytes, uuid);
}

/// A page of the written map, of an array with a last page that is not full.
pub fn map_page(input: &[u8]) {
    let uuid = Uuid::from_u128(1);
    let mut bytes = vec![0; BLOCK_BYTES as usize];
    let len = input.len().min(bytes.len());
    bytes[..len].copy_from_slice(&input[..len]);
    for format in [MapFormat::Single, MapFormat::Paired] {
        let _ = PageImage::decode(&bytes, format, uuid, 0);
        PageImage::seal(&mut bytes, format, uuid, 0);
        let image = PageImage::decode(&bytes, format, uuid, 0).expect("sealed");
        let map = StripeMap::empty(uuid, 1000, format);
        map.load(0, &image);
        assert!(map.pages() == 1 && map.missed_stripes() <= map.written_stripes());
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn odd_bytes_do_no_harm() {
        for input in [&[][..], &[0; 5000], &[255; 4096]] {
            super::superblock(input);
            super::map_page(input);
            super::journal_record(input);
            super::lost_blocks(input);
        }
    }
}
