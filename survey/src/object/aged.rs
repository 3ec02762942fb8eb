//! What age costs: logs that were written over and over, cleaning included.

use super::picks::{BLOCK, Choice, Picks};
use super::shared_file::WRITTEN;
use super::small::{DEPTH, writes_for};
use super::target::{Sizes, Target};
use crate::array::READ_DEPTH;
use crate::figure::{Operand, Taken};
use crate::harness::{Effort, Meter, Rate, Run, median, pairs, spread};
use crate::load::Load;
use crate::log::{object, payload};
use crate::members::Speed;
use anyhow::Result;
use levada_base::ids::Seq;
use levada_base::units::{GIB, MIB, round_down};
use levada_log::{ObjectLog, Stability};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;
use std::cell::Cell;
use std::rc::Rc;

/// The cleaner reads what it moves, so these members keep what is written.
const AGED: Sizes = Sizes { data_bytes: 3 * GIB, meta_bytes: 160 * MIB, keeps_data: true };
/// Of what the log shows as its space.
const FULL_PERCENT: u64 = 80;
const FILES: u64 = 16;
/// What a checkpoint is written by, a file each.
const WRITERS: u64 = 16;
const CHECKPOINTS_KEPT: u64 = 3;
/// After those that fill the log.
const CHECKPOINTS: u64 = 24;

/// Files of one size that take so much of the log together.
#[derive(Clone, Copy)]
struct Files {
    file_bytes: u64,
}

impl Files {
    /// So that `log` is as full as figures of age want it.
    fn filling(log: &ObjectLog) -> Self {
        let bytes = log.space().total_bytes / 100 * FULL_PERCENT;
        Self { file_bytes: round_down(bytes / FILES, MIB) }
    }

    fn bytes(self) -> u64 {
        self.file_bytes * FILES
    }

    async fn write_piece(self, log: ObjectLog, at: u64, data: levada_base::Buf) -> Result<()> {
        let (file, at) = (at / self.file_bytes, at % self.file_bytes);
        log.write(object(file), at, data.into_vec(), Stability::Unstable).await?;
        Ok(())
    }

    /// Writes pieces in the order of `load`.
    async fn write(self, log: &ObjectLog, load: &Load) -> Result<()> {
        let (writer, data) = (log.clone(), payload(load.piece_bytes));
        load.drive(move |at| self.write_piece(writer.clone(), at, data.clone())).await?;
        log.commit(Seq(u64::MAX)).await?;
        Ok(())
    }

    async fn fill(self, log: &ObjectLog) -> Result<()> {
        self.write(log, &Load::sequential(0..self.bytes(), MIB, READ_DEPTH)).await
    }
}

/// 4 KiB writes for a span.
async fn randwrite_for(
    effort: Effort,
    log: ObjectLog,
    files: Files,
    picks: Rc<Picks>,
) -> Result<Run> {
    let (data, writer) = (payload(BLOCK), log.clone());
    let write = move || files.write_piece(writer.clone(), picks.next(), data.clone());
    let sync = move || {
        let log = log.clone();
        async move {
            log.commit(Seq(u64::MAX)).await?;
            Ok(())
        }
    };
    writes_for(effort, write, sync).await
}

pub(super) async fn steady_randwrite(effort: Effort, choice: Choice) -> Result<Taken> {
    let (aged, fresh) =
        (Target::new(Speed::Slow, AGED).await?, Target::new(Speed::Slow, WRITTEN).await?);
    let files = Files::filling(&aged.log());
    files.fill(&aged.log()).await?;
    let picks = Picks::new(choice, files.bytes(), 7);
    let ops = effort.amount(2 * AGED.data_bytes) / BLOCK;
    let (log, data, ager) = (aged.log(), payload(BLOCK), Rc::clone(&picks));
    Load::random(0..ops, 1, DEPTH, ops, 7)
        .drive(move |_| files.write_piece(log.clone(), ager.next(), data.clone()))
        .await?;
    let moved = Cell::new((0, 0));
    let ours = async |_| {
        let before = aged.log().counters().cleaned_bytes;
        let run = randwrite_for(effort, aged.log(), files, Rc::clone(&picks)).await?;
        let (bytes, written) = moved.get();
        moved.set((bytes + aged.log().counters().cleaned_bytes - before, written + run.bytes));
        Ok(run)
    };
    let theirs = async |number: usize| {
        files.fill(&fresh.log()).await?;
        fresh.rest().await?;
        let picks = Picks::new(choice, files.bytes(), number as u64);
        let run = randwrite_for(effort, fresh.log(), files, picks).await?;
        fresh.forget((0..FILES).map(object)).await?;
        Ok(run)
    };
    let pairs = pairs(effort, None, ours, theirs).await?;
    let mut taken = pairs.ratio(Rate::Kiops, ("steady", "fresh"), 1.0);
    let (bytes, written) = moved.get();
    let share = bytes as f64 / written as f64;
    taken.operands.push(Operand::new("moved", share, "bytes a byte written"));
    Ok(taken)
}

