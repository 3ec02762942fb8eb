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
        let object = self.0.objects.get(object).await?;
        let now = object.now.borrow();
        if !now.exists {
            return Err(LogError::NoSuchObject);
        }
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for (looked, (at, extent)) in now.extents.overlapping(offset, u64::MAX).enumerate() {
            let (start, end) = (at.max(offset), at + extent.len);
            let is_neighbour = ranges.last().is_some_and(|last| last.end == start);
            if looked == EXTENTS_MAX || !is_neighbour && ranges.len() == ranges_max {
                return Ok(DataRanges { ranges, upto: start });
            }
            match ranges.last_mut() {
                Some(last) if is_neighbour => last.end = end,
                _ => ranges.push(start..end),
            }
        }
        Ok(DataRanges { ranges, upto: u64::MAX })
    }
}
