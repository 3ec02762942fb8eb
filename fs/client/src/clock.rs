//! The time of day, for file times.

use levada_base::reactor;
use levada_wire::attr::Time;
use std::time::{SystemTime, UNIX_EPOCH};

/// Where virtual time starts: 2026-01-01.
const VIRTUAL_START_NS: i64 = 1_767_225_600_000_000_000;

pub(crate) fn now() -> Time {
    if reactor::is_simulated() {
        return Time(VIRTUAL_START_NS + reactor::now().0 as i64);
    }
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Time(i64::try_from(since.as_nanos()).unwrap_or(i64::MAX))
}
