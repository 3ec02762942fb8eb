//! A directory within the file system, as it is named from outside: `/guests/vm1`.

use std::fmt;
use std::str::FromStr;

/// Where the file system keeps what is not for programs: volumes are in it.
const OWN: &str = ".levada";
const NAME_BYTES_MOST: usize = 255;
const PATH_BYTES_MOST: usize = 4095;

/// The path of a directory from the root of the file system on, without the root itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubtreePath(String);

/// Why a text is no such path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubtreeError {
    /// It starts nowhere.
    #[error("it does not begin with /")]
    Relative,
    /// It is all there is.
    #[error("it is the whole file system")]
    Whole,
    /// It is where volumes, of whomever, are kept.
    #[error("/{OWN} is the cluster's own")]
    Own,
    /// Not one name after the other.
    #[error("\"{name}\" in it is no name")]
    Name {
        /// Between two slashes.
        name: String,
    },
    /// Longer than any path.
    #[error("it is longer than {PATH_BYTES_MOST} bytes")]
    TooLong,
}

impl SubtreePath {
    /// In the place of one that could not be read.
    pub(crate) fn stand_in() -> Self {
        Self("/?".into())
    }

    /// Its names, from the root on.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.split('/').skip(1)
    }

    /// One of the two is in the other, or they are the same.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.names().zip(other.names()).all(|(own, other)| own == other)
    }
}

impl FromStr for SubtreePath {
    type Err = SubtreeError;

    fn from_str(text: &str) -> Result<Self, SubtreeError> {
        let inner = text.strip_prefix('/').ok_or(SubtreeError::Relative)?.trim_end_matches('/');
        if inner.is_empty() {
            return Err(SubtreeError::Whole);
        }
        if text.len() > PATH_BYTES_MOST {
            return Err(SubtreeError::TooLong);
        }
        let is_name = |name: &&str| {
            !["", ".", ".."].contains(name)
                && name.len() <= NAME_BYTES_MOST
                && !name.contains(char::is_control)
        };
        if let Some(name) = inner.split('/').find(|name| !is_name(name)) {
            return Err(SubtreeError::Name { name: name.escape_default().to_string() });
        }
        if inner.split('/').next() == Some(OWN) {
            return Err(SubtreeError::Own);
        }
        Ok(Self(format!("/{inner}")))
    }
}

impl fmt::Display for SubtreePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subtree(text: &str) -> SubtreePath {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn paths_read_as_written() {
        for (text, shown) in [("/a", "/a"), ("/a/b c/", "/a/b c"), ("/.levada.old", "/.levada.old")]
        {
            assert_eq!(subtree(text).to_string(), shown);
        }
        assert_eq!(subtree("/guests/vm1").names().collect::<Vec<_>>(), ["guests", "vm1"]);
    }

    #[test]
    fn what_is_no_directory_of_its_own_is_refused() {
        use SubtreeError::*;
        let name = |name: &str| Name { name: name.into() };
        let long = "x".repeat(256);
        let too_long = "/x".repeat(2048);
        for (text, error) in [
            ("", Relative),
            ("a", Relative),
            ("/", Whole),
            ("///", Whole),
            ("/.levada", Own),
            ("/.levada/volumes/blue", Own),
            ("//a", name("")),
            ("/a//b", name("")),
            ("/a/../b", name("..")),
            ("/.", name(".")),
            ("/a\nb", name("a\\nb")),
            (&format!("/{long}"), name(&long)),
            (&too_long, TooLong),
        ] {
            assert_eq!(text.parse::<SubtreePath>(), Err(error), "{text:?}");
        }
    }

    #[test]
    fn one_in_the_other_overlaps() {
        for (one, other, does) in [
            ("/a", "/a", true),
            ("/a", "/a/b", true),
            ("/a/b/c", "/a", true),
            ("/a", "/ab", false),
            ("/a/b", "/a/c", false),
        ] {
            assert_eq!(subtree(one).overlaps(&subtree(other)), does, "{one} {other}");
            assert_eq!(subtree(other).overlaps(&subtree(one)), does, "{other} {one}");
        }
    }
}
