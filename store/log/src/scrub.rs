//! Scrub: checks every extent of every object against its checksums on the array, and repairs
//! what does not fit.
//!
//! Extents are met in the order of the index and read in the order of the array: a *round* of them
//! is collected, sorted by place, and read in large pieces, several at once. So a log of small
//! extents costs about one pass over its filled stripes, where one read for each cost as many
//! waits as there are extents. What does not fit is read again by itself, as any reader would do
//! it, which repairs it; one after the other, because neighbours share blocks.
//!
//! What always holds:
//! - An extent is checked as it was when the scrub met it, unless it was written over, or moved,
//!   before its turn came: then its bytes were checked and written anew after that.
//! - Only segments that are being read are kept from being given back, not those of the round.
//! - At most [`PIECES_AT_ONCE`] pieces are in memory, and a round of extents: a quarter of what
//!   the log may keep of them anyway.
//!
//! Changes nothing but what it repairs, so a crash leaves nothing to undo.

use crate::LogError;
use crate::extents::{Extent, Place};
use crate::log::{Inner, ObjectLog};
use crate::object::{Object, View};
use crate::open::ROWS_PER_SCAN;
use crate::pages::{EXTENT_BYTES, Held};
use crate::read::{Pin, Plan, Span};
use crate::rows::{OBJECTS, ObjectRow};
use crate::segment::SegmentState;
use crate::write::in_memory;
use futures_util::future::join_all;
use futures_util::stream::{self, StreamExt};
use levada_base::ids::ObjectId;
use levada_base::reactor::yield_now;
use levada_base::units::{KIB, MIB};
use levada_base::{BufMut, probe};
use levada_device::BlockError;
use levada_raid::{IoClass, MemberSet};
use std::collections::{BTreeMap, btree_map};
use std::iter::Peekable;
use std::ops::Bound;
use std::rc::Rc;

/// Reads in flight.
const PIECES_AT_ONCE: usize = 8;
/// Bytes of a piece, unless a single extent is larger.
const PIECE_BYTES_MAX: u64 = MIB;
/// What lies between two extents is read along up to this size: a read by itself costs more.
const GAP_BYTES_MAX: u64 = 64 * KIB;
/// Objects asked of the index at once.
const OBJECTS_AT_ONCE: usize = 16;
/// Extents collected in one go, before others get their turn.
const EXTENTS_PER_TURN: usize = 1024;
/// No object ends behind it.
const OBJECT_BYTES_MAX: u64 = i64::MAX as u64;
/// Checksums that take as much memory as an extent.
const CRCS_PER_EXTENT: usize = 32;

/// What a scrub found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubReport {
    pub objects: u64,
    pub extents: u64,
    pub bytes: u64,
    /// Blocks that were wrong and are right again.
    pub repaired_blocks: u64,
    /// Object, offset and bytes of what is lost; where a row of the index is, up to the largest offset.
    pub damaged: Vec<(ObjectId, u64, u64)>,
}

/// How far a scrub is, in bytes of log that extents take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScrubProgress {
    pub checked_bytes: u64,
    /// Of all objects, as they are now.
    pub total_bytes: u64,
}

impl ObjectLog {
    /// Checks every extent of the objects that the index knows, once.
    ///
    /// # Errors
    ///
    /// When the log stopped; damage is in the report.
    pub async fn scrub(&self) -> Result<ScrubReport, LogError> {
        let _busy = probe::busy("log scrub");
        let log = &self.0;
        let repaired_before = self.counters().repaired_blocks;
        let mut scrub = Scrub::new(log);
        let mut last = vec![OBJECTS];
        loop {
            let from = Bound::Excluded(&last[..]);
            let to = [OBJECTS + 1];
            let rows = log.store.scan(from, Bound::Excluded(&to), ROWS_PER_SCAN).await?;
            for some in rows.chunks(OBJECTS_AT_ONCE) {
                let ids: Vec<ObjectId> =
                    some.iter().map(|(key, _)| ObjectRow::id(key)).collect::<Result<_, _>>()?;
                // Into the cache, together; those that do not fit are asked for again.
                join_all(ids.iter().map(|id| async {
                    let object = log.objects.get(*id).await?;
                    log.objects.load_to_look(&object, 0, log.window_bytes()).await.map(drop)
                }))
                .await;
                for id in ids {
                    scrub.object(id).await?;
                }
            }
            match rows.last() {
                Some((key, _)) if rows.len() == ROWS_PER_SCAN => last = key.to_vec(),
                _ => break,
            }
        }
        scrub.check_round().await?;
        let mut report = std::mem::take(&mut scrub.report);
        report.repaired_blocks = self.counters().repaired_blocks - repaired_before;
        Ok(report)
    }

