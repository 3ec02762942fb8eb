//! The checkpoint below the intent log, as its reactor sees it.
//!
//! One worker thread runs the engine ([`engine`]); this side does its I/O and hands it jobs, one at
//! a time: reads that missed memory first, then the next piece of a closed segment. Pieces are
//! small, so that a read never waits long; nothing here calls the engine.
//!
//! What always holds:
//! - A segment goes to the engine only when every batch in it is durable in the log.
//! - The log's tail moves behind a segment only when the engine has it, durably, and both
//!   superblocks say so.
//!
//! After a crash the worker's next I/O is refused and it ends; the engine's last durable
//! transaction is what the next open finds.

mod engine;
mod message;
mod space;

use crate::overlay::{Segment, cut_value};
use crate::store::{Bytes, KvError};
use futures_util::future::join_all;
use levada_base::reactor::worker::Worker;
use levada_base::sync::oneshot;
use levada_base::units::{BLOCK_BYTES, MIB};
use levada_base::{Buf, BufMut, Epoch, planted, probe};
use levada_device::{BlockError, Device, Durability};
use std::ops::Bound;
use std::rc::Rc;

pub(crate) use engine::read_any;
pub(crate) use message::State;
use message::{Down, Failure, Found, Job, Query, Row, Up};

use crate::format::Layout;

/// Rows and bytes of one piece of a segment.
const PIECE_ROWS_MAX: usize = 256;
const PIECE_BYTES_MAX: usize = 256 << 10;
/// Rows and bytes of one page of a scan.
pub(crate) const SCAN_ROWS_MAX: usize = 1024;
const SCAN_BYTES_MAX: usize = MIB as usize;
/// Reads handed to the engine at once.
pub(crate) const READS_MAX: usize = 32;
/// Runs being written at the same time.
const RUNS_IN_FLIGHT_MAX: usize = 32;

/// One page of a scan of the checkpoint.
pub(crate) struct Page {
    pub rows: Vec<(Bytes, Bytes)>,
    /// There may be more behind the last row.
    pub more: bool,
    /// The segments that were not in the checkpoint when it was read.
    pub stack: Vec<Rc<Segment>>,
}

/// A read that missed memory.
pub(crate) enum Miss {
    Get {
        key: Bytes,
        answer: oneshot::Sender<Option<Bytes>>,
    },
    Scan {
        back: bool,
        from: Bound<Vec<u8>>,
        to: Bound<Vec<u8>>,
        rows: usize,
        answer: oneshot::Sender<Page>,
    },
}

impl Miss {
    fn query(&self) -> Query {
        match self {
            Self::Get { key, .. } => Query::Get(key.to_vec()),
            Self::Scan { back, from, to, rows, .. } => Query::Scan {
                back: *back,
                from: from.clone(),
                to: to.clone(),
                rows: (*rows).min(SCAN_ROWS_MAX),
                bytes: SCAN_BYTES_MAX,
            },
        }
    }
}

/// The engine's thread and the I/O it asks for.
pub(crate) struct Checkpoint {
    area: Rc<dyn Device>,
    layout: Layout,
    worker: Worker<Up, Down>,
    /// Rows of one transaction, at most: what it copies must fit beside what is there.
    transaction_rows_max: usize,
    progress: Option<Progress>,
}

/// How far the oldest closed segment got.
struct Progress {
    segment: u64,
    /// The last row handed over.
    after: Option<Bytes>,
    transaction_rows: usize,
    rows_max: usize,
}

impl Checkpoint {
    /// Starts the engine for the owner of `epoch` on the space of `layout`, empty when `fresh`. Whether a
    /// later owner was there, the state says: before the first job nothing of it changes.
    ///
    /// # Errors
    ///
    /// When the space cannot be read or is not what the engine left.
    pub(crate) async fn open(
        area: Rc<dyn Device>,
        epoch: Epoch,
        layout: Layout,
        cache_bytes: usize,
        fresh: bool,
    ) -> Result<(Self, State), KvError> {
        let space_bytes = layout.space_bytes;
        let worker = Worker::start("kv", move |port| {
            engine::run(port, epoch, space_bytes, cache_bytes, fresh);
        });
        // A changed row copies its leaf and, at worst, the branches above; an eighth is kept free.
        let pages = (space_bytes / BLOCK_BYTES) as usize;
        let transaction_rows_max = (pages / 32).clamp(16, 16384);
        let mut checkpoint = Self { area, layout, worker, transaction_rows_max, progress: None };
        match checkpoint.report().await? {
            Up::Opened(state) => Ok((checkpoint, state)),
            report => unexpected(&report),
        }
    }

