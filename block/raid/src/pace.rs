//! Pace: how fast rebuild and scrub go beside other I/O, also the scrub of what a store keeps on an array.
//!
//! An array that is idle otherwise is worked on at the ceiling. Beside foreground I/O the pace is found between floor and
//! ceiling: a little faster as long as that I/O takes about as long as it does beside the floor, much slower as soon as it
//! takes longer. How long it takes beside the floor is looked up anew now and then.
//!
//! What always holds:
//! - Never below the floor, never above the ceiling.
//! - Where both are the same, or there are none, nobody's I/O is timed: its price is one look at a counter.

use crate::engine::Engine;
use crate::member::add;
use crate::status::Progress;
use levada_base::reactor::{self, Instant};
use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

/// Foreground I/O this recent means that the array is not idle.
const BUSY_FOR: Duration = Duration::from_millis(20);
/// For so long foreground I/O is watched before the pace changes; for longer where there is little of it.
const WINDOW: Duration = Duration::from_millis(100);
const WINDOW_MAX: Duration = Duration::from_secs(1);
/// So many I/Os of a kind tell how long it takes; fewer end no window before its time, and so few tell nothing.
const TELLING: u64 = 16;
const TELLING_LEAST: u64 = 4;
/// It takes longer when it takes so many times as long as beside the floor, on average.
const STRAINED: f64 = 1.25;
const FASTER: f64 = 1.1;
const SLOWER: f64 = 0.7;
/// One window in so many is spent at the floor, to see how long foreground I/O takes there.
const MEASURED_EVERY: u64 = 64;

/// How fast rebuild and scrub may go, in bytes per second moved on all members together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Beside foreground I/O at least this.
    pub floor_bytes_per_second: u64,
    /// At most this; what an array gets that is idle otherwise.
    pub ceiling_bytes_per_second: u64,
}

impl Limits {
    /// As fast as the members are.
    pub const NONE: Self =
        Self { floor_bytes_per_second: u64::MAX, ceiling_bytes_per_second: u64::MAX };
}

/// Foreground I/O of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Taken {
    count: u64,
    ns: u64,
}

/// Reads and writes apart, as they take different times.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Read,
    Write,
}

/// What foreground I/O took, while somebody wants to know.
#[derive(Default)]
pub struct Foreground {
    /// I/Os begun.
    begun: Cell<u64>,
    /// So many are watching.
    watched: Cell<u32>,
    taken: [Cell<Taken>; 2],
}

impl Foreground {
    /// Counts an I/O, and times it if anybody watches.
    pub(crate) fn watch<'a, T: 'a>(
        &'a self,
        kind: Kind,
        io: Pin<Box<dyn Future<Output = T> + 'a>>,
    ) -> Pin<Box<dyn Future<Output = T> + 'a>> {
        add(&self.begun, 1);
        if self.watched.get() == 0 {
            return io;
        }
        Box::pin(async move {
            let begun = reactor::now();
            let result = io.await;
            let taken = &self.taken[kind as usize];
            let Taken { count, ns } = taken.get();
            let took = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
            taken.set(Taken { count: count + 1, ns: ns.saturating_add(took) });
            result
        })
    }
}

/// Finds the pace beside foreground I/O. Does no I/O, and reads no clock.
#[derive(Debug)]
struct Steering {
    limits: Limits,
    rate: f64,
    window_began: Instant,
    moved_bytes: u64,
    /// As they stood when the window began.
    taken: [Taken; 2],
    /// What an I/O takes beside the floor, in nanoseconds.
    beside_floor: [Option<f64>; 2],
    windows: u64,
}

impl Steering {
    fn new(limits: Limits, now: Instant, taken: [Taken; 2]) -> Self {
        Self {
            limits,
            rate: limits.floor_bytes_per_second as f64,
            window_began: now,
            moved_bytes: 0,
            taken,
            beside_floor: [None; 2],
            windows: 0,
        }
    }

    fn is_at_floor(&self) -> bool {
        self.rate <= self.limits.floor_bytes_per_second as f64
    }

    fn measures(&self) -> bool {
        self.is_at_floor() || self.windows.is_multiple_of(MEASURED_EVERY)
    }

