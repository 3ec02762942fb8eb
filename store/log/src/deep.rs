//! Fsck of an index against its segments: each stripe that it counts is there, each extent is a record of its stripe, and
//! the records, replayed in the order of their versions, amount to what the index says.
//!
//! That holds at any time, also after a crash: stripes that no index knows do not count, and what is staged is in
//! neither. Whether data fits its checksums is the scrub's to say.
//!
//! Memory grows with the index, as when it is made anew. Nothing is written but what reading repairs.
//!
//! docs/design/0013-fsck-space-quotas.md.

use crate::LogError;
use crate::extents::{Extent, Place, Record, Watch};
use crate::format::RecordHeader;
use crate::fsck::{Cursor, FINDINGS_KEPT};
use crate::log::{Config, Inner};
use crate::object::{Change, View};
use crate::open::segments_of;
use crate::rebuild::Found;
use crate::rows::{
    self, EXTENTS, LOG_KEY, Lives, LogRow, Mark, OBJECTS, ObjectRow, SEGMENTS, SegmentRow,
};
use crate::segment::Segments;
use crate::stripe::change_of;
use levada_base::ids::ObjectId;
use levada_base::{Epoch, probe};
use levada_kv::Store;
use levada_raid::Array;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

/// The bytes of an object's name in keys.
const ID_BYTES: usize = 24;

/// Something in which an index and its segments differ.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SegmentFinding {
    #[error("stripe {stripe} of segment {segment} is not there")]
    NoStripe { segment: u32, stripe: u32 },
    #[error(
        "the bytes from {offset} on are not in stripe {stripe} of segment {segment}, where the index has them"
    )]
    NoRecord { object: ObjectId, offset: u64, segment: u32, stripe: u32 },
    #[error("the index has it, and by the segments it was deleted, or never was")]
    NotInSegments { object: ObjectId },
    #[error("the segments have it, with {size} bytes, and the index does not")]
    NotInIndex { object: ObjectId, size: u64 },
    #[error("the index says that it has {says} bytes, and by the segments it has {has}")]
    Size { object: ObjectId, says: u64, has: u64 },
    #[error("the bytes from {offset} on are those of another change than the segments have")]
    Bytes { object: ObjectId, offset: u64 },
}

impl SegmentFinding {
    /// The sort of finding, for programs: `docs/fsck.md` lists them.
    #[must_use]
    pub fn sort(&self) -> &'static str {
        match self {
            Self::NoStripe { .. } => "stripe",
            Self::NoRecord { .. } => "record",
            Self::NotInSegments { .. }
            | Self::NotInIndex { .. }
            | Self::Size { .. }
            | Self::Bytes { .. } => "replay",
        }
    }

    /// The object that it is about.
    #[must_use]
    pub fn object(&self) -> Option<ObjectId> {
        match self {
            Self::NoStripe { .. } => None,
            Self::NoRecord { object, .. }
            | Self::NotInSegments { object }
            | Self::NotInIndex { object, .. }
            | Self::Size { object, .. }
            | Self::Bytes { object, .. } => Some(*object),
        }
    }

    /// What the index says, and what the segments amount to.
    #[must_use]
    pub fn says_has(&self) -> Option<(u64, u64)> {
        match *self {
            Self::Size { says, has, .. } => Some((says, has)),
            _ => None,
        }
    }
}

/// What a check of an index against its segments came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SegmentReport {
    pub stripes: u64,
    pub records: u64,
    /// Of these at most 100,000 are kept.
    pub findings: Vec<SegmentFinding>,
    /// All findings.
    pub found: u64,
    /// False where a stripe is missing: what was in it would show as differences everywhere.
    pub is_replayed: bool,
}

impl SegmentReport {
    fn add(&mut self, finding: SegmentFinding) {
        self.found += 1;
        if self.findings.len() < FINDINGS_KEPT {
            self.findings.push(finding);
        }
    }
}

