//! Fsck of an index: whether its rows fit together, and which objects they amount to.
//!
//! Reads rows only, of a store over which no log is open: what an open log decides by (a segment in which nothing is
//! said to live is given back when it is opened) must be right before.
//!
//! What always holds: memory is bounded by the number of segments and by what is staged, and nothing is written but by
//! [`IndexReport::mend`].
//!
//! docs/design/0013-fsck-space-quotas.md.

use crate::LogError;
use crate::extents::Extent;
use crate::format::{RecordHeader, RecordKind};
use crate::rows::{
    self, EXTENTS, LIVES_KEY, LOG_KEY, Lives, LogRow, OBJECTS, ObjectRow, SCRUB_KEY, SEGMENTS,
    STAGED, SegmentRow,
};
use crate::staged::staged_header;
use crate::write::{OBJECT_ROW_BYTES, extent_row_bytes};
use levada_base::ids::ObjectId;
use levada_kv::{Batch, Bytes, KvError, Store};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;

const PAGE_ROWS: usize = 1024;
/// Findings that are told; more are counted.
pub(crate) const FINDINGS_KEPT: usize = 100_000;
/// Rows put by one batch.
const ROWS_PER_BATCH: usize = 512;

/// Something in an index that does not fit together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IndexFinding {
    /// Whoever asks for what it holds gets an error.
    #[error("the {row} row {} makes no sense", hex(.key))]
    Row { row: &'static str, key: Vec<u8> },
    #[error("the store holds no log")]
    NoLog,
    #[error("there are bytes from {offset} on, and no object")]
    NoObject { object: ObjectId, offset: u64 },
    #[error("the bytes from {offset} on begin within those before")]
    Overlap { object: ObjectId, offset: u64 },
    #[error("the bytes from {offset} on reach behind its end, {size}")]
    BehindEnd { object: ObjectId, offset: u64, size: u64 },
    #[error("the bytes from {offset} on lie in segment {segment}, where the log has none")]
    Outside { object: ObjectId, offset: u64, segment: u32 },
    #[error("the record of its size lies in segment {segment}, where the log has none")]
    NoMark { object: ObjectId, segment: u32 },
    #[error("the {what} of segment {segment} stand at {says}, and should be {has}")]
    SegmentSum { segment: u32, what: &'static str, says: u64, has: u64 },
    #[error("the bytes of the index stand at {says}, and should be {has}")]
    IndexBytes { says: u64, has: u64 },
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl IndexFinding {
    /// The sort of finding, for programs: `docs/fsck.md` lists them.
    #[must_use]
    pub fn sort(&self) -> &'static str {
        match self {
            Self::Row { .. } => "index-row",
            Self::NoLog => "no-index",
            Self::NoObject { .. } => "extent-object",
            Self::Overlap { .. }
            | Self::BehindEnd { .. }
            | Self::Outside { .. }
            | Self::NoMark { .. } => "extent",
            Self::SegmentSum { .. } | Self::IndexBytes { .. } => "index-sum",
        }
    }

    /// The object that it is about.
    #[must_use]
    pub fn object(&self) -> Option<ObjectId> {
        match self {
            Self::NoObject { object, .. }
            | Self::Overlap { object, .. }
            | Self::BehindEnd { object, .. }
            | Self::Outside { object, .. }
            | Self::NoMark { object, .. } => Some(*object),
            Self::Row { key, .. } => object_of(key),
            Self::NoLog | Self::SegmentSum { .. } | Self::IndexBytes { .. } => None,
        }
    }

    /// What the row says, and what was counted.
    #[must_use]
    pub fn says_has(&self) -> Option<(u64, u64)> {
        match *self {
            Self::SegmentSum { says, has, .. } | Self::IndexBytes { says, has } => {
                Some((says, has))
            }
            _ => None,
        }
    }

    /// A sum, which follows from the rows that are there.
    #[must_use]
    pub fn is_sum(&self) -> bool {
        matches!(self, Self::SegmentSum { .. } | Self::IndexBytes { .. })
    }
}

/// The object that a row belongs to, by its key.
pub(crate) fn object_of(key: &[u8]) -> Option<ObjectId> {
    let (tag, rest) = key.split_first()?;
    let is_object = matches!((*tag, key.len()), (OBJECTS, 25) | (EXTENTS, 33));
    is_object.then(|| ObjectId::from_key(*rest.first_chunk().expect("24 bytes at least")))
}

/// What a check of an index came to.
#[derive(Clone, Debug, Default)]
pub struct IndexReport {
    pub objects: u64,
    pub extents: u64,
    pub rows: u64,
    /// Of these at most 100,000 are kept.
    pub findings: Vec<IndexFinding>,
    /// All findings.
    pub found: u64,
    /// The most memory that it took, about.
    pub memory_bytes: u64,
    /// Of a log that goes on: objects that did not fit at first sight, and changed whenever they were looked at again.
    pub unsettled: u64,
    /// What the sums should be, where they could be counted and are not.
    segments: BTreeMap<u32, SegmentRow>,
    index_bytes: Option<u64>,
    /// By file system, of which there is one where nothing is damaged.
    last_inos: BTreeMap<u64, u64>,
}

impl IndexReport {
    /// The highest inode number that an object of a file system has, staged ones included; 0: there are none.
    #[must_use]
    pub fn last_ino(&self, fs: u64) -> u64 {
        self.last_inos.get(&fs).copied().unwrap_or(0)
    }

    pub(crate) fn add(&mut self, finding: IndexFinding) {
        self.found += 1;
        if self.findings.len() < FINDINGS_KEPT {
            self.findings.push(finding);
        }
    }

    pub(crate) fn row(&mut self, row: &'static str, key: &[u8]) {
        self.add(IndexFinding::Row { row, key: key.to_vec() });
    }

    /// True when a log may be opened over this index: nothing that it decides by is wrong.
    #[must_use]
    pub fn is_safe_to_open(&self) -> bool {
        let only_of_objects = |finding: &IndexFinding| match finding {
            IndexFinding::Row { row, .. } => matches!(*row, "object" | "extent"),
            IndexFinding::NoObject { .. }
            | IndexFinding::Overlap { .. }
            | IndexFinding::BehindEnd { .. } => true,
            IndexFinding::NoLog
            | IndexFinding::Outside { .. }
            | IndexFinding::NoMark { .. }
            | IndexFinding::SegmentSum { .. }
            | IndexFinding::IndexBytes { .. } => false,
        };
        self.found == self.findings.len() as u64 && self.findings.iter().all(only_of_objects)
    }

    /// False for a store that holds no log at all.
    #[must_use]
    pub fn has_log(&self) -> bool {
        !self.findings.contains(&IndexFinding::NoLog)
    }

    /// Sets the sums to what was counted, durably. Nothing else may have changed since.
    ///
    /// # Errors
    ///
    /// When the store fails.
    pub async fn mend(&self, store: &Store) -> Result<(), LogError> {
        let mut batch = Batch::default();
        for (segment, row) in &self.segments {
            batch.put(&SegmentRow::key(*segment), &row.encode());
        }
        if let Some(index_bytes) = self.index_bytes {
            let row = store.get(LOG_KEY).await?.ok_or(LogError::Index { row: "log" })?;
            let row = LogRow { index_bytes, ..LogRow::decode(&row)? };
            batch.put(LOG_KEY, &row.encode());
        }
        let mut applied = store.last_seq();
        while !batch.changes.is_empty() {
            let rest = batch.changes.split_off(batch.changes.len().min(ROWS_PER_BATCH));
            store.room_to_free().await?;
            applied = store.apply(batch)?;
            batch = Batch { changes: rest };
        }
        Ok(store.durable(applied).await?)
    }
}

/// Rows with one tag, page by page.
pub(crate) struct Cursor<'a> {
    store: &'a Store,
    tag: u8,
    /// Behind this key; `None`: all were read.
    from: Option<Vec<u8>>,
    page: VecDeque<(Bytes, Bytes)>,
}

