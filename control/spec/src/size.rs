//! Sizes as people write them: `"2GiB"`, `"128 KiB"`, `"400MB"`, `4096`.
//!
//! Binary units (KiB) count in 1024, decimal units (kB) in 1000; both are exact. A bare `K`
//! or `G` is refused rather than guessed: drives are sold in GB and cut in GiB.

use std::fmt;
use std::str::FromStr;

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

/// Units by factor. Their order is the order in which [`Bytes`] tries to print itself.
const UNITS: [(&str, u64); 10] = [
    ("PiB", 1 << 50),
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("PB", 1_000_000_000_000_000),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
];

/// Why a text is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// A number with a minus.
    #[error("it is less than nothing")]
    Negative,
    /// No digits at the front.
    #[error("it does not start with a number")]
    NoNumber,
    /// A unit that is not one of ours.
    #[error("`{unit}` is not a unit")]
    UnknownUnit {
        /// What stood where the unit belongs.
        unit: String,
    },
    /// A fraction that is not a whole number of bytes.
    #[error("it is not a whole number of bytes")]
    NotWhole,
    /// More than 2^64 - 1 bytes.
    #[error("it is more than 16 EiB")]
    TooLarge,
}

impl Bytes {
    /// One KiB.
    pub const KIB: u64 = 1 << 10;
    /// One MiB.
    pub const MIB: u64 = 1 << 20;
    /// One GiB.
    pub const GIB: u64 = 1 << 30;

    /// So many KiB.
    #[must_use]
    pub const fn kib(count: u64) -> Self {
        Bytes(count * Self::KIB)
    }

    /// So many MiB.
    #[must_use]
    pub const fn mib(count: u64) -> Self {
        Bytes(count * Self::MIB)
    }

    /// So many GiB.
    #[must_use]
    pub const fn gib(count: u64) -> Self {
        Bytes(count * Self::GIB)
    }

    /// Rounded down to a whole number of `step` bytes.
    #[must_use]
    pub const fn floor_to(self, step: u64) -> Self {
        Bytes(self.0 / step * step)
    }
}

impl fmt::Display for Bytes {
    /// The shortest exact form: the largest unit of which this is a whole number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = UNITS.iter().find(|(_, factor)| self.0 > 0 && self.0.is_multiple_of(*factor));
        match whole {
            Some((unit, factor)) => write!(f, "{}{unit}", self.0 / factor),
            None => write!(f, "{}", self.0),
        }
    }
}

impl FromStr for Bytes {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let text = text.trim();
        if text.starts_with('-') {
            return Err(SizeError::Negative);
        }
        let number_end =
            text.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_').unwrap_or(text.len());
        let (number, unit) = (text[..number_end].replace('_', ""), text[number_end..].trim());
        let (whole, fraction) = number.split_once('.').unwrap_or((&number, ""));
        if whole.is_empty() || fraction.contains('.') || number.ends_with('.') {
            return Err(SizeError::NoNumber);
        }
        let factor = match unit {
            "" | "B" => 1,
            unit => UNITS
                .iter()
                .find(|(known, _)| *known == unit)
                .map(|(_, factor)| *factor)
                .ok_or_else(|| SizeError::UnknownUnit { unit: unit.into() })?,
        };
        let fraction = fraction.trim_end_matches('0');
        if fraction.len() > 18 {
            return Err(SizeError::NotWhole);
        }
        // 128 bits hold any u64 times 10^18, so the fraction is handled exactly.
        let scale = 10u128.pow(fraction.len() as u32);
        let whole: u64 = whole.parse().map_err(|_| SizeError::TooLarge)?;
        let fraction: u64 = if fraction.is_empty() {
            0
        } else {
            fraction.parse().map_err(|_| SizeError::NotWhole)?
        };
        let part = u128::from(fraction) * u128::from(factor);
        if part % scale != 0 {
            return Err(SizeError::NotWhole);
        }
        let bytes = u128::from(whole) * u128::from(factor) + part / scale;
        u64::try_from(bytes).map(Bytes).map_err(|_| SizeError::TooLarge)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn units_are_exact() {
        for (text, bytes) in [
            ("4096", 4096),
            ("4096 B", 4096),
            ("128KiB", 131_072),
            ("128 KiB", 131_072),
            ("1.5GiB", 1_610_612_736),
            ("400MB", 400_000_000),
            ("1kB", 1000),
            ("1_000", 1000),
            ("2TiB", 2 << 40),
            ("0", 0),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn guesses_are_refused() {
        assert_eq!("".parse::<Bytes>(), Err(SizeError::NoNumber));
        assert_eq!("GiB".parse::<Bytes>(), Err(SizeError::NoNumber));
        assert_eq!("-1GiB".parse::<Bytes>(), Err(SizeError::Negative));
        assert_eq!("1.GiB".parse::<Bytes>(), Err(SizeError::NoNumber));
        assert_eq!("1.2.3GiB".parse::<Bytes>(), Err(SizeError::NoNumber));
        assert_eq!("2G".parse::<Bytes>(), Err(SizeError::UnknownUnit { unit: "G".into() }));
        assert_eq!("2gib".parse::<Bytes>(), Err(SizeError::UnknownUnit { unit: "gib".into() }));
        assert_eq!("0.3".parse::<Bytes>(), Err(SizeError::NotWhole));
        assert_eq!("99999999PiB".parse::<Bytes>(), Err(SizeError::TooLarge));
        assert_eq!("99999999999999999999999".parse::<Bytes>(), Err(SizeError::TooLarge));
    }

    proptest! {
        #[test]
        fn printed_sizes_read_back(bytes in prop_oneof![any::<u64>(), (0u64..5000).prop_map(|n| n << 20), (0u64..5000).prop_map(|n| n * 1000)]) {
            prop_assert_eq!(Bytes(bytes).to_string().parse(), Ok(Bytes(bytes)));
        }

        #[test]
        fn any_text_is_answered(text in ".{0,30}") {
            let _ = text.parse::<Bytes>();
        }
    }
}
