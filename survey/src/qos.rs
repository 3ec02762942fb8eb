//! Caps and guarantees of volumes: how exactly they hold, what they cost, and what a guarantee keeps.

use crate::array::{CHUNK_BYTES, STRIPE_BYTES, raid6_of, run, ten};
use crate::chart::{self, Line};
use crate::figure::{Bar, Operand, Spread, Taken};
use crate::harness::{Effort, Meter, Rate, median, pairs, ratio_of};
use crate::load::Load;
use crate::members::{Speed, Storage};
use crate::served::{Fio, Served, Serving, Volumes};
use crate::suite::Spec;
use anyhow::{Context, Result};
use levada_base::reactor::{self, JoinHandle, random_u64};
use levada_base::units::{KIB, MIB};
use levada_raid::RaidArray;
use levada_volume::qos::{Cost, Governed, Governor, Limits, Rates, Terms};
use levada_volume::{ArrayVolume, Volume};
use std::any::Any;
use std::cell::Cell;
use std::fs;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const TERMS: Terms = Terms { request_bytes_max: MIB, capacity: Rates::NONE };
const STRIPES: u64 = 1024;
/// Reads of 4 KiB that the victim asks for, per second, at random times; it is guaranteed twice as many.
const VICTIM_IOPS: u64 = 2000;
/// As many as the victim ever waits for at once.
const VICTIM_DEPTH: usize = 64;
/// Reads of 4 KiB that the aggressor has in flight.
const AGGRESSOR_DEPTH: usize = 256;
const VICTIM: &str = "victim";
const AGGRESSOR: &str = "aggressor";
/// How long the aggressor is there before the victim, and after it.
const MARGIN: Duration = Duration::from_secs(1);
/// Of the chart.
const WINDOW: Duration = Duration::from_millis(500);
/// Before anything counts, so that the window is found.
const SETTLES: Duration = Duration::from_secs(3);

pub(crate) fn specs() -> Vec<Spec> {
    vec![
        Spec {
            name: "qos.cap_error",
            what: "the worst second under a cap of I/Os or bytes, on the clock of the machine",
            bar: Bar::AtMost(0.02),
            take: |effort| run(cap_error(effort)),
        },
        Spec {
            name: "qos.null.cost",
            what: "4 KiB reads of a volume on members that answer at once: the share lost by a cap",
            bar: Bar::AtMost(0.05),
            take: |effort| run(null_cost(effort, Rates::NONE)),
        },
        Spec {
            name: "qos.null.guaranteed_cost",
            what: "the same where the volume has a guarantee, too, which times each request",
            bar: Bar::None,
            take: |effort| run(null_cost(effort, Rates { iops: Some(1000), bytes_per_s: None })),
        },
        Spec {
            name: "qos.nvme.victim_p99_of_alone",
            what: "p99 of a volume with a guarantee, over NBD, beside another process that reads all it can of another, against alone",
            bar: Bar::AtMost(1.5),
            take: |effort| victim_p99(effort, true),
        },
        Spec {
            name: "qos.nvme.unguarded_p99_of_alone",
            what: "the same without the guarantee",
            bar: Bar::None,
            take: |effort| victim_p99(effort, false),
        },
    ]
}

async fn array(speed: Speed) -> Result<RaidArray> {
    let devices = ten(speed, Storage::Null, STRIPES * STRIPE_BYTES);
    let array = raid6_of(&devices, CHUNK_BYTES).await?;
    levada_raid::Array::declare_fresh(&array, 0, STRIPES).await?;
    Ok(array)
}

/// Ends when dropped.
struct Tasks(Vec<JoinHandle<()>>);

impl Drop for Tasks {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
    }
}

/// How far the worst second of `seconds` is from the cap; the first begins with a burst saved up.
async fn worst_second(cap: Rates, bytes: fn() -> u64, seconds: u64) -> Result<f64> {
    let share = Governor::new(TERMS).share(Limits { cap, ..Limits::NONE })?;
    let passed = Rc::new(Cell::new([0_u64; 2]));
    let task = |_| {
        let (share, passed) = (share.clone(), Rc::clone(&passed));
        reactor::spawn(async move {
            loop {
                let bytes = bytes();
                let _admitted = share.admit(Cost::read(bytes)).await;
                let [ios, sum] = passed.get();
                passed.set([ios + 1, sum + bytes]);
                reactor::sleep(Duration::from_micros(80)).await;
            }
        })
    };
    let _tasks = Tasks((0..64).map(task).collect());
    let mut worst: f64 = 0.0;
    for _ in 0..seconds {
        let (before, began) = (passed.get(), reactor::now());
        reactor::sleep(Duration::from_secs(1)).await;
        let span = began.elapsed().as_secs_f64();
        for (rate, (now, before)) in
            [cap.iops, cap.bytes_per_s].into_iter().zip(passed.get().into_iter().zip(before))
        {
            let Some(rate) = rate else { continue };
            worst = worst.max(((now - before) as f64 / span / rate as f64 - 1.0).abs());
        }
    }
    Ok(worst)
}

