//! Which block is next: anywhere alike, or few of them often.

use levada_base::units::KIB;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use std::cell::RefCell;
use std::rc::Rc;

pub(super) const BLOCK: u64 = 4 * KIB;

/// Which block is written next.
#[derive(Clone, Copy)]
pub(super) enum Choice {
    Uniform,
    /// Few are written often: the n-th most popular n^-0.99 times as often as the first.
    Zipf,
}

/// Numbers from 0 on, the first ones often (Gray et al., SIGMOD 1994), dealt over the whole range.
struct Zipf {
    count: u64,
    zeta: f64,
    eta: f64,
}

const THETA: f64 = 0.99;
/// Deals popular blocks over all files: a prime, so that no two fall together.
const DEAL: u64 = 2_654_435_761;

impl Zipf {
    fn new(count: u64) -> Self {
        let zeta = |count: u64| (1..=count).map(|i| (i as f64).powf(-THETA)).sum::<f64>();
        let (zeta, two) = (zeta(count), zeta(2));
        let eta = (1.0 - (2.0 / count as f64).powf(1.0 - THETA)) / (1.0 - two / zeta);
        Self { count, zeta, eta }
    }

    /// The number that a share of 0 to 1 of all picks stands for.
    fn rank(&self, share: f64) -> u64 {
        let scaled = share * self.zeta;
        if scaled < 1.0 {
            return 0;
        }
        if scaled < 1.0 + 0.5_f64.powf(THETA) {
            return 1;
        }
        let rank = (self.eta * share - self.eta + 1.0).powf(1.0 / (1.0 - THETA));
        ((self.count as f64 * rank) as u64).min(self.count - 1)
    }
}

/// Blocks in the order of a choice, which its seed fixes.
pub(super) struct Picks {
    rng: RefCell<Xoshiro256PlusPlus>,
    blocks: u64,
    zipf: Option<Zipf>,
}

impl Picks {
    pub fn new(choice: Choice, bytes: u64, seed: u64) -> Rc<Self> {
        let (rng, blocks) = (Xoshiro256PlusPlus::seed_from_u64(seed), bytes / BLOCK);
        let zipf = match choice {
            Choice::Uniform => None,
            Choice::Zipf => Some(Zipf::new(blocks)),
        };
        Rc::new(Self { rng: RefCell::new(rng), blocks, zipf })
    }

    pub fn next(&self) -> u64 {
        let mut rng = self.rng.borrow_mut();
        let block = match &self.zipf {
            None => rng.random_range(0..self.blocks),
            Some(zipf) => zipf.rank(rng.random_range(0.0..1.0)) * DEAL % self.blocks,
        };
        block * BLOCK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zipf_picks_as_often_as_it_says() {
        let (zipf, picks) = (Zipf::new(1000), 1_000_000);
        let mut counts = vec![0u64; 1000];
        (0..picks).for_each(|i| counts[zipf.rank(i as f64 / picks as f64) as usize] += 1);
        let expected = |rank: u64| (rank as f64).powf(-THETA) / zipf.zeta * picks as f64;
        for rank in [1, 2, 10, 100] {
            let ratio = counts[rank as usize - 1] as f64 / expected(rank);
            assert!((0.7..1.4).contains(&ratio), "{rank}: {ratio}");
        }
    }

    #[test]
    fn popular_blocks_are_dealt_over_the_range() {
        let picks = Picks::new(Choice::Zipf, 1000 * BLOCK, 1);
        let dealt: std::collections::BTreeSet<u64> = (0..1000).map(|i| i * DEAL % 1000).collect();
        assert_eq!(dealt.len(), 1000);
        assert!((0..1000).all(|_| picks.next() < 1000 * BLOCK));
    }
}
