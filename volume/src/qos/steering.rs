//! How much of others may be in flight below while somebody has a guarantee. Does no I/O, and reads no clock.
//!
//! What is in flight of others is what a guaranteed request waits behind: drives keep no order that we could set. So it is
//! bounded by a window, found from what guaranteed requests take: a little wider with each that came in time, much narrower with
//! each that was late. Both are in the ratio that leaves one of 200 late. Late is what takes longer than it
//! would without others; how long that is, is learned when there are none, and in short pauses of the others now and then.
//!
//! What always holds: while nobody uses a guarantee, nothing is bounded.

use super::limits::Kind;
use levada_base::planted;

const MS: u64 = 1_000_000;
/// So long after its last request a guarantee counts as used.
const USED_FOR_NS: u64 = 100 * MS;
/// Late is what takes so many times what 95 of 100 do alone.
const LATE: f64 = 1.25;
const WIDER: f64 = 1.0005;
const NARROWER: f64 = 0.9;
/// In bytes, as [`Cost::weighed`](super::Cost::weighed) has them. One request is always let through.
const WINDOW_LEAST: f64 = 16.0 * 1024.0;
const WINDOW_MOST: f64 = 256.0 * 1024.0 * 1024.0;
const WINDOW_FIRST: f64 = 1024.0 * 1024.0;
/// Others pause once in so long, until so many guaranteed requests went alone, but never longer than this: 1 % at most.
const PAUSE_EVERY_NS: u64 = 2_000 * MS;
const PAUSE_NS: u64 = 20 * MS;
const ALONE_TELLING: u32 = 16;
/// Requests of about the same size take about the same time: a class per power of two from 4 KiB on.
const CLASSES: usize = 10;

/// What guaranteed requests of one volume take alone, each kind and size apart: what 95 of 100 do not exceed, in nanoseconds.
#[derive(Clone, Debug, Default)]
pub(super) struct Alone([[Option<f64>; CLASSES]; 2]);

impl Alone {
    fn of(&mut self, kind: Kind, bytes: u64) -> &mut Option<f64> {
        let class = (bytes.max(4096).ilog2() - 12) as usize;
        &mut self.0[kind as usize][class.min(CLASSES - 1)]
    }

    /// Follows the quantile: up by 0.95 of a step where it is exceeded, down by 0.05 of one where not.
    fn learn(&mut self, kind: Kind, bytes: u64, took_ns: f64) {
        let known = self.of(kind, bytes);
        *known = Some(match *known {
            None => took_ns,
            Some(known) if took_ns > known => known * 1.0475,
            Some(known) => known * 0.9975,
        });
    }
}

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Steering {
    window: f64,
    used_until_ns: u64,
    next_pause_ns: u64,
    pause_until_ns: u64,
    alone_in_pause: u32,
}

impl Default for Steering {
    fn default() -> Self {
        Self {
            window: WINDOW_FIRST,
            used_until_ns: 0,
            next_pause_ns: 0,
            pause_until_ns: 0,
            alone_in_pause: 0,
        }
    }
}

impl Steering {
    /// A guaranteed request goes down.
    pub(super) fn used(&mut self, now_ns: u64) {
        self.used_until_ns = now_ns + USED_FOR_NS;
    }

    /// Whether others may have `cost` more in flight, beside what they have.
    pub(super) fn lets(&mut self, in_flight: f64, cost: f64, now_ns: u64) -> bool {
        if now_ns >= self.used_until_ns {
            return true;
        }
        if now_ns >= self.next_pause_ns {
            self.next_pause_ns = now_ns + PAUSE_EVERY_NS;
            self.pause_until_ns = now_ns + PAUSE_NS;
            self.alone_in_pause = 0;
        }
        let fits = in_flight <= 0.0 || in_flight + cost <= self.window;
        now_ns >= self.pause_until_ns && (fits || planted!("qos-window-not-kept"))
    }

    /// When others may go on that are held by nothing in flight.
    pub(super) fn pause_until_ns(&self) -> u64 {
        self.pause_until_ns
    }

    /// A guaranteed request came back, alone from beginning to end or not; others have so much in flight.
    pub(super) fn done(
        &mut self,
        alone: &mut Alone,
        request: (Kind, u64),
        took_ns: u64,
        was_alone: bool,
        others_in_flight: f64,
    ) {
        let ((kind, bytes), took_ns) = (request, took_ns as f64);
        if was_alone {
            alone.learn(kind, bytes, took_ns);
            self.alone_in_pause += 1;
            if self.alone_in_pause >= ALONE_TELLING {
                self.pause_until_ns = 0;
            }
            return;
        }
        let Some(known) = *alone.of(kind, bytes) else { return };
        if took_ns > LATE * known {
            self.window = (self.window * NARROWER).max(WINDOW_LEAST);
        } else if others_in_flight * 2.0 >= self.window {
            // What is allowed and not used says nothing.
            self.window = (self.window * WIDER).min(WINDOW_MOST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The window after so many guaranteed requests, each of which takes what it does beside such a window.
    fn window_after(requests: u64, took_ns: impl Fn(f64, u64) -> u64) -> f64 {
        let (mut steering, mut alone) = (Steering::default(), Alone::default());
        steering.done(&mut alone, (Kind::Read, 4096), 80_000, true, 0.0);
        for number in 0..requests {
            let (took_ns, window) = (took_ns(steering.window, number), steering.window);
            steering.done(&mut alone, (Kind::Read, 4096), took_ns, false, window);
        }
        steering.window
    }

    #[test]
    fn what_nobody_notices_is_let_through() {
        assert_eq!(window_after(20_000, |_, _| 80_000), WINDOW_MOST);
    }

    #[test]
    fn what_is_always_noticed_is_cut_to_the_least() {
        assert_eq!(window_after(200, |_, _| 800_000), WINDOW_LEAST);
    }

    #[test]
    fn it_stays_where_one_of_200_is_late() {
        // Every 100th is late beside more than 4 MB, every 1000th beside less.
        let knee = 4e6;
        let took = |window: f64, number: u64| {
            let every = if window > knee { 100 } else { 1000 };
            if number.is_multiple_of(every) { 900_000 } else { 80_000 }
        };
        let window = window_after(50_000, took);
        assert!((0.7 * knee..1.3 * knee).contains(&window), "{window}");
    }

    #[test]
    fn nothing_is_bounded_while_no_guarantee_is_used() {
        let mut steering = Steering::default();
        assert!(steering.lets(1e12, 1e9, 5));
        steering.used(5);
        assert!(!steering.lets(1e12, 1e9, 6));
        assert!(!steering.lets(0.0, 1.0, 6), "the pause in which is learned what it takes alone");
        assert!(steering.lets(0.0, 1e9, 6 + PAUSE_NS), "one is always let through");
        assert!(steering.lets(1e12, 1e9, 5 + USED_FOR_NS));
    }
}
