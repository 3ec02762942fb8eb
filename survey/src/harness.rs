//! The harness: runs both sides of a ratio in interleaved pairs and takes medians.
//!
//! What always holds:
//! - The two runs of a pair follow each other directly on the same thread, and pairs take turns
//!   at which side goes first, so slow drift of the machine touches both sides alike.
//! - One pair before the first is thrown away: caches, pools and the processor's clock settle.
//! - CPU time is that of all cores, so work that a side pushes to kernel threads counts.
//! - A pair counts only when its members were the limit: where a model says what the compared side
//!   can do ([`Said`]), it did nearly that. Otherwise the processor was measured, and two sides
//!   that wait for the same processor always look alike. Such a pair is taken again, and after
//!   [`RETAKES_PER_RUN`] the figure is refused instead of met.
#![allow(unsafe_code)] // getrusage(2) and sysconf(3).

use crate::figure::{Cpu, Operand, Per, Spread, Taken};
use crate::table::short;
use anyhow::{Context, Result};
use std::time::{Duration, Instant};

/// How thoroughly to measure.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Runs, or pairs of runs, that count.
    pub runs: usize,
    /// Smaller amounts of work: shows that everything runs, but the figures do not count.
    pub is_quick: bool,
}

impl Effort {
    /// `full` as it is, or an eighth of it when quick.
    #[must_use]
    pub fn amount(&self, full: u64) -> u64 {
        if self.is_quick { (full / 8).max(1) } else { full }
    }

    /// How long a span lasts whose length is a time: what a cache or a buffer could hold back is little beside it.
    #[must_use]
    pub fn span(&self) -> Duration {
        Duration::from_secs_f64(if self.is_quick { 30.0 / 8.0 } else { 30.0 })
    }

    /// No fewer runs than this, unless quick.
    #[must_use]
    pub fn at_least(self, runs: usize) -> Self {
        let runs = if self.is_quick { self.runs } else { self.runs.max(runs) };
        Self { runs, ..self }
    }
}

/// CPU time since some point in the past.
#[derive(Clone, Copy, Debug)]
struct CpuClock {
    all_cores: Duration,
    process: Duration,
}

impl CpuClock {
    fn now() -> Result<Self> {
        Ok(Self { all_cores: busy_of_all_cores()?, process: used_by_process()? })
    }
}

/// Time that the cores did not idle since boot, in steps of 10 ms.
fn busy_of_all_cores() -> Result<Duration> {
    let stat = std::fs::read_to_string("/proc/stat").context("/proc/stat")?;
    let line = stat.lines().next().context("/proc/stat is empty")?;
    busy_ticks(line).map(ticks)
}

fn ticks(count: u64) -> Duration {
    // SAFETY: reads a constant of the system; no memory is involved.
    let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    Duration::from_secs_f64(count as f64 / per_second.max(1) as f64)
}

/// The busy fields of the first line of `/proc/stat` (proc(5)): user, nice, system, irq and
/// softirq; not idle, iowait, or what other guests took.
fn busy_ticks(line: &str) -> Result<u64> {
    let fields: Vec<u64> = line.split_whitespace().skip(1).map_while(|f| f.parse().ok()).collect();
    let [user, nice, system, _idle, _iowait, irq, softirq, ..] = fields[..] else {
        anyhow::bail!("unexpected /proc/stat: {line}");
    };
    Ok(user + nice + system + irq + softirq)
}

/// CPU time of this process with all its threads, those of io_uring included.
fn used_by_process() -> Result<Duration> {
    let mut total = Duration::ZERO;
    for who in [libc::RUSAGE_SELF, libc::RUSAGE_CHILDREN] {
        let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: `usage` is a writable `rusage`.
        let result = unsafe { libc::getrusage(who, usage.as_mut_ptr()) };
        anyhow::ensure!(result == 0, std::io::Error::last_os_error());
        // SAFETY: zeroed above, and all zeroes is a valid `rusage`.
        let usage = unsafe { usage.assume_init() };
        for time in [usage.ru_utime, usage.ru_stime] {
            total += Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
        }
    }
    Ok(total)
}

/// What one run did, and what it took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Run {
    pub bytes: u64,
    pub ops: u64,
    pub elapsed: Duration,
    pub cpu_all_cores: Duration,
    pub cpu_process: Duration,
}

