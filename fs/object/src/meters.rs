//! What a target did and how long it took, for status and survey.

use std::cell::Cell;
use std::time::Duration;

/// Buckets of the latency histogram: bucket `i` counts operations below `2^i` microseconds.
pub const LATENCY_BUCKETS: usize = 32;

/// One kind of operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpMeter {
    pub count: u64,
    /// Ended with a fault.
    pub failed: u64,
    /// Payload bytes.
    pub bytes: u64,
    pub total_ns: u64,
    pub max_ns: u64,
    pub latency: [u64; LATENCY_BUCKETS],
}

impl OpMeter {
    fn add(&mut self, bytes: u64, took: Duration, failed: bool) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.count += 1;
        self.failed += u64::from(failed);
        self.bytes += bytes;
        self.total_ns = self.total_ns.saturating_add(ns);
        self.max_ns = self.max_ns.max(ns);
        let bucket = (64 - (ns / 1000).leading_zeros()) as usize;
        self.latency[bucket.min(LATENCY_BUCKETS - 1)] += 1;
    }

    /// The mean latency.
    #[must_use]
    pub fn mean(&self) -> Duration {
        Duration::from_nanos(self.total_ns.checked_div(self.count).unwrap_or(0))
    }

    /// An upper bound of the latency that `percent` of the operations stayed below.
    #[must_use]
    pub fn percentile(&self, percent: u64) -> Duration {
        let wanted = (self.count * percent).div_ceil(100);
        let mut seen = 0;
        for (bucket, count) in self.latency.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return Duration::from_micros(1 << bucket);
            }
        }
        Duration::from_nanos(self.max_ns)
    }
}

/// The kinds told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Write,
    Read,
    Commit,
    Other,
}

/// All meters of a target since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Meters {
    pub write: OpMeter,
    pub read: OpMeter,
    pub commit: OpMeter,
    /// All others.
    pub other: OpMeter,
    /// Changes that were repeated and not done again.
    pub repeated: u64,
    /// Requests refused because they named an earlier life of the target.
    pub restarted: u64,
}

#[derive(Default)]
pub(crate) struct Metering(Cell<Meters>);

impl Metering {
    pub(crate) fn get(&self) -> Meters {
        self.0.get()
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut Meters)) {
        let mut meters = self.0.get();
        change(&mut meters);
        self.0.set(meters);
    }

    pub(crate) fn add(&self, op: Op, bytes: u64, took: Duration, failed: bool) {
        self.change(|meters| {
            let meter = match op {
                Op::Write => &mut meters.write,
                Op::Read => &mut meters.read,
                Op::Commit => &mut meters.commit,
                Op::Other => &mut meters.other,
            };
            meter.add(bytes, took, failed);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_upper_bounds() {
        let mut meter = OpMeter::default();
        for us in 1..=100 {
            meter.add(1, Duration::from_micros(us), false);
        }
        assert_eq!(meter.bytes, 100);
        assert_eq!(meter.percentile(50), Duration::from_micros(64));
        assert_eq!(meter.percentile(99), Duration::from_micros(128));
        assert_eq!(meter.mean(), Duration::from_nanos(50_500));
    }
}
