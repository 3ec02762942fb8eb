//! The code itself: how many chunks, which coefficients, and how to encode.
//!
//! Chunks are numbered data first: 0 to k - 1 are data, k is P, k + 1 is Q or
//! the second parity, and so on. Parity j is the sum over i of
//! `coefficients[j][i]` * data i, and row 0 is always all ones, so that the
//! commonest repair, one chunk lost, is an exclusive or.

use crate::{gf, kernel::Kernel};

/// Most chunks in a stripe, data and parity together.
pub const CHUNKS_MAX: usize = 32;

/// Most parity chunks in a stripe.
pub const PARITY_MAX: usize = 4;

/// A row per output, a column per source.
pub(crate) type Coefficients = [[u8; CHUNKS_MAX]; PARITY_MAX];

/// Why a code could not do what it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParityError {
    /// No such code: there must be data, 1 to [`PARITY_MAX`] parity chunks,
    /// and at most [`CHUNKS_MAX`] chunks in all.
    #[error("no code has {data_chunks} data and {parity_chunks} parity chunks")]
    NoSuchCode {
        /// As asked for.
        data_chunks: usize,
        /// As asked for.
        parity_chunks: usize,
    },
    /// More chunks are lost than the code tolerates; the data is unreachable.
    #[error("{lost} chunks lost, {tolerated} tolerated")]
    TooManyLost {
        /// Chunks neither present nor computable.
        lost: usize,
        /// Parity chunks of the code.
        tolerated: usize,
    },
}

/// A linear code over GF(2^8): `data_chunks` chunks protected by
/// `parity_chunks` more, any so many of which may be lost.
///
/// It holds its coefficients and its kernel, so make one per array and keep it.
/// All calls panic if the caller passes the wrong number of chunks or chunks of
/// different lengths: that is a bug in the caller, and going on would write
/// wrong parity. Chunks may have any length and alignment; multiples of 64
/// bytes are fastest.
#[derive(Clone, Debug)]
pub struct Code {
    pub(crate) data_chunks: usize,
    pub(crate) parity_chunks: usize,
    pub(crate) coefficients: Coefficients,
    pub(crate) kernel: &'static Kernel,
    is_pq: bool,
}

impl Code {
    /// RAID 5: one parity chunk, P, the exclusive or of the data.
    ///
    /// # Errors
    ///
    /// [`ParityError::NoSuchCode`] when there is no data or too much.
    pub fn p(data_chunks: usize) -> Result<Self, ParityError> {
        Self::new(data_chunks, 1, |_, _| 1)
    }

    /// RAID 6: P, and Q = the sum over i of 2^i * data i (Anvin, section 1).
    ///
    /// # Errors
    ///
    /// [`ParityError::NoSuchCode`] when there is no data or too much.
    pub fn pq(data_chunks: usize) -> Result<Self, ParityError> {
        let code = Self::new(data_chunks, 2, |j, i| gf::exp(i * j))?;
        Ok(Self { is_pq: true, ..code })
    }

    /// 1 to [`PARITY_MAX`] parity chunks, by a Cauchy matrix: see
    /// [`cauchy_coefficient`]. Not the same bytes as [`Code::pq`].
    ///
    /// # Errors
    ///
    /// [`ParityError::NoSuchCode`] when the numbers are out of range.
    pub fn cauchy(data_chunks: usize, parity_chunks: usize) -> Result<Self, ParityError> {
        Self::new(data_chunks, parity_chunks, cauchy_coefficient)
    }

    fn new(
        data_chunks: usize,
        parity_chunks: usize,
        coefficient: impl Fn(usize, usize) -> u8,
    ) -> Result<Self, ParityError> {
        let fits = data_chunks.checked_add(parity_chunks).is_some_and(|n| n <= CHUNKS_MAX);
        if data_chunks == 0 || !(1..=PARITY_MAX).contains(&parity_chunks) || !fits {
            return Err(ParityError::NoSuchCode { data_chunks, parity_chunks });
        }
        let mut coefficients = [[0; CHUNKS_MAX]; PARITY_MAX];
        for (j, row) in coefficients[..parity_chunks].iter_mut().enumerate() {
            for (i, to) in row[..data_chunks].iter_mut().enumerate() {
                *to = coefficient(j, i);
            }
        }
        let kernel = Kernel::best();
        Ok(Self { data_chunks, parity_chunks, coefficients, kernel, is_pq: false })
    }

    /// The same code on another kernel, for tests and measurement.
    #[must_use]
    pub fn with_kernel(self, kernel: &'static Kernel) -> Self {
        Self { kernel, ..self }
    }

