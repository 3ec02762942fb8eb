//! A running store: what its handles share, and its two tasks.
//!
//! The *committer* writes what was applied into the intent log, group by group, with no pause: what
//! gathers while one group is written is the next. What was applied lazily waits until somebody wants it
//! durable, until there is enough of it, or a short time. The *checkpointer* owns the engine: it answers
//! reads that missed memory, and brings the oldest closed segment into the checkpoint.
//!
//! What always holds:
//! - Batches become durable in the order in which they were applied.
//! - After an error nothing is acknowledged any more, both tasks end, and every waiter is told.
//!
//! After a crash the store is opened anew: docs/design/0004-key-value-store.md.

use crate::cache::Cache;
use crate::checkpoint::{Checkpoint, Miss, READS_MAX, State};
use crate::format::{self, RecordHeader, Superblock};
use crate::intent::{self, GROUPS_IN_FLIGHT_MAX, Log, Queued};
use crate::open::write_superblocks;
use crate::overlay::{Overlay, Segment, row_cost};
use crate::store::{BATCH_KEY_BYTES_MAX, Batch, Config, KvError, Usage};
use futures_util::future::{Either, select};
use levada_base::sync::Notify;
use levada_base::units::{KIB, MIB};
use levada_base::{planted, reactor, reactor::Instant};
use levada_device::{BlockError, Device};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::ops::Bound;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

/// Closed segments that may wait before callers are held back.
const BACKLOG_MAX: usize = 2;
/// How long a batch that nobody waits for may stay out of the log, and how many bytes of such.
const LAZY_TIME: Duration = Duration::from_millis(5);
const LAZY_BYTES: usize = 128 * KIB as usize;
/// Rows that leave a segment between two chances for other tasks.
const ROWS_AT_ONCE: usize = 512;

/// What room is wanted for: how deep into the space that is kept one may go.
#[derive(Clone, Copy)]
pub(crate) enum Room {
    ForData,
    /// What was accepted before.
    ToRepeat,
    /// What removes more than it puts: the last of the space but for what is on its way.
    ToFree,
}

/// What the handles of a store share with its tasks.
pub(crate) struct Service {
    area: Rc<dyn Device>,
    log: Log,
    pub overlay: Overlay,
    pub cache: RefCell<Cache>,
    superblock: Cell<Superblock>,
    state: Cell<State>,
    queue: RefCell<VecDeque<Queued>>,
    queued_bytes: Cell<usize>,
    /// Batches up to here are to be written at once.
    wanted: Cell<u64>,
    /// By when the others are to be written.
    lazy_until: Cell<Option<Instant>>,
    misses: RefCell<VecDeque<Miss>>,
    pub last: Cell<u64>,
    pub durable: Cell<u64>,
    ended: RefCell<Ended>,
    /// Something that a caller may wait for: durability, room, the end.
    pub changed: Notify,
    committer: Notify,
    checkpointer: Notify,
    /// The store has closed or failed.
    over: Notify,
}

/// Whether the store still works.
enum Ended {
    Running,
    /// No more batches; what there is goes into the checkpoint.
    Closing,
    Closed,
    Failed(KvError),
}

impl Service {
    /// Starts the tasks over what was found.
    pub(crate) fn start(
        area: Rc<dyn Device>,
        config: Config,
        superblock: Superblock,
        log: Log,
        overlay: Overlay,
        checkpoint: Checkpoint,
        state: State,
    ) -> Rc<Self> {
        let last = log.head().seq;
        let service = Rc::new(Self {
            area,
            log,
            overlay,
            cache: RefCell::new(Cache::new(config.cache_bytes)),
            superblock: Cell::new(superblock),
            state: Cell::new(state),
            queue: RefCell::default(),
            queued_bytes: Cell::new(0),
            wanted: Cell::new(last),
            lazy_until: Cell::new(None),
            misses: RefCell::default(),
            last: Cell::new(last),
            durable: Cell::new(last),
            ended: RefCell::new(Ended::Running),
            changed: Notify::default(),
            committer: Notify::default(),
            checkpointer: Notify::default(),
            over: Notify::default(),
        });
        let committer = Rc::clone(&service).commit_groups();
        drop(reactor::spawn(Rc::clone(&service).until_ended(committer)));
        let checkpointer = Rc::clone(&service);
        drop(reactor::spawn(Rc::clone(&service).until_ended(async move {
            if let Err(error) = checkpointer.keep_checkpoint(checkpoint).await {
                checkpointer.fail(error);
            }
        })));
        service
    }

    /// Runs a task up to the end of the store: from then on it issues nothing.
    async fn until_ended(self: Rc<Self>, task: impl Future<Output = ()>) {
        let ended = self.over.until(|| self.reason());
        select(pin!(ended), pin!(task)).await;
    }

