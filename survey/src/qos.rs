//! Caps and guarantees of volumes: how exactly they hold, what they cost, and what a guarantee keeps.

use crate::array::{CHUNK_BYTES, STRIPE_BYTES, raid6_of, run, ten};
use crate::figure::{Bar, Operand, Spread, Taken};
use crate::harness::{Effort, Meter, Rate, median, pairs, ratio_of};
use crate::load::Load;
use crate::members::{Speed, Storage};
use crate::suite::Spec;
use anyhow::Result;
use levada_base::meter::Latency;
use levada_base::reactor::{self, JoinHandle, random_u64};
use levada_base::units::{KIB, MIB};
use levada_raid::RaidArray;
use levada_volume::qos::{Cost, Governed, Governor, Limits, Rates, Share, Terms};
use levada_volume::{ArrayVolume, Volume};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const TERMS: Terms = Terms { request_bytes_max: MIB, capacity: Rates::NONE };
const STRIPES: u64 = 1024;
/// Reads of 4 KiB that the victim asks for, per second, at random times; it is guaranteed twice as many.
const VICTIM_IOPS: u64 = 2000;
/// Reads of 4 KiB that the aggressor has in flight.
const AGGRESSOR_DEPTH: usize = 256;
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
            what: "p99 of a volume with a guarantee beside an aggressor of the same process, against alone",
            bar: Bar::AtMost(1.5),
            take: |effort| run(victim_p99(effort, true)),
        },
        Spec {
            name: "qos.nvme.unguarded_p99_of_alone",
            what: "the same without the guarantee",
            bar: Bar::None,
            take: |effort| run(victim_p99(effort, false)),
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
        Operand { name, value, unit: "ratio", cpu: None }
    };
    Ok(Taken {
        // Not the median: a cap holds in every second or it does not.
        value: highest,
        unit: "ratio",
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

/// Reads of the victim for `span` after it has settled: p99 in microseconds.
async fn victim(volume: Rc<Governed<ArrayVolume<RaidArray>>>, span: Duration) -> Result<f64> {
    let latency = Rc::new(Latency::default());
    let began = Instant::now();
    let mut reads = Vec::new();
    while began.elapsed() < SETTLES + span {
        let mean_us = 1_000_000 / VICTIM_IOPS;
        reactor::sleep(Duration::from_micros(random_u64() % (2 * mean_us))).await;
        let counts = began.elapsed() >= SETTLES;
        let (volume, latency) = (Rc::clone(&volume), Rc::clone(&latency));
        reads.retain(|read: &JoinHandle<Result<()>>| !read.is_finished());
        reads.push(reactor::spawn(async move {
            let at = random_u64() % (STRIPES * STRIPE_BYTES / 4096) * 4096;
            let asked = Instant::now();
            volume.read(at, 4 * KIB).await?;
            if counts {
                latency.add(asked.elapsed());
            }
            Ok(())
        }));
    }
    for read in reads {
        if let Some(result) = read.await {
            result?;
        }
    }
    Ok(latency.quantile(0.99).as_secs_f64() * 1e6)
}

fn aggressor(share: Share, array: RaidArray, done: Rc<Cell<u64>>) -> Tasks {
    let volume = Rc::new(Governed::new(ArrayVolume::new(array), share));
    let task = |_| {
        let (volume, done) = (Rc::clone(&volume), Rc::clone(&done));
        reactor::spawn(async move {
            loop {
                let at = random_u64() % (STRIPES * STRIPE_BYTES / 4096) * 4096;
                // A failed read shows: it is not done.
                if volume.read(at, 4 * KIB).await.is_ok() {
                    done.set(done.get() + 1);
                }
            }
        })
    };
    Tasks((0..AGGRESSOR_DEPTH).map(task).collect())
}

async fn victim_p99(effort: Effort, is_guaranteed: bool) -> Result<Taken> {
    let span = Duration::from_secs(effort.amount(8));
    let array = array(Speed::Nvme).await?;
    let (mut both, mut aggressors) = (Vec::new(), Vec::new());
    for _ in 0..effort.runs {
        let governor = Governor::new(TERMS);
        let iops = is_guaranteed.then_some(2 * VICTIM_IOPS);
        let guarantee = Rates { iops, bytes_per_s: None };
        let share = governor.share(Limits { guarantee, ..Limits::NONE })?;
        let volume = Rc::new(Governed::new(ArrayVolume::new(array.clone()), share));
        let alone = {
            let _hog = Hog::start();
            victim(Rc::clone(&volume), span).await?
        };
        let (done, began) = (Rc::default(), Instant::now());
        let tasks = aggressor(governor.share(Limits::NONE)?, array.clone(), Rc::clone(&done));
        let beside = victim(volume, span).await?;
        aggressors.push(done.get() as f64 / began.elapsed().as_secs_f64() / 1e3);
        drop(tasks);
        both.push((beside, alone));
    }
    let mut taken = ratio_of(&both, "us", ("beside", "alone"));
    let value = median(aggressors);
    taken.operands.push(Operand { name: "aggressor", value, unit: "kIOPS", cpu: None });
    Ok(taken)
}
