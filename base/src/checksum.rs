//! CRC32C (Castagnoli, RFC 3720 appendix B.4), vectorised by the `crc-fast` crate.

use crc_fast::{CrcAlgorithm, Digest, checksum};

/// The CRC32C of `bytes`.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// The CRC32C of the concatenation of `parts`.
#[must_use]
pub fn crc32c_parts<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    for part in parts {
        digest.update(part);
    }
    digest.finalize() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_the_check_value_of_the_standard() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c_parts([&b"1234"[..], b"56789"]), 0xe306_9283);
        assert_eq!(crc32c(b""), 0);
    }
}