async fn cap_error(effort: Effort) -> Result<Taken> {
    let iops = Rates { iops: Some(20_000), bytes_per_s: None };
    let bytes = Rates { iops: None, bytes_per_s: Some(400_000_000) };
    let mixed = || if random_u64().is_multiple_of(8) { 256 * KIB } else { 4 * KIB };
    let (mut of_iops, mut of_bytes) = (Vec::new(), Vec::new());
    for _ in 0..effort.runs {
        of_iops.push(worst_second(iops, || 4 * KIB, effort.amount(8)).await?);
        of_bytes.push(worst_second(bytes, mixed, effort.amount(8)).await?);
    }
    let worst: Vec<f64> = of_iops.iter().zip(&of_bytes).map(|(a, b)| a.max(*b)).collect();
    let highest = worst.iter().copied().fold(0.0, f64::max);
    let operand = |name, of: &[f64]| {
        let value = of.iter().copied().fold(0.0, f64::max);
        Operand::new(name, value, "ratio")
    };
    Ok(Taken {
        // Not the median: a cap holds in every second or it does not.
        value: highest,
        unit: "ratio".into(),
        operands: vec![operand("20 kIOPS", &of_iops), operand("400 MB/s", &of_bytes)],
        cpu: None,
        runs: worst.len(),
        retaken: 0,
        spread: Spread { lowest: worst.iter().copied().fold(f64::MAX, f64::min), highest },
    })
}

async fn null_cost(effort: Effort, guarantee: Rates) -> Result<Taken> {
    let array = array(Speed::Unlimited).await?;
    let plain = ArrayVolume::new(array.clone());
    // Never reached, and counted as any other.
    let cap = Rates { iops: Some(50_000_000), bytes_per_s: Some(400_000_000_000) };
    let governor = Governor::new(TERMS);
    let tenant = governor.tenant("red".parse()?, Limits { cap, ..Limits::NONE })?;
    let share = tenant.share(Limits { cap, guarantee, ..Limits::NONE })?;
    let governed = Governed::new(ArrayVolume::new(array), share);
    let load = Load::random(0..STRIPES * STRIPE_BYTES, 4 * KIB, 1, 1 << 16, 7);
    let (offsets, rounds) = (load.offsets(), effort.amount(32));
    let one_run = async |volume: &dyn Volume| {
        let meter = Meter::start()?;
        for _ in 0..rounds {
            for at in &offsets {
                volume.read(*at, 4 * KIB).await?;
            }
        }
        let ops = rounds * offsets.len() as u64;
        meter.stop(ops * 4 * KIB, ops)
    };
    let ours = async |_| one_run(&governed).await;
    let theirs = async |_| one_run(&plain).await;
    Ok(pairs(effort, None, ours, theirs).await?.cost(Rate::Kiops, ("governed", "plain")))
}

/// Keeps another core busy until dropped.
struct Hog(Arc<AtomicBool>);

