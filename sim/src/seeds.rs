//! Runs a scenario for many seeds, on several threads, and names the seed that fails.
//!
//! `SIM_SEED=n` replays one seed; `SIM_SEEDS=n` says how many; `SIM_THREADS=n` on how many
//! threads. Threads share nothing: each has its own reactor and world.

use crate::Coverage;
use levada_base::{planted, probe};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// What one seed gave.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Of every scheduling decision: equal for equal seeds.
    pub trace_hash: u64,
    pub coverage: Coverage,
}

/// A scenario: panics when something is wrong.
pub type Scenario = fn(u64) -> Outcome;

/// What many seeds gave.
#[derive(Clone, Debug)]
pub struct Summary {
    pub seeds: u64,
    pub coverage: Coverage,
    pub wall: Duration,
    /// The first seed that failed, and how.
    pub failure: Option<(u64, String)>,
}

fn variable(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.trim().parse().unwrap_or_else(|_| panic!("{name} must be a number: {value:?}")))
}

/// Seeds to run: `SIM_SEED` alone, or from `first` on as many as `SIM_SEEDS` or `default` say.
#[must_use]
pub fn chosen(first: u64, default: u64) -> std::ops::Range<u64> {
    match variable("SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => first..first + variable("SIM_SEEDS").unwrap_or(default),
    }
}

/// Threads or processes that run side by side: `SIM_THREADS`, or one for each core.
#[must_use]
pub fn threads() -> u64 {
    let cores = thread::available_parallelism().map_or(1, |n| n.get() as u64);
    variable("SIM_THREADS").unwrap_or(cores).max(1)
}

/// Runs one seed from a clean thread state; `Err` says why it failed.
///
/// # Errors
///
/// The message of the panic.
pub fn run_one(scenario: Scenario, seed: u64) -> Result<Outcome, String> {
    probe::reset();
    let mut result = catch_unwind(AssertUnwindSafe(|| scenario(seed)));
    if let Ok(outcome) = &mut result {
        probe::counts().iter().for_each(|(what, times)| outcome.coverage.count(what, *times));
    }
    result.map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        text.unwrap_or("a panic without a message").to_owned()
    })
}

/// Runs the seeds until one fails.
pub fn run(seeds: std::ops::Range<u64>, bug: Option<&'static str>, scenario: Scenario) -> Summary {
    let begun = Instant::now();
    let next = AtomicU64::new(seeds.start);
    let stop = AtomicBool::new(false);
    let total = Mutex::new((0, Coverage::default(), None::<(u64, String)>));
    let threads = threads().clamp(1, seeds.end.saturating_sub(seeds.start).max(1));
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                planted::choose(bug);
                while !stop.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        break;
                    }
                    let result = run_one(scenario, seed);
                    let mut total = total.lock().expect("no panic while it is held");
                    total.0 += 1;
                    match result {
                        Ok(outcome) => total.1.add(&outcome.coverage),
                        Err(message) => {
                            stop.store(true, Ordering::Relaxed);
                            if total.2.as_ref().is_none_or(|(first, _)| seed < *first) {
                                total.2 = Some((seed, message));
                            }
                        }
                    }
                }
                planted::choose(None);
            });
        }
    });
    let (ran, coverage, failure) = total.into_inner().expect("no panic while it is held");
    Summary { seeds: ran, coverage, wall: begun.elapsed(), failure }
}

/// Runs the seeds for a test: prints the coverage, panics with the seed that failed.
///
/// # Panics
///
/// When a seed fails.
pub fn check(name: &str, default: u64, scenario: Scenario) -> Coverage {
    check_these(name, chosen(0, default), scenario)
}

/// The same for certain seeds, whatever the variables say.
///
/// # Panics
///
/// When a seed fails.
pub fn check_these(name: &str, seeds: std::ops::Range<u64>, scenario: Scenario) -> Coverage {
    let summary = run(seeds, None, scenario);
    println!(
        "{name}: {} seeds in {:.1} s\n{}",
        summary.seeds,
        summary.wall.as_secs_f64(),
        summary.coverage
    );
    if let Some((seed, message)) = summary.failure {
        panic!("{name} failed: {message}\nreplay with SIM_SEED={seed}");
    }
    summary.coverage
}
