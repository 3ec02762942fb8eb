//! The decoders of this crate that are not public, for `fuzz/`.

/// See `sharing::fuzz`: what a neighbour says of shared memory.
pub fn sharing(input: &[u8]) {
    crate::sharing::fuzz(input);
}
