//! RAID 6: two parities, P and Q (H. P. Anvin, "The mathematics of RAID-6"). Where they lie: [`crate::rotation`].

use levada_parity::{CHUNKS_MAX, Code, ParityError};

pub(crate) const PARITY: usize = 2;

/// Why a group cannot be so wide.
pub(crate) fn check(width: usize) -> Result<(), &'static str> {
    match (3..=CHUNKS_MAX).contains(&width) {
        true => Ok(()),
        false => Err("RAID 6 needs 3 to 32 members, spares apart, in each group"),
    }
}

pub(crate) fn code(data_chunks: usize) -> Result<Code, ParityError> {
    Code::pq(data_chunks)
}
