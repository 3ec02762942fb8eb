//! RAID 5: one parity, the exclusive or of the data. Where it lies: [`crate::rotation`].

use levada_parity::{CHUNKS_MAX, Code, ParityError};

pub(crate) const PARITY: usize = 1;

/// Why a group cannot be so wide.
pub(crate) fn check(width: usize) -> Result<(), &'static str> {
    match (2..=CHUNKS_MAX).contains(&width) {
        true => Ok(()),
        false => Err("RAID 5 needs 2 to 32 members, spares apart, in each group"),
    }
}

pub(crate) fn code(data_chunks: usize) -> Result<Code, ParityError> {
    Code::p(data_chunks)
}
