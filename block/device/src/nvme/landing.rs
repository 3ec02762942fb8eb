//! Buffers while data land in them, piece by piece, and parts of buffers.
//!
//! What always holds: a piece that is taken out comes back to its place, so that the buffers are handed back as they were given, the
//! same memory in the same parts. Their owner may have cut them from something larger.

use levada_base::buf::bytes_in;
use levada_base::{BufMut, IoVec, IoVecMut};
use smallvec::SmallVec;

/// See the module.
pub(crate) struct Landing {
    /// `None`: the part that is being filled, while its rest is taken out.
    parts: SmallVec<[Option<BufMut>; 4]>,
    /// The part that is filled next.
    at: usize,
    /// What of it is filled.
    filled: Option<BufMut>,
}

impl Landing {
    pub fn new(into: IoVecMut) -> Self {
        Self { parts: into.into_iter().map(Some).collect(), at: 0, filled: None }
    }

    /// The next piece to fill, of at most `bytes`. The caller fills no more than there is.
    pub fn take(&mut self, bytes: usize) -> BufMut {
        while self.parts[self.at].as_ref().is_some_and(|part| part.is_empty()) {
            self.at += 1;
        }
        let mut rest = self.parts[self.at].take().expect("the last piece was put back");
        if rest.len() <= bytes {
            return rest;
        }
        let piece = rest.split_to(bytes);
        self.parts[self.at] = Some(rest);
        piece
    }

    /// Puts the piece back.
    pub fn put(&mut self, piece: BufMut) {
        let filled = match self.filled.take() {
            None => piece,
            Some(mut filled) => {
                filled.unsplit(piece);
                filled
            }
        };
        if self.parts[self.at].is_some() {
            self.filled = Some(filled);
        } else {
            self.parts[self.at] = Some(filled);
            self.at += 1;
        }
    }

    /// What lies `back` bytes and less behind the place that is filled next: what landed last.
    pub fn last(&self, back: usize) -> SmallVec<[&[u8]; 4]> {
        let mut left = back;
        let mut found: SmallVec<[&[u8]; 4]> = SmallVec::new();
        let whole = self.parts[..self.at].iter().flatten();
        for part in whole.chain(&self.filled).rev() {
            let taken = left.min(part.len());
            found.push(&part[part.len() - taken..]);
            left -= taken;
            if left == 0 {
                break;
            }
        }
        found.reverse();
        found
    }

    /// The buffers as they were given.
    pub fn into_whole(mut self) -> IoVecMut {
        if let Some(mut filled) = self.filled.take() {
            let rest = self.parts[self.at].take().expect("every piece was put back");
            filled.unsplit(rest);
            self.parts[self.at] = Some(filled);
        }
        self.parts.into_iter().map(|part| part.expect("every piece was put back")).collect()
    }
}

/// Cuts buffers into runs of `bytes`, the last of what is left, and remembers how they were.
pub(crate) fn cut(into: IoVecMut, bytes: u64) -> (Vec<IoVecMut>, Shape) {
    let shape = Shape(into.iter().map(|part| part.len()).collect());
    let mut runs = Vec::with_capacity(bytes_in(&into).div_ceil(bytes) as usize);
    let (mut run, mut room) = (IoVecMut::new(), bytes as usize);
    for mut part in into {
        while part.len() > room {
            run.push(part.split_to(room));
            runs.push(std::mem::take(&mut run));
            room = bytes as usize;
        }
        room -= part.len();
        run.push(part);
    }
    runs.push(run);
    (runs, shape)
}

/// How buffers were before they were cut.
pub(crate) struct Shape(SmallVec<[usize; 4]>);

impl Shape {
    /// Joins what was cut.
    pub fn join(self, runs: impl IntoIterator<Item = IoVecMut>) -> IoVecMut {
        let mut pieces = runs.into_iter().flatten();
        let parts = self.0.into_iter().map(|bytes| {
            let mut part = pieces.next().expect("a piece for every part");
            while part.len() < bytes {
                part.unsplit(pieces.next().expect("pieces make up the part"));
            }
            part
        });
        parts.collect()
    }
}

/// `bytes` of the buffers from `at` on.
pub(crate) fn window(from: &IoVec, at: usize, bytes: usize) -> IoVec {
    let (mut skip, mut left) = (at, bytes);
    let mut parts = IoVec::new();
    for part in from {
        if left == 0 {
            break;
        }
        if skip >= part.len() {
            skip -= part.len();
            continue;
        }
        let taken = (part.len() - skip).min(left);
        parts.push(part.slice(skip, taken));
        (skip, left) = (0, left - taken);
    }
    assert_eq!(left, 0, "no more than there is");
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn buffers(lengths: &[usize]) -> (IoVecMut, Vec<*const u8>) {
        let parts: IoVecMut = lengths.iter().map(|bytes| BufMut::zeroed(*bytes)).collect();
        let places = parts.iter().map(|part| part.as_ptr()).collect();
        (parts, places)
    }

    proptest! {
        #[test]
        fn pieces_come_back_to_their_places(
            lengths in prop::collection::vec(0_usize..9, 1..5),
            steps in prop::collection::vec(1_usize..7, 0..20),
        ) {
            let total: usize = lengths.iter().sum();
            let (parts, places) = buffers(&lengths);
            let mut landing = Landing::new(parts);
            let mut done = 0;
            for step in steps {
                let step = step.min(total - done);
                let mut left = step;
                while left > 0 {
                    let mut piece = landing.take(left);
                    for byte in piece.iter_mut() {
                        done += 1;
                        *byte = done as u8;
                    }
                    left -= piece.len();
                    landing.put(piece);
                }
                let last: Vec<u8> = landing.last(step).concat();
                let expected: Vec<u8> = (done - step + 1..=done).map(|byte| byte as u8).collect();
                prop_assert_eq!(last, expected);
            }
            let whole = landing.into_whole();
            prop_assert_eq!(whole.iter().map(|part| part.len()).collect::<Vec<_>>(), lengths);
            prop_assert_eq!(whole.iter().map(|part| part.as_ptr()).collect::<Vec<_>>(), places);
            let bytes: Vec<u8> = whole.iter().flat_map(|part| part.to_vec()).collect();
            let expected = (1..=total).map(|byte| if byte <= done { byte as u8 } else { 0 });
            prop_assert_eq!(bytes, expected.collect::<Vec<_>>());
        }

        #[test]
        fn what_is_cut_can_be_joined(
            lengths in prop::collection::vec(0_usize..50, 1..5),
            bytes in 1_u64..30,
        ) {
            let (parts, places) = buffers(&lengths);
            let (runs, shape) = cut(parts, bytes);
            let total: usize = lengths.iter().sum();
            for (at, run) in runs.iter().enumerate() {
                let left = total - at * bytes as usize;
                prop_assert_eq!(bytes_in(run), bytes.min(left as u64));
            }
            let whole = shape.join(runs);
            prop_assert_eq!(whole.iter().map(|part| part.len()).collect::<Vec<_>>(), lengths);
            prop_assert_eq!(whole.iter().map(|part| part.as_ptr()).collect::<Vec<_>>(), places);
        }
    }
}
