//! What a program is told, in the same words by a mount and by the model.

use rustix::io::Errno;
use std::collections::BTreeMap;
use std::fmt;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    File,
    Directory,
    Symlink,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stat {
    pub kind: Kind,
    /// Of files; 0 of others.
    pub size: u64,
    pub nlink: u64,
    /// Of a symbolic link it says nothing: 0.
    pub mode: u32,
}

#[derive(Clone, PartialEq, Eq)]
pub enum Answer {
    Done,
    Count(usize),
    Bytes(Vec<u8>),
    Text(String),
    Names(BTreeMap<String, Kind>),
    Attributes(Vec<String>),
    Stat(Stat),
}

pub type Told = Result<Answer, Errno>;

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done => write!(f, "done"),
            Self::Count(count) => write!(f, "{count} bytes"),
            Self::Bytes(bytes) => write!(f, "{} bytes of data", bytes.len()),
            Self::Text(text) => write!(f, "{text:?}"),
            Self::Names(names) => write!(f, "{names:?}"),
            Self::Attributes(names) => write!(f, "{names:?}"),
            Self::Stat(stat) => write!(f, "{stat:?}"),
        }
    }
}

/// What is different, for people.
pub fn difference(told: &Told, expected: &Told) -> String {
    if let (Ok(Answer::Bytes(told)), Ok(Answer::Bytes(expected))) = (told, expected) {
        let differs = |at: &usize| told.get(*at) != expected.get(*at);
        let longest = told.len().max(expected.len());
        let wrong = (0..longest).filter(differs).count();
        let first = (0..longest).find(differs);
        let is_hole = first.is_some_and(|at| told.get(at) == Some(&0));
        return format!(
            "{} bytes instead of {}; {wrong} are wrong, the first at {first:?}{}",
            told.len(),
            expected.len(),
            if is_hole { ", a zero" } else { "" }
        );
    }
    format!("{told:?} instead of {expected:?}")
}