impl Run {
    /// 10^9 bytes per second.
    #[must_use]
    pub fn gb_per_s(&self) -> f64 {
        self.bytes as f64 / self.elapsed.as_secs_f64() / 1e9
    }

    /// 1000 operations per second.
    #[must_use]
    pub fn kiops(&self) -> f64 {
        self.ops as f64 / self.elapsed.as_secs_f64() / 1e3
    }
}

/// Runs in parts: what lies between the parts is not measured.
impl std::ops::AddAssign for Run {
    fn add_assign(&mut self, part: Self) {
        self.bytes += part.bytes;
        self.ops += part.ops;
        self.elapsed += part.elapsed;
        self.cpu_all_cores += part.cpu_all_cores;
        self.cpu_process += part.cpu_process;
    }
}

/// Measures one run from [`Meter::start`] to [`Meter::stop`].
pub struct Meter {
    started: Instant,
    cpu: CpuClock,
}

impl Meter {
    /// # Errors
    ///
    /// When the kernel does not tell CPU times.
    pub fn start() -> Result<Self> {
        Ok(Self { cpu: CpuClock::now()?, started: Instant::now() })
    }

    /// Ends the run, in which `ops` operations moved `bytes`.
    ///
    /// # Errors
    ///
    /// When the kernel does not tell CPU times.
    pub fn stop(self, bytes: u64, ops: u64) -> Result<Run> {
        let elapsed = self.started.elapsed();
        let cpu = CpuClock::now()?;
        Ok(Run {
            bytes,
            ops,
            elapsed,
            cpu_all_cores: cpu.all_cores.saturating_sub(self.cpu.all_cores),
            cpu_process: cpu.process.saturating_sub(self.cpu.process),
        })
    }
}

/// What counts in a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rate {
    GbPerS,
    Kiops,
}

impl Rate {
    fn of(self, run: &Run) -> f64 {
        match self {
            Self::GbPerS => run.gb_per_s(),
            Self::Kiops => run.kiops(),
        }
    }

    fn unit(self) -> &'static str {
        match self {
            Self::GbPerS => "GB/s",
            Self::Kiops => "kIOPS",
        }
    }

    /// CPU time over all `runs` per unit of work: summing first makes the coarse clock finer.
    fn cpu(self, runs: &[Run]) -> Option<Cpu> {
        let (per, work) = match self {
            Self::GbPerS => (Per::Byte, runs.iter().map(|run| run.bytes).sum::<u64>()),
            Self::Kiops => (Per::Op, runs.iter().map(|run| run.ops).sum()),
        };
        let all: Duration = runs.iter().map(|run| run.cpu_all_cores).sum();
        let process: Duration = runs.iter().map(|run| run.cpu_process).sum();
        let each = |total: Duration| total.as_secs_f64() * 1e9 / work as f64;
        (work > 0).then(|| Cpu { per, all_cores_ns: each(all), process_ns: each(process) })
    }
}

/// What the side that is compared with must come near, for its members to have been the limit.
#[derive(Clone, Copy, Debug)]
pub struct Said {
    /// Which side of the figure this is about, before any scale: `raw`, `client`.
    pub side: &'static str,
    /// Who says it: `model`.
    pub by: &'static str,
    pub rate: Rate,
    /// In the rate's unit.
    pub value: f64,
}

/// The share of [`Said`] that a pair's compared side must reach for the pair to count.
pub const REACHED_SHARE: f64 = 0.9;
/// Pairs that may be taken again, for each one that counts.
pub const RETAKES_PER_RUN: usize = 2;

impl Said {
    fn is_reached_by(&self, run: &Run) -> bool {
        self.rate.of(run) >= REACHED_SHARE * self.value
    }
}

/// Both sides of a ratio: the one that the figure is about, and what it is compared with.
pub struct Pairs {
    ours: Vec<Run>,
    theirs: Vec<Run>,
    said: Option<Said>,
    retaken: usize,
}