/// Reads what all stripes of an index say of themselves, and holds the index against it. No log is open over either.
/// `told` hears of the stripes that were read, and how many there are.
///
/// # Errors
///
/// [`LogError::Index`] when the store holds no log or its rows of segments make no sense, [`LogError::Foreign`] when it is
/// of another array, [`LogError::Block`] when a stripe cannot be read now, and when the store cannot.
pub async fn check_segments(
    array: Rc<dyn Array>,
    store: &Store,
    mut config: Config,
    epoch: Epoch,
    told: &dyn Fn(u64, u64),
) -> Result<SegmentReport, LogError> {
    let _busy = probe::busy("log deep check");
    let row = store.get(LOG_KEY).await?.ok_or(LogError::Index { row: "log" })?;
    let row = LogRow::decode(&row)?;
    config.segment_stripes = row.segment_stripes;
    let count = segments_of(&array, &config)?;
    if row.stripe_bytes != array.geometry().stripe_bytes {
        return Err(LogError::Foreign { what: "another geometry" });
    }
    let mut segments = Vec::new();
    let mut cursor = Cursor::new(store, SEGMENTS);
    while let Some((key, value)) = cursor.next().await? {
        let (segment, row) = SegmentRow::decode(&key, &value)?;
        if segment >= count || row.indexed_stripes > config.segment_stripes {
            return Err(LogError::Index { row: "segment" });
        }
        segments.push((segment, row));
    }
    // In the order in which they were begun; copies of one record are alike.
    segments.sort_by_key(|(_, row)| row.generation);
    let table = Segments::new(count, config.segment_stripes, 1);
    let log = Inner::new(array, store.clone(), config, epoch, &row, Lives::default(), table);
    let mut check = Check { store, report: SegmentReport::default(), records: HashMap::new() };
    let found = check.read(&log, &segments, told).await?;
    check.extents().await?;
    if check.report.is_replayed {
        check.compare(replay(found)).await?;
    }
    Ok(check.report)
}

struct Check<'a> {
    store: &'a Store,
    report: SegmentReport,
    /// Those with data.
    records: HashMap<Place, (ObjectId, Rc<Record>)>,
}

/// A change of an object, and the segment that its record is in.
struct Replayed {
    object: ObjectId,
    version: u64,
    change: Change,
    segment: u32,
}

impl Check<'_> {
    /// What the stripes say that the index counts.
    async fn read(
        &mut self,
        log: &Rc<Inner>,
        segments: &[(u32, SegmentRow)],
        told: &dyn Fn(u64, u64),
    ) -> Result<Vec<Replayed>, LogError> {
        let total = segments.iter().map(|(_, row)| u64::from(row.indexed_stripes)).sum();
        let mut changes = Vec::new();
        let mut is_whole = true;
        for (segment, row) in segments {
            for stripe in 0..row.indexed_stripes {
                told(self.report.stripes, total);
                self.report.stripes += 1;
                let Some(headers) = log.records_of(*segment, stripe, row.generation).await? else {
                    // One in which nothing lives was being given back.
                    if row.live_bytes > 0 {
                        self.report.add(SegmentFinding::NoStripe { segment: *segment, stripe });
                        is_whole = false;
                    }
                    continue;
                };
                self.report.records += headers.len() as u64;
                for header in headers {
                    let (object, version) = (header.object, header.version);
                    let change = change_of(&header).unwrap_or_else(|| {
                        let record = Found { header, segment: *segment, stripe }.record();
                        self.records.insert(record.place, (object, Rc::clone(&record)));
                        Change::Write(record)
                    });
                    changes.push(Replayed { object, version, change, segment: *segment });
                }
            }
        }
        self.report.is_replayed = is_whole;
        Ok(changes)
    }

    /// Each extent of the index is where it says.
    async fn extents(&mut self) -> Result<(), LogError> {
        let mut extents = Cursor::new(self.store, EXTENTS);
        while let Some((key, value)) = extents.next().await? {
            // Those that make no sense are told by the check of the index.
            let Ok((offset, extent)) = rows::decode_extent(&key, &value) else { continue };
            let Some(object) = object_of(&key) else { continue };
            let place = extent.record.place;
            let known = self.records.get(&place);
            if !known.is_some_and(|(of, record)| *of == object && is_part(offset, &extent, record))
            {
                let Place { segment, stripe, .. } = place;
                self.report.add(SegmentFinding::NoRecord { object, offset, segment, stripe });
            }
        }
        Ok(())
    }

    /// Objects as the index has them against those of the replay.
    async fn compare(
        &mut self,
        mut replayed: BTreeMap<[u8; ID_BYTES], View>,
    ) -> Result<(), LogError> {
        let mut objects = Cursor::new(self.store, OBJECTS);
        let mut extents = Cursor::new(self.store, EXTENTS);
        while let Some((key, value)) = objects.next().await? {
            let Some(object) = object_of(&key) else { continue };
            let id = object.to_key();
            while let Some(before) = replayed.first_entry().filter(|first| *first.key() < id) {
                let (id, view) = before.remove_entry();
                self.only_replayed(ObjectId::from_key(id), &view);
            }
            let pieces = pieces_of(&mut extents, id).await?;
            let view = replayed.remove(&id).filter(|view| view.exists);
            let Ok(row) = ObjectRow::decode(&value) else { continue };
            match view {
                None => self.report.add(SegmentFinding::NotInSegments { object }),
                Some(view) => self.same(object, row.size, &pieces, &view),
            }
        }
        for (id, view) in replayed {
            self.only_replayed(ObjectId::from_key(id), &view);
        }
        Ok(())
    }

    fn only_replayed(&mut self, object: ObjectId, view: &View) {
        if view.exists {
            self.report.add(SegmentFinding::NotInIndex { object, size: view.size });
        }
    }

    fn same(&mut self, object: ObjectId, size: u64, pieces: &Pieces, view: &View) {
        if view.size != size {
            self.report.add(SegmentFinding::Size { object, says: size, has: view.size });
        }
        let mut replayed = Pieces::default();
        for (offset, extent) in view.extents.iter() {
            replayed.push(offset, extent);
        }
        if let Some(offset) = pieces.differ_from(&replayed) {
            self.report.add(SegmentFinding::Bytes { object, offset });
        }
    }
}

