//! An entry of the log of errors (Base 1.4, 5.14.1.1; Base 2.0, 5.16.1.2, has the opcode as well): a command that failed.

use crate::completion::MORE;
use crate::field::{put, u16_at, u32_at, u64_at};
use crate::{AdminOpcode, Command, Status};

pub const ERROR_ENTRY_BYTES: usize = 64;

/// A command that failed, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorEntry {
    /// Of the controller's errors, from 1 on.
    pub count: u64,
    pub queue: u16,
    /// The command's identifier.
    pub id: u16,
    pub status: Status,
    /// What in the command was wrong: the byte, and above it (bits 10:8) the bit. `None`: nothing in it, or nobody knows.
    pub wrong_at: Option<u16>,
    /// The first of the blocks that it was about; 0: about none.
    pub first_block: u64,
    /// 0: about none.
    pub namespace: u32,
    /// TCP has failed, not what was asked for.
    pub is_of_transport: bool,
}

/// Where the location of a wrong parameter is not known.
const NOWHERE: u16 = 0xffff;
/// The transport of everything here, as discovery has it.
const TCP: u8 = 3;

impl ErrorEntry {
    #[must_use]
    pub fn of(count: u64, queue: u16, command: &Command, status: Status) -> Self {
        // Commands of Fabrics have something else there.
        let is_fabrics = command.opcode() == AdminOpcode::Fabrics as u8;
        Self {
            count,
            queue,
            id: command.id(),
            status,
            wrong_at: None,
            first_block: 0,
            namespace: if is_fabrics { 0 } else { command.namespace() },
            is_of_transport: false,
        }
    }

    #[must_use]
    pub fn to_bytes(&self) -> [u8; ERROR_ENTRY_BYTES] {
        let mut bytes = [0; ERROR_ENTRY_BYTES];
        put(&mut bytes, 0, &self.count.to_le_bytes());
        put(&mut bytes, 8, &self.queue.to_le_bytes());
        put(&mut bytes, 10, &self.id.to_le_bytes());
        // As in the completion, which said that there is this entry.
        put(&mut bytes, 12, &(self.status.field() | MORE).to_le_bytes());
        put(&mut bytes, 14, &self.wrong_at.unwrap_or(NOWHERE).to_le_bytes());
        put(&mut bytes, 16, &self.first_block.to_le_bytes());
        put(&mut bytes, 24, &self.namespace.to_le_bytes());
        bytes[29] = if self.is_of_transport { TCP } else { 0 };
        bytes
    }

    /// `None`: there are no more of them.
    #[must_use]
    pub fn parse(bytes: &[u8; ERROR_ENTRY_BYTES]) -> Option<Self> {
        let (count, wrong_at) = (u64_at(bytes, 0), u16_at(bytes, 14));
        (count > 0).then_some(Self {
            count,
            queue: u16_at(bytes, 8),
            id: u16_at(bytes, 10),
            status: Status::from_field(u16_at(bytes, 12)),
            wrong_at: (wrong_at != NOWHERE).then_some(wrong_at),
            first_block: u64_at(bytes, 16),
            namespace: u32_at(bytes, 24),
            is_of_transport: bytes[29] == TCP,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_the_specification_has_them() {
        let entry = ErrorEntry {
            count: 0x0102,
            queue: 3,
            id: 0x0405,
            status: Status::OUT_OF_RANGE.and_do_not_retry(),
            wrong_at: Some(40),
            first_block: 0x0607,
            namespace: 8,
            is_of_transport: true,
        };
        let mut expected = [0; ERROR_ENTRY_BYTES];
        // Do not retry, more, and the code above the phase tag.
        let fields = [2, 1, 0, 0, 0, 0, 0, 0, 3, 0, 5, 4, 0x00, 0xc1, 40, 0, 7, 6];
        expected[..18].copy_from_slice(&fields);
        (expected[24], expected[29]) = (8, 3);
        assert_eq!(entry.to_bytes(), expected);
        assert_eq!(ErrorEntry::parse(&expected), Some(entry));
        assert_eq!(ErrorEntry::parse(&[0; ERROR_ENTRY_BYTES]), None);
        let nowhere = ErrorEntry { wrong_at: None, is_of_transport: false, ..entry };
        assert_eq!(nowhere.to_bytes()[14..16], [0xff, 0xff]);
        assert_eq!(ErrorEntry::parse(&nowhere.to_bytes()), Some(nowhere));
    }
}
