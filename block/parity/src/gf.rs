//! The field GF(2^8) modulo x^8 + x^4 + x^3 + x^2 + 1 (0x11d), generator 2.
//!
//! Addition is exclusive or. All tables are computed at compile time; the
//! kernels take their multipliers from them, so a call sets nothing up.

/// The polynomial without its x^8 term: what a carry out of bit 7 folds into.
pub(crate) const FOLD: u8 = 0x1d;

/// `EXP[i]` is 2^i; twice the period long, so that a sum of two logarithms
/// needs no reduction.
const EXP: [u8; 510] = {
    let mut exp = [0; 510];
    let mut power = 1;
    let mut i = 0;
    while i < 255 {
        exp[i] = power;
        exp[i + 255] = power;
        power = double(power);
        i += 1;
    }
    exp
};

/// `LOG[EXP[i]]` is i; `LOG[0]` means nothing.
const LOG: [u8; 256] = {
    let mut log = [0; 256];
    let mut i = 0;
    while i < 255 {
        log[EXP[i] as usize] = i as u8;
        i += 1;
    }
    log
};

/// `BIT_PRODUCTS[c][b]` is c * 2^b: what bit b of an operand contributes.
pub(crate) static BIT_PRODUCTS: [[u8; 8]; 256] = {
    let mut table = [[0; 8]; 256];
    let mut c = 0;
    while c < 256 {
        let mut b = 0;
        while b < 8 {
            table[c][b] = mul(c as u8, 1 << b);
            b += 1;
        }
        c += 1;
    }
    table
};

/// Products of one coefficient with every low nibble and every high nibble:
/// the two 16-byte tables of a byte-shuffle multiply.
#[repr(align(32))]
pub(crate) struct NibbleProducts {
    pub(crate) low: [u8; 16],
    pub(crate) high: [u8; 16],
}

#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) static NIBBLE_PRODUCTS: [NibbleProducts; 256] = {
    let mut table = [const { NibbleProducts { low: [0; 16], high: [0; 16] } }; 256];
    let mut c = 0;
    while c < 256 {
        let mut n = 0;
        while n < 16 {
            table[c].low[n] = mul(c as u8, n as u8);
            table[c].high[n] = mul(c as u8, (n as u8) << 4);
            n += 1;
        }
        c += 1;
    }
    table
};

/// Multiplication by each coefficient as the 8x8 bit matrix that
/// `GF2P8AFFINEQB` takes (Intel SDM volume 2): the row that makes bit i of
/// the result is byte 7 - i of the operand. The instruction's own multiply is
/// of no use here, because its polynomial is fixed at 0x11b.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) static BIT_MATRICES: [u64; 256] = {
    let mut table = [0; 256];
    let mut c = 0;
    while c < 256 {
        let mut i = 0;
        while i < 8 {
            let mut b = 0;
            while b < 8 {
                let bit = (mul(c as u8, 1 << b) >> i) & 1;
                table[c] |= (bit as u64) << ((7 - i) * 8 + b);
                b += 1;
            }
            i += 1;
        }
        c += 1;
    }
    table
};

/// 2a.
const fn double(a: u8) -> u8 {
    (a << 1) ^ if a & 0x80 != 0 { FOLD } else { 0 }
}

/// ab.
pub(crate) const fn mul(a: u8, b: u8) -> u8 {
    if a == 0 || b == 0 {
        return 0;
    }
    EXP[LOG[a as usize] as usize + LOG[b as usize] as usize]
}

/// 1/a. Zero has no inverse; asking for it is a broken invariant.
pub(crate) const fn inverse(a: u8) -> u8 {
    assert!(a != 0, "zero has no inverse");
    EXP[255 - LOG[a as usize] as usize]
}

/// 2^i for i below 255.
pub(crate) const fn exp(i: usize) -> u8 {
    assert!(i < 255, "2^255 is 1 again");
    EXP[i]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Schoolbook: shift, add, fold. Shares nothing with the tables.
    fn mul_by_bits(mut a: u8, mut b: u8) -> u8 {
        let mut product = 0;
        while b != 0 {
            if b & 1 != 0 {
                product ^= a;
            }
            let carry = a & 0x80 != 0;
            a <<= 1;
            if carry {
                a ^= 0x1d;
            }
            b >>= 1;
        }
        product
    }

    #[test]
    fn products_agree_with_schoolbook() {
        for a in 0..=255 {
            for b in 0..=255 {
                assert_eq!(mul(a, b), mul_by_bits(a, b), "{a} * {b}");
            }
        }
    }

    #[test]
    fn every_element_but_zero_has_an_inverse() {
        for a in 1..=255 {
            assert_eq!(mul(a, inverse(a)), 1, "{a}");
        }
    }

    #[test]
    fn the_generator_visits_every_element() {
        let mut seen = [false; 256];
        for i in 0..255 {
            assert!(!std::mem::replace(&mut seen[exp(i) as usize], true), "2^{i} repeats");
        }
        assert!(!seen[0]);
    }

    #[test]
    fn derived_tables_agree_with_products() {
        for c in 0..=255_u8 {
            for a in 0..=255_u8 {
                let want = mul_by_bits(c, a);
                let nibbles = &NIBBLE_PRODUCTS[c as usize];
                assert_eq!(nibbles.low[a as usize & 15] ^ nibbles.high[a as usize >> 4], want);
                let bits = BIT_PRODUCTS[c as usize];
                let sum = (0..8).filter(|b| a >> b & 1 != 0).fold(0, |sum, b| sum ^ bits[b]);
                assert_eq!(sum, want);
                let matrix = BIT_MATRICES[c as usize].to_le_bytes();
                let affine = (0..8)
                    .fold(0, |out, i| out | (((matrix[7 - i] & a).count_ones() as u8 & 1) << i));
                assert_eq!(affine, want);
            }
        }
    }
}
