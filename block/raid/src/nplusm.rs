//! N+M: one to four parities by a Cauchy matrix. Where they lie: [`crate::rotation`].

use levada_parity::{CHUNKS_MAX, Code, PARITY_MAX, ParityError};

/// Why it cannot have so many roles.
pub(crate) fn check(width: usize, parity: usize) -> Result<(), &'static str> {
    if !(1..=PARITY_MAX).contains(&parity) {
        return Err("N+M has 1 to 4 parities");
    }
    match (parity + 1..=CHUNKS_MAX).contains(&width) {
        true => Ok(()),
        false => Err("N+M needs more members than parities, spares apart, and at most 32"),
    }
}

pub(crate) fn code(data_chunks: usize, parity: usize) -> Result<Code, ParityError> {
    Code::cauchy(data_chunks, parity)
}
