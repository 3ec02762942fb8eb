//! Rebuilding the index from the segments alone.
//!
//! Every stripe describes itself, so the index is what replaying all records in the order of
//! their versions gives: newer data covers older, and records without data remove what they
//! removed then. Not every stripe that reads as one counts: [`crate::counted`] says which do.
//!
//! A stripe that cannot be read now may be one that counts, so the
//! rebuild fails with what the array said, and may succeed when the drives are back.
//!
//! What was *staged* and is in no stripe that counts is kept as it was: its rows go into the new store, and opening
//! the log puts them into stripes. The beginning of a change whose rest is staged was committed with that, and counts.
//!
//! Reading ([`Rebuilt::read`]) changes nothing but what it repairs, so what an index would hold is known before the
//! old one is given up. The row of the log itself is written last: a rebuild that was cut off is no log, and is
//! started again with an emptied store. Memory grows with the index.

use crate::LogError;
use crate::commit::WatchIndex;
use crate::counted::{self, Stripe};
use crate::extents::{Place, Record};
use crate::format::{RecordHeader, RecordKind};
use crate::heat::Heat;
use crate::log::{Config, Inner, ObjectLog};
use crate::object::Change;
use crate::object::Object;
use crate::open::{new_verifier, segments_of, write_log_row};
use crate::rows::{Lives, LogRow, SegmentRow};
use crate::segment::Segments;
use crate::staged::{StagedChange, StagedRows};
use crate::stripe::change_of;
use levada_base::ids::{ObjectId, Seq};
use levada_base::{BufMut, Epoch, probe};
use levada_kv::{Batch, Store};
use levada_raid::Array;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::rc::Rc;

/// Rows put by one batch.
const ROWS_PER_BATCH: usize = 512;

/// A record and where it was found.
pub(crate) struct Found {
    pub header: RecordHeader,
    pub segment: u32,
    pub stripe: u32,
}

impl Found {
    pub fn record(&self) -> Rc<Record> {
        Rc::new(Record {
            place: Place { segment: self.segment, stripe: self.stripe, at: self.header.data_at },
            version: self.header.version,
            offset: self.header.offset,
            stored: self.header.stored,
            first_block: 0,
            crcs: self.header.crcs.clone().into_boxed_slice(),
        })
    }
}

/// What an index made of the segments holds; nothing of it is written yet.
pub struct Rebuilt {
    row: LogRow,
    batch: Batch,
    staged: Vec<StagedChange>,
    report: RebuildReport,
}

/// What was found when an index was made anew.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RebuildReport {
    pub objects: u64,
    pub extents: u64,
    /// That extents hold.
    pub bytes: u64,
    /// No change that is there is newer.
    pub seq: Seq,
    /// Stripes at the end of the log that did not arrive whole, or came after such a one.
    pub dropped_stripes: u64,
    /// Staged changes that are in no stripe, and stay staged.
    pub staged: u64,
    /// Rows of staged changes that make no sense, or are older than what stripes hold of their object: left out.
    pub staged_left_out: u64,
}

impl ObjectLog {
    /// Makes the index anew in an empty `store` and opens the log. `staged` is what the old store held of changes
    /// that had not reached a stripe; what is not in it is lost.
    ///
    /// # Errors
    ///
    /// [`LogError::Stale`] when a later owner wrote segments, [`LogError::Block`] when a stripe
    /// cannot be read, and as [`ObjectLog::create`].
    pub async fn rebuild_index(
        array: Rc<dyn Array>,
        store: Store,
        config: Config,
        epoch: Epoch,
        staged: &StagedRows,
    ) -> Result<Self, LogError> {
        let rebuilt =
            Rebuilt::read(Rc::clone(&array), store.clone(), config, epoch, staged).await?;
        rebuilt.write(&store).await?;
        drop(rebuilt);
        Self::open(array, store, config, epoch).await
    }
}