impl Hog {
    fn start() -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&ends);
        std::thread::spawn(move || {
            while !seen.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        Self(ends)
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Two volumes of one array, each for a client of its own.
async fn two_volumes(is_guaranteed: bool) -> Result<Volumes> {
    let array = array(Speed::Nvme).await?;
    let governor = Governor::new(TERMS);
    let iops = is_guaranteed.then_some(2 * VICTIM_IOPS);
    let guarantee = Rates { iops, bytes_per_s: None };
    let mut volumes = Volumes::new();
    for (name, guarantee) in [(VICTIM, guarantee), (AGGRESSOR, Rates::NONE)] {
        let share = governor.share(Limits { guarantee, ..Limits::NONE })?;
        let volume = Governed::new(ArrayVolume::new(array.clone()), share);
        volumes.insert(name.to_owned(), Rc::new(volume));
    }
    Ok(volumes)
}

fn reads(depth: usize, span: Duration) -> Vec<String> {
    let size = STRIPES * STRIPE_BYTES;
    let mut load: Vec<_> =
        ["--rw=randread", "--bs=4k", "--time_based"].map(str::to_owned).into_iter().collect();
    load.push(format!("--iodepth={depth}"));
    load.push(format!("--size={size}"));
    load.push(format!("--runtime={}", span.as_secs().max(1)));
    load
}

/// The victim's reads, at random times.
struct Victim<'a> {
    dir: &'a Path,
    fio: Fio,
}

impl<'a> Victim<'a> {
    fn start(dir: &'a Path, served: &Served, span: Duration) -> Result<Self> {
        let mut load = reads(VICTIM_DEPTH, SETTLES + span);
        load.push(format!("--rate_iops={VICTIM_IOPS}"));
        load.push("--rate_process=poisson".into());
        load.push(format!("--write_lat_log={VICTIM}"));
        Ok(Self { dir, fio: Fio::start(dir, &served.uri(VICTIM), &load)? })
    }

    /// When each read that counts was answered, and what it took, by fio's clock.
    fn end(self) -> Result<Vec<(Duration, Duration)>> {
        self.fio.end()?;
        // Lines of: milliseconds, nanoseconds, direction, bytes, priority.
        let log = fs::read_to_string(self.dir.join(format!("{VICTIM}_lat.1.log")))?;
        let read = |line: &str| {
            let mut fields = line.split(',').map(|field| field.trim().parse().ok());
            let (at_ms, took_ns) = (fields.next()??, fields.next()??);
            Some((Duration::from_millis(at_ms), Duration::from_nanos(took_ns)))
        };
        let reads: Option<Vec<_>> = log.lines().map(read).collect();
        let mut reads = reads.context("fio's log is not understood")?;
        reads.retain(|(at, _)| *at >= SETTLES);
        Ok(reads)
    }
}

/// p99 in microseconds.
fn p99(reads: &[(Duration, Duration)]) -> Result<f64> {
    let mut took: Vec<_> = reads.iter().map(|(_, took)| *took).collect();
    took.sort_unstable();
    let at = took.len() * 99 / 100;
    Ok(took.get(at).context("the victim read nothing")?.as_secs_f64() * 1e6)
}

fn victim_p99(effort: Effort, is_guaranteed: bool) -> Result<Taken> {
    let dir = tempfile::Builder::new().prefix("bench-qos-").tempdir()?;
    let span = Duration::from_secs(effort.amount(8).max(2));
    let served = Served::start(dir.path(), Serving::default(), async move || {
        two_volumes(is_guaranteed).await
    })?;
    let (mut both, mut aggressors) = (Vec::new(), Vec::new());
    for _ in 0..effort.runs {
        let alone = {
            let _hog = Hog::start();
            p99(&Victim::start(dir.path(), &served, span)?.end()?)?
        };
        // It is there before the victim, and after it.
        let load = reads(AGGRESSOR_DEPTH, SETTLES + span + 2 * MARGIN);
        let aggressor = Fio::start(dir.path(), &served.uri(AGGRESSOR), &load)?;
        std::thread::sleep(MARGIN);
        let beside = p99(&Victim::start(dir.path(), &served, span)?.end()?)?;
        let iops = aggressor.end()?["read"]["iops"].as_f64();
        aggressors.push(iops.context("fio tells no rate")? / 1e3);
        both.push((beside, alone));
    }
    let mut taken = ratio_of(&both, "us", ("beside", "alone"));
    let value = median(aggressors);
    taken.operands.push(Operand::new("aggressor", value, "kIOPS"));
    Ok(taken)
}

/// p99 over windows of half a second, alone and beside the aggressor with the guarantee and without, as an SVG.
///
/// # Errors
///
/// fio is missing, or failed.
pub fn chart(span: Duration) -> Result<String> {
    let mut lines = Vec::new();
    let sides = [
        ("alone, beside a busy core", true, false),
        ("beside 256 reads at once, guaranteed", true, true),
        ("not guaranteed", false, true),
    ];
    for (name, is_guaranteed, is_attacked) in sides {
        let dir = tempfile::Builder::new().prefix("bench-qos-").tempdir()?;
        let served = Served::start(dir.path(), Serving::default(), async move || {
            two_volumes(is_guaranteed).await
        })?;
        let beside: Box<dyn Any> = if is_attacked {
            let load = reads(AGGRESSOR_DEPTH, SETTLES + span + 2 * MARGIN);
            Box::new(Fio::start(dir.path(), &served.uri(AGGRESSOR), &load)?)
        } else {
            Box::new(Hog::start())
        };
        std::thread::sleep(MARGIN);
        let reads = Victim::start(dir.path(), &served, span)?.end()?;
        drop(beside);
        let window_of = |at: Duration| (at - SETTLES).as_millis() / WINDOW.as_millis();
        let windows = reads.chunk_by(|(one, _), (next, _)| window_of(*one) == window_of(*next));
        let points = windows
            .map(|window| Ok(((window[0].0 - SETTLES).as_secs_f64(), p99(window)?)))
            .collect::<Result<_>>()?;
        lines.push(Line { name: name.to_owned(), points });
    }
    let title =
        format!("p99 of {VICTIM_IOPS} reads of 4 KiB a second, over NBD, in windows of 0.5 s");
    Ok(chart::draw(&title, "us", &lines))
}
