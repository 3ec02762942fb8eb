//! A way through the bytes of a chain.

use crate::memory::{Memory, Outside};
use crate::ring::Span;
use levada_base::LentVec;

/// Where in some spans reading or writing goes on.
pub(crate) struct Cursor<'a> {
    pub memory: &'a Memory,
    spans: &'a [Span],
    /// Bytes of the first span that lie behind.
    behind: u32,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(memory: &'a Memory, spans: &'a [Span]) -> Self {
        Self { memory, spans, behind: 0 }
    }

    /// Goes on by at most `bytes`, within one span: where that is.
    fn step(&mut self, bytes: usize) -> Result<Span, Outside> {
        loop {
            let first = self.spans.first().ok_or(Outside)?;
            let rest = first.bytes - self.behind;
            if rest == 0 {
                self.spans = &self.spans[1..];
                self.behind = 0;
                continue;
            }
            let at = first.at.checked_add(self.behind.into()).ok_or(Outside)?;
            let bytes = u32::try_from(bytes).unwrap_or(u32::MAX).min(rest);
            self.behind += bytes;
            return Ok(Span { at, bytes });
        }
    }

    pub(crate) fn read(&mut self, mut into: &mut [u8]) -> Result<(), Outside> {
        while !into.is_empty() {
            let Span { at, bytes } = self.step(into.len())?;
            let (head, tail) = into.split_at_mut(bytes as usize);
            self.memory.read(at, head)?;
            into = tail;
        }
        Ok(())
    }

    /// Lends the next `bytes` to be filled.
    pub(crate) fn lend(&mut self, bytes: u64) -> Result<LentVec, Outside> {
        let (mut lent, mut rest) = (LentVec::new(), bytes as usize);
        while rest > 0 {
            let Span { at, bytes } = self.step(rest)?;
            self.memory.lend(at, bytes as usize, &mut lent)?;
            rest -= bytes as usize;
        }
        Ok(lent)
    }

    pub(crate) fn write(&mut self, mut from: &[u8]) -> Result<(), Outside> {
        while !from.is_empty() {
            let Span { at, bytes } = self.step(from.len())?;
            let (head, tail) = from.split_at(bytes as usize);
            self.memory.write(at, head)?;
            from = tail;
        }
        Ok(())
    }
}

/// Bytes of all spans.
pub(crate) fn total(spans: &[Span]) -> u64 {
    spans.iter().map(|span| u64::from(span.bytes)).sum()
}

/// A field of a message that was copied out; its length is the caller's to check.
pub(crate) fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// The same of eight bytes.
pub(crate) fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}