    /// The pace beside foreground I/O, in bytes per second.
    fn rate(&self) -> u64 {
        if self.measures() { self.limits.floor_bytes_per_second } else { self.rate as u64 }
    }

    /// So much was moved; looks whether the window is over. `taken` is everything so far.
    fn moved(&mut self, bytes: u64, now: Instant, taken: [Taken; 2]) {
        self.moved_bytes += bytes;
        let span = now.since(self.window_began);
        let since = [0, 1].map(|kind: usize| Taken {
            count: taken[kind].count - self.taken[kind].count,
            ns: taken[kind].ns - self.taken[kind].ns,
        });
        let enough = since.iter().any(|taken| taken.count >= TELLING);
        if span < WINDOW || (!enough && span < WINDOW_MAX) {
            return;
        }
        let measures = self.measures();
        let (mut tells, mut strained) = (false, false);
        for (taken, beside_floor) in since.iter().zip(&mut self.beside_floor) {
            if taken.count < TELLING_LEAST {
                continue;
            }
            tells = true;
            let mean = taken.ns as f64 / taken.count as f64;
            strained |= beside_floor.is_some_and(|least| mean > STRAINED * least);
            *beside_floor = match *beside_floor {
                None => Some(mean),
                Some(least) if measures || mean < least => Some((least + mean) / 2.0),
                Some(least) => Some(least),
            };
        }
        let floor = self.limits.floor_bytes_per_second as f64;
        let ceiling = self.limits.ceiling_bytes_per_second as f64;
        if tells && (!measures || self.is_at_floor()) {
            // What is allowed and not used says nothing.
            let used = 2.0 * self.moved_bytes as f64 / span.as_secs_f64();
            self.rate = match strained {
                true => self.rate * SLOWER,
                false => (self.rate * FASTER).min(used.max(self.rate)),
            };
            self.rate = self.rate.max(floor).min(ceiling);
        }
        self.windows += u64::from(tells);
        (self.window_began, self.moved_bytes, self.taken) = (now, 0, taken);
    }
}

/// Keeps a background task at its pace, and its progress.
pub struct Pace<'a> {
    foreground: &'a Foreground,
    /// `None` where there is nothing to find.
    steering: Option<Steering>,
    limits: Limits,
    begun: Instant,
    /// When the bytes moved so far are paid for.
    paid: Instant,
    bytes: u64,
    /// How many foreground I/Os there had been when it was last looked, and when there were new ones.
    seen: (u64, Option<Instant>),
    pub(crate) progress: Progress,
}

impl<'a> Pace<'a> {
    /// Beside the foreground I/O of an array ([`Array::foreground`](crate::Array::foreground)).
    #[must_use]
    pub fn beside(foreground: &'a Foreground, limits: Limits) -> Self {
        Self::of_stripes(foreground, limits, 0, 0)
    }

    /// `stripes_before` of the total were done before it was interrupted.
    pub(crate) fn new(
        engine: &'a Engine,
        limits: Limits,
        stripes_before: u64,
        stripes_total: u64,
    ) -> Self {
        Self::of_stripes(&engine.foreground, limits, stripes_before, stripes_total)
    }

    fn of_stripes(
        foreground: &'a Foreground,
        limits: Limits,
        stripes_before: u64,
        stripes_total: u64,
    ) -> Self {
        let now = reactor::now();
        let stripes_done = stripes_before;
        let progress =
            Progress { stripes_done, stripes_before, stripes_total, bytes_per_second: 0.0 };
        let steers = limits.floor_bytes_per_second < limits.ceiling_bytes_per_second;
        let taken = foreground.taken.each_ref().map(Cell::get);
        foreground.watched.set(foreground.watched.get() + u32::from(steers));
        Self {
            foreground,
            steering: steers.then(|| Steering::new(limits, now, taken)),
            limits,
            begun: now,
            paid: now,
            bytes: 0,
            seen: (foreground.begun.get(), None),
            progress,
        }
    }

    /// Counts work done and waits until the next may begin.
    pub(crate) async fn spend(&mut self, stripes: u64, bytes: u64) {
        wait_until(self.charge(stripes, bytes)).await;
    }

    /// Counts a piece of work of so many bytes: when it may begin.
    pub fn turn(&mut self, bytes: u64) -> Instant {
        let begins = self.paid;
        self.charge(0, bytes);
        begins
    }

