//! Where on a member the records of the journal lie, one behind the other, round and round. Arithmetic only.

use std::collections::VecDeque;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    sequence: u64,
    start: u64,
    blocks: u64,
}

/// The records of one member, in order.
#[derive(Default)]
pub(crate) struct Ring {
    spans: VecDeque<Span>,
    /// Blocks of them.
    used: u64,
}

impl Ring {
    /// That of a member on whose `area` blocks records were found: the sequence of each, where it starts, and its blocks. They
    /// need not lie in the order of their sequences: a start may have recorded some again.
    pub fn found(area: u64, records: impl Iterator<Item = (u64, u64, u64)>) -> Self {
        let span = |(sequence, start, blocks)| Span { sequence, start, blocks };
        let mut spans: Vec<Span> = records.map(span).collect();
        spans.sort_unstable_by_key(|span| span.start);
        // The widest gap is what is free; how it is known where the ring begins.
        let gap = |at: usize| {
            let before = spans[(at + spans.len() - 1) % spans.len()];
            let end = before.start + before.blocks;
            let start = if at == 0 { area } else { 0 } + spans[at].start;
            start.saturating_sub(end)
        };
        let first = (0..spans.len()).max_by_key(|at| gap(*at)).unwrap_or(0);
        spans.rotate_left(first);
        Self { used: spans.iter().map(|span| span.blocks).sum(), spans: spans.into() }
    }

    /// Where the next record goes, of so many blocks, in an area of `area` blocks. `None`: there is no room, of which
    /// `spare` blocks stay free.
    fn place(&self, area: u64, blocks: u64, spare: u64) -> Option<u64> {
        let (Some(oldest), Some(newest)) = (self.spans.front(), self.spans.back()) else {
            return (blocks + spare <= area).then_some(0);
        };
        let (head, end) = (newest.start + newest.blocks, oldest.start);
        let free = if head > end { area - head + end } else { end - head };
        if free < blocks + spare {
            return None;
        }
        match head > end {
            true if head + blocks <= area => Some(head),
            true => (blocks < end).then_some(0),
            // One block apart, so that a full ring is not an empty one.
            false => (head + blocks < end).then_some(head),
        }
    }

    /// Takes room for a record.
    pub fn reserve(&mut self, area: u64, sequence: u64, blocks: u64, spare: u64) -> Option<u64> {
        let start = self.place(area, blocks, spare)?;
        self.spans.push_back(Span { sequence, start, blocks });
        self.used += blocks;
        Some(start)
    }

    /// Whether [`Self::reserve`] would find room.
    pub fn has_room(&self, area: u64, blocks: u64, spare: u64) -> bool {
        self.place(area, blocks, spare).is_some()
    }

    /// Records below `tail` have no meaning any more.
    pub fn free_below(&mut self, tail: u64) {
        while let Some(span) = self.spans.front().filter(|span| span.sequence < tail) {
            self.used -= span.blocks;
            self.spans.pop_front();
        }
    }

    /// Blocks that records hold.
    pub fn used(&self) -> u64 {
        self.used
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A start that was cut short had written record 9 again, behind 10: the next start must not take its place.
    #[test]
    fn what_was_recorded_again_is_not_written_over() {
        // Sequence, first block, blocks.
        let spans = [(8, 0, 5), (9, 10, 5), (10, 5, 5)];
        let mut ring = Ring::found(64, spans.into_iter());
        let start = ring.reserve(64, 11, 5, 0).expect("it has room");
        let is_free =
            |(_, other, blocks): &(u64, u64, u64)| start + 5 <= *other || other + blocks <= start;
        assert!(spans.iter().all(is_free), "record 11 at {start} lies on another");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// No record lies on one that has a meaning, nor over the end.
        #[test]
        fn records_do_not_overlap(
            area in 40..200u64,
            steps in prop::collection::vec((1..12u64, 0..4u64, any::<bool>()), 1..200),
        ) {
            let mut ring = Ring::default();
            let mut model: VecDeque<(u64, u64, u64)> = VecDeque::new();
            for (sequence, (blocks, gone, spare)) in steps.into_iter().enumerate() {
                let sequence = sequence as u64;
                let spare = if spare { 24 } else { 0 };
                if let Some(start) = ring.reserve(area, sequence, blocks, spare) {
                    prop_assert!(start + blocks <= area);
                    for (_, other, other_blocks) in &model {
                        prop_assert!(start + blocks <= *other || other + other_blocks <= start);
                    }
                    model.push_back((sequence, start, blocks));
                } else {
                    prop_assert!(!model.is_empty());
                }
                for _ in 0..gone {
                    model.pop_front();
                }
                ring.free_below(model.front().map_or(u64::MAX, |(sequence, ..)| *sequence));
                prop_assert_eq!(ring.used(), model.iter().map(|(_, _, blocks)| blocks).sum::<u64>());
            }
        }
    }
}
