//! Large transfers: one file that many write in unaligned pieces, against a file each; and against the array.

use super::target::{Sizes, Target};
use crate::array::{
    self, CHUNK_BYTES, DATA_SHARE, READ_DEPTH, SOURCE_STRIPES, STRIPE_BYTES, source, ten,
};
use crate::figure::Taken;
use crate::harness::{Effort, Meter, Rate, Run, Said, pairs};
use crate::load::{Load, for_span};
use crate::log::{object, payload, read, write};
use crate::members::{Speed, Storage};
use anyhow::Result;
use levada_base::ids::Seq;
use levada_base::units::{GIB, MIB};
use levada_log::{Config, Stability};
use levada_raid::IoClass;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// As in IO500.
const WRITERS: usize = 16;
/// `ior-hard`.
const RECORD_BYTES: u64 = 47_008;
/// Of each side, for reads: above any cache, and the members keep it.
const READ_BYTES: u64 = 1536 * MIB;

/// Holds what a span writes; for writes nothing is kept, so its size costs nothing.
pub(super) const WRITTEN: Sizes =
    Sizes { data_bytes: 56 * GIB, meta_bytes: 256 * MIB, keeps_data: false };
const READ: Sizes = Sizes { data_bytes: 4 * GIB, meta_bytes: 64 * MIB, keeps_data: true };

/// How the writers share the bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// A file each, 1 MiB at a time.
    Easy,
    /// One file, records dealt in turn.
    Hard,
}

impl Shape {
    fn piece_bytes(self) -> u64 {
        match self {
            Self::Easy => MIB,
            Self::Hard => RECORD_BYTES,
        }
    }

    /// Of a writer's piece: which file, and where.
    fn place(self, writer: usize, number: u64) -> (u64, u64) {
        match self {
            Self::Easy => (writer as u64, number * MIB),
            Self::Hard => (0, (number * WRITERS as u64 + writer as u64) * RECORD_BYTES),
        }
    }

    fn files(self) -> u64 {
        match self {
            Self::Easy => WRITERS as u64,
            Self::Hard => 1,
        }
    }
}

/// The easy side writes at nearly what the members take.
fn easy_says() -> Option<Said> {
    let model = Speed::Slow.says(array::WIDTH, CHUNK_BYTES, Rate::GbPerS)?;
    Some(Said { side: "easy", value: model.value * DATA_SHARE, ..model })
}

/// Writes for a span, with a COMMIT at its end.
async fn write_for(
    target: &Target,
    span: Duration,
    shape: Shape,
    stability: Stability,
) -> Result<Run> {
    let (log, bytes) = (target.log(), shape.piece_bytes());
    let (writer_log, data) = (log.clone(), payload(bytes));
    let meter = Meter::start()?;
    let ops = for_span(span, WRITERS, move |writer, number| {
        let (log, data) = (writer_log.clone(), data.clone());
        let (file, at) = shape.place(writer, number);
        async move {
            log.write(object(file), at, data.into_vec(), stability).await?;
            Ok(())
        }
    })
    .await?;
    log.commit(Seq(u64::MAX)).await?;
    let run = meter.stop(ops * bytes, ops)?;
    // Else a span may be told from memory.
    let unstable = Config::new(1, levada_base::ids::TargetId(1)).unstable_bytes_max;
    anyhow::ensure!(run.bytes >= 3 * unstable, "{} bytes are too few for a span", run.bytes);
    target.forget((0..shape.files()).map(object)).await?;
    Ok(run)
}

async fn hard_of_easy(effort: Effort, stability: Stability) -> Result<Taken> {
    let (target, span) = (Target::new(Speed::Slow, WRITTEN).await?, effort.span());
    let ours = async |_| write_for(&target, span, Shape::Hard, stability).await;
    let theirs = async |_| write_for(&target, span, Shape::Easy, Stability::Unstable).await;
    let pairs = pairs(effort, easy_says(), ours, theirs).await?;
    Ok(pairs.ratio(Rate::GbPerS, ("hard", "easy"), 1.0))
}

pub(super) async fn hard_write(effort: Effort) -> Result<Taken> {
    hard_of_easy(effort, Stability::Unstable).await
}

pub(super) async fn hard_write_durable(effort: Effort) -> Result<Taken> {
    hard_of_easy(effort, Stability::Durable).await
}

/// The hard file first, then the easy ones.
fn file_of(shape: Shape, file: u64) -> u64 {
    match shape {
        Shape::Hard => file,
        Shape::Easy => 1 + file,
    }
}

fn pieces_each(shape: Shape) -> u64 {
    READ_BYTES / WRITERS as u64 / shape.piece_bytes()
}

async fn fill(target: &Target, shape: Shape) -> Result<()> {
    let (log, data) = (target.log(), payload(shape.piece_bytes()));
    let load = Load::sequential(0..pieces_each(shape) * WRITERS as u64, 1, WRITERS);
    let writer_log = log.clone();
    load.drive(move |piece| {
        let (log, data) = (writer_log.clone(), data.clone());
        let (writer, number) = (piece % WRITERS as u64, piece / WRITERS as u64);
        let (file, at) = shape.place(writer as usize, number);
        async move {
            let file = object(file_of(shape, file));
            log.write(file, at, data.into_vec(), Stability::Unstable).await?;
            Ok(())
        }
    })
    .await?;
    Ok(log.settle().await?)
}

