//! The engine on its worker thread: rows in a redb database on the checkpoint space.
//!
//! Three tables: `rows` (key to value), `long` (the chunks of values too long for a row) and `meta`
//! (what the checkpoint says of itself, [`State`]). Every row carries a CRC32C of its key and value.
//!
//! What always holds:
//! - A transaction that says "applied up to S" holds every batch up to S. Smaller ones in between
//!   say what the one before said: a part of the batches up to S is in, and replay puts all of them
//!   on top again.
//! - Every transaction says which owner made it.
//! - Commits are in two phases and store the allocator's state, so that opening after a crash does
//!   not walk the tree, unless space is so short that this state itself did not fit.

use super::message::{Down, Failure, Found, Job, Query, Row, State, Up};
use super::space::{Link, Space};
use crate::overlay::{CHUNK_BYTES, cut_value, row_cost};
use levada_base::Epoch;
use levada_base::checksum::crc32c_parts;
use levada_base::reactor::worker::Port;
use redb::{
    Builder, Database, Durability, ReadableDatabase, ReadableTable, Table, TableDefinition,
    WriteTransaction,
};
use std::io;
use std::ops::Bound;
use std::sync::Arc;

const ROWS: TableDefinition<&[u8], &[u8]> = TableDefinition::new("rows");
const LONG: TableDefinition<&[u8], &[u8]> = TableDefinition::new("long");
const META: TableDefinition<&str, &[u8]> = TableDefinition::new("meta");
const STATE: &str = "state";

/// How often a transaction is tried again after it ran out of space.
const SQUEEZES_MAX: u32 = 3;

/// The body of the worker thread.
pub(super) fn run(
    port: Port<Up, Down>,
    epoch: Epoch,
    space_bytes: u64,
    cache_bytes: usize,
    fresh: bool,
) {
    let link = Link::new(port);
    let opened = Engine::open(Arc::clone(&link), epoch, space_bytes, cache_bytes, fresh);
    let mut engine = match opened {
        Ok(engine) => engine,
        Err(error) => {
            link.call(Up::Failed(error.into()));
            return;
        }
    };
    let mut report = Up::Opened(engine.state);
    loop {
        let Some(Down::Job(job)) = link.call(report) else { return };
        report = match job {
            Job::Close => {
                engine.close();
                link.call(Up::Closed);
                return;
            }
            job => match engine.run(job) {
                Ok(report) => report,
                Err(error) => {
                    // The database first: closing it must not talk to a reactor that left.
                    drop(engine);
                    link.call(Up::Failed(error.into()));
                    return;
                }
            },
        };
    }
}

/// An error of the engine, or a row that is not what was stored.
enum EngineError {
    Redb(redb::Error),
    Damaged(&'static str),
    Full,
}

impl<E: Into<redb::Error>> From<E> for EngineError {
    fn from(error: E) -> Self {
        Self::Redb(error.into())
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Full => Self::Full,
            EngineError::Damaged(what) => Self::Damaged(what),
            EngineError::Redb(redb::Error::Io(error))
                if error.kind() != io::ErrorKind::InvalidData =>
            {
                Self::Io
            }
            EngineError::Redb(redb::Error::PreviousIo) => Self::Io,
            EngineError::Redb(error) => {
                tracing::error!(%error, "the checkpoint engine failed");
                Self::Damaged("checkpoint")
            }
        }
    }
}

struct Engine {
    link: Arc<Link>,
    /// The owner's.
    epoch: Epoch,
    space_bytes: u64,
    cache_bytes: usize,
    /// Open while rows are being put; ends before the database does.
    transaction: Option<WriteTransaction>,
    database: Option<Database>,
    state: State,
    /// Attempts of this segment that ran out of space.
    squeezes: u32,
}

impl Engine {
    fn open(
        link: Arc<Link>,
        epoch: Epoch,
        space_bytes: u64,
        cache_bytes: usize,
        fresh: bool,
    ) -> Result<Self, EngineError> {
        let state = State { next_long: 1, ..State::default() };
        let mut engine = Self {
            link,
            epoch,
            space_bytes,
            cache_bytes,
            transaction: None,
            database: None,
            state,
            squeezes: 0,
        };
        engine.open_database(fresh)?;
        if fresh {
            let transaction = engine.begin()?;
            transaction.open_table(ROWS)?;
            transaction.open_table(LONG)?;
            engine.transaction = Some(transaction);
            engine.commit(Some(0))?;
            // Closed and opened once: from now on the file is as long as the space.
            engine.open_database(false)?;
        }
        Ok(engine)
    }

