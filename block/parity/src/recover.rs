//! Recovery: computes lost chunks from any k that are left.
//!
//! The lost data is solved for first, on paper: with e data chunks lost, e
//! parity chunks give e equations, and a matrix of e by e coefficients is
//! inverted. That turns every wanted chunk into one sum of products over the
//! chunks at hand, which the kernel computes in a single pass over memory.
//! (Anvin, section 4, does the same for P and Q by cases.)

use crate::{
    code::{CHUNKS_MAX, Code, Coefficients, PARITY_MAX, ParityError, assert_lengths},
    gf,
};

/// What the caller has of one chunk of a stripe.
#[derive(Debug)]
pub enum Slot<'a> {
    /// The chunk is at hand and right.
    Present(&'a [u8]),
    /// The chunk is lost; compute it into this.
    Wanted(&'a mut [u8]),
    /// The chunk is lost or was not read, and nobody asks for it.
    Absent,
}

/// A square matrix of at most `PARITY_MAX` rows.
type Square = [[u8; PARITY_MAX]; PARITY_MAX];

impl Code {
    /// Computes the chunks listed in `lost` from all the others. `chunks` are
    /// those of one stripe, or any one range of them, data first.
    ///
    /// # Errors
    ///
    /// [`ParityError::TooManyLost`]; then nothing was written.
    ///
    /// # Panics
    ///
    /// When the number of chunks is not the code's, `lost` names a chunk that
    /// there is not, or the lengths differ.
    pub fn recover(&self, lost: &[usize], chunks: &mut [&mut [u8]]) -> Result<(), ParityError> {
        assert_eq!(chunks.len(), self.chunks(), "chunks");
        assert!(lost.iter().all(|&index| index < self.chunks()), "no such chunk in {lost:?}");
        let mut slots = [const { Slot::Absent }; CHUNKS_MAX];
        for (index, (slot, chunk)) in slots.iter_mut().zip(chunks).enumerate() {
            *slot = match lost.contains(&index) {
                true => Slot::Wanted(chunk),
                false => Slot::Present(chunk),
            };
        }
        self.recover_slots(&mut slots[..self.chunks()])
    }

    /// Computes every [`Slot::Wanted`] chunk from those present: the form for a
    /// degraded read, which holds k chunks and wants one. Any k will do; if
    /// there are more, data is preferred, then the lowest parity.
    ///
    /// # Errors
    ///
    /// [`ParityError::TooManyLost`] when fewer than k chunks are present; then
    /// nothing was written.
    ///
    /// # Panics
    ///
    /// When the number of slots is not the code's, or the lengths differ.
    pub fn recover_slots(&self, slots: &mut [Slot<'_>]) -> Result<(), ParityError> {
        assert_eq!(slots.len(), self.chunks(), "slots");
        let is_present = |slot: &Slot<'_>| matches!(slot, Slot::Present(_));
        let lost = slots.iter().filter(|slot| !is_present(slot)).count();
        if lost > self.parity_chunks {
            return Err(ParityError::TooManyLost { lost, tolerated: self.parity_chunks });
        }

        // The unknowns, and as many parity chunks to solve for them with.
        let mut unknown = Indices::default();
        let mut equations = Indices::default();
        for (i, slot) in slots[..self.data_chunks].iter().enumerate() {
            if !is_present(slot) {
                unknown.push(i);
            }
        }
        for (j, slot) in slots[self.data_chunks..].iter().enumerate() {
            if is_present(slot) && equations.list().len() < unknown.list().len() {
                equations.push(j);
            }
        }

        // Borrow what is needed from the slots, in index order.
        let mut sources: [&[u8]; CHUNKS_MAX] = [&[]; CHUNKS_MAX];
        let mut outs: [&mut [u8]; PARITY_MAX] = [&mut [], &mut [], &mut [], &mut []];
        let mut source_indices = [0; CHUNKS_MAX];
        let (mut sources_held, mut wanted) = (0, Indices::default());
        for (index, slot) in slots.iter_mut().enumerate() {
            match slot {
                Slot::Present(chunk) => {
                    let parity = index.checked_sub(self.data_chunks);
                    if parity.is_none_or(|j| equations.list().contains(&j)) {
                        sources[sources_held] = chunk;
                        source_indices[sources_held] = index;
                        sources_held += 1;
                    }
                }
                Slot::Wanted(chunk) => {
                    outs[wanted.list().len()] = chunk;
                    wanted.push(index);
                }
                Slot::Absent => {}
            }
        }
        let outs = &mut outs[..wanted.list().len()];
        let Some(first) = outs.first() else {
            return Ok(());
        };
        let bytes = first.len();
        let sources = &sources[..sources_held];
        assert_lengths(bytes, sources.iter().map(|chunk| chunk.len()));
        assert_lengths(bytes, outs.iter().map(|chunk| chunk.len()));

        if unknown.list().is_empty() && wanted.list().len() == self.parity_chunks {
            self.encode_range(sources, 0, outs);
            return Ok(());
        }
        let rows = self.rows(
            unknown.list(),
            equations.list(),
            &source_indices[..sources_held],
            wanted.list(),
        );
        match outs {
            [out] if rows[0][..sources_held].iter().all(|&c| c == 1) => {
                self.kernel.sum(sources, 0, out);
            }
            _ => self.kernel.dot(&rows, sources, 0, outs, false),
        }
        Ok(())
    }

    /// What each wanted chunk is, as a sum of products over the sources.
    fn rows(
        &self,
        unknown: &[usize],
        equations: &[usize],
        sources: &[usize],
        wanted: &[usize],
    ) -> Coefficients {
        let mut matrix = Square::default();
        for (row, &j) in matrix.iter_mut().zip(equations) {
            for (to, &i) in row.iter_mut().zip(unknown) {
                *to = self.coefficients[j][i];
            }
        }
        let inverse = invert(matrix, unknown.len());

        // Unknown x = sum over r of inverse[x][r] * (parity r + what the
        // known data contributed to it).
        let solved = |x: usize, source: usize| {
            let terms = equations.iter().zip(inverse[x]).map(|(&j, factor)| {
                let of_source = match source.checked_sub(self.data_chunks) {
                    None => self.coefficients[j][source],
                    Some(parity) => u8::from(parity == j),
                };
                gf::mul(factor, of_source)
            });
            terms.fold(0, |sum, term| sum ^ term)
        };

        let mut rows = Coefficients::default();
        for (row, &index) in rows.iter_mut().zip(wanted) {
            for (to, &source) in row.iter_mut().zip(sources) {
                *to = match index.checked_sub(self.data_chunks) {
                    None => {
                        let x = unknown.iter().position(|&i| i == index);
                        solved(x.expect("wanted data is unknown"), source)
                    }
                    // Parity of all data: the known as it is, the unknown as solved.
                    Some(j) => {
                        let known = self.coefficients[j].get(source).copied();
                        let known = known.filter(|_| source < self.data_chunks).unwrap_or(0);
                        let terms = unknown
                            .iter()
                            .enumerate()
                            .map(|(x, &i)| gf::mul(self.coefficients[j][i], solved(x, source)));
                        terms.fold(known, |sum, term| sum ^ term)
                    }
                };
            }
        }
        rows
    }
}

/// A short list of chunk numbers, without allocation.
#[derive(Default)]
struct Indices {
    held: [usize; PARITY_MAX],
    len: usize,
}

impl Indices {
    fn push(&mut self, index: usize) {
        self.held[self.len] = index;
        self.len += 1;
    }

    fn list(&self) -> &[usize] {
        &self.held[..self.len]
    }
}

/// The inverse of the upper left `size` by `size` part, by Gauss and Jordan.
/// The matrices here always have one: that is what makes the code a code.
fn invert(mut matrix: Square, size: usize) -> Square {
    let mut inverse = Square::default();
    for (i, row) in inverse.iter_mut().enumerate() {
        row[i] = 1;
    }
    for column in 0..size {
        let pivot = (column..size).find(|&row| matrix[row][column] != 0);
        let pivot = pivot.expect("every square part of the coefficients has an inverse");
        matrix.swap(column, pivot);
        inverse.swap(column, pivot);
        let scale = gf::inverse(matrix[column][column]);
        let (of_matrix, of_inverse) = (
            matrix[column].map(|entry| gf::mul(entry, scale)),
            inverse[column].map(|entry| gf::mul(entry, scale)),
        );
        for row in 0..size {
            let factor = if row == column { 0 } else { matrix[row][column] };
            for i in 0..size {
                matrix[row][i] ^= gf::mul(factor, of_matrix[i]);
                inverse[row][i] ^= gf::mul(factor, of_inverse[i]);
            }
        }
        (matrix[column], inverse[column]) = (of_matrix, of_inverse);
    }
    inverse
}

#[cfg(test)]
mod tests;