impl<'a> Cursor<'a> {
    pub fn new(store: &'a Store, tag: u8) -> Self {
        Self { store, tag, from: Some(vec![tag]), page: VecDeque::new() }
    }

    pub async fn peek(&mut self) -> Result<Option<&(Bytes, Bytes)>, KvError> {
        while self.page.is_empty()
            && let Some(from) = self.from.take()
        {
            let to = [self.tag + 1];
            // A key that is the tag alone is met with those of no known sort.
            let (from, to) = (Bound::Excluded(&from[..]), Bound::Excluded(&to[..]));
            let page = self.store.scan_page(from, to, PAGE_ROWS).await?;
            self.from = page.upto.map(|upto| upto.to_vec());
            self.page = page.rows.into();
        }
        Ok(self.page.front())
    }

    pub async fn next(&mut self) -> Result<Option<(Bytes, Bytes)>, KvError> {
        self.peek().await?;
        Ok(self.page.pop_front())
    }
}

/// What was counted of a segment.
#[derive(Clone, Copy)]
struct Counted {
    row: SegmentRow,
    live_bytes: u64,
    sizes: u64,
}

/// Reads every row of an index over which no log is open, and says what does not fit together. `told` hears of the
/// rows that were read.
///
/// # Errors
///
/// When the store cannot be read.
pub async fn check_index(store: &Store, told: &dyn Fn(u64)) -> Result<IndexReport, KvError> {
    let mut check = Check {
        store,
        told,
        report: IndexReport::default(),
        counts: true,
        log: None,
        unknown: BTreeSet::new(),
    };
    check.beside().await?;
    let mut segments = check.segments().await?;
    check.objects(&mut segments).await?;
    Ok(check.sums(segments))
}