/// Reads everything again and again, each time with a log that was just opened.
async fn read_for(target: &Target, span: Duration, shape: Shape) -> Result<Run> {
    let mut run = Run::default();
    while run.elapsed < span {
        target.reopen().await?;
        let log = target.log();
        let meter = Meter::start()?;
        let readers: Vec<_> = (0..WRITERS)
            .map(|reader| {
                let log = log.clone();
                levada_base::reactor::spawn(async move {
                    let bytes = shape.piece_bytes();
                    for number in 0..pieces_each(shape) {
                        // Shifted by one rank: nobody reads what it wrote.
                        let (file, at) = shape.place((reader + 1) % WRITERS, number);
                        let parts = log.read(object(file_of(shape, file)), at, bytes).await?;
                        debug_assert_eq!(
                            parts.iter().map(|part| part.len()).sum::<usize>() as u64,
                            bytes
                        );
                    }
                    anyhow::Ok(())
                })
            })
            .collect();
        for reader in readers {
            reader.await.unwrap_or_else(|| Err(anyhow::anyhow!("a reader was killed")))?;
        }
        let ops = pieces_each(shape) * WRITERS as u64;
        run += meter.stop(ops * shape.piece_bytes(), ops)?;
    }
    Ok(run)
}

pub(super) async fn hard_read(effort: Effort) -> Result<Taken> {
    let (target, span) = (Target::new(Speed::Slow, READ).await?, effort.span());
    fill(&target, Shape::Hard).await?;
    fill(&target, Shape::Easy).await?;
    let ours = async |_| read_for(&target, span, Shape::Hard).await;
    let theirs = async |_| read_for(&target, span, Shape::Easy).await;
    Ok(pairs(effort, None, ours, theirs).await?.ratio(Rate::GbPerS, ("hard", "easy"), 1.0))
}

pub(super) async fn seqwrite(effort: Effort) -> Result<Taken> {
    let (target, span) = (Target::new(Speed::Slow, WRITTEN).await?, effort.span());
    let stripes = WRITTEN.data_bytes / STRIPE_BYTES;
    let array = array::raid6(&ten(Speed::Slow, Storage::Null, WRITTEN.data_bytes)).await?;
    let source = source();
    let ours = async |_| {
        let (log, data, next) = (target.log(), payload(MIB), Rc::new(Cell::new(0)));
        let writer_log = log.clone();
        let meter = Meter::start()?;
        let ops = for_span(span, READ_DEPTH, move |_, _| {
            let (log, data, at) = (writer_log.clone(), data.clone(), next.get());
            next.set(at + MIB);
            async move {
                log.write(object(0), at, data.into_vec(), Stability::Unstable).await?;
                Ok(())
            }
        })
        .await?;
        log.commit(Seq(u64::MAX)).await?;
        let run = meter.stop(ops * MIB, ops)?;
        target.forget(std::iter::once(object(0))).await?;
        Ok(run)
    };
    let theirs = async |_| {
        array.declare_fresh(0, stripes).await?;
        let (target, source, next) = (Rc::clone(&array), Rc::clone(&source), Rc::new(Cell::new(0)));
        let meter = Meter::start()?;
        let ops = for_span(span, READ_DEPTH, move |_, _| {
            let (target, stripe) = (Rc::clone(&target), next.get());
            next.set(stripe + 1);
            let data = source[(stripe % SOURCE_STRIPES) as usize].clone();
            async move { Ok(target.write_fresh(stripe, data, IoClass::Foreground).await?) }
        })
        .await?;
        array.flush().await?;
        meter.stop(ops * STRIPE_BYTES, ops)
    };
    let said = easy_says().map(|said| Said { side: "array", ..said });
    let pairs = pairs(effort, said, ours, theirs).await?;
    Ok(pairs.ratio(Rate::GbPerS, ("log", "array"), 1.0))
}

pub(super) async fn seqread(effort: Effort) -> Result<Taken> {
    let (target, span) = (Target::new(Speed::Slow, READ).await?, effort.span());
    let load = Load::sequential(0..READ_BYTES, MIB, READ_DEPTH);
    write(&target.log(), 0, &load).await?;
    target.log().settle().await?;
    let ours = async |_| {
        let mut run = Run::default();
        while run.elapsed < span {
            run += read(&target.log(), 0, &load).await?;
        }
        Ok(run)
    };
    let theirs = async |_| {
        let mut run = Run::default();
        while run.elapsed < span {
            run += array::read(&target.array, &load).await?;
        }
        Ok(run)
    };
    let said = Speed::Slow.says(array::WIDTH, CHUNK_BYTES, Rate::GbPerS);
    let said = said.map(|said| Said { side: "array", ..said });
    Ok(pairs(effort, said, ours, theirs).await?.ratio(Rate::GbPerS, ("log", "array"), 1.0))
}
