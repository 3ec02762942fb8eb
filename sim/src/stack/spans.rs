//! Which bytes of a file an operation touches: one in three begins or ends where something else does.

use crate::Rng;

/// What is cut into pieces by these: blocks, stripe units, and what a record of the object log holds.
const EDGES: [u64; 3] = [4096, 65_536, 126_976];
pub(super) const FILE_BYTES_MAX: usize = 300_000;

/// At most `max`: a multiple of what pieces are cut by, or the byte before or after it.
pub(super) fn edge(rng: &mut Rng, max: usize) -> usize {
    let step = *rng.pick(&EDGES);
    let at = rng.below(FILE_BYTES_MAX as u64 / step + 1) * step + rng.below(3);
    (at.saturating_sub(1) as usize).min(max)
}

/// Where a write to a file of `size` bytes begins, and its length, which may be 0.
pub(super) fn to_write(rng: &mut Rng, size: usize) -> (usize, usize) {
    let len = match rng.below(4) {
        0 => 4096 * rng.between(1, 16) as usize,
        1 => rng.between(1, 200) as usize,
        _ => rng.between(1, 70_000) as usize,
    };
    let offset = match rng.below(4) {
        0 => size,
        1 => rng.below(40) as usize * 4096,
        _ => rng.below(size as u64 + 5000) as usize,
    };
    let (mut offset, mut len) = (offset.min(FILE_BYTES_MAX - 1), len);
    match rng.below(15) {
        0 | 1 => offset = edge(rng, FILE_BYTES_MAX - 1),
        // So that the end is at one.
        2 => {
            let end = edge(rng, FILE_BYTES_MAX).max(1);
            (offset, len) = (end - len.min(end), len.min(end));
        }
        // From one to another: over several units, or none.
        3 => {
            let (one, other) = (edge(rng, FILE_BYTES_MAX - 1), edge(rng, FILE_BYTES_MAX - 1));
            let (from, to) = (one.min(other), one.max(other).min(one.min(other) + 150_000));
            (offset, len) = (from, to - from);
        }
        4 => len = 0,
        _ => {}
    }
    (offset, len.min(FILE_BYTES_MAX - offset))
}

/// The same for a read, also of what lies at or behind the end, and of all there is.
pub(super) fn to_read(rng: &mut Rng, size: usize) -> (usize, usize) {
    let (offset, len) = (rng.below(size as u64 + 1000) as usize, rng.between(1, 100_000) as usize);
    match rng.below(12) {
        0 => (edge(rng, FILE_BYTES_MAX), len),
        1 => (size, len),
        2 => (size.saturating_sub(1), 1 + rng.below(2) as usize),
        3 => (edge(rng, FILE_BYTES_MAX), rng.below(3) as usize * 65_536),
        4 => (offset, usize::MAX),
        _ => (offset, len),
    }
}