struct Check<'a> {
    store: &'a Store,
    told: &'a dyn Fn(u64),
    report: IndexReport,
    /// Every row that goes into a sum could be read.
    counts: bool,
    log: Option<LogRow>,
    /// Segments whose rows make no sense: nothing is held against them.
    unknown: BTreeSet<u32>,
}

/// The object whose rows are being read.
#[derive(Default)]
struct Current {
    /// It exists; none of the size when its row makes no sense.
    object: Option<(ObjectId, Option<u64>)>,
    /// Of its last extent.
    end: u64,
}

impl Check<'_> {
    fn read(&mut self) {
        self.report.rows += 1;
        if self.report.rows.is_multiple_of(PAGE_ROWS as u64) {
            (self.told)(self.report.rows);
        }
    }

    /// The rows of the log itself and what is staged, and those of no known sort.
    async fn beside(&mut self) -> Result<(), KvError> {
        self.log = match self.store.get(LOG_KEY).await? {
            None => {
                self.report.add(IndexFinding::NoLog);
                None
            }
            Some(row) => {
                let row = LogRow::decode(&row);
                if row.is_err() {
                    self.report.row("log", LOG_KEY);
                }
                row.ok()
            }
        };
        if let Some(lives) = self.store.get(LIVES_KEY).await?
            && Lives::decode(&lives).is_err()
        {
            self.report.row("lives", LIVES_KEY);
        }
        let mut staged = Cursor::new(self.store, STAGED);
        while let Some((key, value)) = staged.next().await? {
            self.read();
            match staged_header(&value) {
                Some(header) => self.note(header.object),
                None => self.report.row("staged", &key),
            }
        }
        for tag in (0..=u8::MAX).filter(|tag| ![EXTENTS, SEGMENTS, OBJECTS, STAGED].contains(tag)) {
            let (from, to) = ([tag], [tag.saturating_add(1)]);
            let to = if tag == u8::MAX { Bound::Unbounded } else { Bound::Excluded(&to[..]) };
            let page = self.store.scan_page(Bound::Included(&from), to, PAGE_ROWS).await?;
            for (key, _) in page.rows {
                self.read();
                if ![LOG_KEY, LIVES_KEY, SCRUB_KEY].contains(&&key[..]) {
                    self.report.row("unknown", &key);
                }
            }
        }
        Ok(())
    }

    fn note(&mut self, object: ObjectId) {
        let last = self.report.last_inos.entry(object.fs).or_default();
        *last = object.ino.0.max(*last);
    }

    async fn segments(&mut self) -> Result<BTreeMap<u32, Counted>, KvError> {
        let mut segments = BTreeMap::new();
        let mut rows = Cursor::new(self.store, SEGMENTS);
        while let Some((key, value)) = rows.next().await? {
            self.read();
            let row = SegmentRow::decode(&key, &value).ok();
            let fits = |(segment, row): &(u32, SegmentRow)| {
                self.log.is_none_or(|log| {
                    log.has_segment(*segment) && row.indexed_stripes <= log.segment_stripes
                })
            };
            match row.filter(fits) {
                Some((segment, row)) => {
                    segments.insert(segment, Counted { row, live_bytes: 0, sizes: 0 });
                }
                None => {
                    self.counts = false;
                    let number = key[1..].first_chunk().map(|number| u32::from_be_bytes(*number));
                    self.unknown.extend(number);
                    self.report.row("segment", &key);
                }
            }
        }
        self.report.memory_bytes = (segments.len() * (size_of::<Counted>() + 8)) as u64;
        Ok(segments)
    }

    /// Objects and their extents, side by side.
    async fn objects(&mut self, segments: &mut BTreeMap<u32, Counted>) -> Result<(), KvError> {
        let mut objects = Cursor::new(self.store, OBJECTS);
        let mut extents = Cursor::new(self.store, EXTENTS);
        let mut current = Current::default();
        loop {
            let object = objects.peek().await?.map(|(key, _)| key[1..].to_vec());
            let extent = extents.peek().await?.map(|(key, _)| key[1..].to_vec());
            // An object comes before its extents, as its key is the beginning of theirs.
            let is_object = match (&object, &extent) {
                (Some(object), Some(extent)) => object <= extent,
                (object, None) if object.is_none() => return Ok(()),
                (object, _) => object.is_some(),
            };
            let rows = if is_object { &mut objects } else { &mut extents };
            let Some((key, value)) = rows.next().await? else { return Ok(()) };
            self.read();
            if is_object {
                self.object(&key, &value, &mut current, segments);
            } else {
                self.extent(&key, &value, &mut current, segments);
            }
        }
    }

    fn object(
        &mut self,
        key: &[u8],
        value: &[u8],
        current: &mut Current,
        segments: &mut BTreeMap<u32, Counted>,
    ) {
        let Some(id) = object_of(key) else {
            self.counts = false;
            return self.report.row("object", key);
        };
        self.note(id);
        self.report.objects += 1;
        *self.report.index_bytes.get_or_insert(0) += OBJECT_ROW_BYTES;
        let row = ObjectRow::decode(value).ok();
        *current = Current { object: Some((id, row.as_ref().map(|row| row.size))), end: 0 };
        let Some(row) = row else {
            self.counts = false;
            return self.report.row("object", key);
        };
        let Some(segment) = row.mark.segment else { return };
        match segments.get_mut(&segment) {
            Some(counted) => counted.sizes += 1,
            None if self.unknown.contains(&segment) => {}
            // The cleaner copies what carries a size before it gives a segment back.
            None => self.report.add(IndexFinding::NoMark { object: id, segment }),
        }
    }

    fn extent(
        &mut self,
        key: &[u8],
        value: &[u8],
        current: &mut Current,
        segments: &mut BTreeMap<u32, Counted>,
    ) {
        let decoded = object_of(key).zip(rows::decode_extent(key, value).ok());
        let Some((object, (offset, extent))) = decoded else {
            self.counts = false;
            return self.report.row("extent", key);
        };
        self.note(object);
        self.report.extents += 1;
        *self.report.index_bytes.get_or_insert(0) += extent_row_bytes(offset, &extent);
        if current.object.is_none_or(|(of, _)| of != object) {
            // Told once of each object.
            self.report.add(IndexFinding::NoObject { object, offset });
            *current = Current { object: Some((object, None)), end: 0 };
        }
        if offset < current.end {
            self.report.add(IndexFinding::Overlap { object, offset });
        }
        current.end = current.end.max(offset.saturating_add(extent.len));
        if let Some((_, Some(size))) = current.object
            && offset.saturating_add(extent.len) > size
        {
            self.report.add(IndexFinding::BehindEnd { object, offset, size });
        }
        if !self.count(segments, &extent) {
            let segment = extent.record.place.segment;
            self.report.add(IndexFinding::Outside { object, offset, segment });
        }
    }

    /// False when there is nothing where the extent is said to lie.
    fn count(&mut self, segments: &mut BTreeMap<u32, Counted>, extent: &Extent) -> bool {
        let place = extent.record.place;
        let is_in_log = self.log.is_none_or(|log| place.is_in(&log, extent.record.stored));
        let Some(counted) = segments.get_mut(&place.segment) else {
            return self.unknown.contains(&place.segment);
        };
        counted.live_bytes += extent.footprint();
        is_in_log && place.stripe < counted.row.indexed_stripes
    }

    /// What was counted against what is said.
    fn sums(mut self, segments: BTreeMap<u32, Counted>) -> IndexReport {
        let has = self.report.index_bytes.take().unwrap_or(0);
        if !self.counts {
            return self.report;
        }
        for (segment, Counted { row, live_bytes, sizes }) in segments {
            let sums = [("live bytes", row.live_bytes, live_bytes), ("sizes", row.sizes, sizes)];
            for (what, says, has) in sums.into_iter().filter(|(_, says, has)| says != has) {
                self.report.add(IndexFinding::SegmentSum { segment, what, says, has });
                let row = SegmentRow { live_bytes, sizes, ..row };
                self.report.segments.insert(segment, row);
            }
        }
        if let Some(says) = self.log.map(|log| log.index_bytes).filter(|says| *says != has) {
            self.report.add(IndexFinding::IndexBytes { says, has });
            self.report.index_bytes = Some(has);
        }
        self.report
    }
}

