//! Marks: what a mirror's member holds of a block of which no copy could be read when it was rebuilt.
//!
//! A member remembers what a rebuild left out of it until the array is closed. Mirrors keep no checksums, and not
//! everybody who reads one has some: what a drive held there before it was away must not pass for the block after
//! the next open, least of all when two such drives agree. So the drive knows too. A mark names its member and its
//! place, and is none anywhere else.

use crate::member::Member;
use levada_base::{BufMut, IoVecMut};

const MAGIC: &[u8; 8] = b"LVDNOCPY";
const TEXT: &[u8] = b"no copy of this block could be read when this member was rebuilt\n";
const HEAD_BYTES: usize = 32;

fn head(member: &Member, at: u64) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..8].copy_from_slice(MAGIC);
    head[8..24].copy_from_slice(member.uuid.as_bytes());
    head[24..].copy_from_slice(&at.to_le_bytes());
    head
}

/// What `member` is to hold of the block at this offset.
pub(crate) fn mark(member: &Member, at: u64, block_bytes: u64) -> BufMut {
    let mut block = BufMut::zeroed(block_bytes as usize);
    block[..HEAD_BYTES].copy_from_slice(&head(member, at));
    block[HEAD_BYTES..][..TEXT.len()].copy_from_slice(TEXT);
    block
}

/// Where the marks are among what `member` gave from `at` on, which is the start of a block.
pub(crate) fn find(member: &Member, at: u64, parts: &IoVecMut, block_bytes: u64) -> Vec<u64> {
    let mut found = Vec::new();
    let mut part_at = at;
    for part in parts {
        let first = part_at.next_multiple_of(block_bytes);
        for block_at in (first..part_at + part.len() as u64).step_by(block_bytes as usize) {
            let block = &part[(block_at - part_at) as usize..];
            if block.starts_with(MAGIC) && block.starts_with(&head(member, block_at)) {
                found.push(block_at);
            }
        }
        part_at += part.len() as u64;
    }
    found
}