    /// Fails once the store takes no more requests.
    pub(crate) fn check(&self) -> Result<(), KvError> {
        match &*self.ended.borrow() {
            Ended::Running => Ok(()),
            Ended::Closing | Ended::Closed | Ended::Failed(_) => Err(KvError::Stopped),
        }
    }

    /// Why a waiter waits in vain.
    pub(crate) fn reason(&self) -> Option<KvError> {
        match &*self.ended.borrow() {
            Ended::Running | Ended::Closing => None,
            Ended::Closed => Some(KvError::Stopped),
            Ended::Failed(error) => Some(error.clone()),
        }
    }

    fn end(&self, ended: Ended) {
        *self.ended.borrow_mut() = ended;
        self.misses.borrow_mut().clear();
        self.changed.notify_all();
        self.over.notify_all();
    }

    fn fail(&self, error: KvError) {
        if self.reason().is_none() {
            tracing::error!(%error, "a key-value store stops");
            self.end(Ended::Failed(error));
        }
    }

    /// The last handle is gone: the tasks end where they are.
    pub(crate) fn abandon(&self) {
        if self.reason().is_none() {
            self.end(Ended::Closed);
        }
    }

    /// Checkpoints everything and ends.
    pub(crate) async fn close(&self) -> Result<(), KvError> {
        self.check()?;
        *self.ended.borrow_mut() = Ended::Closing;
        self.rotate();
        self.changed.notify_all();
        let ended = self.changed.until(|| self.reason()).await;
        match ended {
            KvError::Stopped => Ok(()),
            error => Err(error),
        }
    }

    /// Closes the newest segment: its batches go into the log, and then into the checkpoint.
    fn rotate(&self) {
        self.overlay.rotate();
        self.want(self.last.get());
        self.checkpointer.notify_all();
    }

    /// Batches up to `seq` are to be written at once.
    pub(crate) fn want(&self, seq: u64) {
        if seq > self.wanted.get() {
            self.wanted.set(seq);
            self.committer.notify_all();
        }
    }

    /// Queues a batch; later reads see it. A lazy one may wait for company.
    pub(crate) fn apply(&self, batch: Batch, lazy: bool) -> Result<u64, KvError> {
        self.check()?;
        let changes = batch.changes;
        let bytes = format::batch_bytes(&changes);
        let bytes_max = intent::batch_bytes_max(self.superblock.get().layout.log_bytes);
        if let Some(key) = changes.iter().map(|(key, _)| key.len()).max()
            && key > BATCH_KEY_BYTES_MAX
        {
            return Err(KvError::TooLarge { bytes: key, bytes_max: BATCH_KEY_BYTES_MAX });
        }
        if bytes > bytes_max {
            return Err(KvError::TooLarge { bytes, bytes_max });
        }
        let cost = |(key, value): &(_, Option<crate::Bytes>)| {
            let key: &crate::Bytes = key;
            value.as_ref().map_or(0, |value| row_cost(key.len(), value.len()))
        };
        let cost: u64 = changes.iter().map(cost).sum();
        if cost > 0 && self.cost() + cost > self.cost_max() {
            return Err(KvError::Full);
        }

        let seq = self.last.get() + 1;
        self.last.set(seq);
        let segment = self.overlay.insert(seq, &changes);
        let log_bytes = segment.log_bytes.get() + intent::log_bytes_of(&changes);
        segment.log_bytes.set(log_bytes);
        self.queued_bytes.set(self.queued_bytes.get() + bytes);
        self.queue.borrow_mut().push_back(Queued { seq, changes, bytes, segment });
        if log_bytes >= intent::segment_bytes(self.superblock.get().layout.log_bytes) {
            self.rotate();
        }
        if !lazy || self.queued_bytes.get() >= LAZY_BYTES {
            self.want(seq);
        } else if self.lazy_until.get().is_none() {
            self.lazy_until.set(Some(reactor::now() + LAZY_TIME));
            self.committer.notify_all();
        }
        Ok(seq)
    }

    /// What the rows can take in the checkpoint at most, those of the overlay included.
    fn cost(&self) -> u64 {
        self.state.get().cost + self.overlay.cost()
    }

    /// What the checkpoint space surely holds: an eighth is for the copies that a transaction makes,
    /// and some for the engine itself.
    fn cost_max(&self) -> u64 {
        (self.superblock.get().layout.space_bytes / 8 * 7).saturating_sub(512 * KIB)
    }

    /// What is kept of it from new data: for what was accepted and is on its way into a batch when others have
    /// used up the rest, and for removals. An object log has up to an eighth of the intent log on its way (note
    /// 0005), which costs up to four times its bytes.
    fn kept(&self) -> u64 {
        let log_bytes = self.superblock.get().layout.log_bytes;
        (self.cost_max() / 4).min((8 * MIB).max(log_bytes / 4 * 3))
    }