/// Measures `effort.runs` pairs, whose compared side comes near what is `said`. Each side gets
/// the number of its run, from 0 on; number 0 is the pair that does not count.
///
/// # Errors
///
/// Those of either side; and when too many pairs did not reach what is said.
pub async fn pairs(
    effort: Effort,
    said: Option<Said>,
    mut ours: impl AsyncFnMut(usize) -> Result<Run>,
    mut theirs: impl AsyncFnMut(usize) -> Result<Run>,
) -> Result<Pairs> {
    let mut pairs = Pairs { ours: Vec::new(), theirs: Vec::new(), said, retaken: 0 };
    // The most that a pair reached that was not enough.
    let mut reached: f64 = 0.0;
    let mut number = 0;
    while pairs.ours.len() < effort.runs {
        let (our_run, their_run) = if number % 2 == 0 {
            let our_run = ours(number).await?;
            (our_run, theirs(number).await?)
        } else {
            let their_run = theirs(number).await?;
            (ours(number).await?, their_run)
        };
        number += 1;
        if number == 1 {
            continue;
        }
        if let Some(said) = said.filter(|said| !said.is_reached_by(&their_run)) {
            reached = reached.max(said.rate.of(&their_run));
            anyhow::ensure!(
                pairs.retaken < RETAKES_PER_RUN * effort.runs,
                "{} reached {} of {} {}, {} pairs counted and {} did not",
                said.side,
                short(reached),
                short(said.value),
                said.rate.unit(),
                pairs.ours.len(),
                pairs.retaken + 1,
            );
            pairs.retaken += 1;
            continue;
        }
        pairs.ours.push(our_run);
        pairs.theirs.push(their_run);
    }
    Ok(pairs)
}

impl Pairs {
    /// The figure: median of our rate over theirs times `scale`, pair by pair.
    #[must_use]
    pub fn ratio(&self, rate: Rate, names: (&'static str, &'static str), scale: f64) -> Taken {
        self.taken(rate, names, scale, |ratio| ratio)
    }

    /// The share of their rate that ours lacks: median pair by pair; below zero where we are faster.
    #[must_use]
    pub fn cost(&self, rate: Rate, names: (&'static str, &'static str)) -> Taken {
        self.taken(rate, names, 1.0, |ratio| 1.0 - ratio)
    }

    fn taken(
        &self,
        rate: Rate,
        names: (&'static str, &'static str),
        scale: f64,
        of_ratio: impl Fn(f64) -> f64,
    ) -> Taken {
        let ratios: Vec<f64> = self
            .ours
            .iter()
            .zip(&self.theirs)
            .map(|(ours, theirs)| of_ratio(rate.of(ours) / (rate.of(theirs) * scale)))
            .collect();
        let side = |name, runs: &[Run], scale: f64| {
            let value = median(runs.iter().map(|run| rate.of(run) * scale));
            Operand { cpu: rate.cpu(runs), ..Operand::new(name, value, rate.unit()) }
        };
        let mut operands = vec![side(names.0, &self.ours, 1.0), side(names.1, &self.theirs, scale)];
        operands.extend(
            self.said.map(|said| Operand::new(said.by, said.value * scale, said.rate.unit())),
        );
        Taken {
            value: median(ratios.iter().copied()),
            unit: "ratio".into(),
            operands,
            cpu: rate.cpu(&self.ours),
            runs: ratios.len(),
            retaken: self.retaken,
            spread: spread(&ratios),
        }
    }
}

/// Measures `effort.runs` runs, after one that does not count.
///
/// # Errors
///
/// Those of `run`.
pub async fn runs(
    effort: Effort,
    mut run: impl AsyncFnMut(usize) -> Result<Run>,
) -> Result<Vec<Run>> {
    let mut all = Vec::new();
    for number in 0..=effort.runs {
        let this = run(number).await?;
        if number > 0 {
            all.push(this);
        }
    }
    Ok(all)
}

/// The figure that is a plain rate.
#[must_use]
pub fn absolute(rate: Rate, name: &'static str, runs: &[Run]) -> Taken {
    let rates: Vec<f64> = runs.iter().map(|run| rate.of(run)).collect();
    let (value, unit, cpu) = (median(rates.iter().copied()), rate.unit(), rate.cpu(runs));
    let operands = vec![Operand { cpu, ..Operand::new(name, value, unit) }];
    Taken {
        value,
        unit: unit.into(),
        operands,
        cpu,
        runs: rates.len(),
        retaken: 0,
        spread: spread(&rates),
    }
}

