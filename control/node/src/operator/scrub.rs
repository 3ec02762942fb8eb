//! Scrubs: of arrays, and of the objects on them.

use super::shown::stripe_bytes;
use super::{Operator, Refusal};
use crate::arrays::ClusterArray;
use crate::assembly::Service;
use crate::control::{Progress, ScrubResult};
use crate::targets::TargetKind;
use levada_base::reactor;
use levada_log::ObjectLog;
use levada_raid::Limits;
use std::rc::Rc;

impl Operator {
    pub(super) fn scrub(self: &Rc<Self>) -> Result<(), Refusal> {
        if self.scrubbing.replace(true) {
            return Err(Refusal::Scrubbing);
        }
        for array in &self.cluster.arrays {
            array.last_scrub.take();
        }
        let operator = Rc::clone(self);
        // A task of its own: whoever asked may go away.
        reactor::spawn(async move {
            operator.scrub_everything().await;
            operator.scrubbing.set(false);
        });
        Ok(())
    }

    /// Goes on with a scrub of arrays that the last stop interrupted: as they come, objects first.
    pub fn resume_scrub(self: &Rc<Self>) {
        let arrays = &self.cluster.arrays;
        if arrays.iter().any(|array| array.array.status().scrubbed_below > 0) {
            tracing::info!("the scrub that was interrupted goes on");
            // Nobody else began one yet.
            let _ = self.scrub();
        }
    }

    /// Metadata first, then objects, and what holds these last: an array only knows that chunks disagree, and may
    /// take a rotten one for the truth; an object log knows which bytes are right, and what it has put right agrees.
    async fn scrub_everything(&self) {
        let (data, others): (Vec<_>, Vec<_>) =
            self.cluster.arrays.iter().partition(|array| self.holds_objects(array));
        for array in others {
            *array.last_scrub.borrow_mut() = Some(scrub_array(array).await);
        }
        let objects = self.scrub_objects().await;
        for array in data {
            let result = if objects.unrepairable == 0 && objects.not_checked.is_empty() {
                scrub_array(array).await
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
    async fn scrub_objects(&self) -> ScrubResult {
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
            match log.scrub().await {
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
                    found.unrepairable += report.damaged.len() as u64;
                }
                Err(error) => {
                    tracing::error!(target = name, %error, "the scrub of objects stopped");
                    found.not_checked.push(format!("target {name}: {error}"));
                }
            }
        }
        self.objects_scrubbed.set(None);
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

async fn scrub_array(array: &ClusterArray) -> ScrubResult {
    let name = &array.spec.name;
    match array.array.scrub(Limits::NONE).await {
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
