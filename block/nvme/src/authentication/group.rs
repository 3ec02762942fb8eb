//! Groups of Diffie and Hellman (RFC 7919).

use crypto_bigint::modular::{BoxedMontyForm, BoxedMontyParams};
use crypto_bigint::{BoxedUint, Odd};

/// A group, by its identifier (8.13.5.3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Group {
    /// None: the challenge alone.
    None = 0,
    Ffdhe2048 = 1,
    Ffdhe3072 = 2,
    Ffdhe4096 = 3,
    Ffdhe6144 = 4,
    Ffdhe8192 = 5,
}

/// Bytes of the number that each side keeps: enough for the strength of the largest group (RFC 7919, 5.2).
const PRIVATE_BYTES: usize = 64;

impl Group {
    /// All of them, from the one that is asked for first: 128 bits of strength for a few milliseconds, then cheaper, then stronger ones.
    pub const ALL: &[Self] = &[
        Self::Ffdhe3072,
        Self::Ffdhe2048,
        Self::Ffdhe4096,
        Self::Ffdhe6144,
        Self::Ffdhe8192,
        Self::None,
    ];

    #[must_use]
    pub fn of_id(id: u8) -> Option<Self> {
        Self::ALL.iter().copied().find(|group| *group as u8 == id)
    }

    /// Of its prime, and what the place of `X` in the definition holds (RFC 7919, appendix A).
    fn shape(self) -> Option<(usize, u32)> {
        match self {
            Self::None => None,
            Self::Ffdhe2048 => Some((2048, 560_316)),
            Self::Ffdhe3072 => Some((3072, 2_625_351)),
            Self::Ffdhe4096 => Some((4096, 5_736_041)),
            Self::Ffdhe6144 => Some((6144, 15_705_020)),
            Self::Ffdhe8192 => Some((8192, 10_965_728)),
        }
    }

    /// Bytes of a number of the group.
    #[must_use]
    pub fn bytes(self) -> usize {
        self.shape().map_or(0, |(bits, _)| bits / 8)
    }
}

/// One side's share of an agreement.
pub(super) struct Share {
    parameters: BoxedMontyParams,
    prime: BoxedUint,
    private: BoxedUint,
}

impl Share {
    /// A new one; `None` without a group.
    pub fn new(group: Group, random: super::Random<'_>) -> Option<Self> {
        let (bits, x) = group.shape()?;
        let prime = BoxedUint::from_be_slice(&prime(bits, x), bits as u32).expect("as many bits");
        let odd = Option::from(Odd::new(prime.clone())).expect("a prime above 2 is odd");
        let mut private = [0; PRIVATE_BYTES];
        random(&mut private);
        // Never 0 or 1.
        private[0] |= 0x80;
        let private = BoxedUint::from_be_slice(&private, PRIVATE_BYTES as u32 * 8);
        let private = private.expect("as many bits");
        Some(Self { parameters: BoxedMontyParams::new(odd), prime, private })
    }

    fn raised(&self, base: BoxedUint) -> Vec<u8> {
        let base = BoxedMontyForm::new(base, &self.parameters);
        base.pow(&self.private).retrieve().to_be_bytes().to_vec()
    }

    /// What the other side is told.
    pub fn public(&self) -> Vec<u8> {
        let mut two = vec![0; self.prime.bits_precision() as usize / 8];
        if let Some(last) = two.last_mut() {
            *last = 2;
        }
        let two = BoxedUint::from_be_slice(&two, self.prime.bits_precision());
        self.raised(two.expect("as many bits"))
    }

    /// What both know then; `None`: the other side's number would give it away (RFC 7919, 5.1).
    pub fn agreed(&self, theirs: &[u8]) -> Option<Vec<u8>> {
        let theirs = BoxedUint::from_be_slice(theirs, self.prime.bits_precision()).ok()?;
        let one = BoxedUint::one_with_precision(self.prime.bits_precision());
        let last = self.prime.wrapping_sub(&one);
        (theirs > one && theirs < last).then(|| self.raised(theirs))
    }
}