    /// Waits for room.
    pub(crate) async fn room(&self, room: Room) -> Result<(), KvError> {
        let log_bytes = self.superblock.get().layout.log_bytes;
        let queued_max = intent::batch_bytes_max(log_bytes);
        let kept = match room {
            Room::ForData => self.kept(),
            Room::ToRepeat => self.kept() / 4 * 3,
            Room::ToFree => self.kept() / 2,
        };
        let cost_max = self.cost_max().saturating_sub(kept);
        loop {
            let changed = self.changed.changed();
            self.check()?;
            let behind =
                self.overlay.closed() >= BACKLOG_MAX || self.queued_bytes.get() > queued_max;
            if !behind {
                if self.cost() <= cost_max {
                    return Ok(());
                }
                // The overlay counts rows that only replace or remove others: bring them down,
                // and the count is exact.
                if self.overlay.is_empty() {
                    return match room {
                        Room::ForData | Room::ToRepeat => Err(KvError::Full),
                        // Whether it fits is seen when it is applied.
                        Room::ToFree => Ok(()),
                    };
                }
                self.rotate();
            } else {
                self.want(self.last.get());
            }
            changed.await;
        }
    }

    pub(crate) fn usage(&self) -> Usage {
        Usage {
            bytes_used: self.cost(),
            bytes_max: self.cost_max(),
            bytes_kept: self.kept(),
            rows: self.state.get().rows,
            log_bytes_used: self.log.used_bytes(),
            log_bytes_max: self.superblock.get().layout.log_bytes,
            memory_bytes: self.overlay.bytes() + self.cache.borrow().bytes(),
        }
    }

    /// True while the checkpoint holds no row, so that no read can miss.
    pub(crate) fn is_checkpoint_empty(&self) -> bool {
        self.state.get().rows == 0
    }

    /// Hands a read to the checkpointer.
    pub(crate) fn miss(&self, miss: Miss) {
        self.misses.borrow_mut().push_back(miss);
        self.checkpointer.notify_all();
    }

    /// The next group: everything queued for one segment, up to the size of a record; unless it
    /// may still wait.
    fn take_group(&self) -> Option<(u64, levada_base::Buf)> {
        let mut queue = self.queue.borrow_mut();
        let first = queue.front()?;
        if self.lazy_until.get().is_some_and(|until| until <= reactor::now()) {
            self.lazy_until.set(None);
            self.wanted.set(self.last.get());
        }
        if first.seq > self.wanted.get() {
            return None;
        }
        let segment = Rc::clone(&first.segment);
        let bytes_max = intent::group_bytes_max(self.superblock.get().layout.log_bytes);
        let mut bytes = 0;
        let fits = |batch: &&Queued| {
            let first = bytes == 0;
            bytes += batch.bytes;
            Rc::ptr_eq(&batch.segment, &segment) && (first || bytes <= bytes_max)
        };
        let count = queue.iter().take_while(fits).count();
        let group_bytes: usize = queue.iter().take(count).map(|batch| batch.bytes).sum();
        let footprint = RecordHeader::footprint(group_bytes);
        if footprint > self.log.free_bytes() {
            return None;
        }
        let group: Vec<Queued> = queue.drain(..count).collect();
        if queue.is_empty() {
            self.lazy_until.set(None);
        }
        debug_assert_eq!(group[0].seq, self.log.head().seq + 1);
        let placed = self.log.place(&group);
        // From an estimate to what it really takes.
        let estimate: u64 = group.iter().map(|batch| intent::log_bytes_of(&batch.changes)).sum();
        segment.log_bytes.set(segment.log_bytes.get() - estimate + footprint);
        segment.end.set(self.log.head());
        self.queued_bytes.set(self.queued_bytes.get() - group_bytes);
        Some(placed)
    }

    /// The committer. Several groups are in flight; they become durable in order.
    async fn commit_groups(self: Rc<Self>) {
        let mut writes = Writes::default();
        loop {
            let changed = self.committer.changed();
            while writes.0.len() < GROUPS_IN_FLIGHT_MAX
                && let Some((position, record)) = self.take_group()
            {
                let service = Rc::clone(&self);
                let seq = self.log.head().seq;
                writes.push(seq, async move { service.log.write(position, record).await });
            }
            if writes.0.is_empty() {
                match self.lazy_until.get() {
                    None => changed.await,
                    Some(until) => {
                        let wait = until.since(reactor::now());
                        let _ = reactor::timeout(wait, changed).await;
                    }
                }
                continue;
            }
            match select(pin!(writes.next()), pin!(changed)).await {
                Either::Left((Ok(seq), _)) => {
                    self.durable.set(seq);
                    self.changed.notify_all();
                    if self.overlay.closed() > 0 {
                        self.checkpointer.notify_all();
                    }
                }
                Either::Left((Err(error), _)) => return self.fail(error.into()),
                Either::Right(_) => {}
            }
        }
    }

