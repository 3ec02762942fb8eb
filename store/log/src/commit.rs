//! COMMIT: makes changes durable, and brings the index up to date.
//!
//! One round at a time, shared by everybody who waits for it:
//!
//! 1. The cut. If somebody waits for a change in the open stripe, or the stripe begins with the
//!    rest of a change, it is closed when it holds much; else its new changes become *staged*
//!    rows.
//! 2. Wait until every closed stripe below the cut is written; flush the array.
//! 3. One batch: extent, object and segment rows of those stripes, the staged rows of the cut,
//!    the sequence; and the staged rows of changes that are now indexed go.
//! 4. The key-value store makes the batch durable: the one commit point.
//!
//! What always holds: a batch never indexes a stripe that the flush of its round, or of an
//! earlier one, has not covered; stripes are indexed in order; a batch holds all of a change or
//! nothing of it.
//!
//! After a crash a prefix of the batches is there. Each is consistent by itself, and the
//! stripes that the missing ones would have indexed are given back.

use crate::LogError;
use crate::extents::{Extent, Watch};
use crate::heat::{ByHeat, Heat};
use crate::log::{Inner, ObjectLog, State};
use crate::object::{Change, Object, View};
use crate::observe::IndexObserver;
use crate::rows::Mark;
use crate::rows::{self, LogRow, ObjectRow, SegmentRow};
use crate::segment::SegmentState;
use crate::space::SEGMENT_ROW_COST;
use crate::stripe::{StagedRow, header_of};
use crate::write::{OBJECT_ROW_BYTES, cost_of, extent_row_bytes, object_row_cost};
use levada_base::ids::{ObjectId, Seq};
use levada_base::reactor::spawn_in;
use levada_base::{Buf, planted, probe};
use levada_kv::{Batch, row_cost};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

impl ObjectLog {
    /// Makes every change up to `upto` durable (everything, when it is `Seq(u64::MAX)`), and
    /// returns up to where everything is durable now.
    ///
    /// # Errors
    ///
    /// When the log stopped before that.
    pub async fn commit(&self, upto: Seq) -> Result<Seq, LogError> {
        let upto = upto.0.min(self.0.state.borrow().seq);
        self.0.commit(upto).await?;
        Ok(self.durable())
    }

    /// Writes and indexes everything: after this a restart has nothing to do again.
    ///
    /// # Errors
    ///
    /// When the log stopped before that.
    pub async fn settle(&self) -> Result<(), LogError> {
        self.0.settle().await
    }
}

/// With no more free segments than these above the reserve, none is declared ahead.
const PREPARED_AHEAD: u32 = 2;

/// What one round makes durable.
struct Cut {
    /// Stripes below this order are indexed.
    order: u64,
    /// Up to which settling that was asked for this is it.
    settles: ByHeat<u64>,
    /// Changes up to here are durable after the round.
    seq: u64,
    /// Changes of the open stripe that go through the store.
    staged: Vec<(Vec<u8>, Staged)>,
}

struct Staged {
    header: Vec<u8>,
    data: Option<Buf>,
}

impl Inner {
    pub(crate) async fn commit(self: &Rc<Self>, upto: u64) -> Result<(), LogError> {
        {
            let mut state = self.state.borrow_mut();
            state.wanted_seq = state.wanted_seq.max(upto);
        }
        self.commit_if_needed();
        self.changed
            .until(|| {
                let state = self.state.borrow();
                if state.durable_seq >= upto {
                    return Some(Ok(()));
                }
                state.failed.clone().map(Err)
            })
            .await
    }

    pub(crate) async fn settle(self: &Rc<Self>) -> Result<(), LogError> {
        let seq = {
            let mut state = self.state.borrow_mut();
            state.copies_among_hot = false;
            state.wanted_seq = state.wanted_seq.max(state.seq);
            state.seq
        };
        self.settle_stripes(&Heat::ALL, seq).await
    }

    /// The same of what the cleaner copied alone.
    pub(crate) async fn settle_copies(self: &Rc<Self>) -> Result<(), LogError> {
        if self.state.borrow().copies_among_hot {
            return self.settle().await;
        }
        self.settle_stripes(&[Heat::Cold], 0).await
    }

