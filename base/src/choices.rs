//! A fuzzer's bytes as choices, for its entry points: so that random ones get past what every connection begins with.

/// What is left of the bytes; zeroes behind their end.
pub struct Choices<'a>(pub &'a [u8]);

impl Choices<'_> {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    /// One of `count`, of which there are some and at most 256.
    pub fn below(&mut self, count: usize) -> usize {
        usize::from(self.byte()) % count
    }

    pub fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    pub fn number(&mut self) -> u64 {
        u64::from_le_bytes([0; 8].map(|_| self.byte()))
    }

    /// Of those that fields are wrong by, or any.
    pub fn value(&mut self) -> u32 {
        match self.below(8) {
            0 | 1 => 0,
            2 => 1,
            3 => u32::from(self.byte()),
            4 => u32::MAX,
            5 => u32::MAX - 1,
            6 => 1 << (self.byte() % 32),
            _ => self.number() as u32,
        }
    }

    /// One in so many.
    pub fn rarely(&mut self, one_in: u8) -> bool {
        self.byte() % one_in == one_in - 1
    }

    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.byte()).collect()
    }
}
