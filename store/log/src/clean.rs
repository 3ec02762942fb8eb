//! The cleaner: copies what is live out of segments in which much is dead.
//!
//! It runs while free segments are few. A pass picks victims by what they give (dead bytes)
//! against what they cost (live bytes to copy), older ones first among equals; copies their
//! live extents, under their old versions, into the open stripe; settles; and the victims are
//! given back like any other dead segment.
//!
//! Records without data (truncations, holes, deletions) exist so that older data cannot come
//! back when the index is rebuilt. The cleaner drops one when a later one covers it, or when no
//! segment holds anything dead that is older and no object's size hangs on it; else it copies it.
//!
//! It cannot deadlock: new data leaves it a reserve of free segments, the sum of all footprints
//! is bounded below what is left ([`Inner::capacity_bytes`]), and a pass copies no more than
//! fits what is free. A crash in a pass leaves copies that the index does not know, or a victim
//! that is half empty; both are ordinary.

use crate::LogError;
use crate::extents::{Place, footprint};
use crate::format::{FOOTER_BYTES, Footer, RecordHeader, RecordKind};
use crate::log::{Inner, State};
use crate::object::{Change, Object};
use crate::read::{Pin, Plan};
use crate::segment::SegmentState;
use crate::space::MARKS_SHARE;
use crate::stripe::Payload;
use crate::write::Need;
use levada_base::ids::ObjectId;
use levada_base::reactor::spawn_in;
use levada_base::units::{BLOCK_BYTES, KIB, round_up};
use levada_base::{Buf, BufMut, IoVec, planted, probe};
use levada_device::BlockError;
use levada_raid::IoClass;
use std::rc::Rc;

/// Free segments above the reserve at which the cleaner starts and stops.
pub(crate) const FREE_AHEAD: u32 = 2;
/// Segments cleaned in one pass.
const VICTIMS_MAX: usize = 8;
/// Read from the end of a stripe at first; most summaries are smaller.
const SUMMARY_BYTES: u64 = 16 * KIB;

/// How far a log with few free segments has come. Passes that only moved things around would follow each
/// other for ever, and writers wait for them.
#[derive(Clone, Copy)]
struct Standing {
    seq: u64,
    outdated_min: u64,
    stripes: u64,
}

impl Standing {
    fn is_beyond(self, before: Self) -> bool {
        self.seq > before.seq
            || self.outdated_min > before.outdated_min
            || self.stripes > before.stripes
    }
}

impl State {
    /// The age of the oldest record anywhere that must not come back.
    fn outdated_min(&self) -> u64 {
        self.outdated_min_but(None)
    }

    /// The same of all segments but one.
    fn outdated_min_but(&self, segment: Option<u32>) -> u64 {
        let others = self.segments.iter().filter(|(at, _)| Some(*at) != segment);
        others.map(|(_, segment)| segment.outdated_min()).min().unwrap_or(u64::MAX)
    }
}

impl Inner {
    fn wants_cleaning(&self) -> bool {
        let state = self.state.borrow();
        state.failed.is_none()
            && !state.nothing_to_clean
            && state.segments.free_count() < self.config.reserve_segments + FREE_AHEAD
    }

    /// Starts the cleaner when free segments are few and it does not run.
    pub(crate) fn clean_if_needed(self: &Rc<Self>) {
        if self.state.borrow().cleaner_running || !self.wants_cleaning() {
            return;
        }
        self.state.borrow_mut().cleaner_running = true;
        let log = Rc::clone(self);
        spawn_in(&self.group, async move {
            let mut fruitless = 0;
            while log.wants_cleaning() {
                log.state.borrow_mut().died = false;
                match log.clean_pass().await {
                    Ok(true) => fruitless = 0,
                    Ok(false) | Err(LogError::Full) => {
                        fruitless += 1;
                        let mut state = log.state.borrow_mut();
                        // The next one looks for space alone.
                        let may_gain = state.cleaned_oldest && fruitless == 1;
                        state.nothing_to_clean = !may_gain && !state.died;
                    }
                    Err(error) => log.fail(error),
                }
            }
            log.state.borrow_mut().cleaner_running = false;
            log.changed.notify_all();
        });
    }

