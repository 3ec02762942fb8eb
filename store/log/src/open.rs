//! Making a log, and opening one again.
//!
//! Opening reads the segment table and makes the world as the index says it is:
//!
//! - Stripes that the index does not know are given back. They are the ends of segments that
//!   were being filled, and nothing in them was ever promised. Giving them back, rather than
//!   forgetting them, keeps their records from coming back when the index is rebuilt, and their
//!   sequences free for new changes.
//! - When one of those had been written, a stripe is, though there may be nothing to put into it: its footer tells how
//!   far the log went. Declared anew, the others show what they held, and without that a rebuild would count it. So it is when
//!   no segment is filled on, as a segment is declared anew then: its first stripe and that one's footer make what it and those
//!   after it held an older generation's.
//! - Segments that were being discarded are discarded again.
//! - The segments that were being filled, one of each heat, are filled on from their last indexed stripes, so that
//!   crashes in a row do not eat the free ones.
//! - Staged changes are put into the new open stripe under their own versions; their rows stay
//!   until that stripe is indexed.
//!
//! Crashing meanwhile changes nothing: all of it is simply done again.

use crate::LogError;
use crate::clean::Paid;
use crate::extents::footprint;
use crate::format::{Footer, RecordHeader, RecordKind, SEGMENTS_MAX, first_order};
use crate::heat::{ByHeat, Heat};
use crate::load::Objects;
use crate::log::{Config, Counters, Inner, ObjectLog, State, zeroes};
use crate::rows::{self, LIVES_KEY, LOG_KEY, Lives, LogRow, SegmentRow};
use crate::segment::Segments;
use crate::stripe::{Payload, StagedRow, change_of};
use crate::write::Need;
use futures_util::future::join_all;
use levada_base::ids::{BootVerifier, Seq};
use levada_base::reactor;
use levada_base::sync::Notify;
use levada_base::units::BLOCK_BYTES;
use levada_base::{Buf, BufMut, Epoch, RangeLocks, planted, probe};
use levada_kv::{Batch, Bytes, Store, row_cost};
use levada_raid::Array;
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::ops::{Bound, Range};
use std::rc::Rc;

/// Rows asked of the store at once.
pub(crate) const ROWS_PER_SCAN: usize = 1024;
const STRIPE_BYTES_MIN: u64 = 8 * BLOCK_BYTES;
const STRIPE_BYTES_MAX: u64 = 1 << 30;

impl ObjectLog {
    /// Makes an empty log on an array's stripes, which lose what they held, with its index in
    /// an empty `store`.
    ///
    /// # Errors
    ///
    /// [`LogError::Geometry`], [`LogError::Foreign`] when the store is not empty, or when the
    /// array or the store fails.
    pub async fn create(
        array: Rc<dyn Array>,
        store: Store,
        config: Config,
        epoch: Epoch,
    ) -> Result<Self, LogError> {
        let segments = segments_of(&array, &config)?;
        if !store.scan(Bound::Unbounded, Bound::Unbounded, 1).await?.is_empty() {
            return Err(LogError::Foreign { what: "the store is not empty" });
        }
        let geometry = array.geometry();
        array.discard_stripes(0, geometry.stripes).await?;
        let row = LogRow {
            fs: config.fs,
            target: config.target.0,
            segment_stripes: config.segment_stripes,
            epoch,
            stripe_bytes: geometry.stripe_bytes,
            stripes: u64::from(segments) * u64::from(config.segment_stripes),
            next_generation: 1,
            seq: 0,
            index_bytes: 0,
            indexed_seq: 0,
            verifier: new_verifier(),
            is_untold: false,
            indexed_order: Some(0),
        };
        let lives = Lives::default();
        write_log_row(&store, &row, &lives).await?;
        let table = Segments::new(segments, config.segment_stripes, 1);
        Ok(Self(Inner::new(array, store, config, epoch, &row, lives, table)))
    }

