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
//! It reads at the pace that its order allows, as a rebuild does: beside the array's foreground I/O
//! no faster than that bears.
//!
//! Changes nothing but what it repairs, so a crash leaves nothing to undo. How far it is, it puts
//! on record after a round ([`record`]), behind a flush of what it has put right; ordered again
//! under the same number it goes on there.

mod record;

pub use record::ScrubRecord;

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
use levada_base::reactor::{self, Instant, yield_now};
use levada_base::units::{KIB, MIB};
use levada_base::{BufMut, probe};
use levada_device::BlockError;
use levada_raid::{IoClass, Limits, MemberSet, Pace};
use record::Position;
use std::collections::{BTreeMap, btree_map};
use std::iter::Peekable;
use std::ops::Bound;
use std::rc::Rc;
use std::time::Duration;

/// Reads in flight.
const PIECES_AT_ONCE: usize = 8;
/// Bytes of a piece, unless a single extent is larger.
const PIECE_BYTES_MAX: u64 = MIB;
/// What lies between two extents is read along up to this size: a read by itself costs more.
const GAP_BYTES_MAX: u64 = 64 * KIB;
/// Objects asked of the index at once.
const OBJECTS_AT_ONCE: usize = 16;
/// Bytes of extents that a round takes, unless one is larger: what is checked again, at most, after an
/// interruption. Small extents end a round before that.
const ROUND_BYTES_MAX: u64 = 256 * MIB;
/// Between two records of how far it is: in bytes, or an eighth of the log.
const RECORDED_EVERY_BYTES: u64 = 64 * MIB;
const RECORDED_EVERY: Duration = Duration::from_secs(10);
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
    /// Places lost beside these, of which an interruption left no more than their number.
    pub unlisted: u64,
}

impl ScrubReport {
    /// Places that are lost.
    #[must_use]
    pub fn places(&self) -> u64 {
        self.damaged.len() as u64 + self.unlisted
    }
}

/// An order to scrub a log.
#[derive(Clone, Copy, Debug)]
pub struct ScrubOrder {
    /// Tells it from others. One that was interrupted goes on under the number it was ordered with, and one that is
    /// over says again what it found; under any other number a scrub begins anew.
    pub run: u64,
    /// In bytes per second that are read.
    pub limits: Limits,
    /// Seconds, for the record of when it ended.
    pub clock_s: fn() -> u64,
}

/// How far a scrub is, in bytes of log that extents take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScrubProgress {
    pub checked_bytes: u64,
    /// Of all objects, as they are now.
    pub total_bytes: u64,
}

impl ObjectLog {
    /// Checks every extent of the objects that the index knows, once; as fast as it can, and off the record.
    ///
    /// # Errors
    ///
    /// When the log stopped; damage is in the report.
    pub async fn scrub(&self) -> Result<ScrubReport, LogError> {
        let pace = Pace::beside(self.0.array.foreground(), Limits::NONE);
        Scrub::new(&self.0, pace).run().await
    }

    /// The same at the order's pace, and on record: from where it was interrupted, if it was.
    ///
    /// # Errors
    ///
    /// As [`ObjectLog::scrub`].
    pub async fn scrub_by_order(&self, order: ScrubOrder) -> Result<ScrubReport, LogError> {
        let log = &self.0;
        let record = ScrubRecord::load(&log.store).await?.filter(|record| record.run == order.run);
        if let Some(record) = &record
            && record.ended_s.is_some()
        {
            return Ok(record.found.clone());
        }
        let mut scrub = Scrub::new(log, Pace::beside(log.array.foreground(), order.limits));
        let is_new = record.is_none();
        if let Some(record) = record {
            scrub.go_on(record);
        }
        scrub.on_record = Some(OnRecord {
            order,
            at: reactor::now(),
            checked_bytes: log.scrubbed_bytes.get(),
            repaired_blocks: scrub.report.repaired_blocks,
        });
        if is_new {
            // Interrupted at once, it goes on too.
            scrub.put_on_record(false).await?;
        }
        scrub.run().await
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
struct Scrub<'a> {
    log: Rc<Inner>,
    pace: Pace<'a>,
    report: ScrubReport,
    /// How many blocks the log had put right when it began, and how many the scrub before that.
    repaired_before: (u64, u64),
    /// Up to where it is, once a round is checked.
    position: Option<Position>,
    on_record: Option<OnRecord>,
    round: Round,
    /// Extents that the round counts for.
    weight: usize,
    weight_max: usize,
    /// And their bytes.
    round_bytes: u64,
}

/// What is on record of a scrub.
struct OnRecord {
    order: ScrubOrder,
    at: Instant,
    checked_bytes: u64,
    /// Blocks put right, durably.
    repaired_blocks: u64,
}

/// How collecting extents of an object ended.
enum Collected {
    All,
    /// There is more; it goes on here.
    Some(u64),
}

impl<'a> Scrub<'a> {
    fn new(log: &Rc<Inner>, pace: Pace<'a>) -> Self {
        log.scrubbed_bytes.set(0);
        Self {
            log: Rc::clone(log),
            pace,
            report: ScrubReport::default(),
            repaired_before: (log.state.borrow().counters.repaired_blocks, 0),
            position: None,
            on_record: None,
            round: Round::new(),
            weight: 0,
            weight_max: (log.config.cached_bytes_max / 4 / EXTENT_BYTES).max(1) as usize,
            round_bytes: 0,
        }
    }