    async fn settle_stripes(self: &Rc<Self>, heats: &[Heat], seq: u64) -> Result<(), LogError> {
        let wanted = {
            let mut state = self.state.borrow_mut();
            let is_open = heats.iter().any(|heat| state.open[*heat].is_some());
            if is_open || !state.closed.is_empty() || state.round_running {
                heats.iter().for_each(|heat| state.settles_wanted[*heat] += 1);
            }
            state.settles_wanted
        };
        self.commit_if_needed();
        self.changed
            .until(|| {
                let state = self.state.borrow();
                // Copies have no sequence of their own: theirs is the second condition.
                let is_settled = |heat: &Heat| state.settled[*heat] >= wanted[*heat];
                if state.durable_seq >= seq && heats.iter().all(is_settled) {
                    return Some(Ok(()));
                }
                state.failed.clone().map(Err)
            })
            .await
    }

    /// Starts rounds if somebody waits for one and none runs.
    pub(crate) fn commit_if_needed(self: &Rc<Self>) {
        let mut state = self.state.borrow_mut();
        if state.round_running || !self.wants_round(&state) {
            return;
        }
        state.round_running = true;
        let log = Rc::clone(self);
        spawn_in(&self.group, async move {
            loop {
                if let Err(error) = log.round().await {
                    log.fail(error);
                }
                let mut state = log.state.borrow_mut();
                if !log.wants_round(&state) {
                    state.round_running = false;
                    return;
                }
            }
        });
    }

    fn wants_round(&self, state: &State) -> bool {
        let closed_bytes: u64 = state.closed.iter().map(|stripe| stripe.batch_bytes).sum();
        // One stripe takes no more than half of it, so there are always several.
        let written = state.closed.len() as u64 >= self.unstable_stripes_max() / 2
            || closed_bytes > self.unindexed_bytes_max / 2
            // What is open may be much, too, and everybody waits.
            || state.unindexed_bytes > self.unindexed_bytes_max && closed_bytes > 0;
        let wanted = state.wanted_seq > state.durable_seq || state.settles_wanted != state.settled;
        // Only what is indexed lets go of its pages.
        let holds_too_much = self.holds_too_much(state);
        state.failed.is_none() && (wanted || written || holds_too_much)
    }

    async fn round(self: &Rc<Self>) -> Result<(), LogError> {
        let _busy = probe::busy("log commit");
        let cut = self.cut();
        let flush = self
            .changed
            .until(|| {
                let mut state = self.state.borrow_mut();
                if let Some(error) = &state.failed {
                    return Some(Err(error.clone()));
                }
                let order = cut.order;
                let mut below = state.closed.iter().take_while(|stripe| stripe.order < order);
                let written = below.all(|stripe| stripe.written);
                written.then(|| Ok(std::mem::replace(&mut state.unflushed, false)))
            })
            .await?;
        if flush && !planted!("log-flush-dropped") {
            self.array.flush().await?;
        }
        self.store.room_to_free().await?;
        let (seq, order, settles) = (cut.seq, cut.order, cut.settles);
        let told = self.told_below(order);
        let applied = self.index(cut)?;
        self.prepare_segment(told);
        if !planted!("log-commit-not-durable") {
            self.store.durable(applied).await?;
        }
        {
            let mut state = self.state.borrow_mut();
            state.durable_seq = state.durable_seq.max(seq);
            state.durable_order = order;
            state.settled = settles;
            state.counters.commits += 1;
        }
        self.free_dead_segments();
        self.changed.notify_all();
        Ok(())
    }

    fn cut(self: &Rc<Self>) -> Cut {
        let mut state = self.state.borrow_mut();
        let mut staged = Vec::new();
        let mut seq = state.closed_seq;
        let mut wanted = state.wanted_seq > state.closed_seq;
        let settles = state.settles_wanted;
        let must_close = |state: &State, heat| settles[heat] > state.settled[heat];
        // Copies need no staging: what they copy is durable where it was.
        if must_close(&state, Heat::Cold) {
            self.close_early(&mut state, Heat::Cold);
        }
        if let Some(open) = &state.open[Heat::Hot] {
            // A change is indexed whole: its rest goes along. Its beginning cannot wait, for the
            // stripe that holds it may begin with the rest of another change, and so on.
            wanted |= open.continues && open.staged == 0;
            let is_much = open.unstaged_bytes > self.config.stage_bytes_max;
            if must_close(&state, Heat::Hot) || wanted && is_much {
                self.close_early(&mut state, Heat::Hot);
                seq = state.closed_seq;
            } else if wanted {
                staged = stage(&mut state);
                seq = state.seq;
            }
        } else if wanted {
            // Whatever is wanted is in closed stripes.
            seq = state.seq;
        }
        Cut { order: state.next_order, settles, seq, staged }
    }

