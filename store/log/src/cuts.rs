//! The truncations of an object that still matter, so that the cleaner knows which do not.
//!
//! A truncation hides what is older and past its size. A later one to the same size or less hides
//! all of that too, so the earlier record is dead. Without this a file that is truncated again
//! and again (a log, a database's journal) would leave a record each time, and the cleaner would
//! copy them all.
//!
//! What always holds: versions ascend, and so do sizes; no more than [`CUTS_MAX`] are known. One
//! that was forgotten for that only lets records live on that could go.

/// Truncations that are remembered for one object.
pub(crate) const CUTS_MAX: usize = 4;

/// A truncation: its version, and the size that it set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    pub version: u64,
    pub size: u64,
}

/// The newest truncations of one object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cuts(Vec<Cut>);

impl Cuts {
    /// Cuts as they were stored. `None` when they cannot be true.
    pub fn load(cuts: Vec<Cut>) -> Option<Self> {
        let ascend =
            |pair: &[Cut]| pair[0].version < pair[1].version && pair[0].size < pair[1].size;
        (cuts.len() <= CUTS_MAX && cuts.windows(2).all(ascend)).then_some(Self(cuts))
    }

    /// The object was truncated; later than all that are known.
    pub fn push(&mut self, cut: Cut) {
        while self.0.last().is_some_and(|last| last.size >= cut.size) {
            self.0.pop();
        }
        if self.0.len() == CUTS_MAX {
            // The first reaches furthest down, the others are steps of a file that grows.
            self.0.remove(1);
        }
        self.0.push(cut);
    }

    /// True when a later truncation hides all that one of `version` at `offset` hides.
    pub fn supersede(&self, version: u64, offset: u64) -> bool {
        self.0.iter().any(|cut| cut.version > version && cut.size <= offset)
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Cut> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        /// Against all truncations ever: one that is called superseded is, and with few steps
        /// every superseded one is known.
        #[test]
        fn only_what_a_later_one_covers_is_superseded(sizes in prop::collection::vec(0..12u64, 1..20)) {
            let mut cuts = Cuts::default();
            for (version, size) in sizes.iter().enumerate() {
                cuts.push(Cut { version: version as u64, size: *size });
                prop_assert_eq!(Cuts::load(cuts.iter().copied().collect()), Some(cuts.clone()));
            }
            let steps = |sizes: &[u64]| {
                let step = |at: &usize| sizes[at + 1..].iter().all(|later| *later > sizes[*at]);
                (0..sizes.len()).filter(step).count()
            };
            let all_known = (1..=sizes.len()).all(|end| steps(&sizes[..end]) <= CUTS_MAX);
            for (version, size) in sizes.iter().enumerate() {
                let truly = sizes[version + 1..].iter().any(|later| later <= size);
                let said = cuts.supersede(version as u64, *size);
                prop_assert!(said == truly || !said && !all_known, "{} of {:?}", version, sizes);
            }
        }
    }

    #[test]
    fn cuts_that_do_not_ascend_are_refused() {
        let cut = |version, size| Cut { version, size };
        assert!(Cuts::load(vec![cut(1, 5), cut(2, 5)]).is_none());
        assert!(Cuts::load(vec![cut(2, 5), cut(1, 6)]).is_none());
        assert!(Cuts::load((0..=CUTS_MAX as u64).map(|n| cut(n, n)).collect()).is_none());
    }
}