impl Rebuilt {
    /// Reads all segments. Of `scratch`, any store, nothing is read, and nothing is written to it.
    ///
    /// # Errors
    ///
    /// As [`ObjectLog::rebuild_index`].
    pub async fn read(
        array: Rc<dyn Array>,
        scratch: Store,
        config: Config,
        epoch: Epoch,
        staged: &StagedRows,
    ) -> Result<Self, LogError> {
        let count = segments_of(&array, &config)?;
        let mut row = LogRow {
            fs: config.fs,
            target: config.target.0,
            segment_stripes: config.segment_stripes,
            epoch,
            stripe_bytes: array.geometry().stripe_bytes,
            stripes: u64::from(count) * u64::from(config.segment_stripes),
            next_generation: 1,
            seq: 0,
            index_bytes: 0,
            indexed_seq: 0,
            verifier: new_verifier(),
            is_untold: false,
            indexed_order: Some(0),
        };
        let table = Segments::new(count, config.segment_stripes, 1);
        let log = Inner::new(array, scratch, config, epoch, &row, Lives::default(), table);

        let _busy = probe::busy("log index rebuild");
        let mut stripes = Vec::new();
        for segment in 0..count {
            stripes.extend(log.stripes_of(segment).await?);
        }
        for Stripe { footer, .. } in &stripes {
            if footer.epoch > epoch {
                return Err(LogError::Stale { ours: epoch, seen: footer.epoch });
            }
            let told = footer.unused.before.max(footer.generation + 1);
            row.next_generation = row.next_generation.max(told);
        }
        // Generations given out last may have left nothing that can be read, and must not be given
        // out again: footers call what is older than a generation void. There were at most so many.
        row.next_generation += u64::from(count);
        counted::drop_left_over(&mut stripes);
        counted::drop_given_back(&mut stripes);
        let read = stripes.len();
        log.cut_at_the_first_torn(&mut stripes).await?;
        let (staged, damaged) = staged.changes();
        let begun = staged.iter().map(|change| (change.header.version, change.header.object));
        counted::drop_half_a_change(&mut stripes, &begun.collect());
        let dropped_stripes = (read - stripes.len()) as u64;

        let mut found = Vec::new();
        let mut segments = BTreeMap::new();
        for Stripe { footer, records } in stripes {
            let segment_row = segments.entry(footer.segment).or_insert(SegmentRow {
                closed: true,
                heat: Heat::Hot,
                generation: footer.generation,
                outdated_min: u64::MAX,
                version_max: 0,
                live_bytes: 0,
                marks: 0,
                sizes: 0,
                indexed_stripes: 0,
            });
            segment_row.indexed_stripes = segment_row.indexed_stripes.max(footer.stripe + 1);
            row.seq = row.seq.max(footer.seq);
            row.indexed_order = row.indexed_order.max(Some(footer.order + 1));
            for header in records {
                segment_row.version_max = segment_row.version_max.max(header.version);
                segment_row.marks += u64::from(header.kind != RecordKind::Data);
                row.seq = row.seq.max(header.version);
                found.push(Found { header, segment: footer.segment, stripe: footer.stripe });
            }
        }
        // Among copies of one version any will do; the sort is stable, so it is always the same.
        found.sort_by_key(|found: &Found| found.header.version);
        let (staged, outdated) = left_of(staged, &found);
        let last_staged = staged.iter().map(|change| change.header.version).max();
        row.seq = row.seq.max(last_staged.unwrap_or(0));

        let mut watch = WatchIndex::default();
        let mut objects: BTreeMap<ObjectId, Rc<Object>> = BTreeMap::new();
        for found in found {
            let header = &found.header;
            let unknown = || Object::unknown(header.object);
            let object = objects.entry(header.object).or_insert_with(unknown);
            let change = change_of(header).unwrap_or_else(|| Change::Write(found.record()));
            watch.change(object, header.version, &change, found.segment);
        }

        let mut report = RebuildReport {
            seq: Seq(row.seq),
            dropped_stripes,
            staged: staged.len() as u64,
            staged_left_out: damaged + outdated,
            ..RebuildReport::default()
        };
        for object in objects.values() {
            let view = object.indexed.borrow();
            report.objects += u64::from(view.exists);
            report.extents += view.extents.len() as u64;
            report.bytes += view.extents.iter().map(|(_, extent)| extent.len).sum::<u64>();
        }
        let mut batch = Batch::default();
        watch.rows(&mut batch);
        for (segment, mut segment_row) in segments {
            let change = watch.segments.get(&segment).copied().unwrap_or_default();
            segment_row.live_bytes =
                u64::try_from(change.live).expect("what is left is not negative");
            segment_row.outdated_min = segment_row.outdated_min.min(change.outdated_min);
            segment_row.sizes = u64::try_from(change.sizes).expect("what is left is not negative");
            batch.put(&SegmentRow::key(segment), &segment_row.encode());
        }
        row.index_bytes = u64::try_from(watch.index_bytes).expect("what is left is not negative");
        Ok(Self { row, batch, staged, report })
    }

