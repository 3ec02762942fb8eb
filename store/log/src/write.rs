//! Changes: where they wait for room, and how their records get into the open stripe.
//!
//! A change waits first and is then put in place without waiting: it gets its sequence, its
//! records go into the open stripe (and into new ones as that fills up), and the object's view
//! changes, all in one step that no other task sees half done.

use crate::LogError;
use crate::cuts::CUTS_MAX;
use crate::extents::{Extent, Place, Record, Watch, footprint};
use crate::format::{Footer, RecordHeader, RecordKind, blocks_of};
use crate::heat::Heat;
use crate::load::Way;
use crate::log::{Ack, Inner, ObjectLog, Stability, State};
use crate::object::{Change, Object, View};
use crate::pages::{Held, Search, memory_bytes};
use crate::rows::{Mark, SegmentRow};
use crate::space::SEGMENT_ROW_COST;
use crate::stripe::{ClosedStripe, OpenStripe, Payload, Pending, header_of};
use levada_base::buf::bytes_in;
use levada_base::ids::{ObjectId, Seq};
use levada_base::reactor::spawn_in;
use levada_base::units::BLOCK_BYTES;
use levada_base::{Buf, IoVec, probe};
use levada_kv::{Batch, KvError, row_cost};
use levada_raid::IoClass;
use std::ops::Range;
use std::rc::Rc;