    /// Does the engine's I/O until it reports.
    async fn report(&mut self) -> Result<Up, KvError> {
        loop {
            let answer = match self.worker.next().await {
                Some(Up::Read { at, bytes }) => Down::Bytes(self.read(at, bytes).await?),
                Some(Up::Write { runs, flush }) => {
                    self.write(runs, flush).await?;
                    Down::Done
                }
                Some(Up::Failed(Failure::Full)) => return Err(KvError::Full),
                Some(Up::Failed(Failure::Damaged(what))) => {
                    return Err(KvError::Damaged { what, at: self.layout.space_at });
                }
                Some(Up::Failed(Failure::Io)) => return Err(KvError::Stopped),
                Some(report) => return Ok(report),
                None => {
                    let at = self.layout.space_at;
                    return Err(KvError::Damaged { what: "checkpoint (its engine panicked)", at });
                }
            };
            self.worker.answer(answer);
        }
    }

    async fn read(&self, at: u64, bytes: usize) -> Result<Vec<u8>, KvError> {
        let into = BufMut::for_overwrite(bytes).into_vec();
        // redb believes what it reads.
        let read = self.area.read_agreed(self.layout.space_at + at, into).await;
        let read = read.map_err(|error| match error {
            BlockError::Medium { .. } => KvError::Damaged {
                what: "checkpoint (unreadable, or its copies disagree)",
                at: self.layout.space_at + at,
            },
            error => error.into(),
        })?;
        let mut whole = Vec::with_capacity(bytes);
        for part in &read {
            whole.extend_from_slice(part);
        }
        Ok(whole)
    }

    async fn write(&self, runs: Vec<(u64, Vec<u8>)>, flush: bool) -> Result<(), BlockError> {
        for some in runs.chunks(RUNS_IN_FLIGHT_MAX) {
            let writes = some.iter().map(|(at, run)| {
                let from = Buf::copy_of(run).into_vec();
                self.area.write(self.layout.space_at + at, from, Durability::Volatile)
            });
            join_all(writes).await.into_iter().collect::<Result<(), _>>()?;
        }
        if flush && !planted!("kv-checkpoint-not-flushed") {
            self.area.flush().await?;
        }
        Ok(())
    }

    async fn job(&mut self, job: Job) -> Result<Up, KvError> {
        self.worker.answer(Down::Job(job));
        self.report().await
    }

    /// Answers `misses`; `stack` is what lies over the checkpoint. Calls `clean` with each row
    /// found or not found, before its reader hears of it.
    ///
    /// # Errors
    ///
    /// When the engine failed; the readers are dropped.
    pub(crate) async fn answer(
        &mut self,
        misses: Vec<Miss>,
        stack: impl Fn() -> Vec<Rc<Segment>>,
        mut clean: impl FnMut(&Bytes, Option<&Bytes>),
    ) -> Result<(), KvError> {
        let queries = misses.iter().map(Miss::query).collect();
        let found = match self.job(Job::Read(queries)).await? {
            Up::Found(found) => found,
            report => unexpected(&report),
        };
        for (miss, found) in misses.into_iter().zip(found) {
            match (miss, found) {
                (Miss::Get { key, answer }, Found::Value(value)) => {
                    let value = value.map(Bytes::from);
                    clean(&key, value.as_ref());
                    answer.send(value);
                }
                (Miss::Scan { answer, .. }, Found::Rows { rows, more }) => {
                    let rows = rows.into_iter().map(|(key, value)| (key.into(), value.into()));
                    answer.send(Page { rows: rows.collect(), more, stack: stack() });
                }
                (Miss::Get { .. } | Miss::Scan { .. }, found) => {
                    unreachable!("the engine answers in order, not {found:?}")
                }
            }
        }
        Ok(())
    }

