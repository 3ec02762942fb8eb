//! The check of the index of a log that goes on: what [`crate::fsck`] looks for, beside everything else.
//!
//! Rows are walked page by page, and changes of rows that were passed are told by the round that makes them
//! ([`crate::observe`]); so sums are those of all rows at the end. A row that must agree with what the log has in memory
//! is held against it in the step in which the store shows the page. The rows of one object that do not fit together at
//! first sight may be of different moments: they are read again, until nothing of the object changed meanwhile.
//!
//! What always holds: what is found held at one moment, and what could not be looked at is counted. Memory is a page of
//! each sort of row, and 16 bytes a segment.

use crate::LogError;
use crate::extents::Extent;
use crate::fsck::{FINDINGS_KEPT, IndexFinding, IndexReport, object_of};
use crate::log::{ObjectLog, State};
use crate::observe::IndexObserver;
use crate::rows::{
    self, EXTENTS, LIVES_KEY, LOG_KEY, Lives, LogRow, Mark, OBJECTS, ObjectRow, SCRUB_KEY,
    SEGMENTS, STAGED, SegmentRow,
};
use crate::segment::SegmentState;
use crate::staged::staged_header;
use crate::write::{OBJECT_ROW_BYTES, extent_row_bytes};
use levada_base::ids::ObjectId;
use levada_base::{planted, reactor};
use levada_kv::{Bytes, Walk};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::rc::Rc;
use std::time::Duration;

const PAGE_ROWS: usize = 1024;
/// An object that has changed each time is not looked at more often.
const LOOKS_MAX: u32 = 24;
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// What was counted of rows that were passed, as they are now.
#[derive(Default)]
struct Counted {
    /// Live bytes and sizes of each segment.
    segments: Vec<(i64, i64)>,
    index_bytes: i64,
}

impl Counted {
    fn extent(&mut self, offset: u64, extent: &Extent, sign: i64) {
        self.index_bytes += sign * extent_row_bytes(offset, extent) as i64;
        if let Some((live, _)) = self.segments.get_mut(extent.record.place.segment as usize) {
            *live += sign * extent.footprint() as i64;
        }
    }

    fn mark(&mut self, mark: Mark, sign: i64) {
        let segment = mark.segment.and_then(|segment| self.segments.get_mut(segment as usize));
        if let Some((_, sizes)) = segment {
            *sizes += sign;
        }
    }
}

/// An object whose extents are met, in order.
struct Lying {
    id: ObjectId,
    is_there: bool,
    /// `None`: not known.
    size: Option<u64>,
    end: u64,
}

impl Lying {
    /// What does not fit of its next extent.
    fn next(&mut self, offset: u64, extent: &Extent) -> impl Iterator<Item = IndexFinding> {
        let object = self.id;
        // Told once of each object.
        let is_orphan = !std::mem::replace(&mut self.is_there, true);
        let overlaps = offset < self.end;
        let end = offset.saturating_add(extent.len);
        self.end = self.end.max(end);
        let behind = self.size.filter(|size| end > *size);
        let orphan = is_orphan.then_some(IndexFinding::NoObject { object, offset });
        let overlap = overlaps.then_some(IndexFinding::Overlap { object, offset });
        let behind = behind.map(|size| IndexFinding::BehindEnd { object, offset, size });
        [orphan, overlap, behind].into_iter().flatten()
    }
}

struct Check<'a> {
    log: &'a ObjectLog,
    walked: Rc<Walked>,
    yields: bool,
    told: &'a dyn Fn(u64),
    report: RefCell<IndexReport>,
    /// Every row that goes into a sum could be read.
    counts: Cell<bool>,
    /// Objects that were passed and whose extents were not: their sizes, where those are known.
    sizes: RefCell<BTreeMap<[u8; ObjectId::KEY_BYTES], Option<u64>>>,
    /// Extents of the last page that were met before their objects.
    page: RefCell<Vec<(ObjectId, u64, Extent)>>,
    /// The object that was looked at last: all of it, so that its extents on later pages tell nothing new.
    looked_at_last: Cell<Option<ObjectId>>,
}