/// What all changes amount to.
fn replay(mut changes: Vec<Replayed>) -> BTreeMap<[u8; ID_BYTES], View> {
    // Stable: of copies the newest stays the last.
    changes.sort_by_key(|change| change.version);
    let mut views: BTreeMap<[u8; ID_BYTES], View> = BTreeMap::new();
    for Replayed { object, version, change, segment } in changes {
        let view = views.entry(object.to_key()).or_default();
        view.apply(version, &change, segment, &mut Unwatched);
    }
    views
}

struct Unwatched;

impl Watch for Unwatched {
    fn removed(&mut self, _: u64, _: &Extent) {}
    fn added(&mut self, _: u64, _: &Extent) {}
    fn mark_moved(&mut self, _: Mark, _: Mark) {}
}

/// Which change the bytes of an object are of, however they are cut into records: offset, end, version.
#[derive(Default)]
struct Pieces(Vec<(u64, u64, u64)>);

impl Pieces {
    fn push(&mut self, offset: u64, extent: &Extent) {
        let (end, version) = (offset + extent.len, extent.record.version);
        match self.0.last_mut() {
            Some((_, last, of)) if *last == offset && *of == version => *last = end,
            _ => self.0.push((offset, end, version)),
        }
    }

    /// Where they begin to differ.
    fn differ_from(&self, other: &Self) -> Option<u64> {
        let first = self.0.iter().zip(&other.0).position(|(ours, theirs)| ours != theirs);
        let at = first.unwrap_or(self.0.len().min(other.0.len()));
        let starts = [self.0.get(at), other.0.get(at)].into_iter().flatten();
        starts.map(|(offset, _, _)| *offset).min()
    }
}

/// The pieces of an object; the cursor stands behind them afterwards.
async fn pieces_of(extents: &mut Cursor<'_>, id: [u8; ID_BYTES]) -> Result<Pieces, LogError> {
    let mut pieces = Pieces::default();
    while let Some((key, value)) = extents.peek().await? {
        let of = object_of(key).map(ObjectId::to_key);
        if of.is_some_and(|of| of > id) {
            break;
        }
        if of == Some(id)
            && let Ok((offset, extent)) = rows::decode_extent(key, value)
        {
            pieces.push(offset, &extent);
        }
        extents.next().await?;
    }
    Ok(pieces)
}

/// True when an extent of the index is some of the bytes of a record, with its checksums.
fn is_part(offset: u64, extent: &Extent, record: &Record) -> bool {
    let ours = &extent.record;
    let (first, last) = extent.blocks(offset);
    ours.version == record.version
        && ours.offset == record.offset
        && ours.stored == record.stored
        && record.crcs.get(first as usize..last as usize) == Some(&ours.crcs[..])
}

/// The object that a row belongs to, by its key.
fn object_of(key: &[u8]) -> Option<ObjectId> {
    Some(ObjectId::from_key(*key.get(1..)?.first_chunk()?))
}

impl Inner {
    /// The records of a stripe; `None` when it is not there, or of another generation.
    async fn records_of(
        self: &Rc<Self>,
        segment: u32,
        stripe: u32,
        generation: u64,
    ) -> Result<Option<Vec<RecordHeader>>, LogError> {
        let at = u64::from(segment) * u64::from(self.config.segment_stripes) + u64::from(stripe);
        if !self.array.is_written(at) {
            return Ok(None);
        }
        match self.summary_of(segment, stripe, Some(generation)).await? {
            Some((_, records)) => Ok(Some(records)),
            None => {
                self.must_be_readable(segment, stripe).await?;
                Ok(None)
            }
        }
    }
}
