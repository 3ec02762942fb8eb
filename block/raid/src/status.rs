//! What an array tells people about itself.

use crate::layout::Level;
use crate::member::MemberState;
use levada_base::ids::Uuid;
use levada_device::BlockError;
use std::time::Duration;

/// Something that an operator or the node should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArrayEvent {
    /// A member is out. `error` is `None` when an operator said so.
    MemberOut { member: usize, name: String, error: Option<BlockError> },
    /// A member has begun to play a role and waits for [`crate::RaidArray::rebuild`].
    RebuildNeeded { member: usize, name: String },
    /// A member is in sync again.
    RebuildDone { member: usize, name: String },
    /// A chunk could not be read and was rewritten from the others.
    Repaired { member: usize, name: String, stripe: u64 },
    /// Too many members are lost, or somebody else owns the array: no more I/O until reopened.
    Stopped { error: BlockError },
}

/// Buckets per power of two.
const STEPS: usize = 4;
const BUCKETS: usize = 40 * STEPS;

/// A histogram of durations, about 19 % wide per bucket.
#[derive(Clone, Debug)]
pub struct Latency {
    counts: [u32; BUCKETS],
    total: u64,
}

impl Default for Latency {
    fn default() -> Self {
        Self { counts: [0; BUCKETS], total: 0 }
    }
}

impl Latency {
    pub(crate) fn add(&mut self, duration: Duration) {
        let ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX).max(STEPS as u64);
        let octave = ns.ilog2() as usize;
        let step = (ns >> (octave - 2)) as usize & (STEPS - 1);
        let bucket = (octave * STEPS + step).min(BUCKETS - 1);
        self.counts[bucket] = self.counts[bucket].saturating_add(1);
        self.total += 1;
    }

    /// Operations counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.total
    }

    /// The duration that this fraction of the operations did not exceed, as the upper end of its
    /// bucket; zero when nothing was counted.
    #[must_use]
    pub fn quantile(&self, fraction: f64) -> Duration {
        let rank = (self.total as f64 * fraction).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += u64::from(*count);
            if seen >= rank {
                let (octave, step) = (bucket / STEPS, bucket % STEPS);
                return Duration::from_nanos(((STEPS + step + 1) as u64) << octave >> 2);
            }
        }
        Duration::ZERO
    }
}

/// One member, for people.
#[derive(Clone, Debug)]
pub struct MemberStatus {
    pub index: usize,
    pub uuid: Uuid,
    pub name: String,
    pub enclosure: u16,
    pub role: Option<usize>,
    pub state: MemberState,
    /// Since open.
    pub bytes_read: u64,
    pub bytes_written: u64,
    pub medium_errors: u64,
    pub io_errors: u64,
    pub repairs: u64,
    /// Blocks that a rebuild could not make, as far as is known since open. They cannot be read until they are written.
    pub lacks_blocks: u64,
    /// Of reads and writes.
    pub latency_p50: Duration,
    pub latency_p99: Duration,
}

/// How far a rebuild or a scrub has come.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    pub stripes_done: u64,
    /// Written stripes when it began.
    pub stripes_total: u64,
    /// Bytes read and written on members per second, over the run so far.
    pub bytes_per_second: f64,
}

/// An array, for people.
#[derive(Clone, Debug)]
pub struct ArrayStatus {
    pub uuid: Uuid,
    pub name: String,
    pub level: Level,
    pub chunk_bytes: u64,
    pub capacity_bytes: u64,
    pub stripes: u64,
    pub stripes_written: u64,
    pub generation: u64,
    /// Roles without good data everywhere.
    pub degraded: usize,
    pub tolerates: usize,
    /// Why there is no more I/O.
    pub stopped: Option<BlockError>,
    pub members: Vec<MemberStatus>,
    pub rebuild: Option<Progress>,
    pub scrub: Option<Progress>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_a_bucket() {
        let mut latency = Latency::default();
        assert_eq!(latency.quantile(0.5), Duration::ZERO);
        for us in 1..=1000 {
            latency.add(Duration::from_micros(us));
        }
        for (fraction, expected_us) in [(0.5, 500.0), (0.99, 990.0)] {
            let us = latency.quantile(fraction).as_nanos() as f64 / 1000.0;
            assert!((expected_us..expected_us * 1.26).contains(&us), "{fraction}: {us}");
        }
    }
}