    fn open_database(&mut self, fresh: bool) -> Result<(), EngineError> {
        self.transaction = None;
        self.database = None;
        let space = Space::new(Arc::clone(&self.link), self.space_bytes, fresh);
        let database =
            Builder::new().set_cache_size(self.cache_bytes).create_with_backend(space)?;
        if !fresh {
            let meta = database.begin_read()?.open_table(META)?;
            let state = meta.get(STATE)?.ok_or(EngineError::Damaged("checkpoint state"))?;
            self.state = decode_state(state.value())?;
        }
        self.database = Some(database);
        Ok(())
    }

    fn database(&self) -> &Database {
        self.database.as_ref().expect("open between jobs")
    }

    fn begin(&self) -> Result<WriteTransaction, EngineError> {
        let mut transaction = self.database().begin_write()?;
        transaction.set_durability(Durability::Immediate)?;
        transaction.set_two_phase_commit(true);
        transaction.set_quick_repair(self.squeezes <= 1);
        Ok(transaction)
    }

    fn run(&mut self, job: Job) -> Result<Up, EngineError> {
        let done = match job {
            Job::Read(queries) => self.read(&queries).map(Up::Found),
            Job::Put(rows) => self.put(&rows).map(|()| Up::Put),
            Job::Commit { applied } => self.commit(applied).map(|()| Up::Committed(self.state)),
            Job::Close => unreachable!("handled by the caller"),
        };
        match done {
            Err(_) if self.link.take_no_space() => {
                self.squeezes += 1;
                if self.squeezes > SQUEEZES_MAX {
                    return Err(EngineError::Full);
                }
                tracing::warn!(squeezes = self.squeezes, "a checkpoint did not fit; again");
                self.open_database(false)?;
                Ok(Up::Again)
            }
            done => done,
        }
    }

    fn close(&mut self) {
        self.transaction = None;
        // A close that fails leaves what was committed, and a repair to the next open.
        if let Some(database) = self.database.take()
            && let Err(error) = database.close()
        {
            tracing::warn!(%error, "the checkpoint was not closed cleanly");
        }
    }

    fn read(&self, queries: &[Query]) -> Result<Vec<Found>, EngineError> {
        let transaction = self.database().begin_read()?;
        let rows = transaction.open_table(ROWS)?;
        let long = transaction.open_table(LONG)?;
        let answer = |query: &Query| match query {
            Query::Get(key) => {
                let stored = rows.get(key.as_slice())?;
                let value =
                    stored.map(|stored| value_of(key, stored.value(), &long)).transpose()?;
                Ok(Found::Value(value))
            }
            Query::Scan { back, from, to, rows: rows_max, bytes: bytes_max } => {
                let bounds = (as_slice(from), as_slice(to));
                let (mut found, mut bytes, mut more) = (Vec::new(), 0, false);
                let mut range = rows.range::<&[u8]>(bounds)?;
                while let Some(row) = if *back { range.next_back() } else { range.next() } {
                    if found.len() >= *rows_max || bytes >= *bytes_max {
                        more = true;
                        break;
                    }
                    let (key, stored) = row?;
                    let value = value_of(key.value(), stored.value(), &long)?;
                    bytes += key.value().len() + value.len();
                    found.push((key.value().to_vec(), value));
                }
                Ok(Found::Rows { rows: found, more })
            }
        };
        queries.iter().map(answer).collect()
    }