    /// How far the scrub is that runs; nothing is checked when none does.
    #[must_use]
    pub fn scrub_progress(&self) -> ScrubProgress {
        let checked_bytes = self.0.scrubbed_bytes.get();
        let total_bytes = self.0.state.borrow().used_bytes.max(checked_bytes);
        ScrubProgress { checked_bytes, total_bytes }
    }
}

/// An extent to be checked.
struct Check {
    object: ObjectId,
    offset: u64,
    extent: Extent,
    /// Of its segment.
    generation: u64,
}

impl Check {
    fn span(&self, log: &Inner) -> Span {
        Span::new(log, &self.extent.record, self.extent.blocks(self.offset))
    }
}

/// Extents by place, and by their offset in the object where they share a record.
type Round = BTreeMap<(Place, u64), Check>;

/// A scrub under way.
struct Scrub {
    log: Rc<Inner>,
    report: ScrubReport,
    round: Round,
    /// Extents that the round counts for.
    weight: usize,
    weight_max: usize,
}

/// How collecting extents of an object ended.
enum Collected {
    All,
    /// There is more; it goes on here.
    Some(u64),
}

impl Scrub {
    fn new(log: &Rc<Inner>) -> Self {
        log.scrubbed_bytes.set(0);
        Self {
            log: Rc::clone(log),
            report: ScrubReport::default(),
            round: Round::new(),
            weight: 0,
            weight_max: (log.config.cached_bytes_max / 4 / EXTENT_BYTES).max(1) as usize,
        }
    }

    /// Collects all extents of an object, and checks a round whenever it is full.
    async fn object(&mut self, id: ObjectId) -> Result<(), LogError> {
        self.report.objects += 1;
        let mut from = 0;
        loop {
            // Asked for every time, since it may not be held while a round is checked.
            let to = OBJECT_BYTES_MAX.min(from + self.log.window_bytes());
            let object = self.readable(id, from, to).await?;
            let Some((object, held)) = object else { return Ok(()) };
            let collected = self.collect(id, &object.now.borrow(), from, to);
            drop(held);
            let next = match collected {
                Collected::All => self.log.objects.next_start(&object, to).await?,
                Collected::Some(next) => Some(next),
            };
            drop(object);
            if self.weight >= self.weight_max {
                self.check_round().await?;
            }
            match next {
                None => return Ok(()),
                Some(next) => from = next,
            }
            yield_now().await;
        }
    }

