//! Which data lies together: what dies together leaves whole segments empty.
//!
//! What was just written is *hot*: it is likely to be written over soon. What outlived its segment and was copied by the
//! cleaner is *cold*. Each has its own open stripe and segment, so that a segment of hot data soon holds little that must be
//! copied, and one of cold data is left alone (Rosenblum and Ousterhout, "The Design and Implementation of a
//! Log-Structured File System", 1992, section 3.5).

use std::ops::{Index, IndexMut};

/// How soon data is expected to die.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heat {
    Hot,
    Cold,
}

impl Heat {
    pub const ALL: [Self; 2] = [Self::Hot, Self::Cold];
}

/// One of something for each [`Heat`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ByHeat<T>([T; Heat::ALL.len()]);

impl<T> ByHeat<T> {
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter()
    }
}

impl<T> Index<Heat> for ByHeat<T> {
    type Output = T;

    fn index(&self, heat: Heat) -> &T {
        &self.0[heat as usize]
    }
}

impl<T> IndexMut<Heat> for ByHeat<T> {
    fn index_mut(&mut self, heat: Heat) -> &mut T {
        &mut self.0[heat as usize]
    }
}
