//! A keyed hash of facts, so that sets of facts can be compared by their sums.
//!
//! The key is drawn anew for every check, so nobody can make rows whose sums agree by chance: two
//! sets of facts that differ have one sum with a probability of 2^-128.

use levada_base::reactor;
use siphasher::sip128::{Hasher128, SipHasher13};
use std::hash::Hasher;

/// See the module. Sums of hashes wrap around.
pub struct FactHash {
    keyed: SipHasher13,
    bucket_factor: u64,
}

/// What a hash is of.
#[derive(Clone, Copy)]
pub enum Fact {
    /// An inode of a kind has a name.
    Name = 1,
    /// A directory is in another.
    Within,
    /// A directory has a subdirectory.
    Holds,
    /// An entry of a directory, name and all.
    Entry,
    /// An inode has an extended attribute.
    Xattr,
}

/// The bits of a bucket's number.
pub const BUCKET_BITS: u32 = 18;

impl FactHash {
    pub fn new() -> Self {
        let keyed = SipHasher13::new_with_keys(reactor::random_u64(), reactor::random_u64());
        Self { keyed, bucket_factor: reactor::random_u64() | 1 }
    }

    pub fn of(&self, fact: Fact, numbers: &[u64], text: &[u8]) -> u128 {
        let mut hasher = self.keyed;
        hasher.write_u8(fact as u8);
        for number in numbers {
            hasher.write_u64(*number);
        }
        hasher.write(text);
        hasher.finish128().as_u128()
    }

    /// Inodes in one bucket share a sum.
    pub fn bucket(&self, ino: u64) -> usize {
        (ino.wrapping_mul(self.bucket_factor) >> (u64::BITS - BUCKET_BITS)) as usize
    }
}
