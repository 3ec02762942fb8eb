//! The key-value store of one target, as its callers see it.

use crate::checkpoint::{Miss, SCAN_ROWS_MAX};
use crate::format;
use crate::open;
use crate::overlay::{is_empty_range, merge, merge_back};
use crate::service::{Room, Service};
use levada_base::Epoch;
use levada_base::ids::Seq;
use levada_base::sync::oneshot;
use levada_device::{BlockError, Device};
use std::ops::Bound;
use std::rc::Rc;

/// Keys and values: shared, never copied on the way out.
pub type Bytes = Rc<[u8]>;

/// The longest key.
pub const BATCH_KEY_BYTES_MAX: usize = 1024;

/// Why the store could not answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KvError {
    /// The area below failed; the store stops. [`BlockError::Fenced`] when a later owner has it.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// What is on the area is not a store, or not intact.
    #[error("the key-value store is damaged: {what} at {at}")]
    Damaged {
        what: &'static str,
        /// Bytes from the start of the area; for the intent log, its position.
        at: u64,
    },
    /// The checkpoint space is full. Nothing was changed; removing rows makes room.
    #[error("the key-value store is full")]
    Full,
    /// A key or a batch is too large; nothing was changed.
    #[error("{bytes} bytes in a key or a batch; at most {bytes_max}")]
    TooLarge { bytes: usize, bytes_max: usize },
    /// The area is too small for a store.
    #[error("a key-value store needs an area of {bytes_min} bytes, this one has {bytes}")]
    TooSmall { bytes: u64, bytes_min: u64 },
    /// The store was closed, or stopped after an error; it must be reopened.
    #[error("the store has stopped")]
    Stopped,
}

/// Sizes and bounds.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Bytes of the intent log; bounds what a restart replays. Fixed when the store is made, and
    /// at most a quarter of the area. A batch may take a quarter of it.
    pub log_bytes: u64,
    /// Bytes of clean values kept in memory; the engine below takes at most half of this again.
    pub cache_bytes: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { log_bytes: 64 << 20, cache_bytes: 64 << 20 }
    }
}

/// How full a store is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of the checkpoint space that the rows can take at most; what is not checkpointed yet
    /// counts in full, also where it replaces other rows.
    pub bytes_used: u64,
    /// Bytes of the checkpoint space that rows may take.
    pub bytes_max: u64,
    /// Of those, the bytes that [`Store::room`] keeps from data.
    pub bytes_kept: u64,
    /// Rows in the checkpoint.
    pub rows: u64,
    /// Bytes of the intent log that a restart would replay.
    pub log_bytes_used: u64,
    pub log_bytes_max: u64,
    /// Bytes of rows in memory, changed and clean.
    pub memory_bytes: usize,
}

/// What [`Store::scan_page`] found.
#[derive(Clone, Debug)]
pub struct Page {
    pub rows: Vec<(Bytes, Bytes)>,
    /// The range was looked through up to here, inclusive; `None`: to its end.
    pub upto: Option<Bytes>,
}

impl Page {
    /// A page of rows that were looked for up to `upto`, or until there were `limit`.
    fn cut(rows: Vec<(Bytes, Bytes)>, limit: usize, upto: Option<Bytes>) -> Self {
        let last = rows.last().filter(|_| rows.len() >= limit).map(|(key, _)| Rc::clone(key));
        Self { upto: last.or(upto), rows }
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

    /// The bytes that the intent log holds for it (docs/design/0004-key-value-store.md).
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; format::batch_bytes(&self.changes)];
        format::encode_batch(&self.changes, &mut bytes, 0);
        bytes
    }

    /// The batch in such bytes; `None` when they are not one batch.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let changes = format::decode_batches(bytes, 1).ok()?.pop()?;
        Some(Self { changes })
    }
}

/// A store; cheap to clone, all clones are the same store. Dropping the last one without
/// [`Store::close`] is like a crash: what was not durable may be gone. Writes in flight then may
/// still reach the device; so let them settle before the area is opened again.
#[derive(Clone)]
pub struct Store(Rc<Handle>);