    /// Data chunks in a stripe.
    #[must_use]
    pub fn data_chunks(&self) -> usize {
        self.data_chunks
    }

    /// Parity chunks in a stripe: how many chunks may be lost.
    #[must_use]
    pub fn parity_chunks(&self) -> usize {
        self.parity_chunks
    }

    /// Chunks in a stripe, data and parity.
    #[must_use]
    pub fn chunks(&self) -> usize {
        self.data_chunks + self.parity_chunks
    }

    /// Computes all parity of a stripe; what `parity` held is overwritten.
    ///
    /// # Panics
    ///
    /// When the numbers of chunks are not the code's, or their lengths differ.
    pub fn encode(&self, data: &[&[u8]], parity: &mut [&mut [u8]]) {
        assert_eq!(data.len(), self.data_chunks, "data chunks");
        assert_eq!(parity.len(), self.parity_chunks, "parity chunks");
        let bytes = parity[0].len();
        assert_lengths(bytes, data.iter().map(|chunk| chunk.len()));
        assert_lengths(bytes, parity.iter().map(|chunk| chunk.len()));
        self.encode_range(data, 0, parity);
    }

    /// Encodes the bytes from `at` of `data`, as far as `parity` is long.
    pub(crate) fn encode_range(&self, data: &[&[u8]], at: usize, parity: &mut [&mut [u8]]) {
        match parity {
            [p] => self.kernel.sum(data, at, p),
            [p, q] if self.is_pq => self.kernel.pq(data, at, p, q),
            _ => self.kernel.dot(&self.coefficients, data, at, parity, false),
        }
    }

    /// Brings all parity up to date after data chunk `index` changed from
    /// `old` to `new`, without looking at the other data. The slices may be
    /// any one range of the chunks.
    ///
    /// # Panics
    ///
    /// When `index` is no data chunk, the number of parity chunks is not the
    /// code's, or the lengths differ.
    pub fn update_delta(&self, index: usize, old: &[u8], new: &[u8], parity: &mut [&mut [u8]]) {
        assert!(index < self.data_chunks, "chunk {index} is not data");
        assert_eq!(parity.len(), self.parity_chunks, "parity chunks");
        assert_lengths(old.len(), [new.len()].into_iter());
        assert_lengths(old.len(), parity.iter().map(|chunk| chunk.len()));
        let mut coefficients = [[0; CHUNKS_MAX]; PARITY_MAX];
        for (to, from) in coefficients.iter_mut().zip(&self.coefficients) {
            // Subtracting the old is adding it.
            to[..2].fill(from[index]);
        }
        self.kernel.dot(&coefficients, &[old, new], 0, parity, true);
    }
}

/// Coefficient of data chunk `i` in parity chunk `j`: 1 / (j + y) over the
/// field, y = `PARITY_MAX` + i, each column divided by its entry in row 0.
///
/// Every square part of a Cauchy matrix has an inverse, and scaling columns
/// keeps that so; hence any `parity_chunks` losses can be repaired. Neither
/// number of chunks enters, so a wider stripe has the same coefficients.
fn cauchy_coefficient(j: usize, i: usize) -> u8 {
    let y = (PARITY_MAX + i) as u8;
    gf::mul(y, gf::inverse(y ^ j as u8))
}

pub(crate) fn assert_lengths(bytes: usize, lengths: impl Iterator<Item = usize>) {
    for length in lengths {
        assert_eq!(length, bytes, "chunks of one stripe differ in length");
    }
}

/// `p` = the exclusive or of `data`: [`Code::p`] for callers without one.
///
/// # Panics
///
/// When there is no data, or the lengths differ.
pub fn encode_p(data: &[&[u8]], p: &mut [u8]) {
    assert_lengths(p.len(), data.iter().map(|chunk| chunk.len()));
    Kernel::best().sum(data, 0, p);
}

/// P and Q of `data`: [`Code::pq`] for callers without one.
///
/// # Panics
///
/// When there is no data, or the lengths differ.
pub fn encode_pq(data: &[&[u8]], p: &mut [u8], q: &mut [u8]) {
    assert!(data.len() < 255, "2^255 is 1 again: chunk 255 would look like chunk 0");
    assert_lengths(p.len(), data.iter().map(|chunk| chunk.len()));
    assert_lengths(q.len(), data.iter().map(|chunk| chunk.len()));
    Kernel::best().pq(data, 0, p, q);
}

#[cfg(test)]
mod tests;