    /// Closes a stripe that is not full.
    fn close_early(self: &Rc<Self>, state: &mut State, heat: Heat) {
        if let Some(open) = &state.open[heat] {
            state.counters.padded_bytes += self.stripe_bytes - open.data().len() as u64;
            self.close_stripe(state, heat);
        }
    }

    /// Applies the batch of a round.
    fn index(&self, cut: Cut) -> Result<Seq, LogError> {
        let mut state = self.state.borrow_mut();
        let mut batch = Batch::default();
        let observer = self.observer.borrow().clone();
        let mut watch = WatchIndex { observer, ..WatchIndex::default() };
        let mut unstaged_cost = 0;
        // Until the store has the rows.
        let mut held = Vec::new();
        // The store counts more while it has not replaced rows by newer ones, and less when it has.
        state.index_cost = state.index_cost.min(self.store.usage().bytes_used);
        while state.closed.front().is_some_and(|stripe| stripe.order < cut.order) {
            let stripe = state.closed.pop_front().expect("looked at above");
            // It is flushed, and its footer tells.
            state.is_untold[stripe.heat] = false;
            state.unindexed_bytes -= stripe.batch_bytes;
            let row = &mut state.segments.get_mut(stripe.segment).row;
            row.indexed_stripes = stripe.index + 1;
            for pending in stripe.pending {
                if let Some(row) = &pending.staged {
                    batch.delete(&row.key);
                    unstaged_cost += row.cost as i64;
                }
                row.marks += u64::from(pending.change.is_mark());
                watch.change(&pending.object, pending.version, &pending.change, stripe.segment);
                held.push(pending.held);
            }
            watch.segments.entry(stripe.segment).or_default();
            state.unindexed_kills -= u64::from(stripe.kills);
            state.indexed_order = stripe.order + 1;
        }
        for (key, staged) in cut.staged {
            let mut value = staged.header;
            if let Some(data) = staged.data {
                value.extend_from_slice(&data);
            }
            state.counters.staged_bytes += value.len() as u64;
            state.index_changed(row_cost(key.len(), value.len()) as i64);
            if !planted!("log-staged-row-left-out") {
                batch.put(&key, &value);
            }
        }
        watch.rows(&mut batch);
        for (segment, change) in &watch.segments {
            let row = &mut state.segments.get_mut(*segment).row;
            row.live_bytes = row.live_bytes.checked_add_signed(change.live).expect("live bytes");
            row.outdated_min = row.outdated_min.min(change.outdated_min);
            // Rows from before it was counted count from 0.
            row.sizes = row.sizes.saturating_add_signed(change.sizes);
            batch.put(&SegmentRow::key(*segment), &row.encode());
        }
        state.index_changed(watch.index_cost - unstaged_cost);
        let all = state.closed.is_empty() && state.open.iter().all(Option::is_none);
        debug_assert!(!all || state.unindexed_cost == 0, "{} at rest", state.unindexed_cost);
        let changed = watch.index_bytes;
        state.index_bytes = state.index_bytes.checked_add_signed(changed).expect("index bytes");
        if watch.died {
            state.nothing_to_clean = false;
            state.died = true;
        }
        let indexed_seq = state.indexed_seq.max(cut.seq);
        batch.put(rows::LOG_KEY, &LogRow { indexed_seq, ..self.log_row(&state) }.encode());
        let applied = self.store.apply(batch)?;
        // Not before: another task may write the log's row when this batch was refused.
        state.indexed_seq = indexed_seq;
        for segment in watch.segments.keys() {
            state.segments.get_mut(*segment).changed_by = applied;
        }
        Ok(applied)
    }

