//! Ranges in names and paths: `"/dev/nvme{0..23}n1"` stands for 24 paths.
//!
//! One range per text. A first number with leading zeros fixes the width: `{00..11}` is
//! `00`, `01`, ... `11`. Braces in a path itself cannot be written; no drive path needs them.

/// The most texts one pattern may stand for.
const EXPANSION_MAX: u64 = 4096;

/// Why a pattern cannot be expanded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// Braces that do not hold `first..last`.
    #[error("the braces do not hold a range")]
    NotARange,
    /// A second pair of braces.
    #[error("there is more than one pair of braces")]
    SecondRange,
    /// A last number before the first.
    #[error("the range ends before it starts ({first}..{last})")]
    Backwards {
        /// Where it starts.
        first: u64,
        /// Where it ends, inclusive.
        last: u64,
    },
    /// A range of absurd length.
    #[error("the range has {count} members; at most {EXPANSION_MAX} are allowed")]
    TooMany {
        /// How many it has.
        count: u64,
    },
    /// The name and the path of one entry expand to different numbers of texts.
    #[error("the name stands for {names} drives and the path for {paths}")]
    UnequalCounts {
        /// Texts the name stands for.
        names: usize,
        /// Texts the path stands for.
        paths: usize,
    },
}

/// Patterns that stand for these numbers, which rise: a run of them is one.
#[must_use]
pub fn of_numbers(numbers: &[u32]) -> Vec<String> {
    let runs = numbers.chunk_by(|one, next| one + 1 == *next);
    runs.map(|run| match run {
        [one] => one.to_string(),
        _ => format!("{{{}..{}}}", run[0], run[run.len() - 1]),
    })
    .collect()
}

/// All texts that `pattern` stands for, in order; itself when it holds no braces.
///
/// # Errors
///
/// [`PatternError`] when the braces hold no usable range.
pub(crate) fn expand(pattern: &str) -> Result<Vec<String>, PatternError> {
    let (Some(open), Some(close)) = (pattern.find('{'), pattern.find('}')) else {
        return if pattern.contains(['{', '}']) {
            Err(PatternError::NotARange)
        } else {
            Ok(vec![pattern.into()])
        };
    };
    if close < open {
        return Err(PatternError::NotARange);
    }
    let (before, range, after) =
        (&pattern[..open], &pattern[open + 1..close], &pattern[close + 1..]);
    if after.contains(['{', '}']) || range.contains('{') {
        return Err(PatternError::SecondRange);
    }
    let (first_text, last_text) = range.split_once("..").ok_or(PatternError::NotARange)?;
    let number = |text: &str| match text.bytes().all(|b| b.is_ascii_digit()) {
        true => text.parse::<u64>().map_err(|_| PatternError::NotARange),
        false => Err(PatternError::NotARange),
    };
    let (first, last) = (number(first_text)?, number(last_text)?);
    if last < first {
        return Err(PatternError::Backwards { first, last });
    }
    if last - first >= EXPANSION_MAX {
        return Err(PatternError::TooMany { count: (last - first).saturating_add(1) });
    }
    let width = if first_text.starts_with('0') { first_text.len().min(20) } else { 1 };
    Ok((first..=last).map(|n| format!("{before}{n:0width$}{after}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_expand() {
        assert_eq!(expand("plain").unwrap(), ["plain"]);
        assert_eq!(
            expand("/dev/nvme{9..11}n1").unwrap(),
            ["/dev/nvme9n1", "/dev/nvme10n1", "/dev/nvme11n1"]
        );
        assert_eq!(expand("d{08..10}").unwrap(), ["d08", "d09", "d10"]);
    }

    #[test]
    fn bad_ranges_are_refused() {
        for text in [
            "a{",
            "a}",
            "}{",
            "{}",
            "{1}",
            "{1..}",
            "{a..b}",
            "{+1..2}",
            "{1..99999999999999999999999}",
        ] {
            assert_eq!(expand(text), Err(PatternError::NotARange), "{text}");
        }
        assert_eq!(expand("{1..2}{1..2}"), Err(PatternError::SecondRange));
        assert_eq!(expand("{5..2}"), Err(PatternError::Backwards { first: 5, last: 2 }));
        assert_eq!(expand("{0..4096}"), Err(PatternError::TooMany { count: 4097 }));
    }
}
