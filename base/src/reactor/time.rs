//! The reactor's clock and timers.

use super::Core;
use std::collections::BTreeMap;
use std::future::Future;
use std::ops::{Add, Sub};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// A point on the reactor's clock: nanoseconds since the reactor's start of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(pub u64);

impl Instant {
    /// Time passed since `earlier`; zero when that lies ahead.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Time passed until now.
    #[must_use]
    pub fn elapsed(self) -> Duration {
        super::now().since(self)
    }
}

impl Add<Duration> for Instant {
    type Output = Self;
    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl Sub for Instant {
    type Output = Duration;
    fn sub(self, earlier: Self) -> Duration {
        self.since(earlier)
    }
}

/// The limit of a [`super::timeout`] passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("timed out")]
pub struct Elapsed;

/// Timers in order of deadline, then of creation.
#[derive(Default)]
pub(super) struct Timers {
    next_id: u64,
    pending: BTreeMap<(u64, u64), Waker>,
}

impl Timers {
    pub(super) fn next_deadline(&self) -> Option<u64> {
        self.pending.first_key_value().map(|((deadline_ns, _), _)| *deadline_ns)
    }

    pub(super) fn take_due(&mut self, now_ns: u64) -> Option<Waker> {
        let entry = self.pending.first_entry()?;
        (entry.key().0 <= now_ns).then(|| entry.remove())
    }
}

/// Completes at a deadline; see [`super::sleep`].
pub struct Sleep {
    deadline: Instant,
    key: Option<(u64, u64)>,
}

impl Sleep {
    pub(super) fn new(deadline: Instant) -> Self {
        Self { deadline, key: None }
    }
}

impl Future for Sleep {
    type Output = ();
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let core = Core::current();
        if core.now_ns() >= self.deadline.0 {
            return Poll::Ready(());
        }
        let mut timers = core.timers.borrow_mut();
        let deadline_ns = self.deadline.0;
        let key = *self.key.get_or_insert_with(|| {
            timers.next_id += 1;
            (deadline_ns, timers.next_id)
        });
        timers.pending.insert(key, cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            // Outside a reactor the timers are gone with it.
            super::CURRENT.with_borrow(|current| {
                if let Some(core) = current {
                    core.timers.borrow_mut().pending.remove(&key);
                }
            });
        }
    }
}
