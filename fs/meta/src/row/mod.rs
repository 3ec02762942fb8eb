//! The values of the rows: fixed little-endian fields behind a version byte.
//!
//! `docs/design/0007-metadata.md` draws them. What cannot be decoded is [`Damaged`], never a
//! panic. Checksums are the store's business.

mod admin;
mod entry;
mod inode;
mod usage;
mod xattr;

pub use admin::{
    ClientRow, Counters, DoomedRow, MARK, OrphanRow, ReplyRow, Session, Superblock, TailRow,
    first_ino,
};
pub use entry::{EntryRow, NameRow};
pub use inode::{Body, Inode, StoredBytes};
pub use usage::{Charge, Limit, QuotaRow, Subject, SubjectKind, Usage};
pub use xattr::XattrRow;

/// A row's bytes are not what the version byte promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a {what} row is damaged")]
pub struct Damaged {
    pub what: &'static str,
}

/// Takes fields off the front of a row.
struct Fields<'a> {
    rest: &'a [u8],
    what: &'static str,
}

impl<'a> Fields<'a> {
    /// Checks the version byte, which every row starts with.
    fn new(what: &'static str, bytes: &'a [u8]) -> Result<Self, Damaged> {
        let mut fields = Self { rest: bytes, what };
        if fields.u8()? != VERSION {
            return Err(Damaged { what });
        }
        Ok(fields)
    }

    /// A row that has had several versions, the last of them `newest`.
    fn upto(what: &'static str, newest: u8, bytes: &'a [u8]) -> Result<(Self, u8), Damaged> {
        let mut fields = Self { rest: bytes, what };
        let version = fields.u8()?;
        let is_known = (VERSION..=newest).contains(&version);
        if is_known { Ok((fields, version)) } else { Err(Damaged { what }) }
    }

    fn bytes(&mut self, count: usize) -> Result<&'a [u8], Damaged> {
        let (head, rest) = self.rest.split_at_checked(count).ok_or(Damaged { what: self.what })?;
        self.rest = rest;
        Ok(head)
    }

    fn u8(&mut self) -> Result<u8, Damaged> {
        Ok(self.bytes(1)?[0])
    }

    fn u16(&mut self) -> Result<u16, Damaged> {
        Ok(u16::from_le_bytes(self.bytes(2)?.try_into().expect("2 bytes")))
    }

    fn u32(&mut self) -> Result<u32, Damaged> {
        Ok(u32::from_le_bytes(self.bytes(4)?.try_into().expect("4 bytes")))
    }

    fn u64(&mut self) -> Result<u64, Damaged> {
        Ok(u64::from_le_bytes(self.bytes(8)?.try_into().expect("8 bytes")))
    }

    fn i64(&mut self) -> Result<i64, Damaged> {
        Ok(self.u64()? as i64)
    }

    fn end(&self) -> Result<(), Damaged> {
        if self.rest.is_empty() { Ok(()) } else { Err(Damaged { what: self.what }) }
    }

    fn damaged(&self) -> Damaged {
        Damaged { what: self.what }
    }
}

/// The version of every row so far but a client's.
const VERSION: u8 = 1;