/// Who asks for stripes: those who free space may go deeper into the reserve.
#[derive(Clone, Copy)]
pub(crate) enum Need<'a> {
    /// New data for these bytes of the object.
    Data { object: &'a Object, from: u64, to: u64 },
    /// The same, and an earlier life of the log accepted it.
    Again { object: &'a Object, from: u64, to: u64 },
    /// A truncation, a hole or a deletion.
    Mark,
    /// A copy made by the cleaner, which does not wait for itself.
    Copy,
    /// A staged change, when a log is opened: it was accepted before.
    Staged,
}

impl<'a> Need<'a> {
    fn of_data(object: &'a Object, from: u64, to: u64, stability: Stability) -> Self {
        match stability {
            Stability::Unstable | Stability::Durable => Self::Data { object, from, to },
            Stability::Again => Self::Again { object, from, to },
        }
    }

    /// A hole needs no more than any mark, unless it adds to the index: an object, or one extent more than there
    /// were. Then it needs what writing over those bytes would, so that holes cannot fill a full log.
    fn of_hole(object: &'a Object, from: u64, to: u64, grows: bool, stability: Stability) -> Self {
        let now = object.now.borrow();
        let cut = now.extents.overlapping(from, to).next();
        if !now.exists && grows {
            Self::of_data(object, to, to, stability)
        } else if cut.is_some_and(|(offset, extent)| offset < from && to < offset + extent.len) {
            Self::of_data(object, from, to, stability)
        } else {
            Self::Mark
        }
    }
}

/// Keeps in memory what a change needs.
pub(crate) enum Ready {
    Held(#[allow(dead_code, reason = "it is there to be dropped")] Held),
    Found(Rc<Search>),
}

/// See [`Inner::window_bytes`].
const WINDOW_PAGES: u64 = 8;
/// New stripes that putting one change in place may take.
pub(crate) const STRIPES_PER_CHANGE: u64 = 3;
/// So often a change waits for what has died to help, which others' deletions of little may go on to promise.
const SETTLES_MAX: u32 = 64;

impl ObjectLog {
    /// Writes `data` at `offset`; creates the object. A write larger than [`Config::whole_bytes_max`] may be several
    /// changes, of which the last one's sequence is returned: a crash may keep the first of them. Readers and other writers see
    /// all of it or nothing, as long as it is smaller than a stripe. Bytes that replace others need no room of their own.
    ///
    /// [`Config::whole_bytes_max`]: crate::Config::whole_bytes_max
    ///
    /// # Errors
    ///
    /// [`LogError::Full`]; part of a large write may have happened. Or when the log stopped.
    pub async fn write(
        &self,
        object: ObjectId,
        offset: u64,
        data: IoVec,
        stability: Stability,
    ) -> Result<Ack, LogError> {
        let log = &self.0;
        let bytes = bytes_in(&data);
        // Room for holes that end one past the last byte.
        if offset.checked_add(bytes).is_none_or(|end| end > i64::MAX as u64) {
            return Err(LogError::OutOfRange { offset, bytes });
        }
        let object = log.objects.get(object).await?;
        let mut payload = Payload::new(&data);
        let mut done = 0;
        let mut seq = 0;
        while done < bytes || bytes == 0 {
            let run = (bytes - done).min(log.stripe_bytes - BLOCK_BYTES);
            let from = offset + done;
            let _held = log.objects.load_to_change(&object, from, from + run).await?;
            let to = log.step(&object, from, from + run);
            let run = to - from;
            log.room(Need::of_data(&object, from, to, stability)).await?;
            if object.unknown_edge(from, to).is_some() {
                // What came while it waited reaches further.
                continue;
            }
            seq = if bytes == 0 && !object.now.borrow().exists {
                // Nothing but the existence of an object.
                log.put_mark(&object, Change::Truncate { size: 0 })
            } else if bytes == 0 {
                log.state.borrow().seq
            } else {
                log.put_run(&object, from, run, &mut payload)
            };
            done += run;
            if bytes == 0 {
                break;
            }
        }
        log.acknowledge(seq, stability).await
    }

    /// Sets the size exactly; bytes beyond read as zeroes when it grows again. Creates the
    /// object.
    ///
    /// # Errors
    ///
    /// As [`ObjectLog::write`].
    pub async fn truncate(
        &self,
        object: ObjectId,
        size: u64,
        stability: Stability,
    ) -> Result<Ack, LogError> {
        if size > i64::MAX as u64 {
            return Err(LogError::OutOfRange { offset: size, bytes: 0 });
        }
        let log = &self.0;
        let object = log.objects.get(object).await?;
        let _known = log.cut_long_tail(&object, size).await?;
        let seq = log.put_mark(&object, Change::Truncate { size });
        log.acknowledge(seq, stability).await
    }

    /// Makes a hole. The size stays; or, when it `grows`, zeroes are as good as written: the object is
    /// made if there is none, and reaches the end of the hole, which may be empty.
    ///
    /// # Errors
    ///
    /// [`LogError::NoSuchObject`] when it does not grow, and as [`ObjectLog::write`]: a hole in the middle of
    /// an extent takes room for what describes the two halves.
    pub async fn punch(
        &self,
        object: ObjectId,
        offset: u64,
        bytes: u64,
        grows: bool,
        stability: Stability,
    ) -> Result<Ack, LogError> {
        let end = offset.checked_add(bytes).filter(|end| *end <= i64::MAX as u64);
        let end = end.ok_or(LogError::OutOfRange { offset, bytes })?;
        let log = &self.0;
        let object = log.objects.get(object).await?;
        let mut from = offset;
        let seq = loop {
            let extents_max = log.extents_per_change();
            let known = log.objects.search(&object, from, end, Way::Up, extents_max).await?;
            let need = || Need::of_hole(&object, from, end, grows, stability);
            let asked = need();
            log.room(asked).await?;
            // While it waited another write may have made one extent of several.
            if !known.is_sound() || matches!(asked, Need::Mark) && !matches!(need(), Need::Mark) {
                continue;
            }
            let to = log.step(&object, from, known.passed.borrow().end);
            let size = {
                let now = object.now.borrow();
                if !now.exists && !grows {
                    return Err(LogError::NoSuchObject);
                }
                if grows { now.size.max(to) } else { now.size }
            };
            let seq = log.put_mark(&object, Change::Punch { from, to, size });
            if to == end {
                break seq;
            }
            from = to;
        };
        log.acknowledge(seq, stability).await
    }

    /// Removes the object; durable when it returns. Fine when there is none.
    ///
    /// # Errors
    ///
    /// When the log stopped.
    pub async fn delete(&self, object: ObjectId) -> Result<Ack, LogError> {
        let log = &self.0;
        let object = log.objects.get(object).await?;
        let known = log.cut_long_tail(&object, 0).await?;
        let exists = object.now.borrow().exists;
        let seq =
            if exists { log.put_mark(&object, Change::Delete) } else { log.state.borrow().seq };
        drop((known, object));
        log.acknowledge(seq, Stability::Durable).await
    }
}

impl Inner {
    async fn acknowledge(self: &Rc<Self>, seq: u64, stability: Stability) -> Result<Ack, LogError> {
        if stability == Stability::Durable {
            self.commit(seq).await?;
        }
        Ok(Ack { seq: Seq(seq), durable: Seq(self.state.borrow().durable_seq) })
    }

    /// Puts data in place for which there is room, and gives the sequence of its last change. Without a wait between them:
    /// were there another's change between, one that is durable, the first of these would go over it when the client, who
    /// knows the last sequence only, sends all of them again.
    fn put_run(
        self: &Rc<Self>,
        object: &Rc<Object>,
        offset: u64,
        bytes: u64,
        payload: &mut Payload,
    ) -> u64 {
        let mut done = 0;
        loop {
            let part = self.in_one_stripe(offset + done, bytes - done);
            let seq = self.put_data(object, offset + done, part, payload);
            done += part;
            if done == bytes {
                return seq;
            }
        }
    }

    /// How much of a write becomes one change: of a large one what the open stripe still takes. So no stripe begins
    /// with the rest of one, which a round would have to close however empty it is, as a change is indexed whole.
    fn in_one_stripe(self: &Rc<Self>, offset: u64, bytes: u64) -> u64 {
        if bytes <= self.config.whole_bytes_max {
            return bytes;
        }
        let mut state = self.state.borrow_mut();
        let stripe = self.open_stripe(&mut state, Heat::Hot);
        let fit = |bytes: u64| stripe.fit(bytes, (offset | bytes).is_multiple_of(BLOCK_BYTES));
        // What is cut to whole blocks is laid on whole blocks, where one fewer may fit.
        match fit(bytes) {
            0 => bytes,
            fits => match fit(fits) {
                0 => fits,
                fits => fits,
            },
        }
    }

    /// How far from `from` towards `to` one change may reach.
    fn step(&self, object: &Object, from: u64, to: u64) -> u64 {
        let now = object.now.borrow();
        let beyond = now.extents.overlapping(from, to).nth(self.extents_per_change());
        beyond.map_or(to, |(offset, _)| offset)
    }

    /// Cuts an object with very many extents in steps, until one change can do the rest: what that needs is in memory
    /// then, and there is room for it. Each step is a truncation of its own; a crash leaves a longer object than
    /// was asked for.
    async fn cut_long_tail(
        self: &Rc<Self>,
        object: &Rc<Object>,
        size: u64,
    ) -> Result<Rc<Search>, LogError> {
        let extents_max = self.extents_per_change();
        loop {
            let search =
                self.objects.search(object, size, u64::MAX, Way::Down, extents_max).await?;
            self.room(Need::Mark).await?;
            if !search.is_sound() {
                continue;
            }
            let cut = {
                let now = object.now.borrow();
                let from = search.passed.borrow().start;
                let too_many = now.extents.starts(from).rev().nth(extents_max);
                // Nothing lies behind the size, which another truncation may have set meanwhile.
                too_many.unwrap_or(from).min(now.size)
            };
            if cut <= size {
                return Ok(search);
            }
            self.put_mark(object, Change::Truncate { size: cut });
        }
    }

    /// Waits until a staged change can be put in place again, and what it changes is in memory.
    pub(crate) async fn room_for_staged(
        self: &Rc<Self>,
        header: &RecordHeader,
    ) -> Result<(Rc<Object>, Ready), LogError> {
        let object = self.objects.get(header.object).await?;
        let (from, to) = match header.kind {
            RecordKind::Data | RecordKind::Punch => (header.offset, header.offset + header.len),
            RecordKind::Truncate => (header.size, u64::MAX),
            RecordKind::Delete => (0, u64::MAX),
        };
        loop {
            let ready = if header.kind == RecordKind::Data {
                Ready::Held(self.objects.load_to_change(&object, from, to).await?)
            } else {
                let all = usize::MAX;
                Ready::Found(self.objects.search(&object, from, to, Way::Down, all).await?)
            };
            self.room(Need::Staged).await?;
            let is_ready = match &ready {
                Ready::Held(_) => object.unknown_edge(from, to).is_none(),
                Ready::Found(search) => search.is_sound(),
            };
            if is_ready {
                return Ok((object, ready));
            }
        }
    }

    /// Changes in closed stripes hold pages that the cache has no room for.
    pub(crate) fn holds_too_much(&self, state: &State) -> bool {
        !state.closed.is_empty() && self.objects.is_overdue()
    }

    /// Bytes of an object that are looked at in one go, where all of it is.
    pub(crate) fn window_bytes(&self) -> u64 {
        self.config.page_bytes.saturating_mul(WINDOW_PAGES)
    }

    fn reserve(&self, need: Need<'_>) -> u32 {
        match need {
            Need::Data { .. } => self.config.reserve_segments,
            // What is left is enough to empty one segment into another.
            Need::Again { .. } => self.config.reserve_segments.div_ceil(2),
            Need::Mark => self.config.reserve_segments.min(1),
            Need::Copy | Need::Staged => 0,
        }
    }

    /// Waits until one change can be put in place: stripes to write to, and memory.
    pub(crate) async fn room(self: &Rc<Self>, need: Need<'_>) -> Result<(), LogError> {
        let mut settles = 0;
        loop {
            // Again after every wait: others may have been let in by the same room meanwhile.
            self.index_room(need).await?;
            let changed = self.changed.changed();
            let mut must_settle = false;
            let short_of_stripes = {
                let state = self.state.borrow();
                if let Some(error) = &state.failed {
                    return Err(error.clone());
                }
                match need {
                    Need::Data { object, from, to } => {
                        if !fits(self.unused_bytes(&state, self.reserve(need)), object, from, to) {
                            return Err(LogError::Full);
                        }
                    }
                    // It was acknowledged in an earlier life, when less may have been held against it.
                    Need::Again { object, from, to } => {
                        let capacity = self.capacity_bytes(&state, self.reserve(need));
                        let free = capacity.saturating_sub(state.used_bytes + state.mark_bytes);
                        if !fits(free, object, from, to) {
                            return Err(LogError::Full);
                        }
                    }
                    Need::Mark | Need::Copy | Need::Staged => {}
                }
                let heat = if matches!(need, Need::Copy) {
                    self.heat_of_copies(&state)
                } else {
                    Heat::Hot
                };
                let stripes = state.segments.stripes_available(heat, self.reserve(need));
                let short_of_stripes = stripes < STRIPES_PER_CHANGE;
                if short_of_stripes {
                    let is_hopeless = state.is_hopeless();
                    // The cleaner finds only what the index knows to be dead.
                    must_settle =
                        is_hopeless && state.has_unindexed_deaths() && settles < SETTLES_MAX;
                    if matches!(need, Need::Copy) || is_hopeless && !must_settle {
                        return Err(LogError::Full);
                    }
                } else if state.in_memory.len() < self.config.stripes_in_flight
                    && state.unstable_stripes() < self.unstable_stripes_max()
                    && state.unindexed_bytes <= self.unindexed_bytes_max
                    && !self.holds_too_much(&state)
                {
                    break;
                }
                short_of_stripes
            };
            if must_settle {
                settles += 1;
                self.settle().await?;
                continue;
            }
            self.commit_if_needed();
            if short_of_stripes {
                self.free_dead_segments();
            }
            self.clean_if_needed();
            changed.await;
        }
        self.clean_if_needed();
        Ok(())
    }

    /// Waits until the index has room. What was deleted may still have its rows there, and nothing else may
    /// ever come that closes the stripe which holds the deletions: a full index is settled before that is
    /// told to anybody.
    async fn index_room(self: &Rc<Self>, need: Need<'_>) -> Result<(), LogError> {
        let mut has_settled = false;
        loop {
            let room = match need {
                Need::Data { .. } => self.store.room().await,
                Need::Again { .. } => self.store.room_to_repeat().await,
                Need::Mark | Need::Copy | Need::Staged => Ok(()),
            };
            match room {
                Ok(()) => {}
                Err(KvError::Full) => self.index_cost_is_exact(),
                Err(error) => return Err(error.into()),
            }
            {
                let state = self.state.borrow();
                let is_new = matches!(need, Need::Data { .. });
                // What is on its way into the index counts too, or new data would take what is kept for the rest.
                let is_left = self.index_left(&state) > 0;
                if room.is_ok() && (is_left || !is_new) {
                    return Ok(());
                }
                // Unless something has died since, as `space` shows.
                if has_settled && !(is_new && is_left && state.has_unindexed_deaths()) {
                    return Err(LogError::Full);
                }
            }
            self.settle().await?;
            has_settled = true;
        }
    }

    /// Puts `bytes` bytes of the payload in place as one change; [`Inner::room`] came before.
    fn put_data(
        self: &Rc<Self>,
        object: &Rc<Object>,
        offset: u64,
        bytes: u64,
        payload: &mut Payload,
    ) -> u64 {
        let version = self.state.borrow().seq + 1;
        self.put_records(object, version, offset, bytes, payload, None);
        self.state.borrow_mut().seq = version;
        self.objects.shrink();
        version
    }

    /// Puts data in place, as new data or as the copy of what is at these places.
    pub(crate) fn put_records(
        self: &Rc<Self>,
        object: &Rc<Object>,
        version: u64,
        offset: u64,
        bytes: u64,
        payload: &mut Payload,
        from: Option<&Rc<[Place]>>,
    ) {
        let mut state = self.state.borrow_mut();
        let aligned = (offset | bytes).is_multiple_of(BLOCK_BYTES);
        let heat = from.map_or(Heat::Hot, |_| self.heat_of_copies(&state));
        match from {
            Some(_) => {
                state.counters.cleaned_bytes += bytes;
                state.copies_among_hot |= heat == Heat::Hot;
            }
            None => state.counters.written_bytes += footprint(bytes),
        }
        let mut done = 0;
        while done < bytes {
            let stripe = self.open_stripe(&mut state, heat);
            stripe.continues |= done > 0 && stripe.pending.is_empty();
            let stored = stripe.fit(bytes - done, aligned);
            if stored == 0 {
                self.close_stripe(&mut state, heat);
                continue;
            }
            let header = RecordHeader {
                kind: RecordKind::Data,
                object: object.id,
                version,
                offset: offset + done,
                len: stored,
                size: 0,
                data_at: 0,
                stored: stored as u32,
                crcs: Vec::with_capacity(blocks_of(stored) as usize),
            };
            let record = stripe.push_data(header, aligned, payload);
            let change = match from {
                None => Change::Write(record),
                Some(from) => Change::Relocate { from: Rc::clone(from), to: record },
            };
            self.put_change(&mut state, heat, object, version, change);
            done += stored;
        }
    }

    /// Puts a change without data in place.
    pub(crate) fn put_mark(self: &Rc<Self>, object: &Rc<Object>, change: Change) -> u64 {
        let mut state = self.state.borrow_mut();
        let version = state.seq + 1;
        let header = header_of(object, version, &change).expect("a change of its own");
        self.put_mark_record(&mut state, object, &header, change);
        state.seq = version;
        version
    }

    /// Puts a record without data in place: a new one, or one that the cleaner keeps. True when it is
    /// outdated: kept for what it hides only, and to be hidden itself by later ones.
    pub(crate) fn put_mark_record(
        self: &Rc<Self>,
        state: &mut State,
        object: &Rc<Object>,
        header: &RecordHeader,
        change: Change,
    ) -> bool {
        let is_copy = matches!(change, Change::Keep { .. });
        let heat = if is_copy { self.heat_of_copies(state) } else { Heat::Hot };
        state.copies_among_hot |= is_copy && heat == Heat::Hot;
        if !self.open_stripe(state, heat).fits_mark() {
            self.close_stripe(state, heat);
        }
        let stripe = self.open_stripe(state, heat);
        stripe.push_mark(header);
        let segment = stripe.segment;
        // One that carries its object's size is true until a later one takes its place.
        let is_outdated = matches!(change, Change::Keep { carries_size: false })
            && header.kind != RecordKind::Delete;
        if is_outdated {
            let row = &mut state.segments.get_mut(segment).row;
            row.outdated_min = row.outdated_min.min(header.version);
        }
        state.mark_bytes += footprint(0);
        self.put_change(state, heat, object, header.version, change);
        is_outdated
    }

    /// A change whose record is in the open stripe becomes visible.
    fn put_change(
        &self,
        state: &mut State,
        heat: Heat,
        object: &Rc<Object>,
        version: u64,
        change: Change,
    ) {
        let segment = state.open[heat].as_ref().expect("its record was put there").segment;
        let mut watch = WatchNow {
            used_bytes: state.used_bytes,
            index_cost: 0,
            batch_bytes: 0,
            cached_bytes: 0,
            removed: false,
            touched: Range { start: u64::MAX, end: 0 },
            object,
        };
        {
            let mut now = object.now.borrow_mut();
            watch.index_cost -= object_row_cost(&now);
            // Most copies of records without data change no row, and others that one. Were they counted
            // like changes, stripes of copies would be closed when they hold little, and cleaning gain
            // nothing.
            watch.batch_bytes = match change {
                Change::Keep { .. } if now.mark.version == version => {
                    object_row_bytes(now.cuts.iter().len()) + 8
                }
                Change::Keep { .. } => 0,
                _ => 2 * OBJECT_ROW_BYTES,
            };
            now.apply(version, &change, segment, &mut watch);
            watch.index_cost += object_row_cost(&now);
        }
        let mut held = Held::default();
        object.hold_loaded(&watch.touched, &mut held);
        self.objects.changed(watch.cached_bytes);
        match change {
            // All that lay there was in memory, and is held.
            Change::Truncate { size } => object.tail.set(object.tail.get().min(size)),
            Change::Delete => object.tail.set(0),
            _ => {}
        }
        state.used_bytes = watch.used_bytes;
        state.unindexed_cost += watch.index_cost;
        let stripe = state.open[heat].as_mut().expect("its record was put there");
        if let Some(header) = header_of_len(&change) {
            stripe.unstaged_bytes += header;
        }
        stripe.batch_bytes += watch.batch_bytes;
        if change.kills(watch.removed) && !std::mem::replace(&mut stripe.kills, true) {
            state.unindexed_kills += 1;
        }
        state.unindexed_bytes += watch.batch_bytes;
        let row = &mut state.segments.get_mut(stripe.segment).row;
        row.version_max = row.version_max.max(version);
        let object = Rc::clone(object);
        stripe.pending.push(Pending { object, version, change, staged: None, held });
    }

    /// Extents that one change may cut or cover, so that its batch stays small.
    fn extents_per_change(&self) -> usize {
        (self.unindexed_bytes_max / 4 / REMOVAL_BYTES).max(64) as usize
    }

    /// Where copies made by the cleaner go: among themselves, unless free segments are few, as whatever is left of a
    /// segment counts then. Nor before a stripe of this life tells what the segment held that they would begin.
    fn heat_of_copies(&self, state: &State) -> Heat {
        let is_left = state.segments.stripes_left(Heat::Cold) >= STRIPES_PER_CHANGE;
        let is_plenty = state.segments.free_count() > self.config.reserve_segments;
        let is_told = state.durable_order > self.inherited;
        if is_left || is_plenty && is_told { Heat::Cold } else { Heat::Hot }
    }

    /// The open stripe; opens one when there is none.
    pub(crate) fn open_stripe<'a>(
        self: &Rc<Self>,
        state: &'a mut State,
        heat: Heat,
    ) -> &'a mut OpenStripe {
        let limit = self.unindexed_bytes_max / 4;
        if state.open[heat].as_ref().is_some_and(|open| open.batch_bytes > limit) {
            self.close_stripe(state, heat);
        }
        if state.open[heat].is_none() {
            let (segment, index, fresh) =
                state.segments.take_stripe(heat).expect("room was waited for");
            let mut open = OpenStripe::new(segment, index, self.stripe_bytes);
            open.is_checked = self.is_checked.get();
            state.open[heat] = Some(open);
            if fresh {
                let log = Rc::clone(self);
                spawn_in(&self.group, async move {
                    if let Err(error) = log.make_ready(segment, index).await {
                        log.fail(error);
                    }
                });
            }
        }
        state.open[heat].as_mut().expect("opened above")
    }

    /// Closes the open stripe, if there is one, and starts writing it.
    pub(crate) fn close_stripe(self: &Rc<Self>, state: &mut State, heat: Heat) {
        let Some(open) = state.open[heat].take() else { return };
        let (segment, index, order) = (open.segment, open.index, state.next_order);
        state.next_order += 1;
        // A change half put in place has a sequence that is not given out yet. New ones lie in hot stripes.
        if state.open[Heat::Hot].is_none() {
            state.closed_seq = state.seq;
        }
        let unused = state.segments.unused();
        let footer = Footer {
            fs: self.config.fs,
            target: self.config.target.0,
            epoch: self.epoch,
            generation: state.segments.get(segment).row.generation,
            segment,
            stripe: index,
            records: 0,
            header_bytes: 0,
            data_bytes: 0,
            headers_crc: 0,
            seq: state.closed_seq,
            order,
            unflushed: state.closed.front().map_or(order, |oldest| oldest.order),
            inherited: self.inherited,
            unused,
            before: state.before,
        };
        state.before = Some(state.segments.told_of(segment));
        let (batch_bytes, kills) = (open.batch_bytes, open.kills);
        let (data, pending) = open.close(footer);
        state.in_memory.insert((segment, index), data.clone());
        let told = (unused.segments[0], state.segments.begun());
        state.closed.push_back(ClosedStripe {
            segment,
            index,
            order,
            heat,
            kills,
            pending,
            written: false,
            batch_bytes,
            told,
        });
        state.counters.stripes += 1;
        if heat == Heat::Cold {
            probe::count("stripes of cold data", 1);
        }
        let log = Rc::clone(self);
        spawn_in(&self.group, async move {
            if let Err(error) = log.write_stripe(segment, index, order, data).await {
                log.fail(error);
            }
        });
    }

    /// Makes a segment fit for stripes from place `from` on: its row and their declaration are
    /// durable.
    pub(crate) async fn make_ready(
        self: &Rc<Self>,
        segment: u32,
        from: u32,
    ) -> Result<(), LogError> {
        let stripes = u64::from(self.config.segment_stripes);
        let first = u64::from(segment) * stripes + u64::from(from);
        let declared = self.array.declare_fresh(first, stripes - u64::from(from));
        let recorded = async {
            self.store.room_to_free().await?;
            self.check()?;
            let mut batch = Batch::default();
            {
                let mut state = self.state.borrow_mut();
                // Else it has a row.
                if from == 0 {
                    state.index_cost += SEGMENT_ROW_COST;
                }
                batch.put(&SegmentRow::key(segment), &state.segments.get(segment).row.encode());
                batch.put(crate::rows::LOG_KEY, &self.log_row(&state).encode());
            }
            let seq = self.store.apply(batch)?;
            Ok::<_, LogError>(self.store.durable(seq).await?)
        };
        let (declared, recorded) = futures_util::future::join(declared, recorded).await;
        declared?;
        recorded?;
        {
            let mut state = self.state.borrow_mut();
            let slot = state.segments.get_mut(segment);
            slot.ready = true;
        }
        self.changed.notify_all();
        Ok(())
    }

    async fn write_stripe(
        self: &Rc<Self>,
        segment: u32,
        index: u32,
        order: u64,
        data: Buf,
    ) -> Result<(), LogError> {
        let _busy = probe::busy("log seal");
        self.changed
            .until(|| {
                let state = self.state.borrow();
                // Also of those before it: so one that is missing in a segment which is not declared was there once.
                (state.are_ready_to(order) || state.failed.is_some()).then_some(())
            })
            .await;
        self.check()?;
        let stripe = u64::from(segment) * u64::from(self.config.segment_stripes) + u64::from(index);
        self.array.write_fresh(stripe, data.into_vec(), IoClass::Foreground).await?;
        {
            let mut state = self.state.borrow_mut();
            state.in_memory.remove(&(segment, index));
            state.unflushed = true;
            // Nothing is indexed before it is written.
            let closed = state.closed.iter_mut().find(|closed| closed.order == order);
            closed.expect("a stripe being written is not indexed").written = true;
        }
        self.changed.notify_all();
        self.commit_if_needed();
        Ok(())
    }
}

