//! CRC32C (Castagnoli, RFC 3720 appendix B.4).
//!
//! The `crc-fast` crate computes it with the vector instructions of any processor. Whole blocks
//! of 4 KiB, which is what data is checked in, go to a [`Kernel`] of our own where there is one: it
//! takes less time, and copies in the same pass.
//!
//! What always holds: every kernel gives what the portable one gives.

#![allow(unsafe_code, reason = "calls functions compiled for a checked instruction set")]

#[cfg(target_arch = "x86_64")]
mod x86;

use crc_fast::{CrcAlgorithm, Digest};
use std::sync::LazyLock;

/// What a kernel takes at once.
const BLOCK_BYTES: usize = 4096;
type Block = [u8; BLOCK_BYTES];

/// The register that a checksum begins with, and what its end is inverted by.
const ONES: u32 = u32::MAX;

/// One instruction set's way over a block. Both functions take and return the register, which is
/// the checksum inverted. They may be called where it is [supported](Kernel::supported), and nowhere else.
struct Kernel {
    name: &'static str,
    block: unsafe fn(u32, &Block) -> u32,
    /// The same of what was copied to the second block.
    copy: unsafe fn(u32, &Block, &mut Block) -> u32,
    supported: fn() -> bool,
}

/// All kernels of this architecture, fastest first.
static KERNELS: &[&Kernel] = &[
    #[cfg(target_arch = "x86_64")]
    &x86::GFNI,
    &PORTABLE,
];

static PORTABLE: Kernel = Kernel {
    name: "portable",
    block: |register, block| carried(register, block),
    copy: |register, from, to| {
        to.copy_from_slice(from);
        // What was copied, not what is there now: others may write to it (`stripe.rs` of the log).
        carried(register, to)
    },
    supported: || true,
};

static BEST: LazyLock<&'static Kernel> = LazyLock::new(|| {
    let Ok(name) = std::env::var("LEVADA_CHECKSUM_KERNEL") else {
        return Kernel::all_supported().next().expect("the portable kernel runs everywhere");
    };
    Kernel::all_supported().find(|kernel| kernel.name == name).unwrap_or_else(|| {
        let names: Vec<_> = Kernel::all_supported().map(|kernel| kernel.name).collect();
        panic!("LEVADA_CHECKSUM_KERNEL={name}: this machine runs {}", names.join(", "))
    })
});

impl Kernel {
    /// Every kernel that this processor runs, fastest first.
    fn all_supported() -> impl Iterator<Item = &'static Self> {
        KERNELS.iter().copied().filter(|kernel| (kernel.supported)())
    }

    fn crc32c(&self, register: u32, bytes: &[u8]) -> u32 {
        let (blocks, rest) = bytes.as_chunks::<BLOCK_BYTES>();
        // SAFETY: a kernel is used only where its instructions exist (`all_supported`).
        let over = |register, block| unsafe { (self.block)(register, block) };
        let register = blocks.iter().fold(register, over);
        if rest.is_empty() { register } else { carried(register, rest) }
    }

    fn copy_crc32c(&self, from: &[u8], to: &mut [u8]) -> u32 {
        assert_eq!(from.len(), to.len(), "copies differ in length");
        let (blocks, rest) = from.as_chunks::<BLOCK_BYTES>();
        let (to_blocks, to_rest) = to.as_chunks_mut::<BLOCK_BYTES>();
        let mut register = ONES;
        for (from, to) in blocks.iter().zip(to_blocks) {
            // SAFETY: as in `crc32c`.
            register = unsafe { (self.copy)(register, from, to) };
        }
        to_rest.copy_from_slice(rest);
        !carried(register, to_rest)
    }
}

/// The register after `bytes`, as `crc-fast` computes it.
fn carried(register: u32, bytes: &[u8]) -> u32 {
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(register));
    digest.update(bytes);
    !(digest.finalize() as u32)
}

/// The CRC32C of `bytes`.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    if bytes.len() < BLOCK_BYTES {
        // Headers and rows: all that a digest keeps beside the register costs as much as they do.
        return crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32;
    }
    !BEST.crc32c(ONES, bytes)
}

