//! Levels as people name them: `0`, `1`, `10`, `5`, `6`, `50`, `60`, `8+3`.

use levada_base::units::KIB;
use levada_raid::Level;

/// Copies of a mirror when nothing else is said.
const COPIES: usize = 2;
/// Groups of RAID 50 and 60 when nothing else is said.
const GROUPS: usize = 2;

/// A level, as it was asked for.
#[derive(Clone, Debug)]
pub struct LevelWords {
    pub level: String,
    pub copies: Option<usize>,
    pub groups: Option<usize>,
}

/// Why these words mean no level.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LevelError {
    #[error("{word:?} is no level: 0, 1, 10, 5, 6, 50, 60, or N+M such as 8+3")]
    Unknown { word: String },
    #[error("--{option} says nothing about level {word}")]
    Beside { word: String, option: &'static str },
    #[error("level {word} is of {needed} drives, spares apart; {given} are given")]
    Width { word: String, needed: usize, given: usize },
    #[error(
        "level 1 with {given} drives, spares apart: --copies {given} keeps all data on each of them, --level 10 keeps two copies \
         spread over them"
    )]
    Copies { given: usize },
}

impl LevelWords {
    /// The level that is meant, of an array of `width` drives beside its spares.
    ///
    /// # Errors
    ///
    /// [`LevelError`]. Whether the level can have so many drives is for the array to say.
    pub fn level(&self, width: usize) -> Result<Level, LevelError> {
        let word = self.level.trim_start_matches("raid").to_owned();
        let is_mirror = matches!(word.as_str(), "1" | "10");
        let has_groups = matches!(word.as_str(), "50" | "60");
        if self.copies.is_some() && !is_mirror {
            return Err(LevelError::Beside { word, option: "copies" });
        }
        if self.groups.is_some() && !has_groups {
            return Err(LevelError::Beside { word, option: "groups" });
        }
        let copies = self.copies.unwrap_or(COPIES);
        let groups = self.groups.unwrap_or(GROUPS);
        match word.as_str() {
            "0" => Ok(Level::Raid0),
            "1" if width > copies => match self.copies {
                Some(needed) => Err(LevelError::Width { word, needed, given: width }),
                None => Err(LevelError::Copies { given: width }),
            },
            "1" | "10" => Ok(Level::Raid1 { copies }),
            "5" => Ok(Level::Raid5),
            "6" => Ok(Level::Raid6),
            "50" => Ok(Level::Raid50 { groups }),
            "60" => Ok(Level::Raid60 { groups }),
            _ => {
                let parts = word.split_once('+');
                let parts = parts.and_then(|(n, m)| Some((n.parse().ok()?, m.parse().ok()?)));
                let Some((data, parity)) = parts else { return Err(LevelError::Unknown { word }) };
                let _: (usize, usize) = (data, parity);
                let needed = data.saturating_add(parity);
                if needed != width {
                    return Err(LevelError::Width { word, needed, given: width });
                }
                Ok(Level::NPlusM { parity })
            }
        }
    }
}

/// The word for a level of `width` roles.
pub(crate) fn word_of(level: Level, width: usize) -> String {
    match level {
        Level::Raid0 => "0".into(),
        Level::Raid1 { copies } if copies == width => "1".into(),
        Level::Raid1 { .. } => "10".into(),
        Level::Raid5 => "5".into(),
        Level::Raid6 => "6".into(),
        Level::Raid50 { .. } => "50".into(),
        Level::Raid60 { .. } => "60".into(),
        Level::NPlusM { parity } => format!("{}+{parity}", width.saturating_sub(parity)),
    }
}

/// A level in a few words: `RAID 6 4+2, 64 KiB chunks`.
#[must_use]
pub fn describe(level: Level, width: usize, chunk_bytes: u64) -> String {
    let kib = chunk_bytes / KIB;
    let data = |members: usize| members.saturating_sub(level.tolerates());
    match level {
        Level::Raid0 => format!("RAID 0 over {width}, {kib} KiB chunks"),
        Level::Raid1 { copies } if copies == width => format!("mirror of {copies} copies"),
        Level::Raid1 { copies } => {
            format!("spread mirror of {copies} copies over {width}, {kib} KiB extents")
        }
        Level::Raid5 | Level::Raid6 => {
            format!("{level} {}+{}, {kib} KiB chunks", data(width), level.tolerates())
        }
        Level::Raid50 { groups } | Level::Raid60 { groups } => {
            let of_group = width / groups.max(1);
            let parity = level.tolerates();
            format!("{level} of {}+{parity}, {kib} KiB chunks", data(of_group))
        }
        Level::NPlusM { parity } => format!("{}+{parity}, {kib} KiB chunks", data(width)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn level(
        word: &str,
        copies: Option<usize>,
        groups: Option<usize>,
        width: usize,
    ) -> Result<Level, LevelError> {
        LevelWords { level: word.into(), copies, groups }.level(width)
    }

    #[test]
    fn words_mean_levels_and_levels_have_words() {
        for (word, copies, groups, width, meant) in [
            ("0", None, None, 3, Level::Raid0),
            ("1", None, None, 2, Level::Raid1 { copies: 2 }),
            ("1", Some(3), None, 3, Level::Raid1 { copies: 3 }),
            ("10", None, None, 5, Level::Raid1 { copies: 2 }),
            ("5", None, None, 3, Level::Raid5),
            ("6", None, None, 6, Level::Raid6),
            ("50", None, Some(3), 9, Level::Raid50 { groups: 3 }),
            ("60", None, None, 8, Level::Raid60 { groups: 2 }),
            ("8+3", None, None, 11, Level::NPlusM { parity: 3 }),
        ] {
            assert_eq!(level(word, copies, groups, width), Ok(meant));
            assert_eq!(word_of(meant, width), word);
        }
        assert_eq!(level("raid6", None, None, 6), Ok(Level::Raid6));
    }

    #[test]
    fn what_is_no_level_is_told() {
        for word in ["", "7", "8+", "+3", "8+x", "-1+2"] {
            assert!(
                matches!(level(word, None, None, 4), Err(LevelError::Unknown { .. })),
                "{word}"
            );
        }
        assert!(matches!(level("6", Some(2), None, 6), Err(LevelError::Beside { .. })));
        assert!(matches!(level("10", None, Some(2), 6), Err(LevelError::Beside { .. })));
        assert!(matches!(level("8+3", None, None, 10), Err(LevelError::Width { needed: 11, .. })));
        assert_eq!(level("1", None, None, 3), Err(LevelError::Copies { given: 3 }));
        assert!(matches!(level("1", Some(2), None, 3), Err(LevelError::Width { .. })));
        // A sum past the end of numbers.
        let word = format!("{}+3", usize::MAX);
        assert!(matches!(level(&word, None, None, 4), Err(LevelError::Width { .. })));
    }
}
