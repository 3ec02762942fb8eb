//! Small operations, and what checksums cost.

use super::picks::{BLOCK, Choice, Picks};
use super::shared_file::WRITTEN;
use super::target::{Sizes, Target};
use crate::array::{CHUNK_BYTES, READ_DEPTH, STRIPE_BYTES, raid6_of, source, ten, write_round};
use crate::figure::Taken;
use crate::harness::{Effort, Meter, Rate, Run, absolute, median, pairs, ratio_of, runs};
use crate::load::{Load, for_span};
use crate::log::{object, payload, read, write};
use crate::members::{Speed, Storage, members};
use anyhow::Result;
use futures_util::future::try_join_all;
use levada_base::ids::Seq;
use levada_base::units::{GIB, MIB};
use levada_device::{Device, Durability};
use levada_log::Stability;
use levada_raid::Array;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Instant;

pub(super) const DEPTH: usize = 128;
const WRITES_PER_COMMIT: u64 = 1000;
/// What small operations are spread over.
const OBJECT_BYTES: u64 = 768 * MIB;

fn uniform(seed: usize) -> Rc<Picks> {
    Picks::new(Choice::Uniform, OBJECT_BYTES, seed as u64)
}

/// Calls `write` for a span, and `sync` after each thousand and at the end.
pub(super) async fn writes_for<W, S>(
    effort: Effort,
    write: impl Fn() -> W + 'static,
    sync: impl Fn() -> S + Clone + 'static,
) -> Result<Run>
where
    W: Future<Output = Result<()>> + 'static,
    S: Future<Output = Result<()>> + 'static,
{
    let (written, last) = (Rc::new(Cell::new(0)), sync.clone());
    let meter = Meter::start()?;
    let ops = for_span(effort.span(), DEPTH, move |_, _| {
        let (write, sync, written) = (write(), sync.clone(), Rc::clone(&written));
        async move {
            write.await?;
            written.set(written.get() + 1);
            // The others go on meanwhile, on both sides.
            if written.get() % WRITES_PER_COMMIT == 0 {
                sync().await?;
            }
            Ok(())
        }
    })
    .await?;
    last().await?;
    meter.stop(ops * BLOCK, ops)
}

pub(super) async fn randwrite(effort: Effort) -> Result<Taken> {
    let target = Target::new(Speed::Slow, WRITTEN).await?;
    let stripes = OBJECT_BYTES / STRIPE_BYTES;
    let array = raid6_of(&ten(Speed::Slow, Storage::Null, OBJECT_BYTES), CHUNK_BYTES).await?;
    let whole: Rc<dyn Array> = Rc::new(array.clone());
    write_round(&whole, &source(), stripes, stripes).await?;
    let data = payload(BLOCK);
    let ours = async |number: usize| {
        let log = target.log();
        write(&log, 0, &Load::sequential(0..OBJECT_BYTES, MIB, READ_DEPTH)).await?;
        target.rest().await?;
        let (picks, data, writer_log) = (uniform(number), data.clone(), log.clone());
        let write = move || {
            let (log, at, data) = (writer_log.clone(), picks.next(), data.clone());
            async move {
                log.write(object(0), at, data.into_vec(), Stability::Unstable).await?;
                Ok(())
            }
        };
        let sync = move || {
            let log = log.clone();
            async move {
                log.commit(Seq(u64::MAX)).await?;
                Ok(())
            }
        };
        let run = writes_for(effort, write, sync).await?;
        target.forget(std::iter::once(object(0))).await?;
        Ok(run)
    };
    let theirs = async |number: usize| {
        let (picks, data, writer) = (uniform(number), data.clone(), array.clone());
        let write = move || {
            let (array, at, data) = (writer.clone(), picks.next(), data.clone());
            async move { Ok(array.write(at, data.into_vec(), Durability::Volatile).await?) }
        };
        let array = array.clone();
        let sync = move || {
            let array = array.clone();
            async move { Ok(array.flush().await?) }
        };
        writes_for(effort, write, sync).await
    };
    let pairs = pairs(effort, None, ours, theirs).await?;
    Ok(pairs.ratio(Rate::Kiops, ("log", "array"), 1.0))
}