    /// One pass. False when nothing was gained.
    async fn clean_pass(self: &Rc<Self>) -> Result<bool, LogError> {
        let _busy = probe::busy("log clean");
        let before = self.standing();
        let mut victims = self.victims();
        if victims.is_empty() {
            // What has died may not be known to the index yet.
            self.settle().await?;
            victims = self.victims();
        }
        // Held, so that none is given back and used again under the cleaner's eyes.
        let victims: Vec<(u32, Pin)> = {
            let state = self.state.borrow();
            // The oldest first: once it is gone, the records without data of younger ones hide less.
            victims.sort_by_key(|victim| state.segments.get(*victim).outdated_min());
            victims.iter().map(|victim| (*victim, Pin::new(self, &state, *victim))).collect()
        };
        let mut emptied = Vec::new();
        let mut out_of_room = false;
        for (victim, pin) in victims {
            match self.empty(victim).await {
                Ok(true) => emptied.push((victim, pin)),
                Ok(false) => drop(self.state.borrow_mut().segments.damaged.insert(victim)),
                Err(LogError::Full) => {
                    out_of_room = true;
                    break;
                }
                Err(error) => return Err(error),
            }
            if self.pays_alone(victim) {
                self.give_back(std::mem::take(&mut emptied)).await?;
            }
        }
        self.give_back(emptied).await?;
        if out_of_room {
            // What was copied out of the last one is dead in it now.
            self.settle().await?;
        }
        Ok(self.standing().is_beyond(before))
    }

    /// True when a segment holds so little that it is given back before the next victim is looked at.
    fn pays_alone(&self, victim: u32) -> bool {
        let state = self.state.borrow();
        let bytes = self.stripe_bytes * u64::from(state.segments.stripes);
        state.segments.get(victim).row.live_bytes < bytes / 2
    }

    /// Makes the copies durable, gives back the segments from which everything was copied, and waits
    /// until they are free.
    async fn give_back(self: &Rc<Self>, emptied: Vec<(u32, Pin)>) -> Result<(), LogError> {
        if emptied.is_empty() {
            return Ok(());
        }
        self.settle().await?;
        let mut victims = Vec::new();
        for (victim, pin) in emptied {
            drop(pin);
            let mut state = self.state.borrow_mut();
            if state.segments.get(victim).row.live_bytes == 0 {
                // Those that matter have been copied.
                state.forget_marks(victim);
                state.counters.cleaned_segments += 1;
                probe::count("segments cleaned", 1);
                victims.push(victim);
            }
        }
        self.free_dead_segments();
        self.changed
            .until(|| {
                let state = self.state.borrow();
                let is_freeing = |at: &u32| state.segments.get(*at).state == SegmentState::Freeing;
                let freeing = victims.iter().any(is_freeing);
                (!freeing || state.failed.is_some()).then_some(())
            })
            .await;
        Ok(())
    }

    fn standing(&self) -> Standing {
        let state = self.state.borrow();
        Standing {
            seq: state.seq,
            outdated_min: state.outdated_min(),
            stripes: state.segments.stripes_available(0),
        }
    }