/// True when `from..to` of the object may be written: its footprint, less that of what it replaces,
/// is no more than what is free. What does not grow always may.
fn fits(free: u64, object: &Object, from: u64, to: u64) -> bool {
    // What it replaces is looked up only where that matters.
    footprint(to - from) <= free || object.now.borrow().extents.growth(from, to) <= free
}

/// Bytes that staging a change takes; `None` for copies.
fn header_of_len(change: &Change) -> Option<u64> {
    match change {
        Change::Write(record) => Some(footprint(u64::from(record.stored))),
        Change::Truncate { .. } | Change::Punch { .. } | Change::Delete => Some(footprint(0)),
        Change::Relocate { .. } | Change::Keep { .. } => None,
    }
}

/// Bytes of the row of an extent, less four, as logs have always counted them.
pub(crate) fn extent_row_bytes(offset: u64, extent: &Extent) -> u64 {
    let (first, last) = extent.blocks(offset);
    33 + 52 + 4 * (last - first)
}

/// What the row of an extent costs the store that lies in so many blocks.
pub(crate) fn extent_row_cost(blocks: u64) -> u64 {
    row_cost(33, (56 + 4 * blocks) as usize)
}

/// The same of this one.
pub(crate) fn cost_of(offset: u64, extent: &Extent) -> i64 {
    let (first, last) = extent.blocks(offset);
    extent_row_cost(last - first) as i64
}

