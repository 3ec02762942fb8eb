//! Scrubs: of arrays, and of the objects on them.

use super::shown::stripe_bytes;
use super::{Operator, Refusal};
use crate::arrays::{ClusterArray, scrub_pace_of};
use crate::assembly::Service;
use crate::control::{ObjectScrub, Progress, ScrubResult};
use crate::targets::TargetKind;
use levada_base::reactor;
use levada_log::{ObjectLog, ScrubOrder, ScrubRecord};
use levada_raid::Limits;
use std::rc::Rc;
use std::time::{SystemTime, UNIX_EPOCH};

impl Operator {
    pub(super) fn scrub(self: &Rc<Self>) -> Result<(), Refusal> {
        self.begin_scrub(reactor::random_u64())
    }

    fn begin_scrub(self: &Rc<Self>, run: u64) -> Result<(), Refusal> {
        if self.scrubbing.replace(true) {
            return Err(Refusal::Scrubbing);
        }
        for array in &self.cluster.arrays {
            array.last_scrub.take();
        }
        let operator = Rc::clone(self);
        // A task of its own: whoever asked may go away.
        reactor::spawn(async move {
            operator.scrub_everything(run).await;
            operator.scrubbing.set(false);
        });
        Ok(())
    }

    /// Goes on with a scrub that the last stop interrupted: each array and object log where it was. Object logs that
    /// were through say again what they found, and metadata, which is small, is checked again.
    pub async fn resume_scrub(self: &Rc<Self>) {
        let records = self.scrub_records().await;
        let cut = records.iter().find(|record| record.ended_s.is_none());
        let last = cut.or_else(|| records.iter().max_by_key(|record| record.ended_s));
        let arrays = &self.cluster.arrays;
        if cut.is_some() || arrays.iter().any(|array| array.array.status().scrubbed_below > 0) {
            tracing::info!("the scrub that was interrupted goes on");
            let run = last.map_or_else(reactor::random_u64, |record| record.run);
            // Unless somebody has begun another meanwhile.
            let _ = self.begin_scrub(run);
        }
    }

    /// What is on record of the object logs; of scrubs that are over it is also shown.
    async fn scrub_records(&self) -> Vec<ScrubRecord> {
        let mut records = Vec::new();
        for (name, log) in self.object_logs() {
            match log.scrub_record().await {
                Ok(record) => records.extend(record.inspect(|record| self.show(&name, record))),
                // It will say so itself.
                Err(error) => tracing::warn!(target = name, %error, "no record of its last scrub"),
            }
        }
        records
    }

    fn show(&self, name: &str, record: &ScrubRecord) {
        let Some(ended_s) = record.ended_s else { return };
        let found = &record.found;
        let shown = ObjectScrub {
            ended_s,
            checked_bytes: found.bytes,
            repaired_blocks: found.repaired_blocks,
            damaged: found.places(),
        };
        self.scrubbed.borrow_mut().insert(name.to_owned(), shown);
    }

    /// Metadata first, then objects, and what holds these last: an array only knows that chunks disagree, and may
    /// take a rotten one for the truth; an object log knows which bytes are right, and what it has put right agrees.
    async fn scrub_everything(&self, run: u64) {
        let pace = scrub_pace_of(&self.cluster.file.scrub);
        let (data, others): (Vec<_>, Vec<_>) =
            self.cluster.arrays.iter().partition(|array| self.holds_objects(array));
        for array in others {
            *array.last_scrub.borrow_mut() = Some(scrub_array(array, pace).await);
        }
        let objects = self.scrub_objects(ScrubOrder { run, limits: pace, clock_s }).await;
        for array in data {
            let result = if objects.unrepairable == 0 && objects.not_checked.is_empty() {
                scrub_array(array, pace).await
            } else {
                let name = &array.spec.name;
                let left = format!(
                    "array {name}: its redundancy is left as it is while objects on it are damaged or not checked"
                );
                ScrubResult { not_checked: vec![left], ..ScrubResult::default() }
            };
            *array.last_scrub.borrow_mut() = Some(ScrubResult {
                repaired: objects.repaired + result.repaired,
                unrepairable: objects.unrepairable + result.unrepairable,
                not_checked: [objects.not_checked.clone(), result.not_checked].concat(),
                ..result
            });
        }
    }

    /// Scrubs every object target.
    async fn scrub_objects(&self, order: ScrubOrder) -> ScrubResult {
        let mut found = ScrubResult::default();
        for target in &self.cluster.targets {
            if let (TargetKind::Objects, Service::Stopped { why }) =
                (target.entry.kind, &target.service)
            {
                let left_out = format!("target {} is stopped: {why}", target.entry.name());
                found.not_checked.push(left_out);
            }
        }
        let begun = reactor::now();
        for (done, (name, log)) in self.object_logs().enumerate() {
            self.objects_scrubbed.set(Some((begun, done)));
            match log.scrub_by_order(order).await {
                Ok(report) => {
                    for (object, offset, bytes) in &report.damaged {
                        tracing::error!(target = name, ?object, offset, bytes, "beyond repair");
                    }
                    tracing::info!(
                        target = name,
                        objects = report.objects,
                        bytes = report.bytes,
                        repaired_blocks = report.repaired_blocks,
                        "objects scrubbed"
                    );
                    found.repaired += report.repaired_blocks;
                    found.unrepairable += report.places();
                }
                Err(error) => {
                    tracing::error!(target = name, %error, "the scrub of objects stopped");
                    found.not_checked.push(format!("target {name}: {error}"));
                }
            }
        }
        self.objects_scrubbed.set(None);
        self.scrub_records().await;
        found
    }

    fn object_logs(&self) -> impl Iterator<Item = (String, &ObjectLog)> {
        self.cluster.targets.iter().filter_map(|target| match &target.service {
            Service::Objects { log, .. } => Some((target.entry.name(), log)),
            Service::Metadata { .. } | Service::Stopped { .. } => None,
        })
    }

    pub(super) fn holds_objects(&self, array: &ClusterArray) -> bool {
        self.cluster.file.filesystems.iter().any(|fs| fs.data == array.spec.name)
    }

    /// How far the scrub of objects is, over all targets; `None` when none runs.
    pub(super) fn object_scrub(&self) -> Option<Progress> {
        let (begun, done) = self.objects_scrubbed.get()?;
        let mut progress = Progress::default();
        for (at, (_, log)) in self.object_logs().enumerate() {
            let of_log = log.scrub_progress();
            progress.total_bytes += of_log.total_bytes;
            progress.done_bytes +=
                if at < done { of_log.total_bytes } else { of_log.checked_bytes };
        }
        let seconds = begun.elapsed().as_secs_f64().max(1e-3);
        progress.bytes_per_s = (progress.done_bytes as f64 / seconds) as u64;
        Some(progress)
    }
}

/// Seconds since 1970.
fn clock_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

async fn scrub_array(array: &ClusterArray, pace: Limits) -> ScrubResult {
    let name = &array.spec.name;
    match array.array.scrub(pace).await {
        Ok(report) => {
            tracing::info!(array = name, ?report, "scrubbed");
            ScrubResult {
                checked_bytes: report.stripes * stripe_bytes(array),
                repaired: report.unreadable_repaired + report.wrong_repaired,
                unrepairable: report.mismatched + report.lost,
                skipped_bytes: report.skipped * stripe_bytes(array),
                not_checked: Vec::new(),
            }
        }
        Err(error) => {
            tracing::error!(array = name, %error, "the scrub stopped");
            let not_checked = vec![format!("array {name}: {error}")];
            ScrubResult { not_checked, ..ScrubResult::default() }
        }
    }
}