    /// Segments worth cleaning now, together no larger than what can be copied.
    fn victims(&self) -> Vec<u32> {
        let mut state = self.state.borrow_mut();
        let stripe_bytes = self.stripe_bytes - BLOCK_BYTES;
        let segment_bytes = stripe_bytes * u64::from(state.segments.stripes);
        let outdated_min = state.outdated_min();
        let mut candidates: Vec<(f64, u32, u64)> = state
            .segments
            .iter()
            .filter(|(_, segment)| segment.is_settled())
            .filter(|(at, _)| !state.segments.damaged.contains(at))
            .filter_map(|(at, segment)| {
                let row = &segment.row;
                // Those that hide nothing any more go, but for those that carry a size.
                let hides = row.version_max > outdated_min;
                let marks = if hides { row.marks } else { row.sizes };
                let copied = row.live_bytes + marks * footprint(0);
                let dead = segment_bytes.checked_sub(copied).filter(|dead| *dead > 0)?;
                let age = (state.seq.saturating_sub(row.version_max) + 1) as f64;
                // Benefit over cost; age breaks ties, since old data stays as it is.
                let score = dead as f64 / (copied + stripe_bytes) as f64 * age.powf(0.1);
                Some((score, at, copied))
            })
            .collect();
        candidates.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        // What the copies may take: all free stripes but those that a change may always need.
        let stripes = state.segments.stripes_available(0).saturating_sub(4);
        let full_budget = stripes * stripe_bytes / 16 * 15;
        let mut budget = full_budget;
        // Every crash closes the segment that is being filled. While the reserve is in use, what
        // a pass gains must therefore be there soon, or crashes in a row would eat all of it.
        let reserve_in_use = state.segments.free_count() < self.config.reserve_segments;
        let victims_max = if reserve_in_use { 1 } else { VICTIMS_MAX };
        let mut gain = 0;
        let mut victims = Vec::new();
        for &(_, at, copied) in &candidates {
            if victims.len() == victims_max {
                break;
            }
            // A later candidate may still fit.
            if copied > budget {
                continue;
            }
            budget -= copied;
            gain += segment_bytes - copied;
            victims.push(at);
        }
        // Settling leaves part of a stripe empty: less than that is no gain.
        if gain < 2 * stripe_bytes {
            victims.clear();
        }
        // What is dead in one old segment keeps all younger records without data alive. It goes alone, so
        // that it no longer counts when those of others are judged, and every other time, so that space
        // is gained meanwhile.
        let capacity = self.capacity_bytes(&state, self.config.reserve_segments);
        let many_marks = state.mark_bytes > capacity / MARKS_SHARE;
        state.cleaned_oldest = many_marks && (victims.is_empty() || !state.cleaned_oldest);
        if state.cleaned_oldest {
            let is_oldest = |at: u32| state.segments.get(at).outdated_min() == outdated_min;
            let fits = |copied: u64| copied <= full_budget;
            let oldest = candidates.iter().find(|(_, at, copied)| is_oldest(*at) && fits(*copied));
            if let Some((_, at, _)) = oldest {
                return vec![*at];
            }
        }
        victims
    }