    /// Hands the next piece of `segment` over. The new state once all of it is durable.
    ///
    /// # Errors
    ///
    /// When the engine failed or has no room.
    pub(crate) async fn advance(&mut self, segment: &Segment) -> Result<Option<State>, KvError> {
        let _busy = probe::busy("kv checkpoint");
        let rows_max = self.transaction_rows_max;
        let fresh =
            |rows_max| Progress { segment: segment.id, after: None, transaction_rows: 0, rows_max };
        let mut progress = match self.progress.take() {
            Some(progress) if progress.segment == segment.id => progress,
            _ => fresh(rows_max),
        };
        let piece = next_piece(segment, progress.after.as_ref(), progress.rows_max);
        let job = if piece.is_empty() {
            Job::Commit { applied: Some(segment.last_seq.get()) }
        } else if progress.transaction_rows >= progress.rows_max {
            progress.transaction_rows = 0;
            Job::Commit { applied: None }
        } else {
            progress.transaction_rows += piece.iter().map(row_weight).sum::<usize>();
            progress.after = piece.last().map(|(key, _)| Bytes::from(key.as_slice()));
            Job::Put(piece)
        };
        let whole = matches!(job, Job::Commit { applied: Some(_) });
        match self.job(job).await? {
            Up::Committed(state) if whole => return Ok(Some(state)),
            Up::Committed(_) | Up::Put => self.progress = Some(progress),
            Up::Again => self.progress = Some(fresh((progress.rows_max / 8).max(1))),
            report => unexpected(&report),
        }
        Ok(None)
    }

    /// Ends the engine cleanly.
    ///
    /// # Errors
    ///
    /// When it failed.
    pub(crate) async fn close(mut self) -> Result<(), KvError> {
        match self.job(Job::Close).await? {
            Up::Closed => Ok(()),
            report => unexpected(&report),
        }
    }
}

/// Rows that a row stands for in a transaction's bound: a long value's chunks are pages too.
fn row_weight((_, value): &Row) -> usize {
    1 + value.as_ref().map_or(0, |value| cut_value(value.len()).0)
}

fn next_piece(segment: &Segment, after: Option<&Bytes>, rows_max: usize) -> Vec<Row> {
    let from = after.map_or(Bound::Unbounded, |after| Bound::Excluded(&**after));
    let mut bytes = 0;
    let rows = segment.rows.borrow();
    rows.range::<[u8], _>((from, Bound::Unbounded))
        .take(PIECE_ROWS_MAX.min(rows_max))
        .take_while(|(key, value)| {
            let room = bytes < PIECE_BYTES_MAX;
            bytes += key.len() + value.as_ref().map_or(0, |value| value.len());
            room
        })
        .map(|(key, value)| (key.to_vec(), value.as_ref().map(|value| value.to_vec())))
        .collect()
}

fn unexpected(report: &Up) -> ! {
    unreachable!("the engine answered the wrong question: {report:?}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::overlay::Overlay;
    use levada_base::reactor::Reactor;
    use levada_device::RamDevice;

    /// Advances until the segment is whole; how many jobs that took.
    async fn bring_down(checkpoint: &mut Checkpoint, overlay: &Overlay) -> Result<usize, KvError> {
        overlay.rotate();
        let segment = overlay.oldest_closed().expect("just closed");
        let mut jobs = 1;
        while checkpoint.advance(&segment).await?.is_none() {
            jobs += 1;
        }
        overlay.drop_oldest();
        Ok(jobs)
    }

    /// What the store's own bounds prevent: transactions that do not fit are tried again in
    /// smaller pieces, and rows that do not fit at all are an error, not a panic.
    #[test]
    fn a_transaction_that_does_not_fit_is_split() {
        Reactor::simulated(1).block_on(async {
            let area = Rc::new(RamDevice::new("ram", 3 * MIB));
            let layout = Layout::cut(3 * MIB, 64 << 10).expect("large enough");
            let (mut checkpoint, _) =
                Checkpoint::open(area, Epoch(1), layout, 1 << 20, true).await.expect("opens");
            // All rows at once.
            checkpoint.transaction_rows_max = 1024;
            let overlay = Overlay::new();
            let put = |seq: u64, keys: u32| {
                for key in 0..keys {
                    let value: Bytes = vec![seq as u8; 4000].into();
                    overlay.insert(seq, &[(key.to_be_bytes()[..].into(), Some(value))]);
                }
            };
            put(1, 400);
            let whole = bring_down(&mut checkpoint, &overlay).await.expect("fits");
            put(2, 400);
            let split = bring_down(&mut checkpoint, &overlay).await.expect("fits in pieces");
            assert!(split > whole, "{split} jobs, {whole} when it fits at once");
            let (answer, value) = oneshot::channel();
            let miss = Miss::Get { key: 399u32.to_be_bytes()[..].into(), answer };
            checkpoint.answer(vec![miss], Vec::new, |_, _| {}).await.expect("reads");
            assert_eq!(value.await.expect("answered").as_deref(), Some(&[2; 4000][..]));
            put(3, 1000);
            assert_eq!(bring_down(&mut checkpoint, &overlay).await.err(), Some(KvError::Full));
        });
    }
}