    /// The object by that name, and what touches a range of it; where a row of it makes no sense, all of it from there
    /// on is lost.
    async fn readable(
        &mut self,
        id: ObjectId,
        from: u64,
        to: u64,
    ) -> Result<Option<(Rc<Object>, Held)>, LogError> {
        let objects = &self.log.objects;
        let readable = async {
            let object = objects.get(id).await?;
            let held = objects.load_to_look(&object, from, to).await?;
            Ok((object, held))
        };
        match readable.await {
            Ok(readable) => Ok(Some(readable)),
            Err(LogError::Index { .. }) => {
                self.report.damaged.push((id, from, OBJECT_BYTES_MAX - from));
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Adds extents that start at `from` or later, and before `to`. What a write made of the others meanwhile is new.
    fn collect(&mut self, id: ObjectId, view: &View, from: u64, to: u64) -> Collected {
        let state = self.log.state.borrow();
        let extents = view.extents.overlapping(from, to);
        let extents = extents.filter(|(offset, _)| *offset >= from);
        for (turn, (offset, extent)) in extents.enumerate() {
            if turn == EXTENTS_PER_TURN || self.weight >= self.weight_max {
                return Collected::Some(offset);
            }
            self.report.extents += 1;
            self.report.bytes += extent.len;
            let record = &extent.record;
            // What is still in memory has just come, and will be read from there.
            if in_memory(&state, record).is_some() {
                checked(&self.log, extent);
                continue;
            }
            self.weight += 1 + record.crcs.len() / CRCS_PER_EXTENT;
            let generation = state.segments.get(record.place.segment).row.generation;
            let check = Check { object: id, offset, extent: extent.clone(), generation };
            self.round.insert((record.place, offset), check);
        }
        Collected::All
    }

    /// Checks what was collected.
    async fn check_round(&mut self) -> Result<(), LogError> {
        let log = Rc::clone(&self.log);
        log.check()?;
        self.weight = 0;
        let left = std::mem::take(&mut self.round).into_values().peekable();
        let pieces = Pieces { log: Rc::clone(&log), left };
        let checks = stream::iter(pieces).map(|piece| piece.check(&log));
        // To the end, before anything else is waited for: pieces that nobody polls would stand still.
        let found: Vec<_> = checks.buffer_unordered(PIECES_AT_ONCE).collect().await;
        for suspects in found {
            for check in suspects? {
                self.look_again(&check).await?;
            }
        }
        Ok(())
    }

    /// Reads by itself what is left of an extent that did not fit, which repairs it.
    async fn look_again(&mut self, check: &Check) -> Result<(), LogError> {
        let place = check.extent.record.place;
        let end = check.offset + check.extent.len;
        let object = self.readable(check.object, check.offset, end).await?;
        let Some((object, _held)) = object else { return Ok(()) };
        let mut at = check.offset;
        while let Some((offset, extent)) = left_of(&object, at, end, place) {
            let plan = Plan::of_extent(&self.log, offset, &extent);
            match self.log.fetch(plan, IoClass::Scrub).await {
                Ok(_) => {}
                Err(LogError::Damaged { offset, bytes }) => {
                    // Unless it was written over meanwhile.
                    if left_of(&object, offset, offset + bytes, place).is_some() {
                        self.report.damaged.push((object.id, offset, bytes));
                    }
                }
                Err(error) => return Err(error),
            }
            at = offset + extent.len;
        }
        Ok(())
    }
}

impl Drop for Scrub {
    /// Also when the caller gives up.
    fn drop(&mut self) {
        self.log.scrubbed_bytes.set(0);
    }
}

/// The first extent of `from..to` that still points at the record there.
fn left_of(object: &Object, from: u64, to: u64, place: Place) -> Option<(u64, Extent)> {
    let now = object.now.borrow();
    let mut extents = now.extents.overlapping(from, to);
    let (offset, extent) = extents.find(|(_, extent)| extent.record.place == place)?;
    Some((offset, extent.clone()))
}

fn checked(log: &Inner, extent: &Extent) {
    log.scrubbed_bytes.set(log.scrubbed_bytes.get() + extent.footprint());
}

/// Neighbours on the array, read together.
struct Piece {
    /// The array's offsets.
    from: u64,
    to: u64,
    checks: Vec<Check>,
}

/// A round cut into pieces.
struct Pieces {
    log: Rc<Inner>,
    left: Peekable<btree_map::IntoValues<(Place, u64), Check>>,
}

impl Iterator for Pieces {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        let first = self.left.next()?;
        let segment = (first.extent.record.place.segment, first.generation);
        let (from, mut to) = first.span(&self.log).on_array();
        let mut checks = vec![first];
        let joins = |check: &Check, to: u64| {
            let (next_from, next_to) = check.span(&self.log).on_array();
            (check.extent.record.place.segment, check.generation) == segment
                && next_from <= to + GAP_BYTES_MAX
                && next_to.max(to) - from <= PIECE_BYTES_MAX
        };
        while let Some(check) = self.left.next_if(|check| joins(check, to)) {
            to = to.max(check.span(&self.log).on_array().1);
            checks.push(check);
        }
        Some(Piece { from, to, checks })
    }
}

impl Piece {
    /// Reads the piece; those of its extents that do not fit their checksums.
    async fn check(self, log: &Rc<Inner>) -> Result<Vec<Check>, LogError> {
        for check in &self.checks {
            checked(log, &check.extent);
        }
        let Some(_pin) = self.pin(log) else { return Ok(Vec::new()) };
        let into = BufMut::for_overwrite((self.to - self.from) as usize).into_vec();
        let read = log.array.read_avoiding(self.from, into, MemberSet::NONE, IoClass::Scrub).await;
        let data = match read {
            Ok(mut parts) => parts.swap_remove(0).freeze(),
            // Perhaps only some of its blocks; each extent is tried by itself.
            Err(BlockError::Medium { .. }) => return Ok(self.checks),
            Err(error) => return Err(error.into()),
        };
        let mut checks = self.checks;
        checks.retain(|check| {
            let span = check.span(log);
            let (from, to) = span.on_array();
            !span.fits_whole(&data[(from - self.from) as usize..(to - self.from) as usize])
        });
        Ok(checks)
    }

    /// Holds the segment while it is read. `None` when it was given back since: nothing in it
    /// was live any more.
    fn pin(&self, log: &Rc<Inner>) -> Option<Pin> {
        let first = self.checks.first()?;
        let at = first.extent.record.place.segment;
        let state = log.state.borrow();
        let segment = state.segments.get(at);
        let is_there = match segment.state {
            SegmentState::Open | SegmentState::Closed => segment.row.generation == first.generation,
            SegmentState::Free | SegmentState::Freeing => false,
        };
        is_there.then(|| Pin::new(log, &state, at))
    }
}
