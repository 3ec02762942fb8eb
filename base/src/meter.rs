//! Meters: what was done, and how long it took, counted in place.
//!
//! What always holds: counters only rise. Whoever wants a rate looks twice and takes the difference, so nothing is kept for
//! viewers, and any number of them may look. An operation costs a few additions on its own core; no
//! memory is taken, and nothing is copied.

use std::cell::Cell;
use std::time::Duration;

/// Buckets per power of two.
const STEPS: usize = 4;
/// Durations up to 2^40 ns, some 18 minutes; what takes longer is in the last one.
pub const BUCKETS: usize = 40 * STEPS;

/// A histogram of durations, about 19 % wide per bucket.
#[derive(Clone, Debug)]
pub struct Latency {
    counts: [Cell<u64>; BUCKETS],
}

impl Default for Latency {
    fn default() -> Self {
        Self { counts: [const { Cell::new(0) }; BUCKETS] }
    }
}

impl Latency {
    /// Counts an operation that took so long.
    pub fn add(&self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).max(STEPS as u64);
        let octave = ns.ilog2() as usize;
        let step = (ns >> (octave - 2)) as usize & (STEPS - 1);
        raise(&self.counts[(octave * STEPS + step).min(BUCKETS - 1)], 1);
    }

    /// Operations counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().map(Cell::get).sum()
    }

    /// As [`quantile`], of everything counted.
    #[must_use]
    pub fn quantile(&self, fraction: f64) -> Duration {
        quantile(&self.buckets(), fraction)
    }

    /// The buckets that are not empty, in order, each with its count.
    #[must_use]
    pub fn buckets(&self) -> Vec<(u16, u64)> {
        let counts = (0..).zip(self.counts.iter().map(Cell::get));
        counts.filter(|(_, count)| *count > 0).collect()
    }
}

/// The duration that this fraction of the operations did not exceed, as the upper end of its
/// bucket; zero when nothing was counted. The fraction 1 gives the longest.
#[must_use]
pub fn quantile(buckets: &[(u16, u64)], fraction: f64) -> Duration {
    let total: u64 = buckets.iter().map(|(_, count)| count).sum();
    let rank = (total as f64 * fraction).ceil().max(1.0) as u64;
    let mut seen = 0;
    for (bucket, count) in buckets {
        seen += count;
        if seen >= rank {
            let bucket = usize::from(*bucket).min(BUCKETS - 1);
            let (octave, step) = (bucket / STEPS, bucket % STEPS);
            return Duration::from_nanos(((STEPS + step + 1) as u64) << octave >> 2);
        }
    }
    Duration::ZERO
}

/// One kind of operation.
#[derive(Clone, Debug, Default)]
pub struct Meter {
    pub count: Cell<u64>,
    /// Ended with a fault.
    pub failed: Cell<u64>,
    /// Payload bytes.
    pub bytes: Cell<u64>,
    pub total_ns: Cell<u64>,
    pub latency: Latency,
}

impl Meter {
    /// Counts an operation.
    pub fn add(&self, bytes: u64, took: Duration, failed: bool) {
        raise(&self.count, 1);
        raise(&self.failed, failed.into());
        raise(&self.bytes, bytes);
        raise(&self.total_ns, u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        self.latency.add(took);
    }
}

/// A cache: how often what was asked for was there, and how often not.
#[derive(Clone, Debug, Default)]
pub struct HitMeter {
    pub hits: Cell<u64>,
    pub misses: Cell<u64>,
}

impl HitMeter {
    /// Counts a question.
    pub fn count(&self, is_hit: bool) {
        raise(if is_hit { &self.hits } else { &self.misses }, 1);
    }
}

/// Adds to a counter, which wraps around rather than end a program.
pub fn raise(counter: &Cell<u64>, by: u64) {
    counter.set(counter.get().wrapping_add(by));
}

/// One more is under way, as long as this lives.
pub struct InFlight<'a>(&'a Cell<u64>);

impl<'a> InFlight<'a> {
    /// Counts it.
    #[must_use]
    pub fn begin(counter: &'a Cell<u64>) -> Self {
        counter.set(counter.get() + 1);
        Self(counter)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reactor::{Reactor, random_u64};

    /// Sorted samples need no histogram, so they are the model.
    #[test]
    fn quantiles_are_those_of_sorted_samples_within_a_bucket() {
        Reactor::simulated(1).block_on(async {
            for count in 1..300 {
                let latency = Latency::default();
                // As many short ones as long ones.
                let sample = |_| (4 + random_u64() % 4) << (random_u64() % 36);
                let mut samples: Vec<u64> = (0..count).map(sample).collect();
                samples.iter().for_each(|ns| latency.add(Duration::from_nanos(*ns)));
                samples.sort_unstable();
                for percent in [0, 1, 50, 90, 99, 100] {
                    let fraction = f64::from(percent) / 100.0;
                    let rank = (f64::from(count) * fraction).ceil().max(1.0) as usize;
                    let exact = samples[rank - 1] as f64;
                    let told = latency.quantile(fraction).as_nanos() as f64;
                    assert!(told >= exact && told <= exact * 1.26 + 1.0, "{told} for {exact}");
                }
                assert_eq!(latency.count(), count as u64);
            }
        });
    }

    #[test]
    fn nothing_and_very_much_have_quantiles() {
        let latency = Latency::default();
        assert_eq!((latency.quantile(0.5), latency.buckets()), (Duration::ZERO, vec![]));
        latency.add(Duration::ZERO);
        latency.add(Duration::MAX);
        assert_eq!(latency.buckets().len(), 2);
        assert!(latency.quantile(1.0) > Duration::from_secs(1000));
        assert_eq!(quantile(&[(u16::MAX, 1)], 0.5), latency.quantile(1.0), "from another version");
    }

    #[test]
    fn a_meter_counts() {
        let meter = Meter::default();
        meter.add(10, Duration::from_micros(5), false);
        meter.add(20, Duration::from_micros(7), true);
        let told = [&meter.count, &meter.failed, &meter.bytes, &meter.total_ns].map(Cell::get);
        assert_eq!(told, [2, 1, 30, 12_000]);
        let under_way = Cell::new(0);
        let first = InFlight::begin(&under_way);
        drop(InFlight::begin(&under_way));
        assert_eq!(under_way.get(), 1);
        drop(first);
        assert_eq!(under_way.get(), 0);
    }
}
