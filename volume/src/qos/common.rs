//! A cap that several cores share. Each leases tokens for some milliseconds, and touches what is shared only then.
//!
//! What always holds:
//! - What is leased is out of the pool, so all cores together stay within rate * T + burst + cores * (one lease).
//! - What a core at rest keeps from the others is one lease; when it comes again, it goes back before a new one is taken, and what
//!   is above the burst of then is gone.
//! - A change is in force on every core when its lease is over.

use super::bucket::{Bucket, Buckets, ROUNDING};
use super::limits::{Limits, QosError, Rates};
use levada_base::reactor;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// So much of the rate is leased at once.
const LEASE: Duration = Duration::from_millis(1);
/// A lease is over after this.
const LEASE_NS: u64 = 2_000_000;
/// Who waits looks again after this at the latest, as the cap may have been changed elsewhere.
const LOOK_NS: u64 = 5_000_000;

/// A cap for all cores together.
pub struct Common {
    /// Clocks of reactors begin when these do; threads need one of their own.
    began: Instant,
    pool: Mutex<Buckets>,
}

impl Common {
    /// # Errors
    ///
    /// As [`Limits::check`].
    pub fn new(cap: Rates, burst: Duration, request_bytes_max: u64) -> Result<Arc<Self>, QosError> {
        let common = Arc::new(Self { began: Instant::now(), pool: Mutex::default() });
        common.set(cap, burst, request_bytes_max)?;
        Ok(common)
    }

    /// Changes the cap; from any thread.
    ///
    /// # Errors
    ///
    /// As [`Limits::check`].
    pub fn set(&self, cap: Rates, burst: Duration, request_bytes_max: u64) -> Result<(), QosError> {
        Limits { cap, burst, ..Limits::NONE }.check(request_bytes_max)?;
        // Threads have clocks of their own; the pool's is as of the last lease.
        self.lock().set(cap, burst, 0);
        Ok(())
    }

    /// A panic cannot leave a pool half changed.
    fn lock(&self) -> std::sync::MutexGuard<'_, Buckets> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What one core has of one kind.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    is_limited: bool,
    tokens: f64,
    /// As the pool's when it was last looked at.
    burst: f64,
}

impl Held {
    fn has(&self, cost: f64) -> bool {
        !self.is_limited || self.tokens + ROUNDING >= cost.min(self.burst)
    }
}

/// One core's part of a common cap.
pub(super) struct Lease {
    common: Arc<Common>,
    /// The pool's clock less the core's.
    skew_ns: i64,
    held: [Held; 2],
    /// On the core's clock.
    over_ns: u64,
    /// It is known that the pool has nothing before.
    nothing_before_ns: u64,
}

impl Lease {
    /// For this thread's core.
    pub(super) fn new(common: Arc<Common>) -> Self {
        let skew_ns = match reactor::is_simulated() {
            true => 0,
            false => common.began.elapsed().as_nanos() as i64 - reactor::now().0 as i64,
        };
        Self { common, skew_ns, held: Default::default(), over_ns: 0, nothing_before_ns: 0 }
    }

    /// When `cost` may pass, on the core's clock; leases what is missing.
    pub(super) fn ready_ns(&mut self, cost: [f64; 2], now_ns: u64) -> u64 {
        let is_over = now_ns >= self.over_ns;
        if !is_over && self.held.iter().zip(cost).all(|(held, cost)| held.has(cost)) {
            return now_ns;
        }
        if now_ns < self.nothing_before_ns {
            return self.nothing_before_ns;
        }
        let mut pool = self.common.lock();
        pool.refill(now_ns.saturating_add_signed(self.skew_ns));
        let mut wait_ns = 0;
        for ((held, bucket), cost) in self.held.iter_mut().zip(&mut pool.0).zip(cost) {
            let Some(bucket) = bucket else {
                *held = Held::default();
                continue;
            };
            wait_ns = wait_ns.max(held.lease(bucket, cost, is_over));
        }
        self.over_ns = now_ns + LEASE_NS;
        self.nothing_before_ns = if wait_ns == 0 { 0 } else { now_ns + wait_ns.min(LOOK_NS) };
        now_ns.max(self.nothing_before_ns)
    }

    pub(super) fn take(&mut self, cost: [f64; 2]) {
        for (held, cost) in self.held.iter_mut().zip(cost) {
            held.tokens -= if held.is_limited { cost } else { 0.0 };
        }
    }

    pub(super) fn give_back(&mut self, cost: [f64; 2]) {
        for (held, cost) in self.held.iter_mut().zip(cost) {
            held.tokens = if held.is_limited { (held.tokens + cost).min(held.burst) } else { 0.0 };
        }
    }
}

impl Held {
    /// Takes what is missing from the pool, and some more; how long until the rest is there.
    fn lease(&mut self, pool: &mut Bucket, cost: f64, is_over: bool) -> u64 {
        if is_over && self.tokens > 0.0 {
            pool.give_back(self.tokens);
            self.tokens = 0.0;
        }
        (self.is_limited, self.burst) = (true, pool.needed(f64::INFINITY));
        let missing = pool.needed(cost) - self.tokens;
        if missing <= ROUNDING {
            return 0;
        }
        let wanted = missing.max(pool.in_span(LEASE));
        let leased = wanted.min(pool.level().max(0.0));
        pool.take(leased);
        self.tokens += leased;
        let missing = missing - leased;
        if missing <= ROUNDING {
            0
        } else {
            (missing / pool.in_span(Duration::from_nanos(1))).ceil() as u64
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut pool = self.common.lock();
        for (held, bucket) in self.held.iter().zip(&mut pool.0) {
            // Debts, too: they were made on behalf of all.
            bucket.iter_mut().for_each(|bucket| bucket.give_back(held.tokens));
        }
    }
}
