//! Sizes, and the one alignment that all direct I/O here obeys.

/// 2^10 bytes.
pub const KIB: u64 = 1 << 10;
/// 2^20 bytes.
pub const MIB: u64 = 1 << 20;
/// 2^30 bytes.
pub const GIB: u64 = 1 << 30;

/// Every buffer, and every access to a drive, is a multiple of this many bytes.
pub const BLOCK_BYTES: u64 = 4 * KIB;

/// Rounds `n` down to a multiple of `to`, which must not be 0.
#[must_use]
pub const fn round_down(n: u64, to: u64) -> u64 {
    n - n % to
}

/// Rounds `n` up to a multiple of `to`, which must not be 0.
#[must_use]
pub const fn round_up(n: u64, to: u64) -> u64 {
    n.div_ceil(to) * to
}