/// The figure that is our value over theirs, pair by pair, where the values are no rates.
#[must_use]
pub fn ratio_of(
    pairs: &[(f64, f64)],
    unit: &'static str,
    names: (&'static str, &'static str),
) -> Taken {
    let ratios: Vec<f64> = pairs.iter().map(|(ours, theirs)| ours / theirs).collect();
    let side = |name, values: Vec<f64>| Operand::new(name, median(values), unit);
    Taken {
        value: median(ratios.iter().copied()),
        unit: "ratio".into(),
        operands: vec![
            side(names.0, pairs.iter().map(|(ours, _)| *ours).collect()),
            side(names.1, pairs.iter().map(|(_, theirs)| *theirs).collect()),
        ],
        cpu: None,
        runs: ratios.len(),
        retaken: 0,
        spread: spread(&ratios),
    }
}

/// The middle value, or the mean of the two middle ones; not a number when there is none.
#[must_use]
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => f64::midpoint(values[n / 2 - 1], values[n / 2]),
    }
}

/// The lowest and the highest value.
#[must_use]
pub fn spread(values: &[f64]) -> Spread {
    Spread {
        lowest: values.iter().copied().fold(f64::INFINITY, f64::min),
        highest: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use levada_base::reactor::Reactor;

    fn run(bytes: u64, millis: u64) -> Run {
        let elapsed = Duration::from_millis(millis);
        Run { bytes, ops: bytes / 4096, elapsed, cpu_all_cores: elapsed, cpu_process: elapsed }
    }

    #[test]
    fn a_ratio_is_the_median_of_its_pairs_not_the_ratio_of_medians() {
        let effort = Effort { runs: 3, is_quick: false };
        // Each pair is 1 : 2 although the machine slows down over the runs.
        let pairs = Reactor::simulated(0).block_on(pairs(
            effort,
            None,
            async |number| Ok(run(1_000_000, 10 * (number as u64 + 1))),
            async |number| Ok(run(2_000_000, 10 * (number as u64 + 1))),
        ));
        let taken = pairs.expect("no error").ratio(Rate::GbPerS, ("ours", "theirs"), 1.0);
        assert!((taken.value - 0.5).abs() < 1e-9);
        assert_eq!(taken.runs, 3);
        assert!((taken.spread.highest - taken.spread.lowest).abs() < 1e-9);
    }

    /// Pairs of 1 : 1 whose compared side needs these times for 1 MB; the model says 1 GB/s.
    fn pairs_with(runs: usize, their_micros: &[u64]) -> Result<Pairs> {
        let said = Said { side: "raw", by: "model", rate: Rate::GbPerS, value: 1.0 };
        let effort = Effort { runs, is_quick: false };
        let one = async |number: usize| {
            let micros = their_micros[number.min(their_micros.len() - 1)];
            let elapsed = Duration::from_micros(micros);
            Ok(Run { elapsed, ..run(1_000_000, 1) })
        };
        Reactor::simulated(0).block_on(pairs(effort, Some(said), one, one))
    }

    #[test]
    fn a_pair_that_measured_something_else_than_the_members_is_taken_again() {
        let pairs = pairs_with(3, &[9000, 1000, 2000, 1100, 5000, 1050]).expect("three are good");
        let taken = pairs.ratio(Rate::GbPerS, ("array", "raw"), 1.0);
        assert_eq!((taken.runs, taken.retaken), (3, 2));
        assert!(pairs.theirs.iter().all(|run| run.gb_per_s() >= 0.9));
        let model = taken.operands.last().expect("the model is shown");
        assert_eq!(*model, Operand::new("model", 1.0, "GB/s"));
    }

    #[test]
    fn what_the_members_never_limited_is_not_taken() {
        // Both sides equally slow: the ratio would be a perfect 1.
        let Err(error) = pairs_with(3, &[2000]) else { panic!("a figure of the processor") };
        let said = error.to_string();
        assert!(said.starts_with("raw reached 0.500 of 1.00 GB/s"), "{said}");
        assert!(said.ends_with("0 pairs counted and 7 did not"), "{said}");
    }

    #[test]
    fn the_median_of_an_even_number_lies_between() {
        assert!((median([4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
        assert!(median([]).is_nan());
    }

    #[test]
    fn busy_time_leaves_out_idle_iowait_and_steal() {
        assert_eq!(busy_ticks("cpu  1 2 4 100 200 8 16 300 7 0").expect("a good line"), 31);
        assert!(busy_ticks("cpu  1 2").is_err());
    }
}