/// `2^b - 2^(b-64) + (floor(2^(b-130) e) + X) 2^64 - 1`, most significant byte first (RFC 7919, appendix A).
fn prime(bits: usize, x: u32) -> Vec<u8> {
    let ones = [u32::MAX; 2];
    // The middle, of b - 128 bits; the last ones borrow from it.
    let mut middle = scaled_e(bits - 130);
    middle.resize((bits - 128) / 32, 0);
    let mut carry = u64::from(x - 1);
    for limb in &mut middle {
        carry += u64::from(*limb);
        *limb = carry as u32;
        carry >>= 32;
    }
    let limbs = ones.iter().chain(&middle).chain(&ones);
    let mut bytes: Vec<u8> = limbs.flat_map(|limb| limb.to_le_bytes()).collect();
    bytes.reverse();
    bytes
}

/// `floor(2^bits e)`, least significant limb first: the sum of `2^bits / n!`, with 64 bits more while it is summed up.
fn scaled_e(bits: usize) -> Vec<u32> {
    let bits = bits + 64;
    let mut term = vec![0_u32; bits / 32 + 1];
    term[bits / 32] = 1 << (bits % 32);
    let mut sum = term.clone();
    sum.push(0);
    for n in 1_u64.. {
        let mut rest = 0;
        for limb in term.iter_mut().rev() {
            let value = rest << 32 | u64::from(*limb);
            *limb = (value / n) as u32;
            rest = value % n;
        }
        if term.iter().all(|limb| *limb == 0) {
            break;
        }
        let mut carry = 0;
        for (at, limb) in sum.iter_mut().enumerate() {
            carry += u64::from(*limb) + term.get(at).map_or(0, |more| u64::from(*more));
            *limb = carry as u32;
            carry >>= 32;
        }
    }
    sum.drain(..2);
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Their last 16 bytes, as the RFC prints them: the low bits of e are in there.
    #[test]
    fn primes_end_as_the_rfc_prints_them() {
        let ends = [
            (Group::Ffdhe2048, 0x886b_4238_6128_5c97_u64),
            (Group::Ffdhe3072, 0x25e4_1d2b_66c6_2e37),
            (Group::Ffdhe4096, 0xc68a_007e_5e65_5f6a),
            (Group::Ffdhe6144, 0xa40e_329c_d0e4_0e65),
            (Group::Ffdhe8192, 0xd68c_8bb7_c5c6_424c),
        ];
        for (group, end) in ends {
            let (bits, x) = group.shape().expect("a prime");
            let prime = prime(bits, x);
            assert_eq!(prime.len() * 8, bits);
            assert_eq!(prime[..12], [[0xff; 8].as_slice(), &[0xad, 0xf8, 0x54, 0x58]].concat());
            let last = [end.to_be_bytes(), [0xff; 8]].concat();
            assert_eq!(prime[prime.len() - 16..], last, "{group:?}");
        }
    }

    #[test]
    fn both_agree_and_numbers_that_give_the_secret_away_are_refused() {
        let mut next = 0_u8;
        let mut random = |bytes: &mut [u8]| {
            next += 1;
            bytes.fill(next);
        };
        for group in [Group::Ffdhe2048, Group::Ffdhe8192] {
            let (a, b) = (Share::new(group, &mut random), Share::new(group, &mut random));
            let (a, b) = (a.expect("a group"), b.expect("a group"));
            assert_eq!(a.public().len(), group.bytes());
            assert_eq!(a.agreed(&b.public()), b.agreed(&a.public()));
            let mut number = vec![0; group.bytes()];
            assert!(a.agreed(&number).is_none(), "0");
            number[group.bytes() - 1] = 1;
            assert!(a.agreed(&number).is_none(), "1");
            let (bits, x) = group.shape().expect("a prime");
            let mut last = prime(bits, x);
            assert!(a.agreed(&last).is_none(), "the prime");
            let end = last.len() - 1;
            last[end] -= 1;
            assert!(a.agreed(&last).is_none(), "one less");
            number.push(2);
            assert!(a.agreed(&number).is_none(), "too long");
        }
    }
}
