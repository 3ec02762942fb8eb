//! The body of READDIR and READDIRPLUS: as many entries as the kernel has room
//! for.
//!
//! ```text
//! READDIR:      | inode 8 | cookie 8 | name length 4 | type 4 | name | to 8 bytes |
//! READDIRPLUS:  | fuse_entry_out 128 | the same                                   |
//! ```

use super::attr::Entry;
use super::reply::Head;

const DIRENT_BYTES: usize = 24;
const ENTRY_BYTES: usize = 128;

/// Collects directory entries up to the size a request allows.
#[derive(Debug)]
pub struct DirBuilder {
    bytes: Vec<u8>,
    bytes_max: usize,
}

impl DirBuilder {
    /// Room for `size` bytes ([`super::ReadArgs::size`]).
    #[must_use]
    pub fn new(size: u32) -> Self {
        DirBuilder { bytes: Vec::new(), bytes_max: size as usize }
    }

    /// Adds an entry of READDIR. `cookie` is what the kernel sends to go on
    /// after this entry (at most `i64::MAX`); of `mode` the type bits count.
    ///
    /// Returns false, and adds nothing, when there is no room: send what is
    /// there.
    #[must_use]
    pub fn entry(&mut self, inode: u64, cookie: u64, mode: u32, name: &[u8]) -> bool {
        if self.bytes.len() + record_bytes(DIRENT_BYTES, name) > self.bytes_max {
            return false;
        }
        self.put_dirent(inode, cookie, mode, name);
        true
    }

    /// Adds an entry of READDIRPLUS, as [`DirBuilder::entry`] does. An `entry`
    /// with inode 0 gives the name without attributes; `.` and `..` need no
    /// more.
    #[must_use]
    pub fn entry_plus(
        &mut self,
        inode: u64,
        entry: &Entry,
        cookie: u64,
        mode: u32,
        name: &[u8],
    ) -> bool {
        if self.bytes.len() + record_bytes(ENTRY_BYTES + DIRENT_BYTES, name) > self.bytes_max {
            return false;
        }
        let mut body = Head::bare();
        entry.put(&mut body);
        self.bytes.extend_from_slice(body.as_ref());
        self.put_dirent(inode, cookie, mode, name);
        true
    }

    fn put_dirent(&mut self, inode: u64, cookie: u64, mode: u32, name: &[u8]) {
        let file_type = (mode & libc::S_IFMT) >> 12;
        let name_bytes = u32::try_from(name.len()).expect("a name that fits the buffer");
        self.bytes.extend_from_slice(&inode.to_ne_bytes());
        self.bytes.extend_from_slice(&cookie.to_ne_bytes());
        self.bytes.extend_from_slice(&name_bytes.to_ne_bytes());
        self.bytes.extend_from_slice(&file_type.to_ne_bytes());
        self.bytes.extend_from_slice(name);
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
    }

    /// True before the first entry.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The body for [`super::Reply::Bytes`]; empty means the end.
    #[must_use]
    pub fn finish(self) -> Vec<u8> {
        self.bytes
    }
}

fn record_bytes(fixed_bytes: usize, name: &[u8]) -> usize {
    (fixed_bytes + name.len()).next_multiple_of(8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_stop_at_the_limit_and_are_padded() {
        let mut dir = DirBuilder::new(24 + 8 + 24 + 16);
        assert!(dir.entry(7, 1, libc::S_IFDIR | 0o755, b"a"));
        assert!(!dir.entry(8, 2, libc::S_IFREG, &[b'b'; 17]));
        assert!(dir.entry(8, 2, libc::S_IFREG, &[b'b'; 16]));
        assert!(!dir.entry(9, 3, libc::S_IFREG, b"c"));
        let bytes = dir.finish();
        assert_eq!(bytes.len(), 72);
        assert_eq!(&bytes[20..24], &4u32.to_ne_bytes());
        assert_eq!(&bytes[24..32], b"a\0\0\0\0\0\0\0");
    }

    #[test]
    fn an_entry_with_attributes_is_152_bytes_and_its_name() {
        let mut dir = DirBuilder::new(160);
        let entry = Entry { inode: 5, ..Entry::default() };
        assert!(dir.entry_plus(5, &entry, 1, libc::S_IFREG, b"12345678"));
        assert!(!dir.entry_plus(5, &entry, 2, libc::S_IFREG, b"1"));
        let bytes = dir.finish();
        assert_eq!(bytes.len(), 160);
        assert_eq!(&bytes[..8], &5u64.to_ne_bytes());
        assert_eq!(&bytes[152..], b"12345678");
    }
}
