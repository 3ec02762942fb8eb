//! Reading and writing little-endian fields of bounded byte strings.

/// Takes fields from the front of bytes that are not trusted: past the end is `None`.
pub(crate) struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    pub fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(bytes)?;
        self.0 = tail;
        Some(head)
    }

    pub fn u8(&mut self) -> Option<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.take(4).map(|bytes| u32::from_le_bytes(bytes.try_into().expect("4 bytes")))
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.take(8).map(|bytes| u64::from_le_bytes(bytes.try_into().expect("8 bytes")))
    }

    /// `count` numbers; the bytes are there or nothing is allocated.
    pub fn u32s(&mut self, count: usize) -> Option<Vec<u32>> {
        let bytes = self.take(count.checked_mul(4)?)?;
        Some(bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().expect("4"))).collect())
    }
}

/// Appends little-endian fields.
pub(crate) trait PutFields {
    fn put_u32(&mut self, value: u32);
    fn put_u64(&mut self, value: u64);
}

impl PutFields for Vec<u8> {
    fn put_u32(&mut self, value: u32) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    fn put_u64(&mut self, value: u64) {
        self.extend_from_slice(&value.to_le_bytes());
    }
}
