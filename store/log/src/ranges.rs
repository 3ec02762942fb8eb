//! Where an object has data, for those who skip its holes.

use crate::LogError;
use crate::log::ObjectLog;
use levada_base::ids::ObjectId;
use std::ops::Range;

/// Extents that one call looks at, so that it does not hold the others up for long.
const EXTENTS_MAX: usize = 16 << 10;

/// See [`ObjectLog::data_ranges`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataRanges {
    /// In order, none empty.
    pub ranges: Vec<Range<u64>>,
    /// All data between the offset asked for and here is in `ranges`; `u64::MAX` when nothing follows.
    pub upto: u64,
}

impl ObjectLog {
    /// The first `ranges_max` ranges (not 0) that hold data from `offset` on, neighbours as one; or fewer, then
    /// `upto` says how far it looked. All else is holes.
    ///
    /// # Errors
    ///
    /// [`LogError::NoSuchObject`], or when the index fails.
    pub async fn data_ranges(
        &self,
        object: ObjectId,
        offset: u64,
        ranges_max: usize,
    ) -> Result<DataRanges, LogError> {
        self.0.check()?;
        let objects = &self.0.objects;
        let object = objects.get(object).await?;
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let (mut from, mut looked) = (offset, 0);
        loop {
            let to = from.saturating_add(self.0.window_bytes());
            let _held = objects.load_to_look(&object, from, to).await?;
            {
                let now = object.now.borrow();
                if !now.exists {
                    return Err(LogError::NoSuchObject);
                }
                // One that reaches over the end of a window is met again in the next.
                for (at, extent) in now.extents.overlapping(from, to) {
                    let (start, end) = (at.max(from), (at + extent.len).min(to));
                    let is_neighbour = ranges.last().is_some_and(|last| last.end == start);
                    if looked == EXTENTS_MAX || !is_neighbour && ranges.len() == ranges_max {
                        return Ok(DataRanges { ranges, upto: start });
                    }
                    looked += 1;
                    match ranges.last_mut() {
                        Some(last) if is_neighbour => last.end = end,
                        _ => ranges.push(start..end),
                    }
                }
            }
            // The window's end may be in the middle of an extent.
            let reaches_on = ranges.last().is_some_and(|last| last.end == to);
            from = match objects.next_start(&object, to).await? {
                _ if reaches_on => to,
                Some(next) => next,
                None => return Ok(DataRanges { ranges, upto: u64::MAX }),
            };
        }
    }
}
