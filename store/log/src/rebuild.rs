//! Rebuilding the index from the segments alone.
//!
//! Every stripe describes itself, so the index is what replaying all records in the order of
//! their versions gives: newer data covers older, and records without data remove what they
//! removed then. Not every stripe that reads as one counts:
//!
//! - Of each segment only its newest generation. Older ones are leftovers below stripes that were
//!   never written again.
//! - Nothing of a segment that a footer calls unused, of an earlier generation than that footer
//!   tells: the segment has been declared anew since, and shows what it held before.
//! - Nothing of an earlier owner past what the index of a later one knew when that one opened the
//!   log: it gave the rest back. Each footer tells how far that was.
//! - Nothing from the first stripe on that is missing or torn, as far as no flush covered it.
//!   Each footer tells the oldest stripe that was not flushed when it was closed, so only the
//!   newest stripes are in question, and only their data is read. All that comes later was not
//!   committed either, and without the missing one it would be a state that never was.
//!
//! All of that is about stripes that were read. One that cannot be read now may be any of them, so the
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
use crate::extents::{Extent, Place, Record};
use crate::format::{Footer, RecordHeader, RecordKind, StripeOrder};
use crate::log::{Config, Inner, ObjectLog};
use crate::object::Change;
use crate::object::Object;
use crate::open::{new_verifier, segments_of, write_log_row};
use crate::read::Plan;
use crate::rows::{Lives, LogRow, SegmentRow};
use crate::segment::Segments;
use crate::staged::{StagedChange, StagedRows};
use crate::stripe::change_of;
use levada_base::ids::{ObjectId, Seq};
use levada_base::{BufMut, Epoch, probe};
use levada_kv::{Batch, Store};
use levada_raid::{Array, IoClass};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::rc::Rc;

/// Rows put by one batch.
const ROWS_PER_BATCH: usize = 512;

/// A stripe that describes itself.
struct Stripe {
    footer: Footer,
    records: Vec<RecordHeader>,
}

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
        drop_left_over(&mut stripes);
        drop_given_back(&mut stripes);
        let read = stripes.len();
        log.cut_at_the_first_torn(&mut stripes).await?;
        let dropped_stripes = (read - stripes.len()) as u64;
        let (staged, damaged) = staged.changes();
        let begun = staged.iter().map(|change| (change.header.version, change.header.object));
        drop_half_a_change(&mut stripes, &begun.collect());

        let mut found = Vec::new();
        let mut segments = BTreeMap::new();
        for Stripe { footer, records } in stripes {
            let segment_row = segments.entry(footer.segment).or_insert(SegmentRow {
                closed: true,
                generation: footer.generation,
                outdated_min: u64::MAX,
                version_max: 0,
                live_bytes: 0,
                marks: 0,
                sizes: 0,
                indexed_stripes: 0,
            });
            segment_row.indexed_stripes = footer.stripe + 1;
            row.seq = row.seq.max(footer.seq);
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

/// Drops what segments show that were free when some stripe was closed.
fn drop_left_over(stripes: &mut Vec<Stripe>) {
    let mut void: BTreeMap<u32, u64> = BTreeMap::new();
    for Stripe { footer, .. } in &*stripes {
        for segment in footer.unused.segments.iter().flatten() {
            let before = void.entry(*segment).or_default();
            *before = footer.unused.before.max(*before);
        }
    }
    stripes.retain(|Stripe { footer, .. }| {
        void.get(&footer.segment).is_none_or(|before| footer.generation >= *before)
    });
}

/// Drops what a later owner gave back when it opened the log, and sorts the rest.
fn drop_given_back(stripes: &mut Vec<Stripe>) {
    let inherited: BTreeMap<Epoch, StripeOrder> =
        stripes.iter().map(|stripe| (stripe.footer.epoch, stripe.footer.inherited)).collect();
    stripes.sort_by_key(|stripe| stripe.footer.order());
    stripes.retain(|Stripe { footer, .. }| {
        let later = (Bound::Excluded(footer.epoch), Bound::Unbounded);
        inherited.range(later).all(|(_, end)| footer.order() < *end)
    });
}

/// Drops the change at the end of the log whose rest is neither there nor staged. A stripe that was closed in
/// the middle of a change holds a version that was not given out yet.
fn drop_half_a_change(stripes: &mut [Stripe], staged: &BTreeSet<(u64, ObjectId)>) {
    let Some(seq) = stripes.last().map(|last| last.footer.seq) else { return };
    let is_half = |header: &RecordHeader| {
        header.version > seq && !staged.contains(&(header.version, header.object))
    };
    for stripe in stripes.iter_mut().rev() {
        if stripe.records.iter().all(|header| header.version <= seq) {
            return;
        }
        stripe.records.retain(|header| !is_half(header));
    }
}

/// True when a stripe between these two is missing.
fn is_gap(before: &Footer, next: &Footer, segment_stripes: u32) -> bool {
    if before.generation == next.generation {
        return next.stripe != before.stripe + 1;
    }
    // Only a new owner leaves a segment unfinished.
    next.stripe != 0 || before.epoch == next.epoch && before.stripe + 1 != segment_stripes
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
        Ok(found)
    }

    /// Drops the first stripe that did not arrive whole, and everything after it.
    async fn cut_at_the_first_torn(
        self: &Rc<Self>,
        stripes: &mut Vec<Stripe>,
    ) -> Result<(), LogError> {
        let Some(flushed_to) = stripes.iter().map(|stripe| stripe.footer.unflushed).max() else {
            return Ok(());
        };
        let tail = stripes.partition_point(|stripe| stripe.footer.order() < flushed_to);
        for at in tail..stripes.len() {
            let footer = &stripes[at].footer;
            // As long as a stripe of its segment is there, the oldest unflushed one should be too.
            let before = at.checked_sub(1).map(|before| &stripes[before].footer);
            let before = before.filter(|before| before.generation >= flushed_to.generation);
            let gap = match before {
                Some(before) => is_gap(before, footer, self.config.segment_stripes),
                None if footer.generation == flushed_to.generation => footer.order() != flushed_to,
                // A segment that died meanwhile leaves none behind.
                None => footer.stripe != 0,
            };
            if gap || !self.is_whole(&stripes[at]).await? {
                tracing::warn!(
                    segment = footer.segment,
                    stripe = footer.stripe,
                    dropped = stripes.len() - at,
                    "the log ends in stripes that were not committed"
                );
                stripes.truncate(at);
                break;
            }
        }
        Ok(())
    }

    /// True when all data of a stripe fits its checksums, perhaps after repair.
    async fn is_whole(self: &Rc<Self>, stripe: &Stripe) -> Result<bool, LogError> {
        let Footer { segment, stripe: place, .. } = stripe.footer;
        for header in stripe.records.iter().filter(|header| header.kind == RecordKind::Data) {
            let record = Found { header: header.clone(), segment, stripe: place }.record();
            let extent = Extent { len: header.len, record };
            let plan = Plan::of_extent(self, header.offset, &extent);
            match self.fetch(plan, IoClass::Clean).await {
                Ok(_) => {}
                Err(LogError::Damaged { .. }) => {
                    self.must_be_readable(segment, place).await?;
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(true)
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
