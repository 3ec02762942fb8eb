//! Space: what a log shows as free, by the numbers that let changes in and refuse them.
//!
//! What always holds: new data is refused with [`crate::LogError::Full`] only when its footprint, less that of what it
//! replaces, is above what [`ObjectLog::space`] says in that very step. (When the index is full, what replaces other
//! data is refused, too: it may be cut at the end of a stripe, and take a row more.)

use crate::extents::footprint;
use crate::format::blocks_of;
use crate::heat::Heat;
use crate::log::{Inner, ObjectLog, State};
use crate::write::{STRIPES_PER_CHANGE, extent_row_cost};
use levada_base::units::BLOCK_BYTES;
use levada_kv::{Usage, row_cost};

/// Of the space that footprints may take so much is for records without data alone: else one who deletes an object
/// of a full log could not write it again. When they take more, cleaning them out is worth a pass.
pub(crate) const MARKS_SHARE: u64 = 32;
/// What the index is said to suffice for follows what its rows have cost so far, the more of it they take; an empty one is said to
/// hold this part of the space as whole stripes beside them.
const SUPPOSED_SHARE: u64 = 16;
/// What the row of a segment costs the store.
pub(crate) const SEGMENT_ROW_COST: u64 = row_cost(5, 56);

/// Space of a target, in bytes of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    pub total_bytes: u64,
    pub free_bytes: u64,
    /// Of the free ones those that the cleaner must win back before they can be written.
    pub coming_bytes: u64,
}

impl ObjectLog {
    /// Space of the target. Counts the index's space too, and rises at once on deletion.
    #[must_use]
    pub fn space(&self) -> Space {
        let log = &self.0;
        let state = log.state.borrow();
        let reserve = log.config.reserve_segments;
        let capacity = log.capacity_bytes(&state, reserve);
        let total_bytes = capacity - capacity / MARKS_SHARE;
        let free_bytes = log.unused_bytes(&state, reserve).min(log.index_suffices_for(&state));
        // The last stripes are kept, for one change may take several.
        let stripes = state.segments.stripes_available(Heat::Hot, reserve);
        let stripes = stripes.saturating_sub(STRIPES_PER_CHANGE - 1);
        let writable_bytes = stripes * (log.stripe_bytes - BLOCK_BYTES);
        let coming_bytes = free_bytes.saturating_sub(writable_bytes);
        if coming_bytes > 0 && state.is_hopeless() && !state.has_unindexed_deaths() {
            return Space { total_bytes, free_bytes: writable_bytes, coming_bytes: 0 };
        }
        Space { total_bytes, free_bytes, coming_bytes }
    }
}

impl Inner {
    /// Bytes that footprints may add up to so that the cleaner always has enough dead space to
    /// work with, while so many segments stay free.
    pub fn capacity_bytes(&self, state: &State, reserve: u32) -> u64 {
        // What is left of the segments that are being filled.
        let set_aside = reserve + Heat::ALL.len() as u32;
        let segments = u64::from(state.segments.count().saturating_sub(set_aside));
        segments * self.share_of_a_segment(state)
    }

    fn share_of_a_segment(&self, state: &State) -> u64 {
        u64::from(state.segments.stripes) * (self.stripe_bytes - BLOCK_BYTES) / 16 * 15
    }

    /// Bytes that footprints of data may grow by.
    pub fn unused_bytes(&self, state: &State, reserve: u32) -> u64 {
        let capacity = self.capacity_bytes(state, reserve);
        let marks = state.mark_bytes.max(capacity / MARKS_SHARE);
        // What is dead in a segment that cannot be read stays, until all of it is.
        let stays = |at: &u32| {
            let row = &state.segments.get(*at).row;
            let needed = row.live_bytes + row.marks * footprint(0);
            self.share_of_a_segment(state).saturating_sub(needed)
        };
        let damaged: u64 = state.segments.damaged.iter().map(stays).sum();
        capacity.saturating_sub(state.used_bytes + marks + damaged)
    }

    /// Bytes of the index's store that all rows will have taken when everything is indexed, at most, and those of
    /// segments that are free.
    fn index_cost(&self, state: &State, usage: &Usage) -> u64 {
        let indexed = state.index_cost.min(usage.bytes_used);
        let segments = u64::from(state.segments.free_count()) * SEGMENT_ROW_COST;
        indexed.saturating_add_signed(state.unindexed_cost) + segments
    }