    /// The checkpointer.
    async fn keep_checkpoint(&self, mut checkpoint: Checkpoint) -> Result<(), KvError> {
        loop {
            let changed = self.checkpointer.changed();
            let misses: Vec<Miss> = {
                let mut misses = self.misses.borrow_mut();
                let count = misses.len().min(READS_MAX);
                misses.drain(..count).collect()
            };
            let idle = misses.is_empty();
            if !idle {
                let clean = |key: &crate::Bytes, value: Option<&crate::Bytes>| {
                    self.cache.borrow_mut().put(Rc::clone(key), value.cloned());
                };
                checkpoint.answer(misses, || self.overlay.stack(), clean).await?;
            }
            let oldest = self.overlay.oldest_closed();
            match oldest.filter(|segment| self.may_checkpoint(segment)) {
                Some(segment) => {
                    if let Some(state) = checkpoint.advance(&segment).await? {
                        self.checkpointed(&segment, state).await?;
                    }
                }
                None if !idle => {}
                None if self.is_drained() => {
                    checkpoint.close().await?;
                    self.end(Ended::Closed);
                    return Ok(());
                }
                None => changed.await,
            }
        }
    }

    /// The checkpoint must not know what a crash may still take back.
    fn may_checkpoint(&self, segment: &Segment) -> bool {
        segment.last_seq.get() <= self.durable.get() || planted!("kv-checkpoint-too-early")
    }

    fn is_drained(&self) -> bool {
        matches!(*self.ended.borrow(), Ended::Closing) && self.overlay.is_empty()
    }

    /// The engine holds `segment` durably: it leaves memory, and the log behind it is free.
    async fn checkpointed(&self, segment: &Rc<Segment>, state: State) -> Result<(), KvError> {
        // First the clean rows, while the segment still lies over them; a few at a time, because
        // there can be a hundred thousand.
        let mut after: Option<crate::Bytes> = None;
        loop {
            {
                let rows = segment.rows.borrow();
                let from = after.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
                let some = rows.range::<[u8], _>((from, Bound::Unbounded)).take(ROWS_AT_ONCE);
                let mut cache = self.cache.borrow_mut();
                let mut last = None;
                for (key, value) in some {
                    cache.put(Rc::clone(key), value.clone());
                    last = Some(Rc::clone(key));
                }
                if last.is_none() {
                    break;
                }
                after = last;
            }
            reactor::yield_now().await;
        }
        self.state.set(state);
        self.overlay.drop_oldest();
        let mut superblock = self.superblock.get();
        superblock.generation += 1;
        superblock.tail = segment.end.get();
        self.superblock.set(superblock);
        if planted!("kv-tail-too-early") {
            self.log.move_tail(superblock.tail.position);
            self.committer.notify_all();
        }
        write_superblocks(&self.area, &superblock).await?;
        self.log.move_tail(superblock.tail.position);
        self.changed.notify_all();
        self.committer.notify_all();
        // Readers may still hold the segment; the last to leave frees it, normally this task.
        if Rc::strong_count(segment) == 1 {
            let rows = segment.rows.take();
            let mut rows = rows.into_iter();
            while rows.by_ref().take(ROWS_AT_ONCE).count() > 0 {
                reactor::yield_now().await;
            }
        }
        Ok(())
    }
}

type Write = Pin<Box<dyn Future<Output = Result<(), BlockError>>>>;

/// Records being written, oldest first, each with its last sequence.
#[derive(Default)]
struct Writes(VecDeque<(u64, Option<Write>)>);

impl Writes {
    fn push(&mut self, seq: u64, write: impl Future<Output = Result<(), BlockError>> + 'static) {
        self.0.push_back((seq, Some(Box::pin(write))));
    }

    /// Completes when the oldest has; the first error of any ends it at once.
    async fn next(&mut self) -> Result<u64, BlockError> {
        poll_fn(|cx| {
            for (_, write) in &mut self.0 {
                if let Some(running) = write
                    && let Poll::Ready(done) = running.as_mut().poll(cx)
                {
                    *write = None;
                    if let Err(error) = done {
                        return Poll::Ready(Err(error));
                    }
                }
            }
            let out_of_order = planted!("kv-acknowledged-out-of-order")
                && self.0.back().is_some_and(|(_, write)| write.is_none());
            if self.0.front().is_some_and(|(_, write)| write.is_some()) && !out_of_order {
                return Poll::Pending;
            }
            let oldest = if out_of_order { self.0.pop_back() } else { self.0.pop_front() };
            let (seq, _) = oldest.expect("only called while some are in flight");
            Poll::Ready(Ok(seq))
        })
        .await
    }
}