/// Copies `from` to `to`; the CRC32C of what `to` holds then, also when `from` is written to
/// meanwhile by someone else.
///
/// # Panics
///
/// When they differ in length.
#[must_use]
pub fn copy_crc32c(from: &[u8], to: &mut [u8]) -> u32 {
    BEST.copy_crc32c(from, to)
}

/// The CRC32C of the concatenation of `parts`.
#[must_use]
pub fn crc32c_parts<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    !parts.into_iter().fold(ONES, |register, part| BEST.crc32c(register, part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_the_check_value_of_the_standard() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c_parts([&b"1234"[..], b"56789"]), 0xe306_9283);
        assert_eq!(crc32c(b""), 0);
        assert_eq!(crc32c_parts([]), 0);
    }

    /// Bit by bit, as the standard says it.
    fn model(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(ONES, |mut register, byte| {
            register ^= u32::from(*byte);
            for _ in 0..8 {
                let odd = register & 1;
                register = (register >> 1) ^ (odd * 0x82f6_3b78);
            }
            register
        })
    }

    fn noise(bytes: usize) -> Vec<u8> {
        let mut word = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (word >> 56) as u8
        };
        (0..bytes).map(|_| next()).collect()
    }

    #[test]
    fn every_kernel_is_right_for_every_size_and_alignment() {
        let data = noise(3 * BLOCK_BYTES + 300);
        let sizes = (0..300)
            .chain(BLOCK_BYTES - 70..BLOCK_BYTES + 70)
            .chain(2 * BLOCK_BYTES - 3..2 * BLOCK_BYTES + 3)
            .chain([3 * BLOCK_BYTES, 3 * BLOCK_BYTES + 1]);
        for (turn, bytes) in sizes.enumerate() {
            for skip in [0, turn % 64, 64 + turn * 7 % 64] {
                let from = &data[skip..skip + bytes];
                let expected = model(from);
                assert_eq!(crc32c(from), expected, "{bytes} bytes from {skip}");
                for kernel in Kernel::all_supported() {
                    let found = !kernel.crc32c(ONES, from);
                    assert_eq!(found, expected, "{}: {bytes} bytes from {skip}", kernel.name);
                    let mut room = vec![0; bytes + 128];
                    let to = &mut room[turn % 61..turn % 61 + bytes];
                    let found = kernel.copy_crc32c(from, to);
                    assert_eq!(found, expected, "{}: copy of {bytes} from {skip}", kernel.name);
                    assert_eq!(from, to);
                    assert!(room[..turn % 61].iter().all(|byte| *byte == 0));
                    assert!(room[turn % 61 + bytes..].iter().all(|byte| *byte == 0));
                }
            }
        }
    }

    /// A checksum is linear: what is right for each bit of a block alone is right for all blocks.
    #[test]
    fn every_kernel_is_right_for_every_bit_of_a_block() {
        let mut block = vec![0; BLOCK_BYTES];
        let of_zeroes = model(&block);
        // What one bit adds to the checksum, of the last bit first.
        let mut adds = model(&[0x80]) ^ model(&[0]);
        for bit in (0..8 * BLOCK_BYTES).rev() {
            block[bit / 8] ^= 1 << (bit % 8);
            for kernel in Kernel::all_supported() {
                assert_eq!(
                    !kernel.crc32c(ONES, &block),
                    of_zeroes ^ adds,
                    "{}: {bit}",
                    kernel.name
                );
            }
            block[bit / 8] ^= 1 << (bit % 8);
            adds = (adds >> 1) ^ ((adds & 1) * 0x82f6_3b78);
        }
    }

    #[test]
    fn parts_may_be_cut_anywhere() {
        let data = noise(3 * BLOCK_BYTES);
        let expected = model(&data);
        for cut in [0, 1, 63, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 9, 3 * BLOCK_BYTES] {
            let (head, tail) = data.split_at(cut);
            assert_eq!(crc32c_parts([head, tail]), expected, "cut at {cut}");
        }
    }
}