/// An object as an index has it, with what is staged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexedObject {
    pub id: ObjectId,
    /// `None`: its row makes no sense.
    pub size: Option<u64>,
}

/// The objects of an index over which no log is open, in the order of their keys.
pub struct IndexedObjects<'a> {
    rows: Cursor<'a>,
    staged: BTreeMap<ObjectKey, Vec<RecordHeader>>,
}

type ObjectKey = [u8; ObjectId::KEY_BYTES];

impl<'a> IndexedObjects<'a> {
    /// # Errors
    ///
    /// When the store cannot be read.
    pub async fn new(store: &'a Store) -> Result<Self, KvError> {
        let mut staged: BTreeMap<ObjectKey, Vec<RecordHeader>> = BTreeMap::new();
        let mut rows = Cursor::new(store, STAGED);
        while let Some((_, value)) = rows.next().await? {
            // In the order of their versions, as their keys begin with those.
            if let Some(header) = staged_header(&value) {
                let header = RecordHeader { crcs: Vec::new(), ..header };
                staged.entry(header.object.to_key()).or_default().push(header);
            }
        }
        Ok(Self { rows: Cursor::new(store, OBJECTS), staged })
    }

    /// The next one.
    ///
    /// # Errors
    ///
    /// When the store cannot be read.
    pub async fn next(&mut self) -> Result<Option<IndexedObject>, KvError> {
        loop {
            let row = loop {
                match self.rows.peek().await? {
                    Some((key, _)) if object_of(key).is_none() => drop(self.rows.next().await?),
                    row => break row,
                }
            };
            let indexed = row.and_then(|(key, _)| object_of(key)).map(ObjectId::to_key);
            let staged = self.staged.keys().next().copied();
            let Some(key) = [indexed, staged].into_iter().flatten().min() else { return Ok(None) };
            let mut object = Indexed::None;
            if indexed == Some(key)
                && let Some((_, value)) = self.rows.next().await?
            {
                object = ObjectRow::decode(&value)
                    .map_or(Indexed::Unknown, |row| Indexed::Size(row.size));
            }
            for header in self.staged.remove(&key).into_iter().flatten() {
                object = object.after(&header);
            }
            let id = ObjectId::from_key(key);
            match object {
                Indexed::None => {}
                Indexed::Unknown => return Ok(Some(IndexedObject { id, size: None })),
                Indexed::Size(size) => return Ok(Some(IndexedObject { id, size: Some(size) })),
            }
        }
    }
}

/// What an object is after some of its changes.
#[derive(Clone, Copy)]
enum Indexed {
    None,
    /// What is staged stays staged for whoever mends the row.
    Unknown,
    Size(u64),
}

impl Indexed {
    fn after(self, header: &RecordHeader) -> Self {
        let size = match self {
            Self::Unknown => return self,
            Self::None => 0,
            Self::Size(size) => size,
        };
        match header.kind {
            RecordKind::Data => Self::Size(size.max(header.offset + header.len)),
            RecordKind::Truncate | RecordKind::Punch => Self::Size(header.size),
            RecordKind::Delete => Self::None,
        }
    }
}