    /// Copies everything that matters out of a segment. False when some of it cannot be read.
    async fn empty(self: &Rc<Self>, victim: u32) -> Result<bool, LogError> {
        let (stripes, generation) = {
            let state = self.state.borrow();
            let segment = state.segments.get(victim);
            // It may have died by itself since it was chosen.
            if !segment.is_settled() || segment.is_dead() {
                return Ok(true);
            }
            (segment.used_stripes, segment.row.generation)
        };
        let mut marks = Vec::new();
        for stripe in 0..stripes {
            let summary = self.summary_of(victim, stripe, Some(generation)).await?;
            let Some((_, records)) = summary else { return Ok(false) };
            for header in records {
                match header.kind {
                    RecordKind::Data => {
                        if !self.copy_live(victim, stripe, &header).await? {
                            return Ok(false);
                        }
                    }
                    RecordKind::Truncate | RecordKind::Punch | RecordKind::Delete => {
                        marks.push(header);
                    }
                }
            }
        }
        // The oldest first: whether one is needed hangs on what is kept that is older, and copies
        // made before do not lie in the order of their versions.
        marks.sort_unstable_by_key(|header| header.version);
        // Passes that were cut off by crashes left copies.
        marks.dedup_by_key(|header| header.version);
        // What is outdated and older than a record here has been so since that was indexed, and only
        // the cleaner moves it: so one look at the other segments is enough.
        let mut elsewhere = Elsewhere(self.state.borrow().outdated_min_but(Some(victim)));
        for header in marks {
            if !self.keep_mark(victim, &header, &mut elsewhere).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// What a stripe says about itself: of this generation, or of any. `None` when it cannot be
    /// read.
    pub(crate) async fn summary_of(
        self: &Rc<Self>,
        segment: u32,
        stripe: u32,
        generation: Option<u64>,
    ) -> Result<Option<(Footer, Vec<RecordHeader>)>, LogError> {
        let _pin = Pin::new(self, &self.state.borrow(), segment);
        let identity = (self.config.fs, self.config.target.0, segment, stripe);
        let fits = |tail: &[u8]| {
            Footer::decode(tail, self.stripe_bytes).is_some_and(|footer| {
                (footer.fs, footer.target, footer.segment, footer.stripe) == identity
                    && generation.is_none_or(|generation| generation == footer.generation)
            })
        };
        let end = self.array_offset(segment, stripe) + self.stripe_bytes;
        let first = SUMMARY_BYTES.min(self.stripe_bytes);
        let Some(tail) = self.read_fitting(end - first, end, &fits).await? else {
            return Ok(None);
        };
        let footer = Footer::decode(&tail, self.stripe_bytes).expect("it fitted");
        if let Some(records) = footer.records(&tail) {
            return Ok(Some((footer, records)));
        }
        let bytes = round_up(footer.summary_bytes(), BLOCK_BYTES);
        let fits = |tail: &[u8]| footer.records(tail).is_some();
        let tail = self.read_fitting(end - bytes, end, &fits).await?;
        Ok(tail.and_then(|tail| Some((footer, footer.records(&tail)?))))
    }

    /// Reads bytes that can be recognised, with repair.
    async fn read_fitting(
        self: &Rc<Self>,
        from: u64,
        to: u64,
        fits: &dyn Fn(&[u8]) -> bool,
    ) -> Result<Option<Buf>, LogError> {
        let into = BufMut::for_overwrite((to - from) as usize).into_vec();
        match self.array.read(from, into).await {
            Ok(mut parts) => {
                let data = parts.swap_remove(0).freeze();
                if fits(&data) {
                    return Ok(Some(data));
                }
            }
            Err(BlockError::Medium { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        self.recover(from, to, IoClass::Clean, fits).await
    }

    /// The object by that name; `None` when a row of it makes no sense. Nobody knows what matters of it
    /// then, so the segments that may hold some of it stay as they are, and the log goes on.
    async fn readable(&self, id: ObjectId) -> Result<Option<Rc<Object>>, LogError> {
        match self.objects.get(id).await {
            Ok(object) => Ok(Some(object)),
            Err(LogError::Index { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Copies what is still live of a record. False when it or a row of its object is damaged.
    async fn copy_live(
        self: &Rc<Self>,
        segment: u32,
        stripe: u32,
        header: &RecordHeader,
    ) -> Result<bool, LogError> {
        let place = Place { segment, stripe, at: header.data_at };
        let Some(object) = self.readable(header.object).await? else { return Ok(false) };
        let end = header.offset + header.len;
        let _held = match self.objects.load(&object, header.offset, end).await {
            Ok(held) => held,
            Err(LogError::Index { .. }) => return Ok(false),
            Err(error) => return Err(error),
        };
        let live: Vec<_> = object
            .now
            .borrow()
            .extents
            .overlapping(header.offset, end)
            .filter(|(_, extent)| extent.record.place == place)
            .map(|(offset, extent)| (offset, extent.clone()))
            .collect();
        for (offset, extent) in live {
            let plan = Plan::of_extent(self, offset, &extent);
            let data = match self.fetch(plan, IoClass::Clean).await {
                Ok(data) => data,
                Err(LogError::Damaged { .. }) => return Ok(false),
                Err(error) => return Err(error),
            };
            self.room(Need::Copy).await?;
            // It may have been written over or cut while it was read: what is left of it now.
            let end = offset + extent.len;
            let left: Vec<(u64, u64)> = object
                .now
                .borrow()
                .extents
                .overlapping(offset, end)
                .filter(|(_, extent)| extent.record.place == place)
                .map(|(offset, extent)| (offset, extent.len))
                .collect();
            for (at, len) in left {
                let data = slice_parts(&data, at - offset, len);
                let mut payload = Payload::new(&data);
                let version = header.version;
                self.put_records(&object, version, at, len, &mut payload, Some(place));
                self.objects.shrink();
                self.state.borrow_mut().counters.cleaned_bytes += len;
            }
        }
        Ok(true)
    }

    /// Copies a record without data, unless nothing needs it. Whatever is older in its segment and
    /// stays has been copied before. False when a row of its object is damaged.
    async fn keep_mark(
        self: &Rc<Self>,
        victim: u32,
        header: &RecordHeader,
        elsewhere: &mut Elsewhere,
    ) -> Result<bool, LogError> {
        let hides_something = elsewhere.is_hidden_by(header.version);
        let object = match header.kind {
            // There are many, and what the index knows of their objects does not matter.
            RecordKind::Delete => Object::unknown(header.object),
            RecordKind::Data | RecordKind::Truncate | RecordKind::Punch => {
                let Some(object) = self.readable(header.object).await? else { return Ok(false) };
                object
            }
        };
        // A pass that a crash cut off has copied it.
        let mark = object.indexed.borrow().mark;
        let is_copied =
            mark.version == header.version && mark.segment.is_some_and(|segment| segment != victim);
        let carries_size = [&object.now, &object.indexed].iter().any(|view| {
            let view = view.borrow();
            view.exists && view.mark.version == header.version
        });
        let needed = carries_size || hides_something && !is_superseded(&object, header);
        let needed = needed && !is_copied;
        if needed && !planted!("log-tombstone-dropped") {
            self.room(Need::Copy).await?;
            let header = RecordHeader { data_at: 0, ..header.clone() };
            let mut state = self.state.borrow_mut();
            if self.put_mark_record(&mut state, &object, &header, Change::Keep) {
                elsewhere.kept(header.version);
            }
        }
        Ok(true)
    }
}

/// The age of the oldest outdated record outside of a victim: one look at all segments, kept up to date with
/// what the cleaner keeps, instead of a look for each record.
struct Elsewhere(u64);

impl Elsewhere {
    /// True when a record without data of that version may hide something.
    fn is_hidden_by(&self, version: u64) -> bool {
        self.0 < version
    }

    /// An outdated record of that version was copied.
    fn kept(&mut self, version: u64) {
        self.0 = self.0.min(version);
    }
}

/// True when a later record, indexed and so never lost, hides all that this one hides.
fn is_superseded(object: &Object, header: &RecordHeader) -> bool {
    let indexed = object.indexed.borrow();
    // What was deleted left a record that hides everything.
    let deleted = !indexed.exists && !object.now.borrow().exists;
    match header.kind {
        RecordKind::Truncate => deleted || indexed.cuts.supersede(header.version, header.size),
        RecordKind::Punch => deleted || indexed.cuts.supersede(header.version, header.offset),
        RecordKind::Delete | RecordKind::Data => false,
    }
}

/// Part of a list of buffers.
fn slice_parts(parts: &IoVec, start: u64, len: u64) -> IoVec {
    let (mut skip, mut left) = (start as usize, len as usize);
    let mut slices = IoVec::new();
    for part in parts {
        let from = skip.min(part.len());
        let run = left.min(part.len() - from);
        if run > 0 {
            slices.push(part.slice(from, run));
        }
        skip -= from;
        left -= run;
    }
    slices
}

const _: () = assert!(SUMMARY_BYTES as usize >= FOOTER_BYTES);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        /// Against a look at all segments for each record: the copies go to the first of them.
        #[test]
        fn one_look_at_the_other_segments_is_enough(
            mut segments in prop::collection::vec(prop_oneof![0..60u64, Just(u64::MAX)], 1..8),
            mut marks in prop::collection::vec((0..60u64, any::<bool>(), any::<bool>()), 0..30),
        ) {
            marks.sort_unstable();
            let mut elsewhere = Elsewhere(segments.iter().copied().min().unwrap_or(u64::MAX));
            for (version, is_superseded, is_delete) in marks {
                let hides = segments.iter().any(|outdated_min| *outdated_min < version);
                prop_assert_eq!(elsewhere.is_hidden_by(version), hides);
                if hides && !is_superseded && !is_delete {
                    segments[0] = segments[0].min(version);
                    elsewhere.kept(version);
                }
            }
        }
    }
}
