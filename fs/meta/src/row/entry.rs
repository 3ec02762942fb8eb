//! Directory entries: one row in the order of listing, one row by name.

use super::{Damaged, Fields, VERSION};
use levada_base::ids::Ino;
use levada_wire::attr::Kind;

/// The value of `D|parent|cookie`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryRow {
    pub ino: Ino,
    pub kind: Kind,
    pub name: Vec<u8>,
}

/// The value of `N|parent|name`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NameRow {
    pub cookie: u64,
    pub ino: Ino,
    pub kind: Kind,
}

/// The number of a kind in the rows.
pub(super) fn kind_number(kind: Kind) -> u8 {
    match kind {
        Kind::File => 1,
        Kind::Directory => 2,
        Kind::Symlink => 3,
        Kind::Special => 4,
    }
}

pub(super) fn kind_of(number: u8) -> Option<Kind> {
    match number {
        1 => Some(Kind::File),
        2 => Some(Kind::Directory),
        3 => Some(Kind::Symlink),
        4 => Some(Kind::Special),
        _ => None,
    }
}

impl EntryRow {
    /// The row's bytes; the name is not copied into an [`EntryRow`] first.
    pub fn encode(ino: Ino, kind: Kind, name: &[u8]) -> Vec<u8> {
        let mut row = Vec::with_capacity(10 + name.len());
        row.extend_from_slice(&[VERSION, kind_number(kind)]);
        row.extend_from_slice(&ino.0.to_le_bytes());
        row.extend_from_slice(name);
        row
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, Damaged> {
        let mut fields = Fields::new("directory entry", bytes)?;
        let kind = kind_of(fields.u8()?).ok_or(fields.damaged())?;
        Ok(Self { ino: Ino(fields.u64()?), kind, name: fields.rest.to_vec() })
    }
}

impl NameRow {
    pub fn encode(&self) -> [u8; 18] {
        let mut row = [0; 18];
        row[0] = VERSION;
        row[1] = kind_number(self.kind);
        row[2..10].copy_from_slice(&self.ino.0.to_le_bytes());
        row[10..].copy_from_slice(&self.cookie.to_le_bytes());
        row
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, Damaged> {
        let mut fields = Fields::new("name", bytes)?;
        let kind = kind_of(fields.u8()?).ok_or(fields.damaged())?;
        let row = Self { kind, ino: Ino(fields.u64()?), cookie: fields.u64()? };
        fields.end()?;
        Ok(row)
    }
}
