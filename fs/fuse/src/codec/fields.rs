//! Fixed-size fields and NUL-terminated names, taken from the front of a
//! message or put at the end of one.

/// The message ended before the field did, or the field is not what it must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BadField {
    Truncated,
    Name,
}

/// What is left of a message.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Fields { rest: bytes }
    }

    pub fn bytes(&mut self, count: usize) -> Result<&'a [u8], BadField> {
        let (taken, rest) = self.rest.split_at_checked(count).ok_or(BadField::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], BadField> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or(BadField::Truncated)?;
        self.rest = rest;
        Ok(*taken)
    }

    pub fn u16(&mut self) -> Result<u16, BadField> {
        Ok(u16::from_ne_bytes(self.array()?))
    }

    pub fn u32(&mut self) -> Result<u32, BadField> {
        Ok(u32::from_ne_bytes(self.array()?))
    }

    pub fn u64(&mut self) -> Result<u64, BadField> {
        Ok(u64::from_ne_bytes(self.array()?))
    }

    /// Bytes up to a NUL, which is consumed too. Never empty: the kernel has
    /// no operation on an empty name, target or attribute.
    pub fn text(&mut self) -> Result<&'a [u8], BadField> {
        let end = self.rest.iter().position(|&byte| byte == 0).ok_or(BadField::Name)?;
        let (text, rest) = self.rest.split_at(end);
        if text.is_empty() {
            return Err(BadField::Name);
        }
        self.rest = &rest[1..];
        Ok(text)
    }

    /// One component of a path: a text without `/`.
    pub fn name(&mut self) -> Result<&'a [u8], BadField> {
        let name = self.text()?;
        if name.contains(&b'/') { Err(BadField::Name) } else { Ok(name) }
    }
}