    /// Opens the log whose index is in `store`.
    ///
    /// # Errors
    ///
    /// [`LogError::Foreign`] when the store holds no log or that of another array,
    /// [`LogError::Stale`] after a later owner, [`LogError::Index`] when it is damaged, or when
    /// the array or the store fails.
    pub async fn open(
        array: Rc<dyn Array>,
        store: Store,
        mut config: Config,
        epoch: Epoch,
    ) -> Result<Self, LogError> {
        let _busy = probe::busy("log open");
        let row = store.get(LOG_KEY).await?;
        let row = row.ok_or(LogError::Foreign { what: "the store holds no log" })?;
        let mut row = LogRow::decode(&row)?;
        if (row.fs, row.target) != (config.fs, config.target.0) {
            return Err(LogError::Foreign { what: "another file system or target" });
        }
        if row.epoch > epoch {
            return Err(LogError::Stale { ours: epoch, seen: row.epoch });
        }
        config.segment_stripes = row.segment_stripes;
        let segments = segments_of(&array, &config)?;
        let geometry = array.geometry();
        if row.stripe_bytes != geometry.stripe_bytes
            || row.stripes > u64::from(segments) * u64::from(config.segment_stripes)
        {
            return Err(LogError::Foreign { what: "another geometry" });
        }
        let mut lives = match store.get(LIVES_KEY).await? {
            Some(lives) => Lives::decode(&lives)?,
            None => Lives::default(),
        };
        lives.ended(row.verifier, Seq(row.indexed_seq));
        row.epoch = epoch;
        row.verifier = new_verifier();
        write_log_row(&store, &row, &lives).await?;
        let mut table = Segments::new(segments, config.segment_stripes, row.next_generation);
        let mut unfinished = ByHeat::<Option<(u64, u32)>>::default();
        for (key, value) in scan_all(&store, rows::SEGMENTS).await? {
            let (segment, row) = SegmentRow::decode(&key, &value)?;
            let (generation, heat) = (row.generation, row.heat);
            // One that was only declared is given back.
            let is_begun = row.indexed_stripes > 0 && row.indexed_stripes < config.segment_stripes;
            let has_room = !row.closed && is_begun;
            if segment >= segments || !table.load(segment, row) {
                return Err(LogError::Index { row: "segment" });
            }
            if has_room {
                unfinished[heat] = unfinished[heat].max(Some((generation, segment)));
            }
        }
        let unindexed = unindexed(&*array, &table);
        finish_discards(&*array, &mut table);
        // Others in which nothing is needed any more are given back.
        for (_, segment) in unfinished.iter().flatten() {
            table.resume(*segment);
        }
        let log = Self(Inner::new(array, store, config, epoch, &row, lives, table));
        if row.is_untold {
            log.0.state.borrow_mut().must_tell();
        }
        log.0.give_back_unindexed(unindexed).await?;
        log.0.put_staged().await?;
        log.0.tell_what_was_inherited().await?;
        log.0.free_dead_segments();
        Ok(log)
    }
}

/// Segments that fit the array.
pub(crate) fn segments_of(array: &Rc<dyn Array>, config: &Config) -> Result<u32, LogError> {
    let geometry = array.geometry();
    let fault = |what, value, bound| Err(LogError::Geometry { what, value, bound });
    let bytes = geometry.stripe_bytes;
    if bytes < STRIPE_BYTES_MIN || !bytes.is_multiple_of(BLOCK_BYTES) {
        return fault("bytes of a stripe", bytes, STRIPE_BYTES_MIN);
    }
    if bytes > STRIPE_BYTES_MAX {
        return fault("bytes of a stripe", bytes, STRIPE_BYTES_MAX);
    }
    if config.segment_stripes == 0 {
        return fault("stripes of a segment", 0, 1);
    }
    let segments = geometry.stripes / u64::from(config.segment_stripes);
    // One to fill, one to clean into, and one to gain.
    let least = u64::from(config.reserve_segments) + 3;
    if segments < least {
        return fault("segments", segments, least);
    }
    if segments > u64::from(SEGMENTS_MAX) {
        return fault("segments", segments, SEGMENTS_MAX.into());
    }
    Ok(segments as u32)
}

/// Not 0, which stands for "not known".
pub(crate) fn new_verifier() -> BootVerifier {
    BootVerifier(reactor::random_u64() | 1)
}

/// Durable when it returns: before anything is acknowledged under the row's verifier.
pub(crate) async fn write_log_row(
    store: &Store,
    row: &LogRow,
    lives: &Lives,
) -> Result<(), LogError> {
    // It takes the place of another: a full store is opened, so that it can be emptied.
    store.room_to_free().await?;
    let mut batch = Batch::default();
    batch.put(LOG_KEY, &row.encode());
    batch.put(LIVES_KEY, &lives.encode());
    let seq = store.apply(batch)?;
    Ok(store.durable(seq).await?)
}

/// Every row whose key starts with `kind`.
pub(crate) async fn scan_all(store: &Store, kind: u8) -> Result<Vec<(Bytes, Bytes)>, LogError> {
    let (start, end) = ([kind], [kind + 1]);
    let mut found: Vec<(Bytes, Bytes)> = Vec::new();
    loop {
        let last = found.last().map(|(key, _)| Rc::clone(key));
        let from = last.as_deref().map_or(Bound::Included(&start[..]), Bound::Excluded);
        let rows = store.scan(from, Bound::Excluded(&end), ROWS_PER_SCAN).await?;
        let done = rows.len() < ROWS_PER_SCAN;
        found.extend(rows);
        if done {
            return Ok(found);
        }
    }
}