    fn put(&mut self, changed: &[Row]) -> Result<(), EngineError> {
        if self.transaction.is_none() {
            self.transaction = Some(self.begin()?);
        }
        let transaction = self.transaction.as_ref().expect("just begun");
        let mut rows = transaction.open_table(ROWS)?;
        let mut long = transaction.open_table(LONG)?;
        for (key, value) in changed {
            let old = match value {
                None => rows.remove(key.as_slice())?,
                Some(value) => {
                    let stored = store_value(key, value, &mut long, &mut self.state.next_long)?;
                    self.state.cost += row_cost(key.len(), value.len());
                    self.state.rows += 1;
                    rows.insert(key.as_slice(), stored.as_slice())?
                }
            };
            if let Some(old) = old {
                let old = Stored::decode(old.value())?;
                self.state.cost -= row_cost(key.len(), old.bytes());
                self.state.rows -= 1;
                if let Stored::Long { bytes, name, .. } = old {
                    for chunk in 0..cut_value(bytes).0 {
                        long.remove(chunk_key(name, chunk).as_slice())?;
                    }
                }
            }
        }
        Ok(())
    }

    fn commit(&mut self, applied: Option<u64>) -> Result<(), EngineError> {
        let transaction = match self.transaction.take() {
            Some(transaction) => transaction,
            None => self.begin()?,
        };
        let applied_upto = applied.unwrap_or(self.state.applied);
        let state = State { applied: applied_upto, epoch: self.epoch.0, ..self.state };
        {
            let mut meta = transaction.open_table(META)?;
            meta.insert(STATE, encode_state(&state).as_slice())?;
        }
        transaction.commit()?;
        self.state = state;
        if applied.is_some() {
            self.squeezes = 0;
        }
        Ok(())
    }
}

/// A value as the `rows` table holds it.
enum Stored<'a> {
    /// `0`, CRC32C, the value.
    Inline { crc: u32, value: &'a [u8] },
    /// `1`, CRC32C, bytes of the value (u32), name in `long` (u64), what is left of the value
    /// behind its chunks.
    Long { crc: u32, bytes: usize, name: u64, left: &'a [u8] },
}

impl<'a> Stored<'a> {
    fn decode(stored: &'a [u8]) -> Result<Self, EngineError> {
        let damaged = || EngineError::Damaged("a row of the checkpoint");
        let (head, rest) = stored.split_first_chunk::<5>().ok_or_else(damaged)?;
        let crc = u32::from_le_bytes([head[1], head[2], head[3], head[4]]);
        match head[0] {
            0 => Ok(Self::Inline { crc, value: rest }),
            1 => {
                let (bytes, name) = rest.split_first_chunk::<4>().ok_or_else(damaged)?;
                let (name, left) = name.split_first_chunk::<8>().ok_or_else(damaged)?;
                let bytes = u32::from_le_bytes(*bytes) as usize;
                Ok(Self::Long { crc, bytes, name: u64::from_le_bytes(*name), left })
            }
            _ => Err(damaged()),
        }
    }

    /// The length of the value.
    fn bytes(&self) -> usize {
        match self {
            Self::Inline { value, .. } => value.len(),
            Self::Long { bytes, .. } => *bytes,
        }
    }
}

/// A row of the checkpoint and its state, read from any bytes; for `fuzz/`.
pub(crate) fn read_any(bytes: &[u8]) {
    if let Ok(stored) = Stored::decode(bytes) {
        let _ = cut_value(stored.bytes());
    }
    let mut sealed = bytes.to_vec();
    sealed.extend_from_slice(&crc32c_parts([bytes]).to_le_bytes());
    if let Ok(state) = decode_state(&sealed) {
        let again = encode_state(&state);
        // One from before it told the epoch is written with it.
        assert!(again == sealed || sealed.len() == OLD_STATE_BYTES);
        assert_eq!(decode_state(&again).ok(), Some(state));
    }
}

fn chunk_key(name: u64, chunk: usize) -> [u8; 12] {
    let mut key = [0; 12];
    key[..8].copy_from_slice(&name.to_be_bytes());
    key[8..].copy_from_slice(&(chunk as u32).to_be_bytes());
    key
}

/// What goes into `rows` for `value`; its chunks are put into `long`.
fn store_value(
    key: &[u8],
    value: &[u8],
    long: &mut Table<&[u8], &[u8]>,
    next_long: &mut u64,
) -> Result<Vec<u8>, EngineError> {
    let crc = crc32c_parts([key, value]);
    let (chunks, left) = cut_value(value.len());
    let mut stored = Vec::with_capacity(17 + left);
    stored.push(u8::from(chunks > 0));
    stored.extend_from_slice(&crc.to_le_bytes());
    if chunks == 0 {
        stored.extend_from_slice(value);
        return Ok(stored);
    }
    let name = *next_long;
    *next_long += 1;
    stored.extend_from_slice(&(value.len() as u32).to_le_bytes());
    stored.extend_from_slice(&name.to_le_bytes());
    let (whole, left) = value.split_at(value.len() - left);
    stored.extend_from_slice(left);
    for (number, chunk) in whole.chunks(CHUNK_BYTES).enumerate() {
        long.insert(chunk_key(name, number).as_slice(), chunk)?;
    }
    Ok(stored)
}

/// The value that `stored` stands for, checked.
fn value_of(
    key: &[u8],
    stored: &[u8],
    long: &impl ReadableTable<&'static [u8], &'static [u8]>,
) -> Result<Vec<u8>, EngineError> {
    let (crc, value) = match Stored::decode(stored)? {
        Stored::Inline { crc, value } => (crc, value.to_vec()),
        Stored::Long { crc, bytes, name, left } => {
            let mut value = Vec::new();
            for chunk in 0..cut_value(bytes).0 {
                let stored = long.get(chunk_key(name, chunk).as_slice())?;
                let stored = stored.ok_or(EngineError::Damaged("a long value's chunk"))?;
                value.extend_from_slice(stored.value());
            }
            value.extend_from_slice(left);
            (crc, value)
        }
    };
    if crc32c_parts([key, &value]) != crc {
        return Err(EngineError::Damaged("a row of the checkpoint"));
    }
    Ok(value)
}

fn as_slice(bound: &Bound<Vec<u8>>) -> Bound<&[u8]> {
    bound.as_ref().map(Vec::as_slice)
}

/// A state without the owner's epoch.
const OLD_STATE_BYTES: usize = 4 * 8 + 4;

fn encode_state(state: &State) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(44);
    for field in [state.applied, state.cost, state.rows, state.next_long, state.epoch] {
        bytes.extend_from_slice(&field.to_le_bytes());
    }
    bytes.extend_from_slice(&crc32c_parts([bytes.as_slice()]).to_le_bytes());
    bytes
}