/// What an object's row costs the store, if it has one.
pub(crate) fn object_row_cost(view: &View) -> i64 {
    let stored_bytes = if view.is_row_old { 0 } else { 8 };
    let cost = || row_cost(25, 24 + stored_bytes + 16 * view.cuts.iter().len());
    if view.exists { cost() as i64 } else { 0 }
}

/// Bytes of the row of an object of which so many truncations are remembered, less eight, as logs have always counted
/// them.
const fn object_row_bytes(cuts: usize) -> u64 {
    25 + 24 + 16 * cuts as u64
}

/// Bytes of the row of an object that was truncated once; some take a little more or less.
pub(crate) const OBJECT_ROW_BYTES: u64 = object_row_bytes(1);
const _: () =
    assert!(object_row_bytes(CUTS_MAX) + 8 <= 2 * OBJECT_ROW_BYTES, "twice that is the most");

/// Bytes of a batch that remove a row, generously.
const REMOVAL_BYTES: u64 = 64;

/// Keeps the sums over everything that is visible.
struct WatchNow<'a> {
    used_bytes: u64,
    /// What the rows of this change will cost the store more than those before it.
    index_cost: i64,
    /// What the batch of this change takes.
    batch_bytes: u64,
    /// Memory that the map takes more.
    cached_bytes: i64,
    /// Extents left the map.
    removed: bool,
    /// From the first byte to the last of what left or came.
    touched: Range<u64>,
    object: &'a Object,
}