struct Handle(Rc<Service>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.abandon();
    }
}

impl Store {
    /// Makes an empty store on `area`, which loses what it held.
    ///
    /// # Errors
    ///
    /// When the area fails or is too small.
    pub async fn create(
        area: Rc<dyn Device>,
        epoch: Epoch,
        config: Config,
    ) -> Result<Self, KvError> {
        Ok(Self(Rc::new(Handle(open::create(area, epoch, config).await?))))
    }

    /// Opens the store on `area`: the last checkpoint, then the intent log.
    ///
    /// # Errors
    ///
    /// When the area fails, holds no store, or belongs to a later epoch.
    pub async fn open(area: Rc<dyn Device>, epoch: Epoch, config: Config) -> Result<Self, KvError> {
        Ok(Self(Rc::new(Handle(open::open(area, epoch, config).await?))))
    }

    fn service(&self) -> &Service {
        &self.0.0
    }

    /// The value of `key`, with every change applied so far. Answered from memory without
    /// waiting when it was changed or read lately.
    ///
    /// # Errors
    ///
    /// When the store stopped or the area fails.
    pub async fn get(&self, key: &[u8]) -> Result<Option<Bytes>, KvError> {
        let service = self.service();
        service.check()?;
        if let Some(changed) = service.overlay.get(key) {
            return Ok(changed);
        }
        if service.is_checkpoint_empty() {
            return Ok(None);
        }
        if let Some(clean) = service.cache.borrow_mut().get(key) {
            return Ok(clean);
        }
        let (answer, value) = oneshot::channel();
        service.miss(Miss::Get { key: key.into(), answer });
        value.await.map_err(|_| self.reason())
    }

