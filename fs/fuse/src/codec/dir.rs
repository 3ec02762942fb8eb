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
/// Where the length of the name is in the record of an entry.
const NAME_LENGTH_AT: usize = 16;

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

/// The records of a body that a [`DirBuilder`] has made, of READDIRPLUS if `plus`, for who changes what is told.
#[derive(Debug)]
pub struct Records<'a> {
    left: &'a mut [u8],
    plus: bool,
}

impl<'a> Records<'a> {
    /// Those of `body`.
    #[must_use]
    pub fn of(body: &'a mut [u8], plus: bool) -> Self {
        Self { left: body, plus }
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Record<'a>;

    fn next(&mut self) -> Option<Record<'a>> {
        let left = std::mem::take(&mut self.left);
        let dirent_at = if self.plus { ENTRY_BYTES } else { 0 };
        let length = left.get(dirent_at + NAME_LENGTH_AT..)?.first_chunk::<4>()?;
        let name_at = dirent_at + DIRENT_BYTES;
        let name_end = name_at + u32::from_ne_bytes(*length) as usize;
        let (bytes, left) = left.split_at_mut_checked(name_end.next_multiple_of(8))?;
        self.left = left;
        Some(Record { bytes, dirent_at, name_end })
    }
}

/// What a listing tells of a name.
#[derive(Debug)]
pub struct Record<'a> {
    bytes: &'a mut [u8],
    /// Before it is the entry with attributes, if there is one.
    dirent_at: usize,
    name_end: usize,
}

impl Record<'_> {
    /// The name.
    #[must_use]
    pub fn name(&self) -> &[u8] {
        &self.bytes[self.dirent_at + DIRENT_BYTES..self.name_end]
    }

    /// The inode that the kernel keeps with its attributes, and looks up no more; `None`: it is told the name alone.
    #[must_use]
    pub fn looked_up(&self) -> Option<u64> {
        let entry = self.bytes[..self.dirent_at].first_chunk::<8>()?;
        Some(u64::from_ne_bytes(*entry)).filter(|inode| *inode != 0)
    }

    /// Tells the name alone.
    pub fn without_attributes(&mut self) {
        self.bytes[..self.dirent_at].fill(0);
    }

    /// Says that the name is of another inode; of one that is told with attributes, only in the listing.
    pub fn set_listed(&mut self, inode: u64) {
        self.bytes[self.dirent_at..self.dirent_at + 8].copy_from_slice(&inode.to_ne_bytes());
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

    #[test]
    fn records_are_those_that_were_put_in_and_can_be_changed() {
        for plus in [false, true] {
            let mut dir = DirBuilder::new(4096);
            let known = Entry { inode: 5, generation: 9, ..Entry::default() };
            let names: [&[u8]; 4] = [b".", b"..", b"12345678", b"a name of another length"];
            for (cookie, name) in (1..).zip(names) {
                let entry = if cookie > 2 { known } else { Entry::default() };
                assert!(match plus {
                    true => dir.entry_plus(4, &entry, cookie, libc::S_IFREG, name),
                    false => dir.entry(4, cookie, libc::S_IFREG, name),
                });
            }
            let mut body = dir.finish();
            let mut told = Vec::new();
            for mut record in Records::of(&mut body, plus) {
                told.push((record.name().to_vec(), record.looked_up()));
                record.set_listed(7);
                record.without_attributes();
            }
            let of = |at: usize| (names[at].to_vec(), Some(5).filter(|_| plus && at > 1));
            assert_eq!(told, [of(0), of(1), of(2), of(3)]);
            for (record, name) in Records::of(&mut body, plus).zip(names) {
                assert_eq!((record.name(), record.looked_up()), (name, None));
                let at = record.dirent_at;
                assert_eq!(record.bytes[..at], vec![0; at]);
                assert_eq!(record.bytes[at..at + 8], 7u64.to_ne_bytes());
            }
            // A body that is cut, which nobody makes.
            let cut = body.len() - 8;
            assert_eq!(Records::of(&mut body[..cut], plus).count(), 3);
        }
    }
}