/// What is told of changes.
struct Walked {
    objects: Walk,
    extents: Walk,
    counted: RefCell<Counted>,
    /// The object that is read again, and whether it has changed since.
    looked_at: Cell<Option<ObjectId>>,
    has_changed: Cell<bool>,
}

impl IndexObserver for Walked {
    fn removed(&self, object: ObjectId, offset: u64, extent: &Extent) {
        if planted!("log-removals-not-told") {
            return;
        }
        if self.extents.has_passed(&rows::extent_key(object, offset)) {
            self.counted.borrow_mut().extent(offset, extent, -1);
        }
    }

    fn added(&self, object: ObjectId, offset: u64, extent: &Extent) {
        if self.extents.has_passed(&rows::extent_key(object, offset)) {
            self.counted.borrow_mut().extent(offset, extent, 1);
        }
    }

    fn mark_moved(&self, object: ObjectId, from: Mark, to: Mark) {
        if self.objects.has_passed(&ObjectRow::key(object)) {
            let mut counted = self.counted.borrow_mut();
            counted.mark(from, -1);
            counted.mark(to, 1);
        }
    }

    fn changed(&self, object: ObjectId, was_there: bool, is_there: bool) {
        if self.looked_at.get() == Some(object) {
            self.has_changed.set(true);
        }
        if self.objects.has_passed(&ObjectRow::key(object)) {
            let change = i64::from(is_there) - i64::from(was_there);
            self.counted.borrow_mut().index_bytes += change * OBJECT_ROW_BYTES as i64;
        }
    }
}

impl ObjectLog {
    /// Rows of the index, about.
    #[must_use]
    pub fn index_rows(&self) -> u64 {
        self.0.store.usage().rows
    }

    /// Checks the index while the log goes on; with `yields` others get as much time as each page took. `told` hears of
    /// the rows that were read. `None`: another check is running.
    ///
    /// # Errors
    ///
    /// When the log stopped.
    pub async fn check_index(
        &self,
        yields: bool,
        told: &dyn Fn(u64),
    ) -> Result<Option<IndexReport>, LogError> {
        let walk = |tag| Walk::new(&[tag], Some(&[tag + 1]));
        let segments = self.0.state.borrow().segments.count() as usize;
        let walked = Rc::new(Walked {
            objects: walk(OBJECTS),
            extents: walk(EXTENTS),
            counted: RefCell::new(Counted { segments: vec![(0, 0); segments], index_bytes: 0 }),
            looked_at: Cell::new(None),
            has_changed: Cell::new(false),
        });
        let Some(_observing) = self.observe(Rc::clone(&walked) as Rc<_>) else { return Ok(None) };
        let check = Check {
            log: self,
            walked,
            yields,
            told,
            report: RefCell::default(),
            counts: Cell::new(true),
            sizes: RefCell::default(),
            page: RefCell::default(),
            looked_at_last: Cell::default(),
        };
        check.beside().await?;
        check.objects().await?;
        self.0.check()?;
        check.sums();
        let mut report = check.report.take();
        report.memory_bytes = (segments * size_of::<(i64, i64)>()) as u64;
        Ok(Some(report))
    }
}