    /// What it holds.
    #[must_use]
    pub fn report(&self) -> RebuildReport {
        self.report
    }

    /// Writes the index into an empty store; durable when it returns.
    ///
    /// # Errors
    ///
    /// [`LogError::Foreign`] when the store is not empty, or when it fails: then it holds no log.
    pub async fn write(&self, store: &Store) -> Result<(), LogError> {
        if !store.scan(Bound::Unbounded, Bound::Unbounded, 1).await?.is_empty() {
            return Err(LogError::Foreign { what: "the store is not empty" });
        }
        for changes in self.batch.changes.chunks(ROWS_PER_BATCH) {
            // All of it was in an index of this size before.
            store.room_to_free().await?;
            store.apply(Batch { changes: changes.to_vec() })?;
        }
        for change in &self.staged {
            store.room_to_free().await?;
            let mut batch = Batch::default();
            batch.put(&change.key, &change.value);
            store.apply(batch)?;
        }
        // What survived of earlier lives is not known any more: clients send everything again.
        write_log_row(store, &self.row, &Lives::default()).await
    }
}

/// The staged changes that the records in stripes do not hold, and how many were left out that are older than what
/// those hold of their object: opening a log lays staged changes over everything.
fn left_of(staged: Vec<StagedChange>, found: &[Found]) -> (Vec<StagedChange>, u64) {
    let objects: BTreeSet<ObjectId> = staged.iter().map(|change| change.header.object).collect();
    let mut known: BTreeMap<ObjectId, Vec<&RecordHeader>> = BTreeMap::new();
    for Found { header, .. } in found.iter().filter(|found| objects.contains(&found.header.object))
    {
        known.entry(header.object).or_default().push(header);
    }
    let mut outdated = 0;
    let mut left = Vec::new();
    for change in staged {
        let of_object = known.get(&change.header.object).map_or(&[][..], Vec::as_slice);
        if change.is_in(of_object) {
            continue;
        }
        if of_object.iter().any(|header| header.version > change.header.version) {
            let (object, version) = (change.header.object, change.header.version);
            tracing::error!(?object, version, "a staged change is older than its object");
            outdated += 1;
            continue;
        }
        left.push(change);
    }
    (left, outdated)
}

impl Inner {
    /// The stripes of a segment's newest generation, in order.
    async fn stripes_of(self: &Rc<Self>, segment: u32) -> Result<Vec<Stripe>, LogError> {
        let stripes = self.config.segment_stripes;
        let mut found = Vec::new();
        for stripe in 0..stripes {
            let at = u64::from(segment) * u64::from(stripes) + u64::from(stripe);
            if !self.array.is_written(at) {
                continue;
            }
            match self.summary_of(segment, stripe, None).await? {
                Some((footer, records)) => found.push(Stripe { footer, records }),
                None => self.must_be_readable(segment, stripe).await?,
            }
        }
        let newest = found.iter().map(|stripe| stripe.footer.generation).max();
        found.retain(|stripe| Some(stripe.footer.generation) == newest);
        // What an owner gave back shows again below a later one's stripes. Those it wrote here tell of it; should they not, it is
        // older than what lies before it.
        let mut last = None;
        found.retain(|Stripe { footer, .. }| {
            let is_later = Some(footer.order) > last;
            last = last.max(Some(footer.order));
            is_later
        });
        Ok(found)
    }

    /// Fails when a stripe that does not fit its checksums cannot be read at all: the drives that hold
    /// it may come back, and what an index passes over is given back when it is opened. An array
    /// that stops while bytes are being repaired says so only here.
    pub(crate) async fn must_be_readable(&self, segment: u32, stripe: u32) -> Result<(), LogError> {
        let into = BufMut::for_overwrite(self.stripe_bytes as usize).into_vec();
        if let Err(error) = self.array.read(self.array_offset(segment, stripe), into).await {
            tracing::error!(segment, stripe, %error, "no index without what this stripe holds");
            return Err(error.into());
        }
        Ok(())
    }
}