    /// Goes on where the record says that one was interrupted.
    fn go_on(&mut self, record: ScrubRecord) {
        self.log.scrubbed_bytes.set(record.checked_bytes);
        self.repaired_before.1 = record.found.repaired_blocks;
        self.report = record.found;
        self.position = Some(record.position);
    }

    /// All objects, from the position on.
    async fn run(mut self) -> Result<ScrubReport, LogError> {
        let _busy = probe::busy("log scrub");
        let log = Rc::clone(&self.log);
        let begun = self.position;
        let mut last = match begun {
            Some(Position { object, .. }) => ObjectRow::key(object),
            None => vec![OBJECTS],
        };
        let mut is_begun = begun.is_some_and(|position| position.offset < u64::MAX);
        loop {
            let from = match is_begun {
                true => Bound::Included(&last[..]),
                false => Bound::Excluded(&last[..]),
            };
            let to = [OBJECTS + 1];
            let rows = log.store.scan(from, Bound::Excluded(&to), ROWS_PER_SCAN).await?;
            is_begun = false;
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
                    let from = begun.filter(|position| position.object == id);
                    self.object(id, from.map_or(0, |position| position.offset)).await?;
                }
            }
            match rows.last() {
                Some((key, _)) if rows.len() == ROWS_PER_SCAN => last = key.to_vec(),
                _ => break,
            }
        }
        self.check_round().await?;
        self.count_repaired();
        self.put_on_record(true).await?;
        Ok(std::mem::take(&mut self.report))
    }

    fn count_repaired(&mut self) {
        let now = self.log.state.borrow().counters.repaired_blocks;
        self.report.repaired_blocks = now - self.repaired_before.0 + self.repaired_before.1;
    }

    /// Everything up to here is checked; notes that if it is time.
    async fn reached(&mut self, position: Position) -> Result<(), LogError> {
        self.position = Some(position);
        self.count_repaired();
        let checked_bytes = self.log.scrubbed_bytes.get();
        let eighth = self.log.state.borrow().used_bytes / 8;
        let is_time = self.on_record.as_ref().is_some_and(|on_record| {
            on_record.at.elapsed() >= RECORDED_EVERY
                || checked_bytes.saturating_sub(on_record.checked_bytes)
                    >= RECORDED_EVERY_BYTES.min(eighth)
        });
        if is_time { self.put_on_record(false).await } else { Ok(()) }
    }

    /// Puts on record how far it is, or that it is over, if this is one of those.
    async fn put_on_record(&mut self, is_over: bool) -> Result<(), LogError> {
        let log = &self.log;
        let Some(on_record) = &mut self.on_record else { return Ok(()) };
        if self.report.repaired_blocks > on_record.repaired_blocks {
            // Nobody looks there again before the next scrub.
            if let Err(error) = log.array.flush().await {
                log.fail(error.clone().into());
                return Err(error.into());
            }
        }
        let ScrubOrder { run, clock_s, .. } = on_record.order;
        let record = ScrubRecord {
            run,
            ended_s: is_over.then(clock_s),
            found: self.report.clone(),
            position: self.position.unwrap_or(Position::START),
            checked_bytes: log.scrubbed_bytes.get(),
        };
        record.store(&log.store).await?;
        on_record.at = reactor::now();
        on_record.checked_bytes = record.checked_bytes;
        on_record.repaired_blocks = record.found.repaired_blocks;
        Ok(())
    }

    /// Collects all extents of an object from there on, and checks a round whenever it is full.
    async fn object(&mut self, id: ObjectId, mut from: u64) -> Result<(), LogError> {
        self.report.objects += u64::from(from == 0);
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
            let upto = next.unwrap_or(u64::MAX);
            if self.is_round_full() {
                self.check_round().await?;
                self.reached(Position { object: id, offset: upto }).await?;
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

    fn is_round_full(&self) -> bool {
        self.weight >= self.weight_max || self.round_bytes >= ROUND_BYTES_MAX
    }

    /// Adds extents that start at `from` or later, and before `to`. What a write made of the others meanwhile is new.
    fn collect(&mut self, id: ObjectId, view: &View, from: u64, to: u64) -> Collected {
        let state = self.log.state.borrow();
        let extents = view.extents.overlapping(from, to);
        let extents = extents.filter(|(offset, _)| *offset >= from);
        for (turn, (offset, extent)) in extents.enumerate() {
            if turn == EXTENTS_PER_TURN || self.is_round_full() {
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
            self.round_bytes += extent.len;
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
        (self.weight, self.round_bytes) = (0, 0);
        let left = std::mem::take(&mut self.round).into_values().peekable();
        let pieces = Pieces { log: Rc::clone(&log), left };
        let turns = stream::iter(pieces).map(|piece| {
            let begins = self.pace.turn(piece.to - piece.from);
            (begins, piece)
        });
        let pieces = turns.then(|(begins, piece)| async move {
            reactor::sleep_until(begins).await;
            piece
        });
        let checks = pieces.map(|piece| piece.check(&log));
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

impl Drop for Scrub<'_> {
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