/// Of each segment the stripes that the index does not know, where some of them were declared: segment and places.
fn unindexed(array: &dyn Array, table: &Segments) -> Vec<(u32, Range<u32>)> {
    let unknown = table.iter().map(|(at, segment)| (at, segment.used_stripes..table.stripes));
    let is_declared = |(at, places): &(u32, Range<u32>)| {
        let first = u64::from(*at) * u64::from(table.stripes);
        places.clone().any(|place| array.is_written(first + u64::from(place)))
    };
    unknown.filter(is_declared).collect()
}

/// Finds segments that the last owner was discarding: everything that mattered in them was
/// copied durably before, also their records without data, though their rows still count those.
fn finish_discards(array: &dyn Array, table: &mut Segments) {
    for at in 0..table.count() {
        let first = u64::from(at) * u64::from(table.stripes);
        let segment = table.get_mut(at);
        let mut used = first..first + u64::from(segment.used_stripes);
        if segment.row.live_bytes == 0 && used.any(|stripe| !array.is_written(stripe)) {
            segment.row.marks = 0;
        }
    }
}

impl State {
    /// Stripes were given back that had been written. Of the cold ones those count that are filled on.
    fn must_tell(&mut self) {
        self.is_untold[Heat::Hot] = true;
        self.is_untold[Heat::Cold] = self.segments.is_open(Heat::Cold);
    }
}

impl Inner {
    pub(crate) fn new(
        array: Rc<dyn Array>,
        store: Store,
        config: Config,
        epoch: Epoch,
        row: &LogRow,
        lives: Lives,
        segments: Segments,
    ) -> Rc<Self> {
        let used_bytes = segments.iter().map(|(_, segment)| segment.row.live_bytes).sum();
        let marks: u64 = segments.iter().map(|(_, segment)| segment.row.marks).sum();
        let indexed = segments.iter().map(|(_, segment)| &segment.row);
        // As it was before rows told it.
        let first_orders = indexed
            .filter(|row| row.indexed_stripes > 0)
            .map(|row| first_order(row.generation, row.indexed_stripes));
        let inherited = row.indexed_order.or_else(|| first_orders.max()).unwrap_or(0);
        let state = State {
            mark_bytes: marks * footprint(0),
            seq: row.seq,
            indexed_seq: row.indexed_seq,
            durable_seq: row.seq,
            wanted_seq: 0,
            settles_wanted: ByHeat::default(),
            settled: ByHeat::default(),
            indexed_order: inherited,
            durable_order: inherited,
            next_order: inherited,
            before: None,
            closed_seq: row.seq,
            round_running: false,
            cleaner_running: false,
            nothing_to_clean: false,
            died: false,
            unindexed_kills: 0,
            cleaned_oldest: false,
            paid: Paid::default(),
            copies_among_hot: false,
            segments,
            open: ByHeat::default(),
            closed: VecDeque::new(),
            in_memory: HashMap::new(),
            unflushed: false,
            is_untold: ByHeat::default(),
            used_bytes,
            index_bytes: row.index_bytes,
            index_cost: store.usage().bytes_used,
            unindexed_cost: 0,
            unindexed_bytes: 0,
            failed: None,
            counters: Counters::default(),
        };
        // What has been accepted must fit the space that the store keeps for removals.
        let usage = store.usage();
        let unindexed_bytes_max = (usage.log_bytes_max / 8).min(usage.bytes_max / 32);
        Rc::new(Self {
            inherited,
            unindexed_bytes_max,
            stripe_bytes: array.geometry().stripe_bytes,
            objects: Objects::new(store.clone(), &config, array.geometry().stripe_bytes),
            array,
            store,
            config,
            epoch,
            verifier: row.verifier,
            lives,
            state: RefCell::new(state),
            changed: Notify::default(),
            zeroes: zeroes(),
            scrubbed_bytes: Cell::new(0),
            repairs: RangeLocks::default(),
            group: reactor::current_group(),
            is_checked: Cell::new(true),
            observer: RefCell::default(),
        })
    }

