//! RAID 6 8+2 with members missing, and while one is being rebuilt.

use crate::array::{
    CHUNK_BYTES, RANDOM_DEPTH, READ_DEPTH, STRIPE_BYTES, WIDTH, member, raid6_of, read, run,
    source, ten, write_round,
};
use crate::figure::{Bar, Taken};
use crate::harness::{Effort, Meter, Rate, Run, Said, pairs};
use crate::load::Load;
use crate::members::{Raw, Speed, Storage};
use crate::suite::Spec;
use anyhow::{Context, Result};
use levada_base::units::{KIB, MIB};
use levada_base::{BufMut, reactor};
use levada_device::Device;
use levada_raid::{Array, Limits, RaidArray};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// Who fails, in this order.
const LOST: [usize; 2] = [2, 7];
/// Writes of one member in flight.
const MEMBER_DEPTH: usize = 16;
/// What rebuild is told to do beside other I/O, of the rate of the member that it writes.
const FLOOR_OF_MEMBER: f64 = 0.4;

pub(crate) fn specs() -> Vec<Spec> {
    vec![
        Spec {
            name: "array.nvme.degraded2_seqread_of_healthy",
            what: "1 MiB reads in order with two members missing, against all ten",
            bar: Bar::AtLeast(0.7),
            take: |effort| {
                let load = Load::sequential(0..effort.amount(2048) * STRIPE_BYTES, MIB, READ_DEPTH);
                run(of_healthy(effort, load, Rate::GbPerS))
            },
        },
        Spec {
            name: "array.nvme.degraded2_randread4k_of_healthy",
            what: "4 KiB reads anywhere with two members missing, against all ten",
            bar: Bar::AtLeast(0.7),
            take: |effort| {
                let ops = effort.amount(60_000);
                let span = 0..2048 * STRIPE_BYTES;
                run(of_healthy(
                    effort,
                    Load::random(span, 4 * KIB, RANDOM_DEPTH, ops, 7),
                    Rate::Kiops,
                ))
            },
        },
        Spec {
            name: "array.nvme.rebuild_of_member_rate",
            what: "rebuild of one member of an idle array, against writing it",
            bar: Bar::AtLeast(0.9),
            take: |effort| run(rebuild_of_member(effort, false)),
        },
        Spec {
            name: "array.nvme.rebuild_under_load_of_member_rate",
            what: "the same beside 1 MiB reads at half the rate of all members",
            bar: Bar::AtLeast(0.3),
            take: |effort| run(rebuild_of_member(effort, true)),
        },
        Spec {
            name: "array.nvme.foreground_under_rebuild_of_alone",
            what: "these reads beside the rebuild, against the same array without it",
            bar: Bar::AtLeast(0.8),
            take: |effort| run(foreground_of_alone(effort)),
        },
    ]
}

async fn written(stripes: u64) -> Result<RaidArray> {
    let devices = ten(Speed::Nvme, Storage::Null, stripes * STRIPE_BYTES);
    let array = raid6_of(&devices, CHUNK_BYTES).await?;
    let whole: Rc<dyn Array> = Rc::new(array.clone());
    write_round(&whole, &source(), stripes, stripes).await?;
    Ok(array)
}

/// Reads with two members missing and without, each on members of its own.
async fn of_healthy(effort: Effort, load: Load, rate: Rate) -> Result<Taken> {
    let stripes = load.span.end / STRIPE_BYTES;
    let (degraded, healthy) = (written(stripes).await?, written(stripes).await?);
    for lost in LOST {
        degraded.fail(lost).await?;
    }
    let (degraded, healthy): (Rc<dyn Array>, Rc<dyn Array>) = (Rc::new(degraded), Rc::new(healthy));
    let ours = async |_| read(&degraded, &load).await;
    let theirs = async |_| read(&healthy, &load).await;
    let said = Speed::Nvme.says(WIDTH, load.piece_bytes.min(CHUNK_BYTES), rate);
    let said = said.map(|said| Said { side: "healthy", ..said });
    Ok(pairs(effort, said, ours, theirs).await?.ratio(rate, ("degraded", "healthy"), 1.0))
}

/// The rate of all members together, in bytes per second.
fn all_bytes_per_s() -> Result<f64> {
    let said = Speed::Nvme.says(WIDTH, CHUNK_BYTES, Rate::GbPerS).context("a model")?;
    Ok(said.value * 1e9)
}

fn limits(under_load: bool) -> Result<Limits> {
    if !under_load {
        return Ok(Limits::NONE);
    }
    // What it moves on all members: a chunk written for each eight read.
    let member_bytes_per_s = all_bytes_per_s()? / WIDTH as f64;
    let floor_bytes_per_second = (FLOOR_OF_MEMBER * member_bytes_per_s * 9.0) as u64;
    Ok(Limits { floor_bytes_per_second, ..Limits::NONE })
}

/// An array that loses a member, and gets a new one, again and again.
struct Ailing {
    array: RaidArray,
    stripes: u64,
    replaced: Cell<u128>,
}

impl Ailing {
    async fn new(stripes: u64) -> Result<Self> {
        Ok(Self { array: written(stripes).await?, stripes, replaced: Cell::new(0) })
    }

