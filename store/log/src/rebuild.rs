//! Rebuilding the index from the segments alone.
//!
//! Every stripe describes itself, so the index is what replaying all records in the order of
//! their versions gives: newer data covers older, and records without data remove what they
//! removed then. Of each segment only the stripes of its newest generation count; those of
//! older ones are leftovers below a stripe that was never written again.
//!
//! The row of the log itself is written last: a rebuild that was cut off is no log, and is
//! started again with an emptied store. Memory grows with the index.

use crate::LogError;
use crate::commit::WatchIndex;
use crate::extents::{Place, Record};
use crate::format::{Footer, RecordHeader, RecordKind};
use crate::log::{Config, Inner, ObjectLog};
use crate::object::Change;
use crate::open::{segments_of, write_log_row};
use crate::rows::{LogRow, SegmentRow};
use crate::segment::Segments;
use crate::stripe::change_of;
use levada_base::{Epoch, probe};
use levada_kv::{Batch, Store};
use levada_raid::Array;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::rc::Rc;

/// Rows put by one batch.
const ROWS_PER_BATCH: usize = 512;

/// A record and where it was found.
struct Found {
    header: RecordHeader,
    segment: u32,
    stripe: u32,
}

impl ObjectLog {
    /// Makes the index anew in an empty `store` and opens the log. What was staged and had not
    /// reached a stripe is lost with the old store.
    ///
    /// # Errors
    ///
    /// [`LogError::Stale`] when a later owner wrote segments, and as [`ObjectLog::create`].
    pub async fn rebuild_index(
        array: Rc<dyn Array>,
        store: Store,
        config: Config,
        epoch: Epoch,
    ) -> Result<Self, LogError> {
        let count = segments_of(&array, &config)?;
        if !store.scan(Bound::Unbounded, Bound::Unbounded, 1).await?.is_empty() {
            return Err(LogError::Foreign { what: "the store is not empty" });
        }
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
        };
        let table = Segments::new(count, config.segment_stripes, 1);
        let log = Inner::new(Rc::clone(&array), store.clone(), config, epoch, &row, table);

        let _busy = probe::busy("log-rebuild-index");
        let mut found = Vec::new();
        let mut segments = BTreeMap::new();
        for segment in 0..count {
            let stripes = log.stripes_of(segment).await?;
            let Some((last, footer)) = stripes.last().map(|(stripe, footer, _)| (*stripe, *footer))
            else {
                continue;
            };
            if footer.epoch > epoch {
                return Err(LogError::Stale { ours: epoch, seen: footer.epoch });
            }
            let mut segment_row = SegmentRow {
                closed: true,
                generation: footer.generation,
                version_min: u64::MAX,
                version_max: 0,
                live_bytes: 0,
                marks: 0,
                indexed_stripes: last + 1,
            };
            row.next_generation = row.next_generation.max(footer.generation + 1);
            for (stripe, footer, records) in stripes {
                row.seq = row.seq.max(footer.seq);
                for header in records {
                    segment_row.version_min = segment_row.version_min.min(header.version);
                    segment_row.version_max = segment_row.version_max.max(header.version);
                    segment_row.marks += u64::from(header.kind != RecordKind::Data);
                    found.push(Found { header, segment, stripe });
                }
            }
            row.seq = row.seq.max(segment_row.version_max);
            segments.insert(segment, segment_row);
        }
        // Among copies of one version any will do; the sort is stable, so it is always the same.
        found.sort_by_key(|found| found.header.version);

        let mut watch = WatchIndex::default();
        let mut objects = BTreeMap::new();
        for Found { header, segment, stripe } in found {
            let object = match objects.get(&header.object) {
                Some(object) => Rc::clone(object),
                None => {
                    // Held, so that the cache cannot forget what no row says yet.
                    let object = log.objects.get(header.object).await?;
                    objects.insert(header.object, Rc::clone(&object));
                    object
                }
            };
            let version = header.version;
            let change = change_of(&header).unwrap_or_else(|| {
                Change::Write(Rc::new(Record {
                    place: Place { segment, stripe, at: header.data_at },
                    version,
                    offset: header.offset,
                    stored: header.stored,
                    first_block: 0,
                    crcs: header.crcs.into_boxed_slice(),
                }))
            });
            watch.change(&object, version, &change);
        }

        let mut batch = Batch::default();
        watch.rows(&mut batch);
        for (segment, mut segment_row) in segments {
            let live = watch.segments.get(&segment).copied().unwrap_or(0);
            segment_row.live_bytes = u64::try_from(live).expect("what is left is not negative");
            batch.put(&SegmentRow::key(segment), &segment_row.encode());
        }
        row.index_bytes = u64::try_from(watch.index_bytes).expect("what is left is not negative");
        while !batch.changes.is_empty() {
            let rest = batch.changes.split_off(batch.changes.len().min(ROWS_PER_BATCH));
            store.room().await?;
            store.apply(batch)?;
            batch = Batch { changes: rest };
        }
        write_log_row(&store, &row).await?;
        drop((log, objects, watch));
        Self::open(array, store, config, epoch).await
    }
}

impl Inner {
    /// The stripes of a segment's newest generation, in order.
    async fn stripes_of(
        self: &Rc<Self>,
        segment: u32,
    ) -> Result<Vec<(u32, Footer, Vec<RecordHeader>)>, LogError> {
        let stripes = self.config.segment_stripes;
        let mut found = Vec::new();
        for stripe in 0..stripes {
            let at = u64::from(segment) * u64::from(stripes) + u64::from(stripe);
            if self.array.is_written(at)
                && let Some((footer, records)) = self.summary_of(segment, stripe, None).await?
            {
                found.push((stripe, footer, records));
            }
        }
        let newest = found.iter().map(|(_, footer, _)| footer.generation).max();
        // A later owner may have gone on filling the segment. What an earlier one left behind its
        // first stripe was never indexed.
        let mut epoch = Epoch::default();
        found.retain(|(_, footer, _)| {
            let real = Some(footer.generation) == newest && footer.epoch >= epoch;
            if real {
                epoch = footer.epoch;
            }
            real
        });
        Ok(found)
    }
}