impl Check<'_> {
    fn row(&self, row: &'static str, key: &[u8]) {
        self.report.borrow_mut().row(row, key);
    }

    fn add(&self, finding: IndexFinding) {
        self.report.borrow_mut().add(finding);
    }

    /// Goes on by a page, and leaves as much time to others as that took.
    async fn page(
        &self,
        walk: &Walk,
        take: impl FnOnce(&[(Bytes, Bytes)], &State),
    ) -> Result<(), LogError> {
        let begun = reactor::now();
        let log = &self.log.0;
        log.check()?;
        walk.page(&log.store, |rows| {
            take(rows, &log.state.borrow());
            let mut report = self.report.borrow_mut();
            report.rows += rows.len() as u64;
            (self.told)(report.rows);
        })
        .await?;
        self.pause(begun).await;
        Ok(())
    }

    /// Gives others their time: as much as was taken since then, or a turn.
    async fn pause(&self, begun: reactor::Instant) {
        match self.yields {
            true => reactor::sleep(begun.elapsed()).await,
            false => reactor::yield_now().await,
        }
    }

    /// All rows but those of objects and extents.
    async fn beside(&self) -> Result<(), LogError> {
        let mut has_log = false;
        let mut tags = [EXTENTS, SEGMENTS, OBJECTS, STAGED];
        tags.sort_unstable();
        let starts = [vec![]].into_iter().chain(tags.map(|tag| vec![tag + 1]));
        let ends = tags.into_iter().map(Some).chain([None]);
        for (from, end) in starts.zip(ends) {
            let walk = Walk::new(&from, end.as_ref().map(std::slice::from_ref));
            while !walk.is_over() {
                self.page(&walk, |rows, state| {
                    for (key, value) in rows {
                        has_log |= &key[..] == LOG_KEY;
                        self.other(key, value, state);
                    }
                })
                .await?;
            }
        }
        if !has_log {
            self.add(IndexFinding::NoLog);
        }
        let walk = Walk::new(&[STAGED], Some(&[STAGED + 1]));
        while !walk.is_over() {
            self.page(&walk, |rows, _| {
                for (key, _) in rows.iter().filter(|(_, value)| staged_header(value).is_none()) {
                    self.row("staged", key);
                }
            })
            .await?;
        }
        self.segments().await
    }

    fn other(&self, key: &[u8], value: &[u8], state: &State) {
        match key {
            LOG_KEY => match LogRow::decode(value) {
                Err(_) => self.row("log", key),
                Ok(row) if row.index_bytes != state.index_bytes => {
                    let (says, has) = (row.index_bytes, state.index_bytes);
                    self.add(IndexFinding::IndexBytes { says, has });
                }
                Ok(_) => {}
            },
            LIVES_KEY if Lives::decode(value).is_ok() => {}
            LIVES_KEY => self.row("lives", key),
            // Whatever it says: a scrub begins anew where it says nothing.
            SCRUB_KEY => {}
            _ => self.row("unknown", key),
        }
    }

    /// The rows of segments against what the log has in memory.
    async fn segments(&self) -> Result<(), LogError> {
        let walk = Walk::new(&[SEGMENTS], Some(&[SEGMENTS + 1]));
        let mut seen = BTreeSet::new();
        while !walk.is_over() {
            self.page(&walk, |rows, state| {
                for (key, value) in rows {
                    let row = SegmentRow::decode(key, value).ok();
                    match row.filter(|(segment, _)| *segment < state.segments.count()) {
                        Some((segment, row)) => {
                            self.segment(segment, Some(row), state);
                            seen.insert(segment);
                        }
                        None => self.row("segment", key),
                    }
                }
            })
            .await?;
        }
        let count = self.log.0.state.borrow().segments.count();
        for segment in (0..count).filter(|segment| !seen.contains(segment)) {
            if !is_indexed(&self.log.0.state.borrow(), segment) {
                continue;
            }
            // It may have come since, behind the walk.
            let key = SegmentRow::key(segment);
            let walk = Walk::new(&key, Some(&[&key[..], &[0]].concat()));
            self.page(&walk, |rows, state| match rows.first() {
                None => self.segment(segment, None, state),
                // One that makes no sense was told.
                Some((key, value)) => {
                    if let Ok((_, row)) = SegmentRow::decode(key, value) {
                        self.segment(segment, Some(row), state);
                    }
                }
            })
            .await?;
        }
        Ok(())
    }

    /// What a round or a restart decides by. A row may be there a little longer than its segment, and come a little later.
    fn segment(&self, segment: u32, row: Option<SegmentRow>, state: &State) {
        if !is_indexed(state, segment) {
            return;
        }
        let known = state.segments.get(segment).row;
        let said = row
            .map_or((0, 0, 0), |row| (u64::from(row.indexed_stripes), row.live_bytes, row.sizes));
        for (what, says, has) in [
            ("indexed stripes", said.0, u64::from(known.indexed_stripes)),
            ("live bytes", said.1, known.live_bytes),
            ("sizes", said.2, known.sizes),
        ] {
            if says != has {
                self.add(IndexFinding::SegmentSum { segment, what, says, has });
            }
        }
    }

    /// Objects and their extents, side by side: the walk that is behind goes on.
    async fn objects(&self) -> Result<(), LogError> {
        let Walked { objects, extents, .. } = &*self.walked;
        let mut lying = None;
        loop {
            // An object comes before its extents, as its key is the beginning of theirs.
            let last = self.page.borrow().last().map(|(id, ..)| ObjectRow::key(*id));
            match last {
                Some(last) if !objects.has_passed(&last) => self.objects_page(objects).await?,
                Some(_) => self.compare(&mut lying).await?,
                None if !extents.is_over() => self.extents_page(extents).await?,
                None if !objects.is_over() => self.objects_page(objects).await?,
                None => return Ok(()),
            }
        }
    }

    async fn objects_page(&self, walk: &Walk) -> Result<(), LogError> {
        self.page(walk, |rows, state| {
            let mut counted = self.walked.counted.borrow_mut();
            let mut sizes = self.sizes.borrow_mut();
            // Only those that are behind the page of extents, or in it, will be asked for.
            let page = self.page.borrow();
            let last = page.last().map(|(id, ..)| id.to_key());
            let is_needed = |key: &[u8; ObjectId::KEY_BYTES]| match &last {
                Some(last) if key <= last => {
                    page.binary_search_by(|(id, ..)| id.to_key().cmp(key)).is_ok()
                }
                Some(_) => true,
                None => !self.walked.extents.is_over(),
            };
            if last.is_none() && self.walked.extents.is_over() {
                sizes.clear();
            }
            for (key, value) in rows {
                let Some(id) = object_of(key) else {
                    self.counts.set(false);
                    self.row("object", key);
                    continue;
                };
                self.report.borrow_mut().objects += 1;
                counted.index_bytes += OBJECT_ROW_BYTES as i64;
                let row = ObjectRow::decode(value).ok();
                if is_needed(&id.to_key()) {
                    sizes.insert(id.to_key(), row.as_ref().map(|row| row.size));
                }
                let Some(row) = row else {
                    self.counts.set(false);
                    self.row("object", key);
                    continue;
                };
                counted.mark(row.mark, 1);
                if let Some(segment) = row.mark.segment.filter(|at| !is_used(state, *at)) {
                    self.add(IndexFinding::NoMark { object: id, segment });
                }
            }
        })
        .await
    }

    async fn extents_page(&self, walk: &Walk) -> Result<(), LogError> {
        self.page(walk, |rows, state| {
            let log = self.log.0.log_row(state);
            let mut counted = self.walked.counted.borrow_mut();
            let mut page = self.page.borrow_mut();
            for (key, value) in rows {
                let decoded = object_of(key).zip(rows::decode_extent(key, value).ok());
                let Some((object, (offset, extent))) = decoded else {
                    self.counts.set(false);
                    self.row("extent", key);
                    continue;
                };
                self.report.borrow_mut().extents += 1;
                counted.extent(offset, &extent, 1);
                let place = extent.record.place;
                let segment = place.segment;
                let is_indexed = is_used(state, segment)
                    && place.stripe < state.segments.get(segment).row.indexed_stripes;
                if !is_indexed || !place.is_in(&log, extent.record.stored) {
                    self.add(IndexFinding::Outside { object, offset, segment });
                }
                page.push((object, offset, extent));
            }
        })
        .await
    }

    /// Extents of a page against their objects, at first sight.
    async fn compare(&self, lying: &mut Option<Lying>) -> Result<(), LogError> {
        let mut suspects = BTreeSet::new();
        let page = self.page.take();
        let last = page.last().map(|(id, ..)| id.to_key());
        {
            let sizes = self.sizes.borrow();
            for (id, offset, extent) in &page {
                if lying.as_ref().is_none_or(|at| at.id != *id) {
                    let size = sizes.get(&id.to_key());
                    let (is_there, size) = (size.is_some(), size.copied().flatten());
                    *lying = Some(Lying { id: *id, is_there, size, end: 0 });
                }
                let Some(at) = lying.as_mut() else { continue };
                let mut found = at.next(*offset, extent).peekable();
                if found.peek().is_some() {
                    suspects.insert(id.to_key());
                }
                if planted!("log-first-sight-believed") {
                    found.for_each(|finding| self.add(finding));
                }
            }
        }
        if let Some(last) = last {
            let mut sizes = self.sizes.borrow_mut();
            *sizes = sizes.split_off(&last);
        }
        for suspect in suspects.into_iter().map(ObjectId::from_key) {
            if self.looked_at_last.replace(Some(suspect)) != Some(suspect) {
                self.look(suspect).await?;
            }
        }
        Ok(())
    }

    /// Reads the rows of an object until nothing of it changes meanwhile.
    async fn look(&self, object: ObjectId) -> Result<(), LogError> {
        let mut pause = PAUSE_MIN;
        for _ in 0..LOOKS_MAX {
            self.walked.looked_at.set(Some(object));
            self.walked.has_changed.set(false);
            let found = self.rows_of(object).await?;
            if !self.walked.has_changed.get() || planted!("log-object-of-two-moments") {
                found.into_iter().for_each(|finding| self.add(finding));
                self.walked.looked_at.set(None);
                return Ok(());
            }
            reactor::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
        self.walked.looked_at.set(None);
        self.report.borrow_mut().unsettled += 1;
        Ok(())
    }

    /// What does not fit of an object, if all its rows are of one moment.
    async fn rows_of(&self, object: ObjectId) -> Result<Vec<IndexFinding>, LogError> {
        let store = &self.log.0.store;
        let row = store.get(&ObjectRow::key(object)).await?;
        if planted!("log-object-of-two-moments") {
            reactor::sleep(PAUSE_MAX / 4).await;
        }
        let size = row.as_ref().and_then(|row| ObjectRow::decode(row).ok()).map(|row| row.size);
        let mut lying = Lying { id: object, is_there: row.is_some(), size, end: 0 };
        let mut found = Vec::new();
        let (mut from, to) = (rows::extent_key(object, 0), rows::extent_key(object, u64::MAX));
        let mut is_first = true;
        loop {
            let behind =
                if is_first { Bound::Included(&from[..]) } else { Bound::Excluded(&from[..]) };
            let begun = reactor::now();
            let page = store.scan_page(behind, Bound::Included(&to), PAGE_ROWS).await?;
            self.pause(begun).await;
            for (key, value) in &page.rows {
                // Those that make no sense were told.
                let Ok((offset, extent)) = rows::decode_extent(key, value) else { continue };
                if found.len() < FINDINGS_KEPT {
                    found.extend(lying.next(offset, &extent));
                }
            }
            match page.upto {
                Some(upto) => (from, is_first) = (upto.to_vec(), false),
                None => return Ok(found),
            }
        }
    }

    /// What was counted against what the log goes by, in one step.
    fn sums(&self) {
        if !self.counts.get() {
            return;
        }
        let state = self.log.0.state.borrow();
        let counted = self.walked.counted.borrow();
        let positive = |count: i64| u64::try_from(count).unwrap_or(0);
        for ((segment, slot), (live, sizes)) in state.segments.iter().zip(&counted.segments) {
            let sums = [
                ("live bytes", slot.row.live_bytes, positive(*live)),
                ("sizes", slot.row.sizes, positive(*sizes)),
            ];
            for (what, says, has) in sums.into_iter().filter(|(_, says, has)| says != has) {
                self.add(IndexFinding::SegmentSum { segment, what, says, has });
            }
        }
        let (says, has) = (state.index_bytes, positive(counted.index_bytes));
        if says != has {
            self.add(IndexFinding::IndexBytes { says, has });
        }
    }
}

/// Whether the index knows stripes of a segment, and it is not being given back.
fn is_indexed(state: &State, segment: u32) -> bool {
    let slot = state.segments.get(segment);
    let is_kept = matches!(slot.state, SegmentState::Open | SegmentState::Closed);
    is_kept && slot.row.indexed_stripes > 0
}

/// Whether the log has such a segment, and something in it.
fn is_used(state: &State, segment: u32) -> bool {
    segment < state.segments.count() && state.segments.get(segment).state != SegmentState::Free
}