    pub(crate) fn log_row(&self, state: &State) -> LogRow {
        LogRow {
            fs: self.config.fs,
            target: self.config.target.0,
            segment_stripes: self.config.segment_stripes,
            epoch: self.epoch,
            stripe_bytes: self.stripe_bytes,
            stripes: u64::from(state.segments.count()) * u64::from(self.config.segment_stripes),
            next_generation: state.segments.next_generation,
            seq: state.seq,
            index_bytes: state.index_bytes,
            indexed_seq: state.indexed_seq,
            verifier: self.verifier,
            is_untold: Heat::ALL.iter().any(|heat| state.is_untold[*heat]),
            indexed_order: Some(state.indexed_order),
        }
    }

    /// The segment that the newest stripe below an order told of as the next to be used, if that is so still: no other
    /// segment was begun since.
    fn told_below(&self, order: u64) -> Option<u32> {
        let state = self.state.borrow();
        let stripe = state.closed.iter().rev().find(|stripe| stripe.order < order)?;
        let (told, begun) = stripe.told;
        told.filter(|_| state.segments.begun() == begun)
    }

    /// Declares the segment that is used next, of which a flushed footer tells, so that no stripe waits for that; not
    /// where free ones are few.
    fn prepare_segment(self: &Rc<Self>, told: Option<u32>) {
        let mut state = self.state.borrow_mut();
        let is_plenty = state.segments.free_count() > self.config.reserve_segments + PREPARED_AHEAD;
        let Some(segment) = told.filter(|_| is_plenty) else { return };
        if !state.segments.prepare(segment) {
            return;
        }
        let log = Rc::clone(self);
        spawn_in(&self.group, async move {
            if let Err(error) = log.make_ready(segment, 0).await {
                log.fail(error);
            }
        });
    }

    /// Gives back segments in which nothing is live, once the batch that emptied them is durable: a round
    /// may be under way that has applied its batch, and a power cut would bring back rows of what is gone.
    pub(crate) fn free_dead_segments(self: &Rc<Self>) {
        let durable = self.store.durable_seq();
        let mut state = self.state.borrow_mut();
        let dead: Vec<u32> = state
            .segments
            .iter()
            .filter(|(_, segment)| segment.is_dead() && segment.changed_by <= durable)
            .map(|(at, _)| at)
            .collect();
        for segment in dead {
            state.segments.get_mut(segment).state = SegmentState::Freeing;
            let log = Rc::clone(self);
            spawn_in(&self.group, async move {
                if let Err(error) = log.free(segment).await {
                    log.fail(error);
                }
            });
        }
    }

    async fn free(self: &Rc<Self>, segment: u32) -> Result<(), LogError> {
        self.changed
            .until(|| {
                let readers = self.state.borrow().segments.get(segment).readers.get();
                (readers == 0).then_some(())
            })
            .await;
        // The one step that cannot be taken back: rather end here than discard what a power cut
        // would bring back.
        let emptied_by = self.state.borrow().segments.get(segment).changed_by;
        assert!(emptied_by <= self.store.durable_seq(), "segment {segment} is not durably dead");
        let stripes = u64::from(self.config.segment_stripes);
        self.array.discard_stripes(u64::from(segment) * stripes, stripes).await?;
        self.store.room_to_free().await?;
        // Lost in a crash, this is simply done again. Not after it was declared anew: then its row would
        // tell of what it held.
        let mut batch = Batch::default();
        batch.delete(&SegmentRow::key(segment));
        let gone = self.store.apply(batch)?;
        {
            let mut state = self.state.borrow_mut();
            state.index_cost = state.index_cost.saturating_sub(SEGMENT_ROW_COST);
        }
        self.store.durable(gone).await?;
        {
            let mut state = self.state.borrow_mut();
            state.segments.freed(segment);
            state.nothing_to_clean = false;
            state.counters.freed_segments += 1;
        }
        self.changed.notify_all();
        Ok(())
    }
}

/// Takes what must be staged of the open stripe.
fn stage(state: &mut State) -> Vec<(Vec<u8>, Staged)> {
    let Some(mut open) = state.open[Heat::Hot].take() else { return Vec::new() };
    let mut staged = Vec::new();
    let data = open.data().clone();
    for pending in &mut open.pending[open.staged..] {
        if pending.staged.is_some() {
            continue;
        }
        let header = header_of(&pending.object, pending.version, &pending.change);
        let Some(header) = header else { continue };
        let key = rows::staged_key(pending.version, header.offset);
        let mut bytes = Vec::new();
        header.encode(&mut bytes);
        let data = match &pending.change {
            Change::Write(record) => {
                Some(data.slice(record.place.at as usize, record.stored as usize))
            }
            _ => None,
        };
        let stored = data.as_ref().map_or(0, |data| data.len());
        let cost = row_cost(key.len(), bytes.len() + stored);
        pending.staged = Some(StagedRow { key: key.clone(), cost });
        staged.push((key, Staged { header: bytes, data }));
    }
    open.staged = open.pending.len();
    open.unstaged_bytes = 0;
    state.open[Heat::Hot] = Some(open);
    staged
}