async fn seqread(effort: Effort, log: &ObjectLog, files: Files) -> Result<Run> {
    let load = Load::sequential(0..files.bytes(), MIB, READ_DEPTH);
    let mut run = Run::default();
    while run.elapsed < effort.span() {
        let reader = log.clone();
        run += load
            .run(move |at| {
                let (log, file, at) =
                    (reader.clone(), at / files.file_bytes, at % files.file_bytes);
                async move {
                    log.read(object(file), at, MIB).await?;
                    Ok(())
                }
            })
            .await?;
    }
    Ok(run)
}

/// Everything is written over once, in pieces and in no order.
pub(super) async fn aged_seqread(effort: Effort, piece_bytes: u64) -> Result<Taken> {
    let sizes = Sizes { data_bytes: 2 * GIB, ..AGED };
    let (aged, fresh) =
        (Target::new(Speed::Slow, sizes).await?, Target::new(Speed::Slow, sizes).await?);
    let files = Files::filling(&aged.log());
    files.fill(&aged.log()).await?;
    files.fill(&fresh.log()).await?;
    let mut pieces: Vec<u64> = (0..files.bytes() / piece_bytes).collect();
    pieces.shuffle(&mut Xoshiro256PlusPlus::seed_from_u64(7));
    let (log, data) = (aged.log(), payload(piece_bytes));
    let before = log.counters().cleaned_bytes;
    let writer = log.clone();
    Load::sequential(0..pieces.len() as u64, 1, DEPTH)
        .drive(move |number| {
            let at = pieces[number as usize] * piece_bytes;
            files.write_piece(writer.clone(), at, data.clone())
        })
        .await?;
    aged.log().settle().await?;
    fresh.log().settle().await?;
    let moved = (log.counters().cleaned_bytes - before) as f64 / files.bytes() as f64;
    let ours = async |_| seqread(effort, &log, files).await;
    let theirs = async |_| seqread(effort, &fresh.log(), files).await;
    let pairs = pairs(effort, None, ours, theirs).await?;
    let mut taken = pairs.ratio(Rate::GbPerS, ("aged", "fresh"), 1.0);
    taken.operands.push(Operand::new("moved", moved, "bytes a byte written"));
    Ok(taken)
}

/// Checkpoints one after the other, the oldest of four deleted: what the cleaner moved of what was written.
pub(super) async fn checkpoints(effort: Effort) -> Result<Taken> {
    let target = Target::new(Speed::Slow, AGED).await?;
    let log = target.log();
    let bytes = log.space().total_bytes / 100 * FULL_PERCENT / (CHECKPOINTS_KEPT + 1);
    let file_bytes = round_down(bytes / WRITERS, MIB);
    let file = |checkpoint: u64, writer: u64| object(checkpoint * WRITERS + writer);
    let (mut shares, mut written) = (Vec::new(), 0);
    let mut rate = Run::default();
    let mut moved = 0;
    for checkpoint in 0..CHECKPOINTS_KEPT + effort.amount(CHECKPOINTS) {
        let (writer, data) = (log.clone(), payload(MIB));
        let load = Load::sequential(0..file_bytes * WRITERS, MIB, WRITERS as usize);
        let before = log.counters().cleaned_bytes;
        let meter = Meter::start()?;
        load.drive(move |at| {
            let (log, data) = (writer.clone(), data.clone());
            let (piece, writer) = (at / MIB / WRITERS, at / MIB % WRITERS);
            async move {
                let at = piece * MIB;
                log.write(file(checkpoint, writer), at, data.into_vec(), Stability::Unstable)
                    .await?;
                Ok(())
            }
        })
        .await?;
        log.commit(Seq(u64::MAX)).await?;
        let oldest = checkpoint.checked_sub(CHECKPOINTS_KEPT);
        if let Some(oldest) = oldest {
            for writer in 0..WRITERS {
                log.delete(file(oldest, writer)).await?;
            }
            let run = meter.stop(load.ops * MIB, load.ops)?;
            let cleaned = log.counters().cleaned_bytes - before;
            shares.push(cleaned as f64 / run.bytes as f64);
            written += run.bytes;
            moved += cleaned;
            rate += run;
        }
    }
    Ok(Taken {
        value: moved as f64 / written as f64,
        unit: "bytes a byte written".into(),
        operands: vec![
            Operand::new("checkpoint", (file_bytes * WRITERS) as f64 / MIB as f64, "MiB"),
            Operand::new("written", rate.gb_per_s(), "GB/s"),
            Operand::new(
                "median of checkpoints",
                median(shares.iter().copied()),
                "bytes a byte written",
            ),
        ],
        cpu: None,
        runs: shares.len(),
        retaken: 0,
        spread: spread(&shares),
    })
}