/// The median of what `one` takes, one at a time for a span; microseconds.
async fn p50_us(effort: Effort, mut one: impl AsyncFnMut() -> Result<()>) -> Result<f64> {
    let (start, mut took) = (Instant::now(), Vec::new());
    while start.elapsed() < effort.span() {
        let begun = Instant::now();
        one().await?;
        took.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    Ok(median(took))
}

pub(super) async fn sync_latency(effort: Effort) -> Result<Taken> {
    let target = Target::new(Speed::NvmeFlush100us, WRITTEN).await?;
    let copies = members(Speed::NvmeFlush100us, Storage::Ram, 3, OBJECT_BYTES);
    let data = payload(BLOCK);
    let mut values = Vec::new();
    for number in 0..=effort.runs {
        let picks = uniform(number);
        let (log, picks_raw) = (target.log(), uniform(number));
        let ours = p50_us(effort, async || {
            log.write(object(0), picks.next(), data.clone().into_vec(), Stability::Durable).await?;
            Ok(())
        });
        let ours = ours.await?;
        let theirs = p50_us(effort, async || {
            let at = picks_raw.next();
            let volatile = Durability::Volatile;
            try_join_all(copies.iter().map(|c| c.write(at, data.clone().into_vec(), volatile)))
                .await?;
            try_join_all(copies.iter().map(|copy| copy.flush())).await?;
            Ok(())
        });
        let theirs = theirs.await?;
        if number > 0 {
            values.push((ours, theirs));
        }
    }
    Ok(ratio_of(&values, "us", ("log", "raw")))
}

pub(super) async fn read4k(effort: Effort) -> Result<Taken> {
    let target = Target::new(Speed::Unlimited, WRITTEN).await?;
    let log = target.log();
    // Read back as zeroes: what is written must be those.
    let zeroes = levada_base::BufMut::zeroed(MIB as usize).freeze();
    for at in (0..OBJECT_BYTES).step_by(MIB as usize) {
        log.write(object(0), at, zeroes.clone().into_vec(), Stability::Unstable).await?;
    }
    log.settle().await?;
    // Dealt beforehand: what is measured is not the choice.
    let offsets = Load::random(0..OBJECT_BYTES, BLOCK, 1, 1 << 16, 7).offsets();
    let rounds = effort.amount(32);
    let one_run = async |_| {
        let meter = Meter::start()?;
        for _ in 0..rounds {
            for at in &offsets {
                log.read(object(0), *at, BLOCK).await?;
            }
        }
        let ops = rounds * offsets.len() as u64;
        meter.stop(ops * BLOCK, ops)
    };
    let taken = absolute(Rate::Kiops, "log", &runs(effort, one_run).await?);
    let counters = log.counters();
    anyhow::ensure!(counters.repaired_blocks == 0, "checksums did not fit");
    Ok(taken)
}

/// Writes, commits and reads again and again.
async fn write_and_read(effort: Effort, target: &Target, load: &Load) -> Result<Run> {
    let (log, mut run) = (target.log(), Run::default());
    while run.elapsed < effort.span() {
        run += write(&log, 0, load).await?;
        run += read(&log, 0, load).await?;
        target.forget(std::iter::once(object(0))).await?;
    }
    Ok(run)
}

pub(super) async fn checksum_cost(effort: Effort) -> Result<Taken> {
    let sizes = Sizes { data_bytes: 2 * GIB, meta_bytes: 64 * MIB, keeps_data: true };
    let with = Target::new(Speed::Unlimited, sizes).await?;
    let without = Target::new(Speed::Unlimited, sizes).await?;
    without.log().check_nothing_for_measurement();
    let load = Load::sequential(0..OBJECT_BYTES, MIB, READ_DEPTH);
    let ours = async |_| write_and_read(effort, &with, &load).await;
    let theirs = async |_| write_and_read(effort, &without, &load).await;
    let pairs = pairs(effort, None, ours, theirs).await?;
    Ok(pairs.cost(Rate::GbPerS, ("with checksums", "without")))
}