    /// Counts work done: when the next may begin, if not at once.
    pub(crate) fn charge(&mut self, stripes: u64, bytes: u64) -> Option<Instant> {
        self.bytes += bytes;
        self.progress.stripes_done += stripes;
        // Stripes written since it began are visited too.
        self.progress.stripes_total = self.progress.stripes_total.max(self.progress.stripes_done);
        let now = reactor::now();
        let seconds = now.since(self.begun).as_secs_f64();
        if seconds > 0.0 {
            self.progress.bytes_per_second = self.bytes as f64 / seconds;
        }
        let begun = self.foreground.begun.get();
        if begun != self.seen.0 {
            self.seen = (begun, Some(now));
        }
        let busy = self.seen.1.is_some_and(|last| now.since(last) < BUSY_FOR);
        if let Some(steering) = &mut self.steering {
            steering.moved(bytes, now, self.foreground.taken.each_ref().map(Cell::get));
        }
        let rate = match (busy, &self.steering) {
            (true, Some(steering)) => steering.rate(),
            (true, None) | (false, _) => self.limits.ceiling_bytes_per_second,
        };
        if rate == u64::MAX {
            return None;
        }
        let cost = Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64);
        // Time not used is not saved up.
        self.paid = self.paid.max(now) + cost;
        Some(self.paid)
    }
}

impl Drop for Pace<'_> {
    fn drop(&mut self) {
        let watched = self.foreground.watched.get();
        self.foreground.watched.set(watched - u32::from(self.steering.is_some()));
    }
}

/// Waits until then, or lets others go first.
pub(crate) async fn wait_until(then: Option<Instant>) {
    match then {
        Some(then) => reactor::sleep_until(then).await,
        None => reactor::yield_now().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits =
        Limits { floor_bytes_per_second: 1_000_000, ceiling_bytes_per_second: 50_000_000 };

    /// Windows in which reads take so long at each pace; the pace after each.
    fn paces(windows: u64, took_us: impl Fn(u64) -> u64) -> Vec<u64> {
        let (mut now, mut taken) = (Instant(0), [Taken::default(); 2]);
        let mut steering = Steering::new(LIMITS, now, taken);
        let window = |_| {
            let rate = steering.rate();
            now = now + WINDOW;
            taken[0].count += 100;
            taken[0].ns += 100 * took_us(rate) * 1000;
            steering.moved(rate / 10, now, taken);
            rate
        };
        (0..windows).map(window).collect()
    }

    #[test]
    fn what_nobody_notices_goes_at_the_ceiling() {
        let paces = paces(200, |_| 100);
        assert_eq!(paces[0], LIMITS.floor_bytes_per_second);
        assert!(paces.iter().all(|pace| *pace <= LIMITS.ceiling_bytes_per_second));
        assert_eq!(paces[199], LIMITS.ceiling_bytes_per_second);
    }

    #[test]
    fn what_is_noticed_at_once_goes_at_the_floor() {
        // From the floor on every byte more costs.
        let paces = paces(400, |rate| 100 + rate / 10_000);
        let mean = paces[100..].iter().sum::<u64>() / 300;
        assert!(paces.iter().all(|pace| *pace >= LIMITS.floor_bytes_per_second));
        assert!(mean < 2 * LIMITS.floor_bytes_per_second, "{mean}");
    }

    #[test]
    fn it_stays_where_it_is_just_not_noticed() {
        let knee = 10_000_000;
        let paces = paces(1000, |rate| if rate > knee { 200 } else { 100 });
        let mean = paces[100..].iter().sum::<u64>() / 900;
        assert!((knee * 6 / 10..knee * 11 / 10).contains(&mean), "{mean}");
    }

    #[test]
    fn another_load_is_another_measure() {
        // Half-way reads become four times as large.
        let count = Cell::new(0);
        let paces = paces(400, |_| {
            count.set(count.get() + 1);
            if count.get() < 200 { 100 } else { 400 }
        });
        assert_eq!(paces[198], LIMITS.ceiling_bytes_per_second);
        assert!(paces[200..260].iter().any(|pace| *pace < LIMITS.ceiling_bytes_per_second / 4));
        assert_eq!(paces[398], LIMITS.ceiling_bytes_per_second, "{paces:?}");
    }
}
