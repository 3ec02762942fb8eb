//! Tokens that come at a rate and are saved up to a burst. Reads no clock.
//!
//! Looking at a clock takes longer than all the rest of letting a request pass. So a little is set aside whenever it was
//! looked at, and spent without. It is out of the bucket, so nothing is spent twice; but how long ago it was set aside is not known, so a
//! span may have so much more than rate * T + burst.

use super::limits::Rates;
use std::time::Duration;

/// What rounding may leave missing after a wait that was just long enough.
pub(super) const ROUNDING: f64 = 1e-6;
const NS_PER_S: f64 = 1e9;
/// So much of the rate is set aside, and no more than a sixteenth of the burst.
pub(super) const SPARE: Duration = Duration::from_micros(500);

/// One rate.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bucket {
    per_ns: f64,
    burst: f64,
    /// Below zero: a debt that is paid before anything else passes.
    level: f64,
    spare: f64,
    spare_most: f64,
    at_ns: u64,
}

impl Bucket {
    pub(super) fn new(per_s: u64, burst: Duration, now_ns: u64) -> Self {
        // Less than one I/O is never saved up, or nothing would pass without a debt.
        let burst = (per_s as f64 * burst.as_secs_f64()).max(1.0);
        let spare_most = (per_s as f64 * SPARE.as_secs_f64()).min(burst / 16.0);
        let per_ns = per_s as f64 / NS_PER_S;
        Self { per_ns, burst, level: burst, spare: 0.0, spare_most, at_ns: now_ns }
    }

    pub(super) fn refill(&mut self, now_ns: u64) {
        let span_ns = now_ns.saturating_sub(self.at_ns);
        let spare = std::mem::take(&mut self.spare);
        self.level = (self.level + spare + self.per_ns * span_ns as f64).min(self.burst);
        self.at_ns = self.at_ns.max(now_ns);
    }

    /// When `cost` may pass; at once if that is not ahead. What is larger than the burst passes from a full bucket, and
    /// leaves a debt.
    pub(super) fn ready_ns(&self, cost: f64) -> u64 {
        let missing = cost.min(self.burst) - self.level;
        if missing <= ROUNDING {
            return self.at_ns;
        }
        self.at_ns.saturating_add((missing / self.per_ns).ceil() as u64)
    }

    pub(super) fn take(&mut self, cost: f64) {
        self.level -= cost;
    }

    pub(super) fn set_aside(&mut self) {
        let more = (self.spare_most - self.spare).min(self.level.max(0.0));
        self.level -= more;
        self.spare += more;
    }

    pub(super) fn give_back(&mut self, cost: f64) {
        self.level = (self.level + cost).min(self.burst);
    }

    pub(super) fn needed(&self, cost: f64) -> f64 {
        cost.min(self.burst)
    }

    pub(super) fn level(&self) -> f64 {
        self.level
    }

    pub(super) fn in_span(&self, span: Duration) -> f64 {
        self.per_ns * span.as_nanos() as f64
    }

    /// How long ago the last token came that is there now.
    fn overdue_ns(&self) -> f64 {
        self.level / self.per_ns
    }

    /// The same bucket at another rate. Debts stay; what was saved up is cut to the new burst.
    fn changed(self, per_s: u64, burst: Duration) -> Self {
        let fresh = Self::new(per_s, burst, self.at_ns);
        Self { level: (self.level + self.spare).min(fresh.level), ..fresh }
    }
}

/// I/Os and bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Buckets(pub(super) [Option<Bucket>; 2]);

impl Buckets {
    pub(super) fn set(&mut self, rates: Rates, burst: Duration, now_ns: u64) {
        self.refill(now_ns);
        for (bucket, per_s) in self.0.iter_mut().zip(rates.both()) {
            *bucket = match (*bucket, per_s) {
                (_, None) => None,
                (None, Some(per_s)) => Some(Bucket::new(per_s, burst, now_ns)),
                (Some(bucket), Some(per_s)) => Some(bucket.changed(per_s, burst)),
            };
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    pub(super) fn refill(&mut self, now_ns: u64) {
        self.0.iter_mut().flatten().for_each(|bucket| bucket.refill(now_ns));
    }

    /// When `cost` may pass, 0 where nothing is limited; as of the last refill.
    pub(super) fn ready_ns(&self, cost: [f64; 2]) -> u64 {
        let each = self.0.iter().zip(cost);
        each.filter_map(|(bucket, cost)| Some(bucket.as_ref()?.ready_ns(cost))).max().unwrap_or(0)
    }

    pub(super) fn take(&mut self, cost: [f64; 2]) {
        for (bucket, cost) in self.0.iter_mut().zip(cost) {
            bucket.iter_mut().for_each(|bucket| bucket.take(cost));
        }
    }

    pub(super) fn give_back(&mut self, cost: [f64; 2]) {
        for (bucket, cost) in self.0.iter_mut().zip(cost) {
            bucket.iter_mut().for_each(|bucket| bucket.give_back(cost));
        }
    }

    /// Spends what was set aside, if that is enough.
    pub(super) fn take_spare(&mut self, cost: [f64; 2]) -> bool {
        let has = |(bucket, cost): (&Option<Bucket>, f64)| bucket.is_none_or(|b| b.spare >= cost);
        if !self.0.iter().zip(cost).all(has) {
            return false;
        }
        for (bucket, cost) in self.0.iter_mut().zip(cost) {
            bucket.iter_mut().for_each(|bucket| bucket.spare -= cost);
        }
        true
    }

    pub(super) fn set_aside(&mut self) {
        self.0.iter_mut().flatten().for_each(Bucket::set_aside);
    }

    /// How long what is guaranteed has been due; `None` where it is not, or nothing is guaranteed.
    pub(super) fn overdue_ns(&self, cost: [f64; 2], now_ns: u64) -> Option<f64> {
        if self.is_empty() || self.ready_ns(cost) > now_ns {
            return None;
        }
        self.0.iter().flatten().map(Bucket::overdue_ns).reduce(f64::min)
    }
}