/// What indexing changes of a segment's row.
#[derive(Clone, Copy)]
pub(crate) struct SegmentChange {
    /// Change of the live bytes.
    pub live: i64,
    /// See [`SegmentRow::outdated_min`].
    pub outdated_min: u64,
    /// Change of the records that carry a size.
    pub sizes: i64,
}

impl Default for SegmentChange {
    fn default() -> Self {
        Self { live: 0, outdated_min: u64::MAX, sizes: 0 }
    }
}

/// Collects what indexing changes.
#[derive(Default)]
pub(crate) struct WatchIndex {
    /// Objects that changed, and the offsets at which an extent came or went.
    objects: BTreeMap<ObjectId, (Rc<Object>, bool, BTreeSet<u64>)>,
    pub segments: BTreeMap<u32, SegmentChange>,
    pub index_bytes: i64,
    /// What that costs the store.
    pub index_cost: i64,
    /// Something died, other than by being copied: the cleaner may find work.
    pub died: bool,
    touched: Vec<u64>,
    /// Of the change being applied: extents left the map.
    removed: bool,
    /// And its object, while it is applied.
    object: Option<ObjectId>,
    observer: Option<Rc<dyn IndexObserver>>,
}

impl WatchIndex {
    /// Applies a change, whose record is in `segment`, to the indexed view of its object.
    pub fn change(&mut self, object: &Rc<Object>, version: u64, change: &Change, segment: u32) {
        let mut indexed = object.indexed.borrow_mut();
        let (existed, mark) = (indexed.exists, indexed.mark);
        self.index_cost -= object_row_cost(&indexed);
        self.removed = false;
        self.object = Some(object.id);
        indexed.apply(version, change, segment, self);
        let exists = indexed.exists;
        self.index_cost += object_row_cost(&indexed);
        self.died |= change.kills(self.removed);
        match (existed, exists) {
            (false, true) => self.index_bytes += OBJECT_ROW_BYTES as i64,
            (true, false) => self.index_bytes -= OBJECT_ROW_BYTES as i64,
            (true, true) | (false, false) => {}
        }
        let touched = std::mem::take(&mut self.touched);
        debug_assert!(touched.iter().all(|offset| object.knows(*offset, offset + 1)));
        let row_changed = match change {
            Change::Write(_) | Change::Truncate { .. } | Change::Punch { .. } | Change::Delete => {
                true
            }
            Change::Keep { .. } => indexed.mark != mark,
            Change::Relocate { .. } => false,
        };
        if is_dead_on_arrival(&indexed, version, change) {
            probe::count("copies dead on arrival", 1);
            let segment = self.segments.entry(segment).or_default();
            segment.outdated_min = segment.outdated_min.min(version);
        }
        if row_changed || !touched.is_empty() {
            let slot = self
                .objects
                .entry(object.id)
                .or_insert_with(|| (Rc::clone(object), false, BTreeSet::new()));
            slot.1 |= row_changed;
            slot.2.extend(touched);
            if let Some(observer) = &self.observer {
                observer.changed(object.id, existed, exists);
            }
        }
    }

    fn observed(&self) -> Option<(&dyn IndexObserver, ObjectId)> {
        self.observer.as_deref().zip(self.object)
    }

    /// The rows as they are after all changes.
    pub fn rows(&self, batch: &mut Batch) {
        for (id, (object, row_changed, offsets)) in &self.objects {
            let indexed = object.indexed.borrow();
            if *row_changed {
                let key = ObjectRow::key(*id);
                if indexed.exists {
                    batch.put(&key, &indexed.row().encode());
                } else {
                    batch.delete(&key);
                }
            }
            for offset in offsets {
                let key = rows::extent_key(*id, *offset);
                match indexed.extents.get(*offset) {
                    Some(extent) => batch.put(&key, &rows::encode_extent(*offset, extent)),
                    None => batch.delete(&key),
                }
            }
        }
    }
}