    /// Discards stripes that the index does not know. When one of them was written that is noted before: declared anew
    /// it shows that again.
    async fn give_back_unindexed(&self, unindexed: Vec<(u32, Range<u32>)>) -> Result<(), LogError> {
        let places = unindexed.iter().flat_map(|(segment, places)| {
            places.clone().map(move |place| self.shows_a_stripe(*segment, place))
        });
        let is_noted = self.state.borrow().is_untold != ByHeat::default();
        if !is_noted && join_all(places).await.contains(&true) {
            let row = {
                let mut state = self.state.borrow_mut();
                state.must_tell();
                self.log_row(&state)
            };
            write_log_row(&self.store, &row, &self.lives).await?;
        }
        for (segment, places) in unindexed {
            let first = u64::from(segment) * u64::from(self.config.segment_stripes);
            let (start, count) = (first + u64::from(places.start), places.len() as u64);
            self.array.discard_stripes(start, count).await?;
        }
        Ok(())
    }

    /// Whether a stripe ends like one that was written; what cannot be read may be one.
    async fn shows_a_stripe(&self, segment: u32, stripe: u32) -> bool {
        let at = u64::from(segment) * u64::from(self.config.segment_stripes) + u64::from(stripe);
        if !self.array.is_written(at) {
            return false;
        }
        let end = self.array_offset(segment, stripe) + self.stripe_bytes;
        let into = BufMut::for_overwrite(BLOCK_BYTES as usize).into_vec();
        match self.array.read(end - BLOCK_BYTES, into).await {
            Ok(mut parts) => {
                let tail = parts.swap_remove(0).freeze();
                let footer = Footer::decode(&tail, self.stripe_bytes);
                footer.is_some_and(|footer| footer.order >= self.inherited)
            }
            Err(_) => true,
        }
    }

    /// Puts the staged changes into stripes, in their order.
    async fn put_staged(self: &Rc<Self>) -> Result<(), LogError> {
        if planted!("log-staged-not-replayed") {
            return Ok(());
        }
        for (key, value) in scan_all(&self.store, rows::STAGED).await? {
            let (header, taken) =
                RecordHeader::decode(&value).ok_or(LogError::Index { row: "staged" })?;
            let (object, _ready) = match self.room_for_staged(&header).await {
                // It concerns that object only. What is staged stays for whoever mends the row.
                Err(error @ LogError::Index { row: "object" | "extent" }) => {
                    tracing::error!(object = ?header.object, %error, "a staged change stays staged");
                    continue;
                }
                ready => ready?,
            };
            if header.kind == RecordKind::Data {
                let data = value.get(taken..).filter(|data| data.len() as u64 == header.len);
                let data = [Buf::copy_of(data.ok_or(LogError::Index { row: "staged" })?)];
                let mut payload = Payload::new(&data);
                let (offset, len) = (header.offset, header.len);
                self.put_records(&object, header.version, offset, len, &mut payload, None);
            } else if let Some(change) = change_of(&header) {
                let mut state = self.state.borrow_mut();
                self.put_mark_record(&mut state, &object, &header, change);
            }
            let cost = row_cost(key.len(), value.len());
            self.staged_already(StagedRow { key: key.to_vec(), cost });
        }
        Ok(())
    }

    /// Writes stripes, be they empty ones, where that is needed: their footers tell what was inherited, and so what was given
    /// back. One in each segment that is filled on, so that it is there as long as what shows again behind it.
    async fn tell_what_was_inherited(self: &Rc<Self>) -> Result<(), LogError> {
        let (hot, cold) = {
            let state = self.state.borrow();
            let is_new = !state.segments.is_open(Heat::Hot);
            (state.is_untold[Heat::Hot] || is_new, state.is_untold[Heat::Cold])
        };
        if !hot && !cold || planted!("log-inheritance-not-told") {
            return Ok(());
        }
        match self.room(Need::Staged).await {
            Ok(()) => {}
            // Then nothing is declared anew either, before the cleaner has made room.
            Err(LogError::Full) => return Ok(()),
            Err(error) => return Err(error),
        }
        for (heat, must_tell) in Heat::ALL.into_iter().zip([hot, cold]) {
            if must_tell {
                self.open_stripe(&mut self.state.borrow_mut(), heat);
            }
        }
        self.settle().await
    }

    /// The newest records came from this staged row, which goes when the last of them is
    /// indexed. A record may have been split: then only the last piece names the row, since the
    /// pieces are indexed in order.
    fn staged_already(&self, row: StagedRow) {
        let mut state = self.state.borrow_mut();
        state.unindexed_cost -= row.cost as i64;
        let open = state.open[Heat::Hot].as_mut().expect("a record was just put there");
        open.pending.last_mut().expect("a record was just put there").staged = Some(row);
        open.staged = open.pending.len();
        open.unstaged_bytes = 0;
    }
}