impl WatchNow<'_> {
    fn touched(&mut self, offset: u64, extent: &Extent) {
        let end = offset + extent.len;
        debug_assert!(self.object.knows(offset, end), "it may be changed");
        self.touched = self.touched.start.min(offset)..self.touched.end.max(end);
    }
}

impl Watch for WatchNow<'_> {
    fn removed(&mut self, offset: u64, extent: &Extent) {
        self.touched(offset, extent);
        self.cached_bytes -= memory_bytes(offset, extent) as i64;
        self.used_bytes -= extent.footprint();
        self.index_cost -= cost_of(offset, extent);
        self.batch_bytes += REMOVAL_BYTES;
        self.removed = true;
    }

    fn added(&mut self, offset: u64, extent: &Extent) {
        self.touched(offset, extent);
        self.cached_bytes += memory_bytes(offset, extent) as i64;
        self.used_bytes += extent.footprint();
        self.index_cost += cost_of(offset, extent);
        self.batch_bytes += extent_row_bytes(offset, extent) + REMOVAL_BYTES;
    }

    fn mark_moved(&mut self, _: Mark, _: Mark) {}
}

/// The bytes of a record that is still in memory.
pub(crate) fn in_memory(state: &State, record: &Record) -> Option<Buf> {
    let place = record.place;
    let is_there = |open: &&OpenStripe| (open.segment, open.index) == (place.segment, place.stripe);
    let stripe = match state.open.iter().flatten().find(is_there) {
        Some(open) => Some(open.data()),
        None => state.in_memory.get(&(place.segment, place.stripe)),
    };
    stripe.map(|stripe| stripe.slice(place.at as usize, record.stored as usize))
}
