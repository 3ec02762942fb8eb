//! Verification: is a stripe consistent, and if one chunk is wrong, which?
//!
//! Parity is computed afresh, a little at a time in the first-level cache, and
//! compared. The difference for parity j (its *syndrome*) is, if data chunk z
//! alone is wrong by e, `coefficients[j][z]` * e; if parity chunk j alone is
//! wrong, it is the only one that is not zero (Anvin, section 4).

use crate::{
    code::{Code, PARITY_MAX, assert_lengths},
    gf,
};

/// Bytes of each parity chunk computed before they are compared: small enough
/// to stay in the first-level cache, long enough to hide the loop around it.
const BLOCK_BYTES: usize = 2048;

/// What [`Code::locate`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Parity matches the data.
    Consistent,
    /// Exactly this chunk, if it alone is wrong, explains every difference.
    ///
    /// Two or more wrong chunks can look like one wrong chunk, by a chance of
    /// about (number of chunks)/256 per differing byte: believe this only when
    /// many bytes differ or a checksum confirms the repaired chunk.
    Wrong {
        /// Its number, data first.
        index: usize,
    },
    /// No single wrong chunk explains the differences, or there is only one
    /// parity chunk, which can tell that there is a fault but never where.
    Unexplained,
}

impl Code {
    /// Whether the parity of a stripe matches its data. `chunks` are those of
    /// one stripe, or any one range of them, data first.
    ///
    /// # Panics
    ///
    /// When the number of chunks is not the code's, or their lengths differ.
    #[must_use]
    pub fn verify(&self, chunks: &[&[u8]]) -> bool {
        self.for_each_block(chunks, |computed, stored| computed == stored)
    }

    /// Finds the one chunk that is wrong, if exactly one is. Repair it with
    /// [`Code::recover`].
    ///
    /// # Panics
    ///
    /// When the number of chunks is not the code's, or their lengths differ.
    #[must_use]
    pub fn locate(&self, chunks: &[&[u8]]) -> Verdict {
        let mut verdict = Verdict::Consistent;
        self.for_each_block(chunks, |computed, stored| {
            if computed == stored {
                return true;
            }
            for at in 0..computed[0].len() {
                let mut syndrome = [0; PARITY_MAX];
                for (j, to) in syndrome[..self.parity_chunks].iter_mut().enumerate() {
                    *to = computed[j][at] ^ stored[j][at];
                }
                verdict = match (verdict, self.locate_byte(&syndrome)) {
                    (before, Verdict::Consistent) => before,
                    (Verdict::Consistent, found) => found,
                    (before, found) if before == found => found,
                    _ => Verdict::Unexplained,
                };
            }
            verdict != Verdict::Unexplained
        });
        verdict
    }

    /// What the syndrome of one byte of every chunk says.
    fn locate_byte(&self, syndrome: &[u8; PARITY_MAX]) -> Verdict {
        let syndrome = &syndrome[..self.parity_chunks];
        let mut differing = (0..syndrome.len()).filter(|&j| syndrome[j] != 0);
        match (differing.next(), differing.next()) {
            (None, _) => return Verdict::Consistent,
            (Some(_), _) if syndrome.len() == 1 => return Verdict::Unexplained,
            (Some(j), None) => {
                return Verdict::Wrong { index: self.data_chunks + j };
            }
            _ => {}
        }
        // Row 0 is all ones, so syndrome 0 is the error itself.
        let explains = |&z: &usize| {
            (1..syndrome.len())
                .all(|j| syndrome[j] == gf::mul(self.coefficients[j][z], syndrome[0]))
        };
        match (0..self.data_chunks).find(explains) {
            Some(index) => Verdict::Wrong { index },
            None => Verdict::Unexplained,
        }
    }

    /// Calls `compare(computed, stored)` with the parity of one range after
    /// another, until it returns false; returns whether it never did.
    fn for_each_block(
        &self,
        chunks: &[&[u8]],
        mut compare: impl FnMut(&[&mut [u8]], &[&[u8]]) -> bool,
    ) -> bool {
        assert_eq!(chunks.len(), self.chunks(), "chunks");
        let bytes = chunks[0].len();
        assert_lengths(bytes, chunks.iter().map(|chunk| chunk.len()));
        let (data, parity) = chunks.split_at(self.data_chunks);
        let mut scratch = [[0; BLOCK_BYTES]; PARITY_MAX];
        let mut at = 0;
        while at < bytes {
            let step = BLOCK_BYTES.min(bytes - at);
            let mut computed = scratch.each_mut().map(|block| &mut block[..step]);
            let computed = &mut computed[..self.parity_chunks];
            let mut stored: [&[u8]; PARITY_MAX] = [&[]; PARITY_MAX];
            for (to, chunk) in stored.iter_mut().zip(parity) {
                *to = &chunk[at..at + step];
            }
            self.encode_range(data, at, computed);
            if !compare(computed, &stored[..self.parity_chunks]) {
                return false;
            }
            at += step;
        }
        true
    }
}

#[cfg(test)]
mod tests;
