//! Notifications: what a server tells the kernel by itself (`fuse_out_header` with `unique` 0).

use super::OUT_HEADER_BYTES;

/// `FUSE_NOTIFY_INVAL_INODE`.
const INVAL_INODE: i32 = 2;
/// `FUSE_NOTIFY_INVAL_ENTRY`.
const INVAL_ENTRY: i32 = 3;
/// `fuse_notify_inval_entry_out`: directory, length of the name, flags; the name and a NUL follow.
const INVAL_ENTRY_BYTES: usize = 16;
/// `FUSE_NOTIFY_STORE`.
const STORE: i32 = 4;
/// `fuse_notify_store_out`: inode, offset, size, padding; the bytes follow.
const STORE_BYTES: usize = 24;
/// `fuse_notify_inval_inode_out`: inode, offset, length.
const INVAL_INODE_BYTES: usize = 24;

/// Drops the cached pages and attributes of an inode. Writing this waits for pages that are being read or
/// written.
#[must_use]
pub fn invalidate_inode(inode: u64) -> [u8; OUT_HEADER_BYTES + INVAL_INODE_BYTES] {
    let mut message = [0; OUT_HEADER_BYTES + INVAL_INODE_BYTES];
    let bytes = message.len() as u32;
    message[..4].copy_from_slice(&bytes.to_ne_bytes());
    message[4..8].copy_from_slice(&INVAL_INODE.to_ne_bytes());
    message[16..24].copy_from_slice(&inode.to_ne_bytes());
    // From 0, and a length of 0: to the end.
    message
}

/// Drops the cached pages of some bytes (0: all from there on) and the attributes. Writing this waits for those of them that are being read or
/// written.
#[must_use]
pub fn invalidate_range(
    inode: u64,
    offset: u64,
    bytes: u64,
) -> [u8; OUT_HEADER_BYTES + INVAL_INODE_BYTES] {
    let mut message = invalidate_inode(inode);
    message[24..32].copy_from_slice(&offset.to_ne_bytes());
    message[32..40].copy_from_slice(&bytes.to_ne_bytes());
    message
}

/// Drops the cached attributes of an inode, and none of its pages: this waits for nothing.
#[must_use]
pub fn invalidate_attributes(inode: u64) -> [u8; OUT_HEADER_BYTES + INVAL_INODE_BYTES] {
    let mut message = invalidate_inode(inode);
    message[24..32].copy_from_slice(&(-1_i64).to_ne_bytes());
    message
}

/// Makes the kernel look a name up again. Writing this waits for calls that work in the directory.
#[must_use]
pub fn invalidate_entry(directory: u64, name: &[u8]) -> Vec<u8> {
    let mut message = vec![0; OUT_HEADER_BYTES + INVAL_ENTRY_BYTES];
    message.extend_from_slice(name);
    message.push(0);
    let bytes = message.len() as u32;
    message[..4].copy_from_slice(&bytes.to_ne_bytes());
    message[4..8].copy_from_slice(&INVAL_ENTRY.to_ne_bytes());
    message[16..24].copy_from_slice(&directory.to_ne_bytes());
    message[24..28].copy_from_slice(&(name.len() as u32).to_ne_bytes());
    message
}

/// Gives the kernel the last byte of a file of `size` bytes, at least 1, and so its size, where it knows of less.
#[must_use]
pub fn store_last_byte(
    inode: u64,
    size: u64,
    byte: u8,
) -> [u8; OUT_HEADER_BYTES + STORE_BYTES + 1] {
    let mut message = [0; OUT_HEADER_BYTES + STORE_BYTES + 1];
    let bytes = message.len() as u32;
    message[..4].copy_from_slice(&bytes.to_ne_bytes());
    message[4..8].copy_from_slice(&STORE.to_ne_bytes());
    message[16..24].copy_from_slice(&inode.to_ne_bytes());
    message[24..32].copy_from_slice(&(size - 1).to_ne_bytes());
    message[32..36].copy_from_slice(&1_u32.to_ne_bytes());
    message[40] = byte;
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_is_laid_out_as_in_the_abi() {
        let message = invalidate_inode(0x1122);
        assert_eq!(message.len(), 40);
        assert_eq!(message[..8], [40_u32.to_ne_bytes(), 2_u32.to_ne_bytes()].concat());
        assert_eq!(message[8..16], [0; 8]);
        assert_eq!(message[16..24], 0x1122_u64.to_ne_bytes());
        assert_eq!(message[24..], [0; 16]);
        let message = invalidate_range(0x1122, 0x33, 0x44);
        assert_eq!(message[..24], invalidate_inode(0x1122)[..24]);
        assert_eq!(message[24..], [0x33_u64.to_ne_bytes(), 0x44_u64.to_ne_bytes()].concat());
        let message = invalidate_attributes(0x1122);
        assert_eq!(message[..24], invalidate_inode(0x1122)[..24]);
        assert_eq!(message[24..], [[0xFF; 8], [0; 8]].concat());
        let message = invalidate_entry(0x1122, b"abc");
        assert_eq!(message[..8], [36_u32.to_ne_bytes(), 3_u32.to_ne_bytes()].concat());
        assert_eq!(message[8..16], [0; 8]);
        assert_eq!(message[16..24], 0x1122_u64.to_ne_bytes());
        assert_eq!(message[24..32], [3_u32.to_ne_bytes(), [0; 4]].concat());
        assert_eq!(message[32..], *b"abc\0");
        let message = store_last_byte(7, 100, 9);
        assert_eq!(message[..8], [41_u32.to_ne_bytes(), 4_u32.to_ne_bytes()].concat());
        assert_eq!(message[16..32], [7_u64.to_ne_bytes(), 99_u64.to_ne_bytes()].concat());
        assert_eq!(message[32..], [1, 0, 0, 0, 0, 0, 0, 0, 9]);
    }
}
