//! An entry of a completion queue (Base, 4.6).

use crate::Status;
use crate::field::{array, put, u16_at, u64_at};

pub const COMPLETION_BYTES: usize = 16;

/// The answer to a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// What the command is answered with beside data: doublewords 0 and 1.
    pub result: u64,
    /// How far the controller has come with the submission queue.
    pub queue_head: u16,
    /// Of the command.
    pub id: u16,
    pub status: Status,
    /// The log of errors has an entry of it (Base, 4.6.1: M).
    pub has_more: bool,
}

/// Of the status field, with the phase tag below it.
pub(crate) const MORE: u16 = 1 << 14;

impl Completion {
    #[must_use]
    pub fn parse(bytes: &[u8; COMPLETION_BYTES]) -> Self {
        Self {
            result: u64_at(bytes, 0),
            queue_head: u16_at(bytes, 8),
            id: u16_at(bytes, 12),
            status: Status::from_field(u16_at(bytes, 14)),
            has_more: u16_at(bytes, 14) & MORE != 0,
        }
    }

    /// As bytes. The queue's identifier stays 0: a connection is a queue (TCP, 3.2).
    #[must_use]
    #[inline]
    pub fn to_bytes(&self) -> [u8; COMPLETION_BYTES] {
        let mut bytes = [0; COMPLETION_BYTES];
        put(&mut bytes, 0, &self.result.to_le_bytes());
        put(&mut bytes, 8, &self.queue_head.to_le_bytes());
        put(&mut bytes, 12, &self.id.to_le_bytes());
        let more = if self.has_more { MORE } else { 0 };
        put(&mut bytes, 14, &(self.status.field() | more).to_le_bytes());
        array(&bytes, 0)
    }
}