    /// Rebuilds a new member in the place of one that is missing; the run counts what is written to it.
    async fn rebuild(&self, limits: Limits) -> Result<Run> {
        self.replaced.set(self.replaced.get() + 1);
        let new = ten(Speed::Nvme, Storage::Null, self.stripes * STRIPE_BYTES).swap_remove(0);
        let with = member(new, 1000 + self.replaced.get(), (LOST[0] / 2) as u16);
        self.array.replace(LOST[0], with).await?;
        let meter = Meter::start()?;
        self.array.rebuild(limits).await?;
        meter.stop(self.stripes * CHUNK_BYTES, self.stripes)
    }
}

/// Reads of 1 MiB in order at a given rate, until dropped or told to end.
struct Foreground {
    array: RaidArray,
    stripes: u64,
    bytes_per_s: f64,
    begun: reactor::Instant,
    issued: Cell<u64>,
    read_bytes: Cell<u64>,
    ended: Cell<bool>,
}

impl Foreground {
    /// At half the rate of all members.
    fn start(ailing: &Ailing) -> Result<Rc<Self>> {
        let foreground = Rc::new(Self {
            array: ailing.array.clone(),
            stripes: ailing.stripes,
            bytes_per_s: all_bytes_per_s()? / 2.0,
            begun: reactor::now(),
            issued: Cell::new(0),
            read_bytes: Cell::new(0),
            ended: Cell::new(false),
        });
        for _ in 0..READ_DEPTH {
            let this = Rc::clone(&foreground);
            reactor::spawn(async move { this.work().await });
        }
        Ok(foreground)
    }

    async fn work(&self) {
        while !self.ended.get() {
            let number = self.issued.get();
            self.issued.set(number + 1);
            let due_s = number as f64 * STRIPE_BYTES as f64 / self.bytes_per_s;
            reactor::sleep_until(self.begun + Duration::from_secs_f64(due_s)).await;
            let into = BufMut::for_overwrite(STRIPE_BYTES as usize).into_vec();
            let at = number % self.stripes * STRIPE_BYTES;
            // What fails is missing in the rate.
            if self.array.read(at, into).await.is_ok() {
                self.read_bytes.set(self.read_bytes.get() + STRIPE_BYTES);
            }
        }
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.ended.set(true);
    }
}

/// Foreground that ends with this.
struct Ended(Rc<Foreground>);

async fn rebuild_of_member(effort: Effort, under_load: bool) -> Result<Taken> {
    let stripes = effort.amount(2048);
    let ailing = Ailing::new(stripes).await?;
    let lone = Raw::new(&ten(Speed::Nvme, Storage::Null, stripes * STRIPE_BYTES)[..1], CHUNK_BYTES);
    let chunk = source()[0][0].clone();
    let ours = async |_| {
        ailing.array.fail(LOST[0]).await?;
        let foreground = if under_load { Some(Ended(Foreground::start(&ailing)?)) } else { None };
        let run = ailing.rebuild(limits(under_load)?).await;
        drop(foreground);
        run
    };
    let theirs = async |_| {
        let (target, chunk) = (lone.clone(), chunk.clone());
        let load = Load::sequential(0..stripes * CHUNK_BYTES, CHUNK_BYTES, MEMBER_DEPTH);
        load.run(move |at| {
            let (target, chunk) = (target.clone(), chunk.clone());
            async move { target.write_piece(at, chunk.into_vec()).await }
        })
        .await
    };
    let said = Speed::Nvme.says(1, CHUNK_BYTES, Rate::GbPerS);
    let said = said.map(|said| Said { side: "member", ..said });
    let pairs = pairs(effort, said, ours, theirs).await?;
    Ok(pairs.ratio(Rate::GbPerS, ("rebuild", "member"), 1.0))
}

async fn foreground_of_alone(effort: Effort) -> Result<Taken> {
    let ailing = Ailing::new(effort.amount(2048)).await?;
    ailing.array.fail(LOST[0]).await?;
    let ours = async |_| {
        let foreground = Ended(Foreground::start(&ailing)?);
        let meter = Meter::start()?;
        ailing.rebuild(limits(true)?).await?;
        let bytes = foreground.0.read_bytes.get();
        let run = meter.stop(bytes, bytes / STRIPE_BYTES)?;
        drop(foreground);
        ailing.array.fail(LOST[0]).await?;
        Ok(run)
    };
    let theirs = async |_| {
        let foreground = Ended(Foreground::start(&ailing)?);
        let meter = Meter::start()?;
        reactor::sleep(Duration::from_secs(1)).await;
        let bytes = foreground.0.read_bytes.get();
        meter.stop(bytes, bytes / STRIPE_BYTES)
    };
    // At half their rate nobody is to be the limit, but who does not even come to that is.
    let said = Speed::Nvme.says(WIDTH, CHUNK_BYTES, Rate::GbPerS);
    let said =
        said.map(|said| Said { side: "alone", by: "asked for", value: said.value / 2.0, ..said });
    let pairs = pairs(effort, said, ours, theirs).await?;
    Ok(pairs.ratio(Rate::GbPerS, ("beside the rebuild", "alone"), 1.0))
}
