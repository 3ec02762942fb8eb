//! Scrub: reads every extent of every object, which checks and repairs it.

use crate::LogError;
use crate::log::ObjectLog;
use crate::open::ROWS_PER_SCAN;
use crate::read::Plan;
use crate::rows::{OBJECTS, ObjectRow};
use levada_base::ids::ObjectId;
use levada_raid::IoClass;
use std::ops::Bound;

/// What a scrub found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubReport {
    pub objects: u64,
    pub extents: u64,
    pub bytes: u64,
    /// Blocks that were wrong and are right again.
    pub repaired_blocks: u64,
    /// Object, offset and bytes of what is lost.
    pub damaged: Vec<(ObjectId, u64, u64)>,
}

impl ObjectLog {
    /// Reads every extent that the index knows, and those on their way, once.
    ///
    /// # Errors
    ///
    /// When the log stopped; damage is in the report.
    pub async fn scrub(&self) -> Result<ScrubReport, LogError> {
        let log = &self.0;
        let repaired_before = self.counters().repaired_blocks;
        let mut report = ScrubReport::default();
        let mut last = vec![OBJECTS];
        loop {
            let from = Bound::Excluded(&last[..]);
            let to = [OBJECTS + 1];
            let rows = log.store.scan(from, Bound::Excluded(&to), ROWS_PER_SCAN).await?;
            for (key, _) in &rows {
                let object = log.objects.get(ObjectRow::id(key)?).await?;
                report.objects += 1;
                let offsets: Vec<u64> =
                    object.now.borrow().extents.iter().map(|(offset, _)| offset).collect();
                for offset in offsets {
                    // Written over meanwhile: the new bytes have just been checked.
                    let Some(extent) = object.now.borrow().extents.get(offset).cloned() else {
                        continue;
                    };
                    let plan = Plan::of_extent(log, offset, &extent);
                    match log.fetch(plan, IoClass::Scrub).await {
                        Ok(_) => {}
                        Err(LogError::Damaged { offset, bytes }) => {
                            report.damaged.push((object.id, offset, bytes));
                        }
                        Err(error) => return Err(error),
                    }
                    report.extents += 1;
                    report.bytes += extent.len;
                }
            }
            match rows.last() {
                Some((key, _)) if rows.len() == ROWS_PER_SCAN => last = key.to_vec(),
                _ => break,
            }
        }
        report.repaired_blocks = self.counters().repaired_blocks - repaired_before;
        Ok(report)
    }
}