fn decode_state(bytes: &[u8]) -> Result<State, EngineError> {
    let damaged = || EngineError::Damaged("checkpoint state");
    let (fields, crc) = bytes.split_last_chunk::<4>().ok_or_else(damaged)?;
    if crc32c_parts([fields]) != u32::from_le_bytes(*crc) {
        return Err(damaged());
    }
    let (fields, rest) = fields.as_chunks::<8>();
    let (applied, cost, rows, next_long, epoch) = match (fields, rest) {
        ([applied, cost, rows, next_long], []) => (applied, cost, rows, next_long, &[0; 8]),
        ([applied, cost, rows, next_long, epoch], []) => (applied, cost, rows, next_long, epoch),
        _ => return Err(damaged()),
    };
    let number = |bytes: &[u8; 8]| u64::from_le_bytes(*bytes);
    Ok(State {
        applied: number(applied),
        cost: number(cost),
        rows: number(rows),
        next_long: number(next_long),
        epoch: number(epoch),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATE_NOW: State = State { applied: 1, cost: 2, rows: 3, next_long: 4, epoch: 5 };

    #[test]
    fn a_state_survives_the_disk_and_no_bit_of_it_may_change() {
        let mut bytes = encode_state(&STATE_NOW);
        assert_eq!(decode_state(&bytes).ok(), Some(STATE_NOW));
        for at in 0..bytes.len() {
            bytes[at] ^= 1;
            assert!(decode_state(&bytes).is_err(), "byte {at}");
            bytes[at] ^= 1;
            assert!(decode_state(&bytes[..at]).is_err(), "cut to {at}");
        }
    }

    /// A state from before it told the owner's epoch.
    #[test]
    fn an_older_state_is_read() {
        let mut old = encode_state(&STATE_NOW);
        old.truncate(OLD_STATE_BYTES - 4);
        let crc = crc32c_parts([old.as_slice()]);
        old.extend_from_slice(&crc.to_le_bytes());
        assert_eq!(decode_state(&old).ok(), Some(State { epoch: 0, ..STATE_NOW }));
    }
}
