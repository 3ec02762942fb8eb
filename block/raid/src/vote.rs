//! What copies of the same bytes come to: block by block, what more than half of those that can be read hold.

use levada_base::BufMut;
use smallvec::SmallVec;
use std::ops::Range;

/// What one member holds of a range.
pub(crate) struct Copy {
    pub bytes: BufMut,
    /// Where the blocks begin that cannot be read, ascending. They have no voice.
    pub unreadable: Vec<usize>,
}

/// By number of the copy; `None` where nobody has it or answers.
pub(crate) type Copies = SmallVec<[Option<Copy>; 4]>;

/// The outcome of a vote.
pub(crate) struct Vote {
    /// Of every block what more than half hold; without a majority, what the first of them holds.
    pub bytes: BufMut,
    /// Where the blocks begin about which there is no majority, ascending.
    pub undecided: Vec<usize>,
    /// Of those, the ones that nobody can read.
    pub silent: Vec<usize>,
    block_bytes: usize,
}

impl Vote {
    pub fn is_decided(&self) -> bool {
        self.undecided.is_empty()
    }

    /// The decided bytes that `copy` does not hold, in runs.
    pub fn corrections(&self, copy: &Copy) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        if copy.unreadable.is_empty() && copy.bytes[..] == self.bytes[..] {
            return runs;
        }
        for start in (0..self.bytes.len()).step_by(self.block_bytes) {
            let block = start..start + self.block_bytes;
            let holds = copy.unreadable.binary_search(&start).is_err()
                && copy.bytes[block.clone()] == self.bytes[block.clone()];
            if holds || self.undecided.binary_search(&start).is_ok() {
                continue;
            }
            match runs.last_mut() {
                Some(run) if run.end == start => run.end = block.end,
                Some(_) | None => runs.push(block),
            }
        }
        runs
    }
}

/// Lets copies of the same bytes vote; `None` when there is none.
pub(crate) fn vote(copies: &Copies, block_bytes: u64) -> Option<Vote> {
    let block_bytes = block_bytes as usize;
    let present: SmallVec<[&Copy; 4]> = copies.iter().flatten().collect();
    let first = present.first()?;
    let mut vote = Vote {
        bytes: BufMut::copy_of(&first.bytes),
        undecided: Vec::new(),
        silent: Vec::new(),
        block_bytes,
    };
    if present.iter().all(|copy| copy.unreadable.is_empty() && copy.bytes[..] == first.bytes[..]) {
        return Some(vote);
    }
    for start in (0..first.bytes.len()).step_by(block_bytes) {
        let block = start..start + block_bytes;
        let voices: SmallVec<[&[u8]; 4]> = present
            .iter()
            .filter(|copy| copy.unreadable.binary_search(&start).is_err())
            .map(|copy| &copy.bytes[block.clone()])
            .collect();
        let agree_with = |one: &[u8]| voices.iter().filter(|other| **other == one).count();
        let elected = voices.iter().find(|one| 2 * agree_with(one) > voices.len());
        if elected.is_none() {
            vote.undecided.push(start);
        }
        match elected.or(voices.first()) {
            Some(one) => vote.bytes[block].copy_from_slice(one),
            None => vote.silent.push(start),
        }
    }
    Some(vote)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In blocks of two bytes, `?` in what cannot be read: what comes out, with the blocks that are undecided.
    fn result(copies: &[&str]) -> (String, Vec<usize>) {
        let copies: Copies = copies.iter().map(|text| copy(text)).collect();
        let vote = vote(&copies, 2).expect("there are copies");
        (String::from_utf8(vote.bytes.to_vec()).expect("letters"), vote.undecided)
    }

    fn copy(text: &str) -> Option<Copy> {
        let unreadable = (0..text.len()).step_by(2).filter(|at| text[*at..].starts_with('?'));
        let copy =
            Copy { bytes: BufMut::copy_of(text.as_bytes()), unreadable: unreadable.collect() };
        (!text.is_empty()).then_some(copy)
    }

    #[test]
    fn more_than_half_decide_block_by_block() {
        let good = ("aabb".to_owned(), vec![]);
        assert_eq!(result(&["xabb", "aabb", "aabb"]), good);
        assert_eq!(result(&["aabb", "xabb", "aabb"]), good);
        assert_eq!(result(&["xabb", "aaby", "aabb"]), good);
        assert_eq!(result(&["", "aabb", "aabb"]), good);
        assert_eq!(result(&["", "aabb", ""]), good);
        assert_eq!(result(&["??bb", "aa??", "aaby"]), ("aabb".to_owned(), vec![2]));
        assert_eq!(result(&["??bb", "aa??", "aabb"]), good);
        assert_eq!(result(&["??by", "aabb", "aabb"]), good);
        // The first one where nothing decides.
        assert_eq!(result(&["xabb", "aaby", ""]), ("xabb".to_owned(), vec![0, 2]));
        assert_eq!(result(&["xabb", "xabb", "aabb", "aabb"]), ("xabb".to_owned(), vec![0]));
        assert_eq!(result(&["zabb", "xabb", "aaby"]), ("zabb".to_owned(), vec![0]));
        assert_eq!(result(&["??bb", "??bb", "??bb"]), ("??bb".to_owned(), vec![0]));
        assert!(vote(&[None, None, None].into_iter().collect(), 2).is_none());
    }

    #[test]
    fn what_is_decided_and_not_held_is_corrected() {
        let copies = ["aabbccdd", "aaxxyydd", "zzbbcc??"];
        let copies: Copies = copies.iter().map(|text| copy(text)).collect();
        let vote = vote(&copies, 2).expect("there are copies");
        let of = |copy: usize| vote.corrections(copies[copy].as_ref().expect("there"));
        assert_eq!((of(0), of(2)), (vec![], vec![0..2, 6..8]));
        assert_eq!(of(1).first(), Some(&(2..6)));
        let undecided = super::vote(
            &copies[1..]
                .iter()
                .map(|copy| {
                    let copy = copy.as_ref().expect("there");
                    Some(Copy {
                        bytes: BufMut::copy_of(&copy.bytes),
                        unreadable: copy.unreadable.clone(),
                    })
                })
                .collect(),
            2,
        )
        .expect("there are copies");
        assert_eq!(undecided.undecided, [0, 2, 4]);
        let last = undecided.corrections(copies[2].as_ref().expect("there"));
        assert_eq!(last.first(), Some(&(6..8)));
    }
}