/// True when a copy holds what was true when it was made, and is not any more: a change in another stripe, indexed
/// before it, wrote over some of it, or took its place as what carries the size.
fn is_dead_on_arrival(indexed: &View, version: u64, change: &Change) -> bool {
    match change {
        Change::Relocate { to, .. } => {
            let (from, end) = (to.offset, to.offset + u64::from(to.stored));
            let pieces = indexed.extents.overlapping(from, end);
            let live = pieces.filter(|(_, extent)| extent.record.place == to.place);
            live.map(|(_, extent)| extent.len).sum::<u64>() < u64::from(to.stored)
        }
        Change::Keep { carries_size } => *carries_size && indexed.mark.version != version,
        Change::Write(_) | Change::Truncate { .. } | Change::Punch { .. } | Change::Delete => false,
    }
}

impl Watch for WatchIndex {
    fn removed(&mut self, offset: u64, extent: &Extent) {
        let segment = self.segments.entry(extent.record.place.segment).or_default();
        segment.live -= extent.footprint() as i64;
        segment.outdated_min = segment.outdated_min.min(extent.record.version);
        self.index_bytes -= extent_row_bytes(offset, extent) as i64;
        self.index_cost -= cost_of(offset, extent);
        self.removed = true;
        self.touched.push(offset);
        if let Some((observer, object)) = self.observed() {
            observer.removed(object, offset, extent);
        }
    }

    fn added(&mut self, offset: u64, extent: &Extent) {
        self.segments.entry(extent.record.place.segment).or_default().live +=
            extent.footprint() as i64;
        self.index_bytes += extent_row_bytes(offset, extent) as i64;
        self.index_cost += cost_of(offset, extent);
        self.touched.push(offset);
        if let Some((observer, object)) = self.observed() {
            observer.added(object, offset, extent);
        }
    }

    fn mark_moved(&mut self, from: Mark, to: Mark) {
        if let Some(segment) = from.segment {
            let segment = self.segments.entry(segment).or_default();
            segment.outdated_min = segment.outdated_min.min(from.version);
            segment.sizes -= 1;
        }
        if let Some(segment) = to.segment {
            self.segments.entry(segment).or_default().sizes += 1;
        }
        if let Some((observer, object)) = self.observed() {
            observer.mark_moved(object, from, to);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extents::{Place, Record};
    use levada_base::ids::Ino;

    fn record(version: u64, offset: u64, len: u64, segment: u32) -> Rc<Record> {
        let place = Place { segment, stripe: 0, at: 0 };
        let crcs = vec![0].into();
        Rc::new(Record { place, version, offset, stored: len as u32, first_block: 0, crcs })
    }

    /// Copies that come to the index behind what took their place: a segment that holds such a one holds something
    /// outdated, and what hides it must stay.
    #[test]
    fn copies_that_are_dead_on_arrival_are_outdated() {
        let id = ObjectId { fs: 1, ino: Ino(2), component: 0, version: 0 };
        let (object, mut watch) = (Object::unknown(id), WatchIndex::default());
        let (old, copy) = (record(3, 0, 100, 1), record(3, 0, 100, 8));
        let mut change = |version, change, segment| {
            watch.change(&object, version, &change, segment);
            watch.segments.get(&segment).map_or(u64::MAX, |change| change.outdated_min)
        };
        change(3, Change::Write(Rc::clone(&old)), 1);
        assert_eq!(change(4, Change::Truncate { size: 200 }, 1), u64::MAX);
        let from: Rc<[Place]> = [old.place].into();
        let relocate = |to| Change::Relocate { from: Rc::clone(&from), to };
        // All of it is still true.
        assert_eq!(change(3, relocate(record(3, 60, 40, 7)), 7), u64::MAX);
        change(10, Change::Write(record(10, 40, 10, 2)), 2);
        assert_eq!(change(3, relocate(copy), 8), 3);
        change(11, Change::Truncate { size: 300 }, 2);
        assert_eq!(change(4, Change::Keep { carries_size: true }, 9), 4);
        assert_eq!(change(11, Change::Keep { carries_size: true }, 10), u64::MAX);
    }
}