    /// Up to `limit` rows between the bounds, in key order, with every change applied so far.
    /// The first 1000 rows are those of one moment; of more, each has its newest value.
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
        let mut rows = Vec::new();
        let mut from = from.map(<[u8]>::to_vec);
        loop {
            let start = from.as_ref().map(Vec::as_slice);
            let page = self.scan_page(start, to, limit - rows.len()).await?;
            rows.extend(page.rows);
            match page.upto {
                Some(upto) if rows.len() < limit => from = Bound::Excluded(upto.to_vec()),
                _ => return Ok(rows),
            }
        }
    }

    /// The first of the rows between the bounds, up to `limit`, in key order, as they are at the moment in
    /// which this returns. There may be fewer although more follow, also none at all.
    ///
    /// # Errors
    ///
    /// As [`Store::get`].
    pub async fn scan_page(
        &self,
        from: Bound<&[u8]>,
        to: Bound<&[u8]>,
        limit: usize,
    ) -> Result<Page, KvError> {
        self.page(false, from, to, limit).await
    }

    /// As [`Store::scan_page`], but the last of the rows between the bounds, the last one first. The range was looked
    /// through down to `upto`.
    ///
    /// # Errors
    ///
    /// As [`Store::get`].
    pub async fn scan_page_back(
        &self,
        from: Bound<&[u8]>,
        to: Bound<&[u8]>,
        limit: usize,
    ) -> Result<Page, KvError> {
        self.page(true, from, to, limit).await
    }

    async fn page(
        &self,
        back: bool,
        from: Bound<&[u8]>,
        to: Bound<&[u8]>,
        limit: usize,
    ) -> Result<Page, KvError> {
        let service = self.service();
        service.check()?;
        if limit == 0 || is_empty_range(from, to) {
            return Ok(Page { rows: Vec::new(), upto: None });
        }
        let merge = if back { merge_back } else { merge };
        if service.is_checkpoint_empty() {
            let rows = merge(&service.overlay.stack(), from, to, &[], limit);
            return Ok(Page::cut(rows, limit, None));
        }
        let (answer, page) = oneshot::channel();
        service.miss(Miss::Scan {
            back,
            from: from.map(<[u8]>::to_vec),
            to: to.map(<[u8]>::to_vec),
            // Some of them may have been removed since.
            rows: limit.saturating_add(24).min(SCAN_ROWS_MAX),
            answer,
        });
        let page = page.await.map_err(|_| self.reason())?;
        // What was not in the checkpoint when it was read, and what came after that.
        let mut stack = page.stack;
        let seen = stack.last().map_or(0, |segment| segment.id);
        let newer = service.overlay.stack();
        stack.extend(newer.into_iter().filter(|segment| segment.id > seen));
        let last = page.rows.last().filter(|_| page.more).map(|(key, _)| Rc::clone(key));
        let seen = last.as_ref().map(|last| Bound::Included(&**last));
        let (from, to) = if back { (seen.unwrap_or(from), to) } else { (from, seen.unwrap_or(to)) };
        let rows = merge(&stack, from, to, &page.rows, limit);
        Ok(Page::cut(rows, limit, last))
    }

    /// Waits until the intent log has room for another batch (the checkpoint may have to catch
    /// up first). Call before deciding what to [`Store::apply`].
    ///
    /// # Errors
    ///
    /// When the store stopped or is full.
    pub async fn room(&self) -> Result<(), KvError> {
        self.service().room(Room::ForData).await
    }

    /// As [`Store::room`], for a batch that was accepted before and came to nothing, or may have: it may
    /// use a part of the space that is kept for removals.
    ///
    /// # Errors
    ///
    /// As [`Store::room`].
    pub async fn room_to_repeat(&self) -> Result<(), KvError> {
        self.service().room(Room::ToRepeat).await
    }

    /// As [`Store::room`], for a batch that removes more than it puts, or carries out what was accepted: it
    /// may use all that is kept from data, so that a full store goes on and can be emptied.
    ///
    /// # Errors
    ///
    /// When the store stopped.
    pub async fn room_to_free(&self) -> Result<(), KvError> {
        self.service().room(Room::ToFree).await
    }

    /// Applies a batch: later reads see it, later batches come after it. It is durable once
    /// [`Store::durable`] has returned for this sequence or a later one.
    ///
    /// # Errors
    ///
    /// When the store stopped, or when the batch cannot fit; nothing was changed then. It always
    /// fits after [`Store::room`], unless many callers take the same room at once.
    pub fn apply(&self, batch: Batch) -> Result<Seq, KvError> {
        self.service().apply(batch, false).map(Seq)
    }

    /// As [`Store::apply`], but the batch may stay out of the log for a few milliseconds, until
    /// there are more, or somebody waits for it.
    ///
    /// # Errors
    ///
    /// As [`Store::apply`].
    pub fn apply_lazily(&self, batch: Batch) -> Result<Seq, KvError> {
        self.service().apply(batch, true).map(Seq)
    }

    /// Waits until every batch up to `seq` is durable on every in-sync copy of the log.
    /// Callers that wait together share one write and one flush (group commit).
    ///
    /// # Errors
    ///
    /// When the store stopped before that.
    pub async fn durable(&self, seq: Seq) -> Result<(), KvError> {
        let service = self.service();
        service.want(seq.0);
        let done = || {
            if service.durable.get() >= seq.0 {
                return Some(Ok(()));
            }
            service.reason().map(Err)
        };
        service.changed.until(done).await
    }

    /// The sequence of the last applied batch.
    #[must_use]
    pub fn last_seq(&self) -> Seq {
        Seq(self.service().last.get())
    }

    /// Everything up to here is durable.
    #[must_use]
    pub fn durable_seq(&self) -> Seq {
        Seq(self.service().durable.get())
    }

    /// Why the store has stopped by itself, if it has; it must be reopened then.
    #[must_use]
    pub fn failure(&self) -> Option<KvError> {
        self.service().reason()
    }

    /// How full the store is.
    #[must_use]
    pub fn usage(&self) -> Usage {
        self.service().usage()
    }

    /// Brings everything into the checkpoint and stops; the next open replays nothing.
    ///
    /// # Errors
    ///
    /// When the store stopped before that.
    pub async fn close(&self) -> Result<(), KvError> {
        self.service().close().await
    }

    fn reason(&self) -> KvError {
        self.service().reason().unwrap_or(KvError::Stopped)
    }
}
