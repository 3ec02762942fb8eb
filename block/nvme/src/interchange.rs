//! Keys as people hand them on: `PREFIX:HASH:BASE64:`, where a CRC-32 (RFC 1952) stands behind the key, so that a mistyped letter is noticed.
//! Secrets of DH-HMAC-CHAP (Base 2.0, 8.13.5.8) and keys of TLS (TCP, 3.6.1.5) are written alike.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use crc_fast::CrcAlgorithm;

const CRC_BYTES: usize = 4;

/// The hash, and the key with its checksum; `None`: it is not written like that.
pub(crate) fn split<'a>(text: &'a str, prefix: &str) -> Option<(&'a str, &'a str)> {
    let rest = text.strip_prefix(prefix)?.strip_prefix(':')?;
    rest.strip_suffix(':')?.split_once(':')
}

/// The key, and whether its checksum is right; `None`: it is no base64, or too short for a checksum.
pub(crate) fn decode(base64: &str) -> Option<(Vec<u8>, bool)> {
    let mut bytes = STANDARD.decode(base64).ok()?;
    let told: [u8; CRC_BYTES] = *bytes.last_chunk()?;
    bytes.truncate(bytes.len() - CRC_BYTES);
    let is_sound = told == crc(&bytes);
    Some((bytes, is_sound))
}

/// As it is written.
pub(crate) fn encode(prefix: &str, hash: u8, key: &[u8]) -> String {
    format!("{prefix}:{hash:02}:{}:", STANDARD.encode([key, &crc(key)].concat()))
}

fn crc(key: &[u8]) -> [u8; CRC_BYTES] {
    (crc_fast::checksum(CrcAlgorithm::Crc32IsoHdlc, key) as u32).to_le_bytes()
}
