//! Points in time that a suspended machine does not stretch.

use crate::clock;
use levada_base::reactor::{self, Instant};
use levada_wire::attr::Time;
use std::time::Duration;

/// A point in time. The monotonic clock of a machine that is suspended stands still, the time of day is set
/// right afterwards; but that may be set back.
#[derive(Clone, Copy)]
pub(crate) struct Moment {
    monotonic: Instant,
    of_day: Time,
}

impl Moment {
    pub(crate) fn now() -> Self {
        Self { monotonic: reactor::now(), of_day: clock::now() }
    }

    pub(crate) fn monotonic(self) -> Instant {
        self.monotonic
    }

    /// What has passed since, by the clock that says more.
    pub(crate) fn age(self) -> Duration {
        let by_day = clock::now().0.saturating_sub(self.of_day.0);
        let by_day = Duration::from_nanos(u64::try_from(by_day).unwrap_or(0));
        self.monotonic.elapsed().max(by_day)
    }
}