    /// Bytes that rows of new data may still take of the index's store.
    pub fn index_left(&self, state: &State) -> u64 {
        let usage = self.store.usage();
        (usage.bytes_max - usage.bytes_kept).saturating_sub(self.index_cost(state, &usage))
    }

    /// The bytes of data for which what is left of the index suffices, if their rows cost what those of the data
    /// that is there do.
    fn index_suffices_for(&self, state: &State) -> u64 {
        // Those of segments are there whatever is stored.
        let segments = u64::from(state.segments.count()) * SEGMENT_ROW_COST;
        let cost = self.index_cost(state, &self.store.usage()).saturating_sub(segments);
        let left = self.index_left(state);
        let part = self.capacity_bytes(state, self.config.reserve_segments) / SUPPOSED_SHARE;
        // Soon little beside what is there: of an index that is half full rows are believed.
        let empty = left as f64 / (left + cost).max(1) as f64;
        let supposed = (part as f64 * empty.powi(4)) as u64;
        let stripe = self.stripe_bytes - BLOCK_BYTES;
        let supposed_cost = supposed / (stripe / extent_row_cost(blocks_of(stripe))).max(1);
        let bytes = u128::from(state.used_bytes + supposed);
        let suffices = u128::from(left) * bytes / u128::from(cost + supposed_cost).max(1);
        u64::try_from(suffices).unwrap_or(u64::MAX)
    }

    /// A store that says it is full has counted every row once.
    pub fn index_cost_is_exact(&self) {
        self.state.borrow_mut().index_cost = self.store.usage().bytes_used;
    }
}

impl State {
    /// The cleaner finds nothing to gain, and no segment is being given back.
    pub fn is_hopeless(&self) -> bool {
        self.nothing_to_clean && !self.segments.iter().any(|(_, segment)| segment.is_on_its_way())
    }

    /// Something has died that the index does not know of yet, nor the cleaner.
    pub fn has_unindexed_deaths(&self) -> bool {
        self.unindexed_kills > 0
    }

    /// Rows came or went, by a change that is in a batch of the store now.
    pub fn index_changed(&mut self, cost: i64) {
        self.index_cost = self.index_cost.saturating_add_signed(cost);
        self.unindexed_cost -= cost;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuts::Cut;
    use crate::extents::{Extent, Place, Record};
    use crate::object::View;
    use crate::rows::{ObjectRow, SegmentRow, encode_extent, extent_key};
    use crate::segment::Segments;
    use crate::write::{cost_of, object_row_cost};
    use levada_base::ids::{Ino, ObjectId};
    use std::rc::Rc;

    #[test]
    fn rows_cost_what_is_said() {
        let id = ObjectId { fs: 1, ino: Ino(2), component: 0, version: 0 };
        for stored in [1, 4096, 4097, 60_000] {
            let record = Rc::new(Record {
                place: Place { segment: 1, stripe: 2, at: 3 },
                version: 4,
                offset: 10,
                stored,
                first_block: 0,
                crcs: vec![0; blocks_of(u64::from(stored)) as usize].into(),
            });
            let extent = Extent { len: u64::from(stored), record };
            let cost = row_cost(extent_key(id, 10).len(), encode_extent(10, &extent).len());
            assert_eq!(cost_of(10, &extent), cost as i64);
            assert_eq!(extent_row_cost(blocks_of(u64::from(stored))), cost);
        }
        let mut view = View::default();
        assert_eq!(object_row_cost(&view), 0);
        view.exists = true;
        for version in 0..12 {
            view.is_row_old = version % 2 == 0;
            let cost = row_cost(ObjectRow::key(id).len(), view.row().encode().len());
            assert_eq!(object_row_cost(&view), cost as i64);
            view.cuts.push(Cut { version, size: version });
        }
        let segments = Segments::new(1, 1, 1);
        let row = &segments.get(0).row;
        assert_eq!(SEGMENT_ROW_COST, row_cost(SegmentRow::key(0).len(), row.encode().len()));
    }
}
