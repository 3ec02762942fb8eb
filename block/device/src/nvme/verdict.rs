//! What a status of a command on blocks means for who asked.

use crate::BlockError;
use levada_nvme::Status;

/// What comes next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Done,
    /// This path does not reach the blocks just now; another may.
    NotHere,
    /// This path may do better with another try, and so may others.
    Again,
    /// Another host has the reservation.
    Conflict,
    Failed(BlockError),
}

/// What was asked for, as errors tell it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub operation: &'static str,
    pub at: u64,
    pub bytes: u64,
    pub capacity_bytes: u64,
    pub is_read: bool,
}

impl Verdict {
    pub fn of(status: Status, asked: Asked) -> Self {
        let Asked { operation, at, bytes, capacity_bytes, is_read } = asked;
        let failed = |errno| Self::Failed(BlockError::Io { errno });
        if status.is_success() {
            return Self::Done;
        }
        // A namespace that is taken away and put back again is not there for a moment.
        if status.is_of_path() || status.is(Status::INVALID_NAMESPACE) {
            return Self::NotHere;
        }
        // What a later owner does to what the earlier one has under way.
        if status.is(Status::RESERVATION_CONFLICT) || status.is(Status::ABORTED_BY_PREEMPTION) {
            return Self::Conflict;
        }
        // Linux's target says so of blocks that its drive cannot read.
        let is_denied_read = is_read && status.is(Status::ACCESS_DENIED);
        if status.is(Status::UNRECOVERED_READ_ERROR) || status.is_of_integrity() || is_denied_read {
            return Self::Failed(BlockError::Medium { at, bytes });
        }
        if status.is(Status::OUT_OF_RANGE) {
            return Self::Failed(BlockError::OutOfRange { at, bytes, capacity_bytes });
        }
        if status.is(Status::INVALID_OPCODE) {
            return Self::Failed(BlockError::Unsupported { operation });
        }
        if status.is(Status::CAPACITY_EXCEEDED) {
            return failed(libc::ENOSPC);
        }
        if status.is(Status::WRITE_PROTECTED) {
            return failed(libc::EROFS);
        }
        if status.is(Status::ACCESS_DENIED) {
            return failed(libc::EACCES);
        }
        if status.is(Status::INTERNAL_ERROR) && status.do_not_retry && is_read {
            return Self::Failed(BlockError::Medium { at, bytes });
        }
        // A command that was stopped on its way, or a target that is busy; whatever else need not be asked again says so.
        match status.do_not_retry {
            false => Self::Again,
            true => failed(libc::EIO),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_its_meaning() {
        let (at, bytes, capacity_bytes) = (4096, 512, 1 << 20);
        let asked = Asked { operation: "compare", at, bytes, capacity_bytes, is_read: true };
        let errno = |errno| Verdict::Failed(BlockError::Io { errno });
        for (status, expected) in [
            (Status::SUCCESS, Verdict::Done),
            (Status::ANA_INACCESSIBLE, Verdict::NotHere),
            (Status::PATH_ERROR.and_do_not_retry(), Verdict::NotHere),
            (Status::INVALID_NAMESPACE.and_do_not_retry(), Verdict::NotHere),
            (Status::RESERVATION_CONFLICT.and_do_not_retry(), Verdict::Conflict),
            (Status::ABORTED_BY_PREEMPTION.and_do_not_retry(), Verdict::Conflict),
            (Status::UNRECOVERED_READ_ERROR, Verdict::Failed(BlockError::Medium { at, bytes })),
            (
                Status::ACCESS_DENIED.and_do_not_retry(),
                Verdict::Failed(BlockError::Medium { at, bytes }),
            ),
            (
                Status::OUT_OF_RANGE,
                Verdict::Failed(BlockError::OutOfRange { at, bytes, capacity_bytes }),
            ),
            (
                Status::INVALID_OPCODE,
                Verdict::Failed(BlockError::Unsupported { operation: "compare" }),
            ),
            (Status::CAPACITY_EXCEEDED, errno(libc::ENOSPC)),
            (Status::WRITE_PROTECTED, errno(libc::EROFS)),
            (Status::WRITE_FAULT, Verdict::Again),
            (Status::WRITE_FAULT.and_do_not_retry(), errno(libc::EIO)),
            (Status::ABORTED, Verdict::Again),
            (Status::NOT_READY, Verdict::Again),
        ] {
            assert_eq!(Verdict::of(status, asked), expected, "{status}");
        }
        let denied = Verdict::of(Status::ACCESS_DENIED, Asked { is_read: false, ..asked });
        assert_eq!(denied, errno(libc::EACCES));
    }
}
