//! What reads the array of data: indexes against their segments, and data against its checksums.

use super::offline::{Checked, Parts, object_item};
use super::report::{Done, FoundItem};
use crate::assembly::{self, TargetError, Tuning};
use futures_util::future::{Either, select};
use levada_base::ids::ObjectId;
use levada_base::reactor;
use levada_kv::Store;
use levada_log::{
    Config, IndexReport, LogError, ObjectLog, ScrubReport, SegmentReport, check_segments,
};
use levada_meta::FsckProgress;
use levada_raid::Array;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// How often progress is told.
const TELL_EVERY: Duration = Duration::from_millis(200);

impl Parts<'_> {
    /// The index of an object target against its segments.
    pub(super) async fn check_deep(&self, target: &mut Checked) {
        let Some(store) = target.store.clone() else { return };
        let begun = reactor::now();
        match self.read_segments(target, &store).await {
            Ok(report) => {
                target.report.stripes = report.stripes;
                if !report.is_replayed {
                    let what = "what the segments amount to, as stripes are missing";
                    target.report.not_checked.push(what.to_owned());
                }
                let name = &target.name;
                target.doubt = (report.found > 0).then(|| {
                    format!("its segments say otherwise; `levada fsck --rebuild-index {name}` comes first")
                });
                target.segments = Some(report);
            }
            Err(error) => {
                target.doubt = Some("its index could not be held against its segments".to_owned());
                target.report.not_checked.push(format!("its index against its segments: {error}"));
            }
        }
        target.report.seconds += begun.elapsed().as_secs_f64();
    }

    async fn read_segments(
        &self,
        target: &Checked,
        store: &Store,
    ) -> Result<SegmentReport, TargetError> {
        let told = |done_rows, total_rows| {
            let phase = "checking the index against its segments";
            (self.options.progress)(&target.name, FsckProgress { phase, done_rows, total_rows });
        };
        let (stripes, config) = self.log_of(target)?;
        Ok(check_segments(stripes, store, config, self.epoch, &told).await?)
    }

    /// All data of an object target against its checksums.
    pub(super) async fn check_data(&self, target: &mut Checked, metadata: Option<&Store>) {
        if target.store.is_none() {
            return;
        }
        if let Some(doubt) = &target.doubt {
            target.report.not_checked.push(format!("its data: {doubt}"));
            return;
        }
        let begun = reactor::now();
        match self.scrub(target).await {
            Ok(report) => {
                for (object, offset, bytes) in report.damaged {
                    let text = format!("{bytes} bytes from {offset} on are lost: no copy fits");
                    let item = object_item(&target.name, "data", Some(object), text, metadata);
                    target.report.add([item.await], Done::Left);
                }
                if report.repaired_blocks > 0 {
                    let blocks = report.repaired_blocks;
                    let text = format!("blocks that did not fit their checksums: {blocks}");
                    let item = object_item(&target.name, "data", None, text, None).await;
                    let item = FoundItem { has: Some(blocks), ..item };
                    target.report.add([item], Done::Repaired);
                }
            }
            Err(error) => target.report.not_checked.push(format!("its data: {error}")),
        }
        target.report.seconds += begun.elapsed().as_secs_f64();
    }

    async fn scrub(&self, target: &mut Checked) -> Result<ScrubReport, TargetError> {
        let log = self.open_log(target).await?;
        let name = target.name.clone();
        let told = async {
            loop {
                reactor::sleep(TELL_EVERY).await;
                let progress = log.scrub_progress();
                let phase = "reading all data";
                let (done_rows, total_rows) = (progress.checked_bytes, progress.total_bytes);
                (self.options.progress)(&name, FsckProgress { phase, done_rows, total_rows });
            }
        };
        let report = match select(pin!(log.scrub()), pin!(told)).await {
            Either::Left((report, _)) => report?,
            Either::Right((never, _)) => never,
        };
        log.settle().await?;
        Ok(report)
    }

    pub(super) async fn delete(
        &self,
        target: &mut Checked,
        ids: &[ObjectId],
    ) -> Result<(), TargetError> {
        let log = self.open_log(target).await?;
        for id in ids {
            log.delete(*id).await?;
        }
        Ok(log.settle().await?)
    }

    /// The log of a target, over an index of which nothing is wrong that an open log decides by.
    async fn open_log(&self, target: &mut Checked) -> Result<ObjectLog, TargetError> {
        if let Some(log) = &target.log {
            return Ok(log.clone());
        }
        let is_safe = target.index.as_ref().is_some_and(IndexReport::is_safe_to_open)
            && target.doubt.is_none();
        let store = target.store.clone().filter(|_| is_safe);
        let store = store.ok_or(LogError::Foreign { what: "an index that is not sound" })?;
        let (stripes, config) = self.log_of(target)?;
        let log = ObjectLog::open(stripes, store, config, self.epoch).await?;
        target.log = Some(log.clone());
        Ok(log)
    }

    fn log_of(&self, target: &Checked) -> Result<(Rc<dyn Array>, Config), TargetError> {
        let fs = self.table.fs.as_u64_pair().0;
        let config = assembly::log_config(fs, &target.entry, Tuning::default());
        Ok((assembly::stripes_of(&self.data, &target.entry)?, config))
    }
}
