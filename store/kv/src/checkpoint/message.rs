//! What the checkpoint's worker thread and its reactor say to each other. Everything here owns
//! its bytes, because it changes threads.

use std::ops::Bound;

/// A row that changed: its key, and its new value unless it is removed.
pub(crate) type Row = (Vec<u8>, Option<Vec<u8>>);

/// From the worker.
#[derive(Debug)]
pub(crate) enum Up {
    /// Fill this range of the space, aligned to blocks, and answer [`Down::Bytes`].
    Read { at: u64, bytes: usize },
    /// Write these runs, aligned to blocks, then flush if asked, and answer [`Down::Done`].
    Write { runs: Vec<(u64, Vec<u8>)>, flush: bool },
    /// The checkpoint is open; waits for a job.
    Opened(State),
    /// The reads of the last job; waits for the next.
    Found(Vec<Found>),
    /// The rows are in the transaction; waits for the next job.
    Put,
    /// The transaction is durable; waits for the next job.
    Committed(State),
    /// There was no room for the transaction, which is gone: start again with smaller ones.
    Again,
    /// Closed; the worker ends.
    Closed,
    /// The worker ends, and cannot say more.
    Failed(Failure),
}

/// To the worker.
#[derive(Debug)]
pub(crate) enum Down {
    Bytes(Vec<u8>),
    Done,
    Job(Job),
}

/// Work for the engine.
#[derive(Debug)]
pub(crate) enum Job {
    Read(Vec<Query>),
    Put(Vec<Row>),
    /// Ends the transaction. With `applied`, every batch up to it is in.
    Commit {
        applied: Option<u64>,
    },
    Close,
}

/// One read.
#[derive(Debug)]
pub(crate) enum Query {
    Get(Vec<u8>),
    /// At most `rows` rows, or about `bytes` bytes of them; `back`: the last ones, the last first.
    Scan {
        back: bool,
        from: Bound<Vec<u8>>,
        to: Bound<Vec<u8>>,
        rows: usize,
        bytes: usize,
    },
}

/// Its answer.
#[derive(Debug)]
pub(crate) enum Found {
    Value(Option<Vec<u8>>),
    Rows {
        rows: Vec<(Vec<u8>, Vec<u8>)>,
        /// There may be more behind the last row (before it, when they were read back).
        more: bool,
    },
}

/// What the checkpoint says of itself; stored in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// Every batch up to this one is in.
    pub applied: u64,
    /// The sum of the rows' costs.
    pub cost: u64,
    pub rows: u64,
    /// The name of the next value that is cut into chunks.
    pub next_long: u64,
    /// Of the owner that wrote it; 0 in those from before they told.
    pub epoch: u64,
}

/// Why the worker gave up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// No room even for the smallest transaction.
    Full,
    /// What is wrong with the checkpoint.
    Damaged(&'static str),
    /// The reactor refused an I/O or is gone; it knows why.
    Io,
}
